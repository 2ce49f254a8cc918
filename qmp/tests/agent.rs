//! The guest agent's client against a scripted guest.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::future::Future;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::time::Duration;

use dormouse_qmp::Address;
use dormouse_qmp::agent::{
    Agent, AgentError, AgentOptions, GuestFsfreezeFreeze, GuestFsfreezeStatus, GuestFsfreezeThaw, GuestInfo,
    GuestPing, GuestSetTime, Suspension,
};
use dormouse_qmp::view::guest::FsfreezeStatus;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;

/// Long enough for a loaded machine; what is waited for comes at once or never.
const PATIENCE: Duration = Duration::from_secs(20);
/// For what must not come.
const MOMENT: Duration = Duration::from_millis(60);
/// For what must be sent, and then must not be answered.
const WHILE: Duration = Duration::from_millis(400);

async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future)
        .await
        .expect("what was waited for did not come")
}

/// The guest's end of the line, played by hand.
struct Guest(BufReader<UnixStream>);

/// What a guest hears.
#[derive(Debug, PartialEq)]
enum Asked {
    /// To come into step, by this number.
    Sync(i64),
    /// A command, by its name and arguments.
    Command(String, Value),
}

impl Guest {
    async fn and_agent() -> (Self, Agent) {
        let (ours, theirs) = StdUnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let guest = Self(BufReader::new(UnixStream::from_std(theirs).unwrap()));
        let agent = Agent::connect(Address::from(ours), AgentOptions::default())
            .await
            .unwrap();
        (guest, agent)
    }

    async fn hear(&mut self) -> Asked {
        let mut line = Vec::new();
        in_time(self.0.read_until(b'\n', &mut line)).await.unwrap();
        let (reset, text) = match line.strip_prefix(b"\xff") {
            Some(text) => (true, text),
            None => (false, line.as_slice()),
        };
        let command: Value = serde_json::from_slice(text).unwrap();
        assert!(command.get("id").is_none(), "an old agent refuses an id");
        let name = command["execute"].as_str().unwrap().to_owned();
        assert_eq!(reset, name == "guest-sync-delimited", "{name}");
        if reset {
            Asked::Sync(command["arguments"]["id"].as_i64().unwrap())
        } else {
            Asked::Command(name, command["arguments"].clone())
        }
    }

    async fn say(&mut self, bytes: impl AsRef<[u8]>) {
        self.0.get_mut().write_all(bytes.as_ref()).await.unwrap();
    }

    async fn come_into_step(&mut self) {
        let Asked::Sync(token) = self.hear().await else {
            panic!("not asked to come into step")
        };
        self.answer_sync(token).await;
    }

    async fn answer_sync(&mut self, token: i64) {
        let mut line = vec![0xff];
        line.extend_from_slice(format!("{}\n", json!({"return": token})).as_bytes());
        self.say(line).await;
    }

    /// Hears a command of this name and answers it.
    async fn serve(&mut self, name: &str, answer: Value) -> Value {
        let Asked::Command(heard, arguments) = self.hear().await else {
            panic!("not a command")
        };
        assert_eq!(heard, name);
        self.say(format!("{answer}\n")).await;
        arguments
    }
}

#[tokio::test]
async fn commands_are_spoken_as_the_schema_has_them() {
    let (mut guest, agent) = Guest::and_agent().await;
    let serving = tokio::spawn(async move {
        guest.come_into_step().await;
        let info =
            json!({"version": "10.0.2", "supported_commands": [{"name": "guest-ping", "enabled": true}]});
        let mut arguments = vec![guest.serve("guest-ping", json!({"return": {}})).await];
        arguments.push(guest.serve("guest-info", json!({ "return": info })).await);
        arguments.push(guest.serve("guest-set-time", json!({"return": {}})).await);
        arguments.push(guest.serve("guest-set-time", json!({"return": {}})).await);
        arguments.push(guest.serve("guest-fsfreeze-freeze", json!({"return": 3})).await);
        arguments.push(
            guest
                .serve("guest-fsfreeze-status", json!({"return": "frozen"}))
                .await,
        );
        arguments.push(guest.serve("guest-fsfreeze-thaw", json!({"return": 3})).await);
        arguments
    });
    agent.execute(&GuestPing {}).await.unwrap();
    assert!(agent.execute(&GuestInfo {}).await.unwrap().allows("guest-ping"));
    let time_ns = Some(1_700_000_000_123_456_789);
    agent.execute(&GuestSetTime { time_ns }).await.unwrap();
    agent.execute(&GuestSetTime::default()).await.unwrap();
    assert_eq!(agent.execute(&GuestFsfreezeFreeze {}).await.unwrap(), 3);
    assert_eq!(
        agent.execute(&GuestFsfreezeStatus {}).await.unwrap(),
        FsfreezeStatus::Frozen
    );
    assert_eq!(agent.execute(&GuestFsfreezeThaw {}).await.unwrap(), 3);
    let mut expected = vec![Value::Null; 7];
    expected[2] = json!({"time": 1_700_000_000_123_456_789_i64});
    assert_eq!(serving.await.unwrap(), expected);
}

