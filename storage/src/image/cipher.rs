//! Encryption at rest: AES-256-GCM, a key of its own for each image.
//!
//! ```text
//!  key (32 bytes, a person's) ─┐
//!  salt (32 bytes, random) ────┴─ HKDF-SHA-256 ──┬─► check, kept in the superblock: tells a wrong key
//!                                                └─► AES-256-GCM key of this image
//!        chunk         nonce 0 | number of the chunk's writing     bound to its block, place, form and length
//!        device state  nonce 1 | 0                                 bound to chunk table and manifest
//! ```
//!
//! What is guaranteed: RAM and devices are on the disk as ciphertext only; a nonce is used once, for
//! each image has its own key and each writing of a chunk a number of its own; chunks cannot be
//! exchanged, and with the device state table and manifest are authentic too. What is not: manifest
//! and chunk table lie open (names, sizes, which chunks are zero or compress well), and an
//! older image of the same guest is as authentic as a newer one.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, Tag, UnboundKey};
use ring::hkdf;
use ring::rand::{SecureRandom, SystemRandom};

use super::chunks::{Form, Seal};
use super::key::ImageKey;
use super::superblock::Encryption;

pub(super) const SALT_BYTES: usize = 32;
pub(super) const CHECK_BYTES: usize = 16;
pub(super) const TAG_BYTES: usize = 16;

const DOMAIN_CHUNK: u32 = 0;
const DOMAIN_DEVICE_STATE: u32 = 1;

/// The cipher of one image.
pub(super) struct Cipher {
    key: LessSafeKey,
    encryption: Encryption,
    /// Number of the next chunk that is written.
    next: AtomicU64,
}

/// What was sealed does not open: altered, or put elsewhere.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NotAuthentic;

impl Cipher {
    /// A cipher for a new image; `None` if the system has no random numbers.
    pub(super) fn new(key: &ImageKey) -> Option<Self> {
        let mut salt = [0; SALT_BYTES];
        SystemRandom::new().fill(&mut salt).ok()?;
        Self::with_salt(key, salt)
    }

    /// The cipher of an image that was written, if this is its key.
    pub(super) fn of(key: &ImageKey, encryption: &Encryption) -> Option<Self> {
        let cipher = Self::with_salt(key, encryption.salt)?;
        (cipher.encryption.check == encryption.check).then_some(cipher)
    }

    fn with_salt(key: &ImageKey, salt: [u8; SALT_BYTES]) -> Option<Self> {
        let extracted = hkdf::Salt::new(hkdf::HKDF_SHA256, &salt).extract(key.bytes());
        let own = extracted
            .expand(&[b"dormouse image: AES-256-GCM"], &AES_256_GCM)
            .ok()?;
        let mut check = [0; CHECK_BYTES];
        extracted
            .expand(&[b"dormouse image: key check"], CheckLength)
            .and_then(|okm| okm.fill(&mut check))
            .ok()?;
        Some(Self {
            key: LessSafeKey::new(UnboundKey::from(own)),
            encryption: Encryption { salt, check },
            next: AtomicU64::new(0),
        })
    }

    /// What the superblock keeps.
    pub(super) fn encryption(&self) -> Encryption {
        self.encryption
    }

    /// Encrypts what is stored for a chunk, in place.
    pub(super) fn seal_chunk(&self, place: ChunkPlace, stored: &mut [u8]) -> Option<Seal> {
        // Never the same twice: a chunk that is written again gets another one.
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let tag = self
            .key
            .seal_in_place_separate_tag(nonce(DOMAIN_CHUNK, number), Aad::from(place.bytes()), stored)
            .ok()?;
        Some(Seal {
            nonce: number,
            tag: tag_bytes(&tag),
        })
    }

    /// Decrypts what was stored for a chunk, in place. The bytes are worthless if it is not authentic.
    pub(super) fn open_chunk(
        &self,
        place: ChunkPlace,
        seal: Seal,
        stored: &mut [u8],
    ) -> Result<(), NotAuthentic> {
        self.key
            .open_in_place_separate_tag(
                nonce(DOMAIN_CHUNK, seal.nonce),
                Aad::from(place.bytes()),
                Tag::from(seal.tag),
                stored,
                0..,
            )
            .map(|_| ())
            .map_err(|_| NotAuthentic)
    }

    /// Encrypts the device state, bound to what lies open. The tag stands at its end.
    pub(super) fn seal_device_state(&self, device_state: Vec<u8>, open: &[u8]) -> Option<Vec<u8>> {
        let mut sealed = device_state;
        self.key
            .seal_in_place_append_tag(nonce(DOMAIN_DEVICE_STATE, 0), Aad::from(open), &mut sealed)
            .ok()?;
        Some(sealed)
    }

