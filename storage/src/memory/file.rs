//! A file that becomes RAM of a guest to be woken.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use super::{MemoryError, PAGE_BYTES, check_length};
use crate::ByteCount;
use crate::sys::{HUGE_PAGE_BYTES, OwnMapping};

/// How much is looked at in one step when zeros are to be made.
const CLEARED_AT_ONCE: usize = 64 << 10;

/// A page of zeros.
static ZERO_PAGE: [u8; PAGE_BYTES as usize] = [0; PAGE_BYTES as usize];

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
    is_new: bool,
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
            is_new: true,
        };
        if let Err(source) = memory.file.set_len(length.0) {
            let _ = memory.remove();
            return Err(failed("size", source));
        }
        Ok(memory)
    }

    /// Takes RAM that a QEMU whose guest does not run has mapped already: a file open for reading and writing, which has
    /// this length. It may hold anything. `path` is what it is called in errors.
    ///
    /// # Errors
    ///
    /// [`MemoryError::NotPages`] if the length is not a positive number of 4 KiB pages, [`MemoryError::Short`] if the file is
    /// shorter, [`MemoryError::File`] if the system refuses.
    pub fn mapped(file: File, path: &Path, length: ByteCount) -> Result<Self, MemoryError> {
        check_length(length)?;
        let metadata = file.metadata().map_err(|source| MemoryError::File {
            operation: "look at",
            path: path.to_owned(),
            source,
        })?;
        let found = ByteCount(metadata.len());
        if found < length {
            return Err(MemoryError::Short {
                needed: length,
                found,
            });
        }
        Ok(Self {
            file,
            path: path.to_owned(),
            length,
            is_new: false,
        })
    }

    /// Makes a part read as zeros. What does so stays as it is, so that no memory is taken for it.
    pub(crate) fn clear(&self, start: u64, length: u64) -> io::Result<()> {
        if self.is_new {
            return Ok(());
        }
        let mut bytes = vec![0; CLEARED_AT_ONCE.min(usize::try_from(length).unwrap_or(CLEARED_AT_ONCE))];
        let end = start + length;
        let mut at = start;
        while at < end {
            // Where it can be told, what was never written to is not even read.
            match seek(&self.file, SeekFrom::Data(at)) {
                Ok(data) => at = data,
                Err(Errno::NXIO) => break,
                Err(_) => {}
            }
            if at >= end {
                break;
            }
            let part = usize::try_from(end - at).unwrap_or(usize::MAX).min(bytes.len());
            let part = &mut bytes[..part];
            self.file.read_exact_at(part, at)?;
            for page in part.chunks(ZERO_PAGE.len()) {
                if page.iter().any(|byte| *byte != 0) {
                    self.file.write_all_at(&ZERO_PAGE[..page.len()], at)?;
                }
                at += page.len() as u64;
            }
        }
        Ok(())
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

    /// Whether it is made by us, for nobody else yet, and its file system makes it of huge pages, as tmpfs tells by the
    /// unit that it likes best.
    pub(crate) fn is_new_on_huge_pages(&self) -> bool {
        let unit = self.file.metadata().map(|metadata| metadata.blksize());
        self.is_new && unit.is_ok_and(|unit| unit >= HUGE_PAGE_BYTES as u64)
    }

    /// Maps all of it. It has to be new: nobody else has it.
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

    #[test]
    fn ram_that_is_mapped_already_is_cleared_where_it_holds_something_and_takes_no_memory_elsewhere() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(1 << 20).unwrap();
        file.write_all_at(b"left from another guest", 300_000).unwrap();
        let blocks = file.metadata().unwrap().blocks();
        let look = file.try_clone().unwrap();
        let too_long = MemoryFile::mapped(file.try_clone().unwrap(), Path::new("ram"), ByteCount::mib(2));
        assert!(matches!(too_long, Err(MemoryError::Short { .. })));
        let memory = MemoryFile::mapped(file, Path::new("ram"), ByteCount::mib(1)).unwrap();
        memory.clear(0, 1 << 20).unwrap();
        let mut bytes = vec![1; 1 << 20];
        look.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0));
        assert_eq!(look.metadata().unwrap().blocks(), blocks);
    }
}
