//! What QEMU opens for a move, and closes after it.
//!
//! A target is two nodes: the file or device, and its format on top, both under names that come from the operation, so
//! that whoever comes later finds them.
//!
//! # Zeros, and writes that must not be lost
//!
//! A QEMU whose mirror loses writes (see `dormouse_qmp::capabilities::mirror_loses_writes`) first looks which parts of
//! the disk are allocated, and loses what the guest writes to the others meanwhile, if the target can be unmapped. So
//! there it is opened without `discard` and `detect-zeroes`, and gets them once its job has marked all of the disk as to
//! be copied.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use dormouse_qmp::view::job::{JobInfo, JobStatus};
use dormouse_qmp::{Client, command};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::Instant;
use uuid::Uuid;

use super::Format;
use super::plan::Volume;
use crate::error::{Code, Failure};
use crate::vm::file_identity::FileIdentity;
use crate::vm::graph::Graph;

/// How often QEMU is asked whether it has made an image.
const POLL: Duration = Duration::from_millis(5);

/// How long that may take.
const MAKING_LIMIT: Duration = Duration::from_secs(60);

/// The names of what is made for one disk. QEMU takes up to 31 characters.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Names {
    /// The mirror job.
    pub job: String,
    /// The node of the target's file.
    pub file: String,
    /// The node of the target's format, which becomes the guest's.
    pub format: String,
    /// The job's filter in front of the old volume.
    pub filter: String,
    /// The job that makes an image.
    pub create: String,
}

impl Names {
    /// For the disk number `index` of an operation.
    pub fn of(operation: Uuid, index: usize) -> Self {
        let operation = operation.simple().to_string();
        let name = |what: &str| format!("dm{}-{index}{what}", &operation[..12]);
        Self {
            job: name(""),
            file: name("-file"),
            format: name("-format"),
            filter: name("-mirror"),
            create: name("-create"),
        }
    }
}

impl Names {
    /// Whether a node is one that a move made for a guest.
    pub fn is_format(node: &str) -> bool {
        node.starts_with("dm") && node.ends_with("-format")
    }
}

/// How a target treats zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Zeros<'a> {
    /// As they come: before the job has marked all of the disk.
    Written,
    /// Given back to the storage, for a copy that is as sparse as its source.
    Unmapped,
    /// As on the old volume, once the guest is on this one; in QEMU's words.
    AsBefore(&'a str),
}

/// What QEMU is told of the target's two nodes.
fn options(volume: &Volume, zeros: Zeros<'_>) -> [Value; 2] {
    let (target, names) = (&volume.target, &volume.names);
    let discard = match zeros {
        Zeros::Written => "ignore",
        Zeros::Unmapped | Zeros::AsBefore(_) => "unmap",
    };
    let cache = json!({"direct": volume.direct, "no-flush": false});
    let file = json!({
        "driver": if target.is_block_device { "host_device" } else { "file" },
        "node-name": names.file,
        "filename": target.path,
        "cache": cache,
        "discard": discard,
    });
    let mut format = json!({
        "driver": target.format.name(),
        "node-name": names.format,
        "file": names.file,
        "cache": cache,
        "discard": discard,
        "detect-zeroes": match zeros {
            Zeros::Written => "off",
            Zeros::Unmapped => "unmap",
            Zeros::AsBefore(word) => word,
        },
    });
    if let Some(size) = target.pinned(volume.size_bytes) {
        format["size"] = json!(size);
    }
    [file, format]
}

/// Opens a target in QEMU, whose process is `pid`. A qcow2 image that is to be made is made now, in its file, which is
/// there. Nothing is written to a file or device that is another than the one that was looked at or made.
pub async fn attach(client: &Client, volume: &Volume, zeros: Zeros<'_>, pid: u32) -> Result<(), Failure> {
    let [file, format] = options(volume, zeros);
    let opened = |failure: Failure| failure.while_doing(&volume.target.path.display().to_string());
    add(client, file).await.map_err(opened)?;
    if let Some(wanted) = volume.made.or(volume.target.identity)
        && files_open(pid).is_some_and(|open| !open.contains(&wanted))
    {
        return Err(opened(Failure::new(
            Code::Refused,
            "what QEMU opened is not what was looked at: another file or device under that name",
        )));
    }
    if volume.target.create && volume.target.format == Format::Qcow2 {
        make_image(client, volume).await.map_err(opened)?;
    }
    add(client, format).await.map_err(opened)
}

