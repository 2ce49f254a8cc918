//! A dry run tells what a hibernation would take, and leaves the guest alone.

use dormouse_tests::{Foreign, Guest, LoopDevice, QemuBuild, Scene, faults};
use serde_json::Value;

const REFUSED: i32 = 3;
const NO_SPACE: i32 = 7;

fn dry_run(scene: &Scene, more: &[&str]) -> Value {
    let image = scene.image();
    let mut arguments = vec!["hibernate", "guest", "--dry-run", "--json"];
    let to = image.to_str().expect("a path of letters");
    arguments.extend(["--to", to]);
    arguments.extend(more);
    scene.dormouse.execute(&arguments).expect_success().result()
}

#[test]
fn it_tells_engine_space_volumes_and_pause_and_touches_nothing() {
    let scene = Scene::new(QemuBuild::V10_0);
    let _supervisor = scene.run();
    let before = faults::files_in(scene.lab.folder());
    let told = dry_run(&scene, &[]);
    assert_eq!(told["result"], "dry-run", "{told:#}");
    assert_eq!(told["engine"], "direct");
    assert_eq!(told["running"], true);
    let number = |name: &str| told[name].as_u64().unwrap_or_default();
    let ram = scene.guest.ram_bytes();
    assert!(number("needed_bytes") > ram && number("likely_bytes") < number("needed_bytes"));
    assert!(number("block_volume_bytes") >= number("needed_bytes"));
    assert!(number("filesystem_volume_bytes") > number("block_volume_bytes"));
    assert!(told["write_bytes_per_second"].as_f64() > Some(0.0));
    assert!(told["expected_pause_ms"].as_f64() > Some(0.0));
    assert_eq!(faults::files_in(scene.lab.folder()), before);
    scene.guest.wait_for_more_ticks();

    // A slower volume means a longer pause.
    let slow = dry_run(&scene, &["--rate-limit", "1M"]);
    assert!(slow["expected_pause_ms"].as_f64() > told["expected_pause_ms"].as_f64());
    // And what it told is enough.
    let needed = number("needed_bytes");
    scene.dormouse.hibernate("guest", &scene.image()).expect_success();
    assert!(std::fs::metadata(scene.image()).unwrap().len() <= needed);
}

#[test]
fn it_tells_what_stands_in_the_way_as_the_hibernation_would() {
    let foreign = Foreign::start(QemuBuild::V10_0, &[]);
    let told = foreign.hibernate(&["--dry-run"]).expect_success().result();
    assert_eq!(told["engine"], "stream", "{told:#}");
    assert_eq!(told["likely_bytes"], Value::Null);
    foreign.expect_no_image();

    let small = LoopDevice::with_old_data(&foreign.scene.lab, 8);
    let foreign = foreign.with_image_at(small.path().to_owned());
    let error = foreign
        .hibernate(&["--dry-run", "--replace"])
        .expect_exit(NO_SPACE)
        .result();
    assert!(
        error["error"]["message"].to_string().contains("8.0 MiB"),
        "{error}"
    );
    let direct = foreign
        .hibernate(&["--dry-run", "--engine", "direct"])
        .expect_exit(REFUSED);
    assert_eq!(direct.result()["error"]["guest"], "running");
    foreign.scene.guest.wait_for_more_ticks();
}

#[test]
fn it_tells_that_a_cpu_which_is_whatever_the_host_has_binds_the_guest_to_such_hosts() {
    let mut scene = Scene::new(QemuBuild::V10_0);
    scene.guest.start_with(&["-cpu", "max"]);
    let _supervisor = scene.run();
    let told = dry_run(&scene, &[]);
    let remarks = told["remarks"].to_string();
    assert!(
        remarks.contains("wakes only where the CPU has the same"),
        "{remarks}"
    );
}
