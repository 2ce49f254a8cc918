//! A machine that is started only to be looked at.
//!
//! An image from elsewhere comes without a word on how its guest is started; the user gives the command line. Started
//! as a wake would start it (stopped, waiting for a migration that never comes, disks inactive and unlocked), QEMU
//! tells what that machine is made of, and it is compared with what was saved. Then it is killed: no guest ran.

use std::fs;
use std::path::Path;

use dormouse_qmp::command;
use dormouse_qmp::view::machine::{HumanReadableText, MachineInfo, MemoryBackend};
use dormouse_storage::image::manifest::{Disk, Hardware, Qemu};
use dormouse_storage::{BlockSize, ByteCount};

use super::command_line::CommandLine;
use super::process::StartingQemu;
use super::{binary, disks, hardware};
use crate::error::{Code, Failure};

/// What was seen.
#[derive(Debug)]
pub struct Rehearsal {
    /// The QEMU.
    pub qemu: Qemu,
    /// The name of main RAM's block.
    pub main_ram: Option<String>,
    /// The RAM blocks.
    pub blocks: Vec<BlockSize>,
    /// Those of them that a memory backend stands behind.
    pub backed: Vec<String>,
    /// All else that the machine is made of.
    pub hardware: Hardware,
    /// The disks.
    pub disks: Vec<Disk>,
}

impl Rehearsal {
    /// Starts the machine of `line` with the machine type `machine`; `directory` is where the line's relative paths
    /// begin, `scratch` a folder for a socket.
    pub async fn of(
        line: &CommandLine,
        machine: &str,
        directory: &Path,
        scratch: &Path,
    ) -> Result<Self, Failure> {
        binary::locate(line.program())?;
        let socket = scratch.join("rehearsal.sock");
        let started = StartingQemu::spawn_quietly(&line.clone().for_wake(machine), &socket)?;
        let mut process = started.ready().await?;
        let client = process.client().clone();
        let listing: HumanReadableText = client.query(&command::x_query_ramblock {}).await?;
        let blocks: Vec<BlockSize> = listing
            .ram_blocks()
            .into_iter()
            .map(|block| BlockSize {
                name: block.name,
                length: ByteCount(block.used_bytes),
            })
            .collect();
        let backends: Vec<MemoryBackend> = client.query(&command::query_memdev {}).await?;
        let backed: Vec<String> = backends
            .into_iter()
            .filter_map(|backend| backend.id)
            .filter(|id| blocks.iter().any(|block| block.name == *id))
            .collect();
        let machines: Vec<MachineInfo> = client
            .query(&command::query_machines { compat_props: None })
            .await?;
        let own_name = machines
            .into_iter()
            .find(|info| info.name == machine)
            .and_then(|info| info.default_ram_id);
        // A line that names its main memory has a block of that name instead of the machine's own.
        let main_ram = own_name.filter(|_| !line.names_main_memory()).or_else(|| {
            let [only] = backed.as_slice() else { return None };
            Some(only.clone())
        });
        let seen = Self {
            qemu: binary::describe(&client, line.program()).await?,
            main_ram,
            hardware: hardware::of(&client).await?,
            disks: disks::with_fingerprints(disks::present(&client, directory).await?).await?,
            blocks,
            backed,
        };
        process.kill().await?;
        // A QEMU that is killed leaves its socket.
        let _ = fs::remove_file(&socket);
        Ok(seen)
    }

    /// Compares the machine's RAM with that of a save. Every difference is told.
    pub fn check_blocks(&self, saved: &[BlockSize]) -> Result<(), Failure> {
        let differences = differences(saved, &self.blocks);
        if differences.is_empty() {
            return Ok(());
        }
        Err(Failure::new(
            Code::Refused,
            format!(
                "the command line makes another machine than the one that was saved: {}",
                differences.join("; ")
            ),
        ))
    }
}

fn differences(saved: &[BlockSize], made: &[BlockSize]) -> Vec<String> {
    let find = |blocks: &[BlockSize], name: &str| blocks.iter().find(|block| block.name == name).cloned();
    let mut differences = Vec::new();
    for BlockSize { name, length } in saved {
        match find(made, name) {
            None => differences.push(format!("RAM block {name} ({length}) was saved and is not there")),
            // Firmware tables are resized to what was saved when it is loaded.
            Some(block) if block.length != *length && !name.starts_with("/rom@") => {
                differences.push(format!("RAM block {name} was {length} and is {}", block.length))
            }
            Some(_) => {}
        }
    }
    let new = made.iter().filter(|block| find(saved, &block.name).is_none());
    differences.extend(new.map(|block| format!("RAM block {} ({}) was not saved", block.name, block.length)));
    differences
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_difference_of_ram_is_told_but_the_length_of_tables() {
        let block = |name: &str, mib| BlockSize {
            name: name.to_owned(),
            length: ByteCount::mib(mib),
        };
        let saved = [
            block("pc.ram", 64),
            block("/rom@etc/acpi/tables", 2),
            block("vga.vram", 16),
        ];
        assert_eq!(differences(&saved, &saved), Vec::<String>::new());
        let made = [
            block("pc.ram", 128),
            block("/rom@etc/acpi/tables", 1),
            block("qxl.vram", 16),
        ];
        assert_eq!(
            differences(&saved, &made),
            [
                "RAM block pc.ram was 64.0 MiB and is 128.0 MiB",
                "RAM block vga.vram (16.0 MiB) was saved and is not there",
                "RAM block qxl.vram (16.0 MiB) was not saved",
            ]
        );
    }
}
