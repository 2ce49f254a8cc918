//! `dormouse recover`: ends what was interrupted.

mod feeds;
pub mod volumes;
pub mod wakes;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use dormouse_storage::Image;
use serde_json::json;

use super::RecoverArguments;
use super::report::Report;
use crate::error::{Code, Failure, GuestState};
use crate::journal::{self, Found, Record, Written};
use crate::machine::recover::runner::recover as recover_one;
use crate::machine::recover::{Outcome, Recovered};
use crate::supervisor::ending::{How, LastEnding};
use crate::supervisor::state_dir::StateDir;

/// Whoever only looks at a record holds it for an instant.
const SECOND_LOOK: Duration = Duration::from_millis(100);

pub async fn recover(
    arguments: RecoverArguments,
    state: &StateDir,
    report: &Report,
) -> Result<ExitCode, Failure> {
    let wanted = Wanted::of(&arguments)?;
    let look_at_all = || {
        let (all, moves) = (look(state, &wanted)?, volumes::look(state, &wanted)?);
        Ok::<_, Failure>((all, moves, wakes::look(state, &wanted)?))
    };
    let (mut all, mut moves, mut wakes) = look_at_all()?;
    if all.iter().any(is_under_way) || moves.iter().any(is_under_way) || wakes.iter().any(is_under_way) {
        drop((all, moves, wakes));
        tokio::time::sleep(SECOND_LOOK).await;
        (all, moves, wakes) = look_at_all()?;
    }
    // A wake that was interrupted before its guest was told to run is undone first, and leaves nothing to feed.
    let is_fed = !feeds::look(state, &wanted).is_empty();
    if all.is_empty() && moves.is_empty() && wakes.is_empty() && !is_fed {
        report.result(&json!({"operations": 0}), "nothing to recover");
        return Ok(ExitCode::SUCCESS);
    }
    let (mut worst, unsettled) = wakes::recover(wakes, state, &wanted, report).await;
    let fill = (arguments.key.read()?, arguments.rate_limit);
    for found in all {
        match one(found, state, &wanted).await {
            Ok(Some(recovered)) => report.result(&recovered, &describe(&recovered)),
            Ok(None) => {}
            Err(failure) => {
                report.failure(&failure);
                worst = worst.max(Some(failure.code));
            }
        }
    }
    worst = worst.max(volumes::recover(moves, &wanted, report).await);
    // Last, because it may take long.
    let mut fed = feeds::look(state, &wanted);
    fed.retain(|fed| !fed.is_of_any(&unsettled));
    worst = worst.max(feeds::recover(fed, !matches!(wanted, Wanted::All), fill, report).await);
    Ok(worst.map_or(ExitCode::SUCCESS, |code| ExitCode::from(code.exit_code())))
}

fn is_under_way<R>(found: &Found<R>) -> bool {
    matches!(found, Found::UnderWay(_))
}

/// Before a VM of this name starts: what a killed supervisor left, and whose QEMU is gone as well, is swept up. Fails where
/// nobody can say which volumes are the guest's.
pub async fn sweep(name: &str, state: &StateDir) -> Result<(), Failure> {
    volumes::sweep(name, state).await?;
    wakes::sweep(name, state).await;
    for found in journal::find(&state.operations()).unwrap_or_default() {
        let Found::Interrupted(journal) = found else {
            continue;
        };
        let record = journal.record();
        if record.vm_name != *name || record.qemu.is_alive() {
            continue;
        }
        let title = title(record);
        let record = record.clone();
        match recover_one(*journal).await {
            Ok(recovered) => {
                note_ending(state, &record, recovered.outcome);
                tracing::info!(outcome = ?recovered.outcome, "{title}: recovered");
            }
            Err(failure) => tracing::warn!(%failure, "{title}: `dormouse recover` says what is to be done"),
        }
    }
    Ok(())
}

/// An image whose hibernation was interrupted is not woken while the QEMU that it was saved from is there: one of the two
/// is the guest, and which one the recovery finds out.
pub fn check_not_interrupted(image: &Path, state: &StateDir) -> Result<(), Failure> {
    // What is wrong with the image the wake tells.
    let Ok(id) = Image::open(image).map(|image| image.id()) else {
        return Ok(());
    };
    wakes::check_not_interrupted(id, state)?;
    for found in records::<Record>(&state.operations())? {
        let journal = match found {
            Found::Interrupted(journal) => journal,
            Found::UnderWay(_) => continue,
            Found::Unreadable { path, why } => return Err(unreadable(&path, &why)),
        };
        let record = journal.record();
        if record.image_id == id && record.qemu.is_alive() {
            return Err(Failure::new(
                Code::Refused,
                format!(
                    "{} was interrupted, and QEMU's process {} is still there: `dormouse recover` ends that first",
                    title(record),
                    record.qemu.pid
                ),
            ));
        }
    }
    Ok(())
}

/// Which operations are meant.
enum Wanted {
    All,
    Vm(String),
    Monitor(PathBuf),
}

