//! The wake's machine against a small model of what it drives: an image, a QEMU and whether its guest may have run.
//!
//! As with the hibernation's: the model knows nothing of phases, only what must never be. A table beside it says what
//! each input does in each phase.

use proptest::prelude::*;

use super::machine::{Effect, Input, Machine, Owner, Phase};
use crate::error::{Code, Failure, GuestState};

fn broken(code: Code) -> Failure {
    Failure::new(code, "broken")
}

/// Something that happens while an effect is under way, or its end.
#[derive(Debug, Clone, Copy)]
enum Happening {
    EffectEnds,
    /// The effect fails; of a command to QEMU: it was refused.
    Refused,
    /// The effect fails; of a command to QEMU: whether it was done is not known.
    NoAnswer,
    Cancel,
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        12 => Just(Happening::EffectEnds),
        1 => Just(Happening::Refused),
        1 => Just(Happening::NoAnswer),
        1 => Just(Happening::Cancel),
    ]
}

/// Whether an image is marked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mark {
    Sealed,
    Waking,
    /// It was being marked, and that failed.
    Either,
    Consumed,
}

#[derive(Debug)]
struct World {
    qemu: Owner,
    /// Whether QEMU has loaded the guest.
    is_loaded: bool,
    under_way: Option<Effect>,
    mark: Mark,
    may_have_run: bool,
    is_abandoned: bool,
    is_doubtful: bool,
    reason: Option<Code>,
}

impl World {
    fn begin(&mut self, effect: Effect) {
        assert_eq!(self.under_way, None, "{effect:?} is asked for beside another");
        assert!(!self.is_abandoned, "{effect:?} after QEMU was ended");
        match effect {
            Effect::Abandon { unmark, qemu } => {
                assert_eq!(qemu, self.qemu);
                assert!(!self.may_have_run, "a QEMU is ended whose guest may have run");
                if qemu == Owner::Others {
                    assert!(!self.is_loaded, "a guest is left in a QEMU beside its image");
                }
                assert_eq!(unmark, self.mark != Mark::Sealed, "the image is {:?}", self.mark);
                assert!(self.reason.is_some());
            }
            Effect::Resume => {
                assert_eq!(
                    self.mark,
                    Mark::Waking,
                    "a guest runs beside an image that could be woken"
                );
                // Until QEMU says no.
                self.may_have_run = true;
            }
            Effect::Consume => assert!(self.may_have_run),
            Effect::Interrupt => unreachable!("it is no effect of its own"),
            _ => assert_eq!(self.reason, None, "{effect:?} although it was given up"),
        }
        self.under_way = Some(effect);
    }

    fn end(&mut self, failed: Option<Code>) -> Input {
        let effect = self.under_way.take().expect("an effect is under way");
        match (effect, failed) {
            (Effect::Load, None) => {
                self.is_loaded = true;
                if self.qemu == Owner::Others {
                    // A cancel came too late.
                    self.reason = None;
                }
            }
            (Effect::Mark, Some(_)) if self.qemu == Owner::Others => {
                self.mark = Mark::Either;
                self.is_doubtful = true;
            }
            (Effect::Resume, Some(_)) if self.qemu == Owner::Others => self.is_doubtful = true,
            (Effect::Mark, None) => self.mark = Mark::Waking,
            (Effect::Mark, Some(_)) => self.mark = Mark::Either,
            (Effect::Resume, Some(Code::Refused)) => self.may_have_run = false,
            (Effect::Resume, Some(_)) => self.is_doubtful = true,
            (Effect::Consume, None) => self.mark = Mark::Consumed,
            (Effect::Abandon { .. }, None) => {
                self.is_abandoned = true;
                self.mark = Mark::Sealed;
            }
            (Effect::Abandon { .. }, Some(_)) => self.is_doubtful = true,
            _ => {}
        }
        match failed {
            None => Input::Done,
            Some(code) => {
                if effect != Effect::Consume {
                    self.reason.get_or_insert(code);
                }
                Input::Failed(broken(code))
            }
        }
    }

    fn expect_end(&self, machine: &Machine) {
        assert_eq!(self.under_way, None, "over in the middle of an effect");
        match machine.phase() {
            Phase::Awake => {
                assert!(self.may_have_run && matches!(self.mark, Mark::Waking | Mark::Consumed));
                assert_eq!(machine.failure(), None);
            }
            Phase::Failed => {
                assert!(self.is_abandoned && self.mark == Mark::Sealed && !self.may_have_run);
                let failure = machine.failure().expect("a reason");
                assert_eq!(
                    (Some(failure.code), failure.guest),
                    (self.reason, GuestState::Stopped)
                );
            }
            Phase::Uncertain => {
                assert!(self.is_doubtful);
                assert_eq!(
                    machine.failure().map(|failure| failure.code),
                    Some(Code::Operator)
                );
                assert!(!self.may_have_run || self.mark == Mark::Waking);
                assert!(!self.is_abandoned || !self.is_loaded || self.qemu == Owner::Ours);
            }
            phase => panic!("{phase:?} is no end"),
        }
    }
}

fn is_over(machine: &Machine) -> bool {
    matches!(machine.phase(), Phase::Awake | Phase::Failed | Phase::Uncertain)
}

