//! Where the RAM of a guest is made: files on tmpfs, one for each memory backend.
//!
//! RAM in shared files can be saved straight from a mapping of our own, with no copy through QEMU. On huge pages the
//! save reaches the disk's own pace and the guest runs faster, and a tmpfs has them only when mounted so: where the
//! host lets us mount, each VM gets a tmpfs of its own with `huge=within_size`; else the files go into a shared one
//! (`/dev/shm`), in small pages.
//!
//! The files have names only until QEMU has opened them. From then on the memory hangs on QEMU's process alone, and
//! however supervisor and QEMU end, nothing is left of it. Who wants to read it finds it through that process
//! ([`memory`](super::memory)).

use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use dormouse_storage::ByteCount;
use rustix::mount::{MountFlags, UnmountFlags};
use serde::{Deserialize, Serialize};

use crate::error::{Code, Failure};

/// The tmpfs that every Linux host has.
const SHARED_TMPFS: &str = "/dev/shm";
/// `TMPFS_MAGIC` of statfs(2).
const TMPFS_MAGIC: u64 = 0x0102_1994;

/// A folder for one guest's RAM. Dropping it takes the names away; QEMU keeps what it has opened.
#[derive(Debug)]
pub struct RamHome {
    directory: PathBuf,
    pages: Pages,
}

/// The pages that the RAM files are made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Pages {
    /// Transparent huge pages, where they can be had.
    Huge,
    /// Whatever the tmpfs was mounted with, by default small pages.
    Default,
}

impl RamHome {
    /// Prepares room for `size` of RAM: a tmpfs of our own below `vm_directory`, or a folder named after the VM below
    /// `shared`, or below `/dev/shm`.
    pub fn prepare(vm_directory: &Path, shared: Option<&Path>, size: ByteCount) -> Result<Self, Failure> {
        let home = match shared {
            Some(parent) => Self::in_shared(parent, vm_directory)?,
            None => match Self::mount_own(vm_directory, size) {
                Ok(home) => home,
                Err(error) => {
                    tracing::info!(%error, "no tmpfs of our own, so no huge pages: RAM goes to {SHARED_TMPFS}");
                    Self::in_shared(Path::new(SHARED_TMPFS), vm_directory)?
                }
            },
        };
        home.check_room(size)?;
        Ok(home)
    }

    /// Removes what a supervisor that died left behind for this VM.
    pub fn remove_leftovers(vm_directory: &Path, shared: Option<&Path>) {
        let own = vm_directory.join("ram");
        while own.is_dir() && rustix::mount::unmount(&own, UnmountFlags::DETACH).is_ok() {}
        let _ = fs::remove_dir_all(&own);
        let _ = fs::remove_dir_all(shared_directory(
            shared.unwrap_or(Path::new(SHARED_TMPFS)),
            vm_directory,
        ));
    }

    /// The file for the backend `id`.
    pub fn file(&self, id: &str) -> PathBuf {
        self.directory.join(id.replace('/', "_"))
    }

    /// The pages that the RAM is made of.
    pub fn pages(&self) -> Pages {
        self.pages
    }

    fn mount_own(vm_directory: &Path, size: ByteCount) -> io::Result<Self> {
        let directory = vm_directory.join("ram");
        make_private(&directory)?;
        // A little above the RAM itself: tmpfs rounds to its pages and counts what a file's index takes.
        let limit = size.0 + size.0 / 64 + (16 << 20);
        let options = format!("huge=within_size,mode=0700,size={limit}");
        let options = std::ffi::CString::new(options).map_err(io::Error::other)?;
        let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        match rustix::mount::mount(
            "dormouse-ram",
            &directory,
            "tmpfs",
            flags,
            Some(options.as_c_str()),
        ) {
            Ok(()) => Ok(Self {
                directory,
                pages: Pages::Huge,
            }),
            Err(error) => {
                let _ = fs::remove_dir(&directory);
                Err(error.into())
            }
        }
    }

