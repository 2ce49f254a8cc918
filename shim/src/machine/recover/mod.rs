//! Recovery: what was interrupted in the middle of a hibernation is brought to one of its two ends.
//!
//! `verdict` decides from what is found, `runner` looks and acts. What is promised:
//!
//! - Before the image was sealed the guest is given back as it was, and what there is of the image is removed. After it
//!   QEMU is ended, and the image is the guest.
//! - QEMU is ended only when the image is whole, durable, and the guest has not run since.
//! - It can be done again, and be killed itself, at any point: it looks anew, and the record goes last.
//! - The guest of a snapshot is never ended: it is given back if it was not yet, and a sealed snapshot stays.
//! - An interrupted wake is undone or finished by a table of its own (`wake`), which is acted on by `wake_runner`.
//! - Where guest and image might both be the guest, nothing is touched, and a person is told which is which.

pub mod earlier;
pub mod earlier_moves;
pub mod feed;
pub mod runner;
pub mod verdict;
pub mod volumes;
pub mod wake;
pub mod wake_runner;

use std::path::PathBuf;

use serde::Serialize;
use uuid::Uuid;

use crate::error::GuestState;
use crate::machine::hibernate::machine::Aim;

/// How an interrupted hibernation ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Recovered {
    /// The operation.
    pub operation: Uuid,
    /// The VM.
    pub name: String,
    /// Where its image is or was to be.
    pub image: PathBuf,
    /// The image's id.
    pub image_id: Uuid,
    /// What was interrupted.
    #[serde(skip)]
    pub aim: Aim,
    /// Which end it was.
    pub outcome: Outcome,
    /// What the guest does now.
    pub guest: GuestState,
}

/// The ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Outcome {
    /// The image is the guest, and QEMU has ended.
    Hibernated,
    /// The image is a whole snapshot, whose guest was given back before.
    Snapshot,
    /// The guest is as it was before; there is no image.
    GivenBack,
    /// Somebody ran the guest after its image was sealed. It was left as it is, and the image, which is older, removed.
    RanOn,
    /// QEMU has ended before, and there is no image at its place.
    QemuGone,
}
