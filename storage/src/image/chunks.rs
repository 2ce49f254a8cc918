//! The chunk table: what every chunk of guest RAM was when it was saved.
//!
//! Integers are little-endian. The table names the RAM blocks itself, so that an image can be read,
//! checked and mapped without its manifest:
//!
//! ```text
//! u32 number of blocks
//! per block:  u8 length of name | name | u64 offset in the image | u64 length
//!             per chunk, in order:  u32 kind (0 zero, 1 raw, 2 one zstd frame)
//!                                   u32 length (of a zero chunk: of the zeros) | u32 CRC-32 of what is stored
//!                                   in an encrypted image: u64 nonce | tag (16 bytes)
//! ```
//!
//! Every chunk of a block stands for [`CHUNK_BYTES`] of RAM (the superblock tells the size that the
//! writer used) but the last, which is what remains. **A chunk lies at its own place** whatever its kind:
//! at the block's offset plus its own in the block; a compressed one is only shorter and leaves the
//! rest of its place unused. So nobody has to say where a chunk goes, any mixture of kinds is
//! an image, and any page is found with one look at this table. Space is no worse for it: all of it had to
//! be reserved before the guest was stopped, and a file gives back what was not used.
//!
//! The table's own CRC-32 is in the superblock; decoding still trusts nothing: it checks every length
//! before it allocates, and never panics. In format 1 there is no kind 2.

use super::cipher::TAG_BYTES;
use super::layout::{BlockPlacement, Layout, LayoutError};
use crate::ByteCount;

/// Length of a chunk.
///
/// The unit of zero detection, of the checksum and of one write. Chunks of 2 MiB went 1.05 times as
/// fast (median of six interleaved pairs, two and three workers), less than the spread of the runs;
/// 1 MiB finds more zeros, and a bad sector costs less.
pub(crate) const CHUNK_BYTES: u32 = 1 << 20;

/// The longest table that is read: 16 TiB of RAM take 192 MiB, encrypted 576 MiB.
pub(super) const TABLE_LIMIT: ByteCount = ByteCount::mib(640);

const ENTRY_BYTES: u64 = 12;
const SEAL_BYTES: u64 = 8 + TAG_BYTES as u64;
const BLOCK_HEADER_BYTES: u64 = 1 + 8 + 8;

/// One chunk of a RAM block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// The RAM that it stands for, in bytes.
    pub(crate) length: u32,
    pub(crate) content: ChunkContent,
}

/// What a chunk holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ChunkContent {
    /// Zeros; nothing was written.
    Zero,
    /// Something, at the chunk's place.
    Stored(Stored),
}

/// What lies at a chunk's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stored {
    pub(crate) form: Form,
    /// How long it is, in bytes; as long as the chunk at most.
    pub(crate) length: u32,
    /// CRC-32 of it, as it lies there.
    pub(crate) crc32: u32,
    /// Of an encrypted image: what opens it.
    pub(crate) seal: Option<Seal>,
}

/// In which form RAM is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    /// As it is.
    Raw,
    /// One zstd frame.
    Zstd,
}

/// What an encrypted chunk was sealed with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Seal {
    /// Never the same twice in one image.
    pub(crate) nonce: u64,
    pub(crate) tag: [u8; TAG_BYTES],
}

/// How a table is to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TableForm {
    pub(super) chunk_bytes: u32,
    pub(super) encrypted: bool,
    /// Whether chunks can be compressed: since format 2.
    pub(super) zstd: bool,
}

/// A layout with the chunks of each of its blocks, in the layout's order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ChunkTable {
    pub(super) layout: Layout,
    pub(super) chunks: Vec<Vec<Chunk>>,
    /// Whether its chunks have seals.
    pub(super) encrypted: bool,
}

