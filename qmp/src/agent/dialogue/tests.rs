//! The dialogue under tables of steps.

use std::time::Duration;

use super::*;

mod random;

struct Bench {
    dialogue: Dialogue,
    start: Instant,
}

impl Bench {
    fn new() -> Self {
        Self {
            dialogue: Dialogue::new(400),
            start: Instant::now(),
        }
    }

    /// In step, by the token 100.
    fn in_step() -> Self {
        let mut bench = Self::new();
        bench.submit(0, 5);
        bench.receive(b"\xff{\"return\": 100}");
        bench.receive(b"{\"return\": {}}");
        bench.done();
        bench
    }

    fn submit(&mut self, id: u64, deadline_seconds: u64) {
        self.dialogue.submit(Request {
            id: CommandId(id),
            line: format!("command-{id}\n").into_bytes(),
            deadline: Some(self.start + Duration::from_secs(deadline_seconds)),
        });
    }

    fn receive(&mut self, line: &[u8]) {
        self.dialogue.receive(line);
    }

    fn advance(&mut self, seconds: u64) {
        self.dialogue.advance(self.start + Duration::from_secs(seconds));
    }

    /// What was decided since the last look, in short.
    fn done(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.dialogue.next_action())
            .map(in_short)
            .collect()
    }
}

fn in_short(action: Action) -> String {
    match action {
        Action::Resync(line) => {
            assert_eq!(line[0], 0xFF, "the agent is told to forget half a command");
            let command: Value = serde_json::from_slice(&line[1..]).unwrap();
            assert_eq!(command["execute"], "guest-sync-delimited");
            format!("sync {}", command["arguments"]["id"])
        }
        Action::Transmit(line) => String::from_utf8(line).unwrap().trim_end().to_owned(),
        Action::Settle { id, outcome } => match outcome {
            Outcome::Returned(value) => format!("{} returned {value}", id.0),
            Outcome::Refused { class, .. } => format!("{} refused {class}", id.0),
            Outcome::Garbled(_) => format!("{} garbled", id.0),
            Outcome::Absent => format!("{} absent", id.0),
            Outcome::Busy => format!("{} busy", id.0),
            Outcome::TimedOut => format!("{} timed out", id.0),
            Outcome::Lost { sent, .. } => format!("{} lost, sent: {sent}", id.0),
        },
        Action::Close(loss) => format!("close: {loss}"),
    }
}

#[test]
fn the_first_command_waits_until_both_are_in_step() {
    let mut bench = Bench::new();
    bench.submit(1, 5);
    assert_eq!(bench.done(), ["sync 100"]);
    bench.receive(b"\xff{\"return\": 100}");
    assert_eq!(bench.done(), ["command-1"]);
    bench.receive(b"{\"return\": {\"a\": 1}}");
    assert_eq!(bench.done(), ["1 returned {\"a\":1}"]);
}

#[test]
fn nothing_but_the_number_right_behind_the_sentinel_brings_both_into_step() {
    let mut bench = Bench::new();
    bench.submit(1, 5);
    bench.done();
    for stale in [
        b"{\"return\": {}}".as_slice(),
        // The agent's answer to the 0xFF that made it forget half a command.
        b"{\"error\": {\"class\": \"GenericError\", \"desc\": \"JSON parse error, stray '\\xff'\"}}",
        b"login: ",
        b"{\"return\": 100}",
        b"\xff",
        b"\xff{\"return\": 99}",
        b"\xff{\"return\": \"100\"}",
        b"\xff{\"return\": 100.5}",
        b"\xff{\"return\": 100} trailing",
        b"\xff{\"return\": 100}\xff",
        b"\xff{\"error\": {\"class\": \"CommandNotFound\", \"desc\": \"\"}}",
    ] {
        bench.receive(stale);
        assert_eq!(bench.done(), [""; 0], "{}", String::from_utf8_lossy(stale));
    }
    bench.receive(b"{\"return\": {\"half an old ans\xff\xff{\"return\": 100}");
    assert_eq!(bench.done(), ["command-1"]);
}

#[test]
fn commands_go_one_at_a_time_in_their_order() {
    let mut bench = Bench::in_step();
    bench.submit(1, 5);
    bench.submit(2, 5);
    bench.submit(3, 5);
    assert_eq!(bench.done(), ["command-1"]);
    bench.receive(b"{\"error\": {\"class\": \"GenericError\", \"desc\": \"\"}}");
    bench.receive(b"{\"return\": 2}");
    assert_eq!(
        bench.done(),
        ["1 refused GenericError", "command-2", "2 returned 2", "command-3"]
    );
}

#[test]
fn an_answer_that_comes_too_late_is_never_the_next_ones() {
    let mut bench = Bench::in_step();
    bench.submit(1, 5);
    bench.submit(2, 10);
    bench.done();
    bench.advance(5);
    assert_eq!(bench.done(), ["1 timed out", "sync 101"]);
    bench.receive(b"{\"return\": \"of the first\"}");
    assert_eq!(bench.done(), [""; 0]);
    bench.receive(b"\xff{\"return\": 101}");
    bench.receive(b"{\"return\": \"of the second\"}");
    assert_eq!(bench.done(), ["command-2", "2 returned \"of the second\""]);
}

