//! The preflight of a hibernation: everything that can be known to stand in the way, before the guest is touched.

use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use dormouse_qmp::view::machine::RunState;
use dormouse_qmp::{Client, CommandError, command};
use dormouse_storage::image::manifest::{Disk, Hardware, Qemu};
use dormouse_storage::{ByteCount, Layout, Recording};
use serde_json::Value;

use super::machine::Aim;
use super::{Request, live, stream};
use crate::error::{Code, Failure, GuestState, sentence};
use crate::vm::command_line::CommandLine;
use crate::vm::disk_size;
use crate::vm::engine::{self, Choice, Facts, Wish};
use crate::vm::memory::{DEVICE_STATE_BOUND, Memory};
use crate::vm::{binary, blockers, cpu_model, disks, hardware, monitor, mount, process};

/// A hibernation that can be tried.
#[derive(Debug)]
pub struct Plan {
    /// Whether the vCPUs run.
    pub running: bool,
    /// Whether the guest is saved while they run.
    pub live: bool,
    /// QEMU's process.
    pub pid: u32,
    /// Its working directory.
    pub directory: PathBuf,
    /// Its RAM.
    pub memory: Memory,
    /// How that gets into the image.
    pub choice: Choice,
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
    /// What stands in nobody's way, and is good to know.
    pub remarks: Vec<String>,
    /// What the machine is made of.
    pub hardware: Hardware,
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
    let directory = process::working_directory(pid).unwrap_or_else(|| PathBuf::from("/"));
    let command_line = match &request.command_line {
        Some(given) => given.clone(),
        None => process::visible_command_line(pid, &directory)?,
    };
    let line =
        CommandLine::parse(&command_line).map_err(|error| Failure::new(Code::Refused, error.to_string()))?;

    let mut blockers = blockers::all(client, request.shape.as_ref(), &line, &directory).await?;
    let disks = disks::present(client, &directory).await?;
    let command_line = disk_size::as_now(&command_line, &directory, &disks);
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
            match request.aim {
                Aim::Hibernate => format!("cannot hibernate: {}", blockers.join("; ")),
                Aim::Snapshot { .. } => format!("cannot take a snapshot: {}", blockers.join("; ")),
            },
        ));
    }

    check_target(&request.target, request.replace)?;
    if let Some(mount) = &request.volume_mount {
        if is_block_device(&request.target) {
            let why = "a block device is a volume of its own: --volume-mount is for files";
            return Err(Failure::new(Code::Usage, why));
        }
        mount::check_on_volume(&request.target, mount)?;
    }
    let memory = Memory::of(client, pid).await?;
    let mut facts = Facts::of(client, &memory).await?;
    // Of a guest that stands still there is nothing to save while it runs.
    let is_live = request.live.is_some() && running;
    let (wish, channels) = if is_live {
        check_live(request)?;
        live::check_dirty_tracking(client).await?;
        (Wish::Stream, Some(0))
    } else {
        (request.engine, request.channels)
    };
    if wish != Wish::Stream {
        facts.ask_about_handing_over(client).await?;
    }
    let mut choice = engine::choose(wish, channels, &facts)?;
    if let Some(channels @ 1..) = choice.channels {
        let tried = stream::find_settings(client, channels)
            .await?
            .try_on(client)
            .await;
        if let Err(CommandError::Qemu { desc, .. }) = tried {
            facts.multifd = Err(desc);
            choice = engine::choose(wish, request.channels, &facts)?;
        }
    }
    if let Some(block) = memory.backends.iter().find(|block| block.is_at(&request.target)) {
        return Err(Failure::new(
            Code::Refused,
            format!(
                "{} is the guest's own RAM block {}",
                request.target.display(),
                block.id
            ),
        ));
    }
    // A device is written over where it is, unlike a file, which leaves what QEMU has open alone: it may be a part of a
    // disk that no name tells, or the image that a guest's memory is mapped from and whose supervisor is gone.
    if is_block_device(&request.target) && process::has_open(pid, &request.target) {
        return Err(Failure::new(
            Code::Refused,
            format!(
                "QEMU's process {pid} has {} open: the guest uses it, as a disk or as memory",
                request.target.display()
            ),
        ));
    }
    process::check_not_mapped(&request.target)?;
    let layout =
        Layout::plan(&memory.blocks).map_err(|error| Failure::new(Code::Refused, sentence(&error)))?;
    let machine = machine_property(client, "type").await?.unwrap_or_default();
    let main_ram = machine_property(client, "memory-backend")
        .await
        .unwrap_or_default();
    Ok(Plan {
        running,
        live: is_live,
        pid,
        directory,
        memory,
        choice,
        layout,
        machine: machine.strip_suffix("-machine").unwrap_or(&machine).to_owned(),
        main_ram: main_ram.and_then(|path| path.strip_prefix("/objects/").map(str::to_owned)),
        cpu: line.cpu().map(str::to_owned),
        remarks: cpu_model::bound_to_host(line.cpu()).into_iter().collect(),
        hardware: hardware::of(client).await?,
        qemu: binary::describe(client, line.program()).await?,
        command_line,
    })
}

