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
        Input::PreflightPassed { running, live: false }
    } else {
        Input::Done
    }
}

/// A machine in `phase`, with its effect under way.
fn machine_in(phase: Phase, running: bool) -> Machine {
    machine_of(Aim::Hibernate, phase, running)
}

fn machine_of(aim: Aim, phase: Phase, running: bool) -> Machine {
    let (mut machine, _) = Machine::begin(aim);
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
    let (mut machine, first) = Machine::begin(Aim::Hibernate);
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

const SNAPSHOT: Aim = Aim::Snapshot { leave_paused: false };

const SNAPSHOT_FORWARD: [(Phase, Effect); 9] = [
    (Phase::Preflight, Effect::Preflight),
    (Phase::Reserving, Effect::Reserve),
    (Phase::Pausing, Effect::Pause),
    (Phase::SavingDevices, Effect::SaveDevices),
    (Phase::SavingMemory, Effect::SaveMemory),
    (Phase::GivingBack, Effect::GiveBack(GiveBack::Running)),
    (Phase::Syncing, Effect::Sync),
    (Phase::Sealing, Effect::Seal),
    (Phase::Trimming, Effect::Trim),
];

#[test]
fn undisturbed_a_snapshot_gives_its_guest_back_before_anything_is_synced() {
    let (mut machine, first) = Machine::begin(SNAPSHOT);
    let mut effects = vec![(machine.phase(), first)];
    while let Some(effect) = machine.step(input_for(machine.phase(), true)) {
        effects.push((machine.phase(), effect));
    }
    assert_eq!(effects, SNAPSHOT_FORWARD);
    assert_eq!((machine.phase(), machine.failure()), (Phase::SnapshotTaken, None));
}

#[test]
fn the_guest_of_a_snapshot_is_left_as_it_was_or_as_it_was_asked_for() {
    for (leave_paused, running, left) in [
        (false, true, GiveBack::Running),
        (false, false, GiveBack::Paused),
        (true, true, GiveBack::Still),
        (true, false, GiveBack::Still),
    ] {
        let mut machine = machine_of(Aim::Snapshot { leave_paused }, Phase::SavingMemory, running);
        assert_eq!(machine.step(Input::Done), Some(Effect::GiveBack(left)));
    }
}

#[test]
fn what_fails_before_the_guest_of_a_snapshot_is_back_gives_it_back_as_it_was() {
    for leave_paused in [false, true] {
        for phase in [Phase::Pausing, Phase::SavingDevices, Phase::SavingMemory] {
            let mut machine = machine_of(Aim::Snapshot { leave_paused }, phase, true);
            let effect = machine.step(Input::Failed(broken()));
            assert_eq!(effect, Some(Effect::RollBack(GiveBack::Running)), "{phase:?}");
            machine.step(Input::Done);
            assert_eq!(
                (machine.phase(), machine.failure()),
                (Phase::Failed, Some(&broken()))
            );
        }
    }
}

#[test]
fn what_fails_after_the_guest_of_a_snapshot_is_back_takes_the_image_away_and_nothing_else() {
    for phase in [Phase::Syncing, Phase::Sealing] {
        let mut machine = machine_of(SNAPSHOT, phase, true);
        assert_eq!(machine.step(Input::Failed(broken())), Some(Effect::Discard));
        assert_eq!(machine.answer_to_cancel(), CancelAnswer::AlreadyEnding);
        assert_eq!(machine.step(Input::Done), None);
        assert_eq!(
            (machine.phase(), machine.failure()),
            (Phase::Failed, Some(&broken()))
        );
    }
}

#[test]
fn a_guest_that_cannot_be_given_back_is_for_an_operator_and_has_no_snapshot() {
    let mut machine = machine_of(SNAPSHOT, Phase::GivingBack, true);
    let refused = Failure::new(Code::Refused, "QEMU said no");
    assert_eq!(machine.step(Input::Failed(refused)), Some(Effect::Discard));
    machine.step(Input::Done);
    let failure = machine.failure().unwrap();
    assert_eq!(
        (machine.phase(), failure.code),
        (Phase::Uncertain, Code::Operator)
    );
    assert!(failure.message.contains("QEMU said no"), "{failure}");
    // A QEMU that is gone has no guest to look for.
    let gone = Failure::new(Code::Unreachable, "QEMU is gone");
    let mut machine = machine_of(SNAPSHOT, Phase::GivingBack, true);
    machine.step(Input::Failed(gone.clone()));
    machine.step(Input::Done);
    assert_eq!(machine.failure(), Some(&gone));
}

#[test]
fn a_cancel_of_a_snapshot_waits_until_its_guest_is_back() {
    for phase in [Phase::GivingBack, Phase::Syncing] {
        let mut machine = machine_of(SNAPSHOT, phase, true);
        assert_eq!(machine.answer_to_cancel(), CancelAnswer::Accepted);
        assert_eq!(machine.step(Input::CancelRequested), Some(Effect::Interrupt));
        assert_eq!(machine.step(Input::Done), Some(Effect::Discard), "{phase:?}");
        machine.step(Input::Done);
        assert_eq!(machine.failure().unwrap().code, Code::Cancelled);
    }
    for phase in [Phase::Sealing, Phase::Trimming] {
        let mut machine = machine_of(SNAPSHOT, phase, true);
        assert_eq!(machine.answer_to_cancel(), CancelAnswer::TooLate);
        assert_eq!(machine.step(Input::CancelRequested), None);
    }
}

#[test]
fn whoever_runs_the_guest_of_a_snapshot_spoils_it_only_until_it_is_back() {
    for phase in [Phase::SavingDevices, Phase::SavingMemory] {
        let mut machine = machine_of(SNAPSHOT, phase, false);
        assert_eq!(machine.step(Input::GuestRan), Some(Effect::Interrupt));
    }
    for phase in [Phase::GivingBack, Phase::Syncing, Phase::Sealing, Phase::Trimming] {
        let mut machine = machine_of(SNAPSHOT, phase, false);
        assert_eq!(machine.step(Input::GuestRan), None, "{phase:?}");
    }
}

#[test]
fn a_snapshot_that_cannot_be_trimmed_is_one() {
    let mut machine = machine_of(SNAPSHOT, Phase::Trimming, true);
    assert_eq!(machine.step(Input::Failed(broken())), None);
    assert_eq!((machine.phase(), machine.failure()), (Phase::SnapshotTaken, None));
}

/// A live snapshot while its guest is saved.
fn live_machine() -> Machine {
    let (mut machine, _) = Machine::begin(SNAPSHOT);
    machine.step(Input::PreflightPassed {
        running: true,
        live: true,
    });
    assert_eq!(machine.step(Input::Done), Some(Effect::SaveLive));
    machine
}

#[test]
fn a_live_snapshot_saves_its_guest_while_it_runs_and_then_gives_it_back() {
    let mut machine = live_machine();
    // Of course it runs.
    assert_eq!(machine.step(Input::GuestRan), None);
    assert_eq!(
        machine.step(Input::Done),
        Some(Effect::GiveBack(GiveBack::Running))
    );
    assert_eq!(machine.step(Input::Done), Some(Effect::Sync));
}

#[test]
fn a_live_snapshot_that_fails_or_is_cancelled_gives_its_guest_back_running() {
    let mut machine = live_machine();
    let back = Some(Effect::RollBack(GiveBack::Running));
    assert_eq!(machine.step(Input::Failed(broken())), back);
    let mut machine = live_machine();
    assert_eq!(machine.answer_to_cancel(), CancelAnswer::Accepted);
    assert_eq!(machine.step(Input::CancelRequested), Some(Effect::Interrupt));
    assert_eq!(machine.step(Input::Failed(broken())), back);
    machine.step(Input::Done);
    assert_eq!(machine.failure().unwrap().code, Code::Cancelled);
}

#[test]
fn a_live_snapshot_of_a_paused_guest_is_a_snapshot_and_a_hibernation_is_never_live() {
    for (aim, running) in [(SNAPSHOT, false), (Aim::Hibernate, true)] {
        let (mut machine, _) = Machine::begin(aim);
        machine.step(Input::PreflightPassed { running, live: true });
        assert_eq!(machine.step(Input::Done), Some(Effect::Pause));
    }
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
        let aim = [Aim::Hibernate, SNAPSHOT][sequence / inputs.len() % 2];
        let (mut machine, _) = Machine::begin(aim);
        machine.step(Input::PreflightPassed {
            running: sequence % 2 == 0,
            live: sequence % 3 == 0,
        });
        let (mut sealed, mut given_back, mut discarded, mut rest) = (false, 0, false, sequence);
        for _ in 0..9 {
            let input = inputs[rest % inputs.len()].clone();
            rest /= inputs.len();
            let seals =
                machine.phase() == Phase::Sealing && input == Input::Done && machine.failure.is_none();
            let effect = machine.step(input);
            sealed |= seals;
            match effect {
                Some(Effect::Terminate) => {
                    assert!(
                        sealed && aim == Aim::Hibernate,
                        "{sequence}: QEMU ended before the seal"
                    );
                }
                Some(Effect::RollBack(_)) => {
                    assert!(!sealed, "{sequence}: a rollback after the seal");
                    given_back += 1;
                }
                Some(Effect::GiveBack(_)) => given_back += 1,
                Some(Effect::Discard) => discarded = true,
                _ => {}
            }
            assert!(given_back < 2, "{sequence}: the guest was given back twice");
            assert!(
                !(sealed && discarded),
                "{sequence}: what was sealed was discarded"
            );
            let phase = machine.phase();
            assert!(
                !matches!(phase, Phase::Hibernated | Phase::SnapshotTaken) || sealed,
                "{sequence}: done without a seal"
            );
            assert!(
                phase != Phase::SnapshotTaken || given_back == 1,
                "{sequence}: a snapshot whose guest stands still"
            );
        }
    }
}
