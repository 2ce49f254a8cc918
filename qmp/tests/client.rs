//! The client against a scripted QEMU.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::future::Future;
use std::time::Duration;

use dormouse_qmp::fake::{Answer, FakeQemu, Received, Script};
use dormouse_qmp::view::machine::{MachineInfo, RunState, StatusInfo};
use dormouse_qmp::view::migration::{MigrationEvent, MigrationStatus};
use dormouse_qmp::{
    Client, CommandError, ConnectError, ConnectOptions, ConnectionLoss, Events, Heard, command,
};
use serde_json::{Value, json};

/// Long enough for a loaded machine; what is waited for comes at once or never.
const PATIENCE: Duration = Duration::from_secs(20);
/// For what must not come.
const MOMENT: Duration = Duration::from_millis(60);

fn options() -> ConnectOptions {
    ConnectOptions {
        greeting_timeout: PATIENCE,
        command_deadline: PATIENCE,
        ..ConnectOptions::default()
    }
}

fn impatient() -> ConnectOptions {
    ConnectOptions {
        greeting_timeout: MOMENT,
        ..options()
    }
}

async fn connected(script: Script) -> (FakeQemu, Client) {
    let qemu = FakeQemu::start(script).unwrap();
    let client = Client::connect(qemu.path(), options()).await.unwrap();
    (qemu, client)
}

async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future)
        .await
        .expect("what was waited for did not come")
}

async fn heard(events: &mut Events) -> Heard {
    in_time(events.next()).await
}

async fn heard_event(events: &mut Events, name: &str) -> Value {
    match heard(events).await {
        Heard::Event(event) if event.name == name => event.data,
        other => panic!("expected {name}, heard {other:?}"),
    }
}

/// Runs a command in the background, so that it is in flight whatever the test does.
fn in_background(
    client: &Client,
    name: &'static str,
) -> tokio::task::JoinHandle<Result<Value, CommandError>> {
    let client = client.clone();
    tokio::spawn(async move { client.execute_raw(name, Value::Null).await })
}

fn running() -> Answer {
    Answer::returns(json!({"running": true, "singlestep": false, "status": "running"}))
}

#[tokio::test]
async fn a_command_brings_its_reply_and_the_greeting_is_known() {
    let (qemu, client) = connected(Script::new().on("query-status", running())).await;
    assert_eq!(client.greeting().version.to_string(), "10.0.2");
    assert_eq!(client.greeting().package, "fake");
    assert_eq!(client.peer_pid(), Some(std::process::id()));
    let info: StatusInfo = client.query(&command::query_status {}).await.unwrap();
    assert_eq!((info.status, info.running), (RunState::Running, true));
    let received = qemu.received();
    assert_eq!(received[0].arguments, json!({"enable": ["oob"]}));
    assert_eq!(
        (received[1].name.as_str(), &received[1].arguments),
        ("query-status", &Value::Null)
    );
}

#[tokio::test]
async fn an_error_keeps_the_words_of_qemu_whatever_its_class() {
    let script = Script::new().on("stop", Answer::fails("NovelTrouble", "Not now: it is late"));
    let (_qemu, client) = connected(script).await;
    let error = client.execute(&command::stop {}).await.unwrap_err();
    assert_eq!(error.to_string(), "stop: NovelTrouble: Not now: it is late");
    assert_eq!((error.command(), error.class()), ("stop", Some("NovelTrouble")));
    let error = client.execute_raw("dream", Value::Null).await.unwrap_err();
    assert_eq!(error.class(), Some("CommandNotFound"));
}

#[tokio::test]
async fn a_reply_of_another_shape_is_an_error_that_names_the_command() {
    let (_qemu, client) =
        connected(Script::new().on("query-machines", Answer::returns(json!({"a": 1})))).await;
    let error = client
        .query::<_, Vec<MachineInfo>>(&command::query_machines { compat_props: None })
        .await
        .unwrap_err();
    assert!(
        matches!(&error, CommandError::Unexpected { command, .. } if command == "query-machines"),
        "{error:?}"
    );
}

