//! Dormouse is killed at every point of a wake, and `dormouse recover` brings guest and image to one of their two ends: the
//! guest has not run and its image wakes it, or the guest is awake and its image used up.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{fs, path::PathBuf};

use dormouse_tests::{
    Guest, QemuBuild, Scene, Supervisor,
    faults::{self, Hanging, SmallVolume},
    until,
};
use rustix::process::Pid;
use serde_json::{Value, json};

const REFUSED: i32 = 3;
const UNREACHABLE: i32 = 4;
const IMAGE_INVALID: i32 = 8;
const OPERATOR: i32 = 10;

/// A guest in an image, with both the image and the state directory on volumes that can be made to hang.
struct Asleep {
    // Dropped in this order: the scene's lab sweeps up last.
    images: SmallVolume,
    state: SmallVolume,
    scene: Scene,
    image: PathBuf,
    ticks: usize,
}

impl Asleep {
    fn new(build: QemuBuild) -> Self {
        let mut scene = Scene::new(build);
        let state = SmallVolume::new(&scene.lab, 16);
        let images = SmallVolume::named(&scene.lab, "images", 512);
        scene.dormouse = scene.dormouse.with_state_dir(state.path("state"));
        let image = images.path("guest.image");
        let mut supervisor = scene.run();
        scene.dormouse.hibernate("guest", &image).expect_success();
        supervisor.wait_for_end();
        scene.lab.wait_for_no_qemu();
        let ticks = scene.guest.counters().len();
        Self {
            images,
            state,
            scene,
            image,
            ticks,
        }
    }

    /// A wake that stands before the image is marked, which hangs; and its QEMU.
    fn before_the_mark(&self, options: &[&str]) -> (Hanging<'_>, Supervisor, Pid) {
        let held = Hanging::volume(&self.images);
        let wake = self.scene.dormouse.wake("guest", &self.image, options);
        until("the wake to stand before the mark", || {
            let (_, record) = self.scene.dormouse.wakes().pop()?;
            assert_eq!(record["point"], "marked");
            Some(())
        });
        wait_until_held(&wake);
        (held, wake, self.scene.lab.only_qemu())
    }

    /// A wake that stands when the image is marked and QEMU was not told to run the guest: its next record hangs.
    fn after_the_mark(&self, options: &[&str]) -> (Hanging<'_>, Supervisor, Pid) {
        let (held, wake, qemu) = self.before_the_mark(options);
        let state = Hanging::volume(&self.state);
        drop(held);
        until("the mark", || (self.state() == "waking").then_some(()));
        wait_until_held(&wake);
        (state, wake, qemu)
    }

    /// A wake that is killed there.
    fn killed_after_the_mark(&self, options: &[&str]) -> Pid {
        let (held, mut wake, qemu) = self.after_the_mark(options);
        faults::kill(wake.pid());
        drop(held);
        wake.wait_for_end();
        assert_eq!(self.record()["point"], "marked");
        qemu
    }

    /// A wake that is killed when the guest was told to run, before the image is marked as used, or in that.
    fn killed_before_the_image_is_used(&self, options: &[&str]) {
        let (held, mut wake, _) = self.after_the_mark(options);
        let images = Hanging::volume(&self.images);
        drop(held);
        until("the next record", || {
            (self.record()["point"] == "continuing").then_some(())
        });
        wait_until_held(&wake);
        faults::kill(wake.pid());
        drop(images);
        wake.wait_for_end();
    }

    /// As if the wake was killed between its last record and what that announces.
    fn nearly_told_to_run(&self) {
        let (path, mut record) = self.scene.dormouse.wakes().pop().expect("there is a record");
        record["point"] = json!("continuing");
        fs::write(path, record.to_string()).expect("the record can be written");
    }

    fn state(&self) -> Value {
        let inspected = self.scene.dormouse.image("inspect", &self.image, &["--json"]);
        inspected.expect_success().result()["state"].clone()
    }

    fn record(&self) -> Value {
        self.scene.dormouse.wakes().pop().expect("there is a record").1
    }

