//! A wake compares before it loads anything. What differs is named, no guest runs, and the image wakes once it is put
//! right.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends there")]

use std::{ffi::OsString, fs, io::Write, path::Path};

use dormouse_tests::{Guest, QemuBuild, Scene, StandIn, faults, until};
use rustix::process::Pid;

const USAGE: i32 = 2;
const REFUSED: i32 = 3;

/// The wake is refused in these words, its QEMU is gone, and nothing has happened to guest and image.
#[track_caller]
fn expect_refused(scene: &Scene, image: &Path, options: &[&str], words: &[&str]) {
    let ticks = scene.guest.counters().len();
    let outcome = scene.dormouse.try_wake("guest", image, options);
    let outcome = outcome.expect_exit(REFUSED);
    for words in words {
        assert!(
            outcome.stderr.contains(words),
            "{words:?} is not in\n{}",
            outcome.stderr
        );
    }
    scene.lab.wait_for_no_qemu();
    assert_eq!(scene.guest.counters().len(), ticks, "the guest must not have run");
    expect_sealed(scene, image);
}

#[track_caller]
fn expect_sealed(scene: &Scene, image: &Path) {
    let inspected = scene
        .dormouse
        .image("inspect", image, &["--json"])
        .expect_success();
    assert_eq!(inspected.result()["state"], "sealed");
}

fn expect_to_wake(scene: &Scene, image: &Path) {
    let _woken = scene.dormouse.wake("guest", image, &[]);
    scene.guest.wait_for_more_ticks();
}

fn every_build() -> [QemuBuild; 3] {
    [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1]
}

#[test]
fn other_sizes_of_memory_are_told() {
    for build in every_build() {
        let scene = Scene::new(build);
        let image = scene.hibernated();
        expect_refused(
            &scene,
            &image,
            &["--", "-m", "128"],
            &["RAM was 64.0 MiB, is 128.0 MiB"],
        );
        expect_to_wake(&scene, &image);
    }
}

#[test]
fn another_machine_type_is_told() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let words = "the machine type was pc-i440fx-10.0, is q35";
    expect_refused(&scene, &image, &["--", "-M", "q35"], &[words]);
    expect_to_wake(&scene, &image);
}

#[test]
fn other_cpus_are_told() {
    for build in every_build() {
        let scene = Scene::new(build);
        let image = scene.hibernated();
        for (changes, words) in [
            (
                ["-cpu", "qemu64,-pni,-cx16"],
                "CPU features are missing: pni, cx16",
            ),
            (
                ["-cpu", "max"],
                "the CPU model was qemu64-x86_64-cpu, is max-x86_64-cpu",
            ),
            (["-smp", "2"], "CPUs were 1, are 2"),
        ] {
            expect_refused(&scene, &image, &["--", changes[0], changes[1]], &[words]);
        }
        expect_to_wake(&scene, &image);
    }
}

#[test]
fn other_devices_and_places_are_told() {
    for build in every_build() {
        let mut scene = Scene::new(build);
        let qemu = StandIn::new(&scene.lab, build);
        scene.guest.start_by(qemu.path());
        scene.guest.start_with(&[
            "-device",
            "virtio-net-pci,id=net0,addr=3",
            "-device",
            "e1000,addr=4",
        ]);
        let image = scene.hibernated();

        let was_virtio = "device net0 was virtio-net-pci at 03.0 on pci.0, is";
        for (edit, words) in [
            (
                "s/virtio-net-pci/e1000/",
                vec![format!("{was_virtio} e1000 at 03.0 on pci.0")],
            ),
            (
                "s/addr=3/addr=5/",
                vec![format!("{was_virtio} virtio-net-pci at 05.0 on pci.0")],
            ),
            (
                "s/id=net0/id=net1/",
                vec![
                    "device net0 (virtio-net-pci at 03.0 on pci.0) is not there".to_owned(),
                    "device net1 (virtio-net-pci at 03.0 on pci.0) was not there".to_owned(),
                ],
            ),
            (
                "s/^e1000/rtl8139/",
                vec![
                    "device number 0 of those without an id was e1000 at 04.0 on pci.0, is rtl8139"
                        .to_owned(),
                ],
            ),
        ] {
            qemu.starts(build, edit);
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            expect_refused(&scene, &image, &[], &words);
        }
        qemu.starts(build, "");
        expect_to_wake(&scene, &image);
    }
}

#[test]
fn an_older_qemu_is_refused() {
    let mut scene = Scene::new(QemuBuild::V10_0);
    let qemu = StandIn::new(&scene.lab, QemuBuild::V10_0);
    scene.guest.start_by(qemu.path());
    // A machine type that the older one has.
    scene.guest.start_with(&["-machine", "pc-i440fx-7.2"]);
    let image = scene.hibernated();
    qemu.starts(QemuBuild::V7_2, "");
    expect_refused(
        &scene,
        &image,
        &[],
        &["was saved on QEMU 10.0", "this is QEMU 7.2", "which is older"],
    );
    qemu.starts(QemuBuild::V11_1, "");
    expect_to_wake(&scene, &image);
}

