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
//! - If it dies QEMU lives on. (A terminal that they share ends both, as it would end QEMU alone.)
//! - A signal during an operation waits for its end: a guest on its way into an image is not killed on the way. A second
//!   signal cancels the operation.
//! - It ends only after QEMU has ended and the operation under way has said how it ended.

pub mod operation;
pub mod state_dir;

use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::Duration;

use dormouse_qmp::Client;
use dormouse_storage::{ByteCount, Image};
use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::{mpsc, oneshot, watch};
use uuid::Uuid;

use crate::api::routes;
use crate::api::types::{NewOperation, Operation, Ram, Woken};
use crate::error::{Code, Failure};
use crate::machine::hibernate::limits::Limits;
use crate::machine::hibernate::machine::CancelAnswer;
use crate::machine::hibernate::runner::Cancel;
use crate::machine::volume::runner::Word;
use crate::machine::{hibernate, suspend, volume};
use crate::signals::Signals;
use crate::vm::process::{QemuProcess, working_directory};
use crate::vm::shape::Shape;
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
    /// Where operations are written down.
    pub operations: PathBuf,
    /// Where moves of volumes are written down.
    pub moves: PathBuf,
    /// Its QEMU.
    pub qemu: QemuProcess,
    /// Where its RAM is, for status.
    pub ram: Ram,
    /// The image that it was woken from, locked as long as it is in use.
    pub image: Option<Image>,
    /// Whether that image is removed at the end.
    pub remove_image: bool,
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
    /// Let it switch the volumes that wait for this word.
    Complete(Uuid, oneshot::Sender<Result<bool, Failure>>),
}

/// What API clients hold of a supervisor.
#[derive(Debug, Clone)]
pub struct Handle {
    /// The VM's name.
    pub name: String,
    /// QEMU's process.
    pub pid: u32,
    /// The monitor's socket.
    pub monitor: PathBuf,
    /// Where operations are written down.
    pub operations: PathBuf,
    /// Where moves of volumes are written down.
    pub moves: PathBuf,
    /// QEMU's monitor, for questions.
    pub client: Client,
    /// Where its RAM is.
    pub ram: Ram,
    /// How it was woken.
    pub woken: Option<Woken>,
    /// QEMU's command line as the user gave it.
    pub command_line: Vec<String>,
    /// What the machine was made of at the start.
    pub shape: Option<Shape>,
    /// Where requests go.
    pub requests: mpsc::Sender<Request>,
    /// The operation that runs or ran last.
    pub operation: watch::Receiver<Option<watch::Receiver<Operation>>>,
    /// Told the id of an ended operation once somebody has read how it ended.
    pub read: watch::Sender<Option<Uuid>>,
}

/// Supervises until QEMU has ended; returns its status. `signals` has to be watched since before QEMU's start.
pub async fn supervise(mut supervised: Supervised, mut signals: Signals) -> Result<ExitStatus, Failure> {
    let (requests, mut requested) = mpsc::channel(REQUEST_QUEUE);
    let (current, operation) = watch::channel(None);
    let (handle, api) = match settle(&supervised, requests, operation).await {
        Ok(settled) => settled,
        Err(failure) => {
            supervised.directory.keep();
            let pid = supervised.qemu.pid().unwrap_or_default();
            return Err(Failure {
                code: Code::Operator,
                ..failure.while_doing(&format!("QEMU runs as process {pid}, without a supervisor"))
            });
        }
    };
    let mut desk = Desk {
        current,
        running: None,
        waiting: None,
    };
    let status = loop {
        tokio::select! {
            status = supervised.qemu.wait() => break status?,
            signal = signals.next() => desk.signalled(signal, &supervised),
            Some(request) = requested.recv() => desk.answer(request, &handle),
            () = desk.operation_ended() => {
                if let Some(signal) = desk.waiting.take() {
                    pass_on(signal, &supervised);
                }
            }
        }
    };
    desk.wait_for_end(&handle).await;
    api.stop().await;
    let remove_image = supervised.remove_image;
    drop(supervised.directory);
    // Only now nobody maps it any more.
    if let Some(image) = supervised.image.filter(|_| remove_image) {
        remove_used_up(&image);
    }
    Ok(status)
}

