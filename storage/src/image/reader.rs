//! Reading an image, and telling its state.
//!
//! Opening checks all that can be checked without reading RAM: the superblock, every bound against
//! the file's length, the checksums of chunk table and manifest. RAM is checked chunk by chunk when
//! it is read; nothing that failed its checksum is ever handed on.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use uuid::Uuid;

use super::chunks::{Chunk, ChunkContent, ChunkTable, Form, Stored, TableForm};
use super::cipher::Cipher;
use super::codec::{DecodeError, Unpacker};
use super::error::{Corruption, ImageError, TornBecause};
use super::key::ImageKey;
use super::layout::{BlockPlacement, Layout};
use super::manifest::Manifest;
use super::mark::change;
use super::pages::Pages;
use super::random::RandomReader;
use super::sealed::SealedImage;
use super::state::ImageState;
use super::superblock::{
    Area, COPY_BYTES, COPY_OFFSETS, FORMAT_1, FORMAT_VERSION, Superblock, Superblocks, WakeNote,
};
use crate::memory::PAGE_BYTES;
use crate::sys::DirectFile;
use crate::volume::{Published, allocated, leads_to, length_of, open_held, remove, sync_name};
use crate::{ByteCount, Recording};

/// What an image holds and takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// RAM that held something.
    pub data: ByteCount,
    /// What was written for it: less, if it was compressed.
    pub stored: ByteCount,
    /// How much of the RAM is in chunks that are compressed.
    pub compressed: ByteCount,
    /// RAM that was zero and is not.
    pub zero: ByteCount,
    /// Length of the device state.
    pub device_state: ByteCount,
    /// Space that it takes on the disk.
    pub allocated: ByteCount,
}

/// Why RAM cannot be mapped from an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unmappable {
    /// It is encrypted.
    #[error("the image is encrypted")]
    Encrypted,
    /// Some of it is compressed.
    #[error("the image is compressed")]
    Compressed,
    /// What was zero does not read as zeros: the save was cut short after the image was complete, before the
    /// device's old data was cleared.
    #[error("the old data on the device was not cleared where the guest's memory was zero")]
    OldData,
}

/// An image that was opened.
#[derive(Debug)]
pub struct Image {
    file: File,
    direct: DirectFile,
    path: PathBuf,
    locked: bool,
    superblock: Superblock,
    /// Which of the two copies the superblock came from.
    copy: usize,
    table: ChunkTable,
    manifest: Manifest,
    /// Of an encrypted image whose key was given.
    cipher: Option<Arc<Cipher>>,
    /// Of an encrypted image: chunk table and manifest, as they were read. The device state tells whether they are
    /// authentic.
    open: Vec<u8>,
}

impl Image {
    /// Opens an image for reading. No lock is taken: looking at an image that is in use is fine.
    ///
    /// # Errors
    ///
    /// [`ImageError::NotAnImage`], [`ImageError::NewerFormat`], [`ImageError::Torn`] and
    /// [`ImageError::Corrupt`] tell what the file is instead; [`ImageError::Io`] if the system
    /// refuses.
    pub fn open(path: &Path) -> Result<Self, ImageError> {
        let file = File::open(path).map_err(|source| ImageError::io("open", path, source))?;
        Self::read(file, path, false)
    }

    /// Opens an image for waking or changing its state, and locks it for as long as this value
    /// lives.
    ///
    /// # Errors
    ///
    /// [`ImageError::Locked`] if somebody else has it, and those of [`Image::open`].
    pub fn open_locked(path: &Path) -> Result<Self, ImageError> {
        let file = open_held(path)?;
        // Between the open and the lock another image may have taken the name.
        if !leads_to(path, &file) {
            return Err(ImageError::Locked {
                path: path.to_owned(),
            });
        }
        Self::read(file, path, true)
    }

    /// A second reader of the same file, with the same key. As long as either lives a lock of this one is held.
    ///
    /// # Errors
    ///
    /// Those of [`Image::open`].
    pub fn reader(&self) -> Result<Self, ImageError> {
        let file = self.file.try_clone();
        let file = file.map_err(|source| ImageError::io("open", &self.path, source))?;
        let mut reader = Self::read(file, &self.path, false)?;
        reader.cipher.clone_from(&self.cipher);
        Ok(reader)
    }

