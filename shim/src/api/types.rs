//! What the world sees of a VM and its operations. The machines do not know these types.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use dormouse_storage::{Compression, ImageKey};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use uuid::Uuid;
use zeroize::Zeroizing;

use super::snapshot::{NewSnapshot, Snapshot};
use crate::error::{Code, Disposition, Failure, GuestState};
use crate::machine::effect::milliseconds;
use crate::machine::hibernate::machine::CancelAnswer;
use crate::machine::volume::grow::Grown;
use crate::machine::volume::{VolumeProgress, WhenFull, Wish as VolumeWish};
use crate::machine::wake::feeding::{State, View};
use crate::machine::wake::follow_up::FollowUp;
use crate::machine::{hibernate, suspend, volume, wake};
use crate::supervisor::request_queue::{Ask, Priority};
use crate::vm::engine::{Choice, Wish};
use crate::vm::ram_home::Pages;

/// A VM.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Vm {
    /// Its name.
    pub name: String,
    /// The supervisor's process.
    pub supervisor_pid: u32,
    /// QEMU's process.
    pub pid: u32,
    /// QEMU's run state, in QEMU's words.
    pub run_state: String,
    /// QEMU's version.
    pub qemu_version: String,
    /// Where its RAM is.
    pub ram: Ram,
    /// The operation that runs or ran last.
    pub operation: Option<Operation>,
    /// How it was woken, if it was.
    pub woken: Option<Woken>,
    /// How far its memory is, if it was woken before that was there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub feed: Option<MemoryFeed>,
}

/// Memory that comes to a guest while it runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MemoryFeed {
    /// How it stands.
    pub state: FeedState,
    /// All of the guest's memory, in bytes.
    pub total_bytes: u64,
    /// What it has of it, in bytes.
    pub fed_bytes: u64,
    /// How much came in a second, so far or in all.
    pub bytes_per_second: u64,
    /// How long the rest will take at that pace, in milliseconds.
    pub remaining_ms: Option<u64>,
    /// How often the guest waited for a page and got it.
    pub answers: u64,
    /// Half of the answers took no longer, in microseconds.
    pub answer_p50_us: Option<u64>,
    /// 99 of 100 answers took no longer, in microseconds.
    pub answer_p99_us: Option<u64>,
    /// Memory that cannot be had: the guest stands where it needs it.
    pub damaged: Vec<DamagedMemory>,
    /// Why not all of it came, where that is so.
    pub error: Option<Problem>,
}

/// How a feed stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FeedState {
    /// Memory is coming.
    Feeding,
    /// Some of it cannot be had from the image: the guest stands where it needs it. All else is coming, or there.
    Damaged,
    /// All is there.
    Complete,
    /// Not all will be.
    Failed,
}

/// Memory that the image does not give.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DamagedMemory {
    /// Its RAM block.
    pub block: String,
    /// Where in it, in bytes.
    pub offset: u64,
    /// How much, in bytes.
    pub length: u64,
    /// Why.
    pub why: String,
    /// Whether it may come yet: storage did not give it, and is asked again.
    pub may_come: bool,
}

impl From<&View> for MemoryFeed {
    fn from(view: &View) -> Self {
        let (state, numbers, damage) = view.state();
        let (pace, rest) = view.pace();
        let error = view.failure();
        let micros = |time: Option<Duration>| Some(time?.as_micros().try_into().unwrap_or(u64::MAX));
        Self {
            total_bytes: numbers.total.0,
            fed_bytes: numbers.fed.0,
            bytes_per_second: pace.0,
            remaining_ms: rest.map(|rest| rest.as_millis().try_into().unwrap_or(u64::MAX)),
            answers: numbers.answers,
            answer_p50_us: micros(numbers.half_within),
            answer_p99_us: micros(numbers.nearly_all_within),
            state: match state {
                State::Feeding if damage.is_empty() => FeedState::Feeding,
                State::Feeding => FeedState::Damaged,
                State::Complete(_) => FeedState::Complete,
                State::Failed(_) => FeedState::Failed,
            },
            error: error.as_ref().map(Problem::from),
            damaged: damage
                .into_iter()
                .map(|damage| DamagedMemory {
                    block: damage.block,
                    offset: damage.offset,
                    length: damage.length.0,
                    why: damage.why,
                    may_come: damage.may_come,
                })
                .collect(),
        }
    }
}

