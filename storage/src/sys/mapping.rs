//! A read-only shared mapping of guest RAM.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use memmap2::{Advice, MmapOptions, MmapRaw};

use super::{AlignedBuf, is_zero};

/// The first bytes of a file, mapped shared and for reading.
///
/// Ranges are checked against the mapping's length; a range outside is a bug of the caller and
/// panics.
#[derive(Debug)]
pub(crate) struct Mapping {
    map: Arc<MmapRaw>,
}

/// A part of a mapping, which stays mapped for as long as this lives.
#[derive(Debug)]
pub(crate) struct SharedRange {
    map: Arc<MmapRaw>,
    range: Range<usize>,
}

impl SharedRange {
    /// The address and number of its bytes, valid for as long as `self` lives. They may change meanwhile.
    pub(super) fn bytes(&self) -> (*const u8, usize) {
        // SAFETY: the range was checked to lie in the mapping when this was made.
        let start = unsafe { self.map.as_ptr().add(self.range.start) };
        (start, self.range.len())
    }
}

impl Mapping {
    /// Maps the first `length` bytes, which must be there: the caller checks the file's length,
    /// knows that nobody shrinks it (a
    /// page behind the end would be a SIGBUS).
    pub(crate) fn of(file: &File, length: usize) -> io::Result<Self> {
        let map = MmapOptions::new().len(length).map_raw_read_only(file)?;
        Ok(Self { map: Arc::new(map) })
    }

    /// Brings the pages of `range` into the page table at once, which is cheaper than one fault
    /// each.
    ///
    /// Only a hint: a kernel that does not know it (before 5.14) leaves the faults to the scan.
    pub(crate) fn populate(&self, range: &Range<usize>) {
        self.check(range);
        let _ = self
            .map
            .advise_range(Advice::PopulateRead, range.start, range.len());
    }

    /// Whether every byte of `range` is zero.
    pub(crate) fn is_zero(&self, range: &Range<usize>) -> bool {
        self.with_bytes(range, is_zero)
    }

    /// CRC-32 (the polynomial of zlib) of `range`.
    pub(crate) fn crc32(&self, range: &Range<usize>) -> u32 {
        self.with_bytes(range, crc32fast::hash)
    }

    /// Copies `range` to `at` in `buffer`.
    pub(crate) fn copy_to(&self, range: &Range<usize>, buffer: &mut AlignedBuf, at: usize) {
        self.with_bytes(range, |bytes| buffer[at..at + bytes.len()].copy_from_slice(bytes));
    }

    /// `range`, to be written from where it lies.
    pub(crate) fn share(&self, range: &Range<usize>) -> SharedRange {
        self.check(range);
        SharedRange {
            map: Arc::clone(&self.map),
            range: range.clone(),
        }
    }

    fn with_bytes<R>(&self, range: &Range<usize>, look: impl FnOnce(&[u8]) -> R) -> R {
        self.check(range);
        // SAFETY: the range was checked to lie in the mapping, which lives for the whole call. The
        // slice does not outlive it. Another process could write to these pages although the guest
        // is stopped; those who look (a fold, a checksum, a copy) draw no conclusion from a byte
        // that memory safety rests on, so the worst is a wrong sum, which the next reader finds.
        look(unsafe { std::slice::from_raw_parts(self.map.as_ptr().add(range.start), range.len()) })
    }

    fn check(&self, range: &Range<usize>) {
        assert!(
            range.start <= range.end && range.end <= self.map.len(),
            "range {range:?} is outside of a mapping of {} bytes",
            self.map.len()
        );
    }
}
