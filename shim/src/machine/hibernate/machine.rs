//! The hibernation, and the snapshot, as a pure machine: inputs in, effects out, nothing else.
//!
//! # What it guarantees
//!
//! - `Terminate` is only ever asked for after `Sealed`: QEMU ends only when the image is the guest. For a snapshot it is
//!   never asked for.
//! - Every failure, and every cancel that is accepted, before `Sealed` ends in a rollback (once the guest was touched)
//!   or at once (before that); after `Sealed` never.
//! - A guest that was paused before is paused after a rollback.
//! - The guest of a snapshot is given back before anything is synced, and is not touched after that: what fails then takes
//!   the image away, and nothing else.
//!
//! # States
//!
//! ```text
//! Preflight ─► Reserving ─► Pausing ─► SavingDevices ─► SavingMemory ─► Syncing ─► Sealing ─► Terminating ─► Hibernated
//!     │            │           │             │               │            │          │             │
//!     └─ failed, ──┘           └─── failed, cancelled, out of time, guest ran ───────┘             └─ failed ─► Uncertain
//!      cancelled,                              ▼
//!      out of time                       RollingBack ─ failed ─► Uncertain
//!           └─────────► Failed ◄───────────────┘
//! ```
//!
//! A snapshot goes another way once RAM is in the image. A live one has `SavingLive` instead of `Pausing`, `SavingDevices` and
//! `SavingMemory`: the guest runs in it, and stands still at its end.
//!
//! ```text
//! … SavingMemory ─► GivingBack ─► Syncing ─► Sealing ─► Trimming ─► SnapshotTaken
//!        │              │  │         └──────────┴─ failed, cancelled, out of time ─► Discarding ─► Failed
//!        │              │  └─ failed: nobody knows what the guest does ────────────► Discarding ─► Uncertain
//!        │              └─ cancelled, out of time, and then done ──────────────────► Discarding ─► Failed
//!        └─ RollingBack as above
//! ```
//!
//! The seal itself can fail but is not cancelled: nobody could tell whether it came about. It is short, because
//! everything that takes time was synced before.
//!
//! An effect that is under way when a cancel arrives is told to stop ([`Effect::Interrupt`]); the machine then waits
//! for its end, whichever it is, before it rolls back. So at no instant do two effects touch the guest.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Code, Failure};

/// What becomes of the guest once it is in the image.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Aim {
    /// The image is the guest, and QEMU ends.
    #[default]
    Hibernate,
    /// The guest goes on; the image is a copy of it.
    Snapshot {
        /// Whether it stands still until somebody else runs it, so that its disks can be copied first.
        leave_paused: bool,
    },
}

impl Aim {
    /// Whether the guest goes on.
    pub fn is_snapshot(self) -> bool {
        matches!(self, Self::Snapshot { .. })
    }
}

impl fmt::Display for Aim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Hibernate => "hibernation",
            Self::Snapshot { .. } => "snapshot",
        })
    }
}

/// Where a hibernation is. The names are seen by users.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Phase {
    /// Looking for whatever stands in the way. The guest is untouched.
    Preflight,
    /// Allocating the image's space. The guest is untouched.
    Reserving,
    /// Stopping the vCPUs.
    Pausing,
    /// Taking the device state from QEMU.
    SavingDevices,
    /// Writing RAM.
    SavingMemory,
    /// Saving the guest while it runs, and at the end while it stands still.
    SavingLive,
    /// Giving the guest of a snapshot back.
    GivingBack,
    /// Writing what follows RAM, and bringing all of it to the disk.
    Syncing,
    /// Making the image valid.
    Sealing,
    /// The image is the guest; QEMU is ended.
    Terminating,
    /// Giving back space that a snapshot does not use.
    Trimming,
    /// Giving the guest back as it was.
    RollingBack,
    /// Removing what there is of a snapshot, whose guest is not touched any more.
    Discarding,
    /// Done.
    Hibernated,
    /// Done, and the guest went on.
    SnapshotTaken,
    /// Ended with the guest as it was before.
    Failed,
    /// Ended, and what became of the guest has to be looked at.
    Uncertain,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// Nothing stands in the way; tells whether the guest's vCPUs run.
    PreflightPassed {
        /// Whether they do.
        running: bool,
        /// Whether the guest is saved while it runs.
        live: bool,
    },
    /// The effect that was asked for last is done.
    Done,
    /// The effect that was asked for last failed.
    Failed(Failure),
    /// Somebody wants the guest back.
    CancelRequested,
    /// It takes longer than it may.
    OutOfTime(Limit),
    /// Somebody else made the guest run.
    GuestRan,
}

/// How long a hibernation may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// From its beginning to the seal.
    Total(Duration),
    /// Without any progress.
    Stall(Duration),
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Total(limit) => write!(f, "it took longer than {}", humantime::format_duration(*limit)),
            Self::Stall(limit) => write!(
                f,
                "it made no progress for {}",
                humantime::format_duration(*limit)
            ),
        }
    }
}

