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
    let client = client.with_deadline(TIMEOUT);
    let mut stuck = None;
    if monitor::run_state(&client).await? != RunState::Postmigrate {
        client.execute(&command::migrate_cancel {}).await?;
        let _drained = stream::drain(connections);
        match wait_for_migration_end(&client, CANCEL_PATIENCE).await {
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
