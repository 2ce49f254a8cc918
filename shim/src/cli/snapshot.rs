//! `dormouse snapshot`: as `dormouse hibernate`, but the guest goes on.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use dormouse_storage::ByteCount;

use super::SaveArguments;
use super::hibernate::settled::settled;
use super::hibernate::{
    absolute, as_ms, attach, attend, by_supervisor, image_wish, limits, operation_id, something_else, terms,
    volume_mount,
};
use super::report::{Progress, Report};
use crate::api::snapshot::{NewLive, NewSnapshot, Snapshot};
use crate::api::types::{Ending, Key, NewOperation, OperationKind};
use crate::error::{Code, Failure, GuestState};
use crate::machine::hibernate::live::{LiveLimits, Passes};
use crate::machine::hibernate::machine::Aim;
use crate::machine::hibernate::{ImageWish, Request};
use crate::signals::Signals;
use crate::supervisor::operation::Prepared;
use crate::supervisor::request_queue::Priority;
use crate::supervisor::state_dir::StateDir;

/// A copy of a guest.
#[derive(Debug, Args)]
pub struct SnapshotArguments {
    /// Name of a VM that `dormouse run` or `dormouse wake` supervises
    #[arg(required_unless_present = "qmp", conflicts_with = "qmp")]
    name: Option<String>,
    /// QMP socket of a QEMU without a supervisor; its monitor must be free
    #[arg(long, value_name = "SOCKET")]
    qmp: Option<PathBuf>,
    /// Where the image goes
    #[arg(long, value_name = "PATH")]
    to: PathBuf,
    /// Let the guest stand still after it, its disks flushed and let go of, until somebody runs it with QMP's `cont`: copy
    /// the disks meanwhile, and image and disks belong together
    #[arg(long)]
    leave_paused: bool,
    /// Save the guest while it runs, and pause it only for what is left; takes the stream engine, over one connection
    #[arg(long)]
    live: bool,
    /// With --live: the pause to aim at [default: 300ms]
    #[arg(long, value_name = "TIME", requires = "live", value_parser = humantime::parse_duration)]
    max_pause: Option<Duration>,
    /// With --live: pause the guest after so many passes over its memory, whatever is left [default: 10]
    #[arg(long, value_name = "N", requires = "live", value_parser = clap::value_parser!(u64).range(1..))]
    max_passes: Option<u64>,
    /// With --live: pause the guest after this time, whatever is left [default: 5m]
    #[arg(long, value_name = "TIME", requires = "live", value_parser = humantime::parse_duration)]
    max_live: Option<Duration>,
    #[command(flatten)]
    save: SaveArguments,
}

impl SnapshotArguments {
    fn live(&self) -> Option<NewLive> {
        let limits = LiveLimits::default();
        self.live.then(|| NewLive {
            max_pause_ms: as_ms(self.max_pause.unwrap_or(limits.max_pause)),
            max_passes: self.max_passes.unwrap_or(limits.max_passes),
            max_time_ms: as_ms(self.max_live.unwrap_or(limits.max_time)),
        })
    }
}

pub async fn snapshot(
    arguments: SnapshotArguments,
    state: &StateDir,
    report: &Report,
) -> Result<ExitCode, Failure> {
    let image = image_wish(&arguments.save)?;
    let to = absolute(&arguments.to)?;
    let snapshot = match (&arguments.name, &arguments.qmp) {
        (Some(name), _) => {
            let wish = NewOperation::Snapshot(wish(to, &arguments, &image));
            let signals = Signals::watch()?.for_several();
            let terms = terms(&arguments.save, Priority::Normal);
            match by_supervisor(state, name, (wish, terms), signals, report).await? {
                Ending::Snapshot(snapshot) => *snapshot,
                _ => {
                    return Err(something_else());
                }
            }
        }
        (None, Some(socket)) => {
            let progress = report.progress();
            let outcome = by_ourselves(socket, to, &arguments, image, (state, &progress)).await;
            progress.finish();
            outcome?
        }
        (None, None) => return Err(Failure::new(Code::Usage, "name a VM, or a monitor with --qmp")),
    };
    report.result(&snapshot, &describe(&snapshot));
    Ok(ExitCode::SUCCESS)
}

fn wish(to: PathBuf, arguments: &SnapshotArguments, image: &ImageWish) -> NewSnapshot {
    let limits = limits(&arguments.save);
    NewSnapshot {
        to,
        volume_mount: volume_mount(&arguments.save),
        replace: arguments.save.replace,
        engine: arguments.save.engine,
        channels: arguments.save.channels,
        compress: image.compression,
        key: image.key.clone().map(Key),
        rate_limit_bytes: image.rate_limit.map(|limit| limit.0),
        timeout_ms: limits.total.map(as_ms),
        stall_timeout_ms: Some(as_ms(limits.stall)),
        leave_paused: arguments.leave_paused,
        live: arguments.live(),
    }
}

/// Takes the monitor for one operation.
async fn by_ourselves(
    socket: &Path,
    target: PathBuf,
    arguments: &SnapshotArguments,
    image: ImageWish,
    (state, progress): (&StateDir, &Progress),
) -> Result<Snapshot, Failure> {
    let signals = Signals::watch()?;
    let id = operation_id(&arguments.save);
    let wish = NewOperation::Snapshot(wish(target.clone(), arguments, &image));
    match settled(state, None, &wish, id).transpose()? {
        None => {}
        Some(Ending::Snapshot(snapshot)) => return Ok(*snapshot),
        Some(_) => return Err(something_else()),
    }
    let (client, request) = attach(socket, target, &arguments.save, image, state).await?;
    let aim = Aim::Snapshot {
        leave_paused: arguments.leave_paused,
    };
    let prepared = Prepared::new(id, OperationKind::Snapshot);
    let (documents, cancel) = (prepared.watch(), prepared.cancel());
    let live = arguments.live().map(Into::into);
    let work = prepared.hibernate(client, Request { aim, live, ..request });
    let outcome = attend(work, documents, &cancel, signals, progress).await;
    outcome.map(Snapshot::from)
}

fn describe(snapshot: &Snapshot) -> String {
    let passed_over = (snapshot.choice.passed_over.iter())
        .map(|why| format!("\n{why}"))
        .collect::<String>();
    let guest = match snapshot.guest {
        GuestState::Running => "the guest goes on",
        GuestState::Paused => "the guest stands still",
        GuestState::Stopped => "QEMU has ended since",
        GuestState::Unknown => "QEMU does not say what the guest does",
    };
    let live = match snapshot.live {
        None => String::new(),
        Some(Passes {
            passes,
            converged: true,
        }) => format!(" after {passes} passes while it ran"),
        Some(Passes { passes, .. }) => {
            format!(" after {passes} passes while it ran, which did not converge")
        }
    };
    let times = match (snapshot.sealed_after_ms, snapshot.pause_ms) {
        (Some(sealed_after_ms), Some(pause_ms)) => {
            format!(", complete after {sealed_after_ms:.0} ms\npaused {pause_ms:.0} ms")
        }
        _ => ", taken by an earlier command".to_owned(),
    };
    format!(
        "snapshot in {} ({}, engine: {}, {}){times}{live} ({} as {}, {} of zeros left out); {guest}{passed_over}",
        snapshot.image.display(),
        snapshot.storage.kind,
        snapshot.choice.engine.name(),
        snapshot.storage.backend,
        ByteCount(snapshot.data_bytes),
        ByteCount(snapshot.stored_bytes),
        ByteCount(snapshot.zero_bytes),
    )
}