/// What to do next. One at a time, but for `Interrupt`, which speaks of the one under way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Check everything that can be checked without touching the guest.
    Preflight,
    /// Allocate the image's space.
    Reserve,
    /// Stop the vCPUs.
    Pause,
    /// Receive the device state.
    SaveDevices,
    /// Write RAM.
    SaveMemory,
    /// Do all three while the guest runs, as far as that goes.
    SaveLive,
    /// Give the guest of a snapshot back; its memory is not needed any more.
    GiveBack(GiveBack),
    /// Write the tables, and sync.
    Sync,
    /// Publish what was synced.
    Seal,
    /// End QEMU and wait until it is gone.
    Terminate,
    /// Give back the space that the image does not use.
    Trim,
    /// Remove what there is of the image.
    Discard,
    /// Give the guest back as it was, or, when somebody else ran it meanwhile, as that left it.
    RollBack(GiveBack),
    /// End the effect under way as soon as it can be ended.
    Interrupt,
}

/// What a guest that is given back is left as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GiveBack {
    /// A running guest.
    Running,
    /// A paused guest.
    Paused,
    /// Whatever somebody else made of it.
    AsItIs,
    /// A guest that stands still as its save left it, its disks flushed and let go of, until somebody runs it. Unlike one
    /// that is paused again it has not run for an instant.
    Still,
}

/// The answer to a cancel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CancelAnswer {
    /// The guest will be given back.
    Accepted,
    /// It is on its way back already.
    AlreadyEnding,
    /// The image is being sealed or is sealed: there is no way back.
    TooLate,
}

/// A hibernation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    aim: Aim,
    phase: Phase,
    /// Whether the vCPUs ran when the hibernation began.
    was_running: bool,
    is_live: bool,
    /// Why it ends early, once it does.
    failure: Option<Failure>,
    /// Whether the guest runs although we stopped it.
    guest_ran: bool,
    /// Whether the guest of a snapshot was given back.
    is_back: bool,
}

impl Machine {
    /// A hibernation or a snapshot that has not begun, and its first effect.
    pub fn begin(aim: Aim) -> (Self, Effect) {
        (
            Self {
                aim,
                phase: Phase::Preflight,
                was_running: false,
                is_live: false,
                failure: None,
                guest_ran: false,
                is_back: false,
            },
            Effect::Preflight,
        )
    }

    /// Where it is.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Whether it is over.
    pub fn is_over(&self) -> bool {
        matches!(
            self.phase,
            Phase::Hibernated | Phase::SnapshotTaken | Phase::Failed | Phase::Uncertain
        )
    }

    /// Whether the vCPUs ran when it began.
    pub fn was_running(&self) -> bool {
        self.was_running
    }

