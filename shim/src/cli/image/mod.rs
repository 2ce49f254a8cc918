//! `dormouse image`: looks into images, checks them, removes them, and exchanges memory with other tools. One file per
//! verb; this one has the arguments, and how long work is watched and cancelled.

mod age;
mod discard;
mod export;
mod import;
mod inspect;
mod list;
mod verify;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use clap::{Args, Subcommand};
use dormouse_storage::{ByteCount, Image, Progress, Run, WORKER_THREADS};

use super::KeyArguments;
use super::report::Report;
use crate::error::Failure;
use crate::machine::effect::joined;
use crate::signals::Signals;
use crate::supervisor::state_dir::StateDir;

/// How often progress is told.
const TELL: Duration = Duration::from_millis(250);

/// What can be done with images.
#[derive(Debug, Subcommand)]
pub enum ImageVerb {
    /// Show the images in a folder, whole or not
    List(list::ListArguments),
    /// Show what is in an image
    Inspect(ImageArguments),
    /// Read all of an image and check it
    Verify(verify::VerifyArguments),
    /// Write what is in an image to a file that other tools read
    Export(export::ExportArguments),
    /// Make an image of memory that QEMU or libvirt saved
    Import(import::ImportArguments),
    /// Remove an image for good, after saying what is lost
    Discard(discard::DiscardArguments),
}

/// One image.
#[derive(Debug, Args)]
pub struct ImageArguments {
    /// The image
    path: PathBuf,
}

pub async fn image(verb: ImageVerb, state: &StateDir, report: &Report) -> Result<ExitCode, Failure> {
    match verb {
        ImageVerb::List(arguments) => list::list(arguments, report),
        ImageVerb::Discard(arguments) => discard::discard(arguments, report),
        ImageVerb::Inspect(arguments) => inspect::inspect(&arguments.path, report),
        ImageVerb::Verify(arguments) => verify::verify(arguments, report).await,
        ImageVerb::Export(arguments) => export::export(arguments, report).await,
        ImageVerb::Import(arguments) => import::import(arguments, state, report).await,
    }
}

/// Opens an image, with its key if one was given.
fn opened(path: &Path, key: &KeyArguments) -> Result<Image, Failure> {
    let mut image = Image::open(path)?;
    if let Some(key) = key.read()? {
        image.unlock(&key)?;
    }
    Ok(image)
}

/// Does work that reads or writes much, beside the runtime: tells its progress, and ends it at a signal.
async fn watched<T: Send + 'static>(
    report: &Report,
    phase: &str,
    total: ByteCount,
    work: impl FnOnce(&Run<'_>) -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    let mut signals = Signals::watch()?;
    let shared = Arc::new((Progress::new(total), AtomicBool::new(false)));
    let told = report.progress();
    let mut working = tokio::task::spawn_blocking({
        let shared = Arc::clone(&shared);
        move || {
            let (progress, cancelled) = &*shared;
            work(&Run {
                threads: WORKER_THREADS,
                progress,
                cancelled,
            })
        }
    });
    let mut ticks = tokio::time::interval(TELL);
    ticks.tick().await;
    let outcome = loop {
        tokio::select! {
            outcome = joined(&mut working) => break outcome,
            _ = ticks.tick() => told.tell_work(phase, shared.0.done().0, shared.0.total().0),
            _ = signals.next() => shared.1.store(true, Ordering::Relaxed),
        }
    };
    told.finish();
    outcome
}
