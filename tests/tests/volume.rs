//! Volumes move under a running guest, and not one of its writes is lost.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends here")]

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use dormouse_tests::faults::{self, SmallVolume};
use dormouse_tests::{Dormouse, Guest, Lab, LoopDevice, MovingGuest, QemuBuild, SectorWriter, until};
use rustix::process::Pid;
use serde_json::json;

const REFUSED: i32 = 3;
const CANCELLED: i32 = 6;
const NO_SPACE: i32 = 7;

/// The size of the guest's disk.
const DISK_BYTES: u64 = 1 << 30;

fn volume(disk: &str, to: &Path, options: &str) -> String {
    format!("{disk}={}{options}", to.display())
}

/// What is on an image of any format, as a raw file.
fn as_raw(build: QemuBuild, image: &Path, lab: &Lab) -> PathBuf {
    let raw = lab.path("as-raw");
    let converted = Command::new(build.image_tool())
        .args(["convert", "-O", "raw"])
        .args([image, &raw])
        .status();
    assert!(converted.unwrap().success());
    raw
}

fn allocated_bytes(file: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(file).unwrap().blocks() * 512
}

#[test]
fn no_write_is_lost_on_qemu_7_2() {
    no_write_is_lost(QemuBuild::V7_2);
}

#[test]
fn no_write_is_lost_on_qemu_10_0() {
    no_write_is_lost(QemuBuild::V10_0);
}

#[test]
fn no_write_is_lost_on_qemu_11_1() {
    no_write_is_lost(QemuBuild::V11_1);
}

/// From a raw file to another, to a qcow2 image, and to a raw file again, with the guest writing all the time.
fn no_write_is_lost(build: QemuBuild) {
    let writing = MovingGuest::start(build);
    let [second, third, fourth] =
        ["second.img", "third.qcow2", "fourth.img"].map(|name| writing.lab.path(name));
    let first = writing.guest.disk().to_owned();
    let moved = writing
        .moves(&[volume("ide0-hd0", &second, ",create")], &[])
        .expect_success()
        .result();
    assert_eq!(
        (&moved["result"], &moved["remarks"]),
        (&json!("volumes-moved"), &json!([])),
        "{moved}"
    );
    assert_eq!(moved["volumes"][0]["switched"], true);
    let left_at = SectorWriter::sectors_on(&first);
    SectorWriter::wait_for_more_sectors_on(&second, 200);
    assert_eq!(
        SectorWriter::sectors_on(&first),
        left_at,
        "the old volume is not written any more"
    );
    // What is copied before the target is known to be sparse is at most QEMU's buffer.
    assert!(
        allocated_bytes(&second) <= allocated_bytes(&first) + (20 << 20),
        "sparse stays sparse"
    );
    // By the name of the file that the disk has now.
    let from = second.display().to_string();
    writing
        .moves(&[volume(&from, &third, ",create,format=qcow2")], &[])
        .expect_success();
    writing
        .moves(&[volume("ide0-hd0", &fourth, ",create")], &[])
        .expect_success();
    SectorWriter::wait_for_more_sectors_on(&fourth, 200);
    assert_eq!(writing.block_nodes().len(), 2, "{:?}", writing.block_nodes());
    let qemu = writing.lab.only_qemu();
    for old in [&first, &second, &third] {
        assert!(!faults::has_open(qemu, old), "{} is open", old.display());
    }
    let (_guest, lab) = writing.end();
    let written = SectorWriter::sectors_on(&fourth);
    let in_image = SectorWriter::sectors_on(&as_raw(build, &third, &lab));
    let on_second = SectorWriter::sectors_on(&second);
    assert!(left_at < on_second && on_second < in_image && in_image < written);
}

