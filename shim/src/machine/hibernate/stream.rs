//! The stream engine: all RAM comes from QEMU through sockets, over one stream and as many channels beside it as are
//! wished (multifd), and goes into the image chunk by chunk as it comes.
//!
//! ```text
//!  connect   migrate           ──► QEMU connects ──► connections, nothing read yet
//!  (the image's writer reads them to their end, on threads of its own)
//!  settle    QEMU says `completed` and stands still for good, or says why not
//! ```
//!
//! The guest is stopped before, so that each page comes once. A short downtime limit keeps QEMU's monitor answering:
//! what is sent within it is sent with QEMU's lock held. A cancel does not wait for whoever reads the connections: what QEMU
//! still has to send is taken by somebody else.

use std::os::unix::net::UnixStream as StdStream;
use std::time::Duration;

use dormouse_qmp::view::machine::RunState;
use dormouse_qmp::view::migration::{MigrationInfo, MigrationStatus};
use dormouse_qmp::{Client, CommandError, command};
use dormouse_storage::{ImageWriter, Incoming, MemoryWritten, Recording, Run};
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::task::JoinSet;

use super::direct::STREAM_FD;
use super::plan::Plan;
use crate::error::{Code, Failure, sentence};
use crate::vm::memory::DEVICE_STATE_BOUND;
use crate::vm::migration_socket::MigrationSocket;
use crate::vm::monitor::{
    self, MigrationSettings, not_saved, unless_migration_ends, wait_for_migration_end, wait_for_run_state,
};

/// How long QEMU may take from the end of the stream to `completed`.
const MIGRATION_END_TIMEOUT: Duration = Duration::from_secs(60);

/// What QEMU may send with its lock held, as time.
const DOWNTIME_LIMIT_MS: u64 = 20;

/// What migration settings a stream with this many channels needs, and which of them differ.
pub async fn find_settings(client: &Client, channels: u8) -> Result<MigrationSettings, CommandError> {
    let mut parameters = vec![("downtime-limit", json!(DOWNTIME_LIMIT_MS))];
    if channels == 0 {
        return MigrationSettings::find(client, &["events"], &parameters).await;
    }
    parameters.extend([
        ("multifd-channels", json!(channels)),
        ("multifd-compression", json!("none")),
    ]);
    MigrationSettings::find(client, &["events", "multifd"], &parameters).await
}

/// Begins the migration; returns its connections.
pub async fn connect(client: &Client, plan: &Plan, channels: u8) -> Result<Vec<StdStream>, Failure> {
    let connections = match channels {
        0 => vec![one(client).await?],
        channels => several(client, plan.pid, channels).await?,
    };
    connections
        .into_iter()
        .map(|stream| {
            stream
                .into_std()
                .map_err(|error| Failure::new(Code::Internal, format!("cannot hold a connection: {error}")))
        })
        .collect()
}

/// Begins the migration over one plain stream; returns its connection.
pub async fn connect_plain(client: &Client) -> Result<StdStream, Failure> {
    one(client)
        .await?
        .into_std()
        .map_err(|error| Failure::new(Code::Internal, format!("cannot hold a connection: {error}")))
}

/// Writes all that comes over the connections.
pub fn write_memory(
    writer: &mut ImageWriter,
    connections: Vec<StdStream>,
    run: &Run<'_>,
) -> Result<(Recording, MemoryWritten), Failure> {
    let incoming =
        Incoming::of(connections).map_err(|error| Failure::new(Code::Internal, sentence(&error)))?;
    Ok(writer.write_incoming(incoming, DEVICE_STATE_BOUND, run)?)
}

/// Waits until QEMU is done with a migration that was read to its end.
pub async fn settle(client: &Client) -> Result<(), Failure> {
    let migration = wait_for_migration_end(client, MIGRATION_END_TIMEOUT).await?;
    if migration.status != Some(MigrationStatus::Completed) {
        return Err(not_saved(migration));
    }
    wait_for_run_state(client, "postmigrate", |state| *state == RunState::Postmigrate).await?;
    Ok(())
}

/// Takes what a QEMU that was told to cancel still has to send, for as long as the result lives.
///
/// A QEMU that is being cancelled waits for its channels, and a channel waits for its reader, who may wait for storage.
/// Closing the connections instead would be quicker, but a channel that breaks while QEMU waits for all of them leaves
/// QEMU 7.2 and 10.0 waiting for ever.
pub fn drain(connections: &mut Vec<StdStream>) -> JoinSet<()> {
    let mut drained = JoinSet::new();
    for connection in connections.drain(..) {
        // The readers were told to end, and take a socket that does not block for one that has nothing.
        let connection = connection
            .set_nonblocking(true)
            .and_then(|()| UnixStream::from_std(connection));
        if let Ok(mut connection) = connection {
            drained.spawn(async move {
                // An error ends it as well as the end.
                let _ = tokio::io::copy(&mut connection, &mut tokio::io::sink()).await;
            });
        }
    }
    drained
}

/// Why a migration broke off: what QEMU says of it, where it does, else what was seen here.
pub async fn reason(client: &Client, seen: Failure) -> Failure {
    if seen.code == Code::Cancelled {
        return seen;
    }
    match client.query::<_, MigrationInfo>(&command::query_migrate {}).await {
        Ok(migration) if migration.status == Some(MigrationStatus::Failed) => Failure {
            code: seen.code,
            ..not_saved(migration).while_doing(&seen.message)
        },
        Ok(_) => seen,
        Err(error) => Failure::from(error),
    }
}

/// One plain stream, into a socket pair.
async fn one(client: &Client) -> Result<UnixStream, Failure> {
    let stream = monitor::pass_stream(client, STREAM_FD).await?;
    migrate(client, json!({"uri": format!("fd:{STREAM_FD}")})).await?;
    Ok(stream)
}

/// The main stream and the channels, in whatever order QEMU connects them.
async fn several(client: &Client, pid: u32, channels: u8) -> Result<Vec<UnixStream>, Failure> {
    let socket = MigrationSocket::listen(client, pid).await?;
    migrate(client, socket.arguments()).await?;
    let connect = async {
        let mut connections = Vec::new();
        for _ in 0..=channels {
            connections.push(socket.accept().await?);
        }
        Ok(connections)
    };
    unless_migration_ends(client, connect).await
}

async fn migrate(client: &Client, arguments: Value) -> Result<(), Failure> {
    client.execute_raw("migrate", arguments).await?;
    Ok(())
}
