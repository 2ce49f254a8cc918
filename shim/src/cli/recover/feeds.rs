//! The part of `dormouse recover` for guests that were being fed from their images.

use std::fs;
use std::path::PathBuf;

use dormouse_storage::{ByteCount, ImageKey};
use serde_json::json;

use super::Wanted;
use crate::cli::report::Report;
use crate::error::{Code, Failure};
use crate::machine::recover::feed::{FeedOutcome, go_on};
use crate::machine::wake::feeding::FeedRecord;
use crate::supervisor::state_dir::StateDir;

/// A VM that is or was being fed.
pub(super) struct Fed {
    name: String,
    directory: PathBuf,
    record: FeedRecord,
}

/// The VMs that are meant.
pub(super) fn look(state: &StateDir, wanted: &Wanted) -> Vec<Fed> {
    let folders = fs::read_dir(state.path()).into_iter().flatten().flatten();
    let mut found: Vec<Fed> = folders
        .filter_map(|folder| {
            let directory = folder.path();
            let record = FeedRecord::read(&directory)?;
            let name = folder.file_name().into_string().ok()?;
            Some(Fed {
                name,
                directory,
                record,
            })
        })
        .filter(|fed| wanted.takes_vm(&fed.name, &fed.record.monitor))
        .collect();
    found.sort_by(|one, other| one.name.cmp(&other.name));
    found
}

/// Feeds each to its end. Returns the worst that came of it.
pub(super) async fn recover(
    found: Vec<Fed>,
    wanted: &Wanted,
    (key, rate_limit): (Option<ImageKey>, Option<ByteCount>),
    report: &Report,
) -> Option<Code> {
    let mut worst = None;
    for Fed {
        name,
        directory,
        record,
    } in found
    {
        match go_on(&record, &directory, key.clone(), rate_limit).await {
            Ok(outcome) => tell(&name, &record, &outcome, report),
            // Its supervisor lives, and feeds it. Only who asks for it by name is told.
            Err(failure) if failure.code == Code::Refused && matches!(wanted, Wanted::All) => {}
            Err(failure) => {
                let failure: Failure =
                    failure.while_doing(&format!("{name}: its memory still comes from its image"));
                report.failure(&failure);
                worst = worst.max(Some(failure.code));
            }
        }
    }
    worst
}

fn tell(name: &str, record: &FeedRecord, outcome: &FeedOutcome, report: &Report) {
    let image = record.image.display();
    let (bytes, text) = match outcome {
        FeedOutcome::Complete(fed) => (
            fed.numbers.fed.0,
            format!(
                "{name}: the guest has all of its memory from {image} now; its QEMU goes on without a supervisor"
            ),
        ),
        FeedOutcome::WasComplete => (0, format!("{name}: the guest had all of its memory from {image}")),
    };
    report.result(
        &json!({"result": "fed", "name": name, "image": record.image, "image_id": record.image_id, "fed_bytes": bytes}),
        &text,
    );
}
