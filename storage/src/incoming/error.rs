//! Why a guest's memory could not be received.

use std::io;

use crate::migration::{MultifdError, StreamError};

/// Why a guest's memory could not be received.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IncomingError {
    /// There are no connections, or more than a migration has.
    #[error("{found} connections, a migration has 1 to {limit}")]
    Connections {
        /// How many.
        found: usize,
        /// The most that can be: the main one and 255 channels.
        limit: usize,
    },
    /// A connection begins neither as a migration stream nor as a channel of one.
    #[error("a connection begins with {found:02x?}, which is no migration")]
    NotAMigration {
        /// What it begins with.
        found: [u8; 4],
    },
    /// A connection that ended before it said what it is.
    #[error("a connection ended after {bytes} bytes")]
    Nothing {
        /// How many came.
        bytes: usize,
    },
    /// Not exactly one connection is a main stream.
    #[error("{found} of the connections are a main stream, one must be")]
    MainStreams {
        /// How many are.
        found: usize,
    },
    /// A connection failed.
    #[error("a connection to QEMU failed")]
    Socket(#[from] io::Error),
    /// The main stream is not one that can be kept.
    #[error("the migration stream")]
    Stream(#[from] StreamError),
    /// A channel says what cannot be received.
    #[error("multifd")]
    Multifd(#[from] MultifdError),
    /// A page came twice, which it does not when the guest is stopped.
    #[error("the page at {offset:#x} of RAM block {block:?} came twice: the guest was not stopped")]
    Again {
        /// Name of the block.
        block: String,
        /// Offset of the page.
        offset: u64,
    },
    /// A page came when its chunk had been taken for whole, because too many were incomplete.
    #[error("the page at {offset:#x} of RAM block {block:?} came too late, behind all after it")]
    Late {
        /// Name of the block.
        block: String,
        /// Offset of the page.
        offset: u64,
    },
    /// Pages come in no order at all.
    #[error("more than {limit} MiB of RAM are incomplete at once")]
    Scattered {
        /// How many may be.
        limit: usize,
    },
}
