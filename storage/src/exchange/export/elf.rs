//! An ELF core of the guest's physical memory.
//!
//! ```text
//!  ELF header, program headers
//!  notes                          for each CPU: NT_PRSTATUS and QEMU's own
//!  4 KiB steps   PT_LOAD          for each range of physical addresses; zeros are holes of the file
//! ```
//!
//! Virtual addresses in the program headers are the physical ones, so that gdb's `x/16xb 0x100000`
//! shows what is at that physical address.

use std::io;
use std::os::unix::fs::FileExt;

use super::physical::{Physical, Range, physical};
use super::registers::Cpu;
use super::{ElfOptions, ExportError, Registers, sparse_bound, write_sparsely};
use crate::exchange::new_file::NewFile;
use crate::{Image, Run};

const HEADER_BYTES: u64 = 64;
const PROGRAM_HEADER_BYTES: u64 = 56;
const ALIGNMENT: u64 = 4096;

const ET_CORE: u16 = 4;
const EM_X86_64: u16 = 62;
const PT_LOAD: u32 = 1;
const PT_NOTE: u32 = 4;

/// What is in the core, beside RAM.
pub(super) struct Core {
    pub(super) left_out: Vec<String>,
    pub(super) registers: Registers,
}

pub(super) fn write(
    image: &Image,
    options: &ElfOptions,
    new: &NewFile,
    run: &Run<'_>,
) -> Result<Core, ExportError> {
    let recording = image.device_state()?;
    let Physical { ranges, left_out } = physical(recording.machine(), image.layout(), options)?;
    new.check_space(sparse_bound(image)?)?;
    let cpus = match recording.devices() {
        Ok(devices) => Cpu::all(&devices).map_err(str::to_owned),
        Err(error) => Err(error.to_string()),
    };
    let mut notes = Vec::new();
    let with_registers = cpus.as_deref().unwrap_or_default();
    for (index, cpu) in with_registers.iter().enumerate() {
        notes.extend(cpu.prstatus(index));
    }
    for cpu in with_registers {
        notes.extend(cpu.qemu());
    }

    let failed = |source: io::Error| new.failed(source);
    let (head, places, end) = head(&notes, &ranges);
    new.file().set_len(end).map_err(failed)?;
    new.file().write_all_at(&head, 0).map_err(failed)?;
    let mut blocks: Vec<usize> = ranges.iter().map(|range| range.block).collect();
    blocks.dedup();
    blocks.sort_unstable();
    blocks.dedup();
    for block in blocks {
        image.for_each_chunk_of(block, run, |start, length, bytes| {
            let Some(bytes) = bytes else { return Ok(()) };
            let of_block = ranges
                .iter()
                .zip(&places)
                .filter(|(range, _)| range.block == block);
            for (range, place) in of_block {
                // A range may end in the middle of a chunk.
                let first = start.max(range.start);
                let last = (start + length).min(range.start + range.length);
                if first < last {
                    let part = &bytes[(first - start) as usize..(last - start) as usize];
                    write_sparsely(new.file(), part, place + first - range.start).map_err(failed)?;
                }
            }
            Ok(())
        })?;
    }
    let registers = match cpus {
        Ok(cpus) => Registers::Cpus(cpus.len()),
        Err(reason) => Registers::Missing(reason),
    };
    Ok(Core { left_out, registers })
}

/// The headers and notes, where each range goes, and the length of the file.
fn head(notes: &[u8], ranges: &[Range]) -> (Vec<u8>, Vec<u64>, u64) {
    let count = ranges.len() as u64 + 1;
    let notes_at = HEADER_BYTES + count * PROGRAM_HEADER_BYTES;
    let mut end = (notes_at + notes.len() as u64).next_multiple_of(ALIGNMENT);
    let places: Vec<u64> = ranges
        .iter()
        .map(|range| {
            let place = end;
            end += range.length;
            place
        })
        .collect();

    let mut head = b"\x7fELF\x02\x01\x01".to_vec();
    head.resize(16, 0);
    head.extend(ET_CORE.to_le_bytes());
    head.extend(EM_X86_64.to_le_bytes());
    head.extend(1_u32.to_le_bytes());
    head.extend(0_u64.to_le_bytes()); // no entry point
    head.extend(HEADER_BYTES.to_le_bytes());
    head.extend(0_u64.to_le_bytes()); // no sections
    head.extend(0_u32.to_le_bytes());
    for field in [HEADER_BYTES, PROGRAM_HEADER_BYTES, count, 0, 0, 0] {
        head.extend((field as u16).to_le_bytes());
    }
    let mut program_header = |kind: u32, place: u64, address: u64, length: u64, memory: u64| {
        head.extend(kind.to_le_bytes());
        head.extend(0_u32.to_le_bytes());
        for field in [place, address, address, length, memory, 0] {
            head.extend(field.to_le_bytes());
        }
    };
    program_header(PT_NOTE, notes_at, 0, notes.len() as u64, 0);
    for (range, place) in ranges.iter().zip(&places) {
        program_header(PT_LOAD, *place, range.address, range.length, range.length);
    }
    head.extend(notes);
    (head, places, end)
}
