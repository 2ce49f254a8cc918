//! The part of `dormouse recover` for moves of volumes.

use super::Wanted;
use crate::cli::report::Report;
use crate::error::{Code, Failure};
use crate::journal::{self, Found};
use crate::machine::recover::volumes::{MoveOutcome, RecoveredMove, recover as recover_one};
use crate::machine::volume::record::Record;
use crate::supervisor::state_dir::StateDir;

/// The moves that are meant.
pub fn look(state: &StateDir, wanted: &Wanted) -> Result<Vec<Found<Record>>, Failure> {
    let folder = state.moves();
    let found = journal::find_all::<Record>(&folder).map_err(|error| {
        Failure::new(
            Code::Usage,
            format!("cannot look into {}: {error}", folder.display()),
        )
    })?;
    let is_wanted = |found: &Found<Record>| match found {
        Found::Interrupted(journal) => takes(wanted, journal.record()),
        Found::UnderWay(record) => takes(wanted, record),
        // It may be of any.
        Found::Unreadable { .. } => true,
    };
    Ok(found.into_iter().filter(is_wanted).collect())
}

fn takes(wanted: &Wanted, record: &Record) -> bool {
    wanted.takes_vm(&record.vm_name, &record.monitor)
}

/// Brings each to its end and tells which. Returns the worst that came of it.
pub async fn recover(moves: Vec<Found<Record>>, wanted: &Wanted, report: &Report) -> Option<Code> {
    let mut worst = None;
    for found in moves {
        let failure = match found {
            Found::Interrupted(journal) => {
                let title = title(journal.record());
                match recover_one(*journal).await {
                    Ok(recovered) => {
                        report.result(&recovered, &describe(&recovered));
                        let code = (recovered.outcome == MoveOutcome::SomeMoved).then_some(Code::Operator);
                        worst = worst.max(code);
                        continue;
                    }
                    Err(failure) => failure.while_doing(&title),
                }
            }
            // Nothing is wrong with it, so only who asks for it by name is told.
            Found::UnderWay(_) if matches!(wanted, Wanted::All) => continue,
            Found::UnderWay(record) => {
                Failure::new(Code::Refused, format!("{}: it is under way", title(&record)))
            }
            Found::Unreadable { path, why } => Failure::new(
                Code::Operator,
                format!(
                    "the record {} cannot be read: {why}; look which volumes its guest is on, and remove the record",
                    path.display()
                ),
            ),
        };
        report.failure(&failure);
        worst = worst.max(Some(failure.code));
    }
    worst
}

/// Before a VM of this name starts: a move whose QEMU is gone is ended.
pub async fn sweep(name: &str, state: &StateDir) {
    for found in journal::find_all::<Record>(&state.moves()).unwrap_or_default() {
        let Found::Interrupted(journal) = found else {
            continue;
        };
        let record = journal.record();
        if record.vm_name != *name || record.qemu.is_alive() {
            continue;
        }
        let title = title(record);
        match recover_one(*journal).await {
            Ok(recovered) => tracing::info!(outcome = ?recovered.outcome, "{title}: recovered"),
            Err(failure) => tracing::warn!(%failure, "{title}: `dormouse recover` says what is to be done"),
        }
    }
}

fn title(record: &Record) -> String {
    format!("move of volumes {} of {}", record.operation, record.vm_name)
}

fn describe(recovered: &RecoveredMove) -> String {
    let what = match recovered.outcome {
        MoveOutcome::VolumesMoved => "the guest is on its new volumes",
        MoveOutcome::VolumesAsBefore => "the guest is on its old volumes, as before",
        MoveOutcome::SomeMoved => "only some volumes could be switched; move the others, or these back",
        MoveOutcome::QemuGoneBefore => "QEMU has ended; the old volumes are the guest's",
        MoveOutcome::QemuGoneAfter => "QEMU has ended; the new volumes are the guest's",
    };
    let remarks: String = recovered
        .remarks
        .iter()
        .map(|remark| format!("\n{remark}"))
        .collect();
    format!("{}: {what}{remarks}", recovered.name)
}
