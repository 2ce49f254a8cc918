//! Whatever way RAM takes into the image, the guest comes back with every byte; and a guest that somebody else started
//! is saved the way that its memory allows.

use std::fs;

use dormouse_tests::{
    Foreign, Guest, QemuBuild, Scene,
    faults::{self, Hanging, SmallVolume},
    until,
};
use serde_json::{Value, json};

const REFUSED: i32 = 3;
const UNREACHABLE: i32 = 4;
const CANCELLED: i32 = 6;

/// Memory in a memfd, which QEMU 10.0 can hand over, and all else that it must be able to hand over.
const MEMFD_AND_AUX: [&str; 4] = [
    "-object",
    "memory-backend-memfd,id=m0,size=64M,share=on",
    "-machine",
    "memory-backend=m0,aux-ram-share=on",
];

const MEMFD: [&str; 4] = [
    "-object",
    "memory-backend-memfd,id=m0,size=64M",
    "-machine",
    "memory-backend=m0",
];

/// The error object of a refusal after which the guest runs on, set as it was.
fn expect_refusal(foreign: &Foreign, options: &[&str]) -> String {
    let before = foreign.settings();
    let outcome = foreign.hibernate(options).expect_exit(REFUSED);
    let error = outcome.result()["error"].clone();
    assert_eq!(error["guest"], "running", "{error}");
    foreign.scene.guest.wait_for_more_ticks();
    assert_eq!(foreign.settings(), before);
    error["message"].to_string()
}

#[test]
fn memory_in_a_memfd_is_handed_over_by_qemu_10_0() {
    memory_in_a_memfd_is_handed_over(QemuBuild::V10_0);
}

#[test]
fn memory_in_a_memfd_is_handed_over_by_qemu_11_1() {
    memory_in_a_memfd_is_handed_over(QemuBuild::V11_1);
}

fn memory_in_a_memfd_is_handed_over(build: QemuBuild) {
    let foreign = Foreign::start(build, &MEMFD_AND_AUX);
    let (hibernated, _woken) = foreign.keeps_every_byte(&[], "eager");
    assert_eq!(hibernated["engine"], "direct-cpr", "{hibernated:#}");
    assert!(
        hibernated["passed_over"].to_string().contains("8.1"),
        "{hibernated:#}"
    );
    // What was in a memfd is in a shared file now, and is left out by QEMU.
    let again = foreign.scene.lab.path("images/again.image");
    let hibernated = foreign.scene.dormouse.hibernate("guest", &again).expect_success();
    assert_eq!(hibernated.result()["engine"], "direct");
}

#[test]
fn memory_in_a_memfd_is_read_beside_qemu_7_2() {
    let foreign = Foreign::start(QemuBuild::V7_2, &MEMFD);
    let (hibernated, _woken) = foreign.keeps_every_byte(&[], "eager");
    assert_eq!(hibernated["engine"], "direct", "{hibernated:#}");
}

#[test]
fn a_running_guest_is_handed_over_and_counts_on() {
    for build in [QemuBuild::V10_0, QemuBuild::V11_1] {
        let foreign = Foreign::start(build, &MEMFD_AND_AUX);
        foreign.hibernate(&[]).expect_success();
        foreign.scene.lab.wait_for_no_qemu();
        let printed = foreign.scene.guest.last_counter();
        let _woken = foreign.scene.dormouse.wake("guest", &foreign.image(), &[]);
        assert!(foreign.scene.guest.wait_for_more_ticks() > printed);
    }
}

#[test]
fn all_memory_of_a_machine_with_a_dimm_and_video_is_handed_over() {
    for build in [QemuBuild::V10_0, QemuBuild::V11_1] {
        let foreign = Foreign::start(
            build,
            &[
                "-m",
                "64,slots=2,maxmem=1G",
                "-vga",
                "std",
                "-object",
                "memory-backend-ram,id=m0,size=64M,share=on",
                "-object",
                "memory-backend-memfd,id=dimm,size=64M,share=on",
                "-device",
                "pc-dimm,memdev=dimm",
                "-machine",
                "memory-backend=m0,aux-ram-share=on",
            ],
        );
        let (hibernated, _woken) = foreign.keeps_every_byte(&[], "eager");
        assert_eq!(hibernated["engine"], "direct-cpr", "{hibernated:#}");
    }
}

