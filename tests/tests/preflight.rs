//! What stands in the way is named before the guest is touched, and before an image runs on other disks.

use std::{ffi::OsString, fs, io::Write, os::unix::fs::FileExt, path::Path};

use dormouse_tests::{Guest, LoopDevice, PlainQemu, QemuBuild, Scene, faults::SmallVolume};
use serde_json::json;

const REFUSED: i32 = 3;

/// Refused, with these words, and the guest runs on.
fn expect_refusal(scene: &Scene, target: &Path, words: &str) {
    let outcome = scene.dormouse.hibernate("guest", target).expect_exit(REFUSED);
    let error = outcome.result()["error"].clone();
    assert!(error["message"].to_string().contains(words), "{error}");
    assert_eq!(error["guest"], "running");
    scene.guest.wait_for_more_ticks();
}

#[test]
fn a_mirror_job_is_named_on_every_qemu() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let scene = Scene::new(build);
        let _supervisor = scene.run();
        let copy = scene.lab.path("copy.img");
        let mirror = json!({"job-id": "copying", "device": "ide0-hd0", "target": copy, "sync": "full", "format": "raw"});
        scene.guest.monitor().execute("drive-mirror", mirror);
        expect_refusal(&scene, &scene.image(), "mirror job copying");
    }
}

#[test]
fn a_device_that_was_plugged_in_later_is_named() {
    let scene = Scene::new(QemuBuild::V10_0);
    let _supervisor = scene.run();
    let plug = json!({"driver": "virtio-rng-pci", "id": "later"});
    scene.guest.monitor().execute("device_add", plug);
    expect_refusal(
        &scene,
        &scene.image(),
        "device later (virtio-rng-pci) was plugged in",
    );
}

#[test]
fn a_disk_that_was_snapshotted_is_named() {
    let scene = Scene::new(QemuBuild::V10_0);
    let _supervisor = scene.run();
    let overlay = scene.lab.path("overlay.qcow2");
    let snapshot = json!({"device": "ide0-hd0", "snapshot-file": overlay, "format": "qcow2"});
    scene.guest.monitor().execute("blockdev-snapshot-sync", snapshot);
    expect_refusal(&scene, &scene.image(), "at the start and is now");
}

#[test]
fn memory_that_belongs_to_a_file_is_named() {
    let scene = Scene::new(QemuBuild::V10_0);
    let file = scene.lab.path("nvdimm.img");
    fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
    let backend = format!(
        "memory-backend-file,id=nv,size=64M,share=on,mem-path={}",
        file.display()
    );
    let mut line = scene.guest.command_line();
    line.extend(
        [
            "-machine",
            "nvdimm=on",
            "-m",
            "64,slots=2,maxmem=1G",
            "-object",
            &backend,
        ]
        .map(OsString::from),
    );
    line.extend(["-device", "nvdimm,memdev=nv"].map(OsString::from));
    scene
        .dormouse
        .try_run("guest", &["--detach"], &line)
        .expect_success();
    scene.guest.wait_for_ticks(5);
    expect_refusal(&scene, &scene.image(), "memory device of type nvdimm");
}

#[test]
fn the_guests_own_disk_is_no_place_for_its_image() {
    let scene = Scene::new(QemuBuild::V10_0);
    let _supervisor = scene.run();
    expect_refusal(&scene, scene.guest.disk(), "the guest's own disk");
}

#[test]
fn disks_in_snapshot_mode_are_named() {
    let scene = Scene::new(QemuBuild::V10_0);
    let Scene { dormouse, guest, .. } = &scene;
    let mut line = guest.command_line();
    line.push(OsString::from("-snapshot"));
    dormouse.try_run("guest", &["--detach"], &line).expect_success();
    let outcome = dormouse.hibernate("guest", &scene.image()).expect_exit(REFUSED);
    assert!(
        outcome.result()["error"]["message"]
            .as_str()
            .unwrap()
            .contains("snapshot mode"),
        "{outcome:#?}"
    );
    guest.wait_for_more_ticks();
}

