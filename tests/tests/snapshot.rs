//! A snapshot is a copy of a guest that goes on, and wakes where it cannot meet the one that went on.

use std::{
    ffi::OsString,
    fs,
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{Child, Command},
};

use dormouse_tests::{
    BootSectorGuest, Guest, Monitor, QemuBuild, Scene, Supervisor,
    faults::{self, Hanging, SmallVolume},
    until,
};
use rustix::process::Pid;
use serde_json::{Value, json};

const REFUSED: i32 = 3;
const CANCELLED: i32 = 6;
const NO_SPACE: i32 = 7;

const BUILDS: [QemuBuild; 3] = [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1];

/// Those that know all that an emulated CPU wrote.
const LIVE_BUILDS: [QemuBuild; 2] = [QemuBuild::V10_0, QemuBuild::V11_1];

const ENGINES: [&[&str]; 3] = [
    &["--engine", "direct"],
    &["--engine", "stream", "--channels", "0"],
    &["--engine", "stream", "--channels", "2"],
];

/// So slow that there is a middle: the guest holds 17 MiB.
const SLOWLY: [&str; 2] = ["--rate-limit", "4M"];

/// All migration settings.
fn settings(scene: &Scene) -> Value {
    let mut monitor = scene.guest.monitor();
    json!([
        monitor.execute("query-migrate-capabilities", json!({})),
        monitor.execute("query-migrate-parameters", json!({})),
    ])
}

fn image(scene: &Scene) -> PathBuf {
    scene.lab.path("images/guest.image")
}

fn images(scene: &Scene) -> Vec<String> {
    faults::files_in(&scene.lab.path("images"))
}

/// A guest that counts under a supervisor, and a folder for its images.
fn counting(build: QemuBuild) -> (Scene, Supervisor) {
    let scene = Scene::new(build);
    let supervisor = scene.run();
    fs::create_dir(scene.lab.path("images")).expect("a folder can be made");
    (scene, supervisor)
}

/// As an operator copies a disk: with its time.
fn copy_disk(from: &Path, to: &Path) {
    let copied = Command::new("cp")
        .arg("--preserve=timestamps")
        .args([from, to])
        .status();
    assert!(copied.is_ok_and(|status| status.success()), "cp works");
}

fn expect_verified(scene: &Scene) {
    scene
        .dormouse
        .image("verify", &image(scene), &[])
        .expect_success();
}

/// Returns when memory is being written.
fn wait_for_middle(client: &mut Child) {
    let output = client.stdout.take().expect("its output is ours");
    let mut lines = BufReader::new(output).lines().map_while(Result::ok);
    let met = lines.any(|line| {
        let line: Value = serde_json::from_str(&line).unwrap_or_default();
        line["phase"] == "SavingMemory" && line["bytes"] != line["total"]
    });
    assert!(met, "it was too fast to have a middle");
}

#[test]
fn a_guest_goes_on_and_its_snapshot_wakes_on_a_copy_of_its_disk_on_qemu_7_2() {
    a_guest_goes_on_and_its_snapshot_wakes_on_a_copy_of_its_disk(QemuBuild::V7_2);
}

#[test]
fn a_guest_goes_on_and_its_snapshot_wakes_on_a_copy_of_its_disk_on_qemu_10_0() {
    a_guest_goes_on_and_its_snapshot_wakes_on_a_copy_of_its_disk(QemuBuild::V10_0);
}

#[test]
fn a_guest_goes_on_and_its_snapshot_wakes_on_a_copy_of_its_disk_on_qemu_11_1() {
    a_guest_goes_on_and_its_snapshot_wakes_on_a_copy_of_its_disk(QemuBuild::V11_1);
}

/// The guest is left standing, so that its disk can be copied and its memory compared.
fn a_guest_goes_on_and_its_snapshot_wakes_on_a_copy_of_its_disk(build: QemuBuild) {
    for engine in ENGINES {
        goes_on_and_wakes_on_a_copy(build, engine);
    }
}

