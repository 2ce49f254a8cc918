//! File descriptors: each reaches its own command, and none is left open on any path.
//!
//! One test in a process of its own, because it counts the descriptors of the whole process.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::time::Duration;

use dormouse_qmp::agent::{Agent, AgentError, AgentOptions, GuestPing};
use dormouse_qmp::fake::{Answer, FakeQemu, Script};
use dormouse_qmp::reconnect::{Monitor, MonitorOptions, Report};
use dormouse_qmp::view::fdset::AddedFd;
use dormouse_qmp::{Address, Client, CommandError, ConnectOptions, command};
use serde_json::{Value, json};

const PATIENCE: Duration = Duration::from_secs(20);
const MOMENT: Duration = Duration::from_millis(60);

#[test]
fn each_descriptor_reaches_its_own_command_and_none_is_left_open_on_any_path() {
    // The first runtime of a process opens what tokio keeps for signals, for good.
    drop(new_runtime());
    let before = open_descriptors();
    let runtime = new_runtime();
    runtime.block_on(async {
        let idle = open_descriptors();
        each_reaches_its_own_command().await;
        refused_here_and_there().await;
        dropped_and_timed_out_while_queued().await;
        lost_with_the_connection().await;
        given_to_qemu_and_taken_back().await;
        closed_in_good_order().await;
        attached_again_and_again(idle).await;
        spoken_to_an_agent_that_is_not_there(idle).await;
        connecting_to_nobody().await;
        settled(idle).await;
        in_flight_when_the_runtime_ends().await;
    });
    drop(runtime);
    assert_eq!(open_descriptors(), before);
}

async fn each_reaches_its_own_command() {
    let (qemu, client) = connected(Script::new()).await;
    let idle = open_descriptors();
    let commands: Vec<_> = (0..5)
        .map(|number| {
            let (client, name) = (client.clone(), format!("fd-{number}"));
            let fds = vec![file_that_says(&name)];
            tokio::spawn(async move {
                client
                    .execute_with_fds(&command::getfd { fdname: name }, fds)
                    .await
            })
        })
        .collect();
    for command in commands {
        command.await.unwrap().unwrap();
    }
    let names = qemu
        .wait_for("getfd", 5)
        .await
        .into_iter()
        .map(|command| command.arguments["fdname"].clone());
    let descriptors = qemu.take_descriptors();
    assert_eq!(
        open_descriptors(),
        idle + 5,
        "only the peer's duplicates are open"
    );
    let mut said = Vec::new();
    for descriptor in descriptors {
        let mut text = String::new();
        File::from(descriptor).read_to_string(&mut text).unwrap();
        said.push(Value::String(text));
    }
    assert_eq!(said, names.collect::<Vec<_>>());
    settled(idle).await;
}

async fn refused_here_and_there() {
    let script = Script::new().on("getfd", Answer::fails("GenericError", "no"));
    let (qemu, client) = connected(script).await;
    let idle = open_descriptors();
    let getfd = command::getfd {
        fdname: "a".to_owned(),
    };
    let error = client.execute_with_fds(&getfd, vec![file()]).await.unwrap_err();
    assert_eq!(error.class(), Some("GenericError"));
    let error = client
        .execute_with_fds(&getfd, (0..17).map(|_| file()).collect())
        .await
        .unwrap_err();
    assert!(
        matches!(
            error,
            CommandError::TooManyDescriptors {
                count: 17,
                limit: 16,
                ..
            }
        ),
        "{error:?}"
    );
    assert_eq!(qemu.wait_for("getfd", 1).await.len(), 1);
    qemu.take_descriptors();
    settled(idle).await;
}

async fn dropped_and_timed_out_while_queued() {
    let (qemu, client) = connected(Script::new().on("slow", Answer::nothing())).await;
    let slow: Vec<_> = (0..8)
        .map(|_| {
            let client = client.clone();
            tokio::spawn(async move { client.execute_raw("slow", Value::Null).await })
        })
        .collect();
    let received = qemu.wait_for("slow", 8).await;
    let idle = open_descriptors();
    let getfd = command::getfd {
        fdname: "a".to_owned(),
    };
    let late = client
        .with_deadline(MOMENT)
        .execute_with_fds(&getfd, vec![file()])
        .await
        .unwrap_err();
    assert!(matches!(late, CommandError::Timeout { .. }), "{late:?}");
    let dropped = tokio::time::timeout(MOMENT, client.execute_with_fds(&getfd, vec![file()])).await;
    assert!(dropped.is_err());
    settled(idle).await;
    for command in &received {
        qemu.answer(command, Answer::returns(json!({})));
    }
    for command in slow {
        command.await.unwrap().unwrap();
    }
    // Neither was ever sent.
    assert_eq!(qemu.wait_for("getfd", 0).await.len(), 0);
}

