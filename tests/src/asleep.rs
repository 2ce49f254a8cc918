//! A guest in an image, which can be woken again and again.

use std::{
    fs::{self, OpenOptions},
    io,
    path::{Path, PathBuf},
    time::SystemTime,
};

use serde_json::Value;

use crate::{BootSectorGuest, Guest, Outcome, Scene, Supervisor, wait::until};

/// All that a guest in an image consists of, in copies, so that it can be put back as it was.
pub struct Asleep<'a> {
    scene: &'a Scene,
    image: PathBuf,
    memory: Vec<u8>,
    disk_modified: SystemTime,
    log: Vec<u8>,
}

impl<'a> Asleep<'a> {
    /// Keeps copies of the guest of `scene`, which was saved paused to `image` with this `memory`.
    pub fn keep(scene: &'a Scene, image: PathBuf, memory: Vec<u8>) -> Self {
        let disk = fs::metadata(scene.guest.disk()).and_then(|disk| disk.modified());
        let asleep = Self {
            image,
            memory,
            disk_modified: disk.expect("the guest's disk has a time"),
            log: scene.guest.log(),
            scene,
        };
        copy(&asleep.image, &asleep.image_copy());
        copy(scene.guest.disk(), &asleep.disk_copy());
        asleep
    }

    /// Wakes the guest, compares all of its memory with what it was, and lets it count on. Returns its supervisor, and
    /// how it was woken.
    ///
    /// # Panics
    ///
    /// When a byte is another, or the guest does not go on where it was.
    pub fn wakes(&self, options: &[&str]) -> (Supervisor, Value) {
        self.put_back();
        let Scene { dormouse, guest, lab } = self.scene;
        let mut all = vec!["--paused"];
        all.extend(options);
        let supervisor = dormouse.wake("guest", &self.image, &all);
        let woken = until("the guest to have all of its memory", || {
            let status = dormouse.status("guest");
            // Its supervisor may not be up yet.
            let status = (status.exit_code() == Some(0)).then(|| status.result())?;
            // QEMU 11.1 lets nobody look at memory that is not there yet.
            let is_there = status["woken"]["mode"] != "lazy" || status["feed"]["state"] == "complete";
            (is_there && !status["woken"].is_null()).then(|| status["woken"].clone())
        });
        let mut monitor = guest.monitor();
        monitor.wait_for_status("paused");
        let after = monitor.memory(guest.ram_bytes(), &lab.path("after"));
        let first_difference = self.memory.iter().zip(&after).position(|(a, b)| a != b);
        assert_eq!(
            (self.memory.len(), first_difference),
            (after.len(), None),
            "sizes and first difference of the memory before and after, {woken}"
        );
        let ticks = guest.counters().len();
        monitor.cont();
        guest.wait_for_ticks(ticks + 5);
        assert!(
            guest.counters()[ticks] >= BootSectorGuest::counter_in(&self.memory),
            "{woken}"
        );
        (supervisor, woken)
    }

    /// Tries to wake the guest.
    pub fn tries_to_wake(&self, options: &[&str]) -> Outcome {
        self.put_back();
        self.scene.dormouse.try_wake("guest", &self.image, options)
    }

    fn put_back(&self) {
        let disk = self.scene.guest.disk();
        copy(&self.image_copy(), &self.image);
        copy(&self.disk_copy(), disk);
        // A disk with another time is one that was written.
        OpenOptions::new()
            .write(true)
            .open(disk)
            .and_then(|disk| disk.set_modified(self.disk_modified))
            .expect("the guest's disk can be given its time");
        self.scene.guest.goes_back_to(&self.log);
    }

    fn image_copy(&self) -> PathBuf {
        self.scene.lab.path("image-copy")
    }

    fn disk_copy(&self) -> PathBuf {
        self.scene.lab.path("disk-copy")
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
