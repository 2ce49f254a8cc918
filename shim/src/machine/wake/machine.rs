//! The wake as a pure machine.
//!
//! # What it guarantees
//!
//! - The guest is only let run after the image is marked `waking`, so that no second wake can run it again.
//! - A failure before that leaves the image `sealed`, and nothing of the guest in any QEMU: one of ours is ended, one that
//!   somebody else started is left to its owner.
//! - Once QEMU may have let the guest run, the image never becomes `sealed` again and QEMU is never killed.
//! - A QEMU that somebody else started is never killed. So once it has the guest nothing can be undone: there is no cancel
//!   any more, and on a failure the mark stays until its owner has ended it.
//!
//! # States
//!
//! ```text
//! Opening ─► Preparing ─► Starting ─► Checking ─► Loading ─► Marking ─► Resuming ─► Consuming ─► Awake
//!    │           │            │           │           │          │          │
//!    └───────────┴────────────┴── failed ─┴───────────┴──────────┘          ├─ QEMU refused ─► Abandoning ─► Failed
//!                                   ▼                                       └─ no answer ─► Uncertain
//!                               Abandoning ─► Failed
//!
//!                                  of a QEMU of others:      Marking ─ failed ─► Uncertain ◄─ QEMU refused ─ Resuming
//! ```

use serde::{Deserialize, Serialize};

use crate::error::{Code, Failure, GuestState};

/// Where a wake is. The names are seen by users.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Phase {
    /// Locking and checking the image.
    Opening,
    /// Making RAM: planning the map, or filling memory from the image.
    Preparing,
    /// Starting QEMU.
    Starting,
    /// Comparing the machine that came up with the one that was saved.
    Checking,
    /// Loading the device state.
    Loading,
    /// Marking the image as waking.
    Marking,
    /// Letting the vCPUs run.
    Resuming,
    /// Marking the image as used.
    Consuming,
    /// Done.
    Awake,
    /// Ending QEMU, whose guest never ran.
    Abandoning,
    /// Ended; the image is as it was.
    Failed,
    /// Ended, and what became of the guest has to be looked at.
    Uncertain,
}

/// Whose QEMU the guest is woken in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    /// It is started for this.
    Ours,
    /// Somebody else started it, and ends it.
    Others,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// The effect that was asked for last is done.
    Done,
    /// The effect that was asked for last failed.
    Failed(Failure),
    /// Somebody does not want the guest after all.
    CancelRequested,
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Lock the image and check what can be checked without QEMU.
    Open,
    /// Make RAM.
    Prepare,
    /// Start QEMU, or see that one of others waits for an image.
    Start,
    /// Compare machine and disks.
    Check,
    /// Load the device state.
    Load,
    /// Mark the image as waking.
    Mark,
    /// Let the guest run, if it shall.
    Resume,
    /// Mark the image as used.
    Consume,
    /// End a QEMU of ours, or see that one of others has nothing of the guest; `unmark` tells whether the image is marked
    /// and has to be sealed again.
    Abandon {
        /// Whether it is.
        unmark: bool,
        /// Whose QEMU it is.
        qemu: Owner,
    },
    /// End the effect under way as soon as it can be ended.
    Interrupt,
}

/// A wake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    qemu: Owner,
    phase: Phase,
    failure: Option<Failure>,
}

impl Machine {
    /// A wake that has not begun, and its first effect.
    pub fn begin(qemu: Owner) -> (Self, Effect) {
        (
            Self {
                qemu,
                phase: Phase::Opening,
                failure: None,
            },
            Effect::Open,
        )
    }

    /// Where it is.
    pub fn phase(&self) -> Phase {
        self.phase
    }

