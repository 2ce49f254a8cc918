//! `dormouse volume`: other volumes for a running guest. The VM's supervisor does it, or we over a monitor of our own.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use dormouse_qmp::Client;
use dormouse_storage::ByteCount;
use serde_json::json;
use uuid::Uuid;

use super::hibernate::{
    absolute, as_ms, attend, by_supervisor, connect_in_time, known_of, something_else, terms_of,
};
use super::report::Report;
use super::{TermArguments, byte_count};
use crate::api::client::Supervisor;
use crate::api::types::{Ending, NewOperation, OperationKind, Terms, VolumeGrown, VolumesMoved};
use crate::error::{Code, Failure};
use crate::machine::volume::grow as volume_grow;
use crate::machine::volume::{Format, Limits, Request, WhenFull, Wish};
use crate::signals::Signals;
use crate::supervisor::operation::Prepared;
use crate::supervisor::request_queue::Priority;
use crate::supervisor::state_dir::{StateDir, VmRecord};
use crate::vm::process::{visible_command_line, working_directory};
use crate::vm::process_identity::ProcessIdentity;

#[derive(Debug, Subcommand)]
pub enum VolumeVerb {
    /// Copy volumes while the guest runs, and switch it to the copies: all of them, or none
    Move(MoveArguments),
    /// Let a disk become larger while its guest runs: a raw one takes all of its volume, as after a move to a larger one
    Grow(GrowArguments),
    /// Change how much of a move under way is copied in a second
    Speed(SpeedArguments),
    /// Switch the volumes of a move that waits for this (`move --complete manual`)
    Complete(CompleteArguments),
}

#[derive(Debug, Args)]
pub struct MoveArguments {
    /// Name of a supervised VM
    #[arg(required_unless_present = "qmp", conflicts_with = "qmp")]
    name: Option<String>,
    /// QMP socket of a QEMU without a supervisor; its monitor must be free
    #[arg(long, value_name = "SOCKET")]
    qmp: Option<PathBuf>,
    /// A disk (the id of its device, of its node or drive, or the file that it has) and where it goes. The new volume has
    /// to be there, or is made with `create`. May be given for several disks
    #[arg(
        long = "volume",
        required = true,
        value_name = "DISK=PATH[,format=raw|qcow2][,create]",
        value_parser = wish
    )]
    volumes: Vec<Wish>,
    /// Copy at most so much in a second, per disk (bytes, or with a suffix: 200M, 1.5G)
    #[arg(long, value_name = "BYTES", value_parser = byte_count)]
    speed: Option<ByteCount>,
    /// When the volumes are switched: once all are in step, or when `dormouse volume complete` says so
    #[arg(long, value_enum, default_value_t)]
    complete: Complete,
    /// Move disks without those of their dirty bitmaps that cannot go with them: persistent ones to a raw volume, ones of
    /// backing images; without this they are refused
    #[arg(long)]
    drop_bitmaps: bool,
    /// Compare the copies with the old volumes before the switch, while the guest goes on; a copy that differs is not
    /// switched to. For raw volumes
    #[arg(long)]
    verify: bool,
    /// What is done when a new volume is full
    #[arg(long, value_enum, default_value_t)]
    on_enospc: WhenFull,
    /// Wait so long for volumes that are to be there and are not yet [default: not at all]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    wait_for_target: Option<Duration>,
    /// Leave the guest on its old volumes if the new ones are not in place after this time (30s, 5m) [default: no limit]
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    timeout: Option<Duration>,
    /// Leave the guest on its old volumes if there is no less to copy for this time [default: 2m]
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    stall_timeout: Option<Duration>,
    #[command(flatten)]
    terms: TermArguments,
}

#[derive(Debug, Args)]
pub struct GrowArguments {
    /// The VM's name (not with --qmp); the disk, in the same words as for a move; its new size (bytes, or with a suffix: 200M,
    /// 1.5G), or max for all of its volume
    #[arg(required = true, num_args = 2..=3, value_names = ["NAME", "DISK", "SIZE"])]
    what: Vec<String>,
    /// QMP socket of a QEMU without a supervisor; its monitor must be free
    #[arg(long, value_name = "SOCKET")]
    qmp: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub struct SpeedArguments {
    /// Name of a supervised VM
    name: String,
    /// So much in a second, per disk (bytes, or with a suffix: 200M, 1.5G), or unlimited
    #[arg(value_name = "BYTES")]
    speed: String,
}

#[derive(Debug, Args)]
pub struct CompleteArguments {
    /// Name of a supervised VM
    name: String,
}

/// When volumes are switched.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum Complete {
    /// Once all are in step
    #[default]
    Auto,
    /// When somebody says so
    Manual,
}

