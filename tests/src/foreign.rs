//! A guest under a QEMU that somebody else started.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
};

use rustix::process::Pid;
use serde_json::{Value, json};

use crate::{BootSectorGuest, Guest, Outcome, PlainQemu, QemuBuild, Scene, Supervisor, faults};

/// Name of the monitor's socket in the laboratory.
const SOCKET: &str = "foreign.sock";

/// A guest that runs under a QEMU that somebody else started.
pub struct Foreign {
    /// The guest, and the program.
    pub scene: Scene,
    image: PathBuf,
    /// Options that whoever reads the image needs.
    key: Vec<String>,
    _qemu: PlainQemu,
}

impl Foreign {
    /// Starts the guest with these arguments beside its own, and with a monitor for Dormouse.
    pub fn start(build: QemuBuild, arguments: &[&str]) -> Self {
        Self::start_with_ram(build, 64, arguments)
    }

    /// The same with so much RAM.
    pub fn start_with_ram(build: QemuBuild, ram_mib: u64, arguments: &[&str]) -> Self {
        let mut scene = Scene::with_ram(build, ram_mib);
        scene.dormouse = scene.dormouse.with_modules_of(build);
        let monitor = format!("unix:{},server=on,wait=off", scene.lab.path(SOCKET).display());
        let mut all = vec!["-qmp", &monitor];
        all.extend(arguments);
        let qemu = PlainQemu::start_with(&scene.guest, &all);
        scene.guest.wait_for_ticks(20);
        fs::create_dir(scene.lab.path("images")).expect("a folder can be made");
        Self {
            image: scene.lab.path("images/guest.image"),
            key: Vec::new(),
            scene,
            _qemu: qemu,
        }
    }

    /// The same with its images somewhere else.
    pub fn with_image_at(self, image: PathBuf) -> Self {
        Self { image, ..self }
    }

    /// The same with a key in this file for whoever reads its images.
    pub fn with_key_file(self, key: &str) -> Self {
        let key = vec!["--key-file".to_owned(), key.to_owned()];
        Self { key, ..self }
    }

    /// Where its images are.
    pub fn image(&self) -> PathBuf {
        self.image.clone()
    }

    /// Its monitor.
    pub fn socket(&self) -> PathBuf {
        self.scene.lab.path(SOCKET)
    }

    /// Hibernates the guest.
    pub fn hibernate(&self, options: &[&str]) -> Outcome {
        let scene = &self.scene;
        let hibernating = scene
            .dormouse
            .start_hibernating_by_monitor(&self.socket(), &self.image(), options);
        scene.dormouse.finish(hibernating)
    }

    /// Hibernates a guest that takes a while to be saved, and does something in the middle of it; returns the exit code
    /// and the error.
    pub fn disturbed(&self, options: &[&str], disturb: impl FnOnce(&Self, Pid)) -> (Option<i32>, Value) {
        let lab = &self.scene.lab;
        faults::fill_memory(lab.only_qemu(), 64, 1024);
        let is_middle = |line: &Value| line["phase"] == "SavingMemory" && line["bytes"] != line["total"];
        self.disturbed_when(&self.image, options, is_middle, disturb)
    }

    /// Hibernates the guest to `image` and does something when a line of progress says that it is time for it; returns
    /// the exit code and the error.
    pub fn disturbed_when(
        &self,
        image: &Path,
        options: &[&str],
        is_time: impl Fn(&Value) -> bool,
        disturb: impl FnOnce(&Self, Pid),
    ) -> (Option<i32>, Value) {
        let dormouse = &self.scene.dormouse;
        let mut hibernating = dormouse.start_hibernating_by_monitor(&self.socket(), image, options);
        let client = Pid::from_child(&hibernating);
        let output = hibernating.stdout.take().expect("its output is ours");
        let mut lines = BufReader::new(output).lines().map_while(Result::ok);
        let met = lines.find(|line| is_time(&serde_json::from_str(line).unwrap_or_default()));
        assert!(met.is_some(), "it was too fast to be disturbed");
        disturb(self, client);
        let last = lines.last().unwrap_or_default();
        let last: Value = serde_json::from_str(&last).unwrap_or_default();
        let code = dormouse.finish(hibernating).exit_code();
        (code, last["error"].clone())
    }

    /// Whether nothing is where its images are.
    pub fn expect_no_image(&self) {
        let images = faults::files_in(&self.scene.lab.path("images"));
        assert_eq!(images, Vec::<String>::new());
    }

    /// Pauses the guest, hibernates it, wakes it, and compares all of its memory; the guest then counts on. Returns what
    /// the hibernation told.
    pub fn keeps_every_byte(&self, options: &[&str], mode: &str) -> (Value, Supervisor) {
        let before = self.memory("before");
        let hibernated = self.hibernate(options).expect_success().result();
        self.scene.lab.wait_for_no_qemu();
        let woken = self.wakes_with(&before, mode);
        (hibernated, woken)
    }

    /// Wakes the guest and compares its memory with what it was.
    pub fn wakes_with(&self, before: &[u8], mode: &str) -> Supervisor {
        let Scene { dormouse, guest, .. } = &self.scene;
        let mut options: Vec<&str> = self.key.iter().map(String::as_str).collect();
        dormouse.image("verify", &self.image(), &options).expect_success();
        options.extend(["--mode", mode, "--paused"]);
        let woken = dormouse.wake("guest", &self.image(), &options);
        let after = self.memory("after");
        let first_difference = before.iter().zip(&after).position(|(a, b)| a != b);
        assert_eq!(
            (before.len(), first_difference),
            (after.len(), None),
            "sizes and first difference of the memory before and after"
        );
        let ticks = guest.counters().len();
        guest.monitor().cont();
        guest.wait_for_ticks(ticks + 1);
        assert!(guest.counters()[ticks] >= BootSectorGuest::counter_in(before));
        guest.wait_for_more_ticks();
        woken
    }

    /// The memory of the guest, which is paused for it.
    pub fn memory(&self, name: &str) -> Vec<u8> {
        let Scene { guest, lab, .. } = &self.scene;
        let mut monitor = guest.monitor();
        if monitor.status() == "running" {
            monitor.stop();
        }
        monitor.wait_for_status("paused");
        monitor.memory(guest.ram_bytes(), &lab.path(name))
    }

    /// Capabilities and parameters of migrations.
    pub fn settings(&self) -> (Value, Value) {
        let mut monitor = self.scene.guest.monitor();
        (
            monitor.execute("query-migrate-capabilities", json!({})),
            monitor.execute("query-migrate-parameters", json!({})),
        )
    }
}
