//! What can be said to a guest agent: the commands of QEMU's `qga/qapi-schema.json` that are spoken
//! here, as types.
//!
//! Whether an agent knows and allows a command is for `guest-info` to say. A command that is missing
//! here is a struct of one's own away, or goes through
//! [`Agent::execute_raw`](super::Agent::execute_raw).

use serde::de::{DeserializeOwned, IgnoredAny};
use serde::{Deserialize, Serialize};

use crate::view::guest::{FsfreezeStatus, GuestAgentInfo};

/// A command for a guest agent, written as its arguments.
pub trait GuestCommand: Serialize {
    /// Its name.
    const NAME: &'static str;
    /// What it returns.
    type Reply: DeserializeOwned;
}

/// A reply that says nothing but success.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(from = "IgnoredAny")]
pub struct Done;

impl From<IgnoredAny> for Done {
    fn from(_: IgnoredAny) -> Self {
        Self
    }
}

/// Asks for a sign of life.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct GuestPing {}

/// Asks for the agent's version and commands.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct GuestInfo {}

/// Sets the guest's clock, and its real-time clock after it.
///
/// A guest that was saved and loaded does not know that time has passed, and the gap may be too
/// large for NTP.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct GuestSetTime {
    /// Nanoseconds since the epoch, UTC. Absent, the guest takes the time of its real-time clock,
    /// which not every guest can (Windows cannot).
    #[serde(rename = "time", skip_serializing_if = "Option::is_none")]
    pub time_ns: Option<i64>,
}

/// Asks whether the file systems are frozen.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct GuestFsfreezeStatus {}

/// Syncs and freezes all local file systems; returns how many are frozen. On an error all are
/// thawed. Windows thaws them by itself after ten seconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct GuestFsfreezeFreeze {}

/// Thaws all frozen file systems; returns how many. Another number than that of the freeze means
/// that somebody else thawed some.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct GuestFsfreezeThaw {}

impl GuestCommand for GuestPing {
    const NAME: &'static str = "guest-ping";
    type Reply = Done;
}

impl GuestCommand for GuestInfo {
    const NAME: &'static str = "guest-info";
    type Reply = GuestAgentInfo;
}

impl GuestCommand for GuestSetTime {
    const NAME: &'static str = "guest-set-time";
    type Reply = Done;
}

impl GuestCommand for GuestFsfreezeStatus {
    const NAME: &'static str = "guest-fsfreeze-status";
    type Reply = FsfreezeStatus;
}

impl GuestCommand for GuestFsfreezeFreeze {
    const NAME: &'static str = "guest-fsfreeze-freeze";
    type Reply = u64;
}

impl GuestCommand for GuestFsfreezeThaw {
    const NAME: &'static str = "guest-fsfreeze-thaw";
    type Reply = u64;
}