    #[track_caller]
    fn recovered(&self, outcome: &str, guest: &str) {
        let recovered = self.scene.dormouse.recover(&[]).expect_success().result();
        assert_eq!(
            (&recovered["outcome"], &recovered["guest"]),
            (&json!(outcome), &json!(guest)),
            "{recovered}"
        );
        let again = self.scene.dormouse.recover(&[]).expect_success().result();
        assert_eq!(again, json!({"operations": 0}));
    }

    /// QEMU is gone, the guest has not run, its name is free, and the image wakes it.
    #[track_caller]
    fn expect_not_woken(&self) {
        self.recovered("not-woken", "stopped");
        self.expect_to_wake();
    }

    #[track_caller]
    fn expect_to_wake(&self) {
        self.scene.lab.wait_for_no_qemu();
        assert_eq!(self.state(), "sealed");
        assert_eq!(self.scene.guest.counters().len(), self.ticks, "it has not run");
        let mut woken = self
            .scene
            .dormouse
            .wake("guest", &self.image, &["--mode", "eager"]);
        self.scene.guest.wait_for_more_ticks();
        woken.terminate();
        assert!(self.scene.dormouse.wakes().is_empty());
    }

    /// The guest counts on, and its image wakes nobody.
    #[track_caller]
    fn expect_awake(&self) {
        self.recovered("awake", "running");
        self.scene.guest.wait_for_more_ticks();
        assert_eq!(self.state(), "consumed");
        let refused = self.scene.dormouse.try_wake("other", &self.image, &[]);
        refused.expect_exit(IMAGE_INVALID);
        // What lives without a supervisor can be hibernated.
        let again = self.images.path("again.image");
        let monitor = self.scene.dormouse.own_monitor("guest");
        self.scene
            .dormouse
            .hibernate_by_monitor(&monitor, &again)
            .expect_success();
    }
}

/// Whoever is held for long stands at what hangs, and not at what comes before.
fn wait_until_held(wake: &Supervisor) {
    faults::wait_until_held(wake.pid());
}

#[test]
fn killed_as_soon_as_there_is_a_record_the_image_wakes_again() {
    for mode in ["map", "eager", "stream", "lazy"] {
        let asleep = Asleep::new(QemuBuild::V10_0);
        let mut wake = asleep
            .scene
            .dormouse
            .wake("guest", &asleep.image, &["--mode", mode]);
        faults::kill_when(wake.pid(), "a record", || {
            !asleep.scene.dormouse.wakes().is_empty()
        });
        wake.wait_for_end();
        if asleep.record()["point"] == "marked" {
            asleep.expect_not_woken();
        }
    }
}

#[test]
fn killed_in_the_mark_the_image_wakes_again() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let asleep = Asleep::new(build);
        let (held, mut wake, _) = asleep.before_the_mark(&["--mode", "eager"]);
        faults::kill(wake.pid());
        drop(held);
        wake.wait_for_end();
        asleep.expect_not_woken();
    }
}

#[test]
fn killed_between_the_mark_and_the_word_to_run_the_image_wakes_again() {
    for mode in ["map", "eager", "stream"] {
        let asleep = Asleep::new(QemuBuild::V10_0);
        let qemu = asleep.killed_after_the_mark(&["--mode", mode]);
        let dormouse = &asleep.scene.dormouse;
        // Nobody can tell yet, and nobody else may take the image or the guest.
        faults::freeze(qemu);
        dormouse.recover(&[]).expect_exit(UNREACHABLE);
        assert_eq!(asleep.state(), "waking");
        let early = dormouse
            .try_wake("early", &asleep.image, &[])
            .expect_exit(REFUSED);
        assert!(early.stderr.contains("dormouse recover"), "{early:#?}");
        faults::thaw(qemu);
        let saved =
            dormouse.hibernate_by_monitor(&dormouse.own_monitor("guest"), &asleep.images.path("other"));
        let saved = saved.expect_exit(REFUSED);
        assert!(saved.stdout.contains("dormouse recover"), "{saved:#?}");
        asleep.expect_not_woken();
    }
}

