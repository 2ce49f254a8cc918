//! Looks, has it decided, and acts.

use std::time::Duration;

use dormouse_qmp::view::machine::RunState;
use dormouse_qmp::{Client, ConnectError, ConnectOptions};
use dormouse_storage::image::{Interrupted, Remains};
use dormouse_storage::{ImageState, SealedImage};

use super::verdict::{Doubt, Facts, Verdict};
use super::{Outcome, Recovered};
use crate::error::{Code, Failure, GuestState};
use crate::journal::{Journal, Point, Record};
use crate::machine::effect::blocking;
use crate::machine::hibernate::ending::{end_qemu, give_space_back};
use crate::machine::hibernate::give_back::give_guest_back;
use crate::machine::hibernate::machine::GiveBack;
use crate::vm::monitor;
use crate::vm::process::ProcessEnd;

/// How long a QEMU that does not answer may take to end. An end that comes later is for another recovery.
const ENDING_LIMIT: Duration = Duration::from_secs(3);

/// Whether the guest was given back to its owner already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Owner {
    /// It waits for that.
    Waits,
    /// It was: the process that saved it went on, and its owner may have done anything with it since.
    HasTheGuest,
}

/// Brings an interrupted hibernation to its end. Its record goes when that is reached, and stays on every failure.
pub async fn recover(journal: Journal) -> Result<Recovered, Failure> {
    let client = match connect(journal.record()).await {
        // A guest that was given back has nothing to wait for, and its monitor may be in use.
        Err(_) if is_back(journal.record()) => None,
        connected => connected?,
    };
    recover_with(journal, client, Owner::Waits).await
}

/// The same with the monitor of that very QEMU; `None` if it is gone.
pub(super) async fn recover_with(
    journal: Journal,
    client: Option<Client>,
    owner: Owner,
) -> Result<Recovered, Failure> {
    let record = journal.record().clone();
    let (outcome, guest) = bring_to_an_end(&record, client, owner).await?;
    blocking(move || {
        journal.end().map_err(|error| {
            Failure::new(
                Code::StorageIo,
                format!("cannot remove the record of an operation that is over: {error}"),
            )
            .with_guest(guest)
        })
    })
    .await?;
    Ok(Recovered {
        operation: record.operation,
        name: record.vm_name,
        image: record.target,
        image_id: record.image_id,
        aim: record.aim,
        outcome,
        guest,
    })
}

/// Whether it is a snapshot whose guest was given back.
fn is_back(record: &Record) -> bool {
    record.aim.is_snapshot() && record.point != Point::Saving
}

async fn bring_to_an_end(
    record: &Record,
    client: Option<Client>,
    owner: Owner,
) -> Result<(Outcome, GuestState), Failure> {
    let image = Interrupted::new(&record.target, record.image_id);
    let is_back = is_back(record);
    let state = match &client {
        Some(client) => Some(monitor::run_state(client).await?),
        None => None,
    };
    let guest = match &state {
        None if is_back && record.qemu.is_alive() => GuestState::Unknown,
        state => guest_of(state.as_ref()),
    };
    let remains = {
        let image = image.clone();
        blocking(move || Ok(image.remains()?))
            .await
            .map_err(|failure| failure.with_guest(guest))?
    };
    let facts = Facts {
        aim: record.aim,
        point: record.point,
        was_running: record.was_running,
        remains,
        qemu: state,
    };
    let verdict = facts.verdict();
    tracing::debug!(operation = %record.operation, ?facts, ?verdict, "recovering");
    match (verdict, client) {
        (Verdict::EndQemu, Some(client)) => {
            let sealed = settle(image, remains)
                .await
                .map_err(|failure| failure.with_guest(guest))?;
            end_qemu(&client, record.qemu.pid, &record.target).await?;
            finish(sealed).await;
            Ok((Outcome::Hibernated, GuestState::Stopped))
        }
        (Verdict::KeepImage, _) => {
            finish(settle(image, remains).await?).await;
            Ok((Outcome::Hibernated, GuestState::Stopped))
        }
        (Verdict::KeepSnapshot, _) => {
            settle(image, remains)
                .await
                .map_err(|failure| failure.with_guest(guest))?;
            Ok((Outcome::Snapshot, guest))
        }
        (Verdict::DropSnapshot, _) => {
            blocking(move || Ok(image.remove_unfinished()?))
                .await
                .map_err(|failure| failure.with_guest(guest))?;
            let outcome = match guest {
                GuestState::Stopped => Outcome::QemuGone,
                _ => Outcome::GivenBack,
            };
            Ok((outcome, guest))
        }
        (Verdict::GiveBack { how, discard }, Some(client)) => {
            let how = match owner {
                Owner::Waits => how,
                Owner::HasTheGuest => GiveBack::AsItIs,
            };
            give_back(record, image, &client, how, discard)
                .await
                .map_err(|failure| failure.with_guest(guest))
        }
        (Verdict::Ask(doubt), _) => Err(ask(doubt, record).with_guest(guest)),
        // Nothing can be ended or given back without a QEMU.
        (Verdict::Sweep | Verdict::EndQemu | Verdict::GiveBack { .. }, _) => {
            blocking(move || Ok(image.remove_unfinished()?)).await?;
            Ok((Outcome::QemuGone, GuestState::Stopped))
        }
    }
}

