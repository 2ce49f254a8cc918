//! The one task that owns the socket and the dialogue with a guest agent.

use std::collections::HashMap;

use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until};
use tracing::debug;

use super::dialogue::{Action, Dialogue, Outcome, Request};
use crate::connection::CommandId;
use crate::driver::socket_loss;
use crate::error::ConnectionLoss;
use crate::trace;
use crate::transport::{Sending, Transport};
use crate::wire::line::{LINE_LIMIT_BYTES, LineBuffer};

/// What the handles ask of the driver.
#[derive(Debug)]
pub(super) enum Submission {
    Execute {
        request: Request,
        answer: oneshot::Sender<Outcome>,
    },
    Withdraw(CommandId),
}

pub(super) struct Driver {
    /// The address, for the trace.
    peer: String,
    dialogue: Dialogue,
    transport: Transport,
    lines: LineBuffer,
    waiting: HashMap<CommandId, oneshot::Sender<Outcome>>,
}

impl Driver {
    pub(super) fn new(peer: String, transport: Transport, seed: u64) -> Self {
        Self {
            peer,
            dialogue: Dialogue::new(seed),
            transport,
            lines: LineBuffer::new(LINE_LIMIT_BYTES),
            waiting: HashMap::new(),
        }
    }

    /// Runs until the channel is lost or the last handle is dropped.
    pub(super) async fn run(mut self, mut submitted: mpsc::UnboundedReceiver<Submission>) {
        let loss = loop {
            if let Some(loss) = self.act() {
                break loss;
            }
            let deadline = self.dialogue.next_deadline().map(Instant::from_std);
            tokio::select! {
                ready = self.transport.ready() => match ready {
                    Ok(()) => self.exchange(),
                    Err(error) => self.dialogue.lose(socket_loss(error)),
                },
                submission = submitted.recv() => match submission {
                    Some(submission) => self.accept(submission),
                    None => self.dialogue.lose(ConnectionLoss::LocallyClosed),
                },
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    self.dialogue.advance(Instant::now().into_std());
                }
            }
        };
        debug!(reason = %loss, "the channel to the guest agent is gone");
        drop(self.transport);
        // The handles go on asking, and are told the reason each time.
        while let Some(submission) = submitted.recv().await {
            if let Submission::Execute { answer, .. } = submission {
                let loss = loss.clone();
                let _ = answer.send(Outcome::Lost { sent: false, loss });
            }
        }
    }

    /// Does what the dialogue decided. Returns the loss when it has decided to close.
    fn act(&mut self) -> Option<ConnectionLoss> {
        let mut closed = None;
        while let Some(action) = self.dialogue.next_action() {
            match action {
                Action::Resync(line) => {
                    // An agent that never reads costs one line, however often it is asked, and what
                    // it never saw it will not execute later.
                    self.transport.withdraw_unsent();
                    self.transmit(line);
                }
                Action::Transmit(line) => self.transmit(line),
                Action::Settle { id, outcome } => {
                    if let Some(answer) = self.waiting.remove(&id) {
                        // Its future may have been dropped.
                        let _ = answer.send(outcome);
                    }
                }
                Action::Close(loss) => closed = Some(loss),
            }
        }
        closed
    }

    fn transmit(&mut self, line: Vec<u8>) {
        trace::sent(&self.peer, &line, 0);
        self.transport.enqueue(line, Vec::new());
    }

    fn accept(&mut self, submission: Submission) {
        match submission {
            Submission::Execute { request, answer } => {
                self.waiting.insert(request.id, answer);
                self.dialogue.submit(request);
            }
            Submission::Withdraw(id) => {
                self.dialogue.withdraw(id);
                self.waiting.remove(&id);
            }
        }
    }

    fn exchange(&mut self) {
        match self.transport.flush() {
            // Reading comes to the end of the stream.
            Ok(Sending::Open | Sending::Closed) => {}
            Err(error) => self.dialogue.lose(socket_loss(error)),
        }
        match self.transport.read() {
            Ok(Some([])) => self.dialogue.lose(ConnectionLoss::PeerClosed),
            Ok(Some(bytes)) => {
                self.lines.extend(bytes);
                self.receive_lines();
            }
            Ok(None) => {}
            Err(error) => self.dialogue.lose(socket_loss(error)),
        }
    }

    fn receive_lines(&mut self) {
        loop {
            match self.lines.next_line() {
                Ok(Some(line)) => {
                    trace::received(&self.peer, &line);
                    self.dialogue.receive(&line);
                }
                Ok(None) => return,
                Err(error) => {
                    return self.dialogue.lose(ConnectionLoss::NotQmp {
                        what: error.to_string(),
                    });
                }
            }
        }
    }
}
