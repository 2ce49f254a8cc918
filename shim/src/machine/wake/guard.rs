//! What a wake compares before it loads anything: the machine that was saved with the one that is about to be, or has
//! come up.
//!
//! ```text
//!  from the image, the command line and the binary      before QEMU starts: version, machine type, sizes of memory
//!  from the QEMU that came up                           before the load: RAM blocks, CPUs, devices and their places
//! ```
//!
//! Every difference is told at once. The guest has not run then, and its image stays as it is.

use dormouse_qmp::view::machine::HumanReadableText;
use dormouse_qmp::{Client, command};
use dormouse_storage::ByteCount;
use dormouse_storage::image::manifest::{Manifest, RamBlock};

use crate::error::{Code, Failure};
use crate::vm::command_line::{CommandLine, CommandLineError};
use crate::vm::hardware;

/// Firmware tables that QEMU makes itself: it resizes them to what was saved.
const MADE_BY_QEMU: &str = "/rom@";

/// `-m` is rounded up to this.
const RAM_GRANULE: u64 = 8192;

/// A QEMU of this `version` has to be able to load what the recorded one wrote. Updates within a release series keep
/// the form of device state; a series does not know what a later one added.
pub fn check_version(saved: &str, version: &str) -> Result<(), Failure> {
    let (Some(then), Some(now)) = (series(saved), series(version)) else {
        return Ok(());
    };
    if now >= then {
        return Ok(());
    }
    Err(Failure::new(
        Code::Refused,
        format!(
            "the guest was saved on QEMU {saved}, and this is QEMU {version}, which is older and may not know what is \
             in its device state; wake it with QEMU {}.{} or later",
            then.0, then.1
        ),
    ))
}

/// Compares what the command line, with the `changes` made at this wake, says of itself.
pub fn check_line(
    manifest: &Manifest,
    recorded: &CommandLine,
    changes: &[String],
) -> Result<(), CheckLineError> {
    let with_changes = recorded.clone().with_changes(changes)?;
    let mut differences = Vec::new();
    let mut arguments = vec![String::new()];
    arguments.extend_from_slice(changes);
    if let Some(machine) = CommandLine::parse(&arguments)?.machine()
        && machine != manifest.machine
    {
        differences.push(format!("the machine type was {}, is {machine}", manifest.machine));
    }
    let mut sizes: Vec<(String, ByteCount)> = with_changes
        .memory_backends()?
        .into_iter()
        .map(|backend| (backend.id, backend.size))
        .collect();
    if !with_changes.names_main_memory()
        && let Some(main_ram) = &manifest.machine_default_ram_id
    {
        let size = with_changes.ram_size()?.0.next_multiple_of(RAM_GRANULE);
        sizes.push((main_ram.clone(), ByteCount(size)));
    }
    for (name, size) in sizes {
        let block = manifest.ram_blocks.iter().find(|block| block.name == name);
        if let Some(block) = block.filter(|block| block.length_bytes != size.0) {
            differences.push(sizes_differ(manifest, block, size));
        }
    }
    Ok(refuse(differences)?)
}

/// Compares the machine that came up.
pub async fn check_machine(manifest: &Manifest, client: &Client) -> Result<(), Failure> {
    check_version(&manifest.qemu.version, &client.greeting().version.to_string())?;
    let listing: HumanReadableText = client.query(&command::x_query_ramblock {}).await?;
    let blocks: Vec<RamBlock> = listing
        .ram_blocks()
        .into_iter()
        .map(|block| RamBlock {
            name: block.name,
            length_bytes: block.used_bytes,
            backend: None,
        })
        .collect();
    let mut differences = ram_differences(manifest, &blocks);
    if let Some(saved) = &manifest.hardware {
        let now = hardware::of(client).await?;
        let new = hardware::new_features(saved, &now);
        if !new.is_empty() {
            tracing::info!(
                features = new.join(", "),
                "the CPU has features that the guest did not have"
            );
        }
        differences.extend(hardware::differences(saved, &now));
    }
    refuse(differences)
}

