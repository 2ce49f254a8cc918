//! The superblock: what the file is, in which state, and where everything lies.
//!
//! Two copies, 4 KiB each, at offsets 0 and 4096. Integers are little-endian:
//!
//! ```text
//!    0  magic "DORMOUSE"
//!    8  u32 format version        12  u32 state (1 writing, 2 sealed, 3 waking, 4 consumed)
//!   16  image id (UUID)           32  u64 generation
//!   40  u32 chunk size            44  u32 zero
//!   48  chunk table   \
//!   72  device state   } each u64 offset | u64 length | u32 CRC-32 | u32 zero
//!   96  manifest      /
//!  120  u32 flags (bit 0: zero chunks read as zeros at their places; bit 1: woken although its disks differed)
//!  124  u32 cipher (0 none, 1 AES-256-GCM)
//!  128  salt of the cipher's key (32 bytes)
//!  160  what the right key makes of it (16 bytes): tells a wrong key at once
//!  176  id of the wake that marked it (UUID; zero: not told)
//!  192  zero
//! 4092  u32 CRC-32 of bytes 0..4092
//! ```
//!
//! Format 1 ends with the manifest's place: it has no cipher, and being a file, its zeros are zeros. An
//! image of format 1 stays one when its state changes. What a wake notes (bit 1, its id) stands at the same places
//! in each format, and a reader that does not know it passes it by.
//!
//! Magic, version and CRC keep their places in every format to come, so that any version can tell
//! "newer" from "damaged".
//!
//! **A state change** writes the copy that is *not* the current one, with the next generation, and
//! syncs: that sync is the moment of the change. Then the other copy is made its twin (same
//! generation). So at every instant one copy is whole, and:
//!
//! | copies on disk | what happened | state |
//! | --- | --- | --- |
//! | both valid | twins, or a crash between the two writes | the higher generation |
//! | one torn, the other older | a crash in the first write; the change was never acknowledged, nobody acted on it | the older copy: the previous state |
//! | one torn, the other newer | a crash in the second write, or later damage | the newer copy |
//! | both torn | damage | none: the image is torn |
//!
//! The second write is what makes falling back safe: once a change was acknowledged both copies
//! tell it, so that damage to one cannot bring the previous state back and let an image wake twice.
//! With one copy per change a torn `waking` would be the image's older `sealed`, whether the guest
//! already ran or not.

use uuid::Uuid;

use super::chunks::TABLE_LIMIT;
use super::cipher::{CHECK_BYTES, SALT_BYTES};
use super::layout::{AREA_ALIGNMENT, BLOCK_ALIGNMENT};
use super::manifest::MANIFEST_LIMIT;
use super::state::ImageState;
use crate::migration::STREAM_LIMIT;

/// The format that this version writes, and the newest that it reads.
pub const FORMAT_VERSION: u32 = 2;

/// The first format, which is read still.
pub(super) const FORMAT_1: u32 = 1;

/// Chunks that were zero read as zeros at their places.
const FLAG_ZEROS_READ_AS_ZEROS: u32 = 1;

/// The wake was let through although the disks were not those of the save.
const FLAG_DISKS_FORCED: u32 = 2;

/// Length of one copy.
pub(crate) const COPY_BYTES: usize = 4096;

/// Where the two copies lie.
pub(crate) const COPY_OFFSETS: [u64; 2] = [0, COPY_BYTES as u64];

const MAGIC: [u8; 8] = *b"DORMOUSE";

const CIPHER_AES_256_GCM: u32 = 1;
const CRC_AT: usize = COPY_BYTES - 4;

/// One of the areas behind the RAM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Area {
    pub(super) offset: u64,
    pub(super) length: u64,
    pub(super) crc32: u32,
}

impl Area {
    fn end(&self) -> Option<u64> {
        self.offset.checked_add(self.length)
    }
}

