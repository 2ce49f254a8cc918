//! The part of `dormouse recover` for moves of volumes.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::{SECOND_LOOK, Wanted, is_under_way, records};
use crate::cli::report::Report;
use crate::error::{Code, Failure};
use crate::journal::Found;
use crate::machine::recover::volumes::{MoveOutcome, RecoveredMove, recover as recover_one};
use crate::machine::volume::record::Record;
use crate::supervisor::state_dir::StateDir;

/// The moves that are meant.
pub(super) fn look(state: &StateDir, wanted: &Wanted) -> Result<Vec<Found<Record>>, Failure> {
    let found = records::<Record>(&state.moves())?;
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
pub(super) async fn recover(moves: Vec<Found<Record>>, wanted: &Wanted, report: &Report) -> Option<Code> {
    let mut worst = None;
    for found in moves {
        let failure = match found {
            Found::Interrupted(journal) => {
                let title = title(journal.record());
                match recover_one(*journal).await {
                    Ok(recovered) => {
                        report.result(&recovered, &describe(&recovered));
                        if matches!(
                            recovered.outcome,
                            MoveOutcome::SomeMoved | MoveOutcome::DisksChanged
                        ) {
                            worst = worst.max(Some(Code::Operator));
                        }
                        continue;
                    }
                    // Its supervisor has the monitor.
                    Err(failure) if failure.code == Code::Unreachable => {
                        let hint =
                            "if its supervisor lives, the guest's next operation there ends this first";
                        failure.while_doing(&format!("{title} ({hint})"))
                    }
                    Err(failure) => failure.while_doing(&title),
                }
            }
            // Nothing is wrong with it, so only who asks for it by name is told.
            Found::UnderWay(_) if matches!(wanted, Wanted::All) => continue,
            Found::UnderWay(record) => {
                Failure::new(Code::Refused, format!("{}: it is under way", title(&record)))
            }
            Found::Unreadable { path, why } => unreadable(&path, &why),
        };
        report.failure(&failure);
        worst = worst.max(Some(failure.code));
    }
    worst
}

/// Before a VM of this name starts: a move whose QEMU is gone is ended. Where nobody can say which volumes are the guest's,
/// it is not started on any.
pub async fn sweep(name: &str, state: &StateDir) -> Result<(), Failure> {
    let meant = Wanted::Vm(name.to_owned());
    let mut found = look(state, &meant)?;
    if found.iter().any(is_under_way) {
        drop(found);
        tokio::time::sleep(SECOND_LOOK).await;
        found = look(state, &meant)?;
    }
    for found in found {
        match found {
            Found::Interrupted(journal) if journal.record().qemu.is_alive() => {
                return Err(interrupted(journal.record()));
            }
            Found::Interrupted(journal) => {
                let title = title(journal.record());
                let recovered = recover_one(*journal)
                    .await
                    .map_err(|failure| failure.while_doing(&title))?;
                tracing::info!(outcome = ?recovered.outcome, "{title}: recovered");
                for remark in recovered.remarks {
                    tracing::warn!("{title}: {remark}");
                }
            }
            Found::UnderWay(record) => {
                return Err(Failure::new(
                    Code::Refused,
                    format!("{}: it is under way", title(&record)),
                ));
            }
            Found::Unreadable { path, why } if may_be_of(&path, name) => return Err(unreadable(&path, &why)),
            Found::Unreadable { .. } => {}
        }
    }
    Ok(())
}

/// A guest whose move of volumes was interrupted is not saved before that is over: which disks it has is not settled.
pub fn check_over(pid: Option<u32>, state: &StateDir) -> Result<(), Failure> {
    for found in look(state, &Wanted::All)? {
        match found {
            Found::Interrupted(journal) => {
                let record = journal.record();
                if Some(record.qemu.pid) == pid && record.qemu.is_alive() {
                    return Err(interrupted(record));
                }
            }
            Found::UnderWay(_) => {}
            Found::Unreadable { path, why } => return Err(unreadable(&path, &why)),
        }
    }
    Ok(())
}

fn interrupted(record: &Record) -> Failure {
    Failure::new(
        Code::Refused,
        format!(
            "the {} was interrupted, and QEMU's process {} is still there: `dormouse recover` ends that first",
            title(record),
            record.qemu.pid
        ),
    )
}

/// Whether a record that cannot be read may be of this VM: it is of none that it does not name.
fn may_be_of(path: &Path, name: &str) -> bool {
    let text = fs::read(path).unwrap_or_default();
    let value: Value = serde_json::from_slice(&text).unwrap_or_default();
    value["vm_name"].as_str().is_none_or(|named| named == name)
}

fn unreadable(path: &Path, why: &str) -> Failure {
    Failure::new(
        Code::Operator,
        format!(
            "the record {} cannot be read: {why}; look which volumes its guest is on, and remove the record",
            path.display()
        ),
    )
}

fn title(record: &Record) -> String {
    format!("move of volumes {} of {}", record.operation, record.vm_name)
}

fn describe(recovered: &RecoveredMove) -> String {
    let remarks: String = recovered
        .remarks
        .iter()
        .map(|remark| format!("\n{remark}"))
        .collect();
    format!("{}: {}{remarks}", recovered.name, recovered.outcome.text())
}