    /// Takes the key of an encrypted image, without which its RAM and device state cannot be read.
    ///
    /// # Errors
    ///
    /// [`ImageError::WrongKey`] if it is another image's, [`ImageError::NotEncrypted`] if the image needs none: who
    /// has a key expects an image that only its owner can have made.
    pub fn unlock(&mut self, key: &ImageKey) -> Result<(), ImageError> {
        let encryption = self
            .superblock
            .encryption
            .as_ref()
            .ok_or_else(|| ImageError::NotEncrypted {
                path: self.path.clone(),
            })?;
        let cipher = Cipher::of(key, encryption).ok_or_else(|| ImageError::WrongKey {
            path: self.path.clone(),
        })?;
        self.cipher = Some(Arc::new(cipher));
        Ok(())
    }

    /// Whether a key is needed to read RAM and device state.
    pub fn is_encrypted(&self) -> bool {
        self.superblock.encryption.is_some()
    }

    pub(super) fn is_unlocked(&self) -> bool {
        self.cipher.is_some()
    }

    /// Whether RAM can be mapped from where it lies; why not.
    ///
    /// # Errors
    ///
    /// [`Unmappable`] tells what is in the way.
    pub fn check_mappable(&self) -> Result<(), Unmappable> {
        if self.is_encrypted() {
            Err(Unmappable::Encrypted)
        } else if !self.table.is_raw() {
            Err(Unmappable::Compressed)
        } else if !self.superblock.zeros_read_as_zeros {
            Err(Unmappable::OldData)
        } else {
            Ok(())
        }
    }

    /// Version of the format that it is in.
    pub fn format(&self) -> u32 {
        self.superblock.format
    }

    /// Id of the image.
    pub fn id(&self) -> Uuid {
        self.superblock.id
    }

    /// State of the image, as it was when it was opened or marked.
    pub fn state(&self) -> ImageState {
        self.superblock.state
    }

    /// What is known about the guest in it.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Where its RAM blocks lie; they can be mapped from there.
    pub fn layout(&self) -> &Layout {
        &self.table.layout
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// What it holds and takes.
    ///
    /// # Errors
    ///
    /// [`ImageError::Io`] if the system refuses.
    pub fn usage(&self) -> Result<Usage, ImageError> {
        let (mut data, mut zero) = (ByteCount::ZERO, ByteCount::ZERO);
        let (mut written, mut compressed) = (ByteCount::ZERO, ByteCount::ZERO);
        for chunk in self.table.chunks.iter().flatten() {
            let length = ByteCount(chunk.length.into());
            match chunk.content {
                ChunkContent::Zero => zero += length,
                ChunkContent::Stored(stored) => {
                    data += length;
                    written += ByteCount(stored.length.into());
                    if stored.form == Form::Zstd {
                        compressed += length;
                    }
                }
            }
        }
        let allocated = allocated(&self.file, self.superblock.end())
            .map_err(|source| ImageError::io("look at", &self.path, source))?;
        Ok(Usage {
            data,
            stored: written,
            compressed,
            zero,
            device_state: ByteCount(self.superblock.device_state.length),
            allocated,
        })
    }

    /// The device state, checked.
    ///
    /// # Errors
    ///
    /// [`ImageError::Corrupt`] if it is not what was written, [`ImageError::KeyNeeded`] if it is encrypted
    /// and the image was not [unlocked](Self::unlock), [`ImageError::Io`] if the system refuses.
    pub fn device_state(&self) -> Result<Recording, ImageError> {
        let mut stream = self.read_area("device state", self.superblock.device_state)?;
        if self.is_encrypted() {
            let cipher = self.cipher.as_ref().ok_or_else(|| self.key_needed())?;
            stream = cipher
                .open_device_state(stream, &self.open)
                .map_err(|_| ImageError::corrupt(&self.path, Corruption::DeviceStateNotAuthentic))?;
        }
        Recording::parse(&stream)
            .map_err(|source| ImageError::corrupt(&self.path, Corruption::DeviceState(source)))
    }

    /// Every page, zeros too, of the blocks that are not in `except`, read and checked chunk by chunk
    /// as they are asked for: for [`try_write_precopy`](crate::try_write_precopy). Their block indexes
    /// are those of [`Image::device_state`].
    ///
    /// # Errors
    ///
    /// [`ImageError::Corrupt`] if the device state is not what was written, [`ImageError::Io`] if
    /// the system refuses; each page can fail likewise.
    pub fn pages(&self, except: &[&str]) -> Result<Pages<'_>, ImageError> {
        Pages::of(self, except)
    }

