//! The supervisor: the one owner of one VM's QEMU.
//!
//! `dormouse run` and `dormouse wake` are this in two moods. It holds the VM's folder, QEMU's process and its monitor,
//! runs one operation at a time, serves the VM's API, passes signals on, and ends with QEMU's own status.
//!
//! ```text
//!   API clients ──► routes ──requests──► supervise ──► operation ──► QEMU
//!                     ▲                     │  ▲            │
//!                     └──────documents──────┘  └── signals, end of QEMU
//! ```
//!
//! What it guarantees:
//!
//! - If it dies QEMU lives on: nothing of QEMU hangs on the supervisor's life.
//! - It ends only after QEMU has ended and the operation under way has said how it ended.

pub mod operation;
pub mod state_dir;

use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use dormouse_qmp::Client;
use dormouse_storage::Image;
use rustix::process::{Pid, kill_process};
use tokio::sync::{mpsc, oneshot, watch};
use uuid::Uuid;

use crate::api::routes;
use crate::api::types::{NewOperation, Operation, Ram, Woken};
use crate::error::{Code, Failure};
use crate::machine::hibernate;
use crate::machine::hibernate::machine::CancelAnswer;
use crate::machine::hibernate::runner::Cancel;
use crate::signals::Signals;
use crate::vm::process::QemuProcess;
use operation::Prepared;
use state_dir::VmDirectory;

/// How long a finished operation's document is kept for a watcher that has not read it, once QEMU is gone.
const FAREWELL: Duration = Duration::from_secs(2);

/// Requests from API clients that may wait.
const REQUEST_QUEUE: usize = 16;

/// Everything that a supervisor owns.
#[derive(Debug)]
pub struct Supervised {
    /// The VM's folder.
    pub directory: VmDirectory,
    /// Its QEMU.
    pub qemu: QemuProcess,
    /// Where its RAM is, for status.
    pub ram: Ram,
    /// The image that it was woken from, locked as long as it is in use.
    pub image: Option<Image>,
    /// How it was woken, for status.
    pub woken: Option<Woken>,
    /// QEMU's command line as the user gave it.
    pub command_line: Vec<String>,
}

/// What API clients ask a supervisor for.
#[derive(Debug)]
pub enum Request {
    /// Begin an operation.
    Begin(NewOperation, oneshot::Sender<Result<Uuid, Failure>>),
    /// Cancel it.
    Cancel(Uuid, oneshot::Sender<Result<CancelAnswer, Failure>>),
}

/// What API clients hold of a supervisor.
#[derive(Debug, Clone)]
pub struct Handle {
    /// The VM's name.
    pub name: String,
    /// QEMU's process.
    pub pid: u32,
    /// QEMU's monitor, for questions.
    pub client: Client,
    /// Where its RAM is.
    pub ram: Ram,
    /// How it was woken.
    pub woken: Option<Woken>,
    /// Where requests go.
    pub requests: mpsc::Sender<Request>,
    /// The operation that runs or ran last.
    pub operation: watch::Receiver<Option<watch::Receiver<Operation>>>,
    /// Told the version of every ended operation's document that was read.
    pub read: watch::Sender<Option<Uuid>>,
}

/// Supervises until QEMU has ended; returns its status.
pub async fn supervise(mut supervised: Supervised) -> Result<ExitStatus, Failure> {
    let pid = supervised
        .qemu
        .pid()
        .ok_or_else(|| Failure::new(Code::Internal, "QEMU ended before it was supervised"))?;
    let internal =
        |what: &str, error: std::io::Error| Failure::new(Code::Internal, format!("{what}: {error}"));
    supervised
        .directory
        .record(pid, &supervised.command_line)
        .map_err(|error| internal("cannot write the VM's record", error))?;
    let mut signals = Signals::watch()?;
    let (requests, mut requested) = mpsc::channel(REQUEST_QUEUE);
    let (current, operation) = watch::channel(None);
    let handle = Handle {
        name: supervised.directory.name().to_owned(),
        pid,
        client: supervised.qemu.client().clone(),
        ram: supervised.ram.clone(),
        woken: supervised.woken.clone(),
        requests,
        operation,
        read: watch::Sender::new(None),
    };
    let api = routes::Server::start(&supervised.directory.path().join("api.sock"), handle.clone())
        .map_err(|error| internal("cannot serve the VM's API", error))?;

    let mut desk = Desk {
        current,
        running: None,
    };
    let status = loop {
        tokio::select! {
            status = supervised.qemu.wait() => break status?,
            signal = signals.next() => {
                tracing::info!(?signal, "passing a signal on to QEMU");
                if let Some(qemu) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
                    // QEMU may just have ended; then the next turn of this loop says so.
                    let _ = kill_process(qemu, signal);
                }
            }
            Some(request) = requested.recv() => desk.answer(request, &supervised),
            () = desk.operation_ended() => {}
        }
    };
    desk.wait_for_end(&handle).await;
    api.stop().await;
    drop(supervised.directory);
    // Only now nobody maps it any more.
    drop(supervised.image);
    Ok(status)
}

