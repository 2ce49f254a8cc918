//! The last steps of writing, and what is left to do when the image is whole.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use uuid::Uuid;

use super::ImageError;
use super::chunks::{CHUNK_BYTES, ChunkContent, ChunkTable};
use super::layout::AREA_ALIGNMENT;
use super::state::ImageState;
use super::superblock::{COPY_BYTES, COPY_OFFSETS, Superblock, area_of, beginning};
use crate::ByteCount;

/// Smaller gaps are not worth a call each.
const SMALLEST_HOLE: u64 = 64 << 10;

/// Writes all that lies behind the RAM and the sealed superblock, and syncs.
///
/// One data sync covers RAM and areas: it only matters that both are on the disk before the
/// superblock says so. Both copies are written at once here, for until the rename nobody relies on
/// either.
pub(super) fn write_tables(
    file: &File,
    id: Uuid,
    table: &ChunkTable,
    device_state: &[u8],
    manifest: &[u8],
) -> io::Result<Superblock> {
    let mut offset = table.layout.ram_end();
    let mut put = |bytes: &[u8]| {
        let area = area_of(offset, bytes);
        offset = (offset + area.length).next_multiple_of(AREA_ALIGNMENT);
        file.write_all_at(bytes, area.offset).map(|()| area)
    };
    let begun = beginning(id, CHUNK_BYTES);
    let sealed = Superblock {
        state: ImageState::Sealed,
        generation: begun.generation + 1,
        table: put(&table.encode())?,
        device_state: put(device_state)?,
        manifest: put(manifest)?,
        ..begun
    };
    file.sync_data()?;
    for copy in COPY_OFFSETS.iter().rev() {
        file.write_all_at(&sealed.encode(), *copy)?;
    }
    file.sync_all()?;
    Ok(sealed)
}

/// An image that is whole and has its name. It stays locked until this is dropped.
#[derive(Debug)]
pub struct SealedImage {
    file: File,
    path: PathBuf,
    /// What holds nothing, in order.
    unused: Vec<Range<u64>>,
    end: u64,
}

impl SealedImage {
    pub(super) fn of(file: File, path: PathBuf, table: &ChunkTable, sealed: &Superblock) -> Self {
        Self {
            file,
            path,
            unused: unused(table),
            end: sealed.end(),
        }
    }

    /// Returns the space that was reserved and not used: zero chunks, gaps between blocks, and what
    /// lies behind the end.
    ///
    /// The image is whole before, during and after; a file system that cannot punch holes keeps the
    /// space.
    ///
    /// # Errors
    ///
    /// [`ImageError::Io`] if the system refuses.
    pub fn give_back(&self) -> Result<(), ImageError> {
        let failed = |source: io::Error| ImageError::io("give back space of", &self.path, source);
        self.file.set_len(self.end).map_err(failed)?;
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for hole in &self.unused {
            match rustix::fs::fallocate(&self.file, punch, hole.start, hole.end - hole.start) {
                Ok(()) => {}
                Err(Errno::OPNOTSUPP | Errno::NOSYS) => break,
                Err(error) => return Err(failed(error.into())),
            }
        }
        Ok(())
    }

    /// Removes the image for good: its guest runs on elsewhere, so that it must never be woken from
    /// here, not even after a crash.
    ///
    /// # Errors
    ///
    /// [`ImageError::Io`] if the system refuses.
    pub fn remove(self) -> Result<(), ImageError> {
        let failed = |source| ImageError::io("remove", &self.path, source);
        std::fs::remove_file(&self.path).map_err(failed)?;
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))
            .and_then(|folder| folder.sync_all())
            .map_err(failed)
    }

    /// Where the image is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Space that the image takes on the disk now.
    ///
    /// # Errors
    ///
    /// [`ImageError::Io`] if the system refuses.
    pub fn allocated(&self) -> Result<ByteCount, ImageError> {
        allocated(&self.file).map_err(|source| ImageError::io("look at", &self.path, source))
    }
}

/// Space that a file takes on the disk.
pub(super) fn allocated(file: &File) -> io::Result<ByteCount> {
    // The unit of st_blocks, whatever the file system's own.
    const STAT_BLOCK: u64 = 512;
    Ok(ByteCount(file.metadata()?.blocks() * STAT_BLOCK))
}

fn unused(table: &ChunkTable) -> Vec<Range<u64>> {
    let mut unused: Vec<Range<u64>> = Vec::new();
    let mut add = |range: Range<u64>| match unused.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => unused.push(range),
    };
    let mut previous_end = COPY_OFFSETS[1] + COPY_BYTES as u64;
    for (block, chunks) in table.layout.blocks().iter().zip(&table.chunks) {
        add(previous_end..block.offset);
        let mut at = block.offset;
        for chunk in chunks {
            let end = at + u64::from(chunk.length);
            if chunk.content == ChunkContent::Zero {
                add(at..end);
            }
            at = end;
        }
        previous_end = at;
    }
    unused.retain(|hole| hole.end.saturating_sub(hole.start) >= SMALLEST_HOLE);
    unused
}
