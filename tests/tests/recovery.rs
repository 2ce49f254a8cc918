//! Dormouse is killed at every point of a hibernation, and `dormouse recover` brings guest and image to one of their two
//! ends: the guest runs on as it was and there is nothing of the image, or the image is the guest and QEMU is gone.

use std::{
    fs,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::Child,
};

use dormouse_tests::{Guest, PlainQemu, QemuBuild, Scene, Supervisor, faults, until};
use rustix::process::Pid;
use serde_json::{Value, json};

const REFUSED: i32 = 3;
const OPERATOR: i32 = 10;

/// So slow that there is a middle: the guest holds 17 MiB.
const SLOWLY: [&str; 2] = ["--rate-limit", "4M"];

/// Memory in a memfd that QEMU 10.0 can hand over, and all else that it must be able to hand over.
const MEMFD_AND_AUX: [&str; 4] = [
    "-object",
    "memory-backend-memfd,id=m0,size=64M,share=on",
    "-machine",
    "memory-backend=m0,aux-ram-share=on",
];

/// A guest under a QEMU that somebody else started, with one monitor for Dormouse and one for us.
struct Foreign {
    _qemu: PlainQemu,
    scene: Scene,
    settings: Value,
}

impl Foreign {
    /// A guest with its memory in a file.
    fn start(build: QemuBuild) -> Self {
        Self::of(Scene::new(build), |scene| {
            let ram = format!(
                "memory-backend-file,id=pc.ram,size=64M,share=on,mem-path={}",
                scene.lab.path("ram").display()
            );
            let arguments = ["-object", &ram, "-machine", "memory-backend=pc.ram"];
            arguments.map(str::to_owned).to_vec()
        })
    }

    fn start_with(build: QemuBuild, arguments: &[&str]) -> Self {
        Self::of(Scene::new(build), |_| {
            arguments.iter().map(|&argument| argument.to_owned()).collect()
        })
    }

    fn of(mut scene: Scene, arguments: impl FnOnce(&Scene) -> Vec<String>) -> Self {
        // Its command line shows the loader of an unpacked QEMU, not the wrapper.
        scene.dormouse = scene.dormouse.with_modules_of(scene.guest.build());
        let mut all = arguments(&scene);
        all.push("-qmp".to_owned());
        all.push(format!("unix:{},server=on,wait=off", socket(&scene)));
        let all: Vec<&str> = all.iter().map(String::as_str).collect();
        let qemu = PlainQemu::start_with(&scene.guest, &all);
        scene.guest.wait_for_ticks(5);
        fs::create_dir(scene.lab.path("images")).expect("a folder can be made");
        let settings = settings(&scene);
        Self {
            _qemu: qemu,
            scene,
            settings,
        }
    }

    fn start_hibernating(&self, options: &[&str]) -> Child {
        let scene = &self.scene;
        let socket = PathBuf::from(socket(scene));
        scene
            .dormouse
            .start_hibernating_by_monitor(&socket, &image(scene), options)
    }

    /// Kills Dormouse in the middle of the save.
    fn killed_in_the_middle(&self, options: &[&str]) {
        let mut client = self.start_hibernating(&[options, &SLOWLY].concat());
        wait_for_middle(&mut client);
        faults::kill(Pid::from_child(&client));
        self.scene.dormouse.finish(client);
    }

    /// Kills Dormouse as soon as the image has its name.
    fn killed_after_the_seal(&self) {
        let client = self.start_hibernating(&[]);
        let image = image(&self.scene);
        faults::kill_when(Pid::from_child(&client), "the image", || image.exists());
        self.scene.dormouse.finish(client);
    }

    fn expect_given_back(&self) {
        let recovered = self.scene.dormouse.recover(&[]).expect_success().result();
        assert_eq!(recovered["outcome"], "given-back");
        assert_eq!(recovered["guest"], "running");
        expect_guest_as_before(&self.scene, &self.settings);
    }
}