/// Returns what the snapshot told.
fn goes_on_and_wakes_on_a_copy(build: QemuBuild, options: &[&str]) -> Value {
    let (scene, mut supervisor) = counting(build);
    let Scene { dormouse, guest, lab } = &scene;
    let settings_before = settings(&scene);
    let all = [options, &["--leave-paused"]].concat();
    let taken = dormouse.snapshot("guest", &image(&scene), &all).expect_success();
    let taken = taken.result();
    assert_eq!(
        (&taken["result"], &taken["guest"]),
        (&json!("snapshot"), &json!("paused"))
    );
    assert_eq!(settings(&scene), settings_before);

    let mut monitor = guest.monitor();
    let before = monitor.memory(guest.ram_bytes(), &lab.path("memory-before"));
    let copy = lab.path("disk-copy");
    copy_disk(guest.disk(), &copy);
    let said = guest.log();
    let stood_at = guest.last_counter();
    monitor.cont();
    assert!(guest.wait_for_more_ticks() > stood_at);
    drop(monitor);

    expect_verified(&scene);
    // Beside its guest, or on the disk that its guest wrote to since, it does not wake.
    for _ in 0..2 {
        let refused = dormouse
            .try_wake("twin", &image(&scene), &[])
            .expect_exit(REFUSED);
        assert!(refused.stderr.contains("went on"), "{refused:#?}");
        if !lab.qemu_pids().is_empty() {
            supervisor.terminate();
            lab.wait_for_no_qemu();
        }
    }
    fs::rename(&copy, guest.disk()).expect("the copy can take the disk's place");
    guest.goes_back_to(&said);
    let mut woken = dormouse.wake("guest", &image(&scene), &["--mode", "eager", "--paused"]);
    let mut monitor = guest.monitor();
    monitor.wait_for_status("paused");
    let after = monitor.memory(guest.ram_bytes(), &lab.path("memory-after"));
    let first_difference = before.iter().zip(&after).position(|(a, b)| a != b);
    assert_eq!(
        first_difference, None,
        "first difference of the memory, {options:?}"
    );
    assert_eq!(BootSectorGuest::pattern_faults(&after), Vec::<usize>::new());
    monitor.cont();
    assert!(guest.wait_for_more_ticks() > stood_at);
    woken.terminate();
    taken
}

#[test]
fn a_live_snapshot_holds_what_the_guest_wrote_last() {
    for build in LIVE_BUILDS {
        for options in [&[][..], &["--compress", "zstd"]] {
            let taken = goes_on_and_wakes_on_a_copy(build, &[&["--live"], options].concat());
            assert_eq!(taken["engine"], "stream", "{taken}");
            assert_eq!(taken["live"]["converged"], true, "{taken}");
        }
    }
}

#[test]
fn a_guest_that_writes_faster_than_it_can_be_saved_is_paused_for_the_rest() {
    // Too short for the first pass.
    let options = ["--live", "--max-live", "20ms"];
    for build in LIVE_BUILDS {
        let taken = goes_on_and_wakes_on_a_copy(build, &options);
        assert_eq!(taken["live"]["converged"], false, "{taken}");
    }
}

#[test]
fn a_live_snapshot_of_a_paused_guest_is_a_snapshot() {
    let (scene, _supervisor) = counting(QemuBuild::V10_0);
    scene.guest.monitor().stop();
    let taken = scene
        .dormouse
        .snapshot("guest", &image(&scene), &["--live"])
        .expect_success()
        .result();
    assert_eq!(
        (&taken["engine"], &taken["live"]),
        (&json!("direct"), &Value::Null)
    );
    assert_eq!(scene.guest.monitor().status(), "paused");
}

#[test]
fn a_qemu_that_loses_track_of_what_its_guest_writes_takes_no_live_snapshot() {
    let (scene, _supervisor) = counting(QemuBuild::V7_2);
    let refused = scene.dormouse.snapshot("guest", &image(&scene), &["--live"]);
    let message = refused.expect_exit(REFUSED).result()["error"]["message"].to_string();
    assert!(message.contains("QEMU 9.0"), "{message}");
    scene.guest.wait_for_more_ticks();
}

#[test]
fn what_a_live_snapshot_cannot_use_is_refused() {
    let (scene, _supervisor) = counting(QemuBuild::V10_0);
    for wish in [["--engine", "direct"], ["--channels", "2"]] {
        let options = [&["--live"][..], &wish].concat();
        let refused = scene.dormouse.snapshot("guest", &image(&scene), &options);
        let refused = refused.expect_exit(REFUSED).result();
        let message = refused["error"]["message"].to_string();
        assert!(message.contains("--live"), "{message}");
    }
    scene.guest.wait_for_more_ticks();
}

