//! A hibernation is cancelled at every tenth of its way. Each time the guest runs on as if nothing had been, and it is told
//! how long it took to be given back.

use std::{
    io::{BufRead, BufReader},
    process::Child,
};

use dormouse_tests::{
    Foreign, Guest, QemuBuild, Scene,
    faults::{self, Hanging, SmallVolume},
};
use rustix::process::Pid;
use serde_json::Value;

const CANCELLED: i32 = 6;

/// So slow that each tenth of the guest's 64 MiB can be met.
const SLOWLY: [&str; 2] = ["--rate-limit", "32M"];

#[test]
fn a_direct_save_is_cancelled_at_every_tenth_on_qemu_7_2() {
    a_save_is_cancelled_at_every_tenth(QemuBuild::V7_2, "direct");
}

#[test]
fn a_direct_save_is_cancelled_at_every_tenth_on_qemu_10_0() {
    a_save_is_cancelled_at_every_tenth(QemuBuild::V10_0, "direct");
}

#[test]
fn a_direct_save_is_cancelled_at_every_tenth_on_qemu_11_1() {
    a_save_is_cancelled_at_every_tenth(QemuBuild::V11_1, "direct");
}

#[test]
fn a_stream_is_cancelled_at_every_tenth_on_qemu_7_2() {
    a_save_is_cancelled_at_every_tenth(QemuBuild::V7_2, "stream");
}

#[test]
fn a_stream_is_cancelled_at_every_tenth_on_qemu_10_0() {
    a_save_is_cancelled_at_every_tenth(QemuBuild::V10_0, "stream");
}

#[test]
fn a_stream_is_cancelled_at_every_tenth_on_qemu_11_1() {
    a_save_is_cancelled_at_every_tenth(QemuBuild::V11_1, "stream");
}

/// By Ctrl-C at a command that has the monitor itself.
fn a_save_is_cancelled_at_every_tenth(build: QemuBuild, engine: &str) {
    let foreign = guest_in_a_file(build);
    let before = foreign.settings();
    let options = [&["--engine", engine], &SLOWLY[..]].concat();
    for percent in (0..100).step_by(10) {
        let dormouse = &foreign.scene.dormouse;
        let hibernating =
            dormouse.start_hibernating_by_monitor(&foreign.socket(), &foreign.image(), &options);
        let error = cancelled_at(percent, hibernating, &foreign.scene);
        println!(
            "QEMU {build}, {engine}, {percent} %: {} ms",
            error["given_back_ms"]
        );
        foreign.scene.guest.wait_for_more_ticks();
        foreign.expect_no_image();
        assert_eq!(foreign.settings(), before, "cancelled at {percent} %");
    }
    // And nothing of it is in the way of the last one.
    foreign.hibernate(&["--engine", engine]).expect_success();
    foreign
        .scene
        .dormouse
        .image("verify", &foreign.image(), &[])
        .expect_success();
}

#[test]
fn a_save_by_a_supervisor_is_cancelled_at_every_tenth_over_its_api() {
    let scene = Scene::new(QemuBuild::V10_0);
    let _supervisor = scene.run();
    fill(&scene);
    for percent in (0..100).step_by(10) {
        let hibernating = scene
            .dormouse
            .start_hibernating_with("guest", &scene.image(), &SLOWLY);
        cancelled_at(percent, hibernating, &scene);
        scene.guest.wait_for_more_ticks();
        assert!(!scene.image().exists());
        let told = scene.dormouse.status("guest").expect_success().result();
        let problem = &told["operation"]["error"];
        assert_eq!(problem["code"], "cancelled", "{told}");
        assert!(problem["given_back_ms"].is_f64(), "{told}");
    }
}

/// The volume answers nothing at all.
#[test]
fn a_save_onto_a_volume_that_hangs_is_cancelled_and_tells_how_long_that_took() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        for engine in ["direct", "stream"] {
            let foreign = guest_in_a_file(build);
            let volume = SmallVolume::new(&foreign.scene.lab, 256);
            let options = [&["--engine", engine], &SLOWLY[..]].concat();
            let hibernating = foreign.scene.dormouse.start_hibernating_by_monitor(
                &foreign.socket(),
                &volume.path("guest.image"),
                &options,
            );
            let client = Pid::from_child(&hibernating);
            let (hibernating, lines) = met_at(30, hibernating);
            let hanging = Hanging::volume(&volume);
            faults::interrupt(client);
            foreign.scene.guest.wait_for_more_ticks();
            drop(hanging);
            let error = expect_cancelled(hibernating, lines, &foreign.scene);
            println!(
                "QEMU {build}, {engine}, a hanging volume: {} ms",
                error["given_back_ms"]
            );
            assert_eq!(volume.content(), Vec::<String>::new());
        }
    }
}

#[test]
fn a_person_is_told_how_long_the_guest_took_to_be_given_back() {
    let scene = Scene::new(QemuBuild::V10_0);
    let _supervisor = scene.run();
    let mut arguments = vec!["hibernate", "guest", "--to"];
    let image = scene.image();
    arguments.push(image.to_str().expect("a path of letters"));
    arguments.extend(SLOWLY);
    let hibernating = scene.dormouse.spawn(&arguments);
    let mut monitor = scene.guest.monitor();
    monitor.wait_for_status("postmigrate");
    faults::interrupt(Pid::from_child(&hibernating));
    let told = scene.dormouse.finish(hibernating).expect_exit(CANCELLED);
    assert!(
        told.stderr
            .contains("cancelled on request (guest: running, given back within "),
        "{told:#?}"
    );
}

/// A guest whose memory is to be had from outside, and is not zero.
fn guest_in_a_file(build: QemuBuild) -> Foreign {
    let ram = "memory-backend-file,id=pc.ram,size=64M,share=on,mem-path=/dev/shm";
    let foreign = Foreign::start(build, &["-object", ram, "-machine", "memory-backend=pc.ram"]);
    fill(&foreign.scene);
    foreign
}

fn fill(scene: &Scene) {
    faults::fill_memory(scene.lab.only_qemu(), 19, 44);
}

type Lines = Box<dyn Iterator<Item = String>>;

/// Returns when so much of the memory is dealt with, and not all of it.
fn met_at(percent: u64, mut hibernating: Child) -> (Child, Lines) {
    let output = hibernating.stdout.take().expect("its output is ours");
    let mut lines = BufReader::new(output).lines().map_while(Result::ok);
    let met = lines.any(|line| {
        let line: Value = serde_json::from_str(&line).unwrap_or_default();
        let [done, total] = ["bytes", "total"].map(|name| line[name].as_u64().unwrap_or_default());
        line["phase"] == "SavingMemory" && done < total && done * 100 >= total * percent
    });
    assert!(met, "it was over before {percent} % of it were seen");
    (hibernating, Box::new(lines))
}

/// Cancels it there; returns the error.
fn cancelled_at(percent: u64, hibernating: Child, scene: &Scene) -> Value {
    let (hibernating, lines) = met_at(percent, hibernating);
    faults::interrupt(Pid::from_child(&hibernating));
    expect_cancelled(hibernating, lines, scene)
}

fn expect_cancelled(hibernating: Child, lines: Lines, scene: &Scene) -> Value {
    let last = lines.last().unwrap_or_default();
    let outcome = scene.dormouse.finish(hibernating).expect_exit(CANCELLED);
    let last: Value = serde_json::from_str(&last).unwrap_or_default();
    let error = last["error"].clone();
    assert_eq!(error["guest"], "running", "{error} {outcome:#?}");
    assert!(error["given_back_ms"].is_f64(), "{error}");
    error
}
