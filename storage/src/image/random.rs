//! Pages of an image in any order.

use super::codec::Unpacker;
use super::{Image, ImageError, Mismatch};
use crate::memory::PAGE_BYTES;
use crate::migration;

/// Reads single pages of an image, each from a chunk that was checked. Comes from [`Image::random`].
///
/// The last chunk is kept: who touches a page often touches its neighbours.
#[derive(Debug)]
pub struct RandomReader<'a> {
    image: &'a Image,
    unpacker: Unpacker,
    /// Block and index of the chunk that is kept, and whether it holds anything.
    kept: Option<(usize, usize, bool)>,
}

impl<'a> RandomReader<'a> {
    pub(super) fn of(image: &'a Image) -> Self {
        Self {
            image,
            unpacker: image.unpacker(),
            kept: None,
        }
    }

    /// Reads the page at `offset` (a multiple of 4 KiB) of the block with this index in
    /// [`Layout::blocks`](super::Layout::blocks).
    ///
    /// # Errors
    ///
    /// [`ImageError::Mismatch`] if there is no such page; [`ImageError::Corrupt`] if its chunk is not what was
    /// written; [`ImageError::KeyNeeded`]; [`ImageError::Io`].
    pub fn page(
        &mut self,
        block: usize,
        offset: u64,
        page: &mut [u8; migration::PAGE_BYTES],
    ) -> Result<(), ImageError> {
        let placement = self.image.layout().blocks().get(block);
        let placement =
            placement.filter(|block| offset < block.length.0 && offset.is_multiple_of(PAGE_BYTES));
        if placement.is_none() {
            return Err(ImageError::Mismatch {
                block: format!("number {block}, at {offset:#x}"),
                mismatch: Mismatch::Unknown,
            });
        }
        let chunk_bytes = u64::from(self.image.chunk_bytes());
        let (chunk, within) = ((offset / chunk_bytes) as usize, (offset % chunk_bytes) as usize);
        let holds_data = match self.kept {
            Some((kept_block, kept_chunk, holds_data)) if (kept_block, kept_chunk) == (block, chunk) => {
                holds_data
            }
            _ => {
                // A chunk that failed is not kept.
                self.kept = None;
                let (bytes, _) = self.image.read_chunk(block, chunk, &mut self.unpacker)?;
                let holds_data = bytes.is_some();
                self.kept = Some((block, chunk, holds_data));
                holds_data
            }
        };
        if holds_data {
            page.copy_from_slice(&self.unpacker.unpacked()[within..within + migration::PAGE_BYTES]);
        } else {
            page.fill(0);
        }
        Ok(())
    }
}
