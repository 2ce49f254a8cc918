//! A worker thread's own queue of writes.

use std::io;
use std::ops::Range;
use std::sync::Arc;

use super::Backend;
use crate::image::chunks::CHUNK_BYTES;
use crate::sys::uring::{Ring, Source};
use crate::sys::{ALIGNMENT, AlignedBuf, DirectFile, Mapping};

/// Writes that a lane has in flight at most.
///
/// 2000 MiB of random RAM on tmpfs to a new file on ext4, two CPUs, sync included, each run against an `fio`
/// right before it (io_uring, 1 MiB, 8 in flight, `end_fsync=1`); median of five ratios, least to most, three
/// lanes: with 4 KiB pages 2 in flight 1.13 (0.62 to 1.44), 4 1.18 (1.03 to 1.49), 8 1.22 (1.03 to 1.79); with
/// huge pages 1.30 (1.20 to 1.48), 1.40 (1.31 to 1.47), 1.50 (1.37 to 2.50). At the same 0.25 and 0.06
/// CPU-seconds per GiB for all, 8 takes twice the buffers for less than the spread.
pub(super) const DEPTH: usize = 4;

/// A worker thread's own queue of writes.
///
/// A write may come back before it is on the disk, or even before the disk knows of it; what became of
/// it is told by a later call, at the latest by [`Lane::finish`]. After an error the lane takes no more.
/// What it writes from stays where it is until the kernel is through with it, also if the lane is dropped.
#[derive(Debug)]
pub(crate) struct Lane {
    io: Arc<DirectFile>,
    /// Absent where each write is waited for.
    ring: Option<Ring>,
    /// Buffers that came back.
    spare: Vec<AlignedBuf>,
    /// The first error, until it is told.
    failed: Option<io::Error>,
}

impl Lane {
    pub(super) fn on(io: Arc<DirectFile>, backend: Backend, depth: usize) -> Self {
        let ring = match backend {
            Backend::Uring => Ring::new(Arc::clone(&io), depth)
                // The ring that was tried at the start was not refused; one too many can be.
                .inspect_err(|error| tracing::warn!(%error, "no io_uring for this thread, writing without"))
                .ok(),
            Backend::Pwrite | Backend::Buffered => None,
        };
        Self {
            io,
            ring,
            spare: Vec::new(),
            failed: None,
        }
    }

    /// Writes `range` of guest RAM from where it lies.
    ///
    /// # Errors
    ///
    /// Of this write or of an earlier one.
    pub(crate) fn write_mapped(
        &mut self,
        mapping: &Mapping,
        range: &Range<usize>,
        offset: u64,
    ) -> io::Result<()> {
        self.write(Source::mapped(mapping, range), offset)
    }

    /// A buffer for a chunk; what is in it is arbitrary.
    pub(crate) fn buffer(&mut self) -> AlignedBuf {
        self.spare
            .pop()
            .unwrap_or_else(|| AlignedBuf::zeroed(CHUNK_BYTES as usize))
    }

