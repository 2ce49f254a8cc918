//! Moving the volumes under a running guest: everything is copied while the guest writes on, then all disks of the set
//! are switched at once.
//!
//! `plan` looks first, `machine` decides, `runner` acts, with `target` for the files, `nodes` for what QEMU opens and
//! `mirror` for its jobs. The old volumes are never written or removed.

pub mod bitmaps;
pub mod grow;
pub mod machine;
pub mod made;
pub mod mirror;
pub mod nodes;
pub mod plan;
pub mod record;
pub mod recorded;
pub mod runner;
pub mod standing;
pub mod target;
pub mod verify;
pub mod word;

use std::path::PathBuf;
use std::time::Duration;

use dormouse_storage::ByteCount;
use serde::{Deserialize, Serialize};

/// What is asked for.
#[derive(Debug, Clone)]
pub struct Request {
    /// Which disks go where.
    pub volumes: Vec<Wish>,
    /// The most that is copied in a second, per disk.
    pub speed_limit: Option<ByteCount>,
    /// Whether the switch waits for somebody's word.
    pub by_hand: bool,
    /// Whether the copies are compared before the switch.
    pub verify: bool,
    /// What is done when a new volume is full.
    pub when_full: WhenFull,
    /// How long a volume that is not there is waited for.
    pub wait_for_target: Option<Duration>,
    /// Whether dirty bitmaps that cannot go with their disk may be lost.
    pub drop_bitmaps: bool,
    /// How long it may take.
    pub limits: Limits,
    /// The monitor's socket.
    pub monitor: PathBuf,
    /// Where operations are written down.
    pub operations: PathBuf,
    /// The folder of the record of what the machine is made of.
    pub machine: PathBuf,
    /// The VM's name.
    pub vm_name: String,
}

/// One disk, and where it goes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Wish {
    /// The disk: the id of its device, the name of its node or of its drive, or the file that it has now.
    pub disk: String,
    /// The new volume; an absolute path.
    pub to: PathBuf,
    /// The new volume's format; that of an image that is there is seen.
    #[serde(default)]
    pub format: Option<Format>,
    /// Whether the new volume is made, in the size of the old one.
    #[serde(default)]
    pub create: bool,
}

/// The formats of volumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// The bytes of the disk, as they are.
    Raw,
    /// QEMU's image format.
    Qcow2,
}

impl Format {
    /// What QEMU calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

/// What is done when a new volume is full.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum WhenFull {
    /// The guest stays on its old volumes
    #[default]
    Stop,
    /// The copy pauses, and goes on once there is room
    Wait,
}

/// How long a move may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Until the switch; `None`: as long as it goes on.
    pub total: Option<Duration>,
    /// Without there being less left to copy than ever before.
    pub stall: Duration,
    /// How long the guest's writes may wait for the switch.
    pub freeze: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            total: None,
            stall: Duration::from_secs(120),
            freeze: Duration::from_secs(5),
        }
    }
}

/// How far one disk is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeProgress {
    /// The disk.
    pub disk: String,
    /// The volume that it has, and that counts until the switch.
    pub from: String,
    /// The volume that it gets.
    pub to: PathBuf,
    /// What is copied, in bytes.
    pub done_bytes: u64,
    /// What is to be copied, in bytes; grows while the guest writes.
    pub total_bytes: u64,
    /// Whether the new volume is in step.
    pub ready: bool,
    /// The most that is copied in a second, in bytes; `None`: as much as goes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed_limit_bytes: Option<u64>,
    /// What has been compared, in bytes, while that is done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compared_bytes: Option<u64>,
    /// Whether the guest is on the new volume.
    pub switched: bool,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The disks, as they are now.
    pub volumes: Vec<VolumeProgress>,
    /// How long the guest's writes waited at the most, in milliseconds.
    pub freeze_ms: f64,
    /// How long each phase took, in milliseconds.
    pub timings_ms: Vec<(machine::Phase, f64)>,
    /// What could not be cleaned up or seen, and does no harm.
    pub remarks: Vec<String>,
}