impl ChunkTable {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut table = Vec::new();
        table.extend((self.layout.blocks().len() as u32).to_le_bytes());
        for (block, chunks) in self.layout.blocks().iter().zip(&self.chunks) {
            // The layout holds no name longer than 255 bytes.
            table.push(block.name.len() as u8);
            table.extend(block.name.as_bytes());
            table.extend(block.offset.to_le_bytes());
            table.extend(block.length.0.to_le_bytes());
            for chunk in chunks {
                let (kind, length, crc32, seal) = match chunk.content {
                    ChunkContent::Zero => (0_u32, chunk.length, 0, None),
                    ChunkContent::Stored(stored) => {
                        let kind = match stored.form {
                            Form::Raw => 1,
                            Form::Zstd => 2,
                        };
                        (kind, stored.length, stored.crc32, stored.seal)
                    }
                };
                table.extend(kind.to_le_bytes());
                table.extend(length.to_le_bytes());
                table.extend(crc32.to_le_bytes());
                if self.encrypted {
                    table.extend(seal.map_or(0, |seal| seal.nonce).to_le_bytes());
                    table.extend(seal.map_or([0; TAG_BYTES], |seal| seal.tag));
                }
            }
        }
        table
    }

    pub(super) fn decode(table: &[u8], form: TableForm) -> Result<Self, TableError> {
        let chunk_bytes = form.chunk_bytes;
        let entry_bytes = ENTRY_BYTES + if form.encrypted { SEAL_BYTES } else { 0 };
        if chunk_bytes == 0 {
            return Err(TableError::ChunkSize);
        }
        let mut rest = Cursor(table);
        let count = rest.u32()?;
        let mut placements = Vec::new();
        let mut chunks = Vec::new();
        for _ in 0..count {
            let [name_length] = rest.take()?;
            let name = std::str::from_utf8(rest.slice(name_length.into())?)
                .map_err(|_| TableError::Name)?
                .to_owned();
            let offset = rest.u64()?;
            let length = rest.u64()?;
            let entries = length.div_ceil(chunk_bytes.into());
            // Before anything is allocated for them: are they there?
            if entries
                .checked_mul(entry_bytes)
                .is_none_or(|bytes| bytes > rest.0.len() as u64)
            {
                return Err(TableError::Short);
            }
            let mut of_block = Vec::with_capacity(entries as usize);
            for index in 0..entries {
                let expected = chunk_length(length, chunk_bytes, index);
                of_block.push(
                    decode_entry(&mut rest, expected, form).map_err(|reason| match reason {
                        EntryError::Short => TableError::Short,
                        EntryError::Invalid => TableError::Entry {
                            block: name.clone(),
                            index,
                        },
                    })?,
                );
            }
            placements.push(BlockPlacement {
                name,
                offset,
                length: ByteCount(length),
            });
            chunks.push(of_block);
        }
        if !rest.0.is_empty() {
            return Err(TableError::Long {
                extra_bytes: rest.0.len(),
            });
        }
        Ok(Self {
            layout: Layout::of(placements)?,
            chunks,
            encrypted: form.encrypted,
        })
    }

    /// Whether RAM lies as it is: nothing is compressed or encrypted.
    pub(super) fn is_raw(&self) -> bool {
        let raw = |chunk: &Chunk| match chunk.content {
            ChunkContent::Zero => true,
            ChunkContent::Stored(stored) => stored.form == Form::Raw,
        };
        !self.encrypted && self.chunks.iter().flatten().all(raw)
    }
}

/// How long the table of `layout` can be, in bytes: that of an encrypted image.
pub(super) fn encoded_length_bound(layout: &Layout) -> u64 {
    let blocks = layout.blocks().iter();
    4 + blocks
        .map(|block| {
            BLOCK_HEADER_BYTES
                + block.name.len() as u64
                + chunk_count(block.length, CHUNK_BYTES) * (ENTRY_BYTES + SEAL_BYTES)
        })
        .sum::<u64>()
}

/// How many chunks a block has.
pub(super) fn chunk_count(length: ByteCount, chunk_bytes: u32) -> u64 {
    length.0.div_ceil(chunk_bytes.into())
}

/// How long the chunk with this index is in a block of `block_length`.
pub(super) fn chunk_length(block_length: u64, chunk_bytes: u32, index: u64) -> u32 {
    let rest = block_length.saturating_sub(index.saturating_mul(chunk_bytes.into()));
    u32::try_from(rest).map_or(chunk_bytes, |rest| rest.min(chunk_bytes))
}

