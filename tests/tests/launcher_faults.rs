//! A wake in a launcher's QEMU that goes wrong in the middle: QEMU is never ended, and the guest is in it or in its image,
//! never in both.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::Child,
};

use dormouse_tests::{
    Launcher, QemuBuild, Scene,
    faults::{self, Hanging, SmallVolume},
};
use rustix::process::Pid;
use serde_json::{Value, json};

const REFUSED: i32 = 3;
const UNREACHABLE: i32 = 4;
const CANCELLED: i32 = 6;
const IMAGE_INVALID: i32 = 8;
const OPERATOR: i32 = 10;

const BUILDS: [QemuBuild; 3] = [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1];
const STREAM: [&str; 2] = ["--mode", "stream"];

/// A guest in an image, on a volume that can be made to hang.
struct Asleep {
    // Dropped in this order: the scene's lab sweeps up last.
    images: SmallVolume,
    scene: Scene,
    image: PathBuf,
    last: u32,
}

impl Asleep {
    fn new(build: QemuBuild) -> Self {
        let scene = Scene::new(build);
        let images = SmallVolume::named(&scene.lab, "images", 256);
        let image = images.path("guest.image");
        let mut supervisor = scene.run();
        scene.dormouse.hibernate("guest", &image).expect_success();
        supervisor.wait_for_end();
        scene.lab.wait_for_no_qemu();
        let last = scene.guest.last_counter();
        Self {
            images,
            scene,
            image,
            last,
        }
    }

    /// The wake is killed while it marks the image; QEMU has the guest then.
    fn killed_in_the_mark(&self, launcher: &Launcher<'_>) {
        let held = Hanging::volume(&self.images);
        let waking = launcher.start_waking(&self.image, &[]);
        let process = Pid::from_child(&waking);
        launcher.monitor().wait_for_status("paused");
        faults::wait_until_held(process);
        let (_, record) = self.scene.dormouse.wakes().pop().unwrap();
        assert_eq!(
            (&record["point"], &record["is_of_others"]),
            (&json!("marked"), &json!(true))
        );
        faults::kill(process);
        drop(held);
        self.scene.dormouse.finish(waking);
    }

    fn recover(&self) -> Value {
        let recovered = self.scene.dormouse.recover(&[]).expect_success().result();
        let again = self.scene.dormouse.recover(&[]).expect_success().result();
        assert_eq!(again, json!({"operations": 0}));
        recovered
    }
}

fn state_of(scene: &Scene, image: &Path) -> Value {
    let inspected = scene.dormouse.image("inspect", image, &["--json"]);
    inspected.expect_success().result()["state"].clone()
}

/// Arguments for a QEMU that would run its guest by itself after a migration.
fn that_runs_by_itself(scene: &Scene, image: &Path) -> Vec<String> {
    let mut arguments = Launcher::arguments(scene, image, &STREAM);
    arguments.retain(|word| word != "-S");
    arguments
}

/// The guest has not run, and another QEMU of the launcher wakes it.
fn expect_to_wake_in_another(scene: &Scene, image: &Path, last: u32) {
    assert_eq!(scene.guest.last_counter(), last, "the guest must not have run");
    assert_eq!(state_of(scene, image), "sealed");
    assert!(scene.dormouse.wakes().is_empty());
    let launcher = Launcher::start(scene, image, &STREAM);
    launcher.wake(image, &[]).expect_success();
    assert!(scene.guest.wait_for_more_ticks() > last);
}

