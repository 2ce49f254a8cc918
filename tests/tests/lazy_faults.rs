//! What goes wrong while a guest is being fed from its image is told, the guest never goes on without its memory, and the
//! image is kept as long as it could be of use.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use dormouse_tests::{BootSectorGuest, Guest, QemuBuild, Scene, Supervisor, faults, until};
use serde_json::{Value, json};

const REFUSED: i32 = 3;
const UNREACHABLE: i32 = 4;
const IMAGE_INVALID: i32 = 8;

const BUILDS: [QemuBuild; 3] = [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1];

/// Both copies of what says in which state the image is.
const STATE_BYTES: usize = 8192;

/// So slow that there is a middle: the guest holds 17 MiB.
const SLOWLY: [&str; 4] = ["--mode", "lazy", "--rate-limit", "2M"];

/// A guest that has a part of its memory.
fn half_fed(build: QemuBuild, options: &[&str]) -> (Scene, PathBuf, Supervisor) {
    let scene = Scene::new(build);
    let image = scene.hibernated();
    let woken = scene.dormouse.wake("guest", &image, &[&SLOWLY, options].concat());
    scene.wait_for_fed_share(0.1);
    (scene, image, woken)
}

fn described(scene: &Scene) -> String {
    scene
        .dormouse
        .execute(&["status", "guest"])
        .expect_success()
        .stdout
}

/// The image is kept, nobody is woken from it, and it can be given up.
fn expect_kept(scene: &Scene, image: &Path) {
    scene.lab.wait_for_no_qemu();
    assert_eq!(scene.image_state(), "waking");
    let refused = scene
        .dormouse
        .try_wake("guest", image, &[])
        .expect_exit(IMAGE_INVALID);
    assert!(refused.stderr.contains("exported"), "{refused:#?}");
    let nothing = scene.dormouse.recover(&[]).expect_success().result();
    assert_eq!(nothing, json!({"operations": 0}));
    scene
        .dormouse
        .image("discard", image, &["--force", "--yes"])
        .expect_success();
}

#[test]
fn a_guest_stands_where_its_image_is_bad_and_has_all_else() {
    for build in BUILDS {
        let scene = Scene::new(build);
        let image = scene.hibernated();
        faults::flip(&image, faults::find(&image, &BootSectorGuest::landmark()));
        let mut woken = scene.dormouse.wake("guest", &image, &["--mode", "lazy"]);
        let damaged = until("all but one chunk to be there", || {
            let feed = scene.feed()?;
            let missing = feed["total_bytes"].as_u64()? - feed["fed_bytes"].as_u64()?;
            (missing == 1 << 20).then_some(feed)
        });
        assert_eq!(damaged["state"], "damaged");
        assert_eq!(damaged["remaining_ms"], Value::Null);
        let [chunk] = &damaged["damaged"].as_array().unwrap()[..] else {
            panic!("one chunk: {damaged}")
        };
        assert_eq!(
            (&chunk["block"], &chunk["length"]),
            (&json!("pc.ram"), &json!(1 << 20))
        );
        for told in [
            chunk["why"].to_string(),
            damaged["error"].to_string(),
            described(&scene),
            woken.log(),
        ] {
            assert!(told.contains("CRC-32"), "{told}");
        }
        // It came as far as the bad page, and reads nothing that nobody wrote.
        let stands_at = stands_at(&scene);
        for saved in [
            scene.dormouse.hibernate("guest", &scene.lab.path("other.image")),
            scene
                .dormouse
                .snapshot("guest", &scene.lab.path("other.image"), &[]),
        ] {
            let saved = saved.expect_exit(REFUSED);
            assert!(saved.stdout.contains("CRC-32"), "{saved:#?}");
        }
        // QEMU cannot end by itself while its CPU stands.
        woken.terminate();
        scene.lab.wait_for_no_qemu();
        assert_eq!(scene.guest.counters().len(), stands_at);
        assert!(described(&scene).contains("is kept"), "{}", described(&scene));
        expect_kept(&scene, &image);
    }
}

