//! The part of `dormouse recover` for guests that were being fed from their images.

use std::convert::Infallible;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use dormouse_storage::{ByteCount, ImageKey};
use serde_json::json;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use uuid::Uuid;

use super::Wanted;
use crate::cli::report::{Progress, Report};
use crate::error::{Code, Failure};
use crate::machine::recover::feed::{FeedOutcome, go_on};
use crate::machine::wake::feeding::{FeedRecord, View};
use crate::supervisor::state_dir::StateDir;

/// How often progress is told.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// A VM that is or was being fed.
pub(super) struct Fed {
    name: String,
    directory: PathBuf,
    /// It may be unreadable.
    record: Result<FeedRecord, Failure>,
}

impl Fed {
    /// Whether it was begun by one of these wakes.
    pub(super) fn is_of_any(&self, wakes: &[Uuid]) -> bool {
        self.record
            .as_ref()
            .is_ok_and(|record| wakes.contains(&record.wake))
    }
}

/// The VMs that are meant.
pub(super) fn look(state: &StateDir, wanted: &Wanted) -> Vec<Fed> {
    let folders = fs::read_dir(state.path()).into_iter().flatten().flatten();
    let mut found: Vec<Fed> = folders
        .filter_map(|folder| {
            let directory = folder.path();
            let record = FeedRecord::read(&directory).transpose()?;
            let name = folder.file_name().into_string().ok()?;
            Some(Fed {
                name,
                directory,
                record,
            })
        })
        .filter(|fed| match &fed.record {
            Ok(record) => wanted.takes_vm(&fed.name, &record.monitor),
            // It may be of any monitor.
            Err(_) => !matches!(wanted, Wanted::Vm(name) if *name != fed.name),
        })
        .collect();
    found.sort_by(|one, other| one.name.cmp(&other.name));
    found
}

/// Feeds each to its end, all at once: their guests stand still meanwhile. Returns the worst that came of it.
pub(super) async fn recover(
    found: Vec<Fed>,
    is_asked_for: bool,
    (key, rate_limit): (Option<ImageKey>, Option<ByteCount>),
    report: &Report,
) -> Option<Code> {
    let mut feeds = JoinSet::new();
    for fed in found {
        let (key, report) = (key.clone(), report.clone());
        feeds.spawn(async move {
            let ended = one(&fed, is_asked_for, (key, rate_limit), &report).await;
            (fed, ended)
        });
    }
    let mut worst = None;
    while let Some(ended) = feeds.join_next().await {
        let (fed, ended) = match ended {
            Ok(ended) => ended,
            Err(error) => {
                report.failure(&Failure::new(
                    Code::Internal,
                    format!("a feed ended in panic: {error}"),
                ));
                worst = worst.max(Some(Code::Internal));
                continue;
            }
        };
        if let Err(failure) = ended {
            let doing = format!("{}: its memory still comes from its image", fed.name);
            let failure: Failure = failure.while_doing(&doing);
            report.failure(&failure);
            worst = worst.max(Some(failure.code));
        }
    }
    worst
}

async fn one(
    fed: &Fed,
    is_asked_for: bool,
    (key, rate_limit): (Option<ImageKey>, Option<ByteCount>),
    report: &Report,
) -> Result<(), Failure> {
    let name = &fed.name;
    let record = fed.record.as_ref().map_err(Failure::clone)?;
    let image = record.image.display();
    let (begun, view) = oneshot::channel();
    // Whoever looks is there as long as this is awaited.
    let begun = |view| drop(begun.send(view));
    let outcome = tokio::select! {
        outcome = go_on(record, &fed.directory, key, rate_limit, begun) => outcome?,
        never = follow(view, report) => match never {},
    };
    let (bytes, text) = match outcome {
        FeedOutcome::Complete(fed) => (
            fed.numbers.fed.0,
            format!(
                "{name}: the guest has all of its memory from {image} now; its QEMU goes on without a supervisor"
            ),
        ),
        FeedOutcome::WasComplete => (0, format!("{name}: the guest had all of its memory from {image}")),
        // Nothing is wrong with it, so only who asks for it by name is told.
        FeedOutcome::UnderWay(_) if !is_asked_for => return Ok(()),
        FeedOutcome::UnderWay(failure) => return Err(failure),
    };
    report.result(
        &json!({"result": "fed", "name": name, "image": record.image, "image_id": record.image_id, "fed_bytes": bytes}),
        &text,
    );
    Ok(())
}

/// Tells how far it is, until nobody waits any more.
async fn follow(view: oneshot::Receiver<View>, report: &Report) -> Infallible {
    let progress = Cleared(report.progress());
    if let Ok(view) = view.await {
        let mut look = tokio::time::interval(PROGRESS_INTERVAL);
        loop {
            look.tick().await;
            let (_, numbers, _) = view.state();
            progress.0.tell_work("Feeding", numbers.fed.0, numbers.total.0);
        }
    }
    std::future::pending().await
}

/// Progress that goes off the terminal with whoever told it.
struct Cleared(Progress);

impl Drop for Cleared {
    fn drop(&mut self) {
        self.0.finish();
    }
}
