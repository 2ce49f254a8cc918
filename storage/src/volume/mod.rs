//! Where an image is written: a file that has no name yet, or a raw block device.
//!
//! ```text
//!  Volume::create ──► reserve ──► lanes write RAM, write_area the tables ──► sync_data ──► seal ──► publish
//!       └───────────────┴─────────────────────┴──────────────────────────────────┴──────────┴── dropped: no image
//! ```
//!
//! What is guaranteed, wherever it is:
//!
//! * **Until [`Volume::publish`] has returned there is no image that a reader would take for one**, and
//!   a volume that is dropped leaves none: see [`file`] and [`block_device`] for how, and for what may be
//!   replaced.
//! * **It is held**, from before the first look at what is there until the published image is dropped.
//! * **A write that was accepted is on its way to the disk, past the page cache where the system lets us**
//!   ([`Backend`]); it is there after [`Lane::finish`] and [`Volume::sync_data`].
//! * **Old data is never seen through**: a file begins as a hole; on a device nothing relies on what was
//!   not written.

mod backend;
mod beside;
mod block_device;
mod file;
mod hold;
mod lane;
mod published;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;

use uuid::Uuid;

pub use backend::{Backend, VolumeKind};
pub(crate) use beside::{create_beside, folder_of};
use block_device::DeviceInWriting;
use file::PartialFile;
pub(crate) use file::partial_path;
pub(crate) use hold::{is_block_device, leads_to, open_held};
pub(crate) use lane::Lane;
pub(crate) use published::{Published, allocated, remove, sync_name};

use crate::ByteCount;
use crate::image::ImageError;
use crate::image::chunks::CHUNK_BYTES;
use crate::image::error::is_out_of_space;
use crate::image::superblock::{self, COPY_BYTES};
use crate::sys::{self, ALIGNMENT, AlignedBuf, DirectFile};

/// What an image takes when it is begun.
const BEGINNING: ByteCount = ByteCount(2 * COPY_BYTES as u64);

/// Where an image is being written.
#[derive(Debug)]
pub(crate) struct Volume {
    place: Place,
    io: Arc<DirectFile>,
    backend: Backend,
}

#[derive(Debug)]
enum Place {
    File(PartialFile),
    BlockDevice(DeviceInWriting),
}

impl Volume {
    /// Takes hold of `target`: a block device if it leads to one, else a new file beside it; and
    /// begins an image there.
    ///
    /// # Errors
    ///
    /// [`ImageError::TargetExists`], [`ImageError::HoldsGuest`], [`ImageError::NotAnImage`] and
    /// [`ImageError::NewerFormat`] if what is there must stay, [`ImageError::Locked`] and
    /// [`ImageError::DeviceInUse`] if somebody has it, [`ImageError::ReadOnly`] and
    /// [`ImageError::SectorSize`] for a device that cannot hold an image, [`ImageError::Io`] if the system
    /// refuses.
    pub(crate) fn create(
        target: &Path,
        replace: bool,
        image_id: Uuid,
        backend: Option<Backend>,
    ) -> Result<Self, ImageError> {
        let place = if hold::is_block_device(target) {
            Place::BlockDevice(DeviceInWriting::take(target, replace)?)
        } else {
            Place::File(PartialFile::create(target, replace, image_id)?)
        };
        let failed = |operation, source| ImageError::io(operation, place.path(), source);
        let io = if backend == Some(Backend::Buffered) {
            DirectFile::buffered(place.file())
        } else {
            DirectFile::beside(place.file(), place.path(), true)
        }
        .map_err(|source| failed("open", source))?;
        let backend = backend::choose(backend, &io);
        let mut volume = Self {
            place,
            io: Arc::new(io),
            backend,
        };
        volume
            .begin(&superblock::beginning(image_id, CHUNK_BYTES).encode())
            .map_err(|source| volume.failed("begin", BEGINNING, source))?;
        Ok(volume)
    }

    /// Makes sure that there is room for `needed` bytes: a file gets them allocated, a device has them
    /// or not. On a file system that cannot allocate, free space is looked at instead.
    ///
    /// # Errors
    ///
    /// [`ImageError::NoSpace`] with the numbers, [`ImageError::Io`] if the system refuses.
    pub(crate) fn reserve(&self, needed: ByteCount) -> Result<(), ImageError> {
        // First asked, then taken: filling a disk to its last block only to find it too small would
        // hurt others on it.
        if let Some(available) = self.available()?.filter(|available| *available < needed) {
            return Err(self.no_space(needed, available));
        }
        match &self.place {
            Place::File(partial) => partial
                .allocate(needed)
                .map_err(|source| self.failed("reserve space for", needed, source)),
            Place::BlockDevice(_) => Ok(()),
        }
    }

    /// Tells how long the image will be at least. With its length known from the start a file system
    /// does not take its lock for each growing write.
    pub(crate) fn expect_length(&self, length: u64) -> io::Result<()> {
        match &self.place {
            Place::File(partial) => partial.file.set_len(length),
            Place::BlockDevice(_) => Ok(()),
        }
    }

    /// What the target is.
    pub(crate) fn kind(&self) -> VolumeKind {
        match &self.place {
            Place::File(_) => VolumeKind::File,
            Place::BlockDevice(_) => VolumeKind::BlockDevice,
        }
    }

