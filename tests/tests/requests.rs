//! Several who ask for the same guest: the same request is done once, what matters more gets through, and nobody waits
//! without an end.

use std::ffi::OsString;
use std::fs;
use std::path::Path;
use std::process::Child;

use dormouse_tests::{Dormouse, Guest, LoopDevice, Outcome, QemuBuild, Scene, Supervisor, play_agent, until};
use serde_json::Value;

const REFUSED: i32 = 3;
const UNREACHABLE: i32 = 4;
const TIMED_OUT: i32 = 5;
const CANCELLED: i32 = 6;

const ID: &str = "0e8cbf1c-64a4-4a5b-8a0c-3e1d5b0f7a10";

/// 17 MiB at this rate take longer than the test.
const SLOWLY: &[&str] = &["--rate-limit", "128K"];

/// Waits until the guest's memory is being written.
fn wait_for_middle(scene: &Scene) {
    until("memory to be written", || {
        (scene.guest.monitor().status() == "postmigrate").then_some(())
    });
}

/// A hibernation in its middle, which does not end by itself.
fn slow(scene: &Scene, image: &Path, options: &[&str]) -> (Supervisor, Child) {
    let supervisor = scene.run();
    let options = [SLOWLY, options].concat();
    let hibernating = scene.dormouse.start_hibernating_with("guest", image, &options);
    wait_for_middle(scene);
    (supervisor, hibernating)
}

fn hibernate(dormouse: &Dormouse, image: &Path, options: &[&str]) -> Outcome {
    dormouse.finish(dormouse.start_hibernating_with("guest", image, options))
}