#[test]
fn a_disk_moves_to_a_larger_block_device_and_back_to_its_smaller_file() {
    let writing = MovingGuest::start(QemuBuild::V10_0);
    let device = LoopDevice::with_old_data(&writing.lab, 1040);
    let first = writing.guest.disk().to_owned();
    writing
        .moves(&[volume("ide0-hd0", device.path(), "")], &[])
        .expect_success();
    let drives = writing.guest.monitor().execute("query-block", json!({}));
    assert_eq!(
        drives[0]["inserted"]["image"]["virtual-size"], DISK_BYTES,
        "{drives}"
    );
    SectorWriter::wait_for_more_sectors_on(device.path(), 200);
    writing
        .moves(&[volume("ide0-hd0", &first, "")], &[])
        .expect_success();
    SectorWriter::wait_for_more_sectors_on(&first, 200);
    let (guest, lab) = writing.end();
    guest.sectors_on_disk();
    drop(device);
    drop(lab);
}

/// Data disks of all kinds beside the one that the guest writes to, each with its own content.
fn more_disks(lab: &Lab) -> Vec<String> {
    let file = |name: &str, seed: u8| {
        let content: Vec<u8> = (0..1_u32 << 20).map(|at| (at / 4096) as u8 ^ seed).collect();
        fs::write(lab.path(name), content).unwrap();
        lab.path(name).display().to_string()
    };
    let (a, b, c, d) = (
        file("a.img", 1),
        file("b.img", 2),
        file("c.img", 3),
        file("d.img", 4),
    );
    [
        "-object".to_owned(),
        "iothread,id=io".to_owned(),
        "-blockdev".to_owned(),
        format!("driver=file,node-name=prot,filename={a}"),
        "-blockdev".to_owned(),
        "driver=raw,node-name=fmt,file=prot".to_owned(),
        "-device".to_owned(),
        "virtio-blk-pci,id=va,drive=fmt,iothread=io".to_owned(),
        "-device".to_owned(),
        "virtio-scsi-pci,id=scsi".to_owned(),
        "-drive".to_owned(),
        format!("if=none,id=db,file={b},format=raw,cache=none"),
        "-device".to_owned(),
        "scsi-hd,id=sb,drive=db".to_owned(),
        "-drive".to_owned(),
        format!("if=none,id=dc,file={c},format=raw,media=cdrom,readonly=on"),
        "-device".to_owned(),
        "scsi-cd,id=cd,drive=dc".to_owned(),
        "-drive".to_owned(),
        format!("if=none,id=dd,file={d},format=raw"),
        "-device".to_owned(),
        "scsi-hd,id=shared,drive=dd,share-rw=on".to_owned(),
    ]
    .to_vec()
}

fn plug_a_disk(writing: &MovingGuest) -> PathBuf {
    let file = writing.lab.path("plugged.img");
    fs::write(&file, vec![7; 1 << 20]).unwrap();
    let mut monitor = writing.guest.monitor();
    monitor.execute(
        "blockdev-add",
        json!({"driver": "file", "node-name": "hotfile", "filename": file}),
    );
    monitor.execute(
        "blockdev-add",
        json!({"driver": "raw", "node-name": "hot", "file": "hotfile"}),
    );
    monitor.execute(
        "device_add",
        json!({"driver": "scsi-hd", "id": "plugged", "drive": "hot", "bus": "scsi.0"}),
    );
    file
}

#[test]
fn disks_of_all_kinds_move_at_once_on_every_qemu() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let writing = MovingGuest::start_with(build, more_disks);
        let plugged = plug_a_disk(&writing);
        let old = [
            writing.guest.disk().to_owned(),
            writing.lab.path("a.img"),
            writing.lab.path("b.img"),
            plugged,
        ];
        let new: Vec<PathBuf> = (0..4)
            .map(|index| writing.lab.path(&format!("new-{index}")))
            .collect();
        let disks = ["ide0-hd0", "va", "db", "plugged"];
        let formats = [",create", ",create,format=qcow2", ",create", ",create,format=raw"];
        let volumes: Vec<String> = (0..4)
            .map(|at| volume(disks[at], &new[at], formats[at]))
            .collect();
        let moved = writing.moves(&volumes, &[]).expect_success().result();
        // The plugged disk is on no command line.
        let remarks = moved["remarks"].as_array().unwrap();
        assert!(
            remarks.len() == 1 && remarks[0].as_str().unwrap().contains("plugged"),
            "{moved}"
        );
        let qemu = writing.lab.only_qemu();
        for file in &old {
            assert!(
                !faults::has_open(qemu, file),
                "{build}: {} is open",
                file.display()
            );
        }
        let left = writing.block_nodes();
        assert!(
            !left
                .iter()
                .any(|node| ["fmt", "prot", "hot", "hotfile"].contains(&node.as_str())),
            "{left:?}"
        );
        SectorWriter::wait_for_more_sectors_on(&new[0], 100);
        let (_guest, lab) = writing.end();
        SectorWriter::sectors_on(&new[0]);
        assert_eq!(
            fs::read(as_raw(build, &new[1], &lab)).unwrap(),
            fs::read(&old[1]).unwrap()
        );
        for at in [2, 3] {
            assert_eq!(fs::read(&new[at]).unwrap(), fs::read(&old[at]).unwrap());
        }
    }
}

