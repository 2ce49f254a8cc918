//! Every way out of every image: the same image, woken in each mode, brings every byte back, and its guest counts on.

use std::{
    fs::{self, OpenOptions},
    io,
    path::{Path, PathBuf},
};

use dormouse_tests::{BootSectorGuest, Guest, LoopDevice, QemuBuild, Scene, until};
use serde_json::Value;

/// Tests of one engine on one version each, so that they run beside each other and a failure names its place.
macro_rules! on_every_qemu {
    ($($name:ident: $build:ident, $engine:literal;)*) => {
        $(
            #[test]
            fn $name() {
                every_mode_brings_every_byte_back(QemuBuild::$build, $engine);
            }
        )*
    };
}

on_every_qemu! {
    what_was_saved_directly_on_qemu_7_2: V7_2, "direct";
    what_was_saved_directly_on_qemu_10_0: V10_0, "direct";
    what_was_saved_directly_on_qemu_11_1: V11_1, "direct";
    what_came_by_a_stream_from_qemu_7_2: V7_2, "stream";
    what_came_by_a_stream_from_qemu_10_0: V10_0, "stream";
    what_came_by_a_stream_from_qemu_11_1: V11_1, "stream";
}

/// The guest is paused before it is saved and stays so until its whole memory was compared. It is saved once to each
/// kind of volume, and everything is put back for each wake.
fn every_mode_brings_every_byte_back(build: QemuBuild, engine: &str) {
    for on_device in [false, true] {
        let scene = Scene::new(build);
        let Scene { dormouse, guest, lab } = &scene;
        let device = on_device.then(|| LoopDevice::with_old_data(lab, 144));
        let image = match &device {
            Some(device) => device.path().to_owned(),
            None => scene.image(),
        };
        let mut supervisor = scene.run();
        let mut monitor = guest.monitor();
        monitor.stop();
        let before = monitor.memory(guest.ram_bytes(), &lab.path("before"));
        drop(monitor);
        let options = ["--engine", engine, "--replace"];
        let hibernating = dormouse.start_hibernating_with("guest", &image, &options);
        let hibernated = dormouse.finish(hibernating).expect_success().result();
        assert_eq!(hibernated["engine"], engine);
        supervisor.wait_for_end();
        lab.wait_for_no_qemu();
        let saved = Saved::keep(&scene, image);

        for mode in ["lazy", "map", "eager", "stream"] {
            if mode == "map" && !build.maps_images() {
                continue;
            }
            let told = format!("{mode}, on a device: {on_device}");
            saved.put_back(&scene);
            let mut woken = dormouse.wake("guest", &saved.image, &["--mode", mode, "--paused"]);
            let mut monitor = guest.monitor();
            monitor.wait_for_status("paused");
            if mode == "lazy" {
                // QEMU 11.1 lets nobody look at what is not there yet.
                wait_for_all_memory(&scene);
            }
            let after = monitor.memory(guest.ram_bytes(), &lab.path("after"));
            let first_difference = before.iter().zip(&after).position(|(a, b)| a != b);
            assert_eq!(
                (before.len(), first_difference),
                (after.len(), None),
                "sizes and first difference of the memory before and after, {told}"
            );
            let ticks = guest.counters().len();
            monitor.cont();
            guest.wait_for_ticks(ticks + 5);
            assert!(
                guest.counters()[ticks] >= BootSectorGuest::counter_in(&before),
                "{told}"
            );
            woken.terminate();
            lab.wait_for_no_qemu();
        }
        drop(device);
    }
}

/// What a guest that sleeps consists of, in copies.
struct Saved {
    image: PathBuf,
    image_copy: PathBuf,
    disk_copy: PathBuf,
    disk_modified: std::time::SystemTime,
    log: Vec<u8>,
}

impl Saved {
    fn keep(scene: &Scene, image: PathBuf) -> Self {
        let Scene { guest, lab, .. } = scene;
        let saved = Self {
            image,
            image_copy: lab.path("image-copy"),
            disk_copy: lab.path("disk-copy"),
            disk_modified: fs::metadata(guest.disk())
                .and_then(|disk| disk.modified())
                .expect("the guest's disk has a time"),
            log: guest.log(),
        };
        copy(&saved.image, &saved.image_copy);
        copy(guest.disk(), &saved.disk_copy);
        saved
    }

    fn put_back(&self, scene: &Scene) {
        copy(&self.image_copy, &self.image);
        copy(&self.disk_copy, scene.guest.disk());
        // A disk with another time is one that was written.
        OpenOptions::new()
            .write(true)
            .open(scene.guest.disk())
            .and_then(|disk| disk.set_modified(self.disk_modified))
            .expect("the guest's disk can be given its time");
        scene.guest.goes_back_to(&self.log);
    }
}

/// Also from and to a block device.
fn copy(from: &Path, to: &Path) {
    let mut from = fs::File::open(from).expect("what is copied can be read");
    let mut to = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(to)
        .expect("a copy can be made");
    io::copy(&mut from, &mut to).expect("it can be copied");
}

fn wait_for_all_memory(scene: &Scene) {
    until("all memory to be fed", || {
        let status = scene.dormouse.status("guest");
        // Its supervisor may not be up yet.
        let feed: Value = (status.exit_code() == Some(0)).then(|| status.result()["feed"].clone())?;
        (feed["state"] == "complete").then_some(())
    });
}
