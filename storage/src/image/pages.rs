//! The RAM of an image as pages of a migration stream.

use std::collections::VecDeque;

use super::codec::Unpacker;
use super::precopy::{Place, places};
use super::{Image, ImageError};
use crate::migration::{PAGE_BYTES, Page, PageContent};
use crate::sys;

/// Pages of an image, read and checked chunk by chunk. Comes from [`Image::pages`].
#[derive(Debug)]
pub struct Pages<'a> {
    image: &'a Image,
    /// Chunks to come.
    chunks: VecDeque<Place>,
    unpacker: Unpacker,
    ready: VecDeque<Page<'static>>,
}

impl<'a> Pages<'a> {
    pub(super) fn of(image: &'a Image, except: &[&str]) -> Result<Self, ImageError> {
        let recording = image.device_state()?;
        let chunks = places(image, &recording, except)?.into();
        Ok(Self {
            image,
            chunks,
            unpacker: image.unpacker(),
            ready: VecDeque::new(),
        })
    }

    fn read(&mut self, (block, in_stream, chunk): Place) -> Result<(), ImageError> {
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