async fn add(client: &Client, options: Value) -> Result<(), Failure> {
    client.execute_raw("blockdev-add", options).await?;
    Ok(())
}

async fn make_image(client: &Client, volume: &Volume) -> Result<(), Failure> {
    let names = &volume.names;
    let create = json!({
        "job-id": names.create,
        "options": {"driver": "qcow2", "file": names.file, "size": volume.size_bytes},
    });
    client.execute_raw("blockdev-create", create).await?;
    let deadline = Instant::now() + MAKING_LIMIT;
    loop {
        let jobs: Vec<JobInfo> = client.query(&command::query_jobs {}).await?;
        let job = jobs.into_iter().find(|job| job.id == names.create);
        match job {
            Some(job) if job.status == JobStatus::Concluded => {
                client
                    .execute(&command::job_dismiss {
                        id: names.create.clone(),
                    })
                    .await?;
                return match job.error {
                    None => Ok(()),
                    Some(error) => Err(Failure::new(
                        Code::StorageIo,
                        format!("cannot make the image: {error}"),
                    )),
                };
            }
            // Whoever undoes this cancels the job.
            Some(job) if Instant::now() > deadline => {
                let why = format!(
                    "the job that makes the image is still {} after {MAKING_LIMIT:?}",
                    job.status
                );
                return Err(Failure::new(Code::TimedOut, why));
            }
            Some(_) => tokio::time::sleep(POLL).await,
            None => {
                return Err(Failure::new(
                    Code::Internal,
                    "the job that makes the image is gone",
                ));
            }
        }
    }
}

/// Changes how a target that is open treats zeros.
pub async fn reopen(client: &Client, volume: &Volume, zeros: Zeros<'_>) -> Result<(), Failure> {
    let options = options(volume, zeros);
    client
        .execute_raw("blockdev-reopen", json!({ "options": options }))
        .await?;
    Ok(())
}

/// Closes whatever there is of these nodes, top to bottom. What is used by others, or goes with what was above it, is
/// left; so are nodes that QEMU's command line or somebody else made as parts of others. Returns those that are there
/// still and used by nobody.
pub async fn remove(client: &Client, names: &[String]) -> Result<Vec<String>, Failure> {
    let graph = Graph::of(client).await?;
    for name in names.iter().filter(|name| graph.node(name).is_some()) {
        // Nodes that have no name of their own go with the node above them.
        if name.starts_with('#') {
            continue;
        }
        let delete = command::blockdev_del {
            node_name: name.clone(),
        };
        match client.execute(&delete).await {
            Ok(_) | Err(dormouse_qmp::CommandError::Qemu { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let graph = Graph::of(client).await?;
    let left = names
        .iter()
        .filter(|name| graph.node(name).is_some() && !graph.is_used(name));
    Ok(left.cloned().collect())
}

fn files_open(pid: u32) -> Option<Vec<FileIdentity>> {
    let entries = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    let open = entries
        .flatten()
        .filter_map(|entry| FileIdentity::at(&entry.path()));
    Some(open.collect())
}

/// The files that QEMU's process has open of those given; `None` where it cannot be seen.
pub fn still_open<'a>(pid: Option<u32>, files: &[&'a Path]) -> Option<BTreeSet<&'a Path>> {
    let open = files_open(pid?)?;
    let is_open = |file: &&&Path| FileIdentity::at(file).is_some_and(|identity| open.contains(&identity));
    Some(files.iter().filter(is_open).copied().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_enough_for_qemu_and_those_of_two_operations_differ() {
        let names = Names::of(Uuid::max(), 99);
        for name in [
            &names.job,
            &names.file,
            &names.format,
            &names.filter,
            &names.create,
        ] {
            assert!(name.len() <= 31 && name.starts_with("dm"), "{name}");
        }
        assert_ne!(names, Names::of(Uuid::nil(), 99));
        assert_ne!(names, Names::of(Uuid::max(), 98));
    }
}
