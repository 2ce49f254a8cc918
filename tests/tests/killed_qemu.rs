//! QEMU is killed in each phase of a hibernation. Before the seal the guest is lost, as whoever killed it wanted, and there
//! is no image; from the seal on the image is the guest, whole, and counts on from where it was.
//!
//! | killed in | by holding | exit code | image |
//! | --- | --- | --- | --- |
//! | Preflight | QEMU itself | 4 | none |
//! | Reserving | the image's volume | 4 | none |
//! | Pausing | QEMU, while the volume was held | 4 | none |
//! | SavingDevices | QEMU, as its guest stands still | 4 | none |
//! | SavingMemory | nothing: it is slow | 4 | none |
//! | Syncing | QEMU, while its memory was read | 4 | none |
//! | Sealing | nothing: as soon as the image has its name | 0 | whole |
//! | Terminating | the state directory | 0 | whole |

use std::{
    cell::RefCell,
    fs,
    io::{BufRead, BufReader},
    path::PathBuf,
};

use dormouse_tests::{
    Dormouse, Foreign, Guest, QemuBuild, Scene,
    faults::{self, Hanging, SmallVolume},
    until,
};
use rustix::process::Pid;
use serde_json::{Value, json};

const UNREACHABLE: i32 = 4;

const BUILDS: [QemuBuild; 3] = [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1];
const ENGINES: [&str; 2] = ["direct", "stream"];

/// A guest whose QEMU is going to be killed.
struct Doomed {
    // Before the laboratory, in whose folder it is.
    volume: SmallVolume,
    foreign: Foreign,
    qemu: Pid,
    engine: &'static str,
}

impl Doomed {
    /// Its images are on a volume of their own.
    fn saved_to_a_volume(build: QemuBuild, engine: &'static str) -> Self {
        let mut doomed = Self::start(build, engine);
        doomed.foreign = doomed.foreign.with_image_at(doomed.volume.path("guest.image"));
        doomed
    }

    /// The state directory is on a volume of its own.
    fn with_state_on_a_volume(build: QemuBuild, engine: &'static str) -> Self {
        let mut doomed = Self::start(build, engine);
        let state = doomed.volume.path("state");
        let scene = &mut doomed.foreign.scene;
        let modules = scene.guest.build();
        scene.dormouse = Dormouse::new(&scene.lab)
            .with_modules_of(modules)
            .with_state_dir(state);
        doomed
    }

    fn start(build: QemuBuild, engine: &'static str) -> Self {
        let ram = "memory-backend-file,id=pc.ram,size=64M,share=on,mem-path=/dev/shm";
        let foreign = Foreign::start(build, &["-object", ram, "-machine", "memory-backend=pc.ram"]);
        let qemu = foreign.scene.lab.only_qemu();
        Self {
            volume: SmallVolume::new(&foreign.scene.lab, 256),
            foreign,
            qemu,
            engine,
        }
    }

    /// Hibernates it, slowly, and does something when it is in `phase`.
    fn disturbed_in(&self, phase: &str, disturb: impl FnOnce()) -> (Option<i32>, Value) {
        let options = ["--engine", self.engine, "--rate-limit", "16M"];
        let is_time = |line: &Value| line["phase"] == phase;
        self.foreign
            .disturbed_when(&self.foreign.image(), &options, is_time, |_, _| disturb())
    }

    fn expect_no_image(&self, (code, error): &(Option<i32>, Value)) {
        let told = format!("{}, {}: {error}", self.foreign.scene.guest.build(), self.engine);
        assert_eq!(
            (*code, &error["code"], &error["guest"]),
            (Some(UNREACHABLE), &json!("unreachable"), &json!("stopped")),
            "{told}"
        );
        let folder = self.foreign.image();
        let folder = folder.parent().expect("an image is in a folder");
        let images: Vec<String> = faults::files_in(folder)
            .into_iter()
            .filter(|name| name.contains("image"))
            .collect();
        assert_eq!(images, Vec::<String>::new(), "{told}");
        assert_eq!(self.foreign.scene.dormouse.records(), Vec::new(), "{told}");
    }

    fn expect_image_is_the_guest(&self, code: Option<i32>, last: u32) {
        let dormouse = &self.foreign.scene.dormouse;
        assert_eq!(code, Some(0));
        assert_eq!(dormouse.records(), Vec::new());
        let image = self.foreign.image();
        dormouse.image("verify", &image, &[]).expect_success();
        let _woken = dormouse.wake("guest", &image, &[]);
        assert!(self.foreign.scene.guest.wait_for_more_ticks() > last);
    }
}

/// Who only now connects to a QEMU that is frozen gets no greeting, so a supervisor does it.
#[test]
fn qemu_killed_in_preflight_leaves_no_image() {
    for build in BUILDS {
        let scene = Scene::new(build);
        let mut supervisor = scene.run();
        let qemu = scene.lab.only_qemu();
        let images = scene.lab.path("images");
        fs::create_dir(&images).expect("a folder can be made");
        faults::freeze(qemu);
        let mut hibernating = scene
            .dormouse
            .start_hibernating("guest", &images.join("guest.image"));
        let output = hibernating.stdout.take().expect("its output is ours");
        let mut first = String::new();
        BufReader::new(output)
            .read_line(&mut first)
            .expect("its output can be read");
        assert!(first.contains("Preflight"), "{first}");
        faults::kill(qemu);
        scene.dormouse.finish(hibernating).expect_exit(UNREACHABLE);
        supervisor.wait_for_end();
        assert_eq!(faults::files_in(&images), Vec::<String>::new());
        assert_eq!(scene.dormouse.records(), Vec::new());
    }
}

