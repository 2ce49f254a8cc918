//! What is recorded of the machine, after its disks have moved: the command line that a wake starts, and the shape that a
//! hibernation compares with.

use std::path::{Path, PathBuf};

use dormouse_qmp::Client;

use super::plan::Volume;
use crate::error::{Code, Failure};
use crate::machine::effect::blocking;
use crate::supervisor::state_dir::VmRecord;
use crate::vm::disks;
use crate::vm::moved_disk::{self, MovedDisk};
use crate::vm::process::{visible_command_line, working_directory};
use crate::vm::process_identity::ProcessIdentity;

/// Brings the record in `folder` up to date, durably; where there is none of this QEMU, it is made from what its process
/// shows. Returns the disks that the line does not name, which a hibernation will refuse. Done again, it changes nothing.
pub async fn update(
    client: &Client,
    folder: &Path,
    qemu: ProcessIdentity,
    volumes: &[Volume],
) -> Result<Vec<String>, Failure> {
    let directory = working_directory(qemu.pid).unwrap_or_else(|| PathBuf::from("/"));
    let mut record = match VmRecord::read(folder).filter(|record| record.qemu == Some(qemu)) {
        Some(record) => record,
        None => VmRecord {
            qemu: Some(qemu),
            command_line: visible_command_line(qemu.pid, &directory)?,
            shape: None,
        },
    };
    let present = disks::present(client, &directory).await?;
    let mut remarks = Vec::new();
    for volume in volumes {
        let disk = moved(volume);
        match moved_disk::rewritten(&record.command_line, &directory, &disk) {
            Some(line) => record.command_line = line,
            None if moved_disk::is_rewritten(&record.command_line, &disk) => {}
            None => {
                remarks.push(format!(
                    "{}: the recorded command line does not name {} in a way that could be changed, so this guest cannot be \
                     hibernated until it is started anew",
                    volume.label,
                    volume.old_file.display()
                ));
                continue;
            }
        }
        let now = present
            .iter()
            .find(|disk| disk.device == volume.device && disk.qdev == volume.qdev);
        if let (Some(shape), Some(now)) = (&mut record.shape, now) {
            shape.set_disk(disks::label(now), now.file_name.clone());
        }
    }
    let folder = folder.to_owned();
    blocking(move || {
        record
            .write(&folder)
            .map_err(|error| Failure::new(Code::StorageIo, format!("cannot write the VM's record: {error}")))
    })
    .await?;
    Ok(remarks)
}

fn moved(volume: &Volume) -> MovedDisk {
    MovedDisk {
        old: volume.old_file.clone(),
        old_nodes: volume.old_chain.clone(),
        new: volume.target.path.clone(),
        format: Some(volume.target.format.name()),
        is_block_device: volume.target.is_block_device,
        pinned_bytes: volume.target.pinned(volume.size_bytes),
    }
}
