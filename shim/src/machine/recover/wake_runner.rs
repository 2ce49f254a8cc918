//! Looks at an interrupted wake, has it decided, and acts.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use dormouse_qmp::view::machine::RunState;
use dormouse_qmp::{Client, ConnectOptions};
use dormouse_storage::{Image, ImageError, ImageState};
use serde::Serialize;
use uuid::Uuid;

use super::wake::{Doubt, Facts, Mark, Qemu, Verdict};
use crate::error::{Code, Failure, GuestState};
use crate::journal::Journal;
use crate::machine::effect::blocking;
use crate::machine::wake::record::Record;
use crate::machine::wake::resume;
use crate::machine::wake::take_over::has_the_guest;
use crate::vm::monitor;
use crate::vm::process::ProcessEnd;

/// How long QEMU may take to greet or to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(5);

/// How long a QEMU that was killed may take to be gone: the end of its memory takes a while.
const ENDING_LIMIT: Duration = Duration::from_secs(60);

/// How an interrupted wake ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RecoveredWake {
    /// The wake.
    pub operation: Uuid,
    /// The VM.
    pub name: String,
    /// Its image.
    pub image: PathBuf,
    /// The image's id.
    pub image_id: Uuid,
    /// Which end it was.
    pub outcome: WakeOutcome,
    /// What the guest does now.
    pub guest: GuestState,
}

/// The ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum WakeOutcome {
    /// The guest is awake in its QEMU, without a supervisor; the image, if it is there, is used up.
    Awake,
    /// The guest has not run, and QEMU is gone: the image, if no other wake has taken it, is the guest.
    NotWoken,
    /// The guest was awake, and QEMU has ended since.
    HasEnded,
    /// The guest is awake, and not all of its memory is there: the recovery of its feed goes on.
    BeingFed,
}

/// Brings an interrupted wake to its end. Its record goes when that is reached, and stays on every failure.
pub async fn recover(journal: Journal<Record>) -> Result<RecoveredWake, Failure> {
    let record = journal.record().clone();
    let (outcome, guest) = bring_to_an_end(&record).await?;
    blocking(move || {
        journal.end().map_err(|error| {
            Failure::new(
                Code::StorageIo,
                format!("cannot remove the record of a wake that is over: {error}"),
            )
            .with_guest(guest)
        })
    })
    .await?;
    Ok(RecoveredWake {
        operation: record.operation,
        name: record.vm_name,
        image: record.image,
        image_id: record.image_id,
        outcome,
        guest,
    })
}

async fn bring_to_an_end(record: &Record) -> Result<(WakeOutcome, GuestState), Failure> {
    // Held before its process is looked at, so that a process id that is used again is not taken for it.
    let end = ProcessEnd::of(record.qemu.pid);
    let (image, mark) = look_at_image(record).await?;
    let client = connect(record).await?;
    let qemu = look_at_qemu(record, client.as_ref()).await?;
    let facts = Facts {
        point: record.point,
        shall_run: record.shall_run,
        is_fed: record.is_fed,
        is_of_others: record.is_of_others,
        image: mark,
        qemu,
    };
    let verdict = facts.verdict();
    tracing::debug!(operation = %record.operation, ?facts, ?verdict, "recovering");
    let guest = guest_of(qemu);
    match verdict {
        Verdict::Undo => {
            if !matches!(qemu, Qemu::Gone | Qemu::Empty) {
                end_qemu(record, end).await?;
            }
            if let (Some(mut image), Mark::Waking) = (image, mark) {
                blocking(move || Ok(image.mark(ImageState::Sealed)?)).await?;
            }
            Ok((WakeOutcome::NotWoken, GuestState::Stopped))
        }
        Verdict::Finish { run } => {
            let mut guest = guest;
            if let (true, Some(client)) = (run, &client) {
                resume::run(client)
                    .await
                    .map_err(|failure| failure.with_guest(GuestState::Unknown))?;
                guest = GuestState::Running;
            }
            if let Some(image) = image {
                blocking(move || use_up(image))
                    .await
                    .map_err(|failure| failure.with_guest(guest))?;
            }
            Ok((WakeOutcome::Awake, guest))
        }
        Verdict::Over => Ok((WakeOutcome::HasEnded, GuestState::Stopped)),
        // It runs as far as its memory goes.
        Verdict::LeaveToFeed => match &client {
            Some(client) if qemu == Qemu::Waits && record.shall_run => {
                resume::run(client)
                    .await
                    .map_err(|failure| failure.with_guest(GuestState::Unknown))?;
                Ok((WakeOutcome::BeingFed, GuestState::Running))
            }
            _ => Ok((WakeOutcome::BeingFed, guest)),
        },
        Verdict::Ask(doubt) => Err(ask(doubt, record).with_guest(guest)),
    }
}

/// The image, held, and what it says.
async fn look_at_image(record: &Record) -> Result<(Option<Image>, Mark), Failure> {
    let (path, id, wake) = (record.image.clone(), record.image_id, record.operation);
    blocking(move || {
        let image = match Image::open_locked(&path) {
            Ok(image) if image.id() == id => image,
            Ok(_) => return Ok((None, Mark::NotThere)),
            Err(ImageError::NotAnImage { .. }) => return Ok((None, Mark::NotThere)),
            Err(ImageError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
                return Ok((None, Mark::NotThere));
            }
            // Who holds it works with it; storage that fails may come back.
            Err(error) => return Err(error.into()),
        };
        let is_ours = image.note().wake == wake;
        let mark = match image.state() {
            ImageState::Sealed => Mark::Sealed,
            ImageState::Waking if is_ours => Mark::Waking,
            ImageState::Consumed if is_ours => Mark::Used,
            _ => Mark::Others,
        };
        Ok((Some(image), mark))
    })
    .await
}

