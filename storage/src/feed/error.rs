//! Why a feed ended without all of the memory.

use std::io;

use crate::{ByteCount, ImageError};

/// Why not all of a guest's memory got to it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FeedError {
    /// The image could not be read before anything was fed.
    #[error("the image could not be read")]
    Image(#[from] ImageError),
    /// Some of the memory could not be had from the image; all else was fed. The guest stands where it needs it.
    #[error("{missing} of the guest's memory could not be read from the image: {first}")]
    Damaged {
        /// How much.
        missing: ByteCount,
        /// What was wrong with the first chunk of it.
        first: String,
    },
    /// The connection to QEMU ended.
    #[error("the connection to QEMU ended with {missing} of the guest's memory still missing")]
    Lost {
        /// What was not fed.
        missing: ByteCount,
        /// What the system said, where it did.
        #[source]
        source: Option<io::Error>,
    },
    /// QEMU says that it went wrong.
    #[error("QEMU says that it could not take the guest's memory")]
    Refused,
    /// QEMU's memory is not what was saved, or it says what cannot be.
    #[error("{0}")]
    Mismatch(String),
}