/// Runs one of the verbs.
pub async fn volume(verb: VolumeVerb, state: &StateDir, report: &Report) -> Result<ExitCode, Failure> {
    match verb {
        VolumeVerb::Move(arguments) => move_volumes(arguments, state, report).await,
        VolumeVerb::Grow(arguments) => grow(arguments, state, report).await,
        VolumeVerb::Speed(arguments) => change_speed(&arguments, state, report).await,
        VolumeVerb::Complete(arguments) => complete(&arguments.name, state, report).await,
    }
}

async fn move_volumes(
    mut arguments: MoveArguments,
    state: &StateDir,
    report: &Report,
) -> Result<ExitCode, Failure> {
    for volume in &mut arguments.volumes {
        volume.to = absolute(&volume.to)?;
        volume.disk = from_here(&volume.disk)?;
    }
    let limits = Limits::default();
    let limits = Limits {
        total: arguments.timeout,
        stall: arguments.stall_timeout.unwrap_or(limits.stall),
        ..limits
    };
    let by_hand = arguments.complete == Complete::Manual;
    let moved = match (&arguments.name, &arguments.qmp) {
        (Some(name), _) => {
            let wish = NewOperation::MoveVolumes {
                volumes: arguments.volumes,
                speed_limit_bytes: arguments.speed.map(|speed| speed.0),
                complete_by_hand: by_hand,
                drop_bitmaps: arguments.drop_bitmaps,
                verify: arguments.verify,
                when_full: arguments.on_enospc,
                wait_for_target_ms: arguments.wait_for_target.map(as_ms),
                timeout_ms: limits.total.map(as_ms),
                stall_timeout_ms: Some(as_ms(limits.stall)),
            };
            let signals = Signals::watch()?.for_several();
            let terms = terms_of(&arguments.terms, Priority::Normal);
            match by_supervisor(state, name, (wish, terms), signals, report).await? {
                Ending::VolumesMoved(moved) => moved,
                _ => return Err(something_else()),
            }
        }
        (None, Some(_)) if by_hand => {
            let why = "--complete manual needs a supervisor that can be told to go on: name a VM";
            return Err(Failure::new(Code::Usage, why));
        }
        (None, Some(socket)) => {
            let request = Request {
                volumes: arguments.volumes,
                speed_limit: arguments.speed,
                by_hand,
                drop_bitmaps: arguments.drop_bitmaps,
                verify: arguments.verify,
                when_full: arguments.on_enospc,
                wait_for_target: arguments.wait_for_target,
                limits,
                monitor: absolute(socket)?,
                operations: state.moves(),
                machine: PathBuf::new(),
                vm_name: String::new(),
            };
            by_ourselves(socket, request, &arguments.terms, state, report).await?
        }
        (None, None) => return Err(Failure::new(Code::Usage, "name a VM, or a monitor with --qmp")),
    };
    report.result(&moved, &describe(&moved));
    Ok(ExitCode::SUCCESS)
}

/// Moves volumes over a monitor that is free.
async fn by_ourselves(
    socket: &Path,
    request: Request,
    terms: &TermArguments,
    state: &StateDir,
    report: &Report,
) -> Result<VolumesMoved, Failure> {
    let signals = Signals::watch()?;
    let Taken {
        client,
        vm_name,
        record,
    } = take(socket, terms.lock_timeout.unwrap_or_default(), state).await?;
    let machine = match (record, client.peer_pid().and_then(ProcessIdentity::of)) {
        // The folder of a supervisor that was killed.
        (Some(_), _) => request.monitor.parent().map(Path::to_owned).unwrap_or_default(),
        (None, Some(qemu)) => state.machine(qemu),
        // Such a QEMU is refused.
        (None, None) => PathBuf::new(),
    };
    let request = Request {
        vm_name,
        machine,
        ..request
    };
    let prepared = Prepared::new(
        terms.operation_id.unwrap_or_else(Uuid::new_v4),
        OperationKind::MoveVolumes,
    );
    let (documents, cancel, progress) = (prepared.watch(), prepared.cancel(), report.progress());
    let work = prepared.move_volumes(client, request);
    let outcome = attend(work, documents, &cancel, signals, &progress).await;
    progress.finish();
    outcome.map(VolumesMoved::from)
}