    /// Why it did not end in an image; `None` while it runs and when it did.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref().filter(|_| self.is_over())
    }

    /// What a cancel would be answered now.
    pub fn answer_to_cancel(&self) -> CancelAnswer {
        match self.phase {
            Phase::Preflight
            | Phase::Reserving
            | Phase::Pausing
            | Phase::SavingDevices
            | Phase::SavingMemory
            | Phase::SavingLive
            | Phase::GivingBack
            | Phase::Syncing => {
                if self.failure.is_none() {
                    CancelAnswer::Accepted
                } else {
                    CancelAnswer::AlreadyEnding
                }
            }
            Phase::RollingBack | Phase::Discarding | Phase::Failed | Phase::Uncertain => {
                CancelAnswer::AlreadyEnding
            }
            Phase::Sealing
            | Phase::Terminating
            | Phase::Trimming
            | Phase::Hibernated
            | Phase::SnapshotTaken => CancelAnswer::TooLate,
        }
    }

    /// Takes one input and tells what to do. `None`: go on waiting, or it is over.
    pub fn step(&mut self, input: Input) -> Option<Effect> {
        match input {
            // What belongs to no effect under way is stray, and means nothing.
            _ if self.is_over() => None,
            Input::PreflightPassed { .. } if self.phase != Phase::Preflight => None,
            Input::Done if self.phase == Phase::Preflight => None,
            Input::CancelRequested => {
                self.interrupted(|| Failure::new(Code::Cancelled, "cancelled on request"))
            }
            Input::OutOfTime(limit) => self
                .interrupted(|| Failure::new(Code::TimedOut, format!("{limit}; the guest was given back"))),
            Input::GuestRan => self.guest_ran(),
            Input::Failed(failure) => self.failed(failure),
            Input::PreflightPassed { running, live } => {
                self.was_running = running;
                self.is_live = live && running && self.aim.is_snapshot();
                self.advance()
            }
            Input::Done => self.advance(),
        }
    }

    /// The effect of this phase is done: go to the next, or back if something came up meanwhile.
    fn advance(&mut self) -> Option<Effect> {
        self.is_back |= self.phase == Phase::GivingBack;
        if self.failure.is_some() && self.phase < Phase::Terminating {
            return self.turn_back();
        }
        let is_snapshot = self.aim.is_snapshot();
        let (phase, effect) = match self.phase {
            Phase::Preflight => (Phase::Reserving, Some(Effect::Reserve)),
            Phase::Reserving if self.is_live => (Phase::SavingLive, Some(Effect::SaveLive)),
            Phase::Reserving => (Phase::Pausing, Some(Effect::Pause)),
            Phase::Pausing => (Phase::SavingDevices, Some(Effect::SaveDevices)),
            Phase::SavingDevices => (Phase::SavingMemory, Some(Effect::SaveMemory)),
            Phase::SavingMemory | Phase::SavingLive if is_snapshot => {
                (Phase::GivingBack, Some(Effect::GiveBack(self.after_snapshot())))
            }
            Phase::SavingMemory | Phase::SavingLive | Phase::GivingBack => {
                (Phase::Syncing, Some(Effect::Sync))
            }
            Phase::Syncing => (Phase::Sealing, Some(Effect::Seal)),
            Phase::Sealing if is_snapshot => (Phase::Trimming, Some(Effect::Trim)),
            Phase::Sealing => (Phase::Terminating, Some(Effect::Terminate)),
            Phase::Terminating => (Phase::Hibernated, None),
            Phase::Trimming => (Phase::SnapshotTaken, None),
            Phase::Discarding => (self.without_snapshot(), None),
            Phase::RollingBack => (Phase::Failed, None),
            over => (over, None),
        };
        self.phase = phase;
        effect
    }

    fn failed(&mut self, failure: Failure) -> Option<Effect> {
        match self.phase {
            Phase::Terminating => {
                self.failure = Some(Failure {
                    code: Code::Operator,
                    ..failure
                });
                self.phase = Phase::Uncertain;
                None
            }
            Phase::RollingBack => {
                self.not_given_back(failure);
                self.phase = Phase::Uncertain;
                None
            }
            Phase::GivingBack => {
                self.not_given_back(failure);
                self.phase = Phase::Discarding;
                Some(Effect::Discard)
            }
            Phase::Discarding => {
                self.failure = Some(match self.failure.take() {
                    Some(first) => Failure {
                        code: first.code,
                        ..failure.while_doing(&format!("{first}; then the image could not be removed"))
                    },
                    None => failure,
                });
                self.phase = self.without_snapshot();
                None
            }
            // The image is whole, and takes more space than it needs.
            Phase::Trimming => {
                self.phase = Phase::SnapshotTaken;
                None
            }
            _ => {
                // What came first is the reason: an interrupted effect fails only because of it.
                self.failure.get_or_insert(failure);
                self.turn_back()
            }
        }
    }

    /// The guest could not be given back, whose image is given up, or was to be, for another failure.
    fn not_given_back(&mut self, failure: Failure) {
        self.failure = Some(match self.failure.take() {
            // The same silence twice is one failure.
            Some(first) if (first.code, failure.code) == (Code::Unreachable, Code::Unreachable) => first,
            Some(first) => Failure {
                code: Code::Operator,
                ..failure.while_doing(&format!("{first}; then the guest could not be given back"))
            },
            None if self.phase == Phase::GivingBack && failure.code != Code::Unreachable => Failure {
                code: Code::Operator,
                ..failure.while_doing("the guest could not be given back")
            },
            None => failure,
        });
    }

    /// What the guest of a snapshot is left as.
    fn after_snapshot(&self) -> GiveBack {
        match self.aim {
            Aim::Snapshot { leave_paused: true } => GiveBack::Still,
            _ if self.was_running => GiveBack::Running,
            _ => GiveBack::Paused,
        }
    }

    /// Where a snapshot that is given up ends.
    fn without_snapshot(&self) -> Phase {
        if self.is_back {
            Phase::Failed
        } else {
            Phase::Uncertain
        }
    }

    fn interrupted(&mut self, why: impl FnOnce() -> Failure) -> Option<Effect> {
        (self.answer_to_cancel() == CancelAnswer::Accepted).then(|| {
            self.failure = Some(why());
            Effect::Interrupt
        })
    }

    fn guest_ran(&mut self) -> Option<Effect> {
        let fragile = matches!(
            self.phase,
            Phase::SavingDevices | Phase::SavingMemory | Phase::Syncing | Phase::Sealing
        );
        if !fragile || self.is_back {
            return None;
        }
        self.guest_ran = true;
        self.failure.get_or_insert_with(|| {
            Failure::new(
                Code::Refused,
                "another client made the guest run while its memory was being saved; the image was thrown away",
            )
        });
        Some(Effect::Interrupt)
    }

    fn turn_back(&mut self) -> Option<Effect> {
        if self.phase < Phase::Pausing {
            self.phase = Phase::Failed;
            return None;
        }
        if self.is_back {
            self.phase = Phase::Discarding;
            return Some(Effect::Discard);
        }
        self.phase = Phase::RollingBack;
        Some(Effect::RollBack(match (self.guest_ran, self.was_running) {
            (true, _) => GiveBack::AsItIs,
            (false, true) => GiveBack::Running,
            (false, false) => GiveBack::Paused,
        }))
    }
}

impl PartialOrd for Phase {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        (*self as u8).partial_cmp(&(*other as u8))
    }
}

#[cfg(test)]
mod tests;
