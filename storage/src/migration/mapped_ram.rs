//! QEMU's mapped-ram form of a stream: a file in which every page has its own place.
//!
//! ```text
//!  magic, version, configuration    names the capability "mapped-ram"
//!  commands
//!  "ram" START    total length
//!                 per block:  name | length | header {u32 version 1, u64 page size,
//!                                                     u64 offset of the bitmap, u64 offset of the pages}
//!                             bitmap       one bit for each page that is there, words of 64 bits, little-endian
//!                             (up to the next MiB of the file)
//!                             pages        each at its offset in the block; absent ones are zero
//!                 end of section
//!        END      end of section
//!  device sections, VM description
//! ```
//!
//! Offsets are counted from the beginning of the file, whatever stands before the stream in it. The
//! format was learned from QEMU's `docs/devel/migration/mapped-ram.rst` and from files that 10.0 and
//! 11.1 wrote.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;

use super::recording::{Recording, write_name};
use super::slice::Slice;
use super::wire::{self, STREAM_LIMIT};
use super::{PAGE_BYTES, StreamError};
use crate::ByteCount;

const CAPABILITY: &str = "mapped-ram";
const CAPABILITIES: &str = "configuration/capabilities";

const HEADER_VERSION: u32 = 1;
const HEADER_BYTES: u64 = 4 + 8 + 8 + 8;

/// Where the pages of a block may begin.
const PAGES_ALIGNMENT: u64 = 1 << 20;

/// More than a configuration, commands and the beginning of a RAM section need.
const BEGINNING_LIMIT: usize = 64 << 10;

/// More RAM blocks than any machine has.
const BLOCKS_LIMIT: usize = 4096;

/// A block's places in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MappedBlock {
    pub(crate) name: String,
    pub(crate) length: u64,
    pub(crate) bitmap: u64,
    pub(crate) pages: u64,
}

impl MappedBlock {
    /// Length of the bitmap: whole words.
    pub(crate) fn bitmap_bytes(&self) -> u64 {
        (self.length / PAGE_BYTES as u64).div_ceil(64) * 8
    }
}

/// A mapped-ram file that was read, without bitmaps and pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MappedFile {
    /// The blocks, in the stream's order.
    pub(crate) blocks: Vec<MappedBlock>,
    /// The same stream in its plain form without pages, for [`Recording::parse`].
    pub(crate) plain: Vec<u8>,
}

/// A mapped-ram file to be written: all but the bitmaps and the pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MappedRam {
    /// The blocks, in the stream's order.
    pub(crate) blocks: Vec<MappedBlock>,
    /// What stands between them, and where.
    pub(crate) pieces: Vec<(u64, Vec<u8>)>,
}

impl MappedRam {
    /// Lays out a file for the blocks and devices of `recording`.
    pub(crate) fn plan(recording: &Recording) -> io::Result<Self> {
        let mut piece = Vec::new();
        piece.write_all(&wire::MAGIC.to_be_bytes())?;
        piece.write_all(&wire::VERSION.to_be_bytes())?;
        piece.write_all(&recording.configuration)?;
        piece.push(wire::SUBSECTION);
        write_name(CAPABILITIES, &mut piece)?;
        piece.write_all(&1_u32.to_be_bytes())?;
        piece.write_all(&1_u32.to_be_bytes())?;
        write_name(CAPABILITY, &mut piece)?;
        piece.write_all(&recording.opening)?;
        recording.write_section_type(wire::SECTION_START, &mut piece)?;
        piece.write_all(b"\x03ram")?;
        piece.write_all(&recording.section.instance.to_be_bytes())?;
        piece.write_all(&wire::RAM_VERSION.to_be_bytes())?;
        let total: ByteCount = recording.blocks.iter().map(|block| block.used_length).sum();
        piece.write_all(&(total.0 | wire::FLAG_MEM_SIZE).to_be_bytes())?;

        let (mut blocks, mut pieces, mut start) = (Vec::new(), Vec::new(), 0);
        for block in &recording.blocks {
            write_name(&block.name, &mut piece)?;
            piece.write_all(&block.used_length.0.to_be_bytes())?;
            let mut mapped = MappedBlock {
                name: block.name.clone(),
                length: block.used_length.0,
                bitmap: start + piece.len() as u64 + HEADER_BYTES,
                pages: 0,
            };
            mapped.pages = (mapped.bitmap + mapped.bitmap_bytes()).next_multiple_of(PAGES_ALIGNMENT);
            piece.write_all(&HEADER_VERSION.to_be_bytes())?;
            piece.write_all(&(PAGE_BYTES as u64).to_be_bytes())?;
            piece.write_all(&mapped.bitmap.to_be_bytes())?;
            piece.write_all(&mapped.pages.to_be_bytes())?;
            pieces.push((start, std::mem::take(&mut piece)));
            start = mapped.pages + mapped.length;
            blocks.push(mapped);
        }
        recording.write_section_end(&mut piece)?;
        recording.write_end(&mut piece)?;
        pieces.push((start, piece));
        Ok(Self { blocks, pieces })
    }
}

