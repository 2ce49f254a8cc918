//! The one place where pages go out: each once, and those that are waited for before all others.

use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use super::blocks::{Blocks, Unit};
use super::loaded::Loaded;
use crate::Recording;
use crate::migration::{PAGE_BYTES, Postcopy};

/// How long a batch that nobody waits for stands back before it looks again.
const STAND_BACK: Duration = Duration::from_micros(50);

/// Where pages go out.
pub(super) struct Outlet<'a> {
    postcopy: Postcopy<'a>,
    blocks: &'a Blocks,
    inner: Mutex<Inner>,
    /// Answers that stand at the lock.
    waiting: AtomicUsize,
}

struct Inner {
    stream: UnixStream,
    /// A bit for each page of each block.
    sent: Vec<Vec<u64>>,
    /// Pages that were not sent.
    left: usize,
    buffer: Vec<u8>,
}

impl<'a> Outlet<'a> {
    pub(super) fn new(recording: &'a Recording, blocks: &'a Blocks, stream: UnixStream) -> Self {
        let bits = |pages: usize| vec![0; pages.div_ceil(64)];
        Self {
            postcopy: Postcopy::of(recording),
            blocks,
            inner: Mutex::new(Inner {
                stream,
                sent: blocks.blocks.iter().map(|block| bits(block.pages)).collect(),
                left: blocks.pages(),
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

    /// Sends those of some pages of a unit that were not sent, and the end behind the very last; tells how many went.
    /// Somebody waits for them if they are an answer.
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
        inner.send(self, loaded, unit, pages)
    }

    /// Sends the end if QEMU has all pages already.
    pub(super) fn end_if_complete(&self) -> io::Result<()> {
        let mut inner = self.lock();
        if inner.left > 0 {
            return Ok(());
        }
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
    ) -> io::Result<usize> {
        let Self {
            stream,
            sent,
            left,
            buffer,
        } = self;
        let sent = &mut sent[unit.block];
        let is_new = |page: &usize| sent[page / 64] >> (page % 64) & 1 == 0;
        let new: Vec<usize> = pages.filter(is_new).collect();
        if new.is_empty() {
            return Ok(0);
        }
        buffer.clear();
        let records = new.iter().map(|page| loaded.page(unit, *page));
        outlet.postcopy.pages(records, buffer)?;
        if new.len() == *left {
            outlet.postcopy.end(buffer)?;
        }
        // Marked first: a batch that did not go out whole must not go again on this connection.
        for page in &new {
            sent[page / 64] |= 1 << (page % 64);
        }
        *left -= new.len();
        stream.write_all(buffer)?;
        Ok(new.len())
    }

    /// Whether the page was not marked before.
    fn mark(&mut self, block: usize, page: usize) -> bool {
        let is_new = !self.is_sent(block, page);
        if is_new {
            self.sent[block][page / 64] |= 1 << (page % 64);
            self.left -= 1;
        }
        is_new
    }

    fn is_sent(&self, block: usize, page: usize) -> bool {
        self.sent[block][page / 64] >> (page % 64) & 1 == 1
    }
}

/// Pages as bytes.
pub(super) fn bytes_of(pages: usize) -> u64 {
    pages as u64 * PAGE_BYTES as u64
}