#[tokio::test]
async fn events_before_a_reply_are_in_the_subscription_when_the_reply_is() {
    let answer = Answer::returns(json!({}))
        .with_event("MIGRATION", json!({"status": "setup"}))
        .with_event("OF_A_LATER_QEMU", json!({"odd": [null]}))
        .with_event("MIGRATION", json!({"status": "of-a-later-day"}));
    let (_qemu, client) = connected(Script::new().on("migrate", answer)).await;
    let mut events = client.events();
    client
        .execute_raw("migrate", json!({"uri": "fd:x"}))
        .await
        .unwrap();
    let mut told = Vec::new();
    for _ in 0..3 {
        // Without patience: it must be there already.
        let Ok(Heard::Event(event)) = tokio::time::timeout(Duration::ZERO, events.next()).await else {
            panic!("only {told:?}")
        };
        told.push((event.name, event.data));
    }
    assert_eq!(told[1], ("OF_A_LATER_QEMU".to_owned(), json!({"odd": [null]})));
    let last: MigrationEvent = serde_json::from_value(told.pop().unwrap().1).unwrap();
    assert_eq!(last.status, MigrationStatus::Other("of-a-later-day".to_owned()));
}

#[tokio::test]
async fn a_dropped_command_and_its_late_reply_harm_no_other() {
    let (qemu, client) = connected(
        Script::new()
            .on("query-status", running())
            .on("slow", Answer::nothing()),
    )
    .await;
    let slow = in_background(&client, "slow");
    let received: Vec<Received> = in_time(qemu.wait_for("slow", 1)).await;
    slow.abort();
    assert!(slow.await.unwrap_err().is_cancelled());
    client.execute(&command::query_status {}).await.unwrap();
    qemu.answer(&received[0], Answer::returns(json!({"late": true})));
    for _ in 0..20 {
        let reply = client.execute(&command::query_status {}).await.unwrap();
        assert_eq!(reply["status"], "running");
    }
}

#[tokio::test]
async fn a_timeout_is_told_with_its_length_and_leaves_the_others_alone() {
    let (qemu, client) = connected(
        Script::new()
            .on("query-status", running())
            .on("slow", Answer::nothing()),
    )
    .await;
    let patient = in_background(&client, "slow");
    in_time(qemu.wait_for("slow", 1)).await;
    let error = client
        .with_deadline(MOMENT)
        .execute_raw("slow", Value::Null)
        .await
        .unwrap_err();
    assert_eq!(error.to_string(), "slow: no answer within 60ms");
    client.execute(&command::query_status {}).await.unwrap();
    let received = qemu.wait_for("slow", 2).await;
    qemu.answer(&received[1], Answer::returns(json!("too late")));
    qemu.answer(&received[0], Answer::returns(json!("in time")));
    assert_eq!(patient.await.unwrap().unwrap(), "in time");
}

#[tokio::test]
async fn a_quarter_of_a_megabyte_arrives_in_one_line_however_it_is_cut() {
    let schema: Vec<Value> = (0..3500)
        .map(|number| json!({"name": number.to_string(), "meta-type": "object", "members": [{"name": "\u{e4}\n", "type": "int"}]}))
        .collect();
    let schema = Value::Array(schema);
    assert!(schema.to_string().len() > 200_000);
    for chunk_bytes in [usize::MAX, 7919, 333] {
        let script = Script::new().in_chunks_of(chunk_bytes).on(
            "query-qmp-schema",
            Answer::returns(schema.clone()).with_event("STOP", json!({})),
        );
        let (_qemu, client) = connected(script).await;
        let mut events = client.events();
        assert!(
            client.execute(&command::query_qmp_schema {}).await.unwrap() == schema,
            "in pieces of {chunk_bytes}"
        );
        heard_event(&mut events, "STOP").await;
    }
}

#[tokio::test]
async fn a_conversation_byte_by_byte_is_a_conversation() {
    let script = Script::new()
        .in_chunks_of(1)
        .on("query-status", running().with_event("RESUME", json!({"a": "b"})));
    let (_qemu, client) = connected(script).await;
    let mut events = client.events();
    let info: StatusInfo = client.query(&command::query_status {}).await.unwrap();
    assert!(info.running);
    assert_eq!(heard_event(&mut events, "RESUME").await, json!({"a": "b"}));
}

