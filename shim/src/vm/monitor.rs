//! What Dormouse says to a running QEMU more than once: run states, and migration settings that are put back.

use std::io;
use std::time::Duration;

use dormouse_qmp::command;
use dormouse_qmp::view::machine::{RunState, StatusInfo};
use dormouse_qmp::view::migration::MigrationInfo;
use dormouse_qmp::{Client, CommandError};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tokio::net::UnixStream;
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::error::{Code, Failure};

/// How often a state is asked for while it is waited for. QEMU answers in well under a millisecond; events would save
/// the polls and not the need to ask, since they may be missed.
const POLL: Duration = Duration::from_millis(1);

/// How long QEMU may take from one run state to the next. `stop` drains the disks, which may be slow.
const RUN_STATE_TIMEOUT: Duration = Duration::from_secs(60);

/// The run state now.
pub async fn run_state(client: &Client) -> Result<RunState, CommandError> {
    let status: StatusInfo = client.query(&command::query_status {}).await?;
    Ok(status.status)
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

/// Waits until the migration under way, if there is one, has ended, whichever way.
pub async fn wait_for_migration_end(client: &Client, limit: Duration) -> Result<MigrationInfo, Failure> {
    wait_for_migration(client, limit, |migration| !migration.is_in_progress()).await
}

/// Waits until an incoming migration has ended, whichever way. It may not have begun: QEMU says so only once it looks
/// at the stream.
pub async fn wait_for_load_end(client: &Client, limit: Duration) -> Result<MigrationInfo, Failure> {
    wait_for_migration(client, limit, MigrationInfo::is_terminal).await
}

/// Does `work`, which QEMU takes part in once its migration goes on; a migration that has ended instead is why it never
/// will. The migration has to have begun.
pub async fn unless_migration_ends<T>(
    client: &Client,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    let mut work = std::pin::pin!(work);
    loop {
        tokio::select! {
            biased;
            done = &mut work => return done,
            () = tokio::time::sleep(POLL) => {}
        }
        let migration: MigrationInfo = client.query(&command::query_migrate {}).await?;
        if migration.is_terminal() {
            return Err(not_saved(migration));
        }
    }
}

/// Why a migration that ended without success did.
pub fn not_saved(migration: MigrationInfo) -> Failure {
    let why = migration
        .error_desc
        .unwrap_or_else(|| "it gives no reason".to_owned());
    Failure::new(Code::Refused, format!("QEMU could not save the guest: {why}"))
}

async fn wait_for_migration(
    client: &Client,
    limit: Duration,
    is_over: impl Fn(&MigrationInfo) -> bool,
) -> Result<MigrationInfo, Failure> {
    let deadline = Instant::now() + limit;
    loop {
        let migration: MigrationInfo = client.query(&command::query_migrate {}).await?;
        if is_over(&migration) {
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

/// Held as long as a migration mode is set that was only set for a question.
static MODE_IN_QUESTION: Mutex<()> = Mutex::const_new(());

/// Waits until no migration mode is set that was only set for a question. Whoever gave up a question and may end has to:
/// what puts the mode back would end as well.
pub async fn mode_put_back() {
    drop(MODE_IN_QUESTION.lock().await);
}

/// What would stand in the way of a migration in another mode than the one that is set. Sets it for the question and puts
/// back what was found, also when nobody waits for the answer any more.
pub async fn blocked_reasons_in(client: &Client, mode: &'static str) -> Result<Vec<String>, Failure> {
    let client = client.clone();
    let in_question = MODE_IN_QUESTION.lock().await;
    let asked = tokio::spawn(async move {
        let _in_question = in_question;
        let current = client.execute(&command::query_migrate_parameters {}).await?;
        let set = async |mode: &Value| {
            let change = json!({"mode": mode});
            client.execute_raw("migrate-set-parameters", change).await
        };
        set(&json!(mode)).await?;
        let migration = client.query::<_, MigrationInfo>(&command::query_migrate {}).await;
        set(&current["mode"]).await?;
        Ok(migration?.blocked_reasons.unwrap_or_default())
    });
    asked.await.unwrap_or_else(|error| {
        Err(Failure::new(
            Code::Internal,
            format!("a question ended in panic: {error}"),
        ))
    })
}

/// Migration capabilities and parameters as they were found where a save needs others. They outlive every migration,
/// so whoever changes them has to put them back.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MigrationSettings {
    capabilities: Vec<Value>,
    parameters: Map<String, Value>,
    needed: Map<String, Value>,
}

impl MigrationSettings {
    /// Finds what differs from what a save needs: exactly the capabilities in `wanted`, no bandwidth limit, no TLS, the
    /// normal mode, unless `parameters` say otherwise. Changes nothing.
    pub async fn find(
        client: &Client,
        wanted: &[&str],
        parameters: &[(&str, Value)],
    ) -> Result<Self, CommandError> {
        let needed = needed_parameters(parameters);
        // The names go back to QEMU as they came, so they are not read into types that may not know them.
        let capabilities = client.execute(&command::query_migrate_capabilities {}).await?;
        let differs = |capability: &&Value| {
            let name = capability["capability"].as_str().unwrap_or_default();
            (capability["state"] == json!(true)) != wanted.contains(&name)
        };
        let current = client.execute(&command::query_migrate_parameters {}).await?;
        let parameters = needed
            .iter()
            .filter_map(|(name, needed)| {
                let found = current.get(name)?;
                (found != needed).then(|| (name.clone(), found.clone()))
            })
            .collect();
        Ok(Self {
            capabilities: capabilities
                .as_array()
                .into_iter()
                .flatten()
                .filter(differs)
                .cloned()
                .collect(),
            parameters,
            needed,
        })
    }

    /// Sets what a save needs.
    pub async fn apply(&self, client: &Client) -> Result<(), CommandError> {
        let flipped = self.capabilities.iter().map(|found| {
            let is_on = found["state"] == json!(true);
            json!({"capability": found["capability"], "state": !is_on})
        });
        set_capabilities(client, flipped.collect()).await?;
        let needed = self
            .needed
            .iter()
            .filter(|(name, _)| self.parameters.contains_key(*name))
            .map(|(name, value)| (name.clone(), value.clone()));
        set_parameters(client, needed.collect()).await
    }

    /// Whether QEMU takes them: sets them and puts back what was found, also when nobody waits for the answer any more.
    pub async fn try_on(self, client: &Client) -> Result<(), CommandError> {
        let client = client.clone();
        let tried = tokio::spawn(async move {
            let applied = self.apply(&client).await;
            self.put_back(&client).await.and(applied)
        });
        // It does not panic, and what it would have found out shows later too.
        tried.await.unwrap_or(Ok(()))
    }

    /// Puts back what was found, whether it was changed or not. No migration may be under way.
    pub async fn put_back(self, client: &Client) -> Result<(), CommandError> {
        let capabilities = set_capabilities(client, self.capabilities).await;
        let parameters = set_parameters(client, self.parameters).await;
        capabilities.and(parameters)
    }
}

fn needed_parameters(more: &[(&str, Value)]) -> Map<String, Value> {
    let always = [
        ("max-bandwidth", json!(0)),
        ("mode", json!("normal")),
        ("tls-creds", json!("")),
    ];
    always
        .iter()
        .chain(more)
        .map(|(name, value)| ((*name).to_owned(), value.clone()))
        .collect()
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

#[cfg(test)]
mod tests {
    use dormouse_qmp::fake::{Answer, FakeQemu, Script};

    use super::*;

    #[test]
    fn a_mode_that_was_set_for_a_question_is_put_back_though_its_asker_gave_up_and_ends() {
        let runtime = || {
            let mut builder = tokio::runtime::Builder::new_current_thread();
            builder.enable_all().build().unwrap()
        };
        // The fake lives longer than whoever asks.
        let other = runtime();
        let script = Script::new()
            .on(
                "query-migrate-parameters",
                Answer::returns(json!({"mode": "normal"})),
            )
            .on("migrate-set-parameters", Answer::returns(json!({})))
            .on(
                "query-migrate",
                Answer::returns(json!({})).after(Duration::from_millis(100)),
            );
        let qemu = {
            let _inside = other.enter();
            FakeQemu::start(script).unwrap()
        };
        let path = qemu.path().to_owned();
        let asking = std::thread::spawn(move || {
            runtime().block_on(async {
                let client = Client::connect(&path, Default::default()).await.unwrap();
                let question = blocked_reasons_in(&client, "cpr-transfer");
                let given_up = tokio::time::timeout(Duration::from_millis(30), question).await;
                assert!(given_up.is_err());
                mode_put_back().await;
            });
        });
        let modes = other.block_on(async {
            while !asking.is_finished() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            let received = qemu.received().into_iter();
            let set = received.filter(|command| command.name == "migrate-set-parameters");
            set.map(|command| command.arguments["mode"].clone())
                .collect::<Vec<_>>()
        });
        asking.join().unwrap();
        assert_eq!(modes, [json!("cpr-transfer"), json!("normal")]);
    }
}
