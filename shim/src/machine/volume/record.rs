//! What is written down of a move: all that somebody else needs to end it well.
//!
//! ```text
//!  move     attach  mirror ... in step        complete  finalize  check            release
//!  record  Moving                    Intending                         Committed           (removed)
//! ```
//!
//! Where the guest is stopped for the switch, that is written down too once it is done: `Intending` a second time.
//!
//! After `Moving` the guest is on its old volumes, whatever happens. After `Committed` it is on the new ones. After
//! `Intending` the live graph tells which; a QEMU that is gone takes that with it, and either may have been written last.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::plan::Volume;
use crate::journal::Written;
use crate::vm::process_identity::ProcessIdentity;

/// A move under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The record's form: a later one may mean something else.
    pub form: u32,
    /// The operation.
    pub operation: Uuid,
    /// The VM's name.
    pub vm_name: String,
    /// The monitor's socket.
    pub monitor: PathBuf,
    /// The folder of the record of what the machine is made of.
    pub machine: PathBuf,
    /// QEMU's process.
    pub qemu: ProcessIdentity,
    /// The disks.
    pub volumes: Vec<Volume>,
    /// Whether the guest runs, and is stopped for the switch.
    pub stops_guest: bool,
    /// Whether that is done: who finds it standing still may let it go on.
    #[serde(default)]
    pub is_stopped: bool,
    /// How far it is.
    pub point: Point,
}

/// How far a move is. Each is written down before what it announces is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Point {
    /// Targets are made, opened and filled. The guest is on its old volumes.
    Moving,
    /// The volumes may be switched from now on.
    Intending,
    /// The guest is on its new volumes.
    Committed,
}

impl Written for Record {
    const FORM: u32 = 1;

    fn operation(&self) -> Uuid {
        self.operation
    }
}
