//! A worker thread's own queue of writes.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::Backend;
use crate::image::chunks::CHUNK_BYTES;
use crate::sys::{ALIGNMENT, AlignedBuf, DirectFile, Mapping};

/// A worker thread's own queue of writes.
///
/// A write may come back before it is on the disk, or even before the disk knows of it; what became of
/// it is told by a later call, at the latest by [`Lane::finish`]. A lane that is dropped waits for what
/// the kernel is still reading.
#[derive(Debug)]
pub(crate) struct Lane {
    io: Arc<DirectFile>,
    /// Buffers that came back.
    spare: Vec<AlignedBuf>,
}

impl Lane {
    pub(super) fn on(io: Arc<DirectFile>, _backend: Backend) -> Self {
        Self {
            io,
            spare: Vec::new(),
        }
    }

    /// Writes `range` of guest RAM from where it lies.
    pub(crate) fn write_mapped(
        &mut self,
        mapping: &Mapping,
        range: &Range<usize>,
        offset: u64,
    ) -> io::Result<()> {
        mapping.write_at(range, &self.io, offset)
    }

    /// A buffer for a chunk; what is in it is arbitrary.
    pub(crate) fn buffer(&mut self) -> AlignedBuf {
        self.spare
            .pop()
            .unwrap_or_else(|| AlignedBuf::zeroed(CHUNK_BYTES as usize))
    }

    /// Takes a buffer back that was not needed.
    pub(crate) fn give_back(&mut self, buffer: AlignedBuf) {
        self.spare.push(buffer);
    }

    /// Writes the first `length` bytes of `buffer`, and zeros up to the next multiple of 4 KiB.
    ///
    /// # Panics
    ///
    /// Panics if the buffer is shorter than `length`.
    pub(crate) fn write_buffer(
        &mut self,
        mut buffer: AlignedBuf,
        length: usize,
        offset: u64,
    ) -> io::Result<()> {
        let whole = length.next_multiple_of(ALIGNMENT);
        buffer[length..whole].fill(0);
        let result = self.io.write_all_at(&buffer[..whole], offset);
        self.spare.push(buffer);
        result
    }

    /// Waits for all of the lane's writes.
    ///
    /// # Errors
    ///
    /// The first error that was not told yet.
    pub(crate) fn finish(&mut self) -> io::Result<()> {
        Ok(())
    }
}
