//! What must not work does not, says so by its exit code, and harms neither guest nor image.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::Path,
};

use dormouse_tests::{
    BootSectorGuest, Dormouse, Lab, QemuBuild, Scene,
    faults::{self, SmallVolume},
};

const USAGE: i32 = 2;
const REFUSED: i32 = 3;
const UNREACHABLE: i32 = 4;
const NO_SPACE: i32 = 7;
const IMAGE_INVALID: i32 = 8;

fn expect_refused_wake(scene: &Scene, image: &Path, mode: &str) {
    let ticks = scene.guest.counters().len();
    let outcome = scene.dormouse.try_wake("guest", image, &["--mode", mode]);
    outcome.expect_exit(IMAGE_INVALID);
    scene.lab.wait_for_no_qemu();
    assert_eq!(scene.guest.counters().len(), ticks, "the guest must not have run");
}

#[test]
fn a_torn_image_is_refused() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let length = fs::metadata(&image).unwrap().len();
    for cut in [1, length / 2 - 1, length / 2 - 5000] {
        faults::cut_off(&image, cut);
        let verified = scene.dormouse.image("verify", &image, &[]);
        verified.expect_exit(IMAGE_INVALID);
        expect_refused_wake(&scene, &image, "map");
        expect_refused_wake(&scene, &image, "eager");
    }
}

#[test]
fn a_flipped_bit_of_memory_is_found_before_the_guest_runs() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let place = faults::find(&image, &BootSectorGuest::landmark());
    faults::flip(&image, place);
    let verified = scene.dormouse.image("verify", &image, &[]);
    verified.expect_exit(IMAGE_INVALID);
    expect_refused_wake(&scene, &image, "eager");

    // The refusals left the image as it was: healed, it wakes.
    faults::flip(&image, place);
    scene.dormouse.image("verify", &image, &[]).expect_success();
    let _woken = scene.dormouse.wake("guest", &image, &["--mode", "eager"]);
    scene.guest.wait_for_more_ticks();
}

#[test]
fn a_flipped_bit_of_device_state_is_refused_by_every_wake() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    // The migration stream that holds the device state starts with this; the guest's memory does not hold it.
    let place = faults::find(&image, b"QEVM");
    faults::flip(&image, place + 100);
    expect_refused_wake(&scene, &image, "map");
    expect_refused_wake(&scene, &image, "eager");
}

#[test]
fn a_flipped_bit_of_the_manifest_is_refused_by_every_wake() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let disk = scene.guest.disk().as_os_str().as_encoded_bytes();
    faults::flip(&image, faults::find(&image, disk));
    expect_refused_wake(&scene, &image, "map");
    expect_refused_wake(&scene, &image, "eager");
    let inspected = scene.dormouse.image("inspect", &image, &["--json"]);
    inspected.expect_exit(IMAGE_INVALID);
}

#[test]
fn an_image_of_a_newer_format_and_what_is_no_image_are_told_apart() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let whole = fs::read(&image).unwrap();
    let mut newer = whole.clone();
    for copy in newer[..8192].chunks_exact_mut(4096) {
        copy[8..12].copy_from_slice(&99_u32.to_le_bytes());
        let crc32 = crc32fast::hash(&copy[..4092]);
        copy[4092..].copy_from_slice(&crc32.to_le_bytes());
    }
    for (content, words) in [
        (&newer[..], "has format 99, this version reads up to"),
        (&vec![7; 1 << 20], "not a Dormouse image"),
        (&[], "not a Dormouse image"),
    ] {
        fs::write(&image, content).unwrap();
        for mode in ["map", "eager", "lazy", "stream"] {
            expect_refused_wake(&scene, &image, mode);
        }
        for told in [
            scene.dormouse.try_wake("guest", &image, &[]),
            scene.dormouse.image("verify", &image, &[]),
            scene.dormouse.image("inspect", &image, &[]),
        ] {
            let told = told.expect_exit(IMAGE_INVALID);
            assert!(told.stderr.contains(words), "{told:#?}");
        }
    }
    fs::write(&image, whole).unwrap();
    let _woken = scene.dormouse.wake("guest", &image, &["--mode", "eager"]);
    scene.guest.wait_for_more_ticks();
}

#[test]
fn an_image_that_somebody_holds_does_not_wake() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let held = fs::File::open(&image).unwrap();
    held.lock().unwrap();
    for mode in ["map", "eager"] {
        let refused = scene.dormouse.try_wake("guest", &image, &["--mode", mode]);
        let refused = refused.expect_exit(REFUSED);
        assert!(
            refused.stderr.contains("in use by another process"),
            "{refused:#?}"
        );
    }
    drop(held);
    let _woken = scene.dormouse.wake("guest", &image, &["--mode", "eager"]);
    scene.guest.wait_for_more_ticks();
}

