//! Talks to the QEMU guest agent, through the socket that QEMU holds for it.
//!
//! ```text
//!   Agent ──submission──► driver task ──► transport ──► QEMU ──virtio-serial──► qemu-ga
//!     ▲                        │  ▲                                                │
//!     └──reply (oneshot)───────┘  └── dialogue (pure) ◄── lines ◄──────────────────┘
//! ```
//!
//! An agent is no QEMU monitor. It does not greet, sends no events, and may not be there at all:
//! QEMU holds the other end of the socket and keeps what is said until somebody in the guest reads
//! it. So [`Agent::connect`] says nothing about the guest; the first command does.
//!
//! Guarantees:
//!
//! - Commands go out one at a time, in the order of their submission. An answer is given to the
//!   command it belongs to or to none; one that comes too late is never taken for the next one's.
//! - Each command ends by its deadline. [`AgentError::Absent`] means that nobody is there and that
//!   the command was not sent, [`AgentError::Timeout`] that somebody was and took it.
//! - A command is sent at most once.
//! - What a guest says is bounded (a line of 16 MiB) and never trusted to be well-formed.
//!
//! How the two come into step, with `guest-sync-delimited`, and how they fall out of it, is told in
//! `dialogue`.

mod command;
mod dialogue;
mod driver;
mod error;

use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

pub use command::{
    Done, GuestCommand, GuestFsfreezeFreeze, GuestFsfreezeStatus, GuestFsfreezeThaw, GuestInfo, GuestPing,
    GuestSetTime,
};
pub use error::AgentError;

use crate::address::Address;
use crate::connection::CommandId;
use crate::error::ConnectionLoss;
use crate::trace::CommandSpan;
use crate::transport::Transport;
use dialogue::{Outcome, Request};
use driver::{Driver, Submission};

/// How to talk to a guest agent.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct AgentOptions {
    /// The time to wait for a place in the listen queue of the socket.
    pub connect_timeout: Duration,
    /// The time each command is given, coming into step included, unless [`Agent::with_deadline`]
    /// says otherwise.
    ///
    /// A sound agent answers in milliseconds. Freezing file systems takes as long as the guest has
    /// to write, and deserves a deadline of its own.
    pub command_deadline: Duration,
}

impl Default for AgentOptions {
    fn default() -> Self {
        Self {
            connect_timeout: Duration::from_secs(5),
            command_deadline: Duration::from_secs(10),
        }
    }
}

/// How `guest-suspend-disk` went, as far as the channel tells. Neither proves that the guest sleeps:
/// ask QEMU, whose `query-status` says `shutdown` then, or whose process has ended.
#[derive(Clone, Debug)]
pub enum Suspension {
    /// The agent took the command and reported no failure in the time given.
    Unrefused,
    /// The agent took the command, and then the channel was lost, as it is when QEMU exits.
    ChannelLost(ConnectionLoss),
}

/// A cloneable handle on the channel to one guest agent. The channel is closed with the last clone.
#[derive(Clone, Debug)]
pub struct Agent {
    shared: Arc<Shared>,
    deadline: Duration,
}

#[derive(Debug)]
struct Shared {
    next_id: AtomicU64,
    submissions: mpsc::UnboundedSender<Submission>,
}

impl Agent {
    /// Connects to the socket that QEMU holds for the agent. Whether an agent is there shows with
    /// the first command.
    pub async fn connect(address: impl Into<Address>, options: AgentOptions) -> Result<Self, AgentError> {
        let address = address.into();
        let name = address.to_string();
        let stream = match address.connect(Instant::now() + options.connect_timeout).await {
            Ok(stream) => stream,
            Err(source) => {
                return Err(AgentError::Socket {
                    address: name,
                    source,
                });
            }
        };
        // Unbounded is bounded here: each entry belongs to a future that waits for it.
        let (submissions, submitted) = mpsc::unbounded_channel();
        // The standard library seeds its hashers at random; that is random enough for a number that
        // must only be new.
        let seed = RandomState::new().hash_one(&name);
        tokio::spawn(Driver::new(name, Transport::new(stream), seed).run(submitted));
        Ok(Self {
            shared: Arc::new(Shared {
                next_id: AtomicU64::new(CommandId::FIRST.0),
                submissions,
            }),
            deadline: options.command_deadline,
        })
    }

