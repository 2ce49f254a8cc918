//! One chunk on its way: scanned, encoded, written.
//!
//! What keeps memory bounded: each worker has one chunk in its hands and so many in its lane as that has
//! writes in flight, at most one buffer of a huge page each (30 MiB for three workers); chunks that are written from
//! where they lie need none.

use std::io;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use super::ImageError;
use super::chunks::{CHUNK_BYTES, Chunk, ChunkContent, Form, Stored, chunk_length};
use super::codec::{Codec, Unpacker, Workbench};
use super::compression::Written;
use super::layout::Layout;
use crate::rate_limit::RateLimit;
use crate::sys::{self, AlignedBuf};
use crate::volume::{Lane, Volume};
use crate::{ByteCount, GuestMemory};

/// What workers that write chunks of one image share.
#[derive(Debug, Clone, Copy)]
pub(super) struct ChunkWriter<'a> {
    pub(super) volume: &'a Volume,
    pub(super) layout: &'a Layout,
    pub(super) codec: &'a Codec,
    pub(super) rate_limit: Option<&'a RateLimit>,
    /// Most that the image may need: for the message when there is no room.
    pub(super) bound: ByteCount,
    pub(super) cancelled: &'a AtomicBool,
}

/// A worker's own.
pub(super) struct Worker {
    lane: Lane,
    workbench: Workbench,
}

impl Worker {
    /// A buffer for a chunk; what is in it is arbitrary.
    pub(super) fn buffer(&mut self) -> AlignedBuf {
        self.lane.buffer()
    }

    /// Takes a buffer back that was not needed.
    pub(super) fn give_back(&mut self, buffer: AlignedBuf) {
        self.lane.give_back(buffer);
    }

    /// The worker's buffers.
    pub(super) fn lane(&mut self) -> &mut Lane {
        &mut self.lane
    }
}

/// A chunk of the layout.
#[derive(Debug, Clone, Copy)]
struct Place {
    block: usize,
    index: u64,
    /// Where it begins in its block.
    start: u64,
    length: u32,
    /// Where it lies in the image.
    offset: u64,
}

