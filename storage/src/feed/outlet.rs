//! The one place where pages go out: each once, and those that are waited for before all others.
//!
//! Where QEMU bears it ([`Told::pass_zeros`]) zero pages go out only to who waits for them. QEMU empties all memory before
//! anything comes, and at the end lets go of what it watched: what was never touched is zero by then, and takes no memory of
//! the host.

use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::blocks::{Blocks, Unit};
use super::loaded::Loaded;
use super::told::Told;
use crate::Recording;
use crate::migration::{PAGE_BYTES, Postcopy};

/// How long a batch that nobody waits for stands back before it looks again.
const STAND_BACK: Duration = Duration::from_micros(50);

/// Where pages go out.
pub(super) struct Outlet<'a> {
    postcopy: Postcopy<'a>,
    blocks: &'a Blocks,
    told: &'a Told,
    inner: Mutex<Inner>,
    /// Answers that stand at the lock.
    waiting: AtomicUsize,
}

struct Inner {
    stream: UnixStream,
    /// A bit for each page of each block.
    sent: Vec<Vec<u64>>,
    /// Pages that are zero, and were not sent for that reason.
    passed: Vec<Vec<u64>>,
    /// Pages that were neither.
    left: usize,
    /// Whether the end was sent. QEMU reads nothing behind it, and whoever still waits for a page is let go.
    is_ended: bool,
    buffer: Vec<u8>,
}

impl<'a> Outlet<'a> {
    pub(super) fn new(
        recording: &'a Recording,
        blocks: &'a Blocks,
        told: &'a Told,
        stream: UnixStream,
    ) -> Self {
        let bits = || {
            let blocks = blocks.blocks.iter();
            blocks.map(|block| vec![0; block.pages.div_ceil(64)]).collect()
        };
        Self {
            postcopy: Postcopy::of(recording),
            blocks,
            told,
            inner: Mutex::new(Inner {
                stream,
                sent: bits(),
                passed: bits(),
                left: blocks.pages(),
                is_ended: false,
                buffer: Vec::new(),
            }),
            waiting: AtomicUsize::new(0),
        }
    }

    /// Sends what is no page.
    pub(super) fn send_other(&self, bytes: &[u8]) -> io::Result<()> {
        self.lock().stream.write_all(bytes)
    }

    /// Notes that QEMU has all pages of a block.
    pub(super) fn has_all_of(&self, block: usize) -> usize {
        let pages = self.blocks.blocks[block].pages;
        let mut inner = self.lock();
        (0..pages).filter(|page| inner.mark(block, *page)).count()
    }

    /// Notes that QEMU has the pages of a block whose bits are set; `None` if the bits are too few.
    pub(super) fn has(&self, block: usize, bitmap: &[u8]) -> Option<usize> {
        let pages = self.blocks.blocks[block].pages;
        if bitmap.len() < pages.div_ceil(8) {
            return None;
        }
        let mut inner = self.lock();
        let has = |page: &usize| bitmap[page / 8] >> (page % 8) & 1 == 1;
        Some(
            (0..pages)
                .filter(has)
                .filter(|page| inner.mark(block, *page))
                .count(),
        )
    }

    /// Whether a range of pages was sent.
    pub(super) fn is_sent(&self, block: usize, pages: Range<usize>) -> bool {
        let inner = self.lock();
        pages.into_iter().all(|page| inner.is_sent(block, page))
    }

    /// How many pages are left.
    pub(super) fn left(&self) -> usize {
        self.lock().left
    }

    /// Sends those of some pages of a unit that were not sent, and the end behind the very last; tells how many QEMU has more
    /// by that. Somebody waits for them if they are an answer; else what is zero may be passed over.
    pub(super) fn send(
        &self,
        loaded: &Loaded,
        unit: Unit,
        pages: Range<usize>,
        is_answer: bool,
    ) -> io::Result<usize> {
        let mut inner = if is_answer {
            self.waiting.fetch_add(1, Ordering::SeqCst);
            let inner = self.lock();
            self.waiting.fetch_sub(1, Ordering::SeqCst);
            inner
        } else {
            loop {
                if self.waiting.load(Ordering::SeqCst) == 0 {
                    break self.lock();
                }
                thread::park_timeout(STAND_BACK);
            }
        };
        inner.send(self, loaded, unit, pages, is_answer)
    }

    /// Sends the end if QEMU has all pages already.
    pub(super) fn end_if_complete(&self) -> io::Result<()> {
        let mut inner = self.lock();
        if inner.left > 0 {
            return Ok(());
        }
        inner.is_ended = true;
        let mut end = Vec::new();
        self.postcopy.end(&mut end)?;
        inner.stream.write_all(&end)
    }

    /// Ends the connection: whoever reads or writes it comes back.
    pub(super) fn shut(&self, stream: &UnixStream) {
        // It may be gone.
        let _ = stream.shutdown(std::net::Shutdown::Both);
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // What a panicking thread left half-written, QEMU refuses.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn send(
        &mut self,
        outlet: &Outlet<'_>,
        loaded: &Loaded,
        unit: Unit,
        pages: Range<usize>,
        is_answer: bool,
    ) -> io::Result<usize> {
        if self.is_ended {
            return Ok(0);
        }
        let Unit { block, .. } = unit;
        let together = outlet.blocks.blocks[block].together;
        let passes = !is_answer && outlet.told.passes_zeros();
        let mut new = Vec::new();
        let mut counted = 0;
        let mut first = pages.start;
        while first < pages.end {
            let end = pages.end.min(first + together);
            let is_zero = passes && (first..end).all(|page| loaded.is_zero(unit, page));
            for page in first..end {
                if self.is_sent(block, page) {
                    continue;
                }
                let was_passed = bit(&self.passed[block], page);
                counted += usize::from(!was_passed);
                if is_zero {
                    set(&mut self.passed[block], page);
                } else {
                    // Marked first: a batch that did not go out whole must not go again on this connection.
                    set(&mut self.sent[block], page);
                    new.push(page);
                }
            }
            first = end;
        }
        self.left -= counted;
        self.buffer.clear();
        if !new.is_empty() {
            let records = new.iter().map(|page| loaded.page(unit, *page));
            outlet.postcopy.pages(records, &mut self.buffer)?;
        }
        if self.left == 0 {
            self.is_ended = true;
            outlet.postcopy.end(&mut self.buffer)?;
        }
        self.stream.write_all(&self.buffer)?;
        Ok(counted)
    }

    /// Whether the page was not marked before.
    fn mark(&mut self, block: usize, page: usize) -> bool {
        let is_new = !self.is_sent(block, page);
        if is_new {
            set(&mut self.sent[block], page);
            self.left -= 1;
        }
        is_new
    }

    fn is_sent(&self, block: usize, page: usize) -> bool {
        bit(&self.sent[block], page)
    }
}

fn bit(bits: &[u64], index: usize) -> bool {
    bits[index / 64] >> (index % 64) & 1 == 1
}

fn set(bits: &mut [u64], index: usize) {
    bits[index / 64] |= 1 << (index % 64);
}

/// Pages as bytes.
pub(super) fn bytes_of(pages: usize) -> u64 {
    pages as u64 * PAGE_BYTES as u64
}
