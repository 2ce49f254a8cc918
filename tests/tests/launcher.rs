//! A launcher starts QEMU itself, and Dormouse wakes the guest in it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{fs, path::Path, process::Command};

use dormouse_tests::{Guest, Launcher, LoopDevice, QemuBuild, Scene};
use serde_json::json;

const REFUSED: i32 = 3;
const BUILDS: [QemuBuild; 3] = [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1];

#[track_caller]
fn expect_sealed(scene: &Scene, image: &Path) {
    let inspected = scene.dormouse.image("inspect", image, &["--json"]);
    assert_eq!(inspected.expect_success().result()["state"], "sealed");
}

#[test]
fn qemu_starts_with_exactly_the_printed_arguments_and_waits() {
    for build in BUILDS {
        let scene = Scene::new(build);
        let image = scene.hibernated();
        for mode in ["map", "eager", "stream"] {
            if mode == "map" && !build.maps_images() {
                continue;
            }
            let launcher = Launcher::start(&scene, &image, &["--mode", mode]);
            assert_eq!(launcher.status(), "inmigrate");
            launcher.end();
        }
        expect_sealed(&scene, &image);
    }
}

#[test]
fn the_arguments_are_for_a_program_too_and_a_mode_that_cannot_be_is_refused() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let path = image.to_string_lossy();
    let told = |options: &[&str]| {
        let mut all = vec!["wake", &*path, "--print-args", "--json"];
        all.extend(options);
        scene.dormouse.execute(&all)
    };
    let map = told(&[]).expect_success().result();
    assert_eq!(map["mode"], "map");
    let arguments: Vec<&str> = map["arguments"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|word| word.as_str())
        .collect();
    assert!(
        arguments.windows(2).any(|pair| pair == ["-incoming", "defer"]),
        "{arguments:?}"
    );
    assert!(arguments.contains(&"-S"), "{arguments:?}");
    let ram = format!("mem-path={path}");
    assert!(
        arguments
            .iter()
            .any(|word| word.contains(&ram) && word.contains("readonly=on")),
        "{arguments:?}"
    );

    let disk = scene.lab.path("elsewhere.img");
    let elsewhere = format!("ide0-hd0={}", disk.display());
    let stream = told(&["--mode", "stream", "--disk", &elsewhere])
        .expect_success()
        .result();
    let arguments = stream["arguments"].to_string();
    assert!(
        arguments.contains("elsewhere.img") && !arguments.contains(&ram),
        "{arguments}"
    );

    let lazy = told(&["--mode", "lazy"]).expect_exit(REFUSED).result();
    let message = lazy["error"]["message"].to_string();
    assert!(message.contains("nobody would stay to feed it"), "{message}");
    expect_sealed(&scene, &image);
}

/// The guest counts on from where it was, and its image wakes nobody else.
fn expect_awake(scene: &Scene, image: &Path, last: u32) {
    assert!(scene.guest.wait_for_more_ticks() > last);
    assert!(scene.dormouse.wakes().is_empty());
    let again = scene.dormouse.try_wake("other", image, &[]);
    assert_ne!(again.exit_code(), Some(0), "{again:#?}");
}

#[test]
fn the_guest_counts_on_in_the_launchers_qemu_and_its_image_is_used_up() {
    for build in BUILDS {
        for mode in ["eager", "stream", "map"] {
            if mode == "map" && !build.maps_images() {
                continue;
            }
            let scene = Scene::new(build);
            let image = scene.hibernated();
            let last = scene.guest.last_counter();
            let mut launcher = Launcher::start(&scene, &image, &["--mode", mode]);
            let woken = launcher.wake(&image, &[]).expect_success().result();
            assert_eq!(
                (&woken["woken"]["mode"], &woken["result"]),
                (&json!(mode), &json!("woken")),
                "{woken}"
            );
            expect_awake(&scene, &image, last);
            assert_eq!(image.exists(), mode == "map");

            // It is a QEMU like any other of others.
            let again = scene.lab.path("again.image");
            let saved = scene.dormouse.hibernate_by_monitor(launcher.socket(), &again);
            saved.expect_success();
            launcher.wait_for_end();
            let last = scene.guest.last_counter();
            let mut woken = scene.dormouse.wake("guest", &again, &[]);
            assert!(scene.guest.wait_for_more_ticks() > last);
            woken.terminate();
        }
    }
}