impl ChunkWriter<'_> {
    pub(super) fn worker(&self) -> Worker {
        Worker {
            lane: self.volume.lane(),
            workbench: Workbench::default(),
        }
    }

    /// Waits until all that this worker wrote is with the volume.
    pub(super) fn finish(&self, mut worker: Worker) -> Result<(), ImageError> {
        worker.lane.finish().map_err(|source| self.failed(source))
    }

    /// The same, and the worker goes on.
    pub(super) fn settle(&self, worker: &mut Worker) -> Result<(), ImageError> {
        worker.lane.finish().map_err(|source| self.failed(source))
    }

    /// Reads into `buffer` what was written for a chunk, which has to be with the volume.
    pub(super) fn read_back(
        &self,
        (block, index): (usize, u64),
        chunk: &Chunk,
        unpacker: &mut Unpacker,
        buffer: &mut AlignedBuf,
    ) -> Result<(), ImageError> {
        let ChunkContent::Stored(stored) = chunk.content else {
            buffer.fill(0);
            return Ok(());
        };
        let place = self.place(block, index);
        let failed = |why: &str| {
            let source = io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
            ImageError::io("read back", self.volume.path(), source)
        };
        let whole = (stored.length as usize).next_multiple_of(sys::ALIGNMENT);
        self.volume
            .read(&mut unpacker.stored[..whole], place.offset)
            .map_err(|source| ImageError::io("read back", self.volume.path(), source))?;
        if crc32fast::hash(&unpacker.stored[..stored.length as usize]) != stored.crc32 {
            return Err(failed("a chunk is not what was written"));
        }
        let bytes = unpacker
            .unpack(self.codec.cipher(), (block, index), &stored, place.length)
            .map_err(|_| failed("a chunk cannot be decoded"))?;
        buffer[..bytes.len()].copy_from_slice(bytes);
        Ok(())
    }

    /// Writes zeros to the place of a chunk that is zero and was not.
    pub(super) fn write_zeros(
        &self,
        worker: &mut Worker,
        (block, index): (usize, u64),
    ) -> Result<(), ImageError> {
        let place = self.place(block, index);
        let mut zeros = worker.buffer();
        zeros.fill(0);
        worker
            .lane
            .write_buffer(zeros, place.length as usize, place.offset)
            .map_err(|source| self.failed(source))
    }

    /// Writes a chunk of RAM, of which `extents` are the parts that hold anything. It goes to the disk from where
    /// it lies if that is a huge page and nothing has to be done to it. Small pages are copied together first: 256
    /// pieces of a page keep the kernel and the device busier than the copy keeps the CPU (against `fio` in the same
    /// minutes 0.85 in place and 1.32 copied, at 0.29 and 0.41 CPU-seconds per GiB; huge pages 1.28 in place, 0.94 copied). A
    /// mixture of data and holes is copied too, because a direct write would allocate the holes.
    pub(super) fn write_from(
        &self,
        worker: &mut Worker,
        (block, index): (usize, u64),
        memory: &GuestMemory,
        extents: &[Range<u64>],
    ) -> Result<Chunk, ImageError> {
        let place = self.place(block, index);
        let range = place.start..place.start + u64::from(place.length);
        let parts: Vec<_> = parts_in(extents, &range).collect();
        let Some(first) = parts.first() else {
            return Ok(place.zero());
        };
        let whole = *first == range;
        let compress = self.codec.compress_next();
        if whole && !compress && self.codec.stores_as_it_is() && memory.is_on_huge_pages() {
            return self.write_in_place(worker, place, memory, range);
        }
        if whole && memory.is_zero(range.clone()) {
            return Ok(place.zero());
        }
        let started = Instant::now();
        let mut buffer = worker
            .lane
            .spare()
            .unwrap_or_else(|| AlignedBuf::on_huge_pages(CHUNK_BYTES as usize));
        if !whole {
            buffer.fill(0);
        }
        for part in parts {
            let at = (part.start - place.start) as usize;
            memory.copy_to(part, &mut buffer, at);
        }
        self.encode(worker, place, buffer, compress, started)
    }

    /// Writes a chunk that is in a buffer of its own.
    pub(super) fn write(
        &self,
        worker: &mut Worker,
        (block, index): (usize, u64),
        buffer: AlignedBuf,
    ) -> Result<Chunk, ImageError> {
        let compress = self.codec.compress_next();
        self.encode(worker, self.place(block, index), buffer, compress, Instant::now())
    }

    /// The chunk with this index of the block with this index, as one that is zero.
    pub(super) fn zero(&self, (block, index): (usize, u64)) -> Chunk {
        self.place(block, index).zero()
    }

    fn place(&self, block: usize, index: u64) -> Place {
        let placement = &self.layout.blocks()[block];
        let start = index * u64::from(CHUNK_BYTES);
        Place {
            block,
            index,
            start,
            length: chunk_length(placement.length.0, CHUNK_BYTES, index),
            offset: placement.offset + start,
        }
    }

    fn write_in_place(
        &self,
        worker: &mut Worker,
        place: Place,
        memory: &GuestMemory,
        range: Range<u64>,
    ) -> Result<Chunk, ImageError> {
        let started = Instant::now();
        let Some(crc32) = memory.crc32_unless_zero(range.clone()) else {
            return Ok(place.zero());
        };
        let worked = started.elapsed();
        let waited = self.timed(place.length, || {
            memory.write_at(range, &mut worker.lane, place.offset)
        })?;
        let stored = Stored {
            form: Form::Raw,
            length: place.length,
            crc32,
            seal: None,
        };
        self.codec.learn(&Written {
            plain: place.length.into(),
            stored: place.length.into(),
            waited,
            worked,
            compressed: None,
        });
        Ok(place.with(stored))
    }

    fn encode(
        &self,
        worker: &mut Worker,
        place: Place,
        buffer: AlignedBuf,
        compress: bool,
        started: Instant,
    ) -> Result<Chunk, ImageError> {
        let length = place.length as usize;
        if sys::is_zero(&buffer[..length]) {
            worker.give_back(buffer);
            return Ok(place.zero());
        }
        let Worker { lane, workbench } = worker;
        let encoded = self.codec.encode(
            workbench,
            (place.block, place.index),
            (buffer, length),
            compress,
            || lane.buffer(),
        );
        let (encoded, left_over) = encoded.map_err(|error| self.failed(io::Error::other(error)))?;
        if let Some(buffer) = left_over {
            lane.give_back(buffer);
        }
        let compressed = encoded.compressed;
        let worked = started.elapsed().saturating_sub(compressed.unwrap_or_default());
        let stored = encoded.stored;
        let waited = self.timed(stored.length, || {
            lane.write_buffer(encoded.buffer, stored.length as usize, place.offset)
        })?;
        self.codec.learn(&Written {
            plain: place.length.into(),
            stored: stored.length.into(),
            waited,
            worked,
            compressed,
        });
        Ok(place.with(stored))
    }

    /// Writes when the rate limit lets it; tells how long both took.
    fn timed(&self, bytes: u32, write: impl FnOnce() -> io::Result<()>) -> Result<Duration, ImageError> {
        let started = Instant::now();
        let admitted = self
            .rate_limit
            .is_none_or(|limit| limit.wait(bytes.into(), self.cancelled));
        if !admitted {
            return Err(ImageError::Cancelled);
        }
        write().map_err(|source| self.failed(source))?;
        Ok(started.elapsed())
    }

    fn failed(&self, source: io::Error) -> ImageError {
        self.volume.failed("write", self.bound, source)
    }
}

impl Place {
    fn zero(self) -> Chunk {
        Chunk {
            length: self.length,
            content: ChunkContent::Zero,
        }
    }

    fn with(self, stored: Stored) -> Chunk {
        Chunk {
            length: self.length,
            content: ChunkContent::Stored(stored),
        }
    }
}

/// The parts of `range` that lie in `extents`, which are in order and apart.
fn parts_in<'a>(extents: &'a [Range<u64>], range: &'a Range<u64>) -> impl Iterator<Item = Range<u64>> + 'a {
    let first = extents.partition_point(|extent| extent.end <= range.start);
    extents[first..]
        .iter()
        .take_while(|extent| extent.start < range.end)
        .map(|extent| extent.start.max(range.start)..extent.end.min(range.end))
}