impl Plan {
    /// The longest device stream that is read: small RAM blocks, as page records, and the devices.
    pub fn stream_bound(&self) -> ByteCount {
        // A page record has at most a name (256 bytes) beside its page; 1/8 covers headers of 512 bytes per page.
        let streamed = self.memory.other_total().0;
        ByteCount(streamed + streamed / 8 + DEVICE_STATE_BOUND.0)
    }

    /// QEMU has to list the blocks that were planned, in the lengths that they had.
    pub fn check_blocks(&self, recording: &Recording) -> Result<(), Failure> {
        for planned in self.layout.blocks() {
            let found = recording.blocks().iter().find(|block| block.name == planned.name);
            let why = match found {
                Some(block) if block.used_length == planned.length => continue,
                Some(block) => format!(
                    "RAM block {} changed from {} to {}",
                    planned.name, planned.length, block.used_length
                ),
                None => format!("QEMU's device state does not name RAM block {}", planned.name),
            };
            return Err(Failure::new(Code::Refused, why));
        }
        Ok(())
    }

    /// The disks now, for the manifest.
    pub async fn disks(&self, client: &Client) -> Result<Vec<Disk>, Failure> {
        disks::with_fingerprints(disks::present(client, &self.directory).await?).await
    }
}

/// A guest that runs is saved by QEMU's own stream, and over one connection: see [`dormouse_storage::ImageWriter::write_live`].
fn check_live(request: &Request) -> Result<(), Failure> {
    if request.engine == Wish::Direct {
        return Err(Failure::new(
            Code::Refused,
            "the direct engine reads memory that stands still, so it cannot save a guest while it runs: leave out --live, \
             or --engine direct",
        ));
    }
    if request.channels.is_some_and(|channels| channels > 0) {
        return Err(Failure::new(
            Code::Refused,
            "a guest that runs while it is saved comes over one plain stream, in which the later of two contents of a page \
             is known: leave out --live, or --channels",
        ));
    }
    Ok(())
}

/// Tells early and in plain words what the writer would refuse late.
fn check_target(target: &Path, replace: bool) -> Result<(), Failure> {
    let usage = |why: &str| Err(Failure::new(Code::Usage, format!("{} {why}", target.display())));
    match target.file_name() {
        None => return usage("names no file"),
        // A partial image has a longer name, and names have at most 255 bytes.
        Some(name) if name.len() > 200 => return usage("has too long a name; at most 200 bytes"),
        Some(_) => {}
    }
    let folder = target.parent().unwrap_or(Path::new("/"));
    if !folder.is_dir() {
        return Err(Failure::new(
            Code::Usage,
            format!("the folder {} is not there", folder.display()),
        ));
    }
    match fs::metadata(target) {
        // What is on a device is for the writer to judge.
        Ok(found) if found.file_type().is_block_device() => Ok(()),
        Ok(found) if !found.is_file() => usage("is not a file"),
        Ok(_) if !replace => Err(Failure::new(
            Code::Refused,
            format!("{} exists", target.display()),
        )),
        _ => Ok(()),
    }
}

fn is_block_device(target: &Path) -> bool {
    fs::metadata(target).is_ok_and(|found| found.file_type().is_block_device())
}

/// Only a guest that runs or is paused can be woken the way it was.
async fn check_run_state(client: &Client) -> Result<bool, Failure> {
    match monitor::run_state(client).await? {
        RunState::Running => Ok(true),
        RunState::Paused => Ok(false),
        RunState::Postmigrate => Err(Failure::new(
            Code::Refused,
            "the guest was saved or migrated and stands still since; if a hibernation of it was interrupted, \
             `dormouse recover` ends that",
        )
        .with_guest(GuestState::Paused)),
        other => Err(Failure::new(
            Code::Refused,
            format!(
                "the guest is neither running nor paused but {other}, and cannot be hibernated like that"
            ),
        )
        .with_guest(GuestState::Paused)),
    }
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
