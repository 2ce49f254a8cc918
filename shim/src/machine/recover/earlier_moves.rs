//! An interrupted move of a guest whose supervisor lives is ended by that supervisor, which has QEMU's monitor: at once, as
//! far as that goes, and before whatever it does next for the guest.

use std::path::Path;

use dormouse_qmp::Client;

use super::volumes::{RecoveredMove, recover_with};
use crate::error::{Code, Failure};
use crate::journal::{self, Found};
use crate::machine::effect::blocking;
use crate::machine::volume::record::Record;
use crate::vm::process_identity::ProcessIdentity;

/// Brings to their ends all interrupted moves of the guest behind `client`, and returns which ends these were. `moves`:
/// where they are written down. On a failure the record stays.
pub async fn finish_moves(client: &Client, moves: &Path) -> Result<Vec<RecoveredMove>, Failure> {
    let Some(qemu) = client.peer_pid().and_then(ProcessIdentity::of) else {
        return Ok(Vec::new());
    };
    let folder = moves.to_owned();
    let found = blocking(move || {
        journal::find_all::<Record>(&folder).map_err(|error| {
            Failure::new(
                Code::StorageIo,
                format!("cannot read the records of moves: {error}"),
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
    let mut ended = Vec::new();
    for journal in interrupted {
        let operation = journal.record().operation;
        let recovered = recover_with(*journal, Some(client.clone()))
            .await
            .map_err(|failure| failure.while_doing(&format!("move of volumes {operation} is not over")))?;
        tracing::warn!(%operation, remarks = ?recovered.remarks, "an earlier move is over: {}", recovered.outcome.text());
        ended.push(recovered);
    }
    Ok(ended)
}
