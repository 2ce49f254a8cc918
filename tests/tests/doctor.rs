//! What a VM can do is said before it is tried, and every no has its reason.

use dormouse_tests::{Guest, PlainQemu, QemuBuild, Scene};
use serde_json::{Value, json};

/// The finding about `subject`.
fn finding<'a>(diagnosis: &'a Value, subject: &str) -> &'a Value {
    let findings = diagnosis["findings"].as_array().expect("findings are a list");
    let found = findings
        .iter()
        .find(|finding| finding["subject"].to_string().contains(subject));
    found.unwrap_or_else(|| panic!("nothing about {subject:?} in {diagnosis:#}"))
}

#[test]
fn a_supervised_vm_is_told_its_ways_to_sleep_and_wake() {
    for (build, maps, mirrors) in [
        (QemuBuild::V7_2, false, true),
        (QemuBuild::V10_0, true, false),
        (QemuBuild::V11_1, true, true),
    ] {
        let scene = Scene::new(build);
        let _supervisor = scene.run();
        let diagnosis = scene
            .dormouse
            .execute(&["doctor", "guest", "--json"])
            .expect_success()
            .result();
        let direct = finding(&diagnosis, "directly, by x-ignore-shared");
        assert_eq!(direct["can"], true, "{diagnosis:#}");
        let handed_over = finding(&diagnosis, "directly, by cpr-transfer");
        assert_eq!(handed_over["can"], false, "{diagnosis:#}");
        assert_eq!(finding(&diagnosis, "wake by map")["can"], maps, "{diagnosis:#}");
        assert_eq!(finding(&diagnosis, "wake by eager")["can"], true);
        assert_eq!(
            finding(&diagnosis, "mirror a disk")["can"],
            mirrors,
            "{diagnosis:#}"
        );
        assert_eq!(
            finding(&diagnosis, "take disks back")["can"],
            maps,
            "{diagnosis:#}"
        );
        assert_eq!(diagnosis["blockers"], json!([]));
        assert_eq!(diagnosis["disks"][0]["has_witness"], true);
        assert_eq!(diagnosis["memory"]["guest_bytes"], 64 << 20);
        // The guest fills 17 MiB, in whatever pages its memory is made of.
        let touched = diagnosis["memory"]["touched_bytes"].as_u64().unwrap();
        assert!((17 << 20..64 << 20).contains(&touched), "{touched}");
    }
}

#[test]
fn what_stands_in_the_way_is_told_as_the_hibernation_would() {
    let scene = Scene::new(QemuBuild::V10_0);
    let _supervisor = scene.run();
    let copy = scene.lab.path("copy.img");
    let mirror =
        json!({"job-id": "copying", "device": "ide0-hd0", "target": copy, "sync": "full", "format": "raw"});
    scene.guest.monitor().execute("drive-mirror", mirror);
    let diagnosis = scene
        .dormouse
        .execute(&["doctor", "guest", "--json"])
        .expect_success()
        .result();
    assert!(
        diagnosis["blockers"].to_string().contains("mirror job copying"),
        "{diagnosis:#}"
    );
    let outcome = scene.dormouse.execute(&["doctor", "guest"]).expect_success();
    assert!(
        outcome.stdout.contains("in the way: mirror job copying"),
        "{outcome:#?}"
    );
}

#[test]
fn a_qemu_with_private_memory_is_told_the_remedy() {
    let scene = Scene::new(QemuBuild::V10_0);
    let _plain = PlainQemu::start(&scene.guest);
    scene.guest.wait_for_ticks(5);
    let monitor = scene.guest.monitor_socket().to_str().unwrap();
    let diagnosis = scene
        .dormouse
        .execute(&["doctor", "--qmp", monitor, "--json"])
        .expect_success()
        .result();
    for way in ["x-ignore-shared", "cpr-transfer"] {
        let direct = finding(&diagnosis, way);
        assert_eq!(direct["can"], false, "{direct}");
    }
    let left_out = finding(&diagnosis, "x-ignore-shared")["detail"].to_string();
    assert!(left_out.contains("private to QEMU"), "{left_out}");
    assert!(left_out.contains("dormouse run"), "{left_out}");
    assert_eq!(finding(&diagnosis, "by a stream")["can"], true);
    assert_eq!(diagnosis["memory"]["touched_bytes"], Value::Null);
    assert_eq!(diagnosis["blockers"], json!([]));
}
