//! The dialogue with one guest agent, without IO and without a clock.
//!
//! The channel is a serial line into the guest. Nobody is announced on it, agents and clients come
//! and go on either end and leave half of what they said, and answers carry no id: agents before
//! QEMU 4.0 refuse a command that has one. All that ties an answer to its command is the order. So
//! at most one command is under way, and after anything that breaks the order, a command that nobody
//! waits for any more above all, both ends come into step again first.
//!
//! ```text
//!                  a command waits              token behind 0xFF
//!   OutOfStep ────────────────────► Syncing ─────────────────────► InStep ◄────────┐
//!       ▲                              │                              │            │
//!       │ no answer for its deadline   │             a command waits  │            │ answer
//!       ├──────────────────────────────┘                              ▼            │
//!       └───────────────────────────────────────────────────────── Awaiting ───────┘
//!         deadline, withdrawal, what is no message
//! ```
//!
//! and from everywhere to *Closed*, when the socket is lost.
//!
//! - *OutOfStep*: whatever comes is stale and thrown away.
//! - *Syncing*: a byte 0xFF, which makes the agent forget half a command, and `guest-sync-delimited`
//!   with a number never used before are sent. Whatever comes is stale, until the number comes back
//!   right behind another 0xFF. The answer to an earlier attempt has an earlier number.
//! - *InStep*: nothing is awaited. What comes all the same is thrown away.
//! - *Awaiting*: the next message is the answer.
//!
//! Each attempt to come into step is made for one command and ends with its deadline: QEMU's schema
//! demands a new one after each time-out, because the agent that took the last one may be gone.

use std::collections::VecDeque;
use std::time::Instant;

use serde_json::{Value, json};
use tracing::debug;

use crate::connection::CommandId;
use crate::error::ConnectionLoss;
use crate::wire::message::Message;

/// No byte of any JSON text in UTF-8.
const SENTINEL: u8 = 0xFF;

/// A command to be executed.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) id: CommandId,
    /// As it goes out, with its line end.
    pub(super) line: Vec<u8>,
    pub(super) deadline: Option<Instant>,
}

/// How a command ended.
#[derive(Debug)]
pub(super) enum Outcome {
    Returned(Value),
    Refused {
        class: String,
        desc: String,
    },
    /// Something came that is no message.
    Garbled(String),
    /// Its deadline passed while nobody answered the attempt to come into step. It was not sent.
    Absent,
    /// Its deadline passed while it waited behind another. It was not sent.
    Busy,
    /// Its deadline passed after it was sent.
    TimedOut,
    Lost {
        sent: bool,
        loss: ConnectionLoss,
    },
}

/// What the owner of the dialogue has to do.
#[derive(Debug)]
pub(super) enum Action {
    /// Write this line; what was not begun of earlier lines is not wanted any more.
    Resync(Vec<u8>),
    /// Write this line.
    Transmit(Vec<u8>),
    Settle {
        id: CommandId,
        outcome: Outcome,
    },
    Close(ConnectionLoss),
}

#[derive(Debug)]
pub(super) struct Dialogue {
    state: State,
    queued: VecDeque<Request>,
    next_token: i64,
    actions: VecDeque<Action>,
}

#[derive(Debug)]
enum State {
    OutOfStep,
    /// For the command at the head of the queue.
    Syncing {
        token: i64,
    },
    InStep,
    Awaiting {
        id: CommandId,
        deadline: Option<Instant>,
    },
    Closed(ConnectionLoss),
}

impl Dialogue {
    /// A dialogue over a channel in an unknown state. The seed makes the numbers differ from those
    /// of earlier clients, whose answers may still be on their way.
    pub(super) fn new(seed: u64) -> Self {
        Self {
            state: State::OutOfStep,
            queued: VecDeque::new(),
            // QEMU's integers are signed; the room above is for counting up.
            next_token: i64::try_from(seed >> 2).unwrap_or_default(),
            actions: VecDeque::new(),
        }
    }

    pub(super) fn submit(&mut self, request: Request) {
        if let State::Closed(loss) = &self.state {
            let loss = loss.clone();
            return self.settle(request.id, Outcome::Lost { sent: false, loss });
        }
        self.queued.push_back(request);
        self.proceed();
    }

    /// Forgets a command that nobody waits for any more. It will not be settled.
    pub(super) fn withdraw(&mut self, id: CommandId) {
        self.queued.retain(|request| request.id != id);
        match self.state {
            State::Awaiting { id: awaited, .. } if awaited == id => self.state = State::OutOfStep,
            // Whoever comes next makes an attempt of its own.
            State::Syncing { .. } if self.queued.is_empty() => self.state = State::OutOfStep,
            _ => {}
        }
        self.proceed();
    }

