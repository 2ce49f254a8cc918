//! How long a hibernation may take.
//!
//! A guest that stands still for storage that does not answer is worse off than one that was not saved: when a limit
//! is reached the guest is given back, as by a cancel.

use std::time::Duration;

use dormouse_storage::ByteCount;
use tokio::time::Instant;

use super::machine::{Limit, Phase};

/// How long a hibernation may go without any progress unless told otherwise: longer than a busy disk makes one wait
/// for a MiB, shorter than a cluster waits for a node to drain.
const STALL: Duration = Duration::from_secs(120);

/// The limits of one hibernation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// From its beginning to the seal; `None`: as long as it goes on.
    pub total: Option<Duration>,
    /// Without any progress.
    pub stall: Duration,
    /// Until whoever holds the image's target lets go of it; zero: that is refused at once.
    pub lock: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            total: None,
            stall: STALL,
            lock: Duration::ZERO,
        }
    }
}

/// Notices when a limit is reached.
#[derive(Debug)]
pub struct Watchdog {
    limits: Limits,
    begun: Instant,
    /// What was seen last, and since when it is so.
    seen: (Phase, ByteCount),
    since: Instant,
}

impl Watchdog {
    /// A hibernation that begins now.
    pub fn new(limits: Limits, now: Instant) -> Self {
        Self {
            limits,
            begun: now,
            seen: (Phase::Preflight, ByteCount::ZERO),
            since: now,
        }
    }

    /// Looks where the hibernation is; tells the limit that is reached, again and again while it is.
    pub fn look(&mut self, now: Instant, phase: Phase, done: ByteCount) -> Option<Limit> {
        if self.seen != (phase, done) {
            self.seen = (phase, done);
            self.since = now;
        }
        match self.limits {
            Limits {
                total: Some(total), ..
            } if now - self.begun >= total => Some(Limit::Total(total)),
            Limits { stall, .. } if now - self.since >= stall => Some(Limit::Stall(stall)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn progress_of_either_kind_holds_the_stall_limit_off_and_nothing_the_total() {
        let begun = Instant::now();
        let limits = Limits {
            total: Some(100 * SECOND),
            stall: 10 * SECOND,
            lock: Duration::ZERO,
        };
        let mut watchdog = Watchdog::new(limits, begun);
        let mut look =
            |second: u32, phase, bytes| watchdog.look(begun + second * SECOND, phase, ByteCount(bytes));
        assert_eq!(look(9, Phase::Preflight, 0), None);
        assert_eq!(look(18, Phase::Reserving, 0), None);
        assert_eq!(look(27, Phase::Reserving, 0), None);
        assert_eq!(look(28, Phase::Reserving, 0), Some(Limit::Stall(10 * SECOND)));
        for second in (29..99).step_by(9) {
            assert_eq!(look(second, Phase::SavingMemory, second.into()), None);
        }
        assert_eq!(
            look(100, Phase::SavingMemory, 1000),
            Some(Limit::Total(100 * SECOND))
        );
    }
}
