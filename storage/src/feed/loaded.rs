//! A unit's memory, read and checked.

use super::blocks::{Blocks, Unit};
use crate::image::Unpacker;
use crate::migration::{PAGE_BYTES, Page, PageContent};
use crate::{Image, ImageError, sys};

/// What one thread reads units into.
pub(super) struct Loaded {
    chunks: Vec<(Unpacker, bool)>,
    unit: Option<Unit>,
    chunk_pages: usize,
}

impl Loaded {
    pub(super) fn new(image: &Image, blocks: &Blocks) -> Self {
        let chunks = (0..blocks.unit_chunks()).map(|_| (image.unpacker(), false));
        Self {
            chunks: chunks.collect(),
            unit: None,
            chunk_pages: blocks.chunk_pages,
        }
    }

    /// Reads a unit, unless it is here already. On failure tells the first page of the chunk that it was.
    pub(super) fn read(
        &mut self,
        image: &Image,
        blocks: &Blocks,
        unit: Unit,
    ) -> Result<(), (usize, ImageError)> {
        if self.unit == Some(unit) {
            return Ok(());
        }
        self.unit = None;
        let in_image = blocks.blocks[unit.block].in_image;
        let first = unit.first_page / self.chunk_pages;
        for (index, (unpacker, holds_data)) in self.chunks.iter_mut().enumerate() {
            let page = index * self.chunk_pages;
            if page >= unit.pages {
                break;
            }
            let (bytes, _) = image
                .read_chunk(in_image, first + index, unpacker)
                .map_err(|error| (unit.first_page + page, error))?;
            *holds_data = bytes.is_some();
        }
        self.unit = Some(unit);
        Ok(())
    }

    /// Whether a unit that was read last holds anything but zeros.
    pub(super) fn holds_data(&self, unit: Unit) -> bool {
        let chunks = unit.pages.div_ceil(self.chunk_pages);
        self.chunks[..chunks].iter().any(|(_, holds_data)| *holds_data)
    }

    /// Whether a page of the unit that was read last is zero.
    pub(super) fn is_zero(&self, unit: Unit, page: usize) -> bool {
        matches!(self.page(unit, page).content, PageContent::Zero)
    }

    /// A page of the unit that was read last, by its number in the block.
    pub(super) fn page(&self, unit: Unit, page: usize) -> Page<'_> {
        let within = page - unit.first_page;
        let (unpacker, holds_data) = &self.chunks[within / self.chunk_pages];
        let start = within % self.chunk_pages * PAGE_BYTES;
        let bytes = unpacker.unpacked()[start..].first_chunk::<PAGE_BYTES>();
        let content = match bytes {
            Some(bytes) if *holds_data && !sys::is_zero(bytes) => PageContent::Data(bytes.into()),
            _ => PageContent::Zero,
        };
        Page {
            block: unit.block,
            offset: page as u64 * PAGE_BYTES as u64,
            content,
        }
    }
}
