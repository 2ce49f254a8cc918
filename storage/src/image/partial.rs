//! A file on its way to its final name.
//!
//! It is written as `.NAME.partial-ID` beside its target, private and locked, and gets its name in
//! one step when it is whole. Dropped before that, it is gone. A crash of the machine or of the
//! process can leave the partial file, never a target that is not whole.
//!
//! A target that exists is replaced only if it may be and is an image that nobody uses and that holds
//! no guest which was not woken: it stays
//! locked from the beginning, changes places with the new file at the end, and is removed only when
//! the change is on the disk. If that fails it gets its name back.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FlockOperation, RenameFlags};
use rustix::io::Errno;
use uuid::Uuid;

use super::ImageError;
use super::reader::read_superblocks;
use super::state::ImageState;
use super::superblock::{FORMAT_VERSION, Superblocks};

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
        let Some(name) = target.file_name() else {
            return Err(ImageError::io(
                "create",
                target,
                io::Error::from(io::ErrorKind::InvalidInput),
            ));
        };
        let folder = match target.parent() {
            Some(folder) if !folder.as_os_str().is_empty() => folder.to_owned(),
            _ => PathBuf::from("."),
        };
        let replaced = lock_target(target, replace)?;
        remove_leftovers(&folder, name);
        let mut partial_name = OsString::from(".");
        partial_name.push(name);
        partial_name.push(format!(".partial-{id}"));
        let path = folder.join(partial_name);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .map_err(|source| ImageError::io("create", &path, source))?;
        let partial = Self {
            file,
            path,
            target: target.to_owned(),
            folder,
            replaced,
            partial: true,
        };
        lock(&partial.file, &partial.path)?;
        Ok(partial)
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
            // Nobody may find an image that its maker does not vouch for: the guest is about to run
            // on. An old image that cannot have its name back keeps the partial one.
            let _ = match left {
                Left::Replaced => {
                    self.partial = false;
                    fs::rename(&self.path, &self.target)
                }
                Left::Nothing | Left::Link => fs::remove_file(&self.target),
            };
            let _ = folder.sync_all();
            return Err(ImageError::io("make durable the name of", &self.target, source));
        }
        Ok(keep)
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

/// Removes partial files of this target whose writer was killed. One that is still written is locked.
fn remove_leftovers(folder: &Path, name: &OsStr) {
    let prefix = [b".", name.as_encoded_bytes(), b".partial-"].concat();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if !entry.file_name().as_encoded_bytes().starts_with(&prefix) {
            continue;
        }
        let path = entry.path();
        let dead = File::open(&path).is_ok_and(|file| lock(&file, &path).is_ok());
        if dead && let Err(error) = fs::remove_file(&path) {
            tracing::warn!(path = %path.display(), %error, "cannot remove what a killed writer left");
        }
    }
}

/// Takes the lock that everybody who may write to an image holds.
pub(super) fn lock(file: &File, path: &Path) -> Result<(), ImageError> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(()),
        Err(Errno::WOULDBLOCK) => Err(ImageError::Locked {
            path: path.to_owned(),
        }),
        Err(error) => Err(ImageError::io("lock", path, error)),
    }
}

/// Whether `path` leads to the file that is open.
pub(super) fn leads_to(path: &Path, file: &File) -> bool {
    match (fs::metadata(path), file.metadata()) {
        (Ok(there), Ok(open)) => (there.dev(), there.ino()) == (open.dev(), open.ino()),
        _ => false,
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
    // Writable, because network file systems make a record lock of it, which needs that.
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(target)
        .map_err(|source| ImageError::io("open", target, source))?;
    lock(&file, target)?;
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
            if matches!(current.state, ImageState::Sealed | ImageState::Waking) =>
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
