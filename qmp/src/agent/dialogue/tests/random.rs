//! The dialogue with an agent that is slow, is started anew at any time, and shares its line with a
//! console, under random sequences.

use std::collections::{HashMap, HashSet};

use super::*;

/// A xorshift generator: the same sequence for the same seed, on every machine.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// What must be true of a dialogue, told from the outside only.
#[derive(Default)]
struct Model {
    sent: HashSet<u64>,
    withdrawn: HashSet<u64>,
    settled: HashMap<u64, Outcome>,
    /// What the agent has yet to read.
    on_the_line: VecDeque<Vec<u8>>,
}

impl Model {
    fn check(&mut self, action: Action) {
        match action {
            Action::Resync(line) => self.on_the_line.push_back(line),
            Action::Transmit(line) => {
                let id = command_of(&line).unwrap();
                assert!(self.sent.insert(id), "{id} is sent twice");
                assert!(!self.withdrawn.contains(&id) && !self.settled.contains_key(&id));
                self.on_the_line.push_back(line);
            }
            Action::Settle { id, outcome } => {
                assert!(!self.withdrawn.contains(&id.0), "{} was withdrawn", id.0);
                let was_sent = self.sent.contains(&id.0);
                match &outcome {
                    Outcome::Returned(of) => assert_eq!(of, &json!(id.0), "another one's answer"),
                    Outcome::Garbled(_) | Outcome::TimedOut => assert!(was_sent),
                    Outcome::Absent | Outcome::Busy => assert!(!was_sent),
                    Outcome::Lost { sent, .. } => assert_eq!(*sent, was_sent),
                    Outcome::Refused { .. } => panic!("nothing is refused here"),
                }
                assert!(
                    self.settled.insert(id.0, outcome).is_none(),
                    "{} is settled twice",
                    id.0
                );
            }
            Action::Close(_) => {}
        }
    }
}

/// The number of a command, which is also what the agent answers.
fn command_of(line: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(line).ok()?;
    text.trim_end().strip_prefix("command-")?.parse().ok()
}

fn answer_to(line: &[u8]) -> Vec<u8> {
    match command_of(line) {
        Some(id) => json!({"return": id}).to_string().into_bytes(),
        None => {
            let sync: Value = serde_json::from_slice(&line[1..]).unwrap();
            let answer = json!({"return": sync["arguments"]["id"]}).to_string();
            [&[SENTINEL], answer.as_bytes()].concat()
        }
    }
}

#[test]
fn every_command_is_settled_once_and_by_its_own_answer_under_any_interleaving() {
    let mut returned = 0;
    for seed in 1..=500_u64 {
        returned += one_random_life(seed);
    }
    assert!(returned > 5_000, "only {returned} answers: the test shows little");
}

fn one_random_life(seed: u64) -> usize {
    let mut dice = Dice(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
    let mut bench = Bench::new();
    let mut model = Model::default();
    let mut submitted = Vec::new();
    let mut clock = 0;
    for id in 1..=200 {
        match dice.below(20) {
            0..=5 => {
                submitted.push(id);
                bench.submit(id, clock + 1 + dice.below(10));
            }
            6..=14 => {
                if let Some(line) = model.on_the_line.pop_front() {
                    bench.receive(&answer_to(&line));
                }
            }
            15 => bench.receive(b"login: "),
            // The agent is started anew and has forgotten what it read.
            16 => drop(model.on_the_line.pop_front()),
            17 => {
                clock += dice.below(5);
                bench.advance(clock);
            }
            _ => {
                let is_pending = |id: &&u64| !model.settled.contains_key(id) && !model.withdrawn.contains(id);
                if let Some(&id) = submitted.iter().rfind(is_pending) {
                    model.withdrawn.insert(id);
                    bench.dialogue.withdraw(CommandId(id));
                }
            }
        }
        while let Some(action) = bench.dialogue.next_action() {
            model.check(action);
        }
    }
    bench.dialogue.lose(ConnectionLoss::PeerClosed);
    while let Some(action) = bench.dialogue.next_action() {
        model.check(action);
    }
    for id in submitted {
        assert!(
            model.settled.contains_key(&id) || model.withdrawn.contains(&id),
            "seed {seed}: {id} was never settled"
        );
    }
    let is_answer = |outcome: &&Outcome| matches!(outcome, Outcome::Returned(_));
    model.settled.values().filter(is_answer).count()
}