impl MappedFile {
    /// Reads all but bitmaps and pages from a file in which the stream begins at `start`. `None`: this is
    /// a stream, but not of this form.
    pub(crate) fn read(file: &File, start: u64) -> Result<Option<Self>, ReadError> {
        let file_length = file.metadata()?.len();
        let beginning = read_up_to(file, start, BEGINNING_LIMIT as u64)?;
        let mut cursor = Slice::new(&beginning);
        let short = StreamError::Short {
            at: beginning.len(),
            part: "beginning of RAM",
        };
        let Some(mut plain) = beginning_of(&mut cursor).ok_or_else(|| short.clone())?? else {
            return Ok(None);
        };
        let record = cursor.u64().ok_or(short)?;
        if record & wire::FLAGS_MASK != wire::FLAG_MEM_SIZE {
            return Err(StreamError::BlockList("it is missing").into());
        }
        plain.extend_from_slice(&record.to_be_bytes());
        let mut missing = record & !wire::FLAGS_MASK;
        let mut position = start + cursor.at() as u64;
        let mut blocks = Vec::new();
        while missing > 0 {
            if blocks.len() == BLOCKS_LIMIT {
                return Err(StreamError::BlockList("it has more than 4096 blocks").into());
            }
            let block = read_block(file, position, file_length)?;
            missing = missing
                .checked_sub(block.length)
                .ok_or(StreamError::BlockList("its lengths are more than their total"))?;
            // A name came behind its length in one byte.
            plain.push(block.name.len() as u8);
            plain.extend_from_slice(block.name.as_bytes());
            plain.extend_from_slice(&block.length.to_be_bytes());
            position = block.pages + block.length;
            blocks.push(block);
        }
        let rest = read_up_to(file, position, STREAM_LIMIT.0 + 1)?;
        if rest.len() as u64 > STREAM_LIMIT.0 {
            return Err(StreamError::TooLong {
                part: "device state",
                length: ByteCount(file_length - position),
                limit: STREAM_LIMIT,
            }
            .into());
        }
        plain.extend_from_slice(&rest);
        Ok(Some(Self { blocks, plain }))
    }
}