/// Twenty ticks would be over in a fifth of a second.
fn stands_at(scene: &Scene) -> usize {
    let mut last = (usize::MAX, 0);
    until("the guest to stand", || {
        let ticks = scene.guest.counters().len();
        last = if ticks == last.0 {
            (ticks, last.1 + 1)
        } else {
            (ticks, 0)
        };
        (last.1 == 100).then_some(ticks)
    })
}

#[test]
fn storage_that_fails_for_a_while_is_waited_for_and_the_guest_gets_all_of_its_memory() {
    for build in BUILDS {
        let scene = Scene::new(build);
        let image = paused_and_hibernated(&scene);
        let whole = fs::read(&image).unwrap();
        let options = [&SLOWLY[..], &["--keep-image"]].concat();
        let _woken = scene.dormouse.wake("guest", &image, &options);
        scene.wait_for_fed_share(0.1);
        let file = File::options().write(true).open(&image).unwrap();
        file.set_len(STATE_BYTES as u64).unwrap();
        let failing = until("storage to fail", || {
            scene.feed().filter(|feed| feed["state"] == "damaged")
        });
        for chunk in failing["damaged"].as_array().unwrap() {
            assert_eq!(chunk["may_come"], true, "{failing}");
        }
        assert_eq!(failing["error"]["code"], "storage-io", "{failing}");
        let saved = scene.dormouse.hibernate("guest", &scene.lab.path("other.image"));
        let saved = saved.expect_exit(REFUSED);
        assert!(saved.stdout.contains("asked again"), "{saved:#?}");
        // It needs what is not there.
        scene.guest.monitor().cont();
        let stands_at = stands_at(&scene);
        file.write_all_at(&whole[STATE_BYTES..], STATE_BYTES as u64)
            .unwrap();
        let complete = until("all memory to be fed", || {
            scene.feed().filter(|feed| feed["state"] == "complete")
        });
        assert_eq!(complete["damaged"], json!([]), "{complete}");
        scene.guest.wait_for_more_ticks();
        assert!(scene.guest.counters().len() > stands_at);
        expect_whole_memory(&scene);
        until("the image to be used up", || {
            (scene.image_state() == "consumed").then_some(())
        });
    }
}

/// It asks for nothing until it is told to run.
fn paused_and_hibernated(scene: &Scene) -> PathBuf {
    let mut supervisor = scene.run();
    scene.guest.monitor().stop();
    let image = scene.image();
    scene.dormouse.hibernate("guest", &image).expect_success();
    supervisor.wait_for_end();
    image
}

fn expect_whole_memory(scene: &Scene) {
    let Scene { guest, lab, .. } = scene;
    let mut monitor = guest.monitor();
    monitor.stop();
    let memory = monitor.memory(guest.ram_bytes(), &lab.path("memory"));
    assert_eq!(BootSectorGuest::pattern_faults(&memory), Vec::<usize>::new());
    monitor.cont();
}

#[test]
fn a_recovery_ends_with_a_bad_chunk_and_goes_on_once_that_is_mended() {
    for build in BUILDS {
        let scene = Scene::new(build);
        let image = scene.hibernated();
        let landmark = faults::find(&image, &BootSectorGuest::landmark());
        faults::flip(&image, landmark);
        let mut woken = scene
            .dormouse
            .wake("guest", &image, &["--mode", "lazy", "--keep-image"]);
        until("the bad chunk to be seen", || {
            scene.feed().filter(|feed| feed["state"] == "damaged")
        });
        woken.kill();
        for arguments in [&[][..], &["guest"]] {
            let told = scene
                .dormouse
                .recover(arguments)
                .expect_exit(IMAGE_INVALID)
                .stdout;
            assert!(told.contains("CRC-32") && told.contains("is kept"), "{told}");
            assert_eq!(scene.image_state(), "waking");
        }
        // QEMU waits with all that it has.
        let stands_at = stands_at(&scene);
        faults::flip(&image, landmark);
        let recovered = scene.dormouse.recover(&[]).expect_success().result();
        assert_eq!(recovered["result"], "fed", "{recovered}");
        scene.guest.wait_for_more_ticks();
        assert!(scene.guest.counters().len() > stands_at);
        expect_whole_memory(&scene);
        assert_eq!(scene.image_state(), "consumed");
    }
}