/// Where a guest's RAM is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Ram {
    /// In shared files: the direct engine can save it.
    Shared {
        /// The pages that it is made of.
        pages: Pages,
    },
    /// Mapped privately from an image: the stream engine saves it.
    MappedFromImage,
    /// Wherever the user's command line puts it.
    AsGiven,
}

/// How a guest was woken.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Woken {
    /// The image.
    pub image: PathBuf,
    /// Its id.
    pub image_id: Uuid,
    /// The operation that made the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operation: Option<Uuid>,
    /// How RAM came back.
    pub mode: wake::Mode,
    /// Why in no better way, where none was wished for.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub passed_over: Vec<String>,
    /// From QEMU's start to a guest that runs, in milliseconds.
    pub start_to_running_ms: f64,
    /// How long each phase took, in milliseconds.
    pub timings_ms: BTreeMap<String, f64>,
    /// What differed of the disks, and was let through by `--force-disks`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub forced_disks: Vec<String>,
    /// What was done for the guest once it ran.
    #[serde(default)]
    pub follow_up: FollowUp,
}

/// A wish for an operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
pub enum NewOperation {
    /// Save the guest into an image and end QEMU.
    Hibernate {
        /// Where the image goes; an absolute path.
        to: PathBuf,
        /// The mount point of the volume that the image has to go to: refused where none is mounted there.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        volume_mount: Option<PathBuf>,
        /// Whether an image that is there already may be replaced.
        #[serde(default)]
        replace: bool,
        /// How RAM gets into it.
        #[serde(default)]
        engine: Wish,
        /// Channels beside the main stream, where RAM comes from QEMU.
        #[serde(default)]
        channels: Option<u8>,
        /// Whether RAM is compressed: `none`, `auto`, `zstd` or `zstd:LEVEL`.
        #[serde(default, with = "compression")]
        compress: Compression,
        /// The key that the image is encrypted with, as 64 hexadecimal digits.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        key: Option<Key>,
        /// The most that is written in a second, in bytes.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rate_limit_bytes: Option<u64>,
        /// How long it may take until the image is complete, in milliseconds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        timeout_ms: Option<u64>,
        /// How long it may go without progress, in milliseconds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stall_timeout_ms: Option<u64>,
    },
    /// Save the guest into an image, and let it go on.
    Snapshot(NewSnapshot),
    /// Have the guest save itself onto its own disk, by its agent, and power off; then QEMU ends. There is no image.
    SuspendToDisk {
        /// The guest agent's socket, an absolute path; without it, the one that QEMU has for it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        agent: Option<PathBuf>,
        /// How long the guest may take, in milliseconds.
        limit_ms: u64,
    },
    /// Replace volumes under the running guest by copies of them.
    MoveVolumes {
        /// Which disks go where.
        volumes: Vec<VolumeWish>,
        /// The most that is copied in a second, in bytes, per disk.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        speed_limit_bytes: Option<u64>,
        /// Whether the volumes are only switched when that is asked for.
        #[serde(default)]
        complete_by_hand: bool,
        /// Whether dirty bitmaps that cannot go with their disk may be lost.
        #[serde(default)]
        drop_bitmaps: bool,
        /// Whether the copies are compared before the switch.
        #[serde(default)]
        verify: bool,
        /// What is done when a new volume is full.
        #[serde(default)]
        when_full: WhenFull,
        /// How long a volume that is not there is waited for, in milliseconds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        wait_for_target_ms: Option<u64>,
        /// How long it may take until the switch, in milliseconds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        timeout_ms: Option<u64>,
        /// How long it may go without there being less to copy than ever before, in milliseconds.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stall_timeout_ms: Option<u64>,
    },
    /// Let a disk of the running guest become larger.
    GrowVolume {
        /// The disk.
        disk: String,
        /// Its new size, in bytes; without it, all of its volume.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        size_bytes: Option<u64>,
    },
}

/// On which terms an operation is asked for. They are no part of what it does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Terms {
    /// The operation's id, chosen by who asks: the same request again with the same id joins the operation, whether it
    /// runs or has ended. Without one it gets a new one.
    pub id: Option<Uuid>,
    /// How much it matters: it has one that matters less cancelled.
    pub priority: Priority,
    /// How long it may wait for another one that is under way, in milliseconds.
    pub patience_ms: u64,
}

