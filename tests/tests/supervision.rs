//! A supervisor is to QEMU's user what QEMU itself was, and its end is not QEMU's.

use std::ffi::OsString;
use std::fs;

use dormouse_tests::{BootSectorGuest, Dormouse, Guest, Lab, PlainQemu, QemuBuild, faults, until};
use rustix::process::Pid;
use serde_json::json;

const REFUSED: i32 = 3;
const UNREACHABLE: i32 = 4;
const CANCELLED: i32 = 6;
const OPERATOR: i32 = 10;
const KILLED: i32 = 128 + 9;

#[test]
fn a_supervisor_ends_with_qemus_status_and_leaves_nothing() {
    let lab = Lab::new();
    let dormouse = Dormouse::new(&lab);
    let guest = BootSectorGuest::new(&lab, QemuBuild::V10_0);

    let mut supervisor = dormouse.run("guest", &guest);
    guest.monitor().execute("quit", json!({}));
    assert_eq!(supervisor.wait_for_end().code(), Some(0));

    let mut supervisor = dormouse.run("guest", &guest);
    assert_eq!(
        supervisor.terminate().code(),
        Some(0),
        "QEMU takes SIGTERM for a request to shut down"
    );

    let mut supervisor = dormouse.run("guest", &guest);
    faults::kill(lab.only_qemu());
    assert_eq!(supervisor.wait_for_end().code(), Some(KILLED));

    assert_eq!(
        faults::files_in(dormouse.state_dir()),
        [".endings"],
        "but for how the VM ended"
    );
}

#[test]
fn a_command_line_that_qemu_refuses_is_told_and_leaves_nothing() {
    let lab = Lab::new();
    let dormouse = Dormouse::new(&lab);
    let mut line = BootSectorGuest::new(&lab, QemuBuild::V10_0).command_line();
    line.extend(["-device", "no-such-device"].map(OsString::from));
    let outcome = dormouse.try_run("guest", &[], &line).expect_exit(REFUSED);
    assert!(outcome.stderr.contains("no-such-device"), "{outcome:#?}");
    assert_eq!(faults::files_in(dormouse.state_dir()), Vec::<String>::new());
    // In the background the same is seen from the front.
    let outcome = dormouse
        .try_run("guest", &["--detach"], &line)
        .expect_exit(REFUSED);
    assert!(outcome.stderr.contains("no-such-device"), "{outcome:#?}");
    lab.wait_for_no_qemu();
}

/// QEMU waits for somebody to connect to a device's socket before it is up.
#[test]
fn a_start_that_is_given_up_leaves_no_qemu() {
    let lab = Lab::new();
    let dormouse = Dormouse::new(&lab);
    let guest = BootSectorGuest::new(&lab, QemuBuild::V10_0);
    let device = format!(
        "socket,id=late,path={},server=on,wait=on",
        lab.path("late.sock").display()
    );
    let mut line = guest.command_line();
    line.extend(["-chardev", &device].map(OsString::from));
    let mut supervisor = dormouse.start("guest", &line);
    until("QEMU to wait", || lab.path("late.sock").exists().then_some(()));
    assert_eq!(supervisor.terminate().code(), Some(CANCELLED));
    lab.wait_for_no_qemu();
    assert_eq!(faults::files_in(dormouse.state_dir()), Vec::<String>::new());
}

#[test]
fn a_name_in_use_is_refused_and_its_vm_undisturbed() {
    let lab = Lab::new();
    let dormouse = Dormouse::new(&lab);
    let guest = BootSectorGuest::new(&lab, QemuBuild::V10_0);
    let _supervisor = dormouse.run("guest", &guest);
    let other = Lab::new();
    let second = BootSectorGuest::new(&other, QemuBuild::V10_0).command_line();
    for options in [&[][..], &["--detach"]] {
        dormouse.try_run("guest", options, &second).expect_exit(REFUSED);
    }
    guest.wait_for_more_ticks();
    dormouse.status("guest").expect_success();
}

#[test]
fn a_vm_in_the_background_is_there_when_its_start_returns() {
    let lab = Lab::new();
    let dormouse = Dormouse::new(&lab);
    let guest = BootSectorGuest::new(&lab, QemuBuild::V10_0);
    let image = lab.path("guest.image");
    let started = dormouse
        .try_run("guest", &["--detach"], &guest.command_line())
        .expect_success();
    assert!(started.stdout.contains("guest: running"), "{started:#?}");
    guest.wait_for_ticks(5);
    dormouse.hibernate("guest", &image).expect_success();
    // Its name is free at once.
    let image = image.to_str().unwrap();
    let woken = dormouse
        .execute(&["wake", image, "--detach", "--json"])
        .expect_success();
    assert_eq!(woken.result()["run_state"], "running");
    assert_eq!(woken.result()["woken"]["mode"], "map");
    guest.wait_for_more_ticks();
}

