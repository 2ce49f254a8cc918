//! The direct engine: QEMU sends its devices, and RAM is read from the memory itself.
//!
//! Whichever way QEMU was asked to leave RAM out, what it did is looked at: every block that was planned is in its
//! list, in its length, and no page came of one that we read ourselves. Small blocks whose memory we do not have (ROMs,
//! firmware tables, video memory) come as pages; the writer refuses one that came with holes.

use std::fs::File;
use std::time::Duration;

use dormouse_qmp::view::machine::RunState;
use dormouse_qmp::view::migration::MigrationStatus;
use dormouse_qmp::{Client, CommandError, command};
use dormouse_storage::{ByteCount, GuestMemory, ImageWriter, MemoryWritten, Recording, Run};
use serde_json::json;
use tokio::io::AsyncReadExt;
use tokio::net::UnixStream;

use super::plan::Plan;
use crate::error::{Code, Failure, sentence};
use crate::vm::cpr::{self, HandedOver};
use crate::vm::engine::{CPR_MODE, Engine};
use crate::vm::monitor::{self, MigrationSettings, not_saved, wait_for_migration_end, wait_for_run_state};

/// The name under which QEMU gets its end of the socket for the device state.
pub const STREAM_FD: &str = "dormouse-device-state";

/// How long QEMU may take from the end of the stream to `completed`.
const MIGRATION_END_TIMEOUT: Duration = Duration::from_secs(60);

/// Memory that we read ourselves.
#[derive(Debug)]
pub struct Source {
    /// The RAM block's name.
    pub name: String,
    /// Its length; the file may be longer.
    pub length: ByteCount,
    /// The file that it is in.
    pub file: File,
}

/// What migration settings the engine needs, and which of them differ.
pub async fn find_settings(client: &Client, plan: &Plan) -> Result<MigrationSettings, CommandError> {
    match plan.choice.engine {
        // RAM that is handed over is left out by the mode.
        Engine::DirectCpr => MigrationSettings::find(client, &["events"], &[("mode", json!(CPR_MODE))]).await,
        Engine::Direct | Engine::Stream => {
            MigrationSettings::find(client, &["events", "x-ignore-shared"], &[]).await
        }
    }
}

/// Has QEMU migrate its devices to us; returns what it hands over, and the stream that they come in.
pub async fn connect(client: &Client, plan: &Plan) -> Result<(HandedOver, UnixStream), Failure> {
    match plan.choice.engine {
        Engine::DirectCpr => cpr::take_over(client, plan.pid).await,
        Engine::Direct | Engine::Stream => Ok((HandedOver::new(), leave_out(client).await?)),
    }
}

/// Reads the devices, and finds the memory. Returns once QEMU stands still for good.
pub async fn record(
    client: &Client,
    plan: &Plan,
    (handed_over, mut stream): (HandedOver, UnixStream),
) -> Result<(Recording, Vec<Source>), Failure> {
    let bytes = read_to_bound(&mut stream, plan.stream_bound()).await?;
    let migration = wait_for_migration_end(client, MIGRATION_END_TIMEOUT).await?;
    if migration.status != Some(MigrationStatus::Completed) {
        return Err(not_saved(migration));
    }
    wait_for_run_state(client, "postmigrate", |state| *state == RunState::Postmigrate).await?;
    let recording = Recording::parse(&bytes).map_err(|error| {
        Failure::new(
            Code::Internal,
            format!("cannot read QEMU's device state: {}", sentence(&error)),
        )
    })?;
    let sources = sources(plan, handed_over)?;
    check_recording(&recording, plan, &sources)?;
    Ok((recording, sources))
}

/// Writes the memory that we read ourselves, block by block.
pub fn write_memory(
    writer: &mut ImageWriter,
    sources: Vec<Source>,
    run: &Run<'_>,
) -> Result<MemoryWritten, Failure> {
    let mut written = MemoryWritten::default();
    for Source { name, length, file } in sources {
        let memory = GuestMemory::map(file, length).map_err(|error| {
            Failure::new(
                Code::StorageIo,
                format!("cannot map RAM block {name}: {}", sentence(&error)),
            )
        })?;
        written += writer.write_memory(&name, &memory, run)?;
    }
    Ok(written)
}

/// Has QEMU migrate into a socket pair, of which we hold the other end, without the RAM that is shared.
async fn leave_out(client: &Client) -> Result<UnixStream, Failure> {
    let stream = monitor::pass_stream(client, STREAM_FD).await?;
    client
        .execute(&command::migrate {
            uri: Some(format!("fd:{STREAM_FD}")),
            channels: None,
            detach: None,
            resume: None,
        })
        .await?;
    Ok(stream)
}

/// The memory of each block that was handed over, or that the survey found a file for.
fn sources(plan: &Plan, mut handed_over: HandedOver) -> Result<Vec<Source>, Failure> {
    let mut sources = Vec::new();
    for block in plan.layout.blocks() {
        let backend = plan.memory.backend(&block.name);
        let file = match (handed_over.remove(&block.name), backend) {
            (Some(file), _) => file,
            (None, None) => continue,
            (None, Some(backend)) => match &backend.reach {
                Ok(file) => file.try_clone().map_err(|error| {
                    Failure::new(
                        Code::Internal,
                        format!("cannot hold RAM block {}: {error}", block.name),
                    )
                })?,
                Err(why) => {
                    return Err(Failure::new(
                        Code::Refused,
                        format!("QEMU did not hand over RAM block {}, and {why}", block.name),
                    ));
                }
            },
        };
        sources.push(Source {
            name: block.name.clone(),
            length: block.length,
            file,
        });
    }
    Ok(sources)
}

/// Reads until the end. More than `bound` means that QEMU streams RAM that we meant to read ourselves.
async fn read_to_bound(stream: &mut UnixStream, bound: ByteCount) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    stream
        .take(bound.0 + 1)
        .read_to_end(&mut bytes)
        .await
        .map_err(|error| {
            Failure::new(
                Code::Unreachable,
                format!("QEMU's device state broke off: {error}"),
            )
        })?;
    if bytes.len() as u64 > bound.0 {
        return Err(Failure::new(
            Code::Refused,
            format!("QEMU sends more than {bound} of device state; it does not leave out the shared RAM"),
        ));
    }
    Ok(bytes)
}

/// The stream must name the blocks that were planned and carry no page of those that we read ourselves.
fn check_recording(recording: &Recording, plan: &Plan, sources: &[Source]) -> Result<(), Failure> {
    plan.check_blocks(recording)?;
    let blocks = recording.blocks();
    let streamed = recording
        .pages()
        .map(|page| &blocks[page.block].name)
        .find(|name| sources.iter().any(|source| source.name == **name));
    match streamed {
        None => Ok(()),
        Some(name) => Err(Failure::new(
            Code::Refused,
            format!("QEMU streams RAM block {name} although it is to be read from its memory"),
        )),
    }
}
