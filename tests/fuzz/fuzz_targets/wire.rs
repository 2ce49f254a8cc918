//! Any bytes as what a monitor says, arriving in any pieces, while commands are submitted, withdrawn
//! and run late.
//!
//! The first line of an input is the script, one act a byte; the rest is what the peer sends.
//!
//! | byte | act |
//! | --- | --- |
//! | `l` | the bytes up to the next line end arrive |
//! | `s` `S` | a command is submitted, with a deadline 5 s from now or with none |
//! | `o` `O` | the same, out-of-band |
//! | `f` `F` | the same, with file descriptors |
//! | `w` `W` | the oldest, the newest command that is pending is withdrawn |
//! | `t` `T` | 1 s, 10 s pass |
//! | `c` | the client closes |
//! | `x` | the peer takes nothing any more |
//! | any other | so many bytes arrive |
//!
//! Bytes go through the line splitter, the message parser and the protocol machine as they do in
//! the client, and a model that sees only what goes in and out judges every step.

#![no_main]

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use dormouse_qmp::ConnectionLoss;
use dormouse_qmp::connection::{
    Action, CommandId, Connection, DRAIN_LIMIT, IN_FLIGHT_LIMIT, Outcome, Request,
};
use dormouse_qmp::wire::line::LineBuffer;
use dormouse_qmp::wire::message::Message;
use libfuzzer_sys::fuzz_target;
use serde_json::{Value, json};

/// Small, so that it is reached.
const LINE_LIMIT_BYTES: usize = 512;

const NEGOTIATION: u64 = 0;

fuzz_target!(|input: &[u8]| {
    let end = input.iter().position(|&byte| byte == b'\n');
    let (script, stream) = match end {
        Some(end) => (&input[..end], &input[end + 1..]),
        None => (&[][..], input),
    };
    let mut life = Life::new(stream);
    for &act in script {
        life.act(act);
        life.check_rest();
    }
    life.end();
});

/// One connection, from its beginning to its end.
struct Life<'a> {
    connection: Connection,
    lines: LineBuffer,
    unfed: &'a [u8],
    /// What the line splitter has yet to find.
    expected: Lines<'a>,
    /// The client stopped to listen: what came was no QMP.
    deaf: bool,
    now: Instant,
    model: Model,
}

/// What must be true of a connection, told from the outside only.
struct Model {
    opening_deadline: Instant,
    commands: BTreeMap<u64, Command>,
    /// Transmitted and not answered, the negotiation among them.
    on_the_wire: BTreeSet<u64>,
    last_in_band: u64,
    /// Known once the connection is ready: whether it executes out-of-band.
    out_of_band: Option<bool>,
    draining: Option<Draining>,
    closed: bool,
}

/// What a connection that takes no more commands waits for.
#[derive(Clone, Copy, PartialEq)]
enum Draining {
    Answers,
    EndOfStream { limit: Instant },
}

struct Command {
    kind: Kind,
    deadline: Option<Instant>,
    sent: bool,
    /// Neither settled nor withdrawn.
    pending: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Plain,
    WithFds,
    OutOfBand,
}

/// Why the machine is looked at: what it was just given.
#[derive(Clone, Copy)]
enum Given<'a> {
    Message(&'a Message),
    Submission(u64),
    Withdrawal,
    Time(Instant),
    Closing,
    WriteSideLost,
    Loss,
}

impl<'a> Life<'a> {
    fn new(stream: &'a [u8]) -> Self {
        let now = Instant::now();
        let opening_deadline = now + Duration::from_secs(15);
        Self {
            connection: Connection::new(opening_deadline),
            lines: LineBuffer::new(LINE_LIMIT_BYTES),
            unfed: stream,
            expected: Lines::new(stream),
            deaf: false,
            now,
            model: Model {
                opening_deadline,
                commands: BTreeMap::new(),
                on_the_wire: BTreeSet::new(),
                last_in_band: NEGOTIATION,
                out_of_band: None,
                draining: None,
                closed: false,
            },
        }
    }

