//! `dormouse hibernate`: asks the VM's supervisor, or does it over a monitor of its own.

mod all;
mod dry_run;
pub(super) mod settled;
mod suspend;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use dormouse_qmp::{Client, ConnectError, ConnectOptions};
use dormouse_storage::ByteCount;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use uuid::Uuid;

use super::recover::{volumes, wakes};
use super::report::{Progress, Report};
use super::{HibernateArguments, HibernateMode, SaveArguments, TermArguments};
use crate::api::client::Supervisor;
use crate::api::types::{Ending, Hibernated, Key, NewOperation, Operation, OperationKind, Terms};
use crate::error::{Code, Failure};
use crate::machine::hibernate::limits::Limits;
use crate::machine::hibernate::machine::{Aim, CancelAnswer};
use crate::machine::hibernate::runner::Cancel;
use crate::machine::hibernate::{ImageWish, Request};
use crate::machine::wake::feeding::FeedRecord;
use crate::signals::Signals;
use crate::supervisor::ending::{How, LastEnding};
use crate::supervisor::operation::Prepared;
use crate::supervisor::request_queue::Priority;
use crate::supervisor::state_dir::{StateDir, VmRecord};
use crate::vm::process_identity::ProcessIdentity;

pub async fn hibernate(
    arguments: HibernateArguments,
    state: &StateDir,
    report: &Report,
) -> Result<ExitCode, Failure> {
    if arguments.mode == HibernateMode::SuspendToDisk {
        return suspend::suspend_to_disk(&arguments, state, report).await;
    }
    if arguments.agent.is_some() {
        return Err(Failure::new(
            Code::Usage,
            "--agent goes with --mode suspend-to-disk",
        ));
    }
    let image = image_wish(&arguments.save)?;
    if let Some(folder) = &arguments.to_dir {
        let folder = absolute(folder)?;
        return all::hibernate_all(&folder, &arguments, &image, state, report).await;
    }
    let to = match &arguments.to {
        Some(to) => absolute(to)?,
        None => return Err(Failure::new(Code::Usage, "say where the image goes with --to")),
    };
    if arguments.dry_run {
        let forecast = dry_run::forecast(to, &arguments, image, state).await?;
        report.result(&forecast, &dry_run::describe(&forecast));
        return Ok(ExitCode::SUCCESS);
    }
    let outcome = match (&arguments.name, &arguments.qmp) {
        (Some(name), _) => {
            let wish = wish(to, &arguments, &image);
            let signals = Signals::watch()?.for_several();
            by_supervisor(
                state,
                name,
                (wish, terms(&arguments.save, Priority::Normal)),
                signals,
                report,
            )
            .await
            .and_then(hibernated)
        }
        (None, Some(socket)) => {
            let progress = report.progress();
            let outcome = by_ourselves(socket, to, &arguments, image, (state, &progress)).await;
            progress.finish();
            outcome
        }
        (None, None) => Err(Failure::new(Code::Usage, "name a VM, or a monitor with --qmp")),
    };
    let hibernated = outcome?;
    report.result(&hibernated, &describe(&hibernated));
    Ok(ExitCode::SUCCESS)
}

/// An operation ends as what it was begun as.
fn hibernated(ending: Ending) -> Result<Hibernated, Failure> {
    match ending {
        Ending::Hibernated(hibernated) => Ok(*hibernated),
        _ => Err(something_else()),
    }
}

pub(super) fn something_else() -> Failure {
    Failure::new(
        Code::Internal,
        "the supervisor did something else than it was asked for",
    )
}

/// What the image is to be like.
pub(super) fn image_wish(arguments: &SaveArguments) -> Result<ImageWish, Failure> {
    Ok(ImageWish {
        compression: arguments.compress,
        key: arguments.key.read()?,
        rate_limit: arguments.rate_limit,
    })
}

pub(super) fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(path)
        .map_err(|error| Failure::new(Code::Usage, format!("{}: {error}", path.display())))
}

/// Where the volume of the image has to be mounted, wherever a supervisor stands.
pub(super) fn volume_mount(arguments: &SaveArguments) -> Option<PathBuf> {
    let given = arguments.volume_mount.as_ref()?;
    Some(std::path::absolute(given).unwrap_or_else(|_| given.clone()))
}

/// What a supervisor is asked for.
fn wish(to: PathBuf, arguments: &HibernateArguments, image: &ImageWish) -> NewOperation {
    let limits = limits(&arguments.save);
    NewOperation::Hibernate {
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
    }
}

