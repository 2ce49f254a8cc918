//! When to try, when to wait, when to give up: the machine behind a [`Monitor`](super::Monitor),
//! without IO and without a clock.
//!
//! ```text
//!                 attached                    lost
//!   Trying ──────────────────────► Attached ────────► Waiting
//!     ▲  │                             │               │   ▲
//!     │  │ failed                      │               │   │
//!     │  └─────────────────────────────┼───────────────┼───┘
//!     └────────────────────────────────┼─── delay ─────┘
//!                                      ▼
//!                                   GivenUp
//! ```
//!
//! - *Trying*: an attempt is under way. It may last as long as the gap may.
//! - *Waiting*: for the next attempt. The delay doubles with each, up to the cap, and is the first
//!   one again after a connection that held for as long as the cap. So a peer that accepts and drops
//!   is asked no more often than one that refuses.
//! - *Attached*: connected, with the state queried.
//! - *GivenUp*, from every state but Attached: the gap has lasted too long, the process is gone, or
//!   the address is good for one connection only. That a process is gone is no reason to leave a
//!   connection that still stands: its last words are still to be read, and then it is lost.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{AttachError, GivenUp};

/// How the attempts of one gap follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackOff {
    /// The delay before the first attempt after a loss.
    pub first: Duration,
    /// The longest delay.
    pub cap: Duration,
    /// How long a gap may last.
    pub give_up_after: Duration,
}

impl Default for BackOff {
    /// The first delay is what a QEMU that lives needs to listen again after a client has left, many
    /// times over; the cap is what an operator takes for prompt.
    fn default() -> Self {
        Self {
            first: Duration::from_millis(50),
            cap: Duration::from_secs(2),
            give_up_after: Duration::from_secs(60),
        }
    }
}

/// What the owner has to do.
#[derive(Clone, Debug)]
pub(super) enum Step {
    /// Try to connect and to query the state, no longer than this.
    Attempt { until: Instant },
    /// Wait, and then let time pass.
    Wait { until: Instant },
    /// Keep the connection until it is lost.
    Hold,
    /// Stop.
    GiveUp(GivenUp),
}

#[derive(Debug)]
pub(super) struct Attachment {
    state: State,
    back_off: BackOff,
    next_delay: Duration,
    /// How the attempts of this gap fail. One that is cut short by the end of the gap says less than
    /// the one before.
    last: Option<Arc<AttachError>>,
    process_ended: bool,
    reconnectable: bool,
}

#[derive(Debug)]
enum State {
    Trying { gap_ends: Instant },
    Waiting { gap_ends: Instant, until: Instant },
    Attached { since: Instant },
    GivenUp(GivenUp),
}

impl Attachment {
    /// The gap before the first connection begins now, and with it the first attempt.
    pub(super) fn new(back_off: BackOff, reconnectable: bool, now: Instant) -> Self {
        Self {
            state: State::Trying {
                gap_ends: now + back_off.give_up_after,
            },
            back_off,
            next_delay: back_off.first,
            last: None,
            process_ended: false,
            reconnectable,
        }
    }

    pub(super) fn step(&self) -> Step {
        match &self.state {
            State::Trying { gap_ends } => Step::Attempt { until: *gap_ends },
            State::Waiting { until, .. } => Step::Wait { until: *until },
            State::Attached { .. } => Step::Hold,
            State::GivenUp(reason) => Step::GiveUp(reason.clone()),
        }
    }

    /// The attempt brought a connection.
    pub(super) fn attached(&mut self, now: Instant) {
        if let State::Trying { .. } = self.state {
            self.state = State::Attached { since: now };
            self.last = None;
        }
    }

    /// The attempt brought none.
    pub(super) fn failed(&mut self, now: Instant, error: AttachError) {
        let State::Trying { gap_ends } = self.state else {
            return;
        };
        let until = now + self.delay();
        let last = match (error, self.last.take()) {
            (AttachError::Unfinished, Some(before)) => before,
            (error, _) => Arc::new(error),
        };
        self.last = Some(Arc::clone(&last));
        self.state = if !self.reconnectable {
            State::GivenUp(GivenUp::NotReconnectable { last: Some(last) })
        } else if until >= gap_ends {
            let after = self.back_off.give_up_after;
            State::GivenUp(GivenUp::Deadline { after, last })
        } else {
            State::Waiting { gap_ends, until }
        };
    }

    /// The connection is gone.
    pub(super) fn lost(&mut self, now: Instant) {
        let State::Attached { since } = self.state else {
            return;
        };
        if now.duration_since(since) >= self.back_off.cap {
            self.next_delay = self.back_off.first;
        }
        self.state = if self.process_ended {
            State::GivenUp(GivenUp::ProcessEnded)
        } else if self.reconnectable {
            State::Waiting {
                gap_ends: now + self.back_off.give_up_after,
                until: now + self.delay(),
            }
        } else {
            State::GivenUp(GivenUp::NotReconnectable { last: None })
        };
    }

    /// QEMU's process is gone; nobody will ever listen at the address again.
    pub(super) fn process_ended(&mut self) {
        self.process_ended = true;
        if matches!(self.state, State::Trying { .. } | State::Waiting { .. }) {
            self.state = State::GivenUp(GivenUp::ProcessEnded);
        }
    }

    /// Nobody is interested any more.
    pub(super) fn detach(&mut self) {
        if !matches!(self.state, State::GivenUp(_)) {
            self.state = State::GivenUp(GivenUp::Detached);
        }
    }

    /// Lets time pass.
    pub(super) fn advance(&mut self, now: Instant) {
        if let State::Waiting { gap_ends, until } = self.state
            && until <= now
        {
            self.state = State::Trying { gap_ends };
        }
    }