async fn lost_with_the_connection() {
    let script = Script::new().on("getfd", Answer::nothing());
    let (qemu, client) = connected(script).await;
    let idle = open_descriptors();
    // The first is sent; the others wait for it, for only one may be under way.
    let commands: Vec<_> = (0..3)
        .map(|_| {
            let client = client.clone();
            let getfd = command::getfd {
                fdname: "a".to_owned(),
            };
            tokio::spawn(async move { client.execute_with_fds(&getfd, vec![file()]).await })
        })
        .collect();
    qemu.wait_for("getfd", 1).await;
    qemu.hang_up();
    for command in commands {
        let error = command.await.unwrap().unwrap_err();
        assert!(matches!(error, CommandError::ConnectionLost { .. }), "{error:?}");
    }
    let error = client
        .execute_with_fds(
            &command::getfd {
                fdname: "b".to_owned(),
            },
            vec![file()],
        )
        .await
        .unwrap_err();
    assert!(matches!(error, CommandError::ConnectionLost { .. }), "{error:?}");
    qemu.take_descriptors();
    // Both ends of the connection are closed as well.
    settled(idle - 2).await;
}

/// What QEMU was given is QEMU's; taking it back, or failing to, opens and closes nothing here.
async fn given_to_qemu_and_taken_back() {
    let mut removals = 0;
    let script = Script::new()
        .on("closefd", Answer::returns(json!({})))
        .on_each("remove-fd", move |_| {
            removals += 1;
            match removals {
                1 => Answer::returns(json!({})),
                2 => Answer::fails("GenericError", "File descriptor named 'fdset-id:0' not found"),
                _ => Answer::hangs_up(),
            }
        });
    let (qemu, client) = connected(script).await;
    let idle = open_descriptors();
    let getfd = command::getfd {
        fdname: "a".to_owned(),
    };
    let closefd = command::closefd {
        fdname: "a".to_owned(),
    };
    let add_fd = command::add_fd {
        fdset_id: Some(0),
        opaque: Some("ram".to_owned()),
    };
    let remove_fd = command::remove_fd {
        fdset_id: 0,
        fd: None,
    };
    client.execute_with_fds(&getfd, vec![file()]).await.unwrap();
    assert_eq!(open_descriptors(), idle + 1, "only the peer's duplicate is open");
    drop(qemu.take_descriptors());
    client.execute(&closefd).await.unwrap();
    settled(idle).await;

    let added = client.execute_with_fds(&add_fd, vec![file()]).await.unwrap();
    let added: AddedFd = serde_json::from_value(added).unwrap();
    assert_eq!(added.fdset_id, 0);
    drop(qemu.take_descriptors());
    client.execute(&remove_fd).await.unwrap();
    let error = client.execute(&remove_fd).await.unwrap_err();
    assert_eq!(error.class(), Some("GenericError"));
    settled(idle).await;

    // One more on its way in while the removal before it takes the connection along.
    let removing = client.execute(&remove_fd);
    let adding = client.execute_with_fds(&add_fd, vec![file()]);
    let (removed, added) = tokio::join!(removing, adding);
    assert!(
        matches!(removed, Err(CommandError::ConnectionLost { .. })),
        "{removed:?}"
    );
    assert!(
        matches!(added, Err(CommandError::ConnectionLost { .. })),
        "{added:?}"
    );
    drop(qemu.take_descriptors());
    settled(idle - 2).await;
}