    /// Buffers that came back, but for one: for others, where chunks are begun by one lane's thread and
    /// completed by another's.
    pub(crate) fn surplus(&mut self) -> std::vec::Drain<'_, AlignedBuf> {
        self.spare.drain(self.spare.len().min(1)..)
    }

    /// A buffer that came back, if there is one.
    pub(crate) fn spare(&mut self) -> Option<AlignedBuf> {
        self.spare.pop()
    }

    /// Takes a buffer back that was not needed.
    pub(crate) fn give_back(&mut self, buffer: AlignedBuf) {
        self.spare.push(buffer);
    }

    /// Writes the first `length` bytes of `buffer`, and zeros up to the next multiple of 4 KiB.
    ///
    /// # Errors
    ///
    /// Of this write or of an earlier one.
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
        self.write(Source::Buffer(buffer, whole), offset)
    }

    /// Waits for all of the lane's writes.
    ///
    /// # Errors
    ///
    /// The first error that was not told yet.
    pub(crate) fn finish(&mut self) -> io::Result<()> {
        while self.ring.as_ref().is_some_and(|ring| !ring.is_idle()) {
            self.reap(1)?;
        }
        self.failed.take().map_or(Ok(()), Err)
    }

    fn write(&mut self, source: Source, offset: u64) -> io::Result<()> {
        self.reap(0)?;
        while self.ring.as_ref().is_some_and(Ring::is_full) {
            self.reap(1)?;
        }
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        match &mut self.ring {
            Some(ring) if self.io.is_direct() && offset.is_multiple_of(ALIGNMENT as u64) => {
                ring.begin(source, offset)
            }
            _ => {
                let result = source.write_from(0, &self.io, offset);
                self.take_back(source);
                result
            }
        }
    }

    /// Takes the writes that have ended, and waits for so many.
    fn reap(&mut self, wait: usize) -> io::Result<()> {
        let Some(ring) = &mut self.ring else {
            return Ok(());
        };
        for written in ring.reap(wait)? {
            if let Err(error) = written.result {
                tracing::warn!(offset = written.offset, %error, "a write failed");
                self.failed.get_or_insert(error);
            }
            self.take_back(written.source);
        }
        Ok(())
    }

    fn take_back(&mut self, source: Source) {
        if let Source::Buffer(buffer, _) = source {
            self.spare.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::os::unix::fs::FileExt;
    use std::path::Path;

    use super::*;
    use crate::sys::probe;

    fn lane_to(folder: &Path, writable: bool, backend: Backend) -> (File, Lane) {
        let path = folder.join("file");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .unwrap();
        let io = DirectFile::beside(&file, &path, writable).unwrap();
        (file, Lane::on(Arc::new(io), backend, DEPTH))
    }

    fn buffer(lane: &mut Lane, byte: u8) -> AlignedBuf {
        let mut buffer = lane.buffer();
        buffer.fill(byte);
        buffer
    }

    #[test]
    fn a_length_that_is_no_number_of_pages_is_filled_up_with_zeros() {
        for backend in [Backend::Uring, Backend::Pwrite] {
            let folder = tempfile::tempdir().unwrap();
            let (file, mut lane) = lane_to(folder.path(), true, backend);
            let bytes = buffer(&mut lane, 5);
            lane.write_buffer(bytes, 5000, 4096).unwrap();
            lane.finish().unwrap();
            let mut read = vec![0xff; 8192];
            file.read_exact_at(&mut read, 4096).unwrap();
            assert!(read[..5000].iter().all(|byte| *byte == 5));
            assert!(read[5000..].iter().all(|byte| *byte == 0));
        }
    }

    #[test]
    fn more_writes_than_fit_in_flight_go_through_with_few_buffers() {
        let folder = tempfile::tempdir().unwrap();
        let (file, mut lane) = lane_to(folder.path(), true, Backend::Uring);
        let chunk = CHUNK_BYTES as usize;
        for index in 0..20_u8 {
            let bytes = buffer(&mut lane, index);
            lane.write_buffer(bytes, chunk, u64::from(index) * chunk as u64)
                .unwrap();
        }
        lane.finish().unwrap();
        assert!(lane.spare.len() <= DEPTH + 1, "{} buffers", lane.spare.len());
        for index in 0..20_u8 {
            let mut read = vec![0xff; chunk];
            file.read_exact_at(&mut read, u64::from(index) * chunk as u64)
                .unwrap();
            assert!(read.iter().all(|byte| *byte == index));
        }
    }

    #[test]
    fn an_error_is_told_at_the_latest_by_the_end() {
        for backend in [Backend::Uring, Backend::Pwrite] {
            let folder = tempfile::tempdir().unwrap();
            let (_file, mut lane) = lane_to(folder.path(), false, backend);
            let bytes = buffer(&mut lane, 1);
            let error = lane
                .write_buffer(bytes, 4096, 0)
                .and_then(|()| lane.finish())
                .unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EBADF), "{backend}");
        }
    }

    #[test]
    fn a_lane_that_gets_no_ring_writes_without() {
        let folder = tempfile::tempdir().unwrap();
        let (file, mut lane) = probe::without_uring(|| lane_to(folder.path(), true, Backend::Uring));
        assert!(lane.ring.is_none());
        let bytes = buffer(&mut lane, 8);
        lane.write_buffer(bytes, 4096, 0).unwrap();
        lane.finish().unwrap();
        let mut read = vec![0; 4096];
        file.read_exact_at(&mut read, 0).unwrap();
        assert_eq!(read, vec![8; 4096]);
    }
}
