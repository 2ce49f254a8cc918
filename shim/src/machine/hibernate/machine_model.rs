//! The hibernation's machine against a small model of what it drives: a guest, its QEMU and an image.
//!
//! The model knows nothing of phases. It does what the machine asks for, has it succeed or fail, lets others interfere at
//! any instant, and says what must never be. A table beside it says what each input does in each phase.

use std::time::Duration;

use proptest::prelude::*;

use super::machine::{Aim, CancelAnswer, Effect, GiveBack, Input, Limit, Machine, Phase};
use crate::error::{Code, Failure};

const LIMIT: Limit = Limit::Total(Duration::from_secs(9));

fn broken() -> Failure {
    Failure::new(Code::StorageIo, "the disk is gone")
}

/// Something that happens while an effect is under way, or its end.
#[derive(Debug, Clone, Copy)]
enum Happening {
    EffectEnds,
    EffectFails,
    Cancel,
    OutOfTime,
    GuestRuns,
    /// An answer that belongs to no effect.
    Stray,
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        12 => Just(Happening::EffectEnds),
        2 => Just(Happening::EffectFails),
        1 => Just(Happening::Cancel),
        1 => Just(Happening::OutOfTime),
        1 => Just(Happening::GuestRuns),
        1 => Just(Happening::Stray),
    ]
}

/// A guest, its QEMU and an image, as they are driven.
#[derive(Debug)]
struct World {
    ran_before: bool,
    aim: Aim,
    /// Whether the guest of a snapshot shall run as long as it can.
    is_live: bool,
    under_way: Option<Effect>,
    /// Whether the guest was stopped, or told to be.
    is_touched: bool,
    /// Whether the guest ran while its memory was being saved.
    ran_meanwhile: bool,
    is_sealed: bool,
    /// Whether the guest of a snapshot goes on.
    goes_on: bool,
    is_given_back: bool,
    is_ended: bool,
    /// Whether what was tried last, and has no other way out, failed.
    is_doubtful: bool,
    /// The first reason to give up.
    reason: Option<Code>,
    /// Whether a cancel was promised to give the guest back.
    is_promised: bool,
}

impl World {
    fn new(ran_before: bool, aim: Aim, is_live: bool) -> Self {
        Self {
            ran_before,
            aim,
            is_live,
            goes_on: false,
            under_way: None,
            is_touched: false,
            ran_meanwhile: false,
            is_sealed: false,
            is_given_back: false,
            is_ended: false,
            is_doubtful: false,
            reason: None,
            is_promised: false,
        }
    }

    /// From the moment in which the devices are taken until the image is sealed.
    fn is_fragile(&self) -> bool {
        !self.goes_on
            && matches!(
                self.under_way,
                Some(Effect::SaveDevices | Effect::SaveMemory | Effect::Sync | Effect::Seal)
            )
    }

    fn as_it_was(&self) -> GiveBack {
        if self.ran_before {
            GiveBack::Running
        } else {
            GiveBack::Paused
        }
    }

    /// What the machine asked for is begun, if it may be.
    fn begin(&mut self, effect: Effect) {
        assert_eq!(self.under_way, None, "{effect:?} is asked for beside another");
        assert!(!self.is_ended && !self.is_given_back, "{effect:?} after the end");
        match effect {
            Effect::RollBack(how) => {
                assert!(self.is_touched, "a guest that nobody touched is given back");
                assert!(!self.is_sealed, "a guest is given back beside its image");
                assert!(!self.goes_on, "a guest that goes on is touched again");
                let ran_on = self.ran_meanwhile.then_some(GiveBack::AsItIs);
                assert_eq!(how, ran_on.unwrap_or_else(|| self.as_it_was()));
                assert!(self.reason.is_some(), "a guest is given back for no reason");
            }
            Effect::GiveBack(how) => {
                assert_eq!(self.reason, None, "a snapshot goes on although it was given up");
                match self.aim {
                    Aim::Hibernate => panic!("the guest of a hibernation goes on"),
                    Aim::Snapshot { leave_paused: true } => assert_eq!(how, GiveBack::Still),
                    Aim::Snapshot { leave_paused: false } => assert_eq!(how, self.as_it_was()),
                }
            }
            Effect::SaveLive => assert!(self.is_live && self.ran_before && self.aim.is_snapshot()),
            Effect::Pause => assert!(!(self.is_live && self.ran_before && self.aim.is_snapshot())),
            Effect::Trim => assert!(self.is_sealed && self.goes_on && self.reason.is_none()),
            Effect::Discard => assert!(self.aim.is_snapshot() && self.reason.is_some() && !self.is_sealed),
            Effect::Terminate => {
                assert_eq!(self.aim, Aim::Hibernate, "the QEMU of a snapshot is ended");
                assert!(self.is_sealed, "QEMU is ended without an image");
                assert!(!self.ran_meanwhile, "QEMU is ended although its guest ran on");
            }
            Effect::Interrupt => unreachable!("it is no effect of its own"),
            _ => assert_eq!(self.reason, None, "{effect:?} although it was given up"),
        }
        self.is_touched |= matches!(effect, Effect::Pause | Effect::SaveLive);
        self.under_way = Some(effect);
    }

