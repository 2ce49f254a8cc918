//! Addresses, and the ways a connection ends.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::future::Future;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream as StdUnixStream};
use std::time::Duration;

use dormouse_qmp::fake::{Answer, FakeQemu, Script};
use dormouse_qmp::{
    Address, Client, CommandError, ConnectError, ConnectOptions, ConnectionLoss, Events, Heard,
};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::UnixStream;
use tokio::task::JoinHandle;

/// Long enough for a loaded machine; what is waited for comes at once or never.
const PATIENCE: Duration = Duration::from_secs(20);
/// For what must not come.
const MOMENT: Duration = Duration::from_millis(60);

async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future)
        .await
        .expect("what was waited for did not come")
}

fn in_background(client: &Client, name: &'static str) -> JoinHandle<Result<Value, CommandError>> {
    let client = client.clone();
    tokio::spawn(async move { client.execute_raw(name, Value::Null).await })
}

async fn connected(script: Script) -> (FakeQemu, Client) {
    let qemu = FakeQemu::start(script).unwrap();
    let client = Client::connect(qemu.path(), ConnectOptions::default())
        .await
        .unwrap();
    (qemu, client)
}

fn loss_of(ended: Result<Value, CommandError>) -> ConnectionLoss {
    match ended {
        Err(CommandError::ConnectionLost { source, .. }) => source,
        other => panic!("{other:?}"),
    }
}

/// A QEMU that is played by hand, line by line.
struct Peer(BufReader<UnixStream>);

impl Peer {
    fn over(stream: StdUnixStream) -> Self {
        stream.set_nonblocking(true).unwrap();
        Self(BufReader::new(UnixStream::from_std(stream).unwrap()))
    }

    async fn say(&mut self, message: Value) {
        self.0
            .get_mut()
            .write_all(format!("{message}\r\n").as_bytes())
            .await
            .unwrap();
    }

    async fn hear(&mut self) -> Value {
        let mut line = String::new();
        in_time(self.0.read_line(&mut line)).await.unwrap();
        serde_json::from_str(&line).unwrap()
    }

    async fn open(&mut self) {
        self.say(json!({"QMP": {"version": {}, "capabilities": []}}))
            .await;
        let negotiation = self.hear().await;
        self.say(json!({"return": {}, "id": negotiation["id"]})).await;
    }

    /// A client over a pair of sockets, and the peer at the other end.
    async fn and_client() -> (Self, Client) {
        let (ours, theirs) = StdUnixStream::pair().unwrap();
        let mut peer = Self::over(theirs);
        let connecting = tokio::spawn(Client::connect(Address::from(ours), ConnectOptions::default()));
        peer.open().await;
        (peer, in_time(connecting).await.unwrap().unwrap())
    }
}

#[tokio::test]
async fn a_monitor_in_the_abstract_namespace_is_reached_by_its_name() {
    let name = format!("dormouse-qmp-test-{}", std::process::id());
    let listener = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
    let address: Address = format!("@{name}").parse().unwrap();
    let connecting = tokio::spawn(Client::connect(address, ConnectOptions::default()));
    // The kernel has queued it by the time it is accepted, or queues it while we wait.
    let accepted = tokio::task::spawn_blocking(move || listener.accept().unwrap().0);
    let mut peer = Peer::over(in_time(accepted).await.unwrap());
    peer.open().await;
    in_time(connecting).await.unwrap().unwrap();
}

#[tokio::test]
async fn an_address_that_leads_nowhere_is_named_in_the_error() {
    let address: Address = "@dormouse-qmp-nobody".parse().unwrap();
    let error = Client::connect(address, ConnectOptions::default())
        .await
        .unwrap_err();
    assert!(matches!(error, ConnectError::Socket { .. }), "{error:?}");
    assert!(error.to_string().ends_with("@dormouse-qmp-nobody"), "{error}");
    let file: OwnedFd = tempfile::tempfile().unwrap().into();
    let error = Client::connect(file, ConnectOptions::default())
        .await
        .unwrap_err();
    assert!(error.to_string().contains("fd:"), "{error}");
}

#[tokio::test]
async fn a_socket_that_was_handed_over_is_a_connection() {
    let (mut peer, client) = Peer::and_client().await;
    let command = in_background(&client, "query-status");
    let heard = peer.hear().await;
    peer.say(json!({"return": {"status": "running"}, "id": heard["id"]}))
        .await;
    assert_eq!(
        in_time(command).await.unwrap().unwrap(),
        json!({"status": "running"})
    );
}