/// A command line that is no command line, or makes another machine.
#[derive(Debug, thiserror::Error)]
pub enum CheckLineError {
    /// It cannot be read.
    #[error(transparent)]
    Line(#[from] CommandLineError),
    /// It makes another machine.
    #[error(transparent)]
    Differs(#[from] Failure),
}

fn ram_differences(manifest: &Manifest, blocks: &[RamBlock]) -> Vec<String> {
    let saved = manifest
        .ram_blocks
        .iter()
        .filter(|block| !block.name.starts_with(MADE_BY_QEMU));
    saved
        .filter_map(|block| match blocks.iter().find(|now| now.name == block.name) {
            None => Some(format!(
                "RAM block {} ({}) is not there",
                block.name,
                ByteCount(block.length_bytes)
            )),
            Some(now) if now.length_bytes != block.length_bytes => {
                Some(sizes_differ(manifest, block, ByteCount(now.length_bytes)))
            }
            Some(_) => None,
        })
        .collect()
}

fn sizes_differ(manifest: &Manifest, block: &RamBlock, now: ByteCount) -> String {
    let then = ByteCount(block.length_bytes);
    if manifest.machine_default_ram_id.as_ref() == Some(&block.name) {
        format!("RAM was {then}, is {now}")
    } else {
        format!("RAM block {} was {then}, is {now}", block.name)
    }
}

fn refuse(differences: Vec<String>) -> Result<(), Failure> {
    if differences.is_empty() {
        return Ok(());
    }
    Err(Failure::new(
        Code::Refused,
        format!(
            "this is not the machine that was saved: {}",
            differences.join("; ")
        ),
    ))
}

/// Major and minor version.
fn series(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split('.').map(|number| number.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn manifest() -> Manifest {
        serde_json::from_value(json!({
            "created_unix_ms": 1, "dormouse_version": "0", "vm_name": "web", "machine": "pc-i440fx-10.0",
            "machine_default_ram_id": "pc.ram", "qemu": {"version": "10.0.2"}, "engine": "direct",
            "guest": {"state_when_saved": "paused"},
            "ram_blocks": [
                {"name": "pc.ram", "length_bytes": 64 << 20},
                {"name": "vga.vram", "length_bytes": 16 << 20},
                {"name": "dimm", "length_bytes": 32 << 20},
                {"name": "/rom@etc/acpi/tables", "length_bytes": 4096},
            ],
        }))
        .unwrap()
    }

    fn checked(recorded: &str, changes: &str) -> String {
        let words = |text: &str| text.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let recorded = CommandLine::parse(&words(recorded)).unwrap();
        match check_line(&manifest(), &recorded, &words(changes)) {
            Ok(()) => String::new(),
            Err(error) => error.to_string(),
        }
    }

    #[test]
    fn an_older_series_is_refused_and_a_later_or_unknown_one_is_not() {
        assert!(check_version("10.0.2", "10.0.2").is_ok());
        assert!(
            check_version("10.0.13", "10.0.2").is_ok(),
            "an update keeps the form"
        );
        assert!(check_version("7.2.22", "11.1.3").is_ok());
        assert!(check_version("", "11.1.3").is_ok());
        let message = check_version("10.0.2", "9.2.0").unwrap_err().message;
        for words in ["saved on QEMU 10.0.2", "this is QEMU 9.2.0", "QEMU 10.0 or later"] {
            assert!(message.contains(words), "{message}");
        }
    }

    #[test]
    fn what_the_changes_make_of_the_machine_is_told_before_qemu_starts() {
        let recorded = "qemu -M pc -m 64 -object memory-backend-ram,id=dimm,size=32M";
        assert_eq!(checked(recorded, ""), "");
        assert_eq!(checked(recorded, "-M pc-i440fx-10.0 -smp 1 -m 65536k"), "");
        let message = checked(recorded, "-M q35 -m 128");
        assert!(
            message.contains("the machine type was pc-i440fx-10.0, is q35"),
            "{message}"
        );
        assert!(message.contains("RAM was 64.0 MiB, is 128.0 MiB"), "{message}");
        let message = checked("qemu -m 64 -object memory-backend-ram,id=dimm,size=16M", "");
        assert!(
            message.contains("RAM block dimm was 32.0 MiB, is 16.0 MiB"),
            "{message}"
        );
    }

    #[test]
    fn ram_of_other_sizes_is_told_but_tables_that_qemu_makes_are_not() {
        let mut now = manifest().ram_blocks;
        assert_eq!(ram_differences(&manifest(), &now), Vec::<String>::new());
        now[0].length_bytes *= 2;
        now.remove(3);
        now.remove(1);
        assert_eq!(
            ram_differences(&manifest(), &now),
            [
                "RAM was 64.0 MiB, is 128.0 MiB",
                "RAM block vga.vram (16.0 MiB) is not there"
            ]
        );
    }
}
