//! What is done for a guest that was away, once it runs.
//!
//! Nothing here holds the guest up, or makes its wake fail: it runs already. What could not be done is told.
//!
//! - The network learns again where the guest is (`announce-self`).
//! - The guest's clock is set by its agent, if one answers at once.
//! - What a guest may have to know by itself is noted: the balloon is as large as it was, and a VM generation id is the one
//!   that it had, since this is the same machine going on, not a copy of it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dormouse_qmp::agent::{Agent, AgentOptions, GuestSetTime};
use dormouse_qmp::{Client, command};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::error::{Failure, sentence};
use crate::vm::agent_socket;

/// How long QEMU may take over its part.
const QEMU_TIMEOUT: Duration = Duration::from_secs(2);

/// How long the agent may take. A sound one answers in milliseconds; one whose guest is too busy to run it is not waited
/// for.
const AGENT_TIMEOUT: Duration = Duration::from_millis(500);

/// What was done after a wake, and what was found.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FollowUp {
    /// Whether QEMU announces the guest's network cards, those that it has.
    pub announced: bool,
    /// Whether the guest's clock was set.
    pub clock_set: bool,
    /// Why not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clock_not_set_because: Option<String>,
    /// How large the balloon lets the guest be, as it was when it was saved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub balloon_bytes: Option<u64>,
    /// The VM generation id, unchanged.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vm_generation_id: Option<String>,
}

/// Does what can be done. `runs`: whether the guest does.
pub async fn follow_up(client: &Client, pid: u32, runs: bool) -> FollowUp {
    let mut done = FollowUp::default();
    let by_qemu = async {
        // A machine without a balloon or without a generation id says so by an error.
        let balloon = client.execute_raw("query-balloon", json!({})).await;
        done.balloon_bytes = balloon.ok().and_then(|balloon| balloon["actual"].as_u64());
        let id = client.execute(&command::query_vm_generation_id {}).await;
        done.vm_generation_id = id.ok().and_then(|id| Some(id["guid"].as_str()?.to_owned()));
        if runs {
            // QEMU's own defaults: five rounds within two seconds.
            let rounds = json!({"initial": 50, "max": 550, "rounds": 5, "step": 100});
            done.announced = client.execute_raw("announce-self", rounds).await.is_ok();
        }
    };
    // What is not known by then stays unknown.
    let _ = tokio::time::timeout(QEMU_TIMEOUT, by_qemu).await;
    if runs {
        let set = tokio::time::timeout(AGENT_TIMEOUT, set_clock(client, pid)).await;
        done.clock_not_set_because = match set {
            Ok(Ok(())) => None,
            Ok(Err(failure)) => Some(failure),
            Err(_) => Some(format!("no guest agent answered within {AGENT_TIMEOUT:?}")),
        };
        done.clock_set = done.clock_not_set_because.is_none();
    }
    done
}

async fn set_clock(client: &Client, pid: u32) -> Result<(), String> {
    let told = |failure: Failure| failure.message;
    let socket = agent_socket::find(client, pid).await.map_err(told)?;
    let mut options = AgentOptions::default();
    options.connect_timeout = AGENT_TIMEOUT;
    options.command_deadline = AGENT_TIMEOUT;
    let agent = Agent::connect(socket, options)
        .await
        .map_err(|error| sentence(&error))?;
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_err(|error| error.to_string())?;
    let time = GuestSetTime {
        time_ns: i64::try_from(now.as_nanos()).ok(),
    };
    agent.execute(&time).await.map_err(|error| sentence(&error))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};

    use dormouse_qmp::fake::{Answer, FakeQemu, Script};

    use super::*;

    #[tokio::test]
    async fn what_qemu_has_is_told_and_what_it_lacks_is_not() {
        let script = Script::new()
            .on("query-balloon", Answer::returns(json!({"actual": 4096})))
            .on(
                "query-vm-generation-id",
                Answer::fails("GenericError", "VM Generation ID device not found"),
            )
            .on("announce-self", Answer::returns(json!({})))
            .on("qom-list", Answer::returns(json!([])));
        let qemu = FakeQemu::start(script).unwrap();
        let client = Client::connect(qemu.path(), Default::default()).await.unwrap();
        let done = follow_up(&client, 0, true).await;
        assert_eq!(
            (done.balloon_bytes, done.announced, done.clock_set),
            (Some(4096), true, false)
        );
        assert_eq!(done.vm_generation_id, None);
        let why = done.clock_not_set_because.unwrap();
        assert!(why.contains("no virtio-serial port"), "{why}");
    }

    #[tokio::test]
    async fn a_guest_that_stays_paused_is_neither_announced_nor_told_the_time() {
        let qemu = FakeQemu::start(Script::new()).unwrap();
        let client = Client::connect(qemu.path(), Default::default()).await.unwrap();
        assert_eq!(follow_up(&client, 0, false).await, FollowUp::default());
        assert!(
            qemu.received()
                .iter()
                .all(|command| command.name != "announce-self")
        );
    }

    #[tokio::test]
    async fn the_clock_is_set_by_an_agent_that_answers() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("agent.sock");
        let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let agent = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let lines = BufReader::new(stream.try_clone().unwrap());
            for line in lines.split(b'\n').map_while(Result::ok) {
                let text = line.strip_prefix(b"\xff").unwrap_or(&line);
                let command: serde_json::Value = serde_json::from_slice(text).unwrap();
                if command["execute"] == "guest-set-time" {
                    stream.write_all(b"{\"return\": {}}\n").unwrap();
                    return command["arguments"]["time"].as_i64();
                }
                let answer = json!({"return": command["arguments"]["id"]});
                stream.write_all(b"\xff").unwrap();
                stream.write_all(format!("{answer}\n").as_bytes()).unwrap();
            }
            None
        });
        let port = json!([{"name": "port", "type": "child<virtserialport>"}]);
        let chardevs = json!([{"label": "c0", "filename": format!("unix:{},server=on", path.display())}]);
        let script = Script::new()
            .on("qom-list", Answer::returns(port))
            .on_each("qom-get", |asked| {
                let name = asked.arguments["property"] == "name";
                Answer::returns(json!(if name { "org.qemu.guest_agent.0" } else { "c0" }))
            })
            .on("query-chardev", Answer::returns(chardevs));
        let qemu = FakeQemu::start(script).unwrap();
        let client = Client::connect(qemu.path(), Default::default()).await.unwrap();
        let done = follow_up(&client, std::process::id(), true).await;
        assert_eq!((done.clock_set, done.clock_not_set_because), (true, None));
        let set_to = agent.join().unwrap().unwrap();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos();
        assert!((now - u128::try_from(set_to).unwrap()) < 60_000_000_000);
    }
}
