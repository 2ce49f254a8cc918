//! Where every RAM block lies in an image, and how long the image can become.

use std::collections::HashSet;

use super::chunks;
use super::cipher::TAG_BYTES;
use super::manifest::MANIFEST_LIMIT;
use super::{ImageError, Mismatch};
use crate::ByteCount;
use crate::memory::PAGE_BYTES;
use crate::migration::StreamBlock;

/// Where the RAM area begins, and what every RAM block is aligned to: the page that x86 and arm64
/// map RAM with where they can, so that a block can be mapped in place on large pages too.
pub(super) const BLOCK_ALIGNMENT: u64 = 2 << 20;

/// What the areas behind the RAM are aligned to.
pub(super) const AREA_ALIGNMENT: u64 = 4096;

/// More RAM than any image has to hold; keeps the arithmetic far from overflow and the chunk table
/// below its limit.
const RAM_LIMIT: ByteCount = ByteCount::gib(16 << 10);

/// More RAM blocks than a machine has (each memory device, ROM and video card adds one).
const BLOCKS_LIMIT: usize = 4096;

/// QEMU tells the name's length in one byte.
const NAME_LIMIT: usize = 255;

/// A RAM block that is to be placed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockSize {
    /// Its name in the migration stream.
    pub name: String,
    /// Its used length, a multiple of 4 KiB.
    pub length: ByteCount,
}

/// Where a RAM block lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockPlacement {
    /// Its name in the migration stream.
    pub name: String,
    /// Where it begins in the image, in bytes; a multiple of 2 MiB.
    pub offset: u64,
    /// Its length.
    pub length: ByteCount,
}

impl BlockPlacement {
    pub(super) fn end(&self) -> u64 {
        self.offset + self.length.0
    }
}

/// Where every RAM block of a guest lies in its image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    blocks: Vec<BlockPlacement>,
}

impl Layout {
    /// Places `blocks` one behind the other, in this order.
    ///
    /// # Errors
    ///
    /// [`LayoutError`] if there are none or too many, if a name is empty, too long or used twice,
    /// if a length is not a positive multiple of 4 KiB, or if they are longer together than an
    /// image can be.
    pub fn plan(blocks: &[BlockSize]) -> Result<Self, LayoutError> {
        let mut offset = BLOCK_ALIGNMENT;
        let mut placed = Vec::with_capacity(blocks.len().min(BLOCKS_LIMIT));
        for BlockSize { name, length } in blocks {
            placed.push(BlockPlacement {
                name: name.clone(),
                offset,
                length: *length,
            });
            offset = offset
                .checked_add(length.0)
                .and_then(|end| end.checked_next_multiple_of(BLOCK_ALIGNMENT))
                .ok_or(LayoutError::TooLong { limit: RAM_LIMIT })?;
        }
        Self::of(placed)
    }

    /// Checks a layout that was read.
    pub(super) fn of(blocks: Vec<BlockPlacement>) -> Result<Self, LayoutError> {
        if blocks.is_empty() {
            return Err(LayoutError::Empty);
        }
        if blocks.len() > BLOCKS_LIMIT {
            return Err(LayoutError::TooMany {
                found: blocks.len(),
                limit: BLOCKS_LIMIT,
            });
        }
        let mut names = HashSet::new();
        let mut free_from = BLOCK_ALIGNMENT;
        for BlockPlacement { name, offset, length } in &blocks {
            if name.is_empty() || name.len() > NAME_LIMIT {
                return Err(LayoutError::Name {
                    length: name.len(),
                    limit: NAME_LIMIT,
                });
            }
            if !names.insert(name.as_str()) {
                return Err(LayoutError::Twice { name: name.clone() });
            }
            if length.0 == 0 || !length.0.is_multiple_of(PAGE_BYTES) {
                return Err(LayoutError::NotPages {
                    name: name.clone(),
                    length: *length,
                });
            }
            let end = offset
                .checked_add(length.0)
                .filter(|end| *end <= BLOCK_ALIGNMENT + RAM_LIMIT.0);
            let Some(end) = end else {
                return Err(LayoutError::TooLong { limit: RAM_LIMIT });
            };
            if !offset.is_multiple_of(BLOCK_ALIGNMENT) || *offset < free_from {
                return Err(LayoutError::Misplaced {
                    name: name.clone(),
                    offset: *offset,
                });
            }
            free_from = end;
        }
        Ok(Self { blocks })
    }