    fn act(&mut self, act: u8) {
        let soon = Some(self.now + Duration::from_secs(5));
        match act {
            b's' => self.submit(Kind::Plain, soon),
            b'S' => self.submit(Kind::Plain, None),
            b'o' => self.submit(Kind::OutOfBand, soon),
            b'O' => self.submit(Kind::OutOfBand, None),
            b'f' => self.submit(Kind::WithFds, soon),
            b'F' => self.submit(Kind::WithFds, None),
            b'w' => self.withdraw(self.model.oldest_pending()),
            b'W' => self.withdraw(self.model.newest_pending()),
            b't' => self.pass(1),
            b'T' => self.pass(10),
            b'c' => self.close(),
            b'x' => self.lose_write_side(),
            b'l' => {
                let line = self.unfed.iter().position(|&byte| byte == b'\n');
                self.feed(line.map_or(self.unfed.len(), |end| end + 1));
            }
            count => self.feed(count.into()),
        }
    }

    /// The rest arrives, the peer leaves, and somebody comes too late.
    fn end(mut self) {
        self.feed(self.unfed.len());
        self.check_rest();
        if !self.deaf {
            self.expected.check_end();
        }
        self.lose(ConnectionLoss::PeerClosed);
        self.submit(Kind::Plain, None);
        assert!(self.model.closed);
        if let Some(id) = self.model.oldest_pending() {
            panic!("command {id} never ended");
        }
    }

    fn submit(&mut self, kind: Kind, deadline: Option<Instant>) {
        let id = self.model.commands.len() as u64 + CommandId::FIRST.0;
        self.model.commands.insert(
            id,
            Command {
                kind,
                deadline,
                sent: false,
                pending: true,
            },
        );
        self.connection.submit(Request {
            id: CommandId(id),
            name: "human-monitor-command".to_owned(),
            arguments: json!({"command-line": format!("info\n{id}"), "size": u64::MAX}),
            out_of_band: kind == Kind::OutOfBand,
            carries_fds: kind == Kind::WithFds,
            deadline,
        });
        self.carry_out(Given::Submission(id));
    }

    fn withdraw(&mut self, id: Option<u64>) {
        let Some(id) = id else { return };
        self.model.command(id).pending = false;
        self.connection.withdraw(CommandId(id));
        self.carry_out(Given::Withdrawal);
    }

    fn pass(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
        self.connection.advance(self.now);
        self.carry_out(Given::Time(self.now));
        let overdue = self.connection.next_deadline().filter(|&next| next <= self.now);
        assert!(overdue.is_none(), "something overdue was left");
    }

    fn close(&mut self) {
        if self.model.out_of_band.is_some() {
            self.model.draining.get_or_insert(Draining::Answers);
        }
        self.connection.close();
        self.carry_out(Given::Closing);
        let opening = self.model.out_of_band.is_none();
        assert!(
            self.model.closed || !opening,
            "an opening goes on though it was closed"
        );
    }

    fn lose_write_side(&mut self) {
        let until_end = matches!(self.model.draining, Some(Draining::EndOfStream { .. }));
        if self.model.out_of_band.is_some() && !until_end {
            let limit = self.now + DRAIN_LIMIT;
            self.model.draining = Some(Draining::EndOfStream { limit });
        }
        self.connection.lose_write_side(self.now);
        self.carry_out(Given::WriteSideLost);
    }

