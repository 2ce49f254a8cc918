//! What a hibernation would take, found out without touching the guest: `--dry-run`.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use dormouse_qmp::Client;
use dormouse_storage::{ByteCount, Progress, Run, WORKER_THREADS, try_volume};
use serde::{Deserialize, Serialize};

use super::Request;
use super::plan::preflight;
use crate::error::Failure;
use crate::machine::effect::{blocking, milliseconds};
use crate::vm::diagnosis::{MemoryFinding, measure};
use crate::vm::engine::Choice;
use crate::vm::memory::DEVICE_STATE_BOUND;

/// What a file system keeps of a volume for itself: ext4 reserves 5 % for root and takes some 2 % for its tables and its
/// journal; others take less. A share of the volume, not of what is stored in it.
const FILE_SYSTEM_SHARE: f64 = 0.08;

const MIB: u64 = 1 << 20;

/// What a hibernation would take.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Forecast {
    /// `dry-run`.
    pub result: Tag,
    /// How RAM would get into the image, and why no better way would be taken.
    #[serde(flatten)]
    pub choice: Choice,
    /// Whether the guest runs now.
    pub running: bool,
    /// The guest's memory.
    pub memory: MemoryFinding,
    /// The most that the image can take, which is what is allocated before the guest is stopped, in bytes.
    pub needed_bytes: u64,
    /// What it would likely take once it is complete, in bytes; `None` where the memory cannot be looked at.
    pub likely_bytes: Option<u64>,
    /// Room at the target: on a file system what is free, where it tells; of a block device its size; in bytes.
    pub available_bytes: Option<u64>,
    /// `file` or `block device`.
    pub kind: String,
    /// How RAM would be written, where that was tried.
    pub backend: Option<String>,
    /// Size to ask for of a volume with a file system for this one image, in bytes.
    pub filesystem_volume_bytes: u64,
    /// Size to ask for of a raw block volume, in bytes.
    pub block_volume_bytes: u64,
    /// What the volume took in a second when some was written to it just now; `None` for a block device.
    pub write_bytes_per_second: Option<f64>,
    /// What stands in nobody's way, and is good to know before.
    #[serde(default)]
    pub remarks: Vec<String>,
    /// How long the guest would stand still, in milliseconds, by that and by what the image would likely take.
    pub expected_pause_ms: Option<f64>,
}

/// The word that tells results apart in a stream of JSON lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tag {
    /// Nothing was done.
    DryRun,
}

/// Does the whole preflight, allocates the space and gives it back, and writes a little.
pub async fn forecast(client: &Client, request: &Request) -> Result<Forecast, Failure> {
    let plan = preflight(client, request).await?;
    let needed = plan.layout.hard_bound(DEVICE_STATE_BOUND);
    let memory = measure(&plan.memory)?;
    let target = request.target.clone();
    let trial = blocking(move || {
        let run = Run {
            threads: WORKER_THREADS,
            progress: &Arc::new(Progress::default()),
            cancelled: &AtomicBool::new(false),
        };
        Ok(try_volume(&target, needed, &run)?)
    })
    .await?;
    let likely = memory.touched_bytes.map(|touched| touched + memory.device_bytes);
    let rate = trial.written.map(|(written, took)| {
        let own = written.0 as f64 / took.as_secs_f64().max(1e-6);
        request
            .image
            .rate_limit
            .map_or(own, |limit| own.min(limit.0 as f64))
    });
    let pause = rate.map(|rate| {
        let bytes = likely.unwrap_or(memory.guest_bytes) as f64;
        milliseconds(std::time::Duration::from_secs_f64(bytes / rate))
    });
    Ok(Forecast {
        result: Tag::DryRun,
        choice: plan.choice,
        remarks: plan.remarks,
        running: plan.running,
        memory,
        needed_bytes: needed.0,
        likely_bytes: likely,
        available_bytes: trial.available.map(|available| available.0),
        kind: trial.kind.to_string(),
        backend: trial.backend.map(|backend| backend.to_string()),
        filesystem_volume_bytes: filesystem_volume(needed).0,
        block_volume_bytes: needed.0.next_multiple_of(MIB),
        write_bytes_per_second: rate,
        expected_pause_ms: pause,
    })
}

/// A volume of which so much is left when its file system has taken its share.
fn filesystem_volume(needed: ByteCount) -> ByteCount {
    let volume = needed.0 as f64 / (1.0 - FILE_SYSTEM_SHARE);
    ByteCount((volume.ceil() as u64).next_multiple_of(MIB))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_has_room_for_the_image_when_the_file_system_has_taken_its_share() {
        for gib in [1, 32, 1024] {
            let needed = ByteCount::gib(gib);
            let volume = filesystem_volume(needed);
            let left = volume.0 as f64 * (1.0 - FILE_SYSTEM_SHARE);
            assert!(
                left >= needed.0 as f64 && left < needed.0 as f64 + 2.0 * MIB as f64,
                "{volume}"
            );
        }
    }
}