#[test]
fn a_disk_that_is_missing_or_has_another_size_keeps_its_guest_asleep() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let disk = scene.guest.disk();
    let away = scene.lab.path("away.img");
    let resize = |bytes: u64| {
        fs::File::options()
            .write(true)
            .open(disk)
            .unwrap()
            .set_len(bytes)
            .unwrap()
    };
    let refused = |words: &str| {
        let ticks = scene.guest.counters().len();
        for mode in ["map", "eager", "lazy", "stream"] {
            let outcome = scene.dormouse.try_wake("guest", &image, &["--mode", mode]);
            let outcome = outcome.expect_exit(REFUSED);
            assert!(outcome.stderr.contains(words), "{outcome:#?}");
        }
        scene.lab.wait_for_no_qemu();
        assert_eq!(scene.guest.counters().len(), ticks, "the guest must not have run");
    };
    fs::rename(disk, &away).unwrap();
    refused("is missing");
    fs::rename(&away, disk).unwrap();
    let metadata = fs::metadata(disk).unwrap();
    resize(metadata.len() + 512);
    refused("bytes and has now");
    resize(metadata.len());
    fs::File::options()
        .write(true)
        .open(disk)
        .unwrap()
        .set_modified(metadata.modified().unwrap())
        .unwrap();
    let _woken = scene.dormouse.wake("guest", &image, &["--mode", "eager"]);
    scene.guest.wait_for_more_ticks();
}

#[test]
fn an_image_wakes_once() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let mut woken = scene
        .dormouse
        .wake("guest", &image, &["--mode", "eager", "--keep-image"]);
    scene.guest.wait_for_more_ticks();
    woken.terminate();
    scene.lab.wait_for_no_qemu();
    expect_refused_wake(&scene, &image, "eager");
    expect_refused_wake(&scene, &image, "map");
}

#[test]
fn a_full_volume_leaves_the_guest_running_and_nothing_behind() {
    let scene = Scene::new(QemuBuild::V10_0);
    // The guest's memory holds 17 MiB that are not zero.
    let volume = SmallVolume::new(&scene.lab, 12);
    let _supervisor = scene.run();
    let outcome = scene.dormouse.hibernate("guest", &volume.path("guest.image"));
    let outcome = outcome.expect_exit(NO_SPACE);
    assert_eq!(outcome.result()["error"]["guest"], "running");
    scene.guest.wait_for_more_ticks();
    assert_eq!(volume.content(), Vec::<String>::new());
}

#[test]
fn an_unknown_name_is_unreachable() {
    let lab = Lab::new();
    let dormouse = Dormouse::new(&lab);
    let outcome = dormouse.hibernate("nobody", &lab.path("guest.image"));
    let outcome = outcome.expect_exit(UNREACHABLE);
    assert!(outcome.result()["error"]["code"].is_string());
    assert!(!lab.path("guest.image").exists());
}

#[test]
fn an_existing_target_is_not_overwritten() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.lab.path("guest.image");
    fs::write(&image, "somebody's").unwrap();
    let _supervisor = scene.run();
    let outcome = scene.dormouse.hibernate("guest", &image);
    let code = outcome.exit_code();
    assert!(code == Some(REFUSED) || code == Some(USAGE), "{outcome:#?}");
    assert_eq!(fs::read_to_string(&image).unwrap(), "somebody's");
    scene.guest.wait_for_more_ticks();
}

#[test]
fn a_qemu_that_is_killed_while_it_is_asked_is_a_failure() {
    let scene = Scene::new(QemuBuild::V10_0);
    let folder = scene.lab.path("images");
    fs::create_dir(&folder).unwrap();
    let mut supervisor = scene.run();
    let qemu = scene.lab.only_qemu();
    // Frozen, it cannot finish before it is killed.
    faults::freeze(qemu);
    let hibernating = scene
        .dormouse
        .start_hibernating("guest", &folder.join("guest.image"));
    faults::kill(qemu);
    let outcome = scene.dormouse.finish(hibernating);
    assert_ne!(outcome.exit_code(), Some(0), "{outcome:#?}");
    supervisor.wait_for_end();
    assert_eq!(faults::files_in(&folder), Vec::<String>::new());
}

/// The kill comes after the first report of progress, at whatever step that meets. Either the
/// image was sealed before, or there is none.
#[test]
fn a_qemu_that_is_killed_mid_save_leaves_a_whole_image_or_none() {
    let scene = Scene::new(QemuBuild::V10_0);
    let folder = scene.lab.path("images");
    fs::create_dir(&folder).unwrap();
    let image = folder.join("guest.image");
    let mut supervisor = scene.run();
    let qemu = scene.lab.only_qemu();
    let mut hibernating = scene.dormouse.start_hibernating("guest", &image);
    let mut progress = BufReader::new(hibernating.stdout.take().unwrap());
    progress.read_line(&mut String::new()).unwrap();
    // It may have ended already, hibernated.
    let _ = rustix::process::kill_process(qemu, rustix::process::Signal::KILL);
    let rest: Vec<String> = progress.lines().map_while(Result::ok).collect();
    let outcome = scene.dormouse.finish(hibernating);
    supervisor.wait_for_end();
    if outcome.exit_code() == Some(0) {
        scene.dormouse.image("verify", &image, &[]).expect_success();
        assert_eq!(faults::files_in(&folder), ["guest.image"], "{rest:#?}");
    } else {
        assert_eq!(faults::files_in(&folder), Vec::<String>::new(), "{rest:#?}");
    }
}
