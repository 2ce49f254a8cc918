//! The memory image of a hibernated machine: its format, the direct writer, the reader, and the
//! codec of QEMU's migration stream.
//!
//! Guest RAM goes to the disk and back without passing through QEMU, where it can
//! be seen from outside; where not, it comes as a migration over several connections. Device state
//! arrives as QEMU's migration stream and is kept in one normalized form from which every way to wake
//! can be fed.
//!
//! ```text
//!  GuestMemory ──┐
//!  Incoming ─────┼► ImageWriter ──seal──► one file ──► Image ──► MemoryFile      RAM
//!  Recording ────┘                                       └─────► write_precopy   device state
//! ```
//!
//! * [`memory`]: RAM of a stopped guest as a source, and a file that becomes RAM of a woken guest
//!   as a sink.
//! * [`migration`]: QEMU's migration stream, both ways.
//! * [`image`]: the file that holds a guest. Its layout is drawn there.
//! * [`feed`]: a guest that runs before its memory is there, and gets it from the image.
//! * [`exchange`]: memory that goes to other tools in their formats, or comes from them.
//!
//! Nothing here knows QMP, and nothing here is asynchronous: calls block, take a cancel flag, and
//! report through atomics.
#![deny(unsafe_code)]

mod byte_count;
pub mod exchange;
pub mod feed;
mod fingerprint;
pub mod image;
mod incoming;
pub mod memory;
pub mod migration;
mod rate_limit;
mod run;
#[allow(unsafe_code)]
mod sys;
mod volume;

pub use byte_count::ByteCount;
pub use feed::{Fed, FeedError, Feeder};
pub use fingerprint::{Fingerprint, fingerprint};
pub use image::{
    BlockPlacement, BlockSize, CompleteImage, Compression, Corruption, CreateOptions, Image, ImageError,
    ImageKey, ImageState, ImageWriter, Layout, LayoutError, Manifest, MemoryWritten, Mismatch, RandomReader,
    SealedImage, TornBecause, Trial, Unmappable, Usage, Verified, try_volume,
};
pub use incoming::{Incoming, IncomingError};
pub use memory::{GuestMemory, MemoryError, MemoryFile};
pub use migration::{
    Page, PageBytes, PageContent, PrecopyError, Recording, StreamBlock, StreamError, try_write_precopy,
    write_precopy,
};
pub use run::{Progress, Run, WORKER_THREADS};
pub use sys::block_device::{LoopBacking, loop_backing};
pub use volume::{Backend, VolumeKind};