    /// Why it failed, once it is over.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure
            .as_ref()
            .filter(|_| matches!(self.phase, Phase::Failed | Phase::Uncertain))
    }

    /// Takes one input and tells what to do. `None`: go on waiting, or it is over.
    pub fn step(&mut self, input: Input) -> Option<Effect> {
        match input {
            // What belongs to no effect under way is stray, and means nothing.
            _ if matches!(self.phase, Phase::Awake | Phase::Failed | Phase::Uncertain) => None,
            Input::Done => self.advance(),
            Input::Failed(failure) => self.failed(failure),
            Input::CancelRequested => {
                let can_be = match self.phase {
                    Phase::Opening
                    | Phase::Preparing
                    | Phase::Starting
                    | Phase::Checking
                    | Phase::Loading => true,
                    Phase::Marking => self.qemu == Owner::Ours,
                    _ => false,
                };
                (can_be && self.failure.is_none()).then(|| {
                    self.failure = Some(Failure::new(Code::Cancelled, "cancelled on request"));
                    Effect::Interrupt
                })
            }
        }
    }

    fn advance(&mut self) -> Option<Effect> {
        if self.phase == Phase::Loading && self.qemu == Owner::Others {
            // A cancel came too late: QEMU has the guest.
            self.failure = None;
        }
        if self.failure.is_some() && self.phase != Phase::Abandoning {
            // A cancel came while this effect ended well: in Marking the mark is on the image.
            let unmark = self.phase == Phase::Marking;
            return Some(self.abandon(unmark));
        }
        let (phase, effect) = match self.phase {
            Phase::Opening => (Phase::Preparing, Some(Effect::Prepare)),
            Phase::Preparing => (Phase::Starting, Some(Effect::Start)),
            Phase::Starting => (Phase::Checking, Some(Effect::Check)),
            Phase::Checking => (Phase::Loading, Some(Effect::Load)),
            Phase::Loading => (Phase::Marking, Some(Effect::Mark)),
            Phase::Marking => (Phase::Resuming, Some(Effect::Resume)),
            Phase::Resuming => (Phase::Consuming, Some(Effect::Consume)),
            Phase::Consuming => (Phase::Awake, None),
            Phase::Abandoning => {
                self.failure = self
                    .failure
                    .take()
                    .map(|failure| failure.with_guest(GuestState::Stopped));
                (Phase::Failed, None)
            }
            over => (over, None),
        };
        self.phase = phase;
        effect
    }

    fn failed(&mut self, failure: Failure) -> Option<Effect> {
        let unmark = match self.phase {
            // Where QEMU did not answer it may have let the guest run. One of others has the guest in any case.
            Phase::Marking | Phase::Resuming
                if self.qemu == Owner::Others
                    || self.phase == Phase::Resuming && failure.code != Code::Refused =>
            {
                self.failure = Some(Failure {
                    code: Code::Operator,
                    ..failure
                });
                self.phase = Phase::Uncertain;
                return None;
            }
            Phase::Consuming => {
                // The guest runs. That the image could not be marked as used is not the guest's fault: it stays
                // `waking`, which no wake accepts either.
                self.phase = Phase::Awake;
                return None;
            }
            Phase::Abandoning => {
                let first = self
                    .failure
                    .take()
                    .map(|first| format!("{first}; then "))
                    .unwrap_or_default();
                self.failure = Some(Failure {
                    code: Code::Operator,
                    ..failure.while_doing(&format!("{first}the wake could not be undone"))
                });
                self.phase = Phase::Uncertain;
                return None;
            }
            // A failed mark may be on the disk or not; taking it back is right either way.
            Phase::Marking | Phase::Resuming => true,
            _ => false,
        };
        self.failure.get_or_insert(failure);
        Some(self.abandon(unmark))
    }

    fn abandon(&mut self, unmark: bool) -> Effect {
        self.phase = Phase::Abandoning;
        let qemu = self.qemu;
        Effect::Abandon { unmark, qemu }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine_in(phase: Phase) -> Machine {
        machine_of(Owner::Ours, phase)
    }

    fn machine_of(qemu: Owner, phase: Phase) -> Machine {
        let (mut machine, _) = Machine::begin(qemu);
        while machine.phase() != phase {
            machine.step(Input::Done);
        }
        machine
    }

    fn abandoned(unmark: bool) -> Effect {
        let qemu = Owner::Ours;
        Effect::Abandon { unmark, qemu }
    }

    fn broken(code: Code) -> Failure {
        Failure::new(code, "broken")
    }

    #[test]
    fn undisturbed_the_image_is_marked_before_the_guest_runs_and_used_after() {
        let (mut machine, first) = Machine::begin(Owner::Ours);
        let mut effects = vec![first];
        while let Some(effect) = machine.step(Input::Done) {
            effects.push(effect);
        }
        use Effect::*;
        assert_eq!(
            effects,
            [Open, Prepare, Start, Check, Load, Mark, Resume, Consume]
        );
        assert_eq!((machine.phase(), machine.failure()), (Phase::Awake, None));
    }

    #[test]
    fn a_failure_before_the_guest_may_run_ends_qemu_and_leaves_the_image_sealed() {
        use Phase::*;
        for (phase, unmark) in [
            (Opening, false),
            (Preparing, false),
            (Starting, false),
            (Checking, false),
            (Loading, false),
            (Marking, true),
        ] {
            let mut machine = machine_in(phase);
            assert_eq!(
                machine.step(Input::Failed(broken(Code::StorageIo))),
                Some(abandoned(unmark)),
                "{phase:?}"
            );
            machine.step(Input::Done);
            assert_eq!(
                machine.failure(),
                Some(&broken(Code::StorageIo).with_guest(GuestState::Stopped))
            );
        }
    }

    #[test]
    fn a_guest_that_qemu_refused_to_run_can_be_woken_again() {
        let mut machine = machine_in(Phase::Resuming);
        assert_eq!(
            machine.step(Input::Failed(broken(Code::Refused))),
            Some(abandoned(true))
        );
    }

    #[test]
    fn a_guest_that_may_run_is_never_killed_and_its_image_never_sealed_again() {
        for code in [Code::Unreachable, Code::TimedOut, Code::Internal] {
            let mut machine = machine_in(Phase::Resuming);
            assert_eq!(machine.step(Input::Failed(broken(code))), None);
            assert_eq!(machine.phase(), Phase::Uncertain);
            assert_eq!(machine.failure().unwrap().code, Code::Operator);
        }
        let mut machine = machine_in(Phase::Consuming);
        assert_eq!(machine.step(Input::Failed(broken(Code::StorageIo))), None);
        assert_eq!((machine.phase(), machine.failure()), (Phase::Awake, None));
    }

    #[test]
    fn a_cancel_is_taken_until_the_guest_may_run() {
        use Phase::*;
        for phase in [Opening, Preparing, Starting, Checking, Loading, Marking] {
            let mut machine = machine_in(phase);
            assert_eq!(machine.step(Input::CancelRequested), Some(Effect::Interrupt));
            assert_eq!(machine.step(Input::Done), Some(abandoned(phase == Marking)));
            machine.step(Input::Done);
            assert_eq!(machine.failure().unwrap().code, Code::Cancelled);
        }
        for phase in [Resuming, Consuming] {
            assert_eq!(machine_in(phase).step(Input::CancelRequested), None);
        }
    }

    #[test]
    fn a_qemu_of_others_that_does_not_have_the_guest_yet_is_left_and_the_image_stays_sealed() {
        use Phase::*;
        for phase in [Opening, Preparing, Starting, Checking, Loading] {
            let mut machine = machine_of(Owner::Others, phase);
            let left = Effect::Abandon {
                unmark: false,
                qemu: Owner::Others,
            };
            assert_eq!(
                machine.step(Input::Failed(broken(Code::Refused))),
                Some(left),
                "{phase:?}"
            );
            machine.step(Input::Done);
            assert_eq!(machine.phase(), Failed);
        }
    }

    #[test]
    fn once_a_qemu_of_others_has_the_guest_there_is_no_way_back() {
        use Phase::*;
        for phase in [Marking, Resuming] {
            let mut machine = machine_of(Owner::Others, phase);
            assert_eq!(machine.step(Input::CancelRequested), None);
            assert_eq!(machine.step(Input::Failed(broken(Code::Refused))), None);
            assert_eq!(machine.phase(), Uncertain);
            assert_eq!(machine.failure().unwrap().code, Code::Operator);
        }
        let mut machine = machine_of(Owner::Others, Loading);
        assert_eq!(machine.step(Input::CancelRequested), Some(Effect::Interrupt));
        assert_eq!(machine.step(Input::Done), Some(Effect::Mark), "it came too late");
        machine.step(Input::Done);
        machine.step(Input::Done);
        machine.step(Input::Done);
        assert_eq!((machine.phase(), machine.failure()), (Awake, None));
    }
}
