//! RAM of a guest that runs while it is saved: pages come again and again, and the last of each counts.
//!
//! ```text
//!  page, its chunk not put yet ──► the open chunk ──── all pages came, or another chunk is begun ──► put
//!  page, its chunk put before ───► later: the last content of each page, in memory
//!                                     └─ more than LATER_LIMIT, or the end ──► amend: chunk read, pages laid over it,
//!                                                                             encoded anew, written to the same place
//! ```
//!
//! What is guaranteed:
//!
//! * A page that comes twice overwrites itself: every chunk has one place, and the image does not grow.
//! * A chunk that is written again has a CRC of its own, and a nonce of its own if it is encrypted. One that became zero is
//!   written as zeros, so that its place reads as what it is.
//! * Memory is bounded: one chunk, what the lane has in flight, and [`LATER_LIMIT`] pages.
//! * What is left of `later` at the end is amended by who completes the image: the guest need not stand still for it.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use super::chunk_writer::{ChunkWriter, Worker};
use super::chunks::{CHUNK_BYTES, Chunk, ChunkContent, chunk_count};
use super::codec::Unpacker;
use super::{ImageError, Mismatch};
use crate::migration::{PAGE_BYTES, PageSink, ReceiveError, StreamBlock};
use crate::sys::AlignedBuf;
use crate::{ByteCount, Progress};

/// So many pages that came again are kept in memory: 256 MiB, half a second of a fast disk's writing, which is more than a
/// guest may be paused for.
pub(super) const LATER_LIMIT: usize = 65_536;

const CHUNK_PAGES: u64 = CHUNK_BYTES as u64 / PAGE_BYTES as u64;

/// What became of each chunk, by block; `None` while it was not put.
pub(super) type Chunks = Vec<Vec<Option<Chunk>>>;

/// Pages that came after their chunks were put, by block and number: the last content of each, `None` for zeros.
#[derive(Debug, Default)]
pub(super) struct Later {
    pages: BTreeMap<(usize, u64), Option<Box<[u8; PAGE_BYTES]>>>,
}

impl Later {
    pub(super) fn is_empty(&self) -> bool {
        self.pages.is_empty()
    }
}

/// Takes the pages of a guest that runs.
pub(super) struct Live<'a> {
    writer: ChunkWriter<'a>,
    worker: Worker,
    progress: &'a Progress,
    /// Where each block of the stream is in the layout.
    places: Vec<usize>,
    /// Which pages came, by block of the layout.
    came: Vec<Vec<bool>>,
    chunks: Chunks,
    open: Option<Open>,
    later: Later,
    later_limit: usize,
}

/// The chunk whose pages come for the first time.
struct Open {
    block: usize,
    chunk: u64,
    /// If it has data.
    buffer: Option<AlignedBuf>,
    /// Pages that are to come.
    missing: u64,
}

impl<'a> Live<'a> {
    pub(super) fn by(writer: ChunkWriter<'a>, progress: &'a Progress, later_limit: usize) -> Self {
        let blocks = writer.layout.blocks();
        let pages = |length: ByteCount| (length.0 / PAGE_BYTES as u64) as usize;
        Self {
            worker: writer.worker(),
            progress,
            places: Vec::new(),
            came: (blocks.iter())
                .map(|block| vec![false; pages(block.length)])
                .collect(),
            chunks: (blocks.iter())
                .map(|block| vec![None; chunk_count(block.length, CHUNK_BYTES) as usize])
                .collect(),
            open: None,
            later: Later::default(),
            later_limit,
            writer,
        }
    }

    /// The chunks as they were put, and what is still to be laid over them.
    pub(super) fn finish(mut self) -> Result<(Chunks, Later), ImageError> {
        self.close()?;
        for (block, came) in self.writer.layout.blocks().iter().zip(&self.came) {
            let found = came.iter().filter(|came| **came).count() as u64;
            let needed = came.len() as u64;
            if found != needed {
                return Err(ImageError::Mismatch {
                    block: block.name.clone(),
                    mismatch: Mismatch::PagesMissing { found, needed },
                });
            }
        }
        self.writer.finish(self.worker)?;
        Ok((self.chunks, self.later))
    }

    /// Where a page goes: `Some` into the open chunk, at this offset; `None`: it comes again.
    fn place(&mut self, block: usize, page: u64) -> Result<Option<usize>, ImageError> {
        self.progress.advance(PAGE_BYTES as u64);
        let chunk = page / CHUNK_PAGES;
        let is_new = !std::mem::replace(&mut self.came[block][page as usize], true);
        if self.chunks[block][chunk as usize].is_some() {
            return Ok(None);
        }
        let is_open = |open: &Open| (open.block, open.chunk) == (block, chunk);
        if !self.open.as_ref().is_some_and(is_open) {
            self.close()?;
            let pages = self.came[block].len() as u64 - chunk * CHUNK_PAGES;
            self.open = Some(Open {
                block,
                chunk,
                buffer: None,
                missing: pages.min(CHUNK_PAGES),
            });
        }
        if let Some(open) = self.open.as_mut().filter(|_| is_new) {
            open.missing -= 1;
        }
        Ok(Some((page % CHUNK_PAGES) as usize * PAGE_BYTES))
    }

