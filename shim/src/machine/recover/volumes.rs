//! Recovery of moves of volumes: each disk is brought to the end that it is at, which is the same for all but rarely.
//!
//! | record | the live graph | what is done |
//! | --- | --- | --- |
//! | moving, intending | all disks on their old volumes | jobs ended, targets let go, what was made removed |
//! | intending | some on their targets, some on their old volumes | the jobs that stand still are finalized; then looked anew |
//! | any | all on their targets | recorded, old volumes let go |
//! | any | anything else | each is recorded and tidied up as it is, what was made stays, and a person is told which are where |
//! | moving | QEMU is gone | what was made is named, and left: somebody may use it by now |
//! | intending | QEMU is gone | a person is told: it took the graph with it, and either volume may be the later one |
//! | committed | QEMU is gone | nothing; the new volumes are the guest's |

use dormouse_qmp::view::machine::RunState;
use dormouse_qmp::{Client, ConnectOptions, command};
use serde::Serialize;
use uuid::Uuid;

use crate::error::{Code, Failure};
use crate::journal::Journal;
use crate::machine::effect::blocking;
use crate::machine::volume::plan::Volume;
use crate::machine::volume::record::{Point, Record};
use crate::machine::volume::runner::{close_targets, go_on, release, roll_back};
use crate::machine::volume::standing::Standing;
use crate::machine::volume::{made, mirror, recorded};
use crate::vm::graph::Graph;
use crate::vm::monitor;

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
    /// Some disks are on neither, by somebody else's doing; which ones the remarks tell.
    DisksChanged,
    /// QEMU has ended; the old volumes are the guest's.
    QemuGoneBefore,
    /// QEMU has ended; the new volumes are the guest's.
    QemuGoneAfter,
}

impl MoveOutcome {
    /// What that means, for a person.
    pub fn text(self) -> &'static str {
        match self {
            Self::VolumesMoved => "the guest is on its new volumes",
            Self::VolumesAsBefore => "the guest is on its old volumes, as before",
            Self::SomeMoved => "only some volumes could be switched; move the others, or these back",
            Self::DisksChanged => {
                "somebody has changed the disks since; look what they are on, nothing that was made for the move is removed"
            }
            Self::QemuGoneBefore => "QEMU has ended; the old volumes are the guest's",
            Self::QemuGoneAfter => "QEMU has ended; the new volumes are the guest's",
        }
    }
}

/// Brings an interrupted move to its end. Its record goes when that is reached, and stays on every failure.
pub async fn recover(journal: Journal<Record>) -> Result<RecoveredMove, Failure> {
    recover_with(journal, None).await
}

