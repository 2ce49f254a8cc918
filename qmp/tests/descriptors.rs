//! File descriptors: each reaches its own command, and none is left open on any path.
//!
//! One test in a process of its own, because it counts the descriptors of the whole process.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::time::Duration;

use dormouse_qmp::fake::{Answer, FakeQemu, Script};
use dormouse_qmp::{Client, CommandError, ConnectOptions, command};
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