#[test]
fn a_guest_whose_supervisor_was_killed_lives_on_and_can_be_hibernated() {
    let lab = Lab::new();
    let dormouse = Dormouse::new(&lab);
    let guest = BootSectorGuest::new(&lab, QemuBuild::V10_0);
    let image = lab.path("guest.image");
    dormouse.run("guest", &guest).kill();
    guest.wait_for_more_ticks();
    dormouse
        .try_run("guest", &[], &guest.command_line())
        .expect_exit(REFUSED);
    guest.wait_for_more_ticks();

    dormouse
        .hibernate_by_monitor(&dormouse.own_monitor("guest"), &image)
        .expect_success();
    lab.wait_for_no_qemu();
    let last = guest.last_counter();
    let _woken = dormouse.wake("guest", &image, &[]);
    assert!(guest.wait_for_more_ticks() > last);
}

#[test]
fn a_vm_whose_record_cannot_be_read_is_not_started_a_second_time() {
    let lab = Lab::new();
    let dormouse = Dormouse::new(&lab);
    let guest = BootSectorGuest::new(&lab, QemuBuild::V10_0);
    dormouse.run("guest", &guest).kill();
    let record = dormouse.state_dir().join("guest/vm.json");
    let text = fs::read_to_string(&record).expect("there is a record");
    fs::write(&record, &text[..text.len() / 2]).expect("it can be torn");
    let refused = dormouse
        .try_run("guest", &[], &guest.command_line())
        .expect_exit(OPERATOR);
    assert!(refused.stderr.contains("vm.json cannot be read"), "{refused:#?}");
    guest.wait_for_more_ticks();
}

#[test]
fn an_ending_is_written_down_however_the_path_to_the_monitor_is_spelled() {
    let lab = Lab::new();
    let dormouse = Dormouse::new(&lab);
    let guest = BootSectorGuest::new(&lab, QemuBuild::V10_0);
    let image = lab.path("guest.image");
    dormouse.run("guest", &guest).kill();
    let link = lab.path("link");
    std::os::unix::fs::symlink(dormouse.state_dir().join("guest"), &link).expect("a link can be made");
    dormouse
        .hibernate_by_monitor(&link.join("qmp.sock"), &image)
        .expect_success();
    let status = dormouse.status("guest").expect_success().result();
    assert_eq!(status["ended"], "hibernated", "{status}");
}

#[test]
fn a_supervisor_that_does_not_answer_is_let_go_of_by_a_second_ctrl_c() {
    let lab = Lab::new();
    let dormouse = Dormouse::new(&lab);
    let guest = BootSectorGuest::new(&lab, QemuBuild::V10_0);
    let supervisor = dormouse.run("guest", &guest);
    faults::freeze(supervisor.pid());
    let hibernating = dormouse.start_hibernating("guest", &lab.path("guest.image"));
    let asking = Pid::from_child(&hibernating);
    until("the request to be made", || {
        let name = format!("/proc/{}/task", asking.as_raw_nonzero());
        (fs::read_dir(name).is_ok_and(|threads| threads.count() > 1)).then_some(())
    });
    // Each is one if they are not at once; more than two do no harm.
    let mut hibernating = Some(hibernating);
    let outcome = until("the client to end", || {
        let mut running = hibernating.take()?;
        if running.try_wait().expect("it can be looked at").is_none() {
            faults::interrupt(asking);
            hibernating = Some(running);
            return None;
        }
        Some(dormouse.finish(running))
    });
    // What becomes of the request then is not told: it may have been read.
    faults::thaw(supervisor.pid());
    let message = outcome.expect_exit(UNREACHABLE).result()["error"]["message"].clone();
    assert!(message.to_string().contains("does not answer"), "{message}");
}

#[test]
fn a_qemu_without_supervisor_is_hibernated_over_its_monitor() {
    let lab = Lab::new();
    let dormouse = Dormouse::new(&lab);
    let guest = BootSectorGuest::new(&lab, QemuBuild::V10_0);
    let ram = format!(
        "memory-backend-file,id=pc.ram,size=64M,share=on,mem-path={}",
        lab.path("ram").display()
    );
    let plain = PlainQemu::start_with(&guest, &["-object", &ram, "-machine", "memory-backend=pc.ram"]);
    guest.wait_for_ticks(5);
    let image = lab.path("guest.image");
    dormouse
        .hibernate_by_monitor(guest.monitor_socket(), &image)
        .expect_success();
    drop(plain);
    let last = guest.last_counter();
    let _woken = dormouse.wake("guest", &image, &[]);
    assert!(guest.wait_for_more_ticks() > last);
}

#[test]
fn a_monitor_that_is_taken_is_told_so() {
    let lab = Lab::new();
    let dormouse = Dormouse::new(&lab);
    let guest = BootSectorGuest::new(&lab, QemuBuild::V10_0);
    let _supervisor = dormouse.run("guest", &guest);
    let image = lab.path("guest.image");
    let outcome = dormouse
        .hibernate_by_monitor(&dormouse.own_monitor("guest"), &image)
        .expect_exit(UNREACHABLE);
    let message = outcome.result()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("another client holds it"), "{message}");
    guest.wait_for_more_ticks();
    assert!(fs::metadata(image).is_err());
}