    fn feed(&mut self, count: usize) {
        let (bytes, unfed) = self.unfed.split_at(count.min(self.unfed.len()));
        self.unfed = unfed;
        self.lines.extend(bytes);
        while !self.deaf {
            match self.lines.next_line() {
                Ok(Some(line)) => {
                    self.expected.check(&line);
                    match Message::parse(&line) {
                        Ok(message) => self.receive(message),
                        Err(error) => self.not_qmp(error.to_string()),
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    self.expected.check_too_long();
                    self.not_qmp(error.to_string());
                }
            }
        }
    }

    fn not_qmp(&mut self, what: String) {
        self.deaf = true;
        self.lose(ConnectionLoss::NotQmp { what });
    }

    fn lose(&mut self, loss: ConnectionLoss) {
        self.connection.lose(loss);
        self.carry_out(Given::Loss);
        assert!(self.model.closed);
    }

    fn receive(&mut self, message: Message) {
        let answered = answered(&message).filter(|_| !self.model.closed);
        let was_on_the_wire = answered.is_some_and(|id| self.model.on_the_wire.remove(&id));
        let awaited = answered.filter(|id| {
            was_on_the_wire && self.model.commands.get(id).is_some_and(|command| command.pending)
        });
        let publishes = usize::from(matches!(message, Message::Event(_)) && !self.model.closed);

        self.connection.receive(message.clone());
        let published = self.carry_out(Given::Message(&message));
        assert_eq!(published, publishes, "{message:?}");
        if let Some(id) = awaited {
            assert!(!self.model.command(id).pending, "the answer to {id} was lost");
        }
    }

    /// Judges what the machine decided. Returns how many events it published.
    fn carry_out(&mut self, given: Given<'_>) -> usize {
        let mut published = 0;
        while let Some(action) = self.connection.next_action() {
            published += usize::from(matches!(action, Action::Publish(_)));
            self.model.check(action, given);
        }
        published
    }

    /// What holds whenever the machine has nothing to do.
    fn check_rest(&mut self) {
        assert_eq!(self.connection.next_deadline(), self.model.next_deadline());
        if let Some(id) = self.model.held_up_without_a_reason() {
            panic!("command {id} waits for nothing");
        }
        let all_answered = self.model.oldest_pending().is_none();
        assert!(
            self.model.closed || self.model.draining != Some(Draining::Answers) || !all_answered,
            "nothing is left to wait for, and it is not closed"
        );
    }
}

impl Model {
    fn check(&mut self, action: Action, given: Given<'_>) {
        match action {
            Action::Transmit { id, line } => self.transmitted(id.0, &line, given),
            Action::Settle { id, outcome } => self.settled(id.0, &outcome, given),
            Action::Publish(event) => {
                let heard = matches!(given, Given::Message(Message::Event(heard)) if *heard == event);
                assert!(heard && !self.closed, "{event:?} did not happen");
            }
            Action::Announce(greeting) => {
                let negotiated = matches!(given, Given::Message(Message::Reply { id: Some(id), .. }) if *id == NEGOTIATION);
                assert!(negotiated && self.out_of_band.is_none() && !self.closed);
                self.out_of_band = Some(greeting.offers_oob());
            }
            Action::Close(_) => {
                assert!(!self.closed, "closed twice");
                self.closed = true;
            }
        }
    }

    fn transmitted(&mut self, id: u64, line: &[u8], given: Given<'_>) {
        assert!(!self.closed && self.on_the_wire.insert(id));
        assert!(matches!(self.draining, None | Some(Draining::Answers)));
        assert_eq!(line.iter().position(|&byte| byte == b'\n'), Some(line.len() - 1));
        let line: Value = serde_json::from_slice(line).expect("a line of JSON");
        assert_eq!(line["id"], id);
        if id == NEGOTIATION {
            assert!(matches!(given, Given::Message(Message::Greeting(_))));
            assert!(self.out_of_band.is_none());
            return;
        }
        let command = self.command(id);
        assert!(command.pending && !command.sent, "{id} must not be sent");
        command.sent = true;
        let kind = command.kind;
        let verb = if kind == Kind::OutOfBand {
            "exec-oob"
        } else {
            "execute"
        };
        assert_eq!(line[verb], "human-monitor-command");
        assert_eq!(line["arguments"]["size"], u64::MAX);
        match kind {
            Kind::OutOfBand => assert_eq!(self.out_of_band, Some(true)),
            Kind::Plain | Kind::WithFds => {
                assert!(self.out_of_band.is_some(), "{id} is sent before the negotiation");
                assert!(self.last_in_band < id, "{id} is sent out of order");
                self.last_in_band = id;
            }
        }
        assert!(self.in_flight(Kind::Plain) + self.in_flight(Kind::WithFds) <= IN_FLIGHT_LIMIT);
        assert!(self.in_flight(Kind::WithFds) <= 1);
    }

    fn settled(&mut self, id: u64, outcome: &Outcome, given: Given<'_>) {
        let (closed, draining, out_of_band) = (self.closed, self.draining.is_some(), self.out_of_band);
        let command = self.command(id);
        assert!(command.pending, "{id} ends though it has ended, or was withdrawn");
        command.pending = false;
        let sound = match (outcome, given) {
            (Outcome::Returned(value), Given::Message(message @ Message::Reply { result, .. })) => {
                command.sent && answered(message) == Some(id) && value == result
            }
            (Outcome::Refused { class, desc }, Given::Message(message)) => {
                let told =
                    matches!(message, Message::Error { class: c, desc: d, .. } if (c, d) == (class, desc));
                command.sent && answered(message) == Some(id) && told
            }
            (Outcome::TimedOut, Given::Time(now)) => command.deadline.is_some_and(|deadline| deadline <= now),
            (Outcome::OutOfBandUnavailable, _) => {
                command.kind == Kind::OutOfBand && !command.sent && out_of_band == Some(false)
            }
            (Outcome::Lost(_), Given::Submission(submitted)) => (closed || draining) && submitted == id,
            (Outcome::Lost(_), Given::WriteSideLost) => draining && !command.sent,
            (Outcome::Lost(_), _) => closed,
            _ => false,
        };
        assert!(sound, "{id} ends with {outcome:?}");
        assert!(!closed || matches!(outcome, Outcome::Lost(_)));
    }