fn decode_entry(rest: &mut Cursor<'_>, slot: u32, form: TableForm) -> Result<Chunk, EntryError> {
    let short = |_| EntryError::Short;
    let kind = rest.u32().map_err(short)?;
    let length = rest.u32().map_err(short)?;
    let crc32 = rest.u32().map_err(short)?;
    let seal = if form.encrypted {
        Some(Seal {
            nonce: rest.u64().map_err(short)?,
            tag: rest.take().map_err(short)?,
        })
    } else {
        None
    };
    let stored = |form| {
        ChunkContent::Stored(Stored {
            form,
            length,
            crc32,
            seal,
        })
    };
    let content = match (kind, length) {
        (0, length) if length == slot && crc32 == 0 => ChunkContent::Zero,
        (1, length) if length == slot => stored(Form::Raw),
        (2, 1..) if length < slot && form.zstd => stored(Form::Zstd),
        _ => return Err(EntryError::Invalid),
    };
    Ok(Chunk {
        length: slot,
        content,
    })
}

enum EntryError {
    Short,
    Invalid,
}

struct Cursor<'a>(&'a [u8]);

impl<'a> Cursor<'a> {
    fn slice(&mut self, length: usize) -> Result<&'a [u8], TableError> {
        let (taken, rest) = self.0.split_at_checked(length).ok_or(TableError::Short)?;
        self.0 = rest;
        Ok(taken)
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], TableError> {
        let (taken, rest) = self.0.split_first_chunk::<N>().ok_or(TableError::Short)?;
        self.0 = rest;
        Ok(*taken)
    }

    fn u32(&mut self) -> Result<u32, TableError> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, TableError> {
        self.take().map(u64::from_le_bytes)
    }
}