    fn in_shared(parent: &Path, vm_directory: &Path) -> Result<Self, Failure> {
        let at = |error: &dyn std::fmt::Display| {
            Failure::new(
                Code::Usage,
                format!("cannot keep guest RAM in {}: {error}", parent.display()),
            )
        };
        let kind = rustix::fs::statfs(parent).map_err(|error| at(&error))?.f_type;
        if kind as u64 != TMPFS_MAGIC {
            return Err(at(&"it is not on tmpfs; name a folder there with --ram-dir"));
        }
        let directory = shared_directory(parent, vm_directory);
        make_private(&directory).map_err(|error| at(&error))?;
        Ok(Self {
            directory,
            pages: Pages::Default,
        })
    }

    /// Without room a guest would be killed by SIGBUS in the middle of its life.
    fn check_room(&self, size: ByteCount) -> Result<(), Failure> {
        let room = rustix::fs::statvfs(&self.directory)
            .map(|stat| ByteCount(stat.f_bavail.saturating_mul(stat.f_frsize)))
            .map_err(|error| {
                Failure::new(Code::StorageIo, format!("{}: {error}", self.directory.display()))
            })?;
        if room < size {
            return Err(Failure::new(
                Code::NoSpace,
                format!(
                    "the guest's RAM needs {size}, {room} free on {}; name a larger tmpfs with --ram-dir",
                    self.directory.display()
                ),
            ));
        }
        Ok(())
    }
}

impl Drop for RamHome {
    fn drop(&mut self) {
        if self.pages == Pages::Huge
            && let Err(error) = rustix::mount::unmount(&self.directory, UnmountFlags::DETACH)
        {
            tracing::warn!(%error, directory = %self.directory.display(), "cannot unmount the guest's RAM");
        }
        if let Err(error) = fs::remove_dir_all(&self.directory) {
            tracing::warn!(%error, directory = %self.directory.display(), "cannot take away the names of the guest's RAM");
        }
    }
}

/// The VM's folder in a tmpfs shared with others. The inode of the VM's own folder keeps two VMs of the same name, in
/// two state directories, apart.
fn shared_directory(parent: &Path, vm_directory: &Path) -> PathBuf {
    let name = vm_directory
        .file_name()
        .unwrap_or_default()
        .to_string_lossy()
        .into_owned();
    let inode = fs::metadata(vm_directory)
        .map(|metadata| metadata.ino())
        .unwrap_or_default();
    parent.join(format!("dormouse-{name}-{inode}"))
}

fn make_private(directory: &Path) -> io::Result<()> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(directory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_of_ram_are_gone_with_its_home() {
        let vm = tempfile::tempdir().unwrap();
        let home = RamHome::prepare(vm.path(), Some(Path::new(SHARED_TMPFS)), ByteCount(1 << 20)).unwrap();
        let (file, directory) = (home.file("pc.ram"), home.directory.clone());
        fs::write(&file, b"ram").unwrap();
        let held = fs::File::open(&file).unwrap();
        drop(home);
        assert!(!directory.exists());
        assert_eq!(io::read_to_string(held).unwrap(), "ram");
    }

    #[test]
    fn a_guest_larger_than_the_tmpfs_is_refused_with_both_numbers() {
        let vm = tempfile::tempdir().unwrap();
        let error =
            RamHome::prepare(vm.path(), Some(Path::new(SHARED_TMPFS)), ByteCount(1 << 60)).unwrap_err();
        assert_eq!(error.code, Code::NoSpace);
        assert!(
            error.message.contains("EiB") || error.message.contains("needs"),
            "{error}"
        );
    }

    #[test]
    fn a_folder_on_a_disk_is_no_home_for_ram() {
        let vm = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let error = RamHome::prepare(vm.path(), Some(vm.path()), ByteCount(1)).unwrap_err();
        assert_eq!(error.code, Code::Usage);
    }
}