/// A monitor that was taken for one operation.
struct Taken {
    client: Client,
    vm_name: String,
    record: Option<VmRecord>,
}

async fn take(socket: &Path, patience: Duration, state: &StateDir) -> Result<Taken, Failure> {
    state.make()?;
    let client = connect_in_time(socket, patience).await?;
    state.sweep_machines();
    let (vm_name, record) = known_of(socket, client.peer_pid());
    if let Some(pid) = client.peer_pid().filter(|pid| state.is_interrupted(*pid)) {
        return Err(Failure::new(
            Code::Refused,
            format!(
                "an operation on the guest in process {pid} was interrupted: `dormouse recover` ends that first"
            ),
        ));
    }
    Ok(Taken {
        client,
        vm_name,
        record,
    })
}

async fn grow(arguments: GrowArguments, state: &StateDir, report: &Report) -> Result<ExitCode, Failure> {
    let usage = |why: String| Failure::new(Code::Usage, why);
    let (name, disk, size) = match (&arguments.what[..], &arguments.qmp) {
        ([name, disk, size], None) => (Some(name), disk, size),
        ([disk, size], Some(_)) => (None, disk, size),
        (_, None) => {
            return Err(usage(
                "say which VM, which of its disks, and how large".to_owned(),
            ));
        }
        (_, Some(_)) => return Err(usage("with --qmp say which disk, and how large".to_owned())),
    };
    let size_bytes = match size.as_str() {
        "max" => None,
        size => Some(byte_count(size).map_err(usage)?.0),
    };
    let disk = from_here(disk)?;
    let grown = match (name, &arguments.qmp) {
        (Some(name), _) => {
            let wish = NewOperation::GrowVolume { disk, size_bytes };
            let signals = Signals::watch()?.for_several();
            let terms = Terms {
                id: Some(Uuid::new_v4()),
                ..Terms::default()
            };
            match by_supervisor(state, name, (wish, terms), signals, report).await? {
                Ending::VolumeGrown(grown) => grown,
                _ => return Err(something_else()),
            }
        }
        (None, Some(socket)) => {
            let Taken { client, record, .. } = take(socket, Duration::ZERO, state).await?;
            let qemu = client.peer_pid().and_then(ProcessIdentity::of);
            let recorded = record.or_else(|| VmRecord::read(&state.machine(qemu?)));
            let visible = || {
                let directory = working_directory(qemu?.pid)?;
                visible_command_line(qemu?.pid, &directory).ok()
            };
            let request = volume_grow::Request {
                disk,
                size_bytes,
                command_line: recorded
                    .map(|record| record.command_line)
                    .or_else(visible)
                    .unwrap_or_default(),
            };
            let prepared = Prepared::new(Uuid::new_v4(), OperationKind::GrowVolume);
            VolumeGrown::from(prepared.grow_volume(client, request).await?)
        }
        (None, None) => return Err(usage("name a VM, or a monitor with --qmp".to_owned())),
    };
    report.result(
        &grown,
        &format!(
            "{} grew from {} to {} ({} bytes), on {}",
            grown.disk,
            ByteCount(grown.from_bytes),
            ByteCount(grown.to_bytes),
            grown.to_bytes,
            grown.volume.display()
        ),
    );
    Ok(ExitCode::SUCCESS)
}

/// A file that a disk has is named from where we are, not from where QEMU is.
fn from_here(disk: &str) -> Result<String, Failure> {
    if disk.contains('/') && Path::new(disk).exists() {
        return Ok(absolute(Path::new(disk))?.to_string_lossy().into_owned());
    }
    Ok(disk.to_owned())
}