#[test]
fn a_disk_written_after_the_save_keeps_its_guest_asleep_until_it_is_as_it_was() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let Scene { dormouse, guest, .. } = &scene;

    let saved = fs::metadata(guest.disk()).unwrap().modified().unwrap();
    let disk = fs::File::options().write(true).open(guest.disk()).unwrap();
    disk.set_modified(saved + std::time::Duration::from_secs(5))
        .unwrap();
    for mode in ["map", "eager"] {
        let outcome = dormouse
            .try_wake("guest", &image, &["--mode", mode])
            .expect_exit(REFUSED);
        assert!(
            outcome.stderr.contains("was written since the save"),
            "{outcome:#?}"
        );
    }
    disk.set_modified(saved).unwrap();
    let _woken = dormouse.wake("guest", &image, &[]);
    guest.wait_for_more_ticks();
}

#[test]
fn an_image_is_not_woken_with_another_disk_than_it_was_saved_with() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let Scene { dormouse, lab, .. } = &scene;
    let more = lab.path("more.img");
    fs::write(&more, vec![0; 1 << 20]).unwrap();
    let drive = format!("file={},format=raw,if=ide,index=1", more.display());
    let arguments = ["wake", image.to_str().unwrap(), "--", "-drive", &drive];
    let outcome = dormouse.execute(&arguments).expect_exit(REFUSED);
    assert!(outcome.stderr.contains("was not there"), "{outcome:#?}");
    lab.wait_for_no_qemu();
    let inspected = dormouse.image("inspect", &image, &["--json"]).expect_success();
    assert_eq!(
        inspected.result()["state"],
        "sealed",
        "a wake that never ran the guest uses up no image"
    );
}

#[test]
fn a_guest_that_was_paused_is_paused_again_after_a_failure() {
    let scene = Scene::new(QemuBuild::V10_0);
    let _supervisor = scene.run();
    let mut monitor = scene.guest.monitor();
    monitor.stop();
    let outcome = scene.dormouse.hibernate("guest", Path::new("/proc/guest.image"));
    assert_ne!(outcome.exit_code(), Some(0), "{outcome:#?}");
    assert_eq!(outcome.result()["error"]["guest"], "paused");
    monitor.wait_for_status("paused");
    monitor.cont();
    scene.guest.wait_for_more_ticks();
}

#[test]
fn a_block_device_that_holds_something_else_is_not_overwritten_unasked() {
    let scene = Scene::new(QemuBuild::V10_0);
    let _supervisor = scene.run();
    let device = LoopDevice::with_old_data(&scene.lab, 4);
    let before = fs::read(device.path()).unwrap();
    expect_refusal(&scene, device.path(), "not a Dormouse image");
    assert!(fs::read(device.path()).unwrap() == before);
}

/// The guest's disk on a block device, which has no time of its last write.
fn on_a_device(scene: &Scene, device: &LoopDevice) -> Vec<OsString> {
    let disk = fs::read(scene.guest.disk()).expect("the disk can be read");
    let written = fs::OpenOptions::new().write(true).open(device.path());
    let written = written.and_then(|mut open| open.write_all(&disk));
    written.expect("the device can be written");
    let (file, device) = (
        scene.guest.disk().display().to_string(),
        device.path().display().to_string(),
    );
    let line = scene.guest.command_line().into_iter();
    line.map(|argument| argument.to_string_lossy().replace(&file, &device).into())
        .collect()
}

#[test]
fn a_block_device_written_after_the_save_keeps_its_guest_asleep_until_it_is_as_it_was() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let scene = Scene::new(build);
        let device = LoopDevice::with_old_data(&scene.lab, 64);
        let Scene { dormouse, guest, .. } = &scene;
        let line = on_a_device(&scene, &device);
        dormouse.try_run("guest", &["--detach"], &line).expect_success();
        guest.wait_for_ticks(5);
        let image = scene.image();
        dormouse.hibernate("guest", &image).expect_success();
        // Somebody's file system writes its superblock.
        let open = fs::File::options()
            .read(true)
            .write(true)
            .open(device.path())
            .unwrap();
        let mut before = [0; 512];
        open.read_exact_at(&mut before, 512 << 10).unwrap();
        open.write_all_at(&[1; 512], 512 << 10).unwrap();
        open.sync_all().unwrap();
        let outcome = dormouse.try_wake("guest", &image, &[]).expect_exit(REFUSED);
        assert!(
            outcome.stderr.contains("a sample of it is not what it was"),
            "{outcome:#?}"
        );
        open.write_all_at(&before, 512 << 10).unwrap();
        open.sync_all().unwrap();
        drop(open);
        let last = guest.last_counter();
        let mut woken = dormouse.wake("guest", &image, &[]);
        assert!(guest.wait_for_more_ticks() > last, "{build}");
        woken.terminate();
    }
}