/// Why a chunk table is not one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// It ends too early.
    #[error("it ends too early")]
    Short,
    /// Something follows it.
    #[error("{extra_bytes} bytes follow it")]
    Long {
        /// How many.
        extra_bytes: usize,
    },
    /// The superblock tells an impossible chunk size.
    #[error("chunks have no length")]
    ChunkSize,
    /// The name of a RAM block is not UTF-8.
    #[error("the name of a RAM block is not UTF-8")]
    Name,
    /// A chunk is of no known kind, or its length does not fit its place.
    #[error("chunk {index} of RAM block {block:?} is of no known kind or length")]
    Entry {
        /// Name of the RAM block.
        block: String,
        /// Which of its chunks.
        index: u64,
    },
    /// The blocks cannot lie like that.
    #[error("its RAM blocks do not fit an image")]
    Layout(#[from] LayoutError),
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::image::layout::BlockSize;

    const FORM: TableForm = TableForm {
        chunk_bytes: CHUNK_BYTES,
        encrypted: false,
        zstd: true,
    };

    fn table_of(blocks: &[(u64, Vec<Option<u32>>)], encrypted: bool) -> ChunkTable {
        let sizes: Vec<_> = blocks
            .iter()
            .enumerate()
            .map(|(index, (pages, _))| BlockSize {
                name: format!("block-{index}"),
                length: ByteCount(pages * 4096),
            })
            .collect();
        let layout = Layout::plan(&sizes).unwrap();
        let chunks = layout
            .blocks()
            .iter()
            .zip(blocks)
            .map(|(block, (_, contents))| {
                (0..chunk_count(block.length, CHUNK_BYTES))
                    .map(|index| Chunk {
                        length: chunk_length(block.length.0, CHUNK_BYTES, index),
                        content: match contents[index as usize % contents.len()] {
                            None => ChunkContent::Zero,
                            Some(crc32) => {
                                let length = chunk_length(block.length.0, CHUNK_BYTES, index);
                                let compressed = crc32 % 2 == 1;
                                ChunkContent::Stored(Stored {
                                    form: if compressed { Form::Zstd } else { Form::Raw },
                                    length: if compressed {
                                        crc32 % (length - 1) + 1
                                    } else {
                                        length
                                    },
                                    crc32,
                                    seal: encrypted.then_some(Seal {
                                        nonce: index,
                                        tag: [crc32 as u8; TAG_BYTES],
                                    }),
                                })
                            }
                        },
                    })
                    .collect()
            })
            .collect();
        ChunkTable {
            layout,
            chunks,
            encrypted,
        }
    }

    fn form_of(table: &ChunkTable) -> TableForm {
        TableForm {
            encrypted: table.encrypted,
            ..FORM
        }
    }

    fn any_table() -> impl Strategy<Value = ChunkTable> {
        let block = (1_u64..2000, prop::collection::vec(any::<Option<u32>>(), 1..8));
        (prop::collection::vec(block, 1..6), any::<bool>())
            .prop_map(|(blocks, encrypted)| table_of(&blocks, encrypted))
    }

    proptest! {
        #[test]
        fn every_table_comes_back_as_it_went_and_is_no_longer_than_was_told(table in any_table()) {
            let encoded = table.encode();
            let bound = encoded_length_bound(&table.layout);
            prop_assert!(encoded.len() as u64 <= bound);
            prop_assert!(!table.encrypted || encoded.len() as u64 == bound);
            prop_assert_eq!(ChunkTable::decode(&encoded, form_of(&table)).unwrap(), table);
        }

        #[test]
        fn a_table_cut_short_or_made_longer_is_refused(table in any_table(), cut in any::<prop::sample::Index>()) {
            let mut encoded = table.encode();
            let cut = cut.index(encoded.len());
            prop_assert!(ChunkTable::decode(&encoded[..cut], form_of(&table)).is_err());
            encoded.push(0);
            prop_assert_eq!(ChunkTable::decode(&encoded, form_of(&table)), Err(TableError::Long { extra_bytes: 1 }));
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..512), chunk_bytes: u32, encrypted: bool) {
            let _ = ChunkTable::decode(&bytes, TableForm { chunk_bytes, encrypted, zstd: true });
        }

        #[test]
        fn a_changed_byte_never_panics(
            table in any_table(), position in any::<prop::sample::Index>(), byte: u8,
        ) {
            let mut encoded = table.encode();
            let position = position.index(encoded.len());
            encoded[position] = byte;
            let _ = ChunkTable::decode(&encoded, form_of(&table));
        }
    }

    #[test]
    fn a_block_said_to_be_huge_is_refused_before_anything_is_allocated_for_it() {
        let mut table = vec![1, 0, 0, 0, 1, b'a'];
        table.extend((2_u64 << 20).to_le_bytes());
        table.extend((!4095_u64).to_le_bytes());
        assert_eq!(
            ChunkTable::decode(
                &table,
                TableForm {
                    chunk_bytes: 1,
                    ..FORM
                }
            ),
            Err(TableError::Short)
        );
    }

    #[test]
    fn a_compressed_chunk_is_not_one_of_format_1_nor_as_long_as_its_place() {
        let mut table = vec![1, 0, 0, 0, 1, b'a'];
        table.extend((2_u64 << 20).to_le_bytes());
        table.extend(8192_u64.to_le_bytes());
        for word in [2_u32, 8191, 7] {
            table.extend(word.to_le_bytes());
        }
        assert!(ChunkTable::decode(&table, FORM).is_ok());
        let format_1 = TableForm { zstd: false, ..FORM };
        let entry = TableError::Entry {
            block: "a".into(),
            index: 0,
        };
        assert_eq!(ChunkTable::decode(&table, format_1), Err(entry.clone()));
        let at = table.len() - 8;
        table[at..at + 4].copy_from_slice(&8192_u32.to_le_bytes());
        assert_eq!(ChunkTable::decode(&table, FORM), Err(entry));
    }

    #[test]
    fn the_last_chunk_is_what_remains() {
        let lengths: Vec<u32> = (0..4)
            .map(|index| chunk_length((3 << 20) - 4096, 1 << 20, index))
            .collect();
        assert_eq!(lengths, [1 << 20, 1 << 20, (1 << 20) - 4096, 0]);
    }
}
