//! A move of volumes that was interrupted long ago: what somebody has done since with its volumes stays.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends here")]

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use dormouse_tests::{Dormouse, Guest, Lab, PlainQemu, QemuBuild, SectorWriter, faults, until};
use rustix::process::Pid;
use serde_json::{Value, json};

const REFUSED: i32 = 3;
const UNREACHABLE: i32 = 4;
const NEEDS_AN_OPERATOR: i32 = 10;

/// A guest under a QEMU that nobody supervises, and a target that a move makes.
struct Moving {
    // Dropped in this order: the lab sweeps up last.
    qemu: PlainQemu,
    guest: SectorWriter,
    dormouse: Dormouse,
    target: PathBuf,
    lab: Lab,
}

impl Moving {
    fn start() -> Self {
        Self::start_on(QemuBuild::V10_0)
    }

    fn start_on(build: QemuBuild) -> Self {
        let lab = Lab::new();
        let dormouse = Dormouse::new(&lab);
        let guest = SectorWriter::new(&lab, build);
        let qemu = PlainQemu::start(&guest);
        guest.wait_for_sector(200);
        Self {
            qemu,
            guest,
            dormouse,
            target: lab.path("new"),
            lab,
        }
    }

    fn begin(&self, more: &[&str]) -> std::process::Child {
        let socket = self.guest.monitor_socket().display().to_string();
        let wish = format!("ide0-hd0={},create", self.target.display());
        let arguments = ["volume", "move", "--json", "--qmp", &socket, "--volume", &wish];
        self.dormouse.spawn(&[&arguments, more].concat())
    }

    /// Kills Dormouse while it copies.
    fn interrupted(&self) -> Value {
        let moving = self.begin(&["--speed", "1M"]);
        let record = record(&self.dormouse);
        until("the target to be filled", || {
            (fs::metadata(&self.target).unwrap().blocks() > 8).then_some(())
        });
        faults::kill(Pid::from_child(&moving));
        self.dormouse.finish(moving);
        record
    }

    /// A move that was switched and killed before that was written down.
    fn switched_without_a_record(&self) {
        let moving = self.begin(&["--speed", "256M"]);
        let mut record = record(&self.dormouse);
        self.dormouse.finish(moving).expect_success();
        record["point"] = json!("intending");
        self.leave(&record);
    }

    fn leave(&self, record: &Value) {
        leave(&self.dormouse, record);
    }
}

fn leave(dormouse: &Dormouse, record: &Value) {
    let folder = dormouse.state_dir().join(".moves");
    fs::create_dir_all(&folder).unwrap();
    let name = format!("{}.json", record["operation"].as_str().unwrap());
    fs::write(folder.join(name), record.to_string()).unwrap();
}

/// What was written down once the target was made.
fn record(dormouse: &Dormouse) -> Value {
    until("the target to be made and written down", || {
        let record = dormouse.moves().pop()?;
        (!record["volumes"][0]["made"].is_null()).then_some(record)
    })
}

fn names(outcome: &Value, file: &Path) -> bool {
    let remarks = outcome["remarks"].as_array().unwrap();
    remarks
        .iter()
        .any(|remark| remark.as_str().unwrap().contains(&file.display().to_string()))
}

#[test]
fn a_guest_whose_move_was_interrupted_is_not_saved_before_that_is_over() {
    let moving = Moving::start();
    moving.interrupted();
    let (socket, image) = (moving.guest.monitor_socket(), moving.lab.path("guest.image"));
    let refused = moving
        .dormouse
        .hibernate_by_monitor(socket, &image)
        .expect_exit(REFUSED);
    let message = refused.result()["error"]["message"].to_string();
    assert!(message.contains("dormouse recover"), "{message}");
    moving.dormouse.recover(&[]).expect_success();
    moving
        .dormouse
        .hibernate_by_monitor(socket, &image)
        .expect_success();
}

#[test]
fn a_volume_that_a_snapshot_was_put_on_since_is_not_removed() {
    let moving = Moving::start();
    moving.switched_without_a_record();
    let mut monitor = moving.guest.monitor();
    let root = monitor.execute("query-block", json!({}))[0]["inserted"]["node-name"].clone();
    let overlay = moving.lab.path("overlay");
    monitor.execute(
        "blockdev-snapshot-sync",
        json!({"node-name": root, "snapshot-file": overlay, "snapshot-node-name": "overlay"}),
    );
    drop(monitor);
    let recovered = moving
        .dormouse
        .recover(&[])
        .expect_exit(NEEDS_AN_OPERATOR)
        .result();
    assert_eq!(recovered["outcome"], "disks-changed", "{recovered}");
    assert!(names(&recovered, &moving.target), "{recovered}");
    assert!(moving.target.exists(), "the guest's writes are on it");
    assert!(faults::has_open(moving.lab.only_qemu(), &moving.target));
    moving.guest.expect_no_complaint();
}