#[test]
fn a_qcow2_rewritten_after_the_save_keeps_its_guest_asleep_although_its_time_was_put_back() {
    let scene = Scene::new(QemuBuild::V10_0);
    let (qcow2, plain) = (
        scene.lab.path("disk.qcow2"),
        scene.guest.disk().display().to_string(),
    );
    scene.guest.build().make_qcow2(scene.guest.disk(), &qcow2);
    let line = scene.guest.command_line().into_iter();
    let line: Vec<OsString> = line
        .map(|argument| {
            let argument = argument.to_string_lossy();
            let named = argument.replace(
                &format!("file={plain},format=raw"),
                &format!("file={},format=qcow2", qcow2.display()),
            );
            named.into()
        })
        .collect();
    let Scene { dormouse, guest, .. } = &scene;
    dormouse.try_run("guest", &["--detach"], &line).expect_success();
    guest.wait_for_ticks(5);
    let image = scene.image();
    dormouse.hibernate("guest", &image).expect_success();
    let saved = fs::metadata(&qcow2).unwrap().modified().unwrap();
    let open = fs::File::options().read(true).write(true).open(&qcow2).unwrap();
    let mut snapshots = [0; 4];
    open.read_exact_at(&mut snapshots, 60).unwrap();
    open.write_all_at(&[0, 0, 0, 9], 60).unwrap();
    open.set_modified(saved).unwrap();
    let outcome = dormouse.try_wake("guest", &image, &[]).expect_exit(REFUSED);
    assert!(outcome.stderr.contains("qcow2 tables"), "{outcome:#?}");
    open.write_all_at(&snapshots, 60).unwrap();
    open.set_modified(saved).unwrap();
    let last = guest.last_counter();
    let _woken = dormouse.wake("guest", &image, &[]);
    assert!(guest.wait_for_more_ticks() > last);
}

#[test]
fn an_image_goes_to_the_volume_that_it_is_meant_for_or_nowhere() {
    let scene = Scene::new(QemuBuild::V10_0);
    let _supervisor = scene.run();
    let volume = SmallVolume::new(&scene.lab, 256);
    let (on_it, mounted_at) = (volume.path("guest.image"), volume.path(""));
    let not_mounted = scene.lab.path("pvc");
    fs::create_dir(&not_mounted).unwrap();
    let hibernate = |target: &Path, mount: &Path| {
        let options = ["--volume-mount", mount.to_str().unwrap()];
        let command = scene.dormouse.start_hibernating_with("guest", target, &options);
        scene.dormouse.finish(command)
    };
    for (target, mount, words) in [
        (
            not_mounted.join("guest.image"),
            &not_mounted,
            "no volume is mounted at",
        ),
        (
            scene.image(),
            &mounted_at,
            "is not on the volume that is mounted at",
        ),
        (on_it.clone(), &not_mounted, "no volume is mounted at"),
    ] {
        let outcome = hibernate(&target, mount).expect_exit(REFUSED);
        let error = outcome.result()["error"].clone();
        assert!(error["message"].to_string().contains(words), "{error}");
        assert!(!target.exists());
        scene.guest.wait_for_more_ticks();
    }
    hibernate(&on_it, &mounted_at).expect_success();
    assert!(on_it.exists());
}

#[test]
fn a_device_that_the_guests_disk_lies_on_or_that_lies_on_it_takes_no_image() {
    let scene = Scene::new(QemuBuild::V10_0);
    let over_the_disk = LoopDevice::over(scene.guest.disk());
    {
        let _supervisor = scene.run();
        expect_refusal(&scene, over_the_disk.path(), "is the guest's own disk");
    }

    // A disk with one partition from 1 MiB on, which the guest has.
    let scene = Scene::new(QemuBuild::V10_0);
    let whole = scene.lab.path("whole-disk");
    let disk = fs::read(scene.guest.disk()).unwrap();
    let mut content = vec![0; 1 << 20];
    content.extend(&disk);
    fs::write(&whole, content).unwrap();
    let whole = LoopDevice::over(&whole);
    let partition = whole.partition(2048, disk.len() as u64 / 512);
    let partition = partition.to_str().unwrap();
    let file = scene.guest.disk().display().to_string();
    let line = scene.guest.command_line().into_iter();
    let line: Vec<OsString> = line
        .map(|argument| argument.to_string_lossy().replace(&file, partition).into())
        .collect();
    let dormouse = &scene.dormouse;
    dormouse.try_run("guest", &["--detach"], &line).expect_success();
    scene.guest.wait_for_ticks(5);
    expect_refusal(&scene, whole.path(), "is the guest's own disk");
    scene.dormouse.hibernate("guest", &scene.image()).expect_success();
    scene.lab.wait_for_no_qemu();
}

