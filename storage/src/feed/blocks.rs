//! The RAM blocks of a feed, and the units that their pages go in.

use super::FeedError;
use crate::Image;
use crate::Recording;
use crate::migration::PAGE_BYTES;

/// The largest page of memory that is fed: it has to be in memory whole, once for each thread.
const HOST_PAGE_LIMIT: u64 = 32 << 20;

/// A RAM block.
#[derive(Debug)]
pub(super) struct Block {
    pub name: String,
    pub in_image: usize,
    pub pages: usize,
    /// How many pages QEMU takes only together: the page size of the block's memory.
    pub together: usize,
}

/// Some chunks of a block, as many as are read at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Unit {
    /// The block, by its index in the stream.
    pub block: usize,
    pub first_page: usize,
    pub pages: usize,
}

/// All blocks, in the stream's order.
#[derive(Debug)]
pub(super) struct Blocks {
    pub blocks: Vec<Block>,
    pub chunk_pages: usize,
}

impl Blocks {
    /// `page_bytes`: the page size of a block's memory by its name.
    pub(super) fn of(
        image: &Image,
        recording: &Recording,
        page_bytes: impl Fn(&str) -> Option<u64>,
    ) -> Result<Self, FeedError> {
        let mismatch = |block: &str, why: String| FeedError::Mismatch(format!("RAM block {block}: {why}"));
        let mut blocks = Vec::new();
        for block in recording.blocks() {
            let name = &block.name;
            let in_image = image
                .layout()
                .index_of(name)
                .ok_or_else(|| mismatch(name, "it is not in the image".to_owned()))?;
            let length = image.layout().blocks()[in_image].length;
            if length < block.used_length {
                let why = format!("{} of {} are in the image", length, block.used_length);
                return Err(mismatch(name, why));
            }
            let host_page = page_bytes(name)
                .ok_or_else(|| mismatch(name, "QEMU does not tell its page size".to_owned()))?;
            let is_usable = host_page.is_power_of_two()
                && (PAGE_BYTES as u64..=HOST_PAGE_LIMIT).contains(&host_page)
                && block.used_length.0.is_multiple_of(host_page);
            if !is_usable {
                let why = format!(
                    "its memory is in pages of {host_page} bytes, and up to {HOST_PAGE_LIMIT} bytes are fed whole"
                );
                return Err(mismatch(name, why));
            }
            blocks.push(Block {
                name: name.clone(),
                in_image,
                pages: (block.used_length.0 / PAGE_BYTES as u64) as usize,
                together: (host_page / PAGE_BYTES as u64) as usize,
            });
        }
        Ok(Self {
            blocks,
            chunk_pages: image.chunk_bytes() as usize / PAGE_BYTES,
        })
    }

    pub(super) fn pages(&self) -> usize {
        self.blocks.iter().map(|block| block.pages).sum()
    }

    pub(super) fn index_of(&self, name: &str) -> Option<usize> {
        self.blocks.iter().position(|block| block.name == name)
    }

    /// The page size of each block's memory.
    pub(super) fn page_size_of_each(&self) -> Vec<u64> {
        let sizes = self.blocks.iter().map(|block| block.together * PAGE_BYTES);
        sizes.map(|size| size as u64).collect()
    }

    /// All page sizes, ORed.
    pub(super) fn page_sizes(&self) -> u64 {
        let sizes = self.page_size_of_each().into_iter();
        sizes.fold(0, |all, size| all | size)
    }

    /// The unit that a page is in; `None` if there is no such page.
    pub(super) fn unit_at(&self, block: usize, page: usize) -> Option<Unit> {
        let found = self.blocks.get(block).filter(|found| page < found.pages)?;
        let pages = self.chunk_pages.max(found.together);
        let first_page = page / pages * pages;
        Some(Unit {
            block,
            first_page,
            pages: pages.min(found.pages - first_page),
        })
    }

    /// All units of all blocks.
    pub(super) fn units(&self) -> Vec<Unit> {
        let mut units = Vec::new();
        for block in 0..self.blocks.len() {
            let mut page = 0;
            while let Some(unit) = self.unit_at(block, page) {
                units.push(unit);
                page += unit.pages;
            }
        }
        units
    }

    /// How many chunks the largest unit has.
    pub(super) fn unit_chunks(&self) -> usize {
        let largest = self.blocks.iter().map(|block| block.together).max();
        largest.unwrap_or(1).div_ceil(self.chunk_pages)
    }
}