#[tokio::test]
async fn a_lost_connection_fails_all_three_commands_in_flight_and_all_that_follow() {
    let (qemu, client) = connected(Script::new().on("slow", Answer::nothing())).await;
    let mut events = client.events();
    let commands = [(); 3].map(|()| in_background(&client, "slow"));
    in_time(qemu.wait_for("slow", 3)).await;
    qemu.hang_up();
    for command in commands {
        let error = command.await.unwrap().unwrap_err();
        assert!(
            matches!(
                &error,
                CommandError::ConnectionLost {
                    source: ConnectionLoss::PeerClosed,
                    ..
                }
            ),
            "{error:?}"
        );
    }
    assert!(matches!(
        in_time(client.closed()).await,
        ConnectionLoss::PeerClosed
    ));
    assert_eq!(heard(&mut events).await, Heard::Closed);
    assert_eq!(heard(&mut client.events()).await, Heard::Closed);
    let error = client.execute(&command::stop {}).await.unwrap_err();
    assert!(matches!(error, CommandError::ConnectionLost { .. }), "{error:?}");
}

#[tokio::test]
async fn a_reply_that_breaks_off_is_a_lost_connection() {
    let (_qemu, client) = connected(Script::new().on("query-status", running().cut_after(20))).await;
    let error = client.execute(&command::query_status {}).await.unwrap_err();
    assert!(matches!(&error, CommandError::ConnectionLost { .. }), "{error:?}");
}

#[tokio::test]
async fn the_last_reply_of_a_qemu_that_exits_is_a_reply() {
    let answer = Answer::returns(json!({}))
        .with_event("SHUTDOWN", json!({}))
        .cut_after(usize::MAX);
    let (_qemu, client) = connected(Script::new().on("quit", answer)).await;
    let mut events = client.events();
    client.execute(&command::quit {}).await.unwrap();
    heard_event(&mut events, "SHUTDOWN").await;
    assert_eq!(heard(&mut events).await, Heard::Closed);
}

#[tokio::test]
async fn what_is_no_qmp_ends_the_connection_and_is_shown() {
    let (_qemu, client) =
        connected(Script::new().on("slow", Answer::raw("HTTP/1.1 400 Bad Request\r\n"))).await;
    let error = client.execute_raw("slow", Value::Null).await.unwrap_err();
    let CommandError::ConnectionLost {
        source: ConnectionLoss::NotQmp { what },
        ..
    } = error
    else {
        panic!("{error:?}")
    };
    assert!(what.contains("HTTP/1.1 400"), "{what}");
}

#[tokio::test]
async fn a_line_without_an_end_does_not_eat_the_memory() {
    let (qemu, client) = connected(Script::new()).await;
    qemu.send_raw(vec![b' '; 17 << 20]);
    let loss = in_time(client.closed()).await;
    assert!(
        matches!(&loss, ConnectionLoss::NotQmp { what } if what.contains("16777216")),
        "{loss:?}"
    );
}

#[tokio::test]
async fn a_monitor_that_another_client_holds_is_busy_and_is_free_when_that_one_leaves() {
    let (qemu, first) = connected(Script::new()).await;
    let error = Client::connect(qemu.path(), impatient()).await.unwrap_err();
    assert!(matches!(error, ConnectError::MonitorBusy { .. }), "{error:?}");
    let message = error.to_string();
    assert!(
        message.contains("monitor busy") && message.contains("-qmp"),
        "{message}"
    );
    assert!(message.contains(qemu.path().to_str().unwrap()), "{message}");
    drop(first);
    Client::connect(qemu.path(), options()).await.unwrap();
}

#[tokio::test]
async fn a_monitor_whose_listen_queue_is_full_is_busy() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("qmp.sock");
    let socket = tokio::net::UnixSocket::new_stream().unwrap();
    socket.bind(&path).unwrap();
    let _listener = socket.listen(1).unwrap();
    let mut waiting = Vec::new();
    while let Ok(stream) = tokio::net::UnixStream::connect(&path).await {
        waiting.push(stream);
    }
    let error = Client::connect(&path, impatient()).await.unwrap_err();
    assert!(matches!(error, ConnectError::MonitorBusy { .. }), "{error:?}");
}

#[tokio::test]
async fn a_peer_that_never_greets_is_busy_after_the_greeting_timeout() {
    let qemu = FakeQemu::start(Script::new().silent()).unwrap();
    let error = Client::connect(qemu.path(), impatient()).await.unwrap_err();
    assert!(
        matches!(error, ConnectError::MonitorBusy { waited, .. } if waited == MOMENT),
        "{error:?}"
    );
}

