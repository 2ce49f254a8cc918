//! `dormouse hibernate`: asks the VM's supervisor, or does it over a monitor of its own.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use dormouse_qmp::{Client, ConnectOptions};
use dormouse_storage::ByteCount;
use tokio::sync::oneshot;

use super::HibernateArguments;
use super::report::{Progress, Report};
use crate::api::client::Supervisor;
use crate::api::types::{Hibernated, Key, NewOperation, Operation};
use crate::error::{Code, Failure};
use crate::machine::hibernate::machine::CancelAnswer;
use crate::machine::hibernate::{ImageWish, Request};
use crate::signals::Signals;
use crate::supervisor::operation::Prepared;
use crate::supervisor::state_dir::{StateDir, VmRecord};

pub async fn hibernate(
    arguments: HibernateArguments,
    state: &StateDir,
    report: &Report,
) -> Result<ExitCode, Failure> {
    let to = std::path::absolute(&arguments.to)
        .map_err(|error| Failure::new(Code::Usage, format!("{}: {error}", arguments.to.display())))?;
    let image = ImageWish {
        compression: arguments.compress,
        key: arguments.key.read()?,
        rate_limit: arguments.rate_limit,
    };
    let progress = report.progress();
    let outcome = match (&arguments.name, &arguments.qmp) {
        (Some(name), _) => {
            let supervisor = Supervisor::of(state, name);
            let wish = NewOperation::Hibernate {
                to,
                replace: arguments.replace,
                engine: arguments.engine,
                channels: arguments.channels,
                compress: image.compression,
                key: image.key.map(Key),
                rate_limit_bytes: image.rate_limit.map(|limit| limit.0),
            };
            by_supervisor(&supervisor, wish, &progress, report)
                .await
                .map_err(|failure| with_hint(failure, state, name))
        }
        (None, Some(socket)) => by_ourselves(socket, to, &arguments, image, (state, &progress)).await,
        (None, None) => Err(Failure::new(Code::Usage, "name a VM, or a monitor with --qmp")),
    };
    progress.finish();
    let hibernated = outcome?;
    report.result(&hibernated, &describe(&hibernated));
    Ok(ExitCode::SUCCESS)
}

/// The supervisor works; we watch, and pass on a Ctrl-C.
async fn by_supervisor(
    supervisor: &Supervisor,
    wish: NewOperation,
    progress: &Progress,
    report: &Report,
) -> Result<Hibernated, Failure> {
    let mut signals = Signals::watch()?;
    let mut operation = supervisor.begin(&wish).await?;
    let id = operation.id;
    loop {
        match outcome(&operation) {
            Some(Ok(hibernated)) => {
                // The VM's name is free when this returns: whoever wakes it next need not wait.
                supervisor.wait_for_end().await;
                return Ok(hibernated);
            }
            Some(Err(failure)) => return Err(failure),
            None => {}
        }
        progress.tell(&operation);
        operation = tokio::select! {
            news = supervisor.news(id, operation.version) => news.map_err(|failure| {
                failure.while_doing("the hibernation may have ended well, look at the image")
            })?,
            _ = signals.next() => {
                if supervisor.cancel(id).await? == CancelAnswer::TooLate {
                    report.remark("too late to cancel: the image is being sealed");
                }
                continue;
            }
        };
    }
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
            let way = if state.is_interrupted(pid) {
                format!("a hibernation of it was interrupted: `dormouse recover {name}` ends that first")
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
    let mut signals = Signals::watch()?;
    let monitor = std::path::absolute(socket)
        .map_err(|error| Failure::new(Code::Usage, format!("{}: {error}", socket.display())))?;
    state.make()?;
    let client = Client::connect(socket, ConnectOptions::default()).await?;
    let (vm_name, record) = known_of(socket, client.peer_pid());
    let (command_line, shape) = record.map(|record| (record.command_line, record.shape)).unzip();
    let request = Request {
        target,
        replace: arguments.replace,
        engine: arguments.engine,
        channels: arguments.channels,
        image,
        monitor,
        operations: state.operations(),
        vm_name,
        command_line,
        shape: shape.flatten(),
    };
    let prepared = Prepared::new();
    let (mut documents, cancel) = (prepared.watch(), prepared.cancel());
    let mut work = std::pin::pin!(prepared.drive(client, request));
    loop {
        tokio::select! {
            outcome = &mut work => return outcome.map(Hibernated::from),
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

fn outcome(operation: &Operation) -> Option<Result<Hibernated, Failure>> {
    match (&operation.result, &operation.error) {
        (Some(result), _) => Some(Ok(result.clone())),
        (None, Some(problem)) => Some(Err(problem.clone().into())),
        (None, None) => None,
    }
}

fn describe(hibernated: &Hibernated) -> String {
    let took = |phase: &str| hibernated.timings_ms.get(phase).copied().unwrap_or_default();
    let memory_ms = took("SavingMemory");
    let rate = hibernated.data_bytes as f64 / 1e6 / memory_ms.max(0.001);
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
    format!(
        "hibernated to {} ({}, engine: {}, {})\npaused {:.0} ms: device state {:.0} ms, RAM {:.0} ms ({}{compressed} at {rate:.2} GB/s, {} of zeros left out), seal {:.0} ms{passed_over}",
        hibernated.image.display(),
        hibernated.storage.kind,
        hibernated.choice.engine.name(),
        hibernated.storage.backend,
        hibernated.pause_ms,
        took("SavingDevices"),
        memory_ms,
        ByteCount(hibernated.data_bytes),
        ByteCount(hibernated.zero_bytes),
        took("Sealing"),
    )
}