#[test]
fn an_image_that_is_the_guests_memory_is_held_by_qemu_itself() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let launcher = Launcher::start(&scene, &image, &["--mode", "map"]);
    let woken = launcher.wake(&image, &[]).expect_success().result();
    assert_eq!(woken["image"], "in-use");
    let discard = || scene.dormouse.image("discard", &image, &["--yes"]);
    discard().expect_exit(REFUSED);
    scene.guest.wait_for_more_ticks();
    launcher.end();
    discard().expect_success();
}

/// The wake is refused in these words; QEMU is left as it was, and the image too.
#[track_caller]
fn expect_refused(launcher: &mut Launcher<'_>, image: &Path, scene: &Scene, words: &[&str]) {
    let refused = launcher.wake(image, &[]).expect_exit(REFUSED).result();
    let message = refused["error"]["message"].as_str().unwrap().to_owned();
    for words in words {
        assert!(message.contains(words), "{words:?} is not in {message}");
    }
    assert!(launcher.is_alive());
    expect_sealed(scene, image);
    assert!(scene.dormouse.wakes().is_empty());
}

/// The printed arguments with each `from` replaced.
fn changed(arguments: &[String], from: &str, to: &str) -> Vec<String> {
    // A whole option, or a part of anything: a path may have an option in it by chance.
    let change = |word: &String| match from.starts_with('-') {
        true if word == from => to.to_owned(),
        true => word.clone(),
        false => word.replace(from, to),
    };
    let changed: Vec<String> = arguments.iter().map(change).collect();
    assert_ne!(changed, arguments, "there is no {from:?}");
    changed
}

/// The printed arguments with twice the RAM.
fn with_more_ram(arguments: &[String]) -> Vec<String> {
    let mut changed = arguments.to_vec();
    let at = changed.iter().position(|word| word == "-m").unwrap();
    changed[at + 1] = "128".to_owned();
    changed
}

#[test]
fn another_machine_is_refused_with_what_differs_and_left_alone() {
    for build in BUILDS {
        let mut scene = Scene::new(build);
        scene.guest.start_with(&["-device", "virtio-rng-pci,id=rng0"]);
        let image = scene.hibernated();
        let last = scene.guest.last_counter();
        let right = Launcher::arguments(&scene, &image, &["--mode", "stream"]);
        let other_disk = scene.lab.path("other.img");
        fs::copy(scene.guest.disk(), &other_disk).unwrap();
        let disk = scene.guest.disk().to_string_lossy().into_owned();
        let machine = format!("type=pc-i440fx-{build}");
        for (arguments, words) in [
            (with_more_ram(&right), &["RAM was 64.0 MiB, is 128.0 MiB"][..]),
            (
                changed(&right, "virtio-rng-pci,id=rng0", "virtio-rng-pci,id=rng1"),
                &[
                    "device rng0 (virtio-rng-pci",
                    "is not there",
                    "device rng1",
                    "was not there",
                ],
            ),
            (
                changed(&right, &machine, "type=q35"),
                &["the machine type was pc-i440fx", "is pc-q35"],
            ),
            (
                changed(&right, &disk, &other_disk.to_string_lossy()),
                &["other disks", "other.img"],
            ),
        ] {
            let mut launcher = Launcher::start_with(&scene, &arguments);
            expect_refused(&mut launcher, &image, &scene, words);
            assert_eq!(launcher.status(), "inmigrate");
            launcher.end();
        }
        let launcher = Launcher::start_with(&scene, &right);
        launcher.wake(&image, &[]).expect_success();
        expect_awake(&scene, &image, last);
    }
}