    fn delay(&mut self) -> Duration {
        let delay = self.next_delay;
        self.next_delay = (delay * 2).min(self.back_off.cap);
        delay
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::CommandError;

    /// An attachment with a time of its own, in milliseconds.
    struct Bench {
        attachment: Attachment,
        start: Instant,
    }

    impl Bench {
        fn new(reconnectable: bool) -> Self {
            let start = Instant::now();
            let back_off = BackOff {
                first: Duration::from_millis(100),
                cap: Duration::from_millis(1000),
                give_up_after: Duration::from_millis(5000),
            };
            Self {
                attachment: Attachment::new(back_off, reconnectable, start),
                start,
            }
        }

        fn attached() -> Self {
            let mut bench = Self::new(true);
            bench.attachment.attached(bench.start);
            bench
        }

        fn at(&self, ms: u64) -> Instant {
            self.start + Duration::from_millis(ms)
        }

        fn fail(&mut self, ms: u64) {
            let now = self.at(ms);
            self.attachment.failed(now, AttachError::Unfinished);
        }

        fn step(&self) -> String {
            let ms = |instant: Instant| instant.duration_since(self.start).as_millis();
            match self.attachment.step() {
                Step::Attempt { until } => format!("attempt until {}", ms(until)),
                Step::Wait { until } => format!("wait until {}", ms(until)),
                Step::Hold => "hold".to_owned(),
                Step::GiveUp(reason) => format!("give up: {reason}"),
            }
        }
    }

    #[test]
    fn the_first_attempt_is_made_at_once() {
        assert_eq!(Bench::new(true).step(), "attempt until 5000");
    }

    #[test]
    fn the_delays_double_up_to_the_cap_until_no_attempt_fits_the_gap() {
        let mut bench = Bench::new(true);
        let mut now = 0;
        let mut delays = Vec::new();
        loop {
            bench.fail(now);
            let Step::Wait { until } = bench.attachment.step() else {
                break;
            };
            let next = u64::try_from(until.duration_since(bench.start).as_millis()).unwrap();
            delays.push(next - now);
            bench.attachment.advance(bench.at(next - 1));
            assert_eq!(bench.step(), format!("wait until {next}"));
            bench.attachment.advance(until);
            assert_eq!(bench.step(), "attempt until 5000");
            now = next;
        }
        assert_eq!(delays, [100, 200, 400, 800, 1000, 1000, 1000]);
        assert_eq!(bench.step(), "give up: no connection came about within 5s");
    }

    #[test]
    fn each_gap_has_its_own_limit() {
        let mut bench = Bench::attached();
        bench.attachment.lost(bench.at(100_000));
        assert_eq!(bench.step(), "wait until 100100");
        bench.attachment.advance(bench.at(100_100));
        assert_eq!(bench.step(), "attempt until 105000");
    }

    #[test]
    fn a_connection_that_did_not_hold_does_not_shorten_the_delay() {
        let mut bench = Bench::attached();
        let mut delays = Vec::new();
        let mut now = 0;
        for held in [0, 0, 999, 1000, 0] {
            now += held;
            bench.attachment.lost(bench.at(now));
            let Step::Wait { until } = bench.attachment.step() else {
                panic!("{}", bench.step())
            };
            let next = u64::try_from(until.duration_since(bench.start).as_millis()).unwrap();
            delays.push(next - now);
            now = next;
            bench.attachment.advance(until);
            bench.attachment.attached(until);
            assert_eq!(bench.step(), "hold");
        }
        assert_eq!(delays, [100, 200, 400, 100, 200]);
    }

    #[test]
    fn a_process_that_is_gone_ends_a_gap_at_once_and_a_connection_when_it_is_lost() {
        let gone = "give up: the process behind the monitor is gone";
        let mut trying = Bench::new(true);
        trying.attachment.process_ended();
        assert_eq!(trying.step(), gone);
        trying.attachment.attached(trying.at(1));
        trying.fail(1);
        assert_eq!(trying.step(), gone, "what comes after changes nothing");

        let mut waiting = Bench::new(true);
        waiting.fail(1);
        waiting.attachment.process_ended();
        assert_eq!(waiting.step(), gone);

        let mut attached = Bench::attached();
        attached.attachment.process_ended();
        assert_eq!(attached.step(), "hold");
        attached.attachment.lost(attached.at(1));
        assert_eq!(attached.step(), gone);
    }

    #[test]
    fn an_address_for_one_connection_is_tried_once() {
        let mut failed = Bench::new(false);
        failed.fail(1);
        assert!(
            failed.step().starts_with("give up: the address"),
            "{}",
            failed.step()
        );
        let mut lost = Bench::new(false);
        lost.attachment.attached(lost.at(1));
        lost.attachment.lost(lost.at(2));
        assert!(lost.step().starts_with("give up: the address"), "{}", lost.step());
    }

    #[test]
    fn an_attempt_that_is_cut_short_does_not_hide_why_those_before_failed() {
        let mut bench = Bench::new(true);
        let refused = CommandError::OutOfBandUnavailable {
            command: "query-jobs".to_owned(),
        };
        bench.attachment.failed(bench.at(0), refused.into());
        bench.attachment.advance(bench.at(100));
        bench.fail(5000);
        let Step::GiveUp(GivenUp::Deadline { last, .. }) = bench.attachment.step() else {
            panic!("{}", bench.step())
        };
        assert!(matches!(*last, AttachError::Snapshot(_)), "{last}");
    }

    #[test]
    fn the_first_reason_to_give_up_stands() {
        let mut bench = Bench::attached();
        bench.attachment.detach();
        bench.attachment.process_ended();
        bench.attachment.lost(bench.at(1));
        assert_eq!(bench.step(), "give up: the monitor was let go of on this side");
    }
}