#[test]
fn an_answer_that_comes_while_nobody_asks_is_nobodys() {
    let mut bench = Bench::in_step();
    bench.submit(1, 5);
    bench.advance(5);
    bench.receive(b"{\"return\": \"late\"}");
    bench.done();
    bench.submit(2, 10);
    assert_eq!(bench.done(), ["sync 101"]);
    let mut unasked = Bench::in_step();
    unasked.receive(b"{\"return\": \"nonsense\"}");
    unasked.submit(1, 5);
    assert_eq!(unasked.done(), ["command-1"]);
}

#[test]
fn an_agent_that_is_not_there_is_told_from_one_that_is_slow() {
    let mut bench = Bench::new();
    bench.submit(1, 5);
    bench.submit(2, 5);
    bench.submit(3, 7);
    bench.advance(5);
    assert_eq!(
        bench.done(),
        ["sync 100", "1 absent", "2 absent", "sync 101"],
        "each attempt ends with the command it is made for"
    );
    // It was started at last, finds both questions, and answers both.
    bench.receive(b"\xff{\"return\": 100}");
    assert_eq!(bench.done(), [""; 0]);
    bench.receive(b"\xff{\"return\": 101}");
    assert_eq!(bench.done(), ["command-3"]);
    bench.advance(7);
    assert_eq!(bench.done(), ["3 timed out"]);
}

#[test]
fn a_command_whose_deadline_passes_behind_another_was_not_sent() {
    let mut bench = Bench::in_step();
    bench.submit(1, 9);
    bench.submit(2, 5);
    bench.advance(5);
    assert_eq!(bench.done(), ["command-1", "2 busy"]);
    bench.receive(b"{\"return\": 1}");
    assert_eq!(bench.done(), ["1 returned 1"]);
}

#[test]
fn a_withdrawn_command_costs_the_step_only_if_it_was_sent() {
    let mut bench = Bench::in_step();
    bench.submit(1, 5);
    bench.submit(2, 5);
    bench.submit(3, 5);
    bench.dialogue.withdraw(CommandId(2));
    assert_eq!(bench.done(), ["command-1"]);
    bench.dialogue.withdraw(CommandId(1));
    assert_eq!(bench.done(), ["sync 101"]);
    bench.receive(b"{\"return\": \"of the first\"}");
    bench.receive(b"\xff{\"return\": 101}");
    assert_eq!(bench.done(), ["command-3"]);
}

#[test]
fn an_attempt_that_nobody_needs_any_more_is_not_relied_upon() {
    let mut bench = Bench::new();
    bench.submit(1, 5);
    bench.dialogue.withdraw(CommandId(1));
    bench.submit(2, 5);
    assert_eq!(bench.done(), ["sync 100", "sync 101"]);
}

#[test]
fn what_cannot_be_read_ends_one_command_and_the_step() {
    for line in [
        b"login: ".as_slice(),
        b"\xff{\"return\": 1}",
        b"{\"QMP\": {}}",
        b"{\"event\": \"STOP\"}",
        b"{\"novel\": 1}",
    ] {
        let mut bench = Bench::in_step();
        bench.submit(1, 5);
        bench.submit(2, 5);
        bench.receive(line);
        assert_eq!(bench.done(), ["command-1", "1 garbled", "sync 101"]);
    }
}

#[test]
fn a_loss_settles_everything_once_and_tells_what_was_sent() {
    let mut bench = Bench::in_step();
    bench.submit(1, 5);
    bench.submit(2, 5);
    bench.dialogue.lose(ConnectionLoss::PeerClosed);
    bench.dialogue.lose(ConnectionLoss::LocallyClosed);
    bench.receive(b"{\"return\": 1}");
    bench.advance(60);
    bench.submit(3, 70);
    assert_eq!(
        bench.done(),
        [
            "command-1",
            "close: QEMU closed the connection",
            "1 lost, sent: true",
            "2 lost, sent: false",
            "3 lost, sent: false"
        ]
    );
    let mut syncing = Bench::new();
    syncing.submit(1, 5);
    syncing.dialogue.lose(ConnectionLoss::PeerClosed);
    assert_eq!(syncing.done()[2], "1 lost, sent: false");
}

#[test]
fn the_next_deadline_is_the_earliest_of_all() {
    let mut bench = Bench::in_step();
    assert_eq!(bench.dialogue.next_deadline(), None);
    bench.submit(1, 9);
    bench.submit(2, 5);
    let in_seconds = |seconds| Some(bench.start + Duration::from_secs(seconds));
    assert_eq!(bench.dialogue.next_deadline(), in_seconds(5));
    bench.dialogue.withdraw(CommandId(2));
    assert_eq!(
        bench.dialogue.next_deadline(),
        Some(bench.start + Duration::from_secs(9))
    );
}
