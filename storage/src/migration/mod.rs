//! QEMU's migration stream, both ways: recorded from a stopped guest, normalized, and written again
//! for a guest to be woken.
//!
//! ```text
//!  header, configuration            kept, but for the subsection of capabilities
//!  commands                         kept
//!  "ram" START    block list        kept, without the addresses that x-ignore-shared adds
//!        PART     page records      taken out: they belong to the image's RAM area
//!  commands                         kept
//!        END      page records      taken out
//!  ───────────────────────────────
//!  device sections                  the tail: kept byte by byte, never parsed
//!  end of stream, VM description
//! ```
//!
//! What is left loads into a QEMU that has its RAM already, with no capability set; with page
//! records put back in by [`write_precopy`] it loads into one that has not; in the pieces of
//! [`Postcopy`] it loads into one that runs at once. Integers in the stream are big-endian.
//!
//! One parser reads a stream that is in memory ([`Recording::parse`]) and one that is still coming,
//! whose pages go to a sink one by one and whose other parts are bounded. With multifd the pages come
//! in packets of channels beside the stream ([`MultifdPacket`]).
//!
//! What is guaranteed: parsing never panics and never allocates on the word of a length field;
//! whatever is not understood up to the end of the RAM section is refused by name, because guessing
//! its length would shift all that follows; a stream that was cut short is refused, which QEMU
//! itself does not do.
//!
//! The format was learned from QEMU's `migration/savevm.c`, `migration/ram.c` and
//! `migration/multifd*.c`, 7.2 to 11.1. Their difference here is small: the number of the RAM section
//! (2 in 7.2, 1 in 10.0 and later), a switchover command before the RAM section's end from 10.0 on,
//! and which way zero pages are told with multifd.

mod cpr;
mod cursor;
mod devices;
mod mapped_ram;
mod multifd;
mod page_sink;
mod parse;
mod postcopy;
mod precopy;
mod recording;
mod slice;
mod wire;

use std::ops::Deref;

pub use cpr::{CPR_STREAM_LIMIT, CprEntry, CprError, cpr_entries};
pub use devices::{Device, DevicesError};
pub(crate) use mapped_ram::{MappedBlock, MappedFile, MappedRam, ReadError};
pub(crate) use multifd::MULTIFD_MAGIC;
pub use multifd::{MULTIFD_OPENING_BYTES, MULTIFD_PACKET_BYTES, MultifdError, MultifdOpening, MultifdPacket};
pub(crate) use page_sink::{PageSink, ReceiveError};
pub(crate) use parse::receive;
pub use postcopy::Postcopy;
pub use precopy::{PrecopyError, try_write_precopy, write_precopy};
pub(crate) use precopy::{begin_pages, end_pages, write_pages};
pub use recording::{Recording, StreamBlock};
pub(crate) use wire::MAGIC as STREAM_MAGIC;
pub use wire::{PAGE_BYTES, STREAM_LIMIT};

use crate::ByteCount;

/// One page of a guest, as it travels in a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<'a> {
    /// Index of its RAM block in [`Recording::blocks`].
    pub block: usize,
    /// Offset in that block, in bytes; a multiple of [`PAGE_BYTES`].
    pub offset: u64,
    /// What it holds.
    pub content: PageContent<'a>,
}

/// What a page holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PageContent<'a> {
    /// Zeros.
    Zero,
    /// These bytes.
    Data(PageBytes<'a>),
}

/// The bytes of one page, borrowed from a recording or owned.
#[derive(Debug, Clone)]
pub struct PageBytes<'a>(Bytes<'a>);

#[derive(Debug, Clone)]
enum Bytes<'a> {
    Borrowed(&'a [u8; PAGE_BYTES]),
    // Boxed, so that a zero page does not weigh as much as a full one.
    Owned(Box<[u8; PAGE_BYTES]>),
}

impl Deref for PageBytes<'_> {
    type Target = [u8; PAGE_BYTES];

    fn deref(&self) -> &Self::Target {
        match &self.0 {
            Bytes::Borrowed(bytes) => bytes,
            Bytes::Owned(bytes) => bytes,
        }
    }
}

impl PartialEq for PageBytes<'_> {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for PageBytes<'_> {}

