//! How a long piece of work is driven from outside: threads, progress, cancel.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::ByteCount;

/// The number of worker threads that a caller should use unless it knows better.
///
/// Guest RAM in 4 KiB pages is fragmented: one thread cannot submit it as fast as a disk takes it. The rates of
/// one, two and three threads, by io_uring and by pwrite, are in `docs/measured.md`: three were the fastest of
/// either with 4 KiB pages, and took no more CPU time for it.
pub const WORKER_THREADS: usize = 3;

/// What a blocking call needs to know about its surroundings.
#[derive(Debug, Clone, Copy)]
pub struct Run<'a> {
    /// Worker threads; zero counts as one.
    pub threads: usize,
    /// Where the work tells how far it is.
    pub progress: &'a Progress,
    /// Set by anyone to end the work; looked at before every chunk.
    pub cancelled: &'a AtomicBool,
}

impl Run<'_> {
    /// Whether someone asked for the end.
    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }
}

/// How far a piece of work is, readable from any thread.
///
/// The work only ever adds to `done`; the total is the caller's to set, because only the caller
/// knows whether several calls make one job.
#[derive(Debug, Default)]
pub struct Progress {
    done_bytes: AtomicU64,
    total_bytes: AtomicU64,
}

impl Progress {
    /// Nothing done yet of `total`.
    pub fn new(total: ByteCount) -> Self {
        Self {
            done_bytes: AtomicU64::new(0),
            total_bytes: AtomicU64::new(total.0),
        }
    }

    /// Bytes of guest RAM dealt with so far, zeros and holes included.
    pub fn done(&self) -> ByteCount {
        ByteCount(self.done_bytes.load(Ordering::Relaxed))
    }

    /// Bytes of guest RAM that the whole job covers.
    pub fn total(&self) -> ByteCount {
        ByteCount(self.total_bytes.load(Ordering::Relaxed))
    }

    /// Tells the total when it becomes known later.
    pub fn expect(&self, total: ByteCount) {
        self.total_bytes.store(total.0, Ordering::Relaxed);
    }

    /// Adds what was just dealt with.
    pub(crate) fn advance(&self, bytes: u64) {
        self.done_bytes.fetch_add(bytes, Ordering::Relaxed);
    }
}
