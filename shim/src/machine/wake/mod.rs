//! The wake: an image becomes a running guest, exactly once.

pub mod choice;
pub mod feeding;
pub mod follow_up;
pub mod guard;
pub mod lazy;
mod load;
pub mod machine;
#[cfg(test)]
mod machine_model;
pub mod other_disks;
pub mod plan;
pub mod record;
pub mod resume;
pub mod runner;
pub mod snapshot;
pub mod take_over;

use std::path::PathBuf;

use dormouse_storage::ImageKey;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

/// What is asked for.
#[derive(Debug, Clone)]
pub struct Request {
    /// The image.
    pub image: PathBuf,
    /// How RAM comes back; `None`: the fastest way that this QEMU has.
    pub mode: Option<Mode>,
    /// Whether the guest shall stay paused.
    pub paused: bool,
    /// Whether every chunk is checked first, also where the mode would not.
    pub verify: bool,
    /// Whether the disks of a snapshot are known to be as they were at the snapshot, and not those that its guest went on
    /// with.
    pub disks_as_saved: bool,
    /// Whether the guest is woken although its disks are not as they were at the save.
    pub force_disks: bool,
    /// Disks that lie elsewhere than at the save.
    pub other_disks: Vec<other_disks::OtherDisk>,
    /// Arguments for QEMU after the recorded ones.
    pub changes: Vec<String>,
    /// The image's key, if it is encrypted.
    pub key: Option<ImageKey>,
    /// How RAM is fed that comes while the guest runs.
    pub feed: lazy::FeedWish,
}

/// How RAM comes back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// RAM is mapped privately from the image: at once, whatever its size. Not checked before use; the guest's memory
    /// stays on the image until it ends, and is saved by the stream engine.
    Map,
    /// The guest runs at once, and RAM comes from the image behind it: what the guest touches first, each chunk checked
    /// before use. The image is free when all is there, and the next hibernation is direct again. QEMU needs userfaultfd.
    Lazy,
    /// RAM is filled from the image first, every chunk checked. The image is free afterwards and the next hibernation
    /// is direct again.
    Eager,
    /// RAM comes through QEMU's own loading of a migration, every chunk checked: for RAM of any kind, wherever the
    /// command line has it. The image is free afterwards.
    Stream,
}

impl Mode {
    /// What it is called, as on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Map => "map",
            Self::Lazy => "lazy",
            Self::Eager => "eager",
            Self::Stream => "stream",
        }
    }
}

/// What came of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The image.
    pub image: PathBuf,
    /// Its id.
    pub image_id: Uuid,
    /// How RAM came back.
    pub mode: Mode,
    /// Why in no better way, where none was wished for.
    pub passed_over: Vec<String>,
    /// How long each phase took, in milliseconds, in order.
    pub timings_ms: Vec<(machine::Phase, f64)>,
    /// From QEMU's start to a guest that runs (or is ready, when it stays paused), in milliseconds.
    pub start_to_running_ms: f64,
    /// What differed of the disks and was let through.
    pub forced_disks: Vec<String>,
    /// What was done for the guest once it ran.
    pub follow_up: follow_up::FollowUp,
}