    fn command(&mut self, id: u64) -> &mut Command {
        self.commands.get_mut(&id).expect("a command that was submitted")
    }

    fn oldest_pending(&self) -> Option<u64> {
        let mut commands = self.commands.iter();
        commands.find(|(_, command)| command.pending).map(|(&id, _)| id)
    }

    fn newest_pending(&self) -> Option<u64> {
        let mut commands = self.commands.iter().rev();
        commands.find(|(_, command)| command.pending).map(|(&id, _)| id)
    }

    fn in_flight(&self, kind: Kind) -> usize {
        let commands = self.on_the_wire.iter().filter_map(|id| self.commands.get(id));
        commands.filter(|command| command.kind == kind).count()
    }

    fn next_deadline(&self) -> Option<Instant> {
        if self.closed {
            return None;
        }
        let of_the_state = match self.draining {
            Some(Draining::EndOfStream { limit }) => Some(limit),
            Some(Draining::Answers) => None,
            None => self.out_of_band.is_none().then_some(self.opening_deadline),
        };
        let pending = self.commands.values().filter(|command| command.pending);
        pending
            .filter_map(|command| command.deadline)
            .chain(of_the_state)
            .min()
    }

    /// The next command of either queue, if it could be on the wire and is not.
    fn held_up_without_a_reason(&self) -> Option<u64> {
        let until_end = matches!(self.draining, Some(Draining::EndOfStream { .. }));
        if self.closed || until_end || self.out_of_band.is_none() {
            return None;
        }
        let waiting = |out_of_band: bool| {
            self.commands.iter().find(move |(_, command)| {
                command.pending && !command.sent && (command.kind == Kind::OutOfBand) == out_of_band
            })
        };
        let with_fds = self.in_flight(Kind::WithFds);
        let in_band = waiting(false).filter(|(_, command)| {
            self.in_flight(Kind::Plain) + with_fds < IN_FLIGHT_LIMIT
                && (command.kind == Kind::Plain || with_fds == 0)
        });
        waiting(true).or(in_band).map(|(&id, _)| id)
    }
}

/// The id that a message answers to, if it is one of ours.
fn answered(message: &Message) -> Option<u64> {
    match message {
        Message::Reply { id, .. } | Message::Error { id, .. } => id.as_ref()?.as_u64(),
        _ => None,
    }
}

/// The lines of a stream that is there as a whole: what a splitter must find, however it is cut.
struct Lines<'a> {
    rest: &'a [u8],
}

impl<'a> Lines<'a> {
    fn new(stream: &'a [u8]) -> Self {
        Self { rest: stream }
    }

    fn check(&mut self, found: &[u8]) {
        loop {
            let end = self
                .rest
                .iter()
                .position(|&byte| byte == b'\n')
                .expect("a line end");
            let line = &self.rest[..end];
            self.rest = &self.rest[end + 1..];
            assert!(line.len() <= LINE_LIMIT_BYTES, "a line too long was taken");
            if !line.trim_ascii_end().is_empty() {
                return assert_eq!(found, line.trim_ascii_end());
            }
        }
    }

    fn check_too_long(&self) {
        let mut lines = self.rest.split(|&byte| byte == b'\n');
        let line = lines.find(|line| line.len() > LINE_LIMIT_BYTES || !line.trim_ascii_end().is_empty());
        assert!(
            line.is_some_and(|line| line.len() > LINE_LIMIT_BYTES),
            "no line is too long"
        );
    }

    fn check_end(&self) {
        let mut lines = self.rest.split(|&byte| byte == b'\n');
        let unfinished = lines.next_back().unwrap_or_default();
        assert!(unfinished.len() <= LINE_LIMIT_BYTES, "an endless line was taken");
        assert!(
            lines.all(|line| line.trim_ascii_end().is_empty()),
            "a line was lost"
        );
    }
}
