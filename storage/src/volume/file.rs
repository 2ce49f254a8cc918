//! A file on its way to its final name.
//!
//! It is written as `.NAME.partial-ID` beside its target, private and locked, and gets its name in
//! one step when it is whole. Dropped before that, it is gone. A crash of the machine or of the
//! process can leave the partial file, never a target that is not whole.
//!
//! A target that exists is replaced only if it may be and is an image that nobody uses and that is not the only copy of a
//! guest which was not woken: it stays
//! locked from the beginning, changes places with the new file at the end, and is removed only when
//! the change is on the disk. If that fails it gets its name back.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FallocateFlags, RenameFlags};
use rustix::io::Errno;
use uuid::Uuid;

use super::beside::{create_beside, folder_of, path_beside};
use super::block_device::wipe;
use super::hold::{leads_to, open_held};
use crate::ByteCount;
use crate::image::reader::{is_dispensable, read_superblocks};
use crate::image::superblock::{COPY_BYTES, COPY_OFFSETS, FORMAT_VERSION, Superblocks};
use crate::image::{ImageError, ImageState};

/// What the hidden files of images are called.
const PARTIAL: &str = "partial";

/// A file that is written but has not its name yet.
#[derive(Debug)]
pub(super) struct PartialFile {
    /// Open for reading and writing, locked.
    pub(super) file: File,
    path: PathBuf,
    target: PathBuf,
    folder: PathBuf,
    /// What is to be replaced, held locked.
    replaced: Option<File>,
    /// Whether `path` is ours to remove.
    partial: bool,
}

impl PartialFile {
    pub(super) fn create(target: &Path, replace: bool, id: Uuid) -> Result<Self, ImageError> {
        let replaced = lock_target(target, replace)?;
        let (file, path) = create_beside(target, PARTIAL, id)?;
        Ok(Self {
            file,
            path,
            target: target.to_owned(),
            folder: folder_of(target).to_owned(),
            replaced,
            partial: true,
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn target(&self) -> &Path {
        &self.target
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    /// Bytes free for those who are not root, because root's reserve is not there to hold images;
    /// `None` where the file system has no bound (ramfs, an unlimited tmpfs, some of FUSE).
    pub(super) fn available(&self) -> Result<Option<ByteCount>, ImageError> {
        let free = rustix::fs::fstatvfs(&self.file)
            .map_err(|error| ImageError::io("ask for free space on", &self.folder, error))?;
        let bytes = ByteCount(free.f_bavail.saturating_mul(free.f_frsize));
        Ok((free.f_blocks > 0).then_some(bytes))
    }

    /// Allocates the file's first bytes where the file system can do that.
    pub(super) fn allocate(&self, length: ByteCount) -> io::Result<()> {
        match rustix::fs::fallocate(&self.file, FallocateFlags::empty(), 0, length.0) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    pub(super) fn begin(&self, copy: &[u8; COPY_BYTES]) -> io::Result<()> {
        self.file.write_all_at(copy, COPY_OFFSETS[0])
    }

    /// Makes both copies of the superblock say `sealed`: at once, for until the rename nobody relies
    /// on either.
    pub(super) fn seal(&self, copy: &[u8; COPY_BYTES]) -> io::Result<()> {
        for offset in COPY_OFFSETS {
            self.file.write_all_at(copy, offset)?;
        }
        self.file.sync_all()
    }

    /// Gives the file its name, for good: after `Ok` a crash leaves the target as it is now.
    ///
    /// On any error the target is what it was before, as far as the system lets us.
    pub(super) fn publish(mut self) -> Result<File, ImageError> {
        let failed = |operation, source: io::Error| ImageError::io(operation, &self.target, source);
        let folder = File::open(&self.folder).map_err(|source| failed("open the folder of", source))?;
        let keep = self.file.try_clone().map_err(|source| failed("hold", source))?;
        let left = match &self.replaced {
            Some(replaced) => self.take_place_of(replaced)?,
            None => self.take_free_name()?,
        };
        // What the partial name leads to now, if it is there still, goes when `self` is dropped.
        self.partial = left != Left::Nothing;
        if let Err(source) = folder.sync_all() {
            if left == Left::Replaced {
                self.partial = false;
            }
            if !self.withdraw(left, &folder) {
                return Err(ImageError::MayBeSealed {
                    path: self.target.clone(),
                    source,
                });
            }
            return Err(ImageError::io("make durable the name of", &self.target, source));
        }
        Ok(keep)
    }

    /// Takes back a sealed image whose name is not durable; tells whether that is.
    ///
    /// Nobody may find an image that its maker does not vouch for: the guest is about to run on. Whoever
    /// fails to make a name durable is likely to fail with its removal too, so the image itself is made none as
    /// well. An old image that cannot have its name back keeps the partial one.
    fn withdraw(&self, left: Left, folder: &File) -> bool {
        let wiped = wipe(&self.file, 0);
        let unnamed = match left {
            Left::Replaced => fs::rename(&self.path, &self.target),
            Left::Nothing | Left::Link => fs::remove_file(&self.target),
        }
        .and_then(|()| folder.sync_all());
        wiped.is_ok() || unnamed.is_ok()
    }

    fn take_free_name(&self) -> Result<Left, ImageError> {
        let result = match rename(&self.path, &self.target, RenameFlags::NOREPLACE) {
            Ok(()) => Ok(Left::Nothing),
            // File systems that cannot (some network ones) can link, which never replaces either.
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                rustix::fs::linkat(CWD, &self.path, CWD, &self.target, AtFlags::empty()).map(|()| Left::Link)
            }
            Err(error) => Err(error),
        };
        result.map_err(|error| match error {
            Errno::EXIST => ImageError::TargetExists {
                path: self.target.clone(),
            },
            error => ImageError::io("rename to", &self.target, error),
        })
    }

    fn take_place_of(&self, replaced: &File) -> Result<Left, ImageError> {
        if !leads_to(&self.target, replaced) {
            return Err(ImageError::TargetExists {
                path: self.target.clone(),
            });
        }
        match rename(&self.path, &self.target, RenameFlags::EXCHANGE) {
            Ok(()) => Ok(Left::Replaced),
            Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                rename(&self.path, &self.target, RenameFlags::empty()).map(|()| Left::Nothing)
            }
            Err(error) => Err(error),
        }
        .map_err(|error| ImageError::io("rename to", &self.target, error))
    }
}

/// Where the image `id` is written on its way to `target`; `None` if that names no file.
pub(crate) fn partial_path(target: &Path, id: Uuid) -> Option<PathBuf> {
    path_beside(target, PARTIAL, id)
}

/// What the partial name leads to once the target leads to the new image.
#[derive(Clone, Copy, PartialEq)]
enum Left {
    Nothing,
    /// The new image, which has two names for a moment.
    Link,
    /// The image that was replaced.
    Replaced,
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if self.partial
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "a partial image stays behind");
        }
    }
}