#[test]
fn a_qemu_that_does_not_know_the_machine_type_is_refused() {
    let mut scene = Scene::new(QemuBuild::V7_2);
    let qemu = StandIn::new(&scene.lab, QemuBuild::V7_2);
    scene.guest.start_by(qemu.path());
    // Too old for QEMU 11.1.
    scene.guest.start_with(&["-machine", "pc-i440fx-5.1"]);
    let image = scene.hibernated();
    qemu.starts(QemuBuild::V11_1, "");
    let words = "does not know the machine type pc-i440fx-5.1 that the guest was saved on";
    expect_refused(&scene, &image, &[], &[words]);
    qemu.starts(QemuBuild::V7_2, "");
    expect_to_wake(&scene, &image);
}

#[test]
fn the_machine_type_behind_an_alias_is_pinned() {
    let mut scene = Scene::new(QemuBuild::V10_0);
    let qemu = StandIn::new(&scene.lab, QemuBuild::V10_0);
    scene.guest.start_by(qemu.path());
    scene.guest.start_with(&["-machine", "pc"]);
    let image = scene.hibernated();
    // Where `pc` means something else.
    qemu.starts(QemuBuild::V11_1, "");
    let mut woken = scene.dormouse.wake("guest", &image, &[]);
    scene.guest.wait_for_more_ticks();
    let again = scene.lab.path("again.image");
    scene.dormouse.hibernate("guest", &again).expect_success();
    woken.wait_for_end();
    let inspected = scene
        .dormouse
        .image("inspect", &again, &["--json"])
        .expect_success();
    assert_eq!(inspected.result()["manifest"]["machine"], "pc-i440fx-10.0");
}

#[test]
fn a_qemu_that_does_not_start_is_quoted() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let words = "'no-such-device' is not a valid device model name";
    let changes = ["--json", "--", "-device", "no-such-device"];
    let outcome = scene.dormouse.try_wake("guest", &image, &changes);
    let outcome = outcome.expect_exit(REFUSED);
    let message = outcome.result()["error"]["message"].to_string();
    assert!(
        message.contains(words) && message.contains("ended at its start"),
        "{message}"
    );
    scene.lab.wait_for_no_qemu();
    expect_sealed(&scene, &image);
    expect_to_wake(&scene, &image);
}

/// Starts the guest cold, with more options, and lets it run until its image is gone and its API there.
fn start_cold(scene: &Scene, name: &str, options: &[&str]) -> std::process::Child {
    let mut arguments: Vec<OsString> = ["run", "--name", name].map(OsString::from).to_vec();
    arguments.extend(options.iter().map(OsString::from));
    arguments.push("--".into());
    arguments.extend(scene.guest.command_line());
    let api = scene.dormouse.state_dir().join(name).join("api.sock");
    let starting = scene.dormouse.spawn(&arguments);
    until("the guest to be started cold", || api.exists().then_some(()));
    starting
}

fn end(scene: &Scene, mut supervisor: std::process::Child) {
    faults::end(Pid::from_child(&supervisor));
    supervisor.wait().expect("our own child can be waited for");
    scene.lab.wait_for_no_qemu();
}

#[test]
fn a_guest_that_is_in_an_image_is_not_started_cold() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let refused = scene.dormouse.try_run("guest", &[], &scene.guest.command_line());
    let refused = refused.expect_exit(REFUSED);
    let words = format!("guest was hibernated into {}: wake it", image.display());
    assert!(refused.stderr.contains(&words), "{}", refused.stderr);
    assert!(refused.stderr.contains("--discard-image"), "{}", refused.stderr);
    expect_sealed(&scene, &image);

    // On a volume that is not there it may be still.
    let (folder, away) = (scene.lab.path("volume"), scene.lab.path("away"));
    fs::create_dir(&folder).unwrap();
    let moved = folder.join("guest.image");
    let woken = scene.dormouse.wake("guest", &image, &["--mode", "eager"]);
    scene.guest.wait_for_more_ticks();
    scene.dormouse.hibernate("guest", &moved).expect_success();
    drop(woken);
    scene.lab.wait_for_no_qemu();
    fs::rename(&folder, &away).unwrap();
    let refused = scene.dormouse.try_run("guest", &[], &scene.guest.command_line());
    let refused = refused.expect_exit(REFUSED);
    assert!(
        refused.stderr.contains("that folder is not there"),
        "{}",
        refused.stderr
    );
    fs::rename(&away, &folder).unwrap();
    expect_to_wake(&scene, &moved);
}