fn socket(scene: &Scene) -> String {
    scene.lab.path("qmp.sock").to_string_lossy().into_owned()
}

fn image(scene: &Scene) -> PathBuf {
    scene.lab.path("images/guest.image")
}

/// All migration settings.
fn settings(scene: &Scene) -> Value {
    let mut monitor = scene.guest.monitor();
    json!([
        monitor.execute("query-migrate-capabilities", json!({})),
        monitor.execute("query-migrate-parameters", json!({})),
    ])
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

fn files_of_images(scene: &Scene) -> Vec<String> {
    faults::files_in(&scene.lab.path("images"))
}

/// The guest counts on, migration is set as it was, and of the hibernation there is no trace. A second recovery finds
/// nothing, and the next hibernation nothing in its way.
fn expect_guest_as_before(scene: &Scene, settings_before: &Value) {
    scene.guest.wait_for_more_ticks();
    assert_eq!(&settings(scene), settings_before);
    assert_eq!(files_of_images(scene), Vec::<String>::new());
    expect_nothing_to_recover(scene);
}

fn expect_nothing_to_recover(scene: &Scene) {
    let again = scene.dormouse.recover(&[]).expect_success().result();
    assert_eq!(again, json!({"operations": 0}));
    assert!(!scene.dormouse.state_dir().join(".operations").exists());
}

/// QEMU is gone, the image is whole, and its guest counts on from where it was.
fn expect_image_is_the_guest(scene: &Scene) -> Supervisor {
    scene.lab.wait_for_no_qemu();
    assert_eq!(files_of_images(scene), ["guest.image"]);
    scene
        .dormouse
        .image("verify", &image(scene), &[])
        .expect_success();
    expect_nothing_to_recover(scene);
    let last = scene.guest.last_counter();
    let woken = scene.dormouse.wake("guest", &image(scene), &[]);
    assert!(scene.guest.wait_for_more_ticks() > last);
    woken
}

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
    let foreign = Foreign::start(build);
    foreign.killed_in_the_middle(&[]);
    let scene = &foreign.scene;
    assert_eq!(scene.guest.monitor().status(), "postmigrate");
    assert_ne!(settings(scene), foreign.settings);
    // Without it the next hibernation says what to do.
    let refused = scene
        .dormouse
        .finish(foreign.start_hibernating(&[]))
        .expect_exit(REFUSED);
    let message = refused.result()["error"]["message"].to_string();
    assert!(message.contains("dormouse recover"), "{message}");
    foreign.expect_given_back();
    scene
        .dormouse
        .finish(foreign.start_hibernating(&[]))
        .expect_success();
    let _woken = expect_image_is_the_guest(scene);
}

#[test]
fn killed_while_qemu_sends_the_memory_the_guest_is_given_back_on_every_qemu() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        for channels in ["0", "2"] {
            let foreign = Foreign::start_with(build, &[]);
            foreign.killed_in_the_middle(&["--engine", "stream", "--channels", channels]);
            foreign.expect_given_back();
        }
    }
}

#[test]
fn killed_while_memory_that_qemu_handed_over_is_written_the_guest_is_given_back() {
    let foreign = Foreign::start_with(QemuBuild::V10_0, &MEMFD_AND_AUX);
    foreign.killed_in_the_middle(&[]);
    foreign.expect_given_back();
}

#[test]
fn killed_as_soon_as_there_is_a_record_the_guest_runs_on() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let foreign = Foreign::start(build);
        let scene = &foreign.scene;
        let client = foreign.start_hibernating(&SLOWLY);
        faults::kill_when(Pid::from_child(&client), "a record", || {
            !scene.dormouse.records().is_empty()
        });
        scene.dormouse.finish(client);
        foreign.expect_given_back();
    }
}