/// The same over a monitor that is held already.
pub async fn recover_with(
    mut journal: Journal<Record>,
    client: Option<Client>,
) -> Result<RecoveredMove, Failure> {
    let mut remarks = Vec::new();
    let outcome = if journal.record().qemu.is_alive() {
        let client = match client {
            Some(client) => client,
            None => connect(journal.record()).await?,
        };
        journal = switch_the_rest(&client, journal).await?;
        bring_to_an_end(&client, journal.record(), &mut remarks).await?
    } else {
        after_qemu(journal.record(), &mut remarks)?
    };
    let record = journal.record().clone();
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

async fn connect(record: &Record) -> Result<Client, Failure> {
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
    Ok(client)
}

/// Where some disks were switched and some were not, what stands still goes the way of the others.
async fn switch_the_rest(client: &Client, mut journal: Journal<Record>) -> Result<Journal<Record>, Failure> {
    let record = journal.record().clone();
    let standings = looked(client, &record).await?;
    let is_split = standings.contains(&Standing::New) && standings.contains(&Standing::Old);
    if record.point != Point::Intending || !is_split {
        return Ok(journal);
    }
    // Somebody may have run it since.
    if mirror::stops_guest(client).await? && monitor::run_state(client).await? == RunState::Running {
        client.execute(&command::stop {}).await?;
        let stopped = Record {
            is_stopped: true,
            ..record.clone()
        };
        journal = blocking(move || {
            journal.rewrite(stopped).map_err(|error| {
                Failure::new(
                    Code::StorageIo,
                    format!("cannot keep the operation's record: {error}"),
                )
            })?;
            Ok(journal)
        })
        .await?;
    }
    if let Err(failure) = mirror::finalize(client, &on(Standing::Old, &record, &standings)).await {
        tracing::warn!(%failure, "a volume cannot be switched any more");
    }
    Ok(journal)
}

async fn bring_to_an_end(
    client: &Client,
    record: &Record,
    remarks: &mut Vec<String>,
) -> Result<MoveOutcome, Failure> {
    let volumes = &record.volumes;
    let standings = looked(client, record).await?;
    let may_run = record.is_stopped && record.point == Point::Intending;
    if record.stops_guest && !record.is_stopped && monitor::run_state(client).await? == RunState::Paused {
        remarks.push(
            "the guest stands still, and whether that was for the switch or is somebody's wish is not known: `cont` lets it \
             go on"
                .to_owned(),
        );
    }
    let are_all = |wanted| standings.iter().all(|standing| *standing == wanted);
    if are_all(Standing::New) {
        remarks.extend(recorded::update(client, &record.machine, record.qemu, volumes).await?);
        remarks.extend(release(client, volumes, Some(record.qemu.pid)).await?);
        if may_run {
            go_on(client).await?;
        }
        return Ok(MoveOutcome::VolumesMoved);
    }
    if are_all(Standing::Old) && record.point != Point::Committed {
        remarks.extend(roll_back(client, volumes, record.qemu, may_run).await?);
        return Ok(MoveOutcome::VolumesAsBefore);
    }
    remarks.extend(
        volumes
            .iter()
            .zip(&standings)
            .map(|(volume, standing)| told(volume, *standing)),
    );
    let there = on(Standing::New, record, &standings);
    let others = volumes.iter().filter(|volume| !there.contains(volume)).cloned();
    let others: Vec<_> = others.collect();
    if !there.is_empty() {
        remarks.extend(recorded::update(client, &record.machine, record.qemu, &there).await?);
        remarks.extend(release(client, &there, Some(record.qemu.pid)).await?);
    }
    close_targets(client, &others, may_run).await?;
    remarks.extend(made::left(&others));
    Ok(
        match standings.contains(&Standing::Elsewhere) || there.is_empty() {
            true => MoveOutcome::DisksChanged,
            false => MoveOutcome::SomeMoved,
        },
    )
}

async fn looked(client: &Client, record: &Record) -> Result<Vec<Standing>, Failure> {
    let graph = Graph::of(client).await?;
    Ok(Standing::of_all(&graph, &record.volumes))
}

/// The disks that stand so.
fn on(wanted: Standing, record: &Record, standings: &[Standing]) -> Vec<Volume> {
    let all = record.volumes.iter().zip(standings);
    let meant = all.filter(|(_, standing)| **standing == wanted);
    meant.map(|(volume, _)| volume.clone()).collect()
}

fn told(volume: &Volume, standing: Standing) -> String {
    let (label, old, new) = (
        &volume.label,
        volume.old_file.display(),
        volume.target.path.display(),
    );
    match standing {
        Standing::Old => format!("{label} is on {old}"),
        Standing::New => format!("{label} is on {new}"),
        Standing::Elsewhere => format!(
            "{label} is neither on {old} nor on {new}: somebody has changed it since, and what it is on may lie on either"
        ),
    }
}

/// There is no guest any more; what counts is which volumes it will be started with.
fn after_qemu(record: &Record, remarks: &mut Vec<String>) -> Result<MoveOutcome, Failure> {
    match record.point {
        Point::Moving => {
            remarks.extend(made::left(&record.volumes));
            Ok(MoveOutcome::QemuGoneBefore)
        }
        Point::Intending => Err(Failure::new(
            Code::Operator,
            format!(
                "QEMU ended while the volumes of {} were switched: {}. Look which of each was written last, remove the \
                 record {}.json from .moves in the state directory, and start the guest with those",
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