impl Terms {
    /// A request on these terms.
    pub fn of(self, wish: NewOperation) -> Ask {
        Ask {
            id: self.id.unwrap_or_else(Uuid::new_v4),
            priority: self.priority,
            patience: Duration::from_millis(self.patience_ms),
            wish,
        }
    }
}

impl NewOperation {
    /// What it does, in words.
    pub fn title(&self) -> String {
        match self {
            Self::Hibernate { to, .. } => format!("hibernation to {}", to.display()),
            Self::Snapshot(snapshot) => format!("snapshot to {}", snapshot.to.display()),
            Self::SuspendToDisk { .. } => "suspend to disk".to_owned(),
            Self::MoveVolumes { volumes, .. } => {
                let to: Vec<String> = volumes
                    .iter()
                    .map(|volume| format!("{} to {}", volume.disk, volume.to.display()))
                    .collect();
                format!("move of {}", to.join(", "))
            }
            Self::GrowVolume { disk, .. } => format!("growth of {disk}"),
        }
    }

    /// Its kind.
    pub fn kind(&self) -> OperationKind {
        match self {
            Self::Hibernate { .. } => OperationKind::Hibernate,
            Self::Snapshot(_) => OperationKind::Snapshot,
            Self::SuspendToDisk { .. } => OperationKind::SuspendToDisk,
            Self::MoveVolumes { .. } => OperationKind::MoveVolumes,
            Self::GrowVolume { .. } => OperationKind::GrowVolume,
        }
    }
}

/// The key of an image. It is never shown but to whom it is sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Key(pub ImageKey);

impl Serialize for Key {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0.to_hex())
    }
}

impl<'de> Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let digits = Zeroizing::new(String::deserialize(deserializer)?);
        ImageKey::from_file_content(digits.as_bytes())
            .map(Self)
            .map_err(D::Error::custom)
    }
}

pub(super) mod compression {
    use dormouse_storage::Compression;
    use serde::de::Error;
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(compression: &Compression, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(compression)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Compression, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(D::Error::custom)
    }
}

/// What an image is written to, and how.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Storage {
    /// `file` or `block device`.
    pub kind: String,
    /// `io_uring`, `pwrite`, or `buffered` where the page cache cannot be passed by.
    pub backend: String,
}

impl From<hibernate::Storage> for Storage {
    fn from(storage: hibernate::Storage) -> Self {
        Self {
            kind: storage.kind.to_string(),
            backend: storage.backend.to_string(),
        }
    }
}

/// The kinds of operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OperationKind {
    /// The guest goes into an image.
    Hibernate,
    /// A copy of the guest goes into an image.
    Snapshot,
    /// The guest saves itself.
    SuspendToDisk,
    /// The guest gets other volumes.
    MoveVolumes,
    /// A disk becomes larger.
    GrowVolume,
}

/// An operation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Operation {
    /// Its id.
    pub id: Uuid,
    /// Its kind.
    pub kind: OperationKind,
    /// Counts the changes that a watcher has seen.
    pub version: u64,
    /// Where it is, in the words of its kind: `Preflight`, `SavingMemory` and so on.
    pub phase: String,
    /// How RAM gets into the image, once that is known.
    pub choice: Option<Choice>,
    /// What the image is on, once it is begun.
    pub storage: Option<Storage>,
    /// RAM that is dealt with, in bytes.
    pub done_bytes: u64,
    /// RAM that is to be dealt with, in bytes.
    pub total_bytes: u64,
    /// The volumes that are moved: which one counts, and how far each is.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<VolumeProgress>,
    /// What it waits for, where that is somebody's to do: room on a volume, or a volume.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting: Option<String>,
    /// What came of it, once it ended well.
    pub result: Option<Ending>,
    /// Why it failed, once it did.
    pub error: Option<Problem>,
}

impl Operation {
    /// Whether it ended well, and left no guest to do anything with.
    pub fn ended_the_guest(&self) -> bool {
        self.result.as_ref().is_some_and(Ending::is_of_the_guest)
    }
}