#[test]
fn a_qemu_that_is_killed_while_its_guest_is_fed_leaves_the_image() {
    for build in BUILDS {
        let (scene, image, mut woken) = half_fed(build, &[]);
        faults::kill(scene.lab.only_qemu());
        assert_eq!(woken.wait_for_end().code(), Some(137));
        let status = scene.dormouse.status("guest").expect_success().result();
        assert_eq!(status["ended"], "crashed");
        assert_eq!(status["unfed"]["image"], json!(image), "{status}");
        assert!(described(&scene).contains("is kept"), "{}", described(&scene));
        expect_kept(&scene, &image);
    }
}

#[test]
fn a_signal_ends_a_guest_that_is_being_fed_and_leaves_the_image() {
    for build in BUILDS {
        let (scene, image, mut woken) = half_fed(build, &[]);
        assert_eq!(woken.terminate().code(), Some(0));
        let status = scene.dormouse.status("guest").expect_success().result();
        assert_eq!(
            (&status["ended"], &status["reason"]),
            (&json!("stopped"), &json!("host-signal"))
        );
        expect_kept(&scene, &image);
    }
}

#[test]
fn a_guest_that_shuts_itself_down_while_it_is_fed_uses_its_image_up() {
    for (build, options) in BUILDS.iter().zip([&[][..], &["--keep-image"], &[]]) {
        let (scene, image, mut woken) = half_fed(*build, options);
        // It has no handler for that: a triple fault, and with -no-reboot the end.
        scene.guest.monitor().execute("inject-nmi", json!({}));
        assert_eq!(woken.wait_for_end().code(), Some(0));
        match options {
            [] => assert!(!image.exists()),
            _ => assert_eq!(scene.image_state(), "consumed"),
        }
        let status = scene.dormouse.status("guest").expect_success().result();
        assert_eq!(
            (&status["ended"], &status["unfed"]),
            (&json!("stopped"), &Value::Null)
        );
    }
}

#[test]
fn memory_that_is_still_coming_is_not_saved_and_it_is_told_for_how_long() {
    for build in BUILDS {
        let (scene, _, mut woken) = half_fed(build, &[]);
        let other = scene.lab.path("other.image");
        for saved in [
            scene.dormouse.hibernate("guest", &other),
            scene.dormouse.snapshot("guest", &other, &[]),
            scene.dormouse.snapshot("guest", &other, &["--live"]),
        ] {
            let told = saved.expect_exit(REFUSED).stdout;
            assert!(
                told.contains(" % of 64.5 MiB done); try again in about "),
                "{told}"
            );
        }
        let told = described(&scene);
        assert!(
            told.contains("its memory comes while it runs: ") && told.contains(", the rest in about "),
            "{told}"
        );
        // Not past the supervisor either, and not when that is gone.
        let saved = |words: &str| {
            let saved = scene
                .dormouse
                .hibernate_by_monitor(scene.guest.monitor_socket(), &other);
            let saved = saved.expect_exit(REFUSED);
            assert!(saved.stdout.contains(words), "{saved:#?}");
        };
        saved("its memory is still coming");
        woken.kill();
        let stopped = scene
            .dormouse
            .execute(&["status", "guest"])
            .expect_exit(UNREACHABLE);
        assert!(
            stopped
                .stderr
                .contains("`dormouse recover guest` feeds it the rest"),
            "{stopped:#?}"
        );
        let all = scene.dormouse.execute(&["status"]).expect_success();
        assert!(
            all.stdout.contains("`dormouse recover guest` feeds it the rest"),
            "{all:#?}"
        );
        let saved_by_name = scene.dormouse.hibernate("guest", &other).expect_exit(UNREACHABLE);
        assert!(
            saved_by_name.stdout.contains("`dormouse recover guest`"),
            "{saved_by_name:#?}"
        );
        until("QEMU to notice", || {
            let migration = scene.guest.monitor().execute("query-migrate", json!({}));
            (migration["status"] == "postcopy-paused").then_some(())
        });
        saved("`dormouse recover`");
        let recovered = scene.dormouse.recover(&["--rate-limit", "5M"]).expect_success();
        let told = recovered.objects();
        let is_middle =
            |line: &Value| line["phase"] == "Feeding" && line["bytes"].as_u64() < line["total"].as_u64();
        assert!(told.iter().any(is_middle), "{told:#?}");
        scene.guest.wait_for_more_ticks();
        assert!(!other.exists());
    }
}

