//! The disk takes no more writes, from some instant of a save on. Whatever instant that is: a save that was called done is on
//! the disk, whole, and one that was not is no image, or the command says that somebody has to look.

use std::time::{Duration, Instant};

use dormouse_tests::{Foreign, Lab, Outcome, QemuBuild, UnpluggableDevice, faults::SmallVolume, until};

const IMAGE_INVALID: i32 = 8;
const STORAGE: i32 = 9;
const OPERATOR: i32 = 10;

/// From the record before the seal on, which is written while memory is: the whole save takes a tenth of a second.
fn instants() -> impl Iterator<Item = Duration> {
    (0..150).step_by(10).map(Duration::from_millis)
}

fn guest() -> Foreign {
    let ram = "memory-backend-file,id=pc.ram,size=64M,share=on,mem-path=/dev/shm";
    Foreign::start(
        QemuBuild::V10_0,
        &["-object", ram, "-machine", "memory-backend=pc.ram"],
    )
}

/// Saves it to a disk that takes no more writes so long after the record before the seal.
fn saved_until(foreign: &Foreign, device: &UnpluggableDevice, after: Duration) -> Outcome {
    let dormouse = &foreign.scene.dormouse;
    let saving = dormouse.start_hibernating_by_monitor(&foreign.socket(), &foreign.image(), &[]);
    let is_sealing =
        |records: Vec<(_, serde_json::Value)>| records.iter().any(|(_, record)| record["point"] != "saving");
    until("the record before the seal", || {
        is_sealing(dormouse.records()).then_some(())
    });
    let instant = Instant::now() + after;
    while Instant::now() < instant {
        std::hint::spin_loop();
    }
    device.take_no_more_writes();
    dormouse.finish(saving)
}

/// What the command said against what is there.
fn expect_true(foreign: &Foreign, outcome: &Outcome, looked_at: &Outcome, after: Duration) {
    let told = format!("after {after:?}: {outcome:#?} {looked_at:#?}");
    match outcome.exit_code() {
        Some(0) => assert_eq!(looked_at.exit_code(), Some(0), "{told}"),
        Some(OPERATOR) => {}
        Some(STORAGE) => {
            assert_ne!(looked_at.exit_code(), Some(0), "{told}");
            foreign.scene.guest.wait_for_more_ticks();
        }
        _ => panic!("{told}"),
    }
}

#[test]
fn a_save_to_a_device_is_there_when_it_was_called_done_and_not_when_it_was_not() {
    let mut codes = Vec::new();
    for after in instants() {
        let device = UnpluggableDevice::new(160);
        let foreign = guest().with_image_at(device.path().to_owned());
        let outcome = saved_until(&foreign, &device, after);
        let looked_at = foreign.scene.dormouse.image("verify", device.path(), &[]);
        expect_true(&foreign, &outcome, &looked_at, after);
        let code = looked_at.exit_code();
        assert!(code == Some(0) || code == Some(IMAGE_INVALID), "{looked_at:#?}");
        codes.push(outcome.exit_code());
    }
    println!("exit codes: {codes:?}");
}

#[test]
fn a_save_to_a_file_is_there_after_a_crash_when_it_was_called_done_and_not_when_it_was_not() {
    let mut codes = Vec::new();
    for after in instants() {
        let device = UnpluggableDevice::new(224);
        let mut foreign = guest();
        let volume = SmallVolume::on(&foreign.scene.lab, device.path());
        foreign = foreign.with_image_at(volume.path("guest.image"));
        let outcome = saved_until(&foreign, &device, after);
        // What the disk has, not what is in the page cache.
        let lab = Lab::new();
        device.copy_to(&lab.path("disk"));
        let found = SmallVolume::found_in(&lab, &lab.path("disk"));
        let looked_at = foreign
            .scene
            .dormouse
            .image("verify", &found.path("guest.image"), &[]);
        expect_true(&foreign, &outcome, &looked_at, after);
        codes.push(outcome.exit_code());
    }
    println!("exit codes: {codes:?}");
}
