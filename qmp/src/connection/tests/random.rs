//! The machine under random sequences, checked against a small model.

use std::collections::{BTreeSet, HashMap};

use super::*;

/// What must be true of a connection, told from the outside only.
#[derive(Default)]
struct Model {
    submitted: Vec<(u64, Kind)>,
    on_the_wire: BTreeSet<u64>,
    transmitted: Vec<u64>,
    replied: BTreeSet<u64>,
    withdrawn: BTreeSet<u64>,
    settled: HashMap<u64, Outcome>,
    events: u64,
    /// Those submitted after the closing began.
    too_late: BTreeSet<u64>,
    draining: Option<Drain>,
    closed: bool,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Plain,
    WithFds,
    OutOfBand,
}

/// How the end begins.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Drain {
    Closing,
    WriteSideLost,
}

impl Model {
    fn kind(&self, id: u64) -> Kind {
        self.submitted
            .iter()
            .find(|(submitted, _)| *submitted == id)
            .unwrap()
            .1
    }

    fn check(&mut self, action: Action) {
        let is_loss = |action: &Action| {
            matches!(
                action,
                Action::Settle {
                    outcome: Outcome::Lost(_),
                    ..
                }
            )
        };
        if self.draining.is_none() || self.closed {
            assert_eq!(self.closed, is_loss(&action), "{action:?}");
        }
        match action {
            Action::Transmit { id, line } => {
                assert!(!self.withdrawn.contains(&id.0) && !self.settled.contains_key(&id.0));
                assert!(
                    !self.too_late.contains(&id.0),
                    "{} came too late to be sent",
                    id.0
                );
                assert_ne!(self.draining, Some(Drain::WriteSideLost));
                assert!(self.on_the_wire.insert(id.0), "{} is sent twice", id.0);
                self.transmitted.push(id.0);
                let kind = self.kind(id.0);
                let line: Value = serde_json::from_slice(&line).unwrap();
                assert_eq!(line.get("exec-oob").is_some(), kind == Kind::OutOfBand);
                let flying = |wanted: Kind| {
                    self.on_the_wire
                        .iter()
                        .filter(|&&id| self.kind(id) == wanted)
                        .count()
                };
                assert!(flying(Kind::Plain) + flying(Kind::WithFds) <= IN_FLIGHT_LIMIT);
                assert!(flying(Kind::WithFds) <= 1);
            }
            Action::Settle { id, outcome } => {
                assert!(!self.withdrawn.contains(&id.0), "{} was withdrawn", id.0);
                match &outcome {
                    Outcome::Returned(value) => {
                        assert_eq!(value["of"], id.0);
                        assert!(self.replied.contains(&id.0));
                    }
                    Outcome::TimedOut | Outcome::Lost(_) => assert!(!self.replied.contains(&id.0)),
                    other => panic!("{other:?}"),
                }
                // Before the end only what was not sent is lost, and never will be sent.
                match (&outcome, self.draining) {
                    (Outcome::Lost(_), Some(Drain::Closing)) if !self.closed => {
                        assert!(self.too_late.contains(&id.0));
                    }
                    (Outcome::Lost(_), Some(Drain::WriteSideLost)) if !self.closed => {
                        assert!(!self.transmitted.contains(&id.0));
                    }
                    _ => {}
                }
                assert!(
                    self.settled.insert(id.0, outcome).is_none(),
                    "{} is settled twice",
                    id.0
                );
            }
            Action::Publish(event) => {
                assert_eq!(
                    event.data["number"], self.events,
                    "events are lost or out of order"
                );
                self.events += 1;
            }
            Action::Announce(_) => panic!("announced twice"),
            Action::Close(_) => self.closed = true,
        }
    }
}

/// A xorshift generator: the same sequence for the same seed, on every machine.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }

    fn pick(&mut self, from: &BTreeSet<u64>) -> Option<u64> {
        if from.is_empty() {
            None
        } else {
            from.iter().nth(self.below(from.len())).copied()
        }
    }
}