    /// Decrypts the device state.
    pub(super) fn open_device_state(
        &self,
        mut sealed: Vec<u8>,
        open: &[u8],
    ) -> Result<Vec<u8>, NotAuthentic> {
        let opened = self
            .key
            .open_in_place(nonce(DOMAIN_DEVICE_STATE, 0), Aad::from(open), &mut sealed)
            .map_err(|_| NotAuthentic)?
            .len();
        sealed.truncate(opened);
        Ok(sealed)
    }
}

impl fmt::Debug for Cipher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Cipher(..)")
    }
}

/// Where a chunk belongs and what it is: what its seal is bound to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ChunkPlace {
    block: u32,
    chunk: u64,
    length: u32,
    form: Form,
}

impl ChunkPlace {
    /// The place of the chunk with this index in the block with this index.
    pub(super) fn of(block: usize, chunk: u64, length: u32, form: Form) -> Self {
        Self {
            // A layout has at most 4096 blocks.
            block: block as u32,
            chunk,
            length,
            form,
        }
    }

    fn bytes(self) -> [u8; 17] {
        let mut bytes = [0; 17];
        bytes[..4].copy_from_slice(&self.block.to_le_bytes());
        bytes[4..12].copy_from_slice(&self.chunk.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.length.to_le_bytes());
        bytes[16] = match self.form {
            Form::Raw => 1,
            Form::Zstd => 2,
        };
        bytes
    }
}

struct CheckLength;

impl hkdf::KeyType for CheckLength {
    fn len(&self) -> usize {
        CHECK_BYTES
    }
}

fn nonce(domain: u32, number: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[..4].copy_from_slice(&domain.to_le_bytes());
    bytes[4..].copy_from_slice(&number.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

fn tag_bytes(tag: &Tag) -> [u8; TAG_BYTES] {
    let mut bytes = [0; TAG_BYTES];
    bytes.copy_from_slice(tag.as_ref());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(byte: u8) -> ImageKey {
        ImageKey::from_file_content(&[byte; 32]).unwrap()
    }

    const PLACE: ChunkPlace = ChunkPlace {
        block: 1,
        chunk: 2,
        length: 4096,
        form: Form::Raw,
    };

    #[test]
    fn a_chunk_opens_at_its_own_place_only_and_only_unaltered() {
        let cipher = Cipher::new(&key(1)).unwrap();
        let mut stored = vec![7; 4096];
        let seal = cipher.seal_chunk(PLACE, &mut stored).unwrap();
        assert_ne!(stored, [7; 4096]);
        let again = Cipher::of(&key(1), &cipher.encryption()).unwrap();
        let mut opened = stored.clone();
        assert_eq!(again.open_chunk(PLACE, seal, &mut opened), Ok(()));
        assert_eq!(opened, [7; 4096]);

        let elsewhere = [
            ChunkPlace { block: 0, ..PLACE },
            ChunkPlace { chunk: 3, ..PLACE },
            ChunkPlace {
                length: 8192,
                ..PLACE
            },
            ChunkPlace {
                form: Form::Zstd,
                ..PLACE
            },
        ];
        for place in elsewhere {
            assert_eq!(
                again.open_chunk(place, seal, &mut stored.clone()),
                Err(NotAuthentic)
            );
        }
        stored[100] ^= 1;
        assert_eq!(again.open_chunk(PLACE, seal, &mut stored), Err(NotAuthentic));
    }

    #[test]
    fn another_key_is_told_by_the_check_and_another_image_has_another_key() {
        let cipher = Cipher::new(&key(1)).unwrap();
        assert!(Cipher::of(&key(2), &cipher.encryption()).is_none());
        let other = Cipher::new(&key(1)).unwrap();
        assert_ne!(other.encryption(), cipher.encryption());
    }

    #[test]
    fn no_nonce_comes_twice_even_for_one_place() {
        let cipher = Cipher::new(&key(1)).unwrap();
        let first = cipher.seal_chunk(PLACE, &mut [0; 4096]).unwrap();
        let second = cipher.seal_chunk(PLACE, &mut [0; 4096]).unwrap();
        assert_ne!(first.nonce, second.nonce);
    }

    #[test]
    fn a_device_state_is_bound_to_what_lies_open() {
        let cipher = Cipher::new(&key(1)).unwrap();
        let sealed = cipher.seal_device_state(b"devices".to_vec(), b"table").unwrap();
        assert_eq!(
            cipher.open_device_state(sealed.clone(), b"table"),
            Ok(b"devices".to_vec())
        );
        assert_eq!(
            cipher.open_device_state(sealed.clone(), b"tablE"),
            Err(NotAuthentic)
        );
        assert_eq!(
            cipher.open_device_state(sealed[1..].to_vec(), b"table"),
            Err(NotAuthentic)
        );
        assert_eq!(cipher.open_device_state(vec![], b"table"), Err(NotAuthentic));
    }
}
