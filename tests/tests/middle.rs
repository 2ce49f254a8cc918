//! What happens in the middle of a save: the guest is given back, or there is an image, never neither and never a
//! wrong one. The guest's memory is made large enough for a middle to be met.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, ChildStdout},
};

use dormouse_tests::{
    Guest, QemuBuild, Scene, Supervisor,
    faults::{self, Hanging, SmallVolume},
    until,
};
use rustix::process::Pid;
use serde_json::{Value, json};

const REFUSED: i32 = 3;
const UNREACHABLE: i32 = 4;
const TIMED_OUT: i32 = 5;
const CANCELLED: i32 = 6;

/// A guest with a gigabyte of memory, which takes its time to be saved, in the middle of being saved.
struct Middle {
    hibernating: Child,
    lines: BufReader<ChildStdout>,
    supervisor: Supervisor,
    scene: Scene,
}

/// The guest, counting, before it is saved.
fn large_guest(build: QemuBuild) -> (Scene, Supervisor) {
    let scene = Scene::with_ram(build, 1200);
    let supervisor = scene.run();
    faults::fill_memory(scene.lab.only_qemu(), 64, 1024);
    fs::create_dir(scene.lab.path("images")).expect("a folder can be made");
    (scene, supervisor)
}

impl Middle {
    /// Returns when the memory of a new guest is being written.
    fn met(build: QemuBuild) -> Self {
        let (scene, supervisor) = large_guest(build);
        let image = image(&scene);
        Self::met_by(scene, supervisor, &image)
    }

    /// Returns when the guest's memory is being written to `image`.
    fn met_by(scene: Scene, supervisor: Supervisor, image: &Path) -> Self {
        let hibernating = scene.dormouse.start_hibernating("guest", image);
        Self::of(scene, supervisor, hibernating)
    }

    /// Returns when the guest's memory is being written by a command that was started.
    fn of(scene: Scene, supervisor: Supervisor, mut hibernating: Child) -> Self {
        let output = hibernating.stdout.take().expect("its output is ours");
        let mut lines = BufReader::new(output);
        let mut line = String::new();
        while !line.contains("SavingMemory") {
            line.clear();
            let length = lines.read_line(&mut line).expect("its output can be read");
            assert!(length > 0, "it ended before its middle");
        }
        let progress: Value = serde_json::from_str(&line).expect("progress is JSON");
        assert_ne!(
            progress["bytes"], progress["total"],
            "it was too fast to have a middle"
        );
        Self {
            hibernating,
            lines,
            supervisor,
            scene,
        }
    }

    fn client(&self) -> Pid {
        Pid::from_child(&self.hibernating)
    }

    /// Waits for the end; returns the scene after it, the exit code, and the last line's error.
    fn end(self) -> (Scene, Supervisor, Option<i32>, Value) {
        let last = self
            .lines
            .lines()
            .map_while(Result::ok)
            .last()
            .unwrap_or_default();
        let last: Value = serde_json::from_str(&last).unwrap_or_default();
        let outcome = self.scene.dormouse.finish(self.hibernating);
        (
            self.scene,
            self.supervisor,
            outcome.exit_code(),
            last["error"].clone(),
        )
    }
}

fn image(scene: &Scene) -> PathBuf {
    scene.lab.path("images/guest.image")
}

fn expect_no_image(scene: &Scene) {
    assert_eq!(faults::files_in(&scene.lab.path("images")), Vec::<String>::new());
}

/// The guest runs, nothing of the attempt is on the volume, and migration is set as QEMU has it from the start.
fn expect_guest_as_before(scene: &Scene) {
    scene.guest.wait_for_more_ticks();
    expect_no_image(scene);
    let mut monitor = scene.guest.monitor();
    let capabilities = monitor.execute("query-migrate-capabilities", json!({}));
    let on: Vec<&Value> = capabilities
        .as_array()
        .into_iter()
        .flatten()
        .filter(|capability| capability["state"] == true)
        .map(|capability| &capability["capability"])
        .collect();
    assert!(
        !on.iter()
            .any(|name| *name == "x-ignore-shared" || *name == "events"),
        "{on:?}"
    );
    let parameters = monitor.execute("query-migrate-parameters", json!({}));
    assert_eq!(parameters["max-bandwidth"], 128 << 20);
}