    /// Reads pages in any order.
    pub fn random(&self) -> RandomReader<'_> {
        RandomReader::of(self)
    }

    /// The open image with its lock: it is held as long as anybody has this, whatever becomes of us.
    ///
    /// # Errors
    ///
    /// [`ImageError::NotLocked`] if it was opened without its lock, [`ImageError::Io`] if the system refuses.
    pub fn hold(&self) -> Result<OwnedFd, ImageError> {
        if !self.locked {
            return Err(ImageError::NotLocked {
                path: self.path.clone(),
            });
        }
        let file = self.file.try_clone();
        Ok(file
            .map_err(|source| ImageError::io("open", &self.path, source))?
            .into())
    }

    /// What the wake that marked it noted.
    pub fn note(&self) -> WakeNote {
        self.superblock.note
    }

    /// Sets what the mark of a wake will tell beside the state: written by [`Image::mark`], in the same step. An image that
    /// is sealed again tells nothing of the wake that failed.
    pub fn set_note(&mut self, note: WakeNote) {
        self.superblock.note = note;
    }

    /// Changes the state, durably: after `Ok` no crash brings the old one back.
    ///
    /// # Errors
    ///
    /// [`ImageError::WrongState`] if the image may not become that, [`ImageError::NotLocked`] if it
    /// was opened without its lock; after [`ImageError::Io`] the state on the disk is the old or
    /// the new one, and the image counts as `waking`: the change can be made again, and a mark taken back.
    pub fn mark(&mut self, state: ImageState) -> Result<(), ImageError> {
        let found = self.superblock.state;
        if !found.may_become(state) {
            return Err(ImageError::WrongState {
                path: self.path.clone(),
                found,
                wanted: state,
            });
        }
        if !self.locked {
            return Err(ImageError::NotLocked {
                path: self.path.clone(),
            });
        }
        let file = &self.file;
        let write = |superblock: &Superblock, copy| write_copy(file, superblock, copy);
        change(&mut self.superblock, &mut self.copy, state, write)
            .map_err(|source| ImageError::io("mark", &self.path, source))
    }

    /// Makes durable an image whose writer could not tell any more whether it is, in both copies of the superblock.
    ///
    /// # Errors
    ///
    /// [`ImageError::NotLocked`] if it was opened without its lock, [`ImageError::Io`] if the system refuses.
    pub(super) fn settle(&self) -> Result<(), ImageError> {
        if !self.locked {
            return Err(ImageError::NotLocked {
                path: self.path.clone(),
            });
        }
        self.file
            .sync_all()
            .and_then(|()| write_copy(&self.file, &self.superblock, 1 - self.copy))
            .and_then(|()| sync_name(&self.file, &self.path))
            .map_err(|source| ImageError::io("make durable", &self.path, source))
    }

    /// What its writer would have had left to do with it. It has to be locked, and stays so.
    pub(super) fn into_sealed(self) -> Result<SealedImage, ImageError> {
        match Published::found(self.file, self.path.clone()) {
            Ok(published) => Ok(SealedImage::of(published, &self.table, self.superblock)),
            Err(source) => Err(ImageError::io("look at", &self.path, source)),
        }
    }

    /// Whether `path` leads to it too.
    pub(super) fn is_at(&self, path: &Path) -> bool {
        leads_to(path, &self.file)
    }

    /// Removes the image for good, not to be found again even after a crash: a file loses its name, a
    /// block device stays and its superblocks are wiped.
    ///
    /// # Errors
    ///
    /// [`ImageError::NotLocked`] if it was opened without its lock, [`ImageError::Io`] if the system
    /// refuses; it is there still, then.
    pub fn remove(&self) -> Result<(), ImageError> {
        if !self.locked {
            return Err(ImageError::NotLocked {
                path: self.path.clone(),
            });
        }
        // The copy that a change of state did not reach, if there is one: it may say `sealed` yet.
        remove(&self.file, &self.path, 1 - self.copy)
    }

    fn read(file: File, path: &Path, locked: bool) -> Result<Self, ImageError> {
        let failed = |source: io::Error| ImageError::io("read", path, source);
        let Some(found) = length_of(&file).map_err(failed)? else {
            return Err(ImageError::NotAnImage {
                path: path.to_owned(),
            });
        };
        let torn = |because| ImageError::Torn {
            path: path.to_owned(),
            because,
        };
        let (superblock, copy) = match read_superblocks(&file, path)? {
            Superblocks::Valid { current, copy } => (current, copy),
            Superblocks::Alien => {
                return Err(ImageError::NotAnImage {
                    path: path.to_owned(),
                });
            }
            Superblocks::Newer(found) => {
                return Err(ImageError::NewerFormat {
                    path: path.to_owned(),
                    found,
                    supported: FORMAT_VERSION,
                });
            }
            Superblocks::Torn => return Err(torn(TornBecause::BothSuperblocks)),
            Superblocks::Contradiction(_) => {
                return Err(ImageError::corrupt(
                    path,
                    Corruption::Superblock("its copies belong to two images"),
                ));
            }
        };
        if superblock.state == ImageState::Writing {
            return Err(torn(TornBecause::NeverSealed));
        }
        superblock
            .check()
            .map_err(|reason| ImageError::corrupt(path, Corruption::Superblock(reason)))?;
        let needed = ByteCount(superblock.end());
        if found < needed {
            return Err(torn(TornBecause::Short { needed, found }));
        }
        let encoded_table = read_area(&file, path, "chunk table", superblock.table)?;
        let form = TableForm {
            chunk_bytes: superblock.chunk_bytes,
            encrypted: superblock.encryption.is_some(),
            zstd: superblock.format > FORMAT_1,
        };
        let table = ChunkTable::decode(&encoded_table, form)
            .map_err(|source| ImageError::corrupt(path, Corruption::Table(source)))?;
        if table.layout.ram_end() > superblock.table.offset {
            return Err(ImageError::corrupt(
                path,
                Corruption::Superblock("the chunk table lies in the RAM"),
            ));
        }
        let encoded_manifest = read_area(&file, path, "manifest", superblock.manifest)?;
        let manifest = serde_json::from_slice(&encoded_manifest)
            .map_err(|source| ImageError::corrupt(path, Corruption::Manifest(source)))?;
        let open = match superblock.encryption {
            Some(_) => [encoded_table, encoded_manifest].concat(),
            None => Vec::new(),
        };
        let direct = DirectFile::beside(&file, path, false).map_err(failed)?;
        Ok(Self {
            file,
            direct,
            path: path.to_owned(),
            locked,
            superblock,
            copy,
            table,
            manifest,
            cipher: None,
            open,
        })
    }

    pub(crate) fn chunk_bytes(&self) -> u32 {
        self.superblock.chunk_bytes
    }

    pub(crate) fn unpacker(&self) -> Unpacker {
        Unpacker::new(self.superblock.chunk_bytes)
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    pub(super) fn chunk(&self, block: usize, chunk: usize) -> (&BlockPlacement, Chunk, u64) {
        let start = chunk as u64 * u64::from(self.superblock.chunk_bytes);
        (
            &self.layout().blocks()[block],
            self.table.chunks[block][chunk],
            start,
        )
    }

    pub(super) fn chunk_counts(&self) -> impl Iterator<Item = usize> {
        self.table.chunks.iter().map(Vec::len)
    }

    /// Reads a chunk, checks it, and makes RAM of it; tells its bytes, or `None` for zeros, and its offset in the
    /// block.
    pub(crate) fn read_chunk<'u>(
        &self,
        block: usize,
        chunk: usize,
        unpacker: &'u mut Unpacker,
    ) -> Result<(Option<&'u [u8]>, u64), ImageError> {
        let (placement, Chunk { content, length }, start) = self.chunk(block, chunk);
        let ChunkContent::Stored(stored) = content else {
            return Ok((None, start));
        };
        self.read_stored(block, chunk, &stored, unpacker)?;
        let bytes = unpacker.unpack(self.cipher.as_deref(), (block, chunk as u64), &stored, length);
        let bytes = bytes.map_err(|error| {
            let block = placement.name.clone();
            let source = match error {
                DecodeError::NoKey => return self.key_needed(),
                DecodeError::NotAuthentic => Corruption::ChunkNotAuthentic { block, offset: start },
                DecodeError::Frame => Corruption::ChunkFrame { block, offset: start },
            };
            ImageError::corrupt(&self.path, source)
        })?;
        Ok((Some(bytes), start))
    }

    /// Reads what is stored for a chunk into the unpacker, and checks it.
    pub(super) fn read_stored(
        &self,
        block: usize,
        chunk: usize,
        stored: &Stored,
        unpacker: &mut Unpacker,
    ) -> Result<(), ImageError> {
        let (placement, _, start) = self.chunk(block, chunk);
        let length = stored.length as usize;
        // Whole units, so that it can be read past the cache; a chunk's place is made of them.
        let whole = length.next_multiple_of(PAGE_BYTES as usize);
        self.read_raw(&mut unpacker.stored[..whole], placement.offset + start)?;
        self.check_sum(block, chunk, stored, &unpacker.stored[..length])
    }

    /// Compares what was read for a chunk with its checksum.
    pub(super) fn check_sum(
        &self,
        block: usize,
        chunk: usize,
        stored: &Stored,
        bytes: &[u8],
    ) -> Result<(), ImageError> {
        let found = crc32fast::hash(bytes);
        if found != stored.crc32 {
            let (placement, _, start) = self.chunk(block, chunk);
            let source = Corruption::Chunk {
                block: placement.name.clone(),
                offset: start,
                expected: stored.crc32,
                found,
            };
            return Err(ImageError::corrupt(&self.path, source));
        }
        Ok(())
    }

    pub(super) fn key_needed(&self) -> ImageError {
        ImageError::KeyNeeded {
            path: self.path.clone(),
        }
    }

    fn read_area(&self, name: &'static str, area: Area) -> Result<Vec<u8>, ImageError> {
        read_area(&self.file, &self.path, name, area)
    }

    /// Reads without checking.
    pub(super) fn read_raw(&self, bytes: &mut [u8], offset: u64) -> Result<(), ImageError> {
        self.direct
            .read_exact_at(bytes, offset)
            .map_err(|source| ImageError::io("read", &self.path, source))
    }
}