    /// The longest that the image can become, if its device state is not longer than
    /// `device_state_bound`: what must be free before a guest is stopped for it.
    pub fn hard_bound(&self, device_state_bound: ByteCount) -> ByteCount {
        let table = chunks::encoded_length_bound(self).next_multiple_of(AREA_ALIGNMENT);
        let areas = device_state_bound
            .0
            .checked_add(TAG_BYTES as u64)
            .and_then(|state| state.checked_next_multiple_of(AREA_ALIGNMENT))
            .and_then(|state| state.checked_add(table + MANIFEST_LIMIT.0));
        ByteCount(self.ram_end().saturating_add(areas.unwrap_or(u64::MAX)))
    }

    /// Where the block of this name lies.
    pub fn block(&self, name: &str) -> Option<&BlockPlacement> {
        self.blocks.iter().find(|block| block.name == name)
    }

    /// All blocks, in the order of their offsets.
    pub fn blocks(&self) -> &[BlockPlacement] {
        &self.blocks
    }

    /// RAM of all blocks together: the total of a progress bar.
    pub fn ram(&self) -> ByteCount {
        self.blocks.iter().map(|block| block.length).sum()
    }

    pub(crate) fn index_of(&self, name: &str) -> Option<usize> {
        self.blocks.iter().position(|block| block.name == name)
    }

    /// Where each block of a stream is here; both have to have the same blocks.
    pub(crate) fn places_of(&self, blocks: &[StreamBlock]) -> Result<Vec<usize>, ImageError> {
        let mismatch = |block: &str, mismatch| ImageError::Mismatch {
            block: block.to_owned(),
            mismatch,
        };
        let mut places = Vec::new();
        for StreamBlock {
            name, used_length, ..
        } in blocks
        {
            let place = self
                .index_of(name)
                .ok_or_else(|| mismatch(name, Mismatch::Unknown))?;
            let (planned, found) = (self.blocks()[place].length, *used_length);
            if planned != found {
                return Err(mismatch(name, Mismatch::Length { planned, found }));
            }
            places.push(place);
        }
        match (0..self.blocks().len()).find(|place| !places.contains(place)) {
            Some(missing) => Err(mismatch(&self.blocks()[missing].name, Mismatch::NotRecorded)),
            None => Ok(places),
        }
    }

    /// Where the last block ends; a multiple of [`AREA_ALIGNMENT`], because lengths are.
    pub(super) fn ram_end(&self) -> u64 {
        self.blocks.last().map_or(BLOCK_ALIGNMENT, BlockPlacement::end)
    }
}