    /// How RAM gets to the disk. A file system that takes O_DIRECT at the open and refuses the first
    /// transfer changes the answer.
    pub(crate) fn backend(&self) -> Backend {
        if self.io.is_direct() {
            self.backend
        } else {
            Backend::Buffered
        }
    }

    /// Where it is being written: for messages.
    pub(crate) fn path(&self) -> &Path {
        self.place.path()
    }

    /// A thread's own queue of writes.
    pub(crate) fn lane(&self) -> Lane {
        Lane::on(Arc::clone(&self.io), self.backend(), lane::DEPTH)
    }

    /// Writes what is not RAM: any length, at a multiple of 4 KiB; what is missing to whole pages is
    /// written as zeros.
    pub(crate) fn write_area(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut buffer = AlignedBuf::zeroed(bytes.len().min(CHUNK_BYTES as usize));
        for (part, offset) in bytes.chunks(buffer.len()).zip((offset..).step_by(buffer.len())) {
            let whole = part.len().next_multiple_of(ALIGNMENT);
            buffer[..part.len()].copy_from_slice(part);
            buffer[part.len()..whole].fill(0);
            self.io.write_all_at(&buffer[..whole], offset)?;
        }
        Ok(())
    }

    /// Reads what was written, at a multiple of 4 KiB.
    pub(crate) fn read(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        self.io.read_exact_at(bytes, offset)
    }

    /// Brings everything that was written and finished to the disk.
    pub(crate) fn sync_data(&self) -> io::Result<()> {
        self.place.file().sync_data()
    }

    /// Makes the image a sealed one, durably: `copy` is its superblock. Everything that it speaks of
    /// must have been synced.
    pub(crate) fn seal(&self, copy: &[u8; COPY_BYTES]) -> io::Result<()> {
        match &self.place {
            Place::File(partial) => partial.seal(copy),
            Place::BlockDevice(device) => device.seal(copy),
        }
    }

    /// Lets others find the sealed image, for good: a file gets its name; a device has it on it
    /// already.
    ///
    /// # Errors
    ///
    /// [`ImageError::TargetExists`] if somebody took the name meanwhile, [`ImageError::Io`] if the
    /// system refuses; there is no image then. [`ImageError::MayBeSealed`] if there may be one.
    pub(crate) fn publish(self) -> Result<Published, ImageError> {
        let kind = self.kind();
        let (file, path) = match self.place {
            Place::File(partial) => {
                let path = partial.target().to_owned();
                (partial.publish()?, path)
            }
            Place::BlockDevice(device) => {
                let path = device.path().to_owned();
                let file = device
                    .publish()
                    .map_err(|source| ImageError::io("hold", &path, source))?;
                (file, path)
            }
        };
        Ok(Published::of(file, path, kind, self.io))
    }

    /// What an error of a write means for an image that needs `needed` bytes.
    pub(crate) fn failed(&self, operation: &'static str, needed: ByteCount, source: io::Error) -> ImageError {
        if let Place::BlockDevice(device) = &self.place
            && device.may_be_sealed()
        {
            return ImageError::MayBeSealed {
                path: device.path().to_owned(),
                source,
            };
        }
        if is_out_of_space(&source) {
            let available = self.available().ok().flatten().unwrap_or_default();
            // A device that is long enough has no room in what is behind it (a thin pool): nothing that
            // these numbers would explain.
            if self.kind() == VolumeKind::File || available < needed {
                return self.no_space(needed, available);
            }
        }
        ImageError::io(operation, self.path(), source)
    }

    fn begin(&mut self, copy: &[u8; COPY_BYTES]) -> io::Result<()> {
        match &mut self.place {
            Place::File(partial) => partial.begin(copy),
            Place::BlockDevice(device) => device.begin(copy),
        }
    }

    pub(crate) fn available(&self) -> Result<Option<ByteCount>, ImageError> {
        match &self.place {
            Place::File(partial) => partial.available(),
            Place::BlockDevice(device) => Ok(Some(device.length())),
        }
    }

    fn no_space(&self, needed: ByteCount, available: ByteCount) -> ImageError {
        let path = match &self.place {
            Place::File(partial) => partial.folder(),
            Place::BlockDevice(device) => device.path(),
        };
        ImageError::NoSpace {
            needed,
            available,
            path: path.to_owned(),
        }
    }
}

impl Place {
    fn file(&self) -> &File {
        match self {
            Self::File(partial) => &partial.file,
            Self::BlockDevice(device) => &device.file,
        }
    }

    fn path(&self) -> &Path {
        match self {
            Self::File(partial) => partial.path(),
            Self::BlockDevice(device) => device.path(),
        }
    }
}

/// Length of what can hold an image, or `None` if it is neither a file nor a block device.
pub(crate) fn length_of(file: &File) -> io::Result<Option<ByteCount>> {
    let metadata = file.metadata()?;
    if metadata.file_type().is_block_device() {
        return Ok(Some(ByteCount(sys::block_device::length(file)?)));
    }
    Ok(metadata.is_file().then_some(ByteCount(metadata.len())))
}
