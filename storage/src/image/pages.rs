//! The RAM of an image as pages of a migration stream.

use std::collections::VecDeque;

use super::codec::Unpacker;
use super::{Image, ImageError, Mismatch};
use crate::migration::{PAGE_BYTES, Page, PageContent};
use crate::sys;

/// Pages of an image, read and checked chunk by chunk. Comes from [`Image::pages`].
#[derive(Debug)]
pub struct Pages<'a> {
    image: &'a Image,
    /// Chunks to come: block in the image, block in the stream, chunk.
    chunks: VecDeque<(usize, usize, usize)>,
    unpacker: Unpacker,
    ready: VecDeque<Page<'static>>,
}

impl<'a> Pages<'a> {
    pub(super) fn of(image: &'a Image, except: &[&str]) -> Result<Self, ImageError> {
        let recording = image.device_state()?;
        let mut chunks = VecDeque::new();
        for (index, (placement, count)) in image
            .layout()
            .blocks()
            .iter()
            .zip(image.chunk_counts())
            .enumerate()
        {
            if except.contains(&placement.name.as_str()) {
                continue;
            }
            let in_stream = recording
                .blocks()
                .iter()
                .position(|block| block.name == placement.name)
                .ok_or_else(|| ImageError::Mismatch {
                    block: placement.name.clone(),
                    mismatch: Mismatch::NotRecorded,
                })?;
            chunks.extend((0..count).map(|chunk| (index, in_stream, chunk)));
        }
        Ok(Self {
            image,
            chunks,
            unpacker: image.unpacker(),
            ready: VecDeque::new(),
        })
    }

    fn read(&mut self, (block, in_stream, chunk): (usize, usize, usize)) -> Result<(), ImageError> {
        let length = self.image.chunk(block, chunk).1.length;
        let (bytes, start) = self.image.read_chunk(block, chunk, &mut self.unpacker)?;
        let page = |offset, content| Page {
            block: in_stream,
            offset: start + offset,
            content,
        };
        match bytes {
            Some(bytes) => {
                let (pages, _) = bytes.as_chunks::<PAGE_BYTES>();
                self.ready.extend(pages.iter().zip(0_u64..).map(|(bytes, index)| {
                    let content = if sys::is_zero(bytes) {
                        PageContent::Zero
                    } else {
                        PageContent::Data(Box::new(*bytes).into())
                    };
                    page(index * PAGE_BYTES as u64, content)
                }));
            }
            None => {
                let offsets = (0..u64::from(length)).step_by(PAGE_BYTES);
                self.ready
                    .extend(offsets.map(|offset| page(offset, PageContent::Zero)));
            }
        }
        Ok(())
    }
}

impl Iterator for Pages<'_> {
    type Item = Result<Page<'static>, ImageError>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(page) = self.ready.pop_front() {
                return Some(Ok(page));
            }
            let chunk = self.chunks.pop_front()?;
            if let Err(error) = self.read(chunk) {
                self.chunks.clear();
                return Some(Err(error));
            }
        }
    }
}
