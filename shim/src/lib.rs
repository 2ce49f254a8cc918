//! Hibernates and wakes QEMU virtual machines: the machines, the supervisor with its API, the command line.
//!
//! ```text
//!   cli ──► api::client ──socket──► api::routes ──► supervisor ──► machine ──► vm ──► dormouse-qmp
//!    └──────────── (with --qmp) ──────────────────────────────────►   └──► dormouse-storage
//! ```
//!
//! * [`cli`]: one file per verb, and how results are shown.
//! * `api`: what the world sees of a VM: documents, routes, and their client.
//! * `supervisor`: the one owner of one VM's QEMU, and its folder.
//! * `machine`: the operations; each a pure machine, a plan made before anything is touched, and a runner that acts.
//! * `journal`: what is written down of operations, for when their process is killed.
//! * `vm`: what a VM is, as seen from its QEMU.

#![forbid(unsafe_code)]

mod api;
pub mod cli;
mod error;
mod journal;
mod machine;
mod signals;
mod supervisor;
mod vm;
