//! RAM of a stopped guest, as a source.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::MetadataExt;

use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use super::{MemoryError, check_length};
use crate::ByteCount;
use crate::sys::{AlignedBuf, HUGE_PAGE_BYTES, Mapping};
use crate::volume::Lane;

/// RAM of a stopped guest, mapped read-only and shared from the file that backs it.
///
/// The file is kept open, so that it cannot vanish; that nobody shortens it is the caller's to know
/// (QEMU itself would die of that). The guest's CPUs must be stopped for as long as anything is
/// read: nothing here can tell a moving guest.
#[derive(Debug)]
pub struct GuestMemory {
    mapping: Mapping,
    file: File,
    length: ByteCount,
    on_huge_pages: bool,
}

impl GuestMemory {
    /// Maps the first `length` bytes of `file`, which must be open for reading.
    ///
    /// # Errors
    ///
    /// [`MemoryError::Short`] if the file is shorter, [`MemoryError::NotPages`] if the length is
    /// not a positive number of 4 KiB pages, [`MemoryError::Io`] if the system refuses.
    pub fn map(file: File, length: ByteCount) -> Result<Self, MemoryError> {
        check_length(length)?;
        let metadata = file.metadata().map_err(|source| MemoryError::Io {
            operation: "look at",
            source,
        })?;
        let found = metadata.len();
        if found < length.0 {
            return Err(MemoryError::Short {
                needed: length,
                found: ByteCount(found),
            });
        }
        let mapping = Mapping::of(&file, length.0 as usize).map_err(|source| MemoryError::Io {
            operation: "map",
            source,
        })?;
        Ok(Self {
            mapping,
            file,
            length,
            // tmpfs and hugetlbfs tell the page that they use where they can as the preferred size of I/O.
            on_huge_pages: metadata.blksize() >= HUGE_PAGE_BYTES as u64,
        })
    }

    /// Whether it lies on huge pages. Small ones are all over the machine's memory: each is a piece of its own to a
    /// device.
    pub(crate) fn is_on_huge_pages(&self) -> bool {
        self.on_huge_pages
    }

    /// Length of the RAM.
    pub fn length(&self) -> ByteCount {
        self.length
    }

    /// The byte ranges that hold anything, in order and apart from each other; everything between
    /// them is a hole that reads as zeros and must not be touched.
    ///
    /// Where holes cannot be told (a file system without SEEK_DATA), all of it is one extent. Moves
    /// the file's offset, which nobody else uses.
    ///
    /// # Errors
    ///
    /// [`MemoryError::Io`] if the system refuses.
    pub fn data_extents(&self) -> Result<Vec<Range<u64>>, MemoryError> {
        data_extents(&self.file, 0..self.length.0).map_err(|source| MemoryError::Io {
            operation: "find the holes of",
            source,
        })
    }

    /// CRC-32 (the polynomial of zlib) of the bytes in `range`, or `None` if all of them are zero.
    ///
    /// Touches the pages: `range` must lie in one of the [extents](Self::data_extents), or its
    /// holes become memory.
    ///
    /// # Panics
    ///
    /// Panics if `range` is outside of the RAM.
    pub fn crc32_unless_zero(&self, range: Range<u64>) -> Option<u32> {
        let range = as_usize(range);
        self.mapping.populate(&range);
        (!self.mapping.is_zero(&range)).then(|| self.mapping.crc32(&range))
    }

    /// Whether all bytes in `range` are zero. Touches the pages, as
    /// [`crc32_unless_zero`](Self::crc32_unless_zero) does.
    pub(crate) fn is_zero(&self, range: Range<u64>) -> bool {
        let range = as_usize(range);
        self.mapping.populate(&range);
        self.mapping.is_zero(&range)
    }

    /// Copies the bytes in `range` to `at` in `buffer`.
    pub(crate) fn copy_to(&self, range: Range<u64>, buffer: &mut AlignedBuf, at: usize) {
        self.mapping.copy_to(&as_usize(range), buffer, at);
    }

