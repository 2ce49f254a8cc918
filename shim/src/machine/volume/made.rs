//! What becomes of the files that were made for a move that did not come to be.
//!
//! A file is removed only while its QEMU lives, every disk of the move is on its old volume, and neither a node nor a
//! descriptor of that QEMU's is on it, nor anybody's image lock. Else it is left and named: somebody may have begun to
//! use it since.

use std::fs;
use std::path::Path;

use dormouse_qmp::Client;

use super::plan::Volume;
use super::standing::Standing;
use super::{nodes, target};
use crate::error::{Code, Failure};
use crate::machine::effect::blocking;
use crate::vm::file_identity::FileIdentity;
use crate::vm::graph::Graph;
use crate::vm::process::working_directory;
use crate::vm::process_identity::ProcessIdentity;

/// Removes what was made for all disks of a move, as far as that is known to be nobody's. Returns what is left.
pub async fn remove(
    client: &Client,
    qemu: ProcessIdentity,
    volumes: &[Volume],
) -> Result<Vec<String>, Failure> {
    let graph = Graph::of(client).await?;
    if Standing::of_all(&graph, volumes)
        .iter()
        .any(|standing| *standing != Standing::Old)
    {
        return Ok(left(volumes));
    }
    let directory = working_directory(qemu.pid).unwrap_or_default();
    let in_graph: Vec<FileIdentity> = graph
        .node_names()
        .filter_map(|name| FileIdentity::at(&directory.join(&graph.node(name)?.file)))
        .collect();
    let volumes = volumes.to_vec();
    blocking(move || {
        let mut remarks = Vec::new();
        for volume in &volumes {
            let Some(identity) = still_there(volume) else {
                continue;
            };
            let path = &volume.target.path;
            match in_graph.contains(&identity) || is_in_use(qemu, path) {
                true => remarks.extend(left(std::slice::from_ref(volume))),
                false => fs::remove_file(path).map_err(|error| {
                    Failure::new(
                        Code::StorageIo,
                        format!("cannot remove {}: {error}", path.display()),
                    )
                })?,
            }
        }
        Ok(remarks)
    })
    .await
}

/// Names what was made and is there.
pub fn left(volumes: &[Volume]) -> Vec<String> {
    let made = volumes.iter().filter(|volume| still_there(volume).is_some());
    made.map(|volume| {
        format!(
            "{} was made for {} and is left there; remove it if nobody uses it",
            volume.target.path.display(),
            volume.label
        )
    })
    .collect()
}

/// The file that was made for this disk, unless somebody has put another in its place.
fn still_there(volume: &Volume) -> Option<FileIdentity> {
    volume
        .made
        .filter(|made| FileIdentity::at(&volume.target.path) == Some(*made))
}

fn is_in_use(qemu: ProcessIdentity, path: &Path) -> bool {
    let is_locked = fs::metadata(path).is_ok_and(|metadata| target::lock_holder(&metadata).is_some());
    // Where its descriptors cannot be seen, it may have it.
    is_locked || nodes::still_open(Some(qemu.pid), &[path]).is_none_or(|open| !open.is_empty())
}