fn message(outcome: &Outcome) -> String {
    outcome.result()["error"]["message"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

#[test]
fn the_same_request_is_done_once_while_it_runs_and_after_it_ended() {
    let scene = Scene::new(QemuBuild::V10_0);
    let mut supervisor = scene.run();
    let (image, other) = (scene.image(), scene.lab.path("other.image"));
    // Slow enough for the second to come while it runs.
    let options = ["--rate-limit", "16M", "--operation-id", ID];
    let first = scene.dormouse.start_hibernating_with("guest", &image, &options);
    wait_for_middle(&scene);
    let elsewhere = hibernate(&scene.dormouse, &other, &options).expect_exit(REFUSED);
    assert!(message(&elsewhere).contains("other parameters"), "{elsewhere:#?}");
    let second = hibernate(&scene.dormouse, &image, &options).expect_success();
    let first = scene.dormouse.finish(first).expect_success();
    assert_eq!(first.result(), second.result());
    assert_eq!(first.objects()[0]["operation"], ID, "{first:#?}");
    supervisor.wait_for_end();

    // QEMU and its supervisor are gone; what the operation came to is still known, and it is not done again.
    let third = hibernate(&scene.dormouse, &image, &options).expect_success();
    assert_eq!(first.result(), third.result());
    let elsewhere = hibernate(&scene.dormouse, &other, &options).expect_exit(REFUSED);
    assert!(message(&elsewhere).contains("other parameters"), "{elsewhere:#?}");
    // Nor is another one taken for it.
    let fresh = "5c2e9d0e-92f5-4d67-a6c4-7b1f5a3c8d21";
    hibernate(&scene.dormouse, &image, &["--operation-id", fresh]).expect_exit(UNREACHABLE);

    // The host was restarted: the state directory is gone, and the image tells.
    fs::remove_dir_all(scene.dormouse.state_dir()).expect("the state directory can be removed");
    let fourth = hibernate(&scene.dormouse, &image, &options).expect_success();
    for field in ["result", "image", "image_id", "engine"] {
        assert_eq!(first.result()[field], fourth.result()[field], "{field}");
    }
    // It was sealed before its pause was over.
    assert!(first.result()["pause_ms"].is_f64(), "{first:#?}");
    assert!(fourth.result()["pause_ms"].is_null(), "{fourth:#?}");

    // A copy of the request that comes after the guest was woken does not put it to sleep again.
    let _woken = scene.dormouse.wake("guest", &image, &[]);
    scene.guest.wait_for_more_ticks();
    let late = hibernate(&scene.dormouse, &image, &options).expect_exit(REFUSED);
    assert!(message(&late).contains("woken from its image since"), "{late:#?}");
    scene.guest.wait_for_more_ticks();
}

#[test]
fn a_snapshot_is_taken_once_and_found_again_in_its_image() {
    for live in [&[][..], &["--live"]] {
        let scene = Scene::new(QemuBuild::V10_0);
        let mut supervisor = scene.run();
        let image = scene.image();
        let options = [live, &["--operation-id", ID]].concat();
        let taken = || {
            scene
                .dormouse
                .snapshot("guest", &image, &options)
                .expect_success()
                .result()
        };
        let first = taken();
        assert_eq!(taken(), first);
        supervisor.kill();
        let monitor = scene.dormouse.own_monitor("guest");
        let by_monitor = [
            "snapshot",
            "--json",
            "--qmp",
            monitor.to_str().unwrap(),
            "--to",
            image.to_str().unwrap(),
        ];
        let by_monitor = [&by_monitor[..], &options].concat();
        let found = scene.dormouse.execute(&by_monitor).expect_success().result();
        for field in ["result", "image", "image_id", "engine", "data_bytes"] {
            assert_eq!(first[field], found[field], "{field}");
        }
        for field in ["pause_ms", "sealed_after_ms"] {
            assert!(
                first[field].is_f64() && found[field].is_null(),
                "{field}: {first} {found}"
            );
        }
        // The guest is not in it for good.
        let hibernating =
            scene
                .dormouse
                .start_hibernating_by_monitor(&monitor, &image, &["--operation-id", ID]);
        let refused = scene.dormouse.finish(hibernating).expect_exit(REFUSED);
        assert!(message(&refused).contains("other parameters"), "{refused:#?}");
        scene.guest.wait_for_more_ticks();
    }
}

#[test]
fn a_request_over_a_monitor_is_done_once() {
    let scene = Scene::new(QemuBuild::V10_0);
    scene.run().kill();
    let (monitor, image) = (scene.dormouse.own_monitor("guest"), scene.image());
    let by_monitor = || {
        let options = ["--operation-id", ID];
        let command = scene
            .dormouse
            .start_hibernating_by_monitor(&monitor, &image, &options);
        scene.dormouse.finish(command).expect_success().result()
    };
    let first = by_monitor();
    scene.lab.wait_for_no_qemu();
    let second = by_monitor();
    assert_eq!(first["image_id"], second["image_id"]);
    let status = scene.dormouse.status("guest").expect_success().result();
    assert_eq!(status["ended"], "hibernated", "{status}");
}

#[test]
fn what_matters_no_more_is_refused_and_told_by_whom() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.image();
    let (_supervisor, first) = slow(&scene, &image, &["--operation-id", ID]);
    let other = scene.lab.path("other.image");
    for priority in ["low", "normal"] {
        let second = hibernate(&scene.dormouse, &other, &["--priority", priority]).expect_exit(REFUSED);
        let message = message(&second);
        let named = message.contains(ID) && message.contains(image.to_str().unwrap());
        assert!(named && message.contains("priority normal"), "{message}");
    }
    assert!(!other.exists());
    dormouse_tests::faults::interrupt(rustix::process::Pid::from_child(&first));
    scene.dormouse.finish(first).expect_exit(CANCELLED);
    scene.guest.wait_for_more_ticks();
}

#[test]
fn what_matters_more_has_the_other_cancelled_and_then_begins_on_every_qemu() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let scene = Scene::new(build);
        let image = scene.image();
        let (mut supervisor, first) = slow(&scene, &image, &[]);
        let other = scene.lab.path("other.image");
        hibernate(&scene.dormouse, &other, &["--priority", "high"]).expect_success();
        let first = scene.dormouse.finish(first).expect_exit(CANCELLED);
        assert_eq!(first.result()["error"]["code"], "cancelled");
        supervisor.wait_for_end();
        assert!(
            !image.exists(),
            "{build}: a cancelled hibernation leaves no image"
        );
        let last = scene.guest.last_counter();
        let _woken = scene.dormouse.wake("guest", &other, &[]);
        assert!(scene.guest.wait_for_more_ticks() > last);
    }
}

#[test]
fn a_host_that_goes_down_gets_its_guests_whatever_is_under_way() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.image();
    let (_supervisor, first) = slow(&scene, &image, &[]);
    fs::create_dir(scene.lab.path("images")).expect("a folder can be made");
    let folder = scene.lab.path("images");
    let all = [
        "hibernate",
        "--all",
        "--json",
        "--to-dir",
        folder.to_str().unwrap(),
    ];
    scene.dormouse.execute(&all).expect_success();
    scene.dormouse.finish(first).expect_exit(CANCELLED);
    assert!(folder.join("guest.dormouse").exists());
}

