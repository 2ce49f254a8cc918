//! Recovery of moves of volumes: all volumes of the set are the new ones, or all are the old ones.
//!
//! | record | the live graph | what is done |
//! | --- | --- | --- |
//! | moving | | jobs ended, targets let go |
//! | intending | no disk on its target | the same |
//! | intending | some on their targets | the jobs that stand still are finalized; then as below |
//! | intending, committed | all on their targets | recorded, old volumes let go |
//! | intending | still only some | each is recorded and tidied up as it is, and a person is told which are where |
//! | moving | QEMU is gone | what was made is removed |
//! | intending | QEMU is gone | a person is told: it took the graph with it, and either volume may be the later one |
//! | committed | QEMU is gone | nothing; the new volumes are the guest's |

use std::path::Path;

use dormouse_qmp::{Client, ConnectOptions};
use serde::Serialize;
use uuid::Uuid;

use crate::error::{Code, Failure};
use crate::journal::Journal;
use crate::machine::effect::blocking;
use crate::machine::volume::plan::{Volume, is_switched};
use crate::machine::volume::record::{Point, Record};
use crate::machine::volume::runner::{go_on, release, remove_made, roll_back};
use crate::machine::volume::{mirror, recorded};
use crate::vm::graph::Graph;

/// How an interrupted move ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RecoveredMove {
    /// The operation.
    pub operation: Uuid,
    /// The VM.
    pub name: String,
    /// Which end it was.
    pub outcome: MoveOutcome,
    /// What could not be cleaned up, and does no harm.
    pub remarks: Vec<String>,
}

/// The ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MoveOutcome {
    /// The guest is on its new volumes.
    VolumesMoved,
    /// The guest is on its old volumes.
    VolumesAsBefore,
    /// Some disks are on their new volumes and some on their old ones, each of them whole; which ones the remarks tell.
    SomeMoved,
    /// QEMU has ended; the old volumes are the guest's.
    QemuGoneBefore,
    /// QEMU has ended; the new volumes are the guest's.
    QemuGoneAfter,
}

/// Brings an interrupted move to its end. Its record goes when that is reached, and stays on every failure.
pub async fn recover(journal: Journal<Record>) -> Result<RecoveredMove, Failure> {
    let record = journal.record().clone();
    let mut remarks = Vec::new();
    let outcome = bring_to_an_end(&record, &mut remarks).await?;
    blocking(move || {
        journal.end().map_err(|error| {
            Failure::new(
                Code::StorageIo,
                format!("cannot remove the record of an operation that is over: {error}"),
            )
        })
    })
    .await?;
    Ok(RecoveredMove {
        operation: record.operation,
        name: record.vm_name,
        outcome,
        remarks,
    })
}

async fn bring_to_an_end(record: &Record, remarks: &mut Vec<String>) -> Result<MoveOutcome, Failure> {
    if !record.qemu.is_alive() {
        return after_qemu(record).await;
    }
    let client = Client::connect(&record.monitor, ConnectOptions::default()).await?;
    if client.peer_pid() != Some(record.qemu.pid) {
        return Err(Failure::new(
            Code::Operator,
            format!(
                "the volumes of the guest in QEMU's process {} were being moved, but at its monitor {} is another process",
                record.qemu.pid,
                record.monitor.display()
            ),
        ));
    }
    let volumes = &record.volumes;
    let mut on_target = looked(&client, record).await?;
    if record.point != Point::Moving && on_target.contains(&true) && on_target.contains(&false) {
        // Who was killed between two disks: what stands still goes the way of the others.
        let left = volumes.iter().zip(&on_target).filter(|(_, on)| !**on);
        let left: Vec<_> = left.map(|(volume, _)| volume.clone()).collect();
        if let Err(failure) = mirror::finalize(&client, &left).await {
            tracing::warn!(%failure, "a volume cannot be switched any more");
        }
        on_target = looked(&client, record).await?;
    }
    match (on_target.contains(&true), on_target.contains(&false)) {
        (true, false) => {
            remarks.extend(recorded::update(&client, &record.machine, record.qemu, volumes).await?);
            remarks.extend(release(&client, volumes, Some(record.qemu.pid)).await?);
            if record.stops_guest && record.point == Point::Intending {
                go_on(&client).await?;
            }
            Ok(MoveOutcome::VolumesMoved)
        }
        (true, true) => {
            let (there, here): (Vec<_>, Vec<_>) =
                volumes.iter().cloned().zip(on_target).partition(|(_, on)| *on);
            let only =
                |part: Vec<(Volume, bool)>| part.into_iter().map(|(volume, _)| volume).collect::<Vec<_>>();
            let (there, here) = (only(there), only(here));
            let is_on = |volume: &Volume, file: &Path| format!("{} is on {}", volume.label, file.display());
            remarks.extend(there.iter().map(|volume| is_on(volume, &volume.target.path)));
            remarks.extend(here.iter().map(|volume| is_on(volume, &volume.old_file)));
            remarks.extend(recorded::update(&client, &record.machine, record.qemu, &there).await?);
            remarks.extend(release(&client, &there, Some(record.qemu.pid)).await?);
            roll_back(&client, &here, Some(record.qemu), record.stops_guest).await?;
            Ok(MoveOutcome::SomeMoved)
        }
        // Whatever the record says: the guest is not there.
        (false, _) if record.point == Point::Committed => Err(Failure::new(
            Code::Operator,
            "the volumes were switched, and the guest is on others now: somebody has changed its disks since",
        )),
        (false, _) => {
            roll_back(&client, volumes, Some(record.qemu), record.stops_guest).await?;
            Ok(MoveOutcome::VolumesAsBefore)
        }
    }
}

async fn looked(client: &Client, record: &Record) -> Result<Vec<bool>, Failure> {
    let graph = Graph::of(client).await?;
    Ok(record
        .volumes
        .iter()
        .map(|volume| is_switched(&graph, volume))
        .collect())
}

/// There is no guest any more; what counts is which volumes it will be started with.
async fn after_qemu(record: &Record) -> Result<MoveOutcome, Failure> {
    match record.point {
        Point::Moving => {
            remove_made(&record.volumes).await?;
            Ok(MoveOutcome::QemuGoneBefore)
        }
        Point::Intending => Err(Failure::new(
            Code::Operator,
            format!(
                "QEMU ended while the volumes of {} were switched: {}. Look which of each was written last, start the guest \
                 with those, and remove the record {}",
                record.vm_name,
                record
                    .volumes
                    .iter()
                    .map(|volume| format!(
                        "{} or {}",
                        volume.old_file.display(),
                        volume.target.path.display()
                    ))
                    .collect::<Vec<_>>()
                    .join(", "),
                record.operation
            ),
        )),
        Point::Committed => Ok(MoveOutcome::QemuGoneAfter),
    }
}