    /// The effect under way ends; tells the input that its runner makes of it.
    fn end(&mut self, well: bool) -> Input {
        let effect = self.under_way.take().expect("an effect is under way");
        match (effect, well) {
            (Effect::Seal, true) => self.is_sealed = self.reason.is_none(),
            (Effect::GiveBack(_), true) => self.goes_on = true,
            (Effect::RollBack(_), true) => self.is_given_back = true,
            (Effect::Terminate, true) => self.is_ended = true,
            (Effect::RollBack(_) | Effect::GiveBack(_) | Effect::Terminate, false) => {
                self.is_doubtful = true;
            }
            _ => {}
        }
        match (effect, well) {
            (_, false) => {
                // A copy that takes more space than it needs is one all the same.
                if effect != Effect::Trim {
                    self.reason.get_or_insert(Code::StorageIo);
                }
                Input::Failed(broken())
            }
            (Effect::Preflight, true) => Input::PreflightPassed {
                running: self.ran_before,
                live: self.is_live,
            },
            (_, true) => Input::Done,
        }
    }

    /// What must be true of the world once the machine says that it is over.
    fn expect_end(&self, machine: &Machine) {
        assert_eq!(self.under_way, None, "over in the middle of an effect");
        match machine.phase() {
            Phase::Hibernated => {
                assert!(self.is_sealed && self.is_ended && !self.is_promised);
                assert_eq!(machine.failure(), None);
            }
            Phase::SnapshotTaken => {
                assert!(self.is_sealed && self.goes_on && !self.is_ended && !self.is_promised);
                assert_eq!(machine.failure(), None);
            }
            Phase::Failed => {
                assert!(!self.is_sealed && !self.is_ended);
                assert_eq!(self.is_given_back || self.goes_on, self.is_touched);
                assert_eq!(machine.failure().map(|failure| failure.code), self.reason);
            }
            Phase::Uncertain => {
                assert!(self.is_doubtful);
                assert_eq!(
                    machine.failure().map(|failure| failure.code),
                    Some(Code::Operator)
                );
            }
            phase => panic!("{phase:?} is no end"),
        }
    }
}

/// What it is for, and whether a live save is wished for.
fn aim() -> impl Strategy<Value = (Aim, bool)> {
    let aim = prop_oneof![
        Just(Aim::Hibernate),
        any::<bool>().prop_map(|leave_paused| Aim::Snapshot { leave_paused }),
    ];
    (aim, any::<bool>())
}