#[test]
fn what_cannot_be_moved_is_told_all_at_once_and_nothing_is_touched() {
    let writing = MovingGuest::start_with(QemuBuild::V10_0, more_disks);
    let before = writing.block_nodes();
    let small = writing.lab.path("small");
    File::create(&small).unwrap().set_len(DISK_BYTES - 4096).unwrap();
    let unmade = writing.lab.path("unmade");
    let volumes = [
        volume("ide0-hd0", &small, ""),
        volume("cd", &unmade, ",create"),
        volume("shared", &unmade, ",create"),
        volume("va", &writing.lab.path("b.img"), ""),
        volume("sb", &writing.lab.path("nowhere"), ""),
        volume("nosuch", &unmade, ",create"),
    ];
    let refused = writing.moves(&volumes, &[]).expect_exit(NO_SPACE).result();
    let message = refused["error"]["message"].as_str().unwrap();
    for words in [
        "lacks 4096 bytes",
        "removable medium",
        "share-rw",
        "in use by this very QEMU",
        "is not there; with `create`",
        "there is no disk nosuch",
    ] {
        assert!(message.contains(words), "{words:?} is not in {message}");
    }
    assert_eq!(writing.block_nodes(), before);
    assert!(!unmade.exists());
}

#[test]
fn a_volume_of_another_qemu_is_not_taken() {
    let other = MovingGuest::start(QemuBuild::V10_0);
    let writing = MovingGuest::start(QemuBuild::V10_0);
    let refused = writing
        .moves(&[volume("ide0-hd0", other.guest.disk(), "")], &[])
        .expect_exit(REFUSED);
    assert!(refused.stdout.contains("in use by another QEMU"), "{refused:#?}");
}

/// Starts a move that takes long, and waits until it copies.
fn start_slowly(writing: &MovingGuest, target: &Path) -> std::process::Child {
    let arguments = writing.arguments(&[volume("ide0-hd0", target, ",create")], &["--speed", "1M"]);
    let child = writing.dormouse.spawn(&arguments);
    until("the target to be filled", || {
        let qemu = writing.lab.only_qemu();
        (allocated_bytes_if_there(target) > 4096 && faults::has_open(qemu, target)).then_some(())
    });
    child
}

fn allocated_bytes_if_there(file: &Path) -> u64 {
    if file.exists() { allocated_bytes(file) } else { 0 }
}

#[test]
fn a_cancelled_move_leaves_the_disks_as_they_were_on_every_qemu() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let writing = MovingGuest::start(build);
        let before = writing.block_nodes();
        let target = writing.lab.path("new");
        let moving = start_slowly(&writing, &target);
        faults::interrupt(Pid::from_child(&moving));
        let cancelled = writing.dormouse.finish(moving).expect_exit(CANCELLED).result();
        assert_eq!(cancelled["error"]["guest"], "running", "{cancelled}");
        expect_as_before(&writing, &before, &target);
    }
}

fn expect_as_before(writing: &MovingGuest, before: &[String], target: &Path) {
    assert_eq!(writing.block_nodes(), before);
    assert_eq!(
        writing.guest.monitor().execute("query-jobs", json!({})),
        json!([])
    );
    assert!(!target.exists(), "what was made is removed");
    assert!(
        !writing.dormouse.state_dir().join(".moves").exists(),
        "no record is left"
    );
    SectorWriter::wait_for_more_sectors_on(writing.guest.disk(), 100);
}