#[test]
fn two_nodes_of_one_size_keep_their_own_memory() {
    for build in [QemuBuild::V10_0, QemuBuild::V11_1] {
        let foreign = Foreign::start(
            build,
            &[
                "-object",
                "memory-backend-memfd,id=n0,size=32M",
                "-object",
                "memory-backend-memfd,id=n1,size=32M",
                "-numa",
                "node,memdev=n0",
                "-numa",
                "node,memdev=n1",
                "-machine",
                "aux-ram-share=on",
            ],
        );
        foreign.keeps_every_byte(&["--engine", "direct"], "eager");
    }
}

#[test]
fn an_engine_that_cannot_be_is_refused_with_its_reason_and_what_would_help() {
    for (build, memory, words) in [
        (
            QemuBuild::V7_2,
            &[][..],
            &["private to QEMU", "dormouse run", "came with QEMU 10.0"][..],
        ),
        (
            QemuBuild::V10_0,
            &MEMFD,
            &["since QEMU 8.1", "without aux-ram-share=on"],
        ),
        (
            QemuBuild::V11_1,
            &["-machine", "aux-ram-share=on"],
            &["private to QEMU"],
        ),
    ] {
        let foreign = Foreign::start(build, memory);
        let message = expect_refusal(&foreign, &["--engine", "direct"]);
        for word in words {
            assert!(message.contains(word), "{word:?} is not in {message}");
        }
    }
}

/// As much memory as it takes to meet a middle, handed over.
const LARGE_MEMFD_AND_AUX: [&str; 4] = [
    "-object",
    "memory-backend-memfd,id=m0,size=1200M",
    "-machine",
    "memory-backend=m0,aux-ram-share=on",
];

#[test]
fn a_guest_whose_memory_was_handed_over_is_given_back_on_a_ctrl_c() {
    for build in [QemuBuild::V10_0, QemuBuild::V11_1] {
        let foreign = Foreign::start_with_ram(build, 1200, &LARGE_MEMFD_AND_AUX);
        let settings = foreign.settings();
        let (code, error) = foreign.disturbed(&[], |_, client| faults::interrupt(client));
        assert_eq!(
            (code, &error["guest"]),
            (Some(CANCELLED), &json!("running")),
            "{error}"
        );
        foreign.scene.guest.wait_for_more_ticks();
        foreign.expect_no_image();
        assert_eq!(foreign.settings(), settings);
        // And nothing of it stands in the way of the next try.
        let hibernated = foreign.hibernate(&[]).expect_success().result();
        assert_eq!(hibernated["engine"], "direct-cpr");
    }
}

#[test]
fn a_guest_that_somebody_runs_while_its_handed_over_memory_is_written_has_no_image() {
    let foreign = Foreign::start_with_ram(QemuBuild::V10_0, 1200, &LARGE_MEMFD_AND_AUX);
    let settings = foreign.settings();
    let (code, error) = foreign.disturbed(&[], |foreign, _| foreign.scene.guest.monitor().cont());
    assert_eq!(
        (code, &error["guest"]),
        (Some(REFUSED), &json!("running")),
        "{error}"
    );
    foreign.scene.guest.wait_for_more_ticks();
    foreign.expect_no_image();
    assert_eq!(foreign.settings(), settings);
}

#[test]
fn a_qemu_that_is_killed_while_its_handed_over_memory_is_written_leaves_no_image() {
    let foreign = Foreign::start_with_ram(QemuBuild::V11_1, 1200, &LARGE_MEMFD_AND_AUX);
    let (code, error) = foreign.disturbed(&[], |foreign, _| {
        faults::kill(foreign.scene.lab.only_qemu());
    });
    assert_eq!(code, Some(UNREACHABLE), "{error}");
    foreign.expect_no_image();
}