/// Goes through one life; the end of what happens is an undisturbed one.
fn live(ran_before: bool, (aim, is_live): (Aim, bool), happenings: &[Happening]) -> (Machine, World) {
    let (mut machine, first) = Machine::begin(aim);
    let mut world = World::new(ran_before, aim, is_live);
    world.begin(first);
    let undisturbed = std::iter::repeat_n(&Happening::EffectEnds, 12);
    for happening in happenings.iter().chain(undisturbed) {
        if machine.is_over() {
            break;
        }
        let can_be_cancelled = machine.answer_to_cancel() == CancelAnswer::Accepted;
        let input = match happening {
            Happening::EffectEnds => world.end(true),
            Happening::EffectFails => world.end(false),
            Happening::Cancel => {
                world.is_promised |= can_be_cancelled;
                if can_be_cancelled {
                    world.reason.get_or_insert(Code::Cancelled);
                }
                Input::CancelRequested
            }
            Happening::OutOfTime => {
                if can_be_cancelled {
                    world.reason.get_or_insert(Code::TimedOut);
                }
                Input::OutOfTime(LIMIT)
            }
            Happening::GuestRuns => {
                if world.is_fragile() {
                    world.ran_meanwhile = true;
                    world.reason.get_or_insert(Code::Refused);
                }
                Input::GuestRan
            }
            Happening::Stray => match world.under_way {
                Some(Effect::Preflight) => Input::Done,
                _ => Input::PreflightPassed {
                    running: !world.ran_before,
                    live: !world.is_live,
                },
            },
        };
        let is_end = matches!(happening, Happening::EffectEnds | Happening::EffectFails);
        match machine.step(input) {
            Some(Effect::Interrupt) => assert!(!is_end && world.reason.is_some()),
            Some(effect) => {
                assert!(is_end, "{effect:?} before the one under way has ended");
                world.begin(effect);
            }
            None => assert!(
                !is_end || machine.is_over(),
                "nothing is asked for, and it is not over"
            ),
        }
        assert_eq!(machine.is_over(), world.under_way.is_none());
    }
    assert!(machine.is_over(), "undisturbed it comes to no end");
    world.expect_end(&machine);
    (machine, world)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, cases: 4096, ..ProptestConfig::default() })]

    #[test]
    fn whatever_happens_the_guest_is_in_one_place(
        ran_before: bool,
        aim in aim(),
        happenings in prop::collection::vec(happening(), 0..40),
    ) {
        live(ran_before, aim, &happenings);
    }

    #[test]
    fn what_is_over_stays_so(
        running: bool,
        aim in aim(),
        happenings in prop::collection::vec(happening(), 0..40),
    ) {
        let (machine, _) = live(running, aim, &happenings);
        for input in inputs() {
            let mut again = machine.clone();
            prop_assert_eq!(again.step(input), None);
            prop_assert_eq!(&again, &machine);
        }
    }
}

/// One of each kind.
fn inputs() -> [Input; 6] {
    [
        Input::PreflightPassed {
            running: true,
            live: false,
        },
        Input::Done,
        Input::Failed(broken()),
        Input::CancelRequested,
        Input::OutOfTime(LIMIT),
        Input::GuestRan,
    ]
}