#[test]
fn a_ctrl_c_gives_the_guest_back_as_it_was_on_qemu_7_2() {
    a_ctrl_c_gives_the_guest_back_as_it_was(QemuBuild::V7_2);
}

#[test]
fn a_ctrl_c_gives_the_guest_back_as_it_was_on_qemu_10_0() {
    a_ctrl_c_gives_the_guest_back_as_it_was(QemuBuild::V10_0);
}

#[test]
fn a_ctrl_c_gives_the_guest_back_as_it_was_on_qemu_11_1() {
    a_ctrl_c_gives_the_guest_back_as_it_was(QemuBuild::V11_1);
}

fn a_ctrl_c_gives_the_guest_back_as_it_was(build: QemuBuild) {
    let middle = Middle::met(build);
    faults::interrupt(middle.client());
    let (scene, _supervisor, code, error) = middle.end();
    assert_eq!(code, Some(CANCELLED), "{error}");
    assert_eq!(error["guest"], "running");
    expect_guest_as_before(&scene);
    // And nothing of it stands in the way of the next try.
    scene.dormouse.hibernate("guest", &image(&scene)).expect_success();
    scene
        .dormouse
        .image("verify", &image(&scene), &[])
        .expect_success();
}

#[test]
fn a_qemu_that_is_killed_while_its_memory_is_written_leaves_no_image() {
    let middle = Middle::met(QemuBuild::V10_0);
    faults::kill(middle.scene.lab.only_qemu());
    let (scene, mut supervisor, code, error) = middle.end();
    assert_eq!(code, Some(UNREACHABLE), "{error}");
    assert_eq!(error["code"], "unreachable");
    supervisor.wait_for_end();
    expect_no_image(&scene);
}

#[test]
fn a_guest_that_somebody_runs_in_the_middle_has_no_image_and_runs_on() {
    let middle = Middle::met(QemuBuild::V10_0);
    middle.scene.guest.monitor().cont();
    let (scene, _supervisor, code, error) = middle.end();
    assert_eq!(code, Some(REFUSED), "{error}");
    assert_eq!(error["guest"], "running");
    expect_guest_as_before(&scene);
}

#[test]
fn a_client_that_is_killed_does_not_stop_the_save() {
    let middle = Middle::met(QemuBuild::V10_0);
    faults::kill(middle.client());
    let (scene, mut supervisor, code, _) = middle.end();
    assert_eq!(code, None, "the client was killed");
    let status = supervisor.wait_for_end();
    assert!(status.success(), "{status}");
    scene
        .dormouse
        .image("verify", &image(&scene), &[])
        .expect_success();
}

#[test]
fn a_supervisor_that_is_asked_to_end_in_the_middle_finishes_the_save_first() {
    let middle = Middle::met(QemuBuild::V10_0);
    middle.supervisor.ask_to_end();
    let (scene, mut supervisor, code, error) = middle.end();
    assert_eq!(code, Some(0), "{error}");
    assert!(supervisor.wait_for_end().success());
    scene
        .dormouse
        .image("verify", &image(&scene), &[])
        .expect_success();
}

#[test]
fn a_paused_guest_is_given_back_paused_on_every_qemu() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let (scene, supervisor) = large_guest(build);
        scene.guest.monitor().stop();
        let image = image(&scene);
        let middle = Middle::met_by(scene, supervisor, &image);
        faults::interrupt(middle.client());
        let (scene, _supervisor, code, error) = middle.end();
        assert_eq!(
            (code, &error["guest"]),
            (Some(CANCELLED), &json!("paused")),
            "{error}"
        );
        let mut monitor = scene.guest.monitor();
        assert_eq!(monitor.status(), "paused");
        // Its disks are its own again: it goes on, and can be hibernated.
        monitor.cont();
        drop(monitor);
        expect_guest_as_before(&scene);
        scene.dormouse.hibernate("guest", &image).expect_success();
    }
}

