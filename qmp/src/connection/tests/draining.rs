//! The two ways to the end in good order.

use super::*;

const DRAINED: &str = "close: the connection was closed on this side";
const ENDED: &str = "close: QEMU closed the connection";

#[test]
fn a_connection_that_has_nothing_to_finish_closes_at_once() {
    let mut ready = Bench::ready();
    ready.connection.close();
    assert_eq!(ready.done(), [DRAINED]);

    let mut opening = Bench::new();
    opening.submit(1);
    opening.connection.close();
    assert_eq!(opening.done(), [DRAINED, "1 lost"]);
}

#[test]
fn closing_finishes_what_was_submitted_before_and_takes_nothing_more() {
    let mut bench = Bench::ready();
    (1..=9).for_each(|id| bench.submit(id));
    bench.done();
    bench.connection.close();
    bench.connection.close();
    bench.submit(10);
    bench.connection.submit(Request {
        out_of_band: true,
        ..bench.request(11)
    });
    assert_eq!(bench.done(), ["10 lost", "11 lost"]);
    bench.receive(r#"{"event": "STOP"}"#);
    bench.reply(3);
    assert_eq!(bench.done(), ["event STOP", "3 returned", "execute command-9"]);
    for id in [1, 2, 4, 5, 6, 7, 8] {
        bench.reply(id);
    }
    assert_eq!(bench.done().len(), 7);
    bench.reply(9);
    assert_eq!(bench.done(), ["9 returned", DRAINED]);
}

#[test]
fn closing_waits_for_nobody_who_does_not_wait() {
    let mut bench = Bench::ready();
    bench.submit(1);
    bench.submit(2);
    bench.done();
    bench.connection.close();
    bench.connection.withdraw(CommandId(1));
    assert_eq!(bench.done(), [""; 0]);
    assert_eq!(bench.connection.next_deadline(), Some(bench.at(30)));
    bench.connection.advance(bench.at(30));
    assert_eq!(bench.done(), ["2 timed out", DRAINED]);

    let mut withdrawn = Bench::ready();
    withdrawn.submit(1);
    withdrawn.done();
    withdrawn.connection.close();
    withdrawn.connection.withdraw(CommandId(1));
    assert_eq!(withdrawn.done(), [DRAINED]);
}

#[test]
fn a_loss_while_closing_is_a_loss() {
    let mut bench = Bench::ready();
    bench.submit(1);
    bench.done();
    bench.connection.close();
    bench.connection.lose(ConnectionLoss::PeerClosed);
    assert_eq!(bench.done(), [ENDED, "1 lost"]);
}

#[test]
fn what_qemu_said_before_it_left_is_heard_when_nothing_can_be_sent() {
    let mut bench = Bench::ready();
    (1..=9).for_each(|id| bench.submit(id));
    bench.done();
    bench.connection.lose_write_side(bench.at(1));
    assert_eq!(bench.done(), ["9 lost"], "it was not sent and never will be");
    bench.submit(10);
    assert_eq!(bench.done(), ["10 lost"]);
    bench.reply(1);
    bench.receive(r#"{"event": "SHUTDOWN"}"#);
    assert_eq!(bench.done(), ["1 returned", "event SHUTDOWN"]);
    for id in 2..=8 {
        bench.reply(id);
    }
    assert_eq!(bench.done().len(), 7, "the end of the stream is awaited");
    bench.receive(r#"{"event": "LAST"}"#);
    bench.connection.lose(ConnectionLoss::PeerClosed);
    assert_eq!(bench.done(), ["event LAST", ENDED]);
}

#[test]
fn an_end_of_the_stream_that_does_not_come_is_not_awaited_for_ever() {
    let mut bench = Bench::ready();
    bench.connection.submit(Request {
        deadline: None,
        ..bench.request(1)
    });
    bench.done();
    bench.connection.lose_write_side(bench.at(1));
    let limit = bench.at(1) + DRAIN_LIMIT;
    bench.connection.lose_write_side(bench.at(3));
    assert_eq!(bench.connection.next_deadline(), Some(limit));
    bench.connection.advance(limit - Duration::from_millis(1));
    assert_eq!(bench.done(), [""; 0]);
    bench.connection.advance(limit);
    assert_eq!(bench.done(), [ENDED, "1 lost"]);
}

#[test]
fn a_write_side_that_is_lost_while_closing_is_read_to_the_end_too() {
    let mut bench = Bench::ready();
    (1..=9).for_each(|id| bench.submit(id));
    bench.done();
    bench.connection.close();
    bench.connection.lose_write_side(bench.at(1));
    assert_eq!(bench.done(), ["9 lost"]);
    (1..=8).for_each(|id| bench.reply(id));
    assert_eq!(bench.done().len(), 8);
    bench.connection.lose(ConnectionLoss::PeerClosed);
    assert_eq!(bench.done(), [ENDED]);
}

#[test]
fn the_opening_has_its_own_limit_whether_or_not_qemu_can_hear() {
    let mut bench = Bench::new();
    bench.receive(r#"{"QMP": {"version": {}, "capabilities": []}}"#);
    bench.connection.lose_write_side(bench.at(1));
    bench.receive(r#"{"error": {"class": "GenericError", "desc": "leaving"}, "id": 0}"#);
    assert_eq!(
        bench.done()[1],
        "close: the capabilities negotiation was refused: GenericError: leaving"
    );
}
