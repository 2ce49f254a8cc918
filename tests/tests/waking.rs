//! What happens in the middle of a wake: the image is as it was, or the guest runs, never both.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::Child,
};

use dormouse_tests::{
    QemuBuild, Scene,
    faults::{self, Hanging, SmallVolume},
    until,
};
use rustix::process::Pid;
use serde_json::Value;

const UNREACHABLE: i32 = 4;
const CANCELLED: i32 = 6;
const IMAGE_INVALID: i32 = 8;
const OPERATOR: i32 = 10;

const BUILDS: [QemuBuild; 3] = [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1];

/// A guest with a gigabyte of memory, hibernated; its wake takes its time.
fn large_guest(build: QemuBuild) -> (Scene, PathBuf) {
    let scene = Scene::with_ram(build, 1200);
    let image = scene.image();
    let mut supervisor = scene.run();
    faults::fill_memory(scene.lab.only_qemu(), 64, 1024);
    scene.dormouse.hibernate("guest", &image).expect_success();
    supervisor.wait_for_end();
    scene.lab.wait_for_no_qemu();
    (scene, image)
}

fn start_waking(scene: &Scene, image: &Path, options: &[&str]) -> Child {
    let image = image.to_str().unwrap();
    let mut arguments = vec!["wake", image, "--name", "guest", "--json"];
    arguments.extend(options);
    scene.dormouse.spawn(&arguments)
}

/// Waits until the wake says that it is in the middle of `phase`.
fn meet(waking: &mut Child, phase: &str) {
    let output = waking.stdout.take().unwrap();
    let met = BufReader::new(output).lines().map_while(Result::ok).any(|line| {
        let line: Value = serde_json::from_str(&line).unwrap_or_default();
        line["phase"] == phase && line["bytes"] != line["total"]
    });
    assert!(met, "it was too fast to have a middle");
}

fn state_of(scene: &Scene, image: &Path) -> Value {
    let inspected = scene.dormouse.image("inspect", image, &["--json"]);
    inspected.expect_success().result()["state"].clone()
}

/// The guest has not run, its image is sealed, and it can be woken from it.
fn expect_image_as_before(scene: &Scene, image: &Path, ticks: usize) {
    scene.lab.wait_for_no_qemu();
    assert_eq!(scene.guest.counters().len(), ticks, "the guest must not have run");
    assert_eq!(state_of(scene, image), "sealed");
    let _woken = scene.dormouse.wake("guest", image, &[]);
    scene.guest.wait_for_more_ticks();
}

#[test]
fn a_ctrl_c_while_the_memory_streams_into_qemu_leaves_the_image_as_it_was() {
    for build in BUILDS {
        let (scene, image) = large_guest(build);
        let ticks = scene.guest.counters().len();
        let mut waking = start_waking(&scene, &image, &["--mode", "stream"]);
        meet(&mut waking, "Loading");
        faults::interrupt(Pid::from_child(&waking));
        scene.dormouse.finish(waking).expect_exit(CANCELLED);
        expect_image_as_before(&scene, &image, ticks);
    }
}

#[test]
fn a_ctrl_c_is_heard_while_qemu_does_not_read() {
    let (scene, image) = large_guest(QemuBuild::V10_0);
    let ticks = scene.guest.counters().len();
    let mut waking = start_waking(&scene, &image, &["--mode", "stream"]);
    meet(&mut waking, "Loading");
    faults::freeze(scene.lab.only_qemu());
    faults::interrupt(Pid::from_child(&waking));
    scene.dormouse.finish(waking).expect_exit(CANCELLED);
    expect_image_as_before(&scene, &image, ticks);
}

#[test]
fn a_qemu_that_is_killed_while_it_loads_leaves_the_image_as_it_was() {
    for build in BUILDS {
        let (scene, image) = large_guest(build);
        let ticks = scene.guest.counters().len();
        let mut waking = start_waking(&scene, &image, &["--mode", "stream"]);
        meet(&mut waking, "Loading");
        faults::kill(scene.lab.only_qemu());
        scene.dormouse.finish(waking).expect_exit(UNREACHABLE);
        expect_image_as_before(&scene, &image, ticks);
    }
}

#[test]
fn a_qemu_that_is_killed_while_its_image_is_marked_leaves_the_image_sealed() {
    let scene = Scene::with_ram(QemuBuild::V10_0, 64);
    let volume = SmallVolume::new(&scene.lab, 256);
    let image = volume.path("guest.image");
    let mut supervisor = scene.run();
    scene.dormouse.hibernate("guest", &image).expect_success();
    supervisor.wait_for_end();
    scene.lab.wait_for_no_qemu();
    let ticks = scene.guest.counters().len();

    // The mark is the first that is written to the volume.
    let hanging = Hanging::volume(&volume);
    let waking = start_waking(&scene, &image, &["--mode", "stream"]);
    faults::wait_until_held(Pid::from_child(&waking));
    faults::kill(scene.lab.only_qemu());
    drop(hanging);
    scene.dormouse.finish(waking).expect_exit(UNREACHABLE);
    expect_image_as_before(&scene, &image, ticks);
    faults::kill(scene.lab.only_qemu());
    scene.lab.wait_for_no_qemu();
    drop(volume);
}

#[test]
fn a_qemu_that_is_killed_when_it_was_told_to_run_leaves_an_image_that_says_so() {
    let scene = Scene::with_ram(QemuBuild::V10_0, 64);
    let image = scene.hibernated();
    let waking = start_waking(&scene, &image, &["--mode", "stream", "--keep-image"]);
    until("the image to be marked", || {
        (state_of(&scene, &image) != "sealed").then_some(())
    });
    faults::kill(scene.lab.only_qemu());
    let outcome = scene.dormouse.finish(waking);
    // Whichever it was: nothing was told to run, the guest may have run, or it ran and its QEMU was killed.
    let state = state_of(&scene, &image);
    match outcome.exit_code() {
        Some(UNREACHABLE) => assert_eq!(state, "sealed", "{outcome:?}"),
        Some(OPERATOR) => assert_eq!(state, "waking", "{outcome:?}"),
        _ => assert_eq!(state, "consumed", "{outcome:?}"),
    }
}

#[test]
fn a_bad_chunk_is_found_on_its_way_and_told_as_the_images_own_fault() {
    let (scene, image) = large_guest(QemuBuild::V11_1);
    let ticks = scene.guest.counters().len();
    let at = 2 * (1 << 20) + 700 * (1 << 20);
    faults::flip(&image, at);
    for mode in ["stream", "eager"] {
        let outcome = scene.dormouse.try_wake("guest", &image, &["--mode", mode]);
        let outcome = outcome.expect_exit(IMAGE_INVALID);
        assert!(outcome.stderr.contains("pc.ram"), "{outcome:?}");
    }
    faults::flip(&image, at);
    expect_image_as_before(&scene, &image, ticks);
}
