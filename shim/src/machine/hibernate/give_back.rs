//! Giving a guest back, whatever the hibernation had QEMU do: its migration is ended, its vCPUs do what they did, and its
//! migration settings are what they were.

use std::os::unix::net::UnixStream;
use std::time::Duration;

use dormouse_qmp::view::block::BlockInfo;
use dormouse_qmp::view::machine::RunState;
use dormouse_qmp::{Client, command};
use tokio::time::Instant;

use super::direct::STREAM_FD;
use super::machine::GiveBack;
use super::stream;
use crate::error::{Code, Failure};
use crate::vm::monitor::{self, MigrationSettings, wait_for_migration_end, wait_for_run_state};

/// How long QEMU may take to do what gives a guest back. Whatever it is busy with comes first.
const TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// How long a cancelled migration may take to end. What its connections still bring is read and thrown away, so nothing holds
/// it up but what never ends: QEMU 10.0 can wait for ever for channels that broke off as its migration began.
const CANCEL_PATIENCE: Duration = Duration::from_secs(60);

/// Gives the guest back; returns when it was. `connections`: those that its memory comes over; `settings`: what was found,
/// if any were changed.
///
/// Does not give up while QEMU lives: what it was told before it will do, however late, and then the guest must not stay
/// as that leaves it. Only a migration that was cancelled and does not end is not waited for. The guest is given back
/// all the same; the settings cannot be.
pub async fn give_guest_back(
    client: &Client,
    give_back: GiveBack,
    connections: &mut Vec<UnixStream>,
    settings: Option<MigrationSettings>,
) -> Result<Instant, Failure> {
    give_back_within(client, give_back, connections, settings, CANCEL_PATIENCE).await
}

async fn give_back_within(
    client: &Client,
    give_back: GiveBack,
    connections: &mut Vec<UnixStream>,
    settings: Option<MigrationSettings>,
    patience: Duration,
) -> Result<Instant, Failure> {
    let client = client.with_deadline(TIMEOUT);
    let mut stuck = None;
    if monitor::run_state(&client).await? != RunState::Postmigrate {
        client.execute(&command::migrate_cancel {}).await?;
        let _drained = stream::drain(connections);
        match wait_for_migration_end(&client, patience).await {
            Err(failure) if failure.code == Code::TimedOut => stuck = Some(failure),
            ended => drop(ended?),
        }
    }
    let in_between = |state: &RunState| *state == RunState::FinishMigrate;
    let state = wait_for_run_state(&client, "settled", |state| !in_between(state)).await?;
    match (give_back, state) {
        (GiveBack::Running, RunState::Running) | (GiveBack::AsItIs | GiveBack::Still, _) => {}
        (GiveBack::Running, _) => {
            client.execute(&command::cont {}).await?;
            wait_for_run_state(&client, "running", |state| *state == RunState::Running).await?;
        }
        (GiveBack::Paused, RunState::Postmigrate) => {
            // QEMU leaves this state, and takes its disks back, only by running. Both commands are in its queue before
            // it looks at the first, so that the guest runs for an instant.
            let (cont, stop) = tokio::join!(
                client.execute(&command::cont {}),
                client.execute(&command::stop {})
            );
            cont.and(stop)?;
            wait_for_run_state(&client, "paused", |state| *state == RunState::Paused).await?;
        }
        (GiveBack::Paused, _) => {}
    }
    let back = Instant::now();
    if matches!(give_back, GiveBack::Running | GiveBack::Paused) {
        check_disks_active(&client).await?;
    }
    // A descriptor that QEMU did not use stays open in it for ever. Once used it is gone, and this fails.
    let close = command::closefd {
        fdname: STREAM_FD.to_owned(),
    };
    let _ = client.execute(&close).await;
    match (stuck, settings) {
        (Some(stuck), _) => Err(Failure {
            code: Code::Operator,
            ..stuck.while_doing("the guest is given back, but not its migration settings")
        }),
        (None, Some(settings)) => {
            settings.put_back(&client).await?;
            Ok(back)
        }
        (None, None) => Ok(back),
    }
}

