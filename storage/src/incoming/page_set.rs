//! Which pages of a chunk.

use crate::migration::PAGE_BYTES;
use crate::sys::PagedBuf;

/// Pages in a chunk that is not the last of its block.
pub(super) const CHUNK_PAGES: usize = PagedBuf::PAGES;

/// Length of such a chunk.
pub(super) const CHUNK_BYTES: u64 = (CHUNK_PAGES * PAGE_BYTES) as u64;

const WORD_PAGES: usize = u64::BITS as usize;

/// A set of pages of one chunk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct PageSet(pub(super) [u64; CHUNK_PAGES / WORD_PAGES]);

impl PageSet {
    pub(super) fn contains(&self, page: usize) -> bool {
        self.0[page / WORD_PAGES] & (1 << (page % WORD_PAGES)) != 0
    }

    /// Whether the page was not there before.
    pub(super) fn insert(&mut self, page: usize) -> bool {
        let new = !self.contains(page);
        self.0[page / WORD_PAGES] |= 1 << (page % WORD_PAGES);
        new
    }

    pub(super) fn remove(&mut self, page: usize) {
        self.0[page / WORD_PAGES] &= !(1 << (page % WORD_PAGES));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0 == Self::default().0
    }

    pub(super) fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// The first page.
    pub(super) fn first(&self) -> Option<usize> {
        let mut words = self.0.iter().enumerate();
        words.find_map(|(index, word)| {
            (*word != 0).then(|| index * WORD_PAGES + word.trailing_zeros() as usize)
        })
    }

    pub(super) fn or(self, other: Self) -> Self {
        Self(std::array::from_fn(|word| self.0[word] | other.0[word]))
    }

    pub(super) fn and(self, other: Self) -> Self {
        Self(std::array::from_fn(|word| self.0[word] & other.0[word]))
    }
}

/// Which chunk a page at `offset` is in, and where there.
pub(super) fn place(offset: u64) -> (usize, usize) {
    let page = (offset / PAGE_BYTES as u64) as usize;
    (page / CHUNK_PAGES, page % CHUNK_PAGES)
}

/// How many pages the chunk with this index has in a block of `block_pages`.
pub(super) fn pages_in(block_pages: u64, chunk: usize) -> usize {
    let before = chunk as u64 * CHUNK_PAGES as u64;
    block_pages.saturating_sub(before).min(CHUNK_PAGES as u64) as usize
}
