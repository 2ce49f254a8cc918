//! The image: one file, or one block device, that holds a guest.
//!
//! ```text
//! 0            superblock, first copy      4 KiB: what this is, its state, where all lies, CRC-32
//! 4 KiB        superblock, second copy     see `superblock` for what the two are to each other
//! 2 MiB        RAM block 0                 every block from a multiple of 2 MiB on, to be mapped; every MiB
//!              RAM block 1                 of it (a chunk) at its own place: raw, or one zstd frame and then
//!              ...                         nothing; zeros and holes of the guest are not written
//! 4 KiB steps  chunk table                 per chunk: zero, raw or zstd; length; CRC-32; what opens it if it is encrypted
//!              device state                QEMU's migration stream, normalized: without RAM
//!              manifest                    JSON: what is known about the guest; never encrypted
//! ```
//!
//! What is guaranteed:
//!
//! * **There is no half image.** A file is written under a hidden name and gets its own in one step,
//!   after all of it is on the disk; a block device says `writing` until then. Whoever writes and gives
//!   up leaves nothing. How, is told in `volume`.
//! * **Nothing that failed a check is handed on.** Every byte is under a CRC-32; lengths are
//!   checked against limits and the file before anything is allocated or parsed.
//! * **An image wakes once.** Its state says how far that went ([`ImageState`]); a change is
//!   durable before it is acknowledged, and no damage to one place brings an older state back.
//! * **One owner.** Writing, waking and replacing hold an exclusive `flock`; looking needs none.

mod broken;
mod chunk_writer;
pub(crate) mod chunks;
mod cipher;
mod codec;
mod compression;
mod contents;
pub(crate) mod error;
mod fill;
mod interrupted;
mod key;
mod layout;
mod live;
pub mod manifest;
mod mark;
mod pages;
mod precopy;
mod random;
pub(crate) mod reader;
mod received;
mod sealed;
mod state;
pub(crate) mod superblock;
mod trial;
mod verify;
mod workers;
mod writer;

pub use broken::remove_broken;
pub use chunks::TableError;
pub(crate) use codec::Unpacker;
pub use compression::{Compression, CompressionError};
pub use error::{Corruption, ImageError, Mismatch, TornBecause};
pub use interrupted::{Interrupted, Remains};
pub use key::{ImageKey, KEY_BYTES, KeyError};
pub use layout::{BlockPlacement, BlockSize, Layout, LayoutError};
pub use manifest::Manifest;
pub use pages::Pages;
pub use random::RandomReader;
pub use reader::{Image, Unmappable, Usage};
pub use sealed::{CompleteImage, SealedImage};
pub use state::ImageState;
pub use superblock::{FORMAT_VERSION, WakeNote};
pub use trial::{Trial, try_volume};
pub use verify::Verified;
pub(crate) use workers::for_each_chunk;
pub use writer::{CreateOptions, ImageWriter, MemoryWritten};
