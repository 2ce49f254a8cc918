//! How a hibernation ends for QEMU: it is told to quit, or it gets its guest back. Done by who began it, or by who
//! recovers what was interrupted.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use dormouse_qmp::view::machine::RunState;
use dormouse_qmp::{Client, command};

use super::machine::GiveBack;
use super::{direct, stream};
use crate::error::{Code, Failure, GuestState, sentence};
use crate::machine::effect::blocking;
use crate::vm::monitor::{self, MigrationSettings, wait_for_migration_end, wait_for_run_state};
use crate::vm::process::ProcessEnd;

/// How long QEMU may take to do what gives a guest back. Whatever it is busy with comes first.
pub const ROLL_BACK_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// How long QEMU's process may take to end after `quit`.
const QUIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Ends QEMU, whose guest is in `image`, and waits until it is gone.
pub async fn end_qemu(client: &Client, pid: u32, image: &Path) -> Result<(), Failure> {
    let gone = ProcessEnd::of(pid);
    // The connection may end before the answer is read; it is the process that counts.
    let answer = client.execute(&command::quit {}).await;
    let image = image.display();
    let ended = blocking(move || {
        gone.wait(QUIT_TIMEOUT)
            .map_err(|error| Failure::new(Code::Operator, format!("cannot see whether it ended: {error}")))
    })
    .await
    .map_err(|failure| {
        failure.while_doing(&format!("the image {image} is complete; QEMU's process {pid}"))
    })?;
    if ended {
        return Ok(());
    }
    let answer = answer
        .err()
        .map(|error| format!(" ({})", sentence(&error)))
        .unwrap_or_default();
    Err(Failure::new(
        Code::Operator,
        format!(
            "the image {image} is complete, but QEMU's process {pid} is still there after {QUIT_TIMEOUT:?}{answer}; \
             end it without letting the guest run, or remove the image"
        ),
    )
    .with_guest(GuestState::Paused))
}

/// Gives the guest back, and migration the `settings` that were found.
///
/// Does not give up while QEMU lives: what it was told before it will do, however late, and then the guest must not
/// stay as that leaves it. Only a migration that was cancelled and has not ended after `patience` is not waited for: QEMU
/// can get stuck in one whose `connections` broke. The guest is given back all the same; the settings cannot be.
pub async fn give_guest_back(
    client: &Client,
    give_back: GiveBack,
    connections: &mut Vec<UnixStream>,
    settings: Option<MigrationSettings>,
    patience: Duration,
) -> Result<(), Failure> {
    let client = client.with_deadline(ROLL_BACK_TIMEOUT);
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
        (GiveBack::Running, RunState::Running) | (GiveBack::AsItIs, _) => {}
        (GiveBack::Running, _) => {
            client.execute(&command::cont {}).await?;
            wait_for_run_state(&client, "running", |state| *state == RunState::Running).await?;
        }
        (GiveBack::Paused, RunState::Postmigrate) => {
            // QEMU leaves this state, and takes its disks back, only by running. Both commands are in its queue
            // before it looks at the first, so that the guest runs for an instant.
            let (cont, stop) = tokio::join!(
                client.execute(&command::cont {}),
                client.execute(&command::stop {})
            );
            cont.and(stop)?;
            wait_for_run_state(&client, "paused", |state| *state == RunState::Paused).await?;
        }
        (GiveBack::Paused, _) => {}
    }
    // A descriptor that QEMU did not use stays open in it for ever. Once used it is gone, and this fails.
    let _ = client
        .execute(&command::closefd {
            fdname: direct::STREAM_FD.to_owned(),
        })
        .await;
    match (stuck, settings) {
        (Some(stuck), _) => Err(Failure {
            code: Code::Operator,
            ..stuck.while_doing("the guest is given back, but not its migration settings")
        }),
        (None, Some(settings)) => Ok(settings.put_back(&client).await?),
        (None, None) => Ok(()),
    }
}
