//! What is written down of a hibernation or a snapshot: all that somebody else needs to end it well.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::machine::hibernate::machine::Aim;
use crate::vm::monitor::MigrationSettings;
use crate::vm::process_identity::ProcessIdentity;

/// The form of a record that this version writes, and the newest that it reads.
pub const FORM: u32 = 2;

/// A hibernation under way.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The record's form: a later one may mean something else.
    pub form: u32,
    /// What it is; the first form knew only hibernations.
    #[serde(default)]
    pub aim: Aim,
    /// The operation.
    pub operation: Uuid,
    /// The VM's name.
    pub vm_name: String,
    /// Where the image goes.
    pub target: PathBuf,
    /// The image's id, by which its remains are told from other images.
    pub image_id: Uuid,
    /// The monitor's socket.
    pub monitor: PathBuf,
    /// QEMU's process.
    pub qemu: ProcessIdentity,
    /// Whether the vCPUs ran before.
    pub was_running: bool,
    /// Migration settings as they were before.
    pub settings: MigrationSettings,
    /// How far it is.
    pub point: Point,
}

/// How far a hibernation is. Each is written down before what it announces is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Point {
    /// The image is begun, the guest stopped, memory read. There is no whole image.
    Saving,
    /// From now on the image may be sealed. The guest of a snapshot has been given back.
    Sealing,
    /// The image is sealed; QEMU is ended.
    Sealed,
    /// The guest is given back; an image that is sealed nevertheless is removed.
    Returning,
}
