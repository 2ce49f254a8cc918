//! Where a guest's RAM lies in its physical address space.
//!
//! Streams do not tell; machine types do. What is known, learned from QEMU's `hw/i386/pc_piix.c` and
//! `pc_q35.c`:
//!
//! ```text
//!              below 4 GiB lies all RAM that is shorter than           else below 4 GiB lie
//!  pc-i440fx   max-ram-below-4g, 3.5 GiB if not set                    that much, but 3 GiB at most
//!  pc-q35      2.75 GiB, or max-ram-below-4g if that is less           2 GiB, or max-ram-below-4g if less
//! ```
//!
//! What remains begins at 4 GiB, and the firmware `pc.bios` ends at 4 GiB.

use super::{ElfOptions, ExportError};
use crate::{ByteCount, Layout};

const FOUR_GIB: u64 = 4 << 30;

/// From here on an AMD machine may move RAM around the addresses of its HyperTransport.
const RAM_LIMIT: ByteCount = ByteCount::gib(1000);

/// A piece of a RAM block at its address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Range {
    /// Index of the block in the image's layout.
    pub(super) block: usize,
    /// Where the piece begins in the block.
    pub(super) start: u64,
    pub(super) length: u64,
    pub(super) address: u64,
}

/// The ranges in order of their addresses, and the names of the blocks that are not among them.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Physical {
    pub(super) ranges: Vec<Range>,
    pub(super) left_out: Vec<String>,
}

pub(super) fn physical(
    machine: &str,
    layout: &Layout,
    options: &ElfOptions,
) -> Result<Physical, ExportError> {
    let main = layout
        .index_of(&options.main_ram)
        .ok_or_else(|| ExportError::MainRam {
            block: options.main_ram.clone(),
        })?;
    let ram = layout.blocks()[main].length;
    if ram > RAM_LIMIT {
        return Err(ExportError::TooMuchRam {
            ram,
            limit: RAM_LIMIT,
        });
    }
    let below = below_4g(machine, ram.0, options.max_ram_below_4g).ok_or_else(|| ExportError::Machine {
        machine: machine.to_owned(),
    })?;
    let mut ranges = vec![Range {
        block: main,
        start: 0,
        length: below,
        address: 0,
    }];
    let firmware = layout.index_of("pc.bios");
    let firmware_length = firmware.map_or(0, |block| layout.blocks()[block].length.0);
    if let Some(block) = firmware.filter(|_| firmware_length <= FOUR_GIB - below) {
        ranges.push(Range {
            block,
            start: 0,
            length: firmware_length,
            address: FOUR_GIB - firmware_length,
        });
    }
    if ram.0 > below {
        ranges.push(Range {
            block: main,
            start: below,
            length: ram.0 - below,
            address: FOUR_GIB,
        });
    }
    let placed = |index: usize| ranges.iter().any(|range| range.block == index);
    let left_out = layout.blocks().iter().enumerate();
    let left_out = left_out
        .filter(|(index, _)| !placed(*index))
        .map(|(_, block)| block.name.clone())
        .collect();
    Ok(Physical { ranges, left_out })
}

/// How much of `ram` lies below 4 GiB; `None` for a machine that is not known.
fn below_4g(machine: &str, ram: u64, limit: Option<u64>) -> Option<u64> {
    let low = if let Some(version) = machine.strip_prefix("pc-i440fx-") {
        // Machines before 2.0 did not align what is above to a GiB.
        if version.starts_with("0.") || version.starts_with("1.") {
            return None;
        }
        let limit = limit.unwrap_or(0xe000_0000);
        if ram >= limit {
            limit.min(0xc000_0000)
        } else {
            limit
        }
    } else if machine.starts_with("pc-q35-") {
        let low = if ram >= 0xb000_0000 {
            0x8000_0000
        } else {
            0xb000_0000
        };
        low.min(limit.unwrap_or(FOUR_GIB))
    } else {
        return None;
    };
    Some(ram.min(low))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::BlockSize;

    const GIB: u64 = 1 << 30;
    const MIB: u64 = 1 << 20;

    #[test]
    fn ram_is_split_where_the_machine_type_splits_it() {
        for (machine, ram, limit, below) in [
            ("pc-i440fx-10.0", 64 * MIB, None, 64 * MIB),
            ("pc-i440fx-10.0", 3 * GIB + 256 * MIB, None, 3 * GIB + 256 * MIB),
            ("pc-i440fx-10.0", 3 * GIB + 512 * MIB, None, 3 * GIB),
            ("pc-i440fx-7.2", 8 * GIB, None, 3 * GIB),
            ("pc-i440fx-7.2", 8 * GIB, Some(2 * GIB), 2 * GIB),
            ("pc-q35-10.0", 2 * GIB, None, 2 * GIB),
            ("pc-q35-10.0", 2 * GIB + 512 * MIB, None, 2 * GIB + 512 * MIB),
            ("pc-q35-10.0", 2 * GIB + 768 * MIB, None, 2 * GIB),
            ("pc-q35-10.0", 8 * GIB, None, 2 * GIB),
            ("pc-q35-rhel9.6.0", 8 * GIB, Some(GIB), GIB),
        ] {
            assert_eq!(
                below_4g(machine, ram, limit),
                Some(below),
                "{machine} with {ram:#x}"
            );
        }
        for machine in ["microvm", "virt-10.0", "pc-i440fx-1.7", "q35", ""] {
            assert_eq!(below_4g(machine, GIB, None), None, "{machine}");
        }
    }

    #[test]
    fn what_has_no_known_address_is_named() {
        let block = |name: &str, length| BlockSize {
            name: name.to_owned(),
            length: ByteCount(length),
        };
        let layout = Layout::plan(&[
            block("pc.ram", 5 * GIB),
            block("pc.bios", 256 << 10),
            block("vga.vram", 16 * MIB),
        ])
        .unwrap();
        let options = ElfOptions {
            main_ram: "pc.ram".into(),
            max_ram_below_4g: None,
        };
        let physical = physical("pc-q35-10.0", &layout, &options).unwrap();
        let places: Vec<_> = physical
            .ranges
            .iter()
            .map(|range| (range.block, range.start, range.length, range.address))
            .collect();
        assert_eq!(
            places,
            [
                (0, 0, 2 * GIB, 0),
                (1, 0, 256 << 10, FOUR_GIB - (256 << 10)),
                (0, 2 * GIB, 3 * GIB, FOUR_GIB),
            ]
        );
        assert_eq!(physical.left_out, ["vga.vram"]);
    }
}
