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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A packet as QEMU fills it; what is not used is left from packets before.
    fn packet(data: u32, zero: u32, offsets: &[u64]) -> [u8; MULTIFD_PACKET_BYTES] {
        let mut bytes = [0xee; MULTIFD_PACKET_BYTES];
        for (at, field) in [
            (0, MULTIFD_MAGIC),
            (4, VERSION),
            (8, 0),
            (12, 128),
            (16, data),
            (20, data * 4096),
            (24, 0),
            (28, 7),
            (32, zero),
        ] {
            bytes[at..at + 4].copy_from_slice(&field.to_be_bytes());
        }
        bytes[NAME_AT..NAME_AT + 7].copy_from_slice(b"pc.ram\0");
        for (place, offset) in bytes[OFFSETS_AT..].chunks_mut(8).zip(offsets) {
            place.copy_from_slice(&offset.to_be_bytes());
        }
        bytes
    }

    /// The error of a packet with this number in this place.
    fn with(at: usize, field: u32) -> MultifdError {
        let mut bytes = packet(2, 1, &[0x3000, 0x8000, 0x1000]);
        bytes[at..at + 4].copy_from_slice(&field.to_be_bytes());
        MultifdPacket::parse(&bytes).unwrap_err()
    }

    #[test]
    fn a_packet_tells_its_block_and_its_pages() {
        let bytes = packet(2, 1, &[0x3000, 0x8000, 0x1000]);
        let packet = MultifdPacket::parse(&bytes).unwrap();
        assert_eq!((packet.block, packet.number), (Some("pc.ram"), 7));
        assert!(packet.data_pages().eq([0x3000, 0x8000]));
        assert!(packet.zero_pages().eq([0x1000]));
        assert!(!packet.ends_round);
    }

    #[test]
    fn a_packet_without_pages_may_hold_anything_else() {
        let mut bytes = packet(0, 0, &[]);
        bytes[11] = 1;
        // A payload length from before, and a name that is none.
        bytes[22] = 0x10;
        bytes[NAME_AT..OFFSETS_AT].fill(0xff);
        let packet = MultifdPacket::parse(&bytes).unwrap();
        assert_eq!(packet.block, None);
        assert!(packet.ends_round);
        assert_eq!(packet.data_pages().count() + packet.zero_pages().count(), 0);
    }

    #[test]
    fn what_cannot_be_received_is_refused_by_its_name() {
        assert_eq!(with(0, 1), MultifdError::Magic { found: 1 });
        assert_eq!(with(4, 2), MultifdError::Version { found: 2 });
        let methods = ["zlib", "zstd", "an unknown method", "qpl"];
        for (method, number) in methods.into_iter().zip(1..) {
            assert_eq!(with(8, number << 1), MultifdError::Compression { method });
        }
        assert_eq!(with(8, 0x40), MultifdError::DeviceState);
        assert_eq!(with(8, 0x80), MultifdError::Flags { flags: 0x80 });
        let too_many = |pages, places| MultifdError::TooMany { pages, places };
        assert_eq!(with(12, 129), too_many(3, 129));
        assert_eq!(with(12, 2), too_many(3, 2));
        assert_eq!(with(16, u32::MAX), too_many(u64::from(u32::MAX) + 1, 128));
        assert_eq!(with(32, 127), too_many(129, 128));
        assert_eq!(
            with(20, 4096),
            MultifdError::Payload {
                found: 4096,
                needed: 8192
            }
        );
        assert_eq!(with(NAME_AT, 0), MultifdError::Name);
        assert_eq!(
            with(OFFSETS_AT + 4, 0x3001),
            MultifdError::Offset { offset: 0x3001 }
        );
        let mut endless = packet(1, 0, &[0]);
        endless[NAME_AT..OFFSETS_AT].fill(b'n');
        assert_eq!(MultifdPacket::parse(&endless), Err(MultifdError::Name));
    }

    #[test]
    fn an_opening_tells_the_channel() {
        let mut bytes = [0; MULTIFD_OPENING_BYTES];
        bytes[..8].copy_from_slice(&packet(0, 0, &[])[..8]);
        bytes[24] = 3;
        assert_eq!(MultifdOpening::parse(&bytes), Ok(MultifdOpening { channel: 3 }));
        bytes[3] = 0;
        let error = MultifdOpening::parse(&bytes).unwrap_err();
        assert_eq!(error, MultifdError::Magic { found: 0x1122_3300 });
    }

    proptest! {
        #[test]
        fn any_numbers_give_a_packet_that_is_one_or_an_error(
            places: u32, data in 0_u32..140, payload: u32, zero in 0_u32..140, offsets: [u64; 4],
        ) {
            let mut bytes = packet(data, zero, &offsets);
            bytes[12..16].copy_from_slice(&(places % 160).to_be_bytes());
            if payload % 4 == 0 {
                bytes[20..24].copy_from_slice(&payload.to_be_bytes());
            }
            if let Ok(packet) = MultifdPacket::parse(&bytes) {
                prop_assert_eq!(packet.data_pages().len(), data as usize);
                prop_assert_eq!(packet.zero_pages().len(), zero as usize);
                prop_assert!(packet.data_pages().all(|offset| offset % 4096 == 0));
            }
        }
    }
}