async fn closed_in_good_order() {
    let script = Script::new().on("getfd", Answer::nothing());
    let (qemu, client) = connected(script).await;
    let idle = open_descriptors();
    let getfd = command::getfd {
        fdname: "a".to_owned(),
    };
    let pending: Vec<_> = (0..2)
        .map(|_| {
            let (client, getfd) = (client.clone(), getfd.clone());
            tokio::spawn(async move { client.execute_with_fds(&getfd, vec![file()]).await })
        })
        .collect();
    qemu.wait_for("getfd", 1).await;
    let closing = tokio::spawn({
        let client = client.clone();
        async move { client.close().await }
    });
    for number in 1..=2 {
        let received = qemu.wait_for("getfd", number).await;
        qemu.answer(&received[number - 1], Answer::returns(json!({})));
    }
    for command in pending {
        command.await.unwrap().unwrap();
    }
    closing.await.unwrap();
    let refused = client.execute_with_fds(&getfd, vec![file()]).await.unwrap_err();
    assert!(
        matches!(refused, CommandError::ConnectionLost { .. }),
        "{refused:?}"
    );
    qemu.take_descriptors();
    settled(idle - 2).await;
}

async fn attached_again_and_again(idle: usize) {
    settled(idle).await;
    let script = Script::new()
        .on("query-status", Answer::returns(json!({"status": "running"})))
        .on("query-migrate", Answer::returns(json!({})))
        .on("query-jobs", Answer::returns(json!([])))
        .on("query-block", Answer::returns(json!([])))
        .on("query-fdsets", Answer::returns(json!([])));
    let qemu = FakeQemu::start(script).unwrap();
    let mut options = MonitorOptions::default();
    options.back_off.first = Duration::from_millis(1);
    options.back_off.cap = Duration::from_millis(1);
    let monitor = Monitor::attach(qemu.path(), options);
    let mut reports = monitor.subscribe();
    for _ in 0..5 {
        while !matches!(reports.next().await, Report::Back { .. }) {}
        qemu.hang_up();
    }
    while !matches!(reports.next().await, Report::Back { .. }) {}
    // The listener, and both ends of one connection.
    settled(idle + 3).await;
    drop(monitor);
    drop(qemu);
    settled(idle).await;
}

async fn spoken_to_an_agent_that_is_not_there(idle: usize) {
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let agent = Agent::connect(Address::from(ours), AgentOptions::default())
        .await
        .unwrap();
    let error = agent
        .with_deadline(MOMENT)
        .execute(&GuestPing {})
        .await
        .unwrap_err();
    assert!(matches!(error, AgentError::Absent { .. }), "{error:?}");
    assert_eq!(open_descriptors(), idle + 2);
    drop((agent, theirs));
    let file = Agent::connect(Address::from(file()), AgentOptions::default()).await;
    assert!(file.is_err());
    settled(idle).await;
}

async fn connecting_to_nobody() {
    let qemu = FakeQemu::start(Script::new().silent()).unwrap();
    let options = ConnectOptions {
        greeting_timeout: MOMENT,
        ..ConnectOptions::default()
    };
    Client::connect(qemu.path(), options).await.unwrap_err();
    let dropped = tokio::time::timeout(MOMENT, Client::connect(qemu.path(), ConnectOptions::default())).await;
    assert!(dropped.is_err());
}

async fn in_flight_when_the_runtime_ends() {
    let (qemu, client) = connected(Script::new().on("getfd", Answer::nothing())).await;
    for _ in 0..2 {
        let client = client.clone();
        let getfd = command::getfd {
            fdname: "a".to_owned(),
        };
        tokio::spawn(async move { client.execute_with_fds(&getfd, vec![file()]).await });
    }
    qemu.wait_for("getfd", 1).await;
}

fn new_runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

async fn connected(script: Script) -> (FakeQemu, Client) {
    let qemu = FakeQemu::start(script).unwrap();
    let client = Client::connect(qemu.path(), ConnectOptions::default())
        .await
        .unwrap();
    (qemu, client)
}

/// Waits until so many descriptors are open: tasks that were told to end need a moment to do so.
async fn settled(expected: usize) {
    let counted = async {
        while open_descriptors() != expected {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    if tokio::time::timeout(PATIENCE, counted).await.is_err() {
        panic!("{} descriptors are open, not {expected}", open_descriptors());
    }
}

fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn file() -> OwnedFd {
    tempfile::tempfile().unwrap().into()
}

fn file_that_says(text: &str) -> OwnedFd {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    // A second opening, with a position of its own.
    file.reopen().unwrap().into()
}