pub(super) fn limits(arguments: &SaveArguments) -> Limits {
    Limits {
        total: arguments.timeout,
        stall: arguments.stall_timeout.unwrap_or(Limits::default().stall),
        lock: arguments.terms.lock_timeout.unwrap_or_default(),
    }
}

pub(super) fn as_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// On which terms it is asked for. Each operation gets its id here, so that it can be cancelled while it waits.
pub(super) fn terms(arguments: &SaveArguments, usual: Priority) -> Terms {
    terms_of(&arguments.terms, usual)
}

pub(super) fn terms_of(given: &TermArguments, usual: Priority) -> Terms {
    Terms {
        id: Some(given.operation_id.unwrap_or_else(Uuid::new_v4)),
        priority: given.priority.unwrap_or(usual),
        patience_ms: given.lock_timeout.map(as_ms).unwrap_or_default(),
    }
}

pub(super) fn operation_id(arguments: &SaveArguments) -> Uuid {
    arguments.terms.operation_id.unwrap_or_else(Uuid::new_v4)
}

/// The supervisor works; we watch, and pass on a Ctrl-C, which is a change in `signals`.
pub(super) async fn by_supervisor(
    state: &StateDir,
    name: &str,
    wish: (NewOperation, Terms),
    signals: watch::Receiver<()>,
    report: &Report,
) -> Result<Ending, Failure> {
    let supervisor = Supervisor::of(state, name);
    let progress = report.progress();
    let outcome = follow(&supervisor, &wish, signals, &progress, report).await;
    progress.finish();
    match outcome {
        // There is nobody to ask any more, or nobody yet.
        Err(failure) if failure.code == Code::Unreachable => {
            let id = wish.1.id.unwrap_or_default();
            settled::settled(state, Some(name), &wish.0, id)
                .unwrap_or_else(|| Err(with_hint(failure, state, name)))
        }
        outcome => outcome,
    }
}

async fn follow(
    supervisor: &Supervisor,
    (wish, terms): &(NewOperation, Terms),
    mut signals: watch::Receiver<()>,
    progress: &Progress,
    report: &Report,
) -> Result<Ending, Failure> {
    let mut operation = begin(supervisor, wish, terms, &mut signals).await?;
    let id = operation.id;
    loop {
        match (&operation.result, &operation.error) {
            (Some(ending), _) => {
                // The VM's name is free when this returns: whoever starts it next need not wait.
                if ending.is_of_the_guest() {
                    supervisor.wait_for_end().await;
                }
                return Ok(ending.clone());
            }
            (None, Some(problem)) => return Err(problem.clone().into()),
            (None, None) => {}
        }
        progress.tell(&operation);
        operation = tokio::select! {
            news = supervisor.news(id, operation.version) => news.map_err(|failure| {
                failure.while_doing(match operation.kind {
                    OperationKind::MoveVolumes => {
                        "the volumes may have been switched: the guest's next operation ends that, or, where the supervisor \
                         is gone, `dormouse recover`"
                    }
                    OperationKind::GrowVolume => "the disk may have grown, growing it again makes sure",
                    _ => "it may have ended well, look at the image or the guest's disk",
                })
            })?,
            Ok(()) = signals.changed() => {
                // An operation that has just ended takes no cancel, and its document tells how it ended.
                let answer = tokio::select! {
                    answer = supervisor.cancel(id) => answer,
                    Ok(()) = signals.changed() => return Err(unheard(supervisor)),
                };
                if let Ok(CancelAnswer::TooLate) = answer {
                    report.remark(match operation.kind {
                        OperationKind::Hibernate | OperationKind::Snapshot => "too late to cancel: the image is being sealed",
                        OperationKind::SuspendToDisk => {
                            "too late to cancel: the guest was told to suspend itself to its disk"
                        }
                        OperationKind::MoveVolumes => "too late to cancel: the volumes are being switched",
                        OperationKind::GrowVolume => "too late to cancel: the guest is being told",
                    });
                }
                continue;
            }
        };
    }
}

