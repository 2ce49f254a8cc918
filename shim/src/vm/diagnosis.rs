//! What can be done with a running VM, what cannot, why not, and what would help.

use std::path::{Path, PathBuf};

use dormouse_qmp::capabilities::{Capabilities, MirrorSafety, mirror_loses_writes};
use dormouse_qmp::view::machine::RunState;
use dormouse_qmp::{Client, Greeting};
use dormouse_storage::{GuestMemory, Layout, feed};
use serde::{Deserialize, Serialize};

use super::binary::MemoryBackendAbilities;
use super::command_line::CommandLine;
use super::engine::{self, Facts, Wish};
use super::memory::{DEVICE_STATE_BOUND, Memory};
use super::own_memory::{self, OwnMemory};
use super::shape::Shape;
use super::{blockers, cpu_model, disks, monitor, process};
use crate::error::{Code, Failure, sentence};

/// A VM, examined.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diagnosis {
    /// QEMU's version.
    pub qemu_version: String,
    /// The package that QEMU came in; may be empty.
    pub qemu_package: String,
    /// QEMU's process.
    pub pid: u32,
    /// QEMU's run state, in QEMU's words.
    pub run_state: String,
    /// What can be done and what cannot.
    pub findings: Vec<Finding>,
    /// What stands in the way of a hibernation now.
    pub blockers: Vec<String>,
    /// What stands in nobody's way, and is good to know.
    #[serde(default)]
    pub remarks: Vec<String>,
    /// The disks.
    pub disks: Vec<DiskFinding>,
    /// The memory, where it can be reached.
    pub memory: Option<MemoryFinding>,
}

/// One thing that could be done.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Finding {
    /// What.
    pub subject: String,
    /// Whether it can be done.
    pub can: bool,
    /// Why not and what would help; or what to know beside.
    pub detail: String,
}

/// A disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskFinding {
    /// How it is called.
    pub label: String,
    /// The file or device that it is in.
    pub file_name: String,
    /// Its format.
    pub format: String,
    /// Its size as the guest sees it, in bytes.
    pub virtual_size_bytes: u64,
    /// Whether the guest may only read it.
    pub read_only: bool,
    /// Whether a wake can tell if it was written since the save.
    pub has_witness: bool,
}

/// Memory, and what an image of it takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryFinding {
    /// The guest's memory, in bytes.
    pub guest_bytes: u64,
    /// Of that, what the guest has touched so far: what an image takes at most now, but for the next two. `None`: it
    /// cannot be seen from outside.
    pub touched_bytes: Option<u64>,
    /// Memory of devices (ROMs, firmware tables, video memory), in bytes.
    pub device_bytes: u64,
    /// Space that a hibernation reserves, in bytes.
    pub reserved_bytes: u64,
}

/// Examines a VM and changes nothing. `command_line` and `shape`: as its supervisor knows them; `None`: as they show.
pub async fn diagnose(
    client: &Client,
    command_line: Option<Vec<String>>,
    shape: Option<&Shape>,
) -> Result<Diagnosis, Failure> {
    let pid = client.peer_pid().ok_or_else(|| {
        Failure::new(
            Code::Refused,
            "cannot see QEMU's process (another PID namespace?)",
        )
    })?;
    let directory = process::working_directory(pid).unwrap_or_else(|| PathBuf::from("/"));
    let command_line = match command_line {
        Some(given) => given,
        None => process::visible_command_line(pid, &directory)?,
    };
    let line =
        CommandLine::parse(&command_line).map_err(|error| Failure::new(Code::Refused, error.to_string()))?;
    let memory = Memory::of(client, pid).await;
    let (mut findings, chosen) = match &memory {
        Ok(memory) => {
            let facts = Facts::of(client, memory).await?;
            (
                engine_findings(&facts),
                engine::choose(Wish::Auto, None, &facts).map(|_| ()),
            )
        }
        Err(failure) => (Vec::new(), Err(failure.clone())),
    };
    // The name does not matter here: what is told of main RAM is its place.
    let own = own_memory::of(&line, "of -m", &directory)
        .map_err(|error| Failure::new(Code::Refused, error.to_string()))?;
    let abilities = MemoryBackendAbilities::of(client).await?;
    let lazy = match own.iter().find_map(OwnMemory::against_feeding) {
        Some(why) => Err(why),
        None => feed::check_possible(abilities.offset),
    };
    findings.extend(wake_findings(abilities, &line, (lazy, own.first())));
    findings.extend(qemu_findings(
        client.greeting(),
        &*Capabilities::of(client).await?,
    ));
    let run_state = monitor::run_state(client).await?;
    let mut blockers = blockers::all(client, shape, &line, &directory).await?;
    if let Err(failure) = chosen {
        blockers.push(failure.message);
    }
    if !matches!(run_state, RunState::Running | RunState::Paused) {
        blockers.push(format!("the guest is neither running nor paused but {run_state}"));
    }
    let greeting = client.greeting();
    Ok(Diagnosis {
        qemu_version: greeting.version.to_string(),
        qemu_package: greeting.package.clone(),
        pid,
        run_state: run_state.to_string(),
        findings,
        blockers,
        remarks: cpu_model::bound_to_host(line.cpu()).into_iter().collect(),
        disks: disk_findings(client, &directory).await?,
        memory: memory.ok().as_ref().map(measure).transpose()?,
    })
}