/// Writes a copy of the superblock, durably.
fn write_copy(file: &File, superblock: &Superblock, copy: usize) -> io::Result<()> {
    file.write_all_at(&superblock.encode(), COPY_OFFSETS[copy])?;
    file.sync_data()
}

/// Reads both copies of the superblock, as far as the file is long enough for them.
pub(crate) fn read_superblocks(file: &File, path: &Path) -> Result<Superblocks, ImageError> {
    let mut copies = [0; 2 * COPY_BYTES];
    let mut length = 0;
    while length < copies.len() {
        match file.read_at(&mut copies[length..], length as u64) {
            Ok(0) => break,
            Ok(read) => length += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(ImageError::io("read", path, error)),
        }
    }
    let (first, second) = copies[..length].split_at(length.min(COPY_BYTES));
    Ok(Superblocks::read([first, second]))
}

/// Whether nothing is lost with an image of this superblock: its guest was woken from it, or it is a snapshot, whose
/// guest went on. One that cannot be read is none.
pub(crate) fn is_dispensable(file: &File, path: &Path, superblock: &Superblock) -> bool {
    let is_snapshot = || {
        superblock.check().ok()?;
        let manifest = read_area(file, path, "manifest", superblock.manifest).ok()?;
        let manifest: Manifest = serde_json::from_slice(&manifest).ok()?;
        Some(manifest.guest.went_on)
    };
    match superblock.state {
        ImageState::Consumed => true,
        ImageState::Sealed => is_snapshot().unwrap_or(false),
        ImageState::Writing | ImageState::Waking => false,
    }
}

/// Reads an area whose length was checked against its limit and the file's length.
fn read_area(file: &File, path: &Path, name: &'static str, area: Area) -> Result<Vec<u8>, ImageError> {
    let mut bytes = vec![0; area.length as usize];
    file.read_exact_at(&mut bytes, area.offset)
        .map_err(|source| ImageError::io("read", path, source))?;
    let found = crc32fast::hash(&bytes);
    if found != area.crc32 {
        return Err(ImageError::corrupt(
            path,
            Corruption::Area {
                area: name,
                expected: area.crc32,
                found,
            },
        ));
    }
    Ok(bytes)
}
