//! What keeps a guest from being hibernated, in plain words.

use std::path::Path;

use dormouse_qmp::view::block::{BlockExportInfo, BlockInfo};
use dormouse_qmp::view::job::JobInfo;
use dormouse_qmp::view::migration::{MigrationInfo, MigrationStatus};
use dormouse_qmp::{Client, command};

use super::command_line::CommandLine;
use super::shape::{self, Shape};
use crate::error::Failure;

/// Everything that stands in the way, whatever the image's target. `shape`: what the machine was made of at its start,
/// where somebody noted it; `directory`: QEMU's.
pub async fn all(
    client: &Client,
    shape: Option<&Shape>,
    line: &CommandLine,
    directory: &Path,
) -> Result<Vec<String>, Failure> {
    let mut blockers = migration_blockers(client).await?;
    blockers.extend(job_blockers(client).await?);
    blockers.extend(export_blockers(client).await?);
    blockers.extend(inactive_blockers(client).await?);
    blockers.extend(shape_blockers(client, shape, line, directory).await?);
    blockers.extend(memory_device_blockers(client).await?);
    if let Some(option) = line.inherited_descriptor() {
        blockers.push(format!(
            "{option:?} uses a file descriptor that a wake does not have"
        ));
    }
    if line.has_temporary_disks() {
        blockers
            .push("disks are in snapshot mode: what the guest wrote would be gone when QEMU ends".to_owned());
    }
    Ok(blockers)
}

async fn migration_blockers(client: &Client) -> Result<Vec<String>, Failure> {
    let migration: MigrationInfo = client.query(&command::query_migrate {}).await?;
    let is_in_progress = migration.is_in_progress();
    let mut blockers = migration.blocked_reasons.unwrap_or_default();
    if is_in_progress {
        let what = match migration.status {
            Some(MigrationStatus::PostcopyActive) => {
                "its memory is still coming, or going, while a guest runs (post-copy); try again when that is done"
            }
            Some(MigrationStatus::PostcopyPaused) => {
                "its memory has stopped coming while it runs (post-copy); where it comes from an image, `dormouse recover` goes on"
            }
            _ => "a migration is under way",
        };
        blockers.push(what.to_owned());
    }
    Ok(blockers)
}

/// Saving while a job runs makes QEMU 7.2 abort, and on any version leaves half a copy behind.
async fn job_blockers(client: &Client) -> Result<Vec<String>, Failure> {
    let jobs: Vec<JobInfo> = client.query(&command::query_jobs {}).await?;
    Ok(jobs
        .into_iter()
        .map(|job| {
            let JobInfo { id, job_type, status, .. } = job;
            format!("{job_type} job {id} is {status}; wait for its end, or end it with QMP's job-cancel and job-dismiss")
        })
        .collect())
}

/// A client that writes through an export could write after the disks' witness was taken.
async fn export_blockers(client: &Client) -> Result<Vec<String>, Failure> {
    let exports: Vec<BlockExportInfo> = client.query(&command::query_block_exports {}).await?;
    Ok(exports
        .into_iter()
        .map(|export| {
            let BlockExportInfo { id, node_name, .. } = export;
            format!("block export {id} of node {node_name} is open; close it with QMP's block-export-del")
        })
        .collect())
}

/// A disk that QEMU has given over to the other side of a migration: its guest may write there. Told since QEMU 10.0.
async fn inactive_blockers(client: &Client) -> Result<Vec<String>, Failure> {
    let drives: Vec<BlockInfo> = client.query(&command::query_block {}).await?;
    let nodes = drives.into_iter().filter_map(|drive| drive.inserted);
    Ok(nodes
        .filter(|node| node.active == Some(false))
        .map(|node| {
            let name = node.node_name.unwrap_or(node.file);
            format!("block node {name} is inactive; take it back with QMP's blockdev-set-active, or let the guest run")
        })
        .collect())
}

/// What the machine is made of now, against what the wake's command line will make.
async fn shape_blockers(
    client: &Client,
    shape: Option<&Shape>,
    line: &CommandLine,
    directory: &Path,
) -> Result<Vec<String>, Failure> {
    match shape {
        Some(shape) => Ok(shape.changes(&Shape::of(client, directory).await?)),
        None => shape::visible_changes(client, line).await,
    }
}

/// Memory whose content is more than the guest's RAM: it belongs to a file, and must not be moved into an image.
async fn memory_device_blockers(client: &Client) -> Result<Vec<String>, Failure> {
    let devices = client.execute(&command::query_memory_devices {}).await?;
    let kinds = devices
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|device| device["type"].as_str());
    Ok(kinds
        .filter(|kind| *kind != "dimm")
        .map(|kind| format!("the guest has a memory device of type {kind}, which cannot be saved yet"))
        .collect())
}
