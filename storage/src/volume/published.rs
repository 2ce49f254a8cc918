//! An image that is whole and where it belongs.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use super::beside::folder_of;
use super::{VolumeKind, block_device, leads_to};
use crate::image::ImageError;
use crate::sys::{self, AlignedBuf, DirectFile};
use crate::{ByteCount, Run};

/// Zeros that are written with one call where a device cannot make them itself.
const ZEROS_BYTES: usize = 4 << 20;

/// What a device is asked to make zero with one call, so that a cancel is seen now and then.
const ZERO_STEP_BYTES: u64 = 1 << 30;

/// An image that is whole and where it belongs, held until this is dropped.
#[derive(Debug)]
pub(crate) struct Published {
    file: File,
    path: PathBuf,
    kind: VolumeKind,
    io: Arc<DirectFile>,
}

impl Published {
    pub(super) fn of(file: File, path: PathBuf, kind: VolumeKind, io: Arc<DirectFile>) -> Self {
        Self { file, path, kind, io }
    }

    /// One that was published before, by somebody else, and is held by this file.
    pub(crate) fn found(file: File, path: PathBuf) -> io::Result<Self> {
        let kind = if file.metadata()?.file_type().is_block_device() {
            VolumeKind::BlockDevice
        } else {
            VolumeKind::File
        };
        let io = Arc::new(DirectFile::buffered(&file)?);
        Ok(Self { file, path, kind, io })
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn kind(&self) -> VolumeKind {
        self.kind
    }

    /// Gives up what holds nothing: `zeros` are chunks of RAM that were zero, `gaps` all else that is
    /// not used, `end` is where the image ends. Tells whether `zeros` read as zeros now.
    ///
    /// A file's always do, and giving back makes holes of them. A device gets zeros, of its own making
    /// where it can, else written; its gaps only where that costs nothing.
    pub(crate) fn give_back(
        &self,
        zeros: &[Range<u64>],
        gaps: &[Range<u64>],
        end: u64,
        run: &Run<'_>,
    ) -> Result<bool, ImageError> {
        let failed = |source: io::Error| ImageError::io("give back space of", &self.path, source);
        match self.kind {
            VolumeKind::File => {
                self.file.set_len(end).map_err(failed)?;
                for hole in zeros.iter().chain(gaps) {
                    if !punch(&self.file, hole).map_err(failed)? {
                        break;
                    }
                }
                run.progress
                    .advance(zeros.iter().map(|range| range.end - range.start).sum());
            }
            VolumeKind::BlockDevice => {
                let mut cheap = true;
                for range in zeros.iter().flat_map(steps) {
                    if run.is_cancelled() {
                        return Err(ImageError::Cancelled);
                    }
                    cheap = cheap && sys::block_device::zero_cheaply(&self.file, &range).map_err(failed)?;
                    if cheap {
                        run.progress.advance(range.end - range.start);
                    } else {
                        self.write_zeros(&range, run)?;
                    }
                }
                for range in gaps.iter().flat_map(steps) {
                    cheap = cheap && sys::block_device::zero_cheaply(&self.file, &range).map_err(failed)?;
                    if !cheap || run.is_cancelled() {
                        break;
                    }
                }
                self.file.sync_data().map_err(failed)?;
            }
        }
        Ok(true)
    }

    /// Removes the image for good; see [`remove`].
    pub(crate) fn remove(self) -> Result<(), ImageError> {
        // Both copies say the same of a guest.
        remove(&self.file, &self.path, 1)
    }

    fn write_zeros(&self, range: &Range<u64>, run: &Run<'_>) -> Result<(), ImageError> {
        let length = (range.end - range.start).min(ZEROS_BYTES as u64) as usize;
        let zeros = AlignedBuf::zeroed(length);
        let mut at = range.start;
        while at < range.end {
            if run.is_cancelled() {
                return Err(ImageError::Cancelled);
            }
            let length = (range.end - at).min(zeros.len() as u64);
            self.io
                .write_all_at(&zeros[..length as usize], at)
                .map_err(|source| ImageError::io("write zeros to", &self.path, source))?;
            run.progress.advance(length);
            at += length;
        }
        Ok(())
    }
}

/// Removes an image that is held, so that it is not found again even after a crash: a file loses its
/// name, a device has both copies of the superblock wiped, first the one that is named.
///
/// A lock keeps others of us from the file and nobody from its name: somebody may have moved the image, and
/// another one may have the name by now, which is the only copy of its guest. So a file that is not
/// found under its name any more is wiped like a device, and what has its name stays.
pub(crate) fn remove(held: &File, path: &Path, first: usize) -> Result<(), ImageError> {
    let failed = |source| ImageError::io("remove", path, source);
    let kind = held.metadata().map_err(failed)?.file_type();
    if kind.is_block_device() || !leads_to(path, held) {
        return block_device::wipe(held, first).map_err(failed);
    }
    // What was named may be a link to it.
    let path = &std::fs::canonicalize(path).map_err(failed)?;
    std::fs::remove_file(path)
        .and_then(|()| sync_name(held, path))
        .map_err(failed)
}

/// Makes durable that a file has its name, or has it no more. A device's names are not ours.
pub(crate) fn sync_name(held: &File, path: &Path) -> io::Result<()> {
    if held.metadata()?.file_type().is_block_device() {
        return Ok(());
    }
    File::open(folder_of(path)).and_then(|folder| folder.sync_all())
}

/// Space that an image takes: of a file what the file system says, of a device all up to its end.
pub(crate) fn allocated(file: &File, end: u64) -> io::Result<ByteCount> {
    // The unit of st_blocks, whatever the file system's own.
    const STAT_BLOCK: u64 = 512;
    let metadata = file.metadata()?;
    if metadata.file_type().is_block_device() {
        return Ok(ByteCount(end));
    }
    Ok(ByteCount(metadata.blocks() * STAT_BLOCK))
}

/// Makes a hole; tells whether the file system can.
fn punch(file: &File, hole: &Range<u64>) -> io::Result<bool> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match rustix::fs::fallocate(file, flags, hole.start, hole.end - hole.start) {
        Ok(()) => Ok(true),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn steps(range: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let end = range.end;
    (range.start..end)
        .step_by(ZERO_STEP_BYTES as usize)
        .map(move |start| start..end.min(start + ZERO_STEP_BYTES))
}
