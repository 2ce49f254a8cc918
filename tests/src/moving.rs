//! A guest that writes while its volumes are moved.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command},
};

use serde_json::{Value, json};

use crate::{Dormouse, Guest, Lab, Monitor, Outcome, PlainQemu, QemuBuild, SectorWriter, wait::until};

/// A guest that writes numbered sectors as fast as it can, under a QEMU that nobody supervises.
pub struct MovingGuest {
    // Dropped in this order: the lab sweeps up last.
    qemu: PlainQemu,
    /// The guest.
    pub guest: SectorWriter,
    /// The program.
    pub dormouse: Dormouse,
    /// Its folder.
    pub lab: Lab,
}

impl MovingGuest {
    /// The name of its only disk.
    pub const DISK: &str = "ide0-hd0";

    /// Starts it.
    pub fn start(build: QemuBuild) -> Self {
        Self::start_with(build, |_| Vec::new())
    }

    /// The same, with more arguments for QEMU.
    pub fn start_with(build: QemuBuild, more: impl FnOnce(&Lab) -> Vec<String>) -> Self {
        let lab = Lab::new();
        let dormouse = Dormouse::new(&lab);
        let guest = SectorWriter::new(&lab, build);
        let more = more(&lab);
        let more: Vec<&str> = more.iter().map(String::as_str).collect();
        let qemu = PlainQemu::start_with(&guest, &more);
        guest.wait_for_sector(200);
        Self {
            qemu,
            guest,
            dormouse,
            lab,
        }
    }

    /// A monitor to look past Dormouse; Dormouse cannot connect as long as it is open.
    pub fn monitor(&self) -> Monitor {
        self.guest.monitor()
    }

    /// What Dormouse is told to move these volumes.
    pub fn arguments(&self, volumes: &[String], more: &[&str]) -> Vec<String> {
        let socket = self.guest.monitor_socket().display().to_string();
        let mut arguments: Vec<String> = ["volume", "move", "--json", "--qmp", &socket]
            .map(str::to_owned)
            .to_vec();
        for volume in volumes {
            arguments.extend(["--volume".to_owned(), volume.clone()]);
        }
        arguments.extend(more.iter().map(|&option| option.to_owned()));
        arguments
    }

    /// Moves these volumes.
    pub fn moves(&self, volumes: &[String], more: &[&str]) -> Outcome {
        self.dormouse.execute(&self.arguments(volumes, more))
    }

    /// Moves its disk.
    pub fn moves_to(&self, to: &Path, options: &str, more: &[&str]) -> Outcome {
        self.dormouse.finish(self.start_moving_to(to, options, more))
    }

    /// The same without waiting for the end.
    pub fn start_moving_to(&self, to: &Path, options: &str, more: &[&str]) -> Child {
        let volume = format!("{}={}{options}", Self::DISK, to.display());
        self.dormouse.spawn(&self.arguments(&[volume], more))
    }

    /// The node that its disk is on.
    pub fn root(&self) -> String {
        let drives = self.monitor().execute("query-block", json!({}));
        let root = &drives[0]["inserted"]["node-name"];
        root.as_str().expect("a disk has a node").to_owned()
    }

    /// All block nodes by name, sorted.
    pub fn block_nodes(&self) -> Vec<String> {
        let nodes = self
            .monitor()
            .execute("query-named-block-nodes", json!({"flat": true}));
        let name = |node: &Value| node["node-name"].as_str().expect("a name").to_owned();
        let mut names: Vec<String> = nodes.as_array().expect("a list").iter().map(name).collect();
        names.sort();
        names
    }

    /// Waits until the guest has written for a while, whatever its disk is on.
    pub fn wait_for_more_writes(&self) {
        let written = || {
            let stats = self.monitor().execute("query-blockstats", json!({}));
            stats[0]["stats"]["wr_operations"].as_u64().expect("a number")
        };
        let wanted = written() + 200;
        until("the guest to write", || (written() >= wanted).then_some(()));
    }

    /// What is on an image that the guest is on, as a raw file. The guest has to be stopped.
    pub fn as_raw(&self, image: &Path) -> PathBuf {
        let raw = self.lab.path("as-raw");
        let converted = Command::new(self.guest.build().image_tool())
            .args(["convert", "-U", "-O", "raw"])
            .args([image, &raw])
            .status();
        assert!(converted.expect("qemu-img can be run").success());
        raw
    }

    /// Ends QEMU, so that all it holds is on its volumes.
    pub fn end(self) -> (SectorWriter, Lab) {
        let mut monitor = self.monitor();
        monitor.stop();
        monitor.execute("quit", json!({}));
        self.lab.wait_for_no_qemu();
        drop(self.qemu);
        self.guest.expect_no_complaint();
        (self.guest, self.lab)
    }
}
