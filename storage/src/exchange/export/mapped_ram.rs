//! QEMU's mapped-ram file: pages at their places, written in parallel, zeros as holes.

use std::io;
use std::os::unix::fs::FileExt;

use super::sparse_bound;
use crate::exchange::new_file::NewFile;
use crate::image::Mismatch;
use crate::migration::{MappedRam, PAGE_BYTES};
use crate::{Image, ImageError, Run};

pub(super) fn write(image: &Image, new: &NewFile, run: &Run<'_>) -> Result<(), ImageError> {
    new.check_space(sparse_bound(image)?)?;
    let failed = |source: io::Error| new.failed(source);
    let mapped = MappedRam::plan(&image.device_state()?).map_err(failed)?;
    let backed = |name: &str| {
        let mut blocks = image.manifest().ram_blocks.iter();
        blocks.any(|block| block.name == name && block.backend.is_some())
    };
    for block in &mapped.blocks {
        let index = image
            .layout()
            .index_of(&block.name)
            .ok_or_else(|| ImageError::Mismatch {
                block: block.name.clone(),
                mismatch: Mismatch::Unknown,
            })?;
        // A loading QEMU leaves absent pages as it finds them. RAM is zero then, a ROM is not: all of
        // its pages are there, zero or not (a hole that is called present costs nothing).
        let all_present = !backed(&block.name);
        let bits = image.for_each_chunk_of(index, run, |start, length, bytes| {
            let written = match bytes {
                Some(bytes) => {
                    super::write_sparsely(new.file(), bytes, block.pages + start).map_err(failed)?
                }
                None => vec![false; (length / PAGE_BYTES as u64) as usize],
            };
            Ok(written.into_iter().map(move |written| written || all_present))
        })?;
        let mut bitmap = vec![0_u8; block.bitmap_bytes() as usize];
        for (page, _) in bits.into_iter().flatten().enumerate().filter(|(_, bit)| *bit) {
            bitmap[page / 8] |= 1 << (page % 8);
        }
        new.file().write_all_at(&bitmap, block.bitmap).map_err(failed)?;
    }
    for (offset, piece) in &mapped.pieces {
        new.file().write_all_at(piece, *offset).map_err(failed)?;
    }
    Ok(())
}
