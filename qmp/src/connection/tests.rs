//! The machine under tables of steps.

use std::time::Duration;

use super::*;

mod draining;
mod random;

/// A connection with a time of its own, which remembers what it was told to do.
struct Bench {
    connection: Connection,
    start: Instant,
}

impl Bench {
    fn new() -> Self {
        let start = Instant::now();
        Self {
            connection: Connection::new(start + Duration::from_secs(5)),
            start,
        }
    }

    fn ready() -> Self {
        let mut bench = Self::new();
        bench.receive(r#"{"QMP": {"version": {}, "capabilities": ["oob"]}}"#);
        bench.receive(r#"{"return": {}, "id": 0}"#);
        bench.done();
        bench
    }

    fn at(&self, seconds: u64) -> Instant {
        self.start + Duration::from_secs(seconds)
    }

    fn request(&self, id: u64) -> Request {
        Request {
            id: CommandId(id),
            name: format!("command-{id}"),
            arguments: Value::Null,
            out_of_band: false,
            carries_fds: false,
            deadline: Some(self.at(30)),
        }
    }

    fn submit(&mut self, id: u64) {
        self.connection.submit(self.request(id));
    }

    fn receive(&mut self, line: &str) {
        self.connection.receive(Message::parse(line.as_bytes()).unwrap());
    }

    fn reply(&mut self, id: u64) {
        self.receive(&json!({"return": {"of": id}, "id": id}).to_string());
    }

    /// What was decided since the last look, in short.
    fn done(&mut self) -> Vec<String> {
        std::iter::from_fn(|| self.connection.next_action())
            .map(in_short)
            .collect()
    }
}

fn in_short(action: Action) -> String {
    match action {
        Action::Transmit { id, line } => {
            let line: Value = serde_json::from_slice(&line).unwrap();
            let verb = if line.get("exec-oob").is_some() {
                "exec-oob"
            } else {
                "execute"
            };
            assert_eq!(line["id"], id.0);
            format!("{verb} {}", line[verb].as_str().unwrap())
        }
        Action::Settle { id, outcome } => match outcome {
            Outcome::Returned(_) => format!("{} returned", id.0),
            Outcome::Refused { class, .. } => format!("{} refused {class}", id.0),
            Outcome::TimedOut => format!("{} timed out", id.0),
            Outcome::OutOfBandUnavailable => format!("{} no oob", id.0),
            Outcome::Lost(_) => format!("{} lost", id.0),
        },
        Action::Publish(event) => format!("event {}", event.name),
        Action::Announce(_) => "ready".to_owned(),
        Action::Close(loss) => format!("close: {loss}"),
    }
}

#[test]
fn nothing_but_the_negotiation_is_said_before_the_connection_is_ready() {
    let mut bench = Bench::new();
    bench.submit(1);
    assert_eq!(bench.done(), [""; 0]);
    bench.receive(r#"{"QMP": {"version": {}, "capabilities": []}}"#);
    assert_eq!(bench.done(), ["execute qmp_capabilities"]);
    bench.submit(2);
    assert_eq!(bench.done(), [""; 0]);
    bench.receive(r#"{"return": {}, "id": 0}"#);
    assert_eq!(bench.done(), ["ready", "execute command-1", "execute command-2"]);
}

#[test]
fn out_of_band_execution_is_enabled_where_it_is_offered() {
    for (offered, arguments) in [("[\"oob\"]", json!({"enable": ["oob"]})), ("[]", Value::Null)] {
        let mut bench = Bench::new();
        bench.receive(&format!(
            r#"{{"QMP": {{"version": {{}}, "capabilities": {offered}}}}}"#
        ));
        let Some(Action::Transmit { line, .. }) = bench.connection.next_action() else {
            panic!()
        };
        let line: Value = serde_json::from_slice(&line).unwrap();
        assert_eq!(line.get("arguments").cloned().unwrap_or_default(), arguments);
    }
}

#[test]
fn events_are_published_in_every_state_and_before_the_reply_that_follows() {
    let mut bench = Bench::new();
    bench.receive(r#"{"event": "EARLIEST"}"#);
    bench.receive(r#"{"QMP": {"version": {}, "capabilities": []}}"#);
    bench.receive(r#"{"event": "EARLY"}"#);
    bench.receive(r#"{"return": {}, "id": 0}"#);
    bench.submit(1);
    bench.receive(r#"{"event": "BETWEEN"}"#);
    bench.reply(1);
    bench.receive(r#"{"event": "AFTER"}"#);
    assert_eq!(
        bench.done(),
        [
            "event EARLIEST",
            "execute qmp_capabilities",
            "event EARLY",
            "ready",
            "execute command-1",
            "event BETWEEN",
            "1 returned",
            "event AFTER"
        ]
    );
}

#[test]
fn an_opening_that_takes_too_long_tells_what_was_missing() {
    let mut silent = Bench::new();
    silent.submit(1);
    assert_eq!(silent.connection.next_deadline(), Some(silent.at(5)));
    silent.connection.advance(silent.at(4));
    assert_eq!(silent.done(), [""; 0]);
    silent.connection.advance(silent.at(5));
    assert_eq!(silent.done(), ["close: no greeting came in time", "1 lost"]);

    let mut stalled = Bench::new();
    stalled.receive(r#"{"QMP": {"version": {}, "capabilities": []}}"#);
    stalled.connection.advance(stalled.at(5));
    assert_eq!(
        stalled.done(),
        [
            "execute qmp_capabilities",
            "close: the capabilities negotiation was not answered in time"
        ]
    );
}

#[test]
fn a_refused_negotiation_closes_with_the_words_of_qemu() {
    let mut bench = Bench::new();
    bench.receive(r#"{"QMP": {"version": {}, "capabilities": []}}"#);
    bench.receive(r#"{"error": {"class": "GenericError", "desc": "not today"}, "id": 0}"#);
    assert_eq!(
        bench.done()[1],
        "close: the capabilities negotiation was refused: GenericError: not today"
    );
}

#[test]
fn replies_are_matched_by_id_in_whatever_order_they_come() {
    let mut bench = Bench::ready();
    (1..=3).for_each(|id| bench.submit(id));
    bench.done();
    bench.reply(3);
    bench.receive(r#"{"error": {"class": "NovelTrouble", "desc": ""}, "id": 1}"#);
    bench.reply(2);
    assert_eq!(
        bench.done(),
        ["3 returned", "1 refused NovelTrouble", "2 returned"]
    );
}

#[test]
fn the_ninth_command_waits_for_a_reply_and_keeps_its_place() {
    let mut bench = Bench::ready();
    (1..=10).for_each(|id| bench.submit(id));
    assert_eq!(bench.done().len(), IN_FLIGHT_LIMIT);
    bench.reply(5);
    assert_eq!(bench.done(), ["5 returned", "execute command-9"]);
    bench.reply(1);
    assert_eq!(bench.done(), ["1 returned", "execute command-10"]);
}

#[test]
fn a_command_out_of_band_passes_a_full_queue_and_takes_no_place_in_it() {
    let mut bench = Bench::ready();
    (1..=9).for_each(|id| bench.submit(id));
    bench.done();
    bench.connection.submit(Request {
        out_of_band: true,
        ..bench.request(20)
    });
    assert_eq!(bench.done(), ["exec-oob command-20"]);
    bench.reply(1);
    assert_eq!(bench.done(), ["1 returned", "execute command-9"]);
}

#[test]
fn a_command_out_of_band_is_not_sent_where_that_is_not_offered() {
    let mut bench = Bench::new();
    bench.connection.submit(Request {
        out_of_band: true,
        ..bench.request(1)
    });
    bench.receive(r#"{"QMP": {"version": {}, "capabilities": []}}"#);
    bench.receive(r#"{"return": {}, "id": 0}"#);
    assert_eq!(bench.done(), ["execute qmp_capabilities", "ready", "1 no oob"]);
}

#[test]
fn a_second_command_with_descriptors_waits_until_the_first_is_answered() {
    let mut bench = Bench::ready();
    for id in [1, 2] {
        bench.connection.submit(Request {
            carries_fds: true,
            ..bench.request(id)
        });
    }
    bench.submit(3);
    assert_eq!(
        bench.done(),
        ["execute command-1"],
        "and those behind it keep the order"
    );
    // Nobody waits for the first any more, but QEMU has yet to take its descriptors.
    bench.connection.withdraw(CommandId(1));
    assert_eq!(bench.done(), [""; 0]);
    bench.reply(1);
    assert_eq!(bench.done(), ["execute command-2", "execute command-3"]);
}

#[test]
fn a_withdrawn_command_that_was_not_sent_is_never_sent() {
    let mut bench = Bench::ready();
    (1..=10).for_each(|id| bench.submit(id));
    bench.done();
    bench.connection.withdraw(CommandId(9));
    bench.reply(1);
    assert_eq!(bench.done(), ["1 returned", "execute command-10"]);
}

#[test]
fn withdrawing_the_command_at_the_head_frees_those_behind_it() {
    let mut bench = Bench::ready();
    for id in [1, 2] {
        bench.connection.submit(Request {
            carries_fds: true,
            ..bench.request(id)
        });
    }
    bench.submit(3);
    bench.done();
    bench.connection.withdraw(CommandId(2));
    assert_eq!(bench.done(), ["execute command-3"]);
}

#[test]
fn the_late_reply_of_a_withdrawn_command_changes_nothing() {
    let mut bench = Bench::ready();
    bench.submit(1);
    bench.submit(2);
    bench.connection.withdraw(CommandId(1));
    bench.done();
    bench.reply(1);
    bench.reply(1);
    assert_eq!(bench.done(), [""; 0]);
    bench.reply(2);
    assert_eq!(bench.done(), ["2 returned"]);
}

#[test]
fn a_deadline_settles_its_own_command_and_no_other() {
    let mut bench = Bench::ready();
    bench.connection.submit(Request {
        deadline: Some(bench.at(10)),
        ..bench.request(1)
    });
    bench.connection.submit(Request {
        deadline: None,
        ..bench.request(2)
    });
    bench.submit(3);
    bench.done();
    assert_eq!(bench.connection.next_deadline(), Some(bench.at(10)));
    bench.connection.advance(bench.at(10));
    assert_eq!(bench.done(), ["1 timed out"]);
    assert_eq!(bench.connection.next_deadline(), Some(bench.at(30)));
    bench.reply(1);
    bench.reply(3);
    assert_eq!(bench.done(), ["3 returned"]);
    assert_eq!(bench.connection.next_deadline(), None);
}

#[test]
fn a_command_that_times_out_in_the_queue_is_never_sent() {
    let mut bench = Bench::ready();
    for id in 1..=8 {
        bench.connection.submit(Request {
            deadline: None,
            ..bench.request(id)
        });
    }
    bench.submit(9);
    bench.done();
    bench.connection.advance(bench.at(30));
    assert_eq!(bench.done(), ["9 timed out"]);
    bench.reply(1);
    assert_eq!(bench.done(), ["1 returned"]);
}

#[test]
fn commands_that_timed_out_still_count_as_in_flight() {
    let mut bench = Bench::ready();
    (1..=8).for_each(|id| bench.submit(id));
    bench.connection.advance(bench.at(30));
    bench.done();
    bench.connection.submit(Request {
        deadline: None,
        ..bench.request(9)
    });
    assert_eq!(bench.done(), [""; 0]);
    bench.reply(1);
    assert_eq!(bench.done(), ["execute command-9"]);
}

#[test]
fn answers_without_an_id_of_ours_change_nothing() {
    let mut bench = Bench::ready();
    bench.submit(1);
    bench.done();
    for line in [
        r#"{"error": {"class": "GenericError", "desc": "JSON parse error, stray '}'"}}"#,
        r#"{"return": {}, "id": "1"}"#,
        r#"{"return": {}, "id": -1}"#,
        r#"{"return": {}, "id": 0}"#,
        r#"{"return": {}, "id": 99}"#,
        r#"{"QMP": {"version": {}, "capabilities": []}}"#,
        r#"{"novelty": true}"#,
    ] {
        bench.receive(line);
        assert_eq!(bench.done(), [""; 0], "{line}");
    }
    bench.reply(1);
    assert_eq!(bench.done(), ["1 returned"]);
}

#[test]
fn a_loss_settles_what_is_awaited_once_and_all_that_comes_after() {
    let mut bench = Bench::ready();
    (1..=9).for_each(|id| bench.submit(id));
    bench.connection.withdraw(CommandId(4));
    bench.done();
    bench.connection.lose(ConnectionLoss::PeerClosed);
    bench.connection.lose(ConnectionLoss::LocallyClosed);
    let lost = [1, 2, 3, 5, 6, 7, 8, 9].map(|id| format!("{id} lost"));
    let mut expected = vec!["close: QEMU closed the connection".to_owned()];
    expected.extend(lost);
    assert_eq!(bench.done(), expected);
    bench.reply(1);
    bench.receive(r#"{"event": "STOP"}"#);
    bench.connection.advance(bench.at(60));
    assert_eq!(bench.done(), [""; 0]);
    bench.submit(10);
    assert_eq!(bench.done(), ["10 lost"]);
}