/// QEMU does not answer the question that comes before the seal.
#[test]
fn killed_between_the_memory_and_the_seal_the_guest_is_given_back() {
    let foreign = Foreign::start(QemuBuild::V10_0);
    let scene = &foreign.scene;
    let qemu = scene.lab.only_qemu();
    let mut client = foreign.start_hibernating(&SLOWLY);
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
    foreign.expect_given_back();
}

#[test]
fn a_paused_guest_is_given_back_paused() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let foreign = Foreign::start(build);
        let scene = &foreign.scene;
        scene.guest.monitor().stop();
        foreign.killed_in_the_middle(&[]);
        let recovered = scene.dormouse.recover(&[]).expect_success().result();
        assert_eq!(
            (&recovered["outcome"], &recovered["guest"]),
            (&json!("given-back"), &json!("paused"))
        );
        assert_eq!(scene.guest.monitor().status(), "paused");
        scene.guest.monitor().cont();
        expect_guest_as_before(scene, &foreign.settings);
    }
}

#[test]
fn killed_after_the_seal_the_image_is_the_guest_on_every_qemu() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let foreign = Foreign::start(build);
        foreign.killed_after_the_seal();
        let scene = &foreign.scene;
        assert_eq!(scene.guest.monitor().status(), "postmigrate");
        let early = scene
            .dormouse
            .try_wake("early", &image(scene), &[])
            .expect_exit(REFUSED);
        assert!(early.stderr.contains("dormouse recover"), "{early:#?}");
        let recovered = scene
            .dormouse
            .recover(&["--qmp", &socket(scene)])
            .expect_success()
            .result();
        assert_eq!(
            (&recovered["outcome"], &recovered["guest"]),
            (&json!("hibernated"), &json!("stopped"))
        );
        let _woken = expect_image_is_the_guest(scene);
    }
}

#[test]
fn killed_with_the_record_after_the_seal_the_image_is_the_guest() {
    let foreign = Foreign::start(QemuBuild::V10_0);
    let scene = &foreign.scene;
    let client = foreign.start_hibernating(&[]);
    faults::kill_when(Pid::from_child(&client), "the record after the seal", || {
        let record = scene.dormouse.records().pop().unwrap_or_default().1;
        record["point"] == "sealed"
    });
    scene.dormouse.finish(client);
    // QEMU may have been told to quit.
    let recovered = scene.dormouse.recover(&[]).expect_success().result();
    assert_eq!(recovered["outcome"], "hibernated");
    let _woken = expect_image_is_the_guest(scene);
}

#[test]
fn a_guest_that_somebody_ran_after_the_seal_runs_on_and_its_image_goes() {
    let foreign = Foreign::start(QemuBuild::V10_0);
    let scene = &foreign.scene;
    foreign.killed_after_the_seal();
    scene.guest.monitor().cont();
    scene.guest.wait_for_more_ticks();
    let recovered = scene.dormouse.recover(&[]).expect_success().result();
    assert_eq!(
        (&recovered["outcome"], &recovered["guest"]),
        (&json!("ran-on"), &json!("running"))
    );
    expect_guest_as_before(scene, &foreign.settings);
}

#[test]
fn an_image_that_was_taken_away_is_a_persons_to_find() {
    let foreign = Foreign::start(QemuBuild::V10_0);
    let scene = &foreign.scene;
    foreign.killed_after_the_seal();
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
    let foreign = Foreign::start(QemuBuild::V10_0);
    let scene = &foreign.scene;
    foreign.killed_in_the_middle(&[]);
    faults::kill(scene.lab.only_qemu());
    scene.lab.wait_for_no_qemu();
    let recovered = scene.dormouse.recover(&[]).expect_success().result();
    assert_eq!(
        (&recovered["outcome"], &recovered["guest"]),
        (&json!("qemu-gone"), &json!("stopped"))
    );
    assert_eq!(files_of_images(scene), Vec::<String>::new());
    expect_nothing_to_recover(scene);

    let foreign = Foreign::start(QemuBuild::V10_0);
    let scene = &foreign.scene;
    foreign.killed_after_the_seal();
    faults::kill(scene.lab.only_qemu());
    scene.lab.wait_for_no_qemu();
    let recovered = scene.dormouse.recover(&[]).expect_success().result();
    assert_eq!(recovered["outcome"], "hibernated");
    let _woken = expect_image_is_the_guest(scene);
}