/// Returns when the guest is being saved while it runs.
fn wait_for_passes(client: &mut Child) {
    let output = client.stdout.take().expect("its output is ours");
    let mut lines = BufReader::new(output).lines().map_while(Result::ok);
    let met = lines.any(|line| {
        let line: Value = serde_json::from_str(&line).unwrap_or_default();
        line["phase"] == "SavingLive" && line["bytes"] != 0
    });
    assert!(met, "it was too fast to have a middle");
}

#[test]
fn a_live_snapshot_that_is_cancelled_never_stops_its_guest_and_leaves_no_image() {
    for build in LIVE_BUILDS {
        let (scene, _supervisor) = counting(build);
        let settings_before = settings(&scene);
        let options = [&["--live"][..], &SLOWLY].concat();
        let whom = ["guest".as_ref()];
        let mut client = scene
            .dormouse
            .start_taking_snapshot(&whom, &image(&scene), &options);
        wait_for_passes(&mut client);
        scene.guest.wait_for_more_ticks();
        assert_eq!(scene.guest.monitor().status(), "running");
        faults::interrupt(Pid::from_child(&client));
        scene.dormouse.finish(client).expect_exit(CANCELLED);
        scene.guest.wait_for_more_ticks();
        assert_eq!(images(&scene), Vec::<String>::new());
        assert_eq!(settings(&scene), settings_before);
        scene
            .dormouse
            .snapshot("guest", &image(&scene), &["--live"])
            .expect_success();
    }
}

#[test]
fn a_guest_that_its_owner_pauses_while_it_is_saved_live_stays_paused_and_so_does_its_copy() {
    for build in LIVE_BUILDS {
        let (scene, _supervisor) = counting(build);
        let options = [&["--live"][..], &SLOWLY].concat();
        let whom = ["guest".as_ref()];
        let mut client = scene
            .dormouse
            .start_taking_snapshot(&whom, &image(&scene), &options);
        wait_for_passes(&mut client);
        scene.guest.monitor().stop();
        scene.dormouse.finish(client).expect_success();
        scene.guest.monitor().wait_for_status("paused");
        let inspected = scene.dormouse.image("inspect", &image(&scene), &["--json"]);
        let inspected = inspected.expect_success().result();
        assert_eq!(
            inspected["manifest"]["guest"]["state_when_saved"], "paused",
            "{inspected:#}"
        );
    }
}

#[test]
fn killed_while_the_guest_is_saved_live_it_runs_on() {
    for build in LIVE_BUILDS {
        let options = [&["--live"][..], &SLOWLY].concat();
        let killed = Killed::when(build, &options, |scene, _, mut client, supervisor| {
            wait_for_passes(&mut client);
            faults::kill(supervisor);
            scene.dormouse.finish(client);
        });
        killed.scene.guest.wait_for_more_ticks();
        let recovered = killed.recovered();
        assert_eq!(
            (&recovered["outcome"], &recovered["guest"]),
            (&json!("given-back"), &json!("running"))
        );
        assert_eq!(images(&killed.scene), Vec::<String>::new());
        killed.expect_guest_as_before();
    }
}

#[test]
fn snapshots_follow_each_other_and_a_hibernation_follows_them_on_every_qemu() {
    for build in BUILDS {
        let (scene, mut supervisor) = counting(build);
        let Scene { dormouse, guest, .. } = &scene;
        let settings_before = settings(&scene);
        for engine in ENGINES.into_iter().cycle().take(6) {
            let options = [engine, &["--replace"]].concat();
            let taken = dormouse
                .snapshot("guest", &image(&scene), &options)
                .expect_success();
            let taken = taken.result();
            assert_eq!(taken["guest"], "running", "{taken}");
            assert!(
                taken["pause_ms"].as_f64() <= taken["sealed_after_ms"].as_f64(),
                "{taken}"
            );
            guest.wait_for_more_ticks();
            assert_eq!(settings(&scene), settings_before, "{engine:?}");
            assert_eq!(images(&scene), ["guest.image"]);
            expect_verified(&scene);
            let inspected = dormouse
                .image("inspect", &image(&scene), &["--json"])
                .expect_success();
            assert_eq!(inspected.result()["snapshot"], true);
        }
        // A snapshot is not the only copy of its guest, but nobody loses it by accident.
        dormouse.hibernate("guest", &image(&scene)).expect_exit(REFUSED);
        let hibernating = dormouse.start_hibernating_with("guest", &image(&scene), &["--replace"]);
        dormouse.finish(hibernating).expect_success();
        supervisor.wait_for_end();
        scene.lab.wait_for_no_qemu();
        let last = guest.last_counter();
        let _woken = dormouse.wake("guest", &image(&scene), &[]);
        assert!(guest.wait_for_more_ticks() > last);
    }
}

