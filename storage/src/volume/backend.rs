//! How RAM gets to the disk, and what the disk is.

use std::fmt;

use crate::sys::{DirectFile, probe};

/// How RAM gets to the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Backend {
    /// Past the page cache, several writes in flight for each thread.
    Uring,
    /// Past the page cache, one write in flight for each thread: where the kernel or a container's
    /// seccomp profile has no io_uring.
    Pwrite,
    /// Through the page cache, with writeback kept close behind: where there is no O_DIRECT.
    Buffered,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Uring => "io_uring",
            Self::Pwrite => "pwrite",
            Self::Buffered => "buffered",
        })
    }
}

/// What an image is written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum VolumeKind {
    /// A file of any file system.
    File,
    /// A raw block device.
    BlockDevice,
}

impl fmt::Display for VolumeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::File => "file",
            Self::BlockDevice => "block device",
        })
    }
}

/// The backend that is used: the one that was asked for, if it is possible.
pub(super) fn choose(wanted: Option<Backend>, io: &DirectFile) -> Backend {
    if !io.is_direct() {
        return Backend::Buffered;
    }
    match wanted {
        Some(Backend::Buffered) => Backend::Buffered,
        Some(Backend::Pwrite) => Backend::Pwrite,
        Some(Backend::Uring) | None => match probe::why_no_uring() {
            None => Backend::Uring,
            Some(error) => {
                tracing::debug!(%error, "no io_uring here");
                Backend::Pwrite
            }
        },
    }
}
