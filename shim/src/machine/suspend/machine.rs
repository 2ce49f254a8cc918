//! A suspend to disk as a pure machine: inputs in, effects out, nothing else.
//!
//! # What it guarantees
//!
//! - QEMU is ended only after the guest has powered off by itself.
//! - A guest that was refused, or not asked, goes on as it was.
//! - What cannot be known is not called a success: a QEMU that ended without its guest's power-off is *Uncertain*.
//!
//! # States
//!
//! ```text
//! Preflight ─► Suspending ─────► Ending ─────► SuspendedToDisk
//!     │          │ │  guest is off  │  QEMU is gone
//!     │ failed,  │ │                │ failed
//!     │ cancel   │ └─ QEMU ended ───┴──────────► Uncertain
//!     ▼          │    otherwise
//!   Failed ◄─────┘ refused, or not off in time
//! ```
//!
//! The command cannot be taken back: from *Suspending* on a cancel comes too late. An agent says nothing when it
//! succeeds, so that its command was done means little there; what counts is that the guest is off.

use std::time::Duration;

use crate::error::{Code, Failure, GuestState};
use crate::machine::hibernate::machine::CancelAnswer;

/// Where it is. The names are seen by users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Looking whether the guest's agent is there and may do it. The guest is untouched.
    Preflight,
    /// The agent has the command.
    Suspending,
    /// The guest is off; QEMU ends.
    Ending,
    /// Done.
    SuspendedToDisk,
    /// Ended with a guest that has not been suspended.
    Failed,
    /// Ended, and what became of the guest has to be looked at.
    Uncertain,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// The effect that was asked for last is done. For `Ask`: the command went out, and was not refused.
    Done,
    /// The effect that was asked for last failed. For `Ask`: the agent refused, or was not asked.
    Failed(Failure),
    /// The guest has powered off.
    PoweredOff,
    /// QEMU ends, or ended, for another reason.
    EndedOtherwise(String),
    /// The guest had this long to power off.
    LimitReached(Duration),
    /// Somebody wants it to end.
    CancelRequested,
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Check everything that can be checked without touching the guest.
    Preflight,
    /// Have the agent suspend the guest, and watch QEMU.
    Ask,
    /// End QEMU, if it does not end by itself, and wait until it is gone.
    End,
}

/// A suspend to disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    phase: Phase,
    failure: Option<Failure>,
}

impl Machine {
    /// One that has not begun, and its first effect.
    pub fn begin() -> (Self, Effect) {
        let machine = Self {
            phase: Phase::Preflight,
            failure: None,
        };
        (machine, Effect::Preflight)
    }

    /// Where it is.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Whether it is over.
    pub fn is_over(&self) -> bool {
        matches!(
            self.phase,
            Phase::SuspendedToDisk | Phase::Failed | Phase::Uncertain
        )
    }

    /// Why it did not end well; `None` while it runs and when it did.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// What a cancel would be answered now.
    pub fn answer_to_cancel(&self) -> CancelAnswer {
        match self.phase {
            Phase::Preflight => CancelAnswer::Accepted,
            Phase::Suspending | Phase::Ending | Phase::SuspendedToDisk => CancelAnswer::TooLate,
            Phase::Failed | Phase::Uncertain => CancelAnswer::AlreadyEnding,
        }
    }

    /// Takes one input and tells what to do. `None`: go on waiting, or it is over.
    pub fn step(&mut self, input: Input) -> Option<Effect> {
        match (self.phase, input) {
            (Phase::Preflight, Input::Done) => self.enter(Phase::Suspending, Effect::Ask),
            (Phase::Preflight, Input::CancelRequested) => self.end(
                Phase::Failed,
                Failure::new(Code::Cancelled, "cancelled before the guest was asked"),
            ),
            (Phase::Preflight | Phase::Suspending, Input::Failed(failure)) => {
                self.end(Phase::Failed, failure)
            }
            (Phase::Suspending, Input::PoweredOff) => self.enter(Phase::Ending, Effect::End),
            (Phase::Suspending, Input::LimitReached(limit)) => self.end(
                Phase::Failed,
                Failure::new(
                    Code::TimedOut,
                    format!(
                        "the guest agent was asked to suspend the guest to disk, and {limit:?} later the guest is still \
                         not off; it may yet do it"
                    ),
                ),
            ),
            (Phase::Suspending, Input::EndedOtherwise(why)) => self.end(
                Phase::Uncertain,
                Failure::new(
                    Code::Operator,
                    format!("{why} before the guest had powered off: whether it is whole on its disk is not known"),
                ),
            ),
            (Phase::Ending, Input::Done) => {
                self.phase = Phase::SuspendedToDisk;
                None
            }
            (Phase::Ending, Input::Failed(failure)) => self.end(
                Phase::Uncertain,
                Failure {
                    code: Code::Operator,
                    ..failure.while_doing("the guest is off, but its QEMU is not")
                },
            ),
            // What belongs to no effect under way is stray, and means nothing.
            _ => None,
        }
    }