/// In the order in which `--engine auto` looks at them.
fn engine_findings(facts: &Facts<'_>) -> Vec<Finding> {
    let finding = |subject: &str, against: Option<String>, how: &str| match against {
        None => can(subject, how),
        Some(why) => cannot(subject, &why),
    };
    vec![
        finding(
            "hibernate directly, by x-ignore-shared",
            facts
                .against_direct()
                .map(|why| format!("{why}; `dormouse run` puts RAM where it can be")),
            "RAM is written straight from the guest's memory; the fastest way",
        ),
        finding(
            "hibernate directly, by cpr-transfer",
            facts.against_cpr(),
            "RAM is written straight from the guest's memory, which QEMU hands over",
        ),
        can(
            "hibernate by a stream",
            match facts.multifd {
                Ok(()) => "RAM comes from QEMU, over several channels; any RAM will do",
                Err(_) => "RAM comes from QEMU, over one connection; any RAM will do",
            },
        ),
    ]
}

fn wake_findings(
    abilities: MemoryBackendAbilities,
    line: &CommandLine,
    (lazy, own): (Result<(), String>, Option<&OwnMemory>),
) -> Vec<Finding> {
    let map = if let Some(own) = own {
        cannot("wake by map", &own.against_moving())
    } else if !abilities.offset {
        cannot(
            "wake by map",
            "memory-backend-file of this QEMU has no offset=, which came with QEMU 8.1; wake by lazy or eager",
        )
    } else if line.shares_memory() {
        cannot(
            "wake by map",
            "the command line wants memory shared (share=on), and a map is private; wake by lazy or eager",
        )
    } else {
        can(
            "wake by map",
            "RAM is read when it is touched; such a guest is hibernated again by a stream",
        )
    };
    let lazy = match lazy {
        Ok(()) => can(
            "wake by lazy",
            "the guest runs at once, and RAM is fed to it while it does; each chunk is checked before",
        ),
        Err(why) => cannot("wake by lazy", &why),
    };
    vec![
        map,
        lazy,
        match own {
            None => can("wake by eager", "RAM is read and checked before the guest runs"),
            Some(own) => cannot(
                "wake by eager",
                &format!("{}; wake by stream", own.against_moving()),
            ),
        },
    ]
}

/// What QEMU itself brings for saves, moves and migrations.
fn qemu_findings(greeting: &Greeting, capabilities: &Capabilities) -> Vec<Finding> {
    let since = |subject: &str, is_there: bool, what: &str, version: &str| {
        if is_there {
            can(subject, what)
        } else {
            cannot(
                subject,
                &format!("this QEMU has it not ({what}); it came with QEMU {version}"),
            )
        }
    };
    let mirror = match mirror_loses_writes(greeting, capabilities) {
        MirrorSafety::Safe => can("mirror a disk while the guest writes", "no write is lost"),
        MirrorSafety::Affected { why } => cannot("mirror a disk while the guest writes", &why),
        MirrorSafety::NoMirror => cannot(
            "mirror a disk while the guest writes",
            "this QEMU has no blockdev-mirror",
        ),
    };
    vec![
        mirror,
        since(
            "make a running mirror converge",
            capabilities.has_command("block-job-change"),
            "block-job-change switches it to write-blocking",
            "8.2",
        ),
        since(
            "take disks back without running the guest",
            capabilities.has_command("blockdev-set-active"),
            "blockdev-set-active",
            "10.0",
        ),
        since(
            "hand RAM over by descriptors",
            capabilities.has_migration_mode(engine::CPR_MODE),
            "migration mode cpr-transfer",
            "10.0",
        ),
        since(
            "stay alive when a wake fails",
            capabilities.has_argument("migrate-incoming", "exit-on-error"),
            "migrate-incoming with exit-on-error",
            "9.1",
        ),
    ]
}