/// What the superblock says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Superblock {
    pub(super) format: u32,
    pub(crate) state: ImageState,
    pub(crate) id: Uuid,
    pub(super) generation: u64,
    pub(super) chunk_bytes: u32,
    pub(super) table: Area,
    pub(super) device_state: Area,
    pub(super) manifest: Area,
    /// Whether chunks that were zero read as zeros at their places, so that RAM can be mapped.
    pub(super) zeros_read_as_zeros: bool,
    /// How its content is encrypted, if it is.
    pub(super) encryption: Option<Encryption>,
    /// What the wake that marked it noted.
    pub(super) note: WakeNote,
}

/// What a wake notes in the image that it marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WakeNote {
    /// Which wake it was, so that whoever ends it after a crash takes no other wake's mark for its own; nil if that is
    /// not told.
    pub wake: Uuid,
    /// Whether it was let through although the disks were not as they were at the save.
    pub disks_forced: bool,
}

/// What is kept in the open about a cipher's key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Encryption {
    /// Makes the keys of two images differ.
    pub(super) salt: [u8; SALT_BYTES],
    /// What the right key makes of the salt.
    pub(super) check: [u8; CHECK_BYTES],
}

impl Superblock {
    pub(crate) fn encode(&self) -> [u8; COPY_BYTES] {
        let mut copy = [0; COPY_BYTES];
        let mut put = |at: usize, bytes: &[u8]| copy[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC);
        put(8, &self.format.to_le_bytes());
        put(12, &state_number(self.state).to_le_bytes());
        put(16, self.id.as_bytes());
        put(32, &self.generation.to_le_bytes());
        put(40, &self.chunk_bytes.to_le_bytes());
        for (at, area) in [(48, self.table), (72, self.device_state), (96, self.manifest)] {
            put(at, &area.offset.to_le_bytes());
            put(at + 8, &area.length.to_le_bytes());
            put(at + 16, &area.crc32.to_le_bytes());
        }
        let mut flags = 0;
        if self.format > FORMAT_1 && self.zeros_read_as_zeros {
            flags |= FLAG_ZEROS_READ_AS_ZEROS;
        }
        if self.note.disks_forced {
            flags |= FLAG_DISKS_FORCED;
        }
        put(120, &flags.to_le_bytes());
        put(176, self.note.wake.as_bytes());
        if let Some(encryption) = &self.encryption {
            put(124, &CIPHER_AES_256_GCM.to_le_bytes());
            put(128, &encryption.salt);
            put(160, &encryption.check);
        }
        let crc32 = crc32fast::hash(&copy[..CRC_AT]);
        copy[CRC_AT..].copy_from_slice(&crc32.to_le_bytes());
        copy
    }

    /// Where the last area ends: the file must be that long.
    pub(super) fn end(&self) -> u64 {
        [self.table, self.device_state, self.manifest]
            .iter()
            .filter_map(Area::end)
            .max()
            .unwrap_or(u64::MAX)
    }

    /// Checks what a valid checksum does not: that the areas can lie like that, and that none is
    /// longer than its limit.
    pub(super) fn check(&self) -> Result<(), &'static str> {
        if !(AREA_ALIGNMENT..=64 << 20).contains(&self.chunk_bytes.into())
            || !self.chunk_bytes.is_power_of_two()
        {
            return Err("the chunk size is impossible");
        }
        let mut free_from = BLOCK_ALIGNMENT;
        for (area, limit) in [
            (self.table, TABLE_LIMIT),
            (self.device_state, STREAM_LIMIT),
            (self.manifest, MANIFEST_LIMIT),
        ] {
            if area.length > limit.0 {
                return Err("an area is longer than its limit");
            }
            let Some(end) = area.end() else {
                return Err("an area has no end");
            };
            if !area.offset.is_multiple_of(AREA_ALIGNMENT) || area.offset < free_from {
                return Err("an area is misplaced");
            }
            free_from = end;
        }
        Ok(())
    }
}

/// What the beginning of a file turned out to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Superblocks {
    /// At least one valid copy.
    Valid {
        /// The copy that counts.
        current: Superblock,
        /// Which of the two it is.
        copy: usize,
    },
    /// Not even the magic.
    Alien,
    /// A valid copy of a format that this version does not know.
    Newer(u32),
    /// The magic, but no valid copy.
    Torn,
    /// Two valid copies that belong to different images.
    Contradiction(Box<[Superblock; 2]>),
}

