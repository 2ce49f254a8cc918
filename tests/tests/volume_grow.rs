//! Disks grow under their guests to what their new volumes have, and a save and a wake keep to that.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends here")]

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use dormouse_tests::{
    BootSectorGuest, Dormouse, Guest, Lab, LoopDevice, MovingGuest, Outcome, QemuBuild, SectorWriter, until,
};
use serde_json::json;

const REFUSED: i32 = 3;
const UNREACHABLE: i32 = 4;
const NO_SPACE: i32 = 7;

const DISK_BYTES: u64 = 1 << 30;
const LARGER_BYTES: u64 = DISK_BYTES + (16 << 20);

fn larger(lab: &Lab, name: &str) -> PathBuf {
    let path = lab.path(name);
    File::create(&path).unwrap().set_len(LARGER_BYTES).unwrap();
    path
}

fn message(outcome: &Outcome) -> String {
    let result = outcome.result();
    result["error"]["message"].as_str().unwrap().to_owned()
}

fn size(guest: &impl Guest) -> u64 {
    let drives = guest.monitor().execute("query-block", json!({}));
    drives[0]["inserted"]["image"]["virtual-size"].as_u64().unwrap()
}

fn grow(moving: &MovingGuest, size: &str) -> Outcome {
    let socket = moving.guest.monitor_socket().display().to_string();
    let arguments = [
        "volume",
        "grow",
        "--json",
        "--qmp",
        &socket,
        MovingGuest::DISK,
        size,
    ];
    moving.dormouse.execute(&arguments)
}

#[test]
fn a_disk_grows_to_all_of_its_larger_volume_on_every_qemu() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let moving = MovingGuest::start(build);
        let volume = larger(&moving.lab, "volume");
        moving.moves_to(&volume, "", &[]).expect_success();
        assert_eq!(size(&moving.guest), DISK_BYTES, "{build}");
        let too_large = grow(&moving, &(LARGER_BYTES + 4096).to_string()).expect_exit(NO_SPACE);
        assert!(message(&too_large).contains("lacks 4096 bytes"), "{too_large:#?}");
        let smaller = grow(&moving, "512M").expect_exit(REFUSED);
        assert!(message(&smaller).contains("not made smaller"), "{smaller:#?}");
        assert_eq!(size(&moving.guest), DISK_BYTES);
        let nodes = moving.block_nodes();
        let grown = grow(&moving, "max").expect_success().result();
        assert_eq!(
            (&grown["from_bytes"], &grown["to_bytes"]),
            (&json!(DISK_BYTES), &json!(LARGER_BYTES))
        );
        assert_eq!(size(&moving.guest), LARGER_BYTES, "{build}");
        assert_eq!(moving.block_nodes(), nodes);
        // Again it changes nothing, and brings one that was interrupted to its end.
        grow(&moving, &LARGER_BYTES.to_string()).expect_success();
        SectorWriter::wait_for_more_sectors_on(&volume, 200);
        // It can be moved again, as large as it is.
        let next = moving.lab.path("next");
        moving.moves_to(&next, ",create", &[]).expect_success();
        assert_eq!(fs::metadata(&next).unwrap().len(), LARGER_BYTES);
        let (_guest, _lab) = moving.end();
        SectorWriter::sectors_on(&next);
    }
}

#[test]
fn a_disk_grows_to_all_of_a_block_device_and_a_qcow2_image_to_what_is_said() {
    let moving = MovingGuest::start(QemuBuild::V10_0);
    let device = LoopDevice::with_old_data(&moving.lab, 1040);
    let image = moving.lab.path("image.qcow2");
    moving.moves_to(device.path(), "", &[]).expect_success();
    grow(&moving, "1040M").expect_success();
    assert_eq!(size(&moving.guest), 1040 << 20);
    moving
        .moves_to(&image, ",create,format=qcow2", &[])
        .expect_success();
    grow(&moving, "max").expect_exit(REFUSED);
    grow(&moving, "2G").expect_success();
    assert_eq!(size(&moving.guest), 2 << 30);
    moving.wait_for_more_writes();
    let (_guest, _lab) = moving.end();
    drop(device);
}

