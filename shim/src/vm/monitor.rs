//! What Dormouse says to a running QEMU more than once: run states, and migration settings that are put back.

use std::io;
use std::time::Duration;

use dormouse_qmp::command;
use dormouse_qmp::view::machine::{RunState, StatusInfo};
use dormouse_qmp::view::migration::MigrationInfo;
use dormouse_qmp::{Client, CommandError};
use serde_json::{Map, Value, json};
use tokio::net::UnixStream;
use tokio::time::Instant;

use crate::error::{Code, Failure, GuestState};

/// How often a state is asked for while it is waited for. QEMU answers in well under a millisecond; events would save
/// the polls and not the need to ask, since they may be missed.
const POLL: Duration = Duration::from_millis(1);

/// How long QEMU may take from one run state to the next. `stop` drains the disks, which may be slow.
pub const RUN_STATE_TIMEOUT: Duration = Duration::from_secs(60);

/// The run state now.
pub async fn run_state(client: &Client) -> Result<RunState, CommandError> {
    let status: StatusInfo = client.query(&command::query_status {}).await?;
    Ok(status.status)
}

/// What the guest does, for a failure's report; never fails itself.
pub async fn guest_state(client: &Client) -> GuestState {
    match run_state(client).await {
        Ok(RunState::Running) => GuestState::Running,
        Ok(_) => GuestState::Paused,
        Err(_) => GuestState::Unknown,
    }
}

/// Waits until the run state is one that `wanted` takes.
pub async fn wait_for_run_state(
    client: &Client,
    what: &str,
    wanted: impl Fn(&RunState) -> bool,
) -> Result<RunState, Failure> {
    let deadline = Instant::now() + RUN_STATE_TIMEOUT;
    loop {
        let state = run_state(client).await?;
        if wanted(&state) {
            return Ok(state);
        }
        if Instant::now() > deadline {
            return Err(Failure::new(
                Code::TimedOut,
                format!("QEMU is still {state} after {RUN_STATE_TIMEOUT:?}, waiting for it to be {what}"),
            ));
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Waits until the migration under way has ended, whichever way.
pub async fn wait_for_migration_end(client: &Client, limit: Duration) -> Result<MigrationInfo, Failure> {
    let deadline = Instant::now() + limit;
    loop {
        let migration: MigrationInfo = client.query(&command::query_migrate {}).await?;
        if !migration.is_in_progress() {
            return Ok(migration);
        }
        if Instant::now() > deadline {
            return Err(Failure::new(
                Code::TimedOut,
                format!("QEMU's migration has not ended after {limit:?}"),
            ));
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Hands QEMU one end of a new socket pair under `name` and returns the other.
pub async fn pass_stream(client: &Client, name: &str) -> Result<UnixStream, Failure> {
    let local =
        |error: io::Error| Failure::new(Code::Internal, format!("cannot make a socket pair: {error}"));
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().map_err(local)?;
    client
        .execute_with_fds(
            &command::getfd {
                fdname: name.to_owned(),
            },
            vec![theirs.into()],
        )
        .await?;
    ours.set_nonblocking(true).map_err(local)?;
    UnixStream::from_std(ours).map_err(local)
}

/// Migration capabilities and parameters as they were found. They outlive every migration, so whoever changes them
/// has to put them back.
#[derive(Debug)]
pub struct MigrationSettings {
    capabilities: Vec<Value>,
    parameters: Map<String, Value>,
}

impl MigrationSettings {
    /// Sets what a save needs: exactly the capabilities in `wanted`, no bandwidth limit, no TLS, the normal mode.
    pub async fn apply(client: &Client, wanted: &[&str]) -> Result<Self, CommandError> {
        let mut saved = Self {
            capabilities: Vec::new(),
            parameters: Map::new(),
        };
        // The names go back to QEMU as they came, so they are not read into types that may not know them.
        let current = client.execute(&command::query_migrate_capabilities {}).await?;
        let mut changes = Vec::new();
        for capability in current.as_array().into_iter().flatten() {
            let name = capability["capability"].as_str().unwrap_or_default();
            let (is_on, shall_be_on) = (capability["state"] == json!(true), wanted.contains(&name));
            if is_on != shall_be_on {
                saved.capabilities.push(capability.clone());
                changes.push(json!({"capability": name, "state": shall_be_on}));
            }
        }
        let current = client.execute(&command::query_migrate_parameters {}).await?;
        let mut parameters = Map::new();
        for (name, value) in [
            ("max-bandwidth", json!(0)),
            ("mode", json!("normal")),
            ("tls-creds", json!("")),
        ] {
            match current.get(name) {
                Some(found) if *found != value => {
                    saved.parameters.insert(name.to_owned(), found.clone());
                    parameters.insert(name.to_owned(), value);
                }
                _ => {}
            }
        }
        set_capabilities(client, changes).await?;
        if let Err(error) = set_parameters(client, parameters).await {
            saved.put_back(client).await?;
            return Err(error);
        }
        Ok(saved)
    }

    /// Puts back what was found. No migration may be under way.
    pub async fn put_back(self, client: &Client) -> Result<(), CommandError> {
        set_capabilities(client, self.capabilities).await?;
        set_parameters(client, self.parameters).await
    }
}

async fn set_capabilities(client: &Client, changes: Vec<Value>) -> Result<(), CommandError> {
    if !changes.is_empty() {
        client
            .execute_raw("migrate-set-capabilities", json!({"capabilities": changes}))
            .await?;
    }
    Ok(())
}

async fn set_parameters(client: &Client, changes: Map<String, Value>) -> Result<(), CommandError> {
    if !changes.is_empty() {
        client
            .execute_raw("migrate-set-parameters", Value::Object(changes))
            .await?;
    }
    Ok(())
}
