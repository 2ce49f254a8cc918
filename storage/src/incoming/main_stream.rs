//! The main stream: what a guest is apart from its memory, and the pages that do not come by
//! channels.

use std::io::Read;
use std::sync::Arc;

use super::assembly::{Feeder, Part};
use super::channel::socket;
use super::connection::Connection;
use super::error::IncomingError;
use super::page_set::{PageSet, place};
use super::sink::ChunkSink;
use crate::ByteCount;
use crate::image::ImageError;
use crate::migration::{self, PAGE_BYTES, PageSink, ReceiveError, Recording, StreamBlock};
use crate::sys::PagedBuf;

/// Receives the stream, of which `begun` came already, to its end. What follows RAM must not be
/// longer than `tail_bound`.
pub(super) fn receive<S: ChunkSink>(
    begun: [u8; 4],
    connection: Connection<'_>,
    tail_bound: ByteCount,
    feeder: Feeder<'_, S>,
) -> Result<Recording, ImageError> {
    let mut pages = Pages {
        feeder,
        places: Vec::new(),
        current: None,
    };
    let recording = migration::receive(begun.chain(connection), tail_bound, &mut pages).map_err(told)?;
    pages.flush()?;
    pages.feeder.finish()?;
    Ok(recording)
}

pub(super) fn told(error: ReceiveError<ImageError>) -> ImageError {
    match error {
        ReceiveError::Io(error) => socket(error),
        ReceiveError::Stream(error) => IncomingError::from(error).into(),
        ReceiveError::Sink(error) => error,
    }
}

/// Pages one by one, gathered by chunk, so that the lock is taken once for each chunk and not for each
/// page.
struct Pages<'a, S: ChunkSink> {
    feeder: Feeder<'a, S>,
    /// Where each block of the stream is in the layout.
    places: Vec<usize>,
    current: Option<Current>,
}

/// The chunk that pages are coming for.
struct Current {
    block: usize,
    part: Part,
    /// Pages that came before, by other ways.
    came: PageSet,
    /// If it has data.
    buffer: Option<Arc<PagedBuf>>,
}

impl<S: ChunkSink> Pages<'_, S> {
    /// Goes to the chunk of a page that comes now, and returns the page's place in it.
    fn turn_to(&mut self, block: usize, offset: u64) -> Result<usize, ImageError> {
        let block = self.places[block];
        let (chunk, page) = place(offset);
        let is_current = |current: &Current| (current.block, current.part.chunk) == (block, chunk);
        if !self.current.as_ref().is_some_and(is_current) {
            self.flush()?;
            self.current = Some(Current {
                block,
                part: Part {
                    chunk,
                    ..Part::default()
                },
                came: self.feeder.came(block, chunk),
                buffer: None,
            });
        }
        Ok(page)
    }

    /// Takes a page down as come, and puts the chunk if it was the last.
    fn take_down(&mut self, page: usize, is_data: bool) -> Result<(), ImageError> {
        let Some(current) = &mut self.current else {
            return Ok(());
        };
        let part = &mut current.part;
        let before = current.came.or(part.data).or(part.zero);
        if before.contains(page) {
            return Err(self.feeder.again(current.block, part.chunk, page));
        }
        let set = if is_data { &mut part.data } else { &mut part.zero };
        set.insert(page);
        if before.len() + 1 == self.feeder.pages_of(current.block, part.chunk) {
            return self.flush();
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), ImageError> {
        let Some(Current {
            block, part, buffer, ..
        }) = self.current.take()
        else {
            return Ok(());
        };
        // Before the pages are told to be there, so that whoever completes the chunk has it alone.
        drop(buffer);
        self.feeder.commit(block, &[part], 0)
    }
}

impl<S: ChunkSink> PageSink for Pages<'_, S> {
    type Error = ImageError;

    fn blocks(&mut self, blocks: &[StreamBlock]) -> Result<(), ImageError> {
        self.places = self.feeder.list(blocks)?;
        Ok(())
    }

    fn zero(&mut self, block: usize, offset: u64) -> Result<(), ImageError> {
        let page = self.turn_to(block, offset)?;
        self.take_down(page, false)
    }

    fn data(
        &mut self,
        block: usize,
        offset: u64,
        fill: impl FnOnce(&mut [u8; PAGE_BYTES]) -> Result<(), ReceiveError<ImageError>>,
    ) -> Result<(), ReceiveError<ImageError>> {
        let page = self.turn_to(block, offset).map_err(ReceiveError::Sink)?;
        let Some(Current {
            block, part, buffer, ..
        }) = &mut self.current
        else {
            return Ok(());
        };
        if buffer.is_none() {
            let opened = self.feeder.open_one(*block, part.chunk);
            *buffer = Some(opened.map_err(ReceiveError::Sink)?);
        }
        let bytes = buffer.as_ref().and_then(|buffer| buffer.claim(page, 1));
        let Some(bytes) = bytes.and_then(|bytes| bytes.first_chunk_mut()) else {
            let again = self.feeder.again(*block, part.chunk, page);
            return Err(ReceiveError::Sink(again));
        };
        fill(bytes)?;
        self.take_down(page, true).map_err(ReceiveError::Sink)
    }
}
