//! Why an image could not be written, read or marked.

use std::io;
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use super::chunks::TableError;
use super::layout::LayoutError;
use super::state::ImageState;
use crate::ByteCount;
use crate::incoming::IncomingError;
use crate::memory::MemoryError;
use crate::migration::StreamError;

/// Why an image could not be written, read or marked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImageError {
    /// The file was never an image of Dormouse.
    #[error("{path} is not a Dormouse image", path = path.display())]
    NotAnImage {
        /// The file.
        path: PathBuf,
    },
    /// The block device holds something that was never an image of Dormouse.
    #[error("{path} holds something that is not a Dormouse image; it is overwritten only when told to replace it", path = path.display())]
    DeviceHoldsOther {
        /// The device.
        path: PathBuf,
    },
    /// A later version of Dormouse wrote it in a format that this one cannot read.
    #[error("{path} has format {found}, this version reads up to {supported}", path = path.display())]
    NewerFormat {
        /// The file.
        path: PathBuf,
        /// Version of its format.
        found: u32,
        /// Newest version that can be read.
        supported: u32,
    },
    /// The file began as an image but was never finished, or a part of it is missing.
    #[error("{path} is torn: {because}", path = path.display())]
    Torn {
        /// The file.
        path: PathBuf,
        /// What is missing.
        because: TornBecause,
    },
    /// The file is whole but its content is not what was written.
    #[error("{path} is corrupt", path = path.display())]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What differs.
        #[source]
        source: Corruption,
    },
    /// The image is encrypted, and no key was given.
    #[error("{path} is encrypted: its key is needed", path = path.display())]
    KeyNeeded {
        /// The image.
        path: PathBuf,
    },
    /// The key is not the one that the image was encrypted with.
    #[error("the key is not the one that {path} was encrypted with", path = path.display())]
    WrongKey {
        /// The image.
        path: PathBuf,
    },
    /// The image is in a state in which this may not be done to it.
    #[error("{path} is {found} and cannot become {wanted}", path = path.display())]
    WrongState {
        /// The file.
        path: PathBuf,
        /// State that it is in.
        found: ImageState,
        /// State that was asked for.
        wanted: ImageState,
    },
    /// Somebody else holds the image.
    #[error("{path} is in use by another process", path = path.display())]
    Locked {
        /// The file.
        path: PathBuf,
    },
    /// The system uses the block device.
    #[error("{path} is in use: mounted, swap, a part of another device, or a disk of a running QEMU", path = path.display())]
    DeviceInUse {
        /// The device.
        path: PathBuf,
    },
    /// The block device takes no writes.
    #[error("{path} is read-only", path = path.display())]
    ReadOnly {
        /// The device.
        path: PathBuf,
    },
    /// The block device is written in larger units than an image's parts are aligned to.
    #[error("{path} has sectors of {found} bytes, at most {limit} are supported", path = path.display())]
    SectorSize {
        /// The device.
        path: PathBuf,
        /// Bytes of its logical sectors.
        found: u32,
        /// The limit.
        limit: u32,
    },
    /// The seal of an image failed, and so did wiping it: what is found there the next time may be a sealed
    /// image of a guest that runs on.
    #[error("could not seal the image on {path}, nor wipe it: it may be found whole there and must not be woken", path = path.display())]
    MayBeSealed {
        /// The file or device.
        path: PathBuf,
        /// Why it could not be sealed.
        #[source]
        source: io::Error,
    },
    /// The image was opened for reading only, but a state change needs
    /// [`Image::open_locked`](super::Image::open_locked).
    #[error("{path} was opened without its lock and cannot be changed", path = path.display())]
    NotLocked {
        /// The file.
        path: PathBuf,
    },
    /// The file system has no room for the image.
    #[error("needs {needed}, {available} free on {path}", path = path.display())]
    NoSpace {
        /// Bytes that the image needs at most.
        needed: ByteCount,
        /// Bytes that were free.
        available: ByteCount,
        /// Folder in which the image was to be, or the block device.
        path: PathBuf,
    },
    /// There is something at the target already, and it may not be replaced.
    #[error("{path} exists", path = path.display())]
    TargetExists {
        /// The target.
        path: PathBuf,
    },
    /// The image at the target may be the only copy of a guest, so it is not replaced.
    #[error("{path} is {state}: it holds a guest, and is not replaced; wake or remove it first", path = path.display())]
    HoldsGuest {
        /// The target.
        path: PathBuf,
        /// State of the image there.
        state: ImageState,
    },
    /// Somebody asked for the end.
    #[error("cancelled")]
    Cancelled,
    /// RAM blocks cannot be laid out in an image.
    #[error("the RAM blocks do not fit an image")]
    Layout(#[from] LayoutError),
    /// What was to be written does not fit the layout that was planned, or a part of the guest is
    /// missing.
    #[error("RAM block {block:?}: {mismatch}")]
    Mismatch {
        /// The RAM block.
        block: String,
        /// What does not fit.
        mismatch: Mismatch,
    },
    /// The manifest is too long or cannot be told as JSON.
    #[error("the manifest takes {length}, at most {limit} are kept")]
    ManifestTooLong {
        /// Its length.
        length: ByteCount,
        /// The limit.
        limit: ByteCount,
    },
    /// Storage failed.
    #[error("could not {operation} {path}", path = path.display())]
    Io {
        /// What was being done.
        operation: &'static str,
        /// To which file or folder.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// Guest RAM could not be read or written.
    #[error("guest memory")]
    Memory(#[from] MemoryError),
    /// The device state is not a migration stream that can be loaded.
    #[error("device state")]
    Stream(#[from] StreamError),
    /// The guest's memory could not be received.
    #[error("could not receive the guest's memory")]
    Incoming(#[from] IncomingError),
}

/// What is missing from a torn image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TornBecause {
    /// Neither copy of the superblock has a valid checksum.
    #[error("neither copy of its superblock is valid")]
    BothSuperblocks,
    /// Whoever wrote it never came to the end.
    #[error("it was never sealed")]
    NeverSealed,
    /// The file ends too early.
    #[error("it needs {needed} and has {found}")]
    Short {
        /// Length that the superblock promises.
        needed: ByteCount,
        /// Length of the file.
        found: ByteCount,
    },
}

/// How the content of an image differs from what was written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Corruption {
    /// A chunk of RAM.
    #[error("RAM block {block:?} at {offset:#x}: CRC-32 is {found:08x}, {expected:08x} was written")]
    Chunk {
        /// Name of the RAM block.
        block: String,
        /// Offset of the chunk in the block, in bytes.
        offset: u64,
        /// CRC-32 when it was written.
        expected: u32,
        /// CRC-32 now.
        found: u32,
    },
    /// A chunk of RAM that is what was written, but does not decompress.
    #[error("RAM block {block:?} at {offset:#x}: does not decompress")]
    ChunkFrame {
        /// Name of the RAM block.
        block: String,
        /// Offset of the chunk in the block, in bytes.
        offset: u64,
    },
    /// A chunk of RAM was altered by someone without the key, or put where it does not belong.
    #[error("RAM block {block:?} at {offset:#x}: not authentic")]
    ChunkNotAuthentic {
        /// Name of the RAM block.
        block: String,
        /// Offset of the chunk in the block, in bytes.
        offset: u64,
    },
    /// Device state, chunk table or manifest were altered by someone without the key.
    #[error("device state, chunk table or manifest: not authentic")]
    DeviceStateNotAuthentic,
    /// A chunk that was all zeros no longer is.
    #[error("RAM block {block:?} at {offset:#x}: zeros were saved, something else is there")]
    NotZero {
        /// Name of the RAM block.
        block: String,
        /// Offset of the chunk in the block, in bytes.
        offset: u64,
    },
    /// One of the areas behind the RAM.
    #[error("{area}: CRC-32 is {found:08x}, {expected:08x} was written")]
    Area {
        /// Its name.
        area: &'static str,
        /// CRC-32 when it was written.
        expected: u32,
        /// CRC-32 now.
        found: u32,
    },
    /// The superblock is well formed but contradicts itself.
    #[error("superblock: {0}")]
    Superblock(&'static str),
    /// The chunk table is not one.
    #[error("chunk table")]
    Table(#[source] TableError),
    /// The manifest is not one.
    #[error("manifest")]
    Manifest(#[source] serde_json::Error),
    /// The device state is not a migration stream.
    #[error("device state")]
    DeviceState(#[source] StreamError),
}

/// How memory or pages and the planned layout disagree.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Mismatch {
    /// The layout has no such block.
    #[error("it is not in the image's layout")]
    Unknown,
    /// The lengths differ.
    #[error("it is {found} long, the layout has {planned}")]
    Length {
        /// Length in the layout.
        planned: ByteCount,
        /// Length that was offered.
        found: ByteCount,
    },
    /// It was written before, or failed in the middle.
    #[error("its writing was begun before")]
    Twice,
    /// Nothing was written for it.
    #[error("nothing was written for it")]
    Missing,
    /// The recording holds only a part of its pages.
    #[error("the recording holds {found} of its {needed} pages")]
    PagesMissing {
        /// Pages in the recording.
        found: u64,
        /// Pages of the block.
        needed: u64,
    },
    /// The recording has no such block.
    #[error("the recorded device state does not know it")]
    NotRecorded,
}

impl ImageError {
    pub(crate) fn io(operation: &'static str, path: &Path, source: impl Into<io::Error>) -> Self {
        Self::Io {
            operation,
            path: path.to_owned(),
            source: source.into(),
        }
    }

    pub(crate) fn corrupt(path: &Path, source: Corruption) -> Self {
        Self::Corrupt {
            path: path.to_owned(),
            source,
        }
    }
}

/// Whether the system says that there is no room: full, over quota, or longer than files may be
/// here.
pub(crate) fn is_out_of_space(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::NOSPC | Errno::DQUOT | Errno::FBIG)
    )
}