fn live(qemu: Owner, happenings: &[Happening]) -> Machine {
    let (mut machine, first) = Machine::begin(qemu);
    let mut world = World {
        qemu,
        is_loaded: false,
        under_way: None,
        mark: Mark::Sealed,
        may_have_run: false,
        is_abandoned: false,
        is_doubtful: false,
        reason: None,
    };
    world.begin(first);
    let undisturbed = std::iter::repeat_n(&Happening::EffectEnds, 12);
    for happening in happenings.iter().chain(undisturbed) {
        if is_over(&machine) {
            break;
        }
        let input = match happening {
            Happening::EffectEnds => world.end(None),
            Happening::Refused => world.end(Some(Code::Refused)),
            Happening::NoAnswer => world.end(Some(Code::Unreachable)),
            Happening::Cancel => Input::CancelRequested,
        };
        let is_cancel = input == Input::CancelRequested;
        match machine.step(input) {
            Some(Effect::Interrupt) => {
                assert!(is_cancel && !world.may_have_run, "too late");
                world.reason.get_or_insert(Code::Cancelled);
            }
            Some(effect) => {
                assert!(!is_cancel, "{effect:?} before the one under way has ended");
                world.begin(effect);
            }
            None => assert!(is_cancel || is_over(&machine)),
        }
    }
    assert!(is_over(&machine), "undisturbed it comes to no end");
    world.expect_end(&machine);
    machine
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 4096, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_the_guest_runs_once_at_most(happenings in prop::collection::vec(happening(), 0..40)) {
        for qemu in [Owner::Ours, Owner::Others] {
            let machine = live(qemu, &happenings);
            for input in inputs() {
                let mut again = machine.clone();
                prop_assert_eq!(again.step(input), None);
                prop_assert_eq!(&again, &machine);
            }
        }
    }
}

/// One of each kind.
fn inputs() -> [Input; 4] {
    [
        Input::Done,
        Input::Failed(broken(Code::Refused)),
        Input::Failed(broken(Code::Unreachable)),
        Input::CancelRequested,
    ]
}

fn machine_in(phase: Phase) -> Machine {
    let (mut machine, _) = Machine::begin(Owner::Ours);
    match phase {
        Phase::Abandoning | Phase::Failed | Phase::Uncertain => {
            machine.step(Input::Failed(broken(Code::StorageIo)));
            match phase {
                Phase::Failed => machine.step(Input::Done),
                Phase::Uncertain => machine.step(Input::Failed(broken(Code::StorageIo))),
                _ => None,
            };
        }
        _ => {
            while machine.phase() != phase {
                machine.step(Input::Done);
            }
        }
    }
    assert_eq!(machine.phase(), phase);
    machine
}

#[test]
fn every_input_in_every_phase_does_what_the_table_says() {
    use Effect::{Check, Consume, Interrupt, Load, Mark, Prepare, Resume, Start};
    use Phase::{
        Abandoning, Awake, Checking, Consuming, Failed, Loading, Marking, Opening, Preparing, Resuming,
        Starting, Uncertain,
    };
    let qemu = Owner::Ours;
    let abandons = |unmark| (Abandoning, Some(Effect::Abandon { unmark, qemu }));
    let told = |phase| (phase, Some(Interrupt));
    let stays = |phase| (phase, None);
    // In the order of the inputs: done, refused, no answer, cancel.
    let table = [
        (
            Opening,
            [
                (Preparing, Some(Prepare)),
                abandons(false),
                abandons(false),
                told(Opening),
            ],
        ),
        (
            Preparing,
            [
                (Starting, Some(Start)),
                abandons(false),
                abandons(false),
                told(Preparing),
            ],
        ),
        (
            Starting,
            [
                (Checking, Some(Check)),
                abandons(false),
                abandons(false),
                told(Starting),
            ],
        ),
        (
            Checking,
            [
                (Loading, Some(Load)),
                abandons(false),
                abandons(false),
                told(Checking),
            ],
        ),
        (
            Loading,
            [
                (Marking, Some(Mark)),
                abandons(false),
                abandons(false),
                told(Loading),
            ],
        ),
        (
            Marking,
            [
                (Resuming, Some(Resume)),
                abandons(true),
                abandons(true),
                told(Marking),
            ],
        ),
        (
            Resuming,
            [
                (Consuming, Some(Consume)),
                abandons(true),
                stays(Uncertain),
                stays(Resuming),
            ],
        ),
        (
            Consuming,
            [stays(Awake), stays(Awake), stays(Awake), stays(Consuming)],
        ),
        (
            Abandoning,
            [
                stays(Failed),
                stays(Uncertain),
                stays(Uncertain),
                stays(Abandoning),
            ],
        ),
        (Awake, [stays(Awake); 4]),
        (Failed, [stays(Failed); 4]),
        (Uncertain, [stays(Uncertain); 4]),
    ];
    for (phase, row) in table {
        for (input, expected) in inputs().into_iter().zip(row) {
            let mut machine = machine_in(phase);
            let effect = machine.step(input.clone());
            assert_eq!((machine.phase(), effect), expected, "{input:?} in {phase:?}");
        }
    }
}
