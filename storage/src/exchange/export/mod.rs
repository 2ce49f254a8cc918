//! From an image to files of other tools.

mod elf;
mod mapped_ram;
mod physical;
mod registers;
mod stream;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::new_file::NewFile;
use crate::migration::{PAGE_BYTES, StreamError};
use crate::{ByteCount, Image, ImageError, Run, sys};

/// Room for what a file has beside RAM and device state: headers, bitmaps, alignment.
const SPACE_BESIDE: ByteCount = ByteCount::mib(4);

/// What an image is to become.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExportFormat {
    /// A plain migration stream, as QEMU's `migrate` writes it: any QEMU loads it, with `-incoming`
    /// or `migrate-incoming`, as `file:` or `exec:cat`.
    Stream,
    /// A file as QEMU 9.0 and later write it with the capability mapped-ram, zeros left out.
    MappedRam,
    /// An ELF core with guest-physical memory, as QEMU's `dump-guest-memory` makes it: for gdb and
    /// crash.
    Elf(ElfOptions),
}

/// What an image does not tell of where RAM lies.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ElfOptions {
    /// The block that is the machine's main RAM.
    pub main_ram: String,
    /// The machine's property `max-ram-below-4g`, in bytes, if it was set.
    pub max_ram_below_4g: Option<u64>,
}

/// A file that was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exported {
    /// Its length.
    pub length: ByteCount,
    /// The space that it takes.
    pub allocated: ByteCount,
    /// RAM blocks that are not in it, because their address is not known.
    pub left_out: Vec<String>,
    /// What became of the CPUs' registers, in an ELF core.
    pub registers: Option<Registers>,
}

/// Registers in an ELF core.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Registers {
    /// Those of so many CPUs are in it.
    Cpus(usize),
    /// None are, for this reason.
    Missing(String),
}

/// Why an image could not be exported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The image, the target, or the disk.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// Where RAM lies on a machine of this type is not known.
    #[error(
        "where RAM lies in a machine of type {machine:?} is not known; an ELF core can be made of pc-i440fx and pc-q35 \
         machines"
    )]
    Machine {
        /// The machine type.
        machine: String,
    },
    /// The image has no such block.
    #[error("the image has no RAM block {block:?} that could be main RAM")]
    MainRam {
        /// Its name.
        block: String,
    },
    /// So much RAM may be moved by the machine to where it is not known.
    #[error("{ram} of RAM: where the part above {limit} lies depends on the CPU and is not known")]
    TooMuchRam {
        /// How much there is.
        ram: ByteCount,
        /// From where on it is not known.
        limit: ByteCount,
    },
}

impl From<StreamError> for ExportError {
    fn from(error: StreamError) -> Self {
        Self::Image(error.into())
    }
}

/// Writes what is in `image` to a new file at `target`: blocking, with as many threads as `run` says
/// where the format allows it. Every chunk is checked as it is read.
///
/// The state of the image does not matter and is not changed. Whoever runs a guest from the file
/// must know that the image still holds the same guest.
///
/// # Errors
///
/// [`ExportError::Image`] with [`ImageError::TargetExists`], [`ImageError::HoldsGuest`] if there is
/// something at the target that stays, [`ImageError::Corrupt`], [`ImageError::NoSpace`],
/// [`ImageError::Cancelled`], [`ImageError::Io`]; the others for ELF cores. On any error there is no
/// file.
pub fn export(
    image: &Image,
    format: &ExportFormat,
    target: &Path,
    replace: bool,
    run: &Run<'_>,
) -> Result<Exported, ExportError> {
    let new = NewFile::create(target, replace)?;
    let (left_out, registers) = match format {
        ExportFormat::Stream => {
            stream::write(image, &new, run)?;
            (Vec::new(), None)
        }
        ExportFormat::MappedRam => {
            mapped_ram::write(image, &new, run)?;
            (Vec::new(), None)
        }
        ExportFormat::Elf(options) => {
            let core = elf::write(image, options, &new, run)?;
            (core.left_out, Some(core.registers))
        }
    };
    let (length, allocated) = new.publish()?;
    Ok(Exported {
        length,
        allocated,
        left_out,
        registers,
    })
}

/// What a file with zeros left out takes at most.
fn sparse_bound(image: &Image) -> Result<ByteCount, ImageError> {
    let usage = image.usage()?;
    Ok(usage.data + usage.device_state + SPACE_BESIDE)
}

/// Writes the pages in `bytes` that are not zero to their places from `offset` on, neighbours at
/// once. Tells for each page whether it was written.
fn write_sparsely(file: &File, bytes: &[u8], offset: u64) -> io::Result<Vec<bool>> {
    let (pages, _) = bytes.as_chunks::<PAGE_BYTES>();
    let written: Vec<bool> = pages.iter().map(|page| !sys::is_zero(page)).collect();
    let mut at = 0;
    for run in written.chunk_by(|one, next| one == next) {
        let length = run.len() * PAGE_BYTES;
        if run[0] {
            file.write_all_at(&bytes[at..at + length], offset + at as u64)?;
        }
        at += length;
    }
    Ok(written)
}
