//! Storage that fails in the middle: the guest runs on, the command says what it was with the right exit code, and what is
//! left on the storage is not taken for an image.

use std::{
    io::{BufRead, BufReader},
    path::Path,
    time::Duration,
};

use dormouse_tests::{
    DeviceOnVolume, Foreign, QemuBuild, Scene, UnpluggableDevice,
    faults::{self, Hanging, SmallVolume},
    until, within,
};
use rustix::process::Pid;
use serde_json::{Value, json};

const CANCELLED: i32 = 6;
const NO_SPACE: i32 = 7;
const IMAGE_INVALID: i32 = 8;
const STORAGE: i32 = 9;
const OPERATOR: i32 = 10;

const BUILDS: [QemuBuild; 3] = [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1];
const ENGINES: [&str; 2] = ["direct", "stream"];

/// As much as an image of the guest's 64 MiB takes, and some more.
const DEVICE_MIB: u64 = 160;

/// A guest whose memory is to be had from outside, and is not zero; its images go to `image`.
fn guest(build: QemuBuild, image: &Path) -> Foreign {
    let ram = "memory-backend-file,id=pc.ram,size=64M,share=on,mem-path=/dev/shm";
    let foreign = Foreign::start(build, &["-object", ram, "-machine", "memory-backend=pc.ram"]);
    faults::fill_memory(foreign.scene.lab.only_qemu(), 19, 44);
    foreign.with_image_at(image.to_owned())
}

/// Saves the guest slowly, does something when a third of it is saved, and returns the exit code and the error.
fn disturbed(foreign: &Foreign, engine: &str, disturb: impl FnOnce()) -> (Option<i32>, Value) {
    let options = ["--engine", engine, "--rate-limit", "16M"];
    let is_time = |line: &Value| {
        let [done, total] = ["bytes", "total"].map(|name| line[name].as_u64().unwrap_or_default());
        line["phase"] == "SavingMemory" && done * 3 >= total && done < total
    };
    foreign.disturbed_when(&foreign.image(), &options, is_time, |_, _| disturb())
}

/// The guest runs on, with the settings that it had, and can be saved elsewhere.
fn expect_guest_as_before(foreign: &Foreign, settings: &(Value, Value)) {
    foreign.scene.guest.wait_for_more_ticks();
    assert_eq!(&foreign.settings(), settings);
    let elsewhere = foreign.scene.lab.path("elsewhere.image");
    foreign
        .scene
        .dormouse
        .hibernate_by_monitor(&foreign.socket(), &elsewhere)
        .expect_success();
    foreign
        .scene
        .dormouse
        .image("verify", &elsewhere, &[])
        .expect_success();
}

fn expect_failed(outcome: &(Option<i32>, Value), code: i32) {
    let (exit_code, error) = outcome;
    assert_eq!(
        (*exit_code, &error["guest"]),
        (Some(code), &json!("running")),
        "{error}"
    );
}

#[test]
fn a_device_that_is_pulled_out_gives_the_guest_back() {
    for build in BUILDS {
        for engine in ENGINES {
            let device = UnpluggableDevice::new(DEVICE_MIB);
            let foreign = guest(build, device.path());
            let settings = foreign.settings();
            let outcome = disturbed(&foreign, engine, || device.unplug());
            expect_failed(&outcome, STORAGE);
            expect_guest_as_before(&foreign, &settings);
        }
    }
}

#[test]
fn what_is_left_on_a_device_that_takes_no_more_writes_is_no_image() {
    for build in BUILDS {
        for engine in ENGINES {
            let device = UnpluggableDevice::new(DEVICE_MIB);
            let foreign = guest(build, device.path());
            let settings = foreign.settings();
            let outcome = disturbed(&foreign, engine, || device.take_no_more_writes());
            expect_failed(&outcome, STORAGE);
            let dormouse = &foreign.scene.dormouse;
            dormouse
                .image("inspect", device.path(), &[])
                .expect_exit(IMAGE_INVALID);
            dormouse
                .try_wake("woken", device.path(), &[])
                .expect_exit(IMAGE_INVALID);
            expect_guest_as_before(&foreign, &settings);
        }
    }
}