fn moves(dormouse: &Dormouse, to: &Path, options: &str) {
    let wish = format!("{}={}{options}", MovingGuest::DISK, to.display());
    dormouse
        .execute(&["volume", "move", "guest", "--json", "--volume", &wish])
        .expect_success();
}

/// A guest that was just woken runs before its supervisor answers.
fn grow_supervised(dormouse: &Dormouse) -> Outcome {
    until("an answer of the supervisor", || {
        let outcome = dormouse.execute(&["volume", "grow", "guest", MovingGuest::DISK, "max", "--json"]);
        (outcome.exit_code() != Some(UNREACHABLE)).then_some(outcome)
    })
}

#[test]
fn a_guest_wakes_with_its_disk_as_large_as_it_was_at_the_save_on_every_qemu() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let lab = Lab::new();
        let dormouse = Dormouse::new(&lab);
        let guest = SectorWriter::new(&lab, build);
        let mut supervisor = dormouse.run("guest", &guest);
        guest.wait_for_sector(200);
        let (volume, image) = (larger(&lab, "volume"), lab.path("image"));
        moves(&dormouse, &volume, "");
        dormouse.hibernate("guest", &image).expect_success();
        supervisor.wait_for_end();
        lab.wait_for_no_qemu();

        // As before the save, and from a line that has its size.
        let mut woken = dormouse.wake("guest", &image, &["--mode", "eager"]);
        SectorWriter::wait_for_more_sectors_on(&volume, 100);
        assert_eq!(size(&guest), DISK_BYTES, "{build}");
        let refused = grow_supervised(&dormouse).expect_exit(REFUSED);
        assert!(
            message(&refused).contains("move it to another volume"),
            "{refused:#?}"
        );
        let second = larger(&lab, "second");
        moves(&dormouse, &second, "");
        grow_supervised(&dormouse).expect_success();
        assert_eq!(size(&guest), LARGER_BYTES, "{build}");
        dormouse.hibernate("guest", &image).expect_success();
        woken.wait_for_end();
        lab.wait_for_no_qemu();

        let _woken = dormouse.wake("guest", &image, &["--mode", "eager"]);
        SectorWriter::wait_for_more_sectors_on(&second, 100);
        assert_eq!(size(&guest), LARGER_BYTES, "{build}");
        guest.monitor().stop();
        SectorWriter::sectors_on(&second);
        guest.expect_no_complaint();
    }
}

/// As far as an interrupted growth can come: the disk has lost its size, and its guest was not told.
#[test]
fn a_guest_whose_growth_was_interrupted_is_saved_and_woken() {
    let lab = Lab::new();
    let dormouse = Dormouse::new(&lab);
    let guest = SectorWriter::new(&lab, QemuBuild::V10_0);
    let mut supervisor = dormouse.run("guest", &guest);
    guest.wait_for_sector(200);
    let (volume, image) = (larger(&lab, "volume"), lab.path("image"));
    moves(&dormouse, &volume, "");
    let mut monitor = guest.monitor();
    let drives = monitor.execute("query-block", json!({}));
    let root = drives[0]["inserted"]["node-name"].as_str().unwrap();
    let node = json!({"driver": "raw", "node-name": root, "file": root.replace("format", "file")});
    monitor.execute("blockdev-reopen", json!({ "options": [node] }));
    drop(monitor);
    dormouse.hibernate("guest", &image).expect_success();
    supervisor.wait_for_end();
    lab.wait_for_no_qemu();
    let _woken = dormouse.wake("guest", &image, &["--mode", "eager"]);
    SectorWriter::wait_for_more_sectors_on(&volume, 100);
    assert_eq!(size(&guest), LARGER_BYTES);
    grow_supervised(&dormouse).expect_success();
    assert_eq!(dormouse.status("guest").result()["operation"]["phase"], "Grown");
    guest.expect_no_complaint();
}

#[test]
fn a_disk_that_cannot_grow_says_why() {
    let lab = Lab::new();
    let dormouse = Dormouse::new(&lab);
    let guest = BootSectorGuest::new(&lab, QemuBuild::V10_0);
    let _supervisor = dormouse.run("guest", &guest);
    let outcome = dormouse.execute(&["volume", "grow", "guest", "nosuch", "1G", "--json"]);
    assert!(
        message(&outcome).contains("there is no disk nosuch"),
        "{outcome:#?}"
    );
}
