//! What is asked of a snapshot, and what is told of it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use dormouse_storage::Compression;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::types::{Key, Storage, by_name, compression};
use crate::error::GuestState;
use crate::machine::hibernate;
use crate::machine::hibernate::live::{LiveLimits, Passes};
use crate::vm::engine::{Choice, Wish};

/// A wish for a snapshot. What it has in common with a hibernation means the same there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewSnapshot {
    /// Where the image goes; an absolute path.
    pub to: PathBuf,
    /// The mount point of the volume that the image has to go to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volume_mount: Option<PathBuf>,
    /// Whether an image that is there already may be replaced.
    #[serde(default)]
    pub replace: bool,
    /// How RAM gets into it.
    #[serde(default)]
    pub engine: Wish,
    /// Channels beside the main stream, where RAM comes from QEMU.
    #[serde(default)]
    pub channels: Option<u8>,
    /// Whether RAM is compressed: `none`, `auto`, `zstd` or `zstd:LEVEL`.
    #[serde(default, with = "compression")]
    pub compress: Compression,
    /// The key that the image is encrypted with, as 64 hexadecimal digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<Key>,
    /// The most that is written in a second, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate_limit_bytes: Option<u64>,
    /// How long it may take until the image is complete, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_ms: Option<u64>,
    /// How long it may go without progress, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stall_timeout_ms: Option<u64>,
    /// Whether the guest stands still after it, until somebody runs it.
    #[serde(default)]
    pub leave_paused: bool,
    /// Whether the guest runs while it is saved, and how long it may be paused then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub live: Option<NewLive>,
}

/// What is asked of a snapshot of a guest that runs meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewLive {
    /// The pause to aim at, in milliseconds.
    pub max_pause_ms: u64,
    /// Passes over its memory after which the guest is paused in any case.
    pub max_passes: u64,
    /// How long it runs meanwhile before it is paused in any case, in milliseconds.
    pub max_time_ms: u64,
}

impl From<NewLive> for LiveLimits {
    fn from(live: NewLive) -> Self {
        Self {
            max_pause: Duration::from_millis(live.max_pause_ms),
            max_passes: live.max_passes,
            max_time: Duration::from_millis(live.max_time_ms),
        }
    }
}

/// What came of a snapshot.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    /// `snapshot`.
    pub result: SnapshotTag,
    /// The image.
    pub image: PathBuf,
    /// Its id.
    pub image_id: Uuid,
    /// What the guest does now.
    pub guest: GuestState,
    /// How RAM got into it, and why no better way was taken.
    #[serde(flatten)]
    pub choice: Choice,
    /// What the image is on.
    pub storage: Storage,
    /// RAM that held something, in bytes.
    pub data_bytes: u64,
    /// What was written for it, in bytes: less, if it was compressed.
    pub stored_bytes: u64,
    /// RAM that was zero and was not written, in bytes.
    pub zero_bytes: u64,
    /// How it went, if the guest ran while it was saved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub live: Option<Passes>,
    /// From the stop of the vCPUs until the guest was given back, in milliseconds; not known of a snapshot by an earlier command.
    pub pause_ms: Option<f64>,
    /// From the beginning to a sealed image, in milliseconds; not known of a snapshot by an earlier command.
    pub sealed_after_ms: Option<f64>,
    /// How long each phase took, in milliseconds.
    pub timings_ms: BTreeMap<String, f64>,
}

/// The word that tells results apart in a stream of JSON lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SnapshotTag {
    /// A copy of the guest is in the image, and the guest went on.
    Snapshot,
}

impl From<hibernate::Report> for Snapshot {
    fn from(report: hibernate::Report) -> Self {
        Self {
            result: SnapshotTag::Snapshot,
            image: report.image,
            image_id: report.image_id,
            guest: report.guest,
            choice: report.choice,
            storage: report.storage.into(),
            data_bytes: report.data.0,
            stored_bytes: report.stored.0,
            zero_bytes: report.zero.0,
            live: report.live,
            pause_ms: Some(report.pause_ms),
            sealed_after_ms: Some(report.sealed_after_ms),
            timings_ms: by_name(&report.timings_ms),
        }
    }
}
