//! The last steps of writing, and what is left to do when the image is whole.

use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;

use uuid::Uuid;

use super::ImageError;
use super::chunks::{CHUNK_BYTES, ChunkContent, ChunkTable};
use super::cipher::Cipher;
use super::layout::AREA_ALIGNMENT;
use super::state::ImageState;
use super::superblock::{COPY_BYTES, COPY_OFFSETS, Superblock, area_of, beginning};
use super::writer::{MemoryWritten, written};
use crate::volume::{Published, Volume, VolumeKind, allocated};
use crate::{ByteCount, Run};

/// Smaller gaps are not worth a call each.
const SMALLEST_HOLE: u64 = 32 << 10;

/// Writes all that lies behind the RAM, and syncs; tells what the superblock has to say.
///
/// One data sync covers RAM and areas: it only matters that both are on the disk before the
/// superblock says so.
pub(super) fn write_tables(
    volume: &Volume,
    id: Uuid,
    table: &ChunkTable,
    mut device_state: Vec<u8>,
    manifest: &[u8],
    cipher: Option<&Cipher>,
) -> io::Result<Superblock> {
    let encoded_table = table.encode();
    if let Some(cipher) = cipher {
        let open = [&encoded_table[..], manifest].concat();
        device_state = cipher
            .seal_device_state(device_state, &open)
            .ok_or_else(|| io::Error::other("the cipher does not work"))?;
    }
    let mut offset = table.layout.ram_end();
    let mut put = |bytes: &[u8]| {
        let area = area_of(offset, bytes);
        offset = (offset + area.length).next_multiple_of(AREA_ALIGNMENT);
        volume.write_area(bytes, area.offset).map(|()| area)
    };
    let begun = beginning(id, CHUNK_BYTES);
    let sealed = Superblock {
        state: ImageState::Sealed,
        generation: begun.generation + 1,
        table: put(&encoded_table)?,
        device_state: put(&device_state)?,
        manifest: put(manifest)?,
        // What was never written to a new file is a hole. A device has its old data there.
        zeros_read_as_zeros: volume.kind() == VolumeKind::File,
        encryption: cipher.map(Cipher::encryption),
        ..begun
    };
    volume.sync_data()?;
    Ok(sealed)
}

/// An image that is on the disk with all that is in it, and that nobody would take for one yet.
///
/// Dropped without [`CompleteImage::seal`] it leaves nothing behind.
#[derive(Debug)]
pub struct CompleteImage {
    pub(super) volume: Volume,
    /// Most that the image may need: for the message when there is no room.
    pub(super) bound: ByteCount,
    pub(super) table: ChunkTable,
    pub(super) superblock: Superblock,
}

impl CompleteImage {
    /// What its RAM turned out to hold.
    pub fn written(&self) -> MemoryWritten {
        let mut all = MemoryWritten::default();
        for of_block in &self.table.chunks {
            all += written(of_block);
        }
        all
    }

    /// Makes it an image: the sealed superblock; sync; rename; sync of the folder. Short, because nothing else
    /// is left to sync. After `Ok` the image is the guest.
    ///
    /// # Errors
    ///
    /// [`ImageError::TargetExists`] if somebody took the name meanwhile; [`ImageError::MayBeSealed`];
    /// [`ImageError::NoSpace`] and [`ImageError::Io`] from the disk. On any error but `MayBeSealed` there is no
    /// image.
    pub fn seal(self) -> Result<SealedImage, ImageError> {
        self.volume
            .seal(&self.superblock.encode())
            .map_err(|source| self.volume.failed("seal", self.bound, source))?;
        let published = self.volume.publish()?;
        tracing::debug!(path = %published.path().display(), id = %self.superblock.id, "image sealed");
        Ok(SealedImage::of(published, &self.table, self.superblock))
    }
}

/// An image that is whole and has its name. It stays locked until this is dropped.
#[derive(Debug)]
pub struct SealedImage {
    published: Published,
    superblock: Superblock,
    /// Chunks of RAM that are zero, in order.
    zeros: Vec<Range<u64>>,
    /// What else holds nothing, in order.
    gaps: Vec<Range<u64>>,
}

