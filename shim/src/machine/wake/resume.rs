//! Lets a guest run, and sees that it does.
//!
//! A guest may stop again at once, by itself (a disk that is full, a power-off that was under way) or because somebody
//! else stops it. So what counts is that QEMU was seen running, or that it said so: a RESUME event of this `cont`.

use std::time::Duration;

use dormouse_qmp::view::machine::RunState;
use dormouse_qmp::{Client, Events, Heard, command};

use crate::error::{Code, Failure};
use crate::vm::monitor::run_state;

/// How often QEMU is asked.
const POLL: Duration = Duration::from_millis(1);

/// How long QEMU may take from `cont` to a guest that runs. It takes its disks back meanwhile, which may be slow.
const RUN_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs the guest. Refused where QEMU refused; after any other failure it may run.
pub async fn run(client: &Client) -> Result<(), Failure> {
    let events = client.events();
    client.execute(&command::cont {}).await?;
    // From here on the guest may have run: whatever goes wrong now must not look like a refusal.
    let seen = tokio::time::timeout(RUN_TIMEOUT, seen_running(client, events)).await;
    match seen {
        Ok(seen) => seen.map_err(|failure| Failure {
            code: Code::Operator,
            ..failure
        }),
        Err(_) => Err(Failure::new(
            Code::Operator,
            format!(
                "QEMU took the command to run the guest, which was not seen running within {RUN_TIMEOUT:?}"
            ),
        )),
    }
}

async fn seen_running(client: &Client, mut events: Events) -> Result<(), Failure> {
    let mut listening = true;
    loop {
        tokio::select! {
            heard = events.next(), if listening => match heard {
                Heard::Event(event) if event.name == "RESUME" => return Ok(()),
                Heard::Event(_) | Heard::Lagged(_) => {}
                Heard::Closed => listening = false,
            },
            () = tokio::time::sleep(POLL) => {
                if run_state(client).await? == RunState::Running {
                    return Ok(());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use dormouse_qmp::fake::{Answer, FakeQemu, Script};
    use serde_json::json;

    use super::*;

    async fn ran(script: Script) -> Result<(), Failure> {
        let qemu = FakeQemu::start(script).unwrap();
        let client = Client::connect(qemu.path(), Default::default()).await.unwrap();
        run(&client).await
    }

    #[tokio::test]
    async fn a_guest_that_ran_and_stopped_again_at_once_has_run() {
        let status = json!({"running": false, "singlestep": false, "status": "io-error"});
        let script = Script::new()
            .on(
                "cont",
                Answer::returns(json!({})).with_event_after("RESUME", json!({})),
            )
            .on("query-status", Answer::returns(status));
        assert_eq!(ran(script).await, Ok(()));
    }

    #[tokio::test]
    async fn a_guest_whose_event_was_missed_is_seen_by_its_status() {
        let status = json!({"running": true, "singlestep": false, "status": "running"});
        let script = Script::new()
            .on("cont", Answer::returns(json!({})))
            .on("query-status", Answer::returns(status));
        assert_eq!(ran(script).await, Ok(()));
    }

    #[tokio::test]
    async fn a_refusal_is_one_and_a_qemu_that_is_lost_is_not() {
        let refused = Script::new().on("cont", Answer::fails("GenericError", "not now"));
        assert_eq!(ran(refused).await.unwrap_err().code, Code::Refused);
        let lost = Script::new()
            .on("cont", Answer::returns(json!({})))
            .on("query-status", Answer::hangs_up());
        assert_eq!(ran(lost).await.unwrap_err().code, Code::Operator);
    }
}
