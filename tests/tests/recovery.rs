//! Dormouse is killed at every point of a hibernation, and `dormouse recover` brings guest and image to one of their two
//! ends: the guest runs on as it was and there is nothing of the image, or the image is the guest and QEMU is gone.

use std::fs;
use std::os::unix::fs::MetadataExt;

use dormouse_tests::{
    Guest, QemuBuild, Scene, Supervisor,
    faults::{self, SmallVolume},
    interrupted::{
        Guarded, SLOWLY, expect_guest_as_before, expect_image_is_the_guest, expect_nothing_to_recover,
        files_of_images, held_after_the_seal, image, settings, wait_for_middle,
    },
    until,
};
use rustix::process::Pid;
use serde_json::{Value, json};

const REFUSED: i32 = 3;
const OPERATOR: i32 = 10;

/// Memory in a memfd that QEMU 10.0 can hand over, and all else that it must be able to hand over.
const MEMFD_AND_AUX: [&str; 4] = [
    "-object",
    "memory-backend-memfd,id=m0,size=64M,share=on",
    "-machine",
    "memory-backend=m0,aux-ram-share=on",
];

#[test]
fn killed_in_the_middle_of_a_save_on_qemu_7_2_the_guest_is_given_back() {
    killed_in_the_middle_of_a_save_the_guest_is_given_back(QemuBuild::V7_2);
}

#[test]
fn killed_in_the_middle_of_a_save_on_qemu_10_0_the_guest_is_given_back() {
    killed_in_the_middle_of_a_save_the_guest_is_given_back(QemuBuild::V10_0);
}

#[test]
fn killed_in_the_middle_of_a_save_on_qemu_11_1_the_guest_is_given_back() {
    killed_in_the_middle_of_a_save_the_guest_is_given_back(QemuBuild::V11_1);
}

fn killed_in_the_middle_of_a_save_the_guest_is_given_back(build: QemuBuild) {
    let guarded = Guarded::start(build);
    guarded.killed_in_the_middle(&[]);
    let scene = guarded.scene();
    assert_eq!(scene.guest.monitor().status(), "postmigrate");
    assert_ne!(settings(scene), guarded.settings);
    // Without it the next hibernation says what to do.
    let refused = scene
        .dormouse
        .finish(guarded.start_hibernating(&[]))
        .expect_exit(REFUSED);
    let message = refused.result()["error"]["message"].to_string();
    assert!(message.contains("dormouse recover"), "{message}");
    guarded.expect_given_back();
    scene
        .dormouse
        .finish(guarded.start_hibernating(&[]))
        .expect_success();
    let _woken = expect_image_is_the_guest(scene);
}

#[test]
fn killed_while_qemu_sends_the_memory_the_guest_is_given_back_on_every_qemu() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        for channels in ["0", "2"] {
            let guarded = Guarded::start_with(build, &[]);
            guarded.killed_in_the_middle(&["--engine", "stream", "--channels", channels]);
            guarded.expect_given_back();
        }
    }
}

#[test]
fn killed_while_memory_that_qemu_handed_over_is_written_the_guest_is_given_back() {
    let guarded = Guarded::start_with(QemuBuild::V10_0, &MEMFD_AND_AUX);
    guarded.killed_in_the_middle(&[]);
    guarded.expect_given_back();
}

#[test]
fn killed_as_soon_as_there_is_a_record_the_guest_runs_on() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let guarded = Guarded::start(build);
        let scene = guarded.scene();
        let client = guarded.start_hibernating(&SLOWLY);
        faults::kill_when(Pid::from_child(&client), "a record", || {
            !scene.dormouse.records().is_empty()
        });
        scene.dormouse.finish(client);
        guarded.expect_given_back();
    }
}

