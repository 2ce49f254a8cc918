//! Copies that are compared with what they are copies of before the guest is switched to them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on ends here")]

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use dormouse_tests::{Dormouse, Guest, Lab, LoopDevice, MovingGuest, QemuBuild, SectorWriter, faults, until};
use serde_json::json;

const REFUSED: i32 = 3;
const STORAGE_IO: i32 = 9;
const ALL: [QemuBuild; 3] = [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1];

/// What the guest writes all the time is no difference, and none of it is lost.
#[test]
fn a_copy_is_compared_while_its_guest_writes_on_every_qemu() {
    for build in ALL {
        let moving = MovingGuest::start(build);
        let first = moving.guest.disk().to_owned();
        let second = moving.lab.path("second");
        for (to, options) in [(&second, ",create"), (&first, "")] {
            let moved = moving.moves_to(to, options, &["--verify"]).expect_success();
            let moved = moved.result();
            assert!(moved["timings_ms"]["Verifying"].is_number(), "{moved}");
            SectorWriter::wait_for_more_sectors_on(to, 200);
        }
        let (guest, _lab) = moving.end();
        guest.sectors_on_disk();
    }
}

#[test]
fn a_copy_on_a_larger_device_is_compared_as_far_as_the_disk_goes() {
    let moving = MovingGuest::start(QemuBuild::V10_0);
    let device = LoopDevice::with_old_data(&moving.lab, 1040);
    moving.moves_to(device.path(), "", &["--verify"]).expect_success();
    SectorWriter::wait_for_more_sectors_on(device.path(), 200);
    let (_guest, _lab) = moving.end();
    drop(device);
}

fn first_bytes(file: &Path) -> Vec<u8> {
    let mut bytes = vec![0; 512];
    let read = fs::File::open(file).and_then(|file| file.read_at(&mut bytes, 0));
    read.map_or_else(|_| Vec::new(), |_| bytes)
}

/// A volume that does not keep what is written to it: something that was copied already becomes something else.
#[test]
fn a_copy_that_went_bad_is_not_switched_to_on_any_qemu() {
    for build in ALL {
        let lab = Lab::new();
        let dormouse = Dormouse::new(&lab);
        let guest = SectorWriter::new(&lab, build);
        let _supervisor = dormouse.run("guest", &guest);
        guest.wait_for_sector(200);
        let target = lab.path("new");
        let wish = format!("{}={},create", MovingGuest::DISK, target.display());
        let arguments = ["volume", "move", "guest", "--json", "--volume", &wish];
        let moving = dormouse.spawn(&[&arguments[..], &["--verify", "--speed", "64K"]].concat());
        let boot_sector = first_bytes(guest.disk());
        until("the boot sector to be copied", || {
            (first_bytes(&target) == boot_sector).then_some(())
        });
        faults::flip(&target, 17);
        dormouse
            .execute(&["volume", "speed", "guest", "unlimited"])
            .expect_success();
        let failed = dormouse.finish(moving).expect_exit(STORAGE_IO).result();
        let message = failed["error"]["message"].as_str().unwrap();
        assert!(message.contains("the first at byte 0"), "{message}");
        assert!(!target.exists(), "what was made is removed");
        assert_eq!(guest.monitor().execute("query-jobs", json!({})), json!([]));
        assert!(faults::has_open(lab.only_qemu(), guest.disk()));
        SectorWriter::wait_for_more_sectors_on(guest.disk(), 200);
        guest.monitor().stop();
        guest.sectors_on_disk();
        guest.expect_no_complaint();
    }
}

#[test]
fn volumes_that_cannot_be_compared_are_told_before_anything_is_touched() {
    let moving = MovingGuest::start(QemuBuild::V10_0);
    let target = moving.lab.path("new.qcow2");
    let refused = moving.moves_to(&target, ",create,format=qcow2", &["--verify"]);
    let refused = refused.expect_exit(REFUSED);
    assert!(refused.stdout.contains("the new one is qcow2"), "{refused:#?}");
    assert!(!target.exists());
}
