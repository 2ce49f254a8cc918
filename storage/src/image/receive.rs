//! RAM that comes over sockets, into an image.

use std::sync::{Mutex, PoisonError};

use super::chunk_writer::{ChunkWriter, Worker};
use super::chunks::{CHUNK_BYTES, Chunk, chunk_count};
use super::writer::written;
use super::{ImageError, ImageWriter, MemoryWritten};
use crate::incoming::{ChunkSink, Incoming};
use crate::migration::Recording;
use crate::sys::AlignedBuf;
use crate::{ByteCount, Run};

impl ImageWriter {
    /// Receives all blocks over the connections of a migration: blocking, with a thread for each of
    /// them. What follows RAM in the stream must not be longer than `tail_bound`.
    ///
    /// # Errors
    ///
    /// [`ImageError::Incoming`] if what comes is not a migration of this guest, or not all of it;
    /// [`ImageError::Mismatch`] if the stream has other blocks, or a block was written before;
    /// [`ImageError::Cancelled`]; [`ImageError::NoSpace`] and [`ImageError::Io`] from the disk.
    pub fn write_incoming(
        &mut self,
        incoming: Incoming,
        tail_bound: ByteCount,
        run: &Run<'_>,
    ) -> Result<(Recording, MemoryWritten), ImageError> {
        let blocks = self.layout.blocks().to_vec();
        for block in &blocks {
            self.block_to_write(&block.name, block.length)?;
        }
        let chunks = blocks
            .iter()
            .map(|block| vec![None; chunk_count(block.length, CHUNK_BYTES) as usize]);
        let sink = Sink {
            writer: self.chunk_writer(run.cancelled),
            chunks: Mutex::new(chunks.collect()),
        };
        let recording = incoming.receive(&self.layout, tail_bound, &sink, run)?;
        let chunks = sink.chunks.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut total = MemoryWritten::default();
        for (index, chunks) in chunks.into_iter().enumerate() {
            // All were put, or receiving had failed.
            let chunks: Vec<Chunk> = chunks.into_iter().flatten().collect();
            let part = written(&chunks);
            total.data += part.data;
            total.stored += part.stored;
            total.zero += part.zero;
            self.chunks[index] = Some(chunks);
        }
        Ok((recording, total))
    }
}

/// The image, for whoever completes a chunk.
struct Sink<'a> {
    writer: ChunkWriter<'a>,
    /// By block and chunk.
    chunks: Mutex<Vec<Vec<Option<Chunk>>>>,
}

impl ChunkSink for Sink<'_> {
    type Lane = Worker;

    fn lane(&self) -> Worker {
        self.writer.worker()
    }

    fn buffer(&self, worker: &mut Worker) -> AlignedBuf {
        worker.buffer()
    }

    fn put(
        &self,
        worker: &mut Worker,
        block: usize,
        chunk: u64,
        content: Option<AlignedBuf>,
    ) -> Result<(), ImageError> {
        let place = (block, chunk);
        let written = match content {
            None => self.writer.zero(place),
            Some(buffer) => self.writer.write(worker, place, buffer)?,
        };
        let mut chunks = self.chunks.lock().unwrap_or_else(PoisonError::into_inner);
        chunks[block][chunk as usize] = Some(written);
        Ok(())
    }

    fn finish(&self, worker: Worker) -> Result<(), ImageError> {
        self.writer.finish(worker)
    }
}
