//! A file of another format on its way to its name.
//!
//! Written as `.NAME.export-ID` beside its target, private and locked; it gets its name in one step
//! when it is whole and on the disk. Dropped before that it is gone. What a killed writer left is
//! removed by the next one that writes to the same target.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, RenameFlags};
use rustix::io::Errno;
use uuid::Uuid;

use crate::image::ImageError;
use crate::image::error::is_out_of_space;
use crate::volume::{create_beside, folder_of};
use crate::{ByteCount, Image};

/// A file that is written and has not its name yet.
#[derive(Debug)]
pub(super) struct NewFile {
    file: File,
    path: PathBuf,
    target: PathBuf,
    folder: PathBuf,
    replace: bool,
    named: bool,
}

impl NewFile {
    /// Begins a file that will be at `target`. With `replace` it may take the place of a file that is
    /// there, but never of an image of ours: that could be the only copy of a guest.
    pub(super) fn create(target: &Path, replace: bool) -> Result<Self, ImageError> {
        check_target(target, replace)?;
        let (file, path) = create_beside(target, "export", Uuid::new_v4())?;
        Ok(Self {
            file,
            path,
            target: target.to_owned(),
            folder: folder_of(target).to_owned(),
            replace,
            named: false,
        })
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Looks whether there is room for `needed`: before the work, not after half of it.
    pub(super) fn check_space(&self, needed: ByteCount) -> Result<(), ImageError> {
        let available = free_in(&self.folder)?;
        if available < needed {
            return Err(self.no_space(needed, available));
        }
        Ok(())
    }

    /// What a failed write means.
    pub(super) fn failed(&self, source: io::Error) -> ImageError {
        if is_out_of_space(&source) {
            let written = self.file.metadata().map_or(0, |metadata| metadata.blocks() * 512);
            return self.no_space(ByteCount(written + 1), free_in(&self.folder).unwrap_or_default());
        }
        ImageError::io("write", &self.path, source)
    }

    /// Syncs the file and gives it its name; after `Ok` a crash takes neither away. Tells the file's
    /// length and the space that it takes.
    pub(super) fn publish(mut self) -> Result<(ByteCount, ByteCount), ImageError> {
        let failed = |operation, source: io::Error| ImageError::io(operation, &self.target, source);
        self.file.sync_all().map_err(|source| self.failed(source))?;
        let metadata = self.file.metadata().map_err(|source| failed("look at", source))?;
        let folder = File::open(&self.folder).map_err(|source| failed("open the folder of", source))?;
        // Somebody may have made an image there meanwhile.
        check_target(&self.target, self.replace)?;
        self.take_name()?;
        self.named = true;
        folder
            .sync_all()
            .map_err(|source| ImageError::io("make durable the name of", &self.target, source))?;
        Ok((ByteCount(metadata.len()), ByteCount(metadata.blocks() * 512)))
    }

    fn take_name(&self) -> Result<(), ImageError> {
        let rename = |flags| rustix::fs::renameat_with(CWD, &self.path, CWD, &self.target, flags);
        let result = if self.replace {
            rename(RenameFlags::empty())
        } else {
            match rename(RenameFlags::NOREPLACE) {
                // File systems that cannot (some network ones) can link, which never replaces either.
                Err(Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => {
                    rustix::fs::linkat(CWD, &self.path, CWD, &self.target, AtFlags::empty()).map(|()| {
                        // The other name of the same file.
                        let _ = fs::remove_file(&self.path);
                    })
                }
                result => result,
            }
        };
        result.map_err(|error| match error {
            Errno::EXIST => ImageError::TargetExists {
                path: self.target.clone(),
            },
            error => ImageError::io("rename to", &self.target, error),
        })
    }

    fn no_space(&self, needed: ByteCount, available: ByteCount) -> ImageError {
        ImageError::NoSpace {
            needed,
            available,
            path: self.folder.clone(),
        }
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if !self.named
            && let Err(error) = fs::remove_file(&self.path)
        {
            tracing::warn!(path = %self.path.display(), %error, "a partial file stays behind");
        }
    }
}

/// The folder that a path lies in.
/// Bytes free for those who are not root.
pub(super) fn free_in(folder: &Path) -> Result<ByteCount, ImageError> {
    let free = rustix::fs::statvfs(folder)
        .map_err(|error| ImageError::io("ask for free space on", folder, error))?;
    Ok(ByteCount(free.f_bavail.saturating_mul(free.f_frsize)))
}

fn check_target(target: &Path, replace: bool) -> Result<(), ImageError> {
    let found = match fs::symlink_metadata(target) {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(ImageError::io("look at", target, source)),
    };
    let exists = || ImageError::TargetExists {
        path: target.to_owned(),
    };
    if !replace || !found.is_file() || found.file_type().is_block_device() {
        return Err(exists());
    }
    match Image::open(target) {
        Ok(image) => Err(ImageError::HoldsGuest {
            path: target.to_owned(),
            state: image.state(),
        }),
        Err(ImageError::NotAnImage { .. }) => Ok(()),
        // Torn, corrupt or newer: it was an image of ours, and a person may want what is left of it.
        Err(_) => Err(exists()),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_file_has_no_name_before_it_is_whole_and_nothing_stays_of_one_that_is_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("out");
        let new = NewFile::create(&target, false).unwrap();
        new.file().write_all(b"half").unwrap();
        assert!(!target.exists());
        drop(new);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);

        let new = NewFile::create(&target, false).unwrap();
        new.file().write_all(b"whole").unwrap();
        assert_eq!(new.publish().unwrap().0, ByteCount(5));
        assert_eq!(fs::read(&target).unwrap(), b"whole");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn another_file_is_replaced_only_if_that_is_wished() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("out");
        fs::write(&target, b"old").unwrap();
        assert!(matches!(
            NewFile::create(&target, false),
            Err(ImageError::TargetExists { .. })
        ));
        let new = NewFile::create(&target, true).unwrap();
        new.file().write_all(b"new").unwrap();
        new.publish().unwrap();
        assert_eq!(fs::read(&target).unwrap(), b"new");
    }

    #[test]
    fn a_file_that_took_the_name_meanwhile_keeps_it() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("out");
        let new = NewFile::create(&target, false).unwrap();
        fs::write(&target, b"theirs").unwrap();
        assert!(matches!(new.publish(), Err(ImageError::TargetExists { .. })));
        assert_eq!(fs::read(&target).unwrap(), b"theirs");
    }

    #[test]
    fn what_a_killed_writer_left_goes_with_the_next_and_a_living_one_keeps_its_own() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("out");
        fs::write(
            folder
                .path()
                .join(".out.export-11111111-1111-1111-1111-111111111111"),
            b"half",
        )
        .unwrap();
        let first = NewFile::create(&target, false).unwrap();
        let second = NewFile::create(&target, false).unwrap();
        assert!(first.path.exists() && second.path.exists());
        assert!(
            !folder
                .path()
                .join(".out.export-11111111-1111-1111-1111-111111111111")
                .exists()
        );
    }
}
