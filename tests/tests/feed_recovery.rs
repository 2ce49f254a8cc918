//! A guest whose feeder was killed waits for its memory, and nothing but the image that it came from, or QEMU's own word,
//! ends that.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    fs,
    path::{Path, PathBuf},
};

use dormouse_tests::{Dormouse, QemuBuild, Scene, faults, until};
use serde_json::json;

const OPERATOR: i32 = 10;

/// A guest that runs, a part of whose memory is there, and whose feeder was killed.
struct Starving {
    scene: Scene,
    image: PathBuf,
    record: PathBuf,
}

impl Starving {
    fn new() -> Self {
        let scene = Scene::new(QemuBuild::V10_0);
        let image = scene.hibernated();
        let options = ["--mode", "lazy", "--keep-image", "--rate-limit", "1M"];
        let mut woken = scene.dormouse.wake("guest", &image, &options);
        scene.guest.wait_for_more_ticks();
        woken.kill();
        let record = scene.dormouse.state_dir().join("guest/feed.json");
        assert!(record.exists());
        Self { scene, image, record }
    }

    #[track_caller]
    fn expect_to_wait(&self, why: &str) {
        for arguments in [&[][..], &["guest"]] {
            let recovered = self.scene.dormouse.recover(arguments);
            let recovered = recovered.expect_exit(OPERATOR);
            let message = recovered.result()["error"]["message"].to_string();
            assert!(message.contains(why), "{message}");
            assert!(self.record.exists());
        }
    }

    #[track_caller]
    fn expect_to_be_fed(&self) {
        let recovered = self.scene.dormouse.recover(&[]).expect_success().result();
        assert_eq!(recovered["result"], "fed", "{recovered}");
        assert!(!self.record.exists());
        let inspected = self.scene.dormouse.image("inspect", &self.image, &["--json"]);
        assert_eq!(inspected.expect_success().result()["state"], "consumed");
        self.scene.guest.wait_for_more_ticks();
        let nothing = self.scene.dormouse.recover(&[]).expect_success().result();
        assert_eq!(nothing, json!({"operations": 0}));
    }
}

#[test]
fn an_image_that_is_not_at_its_place_is_waited_for() {
    let starving = Starving::new();
    let away = starving.scene.lab.path("away.image");
    fs::rename(&starving.image, &away).unwrap();
    starving.expect_to_wait("there is nothing");
    fs::write(&starving.image, "something else").unwrap();
    starving.expect_to_wait("is not at");
    another_image(&starving.image);
    starving.expect_to_wait("there is the image");
    fs::rename(&away, &starving.image).unwrap();
    starving.expect_to_be_fed();
}

/// One of another guest.
fn another_image(path: &Path) {
    let scene = Scene::new(QemuBuild::V10_0);
    let dormouse: &Dormouse = &scene.dormouse;
    let _supervisor = scene.run();
    let image = scene.image();
    dormouse.hibernate("guest", &image).expect_success();
    fs::copy(&image, path).unwrap();
}

#[test]
fn a_record_that_cannot_be_read_is_told_and_kept() {
    let starving = Starving::new();
    let text = fs::read_to_string(&starving.record).unwrap();
    fs::write(&starving.record, &text[..text.len() / 2]).unwrap();
    starving.expect_to_wait("feed.json cannot be read");
    fs::write(&starving.record, text).unwrap();
    starving.expect_to_be_fed();
}

#[test]
fn a_record_whose_qemu_has_ended_is_told_and_goes_with_the_next_start() {
    let starving = Starving::new();
    faults::kill(starving.scene.lab.only_qemu());
    starving.scene.lab.wait_for_no_qemu();
    starving.expect_to_wait("ended before the guest had all of its memory");
    let _supervisor = starving.scene.run();
    until("the VM to answer", || {
        (starving.scene.dormouse.status("guest").exit_code() == Some(0)).then_some(())
    });
    assert!(!starving.record.exists());
}

#[test]
fn a_feed_that_goes_on_is_nothing_to_recover() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let _woken = scene
        .dormouse
        .wake("guest", &image, &["--mode", "lazy", "--rate-limit", "1M"]);
    scene.guest.wait_for_more_ticks();
    scene.dormouse.recover(&[]).expect_success();
    let named = scene.dormouse.recover(&["guest"]);
    named.expect_exit(3);
    assert!(scene.dormouse.state_dir().join("guest/feed.json").exists());
}
