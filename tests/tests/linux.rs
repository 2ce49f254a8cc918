//! A Linux guest sleeps and wakes.

use dormouse_tests::{Dormouse, Lab, LinuxGuest, QemuBuild};

#[test]
fn a_linux_guest_wakes_with_its_memory_intact() {
    for mode in ["map", "eager"] {
        wakes_with_its_memory_intact(QemuBuild::V10_0, mode);
    }
}

#[test]
fn a_linux_guest_is_fed_while_it_runs_on_qemu_7_2() {
    wakes_with_its_memory_intact(QemuBuild::V7_2, "lazy");
}

#[test]
fn a_linux_guest_is_fed_while_it_runs_on_qemu_10_0() {
    wakes_with_its_memory_intact(QemuBuild::V10_0, "lazy");
}

#[test]
fn a_linux_guest_is_fed_while_it_runs_on_qemu_11_1() {
    wakes_with_its_memory_intact(QemuBuild::V11_1, "lazy");
}

fn wakes_with_its_memory_intact(build: QemuBuild, mode: &str) {
    let lab = Lab::new();
    let dormouse = Dormouse::new(&lab);
    let guest = LinuxGuest::new(&lab, build);
    let image = lab.path("linux.image");

    let mut supervisor = dormouse.run("linux", &guest);
    guest.wait_for_memory_checks(1);
    dormouse.hibernate("linux", &image).expect_success();
    supervisor.wait_for_end();
    lab.wait_for_no_qemu();
    let tick = guest.last_tick();
    let checks = guest.memory_checks();

    let _woken = dormouse.wake("linux", &image, &["--mode", mode]);
    guest.wait_for_tick(tick + 1);
    // The first check may have been under way when the guest was saved; the second was not.
    guest.wait_for_memory_checks(checks + 2);
}
