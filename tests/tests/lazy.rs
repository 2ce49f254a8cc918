//! A guest that is woken before its memory is there runs at once, misses nothing, and gets all of it behind its back.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use dormouse_tests::{BootSectorGuest, Guest, LoopDevice, QemuBuild, Scene, until};
use serde_json::json;

/// Tests on each version, so that they run beside each other and a failure names its place.
macro_rules! on_every_qemu {
    ($($test:ident: $on_7_2:ident, $on_10_0:ident, $on_11_1:ident;)*) => {
        $(
            #[test]
            fn $on_7_2() {
                $test(QemuBuild::V7_2);
            }

            #[test]
            fn $on_10_0() {
                $test(QemuBuild::V10_0);
            }

            #[test]
            fn $on_11_1() {
                $test(QemuBuild::V11_1);
            }
        )*
    };
}

on_every_qemu! {
    every_byte_comes_from_every_volume_and_form:
        every_byte_comes_on_qemu_7_2, every_byte_comes_on_qemu_10_0, every_byte_comes_on_qemu_11_1;
    every_byte_comes_to_every_backend:
        two_backends_are_fed_on_qemu_7_2, two_backends_are_fed_on_qemu_10_0, two_backends_are_fed_on_qemu_11_1;
    zeros_take_memory_only_where_qemu_needs_them:
        zeros_cost_nothing_on_qemu_7_2, zeros_cost_nothing_on_qemu_10_0, zeros_are_fed_to_qemu_11_1;
    the_guest_goes_on_and_is_saved_directly_again:
        it_goes_on_under_qemu_7_2, it_goes_on_under_qemu_10_0, it_goes_on_under_qemu_11_1;
    a_guest_whose_feeder_is_killed_stands_and_goes_on_with_another:
        a_feeder_is_replaced_under_qemu_7_2, a_feeder_is_replaced_under_qemu_10_0, a_feeder_is_replaced_under_qemu_11_1;
}

/// The guest is paused before it is saved and stays so until after it is woken, so that its whole memory can be
/// compared.
fn every_byte_comes_from_every_volume_and_form(build: QemuBuild) {
    let scene = Scene::new(build);
    let Scene { dormouse, guest, lab } = &scene;
    let key = lab.path("key");
    std::fs::write(&key, [7; 32]).unwrap();
    let key = key.to_str().unwrap();
    let volume = LoopDevice::with_old_data(lab, 160);
    let mut supervisor = scene.run();
    let mut saved_before = None;
    for image in [lab.path("guest.image"), volume.path().to_owned()] {
        for form in [&[][..], &["--compress", "zstd"], &["--key-file", key]] {
            let mut monitor = guest.monitor();
            monitor.stop();
            let before = monitor.memory(guest.ram_bytes(), &lab.path("memory-before"));
            drop(monitor);
            assert!(saved_before.is_none_or(|counter| counter < BootSectorGuest::counter_in(&before)));
            let mut options = vec!["--replace"];
            options.extend(form);
            let hibernating = dormouse.start_hibernating_with("guest", &image, &options);
            let hibernated = dormouse.finish(hibernating).expect_success().result();
            assert_eq!(hibernated["engine"], "direct", "{form:?}");
            supervisor.wait_for_end();
            lab.wait_for_no_qemu();

            let mut options = vec!["--mode", "lazy", "--paused"];
            options.extend(
                form.iter()
                    .filter(|option| !matches!(**option, "--compress" | "zstd")),
            );
            supervisor = dormouse.wake("guest", &image, &options);
            let mut monitor = guest.monitor();
            monitor.wait_for_status("paused");
            // QEMU 11.1 lets nobody look before.
            scene.wait_for_all_fed();
            let after = monitor.memory(guest.ram_bytes(), &lab.path("memory-after"));
            let first_difference = before.iter().zip(&after).position(|(a, b)| a != b);
            assert_eq!(
                (before.len(), first_difference),
                (after.len(), None),
                "sizes and first difference of the memory before and after, {form:?} in {}",
                image.display()
            );
            let ticks = guest.counters().len();
            monitor.cont();
            guest.wait_for_ticks(ticks + 5);
            saved_before = Some(BootSectorGuest::counter_in(&before));
        }
    }
    drop(supervisor);
}

/// A guest whose memory is two NUMA nodes, and a device's beside.
fn every_byte_comes_to_every_backend(build: QemuBuild) {
    let mut scene = Scene::new(build);
    scene.guest.start_with(&[
        "-object",
        "memory-backend-ram,id=n0,size=32M",
        "-numa",
        "node,memdev=n0",
        "-object",
        "memory-backend-memfd,id=n1,size=32M",
        "-numa",
        "node,memdev=n1",
        "-device",
        "VGA",
    ]);
    let Scene { dormouse, guest, lab } = &scene;
    let mut supervisor = scene.run();
    let mut monitor = guest.monitor();
    monitor.stop();
    let before = monitor.memory(guest.ram_bytes(), &lab.path("memory-before"));
    drop(monitor);
    let hibernated = dormouse.hibernate("guest", &scene.image()).expect_success();
    assert_eq!(hibernated.result()["engine"], "direct");
    supervisor.wait_for_end();
    lab.wait_for_no_qemu();
    let _woken = dormouse.wake("guest", &scene.image(), &["--mode", "lazy", "--paused"]);
    scene.wait_for_all_fed();
    let mut monitor = guest.monitor();
    let after = monitor.memory(guest.ram_bytes(), &lab.path("memory-after"));
    assert!(before == after);
    monitor.cont();
    drop(monitor);
    guest.wait_for_more_ticks();
}

