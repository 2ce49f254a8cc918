//! A file that becomes RAM of a guest to be woken.

use std::fs::{File, OpenOptions};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::{MemoryError, check_length};
use crate::ByteCount;
use crate::sys::{HUGE_PAGE_BYTES, OwnMapping};

/// A file that becomes RAM of a woken guest: created and sized here, filled in parallel from an
/// image, mapped shared by QEMU.
///
/// It belongs on tmpfs (hugetlbfs takes no writes). It stays when this value is dropped: QEMU maps
/// it by its path. Whoever gives up before QEMU has it removes it with [`MemoryFile::remove`].
#[derive(Debug)]
pub struct MemoryFile {
    file: File,
    path: PathBuf,
    length: ByteCount,
}

impl MemoryFile {
    /// Creates `path`, which must not exist, readable and writable by its owner alone, `length`
    /// bytes long and empty.
    ///
    /// # Errors
    ///
    /// [`MemoryError::NotPages`] if the length is not a positive number of 4 KiB pages,
    /// [`MemoryError::File`] if the system refuses; nothing is left behind then.
    pub fn create(path: &Path, length: ByteCount) -> Result<Self, MemoryError> {
        check_length(length)?;
        let failed = |operation, source| MemoryError::File {
            operation,
            path: path.to_owned(),
            source,
        };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .map_err(|source| failed("create", source))?;
        let memory = Self {
            file,
            path: path.to_owned(),
            length,
        };
        if let Err(source) = memory.file.set_len(length.0) {
            let _ = memory.remove();
            return Err(failed("size", source));
        }
        Ok(memory)
    }

    /// Length of the RAM.
    pub fn length(&self) -> ByteCount {
        self.length
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Removes the file's name; whoever has it mapped keeps the memory.
    ///
    /// # Errors
    ///
    /// [`MemoryError::File`] if the system refuses.
    pub fn remove(self) -> Result<(), MemoryError> {
        std::fs::remove_file(&self.path).map_err(|source| MemoryError::File {
            operation: "remove",
            path: self.path.clone(),
            source,
        })
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// Whether its file system makes it of huge pages, as tmpfs tells by the unit that it likes best.
    pub(crate) fn is_on_huge_pages(&self) -> bool {
        let unit = self.file.metadata().map(|metadata| metadata.blksize());
        unit.is_ok_and(|unit| unit >= HUGE_PAGE_BYTES as u64)
    }

    /// Maps all of it, as long as nobody else has it.
    pub(crate) fn map_alone(&self) -> Result<OwnMapping, MemoryError> {
        // The length was checked to fit when the file was made.
        OwnMapping::of(&self.file, self.length.0 as usize).map_err(|source| MemoryError::File {
            operation: "map",
            path: self.path.clone(),
            source,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn a_memory_file_is_private_sized_and_never_takes_over_an_existing_one() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = folder.path().join("pc.ram");
        let memory = MemoryFile::create(&path, ByteCount::mib(3)).unwrap();
        let metadata = std::fs::metadata(&path).unwrap();
        assert_eq!(
            (metadata.mode() & 0o777, metadata.len(), metadata.blocks()),
            (0o600, 3 << 20, 0)
        );
        assert!(matches!(
            MemoryFile::create(&path, ByteCount::mib(3)),
            Err(MemoryError::File {
                operation: "create",
                ..
            })
        ));
        memory.remove().unwrap();
        assert!(!path.exists());
    }
}
