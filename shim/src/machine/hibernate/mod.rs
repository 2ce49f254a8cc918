//! Hibernation: a guest's memory and devices become an image, and QEMU ends. And the snapshot, after which its guest goes on.

pub mod direct;
pub mod ending;
pub mod forecast;
pub mod give_back;
pub mod limits;
pub mod live;
pub mod machine;
#[cfg(test)]
mod machine_model;
pub mod plan;
pub mod runner;
pub mod stream;
mod target_lock;

use std::path::PathBuf;

use dormouse_storage::{Backend, ByteCount, Compression, ImageKey, VolumeKind};
use uuid::Uuid;

use crate::error::GuestState;
use crate::vm::engine::{Choice, Wish};
use crate::vm::shape::Shape;
use limits::Limits;
use live::{LiveLimits, Passes};
use machine::Aim;

/// What is asked for.
#[derive(Debug, Clone)]
pub struct Request {
    /// What becomes of the guest.
    pub aim: Aim,
    /// Whether the guest of a snapshot runs while it is saved, and how long it may be paused then.
    pub live: Option<LiveLimits>,
    /// Where the image goes.
    pub target: PathBuf,
    /// The mount point of the volume that the target has to be on, if that is known.
    pub volume_mount: Option<PathBuf>,
    /// Whether an image that is there already may be replaced.
    pub replace: bool,
    /// How RAM gets into it.
    pub engine: Wish,
    /// Channels beside the main stream, where RAM comes from QEMU; `None`: as many as are good, 0: none.
    pub channels: Option<u8>,
    /// What the image is to be like.
    pub image: ImageWish,
    /// The monitor's socket, for who comes after us.
    pub monitor: PathBuf,
    /// Where operations are written down.
    pub operations: PathBuf,
    /// How long it may take.
    pub limits: Limits,
    /// The name of the VM, for the image's manifest.
    pub vm_name: String,
    /// QEMU's command line as the user gave it; `None`: take what QEMU's process shows.
    pub command_line: Option<Vec<String>>,
    /// What the machine was made of at its start; `None`: nobody noted it.
    pub shape: Option<Shape>,
}

/// What an image is to be like.
#[derive(Debug, Clone, Default)]
pub struct ImageWish {
    /// Whether RAM is compressed.
    pub compression: Compression,
    /// The key that it is encrypted with, if it is.
    pub key: Option<ImageKey>,
    /// The most that is written in a second.
    pub rate_limit: Option<ByteCount>,
}

/// What an image is written to, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Storage {
    /// A file or a block device.
    pub kind: VolumeKind,
    /// How RAM gets there.
    pub backend: Backend,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// What it was for.
    pub aim: Aim,
    /// What the guest does now.
    pub guest: GuestState,
    /// The image.
    pub image: PathBuf,
    /// Its id.
    pub image_id: Uuid,
    /// How RAM got into it.
    pub choice: Choice,
    /// What the image is on.
    pub storage: Storage,
    /// How a live snapshot went.
    pub live: Option<Passes>,
    /// RAM that held something.
    pub data: ByteCount,
    /// What was written for it.
    pub stored: ByteCount,
    /// RAM that was zero and was not.
    pub zero: ByteCount,
    /// How long each phase took, in milliseconds, in order.
    pub timings_ms: Vec<(machine::Phase, f64)>,
    /// How long the guest stood still, in milliseconds: to a sealed image, or until it was given back.
    pub pause_ms: f64,
    /// From the beginning to a sealed image, in milliseconds.
    pub sealed_after_ms: f64,
}
