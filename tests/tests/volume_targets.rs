//! What is no place for a volume: it would be overwritten, or the guest itself lies there.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends here")]

use std::env;
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

use dormouse_tests::{BootSectorGuest, Dormouse, Lab, LoopDevice, MovingGuest, Outcome, QemuBuild};

const USAGE: i32 = 2;
const REFUSED: i32 = 3;

const DISK_BYTES: u64 = 1 << 30;

fn message(outcome: &Outcome) -> String {
    let result = outcome.result();
    result["error"]["message"].as_str().unwrap().to_owned()
}

fn expect_untouched(moving: &MovingGuest, refused: &Outcome, words: &str) {
    assert!(
        message(refused).contains(words),
        "{words:?} is not in {refused:#?}"
    );
    assert_eq!(moving.block_nodes().len(), 2, "{:?}", moving.block_nodes());
    moving.wait_for_more_writes();
    moving.guest.expect_no_complaint();
}

#[test]
fn an_image_that_holds_a_guest_is_not_overwritten() {
    let lab = Lab::new();
    let dormouse = Dormouse::new(&lab);
    let sleeper = BootSectorGuest::new(&lab, QemuBuild::V10_0);
    let image = lab.path("image");
    let mut supervisor = dormouse.run("sleeper", &sleeper);
    sleeper.wait_for_ticks(5);
    dormouse.hibernate("sleeper", &image).expect_success();
    supervisor.wait_for_end();
    // Large enough for a disk.
    File::options()
        .write(true)
        .open(&image)
        .unwrap()
        .set_len(DISK_BYTES)
        .unwrap();
    let moving = MovingGuest::start(QemuBuild::V10_0);
    let refused = moving.moves_to(&image, ",format=raw", &[]).expect_exit(REFUSED);
    expect_untouched(&moving, &refused, "image of VM sleeper");
}

#[test]
fn what_the_guests_own_disk_lies_on_is_no_target_and_neither_is_what_lies_on_it() {
    let moving = MovingGuest::start(QemuBuild::V10_0);
    let over_the_disk = LoopDevice::over(moving.guest.disk());
    let refused = moving
        .moves_to(over_the_disk.path(), "", &[])
        .expect_exit(REFUSED);
    expect_untouched(&moving, &refused, "lies on or under what this very QEMU has open");
}

#[test]
fn two_disks_do_not_go_to_one_volume_under_two_names() {
    let second = |lab: &Lab| {
        let disk = lab.path("second.img");
        File::create(&disk).unwrap().set_len(1 << 20).unwrap();
        let drive = format!("if=none,id=second,format=raw,file={}", disk.display());
        ["-drive", &drive, "-device", "virtio-blk-pci,drive=second"]
            .map(str::to_owned)
            .to_vec()
    };
    let moving = MovingGuest::start_with(QemuBuild::V10_0, second);
    let file = moving.lab.path("volume");
    File::create(&file).unwrap().set_len(DISK_BYTES).unwrap();
    let device = LoopDevice::over(&file);
    let other = format!("second={}", device.path().display());
    let refused = moving
        .moves_to(&file, "", &["--volume", &other])
        .expect_exit(USAGE);
    assert!(message(&refused).contains("lies on or under"), "{refused:#?}");
}

#[test]
fn a_file_that_is_another_to_qemu_is_not_written() {
    let lab = Lab::new();
    let [ours, its] = ["ours", "its"].map(|name| lab.path(name));
    for folder in [&ours, &its] {
        fs::create_dir(folder).unwrap();
        File::create(folder.join("volume"))
            .unwrap()
            .set_len(DISK_BYTES)
            .unwrap();
    }
    env::set_current_dir(&its).unwrap();
    let moving = MovingGuest::start(QemuBuild::V10_0);
    env::set_current_dir(&ours).unwrap();
    let refused = moving
        .moves_to(Path::new("/proc/self/cwd/volume"), "", &[])
        .expect_exit(REFUSED);
    expect_untouched(&moving, &refused, "is not what was looked at");
    assert_eq!(fs::metadata(its.join("volume")).unwrap().blocks(), 0);
}

#[test]
fn an_encrypted_disk_is_not_copied_in_the_clear() {
    let moving = MovingGuest::start_with(QemuBuild::V10_0, |lab| {
        let disk = lab.path("secret.luks");
        let made = Command::new(QemuBuild::V10_0.image_tool())
            .args([
                "create",
                "-q",
                "-f",
                "luks",
                "--object",
                "secret,id=key,data=sesame",
            ])
            .args(["-o", "key-secret=key,iter-time=10"])
            .arg(&disk)
            .arg("1M")
            .status();
        assert!(made.unwrap().success());
        [
            "-object".to_owned(),
            "secret,id=key,data=sesame".to_owned(),
            "-blockdev".to_owned(),
            format!(
                "driver=luks,node-name=secret,key-secret=key,file.driver=file,file.filename={}",
                disk.display()
            ),
            "-device".to_owned(),
            "virtio-blk-pci,id=locked,drive=secret".to_owned(),
        ]
        .to_vec()
    });
    let target = moving.lab.path("clear");
    let volume = format!("locked={},create", target.display());
    let refused = moving
        .moves_to(&moving.lab.path("new"), ",create", &["--volume", &volume])
        .expect_exit(REFUSED);
    assert!(message(&refused).contains("encrypted"), "{refused:#?}");
    assert!(!target.exists());
}

#[test]
fn internal_snapshots_stay_on_the_old_volume_and_that_is_told() {
    let moving = MovingGuest::start_with(QemuBuild::V10_0, |lab| {
        let disk = lab.path("kept.qcow2");
        let tool = QemuBuild::V10_0.image_tool();
        let run = |arguments: &[&str]| {
            let ran = Command::new(&tool).args(arguments).arg(&disk).status();
            assert!(ran.unwrap().success());
        };
        let made = Command::new(&tool)
            .args(["create", "-q", "-f", "qcow2"])
            .arg(&disk)
            .arg("1M")
            .status();
        assert!(made.unwrap().success());
        run(&["snapshot", "-c", "before-the-upgrade"]);
        let drive = format!("if=none,id=kept,format=qcow2,file={}", disk.display());
        ["-drive", &drive, "-device", "virtio-blk-pci,drive=kept"]
            .map(str::to_owned)
            .to_vec()
    });
    let volume = format!(
        "kept={},create,format=qcow2",
        moving.lab.path("new.qcow2").display()
    );
    let moved = moving
        .moves_to(&moving.lab.path("new"), ",create", &["--volume", &volume])
        .expect_success()
        .result();
    let remarks = moved["remarks"].to_string();
    assert!(remarks.contains("before-the-upgrade"), "{moved}");
}
