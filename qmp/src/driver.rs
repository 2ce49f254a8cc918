//! The one task that owns the socket and the protocol machine of a connection.
//!
//! It waits for whichever comes first of bytes, room to write, a submission, a deadline; feeds the
//! machine; and does what the machine decides. It never waits for a client, a subscriber or the
//! socket's send buffer alone, so the monitor is always drained: a QEMU whose monitor nobody reads
//! may block.
//!
//! The end has an order: the reason is made known first, then the socket is closed, then whatever
//! was still submitted is settled as lost. So a client that learns of the loss in any way finds the
//! reason told.

use std::collections::HashMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};
use tracing::debug;

use crate::connection::{Action, CommandId, Connection, Outcome, Request};
use crate::error::ConnectionLoss;
use crate::trace;
use crate::transport::{Sending, Transport};
use crate::wire::line::{LINE_LIMIT_BYTES, LineBuffer};
use crate::wire::message::{Event, Greeting, Message};

/// What clients ask of the driver.
#[derive(Debug)]
pub(crate) enum Submission {
    Execute {
        request: Request,
        fds: Vec<OwnedFd>,
        answer: oneshot::Sender<Outcome>,
    },
    Withdraw(CommandId),
    /// Take no more commands, and close when those that there are have ended.
    Close,
}

/// The driver's ends of the channels to the clients.
pub(crate) struct Ends {
    pub(crate) submitted: mpsc::UnboundedReceiver<Submission>,
    pub(crate) events: broadcast::Sender<Arc<Event>>,
    pub(crate) loss: watch::Sender<Option<ConnectionLoss>>,
    /// Answered once the connection is ready; dropped without an answer when it is lost before.
    pub(crate) ready: oneshot::Sender<Greeting>,
}

/// Starts the driver of a connection that must be ready by the deadline.
///
/// It ends with the connection, or when the last sender of submissions is dropped.
pub(crate) fn spawn(peer: String, transport: Transport, ready_by: Instant, ends: Ends) {
    let driver = Driver {
        peer,
        connection: Connection::new(ready_by.into_std()),
        lines: LineBuffer::new(LINE_LIMIT_BYTES),
        transport,
        waiting: HashMap::new(),
        events: ends.events,
        ready: Some(ends.ready),
    };
    tokio::spawn(driver.run(ends.submitted, ends.loss));
}

struct Driver {
    /// The address, for the trace.
    peer: String,
    connection: Connection,
    transport: Transport,
    lines: LineBuffer,
    waiting: HashMap<CommandId, Waiting>,
    events: broadcast::Sender<Arc<Event>>,
    ready: Option<oneshot::Sender<Greeting>>,
}

/// A command that has not been settled.
struct Waiting {
    answer: oneshot::Sender<Outcome>,
    /// Until it is transmitted.
    fds: Vec<OwnedFd>,
}

impl Driver {
    async fn run(
        mut self,
        mut submitted: mpsc::UnboundedReceiver<Submission>,
        told: watch::Sender<Option<ConnectionLoss>>,
    ) {
        let loss = loop {
            if let Some(loss) = self.act(&told) {
                break loss;
            }
            let deadline = self.connection.next_deadline().map(Instant::from_std);
            tokio::select! {
                ready = self.transport.ready() => match ready {
                    Ok(()) => self.exchange(),
                    Err(error) => self.connection.lose(socket_loss(error)),
                },
                submission = submitted.recv() => match submission {
                    Some(submission) => self.accept(submission),
                    None => self.connection.lose(ConnectionLoss::LocallyClosed),
                },
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    self.connection.advance(Instant::now().into_std());
                }
            }
        };
        debug!(reason = %loss, "the monitor connection is gone");
        drop(self.transport);
        submitted.close();
        while let Ok(submission) = submitted.try_recv() {
            if let Submission::Execute { answer, .. } = submission {
                let _ = answer.send(Outcome::Lost(loss.clone()));
            }
        }
    }

    /// Does what the machine decided. Returns the loss when it has decided to close.
    fn act(&mut self, told: &watch::Sender<Option<ConnectionLoss>>) -> Option<ConnectionLoss> {
        let mut closed = None;
        while let Some(action) = self.connection.next_action() {
            // That somebody no longer listens is no failure anywhere here: futures are dropped,
            // subscriptions end.
            match action {
                Action::Transmit { id, line } => {
                    let fds = self
                        .waiting
                        .get_mut(&id)
                        .map(|waiting| std::mem::take(&mut waiting.fds));
                    let fds = fds.unwrap_or_default();
                    trace::sent(&self.peer, &line, fds.len());
                    self.transport.enqueue(line, fds);
                }
                Action::Settle { id, outcome } => {
                    if let Some(waiting) = self.waiting.remove(&id) {
                        let _ = waiting.answer.send(outcome);
                    }
                }
                Action::Publish(event) => {
                    let _ = self.events.send(Arc::new(event));
                }
                Action::Announce(greeting) => {
                    if let Some(ready) = self.ready.take() {
                        let _ = ready.send(greeting);
                    }
                }
                Action::Close(loss) => {
                    told.send_replace(Some(loss.clone()));
                    closed = Some(loss);
                }
            }
        }
        closed
    }

    fn accept(&mut self, submission: Submission) {
        match submission {
            Submission::Execute { request, fds, answer } => {
                self.waiting.insert(request.id, Waiting { answer, fds });
                self.connection.submit(request);
            }
            Submission::Withdraw(id) => {
                self.connection.withdraw(id);
                self.waiting.remove(&id);
            }
            Submission::Close => self.connection.close(),
        }
    }

    /// Moves bytes both ways, as far as the socket lets it now.
    fn exchange(&mut self) {
        match self.transport.flush() {
            Ok(Sending::Open) => {}
            Ok(Sending::Closed) => self.connection.lose_write_side(Instant::now().into_std()),
            Err(error) => self.connection.lose(socket_loss(error)),
        }
        match self.transport.read() {
            Ok(Some([])) => self.connection.lose(ConnectionLoss::PeerClosed),
            Ok(Some(bytes)) => {
                self.lines.extend(bytes);
                self.receive_lines();
            }
            Ok(None) => {}
            Err(error) => self.connection.lose(socket_loss(error)),
        }
    }

    fn receive_lines(&mut self) {
        loop {
            match self.lines.next_line() {
                Ok(Some(line)) => {
                    trace::received(&self.peer, &line);
                    match Message::parse(&line) {
                        Ok(message) => self.connection.receive(message),
                        Err(error) => return self.connection.lose(not_qmp(&error, &line)),
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    return self.connection.lose(ConnectionLoss::NotQmp {
                        what: error.to_string(),
                    });
                }
            }
        }
    }
}

pub(crate) fn socket_loss(error: io::Error) -> ConnectionLoss {
    match error.kind() {
        // How the end of the stream shows when the peer left something of ours unread.
        io::ErrorKind::ConnectionReset => ConnectionLoss::PeerClosed,
        _ => ConnectionLoss::Socket(Arc::new(error)),
    }
}

fn not_qmp(error: &serde_json::Error, line: &[u8]) -> ConnectionLoss {
    const SHOWN_BYTES: usize = 120;
    let shown = &line[..line.len().min(SHOWN_BYTES)];
    ConnectionLoss::NotQmp {
        what: format!(
            "{error} in a line that begins with {:?}",
            String::from_utf8_lossy(shown)
        ),
    }
}
