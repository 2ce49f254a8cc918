//! A chunk's buffer while several threads fill it, each its own pages.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use super::AlignedBuf;

/// Size of a target page: what is claimed at once.
const PAGE_BYTES: usize = 4096;

const WORD_PAGES: usize = u64::BITS as usize;
const WORDS: usize = PagedBuf::PAGES / WORD_PAGES;

/// A buffer of at most [`PagedBuf::PAGES`] pages. Whoever claims a page may write to it, for as long
/// as it has the buffer; each page is claimed once.
pub(crate) struct PagedBuf {
    buffer: AlignedBuf,
    start: NonNull<u8>,
    claimed: [AtomicU64; WORDS],
}

impl PagedBuf {
    /// More pages than this are not managed: 1 MiB.
    pub(crate) const PAGES: usize = 256;

    /// Takes a buffer whose content does not matter.
    pub(crate) fn of(mut buffer: AlignedBuf) -> Self {
        let start = NonNull::from(&mut buffer[..]).cast();
        Self {
            buffer,
            start,
            claimed: Default::default(),
        }
    }

    /// The page of this number to write to, unless somebody has it or had it.
    ///
    /// # Panics
    ///
    /// Panics if the buffer has no such page.
    #[allow(
        clippy::mut_from_ref,
        reason = "the claim, not the borrow, makes the reference the only one"
    )]
    pub(crate) fn claim(&self, page: usize) -> Option<&mut [u8; PAGE_BYTES]> {
        assert!(page < self.pages(), "page {page} of {}", self.pages());
        let (word, bit) = (page / WORD_PAGES, 1 << (page % WORD_PAGES));
        if self.claimed[word].fetch_or(bit, Ordering::Relaxed) & bit != 0 {
            return None;
        }
        // SAFETY: the page lies in the buffer, checked above, which `self` owns and, while it is
        // shared, touches only here. The bit was not set before and never is cleared, so this is
        // the only reference to these bytes that is ever made before `filled` takes `self`, which
        // no borrow of `self` outlives. Every bit pattern is a valid byte, and the allocation was
        // initialized.
        Some(unsafe { self.start.add(page * PAGE_BYTES).cast().as_mut() })
    }

    /// Whether somebody has the page of this number or had it.
    pub(crate) fn is_claimed(&self, page: usize) -> bool {
        self.claimed[page / WORD_PAGES].load(Ordering::Relaxed) & (1 << (page % WORD_PAGES)) != 0
    }

    /// The buffer back, with zeros in each of its first `pages` that nobody claimed.
    pub(crate) fn filled(mut self, pages: usize) -> AlignedBuf {
        for page in 0..pages.min(self.pages()) {
            if !self.is_claimed(page) {
                self.buffer[page * PAGE_BYTES..][..PAGE_BYTES].fill(0);
            }
        }
        self.buffer
    }

    fn pages(&self) -> usize {
        (self.buffer.length() / PAGE_BYTES).min(Self::PAGES)
    }
}

// SAFETY: the buffer owns plain bytes, and `start` points to them; nothing is tied to a thread.
unsafe impl Send for PagedBuf {}
// SAFETY: through a shared reference bytes are reached by `claim` only, which gives each page to one
// caller.
unsafe impl Sync for PagedBuf {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_given_once_and_pages_that_nobody_took_become_zero() {
        let mut old = AlignedBuf::zeroed(4 * PAGE_BYTES);
        old.fill(0xee);
        let buffer = PagedBuf::of(old);
        std::thread::scope(|scope| {
            for (page, byte) in [(0, 1), (2, 3)] {
                let buffer = &buffer;
                scope.spawn(move || buffer.claim(page).unwrap().fill(byte));
            }
        });
        assert!(buffer.claim(2).is_none() && buffer.is_claimed(0) && !buffer.is_claimed(1));
        let filled = buffer.filled(3);
        let first_bytes: Vec<u8> = filled.iter().step_by(PAGE_BYTES).copied().collect();
        assert_eq!(first_bytes, [1, 0, 3, 0xee]);
        assert!(filled[PAGE_BYTES..2 * PAGE_BYTES].iter().all(|byte| *byte == 0));
    }

    #[test]
    #[should_panic = "page 4 of 4"]
    fn a_page_behind_the_end_is_a_bug() {
        PagedBuf::of(AlignedBuf::zeroed(4 * PAGE_BYTES)).claim(4);
    }
}
