//! From a chunk of RAM to what is stored for it, and back: compressed, encrypted, under its CRC-32.
//!
//! ```text
//!  chunk ──► zstd, if that makes it smaller by a page ──► AES-256-GCM, if there is a key ──► CRC-32 ──► its place
//!        ◄──                                          ◄──                                ◄── checked
//! ```
//!
//! The CRC-32 is over what is stored: whether an image is whole can be told without its key, and nothing
//! is decompressed that is not what was written.

use std::time::{Duration, Instant};

use zstd::bulk::{Compressor, Decompressor};

use super::chunks::{Form, Stored};
use super::cipher::{ChunkPlace, Cipher};
use super::compression::{Compression, Decider, Written};
use crate::sys::AlignedBuf;

/// A chunk that is not smaller by this much is stored as it is: a volume deals in such units.
const WORTH_STORING: usize = 4096;

/// How the chunks of an image are stored.
#[derive(Debug)]
pub(super) struct Codec {
    level: Option<i32>,
    decider: Decider,
    cipher: Option<Cipher>,
}

/// A worker's own part of a codec.
#[derive(Default)]
pub(super) struct Workbench {
    compressor: Option<Compressor<'static>>,
}

/// What a chunk became.
#[derive(Debug)]
pub(super) struct Encoded {
    pub(super) buffer: AlignedBuf,
    pub(super) stored: Stored,
    /// How long the compression took, if it was tried.
    pub(super) compressed: Option<Duration>,
}

/// Why a chunk could not be stored: the libraries say no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum EncodeError {
    #[error("zstd does not work")]
    Zstd,
    #[error("the cipher does not work")]
    Cipher,
}

impl Codec {
    pub(super) fn new(compression: Compression, cipher: Option<Cipher>) -> Self {
        Self {
            level: compression.level(),
            decider: Decider::of(compression),
            cipher,
        }
    }

    pub(super) fn cipher(&self) -> Option<&Cipher> {
        self.cipher.as_ref()
    }

    /// Whether the next chunk is to be compressed.
    pub(super) fn compress_next(&self) -> bool {
        self.decider.compress_next()
    }

    /// Whether a chunk that is not compressed is stored from where it lies.
    pub(super) fn stores_as_it_is(&self) -> bool {
        self.cipher.is_none()
    }

    /// Tells what became of a chunk.
    pub(super) fn learn(&self, written: &Written) {
        self.decider.learn(written);
    }

    /// Makes of the first `length` bytes of `plain` what is stored for the chunk with this index of the
    /// block with this index. `spare` is a second buffer as long; one of the two comes back in each part
    /// of the result.
    pub(super) fn encode(
        &self,
        workbench: &mut Workbench,
        (block, chunk): (usize, u64),
        (plain, length): (AlignedBuf, usize),
        compress: bool,
        spare: impl FnOnce() -> AlignedBuf,
    ) -> Result<(Encoded, Option<AlignedBuf>), EncodeError> {
        let mut buffer = plain;
        let mut left_over = None;
        let mut form = Form::Raw;
        let mut stored_length = length;
        let mut compressed = None;
        if let Some(level) = self.level.filter(|_| compress && length > WORTH_STORING) {
            let started = Instant::now();
            let compressor = match &mut workbench.compressor {
                Some(compressor) => compressor,
                absent => absent.insert(Compressor::new(level).map_err(|_| EncodeError::Zstd)?),
            };
            let mut smaller = spare();
            // A frame that does not fit is not worth it; zstd has no other error here.
            match compressor.compress_to_buffer(&buffer[..length], &mut smaller[..length - WORTH_STORING]) {
                Ok(frame) => {
                    form = Form::Zstd;
                    stored_length = frame;
                    left_over = Some(std::mem::replace(&mut buffer, smaller));
                }
                Err(_) => left_over = Some(smaller),
            }
            compressed = Some(started.elapsed());
        }
        let seal = match &self.cipher {
            None => None,
            Some(cipher) => {
                // A buffer for a chunk of 1 MiB; lengths fit 32 bits.
                let place = ChunkPlace::of(block, chunk, length as u32, form);
                let seal = cipher.seal_chunk(place, &mut buffer[..stored_length]);
                Some(seal.ok_or(EncodeError::Cipher)?)
            }
        };
        let stored = Stored {
            form,
            length: stored_length as u32,
            crc32: crc32fast::hash(&buffer[..stored_length]),
            seal,
        };
        let encoded = Encoded {
            buffer,
            stored,
            compressed,
        };
        Ok((encoded, left_over))
    }
}

/// Why what is stored for a chunk, and is what was written, is no chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DecodeError {
    /// It is encrypted, and there is no key.
    NoKey,
    /// It was altered, or belongs elsewhere.
    NotAuthentic,
    /// zstd does not make of it what it should.
    Frame,
}

/// Where a chunk is turned back into RAM.
pub(crate) struct Unpacker {
    /// What was stored; of a raw chunk also what it was made of.
    pub(super) stored: AlignedBuf,
    plain: Option<AlignedBuf>,
    /// Where the chunk is that was unpacked last.
    unpacked: Form,
    decompressor: Option<Decompressor<'static>>,
}

impl Unpacker {
    pub(super) fn new(chunk_bytes: u32) -> Self {
        Self {
            // One piece of memory to the device that fills it, instead of 256.
            stored: AlignedBuf::on_huge_pages(chunk_bytes as usize),
            plain: None,
            unpacked: Form::Raw,
            decompressor: None,
        }
    }

