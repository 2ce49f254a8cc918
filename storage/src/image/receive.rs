//! RAM that comes over sockets, into the image.

use std::sync::{Mutex, PoisonError};

use super::chunks::{CHUNK_BYTES, Chunk, ChunkContent, chunk_count, chunk_length};
use super::writer::written;
use super::{ImageError, ImageWriter, MemoryWritten};
use crate::incoming::{ChunkSink, Incoming};
use crate::migration::Recording;
use crate::sys::{self, AlignedBuf};
use crate::volume::Lane;
use crate::{ByteCount, Run};

impl ImageWriter {
    /// Receives all blocks over the connections of a migration.
    ///
    /// # Errors
    ///
    /// Those of receiving and of writing.
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
            .map(|block| vec![None; chunk_count(block.length, CHUNK_BYTES) as usize])
            .collect();
        let sink = Sink {
            writer: self,
            chunks: Mutex::new(chunks),
        };
        let recording = incoming.receive(&self.layout, tail_bound, &sink, run)?;
        let chunks: Vec<Vec<Option<Chunk>>> = sink.chunks.into_inner().unwrap_or_else(PoisonError::into_inner);
        let mut total = MemoryWritten::default();
        for (index, chunks) in chunks.into_iter().enumerate() {
            let chunks: Vec<Chunk> = chunks.into_iter().flatten().collect();
            let part = written(&chunks);
            total.data += part.data;
            total.zero += part.zero;
            self.chunks[index] = Some(chunks);
        }
        Ok((recording, total))
    }
}

struct Sink<'a> {
    writer: &'a ImageWriter,
    chunks: Mutex<Vec<Vec<Option<Chunk>>>>,
}

impl ChunkSink for Sink<'_> {
    type Lane = Lane;

    fn lane(&self) -> Lane {
        self.writer.volume.lane()
    }

    fn buffer(&self, lane: &mut Lane) -> AlignedBuf {
        lane.buffer()
    }

    fn put(
        &self,
        lane: &mut Lane,
        block: usize,
        chunk: u64,
        content: Option<AlignedBuf>,
    ) -> Result<(), ImageError> {
        let placement = &self.writer.layout.blocks()[block];
        let length = chunk_length(placement.length.0, CHUNK_BYTES, chunk);
        let content = match content {
            Some(buffer) if sys::is_zero(&buffer[..length as usize]) => {
                lane.give_back(buffer);
                ChunkContent::Zero
            }
            None => ChunkContent::Zero,
            Some(buffer) => {
                let crc32 = crc32fast::hash(&buffer[..length as usize]);
                let offset = placement.offset + chunk * u64::from(CHUNK_BYTES);
                lane.write_buffer(buffer, length as usize, offset)
                    .map_err(|source| self.writer.failed("write", source))?;
                ChunkContent::Data { crc32 }
            }
        };
        let mut chunks = self.chunks.lock().unwrap_or_else(PoisonError::into_inner);
        chunks[block][chunk as usize] = Some(Chunk { content, length });
        Ok(())
    }

    fn finish(&self, mut lane: Lane) -> Result<(), ImageError> {
        lane.finish().map_err(|source| self.writer.failed("write", source))
    }
}
