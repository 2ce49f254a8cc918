//! Suspend to disk: the guest saves itself onto its own disk and powers off, asked by its agent. There is no image.
//!
//! # When Dormouse is killed
//!
//! The journal has no record of it, and `dormouse recover` nothing to do, because nothing is left halfway by us: the guest is
//! not stopped, no setting of QEMU's is changed, and no storage is ours. Before the agent has the command nothing has
//! happened. After it the guest goes on by itself, to its power-off or to its refusal, and QEMU ends with it whether anybody
//! watches or not. Only a QEMU that was told to stay (`-no-shutdown`) waits for its `quit` then, in the run state `shutdown`,
//! which is what `status` and `doctor` say of it.

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
