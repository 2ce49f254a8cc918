//! A recovery that a person has to help can be done again and again: it says the same until something was done, and then
//! finds its end.

use std::fs;

use dormouse_storage::{Image, ImageState};
use dormouse_tests::{
    Guest, QemuBuild, Scene, faults,
    interrupted::{
        Guarded, SLOWLY, expect_guest_as_before, expect_nothing_to_recover, files_of_images, image, settings,
        wait_for_middle,
    },
};
use rustix::process::Pid;
use serde_json::{Value, json};

const UNREACHABLE: i32 = 4;
const CANCELLED: i32 = 6;
const OPERATOR: i32 = 10;

/// Recovers three times; each time says the same, and leaves the record.
fn expect_the_same_doubt(guarded: &Guarded) -> Value {
    let dormouse = &guarded.scene().dormouse;
    let record = dormouse.records();
    let told: Vec<Value> = (0..3)
        .map(|_| {
            let told = dormouse.recover(&[]).expect_exit(OPERATOR).result();
            assert_eq!(dormouse.records(), record);
            told["error"].clone()
        })
        .collect();
    assert!(told.iter().all(|error| *error == told[0]), "{told:#?}");
    told[0].clone()
}

#[test]
fn a_guest_that_may_run_twice_is_a_persons_to_end_and_then_all_is_found_well() {
    let guarded = Guarded::start(QemuBuild::V10_0);
    guarded.killed_after_the_seal();
    let scene = guarded.scene();
    // Somebody woke the image elsewhere, and somebody let the guest go on here.
    let mut woken = Image::open_locked(&image(scene)).expect("the image can be opened");
    woken.mark(ImageState::Waking).expect("the image can be marked");
    drop(woken);
    scene.guest.monitor().cont();
    scene.guest.wait_for_more_ticks();
    let error = expect_the_same_doubt(&guarded);
    assert!(
        error["message"].to_string().contains("end one of the two"),
        "{error}"
    );
    assert_eq!(error["guest"], "running");
    // Neither was touched.
    scene.guest.wait_for_more_ticks();
    assert_eq!(files_of_images(scene), ["guest.image"]);
    faults::kill(scene.lab.only_qemu());
    scene.lab.wait_for_no_qemu();
    let recovered = scene.dormouse.recover(&[]).expect_success().result();
    assert_eq!(recovered["outcome"], "hibernated");
    expect_nothing_to_recover(scene);
}

/// As after a rollback whose guest ran already, and whose image could not be removed before QEMU was gone.
#[test]
fn an_image_that_is_older_than_its_guest_stays_until_a_person_discards_it() {
    let guarded = Guarded::start(QemuBuild::V10_0);
    guarded.killed_after_the_seal();
    let scene = guarded.scene();
    let (path, mut record) = scene.dormouse.records().pop().expect("there is a record");
    record["point"] = json!("returning");
    fs::write(&path, record.to_string()).expect("the record can be written");
    faults::kill(scene.lab.only_qemu());
    scene.lab.wait_for_no_qemu();
    let error = expect_the_same_doubt(&guarded);
    assert!(error["message"].to_string().contains("image discard"), "{error}");
    assert_eq!(files_of_images(scene), ["guest.image"]);
    scene
        .dormouse
        .image("discard", &image(scene), &["--yes"])
        .expect_success();
    let recovered = scene.dormouse.recover(&[]).expect_success().result();
    assert_eq!(recovered["outcome"], "qemu-gone");
    expect_nothing_to_recover(scene);
}

/// QEMU's process is there, and at its monitor is nobody.
#[test]
fn a_qemu_that_does_not_answer_is_left_until_it_does() {
    let guarded = Guarded::start(QemuBuild::V10_0);
    guarded.killed_in_the_middle(&[]);
    let scene = guarded.scene();
    let (socket, aside) = (guarded.foreign.socket(), scene.lab.path("aside.sock"));
    fs::rename(&socket, &aside).expect("the socket can be moved");
    let record = scene.dormouse.records();
    let failures: Vec<Value> = (0..2)
        .map(|_| {
            let outcome = scene.dormouse.recover(&[]);
            assert_ne!(outcome.exit_code(), Some(0));
            assert_eq!(scene.dormouse.records(), record);
            outcome.result()["error"].clone()
        })
        .collect();
    assert_eq!(failures[0], failures[1]);
    assert_eq!(scene.guest.monitor().status(), "postmigrate");
    assert_eq!(files_of_images(scene).len(), 1);
    fs::rename(&aside, &socket).expect("the socket can be moved back");
    guarded.expect_given_back();
}

/// The supervisor has the monitor, so nobody else can. Its next hibernation does it, whatever becomes of that.
#[test]
fn what_a_hibernation_left_is_ended_by_the_next_one_of_the_same_supervisor() {
    let scene = Scene::new(QemuBuild::V10_0);
    let dormouse = &scene.dormouse;
    let _supervisor = scene.run();
    fs::create_dir(scene.lab.path("images")).expect("a folder can be made");
    let before = settings(&scene);
    let cancelled = |scene: &Scene| {
        let mut client = dormouse.start_hibernating_with("guest", &image(scene), &SLOWLY);
        wait_for_middle(&mut client);
        let record = dormouse.records().pop().expect("there is a record");
        faults::interrupt(Pid::from_child(&client));
        dormouse.finish(client).expect_exit(CANCELLED);
        record
    };
    // As of a migration that did not end when it was cancelled.
    let (path, mut record) = cancelled(&scene);
    record["point"] = json!("returning");
    fs::create_dir_all(path.parent().expect("a record is in a folder")).expect("a folder can be made");
    fs::write(&path, record.to_string()).expect("the record can be written");
    let changed = json!({"max-bandwidth": 0});
    scene.guest.monitor().execute("migrate-set-parameters", changed);
    let error = dormouse.recover(&["guest"]).expect_exit(UNREACHABLE).result();
    let message = error["error"]["message"].to_string();
    assert!(
        message.contains("next hibernation ends this one first"),
        "{message}"
    );
    assert!(path.exists());

    cancelled(&scene);
    expect_guest_as_before(&scene, &before);

    // Meanwhile its owner may have paused it, and nobody runs it for that.
    fs::create_dir_all(path.parent().expect("a record is in a folder")).expect("a folder can be made");
    fs::write(&path, record.to_string()).expect("the record can be written");
    scene.guest.monitor().stop();
    let ticks = scene.guest.counters().len();
    dormouse.hibernate("guest", &image(&scene)).expect_success();
    assert!(!path.exists());
    assert_eq!(scene.guest.counters().len(), ticks);
    let inspected = dormouse
        .image("inspect", &image(&scene), &["--json"])
        .expect_success();
    let saved = inspected.result()["manifest"]["guest"]["state_when_saved"].clone();
    assert_eq!(saved, "paused");
}
