//! What a backup knows of a disk goes with it to its new volume.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends here")]

use std::path::Path;
use std::process::Command;

use dormouse_tests::{MovingGuest, QemuBuild, SectorWriter};
use serde_json::{Value, json};

const REFUSED: i32 = 3;

/// What one bit stands for.
const GRANULARITY_BYTES: u64 = 64 << 10;

/// Adds a bitmap to the disk of a guest that stands still.
fn add_bitmap(moving: &MovingGuest, name: &str, more: Value) {
    let mut arguments = json!({"node": moving.root(), "name": name, "granularity": GRANULARITY_BYTES});
    let more = more.as_object().unwrap().clone();
    arguments.as_object_mut().unwrap().extend(more);
    moving.monitor().execute("block-dirty-bitmap-add", arguments);
}

/// The named bitmaps of the disk: their names, dirty bytes, and whether they record.
fn bitmaps(moving: &MovingGuest) -> Vec<(String, u64, bool)> {
    let drives = moving.monitor().execute("query-block", json!({}));
    let bitmaps = drives[0]["inserted"]["dirty-bitmaps"].as_array().cloned();
    let named = bitmaps.unwrap_or_default().into_iter().filter_map(|bitmap| {
        let name = bitmap["name"].as_str()?.to_owned();
        Some((
            name,
            bitmap["count"].as_u64().unwrap(),
            bitmap["recording"] == true,
        ))
    });
    let mut named: Vec<_> = named.collect();
    named.sort();
    named
}

/// The dirty bytes of a bitmap that saw the guest write all sectors after `first` up to `last`.
fn bytes_of(first: u32, last: u32) -> u64 {
    let bit = |sector: u32| u64::from(sector) * 512 / GRANULARITY_BYTES;
    (bit(last) - bit(first + 1) + 1) * GRANULARITY_BYTES
}

fn sectors_in(moving: &MovingGuest, image: &Path) -> u32 {
    SectorWriter::sectors_on(&moving.as_raw(image))
}

#[test]
fn bitmaps_go_with_the_disk_and_miss_no_write_on_every_qemu() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let moving = MovingGuest::start(build);
        let [second, third] = ["second.qcow2", "third.qcow2"].map(|name| moving.lab.path(name));
        moving.monitor().stop();
        add_bitmap(&moving, "since-first", json!({}));
        let first_at = moving.guest.sectors_on_disk();
        moving.monitor().cont();
        moving
            .moves_to(&second, ",create,format=qcow2", &[])
            .expect_success();
        moving.wait_for_more_writes();
        moving.monitor().stop();
        add_bitmap(&moving, "since-second", json!({"persistent": true}));
        add_bitmap(&moving, "resting", json!({"persistent": true, "disabled": true}));
        let second_at = sectors_in(&moving, &second);
        moving.monitor().cont();
        let moved = moving
            .moves_to(&third, ",create,format=qcow2", &[])
            .expect_success();
        assert_eq!(moved.result()["remarks"], json!([]), "{moved:#?}");
        moving.wait_for_more_writes();
        moving.monitor().stop();
        let last = sectors_in(&moving, &third);
        assert!(first_at < second_at && second_at < last);
        assert_eq!(
            bitmaps(&moving),
            [
                ("resting".to_owned(), 0, false),
                ("since-first".to_owned(), bytes_of(first_at, last), true),
                ("since-second".to_owned(), bytes_of(second_at, last), true),
            ],
            "{build}"
        );
        // Kept by the new volume when QEMU has ended.
        let (_guest, _lab) = moving.end();
        let info = Command::new(build.image_tool())
            .args(["info", "--output=json"])
            .arg(&third)
            .output();
        let info: Value = serde_json::from_slice(&info.unwrap().stdout).unwrap();
        let kept = info["format-specific"]["data"]["bitmaps"].as_array().unwrap();
        let mut kept: Vec<_> = kept.iter().map(|bitmap| bitmap["name"].as_str()).collect();
        kept.sort();
        assert_eq!(kept, [Some("resting"), Some("since-second")], "{build}");
    }
}

#[test]
fn bitmaps_that_would_be_lost_are_told_and_only_lost_by_agreement() {
    let moving = MovingGuest::start(QemuBuild::V10_0);
    let [second, third] = ["second.qcow2", "third.img"].map(|name| moving.lab.path(name));
    moving
        .moves_to(&second, ",create,format=qcow2", &[])
        .expect_success();
    add_bitmap(&moving, "kept", json!({"persistent": true}));
    add_bitmap(&moving, "plain", json!({}));
    let before = moving.block_nodes();
    let refused = moving.moves_to(&third, ",create", &[]).expect_exit(REFUSED);
    assert!(
        refused.stdout.contains("kept (a raw volume cannot keep it"),
        "{refused:#?}"
    );
    assert_eq!(moving.block_nodes(), before);
    assert!(!third.exists());
    let moved = moving
        .moves_to(&third, ",create", &["--drop-bitmaps"])
        .expect_success()
        .result();
    assert!(moved["remarks"][0].as_str().unwrap().contains("kept"), "{moved}");
    let left = bitmaps(&moving);
    let names: Vec<&str> = left.iter().map(|(name, ..)| name.as_str()).collect();
    assert_eq!(names, ["plain"]);
}

/// A bitmap that is added while the disk is copied, as a backup may do at any time, is not left behind; one that was
/// removed does not come back.
#[test]
fn bitmaps_that_come_and_go_while_the_disk_is_copied_are_as_they_are_at_the_switch() {
    let moving = MovingGuest::start_with(QemuBuild::V10_0, |lab| {
        let second = format!("unix:{},server=on,wait=off", lab.path("second.sock").display());
        vec!["-qmp".to_owned(), second]
    });
    let target = moving.lab.path("second.qcow2");
    add_bitmap(&moving, "goes", json!({}));
    let root = moving.root();
    let child = moving.start_moving_to(&target, ",create,format=qcow2", &["--speed", "256K"]);
    let mut other = dormouse_tests::Monitor::connect(&moving.lab.path("second.sock"));
    dormouse_tests::until("the disk to be copied", || {
        let jobs = other.execute("query-block-jobs", json!({}));
        (jobs[0]["len"].as_u64()? > 0).then_some(())
    });
    // The root is behind the filter of the job, under the name that it had.
    other.execute("block-dirty-bitmap-remove", json!({"node": root, "name": "goes"}));
    other.execute("block-dirty-bitmap-add", json!({"node": root, "name": "comes"}));
    let job = job(&mut other);
    other.execute("block-job-set-speed", json!({"device": job, "speed": 0}));
    drop(other);
    moving.dormouse.finish(child).expect_success();
    moving.wait_for_more_writes();
    let [(name, dirty, true)] = &bitmaps(&moving)[..] else {
        panic!("{:?}", bitmaps(&moving));
    };
    assert_eq!(name, "comes");
    assert!(*dirty > 0);
}

fn job(monitor: &mut dormouse_tests::Monitor) -> String {
    let jobs = monitor.execute("query-block-jobs", json!({}));
    jobs[0]["device"].as_str().unwrap().to_owned()
}