/// Removes an image whose guest was woken.
pub fn remove_used_up(image: &Image) {
    if let Err(error) = image.remove() {
        tracing::warn!(%error, image = %image.path().display(), "cannot remove the image, which is used up");
    }
}

/// Notes what the machine is made of, and opens the API.
async fn settle(
    supervised: &Supervised,
    requests: mpsc::Sender<Request>,
    operation: watch::Receiver<Option<watch::Receiver<Operation>>>,
) -> Result<(Handle, routes::Server), Failure> {
    let pid = supervised.qemu.pid().unwrap_or_default();
    let client = supervised.qemu.client().clone();
    let directory = working_directory(pid).unwrap_or_else(|| PathBuf::from("/"));
    let shape = match Shape::of(&client, &directory).await {
        Ok(shape) => Some(shape),
        Err(failure) => {
            // Most likely QEMU has just ended, which its status will tell.
            tracing::warn!(%failure, "cannot see what the machine is made of");
            None
        }
    };
    supervised
        .directory
        .record(pid, &supervised.command_line, shape.as_ref())?;
    let handle = Handle {
        name: supervised.directory.name().to_owned(),
        pid,
        monitor: supervised.directory.monitor_socket(),
        operations: supervised.operations.clone(),
        moves: supervised.moves.clone(),
        client,
        ram: supervised.ram.clone(),
        woken: supervised.woken.clone(),
        command_line: supervised.command_line.clone(),
        shape,
        requests,
        operation,
        read: watch::Sender::new(None),
    };
    let api = routes::Server::start(&supervised.directory.path().join("api.sock"), handle.clone())
        .map_err(|error| Failure::new(Code::Internal, format!("cannot serve the VM's API: {error}")))?;
    Ok((handle, api))
}

fn pass_on(signal: Signal, supervised: &Supervised) {
    tracing::info!(?signal, "passing a signal on to QEMU");
    let pid = supervised
        .qemu
        .pid()
        .and_then(|pid| i32::try_from(pid).ok())
        .and_then(Pid::from_raw);
    if let Some(qemu) = pid {
        // QEMU may just have ended; then the next look says so.
        let _ = kill_process(qemu, signal);
    }
}

/// What a wish for a hibernation asks for.
pub fn hibernation(wish: NewOperation, handle: &Handle) -> Result<hibernate::Request, Failure> {
    let NewOperation::Hibernate {
        to,
        replace,
        engine,
        channels,
        compress,
        key,
        rate_limit_bytes,
        timeout_ms,
        stall_timeout_ms,
    } = wish
    else {
        return Err(Failure::new(Code::Usage, "that is no hibernation"));
    };
    if rate_limit_bytes == Some(0) {
        return Err(Failure::new(
            Code::Usage,
            "at most 0 bytes in a second would never end",
        ));
    }
    let limits = Limits::default();
    Ok(hibernate::Request {
        target: absolute(to)?,
        replace,
        engine,
        channels,
        image: hibernate::ImageWish {
            compression: compress,
            key: key.map(|key| key.0),
            rate_limit: rate_limit_bytes.map(ByteCount),
        },
        limits: Limits {
            total: timeout_ms.map(Duration::from_millis),
            stall: stall_timeout_ms.map_or(limits.stall, Duration::from_millis),
        },
        monitor: handle.monitor.clone(),
        operations: handle.operations.clone(),
        vm_name: handle.name.clone(),
        command_line: Some(handle.command_line.clone()),
        shape: handle.shape.clone(),
    })
}

/// What a wish for a move of volumes asks for.
fn volume_move(wish: NewOperation, handle: &Handle) -> Result<volume::Request, Failure> {
    let NewOperation::MoveVolumes {
        volumes,
        speed_limit_bytes,
        complete_by_hand,
        timeout_ms,
        stall_timeout_ms,
    } = wish
    else {
        return Err(Failure::new(Code::Usage, "that is no move of volumes"));
    };
    for volume in &volumes {
        absolute(volume.to.clone())?;
    }
    let limits = volume::Limits::default();
    Ok(volume::Request {
        volumes,
        speed_limit: speed_limit_bytes.map(ByteCount),
        by_hand: complete_by_hand,
        limits: volume::Limits {
            total: timeout_ms.map(Duration::from_millis),
            stall: stall_timeout_ms.map_or(limits.stall, Duration::from_millis),
            ..limits
        },
        monitor: handle.monitor.clone(),
        operations: handle.moves.clone(),
        vm_name: handle.name.clone(),
    })
}