/// Why a mapped-ram file could not be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReadError {
    #[error(transparent)]
    Stream(#[from] StreamError),
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Everything up to the block list, without the capability; `Some(Ok(None))` if that is not there, `None` if
/// the bytes end first.
fn beginning_of(cursor: &mut Slice<'_>) -> Option<Result<Option<Vec<u8>>, StreamError>> {
    if cursor.u32()? != wire::MAGIC {
        return Some(Err(StreamError::NotAStream));
    }
    let version = cursor.u32()?;
    if version != wire::VERSION {
        return Some(Err(StreamError::Version { found: version }));
    }
    let found = cursor.u8()?;
    if found != wire::CONFIGURATION {
        return Some(Err(StreamError::NoConfiguration { found }));
    }
    let name_length = cursor.u32()?;
    cursor.bytes(name_length as usize)?;
    let mut plain = cursor.since(0).to_vec();
    let (mut is_mapped, mut other) = (false, None);
    while cursor.peek() == Some(wire::SUBSECTION) {
        let start = cursor.at();
        cursor.u8()?;
        let name = cursor.short_name()?;
        match (name, cursor.u32()?) {
            (CAPABILITIES, 1) => {
                for _ in 0..cursor.u32()? {
                    match cursor.short_name()? {
                        CAPABILITY => is_mapped = true,
                        name => other = Some(name.to_owned()),
                    }
                }
                continue;
            }
            ("configuration/target-page-bits", 1) => {
                cursor.u32()?;
            }
            ("configuration/uuid", 1) => {
                cursor.array::<16>()?;
            }
            (name, version) => {
                let name = name.to_owned();
                return Some(Err(StreamError::Subsection { name, version }));
            }
        }
        plain.extend_from_slice(cursor.since(start));
    }
    if !is_mapped {
        return Some(Ok(None));
    }
    if let Some(name) = other {
        return Some(Err(StreamError::Capability { name }));
    }
    let start = cursor.at();
    while cursor.peek() == Some(wire::COMMAND) {
        cursor.u8()?;
        cursor.u16()?;
        let length = cursor.u16()?;
        cursor.bytes(length.into())?;
    }
    let at = cursor.at();
    let section_type = cursor.u8()?;
    if section_type != wire::SECTION_START {
        return Some(Err(StreamError::SectionType { section_type, at }));
    }
    cursor.u32()?;
    cursor.short_name()?;
    cursor.u32()?;
    cursor.u32()?;
    plain.extend_from_slice(cursor.since(start));
    Some(Ok(Some(plain)))
}

fn read_block(file: &File, position: u64, file_length: u64) -> Result<MappedBlock, ReadError> {
    let header = read_up_to(file, position, 1 + 255 + 8 + HEADER_BYTES)?;
    let mut cursor = Slice::new(&header);
    let mut read = || {
        let name = cursor.short_name()?.to_owned();
        let (length, version, page_bytes) = (cursor.u64()?, cursor.u32()?, cursor.u64()?);
        let (bitmap, pages) = (cursor.u64()?, cursor.u64()?);
        let block = MappedBlock {
            name,
            length,
            bitmap,
            pages,
        };
        Some((block, version, page_bytes))
    };
    let (block, version, page_bytes) = read().ok_or(StreamError::Short {
        at: header.len(),
        part: "header of a RAM block",
    })?;
    let length = block.length;
    if length == 0 || !length.is_multiple_of(PAGE_BYTES as u64) {
        return Err(StreamError::BlockList("a length is not a number of pages").into());
    }
    if version != HEADER_VERSION || page_bytes != PAGE_BYTES as u64 {
        return Err(StreamError::BlockList(
            "a mapped block has an unknown header: another version, other pages, or recorded with x-ignore-shared",
        )
        .into());
    }
    let ends = |start: u64, length: u64| start.checked_add(length).filter(|end| *end <= file_length);
    let in_order = block.bitmap >= position + cursor.at() as u64
        && ends(block.bitmap, block.bitmap_bytes()).is_some_and(|end| end <= block.pages)
        && ends(block.pages, length).is_some();
    if !in_order {
        return Err(StreamError::BlockList("a mapped block lies outside of the file or of its place").into());
    }
    Ok(block)
}

/// What is in the file from `start` on, at most `limit` bytes.
fn read_up_to(file: &File, start: u64, limit: u64) -> io::Result<Vec<u8>> {
    const STEP: usize = 64 << 10;
    let mut bytes = Vec::new();
    while (bytes.len() as u64) < limit {
        let length = bytes.len();
        let step = usize::try_from(limit - length as u64).map_or(STEP, |left| left.min(STEP));
        bytes.resize(length + step, 0);
        let read = match file.read_at(&mut bytes[length..], start + length as u64) {
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                bytes.truncate(length);
                continue;
            }
            Err(error) => return Err(error),
        };
        bytes.truncate(length + read);
        if read == 0 {
            break;
        }
    }
    Ok(bytes)
}
