//! The protocol machine of one monitor connection, without IO and without a clock.
//!
//! Whoever owns it feeds it with what happened ([`submit`](Connection::submit),
//! [`withdraw`](Connection::withdraw), [`receive`](Connection::receive),
//! [`advance`](Connection::advance), [`lose`](Connection::lose)) and then carries out what it
//! decided ([`next_action`](Connection::next_action)) until there is nothing left to do.
//!
//! ```text
//!              greeting                 reply to qmp_capabilities
//!   Greeting ───────────► Negotiating ───────────────────────────► Ready
//!      │                       │                                   │   │
//!      │ deadline, close, loss │ deadline, refusal, close, loss    │   │ close, write side lost
//!      │                       │                                   │   ▼
//!      │                       │                              loss │ Draining
//!      │                       │                                   │   │ last reply, limit, loss
//!      └───────────────────────┴────────────► Closed ◄─────────────┴───┘
//! ```
//!
//! - *Greeting*: nothing is said. Commands wait.
//! - *Negotiating*: `qmp_capabilities` is said and nothing else. Commands still wait. Whether or
//!   not QEMU can hear it, what QEMU says is read, and the deadline of the opening is the limit.
//! - *Ready*: commands go out and answers come in.
//! - *Draining*: new commands are settled as lost at once; the answers to earlier ones are still
//!   taken. There are two ways in. After [`close`](Connection::close) the commands that were
//!   submitted before go out as room comes, and the connection is closed with the last of their
//!   answers. After [`lose_write_side`](Connection::lose_write_side) what waits to go out is settled
//!   as lost, and all that QEMU said before it left, events too, is read to the end of the stream,
//!   for at most [`DRAIN_LIMIT`].
//! - *Closed*: everything is settled, the reason is kept, and nothing changes any more.
//!
//! Guarantees:
//!
//! - Each submitted command is settled exactly once, unless it is withdrawn; then it is not settled
//!   at all.
//! - Nothing but the negotiation is transmitted before Ready; commands that come earlier wait.
//!   Nothing that is submitted in Draining or Closed is ever transmitted.
//! - Commands in-band are transmitted in the order of their submission, at most [`IN_FLIGHT_LIMIT`]
//!   at a time. Commands out-of-band pass them by: they are what is left to say when QEMU answers
//!   no other.
//! - At most one command that carries descriptors is in flight. QEMU keeps received descriptors
//!   with the socket, not with the command, until a command takes them (`tcp_chr_recv` in its
//!   `chardev/char-socket.c`); those of a second message replace, and close, those of the first.
//! - Events are published in every state, in their order, and before the reply that follows them.
//! - A reply belongs to the command with its id or to none. A reply that nobody awaits changes
//!   nothing for the others.
//!
//! A command that was transmitted and then withdrawn, or whose deadline passed, leaves a tombstone
//! until its late reply comes. The tombstone still counts as in flight, because QEMU still has the
//! command to do.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tracing::{debug, warn};

use crate::error::ConnectionLoss;
use crate::wire::message::{Event, Greeting, Message, encode_command};

/// How many commands in-band may await their reply at a time.
///
/// QEMU stops reading the monitor while eight commands wait in its queue (`QMP_REQ_QUEUE_LEN_MAX`
/// in its `monitor/qmp.c`), and would not see a command out-of-band behind them. The one that is
/// being executed has left the queue, so seven wait there while QEMU is busy with one of ours.
pub const IN_FLIGHT_LIMIT: usize = 8;

/// How long the end of the stream is awaited when nothing can be sent any more.
///
/// A QEMU that is gone has said all it will ever say; it lies in the socket and takes milliseconds
/// to read. The limit is for a peer that shut down one direction only, which would hold a useless
/// connection open for ever.
pub const DRAIN_LIMIT: Duration = Duration::from_secs(5);

/// Identifies a command on its connection, and is the `id` on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommandId(pub u64);

/// A command to be executed.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its id, used once on a connection, [`CommandId::FIRST`] or above.
    pub id: CommandId,
    /// Its name.
    pub name: String,
    /// Its arguments; null stands for none.
    pub arguments: Value,
    /// Whether to execute it out-of-band.
    pub out_of_band: bool,
    /// Whether file descriptors go with it.
    pub carries_fds: bool,
    /// When to stop waiting for it; never, when absent.
    pub deadline: Option<Instant>,
}