/// The monitor of that very QEMU; `None` if it is gone.
async fn connect(record: &Record) -> Result<Option<Client>, Failure> {
    let pid = record.qemu.pid;
    if !record.qemu.is_alive() {
        return Ok(None);
    }
    let end = ProcessEnd::of(pid);
    let client = match Client::connect(&record.monitor, ConnectOptions::default()).await {
        Ok(client) => client,
        Err(error) => {
            // It may be ending just now, which the end of its memory takes a while for.
            if blocking(move || Ok(end.wait(ENDING_LIMIT).unwrap_or(false))).await? {
                return Ok(None);
            }
            let is_held = matches!(error, ConnectError::MonitorBusy { .. });
            let failure = Failure::from(error).while_doing(&format!(
                "a guest is in QEMU's process {pid}, and waits for its hibernation's end"
            ));
            return Err(if is_held {
                Failure {
                    message: format!(
                        "{failure}; where that is its supervisor, the guest's next hibernation ends this one first"
                    ),
                    ..failure
                }
            } else {
                failure
            });
        }
    };
    match client.peer_pid() {
        Some(found) if found == pid => Ok(Some(client)),
        found => Err(Failure::new(
            Code::Operator,
            format!(
                "a guest waits in QEMU's process {pid} for its hibernation's end, but at its monitor {} is process {}",
                record.monitor.display(),
                found.map_or_else(|| "of another PID namespace".to_owned(), |pid| pid.to_string()),
            ),
        )),
    }
}

/// An image that is being woken, or was, is settled: its changes of state were synced.
async fn settle(image: Interrupted, remains: Remains) -> Result<Option<SealedImage>, Failure> {
    if remains != Remains::Whole(ImageState::Sealed) {
        return Ok(None);
    }
    blocking(move || Ok(Some(image.settle()?))).await
}

/// What the hibernation would have done last.
async fn finish(sealed: Option<SealedImage>) {
    if let Some(sealed) = sealed {
        give_space_back(sealed).await;
    }
}

async fn give_back(
    record: &Record,
    image: Interrupted,
    client: &Client,
    how: GiveBack,
    discard: bool,
) -> Result<(Outcome, GuestState), Failure> {
    // As in a rollback: a whole image before its guest runs, a partial one when there is time.
    if discard {
        let image = image.clone();
        let removed = blocking(move || Ok(image.remove_whole()?)).await;
        removed.map_err(|failure| Failure {
            code: Code::Operator,
            ..failure.while_doing(&format!(
                "the guest in QEMU's process {} is the guest, and its image {} is older and must not be woken, but could \
                 not be removed",
                record.qemu.pid,
                record.target.display()
            ))
        })?;
    }
    let settings = Some(record.settings.clone());
    let given_back = give_guest_back(client, how, &mut Vec::new(), settings).await;
    let guest = match monitor::run_state(client).await {
        Ok(state) => guest_of(Some(&state)),
        Err(_) => GuestState::Unknown,
    };
    // Only now: for a guest that still waits, what is unfinished says that nobody took a whole image away.
    if given_back.is_ok() || guest == GuestState::Running {
        blocking(move || Ok(image.remove_unfinished()?)).await?;
    }
    given_back.map_err(|failure| failure.with_guest(guest))?;
    let outcome = if how == GiveBack::AsItIs {
        Outcome::RanOn
    } else {
        Outcome::GivenBack
    };
    Ok((outcome, guest))
}

fn ask(doubt: Doubt, record: &Record) -> Failure {
    let (pid, image) = (record.qemu.pid, record.target.display());
    let message = match doubt {
        Doubt::RunsTwice => format!(
            "the guest in QEMU's process {pid} went on although its image {image} was sealed, and that image was woken as \
             well: end one of the two, on whose disks both write"
        ),
        Doubt::ImageTakenAway => format!(
            "the image {image} ({}) was sealed, or about to be, and is not there: if it was moved away or woken it is the guest, and \
             QEMU's process {pid} has to be ended (`quit` on its monitor {}); if it was thrown away, the guest in that \
             process is (`cont` there)",
            record.image_id,
            record.monitor.display()
        ),
        Doubt::ImageOlderThanGuest => format!(
            "QEMU's process {pid} is gone, and its guest had gone on from the image {image}, which is older than the \
             guest's disks: remove the image (`dormouse image discard`), or wake it knowing that"
        ),
    };
    Failure::new(Code::Operator, message)
}

fn guest_of(state: Option<&RunState>) -> GuestState {
    match state {
        Some(RunState::Running) => GuestState::Running,
        Some(_) => GuestState::Paused,
        None => GuestState::Stopped,
    }
}