impl<'a> From<&'a [u8; PAGE_BYTES]> for PageBytes<'a> {
    fn from(bytes: &'a [u8; PAGE_BYTES]) -> Self {
        Self(Bytes::Borrowed(bytes))
    }
}

impl From<Box<[u8; PAGE_BYTES]>> for PageBytes<'static> {
    fn from(bytes: Box<[u8; PAGE_BYTES]>) -> Self {
        Self(Bytes::Owned(bytes))
    }
}

/// Why bytes are not a migration stream that can be kept.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// Not QEMU's magic.
    #[error("not a migration stream")]
    NotAStream,
    /// Another version of the stream than 3.
    #[error("migration stream of version {found}, only 3 is known")]
    Version {
        /// Version that was found.
        found: u32,
    },
    /// The stream is longer than what is kept.
    #[error("the {part} takes {length}, at most {limit} are read")]
    TooLong {
        /// What is too long.
        part: &'static str,
        /// Its length.
        length: ByteCount,
        /// The limit.
        limit: ByteCount,
    },
    /// The stream ends in the middle.
    #[error("the stream ends at byte {at}, in the {part}")]
    Short {
        /// Where it ends, in bytes.
        at: usize,
        /// What was being read.
        part: &'static str,
    },
    /// The device state behind the RAM has no end: the stream was cut, or QEMU was told to leave
    /// out the VM description (`suppress-vmdesc=on`), without which a cut cannot be told.
    #[error("the stream was cut: no VM description ends it")]
    Cut,
    /// No configuration section follows the header.
    #[error("no configuration section (found section type {found:#04x})")]
    NoConfiguration {
        /// What was found in its place.
        found: u8,
    },
    /// A name that is not UTF-8, or empty.
    #[error("the {part} is not a name")]
    Name {
        /// What it should name.
        part: &'static str,
    },
    /// A subsection of the configuration whose length is not known.
    #[error("configuration subsection {name:?} of version {version} is not known")]
    Subsection {
        /// Its name.
        name: String,
        /// Its version.
        version: u32,
    },
    /// The stream was recorded with a capability that changes its form.
    #[error("recorded with migration capability {name:?}, which is not supported")]
    Capability {
        /// Its name.
        name: String,
    },
    /// The guest's pages have another size than 4 KiB.
    #[error("target pages of 2^{bits} bytes, only 4 KiB are supported")]
    PageBits {
        /// Logarithm of the page size.
        bits: u32,
    },
    /// A command that opens a conversation: a recording cannot answer.
    #[error("command {name} ({number}) in a recording")]
    Command {
        /// Its name.
        name: &'static str,
        /// Its number.
        number: u16,
    },
    /// A section of something else than RAM whose length is not known.
    #[error("section {name:?} (type {section_type:#04x}) before the end of RAM cannot be kept")]
    Section {
        /// Name of the device.
        name: String,
        /// Type of the section.
        section_type: u8,
    },
    /// A section of this type cannot stand here.
    #[error("section type {section_type:#04x} at byte {at}")]
    SectionType {
        /// Its type.
        section_type: u8,
        /// Where, in bytes.
        at: usize,
    },
    /// A section or footer with a number that does not belong to RAM.
    #[error("section number {found}, RAM has {expected}")]
    SectionNumber {
        /// Number that was found.
        found: u32,
        /// Number of the RAM section.
        expected: u32,
    },
    /// RAM in another version than 4.
    #[error("RAM section of version {found}, only 4 is known")]
    RamVersion {
        /// Version that was found.
        found: u32,
    },
    /// The block list of the RAM section is missing, told twice, or does not add up.
    #[error("RAM block list: {0}")]
    BlockList(&'static str),
    /// A page record with flags that cannot be kept.
    #[error("RAM record with flags {flags:#x}: {reason}")]
    Flags {
        /// The flags.
        flags: u64,
        /// What they mean.
        reason: &'static str,
    },
    /// A page of a block that is not in the list.
    #[error("page of RAM block {name:?}, which is not in the list")]
    UnknownBlock {
        /// Name of the block.
        name: String,
    },
    /// A page behind the end of its block.
    #[error("page at {offset:#x} of RAM block {block:?}, which is {length} long")]
    PageOutside {
        /// Name of the block.
        block: String,
        /// Offset of the page.
        offset: u64,
        /// Length of the block.
        length: ByteCount,
    },
}