#[test]
fn killed_in_the_mark_the_guest_is_its_owners_to_end_and_the_image_wakes_nowhere_before() {
    for build in BUILDS {
        let asleep = Asleep::new(build);
        let Asleep {
            scene, image, last, ..
        } = &asleep;
        let mut launcher = Launcher::start_with(scene, &that_runs_by_itself(scene, image));
        asleep.killed_in_the_mark(&launcher);

        let held = scene.dormouse.recover(&[]).expect_exit(OPERATOR).result();
        assert!(
            held["error"]["message"]
                .to_string()
                .contains("have its owner end it"),
            "{held}"
        );
        assert!(launcher.is_alive());
        assert_eq!(launcher.status(), "paused");
        scene.dormouse.try_wake("other", image, &[]).expect_exit(REFUSED);
        let saved = scene
            .dormouse
            .hibernate_by_monitor(launcher.socket(), &scene.lab.path("again.image"));
        saved.expect_exit(REFUSED);

        launcher.end();
        let recovered = asleep.recover();
        assert_eq!(recovered["outcome"], "not-woken");
        expect_to_wake_in_another(scene, image, *last);
    }
}

#[test]
fn killed_in_the_mark_a_guest_that_its_owner_runs_is_awake() {
    let asleep = Asleep::new(QemuBuild::V10_0);
    let Asleep {
        scene, image, last, ..
    } = &asleep;
    let mut launcher = Launcher::start_with(scene, &that_runs_by_itself(scene, image));
    asleep.killed_in_the_mark(&launcher);
    launcher.monitor().cont();
    let recovered = asleep.recover();
    assert_eq!(
        (&recovered["outcome"], &recovered["guest"]),
        (&json!("awake"), &json!("running"))
    );
    assert!(launcher.is_alive());
    assert!(scene.guest.wait_for_more_ticks() > *last);
    assert_eq!(state_of(scene, image), "consumed");
    scene
        .dormouse
        .try_wake("other", image, &[])
        .expect_exit(IMAGE_INVALID);
}

#[test]
fn a_wake_that_stands_in_the_mark_is_no_more_cancelled_and_no_second_one_begins() {
    let asleep = Asleep::new(QemuBuild::V10_0);
    let Asleep {
        scene, image, last, ..
    } = &asleep;
    let launcher = Launcher::start(scene, image, &STREAM);
    let held = Hanging::volume(&asleep.images);
    let waking = launcher.start_waking(image, &[]);
    let process = Pid::from_child(&waking);
    launcher.monitor().wait_for_status("paused");
    faults::wait_until_held(process);
    launcher.wake(image, &[]).expect_exit(UNREACHABLE);
    let second = scene.dormouse.try_wake("other", image, &[]);
    assert_ne!(second.exit_code(), Some(0), "{second:#?}");
    faults::interrupt(process);
    drop(held);
    scene.dormouse.finish(waking).expect_success();
    assert!(scene.guest.wait_for_more_ticks() > *last);
}

/// A guest with a gigabyte of memory in an image; its wake takes its time.
fn large_guest(build: QemuBuild) -> (Scene, PathBuf, u32) {
    let scene = Scene::with_ram(build, 1200);
    let image = scene.image();
    let mut supervisor = scene.run();
    faults::fill_memory(scene.lab.only_qemu(), 64, 1024);
    scene.dormouse.hibernate("guest", &image).expect_success();
    supervisor.wait_for_end();
    scene.lab.wait_for_no_qemu();
    let last = scene.guest.last_counter();
    (scene, image, last)
}

/// Waits until the wake is in the middle of its load. Its output is read on.
fn meet_the_load(waking: &mut Child) {
    let output = waking.stdout.take().unwrap();
    let mut lines = BufReader::new(output).lines().map_while(Result::ok);
    let met = lines.any(|line| {
        let line: Value = serde_json::from_str(&line).unwrap_or_default();
        line["phase"] == "Loading" && line["bytes"] != line["total"]
    });
    assert!(met, "it was too fast to have a middle");
}

/// A QEMU that failed to load is its owner's, if it did not end by itself, and loads nothing else.
fn expect_useless(launcher: &mut Launcher<'_>, image: &Path, build: QemuBuild) {
    if build == QemuBuild::V7_2 {
        launcher.wait_for_end();
        return;
    }
    assert!(launcher.is_alive());
    assert_eq!(launcher.status(), "inmigrate");
    let again = launcher.wake(image, &[]).expect_exit(REFUSED).result();
    assert!(
        again["error"]["message"]
            .to_string()
            .contains("loads nothing else"),
        "{again}"
    );
}