/// How a command ended.
#[derive(Clone, Debug)]
pub enum Outcome {
    /// QEMU executed it and returned this.
    Returned(Value),
    /// QEMU refused it, or failed.
    Refused {
        /// The error class.
        class: String,
        /// The description for humans.
        desc: String,
    },
    /// Its deadline passed. If it was transmitted, QEMU may still execute it.
    TimedOut,
    /// It was to be executed out-of-band, which this monitor does not offer. It was not
    /// transmitted.
    OutOfBandUnavailable,
    /// The connection ended before its reply came.
    Lost(ConnectionLoss),
}

/// What the owner of the connection has to do.
#[derive(Clone, Debug)]
pub enum Action {
    /// Write this line to the socket, and with its first byte the descriptors of this command.
    Transmit {
        /// The command.
        id: CommandId,
        /// The line, with its line end.
        line: Vec<u8>,
    },
    /// Tell the submitter how the command ended.
    Settle {
        /// The command.
        id: CommandId,
        /// How it ended.
        outcome: Outcome,
    },
    /// Tell the subscribers.
    Publish(Event),
    /// The negotiation is done.
    Announce(Greeting),
    /// Close the socket. All commands that are still awaited are settled as lost next.
    Close(ConnectionLoss),
}

/// The state of one monitor connection.
#[derive(Debug)]
pub struct Connection {
    state: State,
    queued: VecDeque<Request>,
    queued_out_of_band: VecDeque<Request>,
    in_flight: BTreeMap<CommandId, InFlight>,
    actions: VecDeque<Action>,
}

#[derive(Debug)]
enum State {
    Greeting { deadline: Instant },
    Negotiating { deadline: Instant, greeting: Greeting },
    Ready { out_of_band: bool },
    Draining(Draining),
    Closed(ConnectionLoss),
}

#[derive(Clone, Copy, Debug)]
enum Draining {
    /// Told to close; still says what was submitted before.
    UntilAnswered { out_of_band: bool },
    /// Nothing can be said any more.
    UntilEnd { limit: Instant },
}

#[derive(Debug)]
struct InFlight {
    out_of_band: bool,
    carries_fds: bool,
    deadline: Option<Instant>,
    /// False for a tombstone.
    awaited: bool,
}

impl CommandId {
    /// The lowest id that is free for commands.
    pub const FIRST: Self = Self(1);
    const NEGOTIATION: Self = Self(0);
}

impl Connection {
    /// A connection that has just been made, and must be Ready by the deadline.
    pub fn new(deadline: Instant) -> Self {
        Self {
            state: State::Greeting { deadline },
            queued: VecDeque::new(),
            queued_out_of_band: VecDeque::new(),
            in_flight: BTreeMap::new(),
            actions: VecDeque::new(),
        }
    }

    /// Takes a command to execute.
    pub fn submit(&mut self, request: Request) {
        if let Some(loss) = self.refuses_with() {
            return self.settle(request.id, Outcome::Lost(loss));
        }
        let queue = if request.out_of_band {
            &mut self.queued_out_of_band
        } else {
            &mut self.queued
        };
        queue.push_back(request);
        self.transmit_queued();
    }

    /// Forgets a command that nobody waits for any more. It will not be settled.
    pub fn withdraw(&mut self, id: CommandId) {
        for queue in [&mut self.queued, &mut self.queued_out_of_band] {
            queue.retain(|request| request.id != id);
        }
        if let Some(command) = self.in_flight.get_mut(&id) {
            command.awaited = false;
        }
        // The withdrawn one may have held up those behind it, or the end.
        self.transmit_queued();
    }

    /// Takes no more commands, and closes when those that there are have ended. A connection that
    /// is not Ready yet is closed at once.
    pub fn close(&mut self) {
        match self.state {
            State::Greeting { .. } | State::Negotiating { .. } => {
                self.lose(ConnectionLoss::LocallyClosed);
            }
            State::Ready { out_of_band } => {
                self.state = State::Draining(Draining::UntilAnswered { out_of_band });
                self.close_when_answered();
            }
            // Already on the way.
            State::Draining(_) | State::Closed(_) => {}
        }
    }