#[test]
fn a_volume_whose_qemu_is_gone_is_left_and_named() {
    let moving = Moving::start();
    moving.interrupted();
    let Moving {
        qemu,
        dormouse,
        target,
        lab,
        guest: _guest,
    } = moving;
    drop(qemu);
    lab.wait_for_no_qemu();
    // Somebody has copied the disk onto it by hand.
    fs::write(&target, b"the only copy").unwrap();
    let recovered = dormouse.recover(&[]).expect_success().result();
    assert_eq!(recovered["outcome"], "qemu-gone-before", "{recovered}");
    assert!(names(&recovered, &target), "{recovered}");
    assert_eq!(fs::read(&target).unwrap(), b"the only copy");
}

#[test]
fn a_volume_that_another_qemu_uses_by_now_is_not_removed() {
    let moving = Moving::start();
    moving.interrupted();
    let other = Lab::new();
    let second = SectorWriter::new(&other, QemuBuild::V10_0);
    fs::copy(second.disk(), other.path("disk")).unwrap();
    let file = format!(
        "if=none,id=same,format=raw,file.locking=on,file={}",
        moving.target.display()
    );
    // QEMU's mirror shares the permission to write with nobody, so the target is let go of first.
    let mut monitor = moving.guest.monitor();
    let job = monitor.execute("query-jobs", json!({}))[0]["id"].clone();
    monitor.execute("job-cancel", json!({"id": job}));
    until("the job to end", || {
        let jobs = monitor.execute("query-jobs", json!({}));
        (jobs[0]["status"] == "concluded").then_some(())
    });
    for node in ["format", "file"] {
        let name = format!("{}-{node}", job.as_str().unwrap());
        monitor.execute("blockdev-del", json!({"node-name": name}));
    }
    drop(monitor);
    let _other = PlainQemu::start_with(
        &second,
        &["-drive", &file, "-device", "virtio-blk-pci,drive=same"],
    );
    second.wait_for_sector(1);
    let recovered = moving.dormouse.recover(&[]).expect_success().result();
    assert_eq!(recovered["outcome"], "volumes-as-before", "{recovered}");
    assert!(names(&recovered, &moving.target), "{recovered}");
    assert!(moving.target.exists());
}

#[test]
fn a_guest_is_not_started_while_nobody_can_say_which_volumes_are_its_own() {
    let moving = Moving::start();
    let mut record = moving.interrupted();
    record["point"] = json!("intending");
    record["vm_name"] = json!("guest");
    moving.leave(&record);
    let Moving {
        qemu,
        dormouse,
        guest,
        target,
        lab,
    } = moving;
    drop(qemu);
    lab.wait_for_no_qemu();
    let refused = dormouse
        .try_run("guest", &[], &guest.command_line())
        .expect_exit(NEEDS_AN_OPERATOR);
    for volume in [guest.disk(), &target] {
        let volume = volume.display().to_string();
        assert!(refused.stderr.contains(&volume), "{refused:#?}");
    }
    assert_eq!(lab.qemu_pids(), []);
    // Another VM is not kept from anything.
    let _other = dormouse.run("other", &guest);
    lab.only_qemu();
}

#[test]
fn a_guest_that_somebody_has_stopped_since_is_not_run() {
    for (was_stopped_for_it, status) in [(false, "paused"), (true, "running")] {
        let moving = Moving::start_on(QemuBuild::V7_2);
        let mut record = moving.interrupted();
        record["point"] = json!("intending");
        record["stops_guest"] = json!(true);
        record["is_stopped"] = json!(was_stopped_for_it);
        moving.leave(&record);
        moving.guest.monitor().stop();
        let recovered = moving.dormouse.recover(&[]).expect_success().result();
        assert_eq!(recovered["outcome"], "volumes-as-before", "{recovered}");
        assert_eq!(moving.guest.monitor().status(), status);
        assert_eq!(
            recovered["remarks"].to_string().contains("`cont`"),
            !was_stopped_for_it,
            "{recovered}"
        );
        assert!(!moving.target.exists());
    }
}

#[test]
fn what_a_move_left_under_a_living_supervisor_is_ended_by_the_guests_next_operation() {
    let lab = Lab::new();
    let dormouse = Dormouse::new(&lab);
    let guest = SectorWriter::new(&lab, QemuBuild::V10_0);
    let mut supervisor = dormouse.run("guest", &guest);
    guest.wait_for_sector(200);
    let target = lab.path("new");
    let wish = format!("ide0-hd0={},create", target.display());
    let arguments = [
        "volume", "move", "guest", "--json", "--speed", "256M", "--volume", &wish,
    ];
    let moving = dormouse.spawn(&arguments);
    let mut record = record(&dormouse);
    dormouse.finish(moving).expect_success();
    record["point"] = json!("intending");
    leave(&dormouse, &record);
    let taken = dormouse.recover(&[]).expect_exit(UNREACHABLE);
    assert!(taken.stdout.contains("next operation"), "{taken:#?}");
    let image = lab.path("image");
    dormouse.hibernate("guest", &image).expect_success();
    supervisor.wait_for_end();
    assert_eq!(dormouse.moves(), Vec::<Value>::new());
    let _woken = dormouse.wake("guest", &image, &[]);
    SectorWriter::wait_for_more_sectors_on(&target, 100);
    guest.expect_no_complaint();
}