#[test]
fn a_lazy_wake_that_is_killed_before_the_word_to_run_is_undone_whether_qemu_answers_or_not() {
    let asleep = Asleep::new(QemuBuild::V10_0);
    asleep.killed_after_the_mark(&["--mode", "lazy"]);
    asleep.expect_not_woken();
    let asleep = Asleep::new(QemuBuild::V10_0);
    let qemu = asleep.killed_after_the_mark(&["--mode", "lazy"]);
    faults::freeze(qemu);
    asleep.expect_not_woken();
}

#[test]
fn where_qemu_was_killed_too_before_the_word_to_run_the_next_wake_sweeps_up() {
    let asleep = Asleep::new(QemuBuild::V10_0);
    let qemu = asleep.killed_after_the_mark(&["--mode", "map"]);
    faults::kill(qemu);
    asleep.scene.lab.wait_for_no_qemu();
    assert_eq!(asleep.state(), "waking");
    let mut woken = asleep
        .scene
        .dormouse
        .wake("guest", &asleep.image, &["--mode", "eager"]);
    asleep.scene.guest.wait_for_more_ticks();
    woken.terminate();
}

#[test]
fn killed_when_the_guest_runs_it_is_awake() {
    for mode in ["map", "eager", "stream"] {
        let asleep = Asleep::new(QemuBuild::V10_0);
        asleep.killed_before_the_image_is_used(&["--mode", mode]);
        asleep.expect_awake();
    }
}

#[test]
fn killed_before_the_word_to_run_was_said_the_guest_is_run() {
    let asleep = Asleep::new(QemuBuild::V10_0);
    asleep.killed_after_the_mark(&["--mode", "eager"]);
    asleep.nearly_told_to_run();
    assert_eq!(asleep.scene.guest.monitor().status(), "paused");
    asleep.expect_awake();
}

#[test]
fn a_guest_that_shall_stay_paused_does() {
    let asleep = Asleep::new(QemuBuild::V10_0);
    asleep.killed_after_the_mark(&["--mode", "eager", "--paused"]);
    asleep.nearly_told_to_run();
    asleep.recovered("awake", "paused");
    assert_eq!(asleep.scene.guest.monitor().status(), "paused");
    assert_eq!(asleep.state(), "consumed");
    assert_eq!(asleep.scene.guest.counters().len(), asleep.ticks);
}

#[test]
fn a_guest_whose_qemu_is_gone_after_it_was_told_to_run_is_a_persons_to_judge() {
    let asleep = Asleep::new(QemuBuild::V10_0);
    let qemu = asleep.killed_after_the_mark(&["--mode", "map"]);
    asleep.nearly_told_to_run();
    faults::kill(qemu);
    asleep.scene.lab.wait_for_no_qemu();
    let dormouse = &asleep.scene.dormouse;
    for _ in 0..2 {
        let error = dormouse.recover(&[]).expect_exit(OPERATOR).result();
        let message = error["error"]["message"].to_string();
        assert!(message.contains("may have written to its disks"), "{error}");
    }
    assert_eq!(asleep.state(), "waking");
    dormouse
        .try_wake("guest", &asleep.image, &[])
        .expect_exit(IMAGE_INVALID);
    assert_eq!(asleep.state(), "waking");
    // That is settled by giving the image up.
    dormouse
        .image("discard", &asleep.image, &["--force", "--yes"])
        .expect_success();
    asleep.recovered("has-ended", "stopped");
}

#[test]
fn what_another_wake_has_marked_is_not_sealed_again() {
    let asleep = Asleep::new(QemuBuild::V10_0);
    let qemu = asleep.killed_after_the_mark(&["--mode", "map"]);
    faults::kill(qemu);
    asleep.scene.lab.wait_for_no_qemu();
    // As another wake's record would be.
    let (path, mut record) = asleep.scene.dormouse.wakes().pop().unwrap();
    let other = "11111111-1111-4111-8111-111111111111";
    record["operation"] = json!(other);
    fs::write(path.with_file_name(format!("{other}.json")), record.to_string()).unwrap();
    fs::remove_file(path).unwrap();
    asleep.recovered("has-ended", "stopped");
    assert_eq!(asleep.state(), "waking");
}