    /// QEMU takes nothing any more. What it said before is still to be read, to the end of the
    /// stream.
    pub fn lose_write_side(&mut self, now: Instant) {
        match self.state {
            State::Ready { .. } | State::Draining(Draining::UntilAnswered { .. }) => {}
            State::Greeting { .. }
            | State::Negotiating { .. }
            | State::Draining(Draining::UntilEnd { .. })
            | State::Closed(_) => return,
        }
        self.state = State::Draining(Draining::UntilEnd {
            limit: now + DRAIN_LIMIT,
        });
        let queued = self.queued_out_of_band.drain(..).chain(self.queued.drain(..));
        self.actions.extend(queued.map(|request| Action::Settle {
            id: request.id,
            outcome: Outcome::Lost(ConnectionLoss::PeerClosed),
        }));
    }

    /// Takes a message from QEMU.
    pub fn receive(&mut self, message: Message) {
        if matches!(self.state, State::Closed(_)) {
            return;
        }
        match message {
            Message::Event(event) => self.actions.push_back(Action::Publish(event)),
            Message::Greeting(greeting) => self.greeted(greeting),
            Message::Reply { id, result } => self.answered(id, Outcome::Returned(result)),
            Message::Error { id, class, desc } => self.answered(id, Outcome::Refused { class, desc }),
            Message::Other(value) => debug!(%value, "ignored a message of an unknown kind"),
        }
    }

    /// Lets time pass: settles what is overdue.
    pub fn advance(&mut self, now: Instant) {
        match self.state {
            State::Greeting { deadline } if deadline <= now => {
                return self.lose(ConnectionLoss::GreetingTimeout);
            }
            State::Negotiating { deadline, .. } if deadline <= now => {
                return self.lose(ConnectionLoss::NegotiationTimeout);
            }
            State::Draining(Draining::UntilEnd { limit }) if limit <= now => {
                return self.lose(ConnectionLoss::PeerClosed);
            }
            _ => {}
        }
        let overdue = |deadline: Option<Instant>| deadline.is_some_and(|deadline| deadline <= now);
        let mut expired = Vec::new();
        for (&id, command) in &mut self.in_flight {
            if command.awaited && overdue(command.deadline) {
                command.awaited = false;
                expired.push(id);
            }
        }
        for queue in [&mut self.queued, &mut self.queued_out_of_band] {
            expired.extend(
                queue
                    .iter()
                    .filter(|request| overdue(request.deadline))
                    .map(|request| request.id),
            );
            queue.retain(|request| !overdue(request.deadline));
        }
        for id in expired {
            self.settle(id, Outcome::TimedOut);
        }
        self.transmit_queued();
    }

    /// Ends the connection, and with it all commands. The first reason stands.
    pub fn lose(&mut self, loss: ConnectionLoss) {
        if matches!(self.state, State::Closed(_)) {
            return;
        }
        self.state = State::Closed(loss.clone());
        self.actions.push_back(Action::Close(loss.clone()));
        let in_flight = std::mem::take(&mut self.in_flight);
        let awaited = in_flight
            .into_iter()
            .filter_map(|(id, command)| command.awaited.then_some(id));
        let queued = self.queued_out_of_band.drain(..).chain(self.queued.drain(..));
        for id in awaited.chain(queued.map(|request| request.id)) {
            let outcome = Outcome::Lost(loss.clone());
            self.actions.push_back(Action::Settle { id, outcome });
        }
    }

    /// What to do next, in this order.
    pub fn next_action(&mut self) -> Option<Action> {
        self.actions.pop_front()
    }

    /// When [`advance`](Self::advance) has something to do.
    pub fn next_deadline(&self) -> Option<Instant> {
        let of_the_state = match self.state {
            State::Greeting { deadline } | State::Negotiating { deadline, .. } => Some(deadline),
            State::Draining(Draining::UntilEnd { limit }) => Some(limit),
            State::Ready { .. } | State::Draining(Draining::UntilAnswered { .. }) | State::Closed(_) => None,
        };
        let in_flight = self
            .in_flight
            .values()
            .filter(|command| command.awaited)
            .filter_map(|command| command.deadline);
        let queued = self
            .queued
            .iter()
            .chain(&self.queued_out_of_band)
            .filter_map(|request| request.deadline);
        of_the_state.into_iter().chain(in_flight).chain(queued).min()
    }