#[test]
fn every_command_is_settled_once_under_any_interleaving() {
    for seed in 1..=500 {
        one_random_life(seed);
    }
}

fn one_random_life(seed: u64) {
    let ends_well = seed.is_multiple_of(2);
    let mut dice = Dice(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let mut bench = Bench::ready();
    let mut model = Model::default();
    let (mut clock, mut events_sent) = (0, 0);
    let drain = [None, Some(Drain::Closing), Some(Drain::WriteSideLost)][dice.below(3)];
    for id in 1..=200 {
        if id == 150 {
            model.draining = drain;
            match drain {
                None => {}
                Some(Drain::Closing) => bench.connection.close(),
                Some(Drain::WriteSideLost) => bench.connection.lose_write_side(bench.at(clock)),
            }
            while let Some(action) = bench.connection.next_action() {
                model.check(action);
            }
            if model.closed {
                break;
            }
        }
        match dice.below(10) {
            0..=3 => {
                let kind = [Kind::Plain, Kind::Plain, Kind::WithFds, Kind::OutOfBand][dice.below(4)];
                model.submitted.push((id, kind));
                if model.draining.is_some() {
                    model.too_late.insert(id);
                }
                bench.connection.submit(Request {
                    out_of_band: kind == Kind::OutOfBand,
                    carries_fds: kind == Kind::WithFds,
                    deadline: (dice.below(2) == 0).then(|| bench.at(clock + 1 + dice.below(10) as u64)),
                    ..bench.request(id)
                });
            }
            4..=6 => {
                if let Some(id) = dice.pick(&model.on_the_wire) {
                    model.on_the_wire.remove(&id);
                    // Only a reply that comes in time counts as one.
                    if !model.settled.contains_key(&id) {
                        model.replied.insert(id);
                    }
                    bench.reply(id);
                }
            }
            7 => {
                bench.receive(&json!({"event": "TICK", "data": {"number": events_sent}}).to_string());
                events_sent += 1;
            }
            8 => {
                clock += dice.below(4) as u64;
                bench.connection.advance(bench.at(clock));
            }
            _ => {
                let pending = model.submitted.iter().map(|(id, _)| *id);
                let pending = pending.filter(|id| !model.settled.contains_key(id)).collect();
                if let Some(id) = dice.pick(&pending) {
                    model.withdrawn.insert(id);
                    bench.connection.withdraw(CommandId(id));
                }
            }
        }
        while let Some(action) = bench.connection.next_action() {
            model.check(action);
        }
        if model.closed {
            break;
        }
    }
    // One half of the lives end well: QEMU answers all that it has, what is queued follows, until
    // nothing is left.
    while ends_well && let Some(id) = dice.pick(&model.on_the_wire) {
        model.on_the_wire.remove(&id);
        if !model.settled.contains_key(&id) {
            model.replied.insert(id);
        }
        bench.reply(id);
        while let Some(action) = bench.connection.next_action() {
            model.check(action);
        }
    }
    let settled_before_the_end = model.settled.len();
    let closed_by_itself = model.closed;
    bench.connection.lose(ConnectionLoss::PeerClosed);
    while let Some(action) = bench.connection.next_action() {
        model.check(action);
    }
    assert!(model.closed);
    assert_eq!(model.events, events_sent);
    if ends_well {
        assert!(
            drain != Some(Drain::Closing) || closed_by_itself,
            "seed {seed}: the closing did not come to its end"
        );
        assert_eq!(
            model.settled.len(),
            settled_before_the_end,
            "seed {seed}: something was never sent"
        );
    }
    for (id, _) in &model.submitted {
        assert!(
            model.settled.contains_key(id) || model.withdrawn.contains(id),
            "seed {seed}: {id} was never settled"
        );
    }
    let in_band = |ids: Vec<u64>| {
        ids.into_iter()
            .filter(|&id| model.kind(id) != Kind::OutOfBand)
            .collect::<Vec<_>>()
    };
    let sent = in_band(model.transmitted.clone());
    assert!(sent.is_sorted(), "seed {seed}: sent out of order: {sent:?}");
}