/// The monitor of that very QEMU; `None` if it is gone or does not answer.
async fn connect(record: &Record) -> Result<Option<Client>, Failure> {
    if !record.qemu.is_alive() {
        return Ok(None);
    }
    let options = ConnectOptions::default().with_greeting_timeout(ANSWER_LIMIT);
    let Ok(client) = Client::connect(&record.monitor, options).await else {
        return Ok(None);
    };
    match client.peer_pid() {
        Some(found) if found == record.qemu.pid => Ok(Some(client)),
        _ => Err(Failure::new(
            Code::Operator,
            format!(
                "a guest was being woken in QEMU's process {}, but at its monitor {} is another process",
                record.qemu.pid,
                record.monitor.display()
            ),
        )),
    }
}

async fn look_at_qemu(record: &Record, client: Option<&Client>) -> Result<Qemu, Failure> {
    let (state, is_empty) = match client {
        Some(client) => {
            // What it is in the middle of is over soon, whichever way: nobody feeds it any more.
            let is_empty = record.is_of_others && matches!(has_the_guest(client).await, Ok(false));
            let asked = tokio::time::timeout(ANSWER_LIMIT, monitor::run_state(client)).await;
            (asked.ok().and_then(Result::ok), is_empty)
        }
        None => (None, false),
    };
    Ok(match state {
        None if record.qemu.is_alive() => Qemu::Silent,
        None => Qemu::Gone,
        Some(_) if is_empty => Qemu::Empty,
        Some(RunState::Running) => Qemu::Runs,
        Some(RunState::Paused | RunState::Inmigrate | RunState::Prelaunch) => Qemu::Waits,
        Some(_) => Qemu::Stopped,
    })
}

/// As a wake ends a QEMU whose guest has not run: it has nothing to put in order.
async fn end_qemu(record: &Record, end: ProcessEnd) -> Result<(), Failure> {
    let (qemu, pid) = (record.qemu, record.qemu.pid);
    blocking(move || {
        let failed = |why: &dyn std::fmt::Display| {
            Failure::new(
                Code::Operator,
                format!("QEMU's process {pid}, whose guest has not run, could not be ended: {why}"),
            )
        };
        // What is held is that process, or the process was gone before.
        if qemu.is_alive() {
            end.kill().map_err(|error| failed(&error))?;
        }
        match end.wait(ENDING_LIMIT) {
            Ok(false) => Err(failed(&format!("it is still there after {ENDING_LIMIT:?}"))),
            Ok(true) => Ok(()),
            Err(_) if !qemu.is_alive() => Ok(()),
            Err(error) => Err(failed(&error)),
        }
    })
    .await
}

fn use_up(mut image: Image) -> Result<(), Failure> {
    // An image that was sealed goes the whole way: its guest runs.
    if image.state() == ImageState::Sealed {
        image.mark(ImageState::Waking)?;
    }
    if image.state() == ImageState::Waking {
        image.mark(ImageState::Consumed)?;
    }
    Ok(())
}

fn guest_of(qemu: Qemu) -> GuestState {
    match qemu {
        Qemu::Gone | Qemu::Empty => GuestState::Stopped,
        Qemu::Silent => GuestState::Unknown,
        Qemu::Runs => GuestState::Running,
        Qemu::Waits | Qemu::Stopped => GuestState::Paused,
    }
}

fn ask(doubt: Doubt, record: &Record) -> Failure {
    let (pid, image) = (record.qemu.pid, record.image.display());
    let message = match doubt {
        Doubt::MayHaveRun => format!(
            "QEMU's process {pid} is gone, and was about to run the guest of {image}, or had: it may have written to its disks, \
             so its image stays marked as waking and no wake takes it. Start the guest from its disks and remove the image \
             (`dormouse image discard --force`), or save what is in it (`dormouse image export`)"
        ),
        Doubt::RunsTwice => format!(
            "the guest of {image} is in QEMU's process {pid}, and another wake has woken it as well: end one of the two, on whose \
             disks both write"
        ),
        Doubt::ImageNotThere => format!(
            "the wake of {image} ({}) was interrupted before its guest ran, and the image is not there: bring it back, and recover \
             again",
            record.image_id
        ),
        Doubt::Unexpected => format!(
            "the wake of {image} was interrupted before QEMU's process {pid} was told to run its guest, which nevertheless has run, \
             or was saved elsewhere: look at its monitor {}, end what has to end, and remove the image or the record",
            record.monitor.display()
        ),
        Doubt::Held => format!(
            "QEMU's process {pid} has the guest of {image}, which has not run, and is not Dormouse's to end: have its owner end it \
             without running the guest, and recover again; the image wakes nowhere until then"
        ),
        Doubt::Silent => {
            return Failure::new(
                Code::Unreachable,
                format!(
                    "a guest was being woken in QEMU's process {pid}, which does not answer at its monitor {}",
                    record.monitor.display()
                ),
            );
        }
    };
    Failure::new(Code::Operator, message)
}