#[test]
fn patience_has_an_end_and_a_ctrl_c_ends_it_sooner() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.image();
    let (_supervisor, first) = slow(&scene, &image, &["--operation-id", ID]);
    let other = scene.lab.path("other.image");
    let second = hibernate(&scene.dormouse, &other, &["--lock-timeout", "300ms"]).expect_exit(TIMED_OUT);
    let text = message(&second);
    assert!(text.contains("waited 300ms") && text.contains(ID), "{text}");

    let options = ["--lock-timeout", "10m"];
    let waiting = scene.dormouse.start_hibernating_with("guest", &other, &options);
    let pid = rustix::process::Pid::from_child(&waiting);
    // It watches for signals before it asks.
    until("the command to be up", || catches_interrupts(pid).then_some(()));
    dormouse_tests::faults::interrupt(pid);
    scene.dormouse.finish(waiting).expect_exit(CANCELLED);

    // One that is patient enough has its turn.
    let waiting = scene.dormouse.start_hibernating_with("guest", &other, &options);
    until("the command to be up", || {
        catches_interrupts(rustix::process::Pid::from_child(&waiting)).then_some(())
    });
    dormouse_tests::faults::interrupt(rustix::process::Pid::from_child(&first));
    scene.dormouse.finish(first).expect_exit(CANCELLED);
    scene.dormouse.finish(waiting).expect_success();
    assert!(!image.exists() && other.exists());
}

/// Whether a process has a handler for SIGINT.
fn catches_interrupts(pid: rustix::process::Pid) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).unwrap_or_default();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:"));
    let caught = caught.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    caught.unwrap_or_default() & (1 << 1) != 0
}

#[test]
fn who_comes_too_late_for_a_cancel_is_told_so() {
    let scene = Scene::new(QemuBuild::V10_0);
    let agent = scene.lab.path("qga.sock");
    let chardev = format!("socket,id=qga0,path={},server=on,wait=off", agent.display());
    let port = "virtserialport,chardev=qga0,name=org.qemu.guest_agent.0";
    let mut line = scene.guest.command_line();
    line.extend(["-device", "virtio-serial", "-chardev", &chardev, "-device", port].map(OsString::from));
    scene
        .dormouse
        .try_run("guest", &["--detach"], &line)
        .expect_success();
    scene.guest.wait_for_ticks(5);
    let (asked, was_asked) = std::sync::mpsc::channel();
    // The guest takes the command and never powers off.
    let never = Box::new(move || {
        asked.send(()).expect("the test waits");
        None
    });
    play_agent(&agent, &["guest-info", "guest-suspend-disk"], never);
    let suspend = [
        "hibernate",
        "guest",
        "--mode",
        "suspend-to-disk",
        "--json",
        "--timeout",
        "3s",
    ];
    let suspending = scene.dormouse.spawn(&suspend);
    was_asked.recv().expect("the agent is asked");
    let options = ["--priority", "high", "--lock-timeout", "10m"];
    let outcome = hibernate(&scene.dormouse, &scene.image(), &options).expect_exit(REFUSED);
    let text = message(&outcome);
    assert!(
        text.contains("not be cancelled any more") && text.contains("suspend to disk"),
        "{text}"
    );
    scene.dormouse.finish(suspending).expect_exit(TIMED_OUT);
    let ended: Value = hibernate(&scene.dormouse, &scene.image(), &[])
        .expect_success()
        .result();
    assert_eq!(ended["result"], "hibernated");
}

#[test]
fn a_target_and_a_monitor_that_somebody_holds_are_waited_for_as_long_as_was_said() {
    let scene = Scene::new(QemuBuild::V10_0);
    let _supervisor = scene.run();
    let device = LoopDevice::with_old_data(&scene.lab, 128);
    let held = fs::File::open(device.path()).unwrap();
    rustix::fs::flock(&held, rustix::fs::FlockOperation::LockExclusive).unwrap();
    let replacing = ["--replace", "--lock-timeout", "300ms"];
    let outcome = hibernate(&scene.dormouse, device.path(), &replacing).expect_exit(TIMED_OUT);
    let text = message(&outcome);
    assert!(text.contains("waited 300ms"), "{text}");
    scene.guest.wait_for_more_ticks();
    assert_eq!(scene.guest.monitor().status(), "running");

    let monitor = scene.dormouse.own_monitor("guest");
    let options = ["--lock-timeout", "300ms"];
    let command = scene
        .dormouse
        .start_hibernating_by_monitor(&monitor, &scene.image(), &options);
    let outcome = scene.dormouse.finish(command).expect_exit(TIMED_OUT);
    assert!(
        message(&outcome).contains("another client holds it"),
        "{outcome:#?}"
    );
    scene.guest.wait_for_more_ticks();
}