#[test]
fn private_memory_comes_by_a_stream_from_qemu_7_2() {
    private_memory_comes_by_a_stream(QemuBuild::V7_2);
}

#[test]
fn private_memory_comes_by_a_stream_from_qemu_10_0() {
    private_memory_comes_by_a_stream(QemuBuild::V10_0);
}

#[test]
fn private_memory_comes_by_a_stream_from_qemu_11_1() {
    private_memory_comes_by_a_stream(QemuBuild::V11_1);
}

fn private_memory_comes_by_a_stream(build: QemuBuild) {
    let mode = if build.maps_images() { "map" } else { "eager" };
    for (options, channels) in [
        (&[][..], 4),
        (&["--channels", "0"], 0),
        (&["--engine", "stream", "--channels", "5"], 5),
    ] {
        let foreign = Foreign::start(build, &["-vga", "std"]);
        let (hibernated, _woken) = foreign.keeps_every_byte(options, mode);
        assert_eq!(
            (&hibernated["engine"], &hibernated["channels"]),
            (&json!("stream"), &json!(channels)),
            "{hibernated:#}"
        );
    }
}

#[test]
fn a_guest_that_was_woken_by_map_sleeps_again_and_again() {
    for build in [QemuBuild::V10_0, QemuBuild::V11_1] {
        let foreign = Foreign::start(build, &[]);
        let Scene { dormouse, lab, .. } = &foreign.scene;
        let (_, mut woken) = foreign.keeps_every_byte(&[], "map");
        for _ in 0..2 {
            let before = foreign.memory("before");
            // The guest still lives on the image that it was woken from.
            let next = lab.path("images/next.image");
            let hibernated = dormouse.hibernate("guest", &next).expect_success();
            assert_eq!(hibernated.result()["engine"], "stream");
            woken.wait_for_end();
            lab.wait_for_no_qemu();
            fs::rename(&next, foreign.image()).unwrap();
            woken = foreign.wakes_with(&before, "map");
        }
    }
}

#[test]
fn all_memory_of_a_machine_with_nodes_and_a_dimm_comes_by_a_stream() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let foreign = Foreign::start(
            build,
            &[
                "-m",
                "64,slots=2,maxmem=1G",
                "-object",
                "memory-backend-ram,id=n0,size=32M",
                "-object",
                "memory-backend-ram,id=n1,size=32M",
                "-numa",
                "node,memdev=n0",
                "-numa",
                "node,memdev=n1",
                "-object",
                "memory-backend-ram,id=dimm,size=64M",
                "-device",
                "pc-dimm,memdev=dimm",
            ],
        );
        let (hibernated, _woken) = foreign.keeps_every_byte(&[], "eager");
        assert_eq!(hibernated["engine"], "stream", "{hibernated:#}");
    }
}

/// As much memory as it takes to meet a middle, in a file that can be filled.
const LARGE_MEMFD: [&str; 4] = [
    "-object",
    "memory-backend-memfd,id=m0,size=1200M",
    "-machine",
    "memory-backend=m0",
];

#[test]
fn a_guest_whose_memory_is_being_sent_is_given_back_on_a_ctrl_c_by_qemu_7_2() {
    a_guest_whose_memory_is_being_sent_is_given_back_on_a_ctrl_c(QemuBuild::V7_2);
}

#[test]
fn a_guest_whose_memory_is_being_sent_is_given_back_on_a_ctrl_c_by_qemu_10_0() {
    a_guest_whose_memory_is_being_sent_is_given_back_on_a_ctrl_c(QemuBuild::V10_0);
}

#[test]
fn a_guest_whose_memory_is_being_sent_is_given_back_on_a_ctrl_c_by_qemu_11_1() {
    a_guest_whose_memory_is_being_sent_is_given_back_on_a_ctrl_c(QemuBuild::V11_1);
}

