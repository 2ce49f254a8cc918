//! A scripted QEMU for tests: the peer of a monitor connection, without a machine behind it.
//!
//! It behaves like a monitor where clients can tell: it serves one client at a time and leaves the
//! next one waiting for its greeting, insists on the negotiation, executes commands one by one in
//! their order, echoes ids, keeps received descriptors with the socket until `getfd` or `add-fd`
//! takes one, and refuses commands it does not know. What it answers is the [`Script`]'s to say;
//! what happens unasked is the test's, through [`FakeQemu`]. A [`Transcript`] of a real QEMU makes a
//! script that answers as that one did.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use dormouse_qmp::fake::{Answer, FakeQemu, Script};
//! use dormouse_qmp::view::machine::{RunState, StatusInfo};
//! use dormouse_qmp::{Client, command};
//! use serde_json::json;
//!
//! let status = json!({"running": true, "status": "running"});
//! let script = Script::new().on("query-status", Answer::returns(status));
//! let qemu = FakeQemu::start(script)?;
//! let client = Client::connect(qemu.path(), Default::default()).await?;
//! let info: StatusInfo = client.query(&command::query_status {}).await?;
//! assert_eq!(info.status, RunState::Running);
//! # Ok(()) }
//! ```

mod script;
mod session;
mod transcript;

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::Value;
use tokio::net::UnixListener;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

pub use script::{Answer, Script};
pub use transcript::{Exchange, Transcript, TranscriptError};

use session::{Cue, Session};

/// A scripted QEMU that listens on a socket in a directory of its own. Gone, with both, when
/// dropped.
#[derive(Debug)]
pub struct FakeQemu {
    socket: PathBuf,
    directory: PathBuf,
    cues: mpsc::UnboundedSender<Cue>,
    received: watch::Receiver<Vec<Received>>,
    descriptors: Arc<Mutex<Vec<OwnedFd>>>,
    task: JoinHandle<()>,
}

/// A command as it was received.
#[derive(Clone, Debug, PartialEq)]
pub struct Received {
    /// Its name.
    pub name: String,
    /// Its arguments; null when it had none.
    pub arguments: Value,
    /// Its id; null when it had none.
    pub id: Value,
    /// Whether it was to be executed out-of-band.
    pub out_of_band: bool,
    /// Whether it took a descriptor, which only `getfd` and `add-fd` do.
    pub took_descriptor: bool,
}

impl FakeQemu {
    /// Starts to listen. Must be called within a tokio runtime.
    pub fn start(script: Script) -> io::Result<Self> {
        let directory = new_directory()?;
        let socket = directory.join("qmp.sock");
        let listener = UnixListener::bind(&socket)?;
        let (cues, cued) = mpsc::unbounded_channel();
        let (received_sender, received) = watch::channel(Vec::new());
        let descriptors = Arc::new(Mutex::new(Vec::new()));
        let session = Session::new(script, cued, received_sender, Arc::clone(&descriptors));
        let task = tokio::spawn(session.serve(listener));
        Ok(Self {
            socket,
            directory,
            cues,
            received,
            descriptors,
            task,
        })
    }

    /// The monitor socket.
    pub fn path(&self) -> &Path {
        &self.socket
    }

    /// Sends an event to the client that is served, or to the next one.
    pub fn emit(&self, name: &str, data: Value) {
        self.cue(Cue::Send(session::event_line(name, data)));
    }

    /// Sends these bytes as they are.
    pub fn send_raw(&self, bytes: impl Into<Vec<u8>>) {
        self.cue(Cue::Send(bytes.into()));
    }

    /// Answers a command after the fact; what the script left unanswered, for example.
    pub fn answer(&self, command: &Received, answer: Answer) {
        self.cue(Cue::Answer {
            id: command.id.clone(),
            answer,
        });
    }

    /// Closes the connection to the client that is served, or to the next one. Whoever comes after
    /// is served then.
    pub fn hang_up(&self) {
        self.cue(Cue::HangUp);
    }

    /// All commands received so far from all clients, in their order, the negotiation included.
    pub fn received(&self) -> Vec<Received> {
        self.received.borrow().clone()
    }

    /// Waits until the command of this name has been received so many times, and returns those.
    ///
    /// Waits forever when it does not come; a test has a limit of its own.
    pub async fn wait_for(&self, name: &str, times: usize) -> Vec<Received> {
        let named = |received: &[Received]| -> Vec<Received> {
            received
                .iter()
                .filter(|command| command.name == name)
                .cloned()
                .collect()
        };
        let mut receiver = self.received.clone();
        match receiver.wait_for(|received| named(received).len() >= times).await {
            Ok(received) => named(&received),
            // The task only ends with this handle.
            Err(_) => std::future::pending().await,
        }
    }

    /// Takes the descriptors that `getfd` and `add-fd` have taken so far.
    pub fn take_descriptors(&self) -> Vec<OwnedFd> {
        std::mem::take(&mut *self.descriptors.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn cue(&self, cue: Cue) {
        // The task holds the other end as long as this handle lives.
        let _ = self.cues.send(cue);
    }
}

impl Drop for FakeQemu {
    fn drop(&mut self) {
        self.task.abort();
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

fn new_directory() -> io::Result<PathBuf> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    loop {
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let directory = std::env::temp_dir().join(format!("fake-qemu-{}-{number}", std::process::id()));
        match std::fs::create_dir(&directory) {
            Ok(()) => return Ok(directory),
            // Left behind by a process that had this id before.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
}
