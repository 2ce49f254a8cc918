//! The supervisor: the one owner of one VM's QEMU.
//!
//! `dormouse run` and `dormouse wake` are this in two moods. It holds the VM's folder, QEMU's process and its monitor,
//! runs one operation at a time, serves the VM's API, passes signals on, and ends with QEMU's own status.
//!
//! ```text
//!   API clients ──► routes ──requests──► supervise ──► desk ──► operation ──► QEMU
//!                     ▲                     │  ▲      (queue)      │
//!                     └──────documents──────┘  └── signals, end of QEMU
//! ```
//!
//! What it guarantees:
//!
//! - If it dies QEMU lives on. (A terminal that they share ends both, as it would end QEMU alone.)
//! - A signal during an operation waits for its end: a guest on its way into an image is not killed on the way. A second
//!   signal cancels the operation.
//! - It ends only after QEMU has ended and the operation under way has said how it ended.

mod desk;
pub mod ending;
pub mod operation;
pub mod request_queue;
pub mod state_dir;

use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use dormouse_qmp::Client;
use dormouse_storage::{ByteCount, Image};
use rustix::process::{Pid, Signal, kill_process};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use uuid::Uuid;

use crate::api::routes;
use crate::api::snapshot::NewSnapshot;
use crate::api::types::{NewOperation, Operation, Ram, Woken};
use crate::error::{Code, Failure};
use crate::machine::hibernate;
use crate::machine::hibernate::limits::Limits;
use crate::machine::hibernate::machine::{Aim, CancelAnswer};
use crate::machine::volume;
use crate::machine::volume::word::Said;
use crate::machine::wake::feeding::{Feeding, Left, Unfed, View};
use crate::signals::Signals;
use crate::vm::process::{QemuProcess, working_directory};
use crate::vm::process_identity::ProcessIdentity;
use crate::vm::shape::Shape;
use desk::Desk;
use ending::LastEnding;
use request_queue::Ask;
use state_dir::{VmDirectory, VmRecord};

/// How long the last words of a QEMU that has ended may be on their way.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// How long a QEMU may take to end that is asked to, and whose guest stands where its memory does not come.
const STANDING_GUEST_LIMIT: Duration = Duration::from_secs(5);

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
    /// What feeds it, where it was woken before its memory was there.
    pub feeding: Option<Feeding>,
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
    /// Begin an operation, or join it.
    Begin(Ask, oneshot::Sender<Result<Begun, Failure>>),
    /// Cancel it.
    Cancel(Uuid, oneshot::Sender<Result<CancelAnswer, Failure>>),
    /// Say something to it; answered with whether that made a difference.
    Tell(Uuid, Said, oneshot::Sender<Result<bool, Failure>>),
}

/// All operations that are remembered, the last one last.
pub type Documents = Vec<watch::Receiver<Operation>>;

/// The answer to a request for an operation.
#[derive(Debug)]
pub struct Begun {
    /// The operation, to be followed.
    pub operation: watch::Receiver<Operation>,
    /// Whether it was begun before, by the same request.
    pub joined: bool,
}

impl Begun {
    fn new(operation: watch::Receiver<Operation>) -> Self {
        let joined = false;
        Self { operation, joined }
    }

    fn joined(operation: watch::Receiver<Operation>) -> Self {
        let joined = true;
        Self { operation, joined }
    }
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
    /// How its feed stands, if it is or was fed.
    pub feed: Option<View>,
    /// The machine as it was started; disks may have moved since.
    started: VmRecord,
    /// Where requests go.
    pub requests: mpsc::Sender<Request>,
    /// The operations that are remembered; the last one runs or ran last.
    pub documents: watch::Receiver<Documents>,
    /// Told the id of an ended operation once somebody has read how it ended.
    pub read: watch::Sender<Option<Uuid>>,
}