/// A request may wait for another operation; meanwhile a Ctrl-C takes it back.
async fn begin(
    supervisor: &Supervisor,
    wish: &NewOperation,
    terms: &Terms,
    signals: &mut watch::Receiver<()>,
) -> Result<Operation, Failure> {
    let mut begun = std::pin::pin!(supervisor.begin(wish, terms));
    let mut is_wanted = true;
    loop {
        tokio::select! {
            begun = &mut begun => {
                if let (Ok(operation), false) = (&begun, is_wanted) {
                    // The cancel came before the request. What comes of it shows in the operation's document.
                    let _ = supervisor.cancel(operation.id).await;
                }
                return begun;
            }
            Ok(()) = signals.changed() => {
                is_wanted = false;
                if let Some(id) = terms.id {
                    tokio::select! {
                        _ = supervisor.cancel(id) => {}
                        Ok(()) = signals.changed() => return Err(unheard(supervisor)),
                    }
                }
            }
        }
    }
}

/// Somebody asked twice for an end, and the supervisor did not answer once.
fn unheard(supervisor: &Supervisor) -> Failure {
    Failure::new(
        Code::Unreachable,
        format!(
            "the supervisor of VM {} does not answer; the operation may go on, `dormouse status` tells when it can be asked again",
            supervisor.name()
        ),
    )
}

/// A guest can outlive its supervisor; then it is reached in another way.
fn with_hint(failure: Failure, state: &StateDir, name: &str) -> Failure {
    let socket = state.monitor_socket(name);
    let qemu = socket
        .parent()
        .and_then(VmRecord::read)
        .and_then(|record| record.living());
    match (failure.code, qemu) {
        (Code::Unreachable, Some(pid)) => {
            let folder = socket.parent();
            let is_fed = folder.is_some_and(|folder| !matches!(FeedRecord::read(folder), Ok(None)));
            let way = if is_fed {
                format!(
                    "its memory was still coming from an image: `dormouse recover {name}` feeds it the rest first"
                )
            } else if state.is_interrupted(pid) {
                format!("an operation of it was interrupted: `dormouse recover {name}` ends that first")
            } else {
                format!("reach it with --qmp {}", socket.display())
            };
            Failure {
                message: format!("{failure}; its QEMU lives as process {pid}: {way}"),
                ..failure
            }
        }
        _ => failure,
    }
}

/// Takes the monitor for one operation.
async fn by_ourselves(
    socket: &Path,
    target: PathBuf,
    arguments: &HibernateArguments,
    image: ImageWish,
    (state, progress): (&StateDir, &Progress),
) -> Result<Hibernated, Failure> {
    let signals = Signals::watch()?;
    let id = operation_id(&arguments.save);
    if let Some(settled) = settled::settled(state, None, &wish(target.clone(), arguments, &image), id) {
        return hibernated(settled?);
    }
    let (client, request) = attach(socket, target, &arguments.save, image, state).await?;
    let name = state
        .is_monitor_of(&request.vm_name, &request.monitor)
        .then(|| request.vm_name.clone());
    let prepared = Prepared::new(id, OperationKind::Hibernate);
    let (documents, cancel) = (prepared.watch(), prepared.cancel());
    let work = prepared.hibernate(client, request);
    let outcome = attend(work, documents, &cancel, signals, progress).await;
    let hibernated = outcome.map(Hibernated::from)?;
    if let Some(name) = name {
        note_ending(state, &name, id, &hibernated);
    }
    Ok(hibernated)
}

/// A guest whose supervisor was killed had nobody else to write down how it ended.
fn note_ending(state: &StateDir, name: &str, operation: Uuid, hibernated: &Hibernated) {
    let how = How::Hibernated {
        operation,
        image: hibernated.image.clone(),
        image_id: hibernated.image_id,
    };
    let ending = LastEnding {
        result: Some(Ending::Hibernated(Box::new(hibernated.clone()))),
        ..LastEnding::now(name, how)
    };
    if let Err(error) = state.note_ending(&ending) {
        tracing::warn!(%error, name, "cannot write down how the VM ended");
    }
}