async fn change_speed(
    arguments: &SpeedArguments,
    state: &StateDir,
    report: &Report,
) -> Result<ExitCode, Failure> {
    let usage = |why: String| Failure::new(Code::Usage, why);
    let speed = match arguments.speed.as_str() {
        "unlimited" => None,
        speed => Some(byte_count(speed).map_err(usage)?),
    };
    let (supervisor, moving) = moving(&arguments.name, state).await?;
    let in_time = supervisor
        .change_speed(moving, speed.map(|speed| speed.0))
        .await?;
    let text = match (in_time, speed) {
        (false, _) => "too late: nothing is copied any more".to_owned(),
        (true, None) => "copying as fast as it goes".to_owned(),
        (true, Some(speed)) => format!("copying at most {speed} in a second, per disk"),
    };
    report.result(
        &json!({"operation": moving, "in-time": in_time, "bytes-per-second": speed.map(|speed| speed.0)}),
        &text,
    );
    Ok(ExitCode::SUCCESS)
}

/// The move of a VM's volumes that is under way.
async fn moving(name: &str, state: &StateDir) -> Result<(Supervisor, Uuid), Failure> {
    let supervisor = Supervisor::of(state, name);
    let operation = supervisor.vm().await?.operation;
    let moving = operation.filter(|operation| {
        operation.kind == OperationKind::MoveVolumes
            && operation.result.is_none()
            && operation.error.is_none()
    });
    let Some(moving) = moving else {
        return Err(Failure::new(
            Code::Refused,
            format!("no volumes of VM {name} are being moved"),
        ));
    };
    Ok((supervisor, moving.id))
}

async fn complete(name: &str, state: &StateDir, report: &Report) -> Result<ExitCode, Failure> {
    let (supervisor, moving) = moving(name, state).await?;
    let waited_for = supervisor.complete(moving).await?;
    let text = match waited_for {
        true => "the volumes are switched once they are in step",
        false => "that was not waited for: the volumes are switched without it",
    };
    report.result(&json!({"operation": moving, "was-waited-for": waited_for}), text);
    Ok(ExitCode::SUCCESS)
}

fn seconds(text: &str) -> Result<Duration, String> {
    let number: u64 = text
        .parse()
        .map_err(|_| format!("{text:?} is not a number of seconds"))?;
    Ok(Duration::from_secs(number))
}

/// Reads `DISK=PATH[,format=F][,create]`. A path may have commas, as long as what follows one is no option.
fn wish(text: &str) -> Result<Wish, String> {
    let (disk, mut rest) = text
        .split_once('=')
        .filter(|(disk, rest)| !disk.is_empty() && !rest.is_empty())
        .ok_or_else(|| format!("{text:?} is not DISK=PATH"))?;
    let (mut format, mut create) = (None, false);
    while let Some((before, option)) = rest.rsplit_once(',') {
        match option {
            "create" => create = true,
            "format=raw" => format = Some(Format::Raw),
            "format=qcow2" => format = Some(Format::Qcow2),
            option if option.starts_with("format=") => {
                return Err(format!("there is no {option:?}; volumes are raw or qcow2"));
            }
            _ => break,
        }
        rest = before;
    }
    Ok(Wish {
        disk: disk.to_owned(),
        to: PathBuf::from(rest),
        format,
        create,
    })
}

fn describe(moved: &VolumesMoved) -> String {
    let volumes: Vec<String> = moved
        .volumes
        .iter()
        .map(|volume| {
            format!(
                "{}: moved from {} to {} ({} copied)",
                volume.disk,
                volume.from,
                volume.to.display(),
                ByteCount(volume.done_bytes)
            )
        })
        .collect();
    let remarks: String = moved.remarks.iter().map(|remark| format!("\n{remark}")).collect();
    format!(
        "{}\nwrites waited {:.1} ms for the switch{remarks}",
        volumes.join("\n"),
        moved.freeze_ms
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_volume_is_a_disk_and_where_it_goes() {
        let plain = wish("vda=/mnt/a,b.img").unwrap();
        assert_eq!(
            (plain.disk.as_str(), plain.to.to_str()),
            ("vda", Some("/mnt/a,b.img"))
        );
        assert_eq!((plain.format, plain.create), (None, false));
        let made = wish("/old/disk=/new,create,format=qcow2").unwrap();
        assert_eq!(
            (made.disk.as_str(), made.to.to_str()),
            ("/old/disk", Some("/new"))
        );
        assert_eq!((made.format, made.create), (Some(Format::Qcow2), true));
        for bad in ["vda", "=a", "vda=", "vda=/a,format=vmdk"] {
            assert!(wish(bad).is_err(), "{bad}");
        }
    }
}