/// As thinly provisioned storage does when its pool is full.
#[test]
fn a_device_with_less_behind_it_than_it_says_gives_the_guest_back() {
    for engine in ENGINES {
        let mut foreign = guest(QemuBuild::V10_0, Path::new("/nowhere"));
        let volume = SmallVolume::new(&foreign.scene.lab, 48);
        let device = DeviceOnVolume::new(&volume, DEVICE_MIB);
        foreign = foreign.with_image_at(device.path().to_owned());
        let settings = foreign.settings();
        let outcome = foreign.hibernate(&["--engine", engine]);
        let error = outcome.result()["error"].clone();
        expect_failed(&(outcome.exit_code(), error), STORAGE);
        let inspected = foreign.scene.dormouse.image("inspect", device.path(), &[]);
        inspected.expect_exit(IMAGE_INVALID);
        expect_guest_as_before(&foreign, &settings);
    }
}

#[test]
fn a_device_that_is_too_small_is_told_before_the_guest_is_touched() {
    let device = UnpluggableDevice::new(40);
    let foreign = guest(QemuBuild::V10_0, device.path());
    let settings = foreign.settings();
    let outcome = foreign.hibernate(&[]).expect_exit(NO_SPACE);
    let phases: Vec<Value> = outcome
        .objects()
        .iter()
        .map(|line| line["phase"].clone())
        .collect();
    assert!(!phases.contains(&json!("Pausing")), "{phases:?}");
    let message = outcome.result()["error"]["message"].to_string();
    assert!(message.contains("40.0 MiB"), "{message}");
    expect_guest_as_before(&foreign, &settings);
}

#[test]
fn a_file_whose_disk_is_pulled_out_gives_the_guest_back() {
    for build in BUILDS {
        for engine in ENGINES {
            let device = UnpluggableDevice::new(256);
            let mut foreign = guest(build, Path::new("/nowhere"));
            let volume = SmallVolume::on(&foreign.scene.lab, device.path());
            foreign = foreign.with_image_at(volume.path("guest.image"));
            let settings = foreign.settings();
            let outcome = disturbed(&foreign, engine, || device.unplug());
            expect_failed(&outcome, STORAGE);
            assert!(!foreign.image().exists(), "there is an image");
            expect_guest_as_before(&foreign, &settings);
        }
    }
}

/// The file system below the device answers nothing, as a network's storage that hangs.
#[test]
fn a_device_that_hangs_is_left_to_itself_by_a_cancel() {
    for engine in ENGINES {
        let mut foreign = guest(QemuBuild::V10_0, Path::new("/nowhere"));
        let volume = SmallVolume::new(&foreign.scene.lab, 256);
        let device = DeviceOnVolume::new(&volume, DEVICE_MIB);
        foreign = foreign.with_image_at(device.path().to_owned());
        let settings = foreign.settings();
        let options = ["--engine", engine, "--rate-limit", "16M"];
        let is_time = |line: &Value| line["phase"] == "SavingMemory" && line["bytes"] != 0;
        let outcome = foreign.disturbed_when(&foreign.image(), &options, is_time, |foreign, client| {
            let _hanging = Hanging::volume(&volume);
            faults::interrupt(client);
            foreign.scene.guest.wait_for_more_ticks();
        });
        expect_failed(&outcome, CANCELLED);
        until("the torn image to be wiped", || {
            let inspected = foreign.scene.dormouse.image("inspect", device.path(), &[]);
            (inspected.exit_code() == Some(IMAGE_INVALID)).then_some(())
        });
        expect_guest_as_before(&foreign, &settings);
    }
}

#[test]
fn an_image_whose_disk_is_lost_in_part_is_neither_verified_nor_woken() {
    let device = UnpluggableDevice::new(DEVICE_MIB);
    let foreign = guest(QemuBuild::V10_0, device.path());
    foreign.hibernate(&[]).expect_success();
    foreign.scene.lab.wait_for_no_qemu();
    let dormouse = &foreign.scene.dormouse;
    dormouse.image("verify", device.path(), &[]).expect_success();
    device.lose_all_behind(40);
    dormouse.image("verify", device.path(), &[]).expect_exit(STORAGE);
    for mode in ["map", "eager"] {
        dormouse
            .try_wake("guest", device.path(), &["--mode", mode])
            .expect_exit(STORAGE);
        assert!(foreign.scene.lab.qemu_pids().is_empty(), "a QEMU is left");
    }
}