/// A guest that goes on has to have its disks. QEMU tells since 10.0; before that a guest without them does not go on.
async fn check_disks_active(client: &Client) -> Result<(), Failure> {
    let drives: Vec<BlockInfo> = client.query(&command::query_block {}).await?;
    let nodes = drives.into_iter().filter_map(|drive| drive.inserted);
    let inactive: Vec<String> = nodes
        .filter(|node| node.active == Some(false))
        .map(|node| node.node_name.unwrap_or(node.file))
        .collect();
    if inactive.is_empty() {
        return Ok(());
    }
    Err(Failure::new(
        Code::Operator,
        format!(
            "QEMU lets the guest go on, and has not taken back its disks {}",
            inactive.join(", ")
        ),
    ))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use dormouse_qmp::fake::{Answer, FakeQemu, Script};
    use serde_json::json;

    use super::*;
    use crate::error::GuestState;
    use crate::machine::hibernate::machine::{Aim, Effect, Input, Machine, Phase};

    /// Longer than the fake takes for anything, shorter than anybody waits for a test.
    const PATIENCE: Duration = Duration::from_millis(200);

    /// A QEMU whose guest was stopped and whose migration was cancelled: that ends when `ends` says so.
    fn cancelling(ends: &Arc<AtomicBool>) -> Script {
        let ends = Arc::clone(ends);
        let runs = Arc::new(AtomicBool::new(false));
        let is_told = Arc::clone(&runs);
        let done = || Answer::returns(json!({}));
        Script::new()
            .on("migrate_cancel", done())
            .on_each("query-migrate", move |_| {
                let status = if ends.load(Ordering::Relaxed) {
                    "cancelled"
                } else {
                    "cancelling"
                };
                Answer::returns(json!({"status": status}))
            })
            .on_each("cont", move |_| {
                is_told.store(true, Ordering::Relaxed);
                done()
            })
            .on_each("query-status", move |_| {
                let running = runs.load(Ordering::Relaxed);
                let status = if running { "running" } else { "paused" };
                Answer::returns(json!({"status": status, "running": running}))
            })
            .on("query-block", Answer::returns(json!([])))
            .on("closefd", Answer::fails("GenericError", "no such descriptor"))
            .on("migrate-set-capabilities", done())
            .on("migrate-set-parameters", done())
    }

    fn settings() -> Option<MigrationSettings> {
        let settings = json!({
            "capabilities": [{"capability": "multifd", "state": false}],
            "parameters": {"max-bandwidth": 128 << 20},
            "needed": {"max-bandwidth": 0},
        });
        Some(serde_json::from_value(settings).unwrap())
    }

    fn told(qemu: &FakeQemu, name: &str) -> usize {
        qemu.received()
            .iter()
            .filter(|command| command.name == name)
            .count()
    }

    #[tokio::test]
    async fn a_cancelled_migration_that_does_not_end_keeps_no_guest_waiting_and_its_settings_come_back_later()
    {
        let ends = Arc::new(AtomicBool::new(false));
        let qemu = FakeQemu::start(cancelling(&ends)).unwrap();
        let client = Client::connect(qemu.path(), Default::default()).await.unwrap();
        // However often it is tried.
        for attempt in 1..=2 {
            let mut connections = Vec::new();
            let back =
                give_back_within(&client, GiveBack::Running, &mut connections, settings(), PATIENCE).await;
            let failure = back.unwrap_err();
            assert_eq!(failure.code, Code::Operator);
            assert!(
                failure
                    .message
                    .contains("the guest is given back, but not its migration settings"),
                "{failure}"
            );
            assert_eq!(monitor::run_state(&client).await.unwrap(), RunState::Running);
            assert_eq!((told(&qemu, "migrate_cancel"), told(&qemu, "cont")), (attempt, 1));
            assert_eq!(told(&qemu, "migrate-set-parameters"), 0, "QEMU refuses it now");
        }
        ends.store(true, Ordering::Relaxed);
        give_back_within(&client, GiveBack::Running, &mut Vec::new(), settings(), PATIENCE)
            .await
            .unwrap();
        assert_eq!(told(&qemu, "cont"), 1);
        assert_eq!(
            (
                told(&qemu, "migrate-set-capabilities"),
                told(&qemu, "migrate-set-parameters")
            ),
            (1, 1)
        );
    }

    #[test]
    fn a_hibernation_that_ends_like_that_says_that_it_was_cancelled_and_what_is_left_to_do() {
        let (mut machine, _) = Machine::begin(Aim::Hibernate);
        machine.step(Input::PreflightPassed {
            running: true,
            live: false,
        });
        machine.step(Input::Done);
        machine.step(Input::CancelRequested);
        assert_eq!(
            machine.step(Input::Done),
            Some(Effect::RollBack(GiveBack::Running))
        );
        let stuck =
            Failure::new(Code::Operator, "not its migration settings").with_guest(GuestState::Running);
        machine.step(Input::Failed(stuck));
        assert_eq!(machine.phase(), Phase::Uncertain);
        let failure = machine.failure().unwrap();
        assert_eq!(failure.code, Code::Operator);
        for words in ["cancelled on request", "not its migration settings"] {
            assert!(failure.message.contains(words), "{failure}");
        }
    }
}
