//! RAM of a mapped-ram file: read in parallel, each page from its place. A page whose bit is not set is
//! zero, whatever is at its place.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::staging::Staging;
use crate::image::chunks::CHUNK_BYTES;
use crate::image::for_each_chunk;
use crate::migration::{MappedBlock, PAGE_BYTES};
use crate::{ImageError, Run, sys};

const CHUNK_PAGES: u64 = CHUNK_BYTES as u64 / PAGE_BYTES as u64;

pub(super) fn stage(
    file: &File,
    path: &Path,
    blocks: &[MappedBlock],
    staging: &Staging,
    run: &Run<'_>,
) -> Result<(), ImageError> {
    let failed = |source: io::Error| ImageError::io("read", path, source);
    for (index, block) in blocks.iter().enumerate() {
        let pages = block.length / PAGE_BYTES as u64;
        let chunks = pages.div_ceil(CHUNK_PAGES) as usize;
        let buffer = || vec![0; CHUNK_BYTES as usize];
        let stage_chunk = |buffer: &mut Vec<u8>, chunk: usize| {
            let first = chunk as u64 * CHUNK_PAGES;
            let count = CHUNK_PAGES.min(pages - first);
            let mut bits = [0_u8; CHUNK_PAGES as usize / 8];
            let bits = &mut bits[..count.div_ceil(8) as usize];
            file.read_exact_at(bits, block.bitmap + first / 8)
                .map_err(failed)?;
            let is_there = |page: u64| bits[(page / 8) as usize] & (1 << (page % 8)) != 0;
            let places: Vec<u64> = (0..count).collect();
            for neighbours in places.chunk_by(|one, next| is_there(*one) == is_there(*next)) {
                if !is_there(neighbours[0]) {
                    continue;
                }
                let bytes = &mut buffer[..neighbours.len() * PAGE_BYTES];
                let offset = (first + neighbours[0]) * PAGE_BYTES as u64;
                file.read_exact_at(bytes, block.pages + offset).map_err(failed)?;
                if !sys::is_zero(bytes) {
                    staging.write(index, offset, bytes)?;
                }
            }
            run.progress.advance(count * PAGE_BYTES as u64);
            Ok(())
        };
        for_each_chunk(run, chunks, buffer, stage_chunk, |_| Ok(()))?;
    }
    Ok(())
}
