//! A hibernation is cancelled in the phases beside the one that takes its time. Each is held by what it waits for.
//!
//! | cancelled in | by holding | the guest |
//! | --- | --- | --- |
//! | Preflight | QEMU itself | was not touched |
//! | Reserving | the image's volume | was not touched |
//! | Pausing | QEMU, while the volume was held | stops when QEMU can, and is given back |
//! | Syncing | QEMU, while its memory was read | is given back when QEMU can |
//! | Terminating | the state directory | is in its image: the cancel comes too late |

use std::{
    cell::RefCell,
    fs,
    io::{BufRead, BufReader},
};

use dormouse_tests::{
    Dormouse, Foreign, QemuBuild, Scene,
    faults::{self, Hanging, SmallVolume},
    until,
};
use rustix::process::Pid;
use serde_json::{Value, json};

const CANCELLED: i32 = 6;

const BUILDS: [QemuBuild; 3] = [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1];

const SLOWLY: [&str; 4] = ["--engine", "direct", "--rate-limit", "16M"];

/// A guest whose memory is to be had from outside.
fn guest(build: QemuBuild) -> Foreign {
    let ram = "memory-backend-file,id=pc.ram,size=64M,share=on,mem-path=/dev/shm";
    Foreign::start(build, &["-object", ram, "-machine", "memory-backend=pc.ram"])
}

fn expect_given_back(foreign: &Foreign, settings: &(Value, Value), (code, error): &(Option<i32>, Value)) {
    assert_eq!(
        (*code, &error["guest"]),
        (Some(CANCELLED), &json!("running")),
        "{error}"
    );
    assert!(error["given_back_ms"].is_f64(), "{error}");
    foreign.scene.guest.wait_for_more_ticks();
    assert_eq!(&foreign.settings(), settings);
    assert_eq!(foreign.scene.dormouse.records(), Vec::new());
    foreign.hibernate(&[]).expect_success();
}

#[test]
fn cancelled_in_preflight_nothing_waits_for_a_qemu_that_does_not_answer() {
    for build in BUILDS {
        let scene = Scene::new(build);
        let _supervisor = scene.run();
        faults::freeze(scene.lab.only_qemu());
        let mut hibernating = scene.dormouse.start_hibernating("guest", &scene.image());
        let output = hibernating.stdout.take().expect("its output is ours");
        let mut lines = BufReader::new(output).lines().map_while(Result::ok);
        let first = lines.next().unwrap_or_default();
        assert!(first.contains("Preflight"), "{first}");
        faults::interrupt(Pid::from_child(&hibernating));
        // Without an answer, and before QEMU can give one.
        let last = lines.last().unwrap_or_default();
        scene.dormouse.finish(hibernating).expect_exit(CANCELLED);
        let last: Value = serde_json::from_str(&last).unwrap_or_default();
        assert_eq!(last["error"]["guest"], "unknown", "{last}");
        faults::thaw(scene.lab.only_qemu());
        scene.guest.wait_for_more_ticks();
        assert!(!scene.image().exists());
        scene.dormouse.hibernate("guest", &scene.image()).expect_success();
    }
}

#[test]
fn cancelled_in_reserving_the_guest_was_not_touched() {
    for build in BUILDS {
        let mut foreign = guest(build);
        let volume = SmallVolume::new(&foreign.scene.lab, 256);
        foreign = foreign.with_image_at(volume.path("guest.image"));
        let settings = foreign.settings();
        let hanging = Hanging::volume(&volume);
        let is_time = |line: &Value| line["phase"] == "Reserving";
        let outcome = foreign.disturbed_when(&foreign.image(), &SLOWLY, is_time, |foreign, client| {
            faults::interrupt(client);
            foreign.scene.guest.wait_for_more_ticks();
            drop(hanging);
        });
        until("the partial image to be gone", || {
            volume.content().is_empty().then_some(())
        });
        expect_given_back(&foreign, &settings, &outcome);
    }
}

#[test]
fn cancelled_in_pausing_the_guest_is_given_back_when_qemu_has_stopped_it() {
    for build in BUILDS {
        let mut foreign = guest(build);
        let volume = SmallVolume::new(&foreign.scene.lab, 256);
        foreign = foreign.with_image_at(volume.path("guest.image"));
        let settings = foreign.settings();
        let qemu = foreign.scene.lab.only_qemu();
        let hanging = RefCell::new(Some(Hanging::volume(&volume)));
        let is_time = |line: &Value| {
            if line["phase"] == "Reserving" && hanging.borrow().is_some() {
                // Of all that it is asked before, it has answered the last.
                until("a record", || {
                    (!foreign.scene.dormouse.records().is_empty()).then_some(())
                });
                faults::freeze(qemu);
                hanging.take();
            }
            line["phase"] == "Pausing"
        };
        let outcome = foreign.disturbed_when(&foreign.image(), &SLOWLY, is_time, |_, client| {
            faults::interrupt(client);
            faults::thaw(qemu);
        });
        assert_eq!(volume.content(), Vec::<String>::new());
        expect_given_back(&foreign, &settings, &outcome);
    }
}

#[test]
fn cancelled_in_syncing_the_guest_is_given_back_when_qemu_answers() {
    for build in BUILDS {
        let foreign = guest(build);
        let settings = foreign.settings();
        let qemu = foreign.scene.lab.only_qemu();
        let is_frozen = RefCell::new(false);
        let is_time = |line: &Value| {
            if line["phase"] == "SavingMemory" && !is_frozen.replace(true) {
                faults::freeze(qemu);
            }
            line["phase"] == "SavingMemory" && line["bytes"] == line["total"]
        };
        let outcome = foreign.disturbed_when(&foreign.image(), &SLOWLY, is_time, |_, client| {
            faults::interrupt(client);
            faults::thaw(qemu);
        });
        foreign.expect_no_image();
        expect_given_back(&foreign, &settings, &outcome);
    }
}

#[test]
fn cancelled_in_terminating_the_guest_is_in_its_image() {
    for build in BUILDS {
        let mut foreign = guest(build);
        let volume = SmallVolume::new(&foreign.scene.lab, 64);
        foreign.scene.dormouse = Dormouse::new(&foreign.scene.lab)
            .with_modules_of(build)
            .with_state_dir(volume.path("state"));
        let dormouse = &foreign.scene.dormouse;
        let image = foreign.image();
        let hibernating = dormouse.start_hibernating_by_monitor(&foreign.socket(), &image, &SLOWLY);
        until("the record before the seal", || {
            let (_, record) = dormouse.records().pop()?;
            (record["point"] == "sealing").then_some(())
        });
        let hanging = Hanging::volume(&volume);
        until("the image", || fs::exists(&image).unwrap_or(false).then_some(()));
        let last = foreign.scene.guest.last_counter();
        faults::interrupt(Pid::from_child(&hibernating));
        drop(hanging);
        dormouse.finish(hibernating).expect_success();
        foreign.scene.lab.wait_for_no_qemu();
        let _woken = dormouse.wake("guest", &image, &[]);
        assert!(foreign.scene.guest.wait_for_more_ticks() > last);
    }
}