/// The guest holds 17 MiB of its 64. Since 10.2 QEMU's main loop could wait for a zero page at the end.
fn zeros_take_memory_only_where_qemu_needs_them(build: QemuBuild) {
    let scene = Scene::new(build);
    let image = scene.hibernated();
    let _woken = scene.dormouse.wake("guest", &image, &["--mode", "lazy"]);
    scene.wait_for_all_fed();
    let doctor = scene
        .dormouse
        .execute(&["doctor", "guest", "--json"])
        .expect_success()
        .result();
    let touched_mib = doctor["memory"]["touched_bytes"].as_u64().unwrap() >> 20;
    if build == QemuBuild::V11_1 {
        assert_eq!(touched_mib, 64);
    } else {
        assert!((17..30).contains(&touched_mib), "{touched_mib}");
    }
    scene.guest.wait_for_more_ticks();
}

/// The guest runs right up to the save, and again from the wake.
fn the_guest_goes_on_and_is_saved_directly_again(build: QemuBuild) {
    let scene = Scene::new(build);
    let image = scene.hibernated();
    let last_printed = scene.guest.last_counter();
    let mut woken = scene.dormouse.wake("guest", &image, &["--mode", "lazy"]);
    assert!(scene.guest.wait_for_more_ticks() > last_printed);
    let feed = scene.wait_for_all_fed();
    assert!(feed["answers"].as_u64().unwrap() > 0, "{feed}");
    until("the image to go", || (!image.exists()).then_some(()));
    let hibernated = scene.dormouse.hibernate("guest", &image).expect_success();
    assert_eq!(hibernated.result()["engine"], "direct");
    woken.wait_for_end();
    scene.lab.wait_for_no_qemu();
    let last_printed = scene.guest.last_counter();
    let mut again = scene
        .dormouse
        .wake("guest", &image, &["--mode", "lazy", "--keep-image"]);
    assert!(scene.guest.wait_for_more_ticks() > last_printed);
    scene.wait_for_all_fed();
    until("the image to be used up", || {
        (scene.image_state() == "consumed").then_some(())
    });
    again.terminate();
    scene.lab.wait_for_no_qemu();
    assert!(scene.guest.counter_on_disk() >= scene.guest.last_counter());
}

/// At several points of the fill: right after the wake, and when some of it is there. The second feeder is killed too.
fn a_guest_whose_feeder_is_killed_stands_and_goes_on_with_another(build: QemuBuild) {
    for (share, form) in [(0.0, &[][..]), (0.1, &["--compress", "zstd"])] {
        let scene = Scene::new(build);
        let Scene { dormouse, guest, lab } = &scene;
        let image = scene.image();
        let supervisor = scene.run();
        let hibernating = dormouse.start_hibernating_with("guest", &image, form);
        dormouse.finish(hibernating).expect_success();
        drop(supervisor);
        lab.wait_for_no_qemu();
        let mut woken = dormouse.wake("guest", &image, &["--mode", "lazy", "--rate-limit", "2M"]);
        scene.wait_for_fed_share(share);
        woken.kill();
        assert_eq!(scene.image_state(), "waking");

        let mut slowly = dormouse.start_recovering(&["guest", "--rate-limit", "1M"]);
        until("another feeder to begin", || {
            let mut monitor = guest.monitor();
            let migration = monitor.execute("query-migrate", json!({}));
            // QEMU 7.2 does not survive the loss of a feeder that it is just taking.
            let begun = match build {
                QemuBuild::V7_2 => migration["status"] == "postcopy-active",
                _ => migration["status"] != "postcopy-paused",
            };
            begun.then_some(())
        });
        slowly.kill().unwrap();
        dormouse.finish(slowly);
        let recovered = dormouse.execute(&["recover", "guest", "--json"]).expect_success();
        assert_eq!(recovered.result()["result"], "fed", "{recovered:#?}");
        assert!(!image.exists());
        guest.wait_for_more_ticks();
        let mut monitor = guest.monitor();
        monitor.stop();
        let memory = monitor.memory(guest.ram_bytes(), &lab.path("memory"));
        assert_eq!(BootSectorGuest::pattern_faults(&memory), Vec::<usize>::new());
        monitor.cont();
        drop(monitor);
        let nothing = dormouse.execute(&["recover", "--json"]).expect_success();
        assert_eq!(nothing.result()["operations"], 0);
    }
}