/// Where operations are begun and cancelled: one at a time.
struct Desk {
    current: watch::Sender<Option<watch::Receiver<Operation>>>,
    running: Option<Running>,
    /// A signal for QEMU that waits for the operation's end.
    waiting: Option<Signal>,
}

struct Running {
    task: tokio::task::JoinHandle<()>,
    cancel: mpsc::Sender<Cancel>,
    word: mpsc::Sender<Word>,
}

impl Desk {
    fn signalled(&mut self, signal: Signal, supervised: &Supervised) {
        match &self.running {
            None => pass_on(signal, supervised),
            Some(_) if self.waiting.is_none() => {
                tracing::warn!(
                    ?signal,
                    "an operation is under way; the signal waits for its end, a second one cancels it"
                );
                self.waiting = Some(signal);
            }
            Some(running) => {
                let (tell, _) = oneshot::channel();
                // A full queue holds cancels already.
                let _ = running.cancel.try_send(tell);
            }
        }
    }

    fn answer(&mut self, request: Request, handle: &Handle) {
        match request {
            // Whoever asked may be gone by now; the operation goes on, as it would after an answer.
            Request::Begin(wish, answer) => drop(answer.send(self.begin(wish, handle))),
            Request::Cancel(id, answer) => self.cancel(id, answer),
            Request::Complete(id, answer) => self.complete(id, answer),
        }
    }

    fn begin(&mut self, wish: NewOperation, handle: &Handle) -> Result<Uuid, Failure> {
        if self.running.is_some() {
            return Err(Failure::new(Code::Refused, "another operation is under way"));
        }
        let client = handle.client.clone();
        let prepared = Prepared::new(wish.kind());
        let (documents, cancel, word) = (prepared.watch(), prepared.cancel(), prepared.word());
        let id = documents.borrow().id;
        let task = match wish {
            NewOperation::Hibernate { .. } => {
                let request = hibernation(wish, handle)?;
                tokio::spawn(async move {
                    match prepared.hibernate(client, request).await {
                        Ok(report) => tracing::info!(image = %report.image.display(), "hibernated"),
                        Err(failure) => {
                            tracing::warn!(code = ?failure.code, guest = ?failure.guest, %failure, "not hibernated")
                        }
                    }
                })
            }
            NewOperation::SuspendToDisk { agent, limit_ms } => {
                let request = suspend::Request {
                    agent: agent.map(absolute).transpose()?,
                    limit: Duration::from_millis(limit_ms),
                };
                tokio::spawn(async move {
                    match prepared.suspend_to_disk(client, request).await {
                        Ok(report) => tracing::info!(agent = %report.agent.display(), "suspended to disk"),
                        Err(failure) => {
                            tracing::warn!(code = ?failure.code, guest = ?failure.guest, %failure, "not suspended")
                        }
                    }
                })
            }
            NewOperation::MoveVolumes { .. } => {
                let request = volume_move(wish, handle)?;
                tokio::spawn(async move {
                    match prepared.move_volumes(client, request).await {
                        Ok(report) => tracing::info!(volumes = report.volumes.len(), "volumes moved"),
                        Err(failure) => {
                            tracing::warn!(code = ?failure.code, guest = ?failure.guest, %failure, "volumes not moved")
                        }
                    }
                })
            }
        };
        self.running = Some(Running { task, cancel, word });
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

    fn complete(&self, id: Uuid, answer: oneshot::Sender<Result<bool, Failure>>) {
        let is_current = self
            .current
            .borrow()
            .as_ref()
            .is_some_and(|operation| operation.borrow().id == id);
        let refusal = || Failure::new(Code::Refused, format!("no operation {id} is under way"));
        let Some(running) = self.running.as_ref().filter(|_| is_current) else {
            let _ = answer.send(Err(refusal()));
            return;
        };
        let word = running.word.clone();
        tokio::spawn(async move {
            let (tell, told) = oneshot::channel();
            let waited_for = match word.send(tell).await {
                Ok(()) => told.await.unwrap_or(false),
                Err(_) => false,
            };
            let _ = answer.send(Ok(waited_for));
        });
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
