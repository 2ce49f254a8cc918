//! What we say to QEMU: the commands of its own schema, as types.
//!
//! The types are generated from the schema of QEMU 9.1. A command or an argument that is younger
//! goes through [`Client::execute_raw`](crate::Client::execute_raw), or through a struct of one's
//! own that implements [`Command`]. Whether the QEMU at the other end knows a command is for that
//! QEMU to say, not for this list.

pub use qapi::Command;
pub use qapi::qmp::*;
