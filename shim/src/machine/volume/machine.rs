//! A move of volumes as a pure machine: inputs in, effects out, nothing else.
//!
//! # What it guarantees
//!
//! - Before *Finalizing* every failure, limit or cancel ends with the disks as they were found.
//! - No disk is switched before all are in step with their targets and stand still, and before that intent is durable.
//! - That the guest is on its new volumes is never deduced from what jobs said: the live graph is looked at.
//! - Nothing of the old volumes is let go before it is durable that the guest has left them.
//!
//! # States
//!
//! ```text
//! Preflight ─► Attaching ─► Mirroring ─► (Ready) ─► Intending ─► Completing ─► Finalizing ─► Checking
//!     │            │            │           │           │            │                        │ │ │
//!     ▼            └────────────┴───────────┴───────────┴────────────┴──► RollingBack ◄─ none ┘ │ │
//!   Failed ◄──────────────────────────────────────────────────────────────────┘ │       some ───┘ │ all
//!                                                     Uncertain ◄───────────────┴─────────┘       ▼
//!                                                                      Moved ◄─ Releasing ◄─ Committing
//! ```
//!
//! Between *Mirroring* and *Ready* is *Verifying*, where that was asked for: the copies are compared while they are kept in
//! step. *Ready* is for a switch by hand: the volumes are kept in step until somebody says so. In *Completing* the guest's
//! writes begin to wait, so it is limited in time; once all stand still *Finalizing* takes milliseconds. What ends
//! *Uncertain* is looked at once more at once, as a recovery does.

use std::time::Duration;

use crate::error::{Code, Failure};
use crate::machine::hibernate::machine::CancelAnswer;

/// Where it is. The names are seen by users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Looking whether it can be done. Nothing is touched.
    Preflight,
    /// Targets are made and opened.
    Attaching,
    /// Everything is copied, and what the guest writes meanwhile.
    Mirroring,
    /// In step, and compared with what it is a copy of, where that was asked for.
    Verifying,
    /// In step, and kept so until somebody says that the volumes may be switched.
    Ready,
    /// Writing down that the volumes are about to be switched.
    Intending,
    /// The last writes are copied; the guest's writes wait.
    Completing,
    /// The volumes are switched.
    Finalizing,
    /// Looking which volumes the guest is on.
    Checking,
    /// Writing down that the guest has left the old volumes.
    Committing,
    /// The old volumes are let go.
    Releasing,
    /// Done.
    Moved,
    /// The targets are let go.
    RollingBack,
    /// Ended with the volumes as they were.
    Failed,
    /// Ended, and what became of the volumes has to be looked at.
    Uncertain,
}

/// How many of the guest's disks are on their targets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Switched {
    /// All.
    All,
    /// None.
    None,
    /// Some are, some are not.
    Some,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Input {
    /// The effect that was asked for last is done. For `Mirror`: all volumes are in step.
    Done,
    /// The effect that was asked for last failed.
    Failed(Failure),
    /// The live graph was looked at.
    Checked(Switched),
    /// Somebody wants the volumes to be switched now.
    CompleteRequested,
    /// It may take no longer.
    LimitReached(Duration),
    /// Somebody wants it to end.
    CancelRequested,
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Check everything that can be checked without touching the VM.
    Preflight,
    /// Write down what is about to be done, make and open the targets.
    Attach,
    /// Copy, until all volumes are in step.
    Mirror,
    /// Compare the volumes with their copies, and watch the jobs.
    Verify,
    /// Keep the volumes in step, and watch the jobs.
    Hold,
    /// Write down that the volumes may be switched from now on.
    Intend,
    /// Have all jobs stand still with nothing left to copy.
    Complete,
    /// Switch all volumes.
    Finalize,
    /// Look at the live graph.
    Check,
    /// Write down that the guest is on its new volumes.
    Commit,
    /// Let go of the old volumes.
    Release,
    /// End the jobs, and let go of the targets.
    RollBack,
}

/// A move of volumes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    phase: Phase,
    /// Whether the switch waits for somebody's word.
    by_hand: bool,
    /// Whether the copies are compared.
    verify: bool,
    failure: Option<Failure>,
}