    /// Takes a line, given without its line end.
    pub(super) fn receive(&mut self, line: &[u8]) {
        match self.state {
            State::Syncing { token } => {
                if answers_sync(line, token) {
                    self.state = State::InStep;
                } else {
                    debug!("threw away what an agent said before it was in step");
                }
            }
            State::Awaiting { id, .. } => self.answered(id, line),
            State::OutOfStep | State::InStep => debug!("threw away what an agent said unasked"),
            State::Closed(_) => {}
        }
        self.proceed();
    }

    /// Lets time pass: settles what is overdue.
    pub(super) fn advance(&mut self, now: Instant) {
        let overdue = |deadline: Option<Instant>| deadline.is_some_and(|deadline| deadline <= now);
        // Whoever waits while nobody answers waits for an agent, not for a command before.
        let absent = matches!(self.state, State::Syncing { .. });
        match self.state {
            State::Awaiting { id, deadline } if overdue(deadline) => {
                self.state = State::OutOfStep;
                self.settle(id, Outcome::TimedOut);
            }
            // The attempt ends with the command it was made for.
            State::Syncing { .. } if self.queued.front().is_some_and(|head| overdue(head.deadline)) => {
                self.state = State::OutOfStep;
            }
            _ => {}
        }
        let (expired, kept) = std::mem::take(&mut self.queued)
            .into_iter()
            .partition::<VecDeque<_>, _>(|request| overdue(request.deadline));
        self.queued = kept;
        for Request { id, .. } in expired {
            self.settle(id, if absent { Outcome::Absent } else { Outcome::Busy });
        }
        self.proceed();
    }

    /// Ends the dialogue, and with it all commands. The first reason stands.
    pub(super) fn lose(&mut self, loss: ConnectionLoss) {
        if matches!(self.state, State::Closed(_)) {
            return;
        }
        let ended = std::mem::replace(&mut self.state, State::Closed(loss.clone()));
        self.actions.push_back(Action::Close(loss.clone()));
        if let State::Awaiting { id, .. } = ended {
            let loss = loss.clone();
            self.settle(id, Outcome::Lost { sent: true, loss });
        }
        for request in std::mem::take(&mut self.queued) {
            let loss = loss.clone();
            self.settle(request.id, Outcome::Lost { sent: false, loss });
        }
    }

    /// What to do next, in this order.
    pub(super) fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// When [`advance`](Self::advance) has something to do.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let awaited = match self.state {
            State::Awaiting { deadline, .. } => deadline,
            _ => None,
        };
        let queued = self.queued.iter().filter_map(|request| request.deadline);
        awaited.into_iter().chain(queued).min()
    }

    fn answered(&mut self, id: CommandId, line: &[u8]) {
        let (state, outcome) = match Message::parse(line) {
            Ok(Message::Reply { result, .. }) => (State::InStep, Outcome::Returned(result)),
            Ok(Message::Error { class, desc, .. }) => (State::InStep, Outcome::Refused { class, desc }),
            Ok(other) => (
                State::OutOfStep,
                Outcome::Garbled(format!("it is no answer: {other:?}")),
            ),
            Err(error) => (State::OutOfStep, Outcome::Garbled(error.to_string())),
        };
        self.state = state;
        self.settle(id, outcome);
    }

    /// Takes the next step towards the next command.
    fn proceed(&mut self) {
        match self.state {
            State::OutOfStep if !self.queued.is_empty() => {
                let token = self.next_token;
                self.next_token += 1;
                self.state = State::Syncing { token };
                self.actions.push_back(Action::Resync(sync_line(token)));
            }
            State::InStep => {
                if let Some(Request { id, line, deadline }) = self.queued.pop_front() {
                    self.state = State::Awaiting { id, deadline };
                    self.actions.push_back(Action::Transmit(line));
                }
            }
            _ => {}
        }
    }

    fn settle(&mut self, id: CommandId, outcome: Outcome) {
        self.actions.push_back(Action::Settle { id, outcome });
    }
}

fn sync_line(token: i64) -> Vec<u8> {
    let command = json!({"execute": "guest-sync-delimited", "arguments": {"id": token}});
    let mut line = vec![SENTINEL];
    line.extend_from_slice(format!("{command}\n").as_bytes());
    line
}

/// Whether the line ends in the answer to this attempt, with the sentinel before it.
fn answers_sync(line: &[u8], token: i64) -> bool {
    let Some(sentinel) = line.iter().rposition(|&byte| byte == SENTINEL) else {
        return false;
    };
    matches!(
        Message::parse(&line[sentinel + 1..]),
        Ok(Message::Reply { result, .. }) if result.as_i64() == Some(token)
    )
}

#[cfg(test)]
mod tests;
