//! The hibernation as a pure machine: inputs in, effects out, nothing else.
//!
//! # What it guarantees
//!
//! - `Terminate` is only ever asked for after `Sealed`: QEMU ends only when the image is the guest.
//! - Every failure, and every cancel that is accepted, before `Sealed` ends in a rollback (once the guest was touched)
//!   or at once (before that); after `Sealed` never.
//! - A guest that was paused before is paused after a rollback.
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
//! The seal itself can fail but is not cancelled: nobody could tell whether it came about. It is short, because
//! everything that takes time was synced before.
//!
//! An effect that is under way when a cancel arrives is told to stop ([`Effect::Interrupt`]); the machine then waits
//! for its end, whichever it is, before it rolls back. So at no instant do two effects touch the guest.

use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Code, Failure};

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
    /// Writing what follows RAM, and bringing all of it to the disk.
    Syncing,
    /// Making the image valid.
    Sealing,
    /// The image is the guest; QEMU is ended.
    Terminating,
    /// Giving the guest back as it was.
    RollingBack,
    /// Done.
    Hibernated,
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
            Self::Total(limit) => write!(
                f,
                "the hibernation took longer than {}",
                humantime::format_duration(*limit)
            ),
            Self::Stall(limit) => write!(
                f,
                "the hibernation made no progress for {}",
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
    /// Write the tables, and sync.
    Sync,
    /// Publish what was synced.
    Seal,
    /// End QEMU and wait until it is gone.
    Terminate,
    /// Give the guest back as it was, or, when somebody else ran it meanwhile, as that left it.
    RollBack(GiveBack),
    /// End the effect under way as soon as it can be ended.
    Interrupt,
}

/// What a rollback leaves behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GiveBack {
    /// A running guest.
    Running,
    /// A paused guest.
    Paused,
    /// Whatever somebody else made of it.
    AsItIs,
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
    phase: Phase,
    /// Whether the vCPUs ran when the hibernation began.
    was_running: bool,
    /// Why it ends early, once it does.
    failure: Option<Failure>,
    /// Whether the guest runs although we stopped it.
    guest_ran: bool,
}

