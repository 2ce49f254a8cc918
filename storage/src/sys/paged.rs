//! A chunk's buffer while several threads fill it, each its own pages.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use super::AlignedBuf;

/// Size of a target page.
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

    /// `count` pages from `first` on to write to, unless somebody has one of them or had it.
    ///
    /// # Panics
    ///
    /// Panics if the buffer has no such pages.
    #[allow(
        clippy::mut_from_ref,
        reason = "the claim, not the borrow, makes the reference the only one"
    )]
    pub(crate) fn claim(&self, first: usize, count: usize) -> Option<&mut [u8]> {
        let end = first.saturating_add(count);
        assert!(end <= self.pages(), "pages {first}..{end} of {}", self.pages());
        for page in first..end {
            let bit = 1 << (page % WORD_PAGES);
            if self.claimed[page / WORD_PAGES].fetch_or(bit, Ordering::Relaxed) & bit != 0 {
                return None;
            }
        }
        // SAFETY: the pages lie in the buffer, checked above, which `self` owns and, while it is
        // shared, touches only here. None of their bits was set before, and none ever is cleared,
        // so this is the only reference to these bytes that is ever made before `filled` takes
        // `self`, which no borrow of `self` outlives. Every bit pattern is a valid byte, and the
        // allocation was initialized.
        Some(unsafe {
            std::slice::from_raw_parts_mut(self.start.as_ptr().add(first * PAGE_BYTES), count * PAGE_BYTES)
        })
    }

    /// The pages that somebody has or had, as bits: page 0 is the lowest of the first word.
    pub(crate) fn claimed(&self) -> [u64; WORDS] {
        std::array::from_fn(|word| self.claimed[word].load(Ordering::Relaxed))
    }

    /// The buffer back, with zeros in each of its first `pages` that nobody claimed.
    pub(crate) fn filled(mut self, pages: usize) -> AlignedBuf {
        let claimed = self.claimed();
        for page in 0..pages.min(self.pages()) {
            if claimed[page / WORD_PAGES] & (1 << (page % WORD_PAGES)) == 0 {
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
                scope.spawn(move || buffer.claim(page, 1).unwrap().fill(byte));
            }
        });
        assert!(buffer.claim(2, 1).is_none());
        assert_eq!(buffer.claimed(), [0b101, 0, 0, 0]);
        let filled = buffer.filled(3);
        let first_bytes: Vec<u8> = filled.iter().step_by(PAGE_BYTES).copied().collect();
        assert_eq!(first_bytes, [1, 0, 3, 0xee]);
        assert!(filled[PAGE_BYTES..2 * PAGE_BYTES].iter().all(|byte| *byte == 0));
    }

    #[test]
    #[should_panic = "pages 3..5 of 4"]
    fn a_page_behind_the_end_is_a_bug() {
        PagedBuf::of(AlignedBuf::zeroed(4 * PAGE_BYTES)).claim(3, 2);
    }
}
