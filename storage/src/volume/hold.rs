//! Holding what is written, woken or replaced, so that nobody else does the same.
//!
//! Everybody takes an exclusive `flock`. That lock belongs to the inode that a path leads to, and a
//! block device can have several (a container's `/dev` beside the host's), so a device is also opened
//! with `O_EXCL`: the kernel's own claim, which a mount, swap, a device mapper or a RAID holds too.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::io::Errno;

use crate::image::ImageError;
use crate::sys::block_device;

/// How long others may look at a device that is ours already.
const PATIENCE: Duration = Duration::from_secs(2);

/// Whether `path` leads to a block device.
pub(crate) fn is_block_device(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_block_device())
}

/// Opens an existing file or block device for reading and writing, and holds it.
///
/// # Errors
///
/// [`ImageError::Locked`] if another Dormouse holds it, [`ImageError::DeviceInUse`] if the system uses
/// the device, [`ImageError::ReadOnly`] for a device that takes no writes, [`ImageError::Io`].
pub(crate) fn open_held(path: &Path) -> Result<File, ImageError> {
    // Writable, because network file systems make a record lock of it, which needs that.
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    if !is_block_device(path) {
        let file = options
            .open(path)
            .map_err(|source| ImageError::io("open", path, source))?;
        lock(&file, path)?;
        return Ok(file);
    }
    match options.custom_flags(libc::O_EXCL).open(path) {
        Ok(device) => {
            lock_claimed(&device, path)?;
            Ok(device)
        }
        Err(error) => Err(why_not(path, error)),
    }
}

/// Takes the lock that everybody who may write to an image holds.
pub(crate) fn lock(file: &File, path: &Path) -> Result<(), ImageError> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(()),
        Err(Errno::WOULDBLOCK) => Err(ImageError::Locked {
            path: path.to_owned(),
        }),
        Err(error) => Err(ImageError::io("lock", path, error)),
    }
}

/// Takes the lock on a device that is open for us alone. No other Dormouse has it then; udev holds a
/// shared lock for a moment after whoever wrote to a device closes it, and tells nobody when that ends.
fn lock_claimed(device: &File, path: &Path) -> Result<(), ImageError> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match lock(device, path) {
            Err(ImageError::Locked { .. }) if Instant::now() < deadline => {
                #[allow(
                    clippy::disallowed_methods,
                    reason = "a lock has no way to be waited for with a deadline"
                )]
                std::thread::sleep(Duration::from_millis(10));
            }
            result => return result,
        }
    }
}

/// Whether `path` leads to the file that is open.
pub(crate) fn leads_to(path: &Path, file: &File) -> bool {
    match (fs::metadata(path), file.metadata()) {
        (Ok(there), Ok(open)) => (there.dev(), there.ino()) == (open.dev(), open.ino()),
        _ => false,
    }
}

/// Why a device could not be opened for ourselves alone: in our words where the system's number does
/// not tell.
fn why_not(path: &Path, error: io::Error) -> ImageError {
    let reader = File::open(path);
    match Errno::from_io_error(&error) {
        Some(Errno::BUSY) => match reader.as_ref().map(|reader| lock(reader, path)) {
            // It is another Dormouse that has it.
            Ok(Err(locked @ ImageError::Locked { .. })) => locked,
            _ => ImageError::DeviceInUse {
                path: path.to_owned(),
            },
        },
        Some(Errno::ACCESS | Errno::ROFS | Errno::PERM)
            if reader
                .as_ref()
                .is_ok_and(|reader| block_device::is_read_only(reader).unwrap_or(false)) =>
        {
            ImageError::ReadOnly {
                path: path.to_owned(),
            }
        }
        _ => ImageError::io("open", path, error),
    }
}