#[test]
fn an_encrypted_feed_takes_its_key_again() {
    let scene = Scene::new(QemuBuild::V10_0);
    let Scene { dormouse, guest, lab } = &scene;
    let image = scene.image();
    let key = lab.path("key");
    std::fs::write(&key, [7; 32]).unwrap();
    let key = ["--key-file", key.to_str().unwrap()];
    let mut supervisor = scene.run();
    let hibernating = dormouse.start_hibernating_with("guest", &image, &key);
    dormouse.finish(hibernating).expect_success();
    supervisor.wait_for_end();
    let mut woken = dormouse.wake("guest", &image, &[&SLOWLY[..], &key].concat());
    scene.wait_for_fed_share(0.1);
    woken.kill();
    let without = dormouse.recover(&["guest"]);
    assert_ne!(without.exit_code(), Some(0));
    assert!(without.stdout.contains("its key is needed"), "{without:#?}");
    let recovered = dormouse
        .recover(&[&["guest"], &key[..]].concat())
        .expect_success()
        .result();
    assert_eq!(recovered["result"], "fed", "{recovered}");
    let mut monitor = guest.monitor();
    monitor.stop();
    let memory = monitor.memory(guest.ram_bytes(), &lab.path("memory"));
    assert_eq!(BootSectorGuest::pattern_faults(&memory), Vec::<usize>::new());
    monitor.cont();
    drop(monitor);
    guest.wait_for_more_ticks();
    assert!(!image.exists());
}

#[test]
fn where_faults_may_not_be_handled_a_lazy_wake_is_refused_before_qemu_starts_and_another_mode_is_chosen() {
    for build in BUILDS {
        for with_device in [false, true] {
            let mut scene = Scene::new(build);
            let image = scene.hibernated();
            scene.dormouse = scene.dormouse.without_userfaultfd(&scene.lab, with_device);
            // Since 8.1 QEMU knows the device.
            let is_possible = with_device && build.maps_images();
            if !is_possible {
                let refused = scene.dormouse.try_wake("guest", &image, &["--mode", "lazy"]);
                let refused = refused.expect_exit(REFUSED);
                for word in ["userfaultfd", "CAP_SYS_PTRACE", "--mode eager"] {
                    assert!(refused.stderr.contains(word), "{refused:#?}");
                }
                assert_eq!(scene.image_state(), "sealed");
            }
            let mut options = vec!["--keep-image"];
            if is_possible {
                options.extend(["--mode", "lazy"]);
            }
            let mut woken = scene.dormouse.wake("guest", &image, &options);
            scene.guest.wait_for_more_ticks();
            let status = scene.dormouse.status("guest").expect_success().result();
            let expected = match (is_possible, build.maps_images()) {
                (true, _) => "lazy",
                (false, true) => "map",
                (false, false) => "eager",
            };
            assert_eq!(status["woken"]["mode"], expected, "{}", woken.log());
            let doctor = scene
                .dormouse
                .execute(&["doctor", "guest"])
                .expect_success()
                .stdout;
            let lazy = doctor
                .lines()
                .find(|line| line.contains("wake by lazy:"))
                .unwrap();
            assert_eq!(lazy.starts_with("yes"), is_possible, "{lazy}");
            woken.terminate();
        }
    }
}
