//! Migration: what `query-migrate` and the `MIGRATION` event tell.

use serde::Deserialize;

use super::open_enum::open_enum;
use super::tolerant;

open_enum! {
    /// Where a migration stands.
    ///
    /// New versions of QEMU put new words between the start and the end (`device` is one), so a
    /// word that is not known means that the migration is in progress.
    pub enum MigrationStatus {
        /// No migration has been started.
        None = "none",
        /// Being set up.
        Setup = "setup",
        /// Being cancelled.
        Cancelling = "cancelling",
        /// Cancelled.
        Cancelled = "cancelled",
        /// Sending memory while the guest runs.
        Active = "active",
        /// Sending memory while the guest runs on the other side.
        PostcopyActive = "postcopy-active",
        /// A postcopy migration has lost its connection and waits for recovery.
        PostcopyPaused = "postcopy-paused",
        /// A postcopy recovery is being set up.
        PostcopyRecoverSetup = "postcopy-recover-setup",
        /// A postcopy migration is recovering.
        PostcopyRecover = "postcopy-recover",
        /// Completed.
        Completed = "completed",
        /// Failed.
        Failed = "failed",
        /// COLO replication is active.
        Colo = "colo",
        /// Waits for `migrate-continue` before the guest is stopped for good.
        PreSwitchover = "pre-switchover",
        /// Sending device state; the guest is stopped.
        Device = "device",
        /// Waits for a device to be unplugged.
        WaitUnplug = "wait-unplug",
    }
}

/// The reply of `query-migrate`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct MigrationInfo {
    /// Where the migration stands; absent when none has been started.
    #[serde(deserialize_with = "tolerant")]
    pub status: Option<MigrationStatus>,
    /// What happened to the guest's memory so far.
    #[serde(deserialize_with = "tolerant")]
    pub ram: Option<MigrationRam>,
    /// The time since the start in milliseconds, or the whole time when it has ended.
    #[serde(rename = "total-time", deserialize_with = "tolerant")]
    pub total_time_ms: Option<u64>,
    /// The time the guest was stopped, in milliseconds; known when the migration has completed.
    #[serde(rename = "downtime", deserialize_with = "tolerant")]
    pub downtime_ms: Option<u64>,
    /// The time the guest would be stopped if it were stopped now, in milliseconds.
    #[serde(rename = "expected-downtime", deserialize_with = "tolerant")]
    pub expected_downtime_ms: Option<u64>,
    /// The time the setup took, in milliseconds.
    #[serde(rename = "setup-time", deserialize_with = "tolerant")]
    pub setup_time_ms: Option<u64>,
    /// How much the guest's CPUs are slowed down, in percent.
    #[serde(rename = "cpu-throttle-percentage", deserialize_with = "tolerant")]
    pub cpu_throttle_percent: Option<u64>,
    /// What went wrong, in QEMU's words.
    #[serde(deserialize_with = "tolerant")]
    pub error_desc: Option<String>,
    /// Why this guest could not be migrated, in QEMU's words; told whether or not a migration was
    /// started. Depends on the migration mode that is set.
    #[serde(deserialize_with = "tolerant")]
    pub blocked_reasons: Option<Vec<String>>,
}

/// Memory within [`MigrationInfo`].
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct MigrationRam {
    /// Bytes put into the migration stream.
    #[serde(rename = "transferred", deserialize_with = "tolerant")]
    pub transferred_bytes: Option<u64>,
    /// Bytes of guest memory.
    #[serde(rename = "total", deserialize_with = "tolerant")]
    pub total_bytes: Option<u64>,
    /// Bytes of guest memory still to be sent; absent once completed in some versions.
    #[serde(rename = "remaining", deserialize_with = "tolerant")]
    pub remaining_bytes: Option<u64>,
    /// Pages that were all zeros and cost next to nothing.
    #[serde(rename = "duplicate", deserialize_with = "tolerant")]
    pub duplicate_pages: Option<u64>,
    /// Pages sent whole.
    #[serde(rename = "normal", deserialize_with = "tolerant")]
    pub normal_pages: Option<u64>,
    /// Bytes of the pages sent whole.
    #[serde(deserialize_with = "tolerant")]
    pub normal_bytes: Option<u64>,
    /// The rate in megabits per second.
    #[serde(rename = "mbps", deserialize_with = "tolerant")]
    pub megabits_per_second: Option<f64>,
    /// How often the dirty bitmap was fetched: the passes over memory.
    #[serde(deserialize_with = "tolerant")]
    pub dirty_sync_count: Option<u64>,
    /// Pages that the guest dirties per second.
    #[serde(rename = "dirty-pages-rate", deserialize_with = "tolerant")]
    pub dirty_pages_per_second: Option<u64>,
    /// Pages sent per second.
    #[serde(deserialize_with = "tolerant")]
    pub pages_per_second: Option<u64>,
    /// The size of a guest page, in bytes.
    #[serde(rename = "page-size", deserialize_with = "tolerant")]
    pub page_size_bytes: Option<u64>,
    /// Bytes sent through multifd channels.
    #[serde(deserialize_with = "tolerant")]
    pub multifd_bytes: Option<u64>,
    /// Bytes sent while the guest ran.
    #[serde(deserialize_with = "tolerant")]
    pub precopy_bytes: Option<u64>,
    /// Bytes sent while the guest was stopped.
    #[serde(deserialize_with = "tolerant")]
    pub downtime_bytes: Option<u64>,
}

