//! The preflight of a hibernation: everything that can be known to stand in the way, before the guest is touched.

use std::fs;
use std::path::PathBuf;

use dormouse_qmp::view::block::BlockExportInfo;
use dormouse_qmp::view::job::JobInfo;
use dormouse_qmp::view::machine::RunState;
use dormouse_qmp::view::migration::MigrationInfo;
use dormouse_qmp::{Client, command};
use dormouse_storage::image::manifest::{Disk, Qemu};
use dormouse_storage::{ByteCount, Layout};
use serde_json::{Value, json};

use super::Request;
use crate::error::{Code, Failure, GuestState, sentence};
use crate::vm::command_line::CommandLine;
use crate::vm::memory::{Memory, working_directory};
use crate::vm::{binary, disks, monitor};

/// The most that devices other than RAM may fill. QEMU's own devices need well under 1 MiB; a passed-through device
/// brings the state of its firmware.
pub const DEVICE_STATE_BOUND: ByteCount = ByteCount(64 << 20);

/// A hibernation that can be tried.
#[derive(Debug)]
pub struct Plan {
    /// Whether the vCPUs run.
    pub running: bool,
    /// QEMU's process.
    pub pid: u32,
    /// Its working directory.
    pub directory: PathBuf,
    /// Its RAM.
    pub memory: Memory,
    /// Where everything will be in the image.
    pub layout: Layout,
    /// The machine type, resolved.
    pub machine: String,
    /// The backend of main RAM, where there is one.
    pub main_ram: Option<String>,
    /// The command line, as the user gave it.
    pub command_line: Vec<String>,
    /// The CPU, as given.
    pub cpu: Option<String>,
    /// What the QEMU that runs is and can do.
    pub qemu: Qemu,
}

/// Looks at everything that could stand in the way. Blockers are told all at once.
pub async fn preflight(client: &Client, request: &Request) -> Result<Plan, Failure> {
    let running = check_run_state(client).await?;
    let guest = if running {
        GuestState::Running
    } else {
        GuestState::Paused
    };
    examine(client, request, running)
        .await
        .map_err(|failure| failure.with_guest(guest))
}

async fn examine(client: &Client, request: &Request, running: bool) -> Result<Plan, Failure> {
    let pid = client.peer_pid().ok_or_else(|| {
        Failure::new(
            Code::Refused,
            "cannot see QEMU's process (another PID namespace?), so its RAM cannot be reached",
        )
    })?;
    let directory = working_directory(pid).unwrap_or_else(|| PathBuf::from("/"));
    let command_line = match &request.command_line {
        Some(given) => given.clone(),
        None => visible_command_line(pid)?,
    };
    let line =
        CommandLine::parse(&command_line).map_err(|error| Failure::new(Code::Refused, error.to_string()))?;

    let mut blockers = migration_blockers(client).await?;
    blockers.extend(job_blockers(client).await?);
    blockers.extend(export_blockers(client).await?);
    blockers.extend(hotplug_blockers(client).await?);
    if line.has_temporary_disks() {
        blockers
            .push("disks are in snapshot mode: what the guest wrote would be gone when QEMU ends".to_owned());
    }
    let disks = disks::present(client, &directory).await?;
    if let Some(disk) = disks.iter().find(|disk| disks::is_target(disk, &request.target)) {
        blockers.push(format!(
            "{} is the guest's own {}",
            request.target.display(),
            disks::label(disk)
        ));
    }
    if !blockers.is_empty() {
        return Err(Failure::new(
            Code::Refused,
            format!("cannot hibernate: {}", blockers.join("; ")),
        ));
    }

    let memory = Memory::of(client, pid).await?;
    if let Some(block) = memory.shared.iter().find(|block| block.is_at(&request.target)) {
        return Err(Failure::new(
            Code::Refused,
            format!(
                "{} is the guest's own RAM block {}",
                request.target.display(),
                block.name
            ),
        ));
    }
    let layout =
        Layout::plan(&memory.blocks).map_err(|error| Failure::new(Code::Refused, sentence(&error)))?;
    let machine = machine_property(client, "type").await?.unwrap_or_default();
    let main_ram = machine_property(client, "memory-backend")
        .await
        .unwrap_or_default();
    Ok(Plan {
        running,
        pid,
        directory,
        memory,
        layout,
        machine: machine.strip_suffix("-machine").unwrap_or(&machine).to_owned(),
        main_ram: main_ram.and_then(|path| path.strip_prefix("/objects/").map(str::to_owned)),
        cpu: line.cpu().map(str::to_owned),
        qemu: describe_qemu(client, line.program()).await?,
        command_line,
    })
}

