//! Many guests of one host.

use std::thread;

use dormouse_tests::{BootSectorGuest, Dormouse, Lab, QemuBuild};

#[test]
fn twenty_guests_that_wake_at_once_all_count_on_each_from_its_own_memory() {
    let host = Lab::new();
    // A folder for each, and one state directory for all.
    let labs: Vec<Lab> = (0..20).map(|_| Lab::new()).collect();
    let builds = [QemuBuild::V10_0, QemuBuild::V11_1, QemuBuild::V7_2];
    let modes = ["map", "eager", "stream", "lazy"];
    let sleepers: Vec<_> = labs
        .iter()
        .enumerate()
        .map(|(number, lab)| {
            let build = builds[number % 3];
            let mode = modes[(number / 3) % 4];
            let mode = if mode == "map" && !build.maps_images() {
                "eager"
            } else {
                mode
            };
            let dormouse = Dormouse::new(lab).with_state_dir(host.path("state"));
            let guest = BootSectorGuest::with_ram(lab, build, 32);
            let (name, image) = (format!("guest-{number}"), lab.path("guest.image"));
            let mut supervisor = dormouse.run(&name, &guest);
            guest.wait_for_ticks(5);
            dormouse.hibernate(&name, &image).expect_success();
            supervisor.wait_for_end();
            lab.wait_for_no_qemu();
            (name, image, mode, dormouse, guest)
        })
        .collect();
    thread::scope(|scope| {
        for (name, image, mode, dormouse, guest) in &sleepers {
            scope.spawn(move || {
                let last = guest.last_counter();
                let mut woken = dormouse.wake(name, image, &["--mode", mode]);
                assert!(guest.wait_for_more_ticks() > last, "{name} by {mode}");
                woken.terminate();
            });
        }
    });
}