#[test]
fn a_ctrl_c_in_the_middle_of_the_load_leaves_the_image_as_it_was_and_qemu_to_its_owner() {
    for build in BUILDS {
        let (scene, image, last) = large_guest(build);
        let mut launcher = Launcher::start(&scene, &image, &STREAM);
        let mut waking = launcher.start_waking(&image, &[]);
        meet_the_load(&mut waking);
        faults::interrupt(Pid::from_child(&waking));
        scene.dormouse.finish(waking).expect_exit(CANCELLED);
        expect_useless(&mut launcher, &image, build);
        drop(launcher);
        expect_to_wake_in_another(&scene, &image, last);
    }
}

#[test]
fn killed_in_the_middle_of_the_load_the_image_is_the_guest() {
    for build in BUILDS {
        let (scene, image, last) = large_guest(build);
        let mut launcher = Launcher::start(&scene, &image, &STREAM);
        let mut waking = launcher.start_waking(&image, &[]);
        meet_the_load(&mut waking);
        faults::kill(Pid::from_child(&waking));
        scene.dormouse.finish(waking);
        let recovered = scene.dormouse.recover(&[]).expect_success().result();
        assert_eq!(recovered["outcome"], "not-woken", "{recovered}");
        expect_useless(&mut launcher, &image, build);
        drop(launcher);
        expect_to_wake_in_another(&scene, &image, last);
    }
}

#[test]
fn a_qemu_that_is_killed_in_the_middle_of_the_load_leaves_the_image_as_it_was() {
    let (scene, image, last) = large_guest(QemuBuild::V10_0);
    let mut launcher = Launcher::start(&scene, &image, &STREAM);
    let mut waking = launcher.start_waking(&image, &[]);
    meet_the_load(&mut waking);
    faults::kill(launcher.pid());
    scene.dormouse.finish(waking).expect_exit(UNREACHABLE);
    launcher.wait_for_end();
    drop(launcher);
    expect_to_wake_in_another(&scene, &image, last);
}

#[test]
fn a_damaged_chunk_is_told_before_the_guest_runs_and_a_qemu_that_was_not_loaded_can_be_used_again() {
    for build in BUILDS {
        for mode in ["eager", "stream"] {
            let scene = Scene::new(build);
            let image = scene.hibernated();
            let last = scene.guest.last_counter();
            let at = faults::find(&image, &dormouse_tests::BootSectorGuest::landmark());
            let mut launcher = Launcher::start(&scene, &image, &["--mode", mode]);
            faults::flip(&image, at);
            launcher.wake(&image, &[]).expect_exit(IMAGE_INVALID);
            faults::flip(&image, at);
            if mode == "stream" {
                expect_useless(&mut launcher, &image, build);
                drop(launcher);
                expect_to_wake_in_another(&scene, &image, last);
            } else {
                launcher.wake(&image, &[]).expect_success();
                assert!(scene.guest.wait_for_more_ticks() > last);
            }
        }
    }
}

#[test]
fn an_image_that_its_guest_would_write_into_is_refused() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let content = fs::read(&image).unwrap();
    let arguments = Launcher::arguments(&scene, &image, &["--mode", "map"]);
    let shared: Vec<String> = arguments
        .iter()
        .map(|word| word.replace("share=off,readonly=on,rom=off", "share=on"))
        .collect();
    assert_ne!(shared, arguments);
    let launcher = Launcher::start_with(&scene, &shared);
    let refused = launcher.wake(&image, &[]).expect_exit(REFUSED).result();
    assert!(
        refused["error"]["message"].to_string().contains("mapped shared"),
        "{refused}"
    );
    launcher.end();
    assert!(fs::read(&image).unwrap() == content, "the image was written to");
}