#[test]
fn killed_while_it_copies_the_recovery_leaves_the_disks_as_they_were() {
    let writing = MovingGuest::start(QemuBuild::V10_0);
    let before = writing.block_nodes();
    let target = writing.lab.path("new");
    let moving = start_slowly(&writing, &target);
    faults::kill(Pid::from_child(&moving));
    writing.dormouse.finish(moving);
    let early = writing.moves(&[volume("ide0-hd0", &writing.lab.path("x"), ",create")], &[]);
    assert!(early.expect_exit(REFUSED).stdout.contains("dormouse recover"));
    let recovered = writing.dormouse.recover(&[]).expect_success().result();
    assert_eq!(recovered["outcome"], "volumes-as-before");
    expect_as_before(&writing, &before, &target);
}

/// Killed in the instant in which the record says so, whatever QEMU has done by then.
#[test]
fn killed_at_the_switch_all_volumes_are_the_new_ones_or_all_are_the_old_ones() {
    for point in ["intending", "committed"] {
        let writing = MovingGuest::start_with(QemuBuild::V10_0, more_disks);
        let before = writing.block_nodes();
        let new = [writing.lab.path("new-0"), writing.lab.path("new-1")];
        let volumes = [
            volume("ide0-hd0", &new[0], ",create"),
            volume("va", &new[1], ",create"),
        ];
        let moving = writing.dormouse.spawn(&writing.arguments(&volumes, &[]));
        faults::kill_when(Pid::from_child(&moving), point, || {
            writing
                .dormouse
                .moves()
                .iter()
                .any(|record| record["point"] == point)
        });
        writing.dormouse.finish(moving);
        let recovered = writing.dormouse.recover(&[]).expect_success().result();
        if recovered["outcome"] == "volumes-as-before" {
            assert_eq!(point, "intending");
            expect_as_before(&writing, &before, &new[0]);
        } else {
            assert_eq!(recovered["outcome"], "volumes-moved", "{recovered}");
            SectorWriter::wait_for_more_sectors_on(&new[0], 100);
            assert!(!faults::has_open(writing.lab.only_qemu(), writing.guest.disk()));
            assert_eq!(
                writing.guest.monitor().execute("query-jobs", json!({})),
                json!([])
            );
            let (_guest, _lab) = writing.end();
            SectorWriter::sectors_on(&new[0]);
            assert!(new[1].exists());
        }
    }
}

#[test]
fn a_target_that_gets_full_leaves_the_guest_on_its_old_volume_on_every_qemu() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        a_target_that_gets_full_leaves_the_guest_on_its_old_volume(build);
    }
}

fn a_target_that_gets_full_leaves_the_guest_on_its_old_volume(build: QemuBuild) {
    let writing = MovingGuest::start(build);
    let before = writing.block_nodes();
    let full = SmallVolume::new(&writing.lab, 16);
    let target = full.path("new");
    // It has room, but not where the guest's sectors go, so it is only noticed when those are written.
    let file = File::create(&target).unwrap();
    file.set_len(DISK_BYTES).unwrap();
    file.write_all_at(&vec![1; 4 << 20], 900 << 20).unwrap();
    file.sync_all().unwrap();
    let mut filling = File::create(full.path("filling")).unwrap();
    while filling
        .write_all(&[1; 4096])
        .and_then(|()| filling.sync_data())
        .is_ok()
    {}
    let failed = writing
        .moves(&[volume("ide0-hd0", &target, "")], &[])
        .expect_exit(NO_SPACE)
        .result();
    assert_eq!(failed["error"]["guest"], "running", "{failed}");
    assert_eq!(writing.block_nodes(), before);
    assert!(target.exists(), "what was there before is left there");
    SectorWriter::wait_for_more_sectors_on(writing.guest.disk(), 100);
}

#[test]
fn twenty_moves_on_qemu_7_2_lose_nothing_and_leave_nothing_behind() {
    twenty_moves(QemuBuild::V7_2);
}

#[test]
fn twenty_moves_on_qemu_10_0_lose_nothing_and_leave_nothing_behind() {
    twenty_moves(QemuBuild::V10_0);
}

#[test]
fn twenty_moves_on_qemu_11_1_lose_nothing_and_leave_nothing_behind() {
    twenty_moves(QemuBuild::V11_1);
}