#[test]
fn a_guest_is_started_cold_when_its_image_is_given_up() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    // What cannot be started does not cost the image.
    let nonsense = ["/nowhere/qemu".into()];
    let refused = scene.dormouse.try_run("guest", &["--discard-image"], &nonsense);
    assert_ne!(refused.exit_code(), Some(0));
    expect_sealed(&scene, &image);

    let supervisor = start_cold(&scene, "guest", &["--discard-image"]);
    assert!(!image.exists());
    end(&scene, supervisor);
    // Nothing stands in the way any more.
    let supervisor = start_cold(&scene, "guest", &[]);
    end(&scene, supervisor);
}

#[test]
fn the_image_of_a_guest_that_was_booted_cold_does_not_wake() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let written = || fs::metadata(scene.guest.disk()).unwrap().modified().unwrap();
    let before = written();
    let supervisor = start_cold(&scene, "elsewhere", &[]);
    until("the guest to write to its disk", || {
        (written() > before).then_some(())
    });
    end(&scene, supervisor);
    let outcome = scene.dormouse.try_wake("guest", &image, &[]);
    let outcome = outcome.expect_exit(REFUSED);
    assert!(
        outcome.stderr.contains("was written since the save"),
        "{}",
        outcome.stderr
    );
    expect_sealed(&scene, &image);
}

#[test]
fn a_guest_is_woken_on_disks_that_changed_when_that_is_forced_which_is_told_and_remembered() {
    for mode in ["map", "eager"] {
        let scene = Scene::new(QemuBuild::V10_0);
        let image = scene.hibernated();
        let mut disk = fs::File::options().append(true).open(scene.guest.disk()).unwrap();
        disk.write_all(&[0; 512]).unwrap();
        drop(disk);
        expect_refused(&scene, &image, &["--mode", mode], &["had", "bytes and has now"]);
        let ticks = scene.guest.counters().len();
        let options = ["--mode", mode, "--force-disks", "--keep-image", "--json"];
        let mut woken = scene.dormouse.wake("guest", &image, &options);
        scene.guest.wait_for_ticks(ticks + 20);
        let status = until("its status", || {
            let status = scene.dormouse.status("guest");
            (status.exit_code() == Some(0)).then(|| status.result())
        });
        let forced = status["woken"]["forced_disks"].as_array().unwrap();
        // The file, and then QEMU's view of it.
        assert_eq!(forced.len(), 2, "{status}");
        assert!(woken.log().contains("--force-disks"), "{}", woken.log());
        woken.terminate();
        let inspected = scene.dormouse.image("inspect", &image, &["--json"]);
        let inspected = inspected.expect_success().result();
        assert_eq!(
            (&inspected["state"], &inspected["disks_forced"]),
            (&"consumed".into(), &true.into())
        );
    }
}

#[test]
fn forcing_where_nothing_differs_leaves_no_trace() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let mut woken = scene
        .dormouse
        .wake("guest", &image, &["--force-disks", "--keep-image"]);
    scene.guest.wait_for_more_ticks();
    woken.terminate();
    let inspected = scene.dormouse.image("inspect", &image, &["--json"]);
    assert_eq!(inspected.expect_success().result()["disks_forced"], false);
}

#[test]
fn a_guest_wakes_on_its_disk_elsewhere_and_stays_there() {
    for mode in ["map", "eager", "stream"] {
        let scene = Scene::new(QemuBuild::V10_0);
        let image = scene.hibernated();
        let elsewhere = scene.lab.path("elsewhere.img");
        fs::rename(scene.guest.disk(), &elsewhere).unwrap();
        expect_refused(&scene, &image, &["--mode", mode], &["is missing"]);
        let old = scene.guest.disk().to_string_lossy().into_owned();
        for name in ["ide0-hd0", &old] {
            let unchanged = scene.lab.path("changed.img");
            fs::copy(&elsewhere, &unchanged).unwrap();
            let wish = format!("{name}={}", unchanged.display());
            expect_refused(
                &scene,
                &image,
                &["--disk", &wish],
                &["was written since the save"],
            );
            fs::remove_file(&unchanged).unwrap();
        }
        let unknown = scene.dormouse.try_wake("guest", &image, &["--disk", "nobody=/x"]);
        let unknown = unknown.expect_exit(USAGE);
        assert!(unknown.stderr.contains("disk ide0-hd0"), "{unknown:#?}");
        expect_sealed(&scene, &image);

        let wish = format!("ide0-hd0={}", elsewhere.display());
        let mut woken = scene
            .dormouse
            .wake("guest", &image, &["--mode", mode, "--disk", &wish]);
        scene.guest.wait_for_more_ticks();
        let again = scene.lab.path("again.image");
        scene.dormouse.hibernate("guest", &again).expect_success();
        woken.wait_for_end();
        // What is recorded is the new place.
        expect_to_wake(&scene, &again);
        assert!(!scene.guest.disk().exists());
    }
}
