//! A guest that saves itself: its agent is asked, and how it ends is told apart. The agent is a scripted one; the guest
//! powers off as any guest does, by the registers of its board.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::mpsc;

use dormouse_tests::{
    BootSectorGuest, Guest, Monitor, Outcome, PATIENCE, PlainQemu, QemuBuild, Scene, Suspend, faults,
    play_agent, until,
};
use rustix::process::Pid;
use serde_json::json;

const USAGE: i32 = 2;
const REFUSED: i32 = 3;
const UNREACHABLE: i32 = 4;
const TIMED_OUT: i32 = 5;
const CANCELLED: i32 = 6;
const OPERATOR: i32 = 10;

const ABLE: &[&str] = &["guest-info", "guest-suspend-disk"];

/// Board registers that a guest powers off by: SLP_EN, and beside it the sleep type, which is 2 for S4.
const PLAIN_POWER_OFF: &str = "o /h 0x604 0x2000";
const GO_TO_S4: &str = "o /h 0x604 0x2800";

fn write_register(monitor: &Path, command: &str) {
    Monitor::connect(monitor).execute("human-monitor-command", json!({"command-line": command}));
}

/// An agent that does `command` to the guest's board when it is asked.
fn obeying(scene: &Scene, command: &'static str) -> Suspend {
    let monitor = scene.guest.monitor_socket().to_owned();
    Box::new(move || {
        write_register(&monitor, command);
        None
    })
}

fn agent_socket(scene: &Scene) -> PathBuf {
    scene.lab.path("qga.sock")
}

/// The guest with a port for its agent.
fn with_port(scene: &Scene) -> Vec<OsString> {
    let chardev = format!(
        "socket,id=qga0,path={},server=on,wait=off",
        agent_socket(scene).display()
    );
    let mut line = scene.guest.command_line();
    line.extend(["-device", "virtio-serial", "-chardev", &chardev].map(OsString::from));
    line.extend(
        [
            "-device",
            "virtserialport,chardev=qga0,name=org.qemu.guest_agent.0",
        ]
        .map(OsString::from),
    );
    line
}

fn suspend(scene: &Scene, of: &[&str], more: &[&str]) -> Outcome {
    let command = [&["hibernate", "--mode", "suspend-to-disk", "--json"], of, more].concat();
    scene.dormouse.execute(&command)
}

/// Asks the agent at the scene's own socket, over the guest's second monitor.
fn suspend_by_monitor(scene: &Scene, more: &[&str]) -> Outcome {
    let (agent, monitor) = (agent_socket(scene), scene.guest.monitor_socket());
    let of = [
        "--qmp",
        monitor.to_str().expect("paths of the lab are text"),
        "--agent",
        agent.to_str().expect("paths of the lab are text"),
    ];
    suspend(scene, &of, more)
}

#[test]
fn a_guest_that_goes_to_s4_is_suspended_and_its_name_is_free_on_every_qemu() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let scene = Scene::new(build);
        scene
            .dormouse
            .try_run("guest", &["--detach"], &with_port(&scene))
            .expect_success();
        scene.guest.wait_for_ticks(5);
        // In QEMU's place, where QEMU says that it listens: nobody reads its own end inside this guest.
        play_agent(&agent_socket(&scene), ABLE, obeying(&scene, GO_TO_S4));
        let result = suspend(&scene, &["guest"], &[]).expect_success().result();
        assert_eq!(result["result"], "suspended-to-disk", "{build}: {result}");
        assert_eq!(result["by_s4"], true, "{build}: {result}");
        assert_eq!(result["agent"], agent_socket(&scene).to_str().unwrap(), "{build}");
        scene.lab.wait_for_no_qemu();
        // The guest can be started again at once, as it is done with one that is to resume.
        let _again = scene.dormouse.run("guest", &scene.guest);
    }
}

#[test]
fn a_qemu_that_was_told_to_stay_is_ended_once_its_guest_is_off() {
    let scene = Scene::new(QemuBuild::V10_0);
    let guest = KeptApart::of(&scene, &["-no-shutdown"]);
    play_agent(&agent_socket(&scene), ABLE, guest.obeying(PLAIN_POWER_OFF));
    let outcome = suspend_by_monitor(&scene, &[]).expect_success();
    assert_eq!(outcome.result()["result"], "suspended-to-disk");
    assert_eq!(outcome.result()["by_s4"], false);
    scene.lab.wait_for_no_qemu();
}