/// Its tables were read; its memory cannot be any more.
#[test]
fn a_disk_that_is_pulled_out_in_the_middle_of_a_wake_leaves_no_guest() {
    let scene = Scene::with_ram(QemuBuild::V10_0, 1200);
    let device = UnpluggableDevice::new(1400);
    let mut supervisor = scene.run();
    faults::fill_memory(scene.lab.only_qemu(), 64, 1024);
    scene.dormouse.hibernate("guest", device.path()).expect_success();
    supervisor.wait_for_end();
    let ticks = scene.guest.counters().len();
    let mut waking = scene.dormouse.wake("guest", device.path(), &["--mode", "eager"]);
    until("the wake to begin", || {
        scene.dormouse.state_dir().join("guest").exists().then_some(())
    });
    device.unplug();
    assert_eq!(waking.wait_for_end().code(), Some(STORAGE), "{}", waking.log());
    scene.lab.wait_for_no_qemu();
    assert_eq!(scene.guest.counters().len(), ticks, "the guest must not have run");
}

/// All is on the device but for the last step: neither that nor its undoing came through, and nobody knows what the device
/// will say when it is back. The guest runs on and can be saved elsewhere; that a recovery has to look at the device stays.
#[test]
fn a_device_that_fails_at_the_seal_is_told_as_doubtful_and_not_forgotten() {
    let mut foreign = guest(QemuBuild::V10_0, Path::new("/nowhere"));
    let disk = UnpluggableDevice::new(512);
    let volume = SmallVolume::on(&foreign.scene.lab, disk.path());
    let device = DeviceOnVolume::new(&volume, DEVICE_MIB);
    foreign = foreign.with_image_at(device.path().to_owned());
    let settings = foreign.settings();
    let qemu = foreign.scene.lab.only_qemu();
    let dormouse = &foreign.scene.dormouse;
    let options = ["--engine", "direct", "--rate-limit", "64M"];
    let mut saving = dormouse.start_hibernating_by_monitor(&foreign.socket(), device.path(), &options);
    let client = Pid::from_child(&saving);
    let output = saving.stdout.take().expect("its output is ours");
    let mut lines = BufReader::new(output).lines().map_while(Result::ok);
    let mut wait_for = |phase: &str| {
        let is_met = |line: String| {
            let line: Value = serde_json::from_str(&line).unwrap_or_default();
            line["phase"] == phase
                || phase == "all memory" && line["bytes"] == line["total"] && line["bytes"] != 0
        };
        assert!(lines.any(is_met), "it was over before {phase}");
    };
    wait_for("SavingMemory");
    faults::freeze(qemu);
    // QEMU does not say what its disks are: all memory is written, and nothing else.
    wait_for("all memory");
    loop {
        let hanging = Hanging::volume(&volume);
        faults::thaw(qemu);
        let is_held = within(Duration::from_secs(5), || faults::is_held(client));
        faults::freeze(qemu);
        drop(hanging);
        // Else the last of the memory was on its way still, for which nobody waits in the kernel.
        if is_held {
            break;
        }
    }
    // QEMU does not say whether its guest stands still: all is synced, and the seal is next.
    wait_for("Sealing");
    disk.take_no_more_writes();
    faults::thaw(qemu);
    let last = lines.last().unwrap_or_default();
    let code = dormouse.finish(saving).exit_code();
    let last: Value = serde_json::from_str(&last).unwrap_or_default();
    expect_failed(&(code, last["error"].clone()), OPERATOR);
    foreign.scene.guest.wait_for_more_ticks();
    let (_, record) = dormouse.records().pop().expect("a record stays");
    assert_eq!(record["point"], "returning");
    expect_guest_as_before(&foreign, &settings);
    for _ in 0..2 {
        dormouse.recover(&[]).expect_exit(STORAGE);
        assert_eq!(dormouse.records().len(), 1);
    }
}