#[test]
fn a_device_that_lies_on_the_guests_memory_takes_no_image() {
    let scene = Scene::new(QemuBuild::V10_0);
    let file = scene.lab.path("ram");
    let ram = format!(
        "memory-backend-file,id=pc.ram,size=64M,share=on,mem-path={}",
        file.display()
    );
    let arguments = ["-object", &ram, "-machine", "memory-backend=pc.ram"];
    let _plain = PlainQemu::start_with(&scene.guest, &arguments);
    scene.guest.wait_for_ticks(5);
    let over_the_memory = LoopDevice::over(&file);
    let over_that = LoopDevice::over(over_the_memory.path());
    for is_removed in [false, true] {
        if is_removed {
            fs::remove_file(&file).unwrap();
        }
        for device in [&over_the_memory, &over_that] {
            let socket = scene.guest.monitor_socket();
            let outcome = scene
                .dormouse
                .hibernate_by_monitor(socket, device.path())
                .expect_exit(REFUSED);
            let message = outcome.result()["error"]["message"].to_string();
            assert!(
                message.contains("is the guest's own RAM block pc.ram"),
                "{message}"
            );
            scene.guest.wait_for_more_ticks();
        }
    }
    scene
        .dormouse
        .hibernate_by_monitor(scene.guest.monitor_socket(), &scene.image())
        .expect_success();
}

#[test]
fn an_export_that_somebody_could_write_through_is_named_with_what_closes_it() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let scene = Scene::new(build);
        let _supervisor = scene.run();
        let mut monitor = scene.guest.monitor();
        let socket = scene.lab.path("nbd.sock");
        let server = json!({"addr": {"type": "unix", "data": {"path": socket}}});
        monitor.execute("nbd-server-start", server);
        let drives = monitor.execute("query-block", json!({}));
        let node = drives[0]["inserted"]["node-name"].clone();
        let export = json!({"type": "nbd", "id": "backup", "node-name": node, "writable": false});
        monitor.execute("block-export-add", export);
        expect_refusal(&scene, &scene.image(), "block export backup");
        expect_refusal(&scene, &scene.image(), "block-export-del");
        monitor.execute("block-export-del", json!({"id": "backup"}));
        scene.dormouse.hibernate("guest", &scene.image()).expect_success();
    }
}

#[test]
fn a_device_that_the_memory_of_another_guest_lies_on_takes_no_image() {
    let asleep = Scene::new(QemuBuild::V10_0);
    let device = LoopDevice::with_old_data(&asleep.lab, 160);
    let mut supervisor = asleep.run();
    let hibernating = asleep
        .dormouse
        .start_hibernating_with("guest", device.path(), &["--replace"]);
    asleep.dormouse.finish(hibernating).expect_success();
    supervisor.wait_for_end();
    let mut woken = asleep.dormouse.wake("guest", device.path(), &["--mode", "map"]);
    asleep.guest.wait_for_more_ticks();
    woken.kill();

    let scene = Scene::new(QemuBuild::V10_0);
    let _supervisor = scene.run();
    let hibernating = scene
        .dormouse
        .start_hibernating_with("guest", device.path(), &["--replace"]);
    let refused = scene.dormouse.finish(hibernating).expect_exit(REFUSED);
    let message = refused.result()["error"]["message"].to_string();
    assert!(message.contains("a guest was woken from it"), "{message}");
    let discarded = scene
        .dormouse
        .image("discard", device.path(), &["--yes", "--json"]);
    discarded.expect_exit(REFUSED);
    scene.guest.wait_for_more_ticks();
    asleep.guest.wait_for_more_ticks();
}
