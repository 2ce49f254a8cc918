//! A guest that writes numbered sectors as fast as its disk takes them, and keeps in its memory how far it is.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::Read,
    os::unix::fs::FileExt,
    path::Path,
};

use crate::{
    guest::{Body, Guest},
    lab::Lab,
    qemu::{QemuBuild, existing, laboratory},
    wait::until,
};

const SECTOR_BYTES: u64 = 512;
const DISK_SECTORS: u64 = 0x20_0000;
const COUNTER_ADDRESS: usize = 0x6000;
const MIRROR: usize = 0x10_0000;
const MIRROR_PAGES: u32 = 4096;
const PAGE_BYTES: usize = 4096;

/// How far behind the last written sector it is looked for others.
const LOOKED_BEHIND: u32 = 4096;

/// A guest of one boot sector that writes sector after sector, each with its number, and mirrors the counter in its memory;
/// see `tests/guest/sector_writer.S`.
pub struct SectorWriter {
    body: Body,
}

impl SectorWriter {
    /// All that the guest writes in its memory is below this address.
    pub const MEMORY_IN_USE: usize = MIRROR + MIRROR_PAGES as usize * PAGE_BYTES;

    /// A guest with 64 MiB of RAM, of which it soon uses 16, and a disk of its own.
    pub fn new(lab: &Lab, build: QemuBuild) -> Self {
        let body = Body::new(lab, build, 64);
        let original = existing(laboratory().join("guest/sector_writer.img"));
        fs::copy(original, &body.disk).expect("the guest's disk can be copied");
        let disk = OpenOptions::new().write(true).open(&body.disk);
        disk.and_then(|disk| disk.set_len(DISK_SECTORS * SECTOR_BYTES))
            .expect("the guest's disk can be sized");
        Self { body }
    }

    /// The QEMU that runs it.
    pub fn build(&self) -> QemuBuild {
        self.body.build
    }

    /// The guest's disk.
    pub fn disk(&self) -> &Path {
        &self.body.disk
    }

    /// Waits until sector `number` is on the disk.
    pub fn wait_for_sector(&self, number: u32) {
        until(&format!("sector {number} of the guest"), || {
            self.expect_no_complaint();
            (self.sector(number) == sector(number)).then_some(())
        });
    }

    /// How many sectors are on the disk: all from the first to this one, each with its number, and none after it.
    ///
    /// # Panics
    ///
    /// When one is missing, wrong, torn, or where none should be.
    pub fn sectors_on_disk(&self) -> u32 {
        Self::sectors_on(self.disk())
    }

    /// The same for another disk that the guest writes to, or has written to.
    pub fn sectors_on(disk: &Path) -> u32 {
        let sector_there = |number| sector_in(disk, number);
        let disk = File::open(disk).expect("the guest's disk can be read");
        let mut disk = std::io::BufReader::with_capacity(1 << 20, disk);
        let mut number = 0;
        let mut found = [0; SECTOR_BYTES as usize];
        disk.read_exact(&mut found).expect("the boot sector");
        loop {
            disk.read_exact(&mut found)
                .expect("the guest's disk is long enough");
            if found == sector(0) {
                break;
            }
            number += 1;
            assert!(
                found == sector(number),
                "in sector {number} is {:?}",
                numbers_in(&found)
            );
        }
        for behind in number + 1..=number + LOOKED_BEHIND {
            assert!(
                sector_there(behind) == sector(0),
                "sector {} was not written, but sector {behind}",
                number + 1
            );
        }
        number
    }

    /// The guest's counter, in a copy of its memory.
    ///
    /// # Panics
    ///
    /// When the mirror is not at the counter or one further.
    pub fn counter_in(memory: &[u8]) -> u32 {
        let counter = dword(memory, COUNTER_ADDRESS);
        let mirror = |number: u32| dword(memory, MIRROR + (number % MIRROR_PAGES) as usize * PAGE_BYTES);
        let newest = counter + u32::from(mirror(counter + 1) == counter + 1);
        for number in newest.saturating_sub(MIRROR_PAGES - 1).max(1)..=newest {
            assert_eq!(
                mirror(number),
                number,
                "in the mirror, with the counter at {counter}"
            );
        }
        counter
    }

    /// # Panics
    ///
    /// When it said anything but that it is ready.
    pub fn expect_no_complaint(&self) {
        let said = self.body.said();
        assert!(said.is_empty() || said == ["ready"], "the guest said {said:?}");
    }

    fn sector(&self, number: u32) -> [u8; SECTOR_BYTES as usize] {
        sector_in(self.disk(), number)
    }

    /// Waits until the guest has written `more` sectors to a raw disk after the ones that are on it.
    pub fn wait_for_more_sectors_on(disk: &Path, more: u32) {
        let last = || {
            let (mut low, mut high) = (0_u32, DISK_SECTORS as u32 - 1);
            while low < high {
                let middle = low + (high - low).div_ceil(2);
                if sector_in(disk, middle) == sector(middle) {
                    low = middle;
                } else {
                    high = middle - 1;
                }
            }
            low
        };
        let wanted = last() + more;
        until(&format!("sector {wanted} on {}", disk.display()), || {
            (sector_in(disk, wanted) == sector(wanted)).then_some(())
        });
    }
}

impl Guest for SectorWriter {
    fn command_line(&self) -> Vec<OsString> {
        self.body.command_line("ide", &[])
    }

    fn monitor_socket(&self) -> &Path {
        &self.body.monitor_socket
    }

    fn ram_bytes(&self) -> u64 {
        self.body.ram_mib << 20
    }
}

fn sector_in(disk: &Path, number: u32) -> [u8; SECTOR_BYTES as usize] {
    let mut found = [0; SECTOR_BYTES as usize];
    File::open(disk)
        .and_then(|disk| disk.read_exact_at(&mut found, u64::from(number) * SECTOR_BYTES))
        .expect("the guest's disk can be read");
    found
}

/// What a sector of this number holds; none was written where it is that of 0.
fn sector(number: u32) -> [u8; SECTOR_BYTES as usize] {
    let mut sector = [0; SECTOR_BYTES as usize];
    for field in sector.chunks_exact_mut(4) {
        field.copy_from_slice(&number.to_le_bytes());
    }
    sector
}

/// The numbers in a sector, each once.
fn numbers_in(sector: &[u8]) -> Vec<u32> {
    let mut numbers: Vec<u32> = (0..sector.len()).step_by(4).map(|at| dword(sector, at)).collect();
    numbers.dedup();
    numbers
}

fn dword(bytes: &[u8], at: usize) -> u32 {
    let field = bytes[at..at + 4].try_into().expect("four bytes");
    u32::from_le_bytes(field)
}