    /// Puts the open chunk, with zeros for what did not come: that comes later, or the save fails.
    fn close(&mut self) -> Result<(), ImageError> {
        let Some(Open {
            block, chunk, buffer, ..
        }) = self.open.take()
        else {
            return Ok(());
        };
        let put = match buffer {
            None => self.writer.zero((block, chunk)),
            Some(buffer) => self.writer.write(&mut self.worker, (block, chunk), buffer)?,
        };
        self.chunks[block][chunk as usize] = Some(put);
        Ok(())
    }

    fn close_if_whole(&mut self) -> Result<(), ImageError> {
        match &self.open {
            Some(Open { missing: 0, .. }) => self.close(),
            _ => Ok(()),
        }
    }

    fn amend_if_many(&mut self) -> Result<(), ImageError> {
        if self.later.pages.len() < self.later_limit {
            return Ok(());
        }
        let later = std::mem::take(&mut self.later);
        amend(&self.writer, &mut self.worker, later, &mut self.chunks)
    }
}

impl PageSink for Live<'_> {
    type Error = ImageError;

    fn blocks(&mut self, blocks: &[StreamBlock]) -> Result<(), ImageError> {
        self.places = self.writer.layout.places_of(blocks)?;
        Ok(())
    }

    fn zero(&mut self, block: usize, offset: u64) -> Result<(), ImageError> {
        let (block, page) = (self.places[block], offset / PAGE_BYTES as u64);
        match self.place(block, page)? {
            Some(at) => {
                if let Some(buffer) = self.open.as_mut().and_then(|open| open.buffer.as_mut()) {
                    buffer[at..at + PAGE_BYTES].fill(0);
                }
                self.close_if_whole()
            }
            None => {
                self.later.pages.insert((block, page), None);
                self.amend_if_many()
            }
        }
    }

    fn data(
        &mut self,
        block: usize,
        offset: u64,
        fill: impl FnOnce(&mut [u8; PAGE_BYTES]) -> Result<(), ReceiveError<ImageError>>,
    ) -> Result<(), ReceiveError<ImageError>> {
        let (block, page) = (self.places[block], offset / PAGE_BYTES as u64);
        let place = self.place(block, page).map_err(ReceiveError::Sink)?;
        if let (Some(at), Some(open)) = (place, &mut self.open) {
            let worker = &mut self.worker;
            let buffer = open.buffer.get_or_insert_with(|| {
                let mut buffer = worker.buffer();
                buffer.fill(0);
                buffer
            });
            if let Some(bytes) = buffer[at..at + PAGE_BYTES].first_chunk_mut() {
                fill(bytes)?;
            }
            return self.close_if_whole().map_err(ReceiveError::Sink);
        }
        let later = self.later.pages.entry((block, page)).or_default();
        fill(later.get_or_insert_with(|| Box::new([0; PAGE_BYTES])))?;
        self.amend_if_many().map_err(ReceiveError::Sink)
    }
}

/// Lays pages over chunks that were put, each of which is read, encoded anew, and written to its place.
pub(super) fn amend(
    writer: &ChunkWriter<'_>,
    worker: &mut Worker,
    later: Later,
    chunks: &mut Chunks,
) -> Result<(), ImageError> {
    let mut unpacker = Unpacker::new(CHUNK_BYTES);
    let mut pages = later.pages.into_iter().peekable();
    // What was put is read, so it has to be there.
    writer.settle(worker)?;
    while let Some(((block, page), _)) = pages.peek() {
        let (block, chunk) = (*block, page / CHUNK_PAGES);
        let Some(amended) = &mut chunks[block][chunk as usize] else {
            // Only pages of chunks that were put come again.
            break;
        };
        let mut buffer = worker.buffer();
        writer.read_back((block, chunk), amended, &mut unpacker, &mut buffer)?;
        let is_here = |((of, page), _): &((usize, u64), _)| (*of, page / CHUNK_PAGES) == (block, chunk);
        while let Some(((_, page), content)) = pages.next_if(is_here) {
            let at = (page % CHUNK_PAGES) as usize * PAGE_BYTES;
            match content {
                Some(bytes) => buffer[at..at + PAGE_BYTES].copy_from_slice(&bytes[..]),
                None => buffer[at..at + PAGE_BYTES].fill(0),
            }
        }
        let before = *amended;
        *amended = writer.write(worker, (block, chunk), buffer)?;
        if matches!(amended.content, ChunkContent::Zero) && !matches!(before.content, ChunkContent::Zero) {
            writer.write_zeros(worker, (block, chunk))?;
        }
    }
    Ok(())
}