#[tokio::test]
async fn what_lies_on_the_line_from_before_is_passed_over() {
    let (mut guest, agent) = Guest::and_agent().await;
    guest
        .say("{\"return\": \"for somebody else\"}\n{\"return\": {\"half a")
        .await;
    let serving = tokio::spawn(async move {
        let Asked::Sync(token) = guest.hear().await else {
            panic!()
        };
        guest.say("n answer\r\n\r\nlogin: \n").await;
        guest
            .say("{\"error\": {\"class\": \"GenericError\", \"desc\": \"JSON parse error\"}}\n{\"ret")
            .await;
        guest.answer_sync(token - 1).await;
        guest.say("more garbage").await;
        guest.answer_sync(token).await;
        guest.serve("guest-ping", json!({"return": {}})).await;
    });
    in_time(agent.execute(&GuestPing {})).await.unwrap();
    serving.await.unwrap();
}

#[tokio::test]
async fn an_answer_that_comes_byte_by_byte_is_an_answer() {
    let (mut guest, agent) = Guest::and_agent().await;
    let serving = tokio::spawn(async move {
        guest.come_into_step().await;
        guest.hear().await;
        for byte in b"{\"return\": 42}\n" {
            guest.say([*byte]).await;
            tokio::task::yield_now().await;
        }
    });
    assert_eq!(agent.execute_raw("guest-novelty", json!({})).await.unwrap(), 42);
    serving.await.unwrap();
}

#[tokio::test]
async fn an_agent_that_is_not_there_is_told_as_such_and_found_when_it_comes() {
    let (mut guest, agent) = Guest::and_agent().await;
    let hasty = agent.with_deadline(MOMENT);
    for _ in 0..2 {
        let error = hasty.execute(&GuestPing {}).await.unwrap_err();
        assert!(matches!(error, AgentError::Absent { .. }), "{error:?}");
        assert!(
            error
                .to_string()
                .starts_with("guest-ping: no guest agent answered")
        );
    }
    let serving = tokio::spawn(async move {
        // It finds all three attempts, and answers them in order.
        for _ in 0..3 {
            guest.come_into_step().await;
        }
        guest.serve("guest-ping", json!({"return": {}})).await;
    });
    in_time(agent.execute(&GuestPing {})).await.unwrap();
    serving.await.unwrap();
}