#[tokio::test]
async fn an_opening_that_fails_tells_how() {
    let missing = std::path::Path::new("/nonexistent/qmp.sock");
    let error = Client::connect(missing, options()).await.unwrap_err();
    assert!(matches!(error, ConnectError::Socket { .. }), "{error:?}");

    let stalled = FakeQemu::start(Script::new().on("qmp_capabilities", Answer::nothing())).unwrap();
    let error = Client::connect(stalled.path(), impatient()).await.unwrap_err();
    assert!(
        matches!(error, ConnectError::NegotiationTimeout { .. }),
        "{error:?}"
    );

    let refusing =
        FakeQemu::start(Script::new().on("qmp_capabilities", Answer::fails("GenericError", "no"))).unwrap();
    let error = Client::connect(refusing.path(), options()).await.unwrap_err();
    assert!(
        matches!(&error, ConnectError::NegotiationRefused { desc, .. } if desc == "no"),
        "{error:?}"
    );

    let leaving = FakeQemu::start(Script::new().on("qmp_capabilities", Answer::hangs_up())).unwrap();
    let error = Client::connect(leaving.path(), options()).await.unwrap_err();
    assert!(
        matches!(
            &error,
            ConnectError::Lost {
                source: ConnectionLoss::PeerClosed,
                ..
            }
        ),
        "{error:?}"
    );
}

#[tokio::test]
async fn the_ninth_command_waits_and_one_out_of_band_does_not() {
    let script = Script::new()
        .on("slow", Answer::nothing())
        .on("query-yank", Answer::returns(json!([])));
    let (qemu, client) = connected(script).await;
    let commands: Vec<_> = (0..9).map(|_| in_background(&client, "slow")).collect();
    let received = in_time(qemu.wait_for("slow", 8)).await;
    // Its reply shows that whatever was sent before it has arrived.
    client.execute_oob(&command::query_yank {}).await.unwrap();
    assert!(qemu.received().last().unwrap().out_of_band);
    assert_eq!(qemu.wait_for("slow", 0).await.len(), 8);
    qemu.answer(&received[0], Answer::returns(json!({})));
    for command in &in_time(qemu.wait_for("slow", 9)).await[1..] {
        qemu.answer(command, Answer::returns(json!({})));
    }
    for command in commands {
        in_time(command).await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn out_of_band_execution_that_is_not_offered_is_refused_here() {
    let (qemu, client) = connected(Script::new().greeting(json!({"version": {}, "capabilities": []}))).await;
    let error = client.execute_oob(&command::query_yank {}).await.unwrap_err();
    assert!(
        matches!(error, CommandError::OutOfBandUnavailable { .. }),
        "{error:?}"
    );
    assert_eq!(qemu.received().len(), 1);
}

#[tokio::test]
async fn a_subscriber_that_lags_is_told_how_far_and_holds_up_nobody() {
    let qemu = FakeQemu::start(Script::new().on("query-status", running())).unwrap();
    let small = ConnectOptions {
        event_capacity: 4,
        ..options()
    };
    let client = Client::connect(qemu.path(), small).await.unwrap();
    let mut events = client.events();
    for number in 0..10 {
        qemu.emit("TICK", json!({"number": number}));
    }
    qemu.emit("LAST", Value::Null);
    let mut probe = client.events();
    while !matches!(heard(&mut probe).await, Heard::Event(event) if event.name == "LAST") {}
    client.execute(&command::query_status {}).await.unwrap();
    assert_eq!(heard(&mut events).await, Heard::Lagged(7));
    assert_eq!(heard_event(&mut events, "TICK").await, json!({"number": 7}));
}

#[tokio::test]
async fn the_connection_ends_with_its_last_handle_and_not_before() {
    let (qemu, client) = connected(Script::new().on("query-status", running())).await;
    let clone = client.with_deadline(PATIENCE);
    let mut events = client.events();
    drop(client);
    clone.execute(&command::query_status {}).await.unwrap();
    drop(clone);
    assert_eq!(heard(&mut events).await, Heard::Closed);
    // Only one client is served at a time, so this shows that the first one's socket is closed.
    Client::connect(qemu.path(), options()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_commands_at_once_get_each_their_own_reply() {
    let script = Script::new().on_each("echo", |command| Answer::returns(command.arguments.clone()));
    let (qemu, client) = connected(script).await;
    let commands = (0..100).map(|number| {
        let client = client.clone();
        tokio::spawn(async move { client.execute_raw("echo", json!({"number": number})).await })
    });
    for (number, command) in commands.collect::<Vec<_>>().into_iter().enumerate() {
        qemu.emit("TICK", Value::Null);
        assert_eq!(command.await.unwrap().unwrap(), json!({"number": number}));
    }
}