#[test]
fn a_torn_record_is_told_and_nothing_is_touched() {
    let foreign = Foreign::start(QemuBuild::V10_0);
    let scene = &foreign.scene;
    foreign.killed_in_the_middle(&[]);
    let (path, _) = scene.dormouse.records().pop().expect("there is a record");
    let whole = fs::read(&path).expect("the record can be read");
    fs::write(&path, &whole[..whole.len() / 2]).expect("the record can be torn");
    let error = scene.dormouse.recover(&[]).expect_exit(OPERATOR).result();
    let message = error["error"]["message"].to_string();
    assert!(message.contains("torn"), "{message}");
    assert_eq!(scene.guest.monitor().status(), "postmigrate");
    assert_eq!(files_of_images(scene).len(), 1);
    fs::write(&path, &whole).expect("the record can be mended");
    foreign.expect_given_back();
}

#[test]
fn what_is_under_way_is_left_alone() {
    let foreign = Foreign::start(QemuBuild::V10_0);
    let scene = &foreign.scene;
    let mut client = foreign.start_hibernating(&SLOWLY);
    wait_for_middle(&mut client);
    scene.dormouse.recover(&["vm"]).expect_exit(REFUSED);
    scene.dormouse.recover(&[]).expect_success();
    scene.dormouse.finish(client).expect_success();
    let _woken = expect_image_is_the_guest(scene);
}

/// A guest under a supervisor, which is killed at some point of its hibernation.
fn supervised(kill: impl FnOnce(&Scene, &Supervisor)) -> (Scene, Value) {
    let scene = Scene::new(QemuBuild::V10_0);
    let mut supervisor = scene.run();
    fs::create_dir(scene.lab.path("images")).expect("a folder can be made");
    let settings = settings(&scene);
    kill(&scene, &supervisor);
    supervisor.wait_for_end();
    (scene, settings)
}

#[test]
fn a_supervisor_that_is_killed_in_the_middle_is_told_of_everywhere_and_its_guest_given_back() {
    let (scene, settings) = supervised(|scene, supervisor| {
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
    let (scene, _) = supervised(|scene, supervisor| {
        let client = scene.dormouse.start_hibernating("guest", &image(scene));
        let image = image(scene);
        faults::kill_when(supervisor.pid(), "the image", || image.exists());
        scene.dormouse.finish(client);
    });
    let recovered = scene.dormouse.recover(&["guest"]).expect_success().result();
    assert_eq!(recovered["outcome"], "hibernated");
    assert_eq!(faults::files_in(scene.dormouse.state_dir()), Vec::<String>::new());
    let _woken = expect_image_is_the_guest(&scene);
}

#[test]
fn a_start_sweeps_up_what_a_supervisor_left_that_was_killed_with_its_qemu() {
    let (scene, _) = supervised(|scene, supervisor| {
        let mut client = scene
            .dormouse
            .start_hibernating_with("guest", &image(scene), &SLOWLY);
        wait_for_middle(&mut client);
        faults::kill(supervisor.pid());
        faults::kill(scene.lab.only_qemu());
        scene.dormouse.finish(client);
    });
    scene.lab.wait_for_no_qemu();
    assert_eq!(files_of_images(&scene).len(), 1);
    fs::remove_file(scene.lab.path("serial.log")).expect("the guest begins anew");
    let _supervisor = scene.run();
    assert_eq!(files_of_images(&scene), Vec::<String>::new());
    expect_nothing_to_recover(&scene);
}