#[test]
fn what_the_agent_refuses_is_told_in_its_words_and_the_guest_runs_on() {
    let scene = Scene::new(QemuBuild::V10_0);
    let _supervisor = scene.run();
    let agent = agent_socket(&scene);
    let by_agent = ["--agent", agent.to_str().unwrap()];
    let refusal = || Some(json!({"error": {"class": "Unsupported", "desc": "no swap in this guest"}}));
    play_agent(&agent, ABLE, Box::new(refusal));
    let outcome = suspend(&scene, &["guest"], &by_agent).expect_exit(REFUSED);
    let error = outcome.result()["error"].clone();
    assert_eq!(
        error["message"],
        "guest-suspend-disk: Unsupported: no swap in this guest"
    );
    assert_eq!(error["guest"], "running");

    // One that may not do it is not asked: this one would panic.
    let agent = scene.lab.path("other.sock");
    let by_agent = ["--agent", agent.to_str().unwrap()];
    play_agent(&agent, &["guest-info"], Box::new(|| panic!("it was asked")));
    let outcome = suspend(&scene, &["guest"], &by_agent).expect_exit(REFUSED);
    let message = outcome.result()["error"]["message"].to_string();
    assert!(message.contains("does not know guest-suspend-disk"), "{message}");

    // Without an agent's port there is nobody to ask.
    let outcome = suspend(&scene, &["guest"], &[]).expect_exit(REFUSED);
    let message = outcome.result()["error"]["message"].to_string();
    assert!(message.contains("no virtio-serial port"), "{message}");
    scene.guest.wait_for_more_ticks();
    // The supervisor takes the next wish as ever.
    scene.dormouse.hibernate("guest", &scene.image()).expect_success();
}

#[test]
fn an_agent_that_does_not_answer_is_told_apart_from_one_that_refuses() {
    let scene = Scene::new(QemuBuild::V10_0);
    scene
        .dormouse
        .try_run("guest", &["--detach"], &with_port(&scene))
        .expect_success();
    scene.guest.wait_for_ticks(5);
    // QEMU's own socket, found by its port; no agent runs in this guest.
    let outcome = suspend(&scene, &["guest"], &[]).expect_exit(UNREACHABLE);
    let error = outcome.result()["error"].clone();
    let message = error["message"].to_string();
    assert!(message.contains("no guest agent answered"), "{message}");
    assert_eq!(error["guest"], "running");
    scene.guest.wait_for_more_ticks();
}

#[test]
fn a_guest_that_is_not_off_in_time_is_told_with_what_it_does() {
    let scene = Scene::new(QemuBuild::V10_0);
    let _supervisor = scene.run();
    let agent = agent_socket(&scene);
    play_agent(&agent, ABLE, Box::new(|| None));
    let options = ["--agent", agent.to_str().unwrap(), "--timeout", "1s"];
    let outcome = suspend(&scene, &["guest"], &options).expect_exit(TIMED_OUT);
    let error = outcome.result()["error"].clone();
    assert_eq!(error["guest"], "running");
    assert!(
        error["message"]
            .to_string()
            .contains("1s later the guest is still"),
        "{error}"
    );
    scene.guest.wait_for_more_ticks();
}

#[test]
fn a_qemu_that_somebody_ends_has_not_suspended_its_guest() {
    let expect_doubt = |scene: &Scene, words: &str| {
        let outcome = suspend_by_monitor(scene, &[]).expect_exit(OPERATOR);
        let error = outcome.result()["error"].clone();
        assert!(error["message"].to_string().contains(words), "{error}");
        assert_eq!(error["guest"], "stopped");
    };
    let scene = Scene::new(QemuBuild::V10_0);
    let guest = KeptApart::of(&scene, &[]);
    let monitor = guest.monitor.clone();
    let quit = move || {
        Monitor::connect(&monitor).execute("quit", json!({}));
        None
    };
    play_agent(&agent_socket(&scene), ABLE, Box::new(quit));
    expect_doubt(&scene, "host-qmp-quit");

    let scene = Scene::new(QemuBuild::V10_0);
    let _guest = KeptApart::of(&scene, &[]);
    let qemu = scene.lab.only_qemu();
    let kill = move || {
        faults::kill(qemu);
        None
    };
    play_agent(&agent_socket(&scene), ABLE, Box::new(kill));
    expect_doubt(&scene, "was gone");
}