#[test]
fn a_paused_guest_is_paused_after_its_snapshot_on_every_qemu() {
    for build in BUILDS {
        for engine in ENGINES {
            let (scene, _supervisor) = counting(build);
            scene.guest.monitor().stop();
            let taken = scene
                .dormouse
                .snapshot("guest", &image(&scene), engine)
                .expect_success();
            assert_eq!(taken.result()["guest"], "paused");
            assert_eq!(scene.guest.monitor().status(), "paused");
            expect_verified(&scene);
            scene.guest.monitor().cont();
            scene.guest.wait_for_more_ticks();
        }
    }
}

/// A machine with nothing to write to.
fn diskless(build: QemuBuild, monitor: &Path) -> Vec<OsString> {
    let mut line = vec![build.program().into_os_string()];
    let monitor = format!("unix:{},server=on,wait=off", monitor.display());
    let arguments = [
        "-accel",
        "tcg",
        "-m",
        "64",
        "-nodefaults",
        "-display",
        "none",
        "-qmp",
        &monitor,
    ];
    line.extend(arguments.map(OsString::from));
    line
}

#[test]
fn a_snapshot_of_a_guest_without_disks_wakes_beside_it() {
    let scene = Scene::new(QemuBuild::V10_0);
    let socket = scene.lab.path("diskless.sock");
    let _supervisor = scene
        .dormouse
        .start("diskless", &diskless(QemuBuild::V10_0, &socket));
    let mut monitor = Monitor::connect(&socket);
    monitor.wait_for_status("running");
    let api = scene.dormouse.state_dir().join("diskless/api.sock");
    until("the supervisor's API", || api.exists().then_some(()));
    let image = scene.lab.path("diskless.image");
    scene.dormouse.snapshot("diskless", &image, &[]).expect_success();
    assert_eq!(monitor.status(), "running");
    let listed = scene
        .dormouse
        .execute(&["image".as_ref(), "list".as_ref(), scene.lab.folder().as_os_str()]);
    assert!(listed.stdout.contains("sealed, snapshot"), "{listed:#?}");
    // Its monitor's socket is one thing that two cannot share.
    fs::remove_file(&socket).expect("the socket can be removed");
    let _twin = scene.dormouse.wake("twin", &image, &[]);
    Monitor::connect(&socket).wait_for_status("running");
    assert_eq!(scene.lab.qemu_pids().len(), 2);
    assert_eq!(monitor.status(), "running");
}

#[test]
fn a_ctrl_c_in_the_middle_gives_the_guest_back_and_leaves_no_image() {
    for build in BUILDS {
        for options in [
            &SLOWLY[..],
            &["--rate-limit", "4M", "--leave-paused", "--engine", "stream"],
        ] {
            let (scene, _supervisor) = counting(build);
            let settings_before = settings(&scene);
            let mut client =
                scene
                    .dormouse
                    .start_taking_snapshot(&["guest".as_ref()], &image(&scene), options);
            wait_for_middle(&mut client);
            faults::interrupt(Pid::from_child(&client));
            scene.dormouse.finish(client).expect_exit(CANCELLED);
            scene.guest.wait_for_more_ticks();
            assert_eq!(images(&scene), Vec::<String>::new());
            assert_eq!(settings(&scene), settings_before);
        }
    }
}

#[test]
fn a_volume_without_room_leaves_the_guest_alone() {
    let (scene, _supervisor) = counting(QemuBuild::V10_0);
    let volume = SmallVolume::new(&scene.lab, 16);
    let refused = scene.dormouse.snapshot("guest", &volume.path("guest.image"), &[]);
    let refused = refused.expect_exit(NO_SPACE).result();
    assert_eq!(refused["error"]["guest"], "running");
    assert_eq!(volume.content(), Vec::<String>::new());
    scene.guest.wait_for_more_ticks();
}