    fn greeted(&mut self, greeting: Greeting) {
        let State::Greeting { deadline } = self.state else {
            return warn!("ignored a second greeting");
        };
        let arguments = if greeting.offers_oob() {
            json!({"enable": ["oob"]})
        } else {
            Value::Null
        };
        self.state = State::Negotiating { deadline, greeting };
        let line = encode_command(
            CommandId::NEGOTIATION.0,
            "qmp_capabilities".to_owned(),
            arguments,
            false,
        );
        self.actions.push_back(Action::Transmit {
            id: CommandId::NEGOTIATION,
            line,
        });
    }

    fn answered(&mut self, id: Option<Value>, outcome: Outcome) {
        let Some(id) = id.as_ref().and_then(Value::as_u64).map(CommandId) else {
            // QEMU answers like this to a line that it could not parse, which no line of ours
            // should be.
            return warn!(?id, ?outcome, "ignored an answer without an id of ours");
        };
        if id == CommandId::NEGOTIATION {
            return self.negotiated(outcome);
        }
        match self.in_flight.remove(&id) {
            Some(command) if command.awaited => self.settle(id, outcome),
            Some(_) => debug!(
                id = id.0,
                "threw away the late reply of a command that nobody waits for"
            ),
            None => warn!(id = id.0, "ignored an answer to a command that is not in flight"),
        }
        self.transmit_queued();
    }

    fn negotiated(&mut self, outcome: Outcome) {
        let State::Negotiating { greeting, .. } = &mut self.state else {
            return warn!("ignored an answer to a negotiation that is not under way");
        };
        if let Outcome::Refused { class, desc } = outcome {
            return self.lose(ConnectionLoss::NegotiationRefused { class, desc });
        }
        let greeting = std::mem::take(greeting);
        self.state = State::Ready {
            out_of_band: greeting.offers_oob(),
        };
        self.actions.push_back(Action::Announce(greeting));
        self.transmit_queued();
    }

    /// The reason for which a new command is settled at once, if there is one.
    fn refuses_with(&self) -> Option<ConnectionLoss> {
        match &self.state {
            State::Greeting { .. } | State::Negotiating { .. } | State::Ready { .. } => None,
            State::Draining(Draining::UntilAnswered { .. }) => Some(ConnectionLoss::LocallyClosed),
            State::Draining(Draining::UntilEnd { .. }) => Some(ConnectionLoss::PeerClosed),
            State::Closed(loss) => Some(loss.clone()),
        }
    }

    /// Sends what may be sent now, and closes when that was what the closing waited for.
    fn transmit_queued(&mut self) {
        let (State::Ready { out_of_band } | State::Draining(Draining::UntilAnswered { out_of_band })) =
            self.state
        else {
            return;
        };
        while let Some(request) = self.queued_out_of_band.pop_front() {
            if out_of_band {
                self.transmit(request);
            } else {
                self.settle(request.id, Outcome::OutOfBandUnavailable);
            }
        }
        while let Some(request) = self
            .queued
            .pop_front_if(|request| may_follow(request, &self.in_flight))
        {
            self.transmit(request);
        }
        self.close_when_answered();
    }

    /// Tombstones are not waited for: nobody wants to know.
    fn close_when_answered(&mut self) {
        let closing = matches!(self.state, State::Draining(Draining::UntilAnswered { .. }));
        let awaited = self.in_flight.values().any(|command| command.awaited);
        if closing && !awaited && self.queued.is_empty() && self.queued_out_of_band.is_empty() {
            self.lose(ConnectionLoss::LocallyClosed);
        }
    }

    fn transmit(&mut self, request: Request) {
        let Request {
            id,
            name,
            arguments,
            out_of_band,
            carries_fds,
            deadline,
        } = request;
        self.in_flight.insert(
            id,
            InFlight {
                out_of_band,
                carries_fds,
                deadline,
                awaited: true,
            },
        );
        let line = encode_command(id.0, name, arguments, out_of_band);
        self.actions.push_back(Action::Transmit { id, line });
    }

    fn settle(&mut self, id: CommandId, outcome: Outcome) {
        self.actions.push_back(Action::Settle { id, outcome });
    }
}

/// Whether a command in-band may be transmitted while these are in flight.
fn may_follow(request: &Request, in_flight: &BTreeMap<CommandId, InFlight>) -> bool {
    let in_band = in_flight.values().filter(|command| !command.out_of_band).count();
    let descriptors_pending = in_flight.values().any(|command| command.carries_fds);
    in_band < IN_FLIGHT_LIMIT && !(request.carries_fds && descriptors_pending)
}

#[cfg(test)]
mod tests;