#[test]
fn a_guest_is_given_back_while_its_volume_hangs() {
    let (scene, supervisor) = large_guest(QemuBuild::V10_0);
    let volume = SmallVolume::new(&scene.lab, 2048);
    let middle = Middle::met_by(scene, supervisor, &volume.path("guest.image"));
    let hanging = Hanging::volume(&volume);
    faults::interrupt(middle.client());
    middle.scene.guest.wait_for_more_ticks();
    drop(hanging);
    let (scene, _supervisor, code, error) = middle.end();
    assert_eq!(
        (code, &error["guest"]),
        (Some(CANCELLED), &json!("running")),
        "{error}"
    );
    until("the partial image to be gone", || {
        volume.content().is_empty().then_some(())
    });
    expect_guest_as_before(&scene);
    // The volume is in the lab's folder, which goes last.
    drop(volume);
}

#[test]
fn a_volume_that_hangs_costs_the_guest_no_more_than_the_time_that_was_set() {
    let (scene, supervisor) = large_guest(QemuBuild::V10_0);
    let volume = SmallVolume::new(&scene.lab, 2048);
    let image = volume.path("guest.image");
    let hibernating = scene
        .dormouse
        .start_hibernating_with("guest", &image, &["--stall-timeout", "1s"]);
    let middle = Middle::of(scene, supervisor, hibernating);
    let hanging = Hanging::volume(&volume);
    middle.scene.guest.wait_for_more_ticks();
    drop(hanging);
    let (scene, _supervisor, code, error) = middle.end();
    assert_eq!(
        (code, &error["code"], &error["guest"]),
        (Some(TIMED_OUT), &json!("timed-out"), &json!("running")),
        "{error}"
    );
    assert!(
        error["message"].to_string().contains("no progress for 1s"),
        "{error}"
    );
    expect_guest_as_before(&scene);
    drop(volume);
}

#[test]
fn a_hibernation_that_takes_longer_than_it_may_gives_the_guest_back() {
    let (scene, supervisor) = large_guest(QemuBuild::V10_0);
    let image = image(&scene);
    // A gigabyte at this rate takes a hundred seconds.
    let slow = ["--rate-limit", "10M", "--timeout", "2s"];
    let hibernating = scene.dormouse.start_hibernating_with("guest", &image, &slow);
    let (scene, _supervisor, code, error) = Middle::of(scene, supervisor, hibernating).end();
    assert_eq!(
        (code, &error["guest"]),
        (Some(TIMED_OUT), &json!("running")),
        "{error}"
    );
    expect_guest_as_before(&scene);
    assert_eq!(faults::files_in(&scene.lab.path("images")), Vec::<String>::new());
}

#[test]
fn a_wake_that_is_given_up_leaves_its_image_as_it_was() {
    let (scene, mut supervisor) = large_guest(QemuBuild::V10_0);
    let image = image(&scene);
    scene.dormouse.hibernate("guest", &image).expect_success();
    supervisor.wait_for_end();
    let ticks = scene.guest.counters().len();
    let mut waking = scene.dormouse.wake("guest", &image, &["--mode", "eager"]);
    // Locked as long as it is filled from.
    until("the wake to begin", || {
        scene.dormouse.state_dir().join("guest").exists().then_some(())
    });
    assert_eq!(waking.terminate().code(), Some(CANCELLED));
    scene.lab.wait_for_no_qemu();
    assert_eq!(scene.guest.counters().len(), ticks, "the guest must not have run");
    let inspected = scene
        .dormouse
        .image("inspect", &image, &["--json"])
        .expect_success();
    assert_eq!(inspected.result()["state"], "sealed");
    let _woken = scene.dormouse.wake("guest", &image, &[]);
    scene.guest.wait_for_more_ticks();
}