fn a_guest_whose_memory_is_being_sent_is_given_back_on_a_ctrl_c(build: QemuBuild) {
    for channels in ["2", "0"] {
        let foreign = Foreign::start_with_ram(build, 1200, &LARGE_MEMFD);
        let settings = foreign.settings();
        let options = ["--engine", "stream", "--channels", channels];
        let (code, error) = foreign.disturbed(&options, |_, client| faults::interrupt(client));
        assert_eq!(
            (code, &error["guest"]),
            (Some(CANCELLED), &json!("running")),
            "{error}"
        );
        foreign.scene.guest.wait_for_more_ticks();
        foreign.expect_no_image();
        assert_eq!(foreign.settings(), settings);
        foreign.hibernate(&options).expect_success();
        foreign
            .scene
            .dormouse
            .image("verify", &foreign.image(), &[])
            .expect_success();
    }
}

#[test]
fn a_guest_that_somebody_runs_while_its_memory_is_being_sent_has_no_image() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let foreign = Foreign::start_with_ram(build, 1200, &LARGE_MEMFD);
        let settings = foreign.settings();
        let (code, error) = foreign.disturbed(&["--engine", "stream"], |foreign, _| {
            foreign.scene.guest.monitor().cont();
        });
        assert_eq!(
            (code, &error["guest"]),
            (Some(REFUSED), &json!("running")),
            "{error}"
        );
        foreign.scene.guest.wait_for_more_ticks();
        foreign.expect_no_image();
        assert_eq!(foreign.settings(), settings);
    }
}

#[test]
fn a_qemu_that_is_killed_while_it_sends_its_memory_leaves_no_image() {
    for build in [QemuBuild::V7_2, QemuBuild::V11_1] {
        let foreign = Foreign::start_with_ram(build, 1200, &LARGE_MEMFD);
        let (code, error) = foreign.disturbed(&["--engine", "stream"], |foreign, _| {
            faults::kill(foreign.scene.lab.only_qemu());
        });
        assert_eq!(code, Some(UNREACHABLE), "{error}");
        foreign.expect_no_image();
    }
}

/// QEMU connects, opens its channels and begins to send within some milliseconds, each of which is a bad one for a
/// cancel in one version or another.
#[test]
fn a_cancel_may_come_while_qemu_is_still_connecting() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let foreign = Foreign::start_with_ram(build, 1200, &LARGE_MEMFD);
        let settings = foreign.settings();
        faults::fill_memory(foreign.scene.lab.only_qemu(), 64, 1024);
        let options = ["--engine", "stream"];
        for phase in ["Pausing", "SavingDevices"].repeat(4) {
            // A short phase may be over before it is told.
            let is_time = |line: &Value| line["phase"] == phase || line["phase"] == "SavingMemory";
            let cancel = |_: &Foreign, client| faults::interrupt(client);
            let (code, error) = foreign.disturbed_when(&foreign.image(), &options, is_time, cancel);
            assert_eq!(
                (code, &error["guest"]),
                (Some(CANCELLED), &json!("running")),
                "{error}"
            );
            assert_eq!(foreign.settings(), settings);
        }
        foreign.scene.guest.wait_for_more_ticks();
        foreign.expect_no_image();
        foreign.hibernate(&options).expect_success();
    }
}

#[test]
fn a_guest_whose_memory_is_being_sent_is_given_back_while_its_volume_hangs() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let foreign = Foreign::start_with_ram(build, 1200, &LARGE_MEMFD);
        faults::fill_memory(foreign.scene.lab.only_qemu(), 64, 1024);
        let volume = SmallVolume::new(&foreign.scene.lab, 2048);
        let is_middle = |line: &Value| line["phase"] == "SavingMemory" && line["bytes"] != line["total"];
        let (code, error) = foreign.disturbed_when(
            &volume.path("guest.image"),
            &["--engine", "stream"],
            is_middle,
            |foreign, client| {
                let _hanging = Hanging::volume(&volume);
                faults::interrupt(client);
                foreign.scene.guest.wait_for_more_ticks();
            },
        );
        assert_eq!(
            (code, &error["guest"]),
            (Some(CANCELLED), &json!("running")),
            "{error}"
        );
        until("the partial image to be gone", || {
            volume.content().is_empty().then_some(())
        });
        // The volume is in the lab's folder, which goes last.
        drop(volume);
    }
}