/// QEMU does not answer the question that comes before the seal.
#[test]
fn killed_between_the_memory_and_the_seal_the_guest_is_given_back() {
    let guarded = Guarded::start(QemuBuild::V10_0);
    let scene = guarded.scene();
    let qemu = scene.lab.only_qemu();
    let mut client = guarded.start_hibernating(&SLOWLY);
    wait_for_middle(&mut client);
    faults::freeze(qemu);
    until("the record before the seal", || {
        let (_, record) = scene.dormouse.records().pop()?;
        (record["point"] == "sealing").then_some(())
    });
    // A recovery that is killed is one that never was.
    faults::kill(Pid::from_child(&client));
    scene.dormouse.finish(client);
    let recovering = scene.dormouse.start_recovering(&[]);
    let (record, _) = scene.dormouse.records().pop().expect("there is a record");
    until("the recovery to hold the record", || {
        faults::has_open(Pid::from_child(&recovering), &record).then_some(())
    });
    scene.dormouse.recover(&["vm"]).expect_exit(REFUSED);
    faults::kill(Pid::from_child(&recovering));
    scene.dormouse.finish(recovering);
    faults::thaw(qemu);
    guarded.expect_given_back();
}

#[test]
fn a_paused_guest_is_given_back_paused() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let guarded = Guarded::start(build);
        let scene = guarded.scene();
        scene.guest.monitor().stop();
        guarded.killed_in_the_middle(&[]);
        let recovered = scene.dormouse.recover(&[]).expect_success().result();
        assert_eq!(
            (&recovered["outcome"], &recovered["guest"]),
            (&json!("given-back"), &json!("paused"))
        );
        assert_eq!(scene.guest.monitor().status(), "paused");
        scene.guest.monitor().cont();
        expect_guest_as_before(scene, &guarded.settings);
    }
}

#[test]
fn killed_after_the_seal_the_image_is_the_guest_on_every_qemu() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let guarded = Guarded::start(build);
        guarded.killed_after_the_seal();
        let scene = guarded.scene();
        assert_eq!(scene.guest.monitor().status(), "postmigrate");
        let early = scene
            .dormouse
            .try_wake("early", &image(scene), &[])
            .expect_exit(REFUSED);
        assert!(early.stderr.contains("dormouse recover"), "{early:#?}");
        let recovered = scene
            .dormouse
            .recover(&["--qmp", &guarded.socket()])
            .expect_success()
            .result();
        assert_eq!(
            (&recovered["outcome"], &recovered["guest"]),
            (&json!("hibernated"), &json!("stopped"))
        );
        // What was reserved for memory that is zero is given back.
        let allocated = fs::metadata(image(scene)).expect("the image").blocks() * 512;
        assert!(allocated < scene.guest.ram_bytes() / 2, "{allocated} bytes");
        let _woken = expect_image_is_the_guest(scene);
    }
}

/// QEMU has been told, and ends when it can.
#[test]
fn killed_while_qemu_ends_the_image_is_the_guest() {
    let guarded = Guarded::start(QemuBuild::V10_0);
    let scene = guarded.scene();
    let qemu = scene.lab.only_qemu();
    let client = guarded.start_hibernating(&SLOWLY);
    let held = held_after_the_seal(scene, &guarded.state);
    // Whoever is held for long has asked QEMU once more whether its guest ran: only the record is left.
    faults::wait_until_held(Pid::from_child(&client));
    faults::freeze(qemu);
    drop(held);
    until("the record after the seal", || {
        let (_, record) = scene.dormouse.records().pop()?;
        (record["point"] == "sealed").then_some(())
    });
    faults::kill(Pid::from_child(&client));
    scene.dormouse.finish(client);
    faults::thaw(qemu);
    let recovered = scene.dormouse.recover(&[]).expect_success().result();
    assert_eq!(recovered["outcome"], "hibernated");
    let _woken = expect_image_is_the_guest(scene);
}

#[test]
fn a_guest_that_somebody_ran_after_the_seal_runs_on_and_its_image_goes() {
    let guarded = Guarded::start(QemuBuild::V10_0);
    let scene = guarded.scene();
    guarded.killed_after_the_seal();
    scene.guest.monitor().cont();
    scene.guest.wait_for_more_ticks();
    let recovered = scene.dormouse.recover(&[]).expect_success().result();
    assert_eq!(
        (&recovered["outcome"], &recovered["guest"]),
        (&json!("ran-on"), &json!("running"))
    );
    expect_guest_as_before(scene, &guarded.settings);
}

