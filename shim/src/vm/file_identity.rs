//! Which file a file is, whatever it is called.

use std::fs::{self, File, Metadata};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use serde::{Deserialize, Serialize};

/// A file, whatever its names: the device that it is on, and its inode there. Of a block device, whose nodes can be many:
/// its own number, and no inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct FileIdentity {
    /// Major number of the device.
    pub major: u32,
    /// Minor number of the device.
    pub minor: u32,
    /// Inode number; 0 for a block device.
    pub inode: u64,
}

impl FileIdentity {
    /// Of a file that was looked at.
    pub fn of(metadata: &Metadata) -> Self {
        let own_device = if metadata.file_type().is_block_device() {
            metadata.rdev()
        } else {
            0
        };
        Self::of_numbers(metadata.dev(), metadata.ino(), own_device)
    }

    /// Of the file with this inode on a file system's device, or of a block device, if it has a number of its own.
    pub fn of_numbers(device: u64, inode: u64, own_device: u64) -> Self {
        let (device, inode) = match own_device {
            0 => (device, inode),
            own => (own, 0),
        };
        Self {
            major: rustix::fs::major(device),
            minor: rustix::fs::minor(device),
            inode,
        }
    }

    /// Of the file that `path` leads to, if it leads to one.
    pub fn at(path: &Path) -> Option<Self> {
        fs::metadata(path).ok().as_ref().map(Self::of)
    }

    /// Of an open file.
    pub fn of_open(file: &File) -> Option<Self> {
        file.metadata().ok().as_ref().map(Self::of)
    }
}
