//! The packets of multifd: RAM that QEMU sends by threads of its own over connections of their own,
//! beside the main stream.
//!
//! ```text
//! opening   u32 magic | u32 version 1 | 16 bytes UUID of the guest | u8 channel | 39 bytes unused
//! packet    u32 magic | u32 version 1 | u32 flags | u32 places | u32 data pages | u32 payload bytes
//!           u64 number | u32 zero pages | 28 bytes unused | 256 bytes name of the RAM block, NUL-padded
//!           128 u64 offsets: of the data pages, then of the zero pages, then whatever stood there before
//! payload   the data pages, in the order of their offsets
//! ```
//!
//! Integers are big-endian. A packet has always the length for 128 offsets. It belongs to one RAM
//! block. One without pages only says that a round is over; it can name a block and a payload of
//! packets past, which mean nothing. QEMU before 9.0 looks for zero pages in its main thread and
//! tells them in the main stream; the count is zero in its packets then.
//!
//! The number is counted over all channels, in the order in which QEMU goes through memory. On QEMU
//! 7.2 the end of a round can overtake a packet that is still to be sent: it is sent with the flag
//! and the number of the round's end, its own is left out, and an empty packet with the same number
//! follows. From 9.0 on channels take numbers themselves, so that neighbours can be the other way
//! round.

use super::PAGE_BYTES;

/// Length of what a channel begins with.
pub const MULTIFD_OPENING_BYTES: usize = 64;

/// Length of a packet without its payload.
pub const MULTIFD_PACKET_BYTES: usize = OFFSETS_AT + PAGES_LIMIT * 8;

/// How a multifd channel begins, as opposed to the main stream.
pub(crate) const MULTIFD_MAGIC: u32 = 0x1122_3344;

const VERSION: u32 = 1;

const PAGES_LIMIT: usize = MultifdPacket::PAGES_LIMIT;

const NAME_AT: usize = 64;
const OFFSETS_AT: usize = NAME_AT + 256;

const FLAG_SYNC: u32 = 1;
const FLAGS_COMPRESSION: u32 = 0x1f << 1;
const FLAG_DEVICE_STATE: u32 = 0x20 << 1;

/// What a channel says first: which one it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MultifdOpening {
    /// Number of the channel among its migration's.
    pub channel: u8,
}

impl MultifdOpening {
    /// Reads an opening.
    ///
    /// # Errors
    ///
    /// [`MultifdError::Magic`] and [`MultifdError::Version`].
    pub fn parse(bytes: &[u8; MULTIFD_OPENING_BYTES]) -> Result<Self, MultifdError> {
        check_magic_and_version(bytes)?;
        Ok(Self { channel: bytes[24] })
    }
}

/// A packet without its payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MultifdPacket<'a> {
    /// Its number among all of its migration; if it ends a round, not reliably its own.
    pub number: u64,
    /// Whether QEMU's channel goes to wait for the others after it.
    pub ends_round: bool,
    /// Name of the RAM block, if it has pages.
    pub block: Option<&'a str>,
    data: usize,
    zero: usize,
    offsets: &'a [[u8; 8]],
}

impl MultifdPacket<'_> {
    /// Pages of a full packet: 512 KiB of payload, in every version of QEMU with pages of 4 KiB.
    pub const PAGES_LIMIT: usize = 128;

    /// Length of what [`MultifdPacket::check_head`] looks at.
    pub(crate) const HEAD_BYTES: usize = 12;
}

impl<'a> MultifdPacket<'a> {
    /// Reads a packet.
    ///
    /// # Errors
    ///
    /// [`MultifdError`] names what cannot be received, such as compressed pages, and what
    /// contradicts itself.
    pub fn parse(bytes: &'a [u8; MULTIFD_PACKET_BYTES]) -> Result<Self, MultifdError> {
        Self::check_head(bytes)?;
        let field = |at| u32_at(bytes, at);
        let (places, data, payload, zero) = (field(12), field(16), field(20), field(32));
        let number = u64::from(field(24)) << 32 | u64::from(field(28));
        let ends_round = field(8) & FLAG_SYNC != 0;
        let pages = u64::from(data) + u64::from(zero);
        if pages > u64::from(places) || places as usize > PAGES_LIMIT {
            return Err(MultifdError::TooMany { pages, places });
        }
        let (data, zero) = (data as usize, zero as usize);
        if data + zero == 0 {
            return Ok(Self {
                number,
                ends_round,
                block: None,
                data,
                zero,
                offsets: &[],
            });
        }
        let needed = data * PAGE_BYTES;
        if payload as usize != needed && data > 0 {
            return Err(MultifdError::Payload {
                found: payload,
                needed,
            });
        }
        let name = &bytes[NAME_AT..OFFSETS_AT];
        let end = name.iter().position(|byte| *byte == 0);
        let name = end.and_then(|end| std::str::from_utf8(&name[..end]).ok());
        let name = name.filter(|name| !name.is_empty()).ok_or(MultifdError::Name)?;
        let (offsets, _) = bytes[OFFSETS_AT..].as_chunks::<8>();
        let packet = Self {
            number,
            ends_round,
            block: Some(name),
            data,
            zero,
            offsets: &offsets[..data + zero],
        };
        let mut offsets = packet.data_pages().chain(packet.zero_pages());
        if let Some(offset) = offsets.find(|at| !at.is_multiple_of(PAGE_BYTES as u64)) {
            return Err(MultifdError::Offset { offset });
        }
        Ok(packet)
    }

