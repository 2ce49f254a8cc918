//! What an earlier hibernation of the same guest left undone is done by the next one.
//!
//! A hibernation can end with its process alive and something left: QEMU did not end a migration that it was told to cancel,
//! so that its settings could not be put back, or storage let neither a seal nor its removal through. Its supervisor holds the
//! monitor, so nobody else could recover that. The guest was given back since, and whether it runs is its owner's: that is left
//! as it is. A guest that stands still since it was saved is not touched here: whether it or its image is the guest,
//! `dormouse recover` finds out.
//!
//! Where it cannot be done the record stays, and the next hibernation goes on: a volume that is broken keeps no guest from
//! being saved to another.

use std::path::Path;

use dormouse_qmp::view::machine::RunState;
use dormouse_qmp::view::migration::{MigrationInfo, MigrationStatus};
use dormouse_qmp::{Client, command};

use super::runner::{Owner, recover_with};
use crate::error::{Code, Failure};
use crate::journal::{self, Found};
use crate::machine::effect::blocking;
use crate::vm::monitor;
use crate::vm::process_identity::ProcessIdentity;

/// Brings to their ends all interrupted hibernations of the guest behind `client`, as far as that goes.
pub async fn finish_earlier(client: &Client, operations: &Path) {
    if let Err(failure) = try_to_finish(client, operations).await {
        tracing::warn!(%failure, "an earlier hibernation is not over; `dormouse recover` says what is to be done");
    }
}

async fn try_to_finish(client: &Client, operations: &Path) -> Result<(), Failure> {
    let Some(qemu) = client.peer_pid().and_then(ProcessIdentity::of) else {
        return Ok(());
    };
    let folder = operations.to_owned();
    let found = blocking(move || {
        journal::find(&folder).map_err(|error| {
            Failure::new(
                Code::StorageIo,
                format!("cannot read the records of operations: {error}"),
            )
        })
    })
    .await?;
    let interrupted = found.into_iter().filter_map(|found| match found {
        Found::Interrupted(journal) if journal.record().qemu == qemu => Some(journal),
        _ => None,
    });
    // Those of others are let go of before anything takes its time.
    let interrupted: Vec<_> = interrupted.collect();
    if interrupted.is_empty() || monitor::run_state(client).await? == RunState::Postmigrate {
        return Ok(());
    }
    // Another's, which keeps the guest from being saved as well.
    let migration: MigrationInfo = client.query(&command::query_migrate {}).await?;
    if migration.is_in_progress() && migration.status != Some(MigrationStatus::Cancelling) {
        return Ok(());
    }
    for journal in interrupted {
        let operation = journal.record().operation;
        let recovered = recover_with(*journal, Some(client.clone()), Owner::HasTheGuest)
            .await
            .map_err(|failure| failure.while_doing(&format!("hibernation {operation} is not over")))?;
        tracing::info!(%operation, outcome = ?recovered.outcome, "an earlier hibernation is over");
    }
    Ok(())
}