impl Superblocks {
    /// Reads the two copies; what the file was too short for is left out or cut.
    pub(super) fn read(copies: [&[u8]; 2]) -> Self {
        let copies = copies.map(Copy::read);
        let newest = copies.iter().filter_map(|copy| match copy {
            Copy::Newer(version) => Some(*version),
            _ => None,
        });
        if let Some(version) = newest.max() {
            return Self::Newer(version);
        }
        match copies {
            [Copy::Valid(first), Copy::Valid(second)] if first.id != second.id => {
                Self::Contradiction(Box::new([first, second]))
            }
            [Copy::Valid(first), Copy::Valid(second)] if second.generation > first.generation => {
                Self::Valid {
                    current: second,
                    copy: 1,
                }
            }
            [Copy::Valid(first), _] => Self::Valid {
                current: first,
                copy: 0,
            },
            [_, Copy::Valid(second)] => Self::Valid {
                current: second,
                copy: 1,
            },
            [Copy::Alien, Copy::Alien] => Self::Alien,
            _ => Self::Torn,
        }
    }
}

enum Copy {
    Valid(Superblock),
    Newer(u32),
    Torn,
    Alien,
}

impl Copy {
    fn read(copy: &[u8]) -> Self {
        if !copy.starts_with(&MAGIC) {
            return Self::Alien;
        }
        let Some(copy) = copy.first_chunk::<COPY_BYTES>() else {
            return Self::Torn;
        };
        if crc32fast::hash(&copy[..CRC_AT]) != u32_at(copy, CRC_AT) {
            return Self::Torn;
        }
        let format = u32_at(copy, 8);
        if format > FORMAT_VERSION {
            return Self::Newer(format);
        }
        let Some(state) = state_of(u32_at(copy, 12)).filter(|_| format >= FORMAT_1) else {
            return Self::Torn;
        };
        let flags = u32_at(copy, 120);
        let zeros_read_as_zeros = format == FORMAT_1 || flags & FLAG_ZEROS_READ_AS_ZEROS != 0;
        let encryption = match u32_at(copy, 124) {
            0 => None,
            CIPHER_AES_256_GCM => Some(Encryption {
                salt: bytes_at(copy, 128),
                check: bytes_at(copy, 160),
            }),
            // A cipher to come would come with a format to come.
            _ => return Self::Torn,
        };
        let area = |at| Area {
            offset: u64_at(copy, at),
            length: u64_at(copy, at + 8),
            crc32: u32_at(copy, at + 16),
        };
        Self::Valid(Superblock {
            format,
            state,
            id: Uuid::from_bytes(bytes_at(copy, 16)),
            generation: u64_at(copy, 32),
            chunk_bytes: u32_at(copy, 40),
            table: area(48),
            device_state: area(72),
            manifest: area(96),
            zeros_read_as_zeros,
            encryption,
            note: WakeNote {
                wake: Uuid::from_bytes(bytes_at(copy, 176)),
                disks_forced: flags & FLAG_DISKS_FORCED != 0,
            },
        })
    }
}

fn u32_at(copy: &[u8; COPY_BYTES], at: usize) -> u32 {
    u32::from_le_bytes(bytes_at(copy, at))
}

fn u64_at(copy: &[u8; COPY_BYTES], at: usize) -> u64 {
    u64::from_le_bytes(bytes_at(copy, at))
}

fn bytes_at<const N: usize>(copy: &[u8; COPY_BYTES], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&copy[at..at + N]);
    bytes
}

fn state_number(state: ImageState) -> u32 {
    match state {
        ImageState::Writing => 1,
        ImageState::Sealed => 2,
        ImageState::Waking => 3,
        ImageState::Consumed => 4,
    }
}

