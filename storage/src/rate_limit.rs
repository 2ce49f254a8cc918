//! A limit on how fast a volume is written to.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::ByteCount;

/// How much may go out at once after a pause: keeps the average right without stuttering.
const BURST: Duration = Duration::from_millis(50);

/// How long nobody looks whether the work was cancelled.
const NAP: Duration = Duration::from_millis(20);

/// So many bytes in a second, for all threads together.
#[derive(Debug)]
pub(crate) struct RateLimit {
    bytes_per_second: u64,
    /// When what was let through so far will have had its time.
    paid_until: Mutex<Instant>,
}

impl RateLimit {
    /// A limit of so many bytes per second; at least one.
    pub(crate) fn new(per_second: ByteCount, now: Instant) -> Self {
        Self {
            bytes_per_second: per_second.0.max(1),
            paid_until: Mutex::new(now),
        }
    }

    /// Waits until `bytes` may be written. `false`: it was cancelled.
    pub(crate) fn wait(&self, bytes: u64, cancelled: &AtomicBool) -> bool {
        let due = self.admit(bytes, Instant::now());
        loop {
            if cancelled.load(Ordering::Relaxed) {
                return false;
            }
            let left = due.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return true;
            }
            thread::park_timeout(left.min(NAP));
        }
    }

    /// When `bytes` more may be written.
    fn admit(&self, bytes: u64, now: Instant) -> Instant {
        // Nothing that could panic is done under the lock.
        let mut paid_until = self
            .paid_until
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        let due = (*paid_until).max(now.checked_sub(BURST).unwrap_or(now));
        let price = Duration::from_secs_f64(bytes as f64 / self.bytes_per_second as f64);
        *paid_until = due + price;
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_takes_its_time_and_a_pause_does_not_add_up() {
        let begin = Instant::now();
        let limit = RateLimit::new(ByteCount::mib(100), begin);
        let mut now = begin;
        for _ in 0..100 {
            now = limit.admit(1 << 20, now).max(now);
        }
        let taken = now.duration_since(begin);
        assert!(
            (900..1100).contains(&taken.as_millis()),
            "100 MiB at 100 MiB/s took {taken:?}"
        );
        let later = now + Duration::from_secs(60);
        let mut now = later;
        for _ in 0..100 {
            now = limit.admit(1 << 20, now).max(now);
        }
        assert!(now.duration_since(later) > Duration::from_millis(900));
    }

    #[test]
    fn a_cancel_ends_the_wait() {
        let limit = RateLimit::new(ByteCount(1), Instant::now());
        let cancelled = AtomicBool::new(false);
        assert!(limit.wait(1 << 20, &cancelled), "the first is let through");
        cancelled.store(true, Ordering::Relaxed);
        assert!(!limit.wait(1 << 20, &cancelled));
    }
}