/// Checks what stands at the target already, and locks it if it may be replaced.
fn lock_target(target: &Path, replace: bool) -> Result<Option<File>, ImageError> {
    match fs::symlink_metadata(target) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(ImageError::io("look at", target, error)),
        Ok(_) if !replace => {
            return Err(ImageError::TargetExists {
                path: target.to_owned(),
            });
        }
        Ok(metadata) if !metadata.is_file() => {
            return Err(ImageError::NotAnImage {
                path: target.to_owned(),
            });
        }
        Ok(_) => {}
    }
    let file = open_held(target)?;
    match read_superblocks(&file, target)? {
        Superblocks::Alien => Err(ImageError::NotAnImage {
            path: target.to_owned(),
        }),
        Superblocks::Newer(found) => Err(ImageError::NewerFormat {
            path: target.to_owned(),
            found,
            supported: FORMAT_VERSION,
        }),
        Superblocks::Valid { current, .. }
            if matches!(current.state, ImageState::Sealed | ImageState::Waking)
                && !is_dispensable(&file, target, &current) =>
        {
            Err(ImageError::HoldsGuest {
                path: target.to_owned(),
                state: current.state,
            })
        }
        _ => Ok(Some(file)),
    }
}

fn rename(from: &Path, to: &Path, flags: RenameFlags) -> rustix::io::Result<()> {
    rustix::fs::renameat_with(CWD, from, CWD, to, flags)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file at its target, of which `file` is the hold.
    fn published(target: &Path, file: File) -> PartialFile {
        PartialFile {
            file,
            path: target.with_extension("partial"),
            target: target.to_owned(),
            folder: PathBuf::from("/"),
            replaced: None,
            partial: false,
        }
    }

    #[test]
    fn an_image_whose_name_cannot_be_made_durable_is_none_and_told_if_it_may_be_one() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("image");
        fs::write(&target, [7; 2 * COPY_BYTES]).unwrap();
        let link = folder.path().join("link");
        fs::hard_link(&target, &link).unwrap();
        // Not to be synced, as a folder on a file system that is read-only after an error.
        let broken_folder = File::open("/dev/null").unwrap();
        broken_folder.sync_all().unwrap_err();

        let read_only = published(&target, File::open(&target).unwrap());
        assert!(!read_only.withdraw(Left::Nothing, &broken_folder));
        assert_eq!(fs::read(&link).unwrap(), [7; 2 * COPY_BYTES]);

        let file = File::options().write(true).open(&link).unwrap();
        let writable = published(&target, file);
        assert!(writable.withdraw(Left::Nothing, &broken_folder));
        assert_eq!(fs::read(&link).unwrap(), [0; 2 * COPY_BYTES]);
    }
}
