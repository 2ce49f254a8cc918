//! Suspend to disk: the guest saves itself onto its own disk and powers off, asked by its agent. There is no image.

pub mod machine;
pub mod runner;

use std::path::PathBuf;
use std::time::Duration;

/// What is asked for.
#[derive(Debug, Clone)]
pub struct Request {
    /// The guest agent's socket; `None`: the one that QEMU has for it.
    pub agent: Option<PathBuf>,
    /// How long the guest may take from the command until it is off.
    pub limit: Duration,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Report {
    /// The guest agent's socket.
    pub agent: PathBuf,
    /// Whether the machine itself saw the guest go to ACPI S4. A guest may also save itself and then power off plainly,
    /// and from outside that looks like any other power-off.
    pub by_s4: bool,
    /// From the command to a guest that is off, in milliseconds.
    pub power_off_ms: f64,
}
