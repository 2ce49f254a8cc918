//! Guest RAM: of a stopped guest as a source, of a guest to be woken as a sink.
//!
//! Both are files that QEMU maps shared (tmpfs, hugetlbfs, a memfd), so RAM moves between them and
//! the image without QEMU's help. What is guaranteed:
//!
//! * a source is never written to, and its holes are never touched: looking at a hole of a tmpfs
//!   file would allocate it;
//! * the bytes of a source never appear as a slice outside of `sys`, because another process maps
//!   them too;
//! * a sink is new, private to its owner, and as long as the guest's RAM from the start.

mod file;
mod guest;

use std::io;
use std::path::PathBuf;

pub use file::MemoryFile;
pub use guest::GuestMemory;

use crate::ByteCount;

/// Why guest RAM could not be mapped, scanned or created.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The file that backs the RAM is shorter than the RAM.
    #[error("the file behind guest RAM has {found}, {needed} are needed")]
    Short {
        /// Length that was asked for.
        needed: ByteCount,
        /// Length of the file.
        found: ByteCount,
    },
    /// RAM of no length, or of one that is no multiple of a page.
    #[error("guest RAM of {length} ({bytes} bytes) is not a number of pages", bytes = length.0)]
    NotPages {
        /// The length.
        length: ByteCount,
    },
    /// The system could not do it.
    #[error("could not {operation} guest RAM")]
    Io {
        /// What was being done.
        operation: &'static str,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The system could not create the file.
    #[error("could not {operation} {path}", path = path.display())]
    File {
        /// What was being done.
        operation: &'static str,
        /// To which file.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

/// The page size that RAM lengths are multiples of, on every host and guest that is supported.
pub(crate) const PAGE_BYTES: u64 = 4096;

fn check_length(length: ByteCount) -> Result<(), MemoryError> {
    if length.0 == 0 || !length.0.is_multiple_of(PAGE_BYTES) || usize::try_from(length.0).is_err() {
        return Err(MemoryError::NotPages { length });
    }
    Ok(())
}