impl Plan {
    /// The longest device stream that is read: small RAM blocks, as page records, and the devices.
    pub fn stream_bound(&self) -> ByteCount {
        // A page record has at most a name (256 bytes) beside its page; 1/8 covers headers of 512 bytes per page.
        let streamed = self.memory.streamed_total().0;
        ByteCount(streamed + streamed / 8 + DEVICE_STATE_BOUND.0)
    }

    /// The disks now, for the manifest.
    pub async fn disks(&self, client: &Client) -> Result<Vec<Disk>, Failure> {
        disks::present(client, &self.directory).await
    }
}

/// Only a guest that runs or is paused can be woken the way it was.
async fn check_run_state(client: &Client) -> Result<bool, Failure> {
    match monitor::run_state(client).await? {
        RunState::Running => Ok(true),
        RunState::Paused => Ok(false),
        other => Err(Failure::new(
            Code::Refused,
            format!(
                "the guest is neither running nor paused but {other}, and cannot be hibernated like that"
            ),
        )
        .with_guest(GuestState::Paused)),
    }
}

async fn migration_blockers(client: &Client) -> Result<Vec<String>, Failure> {
    let migration: MigrationInfo = client.query(&command::query_migrate {}).await?;
    let is_in_progress = migration.is_in_progress();
    let mut blockers = migration.blocked_reasons.unwrap_or_default();
    if is_in_progress {
        blockers.push("a migration is under way".to_owned());
    }
    Ok(blockers)
}

/// Saving while a job runs makes QEMU 7.2 abort, and on any version leaves half a copy behind.
async fn job_blockers(client: &Client) -> Result<Vec<String>, Failure> {
    let jobs: Vec<JobInfo> = client.query(&command::query_jobs {}).await?;
    Ok(jobs
        .into_iter()
        .map(|job| format!("{} job {} is {}", job.job_type, job.id, job.status))
        .collect())
}

/// A client that writes through an export could write after the disks' witness was taken.
async fn export_blockers(client: &Client) -> Result<Vec<String>, Failure> {
    let exports: Vec<BlockExportInfo> = client.query(&command::query_block_exports {}).await?;
    Ok(exports
        .into_iter()
        .map(|export| format!("block export {} of node {} is open", export.id, export.node_name))
        .collect())
}

/// What was plugged in later is not on the command line that the wake will use.
async fn hotplug_blockers(client: &Client) -> Result<Vec<String>, Failure> {
    let mut blockers = Vec::new();
    for folder in ["/machine/peripheral", "/machine/peripheral-anon"] {
        let children = client
            .execute(&command::qom_list {
                path: folder.to_owned(),
            })
            .await?;
        for child in children.as_array().into_iter().flatten() {
            let (name, kind) = (
                child["name"].as_str().unwrap_or_default(),
                child["type"].as_str().unwrap_or_default(),
            );
            if !kind.starts_with("child<") {
                continue;
            }
            let get = command::qom_get {
                path: format!("{folder}/{name}"),
                property: "hotplugged".to_owned(),
            };
            if client.execute(&get).await.is_ok_and(|value| value == json!(true)) {
                blockers.push(format!(
                    "device {name} was plugged in while the guest ran; unplug it first"
                ));
            }
        }
    }
    Ok(blockers)
}

/// Asks a property of the machine; `None` where it is empty.
async fn machine_property(client: &Client, property: &str) -> Result<Option<String>, Failure> {
    let get = command::qom_get {
        path: "/machine".to_owned(),
        property: property.to_owned(),
    };
    let value: Value = client.execute(&get).await?;
    Ok(value.as_str().filter(|text| !text.is_empty()).map(str::to_owned))
}

async fn describe_qemu(client: &Client, program: &str) -> Result<Qemu, Failure> {
    let located = binary::locate(program).ok();
    let abilities = binary::MemoryBackendAbilities::of(client).await?;
    let greeting = client.greeting();
    Ok(Qemu {
        version: greeting.version.to_string(),
        package: greeting.package.clone(),
        binary: located.as_ref().map(|(path, _)| path.clone()),
        binary_fingerprint: located.map(|(_, fingerprint)| fingerprint),
        memory_backend_offset: abilities.offset,
        memory_backend_rom: abilities.rom,
    })
}

fn visible_command_line(pid: u32) -> Result<Vec<String>, Failure> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).map_err(|error| {
        Failure::new(
            Code::Refused,
            format!("cannot see the command line of QEMU's process {pid}: {error}"),
        )
    })?;
    let text = bytes.strip_suffix(b"\0").unwrap_or(&bytes);
    Ok(text
        .split(|byte| *byte == 0)
        .map(|argument| String::from_utf8_lossy(argument).into_owned())
        .collect())
}
