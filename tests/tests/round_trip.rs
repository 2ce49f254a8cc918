//! Hibernated and woken, a running guest goes on where it was.

use dormouse_tests::{BootSectorGuest, Dormouse, Lab, QemuBuild};

#[test]
fn a_running_guest_counts_on_under_qemu_7_2() {
    a_running_guest_counts_on(QemuBuild::V7_2);
}

#[test]
fn a_running_guest_counts_on_under_qemu_10_0() {
    a_running_guest_counts_on(QemuBuild::V10_0);
}

#[test]
fn a_running_guest_counts_on_under_qemu_11_1() {
    a_running_guest_counts_on(QemuBuild::V11_1);
}

fn modes(build: QemuBuild) -> &'static [&'static str] {
    if build.maps_images() {
        &["eager", "map", "stream"]
    } else {
        &["eager", "stream"]
    }
}

/// The guest runs right up to the save, and again from the wake.
fn a_running_guest_counts_on(build: QemuBuild) {
    for mode in modes(build) {
        let lab = Lab::new();
        let dormouse = Dormouse::new(&lab);
        let guest = BootSectorGuest::new(&lab, build);
        let image = lab.path("guest.image");

        let mut supervisor = dormouse.run("guest", &guest);
        guest.wait_for_ticks(20);
        dormouse.hibernate("guest", &image).expect_success();
        supervisor.wait_for_end();
        lab.wait_for_no_qemu();
        expect_sealed(&dormouse, &image);
        let last_printed = guest.last_counter();
        assert!(
            guest.counter_on_disk() >= last_printed,
            "a printed number is on the disk"
        );

        let mut woken = dormouse.wake("guest", &image, &["--mode", mode]);
        assert!(guest.wait_for_more_ticks() > last_printed, "woken by {mode}");
        woken.terminate();
        lab.wait_for_no_qemu();
        assert!(guest.counter_on_disk() >= guest.last_counter());
    }
}

fn expect_sealed(dormouse: &Dormouse, image: &std::path::Path) {
    let inspected = dormouse.image("inspect", image, &["--json"]).expect_success();
    assert_eq!(inspected.result()["state"], "sealed");
    dormouse.image("verify", image, &[]).expect_success();
}