/// Connects to a monitor that is free; what is asked for of the guest behind it.
pub(super) async fn attach(
    socket: &Path,
    target: PathBuf,
    arguments: &SaveArguments,
    image: ImageWish,
    state: &StateDir,
) -> Result<(Client, Request), Failure> {
    let monitor = absolute(socket)?;
    state.make()?;
    let mut limits = limits(arguments);
    let begun = Instant::now();
    let client = connect_in_time(socket, limits.lock).await?;
    // What was waited for the monitor is not waited again for the image.
    limits.lock = limits.lock.saturating_sub(begun.elapsed());
    wakes::check_over(client.peer_pid(), state)?;
    volumes::check_over(client.peer_pid(), state)?;
    let (vm_name, record) = known_of(socket, client.peer_pid());
    // The command line that its process shows names the disks that it was started with.
    let foreign = || {
        let qemu = client.peer_pid().and_then(ProcessIdentity::of)?;
        VmRecord::read(&state.machine(qemu))
    };
    let record = record.or_else(foreign);
    let (command_line, shape) = record.map(|record| (record.command_line, record.shape)).unzip();
    let request = Request {
        aim: Aim::Hibernate,
        live: None,
        target,
        volume_mount: volume_mount(arguments),
        replace: arguments.replace,
        engine: arguments.engine,
        channels: arguments.channels,
        image,
        monitor,
        operations: state.operations(),
        limits,
        vm_name,
        command_line,
        shape: shape.flatten(),
    };
    Ok((client, request))
}

/// A monitor serves one client at a time; another one that has it is waited for as long as was said.
pub(super) async fn connect_in_time(socket: &Path, patience: Duration) -> Result<Client, Failure> {
    let begun = Instant::now();
    loop {
        match Client::connect(socket, ConnectOptions::default()).await {
            Err(ConnectError::MonitorBusy { .. }) if begun.elapsed() < patience => {}
            Err(error @ ConnectError::MonitorBusy { .. }) if patience > Duration::ZERO => {
                let waited = format!("waited {}", humantime::format_duration(patience));
                let failure = Failure::from(error).while_doing(&waited);
                let code = Code::TimedOut;
                return Err(Failure { code, ..failure });
            }
            connected => return Ok(connected?),
        }
    }
}

/// Tells where the work is, and passes a Ctrl-C to it.
pub(super) async fn attend<T>(
    work: impl Future<Output = T>,
    mut documents: watch::Receiver<Operation>,
    cancel: &mpsc::Sender<Cancel>,
    mut signals: Signals,
    progress: &Progress,
) -> T {
    let mut work = std::pin::pin!(work);
    loop {
        tokio::select! {
            outcome = &mut work => return outcome,
            Ok(()) = documents.changed() => progress.tell(&documents.borrow_and_update()),
            _ = signals.next() => {
                // The answer shows in the outcome.
                let (tell, _) = oneshot::channel();
                let _ = cancel.try_send(tell);
            }
        }
    }
}

/// A guest whose supervisor died is known by the record that it left: what its process shows is not what the user gave.
pub(super) fn known_of(socket: &Path, pid: Option<u32>) -> (String, Option<VmRecord>) {
    let folder = socket
        .canonicalize()
        .ok()
        .and_then(|socket| socket.parent().map(Path::to_owned));
    match folder.and_then(|folder| Some((VmRecord::read(&folder)?, folder))) {
        Some((record, folder)) if pid.is_some() && record.living() == pid => (
            folder
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            Some(record),
        ),
        _ => ("vm".to_owned(), None),
    }
}

fn describe(hibernated: &Hibernated) -> String {
    let took = |phase: &str| hibernated.timings_ms.get(phase).copied().unwrap_or_default();
    let passed_over = hibernated
        .choice
        .passed_over
        .iter()
        .map(|why| format!("\n{why}"))
        .collect::<String>();
    let compressed = if hibernated.stored_bytes < hibernated.data_bytes {
        format!(" as {}", ByteCount(hibernated.stored_bytes))
    } else {
        String::new()
    };
    let (data, zero) = (ByteCount(hibernated.data_bytes), ByteCount(hibernated.zero_bytes));
    let times = match hibernated.pause_ms {
        Some(pause_ms) => {
            let memory_ms = took("SavingMemory");
            format!(
                "paused {pause_ms:.0} ms: device state {:.0} ms, RAM {memory_ms:.0} ms ({data}{compressed} at {:.2} GB/s, {zero} of zeros left out), seal {:.0} ms",
                took("SavingDevices"),
                hibernated.data_bytes as f64 / 1e6 / memory_ms.max(0.001),
                took("Syncing") + took("Sealing"),
            )
        }
        None => format!("by an earlier command: {data}{compressed}, {zero} of zeros left out"),
    };
    format!(
        "hibernated to {} ({}, engine: {}, {})\n{times}{passed_over}",
        hibernated.image.display(),
        hibernated.storage.kind,
        hibernated.choice.engine.name(),
        hibernated.storage.backend,
    )
}
