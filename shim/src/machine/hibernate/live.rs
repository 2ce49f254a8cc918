//! A snapshot of a guest that runs meanwhile: QEMU sends its memory in passes, each of what the guest wrote to during the one
//! before, until what is left takes no longer than the guest may be paused.
//!
//! ```text
//!  migrate ──► pass, pass, … the guest runs ──┬─ little is left: QEMU pauses the guest (converged) ─┬─► the rest ──► completed
//!                                             └─ too many passes, or too long: we pause it ─────────┘
//! ```
//!
//! It never fails for not converging: a guest that writes faster than it can be saved is paused, and the rest is saved while
//! it stands still, as without `--live`. Its vCPUs are not slowed down.

use std::time::Duration;

use dormouse_qmp::capabilities::Capabilities;
use dormouse_qmp::view::machine::RunState;
use dormouse_qmp::view::migration::MigrationInfo;
use dormouse_qmp::{Client, CommandError, Events, Heard, command};
use dormouse_storage::{ByteCount, Progress};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use crate::error::{Code, Failure};
use crate::vm::monitor::{self, MigrationSettings};

/// How often QEMU is asked for its passes. Each takes a fraction of a second at least.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// How long `stop` may take; see the pause of other saves.
const STOP_TIMEOUT: Duration = Duration::from_secs(600);

/// How long the guest may be paused, and when it is paused in any case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LiveLimits {
    /// The pause to aim at: QEMU pauses the guest when it expects to send the rest within that.
    pub max_pause: Duration,
    /// Passes over the guest's memory while it runs.
    pub max_passes: u64,
    /// How long the guest runs meanwhile.
    pub max_time: Duration,
}

impl Default for LiveLimits {
    /// As long a pause as QEMU takes by itself, and passes until most guests that converge have.
    fn default() -> Self {
        Self {
            max_pause: Duration::from_millis(300),
            max_passes: 10,
            max_time: Duration::from_secs(300),
        }
    }
}

/// How it went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Passes {
    /// How often QEMU went over the guest's memory, the last time included.
    pub passes: u64,
    /// Whether QEMU paused the guest because little was left; else it was paused because a limit was reached.
    pub converged: bool,
}

/// What migration settings it needs, and which of them differ.
pub async fn find_settings(client: &Client, limits: LiveLimits) -> Result<MigrationSettings, CommandError> {
    let max_pause_ms = u64::try_from(limits.max_pause.as_millis()).unwrap_or(u64::MAX);
    MigrationSettings::find(client, &["events"], &[("downtime-limit", json!(max_pause_ms))]).await
}

/// Refuses a QEMU that does not know all that its guest wrote.
///
/// Before 9.0 QEMU takes note of what an emulated CPU (TCG) writes only until it goes over its notes: what was written to a
/// page after that is sent or not, by luck (QEMU's 9.0 brings its TLB up to date then). Seen on 7.2.22: the page that the
/// guest wrote to all the time was sent once in five passes. KVM takes these notes itself.
pub async fn check_dirty_tracking(client: &Client) -> Result<(), Failure> {
    let kvm = client.execute_raw("query-kvm", json!({})).await?;
    // What else came with that release.
    let is_new = Capabilities::of(client)
        .await?
        .has_migration_capability("mapped-ram");
    if is_new || kvm["enabled"] == json!(true) {
        return Ok(());
    }
    Err(Failure::new(
        Code::Refused,
        "this QEMU emulates the guest's CPU, and before QEMU 9.0 it then loses track of what the guest writes while it is saved: \
         leave out --live",
    ))
}

/// Follows the passes, and pauses the guest when a limit is reached.
#[derive(Debug)]
pub struct Follower {
    client: Client,
    events: Events,
    limits: LiveLimits,
    begun: Instant,
    /// Since when the guest stands still for its save.
    pub paused_at: Option<Instant>,
    /// Whether a limit was reached.
    is_forced: bool,
    /// Whether somebody else paused the guest meanwhile.
    pub paused_by_another: bool,
}

impl Follower {
    /// Follows a migration that is about to begin.
    pub fn of(client: &Client, limits: LiveLimits) -> Self {
        Self {
            events: client.events(),
            client: client.clone(),
            limits,
            begun: Instant::now(),
            paused_at: None,
            is_forced: false,
            paused_by_another: false,
        }
    }

    /// Goes on following until something is new.
    pub async fn follow(&mut self, progress: &Progress) -> Result<(), Failure> {
        let deadline = self.begun + self.limits.max_time;
        let runs = self.paused_at.is_none();
        tokio::select! {
            biased;
            // Whether QEMU answers or not: it may be busy with its guest.
            () = sleep_until(deadline), if runs => self.pause().await,
            heard = self.events.next() => match heard {
                Heard::Event(event) if event.name == "STOP" => self.stopped().await,
                Heard::Event(event) if event.name == "RESUME" => {
                    self.paused_by_another = false;
                    // Somebody ran it after our pause: the limits hold again.
                    self.paused_at = None;
                    Ok(())
                }
                Heard::Event(_) | Heard::Lagged(_) => Ok(()),
                // The next question says so.
                Heard::Closed => {
                    sleep(LOOK_EVERY).await;
                    self.look(progress).await
                }
            },
            () = sleep(LOOK_EVERY) => self.look(progress).await,
        }
    }

    /// How it went, once the migration is completed.
    pub async fn conclude(&self) -> Result<Passes, Failure> {
        let migration: MigrationInfo = self.client.query(&command::query_migrate {}).await?;
        Ok(Passes {
            passes: passes(&migration),
            converged: !self.is_forced,
        })
    }

    async fn stopped(&mut self) -> Result<(), Failure> {
        if self.paused_at.is_some() {
            return Ok(());
        }
        let heard = Instant::now();
        // QEMU's own pause has a run state of its own.
        if monitor::run_state(&self.client).await? == RunState::Paused {
            self.paused_by_another = true;
        } else {
            self.paused_at = Some(heard);
        }
        Ok(())
    }

    async fn look(&mut self, progress: &Progress) -> Result<(), Failure> {
        let asked = self.client.query::<_, MigrationInfo>(&command::query_migrate {});
        let migration = match self.paused_at {
            Some(_) => asked.await?,
            None => match timeout_at(self.begun + self.limits.max_time, asked).await {
                Ok(answer) => answer?,
                // The next look pauses the guest.
                Err(_) => return Ok(()),
            },
        };
        let remaining = migration.ram.as_ref().and_then(|ram| ram.remaining_bytes);
        progress.expect(progress.done() + ByteCount(remaining.unwrap_or_default()));
        if self.paused_at.is_none() {
            // An event can be missed.
            match monitor::run_state(&self.client).await? {
                RunState::Paused => self.paused_by_another = true,
                RunState::Running => self.paused_by_another = false,
                _ => {}
            }
        }
        // A pass is counted when it begins.
        let is_beyond = passes(&migration) > self.limits.max_passes;
        if is_beyond && self.paused_at.is_none() && !migration.is_terminal() {
            return self.pause().await;
        }
        Ok(())
    }

    async fn pause(&mut self) -> Result<(), Failure> {
        self.is_forced = true;
        self.paused_at = Some(Instant::now());
        self.client
            .with_deadline(STOP_TIMEOUT)
            .execute(&command::stop {})
            .await?;
        Ok(())
    }
}

fn passes(migration: &MigrationInfo) -> u64 {
    let ram = migration.ram.as_ref();
    ram.and_then(|ram| ram.dirty_sync_count).unwrap_or_default()
}