#[test]
fn a_file_that_took_a_disks_name_is_not_that_disk() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let mut launcher = Launcher::start(&scene, &image, &["--mode", "stream"]);
    // Both look the same from outside.
    let disk = scene.guest.disk();
    let copy = disk.with_extension("copy");
    let copied = Command::new("cp")
        .arg("--preserve=timestamps")
        .args([disk, &copy])
        .status();
    assert!(copied.unwrap().success());
    fs::rename(&copy, disk).unwrap();
    expect_refused(
        &mut launcher,
        &image,
        &scene,
        &["has other disks open", "ide0-hd0"],
    );
}

#[test]
fn a_qemu_that_does_not_wait_for_an_image_is_refused() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let arguments = Launcher::arguments(&scene, &image, &["--mode", "stream"]);
    let at = arguments.iter().position(|word| word == "-incoming").unwrap();
    let mut cold = arguments.clone();
    cold.drain(at..=at + 1);
    let mut launcher = Launcher::start_with(&scene, &cold);
    expect_refused(
        &mut launcher,
        &image,
        &scene,
        &["does not wait for an image", "-incoming defer"],
    );
    launcher.end();

    let mut launcher = Launcher::start_with(&scene, &arguments);
    let elsewhere = format!("unix:{}", scene.lab.path("migration.sock").display());
    launcher
        .monitor()
        .execute("migrate-incoming", json!({"uri": elsewhere}));
    expect_refused(&mut launcher, &image, &scene, &["told to load something already"]);
}

#[test]
fn a_qemu_that_was_started_a_moment_ago_is_waited_for() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let last = scene.guest.last_counter();
    let arguments = Launcher::arguments(&scene, &image, &[]);
    let launcher = Launcher::start_at_once(&scene, &arguments);
    launcher.wake(&image, &[]).expect_success();
    assert!(scene.guest.wait_for_more_ticks() > last);
}

#[test]
fn a_disk_that_lies_elsewhere_is_named_to_both_and_stays_there() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let last = scene.guest.last_counter();
    let elsewhere = scene.lab.path("elsewhere.img");
    fs::rename(scene.guest.disk(), &elsewhere).unwrap();
    let disk = format!("ide0-hd0={}", elsewhere.display());
    let options = ["--disk", &disk];
    let mut launcher = Launcher::start(&scene, &image, &options);
    launcher.wake(&image, &options).expect_success();
    assert!(scene.guest.wait_for_more_ticks() > last);
    let again = scene.lab.path("again.image");
    scene
        .dormouse
        .hibernate_by_monitor(launcher.socket(), &again)
        .expect_success();
    launcher.wait_for_end();
    // What was recorded is the machine, and nothing of this wake.
    let printed = ["wake", &again.to_string_lossy(), "--print-args"];
    let line = scene.dormouse.execute(&printed).expect_success().stdout;
    assert!(line.contains("elsewhere.img"), "{line}");
    assert_eq!(line.matches("-incoming").count(), 1, "{line}");
    assert!(!line.contains("launched.sock"), "{line}");
}

/// Its memory.
fn memory(scene: &Scene, name: &str) -> Vec<u8> {
    let mut monitor = scene.guest.monitor();
    if monitor.status() == "running" {
        monitor.stop();
    }
    monitor.memory(scene.guest.ram_bytes(), &scene.lab.path(name))
}

const FILE: &str = "memory-backend-file,id=pc.ram,size=67108864,mem-path=/dev/shm,";
const MEMFD: &str = "memory-backend-memfd,id=pc.ram,size=67108864,";

