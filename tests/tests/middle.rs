//! What happens in the middle of a save: the guest is given back, or there is an image, never neither and never a
//! wrong one. The guest's memory is made large enough for a middle to be met.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::Child,
};

use dormouse_tests::{BootSectorGuest, Dormouse, Guest, Lab, Outcome, QemuBuild, Supervisor, faults};
use rustix::process::Pid;
use serde_json::Value;

const REFUSED: i32 = 3;
const UNREACHABLE: i32 = 4;
const CANCELLED: i32 = 6;

/// A guest with a gigabyte of memory that takes its time to be saved.
struct Scene {
    // Dropped in this order: the lab sweeps up last.
    supervisor: Supervisor,
    dormouse: Dormouse,
    guest: BootSectorGuest,
    lab: Lab,
}

impl Scene {
    fn new(build: QemuBuild) -> Self {
        let lab = Lab::new();
        let dormouse = Dormouse::new(&lab);
        let guest = BootSectorGuest::with_ram(&lab, build, 1200);
        let supervisor = dormouse.run("guest", &guest);
        guest.wait_for_ticks(5);
        faults::fill_memory(lab.only_qemu(), 64, 1024);
        fs::create_dir(lab.path("images")).expect("a folder can be made");
        Self {
            supervisor,
            dormouse,
            guest,
            lab,
        }
    }

    fn image(&self) -> PathBuf {
        self.lab.path("images/guest.image")
    }

    /// Begins to hibernate and returns when memory is being written.
    fn hibernating(&self) -> (Child, impl BufRead + use<>) {
        let mut hibernating = self.dormouse.start_hibernating("guest", &self.image());
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
        (hibernating, lines)
    }

    /// How it ended, and its last line.
    fn finish(&self, hibernating: Child, lines: impl BufRead) -> (Outcome, Value) {
        let last = lines.lines().map_while(Result::ok).last().unwrap_or_default();
        (
            self.dormouse.finish(hibernating),
            serde_json::from_str(&last).unwrap_or_default(),
        )
    }

    fn expect_guest_as_before(&self) {
        self.guest.wait_for_more_ticks();
        assert_eq!(faults::files_in(&self.lab.path("images")), Vec::<String>::new());
        let mut monitor = self.guest.monitor();
        let capabilities = monitor.execute("query-migrate-capabilities", serde_json::json!({}));
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
        let parameters = monitor.execute("query-migrate-parameters", serde_json::json!({}));
        assert_eq!(parameters["max-bandwidth"], 128 << 20);
    }
}

fn pid_of(child: &Child) -> Pid {
    Pid::from_child(child)
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
    let scene = Scene::new(build);
    let (hibernating, lines) = scene.hibernating();
    faults::interrupt(pid_of(&hibernating));
    let (outcome, last) = scene.finish(hibernating, lines);
    assert_eq!(outcome.exit_code(), Some(CANCELLED), "{outcome:#?}");
    assert_eq!(last["error"]["guest"], "running");
    scene.expect_guest_as_before();
    // And nothing of it stands in the way of the next try.
    scene.dormouse.hibernate("guest", &scene.image()).expect_success();
    scene
        .dormouse
        .image("verify", &scene.image(), &[])
        .expect_success();
}

#[test]
fn a_qemu_that_is_killed_while_its_memory_is_written_leaves_no_image() {
    let mut scene = Scene::new(QemuBuild::V10_0);
    let (hibernating, lines) = scene.hibernating();
    faults::kill(scene.lab.only_qemu());
    let (outcome, last) = scene.finish(hibernating, lines);
    assert_eq!(outcome.exit_code(), Some(UNREACHABLE), "{outcome:#?}");
    assert_eq!(last["error"]["code"], "unreachable");
    scene.supervisor.wait_for_end();
    assert_eq!(faults::files_in(&scene.lab.path("images")), Vec::<String>::new());
}

#[test]
fn a_guest_that_somebody_runs_in_the_middle_has_no_image_and_runs_on() {
    let scene = Scene::new(QemuBuild::V10_0);
    let mut monitor = scene.guest.monitor();
    let (hibernating, lines) = scene.hibernating();
    monitor.cont();
    drop(monitor);
    let (outcome, last) = scene.finish(hibernating, lines);
    assert_eq!(outcome.exit_code(), Some(REFUSED), "{outcome:#?}");
    assert_eq!(last["error"]["guest"], "running");
    scene.expect_guest_as_before();
}

#[test]
fn a_client_that_is_killed_does_not_stop_the_save() {
    let mut scene = Scene::new(QemuBuild::V10_0);
    let (hibernating, lines) = scene.hibernating();
    faults::kill(pid_of(&hibernating));
    drop(lines);
    let status = scene.supervisor.wait_for_end();
    assert!(status.success(), "{status}");
    scene
        .dormouse
        .image("verify", &scene.image(), &[])
        .expect_success();
    scene.dormouse.finish(hibernating);
}