    /// Turns what lies in `self.stored`, whose CRC-32 was checked, into `length` bytes of RAM.
    pub(super) fn unpack(
        &mut self,
        cipher: Option<&Cipher>,
        (block, chunk): (usize, u64),
        stored: &Stored,
        length: u32,
    ) -> Result<&[u8], DecodeError> {
        let bytes = &mut self.stored[..stored.length as usize];
        if let Some(seal) = stored.seal {
            let place = ChunkPlace::of(block, chunk, length, stored.form);
            cipher
                .ok_or(DecodeError::NoKey)?
                .open_chunk(place, seal, bytes)
                .map_err(|_| DecodeError::NotAuthentic)?;
        }
        self.unpacked = stored.form;
        if stored.form == Form::Raw {
            return Ok(bytes);
        }
        let decompressor = match &mut self.decompressor {
            Some(decompressor) => decompressor,
            absent => absent.insert(Decompressor::new().map_err(|_| DecodeError::Frame)?),
        };
        let whole = length as usize;
        let plain = self.plain.get_or_insert_with(|| AlignedBuf::zeroed(whole));
        if plain.len() < whole {
            *plain = AlignedBuf::zeroed(whole);
        }
        match decompressor.decompress_to_buffer(bytes, &mut plain[..whole]) {
            Ok(found) if found == whole => Ok(&plain[..whole]),
            _ => Err(DecodeError::Frame),
        }
    }
}

impl Unpacker {
    /// The chunk that was unpacked last, and behind it, if it was a short one, anything.
    pub(crate) fn unpacked(&self) -> &[u8] {
        match (self.unpacked, &self.plain) {
            (Form::Zstd, Some(plain)) => plain,
            _ => &self.stored,
        }
    }
}

impl std::fmt::Debug for Unpacker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Unpacker(..)")
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::image::key::ImageKey;

    fn cipher() -> Option<Cipher> {
        Cipher::new(&ImageKey::from_file_content(&[9; 32]).unwrap())
    }

    fn buffer(bytes: &[u8]) -> AlignedBuf {
        let mut buffer = AlignedBuf::zeroed(1 << 20);
        buffer[..bytes.len()].copy_from_slice(bytes);
        buffer
    }

    fn encode(codec: &Codec, plain: &[u8]) -> Encoded {
        let spare = || AlignedBuf::zeroed(1 << 20);
        let encoded = codec.encode(
            &mut Workbench::default(),
            (1, 2),
            (buffer(plain), plain.len()),
            codec.compress_next(),
            spare,
        );
        encoded.unwrap().0
    }

    fn decode(codec: &Codec, encoded: &Encoded, length: u32) -> Result<Vec<u8>, DecodeError> {
        let mut unpacker = Unpacker::new(1 << 20);
        let stored = encoded.stored.length as usize;
        unpacker.stored[..stored].copy_from_slice(&encoded.buffer[..stored]);
        unpacker
            .unpack(codec.cipher(), (1, 2), &encoded.stored, length)
            .map(<[u8]>::to_vec)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn every_chunk_comes_back_however_it_is_stored(
            pattern in prop::collection::vec(any::<u8>(), 1..64), pages in 1_usize..=256, noisy: bool,
            level in prop::option::of(-7..=3), encrypted: bool,
        ) {
            let mut plain: Vec<u8> = pattern.iter().copied().cycle().take(pages * 4096).collect();
            if noisy {
                let mut state = 1_u64;
                for word in plain.chunks_mut(8) {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    word.copy_from_slice(&state.to_le_bytes());
                }
            }
            let compression = level.map_or(Compression::None, Compression::Zstd);
            let codec = Codec::new(compression, encrypted.then(cipher).flatten());
            let encoded = encode(&codec, &plain);
            let smaller = encoded.stored.form == Form::Zstd;
            prop_assert_eq!(smaller, level.is_some() && !noisy && pages > 1);
            prop_assert!(!smaller || encoded.stored.length as usize <= plain.len() - WORTH_STORING);
            prop_assert_eq!(
                encoded.stored.crc32, crc32fast::hash(&encoded.buffer[..encoded.stored.length as usize])
            );
            prop_assert_eq!(encoded.stored.seal.is_some(), encrypted);
            prop_assert!(!encrypted || encoded.buffer[..64] != plain[..64]);
            prop_assert_eq!(decode(&codec, &encoded, plain.len() as u32), Ok(plain));
        }

        #[test]
        fn a_frame_that_is_none_is_told(bytes in prop::collection::vec(any::<u8>(), 1..4096)) {
            let stored = Stored { form: Form::Zstd, length: bytes.len() as u32, crc32: 0, seal: None };
            let encoded = Encoded { buffer: buffer(&bytes), stored, compressed: None };
            let codec = Codec::new(Compression::None, None);
            prop_assert_eq!(decode(&codec, &encoded, 1 << 20), Err(DecodeError::Frame));
        }
    }

    #[test]
    fn without_the_key_and_with_another_length_nothing_comes_out() {
        let codec = Codec::new(Compression::Zstd(1), cipher());
        let encoded = encode(&codec, &[7; 1 << 20]);
        let keyless = Codec::new(Compression::None, None);
        assert_eq!(decode(&keyless, &encoded, 1 << 20), Err(DecodeError::NoKey));
        assert_eq!(decode(&codec, &encoded, 1 << 19), Err(DecodeError::NotAuthentic));
        let plain = Codec::new(Compression::Zstd(1), None);
        let encoded = encode(&plain, &[7; 1 << 20]);
        assert_eq!(decode(&plain, &encoded, 1 << 19), Err(DecodeError::Frame));
    }
}