impl Handle {
    /// What the machine is made of, as recorded: its command line and its shape, with its disks where they are now.
    pub fn machine(&self) -> VmRecord {
        let folder = self.monitor.parent();
        folder
            .and_then(VmRecord::read)
            .unwrap_or_else(|| self.started.clone())
    }

    /// The operation of that id, if it is remembered.
    pub fn operation(&self, id: Uuid) -> Option<watch::Receiver<Operation>> {
        desk::find(&self.documents.borrow(), id)
    }

    /// The operation that runs or ran last.
    pub fn last_operation(&self) -> Option<Operation> {
        let last = self.documents.borrow().last().cloned();
        last.map(|operation| operation.borrow().clone())
    }
}

/// How a supervised VM ended.
#[derive(Debug)]
pub struct Ended {
    /// QEMU's status.
    pub status: ExitStatus,
    /// What became of the guest.
    pub ending: LastEnding,
}

/// Supervises until QEMU has ended. `signals` has to be watched since before QEMU's start.
pub async fn supervise(mut supervised: Supervised, mut signals: Signals) -> Result<Ended, Failure> {
    let reason = tokio::spawn(ending::shutdown_reason(supervised.qemu.client().events()));
    let (requests, mut requested) = mpsc::channel(REQUEST_QUEUE);
    let (published, documents) = watch::channel(Documents::new());
    let (handle, api) = match settle(&supervised, requests, documents).await {
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
    // Whatever becomes of it is told by its view.
    let feeding = supervised.feeding.take().map(|feeding| {
        let folder = supervised.directory.path().to_owned();
        tokio::spawn(async move { feeding.run(&folder).await })
    });
    let woken_from = supervised.woken.as_ref().and_then(|woken| woken.operation);
    let mut desk = Desk::new(published, woken_from);
    let mut out_of_patience = None;
    let status = loop {
        let signal = tokio::select! {
            status = supervised.qemu.wait() => break status?,
            () = at(out_of_patience) => {
                tracing::error!("QEMU did not end: its guest stands where it needs memory that does not come. It is killed");
                supervised.qemu.kill().await?;
                out_of_patience = None;
                None
            }
            signal = signals.next() => desk.signalled(signal),
            Some(request) = requested.recv() => {
                desk.answer(request, &handle);
                None
            }
            news = desk.news() => desk.act(&news, &handle),
        };
        if let Some(signal) = signal {
            pass_on(signal, &supervised);
            if handle.feed.as_ref().and_then(View::failure).is_some() {
                out_of_patience.get_or_insert_with(|| Instant::now() + STANDING_GUEST_LIMIT);
            }
        }
    };
    // An operation may still wait for its storage. It is asked about and cancelled as before; no signal has a QEMU to go to.
    loop {
        tokio::select! {
            () = desk.wait_for_end() => break,
            signal = signals.next() => {
                let _ = desk.signalled(signal);
            }
            Some(request) = requested.recv() => desk.answer(request, &handle),
        }
    }
    // It ended with QEMU at the latest; what it does with the image it does to the end.
    let fed = match feeding {
        Some(feeding) => feeding.await.ok(),
        None => None,
    };
    // What QEMU said last may be on its way still; its monitor is closed now.
    let reason = tokio::time::timeout(LAST_WORDS, reason).await;
    let reason = reason.ok().and_then(Result::ok).flatten();
    let operation = handle.last_operation();
    let mut ending = LastEnding::seen(&handle.name, status, reason, operation.as_ref());
    if let Some(Err(unfed)) = fed {
        ending.unfed = ended_unfed(*unfed, &ending, supervised.directory.path()).await;
    }
    if let Err(error) = supervised.directory.state().note_ending(&ending) {
        tracing::warn!(%error, ?ending, "cannot write down how the VM ended");
    }
    desk.farewell(&handle).await;
    api.stop().await;
    let remove_image = supervised.remove_image;
    drop(supervised.directory);
    // Only now nobody maps it any more.
    if let Some(image) = supervised.image.filter(|_| remove_image) {
        remove_used_up(&image);
    }
    Ok(Ended { status, ending })
}

/// What becomes of the image that a guest was still being fed from when it ended. Tells what is kept.
async fn ended_unfed(unfed: Unfed, ending: &LastEnding, vm_directory: &Path) -> Option<Left> {
    if !ending.is_of_the_guest_itself() {
        tracing::error!(failure = %unfed.failure, "not all of the guest's memory got to it");
        return Some(unfed.left);
    }
    let left = unfed.left.clone();
    match unfed.guest_is_off(vm_directory).await {
        Ok(()) => None,
        Err(failure) => {
            tracing::warn!(%failure, "the guest is off, but its image could not be put away; remove it");
            Some(left)
        }
    }
}

async fn at(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
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
    documents: watch::Receiver<Documents>,
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
    supervised
        .directory
        .state()
        .forget_ending(supervised.directory.name());
    let handle = Handle {
        name: supervised.directory.name().to_owned(),
        pid,
        monitor: supervised.directory.monitor_socket(),
        operations: supervised.operations.clone(),
        moves: supervised.moves.clone(),
        client,
        ram: supervised.ram.clone(),
        woken: supervised.woken.clone(),
        feed: supervised.feeding.as_ref().map(Feeding::view),
        started: VmRecord {
            qemu: ProcessIdentity::of(pid),
            command_line: supervised.command_line.clone(),
            shape,
        },
        requests,
        documents,
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

/// What a wish for a snapshot asks for.
fn snapshot(wish: NewSnapshot, lock: Duration, handle: &Handle) -> Result<hibernate::Request, Failure> {
    let aim = Aim::Snapshot {
        leave_paused: wish.leave_paused,
    };
    let as_of_hibernation = NewOperation::Hibernate {
        to: wish.to,
        volume_mount: wish.volume_mount,
        replace: wish.replace,
        engine: wish.engine,
        channels: wish.channels,
        compress: wish.compress,
        key: wish.key,
        rate_limit_bytes: wish.rate_limit_bytes,
        timeout_ms: wish.timeout_ms,
        stall_timeout_ms: wish.stall_timeout_ms,
    };
    Ok(hibernate::Request {
        aim,
        live: wish.live.map(Into::into),
        ..hibernation(as_of_hibernation, lock, handle)?
    })
}

/// What a wish for a hibernation asks for; `lock`: how long it may wait for its target.
pub fn hibernation(
    wish: NewOperation,
    lock: Duration,
    handle: &Handle,
) -> Result<hibernate::Request, Failure> {
    let NewOperation::Hibernate {
        to,
        volume_mount,
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
        aim: Aim::Hibernate,
        live: None,
        target: absolute(to)?,
        volume_mount: volume_mount.map(absolute).transpose()?,
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
            lock,
        },
        monitor: handle.monitor.clone(),
        operations: handle.operations.clone(),
        vm_name: handle.name.clone(),
        command_line: Some(handle.machine().command_line),
        shape: handle.machine().shape,
    })
}

/// What a wish for a move of volumes asks for.
fn volume_move(wish: NewOperation, handle: &Handle) -> Result<volume::Request, Failure> {
    let NewOperation::MoveVolumes {
        volumes,
        speed_limit_bytes,
        complete_by_hand,
        drop_bitmaps,
        verify,
        when_full,
        wait_for_target_ms,
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
        drop_bitmaps,
        verify,
        when_full,
        wait_for_target: wait_for_target_ms.map(Duration::from_millis),
        limits: volume::Limits {
            total: timeout_ms.map(Duration::from_millis),
            stall: stall_timeout_ms.map_or(limits.stall, Duration::from_millis),
            ..limits
        },
        monitor: handle.monitor.clone(),
        operations: handle.moves.clone(),
        machine: handle.monitor.parent().map(Path::to_owned).unwrap_or_default(),
        vm_name: handle.name.clone(),
    })
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
