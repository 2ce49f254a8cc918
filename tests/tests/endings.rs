//! How a VM ended is known after its end: in an image, off, or crashed.

use std::fs;
use std::path::Path;

use dormouse_tests::{Guest, QemuBuild, Scene, faults};
use serde_json::{Value, json};

fn read(file: &Path) -> Value {
    serde_json::from_slice(&fs::read(file).expect("the file is there")).expect("one JSON object")
}

#[test]
fn status_tells_hibernated_from_stopped_and_crashed_on_every_qemu() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let scene = Scene::new(build);
        let status = || scene.dormouse.status("guest").expect_success().result();

        let mut supervisor = scene.run();
        faults::kill(scene.lab.only_qemu());
        supervisor.wait_for_end();
        assert_eq!(
            (&status()["ended"], &status()["signal"]),
            (&json!("crashed"), &json!(9)),
            "{build}"
        );

        let mut supervisor = scene.dormouse.run("guest", &scene.guest);
        assert_eq!(status()["run_state"], "running", "{build}: it runs again");
        scene.guest.monitor().execute("quit", json!({}));
        supervisor.wait_for_end();
        assert_eq!(status()["ended"], "stopped", "{build}");
        assert_eq!(status()["reason"], "host-qmp-quit", "{build}");
    }
}

#[test]
fn a_guest_that_powered_off_is_told_from_a_qemu_that_was_told_to_end_on_every_qemu() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let scene = Scene::new(build);
        let mut supervisor = scene.run();
        // The register of the board that a guest powers off by.
        let power_off = json!({"command-line": "o /h 0x604 0x2000"});
        scene.guest.monitor().execute("human-monitor-command", power_off);
        supervisor.wait_for_end();
        let ended = scene.dormouse.status("guest").expect_success().result();
        assert_eq!(
            (&ended["ended"], &ended["reason"]),
            (&json!("stopped"), &json!("guest-shutdown")),
            "{build}"
        );
    }
}

#[test]
fn a_vm_in_an_image_is_told_with_the_image_until_it_is_woken() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let status = || scene.dormouse.status("guest").expect_success();
    let ended = status().result();
    assert_eq!(
        (&ended["ended"], &ended["image"], &ended["image_now"]),
        (&json!("hibernated"), &json!(image), &json!("sealed"))
    );
    // In the list as well, and in words.
    let listed = scene.dormouse.execute(&["status"]).expect_success();
    let words = format!("guest: hibernated into {} at ", image.display());
    assert!(listed.stdout.contains(&words), "{listed:#?}");

    // A start that fails takes nothing of it away.
    let line = ["/nowhere/qemu".into()];
    scene.dormouse.try_run("guest", &[], &line);
    assert_eq!(status().result()["ended"], "hibernated");

    let mut woken = scene.dormouse.wake("guest", &image, &[]);
    scene.guest.wait_for_more_ticks();
    assert_eq!(status().result()["run_state"], "running");
    woken.terminate();
    assert_eq!(status().result()["ended"], "stopped");
}

#[test]
fn an_image_that_is_gone_is_told() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    fs::remove_file(&image).expect("the image can be removed");
    let ended = scene.dormouse.status("guest").expect_success().result();
    assert_eq!(ended["image_now"], "not there");
}

#[test]
fn who_started_a_vm_reads_how_it_ended() {
    let scene = Scene::new(QemuBuild::V10_0);
    let (message, image) = (scene.lab.path("termination"), scene.image());
    let name = message.to_str().expect("paths of the lab are text");
    let options = ["--detach", "--termination-message", name];
    scene
        .dormouse
        .try_run("guest", &options, &scene.guest.command_line())
        .expect_success();
    scene.guest.wait_for_ticks(5);
    scene.dormouse.hibernate("guest", &image).expect_success();
    let ended = dormouse_tests::until("the message", || message.exists().then(|| read(&message)));
    assert_eq!(
        (&ended["ended"], &ended["image"]),
        (&json!("hibernated"), &json!(image))
    );
}

#[test]
fn a_hibernation_that_was_recovered_is_known_like_any_other() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.image();
    let mut supervisor = scene.run();
    let hibernating = scene.dormouse.start_hibernating("guest", &image);
    faults::kill_when(supervisor.pid(), "the image to be sealed", || image.exists());
    supervisor.wait_for_end();
    scene.dormouse.finish(hibernating);
    scene.dormouse.recover(&[]).expect_success();
    let ended = scene.dormouse.status("guest").expect_success().result();
    assert_eq!(
        (&ended["ended"], &ended["image"]),
        (&json!("hibernated"), &json!(image))
    );
}