impl Wanted {
    fn of(arguments: &RecoverArguments) -> Result<Self, Failure> {
        Ok(match (&arguments.name, &arguments.qmp) {
            (Some(name), _) => Self::Vm(name.clone()),
            (None, Some(socket)) => Self::Monitor(resolved(socket)?),
            (None, None) => Self::All,
        })
    }

    fn takes(&self, record: &Record) -> bool {
        self.takes_vm(&record.vm_name, &record.monitor)
    }

    fn takes_vm(&self, vm_name: &str, monitor: &Path) -> bool {
        match self {
            Self::All => true,
            Self::Vm(name) => vm_name == *name,
            Self::Monitor(socket) => resolved(monitor).is_ok_and(|monitor| monitor == *socket),
        }
    }
}

/// The socket may be gone with its QEMU.
fn resolved(socket: &Path) -> Result<PathBuf, Failure> {
    socket
        .canonicalize()
        .or_else(|_| std::path::absolute(socket))
        .map_err(|error| Failure::new(Code::Usage, format!("{}: {error}", socket.display())))
}

fn look(state: &StateDir, wanted: &Wanted) -> Result<Vec<Found>, Failure> {
    let found = records(&state.operations())?;
    let is_wanted = |found: &Found| match found {
        Found::Interrupted(journal) => wanted.takes(journal.record()),
        Found::UnderWay(record) => wanted.takes(record),
        // It may be of any.
        Found::Unreadable { .. } => true,
    };
    Ok(found.into_iter().filter(is_wanted).collect())
}

async fn one(found: Found, state: &StateDir, wanted: &Wanted) -> Result<Option<Recovered>, Failure> {
    match found {
        Found::Interrupted(journal) => {
            let record = journal.record().clone();
            let recovered = recover_one(*journal)
                .await
                .map_err(|failure| failure.while_doing(&title(&record)))?;
            note_ending(state, &record, recovered.outcome);
            if recovered.guest == GuestState::Stopped {
                free_name(state, &record).await;
            }
            Ok(Some(recovered))
        }
        // Nothing is wrong with it, so only who asks for it by name is told.
        Found::UnderWay(_) if matches!(wanted, Wanted::All) => Ok(None),
        Found::UnderWay(record) => Err(Failure::new(
            Code::Refused,
            format!("{}: it is under way", title(&record)),
        )),
        Found::Unreadable { path, why } => Err(unreadable(&path, &why)),
    }
}

/// All records in a folder.
fn records<R: Written>(folder: &Path) -> Result<Vec<Found<R>>, Failure> {
    journal::find_all(folder).map_err(|error| {
        Failure::new(
            Code::Usage,
            format!("cannot look into {}: {error}", folder.display()),
        )
    })
}

/// It may be of any guest and any image.
fn unreadable(path: &Path, why: &str) -> Failure {
    Failure::new(
        Code::Operator,
        format!(
            "the record {} cannot be read: {why}; look at its guest's QEMU and image, end what has to end, and remove the record",
            path.display()
        ),
    )
}

/// Its supervisor could not write down where the guest went.
fn note_ending(state: &StateDir, record: &Record, outcome: Outcome) {
    if outcome != Outcome::Hibernated || !state.is_monitor_of(&record.vm_name, &record.monitor) {
        return;
    }
    let how = How::Hibernated {
        operation: record.operation,
        image: record.target.clone(),
        image_id: record.image_id,
    };
    if let Err(error) = state.note_ending(&LastEnding::now(&record.vm_name, how)) {
        tracing::warn!(%error, "{}: cannot write down how it ended", title(record));
    }
}

/// The folder of a VM whose supervisor was killed goes with its QEMU.
async fn free_name(state: &StateDir, record: &Record) {
    let folder = state.path().join(&record.vm_name);
    if state.is_monitor_of(&record.vm_name, &record.monitor) && folder.exists() {
        // Taken and dropped. Somebody else may take it as well.
        let _ = state.claim(&record.vm_name, None).await;
    }
}

fn title(record: &Record) -> String {
    format!("{} {} of {}", record.aim, record.operation, record.vm_name)
}

fn describe(recovered: &Recovered) -> String {
    let (name, image) = (&recovered.name, recovered.image.display());
    let aim = recovered.aim;
    let what = match recovered.outcome {
        Outcome::Snapshot => format!("a whole snapshot is in {image}, the guest is not touched"),
        Outcome::Hibernated => format!("hibernated to {image}, QEMU has ended"),
        Outcome::GivenBack => {
            let guest = serde_json::to_value(recovered.guest).unwrap_or_default();
            let guest = guest.as_str().unwrap_or_default().to_owned();
            format!("no {aim}, the guest is given back ({guest})")
        }
        Outcome::RanOn => "not hibernated, the guest had gone on by itself".to_owned(),
        Outcome::QemuGone => format!("QEMU has ended, and there is no image of this {aim} at {image}"),
    };
    format!("{name}: {what}")
}