/// The data of the event `MIGRATION`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct MigrationEvent {
    /// Where the migration stands now.
    pub status: MigrationStatus,
}

impl MigrationStatus {
    /// Whether the migration has ended, in whatever way.
    pub fn is_terminal(&self) -> bool {
        matches!(self, Self::Completed | Self::Failed | Self::Cancelled)
    }

    /// Whether the migration was started and has not ended. True for words that are not known.
    pub fn is_in_progress(&self) -> bool {
        !self.is_terminal() && *self != Self::None
    }
}

impl MigrationInfo {
    /// Whether a migration was started and has ended.
    ///
    /// An end that is seen here is not yet an end of everything: the run state follows a moment
    /// later.
    pub fn is_terminal(&self) -> bool {
        self.status.as_ref().is_some_and(MigrationStatus::is_terminal)
    }

    /// Whether a migration was started and has not ended.
    pub fn is_in_progress(&self) -> bool {
        self.status.as_ref().is_some_and(MigrationStatus::is_in_progress)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn read(reply: Value) -> MigrationInfo {
        serde_json::from_value(reply).unwrap()
    }

    #[test]
    fn a_running_migration_tells_its_memory() {
        let info = read(json!({
            "expected-downtime": 300, "status": "active", "setup-time": 3, "total-time": 1203,
            "ram": {"total": 17196711936u64, "postcopy-requests": 0, "dirty-sync-count": 1, "multifd-bytes": 0,
                    "pages-per-second": 32710, "downtime-bytes": 0, "page-size": 4096, "remaining": 15032385536u64,
                    "postcopy-bytes": 0, "mbps": 1073.32, "transferred": 161406976, "dirty-sync-missed-zero-copy": 0,
                    "precopy-bytes": 161406976, "duplicate": 489021, "dirty-pages-rate": 0, "normal-bytes": 156672000,
                    "normal": 38250},
        }));
        assert!(info.is_in_progress());
        let ram = info.ram.unwrap();
        assert_eq!(
            (ram.total_bytes, ram.remaining_bytes),
            (Some(17_196_711_936), Some(15_032_385_536))
        );
        assert_eq!(
            (ram.duplicate_pages, ram.normal_pages),
            (Some(489_021), Some(38_250))
        );
        assert_eq!(ram.megabits_per_second, Some(1073.32));
    }

    #[test]
    fn a_completed_migration_needs_no_remaining() {
        let info =
            read(json!({"status": "completed", "downtime": 14, "total-time": 5211, "ram": {"total": 4096}}));
        assert!(info.is_terminal() && !info.is_in_progress());
        assert_eq!(
            (info.downtime_ms, info.ram.unwrap().remaining_bytes),
            (Some(14), None)
        );
    }

    #[test]
    fn blocked_reasons_are_told_without_a_migration() {
        let info = read(
            json!({"blocked-reasons": ["State blocked by non-migratable device '0000:00:03.0/ivshmem'"]}),
        );
        assert_eq!(info.status, None);
        assert!(!info.is_terminal() && !info.is_in_progress());
        assert_eq!(info.blocked_reasons.unwrap().len(), 1);
    }

    #[test]
    fn a_status_that_is_not_known_is_in_progress() {
        for word in ["failing", "postcopy-device", "of-a-later-day"] {
            let info = read(json!({"status": word}));
            assert_eq!(info.status, Some(MigrationStatus::Other(word.to_owned())));
            assert!(info.is_in_progress() && !info.is_terminal(), "{word}");
        }
    }

    #[test]
    fn a_number_that_is_no_number_any_more_reads_as_absent() {
        let info = read(
            json!({"status": "failed", "error-desc": "Unable to write", "total-time": -1, "downtime": "?"}),
        );
        assert_eq!((info.total_time_ms, info.downtime_ms), (None, None));
        assert_eq!(info.error_desc.as_deref(), Some("Unable to write"));
        assert!(info.is_terminal());
    }
}