async fn disk_findings(client: &Client, directory: &Path) -> Result<Vec<DiskFinding>, Failure> {
    let present = disks::present(client, directory).await?;
    Ok(present
        .into_iter()
        .map(|disk| DiskFinding {
            label: disks::label(&disk),
            has_witness: disk.witness.is_some() && disk.backing.iter().all(|file| file.witness.is_some()),
            file_name: disk.file_name,
            format: disk.format,
            virtual_size_bytes: disk.virtual_size_bytes,
            read_only: disk.read_only,
        })
        .collect())
}

/// What is known of a guest's memory, and what an image of it takes.
pub fn measure(memory: &Memory) -> Result<MemoryFinding, Failure> {
    let refused = |error: &dyn std::error::Error| Failure::new(Code::Refused, sentence(error));
    let layout = Layout::plan(&memory.blocks).map_err(|error| refused(&error))?;
    let mut touched = Some(0);
    for backend in &memory.backends {
        touched = match (&backend.reach, touched) {
            (Ok(file), Some(touched)) => {
                let file = file.try_clone().map_err(|error| refused(&error))?;
                let mapped = GuestMemory::map(file, backend.length).map_err(|error| refused(&error))?;
                let extents = mapped.data_extents().map_err(|error| refused(&error))?;
                Some(
                    touched
                        + extents
                            .iter()
                            .map(|extent| extent.end - extent.start)
                            .sum::<u64>(),
                )
            }
            _ => None,
        };
    }
    Ok(MemoryFinding {
        guest_bytes: memory.guest_total().0,
        touched_bytes: touched,
        device_bytes: memory.other_total().0,
        reserved_bytes: layout.hard_bound(DEVICE_STATE_BOUND).0,
    })
}

fn can(subject: &str, detail: &str) -> Finding {
    Finding {
        subject: subject.to_owned(),
        can: true,
        detail: detail.to_owned(),
    }
}

fn cannot(subject: &str, detail: &str) -> Finding {
    Finding {
        subject: subject.to_owned(),
        can: false,
        detail: detail.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> CommandLine {
        CommandLine::parse(&text.split(' ').map(str::to_owned).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn a_wake_that_cannot_be_says_why() {
        let (old, new) = (
            MemoryBackendAbilities {
                offset: false,
                rom: false,
            },
            MemoryBackendAbilities {
                offset: true,
                rom: true,
            },
        );
        let shared = line("qemu -object memory-backend-file,id=m,size=1G,share=on,mem-path=/ram");
        for (abilities, line, can, words) in [
            (old, &line("qemu"), false, "QEMU 8.1"),
            (new, &shared, false, "share=on"),
            (new, &line("qemu"), true, "when it is touched"),
        ] {
            let [map, lazy, _] = &wake_findings(abilities, line, (Err("it rains".to_owned()), None))[..]
            else {
                panic!("map, lazy and eager")
            };
            assert_eq!(map.can, can, "{map:?}");
            assert!(map.detail.contains(words), "{map:?}");
            assert_eq!((lazy.can, &lazy.detail[..]), (false, "it rains"));
        }
        let huge = line("qemu -m 64 -object memory-backend-memfd,id=dimm,size=64M,hugetlb=on");
        let own = own_memory::of(&huge, "of -m", Path::new("/")).unwrap();
        let findings = wake_findings(new, &huge, (Ok(()), own.first()));
        for finding in findings
            .iter()
            .filter(|finding| !finding.subject.contains("lazy"))
        {
            assert!(
                !finding.can && finding.detail.contains("RAM block dimm"),
                "{finding:?}"
            );
        }
    }
}