impl Machine {
    /// A hibernation that has not begun, and its first effect.
    pub fn begin() -> (Self, Effect) {
        (
            Self {
                phase: Phase::Preflight,
                was_running: false,
                failure: None,
                guest_ran: false,
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
        matches!(self.phase, Phase::Hibernated | Phase::Failed | Phase::Uncertain)
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
            | Phase::Syncing => {
                if self.failure.is_none() {
                    CancelAnswer::Accepted
                } else {
                    CancelAnswer::AlreadyEnding
                }
            }
            Phase::RollingBack | Phase::Failed | Phase::Uncertain => CancelAnswer::AlreadyEnding,
            Phase::Sealing | Phase::Terminating | Phase::Hibernated => CancelAnswer::TooLate,
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
            Input::PreflightPassed { running } => {
                self.was_running = running;
                self.advance()
            }
            Input::Done => self.advance(),
        }
    }

    /// The effect of this phase is done: go to the next, or back if something came up meanwhile.
    fn advance(&mut self) -> Option<Effect> {
        if self.failure.is_some() && self.phase < Phase::Terminating {
            return self.turn_back();
        }
        let (phase, effect) = match self.phase {
            Phase::Preflight => (Phase::Reserving, Some(Effect::Reserve)),
            Phase::Reserving => (Phase::Pausing, Some(Effect::Pause)),
            Phase::Pausing => (Phase::SavingDevices, Some(Effect::SaveDevices)),
            Phase::SavingDevices => (Phase::SavingMemory, Some(Effect::SaveMemory)),
            Phase::SavingMemory => (Phase::Syncing, Some(Effect::Sync)),
            Phase::Syncing => (Phase::Sealing, Some(Effect::Seal)),
            Phase::Sealing => (Phase::Terminating, Some(Effect::Terminate)),
            Phase::Terminating => (Phase::Hibernated, None),
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
                let first = self.failure.take();
                self.failure = Some(match first {
                    // The same silence twice is one failure.
                    Some(first) if (first.code, failure.code) == (Code::Unreachable, Code::Unreachable) => {
                        first
                    }
                    Some(first) => Failure {
                        code: Code::Operator,
                        ..failure.while_doing(&format!("{first}; then the guest could not be given back"))
                    },
                    None => failure,
                });
                self.phase = Phase::Uncertain;
                None
            }
            _ => {
                // What came first is the reason: an interrupted effect fails only because of it.
                self.failure.get_or_insert(failure);
                self.turn_back()
            }
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
        if !fragile {
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
mod tests {
    use super::*;

    const FORWARD: [(Phase, Effect); 8] = [
        (Phase::Preflight, Effect::Preflight),
        (Phase::Reserving, Effect::Reserve),
        (Phase::Pausing, Effect::Pause),
        (Phase::SavingDevices, Effect::SaveDevices),
        (Phase::SavingMemory, Effect::SaveMemory),
        (Phase::Syncing, Effect::Sync),
        (Phase::Sealing, Effect::Seal),
        (Phase::Terminating, Effect::Terminate),
    ];

    fn input_for(phase: Phase, running: bool) -> Input {
        if phase == Phase::Preflight {
            Input::PreflightPassed { running }
        } else {
            Input::Done
        }
    }

    /// A machine in `phase`, with its effect under way.
    fn machine_in(phase: Phase, running: bool) -> Machine {
        let (mut machine, _) = Machine::begin();
        while machine.phase() != phase {
            machine.step(input_for(machine.phase(), running));
        }
        machine
    }

    fn broken() -> Failure {
        Failure::new(Code::StorageIo, "the disk is gone")
    }

    #[test]
    fn undisturbed_it_goes_through_every_phase_to_hibernated() {
        let (mut machine, first) = Machine::begin();
        let mut effects = vec![(machine.phase(), first)];
        while let Some(effect) = machine.step(input_for(machine.phase(), true)) {
            effects.push((machine.phase(), effect));
        }
        assert_eq!(effects, FORWARD);
        assert_eq!((machine.phase(), machine.failure()), (Phase::Hibernated, None));
    }

    #[test]
    fn a_failure_before_the_guest_is_touched_needs_no_rollback() {
        for phase in [Phase::Preflight, Phase::Reserving] {
            let mut machine = machine_in(phase, true);
            assert_eq!(machine.step(Input::Failed(broken())), None);
            assert_eq!(machine.phase(), Phase::Failed, "{phase:?}");
        }
    }

    #[test]
    fn a_failure_after_the_pause_and_before_the_seal_gives_the_guest_back_as_it_was() {
        for phase in [
            Phase::Pausing,
            Phase::SavingDevices,
            Phase::SavingMemory,
            Phase::Syncing,
            Phase::Sealing,
        ] {
            for (running, as_it_was) in [(true, GiveBack::Running), (false, GiveBack::Paused)] {
                let mut machine = machine_in(phase, running);
                let effect = machine.step(Input::Failed(broken()));
                assert_eq!(effect, Some(Effect::RollBack(as_it_was)), "{phase:?}");
                assert_eq!(machine.step(Input::Done), None);
                assert_eq!(
                    (machine.phase(), machine.failure()),
                    (Phase::Failed, Some(&broken()))
                );
            }
        }
    }

    #[test]
    fn a_failure_after_the_seal_never_starts_the_guest_again() {
        let mut machine = machine_in(Phase::Terminating, true);
        assert_eq!(machine.step(Input::Failed(broken())), None);
        assert_eq!(machine.phase(), Phase::Uncertain);
        assert_eq!(machine.failure().unwrap().code, Code::Operator);
    }

    #[test]
    fn a_cancel_interrupts_the_effect_and_waits_for_its_end() {
        for phase in [
            Phase::Pausing,
            Phase::SavingDevices,
            Phase::SavingMemory,
            Phase::Syncing,
        ] {
            for end in [Input::Done, Input::Failed(broken())] {
                let mut machine = machine_in(phase, true);
                assert_eq!(machine.step(Input::CancelRequested), Some(Effect::Interrupt));
                assert_eq!(machine.answer_to_cancel(), CancelAnswer::AlreadyEnding);
                assert_eq!(machine.step(end), Some(Effect::RollBack(GiveBack::Running)));
                machine.step(Input::Done);
                assert_eq!(machine.failure().unwrap().code, Code::Cancelled);
            }
        }
    }

    #[test]
    fn what_takes_too_long_is_given_up_as_on_a_cancel_and_told_as_a_timeout() {
        for (phase, effect) in &FORWARD[..6] {
            let mut machine = machine_in(*phase, true);
            let limit = Limit::Total(Duration::from_secs(90));
            assert_eq!(
                machine.step(Input::OutOfTime(limit)),
                Some(Effect::Interrupt),
                "{effect:?}"
            );
            // A second limit, or a cancel, changes nothing.
            assert_eq!(
                machine.step(Input::OutOfTime(Limit::Stall(Duration::from_secs(1)))),
                None
            );
            assert_eq!(machine.step(Input::CancelRequested), None);
            machine.step(Input::Failed(broken()));
            machine.step(Input::Done);
            let failure = machine.failure().unwrap();
            assert_eq!(failure.code, Code::TimedOut, "{phase:?}");
            assert!(failure.message.contains("1m 30s"), "{failure}");
        }
        for phase in [Phase::Sealing, Phase::Terminating] {
            let mut machine = machine_in(phase, true);
            assert_eq!(machine.step(Input::OutOfTime(Limit::Total(Duration::ZERO))), None);
            assert_eq!(machine.failure, None);
        }
    }

    #[test]
    fn a_cancel_that_comes_with_the_seal_is_too_late() {
        for phase in [Phase::Sealing, Phase::Terminating] {
            let mut machine = machine_in(phase, true);
            assert_eq!(machine.answer_to_cancel(), CancelAnswer::TooLate);
            assert_eq!(machine.step(Input::CancelRequested), None);
            assert_eq!(machine.failure, None);
        }
    }

    #[test]
    fn a_guest_that_somebody_ran_is_left_running_and_its_image_is_never_sealed() {
        let mut machine = machine_in(Phase::SavingMemory, false);
        assert_eq!(machine.step(Input::GuestRan), Some(Effect::Interrupt));
        assert_eq!(
            machine.step(Input::Done),
            Some(Effect::RollBack(GiveBack::AsItIs))
        );
        machine.step(Input::Done);
        assert_eq!(machine.failure().unwrap().code, Code::Refused);
    }

    #[test]
    fn a_rollback_that_fails_tells_both_reasons() {
        let mut machine = machine_in(Phase::SavingMemory, true);
        machine.step(Input::Failed(broken()));
        machine.step(Input::Failed(Failure::new(Code::Refused, "QEMU said no")));
        let failure = machine.failure().unwrap();
        assert_eq!(failure.code, Code::Operator);
        assert!(failure.message.contains("the disk is gone") && failure.message.contains("QEMU said no"));
    }

    #[test]
    fn a_qemu_that_is_gone_is_one_failure_not_two() {
        let gone = Failure::new(Code::Unreachable, "QEMU is gone");
        let mut machine = machine_in(Phase::SavingMemory, true);
        machine.step(Input::Failed(gone.clone()));
        machine.step(Input::Failed(gone.clone()));
        assert_eq!(
            (machine.phase(), machine.failure()),
            (Phase::Uncertain, Some(&gone))
        );
    }

    #[test]
    fn no_sequence_of_inputs_ends_qemu_without_a_seal_or_runs_the_guest_after_it() {
        // Every sequence of nine inputs out of five, behind a preflight that passed: few enough to try them all.
        let inputs = [
            Input::Done,
            Input::Failed(broken()),
            Input::CancelRequested,
            Input::OutOfTime(Limit::Total(Duration::ZERO)),
            Input::GuestRan,
        ];
        for sequence in 0..inputs.len().pow(9) {
            let (mut machine, _) = Machine::begin();
            machine.step(Input::PreflightPassed {
                running: sequence % 2 == 0,
            });
            let (mut sealed, mut rest) = (false, sequence);
            for _ in 0..9 {
                let input = inputs[rest % inputs.len()].clone();
                rest /= inputs.len();
                let seals =
                    machine.phase() == Phase::Sealing && input == Input::Done && machine.failure.is_none();
                let effect = machine.step(input);
                sealed |= seals;
                match effect {
                    Some(Effect::Terminate) => assert!(sealed, "{sequence}: QEMU ended before the seal"),
                    Some(Effect::RollBack(_)) => {
                        assert!(!sealed, "{sequence}: a rollback after the seal")
                    }
                    _ => {}
                }
                assert!(
                    machine.phase() != Phase::Hibernated || sealed,
                    "{sequence}: hibernated without a seal"
                );
            }
        }
    }
}