impl Machine {
    /// One that has not begun, and its first effect. `by_hand`: the switch waits for somebody's word; `verify`: the copies
    /// are compared before.
    pub fn begin(by_hand: bool, verify: bool) -> (Self, Effect) {
        let machine = Self {
            phase: Phase::Preflight,
            by_hand,
            verify,
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
        matches!(self.phase, Phase::Moved | Phase::Failed | Phase::Uncertain)
    }

    /// Why it did not end well; `None` while nothing failed.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// What a cancel would be answered now.
    pub fn answer_to_cancel(&self) -> CancelAnswer {
        match self.phase {
            _ if self.failure.is_some() => CancelAnswer::AlreadyEnding,
            Phase::Preflight
            | Phase::Attaching
            | Phase::Mirroring
            | Phase::Verifying
            | Phase::Ready
            | Phase::Intending
            | Phase::Completing => CancelAnswer::Accepted,
            Phase::Finalizing | Phase::Checking | Phase::Committing | Phase::Releasing | Phase::Moved => {
                CancelAnswer::TooLate
            }
            Phase::RollingBack | Phase::Failed | Phase::Uncertain => CancelAnswer::AlreadyEnding,
        }
    }

    /// Whether the switch waits for somebody's word, now or once the volumes are in step.
    pub fn waits_for_a_word(&self) -> bool {
        let is_on_its_way = matches!(
            self.phase,
            Phase::Preflight | Phase::Attaching | Phase::Mirroring | Phase::Verifying | Phase::Ready
        );
        self.by_hand && self.failure.is_none() && is_on_its_way
    }

    /// Whether anything is still to be copied at a pace that somebody chooses.
    pub fn has_a_pace(&self) -> bool {
        self.failure.is_none()
            && matches!(
                self.phase,
                Phase::Preflight | Phase::Attaching | Phase::Mirroring | Phase::Verifying | Phase::Ready
            )
    }

    /// Takes one input and tells what to do. `None`: go on waiting, or it is over.
    pub fn step(&mut self, input: Input) -> Option<Effect> {
        match (self.phase, input) {
            (
                Phase::Mirroring | Phase::Verifying | Phase::Preflight | Phase::Attaching | Phase::Ready,
                Input::CompleteRequested,
            ) => {
                self.by_hand = false;
                match self.phase {
                    Phase::Ready => self.enter(Phase::Intending, Effect::Intend),
                    _ => None,
                }
            }
            (Phase::Preflight, Input::Done) => self.enter(Phase::Attaching, Effect::Attach),
            (Phase::Preflight, input) => {
                let failure = ending(input)?;
                self.end(Phase::Failed, failure)
            }
            // What makes files, or the record, is not left in the middle: it takes moments.
            (Phase::Attaching | Phase::Intending, Input::Done) => match (&self.failure, self.phase) {
                (Some(_), _) => self.enter(Phase::RollingBack, Effect::RollBack),
                (None, Phase::Attaching) => self.enter(Phase::Mirroring, Effect::Mirror),
                (None, _) => self.enter(Phase::Completing, Effect::Complete),
            },
            (Phase::Attaching | Phase::Intending, Input::Failed(failure)) => self.roll_back(failure),
            (Phase::Attaching | Phase::Intending, input) => {
                let failure = ending(input)?;
                self.failure.get_or_insert(failure);
                None
            }
            (Phase::Mirroring, Input::Done) if self.verify => self.enter(Phase::Verifying, Effect::Verify),
            (Phase::Mirroring | Phase::Verifying, Input::Done) if self.by_hand => {
                self.enter(Phase::Ready, Effect::Hold)
            }
            (Phase::Mirroring | Phase::Verifying, Input::Done) => {
                self.enter(Phase::Intending, Effect::Intend)
            }
            (Phase::Completing, Input::Done) => self.enter(Phase::Finalizing, Effect::Finalize),
            (Phase::Mirroring | Phase::Verifying | Phase::Ready | Phase::Completing, input) => {
                let failure = ending(input)?;
                self.roll_back(failure)
            }
            // From here on only the graph tells.
            (Phase::Finalizing, Input::Done) => self.enter(Phase::Checking, Effect::Check),
            (Phase::Finalizing, Input::Failed(failure)) => {
                self.failure = Some(failure);
                self.enter(Phase::Checking, Effect::Check)
            }
            (Phase::Checking, Input::Checked(Switched::All)) => {
                // Whatever a job said at its end: the guest is where it should be.
                self.failure = None;
                self.enter(Phase::Committing, Effect::Commit)
            }
            (Phase::Checking, Input::Checked(Switched::None)) => {
                let failure = self.failure.take().unwrap_or_else(|| {
                    Failure::new(Code::Internal, "QEMU ended the jobs well and switched no volume")
                });
                self.roll_back(failure)
            }
            (Phase::Checking, Input::Checked(Switched::Some)) => {
                let failure = self.failure.take();
                let why =
                    failure.map_or_else(|| "QEMU gives no reason".to_owned(), |failure| failure.message);
                self.end(
                    Phase::Uncertain,
                    Failure::new(
                        Code::Operator,
                        format!("only some of the volumes were switched: {why}"),
                    ),
                )
            }
            (Phase::Checking, Input::Failed(failure)) => self.end(
                Phase::Uncertain,
                operator(
                    failure,
                    "the volumes were about to be switched, and whether they are is not known",
                ),
            ),
            (Phase::Committing, Input::Done) => self.enter(Phase::Releasing, Effect::Release),
            (Phase::Committing, Input::Failed(failure)) => {
                self.failure = Some(operator(
                    failure,
                    "the guest is on its new volumes, but that could not be written down",
                ));
                self.enter(Phase::Releasing, Effect::Release)
            }
            (Phase::Releasing, Input::Done) => {
                self.phase = match self.failure {
                    Some(_) => Phase::Uncertain,
                    None => Phase::Moved,
                };
                None
            }
            (Phase::Releasing, Input::Failed(failure)) => {
                let failure = operator(
                    failure,
                    "the guest is on its new volumes, but the old ones are not let go",
                );
                let failure = self.failure.take().unwrap_or(failure);
                self.end(Phase::Uncertain, failure)
            }
            (Phase::RollingBack, Input::Done) => {
                self.phase = Phase::Failed;
                None
            }
            (Phase::RollingBack, Input::Failed(failure)) => {
                let first = self
                    .failure
                    .take()
                    .map(|failure| failure.message)
                    .unwrap_or_default();
                self.end(
                    Phase::Uncertain,
                    operator(
                        failure,
                        &format!("{first}; the guest is on its old volumes, but the targets are not let go"),
                    ),
                )
            }
            // What belongs to no effect under way is stray, and means nothing.
            _ => None,
        }
    }

    fn enter(&mut self, phase: Phase, effect: Effect) -> Option<Effect> {
        self.phase = phase;
        Some(effect)
    }

    fn roll_back(&mut self, failure: Failure) -> Option<Effect> {
        self.failure.get_or_insert(failure);
        self.enter(Phase::RollingBack, Effect::RollBack)
    }

    fn end(&mut self, phase: Phase, failure: Failure) -> Option<Effect> {
        self.phase = phase;
        self.failure = Some(failure);
        None
    }
}

/// The failure that an input ends an operation with, if it does.
fn ending(input: Input) -> Option<Failure> {
    match input {
        Input::Failed(failure) => Some(failure),
        Input::CancelRequested => Some(Failure::new(Code::Cancelled, "cancelled")),
        Input::LimitReached(limit) => Some(Failure::new(
            Code::TimedOut,
            format!("the volumes are not moved after {limit:?}"),
        )),
        Input::Done | Input::Checked(_) | Input::CompleteRequested => None,
    }
}

fn operator(failure: Failure, what: &str) -> Failure {
    Failure {
        code: Code::Operator,
        ..failure.while_doing(what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);

    fn broken() -> Failure {
        Failure::new(Code::StorageIo, "input/output error")
    }

    fn inputs() -> [Input; 8] {
        [
            Input::Done,
            Input::Failed(broken()),
            Input::Checked(Switched::All),
            Input::Checked(Switched::None),
            Input::Checked(Switched::Some),
            Input::CompleteRequested,
            Input::LimitReached(LIMIT),
            Input::CancelRequested,
        ]
    }

    /// A machine in `phase`, with its effect under way.
    fn machine_in(phase: Phase) -> Machine {
        let (mut machine, _) = Machine::begin(phase == Phase::Ready, phase == Phase::Verifying);
        if phase == Phase::RollingBack {
            machine.step(Input::Done);
            machine.step(Input::Failed(broken()));
        }
        while machine.phase() != phase {
            assert!(!machine.is_over(), "{phase:?} is not on the way");
            let input = match machine.phase() {
                Phase::Checking => Input::Checked(Switched::All),
                _ => Input::Done,
            };
            machine.step(input);
        }
        machine
    }

    #[test]
    fn every_input_in_every_phase_does_what_the_table_says() {
        use Phase::*;
        // In the order of the inputs: done, failed, checked all, none, some, complete, limit, cancel.
        let stays = |phase| (phase, None, None);
        let goes = |phase, effect| (phase, Some(effect), None);
        let back = |code| (RollingBack, Some(Effect::RollBack), Some(code));
        let ends = |phase, code| (phase, None, Some(code));
        let (io, cut, late, ask) = (Code::StorageIo, Code::Cancelled, Code::TimedOut, Code::Operator);
        let table: [(Phase, [_; 8]); 12] = [
            (
                Preflight,
                [
                    goes(Attaching, Effect::Attach),
                    ends(Failed, io),
                    stays(Preflight),
                    stays(Preflight),
                    stays(Preflight),
                    stays(Preflight),
                    ends(Failed, late),
                    ends(Failed, cut),
                ],
            ),
            (
                Attaching,
                [
                    goes(Mirroring, Effect::Mirror),
                    back(io),
                    stays(Attaching),
                    stays(Attaching),
                    stays(Attaching),
                    stays(Attaching),
                    ends(Attaching, late),
                    ends(Attaching, cut),
                ],
            ),
            (
                Mirroring,
                [
                    goes(Intending, Effect::Intend),
                    back(io),
                    stays(Mirroring),
                    stays(Mirroring),
                    stays(Mirroring),
                    stays(Mirroring),
                    back(late),
                    back(cut),
                ],
            ),
            (
                Verifying,
                [
                    goes(Intending, Effect::Intend),
                    back(io),
                    stays(Verifying),
                    stays(Verifying),
                    stays(Verifying),
                    stays(Verifying),
                    back(late),
                    back(cut),
                ],
            ),
            (
                Ready,
                [
                    stays(Ready),
                    back(io),
                    stays(Ready),
                    stays(Ready),
                    stays(Ready),
                    goes(Intending, Effect::Intend),
                    back(late),
                    back(cut),
                ],
            ),
            (
                Intending,
                [
                    goes(Completing, Effect::Complete),
                    back(io),
                    stays(Intending),
                    stays(Intending),
                    stays(Intending),
                    stays(Intending),
                    ends(Intending, late),
                    ends(Intending, cut),
                ],
            ),
            (
                Completing,
                [
                    goes(Finalizing, Effect::Finalize),
                    back(io),
                    stays(Completing),
                    stays(Completing),
                    stays(Completing),
                    stays(Completing),
                    back(late),
                    back(cut),
                ],
            ),
            (
                Finalizing,
                [
                    goes(Checking, Effect::Check),
                    (Checking, Some(Effect::Check), Some(io)),
                    stays(Finalizing),
                    stays(Finalizing),
                    stays(Finalizing),
                    stays(Finalizing),
                    stays(Finalizing),
                    stays(Finalizing),
                ],
            ),
            (
                Checking,
                [
                    stays(Checking),
                    ends(Uncertain, ask),
                    goes(Committing, Effect::Commit),
                    back(Code::Internal),
                    ends(Uncertain, ask),
                    stays(Checking),
                    stays(Checking),
                    stays(Checking),
                ],
            ),
            (
                Committing,
                [
                    goes(Releasing, Effect::Release),
                    (Releasing, Some(Effect::Release), Some(ask)),
                    stays(Committing),
                    stays(Committing),
                    stays(Committing),
                    stays(Committing),
                    stays(Committing),
                    stays(Committing),
                ],
            ),
            (
                Releasing,
                [
                    stays(Moved),
                    ends(Uncertain, ask),
                    stays(Releasing),
                    stays(Releasing),
                    stays(Releasing),
                    stays(Releasing),
                    stays(Releasing),
                    stays(Releasing),
                ],
            ),
            (
                RollingBack,
                [
                    ends(Failed, io),
                    ends(Uncertain, ask),
                    ends(RollingBack, io),
                    ends(RollingBack, io),
                    ends(RollingBack, io),
                    ends(RollingBack, io),
                    ends(RollingBack, io),
                    ends(RollingBack, io),
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
    fn a_cancel_that_comes_while_targets_are_made_is_not_forgotten() {
        for phase in [Phase::Attaching, Phase::Intending] {
            let mut machine = machine_in(phase);
            machine.step(Input::CancelRequested);
            assert_eq!(machine.answer_to_cancel(), CancelAnswer::AlreadyEnding);
            assert_eq!(machine.step(Input::Done), Some(Effect::RollBack));
            machine.step(Input::Done);
            assert_eq!(
                (machine.phase(), machine.failure().map(|failure| failure.code)),
                (Phase::Failed, Some(Code::Cancelled))
            );
        }
    }

    #[test]
    fn a_word_that_comes_before_the_volumes_are_in_step_counts_once_they_are() {
        let (mut machine, _) = Machine::begin(true, true);
        for input in [Input::Done, Input::Done, Input::Done, Input::CompleteRequested] {
            machine.step(input);
        }
        assert_eq!(machine.step(Input::Done), Some(Effect::Intend));
    }

    #[test]
    fn a_switch_that_is_called_off_waits_for_no_word() {
        for input in [Input::CancelRequested, Input::LimitReached(LIMIT)] {
            let (mut machine, _) = Machine::begin(true, false);
            machine.step(Input::Done);
            assert!(machine.waits_for_a_word());
            machine.step(input);
            assert!(!machine.waits_for_a_word(), "{:?}", machine.phase());
            machine.step(Input::Done);
            assert!(!machine.waits_for_a_word(), "{:?}", machine.phase());
        }
    }

    /// The disks of a model QEMU: whether they are switched, and what is written down.
    #[derive(Default)]
    struct Model {
        intent: bool,
        committed: bool,
        still: bool,
        switched: bool,
        let_go: bool,
    }

    #[test]
    fn no_sequence_of_inputs_breaks_what_is_promised() {
        // A small generator: its sequences are the same every time, and many.
        let mut seed = 1_u64;
        let mut random = move |below: usize| {
            seed = seed
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            usize::try_from((seed >> 33) % below as u64).unwrap()
        };
        for round in 0..40_000 {
            let (mut machine, first) = Machine::begin(random(2) == 0, random(2) == 0);
            let (mut model, mut effect) = (Model::default(), Some(first));
            for _ in 0..40 {
                if machine.is_over() {
                    break;
                }
                let acted = random(3) != 0;
                // The effect that is asked for really happens, at the latest with its answer.
                if let (true, Some(done)) = (acted, effect) {
                    match done {
                        Effect::Intend => model.intent = true,
                        Effect::Complete => model.still = true,
                        Effect::Finalize => {
                            assert!(model.intent && model.still, "{round}: switched without notice");
                            model.switched = true;
                        }
                        Effect::Commit => model.committed = true,
                        Effect::Release => {
                            assert!(
                                model.switched,
                                "{round}: let go of the volumes that the guest is on"
                            );
                            model.let_go = true;
                        }
                        Effect::RollBack => assert!(!model.switched, "{round}: rolled back after the switch"),
                        _ => {}
                    }
                }
                let input = match (effect, acted) {
                    (Some(Effect::Check), true) if model.switched => Input::Checked(Switched::All),
                    (Some(Effect::Check), true) => Input::Checked(Switched::None),
                    (Some(Effect::Hold), true) => Input::CompleteRequested,
                    (Some(_), true) => Input::Done,
                    // A check that fails says nothing of the volumes, and neither does a lost answer to a commit.
                    _ => match random(4) {
                        0 => Input::Failed(broken()),
                        1 => Input::LimitReached(LIMIT),
                        2 => Input::CancelRequested,
                        _ => Input::CompleteRequested,
                    },
                };
                if let Some(next) = machine.step(input) {
                    effect = Some(next);
                }
            }
            match machine.phase() {
                Phase::Moved => assert!(model.switched && model.committed && model.let_go, "{round}"),
                Phase::Failed => assert!(!model.switched && machine.failure().is_some(), "{round}"),
                Phase::Uncertain => assert_eq!(machine.failure().map(|f| f.code), Some(Code::Operator)),
                _ => {}
            }
        }
    }
}