    /// Writes the bytes in `range` to `offset`, from where they lie.
    pub(crate) fn write_at(&self, range: Range<u64>, lane: &mut Lane, offset: u64) -> io::Result<()> {
        lane.write_mapped(&self.mapping, &as_usize(range), offset)
    }
}

/// The length of a mapping fits an address; a range beyond one cannot and panics in the mapping's
/// check.
fn as_usize(range: Range<u64>) -> Range<usize> {
    let bound = |bound| usize::try_from(bound).unwrap_or(usize::MAX);
    bound(range.start)..bound(range.end)
}

/// The ranges of `within` where `file` holds data.
fn data_extents(file: &File, within: Range<u64>) -> io::Result<Vec<Range<u64>>> {
    let mut extents = Vec::new();
    let mut position = within.start;
    while position < within.end {
        let start = match seek(file, SeekFrom::Data(position)) {
            Ok(start) if start < within.end => start,
            // Data begins behind the range, or there is none up to the file's end.
            Ok(_) | Err(Errno::NXIO) => break,
            // hugetlbfs and others that cannot tell.
            Err(Errno::INVAL | Errno::OPNOTSUPP) => position,
            Err(error) => return Err(error.into()),
        };
        let end = match seek(file, SeekFrom::Hole(start)) {
            Ok(end) => end.min(within.end),
            Err(Errno::INVAL | Errno::OPNOTSUPP) => within.end,
            Err(error) => return Err(error.into()),
        };
        // A file that changes between the two calls could answer anything; never go back or stand
        // still.
        if end <= start {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        }
        extents.push(start..end);
        position = end;
    }
    Ok(extents)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn extents_cover_what_was_written_and_leave_the_holes_alone() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(8 << 20).unwrap();
        file.write_all_at(&[1; 4096], 4 << 20).unwrap();
        file.write_all_at(&[1; 8192], (6 << 20) - 4096).unwrap();
        let memory = GuestMemory::map(file.try_clone().unwrap(), ByteCount::mib(8)).unwrap();
        let before = rustix::fs::fstat(&file).unwrap().st_blocks;
        let extents = memory.data_extents().unwrap();
        assert!(extents.iter().any(|extent| extent.contains(&(4 << 20))));
        assert!(extents.iter().any(|extent| extent.contains(&(6 << 20))));
        assert!(!extents.iter().any(|extent| extent.contains(&0)));
        assert_eq!(
            rustix::fs::fstat(&file).unwrap().st_blocks,
            before,
            "nothing was allocated by looking"
        );
    }

    #[test]
    fn an_empty_memory_has_no_extents_and_a_full_one_has_one() {
        let file = tempfile::tempfile_in("/dev/shm").unwrap();
        file.set_len(1 << 20).unwrap();
        let memory = GuestMemory::map(file.try_clone().unwrap(), ByteCount::mib(1)).unwrap();
        assert_eq!(memory.data_extents().unwrap(), vec![]);
        file.write_all_at(&vec![7; 1 << 20], 0).unwrap();
        assert_eq!(memory.data_extents().unwrap(), vec![0..1 << 20]);
    }

    #[test]
    fn a_file_shorter_than_the_ram_is_refused_with_both_lengths() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let error = GuestMemory::map(file, ByteCount(8192)).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the file behind guest RAM has 4.0 KiB, 8.0 KiB are needed"
        );
    }

    #[test]
    fn a_length_that_is_no_number_of_pages_is_refused() {
        for length in [0, 1, 4095, 4097] {
            let file = tempfile::tempfile().unwrap();
            file.set_len(1 << 20).unwrap();
            let error = GuestMemory::map(file, ByteCount(length)).unwrap_err();
            assert!(matches!(error, MemoryError::NotPages { .. }), "{length}: {error}");
        }
    }
}