fn twenty_moves(build: QemuBuild) {
    let writing = MovingGuest::start(build);
    let places = [writing.lab.path("one"), writing.lab.path("two")];
    for place in &places {
        File::create(place).unwrap().set_len(DISK_BYTES).unwrap();
    }
    let nodes = writing.block_nodes().len();
    for round in 0..20 {
        writing
            .moves(&[volume("ide0-hd0", &places[round % 2], "")], &[])
            .expect_success();
    }
    assert_eq!(writing.block_nodes().len(), nodes);
    let qemu = writing.lab.only_qemu();
    let descriptors = fs::read_dir(format!("/proc/{}/fd", qemu.as_raw_nonzero())).unwrap();
    let open: Vec<PathBuf> = descriptors
        .flatten()
        .filter_map(|descriptor| fs::read_link(descriptor.path()).ok())
        .filter(|file| [writing.guest.disk(), &places[0], &places[1]].contains(&file.as_path()))
        .collect();
    assert_eq!(open, [places[1].clone()]);
    let (_guest, _lab) = writing.end();
    SectorWriter::sectors_on(&places[1]);
}

#[test]
fn a_guest_that_was_moved_is_hibernated_and_wakes_on_its_new_volume() {
    for (build, is_larger) in [
        (QemuBuild::V7_2, false),
        (QemuBuild::V10_0, false),
        (QemuBuild::V11_1, true),
    ] {
        let lab = Lab::new();
        let dormouse = Dormouse::new(&lab);
        let guest = SectorWriter::new(&lab, build);
        let mut supervisor = dormouse.run("guest", &guest);
        guest.wait_for_sector(200);
        let new = lab.path("new.img");
        let options = if is_larger {
            File::create(&new)
                .unwrap()
                .set_len(DISK_BYTES + (1 << 20))
                .unwrap();
            ""
        } else {
            ",create"
        };
        let wish = volume("ide0-hd0", &new, options);
        dormouse
            .execute(&["volume", "move", "guest", "--json", "--volume", &wish])
            .expect_success();
        let old = fs::metadata(guest.disk()).unwrap().modified().unwrap();
        SectorWriter::wait_for_more_sectors_on(&new, 100);
        let image = lab.path("image");
        dormouse.hibernate("guest", &image).expect_success();
        supervisor.wait_for_end();
        lab.wait_for_no_qemu();
        let saved_at = SectorWriter::sectors_on(&new);
        let _woken = dormouse.wake("guest", &image, &[]);
        SectorWriter::wait_for_more_sectors_on(&new, 100);
        assert!(!faults::has_open(lab.only_qemu(), guest.disk()));
        guest.monitor().stop();
        assert!(SectorWriter::sectors_on(&new) > saved_at);
        assert_eq!(
            fs::metadata(guest.disk()).unwrap().modified().unwrap(),
            old,
            "the old volume is not written"
        );
        guest.expect_no_complaint();
    }
}

#[test]
fn volumes_wait_for_the_word_to_switch() {
    let lab = Lab::new();
    let dormouse = Dormouse::new(&lab);
    let guest = SectorWriter::new(&lab, QemuBuild::V10_0);
    let _supervisor = dormouse.run("guest", &guest);
    guest.wait_for_sector(200);
    let new = lab.path("new.qcow2");
    let wish = volume("ide0-hd0", &new, ",create,format=qcow2");
    let arguments = [
        "volume",
        "move",
        "guest",
        "--json",
        "--complete",
        "manual",
        "--volume",
        &wish,
    ];
    let moving = dormouse.spawn(&arguments);
    until("the volumes to be in step", || {
        let status = dormouse.status("guest").stdout;
        status.contains("Ready").then_some(())
    });
    assert!(faults::has_open(lab.only_qemu(), guest.disk()));
    dormouse
        .execute(&["volume", "complete", "guest"])
        .expect_success();
    let moved = dormouse.finish(moving).expect_success().result();
    assert_eq!(moved["volumes"][0]["switched"], true, "{moved}");
    assert!(!faults::has_open(lab.only_qemu(), guest.disk()));
    guest.expect_no_complaint();
}