#[test]
fn every_byte_comes_back_into_memory_of_any_kind_from_images_of_any_form() {
    for (build, form, mode, from, to) in [
        // RAM in a memfd.
        (QemuBuild::V7_2, "none", "eager", FILE, MEMFD),
        (QemuBuild::V10_0, "zstd", "eager", FILE, MEMFD),
        // RAM in a file that holds something already.
        (
            QemuBuild::V11_1,
            "none",
            "eager",
            "mem-path=/dev/shm,",
            "mem-path=RAM,",
        ),
        // Without -S, which would run the guest once it is loaded.
        (QemuBuild::V7_2, "none", "stream", "-S", "-nodefaults"),
        (QemuBuild::V11_1, "key", "stream", "-S", "-nodefaults"),
        (QemuBuild::V11_1, "key", "eager", "-S", "-nodefaults"),
    ] {
        let scene = Scene::new(build);
        let key = scene.lab.path("key");
        fs::write(&key, [7; 32]).unwrap();
        let key = ["--key-file", key.to_str().unwrap()];
        let (saving, reading): (&[&str], &[&str]) = match form {
            "key" => (&key, &key),
            form => (&["--compress", form], &[]),
        };
        let image = scene.image();
        let mut supervisor = scene.run();
        let before = memory(&scene, "before");
        let saved = scene.dormouse.start_hibernating_with("guest", &image, saving);
        scene.dormouse.finish(saved).expect_success();
        supervisor.wait_for_end();
        scene.lab.wait_for_no_qemu();

        let ram = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        fs::write(ram.path(), vec![0xa5; 64 << 20]).unwrap();
        let to = to.replace("RAM", &ram.path().to_string_lossy());
        let arguments = Launcher::arguments(&scene, &image, &["--mode", mode]);
        let arguments = changed(&arguments, from, &to);
        let launcher = Launcher::start_with(&scene, &arguments);
        let woken = launcher.wake(&image, reading).expect_success().result();
        assert_eq!(woken["woken"]["mode"], mode, "{woken}");
        // It was saved paused.
        assert_eq!(launcher.status(), "paused");
        let after = memory(&scene, "after");
        let difference = before.iter().zip(&after).position(|(a, b)| a != b);
        assert_eq!(
            (before.len(), difference),
            (after.len(), None),
            "{build} {form} {mode}"
        );
        launcher.monitor().cont();
        scene.guest.wait_for_more_ticks();
    }
}

#[test]
fn a_block_device_is_the_guests_memory_and_takes_no_other_image_meanwhile() {
    for build in [QemuBuild::V10_0, QemuBuild::V11_1] {
        let scene = Scene::new(build);
        let device = LoopDevice::with_old_data(&scene.lab, 160);
        let mut supervisor = scene.run();
        let saved = scene
            .dormouse
            .start_hibernating_with("guest", device.path(), &["--replace"]);
        scene.dormouse.finish(saved).expect_success();
        supervisor.wait_for_end();
        scene.lab.wait_for_no_qemu();
        let last = scene.guest.last_counter();
        let mut launcher = Launcher::start(&scene, device.path(), &["--mode", "map"]);
        let woken = launcher.wake(device.path(), &[]).expect_success().result();
        assert_eq!(woken["image"], "in-use");
        assert!(scene.guest.wait_for_more_ticks() > last);
        let onto_itself = ["--replace"];
        let saving =
            scene
                .dormouse
                .start_hibernating_by_monitor(launcher.socket(), device.path(), &onto_itself);
        scene.dormouse.finish(saving).expect_exit(REFUSED);
        scene.guest.wait_for_more_ticks();
        let elsewhere = scene.lab.path("again.image");
        let saved = scene.dormouse.hibernate_by_monitor(launcher.socket(), &elsewhere);
        saved.expect_success();
        launcher.wait_for_end();
        let last = scene.guest.last_counter();
        let _woken = scene.dormouse.wake("guest", &elsewhere, &[]);
        assert!(scene.guest.wait_for_more_ticks() > last);
    }
}