/// What came of an operation that ended well.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Ending {
    /// The guest is in an image.
    Hibernated(Box<Hibernated>),
    /// A copy of the guest is in an image.
    Snapshot(Box<Snapshot>),
    /// The guest is on its own disk.
    SuspendedToDisk(SuspendedToDisk),
    /// The guest is on its new volumes.
    VolumesMoved(VolumesMoved),
    /// A disk is larger.
    VolumeGrown(VolumeGrown),
}

/// What came of a move of volumes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct VolumesMoved {
    /// `volumes-moved`.
    pub result: VolumesMovedTag,
    /// The disks, as they are now.
    pub volumes: Vec<VolumeProgress>,
    /// How long the guest's writes waited for the switch at the most, in milliseconds.
    pub freeze_ms: f64,
    /// How long each phase took, in milliseconds.
    pub timings_ms: BTreeMap<String, f64>,
    /// What could not be cleaned up or seen, and does no harm.
    pub remarks: Vec<String>,
}

/// The word that tells results apart in a stream of JSON lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VolumesMovedTag {
    /// The guest is on its new volumes, and the old ones are let go.
    VolumesMoved,
}

/// What came of a growth.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeGrown {
    /// `volume-grown`.
    pub result: VolumeGrownTag,
    /// The disk.
    pub disk: String,
    /// Its volume.
    pub volume: PathBuf,
    /// Its size before, in bytes.
    pub from_bytes: u64,
    /// Its size now, in bytes.
    pub to_bytes: u64,
}

/// The word that tells results apart in a stream of JSON lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VolumeGrownTag {
    /// The disk is larger, and the guest was told.
    VolumeGrown,
}

impl From<Grown> for VolumeGrown {
    fn from(grown: Grown) -> Self {
        Self {
            result: VolumeGrownTag::VolumeGrown,
            disk: grown.disk,
            volume: grown.volume,
            from_bytes: grown.from_bytes,
            to_bytes: grown.to_bytes,
        }
    }
}

impl Ending {
    /// Whether it is the guest's end too.
    pub fn is_of_the_guest(&self) -> bool {
        !matches!(
            self,
            Self::Snapshot(_) | Self::VolumesMoved(_) | Self::VolumeGrown(_)
        )
    }
}

/// What came of a suspend to disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SuspendedToDisk {
    /// `suspended-to-disk`.
    pub result: SuspendedTag,
    /// The guest agent's socket.
    pub agent: PathBuf,
    /// Whether the machine itself saw the guest go to ACPI S4; a guest may also save itself and power off plainly, which
    /// looks like any other power-off.
    pub by_s4: bool,
    /// From the command to a guest that is off, in milliseconds.
    pub power_off_ms: f64,
}

/// The word that tells results apart in a stream of JSON lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SuspendedTag {
    /// The guest has powered off and QEMU is gone.
    SuspendedToDisk,
}

/// What came of a hibernation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Hibernated {
    /// `hibernated`.
    pub result: HibernatedTag,
    /// The image.
    pub image: PathBuf,
    /// Its id.
    pub image_id: Uuid,
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
    /// From the stop of the vCPUs to a sealed image, in milliseconds; not known of a hibernation by an earlier command.
    pub pause_ms: Option<f64>,
    /// How long each phase took, in milliseconds.
    pub timings_ms: BTreeMap<String, f64>,
}

/// The word that tells results apart in a stream of JSON lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HibernatedTag {
    /// The guest is in the image and QEMU is gone.
    Hibernated,
}

/// The answer to a cancel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cancelled {
    /// What will come of it.
    pub answer: CancelAnswer,
}

/// A new speed for what is being copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NewSpeed {
    /// The most that is copied in a second, in bytes, per disk; `null`: as much as goes.
    pub bytes_per_second: Option<u64>,
}

/// The answer to a new speed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpeedChanged {
    /// Whether there was still something to be copied.
    pub in_time: bool,
}

/// The answer to the word that volumes may be switched now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Completed {
    /// Whether that was waited for; else they are switched without it.
    pub was_waited_for: bool,
}

/// A failure, as RFC 9457 has it, with what a program needs beside.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Problem {
    /// The HTTP status.
    pub status: u16,
    /// The kind of failure; stable.
    pub code: Code,
    /// Who can do something about it.
    pub disposition: Disposition,
    /// What the guest does.
    pub guest: GuestState,
    /// One sentence for a person.
    pub detail: String,
    /// From a cancel, or a limit that was reached, until the guest was given back, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given_back_ms: Option<f64>,
}