/// Where operations are begun and cancelled: one at a time.
struct Desk {
    current: watch::Sender<Option<watch::Receiver<Operation>>>,
    running: Option<Running>,
}

struct Running {
    task: tokio::task::JoinHandle<()>,
    cancel: mpsc::Sender<Cancel>,
}

impl Desk {
    fn answer(&mut self, request: Request, supervised: &Supervised) {
        match request {
            // Whoever asked may be gone by now; the operation goes on, as it would after an answer.
            Request::Begin(wish, answer) => drop(answer.send(self.begin(wish, supervised))),
            Request::Cancel(id, answer) => self.cancel(id, answer),
        }
    }

    fn begin(&mut self, wish: NewOperation, supervised: &Supervised) -> Result<Uuid, Failure> {
        if self.running.is_some() {
            return Err(Failure::new(Code::Refused, "another operation is under way"));
        }
        let NewOperation::Hibernate { to, replace } = wish;
        let request = hibernate::Request {
            target: absolute(to)?,
            replace,
            vm_name: supervised.directory.name().to_owned(),
            command_line: Some(supervised.command_line.clone()),
        };
        let prepared = Prepared::new();
        let (documents, cancel) = (prepared.watch(), prepared.cancel());
        let id = documents.borrow().id;
        let client = supervised.qemu.client().clone();
        let task = tokio::spawn(async move {
            match prepared.drive(client, request).await {
                Ok(report) => tracing::info!(image = %report.image.display(), "hibernated"),
                Err(failure) => {
                    tracing::warn!(code = ?failure.code, guest = ?failure.guest, %failure, "not hibernated")
                }
            }
        });
        self.running = Some(Running { task, cancel });
        self.current.send_replace(Some(documents));
        Ok(id)
    }

    fn cancel(&self, id: Uuid, answer: oneshot::Sender<Result<CancelAnswer, Failure>>) {
        let is_current = self
            .current
            .borrow()
            .as_ref()
            .is_some_and(|operation| operation.borrow().id == id);
        let refusal = match &self.running {
            Some(running) if is_current => {
                let cancel = running.cancel.clone();
                tokio::spawn(async move {
                    let (tell, told) = oneshot::channel();
                    let answered = match cancel.send(tell).await {
                        Ok(()) => told.await.unwrap_or(CancelAnswer::AlreadyEnding),
                        Err(_) => CancelAnswer::AlreadyEnding,
                    };
                    let _ = answer.send(Ok(answered));
                });
                return;
            }
            _ => Failure::new(Code::Refused, format!("no operation {id} is under way")),
        };
        let _ = answer.send(Err(refusal));
    }

    /// Resolves when the operation under way has ended; never when there is none.
    async fn operation_ended(&mut self) {
        match &mut self.running {
            Some(running) => {
                if let Err(error) = (&mut running.task).await {
                    tracing::error!(%error, "an operation ended in panic");
                }
                self.running = None;
            }
            None => std::future::pending().await,
        }
    }

    /// After QEMU's end: lets the operation come to its own, and a watcher read how it ended.
    async fn wait_for_end(&mut self, handle: &Handle) {
        if self.running.is_some() {
            self.operation_ended().await;
        }
        let id = self
            .current
            .borrow()
            .as_ref()
            .map(|operation| operation.borrow().id);
        if id.is_some() {
            let mut read = handle.read.subscribe();
            // A watcher that went away reads nothing; the limit is for that.
            let _ = tokio::time::timeout(FAREWELL, read.wait_for(|read| *read == id)).await;
        }
    }
}

/// A path in a request is taken as it is: the supervisor's working directory is none of a client's business.
fn absolute(path: PathBuf) -> Result<PathBuf, Failure> {
    if path.is_absolute() {
        return Ok(path);
    }
    Err(Failure::new(
        Code::Usage,
        format!("{} is not an absolute path", path.display()),
    ))
}