#[tokio::test]
async fn a_line_that_nobody_reads_holds_one_attempt_however_many_are_made() {
    let (mut guest, agent) = Guest::and_agent().await;
    // Far more than a socket holds, so it is begun and not finished.
    let large = json!({"data": "x".repeat(4 << 20)});
    let begun = tokio::spawn({
        let agent = agent.with_deadline(WHILE);
        async move { agent.execute_raw("guest-exec", large).await }
    });
    guest.come_into_step().await;
    let error = in_time(begun).await.unwrap().unwrap_err();
    assert!(matches!(error, AgentError::Timeout { .. }), "{error:?}");
    for _ in 0..20 {
        let hasty = agent.with_deadline(Duration::from_millis(1));
        let error = hasty.execute(&GuestPing {}).await.unwrap_err();
        assert!(matches!(error, AgentError::Absent { .. }), "{error:?}");
    }
    let ping = tokio::spawn(async move { agent.execute(&GuestPing {}).await });
    guest.serve("guest-exec", json!({"return": {}})).await;
    guest.come_into_step().await;
    guest.serve("guest-ping", json!({"return": {}})).await;
    in_time(ping).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_late_answer_is_not_taken_for_the_next_commands() {
    let (mut guest, agent) = Guest::and_agent().await;
    let hasty = agent.with_deadline(WHILE);
    let slow = tokio::spawn(async move { hasty.execute(&GuestFsfreezeFreeze {}).await });
    guest.come_into_step().await;
    let Asked::Command(name, _) = guest.hear().await else {
        panic!()
    };
    let error = in_time(slow).await.unwrap().unwrap_err();
    assert!(matches!(error, AgentError::Timeout { .. }), "{error:?}");
    assert_eq!(name, "guest-fsfreeze-freeze");
    let next = tokio::spawn(async move { agent.execute(&GuestFsfreezeThaw {}).await });
    guest.say("{\"return\": 7}\n").await;
    guest.come_into_step().await;
    guest.serve("guest-fsfreeze-thaw", json!({"return": 3})).await;
    assert_eq!(in_time(next).await.unwrap().unwrap(), 3);
}

#[tokio::test]
async fn a_command_whose_future_is_dropped_harms_no_other() {
    let (mut guest, agent) = Guest::and_agent().await;
    let dropped = tokio::spawn({
        let agent = agent.clone();
        async move { agent.execute(&GuestFsfreezeFreeze {}).await }
    });
    guest.come_into_step().await;
    guest.hear().await;
    let next = tokio::spawn(async move { agent.execute(&GuestFsfreezeThaw {}).await });
    dropped.abort();
    guest.say("{\"return\": 7}\n").await;
    guest.come_into_step().await;
    guest.serve("guest-fsfreeze-thaw", json!({"return": 3})).await;
    assert_eq!(in_time(next).await.unwrap().unwrap(), 3);
}

#[tokio::test]
async fn a_refusal_keeps_the_words_of_the_agent() {
    let (mut guest, agent) = Guest::and_agent().await;
    let suspending = tokio::spawn(async move { agent.suspend_to_disk().await });
    guest.come_into_step().await;
    let refusal = json!({"error": {"class": "GenericError", "desc": "the guest has no swap"}});
    guest.serve("guest-suspend-disk", refusal).await;
    let error = in_time(suspending).await.unwrap().unwrap_err();
    assert_eq!(
        error.to_string(),
        "guest-suspend-disk: GenericError: the guest has no swap"
    );
    assert_eq!(error.class(), Some("GenericError"));
}

#[tokio::test]
async fn a_guest_that_falls_asleep_says_nothing_and_comes_into_step_when_it_wakes() {
    let (mut guest, agent) = Guest::and_agent().await;
    let suspending = tokio::spawn({
        let agent = agent.with_deadline(WHILE);
        async move { agent.suspend_to_disk().await }
    });
    guest.come_into_step().await;
    guest.hear().await;
    let suspension = in_time(suspending).await.unwrap().unwrap();
    assert!(matches!(suspension, Suspension::Unrefused), "{suspension:?}");
    let ping = tokio::spawn(async move { agent.execute(&GuestPing {}).await });
    guest.come_into_step().await;
    guest.serve("guest-ping", json!({"return": {}})).await;
    in_time(ping).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_qemu_that_ends_with_the_guest_is_the_other_good_ending_and_only_if_it_was_asked() {
    let (mut guest, agent) = Guest::and_agent().await;
    let suspending = tokio::spawn({
        let agent = agent.clone();
        async move { agent.suspend_to_disk().await }
    });
    guest.come_into_step().await;
    guest.hear().await;
    drop(guest);
    let suspension = in_time(suspending).await.unwrap().unwrap();
    assert!(matches!(suspension, Suspension::ChannelLost(_)), "{suspension:?}");
    for _ in 0..2 {
        let error = in_time(agent.suspend_to_disk()).await.unwrap_err();
        assert!(
            matches!(error, AgentError::ConnectionLost { sent: false, .. }),
            "{error:?}"
        );
    }
}

#[tokio::test]
async fn an_agent_nobody_answers_for_is_not_asked_to_sleep() {
    let (guest, agent) = Guest::and_agent().await;
    let error = agent.with_deadline(MOMENT).suspend_to_disk().await.unwrap_err();
    assert!(matches!(error, AgentError::Absent { .. }), "{error:?}");
    drop(guest);
}

#[tokio::test]
async fn what_is_no_answer_ends_one_command() {
    let (mut guest, agent) = Guest::and_agent().await;
    let garbled = tokio::spawn({
        let agent = agent.clone();
        async move { agent.execute(&GuestPing {}).await }
    });
    guest.come_into_step().await;
    guest.hear().await;
    guest.say("Kernel panic - not syncing\n").await;
    let error = in_time(garbled).await.unwrap().unwrap_err();
    assert!(matches!(error, AgentError::Garbled { .. }), "{error:?}");
    let odd = tokio::spawn(async move { agent.execute(&GuestFsfreezeThaw {}).await });
    guest.come_into_step().await;
    guest
        .serve("guest-fsfreeze-thaw", json!({"return": "many"}))
        .await;
    let error = in_time(odd).await.unwrap().unwrap_err();
    assert!(matches!(error, AgentError::Unexpected { .. }), "{error:?}");
}

#[tokio::test]
async fn a_socket_that_is_not_there_is_named() {
    let path = std::path::Path::new("/nonexistent/qga.sock");
    let error = Agent::connect(path, AgentOptions::default()).await.unwrap_err();
    assert!(error.to_string().contains("/nonexistent/qga.sock"), "{error}");
}