impl From<&Failure> for Problem {
    fn from(failure: &Failure) -> Self {
        let status = match failure.code {
            Code::Usage => 400,
            Code::Refused | Code::ImageInvalid | Code::Cancelled => 409,
            Code::TimedOut => 504,
            Code::Unreachable => 502,
            Code::NoSpace => 507,
            Code::Internal | Code::StorageIo | Code::Operator => 500,
        };
        Self {
            status,
            code: failure.code,
            disposition: failure.code.disposition(),
            guest: failure.guest,
            detail: failure.message.clone(),
            given_back_ms: failure.given_back_after.map(milliseconds),
        }
    }
}

impl From<Problem> for Failure {
    fn from(problem: Problem) -> Self {
        Self {
            code: problem.code,
            guest: problem.guest,
            message: problem.detail,
            given_back_after: problem
                .given_back_ms
                .and_then(|ms| Duration::try_from_secs_f64(ms / 1000.0).ok()),
        }
    }
}

impl From<hibernate::Report> for Hibernated {
    fn from(report: hibernate::Report) -> Self {
        Self {
            result: HibernatedTag::Hibernated,
            image: report.image,
            image_id: report.image_id,
            choice: report.choice,
            storage: report.storage.into(),
            data_bytes: report.data.0,
            stored_bytes: report.stored.0,
            zero_bytes: report.zero.0,
            pause_ms: Some(report.pause_ms),
            timings_ms: by_name(&report.timings_ms),
        }
    }
}

impl From<suspend::Report> for SuspendedToDisk {
    fn from(report: suspend::Report) -> Self {
        Self {
            result: SuspendedTag::SuspendedToDisk,
            agent: report.agent,
            by_s4: report.by_s4,
            power_off_ms: report.power_off_ms,
        }
    }
}

impl Woken {
    /// What a person is told of it.
    pub fn describe(&self) -> String {
        let mode = serde_json::to_value(self.mode).unwrap_or_default();
        let mode = mode.as_str().unwrap_or_default();
        let split: Vec<String> = SPLIT
            .iter()
            .filter_map(|(phase, told)| Some(format!("{told} {:.0}", self.timings_ms.get(*phase)?)))
            .collect();
        format!(
            "by {mode}, {:.0} ms from QEMU's start to running ({} ms)",
            self.start_to_running_ms,
            split.join(", ")
        ) + if self.follow_up.clock_set {
            "; its clock was set"
        } else {
            ""
        } + &self
            .forced_disks
            .iter()
            .map(|what| format!("; in spite of its disks (--force-disks): {what}"))
            .chain(self.passed_over.iter().map(|why| format!("\n{why}")))
            .collect::<String>()
    }
}

/// The phases of a wake that a person is told of.
const SPLIT: [(&str, &str); 6] = [
    ("Preparing", "memory"),
    ("Starting", "start"),
    ("Checking", "check"),
    ("Loading", "load"),
    ("Marking", "mark"),
    ("Resuming", "resume"),
];

impl From<volume::Report> for VolumesMoved {
    fn from(report: volume::Report) -> Self {
        Self {
            result: VolumesMovedTag::VolumesMoved,
            volumes: report.volumes,
            freeze_ms: report.freeze_ms,
            timings_ms: by_name(&report.timings_ms),
            remarks: report.remarks,
        }
    }
}

impl From<wake::Report> for Woken {
    fn from(report: wake::Report) -> Self {
        Self {
            image: report.image,
            image_id: report.image_id,
            operation: None,
            mode: report.mode,
            start_to_running_ms: report.start_to_running_ms,
            passed_over: report.passed_over,
            forced_disks: report.forced_disks,
            follow_up: report.follow_up,
            timings_ms: by_name(&report.timings_ms),
        }
    }
}

pub(super) fn by_name<P: std::fmt::Debug>(timings: &[(P, f64)]) -> BTreeMap<String, f64> {
    timings
        .iter()
        .map(|(phase, elapsed)| (format!("{phase:?}"), *elapsed))
        .collect()
}