#[test]
fn a_ctrl_c_before_the_guest_is_asked_leaves_it_alone() {
    let scene = Scene::new(QemuBuild::V10_0);
    scene
        .dormouse
        .try_run("guest", &["--detach"], &with_port(&scene))
        .expect_success();
    scene.guest.wait_for_ticks(5);
    let command = ["hibernate", "guest", "--mode", "suspend-to-disk", "--json"];
    let command = scene.dormouse.spawn(&command);
    until("the operation to begin", || {
        let operation = scene.dormouse.status("guest").result()["operation"].clone();
        (operation["kind"] == "suspend-to-disk").then_some(())
    });
    let pid = i32::try_from(command.id()).ok().and_then(Pid::from_raw);
    faults::interrupt(pid.unwrap());
    let outcome = scene.dormouse.finish(command).expect_exit(CANCELLED);
    assert_eq!(outcome.result()["error"]["guest"], "running");
    scene.guest.wait_for_more_ticks();
}

#[test]
fn a_dormouse_that_is_killed_while_the_guest_saves_itself_leaves_nothing_to_recover() {
    let scene = Scene::new(QemuBuild::V10_0);
    let guest = KeptApart::of(&scene, &[]);
    let (tell, asked) = mpsc::channel();
    let silent = move || {
        // Nobody listens once the test has failed.
        let _ = tell.send(());
        None
    };
    play_agent(&agent_socket(&scene), ABLE, Box::new(silent));
    let (agent, monitor) = (agent_socket(&scene), scene.guest.monitor_socket());
    let command = scene.dormouse.spawn(&[
        "hibernate".as_ref(),
        "--mode".as_ref(),
        "suspend-to-disk".as_ref(),
        "--qmp".as_ref(),
        monitor.as_os_str(),
        "--agent".as_ref(),
        agent.as_os_str(),
    ]);
    asked.recv_timeout(PATIENCE).expect("the agent is asked");
    faults::kill(Pid::from_child(&command));
    scene.dormouse.finish(command);
    let recovered = scene.dormouse.recover(&[]).expect_success().result();
    assert_eq!(recovered, json!({"operations": 0}));
    // The guest does what it was asked for all the same, and takes QEMU with it.
    scene.guest.wait_for_more_ticks();
    write_register(&guest.monitor, PLAIN_POWER_OFF);
    scene.lab.wait_for_no_qemu();
}

#[test]
fn an_image_and_a_suspend_to_disk_exclude_each_other() {
    let scene = Scene::new(QemuBuild::V10_0);
    let outcome = suspend(&scene, &["guest"], &["--to", "/x"]).expect_exit(USAGE);
    assert!(outcome.result()["error"]["message"].to_string().contains("--to"));
    suspend(&scene, &["guest"], &["--compress", "zstd"]).expect_exit(USAGE);
    let image = ["hibernate", "guest", "--to", "/x", "--agent", "/y"];
    scene.dormouse.execute(&image).expect_exit(USAGE);
    scene.dormouse.execute(&["hibernate", "guest"]).expect_exit(USAGE);
}

/// A QEMU without a supervisor, with one more monitor, for the test to act through while Dormouse holds the other.
struct KeptApart {
    monitor: PathBuf,
    _qemu: PlainQemu,
}

impl KeptApart {
    fn of(scene: &Scene, more: &[&str]) -> Self {
        let monitor = scene.lab.path("third-monitor.sock");
        let option = format!("unix:{},server=on,wait=off", monitor.display());
        let guest: &BootSectorGuest = &scene.guest;
        let qemu = PlainQemu::start_with(guest, &[&["-qmp", &option], more].concat());
        guest.wait_for_ticks(5);
        Self { monitor, _qemu: qemu }
    }

    fn obeying(&self, command: &'static str) -> Suspend {
        let monitor = self.monitor.clone();
        Box::new(move || {
            write_register(&monitor, command);
            None
        })
    }
}