    fn enter(&mut self, phase: Phase, effect: Effect) -> Option<Effect> {
        self.phase = phase;
        Some(effect)
    }

    fn end(&mut self, phase: Phase, failure: Failure) -> Option<Effect> {
        self.phase = phase;
        self.failure = Some(failure);
        None
    }
}

/// What a guest that was not suspended does, by what could be seen of it.
pub fn guest_state(runs: Option<bool>, qemu_is_gone: bool) -> GuestState {
    match (runs, qemu_is_gone) {
        (_, true) => GuestState::Stopped,
        (Some(true), false) => GuestState::Running,
        (Some(false), false) => GuestState::Paused,
        (None, false) => GuestState::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(300);

    fn refused() -> Failure {
        Failure::new(Code::Refused, "guest-suspend-disk: GenericError: no swap")
    }

    fn inputs() -> [Input; 6] {
        [
            Input::Done,
            Input::Failed(refused()),
            Input::PoweredOff,
            Input::EndedOtherwise("QEMU was killed".to_owned()),
            Input::LimitReached(LIMIT),
            Input::CancelRequested,
        ]
    }

    /// A machine in `phase`, with its effect under way.
    fn machine_in(phase: Phase) -> Machine {
        let (mut machine, _) = Machine::begin();
        for input in [Input::Done, Input::PoweredOff] {
            if machine.phase() != phase {
                machine.step(input);
            }
        }
        assert_eq!(machine.phase(), phase);
        machine
    }

    #[test]
    fn every_input_in_every_phase_does_what_the_table_says() {
        use Phase::{Ending, Failed, Preflight, SuspendedToDisk, Suspending, Uncertain};
        // In the order of the inputs: done, failed, powered off, ended otherwise, limit, cancel.
        let stays = |phase| (phase, None, None);
        let ends = |phase, code| (phase, None, Some(code));
        let table = [
            (
                Preflight,
                [
                    (Suspending, Some(Effect::Ask), None),
                    ends(Failed, Code::Refused),
                    stays(Preflight),
                    stays(Preflight),
                    stays(Preflight),
                    ends(Failed, Code::Cancelled),
                ],
            ),
            (
                Suspending,
                [
                    stays(Suspending),
                    ends(Failed, Code::Refused),
                    (Ending, Some(Effect::End), None),
                    ends(Uncertain, Code::Operator),
                    ends(Failed, Code::TimedOut),
                    stays(Suspending),
                ],
            ),
            (
                Ending,
                [
                    stays(SuspendedToDisk),
                    ends(Uncertain, Code::Operator),
                    stays(Ending),
                    stays(Ending),
                    stays(Ending),
                    stays(Ending),
                ],
            ),
        ];
        for (phase, row) in table {
            for (input, (next, effect, code)) in inputs().into_iter().zip(row) {
                let mut machine = machine_in(phase);
                let asked = machine.step(input.clone());
                let seen = (
                    machine.phase(),
                    asked,
                    machine.failure().map(|failure| failure.code),
                );
                assert_eq!(seen, (next, effect, code), "{input:?} in {phase:?}");
            }
        }
    }

    #[test]
    fn what_is_over_stays_as_it_is() {
        let over = [
            (Phase::Preflight, Input::Failed(refused())),
            (Phase::Ending, Input::Done),
            (Phase::Ending, Input::Failed(refused())),
        ];
        for (phase, last) in over {
            let mut machine = machine_in(phase);
            machine.step(last);
            assert!(machine.is_over());
            for input in inputs() {
                let before = machine.clone();
                assert_eq!(machine.step(input), None);
                assert_eq!(machine, before);
            }
        }
    }

    #[test]
    fn the_agents_words_are_kept() {
        let mut machine = machine_in(Phase::Suspending);
        machine.step(Input::Failed(refused()));
        assert_eq!(machine.failure(), Some(&refused()));
    }

    #[test]
    fn a_cancel_is_answered_by_whether_the_guest_was_asked() {
        let answer = |phase| machine_in(phase).answer_to_cancel();
        assert_eq!(answer(Phase::Preflight), CancelAnswer::Accepted);
        assert_eq!(answer(Phase::Suspending), CancelAnswer::TooLate);
        assert_eq!(answer(Phase::Ending), CancelAnswer::TooLate);
    }

    #[test]
    fn no_sequence_of_inputs_ends_a_qemu_whose_guest_is_not_off() {
        // Every sequence of six inputs out of six: few enough to try them all.
        let inputs = inputs();
        for sequence in 0..inputs.len().pow(6) {
            let (mut machine, _) = Machine::begin();
            let (mut is_off, mut rest) = (false, sequence);
            for _ in 0..6 {
                let input = inputs[rest % inputs.len()].clone();
                rest /= inputs.len();
                is_off |= input == Input::PoweredOff && machine.phase() == Phase::Suspending;
                let ends = machine.step(input) == Some(Effect::End);
                let is_done = machine.phase() == Phase::SuspendedToDisk;
                assert!(is_off || !(ends || is_done), "{sequence}");
            }
        }
    }
}
