//! Jobs: what `query-jobs` and `query-block-jobs` tell.

use serde::Deserialize;

use super::open_enum::open_enum;
use super::tolerant;

open_enum! {
    /// Where a job stands.
    pub enum JobStatus {
        /// Made, not started.
        Created = "created",
        /// Running.
        Running = "running",
        /// Paused.
        Paused = "paused",
        /// In step with its source; can be completed.
        Ready = "ready",
        /// Paused while ready.
        Standby = "standby",
        /// Done with its work; waits for the other jobs of its transaction.
        Waiting = "waiting",
        /// Waits for `job-finalize`. The guest's writes to the disk wait with it.
        Pending = "pending",
        /// Undoing what it did.
        Aborting = "aborting",
        /// Ended, and kept until `job-dismiss` so that its result can be read.
        Concluded = "concluded",
        /// Gone.
        Null = "null",
    }
}

open_enum! {
    /// What a job does.
    pub enum JobType {
        /// Commits an overlay into its backing image.
        Commit = "commit",
        /// Copies backing data into an overlay.
        Stream = "stream",
        /// Mirrors a disk.
        Mirror = "mirror",
        /// Copies a disk as of its start.
        Backup = "backup",
        /// Makes an image.
        Create = "create",
        /// Changes an image's options.
        Amend = "amend",
        /// Loads a snapshot.
        SnapshotLoad = "snapshot-load",
        /// Saves a snapshot.
        SnapshotSave = "snapshot-save",
        /// Deletes a snapshot.
        SnapshotDelete = "snapshot-delete",
    }
}

/// An entry of `query-jobs`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct JobInfo {
    /// The id.
    pub id: String,
    /// What the job does.
    #[serde(rename = "type")]
    pub job_type: JobType,
    /// Where it stands.
    pub status: JobStatus,
    /// How far it is, in a unit of its own (bytes for block jobs).
    #[serde(default, deserialize_with = "tolerant")]
    pub current_progress: Option<u64>,
    /// Where `current_progress` is headed; an estimate that may grow.
    #[serde(default, deserialize_with = "tolerant")]
    pub total_progress: Option<u64>,
    /// Why it failed, in QEMU's words; absent while nothing failed.
    #[serde(default, deserialize_with = "tolerant")]
    pub error: Option<String>,
}

/// An entry of `query-block-jobs`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct BlockJobInfo {
    /// The id of the job; for a job started without one, the device.
    #[serde(rename = "device")]
    pub id: String,
    /// What the job does.
    #[serde(rename = "type")]
    pub job_type: JobType,
    /// Where it stands. Absent before QEMU 2.12.
    #[serde(default, deserialize_with = "tolerant")]
    pub status: Option<JobStatus>,
    /// Where `offset_bytes` is headed; an estimate that may grow.
    #[serde(rename = "len", default, deserialize_with = "tolerant")]
    pub length_bytes: Option<u64>,
    /// How far it is.
    #[serde(rename = "offset", default, deserialize_with = "tolerant")]
    pub offset_bytes: Option<u64>,
    /// The speed limit in bytes per second; 0 is none.
    #[serde(rename = "speed", default, deserialize_with = "tolerant")]
    pub speed_bytes_per_second: Option<u64>,
    /// Whether it has requests in flight.
    #[serde(default)]
    pub busy: bool,
    /// Whether it is paused or will be soon.
    #[serde(default)]
    pub paused: bool,
    /// Whether it can be completed.
    #[serde(default)]
    pub ready: bool,
    /// Whether each write of the guest reaches both sides before it is acknowledged. Only mirror
    /// jobs, since QEMU 8.2.
    #[serde(default, deserialize_with = "tolerant")]
    pub actively_synced: Option<bool>,
    /// Whether an I/O error has stopped it.
    #[serde(default, deserialize_with = "tolerant")]
    pub io_status: Option<IoStatus>,
    /// Whether it goes on to its end without `job-finalize`.
    #[serde(default, deserialize_with = "tolerant")]
    pub auto_finalize: Option<bool>,
    /// Whether it disappears at its end without `job-dismiss`.
    #[serde(default, deserialize_with = "tolerant")]
    pub auto_dismiss: Option<bool>,
    /// Why it failed, in QEMU's words.
    #[serde(default, deserialize_with = "tolerant")]
    pub error: Option<String>,
}

open_enum! {
    /// How I/O fares on a device or in a job.
    pub enum IoStatus {
        /// No error.
        Ok = "ok",
        /// An error has stopped it.
        Failed = "failed",
        /// A lack of space has stopped it.
        NoSpace = "nospace",
    }
}

impl JobStatus {
    /// Whether the job's work is over, well or not.
    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::Concluded | Self::Null)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn jobs_of_known_and_unknown_kinds_are_read() {
        let jobs: Vec<JobInfo> = serde_json::from_value(json!([
            {"current-progress": 1048576, "status": "ready", "total-progress": 21474836480u64, "type": "mirror",
             "id": "dormouse-vda"},
            {"status": "concluded", "type": "mirror", "id": "m1", "current-progress": 0, "total-progress": 0,
             "error": "Source and target image have different sizes"},
            {"status": "musing", "type": "defragment", "id": "n1"},
        ]))
        .unwrap();
        assert_eq!(
            (&jobs[0].status, jobs[0].total_progress),
            (&JobStatus::Ready, Some(20 << 30))
        );
        assert!(jobs[1].status.is_terminal() && jobs[1].error.is_some());
        assert_eq!(jobs[2].status, JobStatus::Other("musing".to_owned()));
        assert_eq!(
            (&jobs[2].job_type, jobs[2].current_progress),
            (&JobType::Other("defragment".to_owned()), None)
        );
        assert!(!jobs[2].status.is_terminal());
    }

    #[test]
    fn a_block_job_tells_whether_it_is_in_step() {
        let jobs: Vec<BlockJobInfo> = serde_json::from_value(json!([
            {"auto-finalize": true, "io-status": "ok", "device": "dormouse-vda", "auto-dismiss": false, "busy": false,
             "len": 268435456, "offset": 268435456, "status": "ready", "paused": false, "speed": 0, "ready": true,
             "type": "mirror", "actively-synced": true},
            {"device": "old", "type": "backup", "io-status": "tepid"},
        ]))
        .unwrap();
        assert!(jobs[0].ready);
        assert_eq!(
            (jobs[0].actively_synced, jobs[0].auto_dismiss),
            (Some(true), Some(false))
        );
        assert_eq!(jobs[0].offset_bytes, jobs[0].length_bytes);
        assert_eq!((&jobs[1].status, jobs[1].length_bytes), (&None, None));
        assert_eq!(jobs[1].io_status, Some(IoStatus::Other("tepid".to_owned())));
    }
}
