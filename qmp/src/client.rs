//! The handle on a monitor connection.
//!
//! [`Client::connect`] returns when QEMU has greeted and the capabilities are negotiated, or tells
//! why not, within the greeting timeout. From then on any number of clones speak through the one
//! connection. The connection ends when the last clone is dropped, or with [`Client::close`].
//!
//! # Whether QEMU is alive
//!
//! QEMU's main loop stalls for seconds in normal work, and a monitor with it. So a late answer says
//! nothing about life: [`CommandError::Timeout`] ends one command and leaves the connection open,
//! and nothing here sends a ping. What tells is the socket, by [`Client::is_closed`] and
//! [`Client::closed`], and the process behind it, which its owner watches by pidfd
//! ([`Client::peer_pid`] names it). The kernel closes the socket when the process ends, however it
//! ends; an open socket of a process that hangs is the one case where only the owner can decide.
//!
//! # Dropping a command's future
//!
//! A command that has not been sent is withdrawn, and its descriptors are closed. One that has been
//! sent may still be executed by QEMU: its reply is recognised when it comes and thrown away. Both
//! hold for a command whose deadline passes.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::net::UnixStream;
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::address::Address;
use crate::command::Command;
use crate::connection::{CommandId, Outcome, Request};
use crate::driver::{self, Submission};
use crate::error::{CommandError, ConnectError, ConnectionLoss};
use crate::events::Events;
use crate::trace::CommandSpan;
use crate::transport::{DESCRIPTOR_LIMIT, Transport};
use crate::wire::message::{Event, Greeting};

/// How to connect.
#[derive(Clone, Debug)]
pub struct ConnectOptions {
    /// The time for connecting, greeting and negotiation together.
    pub greeting_timeout: Duration,
    /// The time each command is given, unless [`Client::with_deadline`] says otherwise.
    ///
    /// QEMU's main loop stalls for seconds in normal work (the end of a migration, the close of a
    /// large file), so anything far below the default takes a busy QEMU for a dead one.
    pub command_deadline: Duration,
    /// How many events a subscription holds before it starts to lose the oldest, rounded up to a
    /// power of two.
    pub event_capacity: usize,
}

impl ConnectOptions {
    /// The same with another [`greeting_timeout`](Self::greeting_timeout).
    #[must_use]
    pub fn with_greeting_timeout(mut self, timeout: Duration) -> Self {
        self.greeting_timeout = timeout;
        self
    }
}

/// A cloneable handle on one monitor connection.
#[derive(Clone, Debug)]
pub struct Client {
    shared: Arc<Shared>,
    deadline: Duration,
}

#[derive(Debug)]
struct Shared {
    greeting: Greeting,
    peer_pid: Option<u32>,
    next_id: AtomicU64,
    submissions: mpsc::UnboundedSender<Submission>,
    events: broadcast::WeakSender<Arc<Event>>,
    loss: watch::Receiver<Option<ConnectionLoss>>,
}

impl Client {
    /// Connects to the monitor at an address, usually a path, awaits the greeting and negotiates
    /// the capabilities. Out-of-band execution is switched on when it is offered.
    pub async fn connect(address: impl Into<Address>, options: ConnectOptions) -> Result<Self, ConnectError> {
        let address = address.into();
        let name = address.to_string();
        let waited = options.greeting_timeout;
        let deadline = Instant::now() + waited;
        let stream = match address.connect(deadline).await {
            Ok(stream) => stream,
            Err(error) => return Err(socket_error(name, waited, error)),
        };
        let peer_pid = peer_pid(&stream);

        // Unbounded is bounded here: each entry belongs to a future that waits for it.
        let (submissions, submitted) = mpsc::unbounded_channel();
        let (events, _) = broadcast::channel(options.event_capacity.max(1));
        let weak_events = events.downgrade();
        let (loss, lost) = watch::channel(None);
        let (ready, greeted) = oneshot::channel();
        driver::spawn(
            name.clone(),
            Transport::new(stream),
            deadline,
            driver::Ends {
                submitted,
                events,
                loss,
                ready,
            },
        );

        let Ok(greeting) = greeted.await else {
            return Err(connect_error(name, waited, loss_told(lost).await));
        };
        let shared = Shared {
            greeting,
            peer_pid,
            next_id: AtomicU64::new(CommandId::FIRST.0),
            submissions,
            events: weak_events,
            loss: lost,
        };
        Ok(Self {
            shared: Arc::new(shared),
            deadline: options.command_deadline,
        })
    }

