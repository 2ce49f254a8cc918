//! Hibernations that are interrupted: Dormouse is killed in the middle or after the seal, and what must be true after a
//! recovery.

use std::{
    io::{BufRead, BufReader},
    path::PathBuf,
    process::Child,
};

use rustix::process::Pid;
use serde_json::{Value, json};

use crate::{
    Foreign, Guest, QemuBuild, Scene, Supervisor,
    faults::{self, Hanging, SmallVolume},
    until,
};

/// So slow that there is a middle: the guest holds 17 MiB.
pub const SLOWLY: [&str; 2] = ["--rate-limit", "4M"];

/// A guest under a QEMU that somebody else started, and its migration settings.
pub struct Guarded {
    /// What the state directory is on.
    pub state: SmallVolume,
    /// The guest, and its monitor.
    pub foreign: Foreign,
    /// Its migration settings before anything was done.
    pub settings: Value,
}

impl Guarded {
    /// A guest with its memory in a file.
    pub fn start(build: QemuBuild) -> Self {
        let ram = "memory-backend-file,id=pc.ram,size=64M,share=on,mem-path=/dev/shm";
        Self::start_with(build, &["-object", ram, "-machine", "memory-backend=pc.ram"])
    }

    /// A guest under a QEMU with these arguments beside its own.
    pub fn start_with(build: QemuBuild, arguments: &[&str]) -> Self {
        let mut foreign = Foreign::start(build, arguments);
        let state = SmallVolume::new(&foreign.scene.lab, 16);
        foreign.scene.dormouse = foreign.scene.dormouse.with_state_dir(state.path("state"));
        let settings = settings(&foreign.scene);
        Self {
            state,
            foreign,
            settings,
        }
    }

    /// The guest, and the program.
    pub fn scene(&self) -> &Scene {
        &self.foreign.scene
    }

    /// Where its monitor is.
    pub fn socket(&self) -> String {
        self.foreign.socket().to_string_lossy().into_owned()
    }

    /// Starts to hibernate it.
    pub fn start_hibernating(&self, options: &[&str]) -> Child {
        let scene = self.scene();
        scene
            .dormouse
            .start_hibernating_by_monitor(&self.foreign.socket(), &image(scene), options)
    }

    /// Kills Dormouse in the middle of the save.
    pub fn killed_in_the_middle(&self, options: &[&str]) {
        let mut client = self.start_hibernating(&[options, &SLOWLY].concat());
        wait_for_middle(&mut client);
        faults::kill(Pid::from_child(&client));
        self.scene().dormouse.finish(client);
    }

    /// Kills Dormouse between the seal and QEMU's end.
    pub fn killed_after_the_seal(&self) {
        let client = self.start_hibernating(&SLOWLY);
        let held = held_after_the_seal(self.scene(), &self.state);
        faults::kill(Pid::from_child(&client));
        drop(held);
        self.scene().dormouse.finish(client);
    }

    /// Recovers, and the guest is as it was.
    pub fn expect_given_back(&self) {
        let recovered = self.scene().dormouse.recover(&[]).expect_success().result();
        assert_eq!(recovered["outcome"], "given-back");
        assert_eq!(recovered["guest"], "running");
        expect_guest_as_before(self.scene(), &self.settings);
    }
}

/// Lets the state directory hang from the record before the seal on, so that Dormouse stands before the one after it.
pub fn held_after_the_seal<'a>(scene: &Scene, state: &'a SmallVolume) -> Hanging<'a> {
    until("the record before the seal", || {
        let (_, record) = scene.dormouse.records().pop()?;
        (record["point"] == "sealing").then_some(())
    });
    let held = Hanging::volume(state);
    until("the image", || image(scene).exists().then_some(()));
    held
}

/// Where its image goes.
pub fn image(scene: &Scene) -> PathBuf {
    scene.lab.path("images/guest.image")
}

/// All migration settings.
pub fn settings(scene: &Scene) -> Value {
    let mut monitor = scene.guest.monitor();
    json!([
        monitor.execute("query-migrate-capabilities", json!({})),
        monitor.execute("query-migrate-parameters", json!({})),
    ])
}

/// Returns when memory is being written.
pub fn wait_for_middle(client: &mut Child) {
    let output = client.stdout.take().expect("its output is ours");
    let mut lines = BufReader::new(output).lines().map_while(Result::ok);
    let met = lines.any(|line| {
        let line: Value = serde_json::from_str(&line).unwrap_or_default();
        line["phase"] == "SavingMemory" && line["bytes"] != line["total"]
    });
    assert!(met, "it was too fast to have a middle");
}

/// What is where its images go.
pub fn files_of_images(scene: &Scene) -> Vec<String> {
    faults::files_in(&scene.lab.path("images"))
}

/// The guest counts on, migration is set as it was, and of the hibernation there is no trace. A second recovery finds
/// nothing, and the next hibernation nothing in its way.
pub fn expect_guest_as_before(scene: &Scene, settings_before: &Value) {
    scene.guest.wait_for_more_ticks();
    assert_eq!(&settings(scene), settings_before);
    assert_eq!(files_of_images(scene), Vec::<String>::new());
    expect_nothing_to_recover(scene);
}

/// A recovery finds nothing to do, and no record.
pub fn expect_nothing_to_recover(scene: &Scene) {
    let again = scene.dormouse.recover(&[]).expect_success().result();
    assert_eq!(again, json!({"operations": 0}));
    assert!(!scene.dormouse.state_dir().join(".operations").exists());
}

/// QEMU is gone, the image is whole, and its guest counts on from where it was.
pub fn expect_image_is_the_guest(scene: &Scene) -> Supervisor {
    scene.lab.wait_for_no_qemu();
    assert_eq!(files_of_images(scene), ["guest.image"]);
    scene
        .dormouse
        .image("verify", &image(scene), &[])
        .expect_success();
    expect_nothing_to_recover(scene);
    let last = scene.guest.last_counter();
    let woken = scene.dormouse.wake("guest", &image(scene), &[]);
    assert!(scene.guest.wait_for_more_ticks() > last);
    woken
}