impl SealedImage {
    pub(super) fn of(published: Published, table: &ChunkTable, superblock: Superblock) -> Self {
        let (zeros, gaps) = unused(table);
        Self {
            published,
            superblock,
            zeros,
            gaps,
        }
    }

    /// Gives back what was reserved and not used: zero chunks, gaps between blocks, and what lies
    /// behind the end. Tells whether chunks that are zero read as zeros at their place now, so that RAM
    /// can be mapped from the image.
    ///
    /// The image is whole before, during and after. A file's zero chunks always read as zeros; they
    /// become holes where the file system can punch them. A block device makes zeros itself or is
    /// sent them, which takes as long as writing them does: progress counts the bytes of zero chunks,
    /// of which [`SealedImage::zero`] tells the total, and a cancel is looked at.
    ///
    /// # Errors
    ///
    /// [`ImageError::Cancelled`]; [`ImageError::Io`] if the system refuses.
    pub fn give_back(&mut self, run: &Run<'_>) -> Result<bool, ImageError> {
        let end = self.superblock.end();
        let zeros_read_as_zeros = self.published.give_back(&self.zeros, &self.gaps, end, run)?;
        if zeros_read_as_zeros && !self.superblock.zeros_read_as_zeros {
            let changed = Superblock {
                zeros_read_as_zeros,
                generation: self.superblock.generation + 1,
                ..self.superblock.clone()
            };
            // Both say the same of the guest, so that either may be the one that a crash tears.
            for copy in COPY_OFFSETS {
                self.published
                    .file()
                    .write_all_at(&changed.encode(), copy)
                    .and_then(|()| self.published.file().sync_data())
                    .map_err(|source| ImageError::io("mark", self.path(), source))?;
            }
            self.superblock = changed;
        }
        Ok(zeros_read_as_zeros)
    }

    /// RAM that was zero.
    pub fn zero(&self) -> ByteCount {
        self.zeros
            .iter()
            .map(|range| ByteCount(range.end - range.start))
            .sum()
    }

    /// Removes the image for good: its guest runs on elsewhere, so that it must never be woken from
    /// here, not even after a crash. A file is unlinked, a device's superblocks are wiped.
    ///
    /// # Errors
    ///
    /// [`ImageError::Io`] if the system refuses.
    pub fn remove(self) -> Result<(), ImageError> {
        self.published.remove()
    }

    /// Where the image is.
    pub fn path(&self) -> &Path {
        self.published.path()
    }

    /// What the image is on.
    pub fn kind(&self) -> VolumeKind {
        self.published.kind()
    }

    /// Space that the image takes on the disk now.
    ///
    /// # Errors
    ///
    /// [`ImageError::Io`] if the system refuses.
    pub fn allocated(&self) -> Result<ByteCount, ImageError> {
        allocated(self.published.file(), self.superblock.end())
            .map_err(|source| ImageError::io("look at", self.path(), source))
    }
}

/// What holds nothing: chunks of zeros, and the gaps between blocks and behind compressed chunks that are worth
/// a call.
fn unused(table: &ChunkTable) -> (Vec<Range<u64>>, Vec<Range<u64>>) {
    let (mut zeros, mut gaps) = (Vec::<Range<u64>>::new(), Vec::new());
    let mut previous_end = COPY_OFFSETS[1] + COPY_BYTES as u64;
    for (block, chunks) in table.layout.blocks().iter().zip(&table.chunks) {
        gaps.push(previous_end..block.offset);
        let mut at = block.offset;
        for chunk in chunks {
            let end = at + u64::from(chunk.length);
            match chunk.content {
                ChunkContent::Zero => match zeros.last_mut() {
                    Some(last) if last.end == at => last.end = end,
                    _ => zeros.push(at..end),
                },
                ChunkContent::Stored(stored) => {
                    gaps.push((at + u64::from(stored.length)).next_multiple_of(AREA_ALIGNMENT)..end);
                }
            }
            at = end;
        }
        previous_end = at;
    }
    gaps.retain(|gap| gap.end.saturating_sub(gap.start) >= SMALLEST_HOLE);
    (zeros, gaps)
}