    /// How QEMU introduced itself.
    pub fn greeting(&self) -> &Greeting {
        &self.shared.greeting
    }

    /// The process that made the monitor socket listen, when it is visible from this pid namespace.
    ///
    /// That is QEMU, unless whoever started QEMU handed it a socket that was listening already.
    pub fn peer_pid(&self) -> Option<u32> {
        self.shared.peer_pid
    }

    /// Executes a command and returns its reply as it came.
    pub async fn execute<C: Command>(&self, command: &C) -> Result<Value, CommandError> {
        self.submit(C::NAME, arguments_of(command)?, Vec::new(), false)
            .await
    }

    /// Executes a command and reads its reply into a view, usually one of [`crate::view`].
    pub async fn query<C: Command, V: DeserializeOwned>(&self, command: &C) -> Result<V, CommandError> {
        let reply = self.execute(command).await?;
        serde_json::from_value(reply).map_err(|source| CommandError::Unexpected {
            command: C::NAME.to_owned(),
            source,
        })
    }

    /// Executes a command that takes file descriptors, such as `getfd` or `add-fd`.
    ///
    /// The descriptors are closed on this side once they are sent, and on every failure. QEMU takes
    /// one descriptor per command and closes further ones.
    pub async fn execute_with_fds<C: Command>(
        &self,
        command: &C,
        fds: Vec<OwnedFd>,
    ) -> Result<Value, CommandError> {
        self.submit(C::NAME, arguments_of(command)?, fds, false).await
    }

    /// Executes a command out-of-band: at once, past commands that wait for QEMU's main loop.
    ///
    /// Few commands allow it (`yank`, `migrate-pause`, …); QEMU refuses the others.
    pub async fn execute_oob<C: Command>(&self, command: &C) -> Result<Value, CommandError> {
        self.submit(C::NAME, arguments_of(command)?, Vec::new(), true)
            .await
    }

    /// Executes a command by its name, for what the generated types do not have. Null stands for no
    /// arguments.
    pub async fn execute_raw(&self, name: &str, arguments: Value) -> Result<Value, CommandError> {
        self.submit(name, arguments, Vec::new(), false).await
    }

    /// The same connection with another deadline for each command.
    pub fn with_deadline(&self, deadline: Duration) -> Self {
        Self {
            shared: Arc::clone(&self.shared),
            deadline,
        }
    }

    /// Subscribes to the events that arrive from now on.
    ///
    /// What happened before is found by queries. Subscribe first and query then, and nothing falls
    /// between.
    pub fn events(&self) -> Events {
        let receiver = match self.shared.events.upgrade() {
            Some(events) => events.subscribe(),
            // The driver is gone. A channel without a sender tells just that.
            None => broadcast::channel(1).1,
        };
        Events::new(receiver)
    }

    /// Closes the connection in good order, for all handles: commands submitted from now on fail,
    /// those submitted before are still executed and answered, then the socket is closed.
    ///
    /// Returns when the connection is gone, and tells what ended it:
    /// [`ConnectionLoss::LocallyClosed`], or what came before that. It waits no longer than the
    /// pending commands do, each of which has its deadline. Dropping the future does not take the
    /// closing back.
    pub async fn close(&self) -> ConnectionLoss {
        // When the driver is gone there is nothing left to close.
        let _ = self.shared.submissions.send(Submission::Close);
        self.closed().await
    }

    /// Whether the connection is gone.
    ///
    /// False says that the socket was open when last looked at, and nothing about how fast QEMU
    /// answers.
    pub fn is_closed(&self) -> bool {
        let loss = &self.shared.loss;
        // Without a driver nobody tells the loss any more.
        loss.borrow().is_some() || loss.has_changed().is_err()
    }

    /// Waits until the connection is gone, and tells why.
    pub async fn closed(&self) -> ConnectionLoss {
        loss_told(self.shared.loss.clone()).await
    }

