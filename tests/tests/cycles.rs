//! A guest that writes without a pause is hibernated and woken again and again, and every time its disk is exactly where
//! its memory says: no sector is lost, written twice, or out of order.

use std::path::{Path, PathBuf};

use dormouse_storage::Image;
use dormouse_tests::{Dormouse, Guest, Lab, LoopDevice, PlainQemu, QemuBuild, SectorWriter, until};

/// Together fifty.
const CYCLES: [(QemuBuild, usize); 3] = [
    (QemuBuild::V7_2, 16),
    (QemuBuild::V10_0, 17),
    (QemuBuild::V11_1, 17),
];

/// How many sectors the guest writes at least between two hibernations.
const SECTORS_PER_CYCLE: u32 = 1500;

const PAGE_BYTES: usize = 4096;

/// How a guest gets into an image and out of it again.
struct Cycle {
    engine: &'static str,
    mode: &'static str,
    is_on_device: bool,
}

impl Cycle {
    /// Files and devices take turns, since a guest that was woken by map holds the image that it came from; so do the ways
    /// in and out, each with each.
    fn number(number: usize, build: QemuBuild) -> Self {
        let maps = build.maps_images() && number % 4 < 2;
        Self {
            engine: if number.is_multiple_of(3) {
                "stream"
            } else {
                "auto"
            },
            mode: if maps { "map" } else { "eager" },
            is_on_device: number % 2 == 1,
        }
    }
}

#[test]
fn sixteen_cycles_lose_no_sector_on_qemu_7_2() {
    cycles_lose_no_sector(CYCLES[0]);
}

#[test]
fn seventeen_cycles_lose_no_sector_on_qemu_10_0() {
    cycles_lose_no_sector(CYCLES[1]);
}

#[test]
fn seventeen_cycles_lose_no_sector_on_qemu_11_1() {
    cycles_lose_no_sector(CYCLES[2]);
}

fn cycles_lose_no_sector((build, cycles): (QemuBuild, usize)) {
    let lab = Lab::new();
    let dormouse = Dormouse::new(&lab);
    let guest = SectorWriter::new(&lab, build);
    let device = LoopDevice::with_old_data(&lab, 160);
    let mut engines = Vec::new();

    let mut supervisor = dormouse.run("guest", &guest);
    guest.wait_for_sector(SECTORS_PER_CYCLE);
    for number in 0..cycles {
        let cycle = Cycle::number(number, build);
        let image: PathBuf = if cycle.is_on_device {
            device.path().to_owned()
        } else {
            lab.path("guest.image")
        };
        let mut options = vec!["--engine", cycle.engine];
        if cycle.is_on_device {
            options.push("--replace");
        }
        let hibernating = dormouse.start_hibernating_with("guest", &image, &options);
        let hibernated = dormouse.finish(hibernating).expect_success().result();
        engines.push(hibernated["engine"].to_string());
        supervisor.wait_for_end();
        lab.wait_for_no_qemu();

        // Written, confirmed, counted: a hibernation may come between any two of these.
        let on_disk = guest.sectors_on_disk();
        let counted = SectorWriter::counter_in(&memory_in(&image));
        assert!(
            on_disk == counted || on_disk == counted + 1,
            "cycle {number}: {on_disk} sectors are on the disk, and the guest counted {counted}"
        );

        supervisor = dormouse.wake("guest", &image, &["--mode", cycle.mode]);
        let api = dormouse.state_dir().join("guest/api.sock");
        until("the supervisor's API", || api.exists().then_some(()));
        guest.wait_for_sector(on_disk + SECTORS_PER_CYCLE);
    }
    supervisor.terminate();
    lab.wait_for_no_qemu();
    guest.sectors_on_disk();
    guest.expect_no_complaint();
    for engine in ["direct", "stream"] {
        assert!(engines.iter().any(|used| used.contains(engine)), "{engines:?}");
    }
}

/// The guest's memory as an image has it, as far as the guest uses it.
fn memory_in(image: &Path) -> Vec<u8> {
    let image = Image::open(image).expect("the image can be opened");
    let blocks = image.layout().blocks();
    let ram = blocks.iter().position(|block| block.name == "pc.ram");
    let ram = ram.expect("the image has the guest's RAM");
    let mut reader = image.random();
    let mut memory = Vec::with_capacity(SectorWriter::MEMORY_IN_USE);
    let mut page = [0; PAGE_BYTES];
    while memory.len() < SectorWriter::MEMORY_IN_USE {
        let offset = memory.len() as u64;
        reader.page(ram, offset, &mut page).expect("the page can be read");
        memory.extend_from_slice(&page);
    }
    memory
}

#[test]
fn the_checks_see_a_lost_sector_a_torn_one_and_one_out_of_order() {
    use std::{os::unix::fs::FileExt, panic::catch_unwind};
    let lab = Lab::new();
    let guest = SectorWriter::new(&lab, QemuBuild::V10_0);
    let qemu = PlainQemu::start(&guest);
    guest.wait_for_sector(2000);
    guest.monitor().stop();
    drop(qemu);
    let on_disk = guest.sectors_on_disk();
    let disk = std::fs::File::options().read(true).write(true).open(guest.disk());
    let disk = disk.expect("the disk can be opened");
    let mut original = [0; 512];
    let mut other = [0; 512];
    disk.read_exact_at(&mut original, 1000 * 512).expect("a sector");
    disk.read_exact_at(&mut other, 1001 * 512).expect("a sector");
    let mut torn = original;
    torn[508] ^= 1;
    for damage in [[0; 512], other, torn] {
        disk.write_all_at(&damage, 1000 * 512).expect("a sector");
        let is_seen = catch_unwind(|| guest.sectors_on_disk()).is_err();
        assert!(is_seen, "{damage:?}");
    }
    disk.write_all_at(&original, 1000 * 512).expect("a sector");
    assert_eq!(guest.sectors_on_disk(), on_disk);
    // And one that is ahead of the others.
    disk.write_all_at(&original, u64::from(on_disk + 2) * 512)
        .expect("a sector");
    assert!(catch_unwind(|| guest.sectors_on_disk()).is_err());
}
