//! A guest that was woken lives on like one that was never away: its power button, its tray, new disks, block jobs, and
//! the next hibernation.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{fs, path::Path};

use dormouse_tests::{Guest, Monitor, QemuBuild, Scene, Supervisor, until};
use serde_json::{Value, json};

const MODES: [&str; 4] = ["map", "eager", "lazy", "stream"];

/// Wakes the guest and waits until it has all of its memory.
fn woken(scene: &Scene, image: &Path, mode: &str) -> Supervisor {
    let woken = scene.dormouse.wake("guest", image, &["--mode", mode]);
    until("the guest to be awake, with all of its memory", || {
        let status = scene.dormouse.status("guest");
        let status = (status.exit_code() == Some(0)).then(|| status.result())?;
        let is_there = status["woken"].is_object() && ["complete", ""].contains(&feed(&status));
        is_there.then_some(())
    });
    woken
}

fn feed(status: &Value) -> &str {
    status["feed"]["state"].as_str().unwrap_or_default()
}

/// The disk is copied by a job of QEMU's.
fn copy_disk(scene: &Scene, monitor: &mut Monitor) {
    let copy = scene.lab.path("copy.img");
    let disk = fs::read(scene.guest.disk()).unwrap();
    fs::write(&copy, vec![0; disk.len()]).unwrap();
    monitor.execute(
        "blockdev-add",
        json!({"driver": "raw", "node-name": "copy", "file": {"driver": "file", "filename": copy}}),
    );
    monitor.execute(
        "blockdev-backup",
        json!({"job-id": "copying", "device": "ide0-hd0", "target": "copy", "sync": "full"}),
    );
    until("the end of the job", || {
        (monitor.execute("query-jobs", json!({})) == json!([])).then_some(())
    });
    monitor.execute("blockdev-del", json!({"node-name": "copy"}));
    let copied = fs::read(&copy).unwrap();
    assert!(copied.len() == disk.len() && copied[..512] == disk[..512]);
}

fn has_medium(monitor: &mut Monitor) -> bool {
    let drives = monitor.execute("query-block", json!({}));
    let drive = drives.as_array().unwrap().iter().find(|drive| {
        let qdev = drive["qdev"].as_str().unwrap_or_default();
        qdev.contains("tray")
    });
    drive.expect("there is a tray")["inserted"].is_object()
}

#[test]
fn a_woken_guest_has_a_whole_life() {
    for mode in MODES {
        let mut scene = Scene::new(QemuBuild::V10_0);
        let disc = scene.lab.path("disc.iso");
        fs::write(&disc, vec![7; 1 << 20]).unwrap();
        let drive = format!(
            "if=none,id=disc,media=cdrom,format=raw,readonly=on,file={}",
            disc.display()
        );
        scene
            .guest
            .start_with(&["-drive", &drive, "-device", "ide-cd,id=tray,drive=disc,bus=ide.1"]);
        let image = scene.hibernated();

        let mut first = woken(&scene, &image, mode);
        scene.guest.wait_for_more_ticks();
        copy_disk(&scene, &mut scene.guest.monitor());
        let again = scene.lab.path("again.image");
        scene.dormouse.hibernate("guest", &again).expect_success();
        first.wait_for_end();

        let _second = woken(&scene, &again, mode);
        scene.guest.wait_for_more_ticks();
        let mut monitor = scene.guest.monitor();
        monitor.execute(
            "blockdev-add",
            json!({"driver": "null-co", "node-name": "new", "size": 1 << 20}),
        );
        monitor.execute(
            "device_add",
            json!({"driver": "virtio-blk-pci", "id": "plugged", "drive": "new"}),
        );
        let devices = monitor.execute("qom-list", json!({"path": "/machine/peripheral"}));
        assert!(devices.to_string().contains("plugged"), "{devices}");
        assert!(has_medium(&mut monitor));
        monitor.execute("eject", json!({"id": "tray"}));
        assert!(!has_medium(&mut monitor));
        copy_disk(&scene, &mut monitor);
        monitor.execute_until("system_powerdown", "POWERDOWN");
        scene.guest.wait_for_more_ticks();
    }
}

#[test]
fn a_guest_that_was_saved_paused_wakes_paused() {
    for mode in MODES {
        let scene = Scene::new(QemuBuild::V10_0);
        let mut supervisor = scene.run();
        scene.guest.monitor().stop();
        scene.dormouse.hibernate("guest", &scene.image()).expect_success();
        supervisor.wait_for_end();
        let ticks = scene.guest.counters().len();
        let _woken = woken(&scene, &scene.image(), mode);
        assert_eq!(scene.guest.monitor().status(), "paused");
        assert_eq!(scene.guest.counters().len(), ticks);
        scene.guest.monitor().cont();
        scene.guest.wait_for_more_ticks();
    }
}
