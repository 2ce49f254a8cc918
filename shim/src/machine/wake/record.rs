//! What is written down of a wake that is about to let its guest run.
//!
//! ```text
//!  wake     load   mark the image   ask QEMU        cont ... running   mark it used
//!  record        Marked                    Continuing                              (removed)
//! ```
//!
//! At `Marked` QEMU was never told to run the guest: it is ended, and the image is the guest again. At `Continuing` it may
//! have been, and the image is the guest no more.
//!
//! The record goes once a guest that has all of its memory is awake. One that is still being fed has another record from
//! then on (`feeding.rs`).

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::journal::Written;
use crate::vm::process_identity::ProcessIdentity;

/// A wake under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// The record's form: a later one may mean something else.
    pub form: u32,
    /// The wake's id, which the image's mark names.
    pub operation: Uuid,
    /// The VM's name.
    pub vm_name: String,
    /// The image.
    pub image: PathBuf,
    /// Its id.
    pub image_id: Uuid,
    /// The monitor's socket.
    pub monitor: PathBuf,
    /// QEMU's process.
    pub qemu: ProcessIdentity,
    /// Whether the guest shall run; else it stays paused.
    pub shall_run: bool,
    /// Whether it is fed from the image while it runs.
    pub is_fed: bool,
    /// Whether somebody else started QEMU, and has to end it.
    #[serde(default)]
    pub is_of_others: bool,
    /// How far it is.
    pub point: Point,
}

/// How far a wake is. Each is written down before what it announces is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Point {
    /// The image is marked. QEMU has the guest, and was not told to run it.
    Marked,
    /// QEMU is told to run the guest.
    Continuing,
}

impl Written for Record {
    const FORM: u32 = 2;

    fn operation(&self) -> Uuid {
        self.operation
    }
}