#[test]
fn qemu_killed_in_reserving_leaves_no_image() {
    for build in BUILDS {
        let doomed = Doomed::saved_to_a_volume(build, "auto");
        let hanging = Hanging::volume(&doomed.volume);
        let outcome = doomed.disturbed_in("Reserving", || {
            faults::kill(doomed.qemu);
            drop(hanging);
        });
        doomed.expect_no_image(&outcome);
    }
}

#[test]
fn qemu_killed_in_pausing_leaves_no_image() {
    for build in BUILDS {
        let doomed = Doomed::saved_to_a_volume(build, "auto");
        let hanging = RefCell::new(Some(Hanging::volume(&doomed.volume)));
        let options = ["--engine", doomed.engine];
        let foreign = &doomed.foreign;
        let is_time = |line: &Value| {
            if line["phase"] == "Reserving" && hanging.borrow().is_some() {
                // Of all that it is asked before, it has answered the last.
                until("a record", || {
                    (!foreign.scene.dormouse.records().is_empty()).then_some(())
                });
                faults::freeze(doomed.qemu);
                hanging.take();
            }
            line["phase"] == "Pausing"
        };
        let outcome = foreign.disturbed_when(&foreign.image(), &options, is_time, |_, _| {
            faults::kill(doomed.qemu);
        });
        doomed.expect_no_image(&outcome);
    }
}

#[test]
fn qemu_killed_in_saving_devices_leaves_no_image() {
    for build in BUILDS {
        for engine in ENGINES {
            let doomed = Doomed::saved_to_a_volume(build, engine);
            let foreign = &doomed.foreign;
            let options = ["--engine", engine, "--rate-limit", "16M"];
            let mut monitor = foreign.scene.guest.monitor();
            let hibernating = foreign.scene.dormouse.start_hibernating_by_monitor(
                &foreign.socket(),
                &foreign.image(),
                &options,
            );
            faults::kill_when(doomed.qemu, "the guest to stand still", || {
                monitor.status() != "running"
            });
            let outcome = foreign.scene.dormouse.finish(hibernating);
            doomed.expect_no_image(&(outcome.exit_code(), outcome.result()["error"].clone()));
        }
    }
}

#[test]
fn qemu_killed_in_saving_memory_leaves_no_image() {
    for build in BUILDS {
        for engine in ENGINES {
            let doomed = Doomed::saved_to_a_volume(build, engine);
            let outcome = doomed.disturbed_in("SavingMemory", || faults::kill(doomed.qemu));
            doomed.expect_no_image(&outcome);
        }
    }
}

/// Its memory can be read while it is frozen; what its disks are it has to be asked.
#[test]
fn qemu_killed_in_syncing_leaves_no_image() {
    for build in BUILDS {
        let doomed = Doomed::saved_to_a_volume(build, "direct");
        let options = ["--engine", doomed.engine, "--rate-limit", "16M"];
        let is_frozen = RefCell::new(false);
        let is_time = |line: &Value| {
            if line["phase"] == "SavingMemory" && !is_frozen.replace(true) {
                faults::freeze(doomed.qemu);
            }
            line["phase"] == "SavingMemory" && line["bytes"] == line["total"]
        };
        let foreign = &doomed.foreign;
        let outcome = foreign.disturbed_when(&foreign.image(), &options, is_time, |_, _| {
            faults::kill(doomed.qemu);
        });
        doomed.expect_no_image(&outcome);
    }
}

#[test]
fn qemu_killed_in_sealing_leaves_the_image_that_is_its_guest() {
    for build in BUILDS {
        for engine in ENGINES {
            let doomed = Doomed::saved_to_a_volume(build, engine);
            let (foreign, image) = (&doomed.foreign, doomed.foreign.image());
            let hibernating = foreign.scene.dormouse.start_hibernating_by_monitor(
                &foreign.socket(),
                &image,
                &["--engine", engine],
            );
            faults::kill_when(doomed.qemu, "the image", || image.exists());
            let last = foreign.scene.guest.last_counter();
            let code = foreign.scene.dormouse.finish(hibernating).exit_code();
            doomed.expect_image_is_the_guest(code, last);
        }
    }
}

#[test]
fn qemu_killed_in_terminating_leaves_the_image_that_is_its_guest() {
    for build in BUILDS {
        let doomed = Doomed::with_state_on_a_volume(build, "auto");
        let (foreign, image): (&Foreign, PathBuf) = (&doomed.foreign, doomed.foreign.image());
        let hibernating = foreign.scene.dormouse.start_hibernating_by_monitor(
            &foreign.socket(),
            &image,
            &["--rate-limit", "16M"],
        );
        until("the record before the seal", || {
            let (_, record) = foreign.scene.dormouse.records().pop()?;
            (record["point"] == "sealing").then_some(())
        });
        // The next record cannot be written, so that QEMU is not told to end.
        let hanging = Hanging::volume(&doomed.volume);
        until("the image", || fs::exists(&image).unwrap_or(false).then_some(()));
        let last = foreign.scene.guest.last_counter();
        faults::kill(doomed.qemu);
        drop(hanging);
        let code = foreign.scene.dormouse.finish(hibernating).exit_code();
        doomed.expect_image_is_the_guest(code, last);
    }
}