fn state_of(number: u32) -> Option<ImageState> {
    Some(match number {
        1 => ImageState::Writing,
        2 => ImageState::Sealed,
        3 => ImageState::Waking,
        4 => ImageState::Consumed,
        _ => return None,
    })
}

/// The superblock of an image whose writing begins.
pub(crate) fn beginning(id: Uuid, chunk_bytes: u32) -> Superblock {
    Superblock {
        format: FORMAT_VERSION,
        state: ImageState::Writing,
        id,
        generation: 1,
        chunk_bytes,
        table: Area::default(),
        device_state: Area::default(),
        manifest: Area::default(),
        zeros_read_as_zeros: false,
        encryption: None,
        note: WakeNote::default(),
    }
}

/// The area that `bytes` make at `offset`.
pub(super) fn area_of(offset: u64, bytes: &[u8]) -> Area {
    Area {
        offset,
        length: bytes.len() as u64,
        crc32: crc32fast::hash(bytes),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn superblock(state: ImageState, generation: u64) -> Superblock {
        Superblock {
            state,
            generation,
            table: Area {
                offset: 4 << 20,
                length: 100,
                crc32: 1,
            },
            device_state: Area {
                offset: (4 << 20) + 4096,
                length: 200,
                crc32: 2,
            },
            manifest: Area {
                offset: (4 << 20) + 8192,
                length: 300,
                crc32: 3,
            },
            ..beginning(Uuid::from_u128(7), 1 << 20)
        }
    }

    fn torn(superblock: &Superblock) -> Vec<u8> {
        let mut copy = superblock.encode().to_vec();
        // The first sector is new, the last one still old: what a crash in the middle of the write
        // leaves.
        copy[2048..].fill(0);
        copy
    }

    #[test]
    fn a_superblock_comes_back_as_it_went() {
        let written = superblock(ImageState::Waking, 3);
        let read = Superblocks::read([&written.encode(), &[]]);
        assert_eq!(
            read,
            Superblocks::Valid {
                current: written.clone(),
                copy: 0
            }
        );
        assert_eq!(written.check(), Ok(()));
        assert_eq!(written.end(), (4 << 20) + 8192 + 300);
    }

    #[test]
    fn what_format_2_added_comes_back_and_format_1_stays_format_1() {
        let encrypted = Superblock {
            encryption: Some(Encryption {
                salt: [3; SALT_BYTES],
                check: [5; CHECK_BYTES],
            }),
            zeros_read_as_zeros: true,
            ..superblock(ImageState::Sealed, 2)
        };
        let first = Superblock {
            format: FORMAT_1,
            zeros_read_as_zeros: true,
            ..superblock(ImageState::Sealed, 2)
        };
        for written in [encrypted, first.clone()] {
            let read = Superblocks::read([&written.encode(), &[]]);
            let current = written;
            assert_eq!(read, Superblocks::Valid { current, copy: 0 });
        }
        assert!(first.encode()[120..CRC_AT].iter().all(|byte| *byte == 0));
    }

    #[test]
    fn what_a_wake_noted_comes_back_in_every_format() {
        for format in [FORMAT_1, FORMAT_VERSION] {
            let current = Superblock {
                format,
                zeros_read_as_zeros: format == FORMAT_1,
                note: WakeNote {
                    wake: Uuid::from_u128(9),
                    disks_forced: true,
                },
                ..superblock(ImageState::Waking, 3)
            };
            let read = Superblocks::read([&current.encode(), &[]]);
            assert_eq!(read, Superblocks::Valid { current, copy: 0 });
        }
    }

    #[test]
    fn the_copy_with_the_higher_generation_counts_wherever_it_lies() {
        let older = superblock(ImageState::Sealed, 2);
        let newer = superblock(ImageState::Waking, 3);
        assert_eq!(
            Superblocks::read([&older.encode(), &newer.encode()]),
            Superblocks::Valid {
                current: newer.clone(),
                copy: 1
            }
        );
        assert_eq!(
            Superblocks::read([&newer.encode(), &older.encode()]),
            Superblocks::Valid {
                current: newer,
                copy: 0
            }
        );
    }

    #[test]
    fn a_torn_copy_leaves_what_the_other_says_at_every_combination() {
        let older = superblock(ImageState::Sealed, 2);
        let newer = superblock(ImageState::Waking, 3);
        let valid = |current: &Superblock, copy| Superblocks::Valid {
            current: current.clone(),
            copy,
        };
        for first in [&older, &newer] {
            for second in [&older, &newer] {
                assert_eq!(
                    Superblocks::read([&torn(first), &second.encode()]),
                    valid(second, 1)
                );
                assert_eq!(
                    Superblocks::read([&first.encode(), &torn(second)]),
                    valid(first, 0)
                );
                assert_eq!(
                    Superblocks::read([&torn(first), &torn(second)]),
                    Superblocks::Torn
                );
                assert_eq!(
                    Superblocks::read([&torn(first), &[0; COPY_BYTES]]),
                    Superblocks::Torn
                );
                assert_eq!(
                    Superblocks::read([&[0; COPY_BYTES], &torn(second)]),
                    Superblocks::Torn
                );
            }
        }
    }

    #[test]
    fn a_newer_format_is_told_from_damage_by_its_checksum() {
        let mut newer = superblock(ImageState::Sealed, 2).encode();
        newer[8..12].copy_from_slice(&7_u32.to_le_bytes());
        assert_eq!(Superblocks::read([&newer, &newer]), Superblocks::Torn);
        let crc32 = crc32fast::hash(&newer[..CRC_AT]);
        newer[CRC_AT..].copy_from_slice(&crc32.to_le_bytes());
        assert_eq!(Superblocks::read([&newer, &[]]), Superblocks::Newer(7));
    }

    #[test]
    fn copies_of_two_images_in_one_file_are_a_contradiction() {
        let first = superblock(ImageState::Sealed, 2);
        let second = Superblock {
            id: Uuid::from_u128(8),
            ..first.clone()
        };
        assert_eq!(
            Superblocks::read([&first.encode(), &second.encode()]),
            Superblocks::Contradiction(Box::new([first, second]))
        );
    }

    #[test]
    fn areas_that_overlap_lie_in_the_ram_or_are_too_long_are_refused() {
        let good = superblock(ImageState::Sealed, 2);
        let area = |offset, length| Area {
            offset,
            length,
            crc32: 0,
        };
        for bad in [
            Superblock {
                table: area(4096, 100),
                ..good.clone()
            },
            Superblock {
                table: area((4 << 20) + 1, 100),
                ..good.clone()
            },
            Superblock {
                device_state: area(4 << 20, 100),
                ..good.clone()
            },
            Superblock {
                device_state: area((4 << 20) + 4096, STREAM_LIMIT.0 + 1),
                ..good.clone()
            },
            Superblock {
                manifest: area(u64::MAX - 4095, 4096),
                ..good.clone()
            },
            Superblock {
                manifest: area((4 << 20) + 8192, MANIFEST_LIMIT.0 + 1),
                ..good.clone()
            },
            Superblock {
                chunk_bytes: 0,
                ..good.clone()
            },
            Superblock {
                chunk_bytes: 1000,
                ..good.clone()
            },
            // Whoever looks for the chunks of a larger page counts on a power of two.
            Superblock {
                chunk_bytes: 3 * 4096,
                ..good.clone()
            },
        ] {
            assert!(bad.check().is_err(), "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn any_flipped_bit_makes_a_copy_invalid(bit in 64_usize..COPY_BYTES * 8) {
            let mut copy = superblock(ImageState::Sealed, 2).encode();
            copy[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(Superblocks::read([&copy, &[]]), Superblocks::Torn);
        }

        #[test]
        fn arbitrary_bytes_never_panic(first in prop::collection::vec(any::<u8>(), 0..5000), second: Vec<u8>) {
            let _ = Superblocks::read([&first, &second]);
            let mut marked = MAGIC.to_vec();
            marked.extend(first);
            let _ = Superblocks::read([&marked, &second]);
        }
    }
}
