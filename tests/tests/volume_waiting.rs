//! Moves of volumes that take their time: held back, waiting for room, for a volume, or for one another.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends here")]

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use dormouse_tests::faults::{self, SmallVolume};
use dormouse_tests::{Dormouse, Guest, Lab, MovingGuest, QemuBuild, SectorWriter, Supervisor, until};
use rustix::process::Pid;
use serde_json::{Value, json};

const TIMED_OUT: i32 = 5;
const CANCELLED: i32 = 6;
const ALL: [QemuBuild; 3] = [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1];

const DISK_BYTES: u64 = 1 << 30;

/// A supervised guest that writes all the time.
struct Scene {
    // Dropped in this order: the lab sweeps up last.
    supervisor: Supervisor,
    guest: SectorWriter,
    dormouse: Dormouse,
    lab: Lab,
}

impl Scene {
    fn start(build: QemuBuild) -> Self {
        let lab = Lab::new();
        let dormouse = Dormouse::new(&lab);
        let guest = SectorWriter::new(&lab, build);
        let supervisor = dormouse.run("guest", &guest);
        guest.wait_for_sector(200);
        Self {
            supervisor,
            guest,
            dormouse,
            lab,
        }
    }

    fn start_moving(&self, to: &Path, options: &str, more: &[&str]) -> Child {
        let wish = format!("{}={}{options}", MovingGuest::DISK, to.display());
        let arguments = ["volume", "move", "guest", "--json", "--volume", &wish];
        self.dormouse.spawn(&[&arguments, more].concat())
    }

    /// The operation, as it is published.
    fn operation(&self) -> Value {
        let status = self.dormouse.execute(&["status", "guest", "--json"]);
        status.expect_success().result()["operation"].clone()
    }

    fn wait_for_operation(&self, what: &str, is_so: impl Fn(&Value) -> bool) {
        until(what, || is_so(&self.operation()).then_some(()));
    }

    fn change_speed(&self, speed: &str) {
        self.dormouse
            .execute(&["volume", "speed", "guest", speed])
            .expect_success();
    }

    fn block_nodes(&self) -> Vec<String> {
        let nodes = self
            .guest
            .monitor()
            .execute("query-named-block-nodes", json!({"flat": true}));
        let name = |node: &Value| node["node-name"].as_str().unwrap().to_owned();
        let mut names: Vec<String> = nodes.as_array().unwrap().iter().map(name).collect();
        names.sort();
        names
    }

    /// Pauses the guest, and finds all that it wrote on this raw disk.
    fn expect_all_writes_on(&self, disk: &Path) {
        SectorWriter::wait_for_more_sectors_on(disk, 200);
        self.guest.monitor().stop();
        SectorWriter::sectors_on(disk);
        self.guest.expect_no_complaint();
    }
}

#[test]
fn the_speed_of_a_move_is_changed_on_the_way_on_every_qemu() {
    for build in ALL {
        let scene = Scene::start(build);
        let target = scene.lab.path("new");
        let moving = scene.start_moving(&target, ",create", &["--speed", "64K"]);
        let has_speed = |operation: &Value, speed: u64| operation["volumes"][0]["speed_limit_bytes"] == speed;
        scene.wait_for_operation("the speed that was asked for", |now| has_speed(now, 64 << 10));
        scene.change_speed("128K");
        scene.wait_for_operation("the other speed", |now| has_speed(now, 128 << 10));
        scene.change_speed("unlimited");
        let moved = scene.dormouse.finish(moving).expect_success().result();
        assert_eq!(moved["volumes"][0]["switched"], true, "{moved}");
        scene.expect_all_writes_on(&target);
    }
}

/// A volume that is full where the guest's sectors go, and the folder with what fills it.
fn full_volume(lab: &Lab) -> (SmallVolume, PathBuf, PathBuf) {
    let volume = SmallVolume::new(lab, 512);
    let (target, filling) = (volume.path("new"), volume.path("filling"));
    let file = File::create(&target).unwrap();
    file.set_len(DISK_BYTES).unwrap();
    file.write_all_at(&[1; 4096], 900 << 20).unwrap();
    file.sync_all().unwrap();
    fs::create_dir(&filling).unwrap();
    let takes = |name: String, bytes: u64| {
        let mut allocate = Command::new("fallocate");
        allocate
            .args(["--length", &bytes.to_string()])
            .arg(filling.join(name));
        allocate.stderr(Stdio::null()).status().unwrap().success()
    };
    for shift in (12..29).rev() {
        (0..).find(|number| !takes(format!("{shift}-{number}"), 1 << shift));
    }
    (volume, target, filling)
}

fn waits_for_room(operation: &Value) -> bool {
    let waiting = operation["waiting"].as_str();
    waiting.is_some_and(|waiting| waiting.contains("is full"))
}