    /// The same channel with another deadline for each command.
    pub fn with_deadline(&self, deadline: Duration) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            deadline,
        }
    }

    /// Executes a command and reads its reply.
    pub async fn execute<C: GuestCommand>(&self, command: &C) -> Result<C::Reply, AgentError> {
        let arguments = serde_json::to_value(command).map_err(|source| AgentError::Arguments {
            command: C::NAME.to_owned(),
            source,
        })?;
        let reply = self.execute_raw(C::NAME, arguments).await?;
        serde_json::from_value(reply).map_err(|source| AgentError::Unexpected {
            command: C::NAME.to_owned(),
            source,
        })
    }

    /// Executes a command by its name. Null, and an object with nothing in it, stand for no
    /// arguments.
    pub async fn execute_raw(&self, name: &str, arguments: Value) -> Result<Value, AgentError> {
        let id = CommandId(self.shared.next_id.fetch_add(1, Ordering::Relaxed));
        let span = CommandSpan::begin(name, id.0);
        let ended = self.exchange(id, name, arguments).await;
        span.end(match &ended {
            Ok(_) => "returned",
            Err(error) => error.outcome(),
        });
        ended
    }

    /// Asks the guest to hibernate, with `guest-suspend-disk`.
    ///
    /// An agent does not answer this command when it succeeds. So what is waited for is a refusal;
    /// the deadline without one is the good ending, and is spent whole unless the guest is off
    /// before. When the guest wakes up, the next command comes into step by itself.
    pub async fn suspend_to_disk(&self) -> Result<Suspension, AgentError> {
        match self.execute_raw("guest-suspend-disk", Value::Null).await {
            // Not what the schema says, and no refusal either.
            Ok(_) | Err(AgentError::Timeout { .. }) => Ok(Suspension::Unrefused),
            Err(AgentError::ConnectionLost {
                sent: true, source, ..
            }) => Ok(Suspension::ChannelLost(source)),
            Err(error) => Err(error),
        }
    }

    async fn exchange(&self, id: CommandId, name: &str, arguments: Value) -> Result<Value, AgentError> {
        let request = Request {
            id,
            line: command_line(name, arguments),
            // A duration past the end of time means no deadline that matters.
            deadline: Instant::now().into_std().checked_add(self.deadline),
        };
        let (answer, answered) = oneshot::channel();
        // When the driver is gone this drops the submission, which the waiting below notices.
        let _ = self
            .shared
            .submissions
            .send(Submission::Execute { request, answer });
        let mut withdrawal = Withdrawal {
            id,
            submissions: Some(&self.shared.submissions),
        };
        let outcome = answered.await.unwrap_or(Outcome::Lost {
            // The driver went with its runtime; nobody can tell.
            sent: true,
            loss: ConnectionLoss::LocallyClosed,
        });
        withdrawal.submissions = None;
        let (command, after) = (name.to_owned(), self.deadline);
        Err(match outcome {
            Outcome::Returned(value) => return Ok(value),
            Outcome::Refused { class, desc } => AgentError::Refused { command, class, desc },
            Outcome::Garbled(what) => AgentError::Garbled { command, what },
            Outcome::Absent => AgentError::Absent { command, after },
            Outcome::Busy => AgentError::Busy { command, after },
            Outcome::TimedOut => AgentError::Timeout { command, after },
            Outcome::Lost { sent, loss: source } => AgentError::ConnectionLost {
                command,
                sent,
                source,
            },
        })
    }
}

/// Withdraws the command when its future is dropped before the answer came.
struct Withdrawal<'a> {
    id: CommandId,
    submissions: Option<&'a mpsc::UnboundedSender<Submission>>,
}

impl Drop for Withdrawal<'_> {
    fn drop(&mut self) {
        if let Some(submissions) = self.submissions {
            let _ = submissions.send(Submission::Withdraw(self.id));
        }
    }
}

/// Without an id, which agents before QEMU 4.0 refuse.
fn command_line(name: &str, arguments: Value) -> Vec<u8> {
    let without = arguments.is_null() || arguments.as_object().is_some_and(serde_json::Map::is_empty);
    let command = if without {
        json!({"execute": name})
    } else {
        json!({"execute": name, "arguments": arguments})
    };
    format!("{command}\n").into_bytes()
}
