//! A launcher starts QEMU itself, and Dormouse wakes the guest in it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::path::Path;

use dormouse_tests::{Launcher, QemuBuild, Scene};

const REFUSED: i32 = 3;
const BUILDS: [QemuBuild; 3] = [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1];

#[track_caller]
fn expect_sealed(scene: &Scene, image: &Path) {
    let inspected = scene.dormouse.image("inspect", image, &["--json"]);
    assert_eq!(inspected.expect_success().result()["state"], "sealed");
}

#[test]
fn qemu_starts_with_exactly_the_printed_arguments_and_waits() {
    for build in BUILDS {
        let scene = Scene::new(build);
        let image = scene.hibernated();
        for mode in ["map", "eager", "stream"] {
            if mode == "map" && !build.maps_images() {
                continue;
            }
            let launcher = Launcher::start(&scene, &image, &["--mode", mode]);
            assert_eq!(launcher.status(), "inmigrate");
            launcher.end();
        }
        expect_sealed(&scene, &image);
    }
}

#[test]
fn the_arguments_are_for_a_program_too_and_a_mode_that_cannot_be_is_refused() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let path = image.to_string_lossy();
    let told = |options: &[&str]| {
        let mut all = vec!["wake", &*path, "--print-args", "--json"];
        all.extend(options);
        scene.dormouse.execute(&all)
    };
    let map = told(&[]).expect_success().result();
    assert_eq!(map["mode"], "map");
    let arguments: Vec<&str> = map["arguments"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(|word| word.as_str())
        .collect();
    assert!(
        arguments.windows(2).any(|pair| pair == ["-incoming", "defer"]),
        "{arguments:?}"
    );
    assert!(arguments.contains(&"-S"), "{arguments:?}");
    let ram = format!("mem-path={path}");
    assert!(
        arguments
            .iter()
            .any(|word| word.contains(&ram) && word.contains("readonly=on")),
        "{arguments:?}"
    );

    let disk = scene.lab.path("elsewhere.img");
    let elsewhere = format!("ide0-hd0={}", disk.display());
    let stream = told(&["--mode", "stream", "--disk", &elsewhere])
        .expect_success()
        .result();
    let arguments = stream["arguments"].to_string();
    assert!(
        arguments.contains("elsewhere.img") && !arguments.contains(&ram),
        "{arguments}"
    );

    let lazy = told(&["--mode", "lazy"]).expect_exit(REFUSED).result();
    let message = lazy["error"]["message"].to_string();
    assert!(message.contains("nobody would stay to feed it"), "{message}");
    expect_sealed(&scene, &image);
}
