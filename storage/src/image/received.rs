//! The image as the place where chunks go that come over connections.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use super::ImageError;
use super::chunk_writer::{ChunkWriter, Worker};
use super::chunks::{CHUNK_BYTES, Chunk, chunk_count};
use crate::incoming::ChunkSink;
use crate::sys::AlignedBuf;

/// So many buffers are on huge pages, which a device takes faster; a guest whose pages come in order needs less than twenty.
/// More are for memory that comes from everywhere at once, and small: a huge page holds two.
const ON_HUGE_PAGES: usize = 64;

/// Writes whole chunks of all blocks, in whatever order they come, and remembers what became of them.
pub(super) struct Received<'a> {
    writer: ChunkWriter<'a>,
    /// Buffers whose chunks were written. Who completes a chunk is often not who begins one: without
    /// this, buffers would pile up with the one while the other makes new ones.
    pool: Mutex<Vec<AlignedBuf>>,
    /// Buffers that were made.
    made: AtomicUsize,
    /// By block and index.
    chunks: Mutex<Vec<Vec<Option<Chunk>>>>,
}

/// A thread's own part.
pub(super) struct ReceivingLane {
    worker: Worker,
    written: Vec<(usize, u64, Chunk)>,
}

impl<'a> Received<'a> {
    pub(super) fn by(writer: ChunkWriter<'a>) -> Self {
        let blocks = writer.layout.blocks().iter();
        let chunks = blocks.map(|block| vec![None; chunk_count(block.length, CHUNK_BYTES) as usize]);
        Self {
            chunks: Mutex::new(chunks.collect()),
            pool: Mutex::default(),
            made: AtomicUsize::new(0),
            writer,
        }
    }

    /// What was written, by block: `None` for a block of which a chunk is missing.
    pub(super) fn into_chunks(self) -> Vec<Option<Vec<Chunk>>> {
        let chunks = self.chunks.into_inner().unwrap_or_else(PoisonError::into_inner);
        chunks
            .into_iter()
            .map(|of_block| of_block.into_iter().collect())
            .collect()
    }
}

impl ChunkSink for Received<'_> {
    type Lane = ReceivingLane;

    fn lane(&self) -> ReceivingLane {
        ReceivingLane {
            worker: self.writer.worker(),
            written: Vec::new(),
        }
    }

    fn buffer(&self, lane: &mut ReceivingLane) -> AlignedBuf {
        let own = lane.worker.lane().spare();
        own.or_else(|| self.pool.lock().unwrap_or_else(PoisonError::into_inner).pop())
            .unwrap_or_else(|| {
                if self.made.fetch_add(1, Ordering::Relaxed) < ON_HUGE_PAGES {
                    AlignedBuf::on_huge_pages(CHUNK_BYTES as usize)
                } else {
                    lane.worker.buffer()
                }
            })
    }

    fn put(
        &self,
        lane: &mut ReceivingLane,
        block: usize,
        chunk: u64,
        content: Option<AlignedBuf>,
    ) -> Result<(), ImageError> {
        let written = match content {
            None => self.writer.zero((block, chunk)),
            Some(buffer) => self.writer.write(&mut lane.worker, (block, chunk), buffer)?,
        };
        lane.written.push((block, chunk, written));
        let surplus = lane.worker.lane().surplus();
        if surplus.len() > 0 {
            self.pool
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .extend(surplus);
        }
        Ok(())
    }

    fn finish(&self, lane: ReceivingLane) -> Result<(), ImageError> {
        self.writer.finish(lane.worker)?;
        let mut chunks = self.chunks.lock().unwrap_or_else(PoisonError::into_inner);
        for (block, chunk, written) in lane.written {
            chunks[block][chunk as usize] = Some(written);
        }
        Ok(())
    }
}
