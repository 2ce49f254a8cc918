//! RAM on its way: one file without a name for each block, with zeros as holes.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::image::error::is_out_of_space;
use crate::migration::PAGE_BYTES;
use crate::{BlockSize, ByteCount, GuestMemory, ImageError};

/// So many neighbouring pages are written at once.
const RUN_BYTES: usize = 1 << 20;

/// Pages whose bits are kept together.
const GROUP_PAGES: u64 = u64::BITS as u64;

/// RAM blocks in files.
#[derive(Debug)]
pub(super) struct Staging {
    folder: PathBuf,
    blocks: Vec<BlockSize>,
    files: Vec<File>,
    /// Pages that came, by block and group. Grows with what came, not with what was announced.
    came: BTreeMap<(usize, u64), Group>,
    run: PendingRun,
}

#[derive(Debug, Clone, Copy, Default)]
struct Group {
    came: u64,
    /// Those that a file holds, so that a page that became zero is overwritten.
    data: u64,
}

/// Neighbouring pages that are not written yet.
#[derive(Debug, Default)]
struct PendingRun {
    block: usize,
    start: u64,
    bytes: Vec<u8>,
}

impl Staging {
    pub(super) fn create(folder: &Path, blocks: &[BlockSize]) -> Result<Self, ImageError> {
        let files = blocks.iter().map(|block| {
            let file = tempfile::tempfile_in(folder)?;
            file.set_len(block.length.0)?;
            Ok(file)
        });
        let files = files
            .collect::<io::Result<_>>()
            .map_err(|source| ImageError::io("stage RAM in", folder, source))?;
        Ok(Self {
            folder: folder.to_owned(),
            blocks: blocks.to_vec(),
            files,
            came: BTreeMap::new(),
            run: PendingRun::default(),
        })
    }

    pub(super) fn blocks(&self) -> &[BlockSize] {
        &self.blocks
    }

    /// A page that came in a stream; `None` for zeros. What came before at its place is gone.
    pub(super) fn put(
        &mut self,
        block: usize,
        offset: u64,
        page: Option<&[u8; PAGE_BYTES]>,
    ) -> Result<(), ImageError> {
        let number = offset / PAGE_BYTES as u64;
        let group = self.came.entry((block, number / GROUP_PAGES)).or_default();
        let bit = 1 << (number % GROUP_PAGES);
        group.came |= bit;
        let page = match page {
            Some(page) => page,
            None if group.data & bit == 0 => return Ok(()),
            None => &[0; PAGE_BYTES],
        };
        group.data |= bit;
        let goes_on = self.run.block == block
            && self.run.start + self.run.bytes.len() as u64 == offset
            && self.run.bytes.len() < RUN_BYTES;
        if !goes_on {
            self.flush()?;
            (self.run.block, self.run.start) = (block, offset);
        }
        self.run.bytes.extend_from_slice(page);
        Ok(())
    }

    /// Writes what is still pending.
    pub(super) fn flush(&mut self) -> Result<(), ImageError> {
        self.write(self.run.block, self.run.start, &self.run.bytes)?;
        self.run.bytes.clear();
        Ok(())
    }

    /// Pages of the block that came, each counted once.
    pub(super) fn pages_of(&self, block: usize) -> u64 {
        let groups = self.came.range((block, 0)..=(block, u64::MAX));
        groups.map(|(_, group)| u64::from(group.came.count_ones())).sum()
    }

    /// Writes bytes to their place in a block.
    pub(super) fn write(&self, block: usize, offset: u64, bytes: &[u8]) -> Result<(), ImageError> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.files[block].write_all_at(bytes, offset).map_err(|source| {
            if is_out_of_space(&source) {
                return ImageError::NoSpace {
                    needed: self.blocks.iter().map(|block| block.length).sum(),
                    available: super::free_in(&self.folder).unwrap_or(ByteCount::ZERO),
                    path: self.folder.clone(),
                };
            }
            ImageError::io("stage RAM in", &self.folder, source)
        })
    }

    /// The blocks as memory that can be written to an image.
    pub(super) fn into_memory(self) -> Result<Vec<(String, GuestMemory)>, ImageError> {
        let blocks = self.blocks.into_iter().zip(self.files);
        blocks
            .map(|(block, file)| Ok((block.name, GuestMemory::map(file, block.length)?)))
            .collect()
    }
}