    /// Looks at the beginning of a packet, magic, version and flags, which says whether the rest is
    /// one that [`MultifdPacket::parse`] reads: one of device state is shorter.
    pub(crate) fn check_head(head: &[u8]) -> Result<(), MultifdError> {
        check_magic_and_version(head)?;
        let flags = u32_at(head, 8);
        if flags & FLAG_DEVICE_STATE != 0 {
            return Err(MultifdError::DeviceState);
        }
        let method = match (flags & FLAGS_COMPRESSION) >> 1 {
            0 if flags & !FLAG_SYNC == 0 => return Ok(()),
            0 => return Err(MultifdError::Flags { flags }),
            1 => "zlib",
            2 => "zstd",
            4 => "qpl",
            8 => "uadk",
            16 => "qatzip",
            _ => "an unknown method",
        };
        Err(MultifdError::Compression { method })
    }

    /// Offsets in the block of the pages that the payload holds, in its order; multiples of 4 KiB.
    pub fn data_pages(&self) -> impl ExactSizeIterator<Item = u64> + use<'a> {
        self.offsets[..self.data]
            .iter()
            .map(|offset| u64::from_be_bytes(*offset))
    }

    /// Offsets in the block of pages that are zero; multiples of 4 KiB.
    pub fn zero_pages(&self) -> impl ExactSizeIterator<Item = u64> + use<'a> {
        self.offsets[self.data..][..self.zero]
            .iter()
            .map(|offset| u64::from_be_bytes(*offset))
    }
}

fn check_magic_and_version(bytes: &[u8]) -> Result<(), MultifdError> {
    let (magic, version) = (u32_at(bytes, 0), u32_at(bytes, 4));
    if magic != MULTIFD_MAGIC {
        return Err(MultifdError::Magic { found: magic });
    }
    if version != VERSION {
        return Err(MultifdError::Version { found: version });
    }
    Ok(())
}

/// The callers ask for places inside only.
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..]
        .first_chunk()
        .map_or(0, |field| u32::from_be_bytes(*field))
}

/// Why a packet of a multifd channel cannot be received.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MultifdError {
    /// Not multifd's magic.
    #[error("a packet begins with {found:#010x}")]
    Magic {
        /// What stands there.
        found: u32,
    },
    /// Another version than 1.
    #[error("packets of version {found}, only 1 is known")]
    Version {
        /// Version that was found.
        found: u32,
    },
    /// The migration parameter `multifd-compression` is not `none`.
    #[error("pages compressed with {method}, set multifd-compression to none")]
    Compression {
        /// Name of the method.
        method: &'static str,
    },
    /// Device state in a channel: of VFIO devices, from QEMU 10.0 on.
    #[error("device state in a multifd channel, which cannot be kept")]
    DeviceState,
    /// Flags that are not known.
    #[error("a packet with flags {flags:#x}")]
    Flags {
        /// The flags.
        flags: u32,
    },
    /// More pages than a packet has places, or more places than packets have.
    #[error("a packet with {pages} pages in {places} places, at most {PAGES_LIMIT} can be")]
    TooMany {
        /// Pages, data and zero.
        pages: u64,
        /// Places.
        places: u32,
    },
    /// A payload that is not that of its pages.
    #[error("a packet with {found} bytes of payload, its pages take {needed}")]
    Payload {
        /// Bytes that are told.
        found: u32,
        /// Bytes that its pages take.
        needed: usize,
    },
    /// The name of a RAM block that is not UTF-8, empty, or without an end.
    #[error("a packet does not name its RAM block")]
    Name,
    /// An offset that is not a page's.
    #[error("a packet with a page at {offset:#x}, where none begins")]
    Offset {
        /// The offset.
        offset: u64,
    },
    /// A channel ends in the middle of a packet or of its payload.
    #[error("the channel ends in the middle of a packet")]
    Short,
    /// Two channels with one number.
    #[error("two channels have the number {channel}")]
    Twice {
        /// The number.
        channel: u8,
    },
}