/// Why RAM blocks cannot be laid out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// There are none.
    #[error("there are no RAM blocks")]
    Empty,
    /// There are too many.
    #[error("{found} RAM blocks, at most {limit} are kept")]
    TooMany {
        /// How many.
        found: usize,
        /// The limit.
        limit: usize,
    },
    /// A name is empty or too long.
    #[error("the name of a RAM block has {length} bytes, 1 to {limit} can be")]
    Name {
        /// Its length in bytes.
        length: usize,
        /// The limit.
        limit: usize,
    },
    /// Two blocks have one name.
    #[error("two RAM blocks are called {name:?}")]
    Twice {
        /// The name.
        name: String,
    },
    /// A length is not a positive multiple of 4 KiB.
    #[error("RAM block {name:?} has {bytes} bytes, which is not a number of pages", bytes = length.0)]
    NotPages {
        /// Name of the block.
        name: String,
        /// Its length.
        length: ByteCount,
    },
    /// The blocks are longer than an image can be.
    #[error("the RAM blocks need more than {limit}")]
    TooLong {
        /// The limit.
        limit: ByteCount,
    },
    /// A block lies where none can.
    #[error("RAM block {name:?} at {offset:#x} is misaligned or overlaps")]
    Misplaced {
        /// Name of the block.
        name: String,
        /// Where it was said to lie.
        offset: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    fn size(name: &str, length: u64) -> BlockSize {
        BlockSize {
            name: name.to_owned(),
            length: ByteCount(length),
        }
    }

    #[test]
    fn blocks_lie_behind_each_other_on_two_megabyte_borders() {
        let layout = Layout::plan(&[
            size("pc.ram", 5 << 20),
            size("pc.bios", 0x40000),
            size("vga", 4096),
        ])
        .unwrap();
        let offsets: Vec<u64> = layout.blocks().iter().map(|block| block.offset >> 20).collect();
        assert_eq!(offsets, [2, 8, 10]);
        assert_eq!(layout.block("vga").unwrap().end(), (10 << 20) + 4096);
        assert_eq!(layout.block("none"), None);
        assert_eq!(layout.ram(), ByteCount((5 << 20) + 0x40000 + 4096));
    }

    #[test]
    fn the_hard_bound_grows_with_the_device_state_and_never_wraps() {
        let layout = Layout::plan(&[size("pc.ram", 1 << 30)]).unwrap();
        let bound = layout.hard_bound(ByteCount::mib(1));
        assert!(bound.0 > (1 << 30) + (2 << 20) + (1 << 20) + MANIFEST_LIMIT.0);
        assert!(bound.0 < (1 << 30) + (8 << 20));
        assert_eq!(layout.hard_bound(ByteCount(u64::MAX)), ByteCount(u64::MAX));
    }

    #[test]
    fn blocks_that_cannot_be_laid_out_are_refused_with_the_reason() {
        assert_eq!(Layout::plan(&[]), Err(LayoutError::Empty));
        assert!(matches!(
            Layout::plan(&[size("", 4096)]),
            Err(LayoutError::Name { length: 0, .. })
        ));
        assert!(matches!(
            Layout::plan(&[size(&"n".repeat(256), 4096)]),
            Err(LayoutError::Name { length: 256, .. })
        ));
        assert!(matches!(
            Layout::plan(&[size("a", 4096), size("a", 4096)]),
            Err(LayoutError::Twice { .. })
        ));
        assert!(matches!(
            Layout::plan(&[size("a", 0)]),
            Err(LayoutError::NotPages { .. })
        ));
        assert!(matches!(
            Layout::plan(&[size("a", 4097)]),
            Err(LayoutError::NotPages { .. })
        ));
        assert!(matches!(
            Layout::plan(&[size("a", u64::MAX - 4095)]),
            Err(LayoutError::TooLong { .. })
        ));
        assert!(matches!(
            Layout::plan(&[size("a", 17 << 40)]),
            Err(LayoutError::TooLong { .. })
        ));
        let many: Vec<_> = (0..=BLOCKS_LIMIT)
            .map(|index| size(&index.to_string(), 4096))
            .collect();
        assert!(matches!(
            Layout::plan(&many),
            Err(LayoutError::TooMany { found: 4097, .. })
        ));
    }

    #[test]
    fn a_read_layout_whose_blocks_overlap_is_refused() {
        let place = |name: &str, offset, length| BlockPlacement {
            name: name.to_owned(),
            offset,
            length: ByteCount(length),
        };
        for blocks in [
            vec![place("a", 0, 4096)],
            vec![place("a", BLOCK_ALIGNMENT + 4096, 4096)],
            vec![
                place("a", BLOCK_ALIGNMENT, 3 << 20),
                place("b", 2 * BLOCK_ALIGNMENT, 4096),
            ],
        ] {
            assert!(matches!(Layout::of(blocks), Err(LayoutError::Misplaced { .. })));
        }
    }
}
