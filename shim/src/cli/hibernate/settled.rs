//! An operation that was asked for before, and whose process is not there to join: what its traces tell.
//!
//! There are three: its record in the journal (it was interrupted, or another process works on it), the VM's last ending
//! (written by who saw it), and the image itself, whose manifest names the operation that made it. The image goes where
//! the state directory does not, so that a command can be repeated after the host's restart.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use dormouse_storage::{Image, ImageState, VolumeKind};
use serde_json::json;
use uuid::Uuid;

use crate::api::snapshot::{Snapshot, SnapshotTag};
use crate::api::types::{Ending, Hibernated, HibernatedTag, NewOperation, Storage};
use crate::error::{Code, Failure, GuestState};
use crate::journal::{self, Found};
use crate::supervisor::ending::How;
use crate::supervisor::state_dir::StateDir;
use crate::vm::engine::{Choice, Engine};

/// How the operation `id` ended, if that can be seen. `name`: the VM, where it has one.
pub fn settled(
    state: &StateDir,
    name: Option<&str>,
    wish: &NewOperation,
    id: Uuid,
) -> Option<Result<Ending, Failure>> {
    if let Some(failure) = in_the_journal(state, id) {
        return Some(Err(failure));
    }
    let ending = name.and_then(|name| state.last_ending(name));
    if let Some(ending) = ending.filter(|ending| ending.operation() == Some(id)) {
        let is_same = match (&ending.how, wish) {
            (How::Hibernated { image, .. }, NewOperation::Hibernate { to, .. }) => image == to,
            (How::SuspendedToDisk { .. }, NewOperation::SuspendToDisk { .. }) => true,
            _ => false,
        };
        match ending.result {
            _ if !is_same => return Some(Err(other_parameters(id))),
            Some(result) => return Some(Ok(result)),
            // The image tells.
            None => {}
        }
    }
    match wish {
        NewOperation::Hibernate { to, .. } => in_an_image(to, id, false, |hibernated| {
            Ending::Hibernated(Box::new(hibernated))
        }),
        NewOperation::Snapshot(snapshot) => in_an_image(&snapshot.to, id, true, |made| {
            Ending::Snapshot(Box::new(as_snapshot(made)))
        }),
        _ => None,
    }
}

fn in_the_journal(state: &StateDir, id: Uuid) -> Option<Failure> {
    let found = match journal::find(&state.operations()) {
        Ok(found) => found,
        Err(error) => {
            let why = format!("cannot read the records of operations: {error}");
            return Some(Failure::new(Code::StorageIo, why));
        }
    };
    found.iter().find_map(|found| match found {
        Found::Interrupted(journal) if journal.record().operation == id => Some(Failure::new(
            Code::Refused,
            format!("operation {id} was interrupted: `dormouse recover` ends it"),
        )),
        Found::UnderWay(record) if record.operation == id => Some(Failure::new(
            Code::Refused,
            format!("operation {id} is under way in another process"),
        )),
        _ => None,
    })
}

fn other_parameters(id: Uuid) -> Failure {
    let why = format!("operation {id} ended with other parameters; another request takes another id");
    Failure::new(Code::Refused, why)
}

fn in_an_image(
    path: &Path,
    id: Uuid,
    is_snapshot: bool,
    ending: impl FnOnce(Hibernated) -> Ending,
) -> Option<Result<Ending, Failure>> {
    let image = Image::open(path).ok()?;
    if image.manifest().operation != Some(id) {
        return None;
    }
    if image.manifest().guest.went_on != is_snapshot {
        return Some(Err(other_parameters(id)));
    }
    Some(match image.state() {
        ImageState::Sealed => told(&image).map(ending),
        state => Err(Failure::new(
            Code::Refused,
            format!(
                "operation {id} ended in {}, which is {state}: its guest was woken since",
                path.display()
            ),
        )),
    })
}

/// The same of a snapshot, whose guest may have done anything since.
fn as_snapshot(made: Hibernated) -> Snapshot {
    Snapshot {
        result: SnapshotTag::Snapshot,
        image: made.image,
        image_id: made.image_id,
        guest: GuestState::Unknown,
        choice: made.choice,
        storage: made.storage,
        data_bytes: made.data_bytes,
        stored_bytes: made.stored_bytes,
        zero_bytes: made.zero_bytes,
        pause_ms: made.pause_ms,
        live: None,
        sealed_after_ms: None,
        timings_ms: made.timings_ms,
    }
}

/// What the asker was told, as far as the image knows it.
fn told(image: &Image) -> Result<Hibernated, Failure> {
    let (usage, manifest) = (image.usage()?, image.manifest());
    let is_device = fs::metadata(image.path()).is_ok_and(|found| found.file_type().is_block_device());
    let kind = if is_device {
        VolumeKind::BlockDevice
    } else {
        VolumeKind::File
    };
    Ok(Hibernated {
        result: HibernatedTag::Hibernated,
        image: image.path().to_owned(),
        image_id: image.id(),
        choice: Choice {
            engine: serde_json::from_value(json!(manifest.engine)).unwrap_or(Engine::Stream),
            channels: None,
            passed_over: Vec::new(),
        },
        storage: Storage {
            kind: kind.to_string(),
            backend: "not known any more".to_owned(),
        },
        data_bytes: usage.data.0,
        stored_bytes: usage.stored.0,
        zero_bytes: usage.zero.0,
        // The manifest was written before the end of it.
        pause_ms: None,
        timings_ms: manifest.timings_ms.clone(),
    })
}