/// A guest whose snapshot is taken by a supervisor that is killed at some point of it; with its monitor, and its migration
/// settings as they were.
struct Killed {
    // Before the laboratory, in whose folder it is.
    _state: SmallVolume,
    scene: Scene,
    settings: Value,
}

impl Killed {
    fn when(build: QemuBuild, options: &[&str], kill: impl FnOnce(&Scene, &SmallVolume, Child, Pid)) -> Self {
        let mut scene = Scene::new(build);
        let state = SmallVolume::new(&scene.lab, 16);
        scene.dormouse = scene.dormouse.with_state_dir(state.path("state"));
        let mut supervisor = scene.run();
        fs::create_dir(scene.lab.path("images")).expect("a folder can be made");
        let settings = settings(&scene);
        let whom = ["guest".as_ref()];
        let client = scene
            .dormouse
            .start_taking_snapshot(&whom, &image(&scene), options);
        kill(&scene, &state, client, supervisor.pid());
        supervisor.wait_for_end();
        Self {
            _state: state,
            scene,
            settings,
        }
    }

    fn recovered(&self) -> Value {
        self.scene.dormouse.recover(&[]).expect_success().result()
    }

    /// The guest counts on, and of the operation there is no trace but its image.
    fn expect_guest_as_before(&self) {
        self.scene.guest.wait_for_more_ticks();
        assert_eq!(settings(&self.scene), self.settings);
        assert_eq!(self.recovered(), json!({"operations": 0}));
    }
}

fn record_says(scene: &Scene, point: &str) -> bool {
    let record = scene.dormouse.records().pop();
    record.is_some_and(|(_, record)| record["point"] == point)
}

#[test]
fn killed_in_the_middle_the_guest_is_given_back_on_every_qemu() {
    for build in BUILDS {
        for engine in ENGINES {
            let options = [engine, &SLOWLY].concat();
            let killed = Killed::when(build, &options, |scene, _, mut client, supervisor| {
                wait_for_middle(&mut client);
                faults::kill(supervisor);
                scene.dormouse.finish(client);
            });
            let recovered = killed.recovered();
            assert_eq!(
                (&recovered["outcome"], &recovered["guest"]),
                (&json!("given-back"), &json!("running"))
            );
            assert_eq!(images(&killed.scene), Vec::<String>::new());
            killed.expect_guest_as_before();
        }
    }
}

#[test]
fn killed_as_soon_as_the_guest_is_back_there_is_a_whole_snapshot_or_none() {
    for build in BUILDS {
        let killed = Killed::when(build, &[], |scene, _, client, supervisor| {
            faults::kill_when(supervisor, "the record of a guest that is back", || {
                record_says(scene, "sealing")
            });
            scene.dormouse.finish(client);
        });
        killed.scene.guest.wait_for_more_ticks();
        let recovered = killed.recovered();
        assert_eq!(recovered["guest"], "running");
        if recovered["outcome"] == "snapshot" {
            expect_verified(&killed.scene);
        } else {
            assert_eq!(recovered["outcome"], "given-back");
            assert_eq!(images(&killed.scene), Vec::<String>::new());
        }
        killed.expect_guest_as_before();
    }
}

#[test]
fn killed_after_the_seal_the_snapshot_stays_and_its_guest_is_left_alone() {
    for build in BUILDS {
        let killed = Killed::when(build, &[], |scene, state, client, supervisor| {
            until("the record of a guest that is back", || {
                (record_says(scene, "sealing") || image(scene).exists()).then_some(())
            });
            let held = Hanging::volume(state);
            until("the image", || image(scene).exists().then_some(()));
            faults::kill(supervisor);
            drop(held);
            scene.dormouse.finish(client);
        });
        // What its owner did with it since counts.
        killed.scene.guest.monitor().stop();
        if !killed.scene.dormouse.records().is_empty() {
            let recovered = killed.recovered();
            assert_eq!(
                (&recovered["outcome"], &recovered["guest"]),
                (&json!("snapshot"), &json!("paused"))
            );
        }
        assert_eq!(killed.scene.guest.monitor().status(), "paused");
        assert_eq!(images(&killed.scene), ["guest.image"]);
        expect_verified(&killed.scene);
        killed.scene.guest.monitor().cont();
        killed.expect_guest_as_before();
    }
}