/// A machine in `phase`, its effect under way.
fn machine_in(phase: Phase) -> Machine {
    let (mut machine, _) = Machine::begin(Aim::Hibernate);
    machine.step(Input::PreflightPassed {
        running: true,
        live: false,
    });
    match phase {
        Phase::Preflight => return Machine::begin(Aim::Hibernate).0,
        Phase::RollingBack | Phase::Failed | Phase::Uncertain => {
            machine.step(Input::Done);
            machine.step(Input::Failed(broken()));
            match phase {
                Phase::Failed => machine.step(Input::Done),
                Phase::Uncertain => machine.step(Input::Failed(broken())),
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
    use Effect::{Interrupt, Pause, Reserve, RollBack, SaveDevices, SaveMemory, Seal, Sync, Terminate};
    use Phase::{
        Failed, Hibernated, Pausing, Preflight, Reserving, RollingBack, SavingDevices, SavingMemory, Sealing,
        Syncing, Terminating, Uncertain,
    };
    let back = (RollingBack, Some(RollBack(GiveBack::Running)));
    let untouched = (Failed, None);
    let stays = |phase| (phase, None);
    let told = |phase| (phase, Some(Interrupt));
    // In the order of the inputs: preflight passed, done, failed, cancel, out of time, guest ran.
    let table = [
        (
            Preflight,
            [
                (Reserving, Some(Reserve)),
                stays(Preflight),
                untouched,
                told(Preflight),
                told(Preflight),
                stays(Preflight),
            ],
        ),
        (
            Reserving,
            [
                stays(Reserving),
                (Pausing, Some(Pause)),
                untouched,
                told(Reserving),
                told(Reserving),
                stays(Reserving),
            ],
        ),
        (
            Pausing,
            [
                stays(Pausing),
                (SavingDevices, Some(SaveDevices)),
                back,
                told(Pausing),
                told(Pausing),
                stays(Pausing),
            ],
        ),
        (
            SavingDevices,
            [
                stays(SavingDevices),
                (SavingMemory, Some(SaveMemory)),
                back,
                told(SavingDevices),
                told(SavingDevices),
                told(SavingDevices),
            ],
        ),
        (
            SavingMemory,
            [
                stays(SavingMemory),
                (Syncing, Some(Sync)),
                back,
                told(SavingMemory),
                told(SavingMemory),
                told(SavingMemory),
            ],
        ),
        (
            Syncing,
            [
                stays(Syncing),
                (Sealing, Some(Seal)),
                back,
                told(Syncing),
                told(Syncing),
                told(Syncing),
            ],
        ),
        (
            Sealing,
            [
                stays(Sealing),
                (Terminating, Some(Terminate)),
                back,
                stays(Sealing),
                stays(Sealing),
                told(Sealing),
            ],
        ),
        (
            Terminating,
            [
                stays(Terminating),
                stays(Hibernated),
                stays(Uncertain),
                stays(Terminating),
                stays(Terminating),
                stays(Terminating),
            ],
        ),
        (
            RollingBack,
            [
                stays(RollingBack),
                stays(Failed),
                stays(Uncertain),
                stays(RollingBack),
                stays(RollingBack),
                stays(RollingBack),
            ],
        ),
        (Hibernated, [stays(Hibernated); 6]),
        (Failed, [stays(Failed); 6]),
        (Uncertain, [stays(Uncertain); 6]),
    ];
    for (phase, row) in table {
        for (input, expected) in inputs().into_iter().zip(row) {
            let mut machine = machine_in(phase);
            let effect = machine.step(input.clone());
            assert_eq!((machine.phase(), effect), expected, "{input:?} in {phase:?}");
        }
    }
}

#[test]
fn after_a_cancel_every_input_in_every_phase_does_what_the_table_says() {
    use Effect::{Interrupt, RollBack};
    use Phase::{Failed, Pausing, Preflight, Reserving, RollingBack, SavingDevices, SavingMemory, Syncing};
    for phase in [
        Preflight,
        Reserving,
        Pausing,
        SavingDevices,
        SavingMemory,
        Syncing,
    ] {
        let is_touched = !matches!(phase, Preflight | Reserving);
        let is_fragile = matches!(phase, SavingDevices | SavingMemory | Syncing);
        let stays = (phase, None);
        let ends = if is_touched {
            (RollingBack, Some(RollBack(GiveBack::Running)))
        } else {
            (Failed, None)
        };
        let (passed, done) = if phase == Preflight {
            (ends, stays)
        } else {
            (stays, ends)
        };
        let ran = if is_fragile {
            (phase, Some(Interrupt))
        } else {
            stays
        };
        for (input, expected) in inputs().into_iter().zip([passed, done, ends, stays, stays, ran]) {
            let mut machine = machine_in(phase);
            assert_eq!(machine.step(Input::CancelRequested), Some(Interrupt));
            let effect = machine.step(input.clone());
            assert_eq!(
                (machine.phase(), effect),
                expected,
                "{input:?} in {phase:?} after a cancel"
            );
        }
    }
}

#[test]
fn every_input_in_every_phase_of_a_snapshot_alone_does_what_the_table_says() {
    use Effect::{Discard, Interrupt, Sync};
    use Phase::{Discarding, Failed, GivingBack, SnapshotTaken, Syncing, Trimming};
    let stays = |phase| (phase, None);
    let told = (GivingBack, Some(Interrupt));
    let discards = (Discarding, Some(Discard));
    // In the order of the inputs, as above.
    let table = [
        (
            GivingBack,
            [
                stays(GivingBack),
                (Syncing, Some(Sync)),
                discards,
                told,
                told,
                stays(GivingBack),
            ],
        ),
        (
            Trimming,
            [
                stays(Trimming),
                stays(SnapshotTaken),
                stays(SnapshotTaken),
                stays(Trimming),
                stays(Trimming),
                stays(Trimming),
            ],
        ),
        (
            Discarding,
            [
                stays(Discarding),
                stays(Failed),
                stays(Failed),
                stays(Discarding),
                stays(Discarding),
                stays(Discarding),
            ],
        ),
        (SnapshotTaken, [stays(SnapshotTaken); 6]),
    ];
    for (phase, row) in table {
        for (input, expected) in inputs().into_iter().zip(row) {
            let (mut machine, _) = Machine::begin(Aim::Snapshot { leave_paused: false });
            machine.step(Input::PreflightPassed {
                running: true,
                live: false,
            });
            let way_to = if phase == Discarding { Syncing } else { phase };
            while machine.phase() != way_to {
                machine.step(Input::Done);
            }
            if phase == Discarding {
                machine.step(Input::Failed(broken()));
            }
            let effect = machine.step(input.clone());
            assert_eq!((machine.phase(), effect), expected, "{input:?} in {phase:?}");
        }
    }
}
