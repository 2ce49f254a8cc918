//! What may be said to a move under way.

use dormouse_storage::ByteCount;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;

/// What is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Said {
    /// The volumes may be switched now.
    Complete,
    /// So much may be copied in a second and per disk from now on, in bytes; `None`: as much as goes.
    Speed(Option<u64>),
}

/// Something that is said, to be answered with whether it made a difference.
#[derive(Debug)]
pub struct Word {
    /// That.
    pub said: Said,
    /// Who waits for the answer.
    pub answer: oneshot::Sender<bool>,
}

/// A speed as QEMU has it: 0 is no limit.
pub fn for_qemu(speed: Option<ByteCount>) -> u64 {
    speed.map_or(0, |speed| speed.0)
}