#[test]
fn an_image_that_was_taken_away_is_a_persons_to_find() {
    let guarded = Guarded::start(QemuBuild::V10_0);
    let scene = guarded.scene();
    guarded.killed_after_the_seal();
    let elsewhere = scene.lab.path("elsewhere");
    fs::rename(image(scene), &elsewhere).expect("the image can be moved");
    for _ in 0..2 {
        let error = scene.dormouse.recover(&[]).expect_exit(OPERATOR).result();
        assert_eq!(error["error"]["guest"], "paused", "{error}");
    }
    assert_eq!(scene.guest.monitor().status(), "postmigrate");
    fs::rename(&elsewhere, image(scene)).expect("the image can be moved back");
    scene.dormouse.recover(&[]).expect_success();
    let _woken = expect_image_is_the_guest(scene);
}

#[test]
fn where_qemu_was_killed_too_nothing_is_left_but_what_was_sealed() {
    let guarded = Guarded::start(QemuBuild::V10_0);
    let scene = guarded.scene();
    guarded.killed_in_the_middle(&[]);
    faults::kill(scene.lab.only_qemu());
    scene.lab.wait_for_no_qemu();
    let recovered = scene.dormouse.recover(&[]).expect_success().result();
    assert_eq!(
        (&recovered["outcome"], &recovered["guest"]),
        (&json!("qemu-gone"), &json!("stopped"))
    );
    assert_eq!(files_of_images(scene), Vec::<String>::new());
    expect_nothing_to_recover(scene);

    let guarded = Guarded::start(QemuBuild::V10_0);
    let scene = guarded.scene();
    guarded.killed_after_the_seal();
    faults::kill(scene.lab.only_qemu());
    scene.lab.wait_for_no_qemu();
    let recovered = scene.dormouse.recover(&[]).expect_success().result();
    assert_eq!(recovered["outcome"], "hibernated");
    let _woken = expect_image_is_the_guest(scene);
}

#[test]
fn a_torn_record_is_told_and_nothing_is_touched() {
    let guarded = Guarded::start(QemuBuild::V10_0);
    let scene = guarded.scene();
    guarded.killed_in_the_middle(&[]);
    let (path, _) = scene.dormouse.records().pop().expect("there is a record");
    let whole = fs::read(&path).expect("the record can be read");
    fs::write(&path, &whole[..whole.len() / 2]).expect("the record can be torn");
    let error = scene.dormouse.recover(&[]).expect_exit(OPERATOR).result();
    let message = error["error"]["message"].to_string();
    assert!(message.contains("torn"), "{message}");
    assert_eq!(scene.guest.monitor().status(), "postmigrate");
    assert_eq!(files_of_images(scene).len(), 1);
    fs::write(&path, &whole).expect("the record can be mended");
    guarded.expect_given_back();
}

#[test]
fn a_record_that_cannot_be_read_keeps_every_image_asleep() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    for folder in [".operations", ".wakes"] {
        let folder = scene.dormouse.state_dir().join(folder);
        fs::create_dir_all(&folder).expect("a folder can be made");
        let record = folder.join("5c2e9d0e-92f5-4d67-a6c4-7b1f5a3c8d21.json");
        fs::write(&record, "{\"form\": 99}").expect("a record can be written");
        let refused = scene
            .dormouse
            .try_wake("guest", &image, &[])
            .expect_exit(OPERATOR);
        assert!(refused.stderr.contains("cannot be read"), "{refused:#?}");
        scene.lab.wait_for_no_qemu();
        fs::remove_file(&record).expect("the record can be removed");
    }
    let _woken = scene.dormouse.wake("guest", &image, &[]);
    scene.guest.wait_for_more_ticks();
}