#[test]
fn a_move_to_a_full_volume_waits_for_room_where_that_was_said_on_every_qemu() {
    for build in ALL {
        let scene = Scene::start(build);
        let (volume, target, filling) = full_volume(&scene.lab);
        // Longer than it may stall: waiting for room is no stall.
        let moving = scene.start_moving(&target, "", &["--on-enospc", "wait", "--stall-timeout", "3s"]);
        scene.wait_for_operation("the volume to be full", waits_for_room);
        let at = SectorWriter::sectors_on;
        SectorWriter::wait_for_more_sectors_on(scene.guest.disk(), 200);
        fs::remove_dir_all(&filling).unwrap();
        let moved = scene.dormouse.finish(moving).expect_success().result();
        assert_eq!(moved["volumes"][0]["switched"], true, "{moved}");
        scene.expect_all_writes_on(&target);
        assert!(at(&target) > at(scene.guest.disk()));
        drop(scene);
        drop(volume);
    }
}

#[test]
fn a_move_that_waits_for_room_is_cancelled_and_leaves_the_disks_as_they_were_on_every_qemu() {
    for build in ALL {
        let scene = Scene::start(build);
        let before = scene.block_nodes();
        let (volume, target, _) = full_volume(&scene.lab);
        let moving = scene.start_moving(&target, "", &["--on-enospc", "wait"]);
        scene.wait_for_operation("the volume to be full", waits_for_room);
        faults::interrupt(Pid::from_child(&moving));
        scene.dormouse.finish(moving).expect_exit(CANCELLED);
        assert_eq!(scene.block_nodes(), before, "{build}");
        let jobs = scene.guest.monitor().execute("query-jobs", json!({}));
        assert_eq!(jobs, json!([]));
        scene.expect_all_writes_on(scene.guest.disk());
        drop(scene);
        drop(volume);
    }
}

#[test]
fn a_volume_that_is_not_there_is_waited_for_as_long_as_was_said() {
    let scene = Scene::start(QemuBuild::V10_0);
    let before = scene.block_nodes();
    let target = scene.lab.path("new");
    let late = scene.start_moving(&target, "", &["--wait-for-target", "1"]);
    let late = scene.dormouse.finish(late).expect_exit(TIMED_OUT);
    assert!(late.stdout.contains("is not there after 1s"), "{late:#?}");
    assert_eq!(scene.block_nodes(), before);
    assert_eq!(scene.operation()["waiting"], json!(null));

    let moving = scene.start_moving(&target, "", &["--wait-for-target", "600"]);
    scene.wait_for_operation("the volume to be waited for", |now| {
        let waiting = now["waiting"].as_str();
        waiting.is_some_and(|waiting| waiting.contains(target.to_str().unwrap()))
    });
    let made = scene.lab.path("made");
    File::create(&made).unwrap().set_len(DISK_BYTES).unwrap();
    fs::rename(&made, &target).unwrap();
    scene.dormouse.finish(moving).expect_success();
    scene.expect_all_writes_on(&target);
}

#[test]
fn a_move_is_joined_waited_for_and_gives_way_as_a_hibernation_does() {
    const ID: &str = "5a0d3c0e-7b1f-4d1e-8a55-0f6c1f3c2b11";
    let mut scene = Scene::start(QemuBuild::V10_0);
    let [second, third, fourth] = ["second", "third", "fourth"].map(|name| scene.lab.path(name));
    let slowly = ["--speed", "64K", "--operation-id", ID];
    let first = scene.start_moving(&second, ",create", &slowly);
    scene.wait_for_operation("the first to copy", |now| now["phase"] == "Mirroring");
    let same = scene.start_moving(&second, ",create", &slowly);
    let waiting = scene.start_moving(&third, ",create", &["--lock-timeout", "5m"]);
    scene.change_speed("unlimited");
    let first = scene.dormouse.finish(first).expect_success().result();
    let same = scene.dormouse.finish(same).expect_success().result();
    assert_eq!(first, same);
    scene.dormouse.finish(waiting).expect_success();

    let low = ["--speed", "64K", "--priority", "low"];
    let low = scene.start_moving(&fourth, ",create", &low);
    scene.wait_for_operation("the last to copy", |now| {
        now["phase"] == "Mirroring" && now["volumes"][0]["to"] == fourth.to_str().unwrap()
    });
    let image = scene.lab.path("image");
    scene.dormouse.hibernate("guest", &image).expect_success();
    scene.dormouse.finish(low).expect_exit(CANCELLED);
    scene.supervisor.wait_for_end();
    assert!(!fourth.exists(), "what was made for it is removed");
    SectorWriter::sectors_on(&third);
}