#[tokio::test]
async fn closing_lets_what_is_pending_finish_and_nothing_begin() {
    let (qemu, client) = connected(Script::new().on("slow", Answer::nothing())).await;
    let slow: Vec<_> = (0..9).map(|_| in_background(&client, "slow")).collect();
    let received = in_time(qemu.wait_for("slow", 8)).await;
    let closing = tokio::spawn({
        let client = client.clone();
        async move { client.close().await }
    });
    let refused = loop {
        // Until the closing has begun it is a command like any other.
        match client
            .with_deadline(MOMENT)
            .execute_raw("late", Value::Null)
            .await
        {
            Err(CommandError::Timeout { .. }) => {}
            other => break other,
        }
    };
    assert!(matches!(loss_of(refused), ConnectionLoss::LocallyClosed));
    assert!(!client.is_closed(), "nine commands are pending");
    for command in &received {
        qemu.answer(command, Answer::returns(json!("done")));
    }
    let ninth = in_time(qemu.wait_for("slow", 9)).await.pop().unwrap();
    qemu.answer(&ninth, Answer::returns(json!("done")));
    for command in slow {
        assert_eq!(in_time(command).await.unwrap().unwrap(), "done");
    }
    assert!(matches!(
        in_time(closing).await.unwrap(),
        ConnectionLoss::LocallyClosed
    ));
    assert!(client.is_closed());
    assert!(qemu.wait_for("late", 0).await.is_empty());
    // The monitor is free for the next one.
    Client::connect(qemu.path(), ConnectOptions::default())
        .await
        .unwrap();
}

#[tokio::test]
async fn closing_twice_or_too_late_tells_what_ended_the_connection() {
    let (_qemu, client) = connected(Script::new()).await;
    assert!(matches!(
        in_time(client.close()).await,
        ConnectionLoss::LocallyClosed
    ));
    assert!(matches!(
        in_time(client.close()).await,
        ConnectionLoss::LocallyClosed
    ));

    let (qemu, client) = connected(Script::new().on("slow", Answer::nothing())).await;
    let slow = in_background(&client, "slow");
    in_time(qemu.wait_for("slow", 1)).await;
    let closing = tokio::spawn({
        let client = client.clone();
        async move { client.close().await }
    });
    qemu.hang_up();
    assert!(matches!(
        loss_of(in_time(slow).await.unwrap()),
        ConnectionLoss::PeerClosed
    ));
    assert!(matches!(
        in_time(closing).await.unwrap(),
        ConnectionLoss::PeerClosed
    ));
}

#[tokio::test]
async fn a_closing_whose_future_is_dropped_goes_on() {
    let (qemu, client) = connected(Script::new().on("slow", Answer::nothing())).await;
    let slow = in_background(&client, "slow");
    let received = in_time(qemu.wait_for("slow", 1)).await;
    assert!(tokio::time::timeout(MOMENT, client.close()).await.is_err());
    qemu.answer(&received[0], Answer::returns(json!({})));
    in_time(slow).await.unwrap().unwrap();
    assert!(matches!(
        in_time(client.closed()).await,
        ConnectionLoss::LocallyClosed
    ));
}

#[tokio::test]
async fn the_answers_of_a_qemu_that_no_longer_listens_are_read_to_the_end() {
    let (mut peer, client) = Peer::and_client().await;
    let mut events = client.events();
    let first = in_background(&client, "first");
    let heard = peer.hear().await;
    // From here on sending fails, and reading does not.
    let stream = peer.0.into_inner().into_std().unwrap();
    stream.shutdown(std::net::Shutdown::Read).unwrap();
    let mut peer = Peer::over(stream);
    let unsent = in_background(&client, "unsent");
    let refused = loop {
        match client
            .with_deadline(MOMENT)
            .execute_raw("later", Value::Null)
            .await
        {
            Err(CommandError::Timeout { .. }) => {}
            other => break other,
        }
    };
    assert!(matches!(loss_of(refused), ConnectionLoss::PeerClosed));
    assert!(!client.is_closed(), "there may be something to be read");
    peer.say(json!({"event": "SHUTDOWN"})).await;
    peer.say(json!({"return": "in time", "id": heard["id"]})).await;
    assert_eq!(in_time(first).await.unwrap().unwrap(), "in time");
    drop(peer);
    assert!(matches!(
        loss_of(in_time(unsent).await.unwrap()),
        ConnectionLoss::PeerClosed
    ));
    in_time(client.closed()).await;
    assert!(client.is_closed());
    assert!(matches!(next(&mut events).await, Heard::Event(event) if event.name == "SHUTDOWN"));
    assert_eq!(next(&mut events).await, Heard::Closed);
}

#[tokio::test]
async fn a_late_answer_is_no_loss_and_the_end_of_the_socket_is() {
    let (qemu, client) = connected(Script::new().on("slow", Answer::nothing())).await;
    let error = client
        .with_deadline(MOMENT)
        .execute_raw("slow", Value::Null)
        .await
        .unwrap_err();
    assert!(matches!(error, CommandError::Timeout { .. }), "{error:?}");
    assert!(!client.is_closed());
    qemu.hang_up();
    in_time(client.closed()).await;
    assert!(client.is_closed());
}

#[test]
fn a_connection_whose_runtime_is_gone_is_closed() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let (_qemu, client) = runtime.block_on(connected(Script::new()));
    assert!(!client.is_closed());
    drop(runtime);
    assert!(client.is_closed());
}

async fn next(events: &mut Events) -> Heard {
    in_time(events.next()).await
}