#[test]
fn what_is_under_way_is_left_alone() {
    let guarded = Guarded::start(QemuBuild::V10_0);
    let scene = guarded.scene();
    let mut client = guarded.start_hibernating(&SLOWLY);
    wait_for_middle(&mut client);
    scene.dormouse.recover(&["vm"]).expect_exit(REFUSED);
    scene.dormouse.recover(&[]).expect_success();
    scene.dormouse.finish(client).expect_success();
    let _woken = expect_image_is_the_guest(scene);
}

/// A guest under a supervisor, which is killed at some point of its hibernation.
fn supervised(kill: impl FnOnce(&Scene, &SmallVolume, &Supervisor)) -> (SmallVolume, Scene, Value) {
    let mut scene = Scene::new(QemuBuild::V10_0);
    let state = SmallVolume::new(&scene.lab, 16);
    scene.dormouse = scene.dormouse.with_state_dir(state.path("state"));
    let mut supervisor = scene.run();
    fs::create_dir(scene.lab.path("images")).expect("a folder can be made");
    let settings = settings(&scene);
    kill(&scene, &state, &supervisor);
    supervisor.wait_for_end();
    (state, scene, settings)
}

#[test]
fn a_supervisor_that_is_killed_in_the_middle_is_told_of_everywhere_and_its_guest_given_back() {
    let (_state, scene, settings) = supervised(|scene, _, supervisor| {
        let mut client = scene
            .dormouse
            .start_hibernating_with("guest", &image(scene), &SLOWLY);
        wait_for_middle(&mut client);
        faults::kill(supervisor.pid());
        scene.dormouse.finish(client);
    });
    let Scene { dormouse, guest, .. } = &scene;
    for told in [
        dormouse.try_run("guest", &[], &guest.command_line()),
        dormouse.status("guest"),
        dormouse.execute(&["status"]),
        dormouse.hibernate("guest", &image(&scene)),
    ] {
        let said = format!("{}{}", told.stdout, told.stderr);
        assert!(said.contains("dormouse recover"), "{told:#?}");
    }
    let recovered = dormouse.recover(&["guest"]).expect_success().result();
    assert_eq!(recovered["outcome"], "given-back");
    expect_guest_as_before(&scene, &settings);
    dormouse
        .hibernate_by_monitor(&dormouse.own_monitor("guest"), &image(&scene))
        .expect_success();
    let _woken = expect_image_is_the_guest(&scene);
}

#[test]
fn a_supervisor_that_is_killed_after_the_seal_leaves_its_name_free() {
    let (_state, scene, _) = supervised(|scene, state, supervisor| {
        let client = scene
            .dormouse
            .start_hibernating_with("guest", &image(scene), &SLOWLY);
        let held = held_after_the_seal(scene, state);
        faults::kill(supervisor.pid());
        drop(held);
        scene.dormouse.finish(client);
    });
    let recovered = scene.dormouse.recover(&["guest"]).expect_success().result();
    assert_eq!(recovered["outcome"], "hibernated");
    assert_eq!(
        faults::files_in(scene.dormouse.state_dir()),
        [".endings"],
        "but for how the VM ended"
    );
    let _woken = expect_image_is_the_guest(&scene);
}

#[test]
fn a_start_sweeps_up_what_a_supervisor_left_that_was_killed_with_its_qemu() {
    let (_state, scene, _) = supervised(|scene, _, supervisor| {
        let mut client = scene
            .dormouse
            .start_hibernating_with("guest", &image(scene), &SLOWLY);
        wait_for_middle(&mut client);
        let qemu = scene.lab.only_qemu();
        faults::kill(supervisor.pid());
        faults::kill(qemu);
        scene.dormouse.finish(client);
        until("QEMU's end", || faults::has_ended(qemu).then_some(()));
    });
    assert_eq!(files_of_images(&scene).len(), 1);
    fs::remove_file(scene.lab.path("serial.log")).expect("the guest begins anew");
    let _supervisor = scene.run();
    assert_eq!(files_of_images(&scene), Vec::<String>::new());
    expect_nothing_to_recover(&scene);
}