    async fn submit(
        &self,
        name: &str,
        arguments: Value,
        fds: Vec<OwnedFd>,
        out_of_band: bool,
    ) -> Result<Value, CommandError> {
        let id = CommandId(self.shared.next_id.fetch_add(1, Ordering::Relaxed));
        let span = CommandSpan::begin(name, id.0);
        let ended = self.exchange(id, name, arguments, fds, out_of_band).await;
        span.end(match &ended {
            Ok(_) => "returned",
            Err(error) => error.outcome(),
        });
        ended
    }

    async fn exchange(
        &self,
        id: CommandId,
        name: &str,
        arguments: Value,
        fds: Vec<OwnedFd>,
        out_of_band: bool,
    ) -> Result<Value, CommandError> {
        let command = || name.to_owned();
        if fds.len() > DESCRIPTOR_LIMIT {
            return Err(CommandError::TooManyDescriptors {
                command: command(),
                count: fds.len(),
                limit: DESCRIPTOR_LIMIT,
            });
        }
        let request = Request {
            id,
            name: command(),
            arguments,
            out_of_band,
            carries_fds: !fds.is_empty(),
            // A duration past the end of time means no deadline that matters.
            deadline: Instant::now().into_std().checked_add(self.deadline),
        };
        let (answer, answered) = oneshot::channel();
        // When the driver is gone this drops the submission, which the waiting below notices.
        let _ = self
            .shared
            .submissions
            .send(Submission::Execute { request, fds, answer });
        let mut withdrawal = Withdrawal {
            id,
            submissions: Some(&self.shared.submissions),
        };
        let outcome = answered.await;
        withdrawal.submissions = None;
        match outcome {
            Ok(Outcome::Returned(value)) => Ok(value),
            Ok(Outcome::Refused { class, desc }) => Err(CommandError::Qemu {
                command: command(),
                class,
                desc,
            }),
            Ok(Outcome::OutOfBandUnavailable) => {
                Err(CommandError::OutOfBandUnavailable { command: command() })
            }
            Ok(Outcome::TimedOut) => Err(CommandError::Timeout {
                command: command(),
                after: self.deadline,
            }),
            Ok(Outcome::Lost(source)) => Err(CommandError::ConnectionLost {
                command: command(),
                source,
            }),
            Err(_) => Err(CommandError::ConnectionLost {
                command: command(),
                source: self.closed().await,
            }),
        }
    }
}

impl Default for ConnectOptions {
    fn default() -> Self {
        Self {
            greeting_timeout: Duration::from_secs(5),
            command_deadline: Duration::from_secs(30),
            event_capacity: 1024,
        }
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

fn arguments_of<C: Command>(command: &C) -> Result<Value, CommandError> {
    match serde_json::to_value(command) {
        // The types of commands without arguments are written as an empty object; what QEMU's own
        // tools send has none.
        Ok(Value::Object(arguments)) if arguments.is_empty() => Ok(Value::Null),
        Ok(arguments) => Ok(arguments),
        Err(source) => Err(CommandError::Arguments {
            command: C::NAME.to_owned(),
            source,
        }),
    }
}

fn socket_error(address: String, waited: Duration, source: io::Error) -> ConnectError {
    if source.kind() == io::ErrorKind::WouldBlock {
        ConnectError::MonitorBusy { address, waited }
    } else {
        ConnectError::Socket { address, source }
    }
}

fn connect_error(address: String, waited: Duration, loss: ConnectionLoss) -> ConnectError {
    match loss {
        ConnectionLoss::GreetingTimeout => ConnectError::MonitorBusy { address, waited },
        ConnectionLoss::NegotiationTimeout => ConnectError::NegotiationTimeout { address, waited },
        ConnectionLoss::NegotiationRefused { class, desc } => {
            ConnectError::NegotiationRefused { address, class, desc }
        }
        source => ConnectError::Lost { address, source },
    }
}

/// The kernel writes 0 for a process of another pid namespace.
fn peer_pid(stream: &UnixStream) -> Option<u32> {
    let pid = stream.peer_cred().ok()?.pid()?;
    u32::try_from(pid).ok().filter(|&pid| pid != 0)
}

async fn loss_told(mut loss: watch::Receiver<Option<ConnectionLoss>>) -> ConnectionLoss {
    match loss.wait_for(Option::is_some).await {
        Ok(told) => told.clone().unwrap_or(ConnectionLoss::LocallyClosed),
        // The driver was dropped with its runtime and had no time to tell.
        Err(_) => ConnectionLoss::LocallyClosed,
    }
}
