//! The laboratory itself: its guests run, and can be checked, under QEMU without Dormouse.

use dormouse_tests::{BootSectorGuest, Guest, Lab, LinuxGuest, PlainQemu, QemuBuild, until};

#[test]
fn the_boot_sector_guest_counts_on_qemu_7_2() {
    the_boot_sector_guest_counts(QemuBuild::V7_2);
}

#[test]
fn the_boot_sector_guest_counts_on_qemu_10_0() {
    the_boot_sector_guest_counts(QemuBuild::V10_0);
}

#[test]
fn the_boot_sector_guest_counts_on_qemu_11_1() {
    the_boot_sector_guest_counts(QemuBuild::V11_1);
}

fn the_boot_sector_guest_counts(build: QemuBuild) {
    let lab = Lab::new();
    let guest = BootSectorGuest::new(&lab, build);
    let _qemu = PlainQemu::start(&guest);
    guest.wait_for_ticks(20);

    let mut monitor = guest.monitor();
    monitor.stop();
    let memory = monitor.memory(guest.ram_bytes(), &lab.path("memory"));
    let printed = guest.last_counter();
    assert_eq!(BootSectorGuest::pattern_faults(&memory), Vec::<usize>::new());
    assert!(BootSectorGuest::counter_in(&memory) >= printed);
    assert!(guest.counter_on_disk() >= printed);

    let later = monitor.memory(guest.ram_bytes(), &lab.path("memory-later"));
    assert!(memory == later, "the memory of a stopped guest changed");
    monitor.cont();
    assert!(guest.wait_for_more_ticks() > printed);
    assert_eq!(monitor.status(), "running");
}

#[test]
fn the_checks_see_a_memory_fault() {
    let lab = Lab::new();
    let guest = BootSectorGuest::new(&lab, QemuBuild::V10_0);
    let _qemu = PlainQemu::start(&guest);
    guest.wait_for_ticks(1);
    let mut monitor = guest.monitor();
    monitor.stop();
    let mut memory = monitor.memory(guest.ram_bytes(), &lab.path("memory"));
    let landmark = BootSectorGuest::landmark();
    let places = memory.windows(landmark.len()).filter(|part| *part == landmark);
    assert_eq!(places.count(), 1);

    memory[0x20_0001] ^= 1;
    assert_eq!(BootSectorGuest::pattern_faults(&memory), [0x20_0000]);
}

#[test]
fn the_linux_guest_is_up_and_finds_its_memory_intact() {
    let lab = Lab::new();
    let guest = LinuxGuest::new(&lab, QemuBuild::V10_0);
    let _qemu = PlainQemu::start(&guest);
    guest.wait_for_tick(5);
    guest.wait_for_memory_checks(1);
}

#[test]
fn nothing_outlives_the_lab() {
    let lab = Lab::new();
    let guest = BootSectorGuest::new(&lab, QemuBuild::V10_0);
    let qemu = PlainQemu::start(&guest);
    guest.wait_for_ticks(1);
    let pid = lab.only_qemu();
    // The handle is lost, as when a supervisor dies.
    std::mem::forget(qemu);
    drop(lab);
    // It is our own child that nobody waits for, so that it stays listed, as a zombie.
    let stat = format!("/proc/{}/stat", pid.as_raw_nonzero());
    until("QEMU to end", || {
        let stat = std::fs::read_to_string(&stat).expect("an unwaited child is listed");
        stat.contains(") Z ").then_some(())
    });
}
