//! `dormouse image import`: memory that QEMU or libvirt saved becomes an image.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::UNIX_EPOCH;

use clap::Args;
use dormouse_storage::exchange::{Imported, Source, StreamCompression};
use dormouse_storage::image::manifest::{
    Backend, Disk, Guest, GuestState, Hardware, Manifest, Qemu, RamBlock,
};
use dormouse_storage::{ByteCount, Compression, CreateOptions, Image};
use serde_json::json;

use super::watched;
use crate::cli::KeyArguments;
use crate::cli::report::Report;
use crate::cli::run::with_absolute_program;
use crate::error::{Code, Failure};
use crate::supervisor::state_dir::{StateDir, checked_name};
use crate::vm::command_line::{CommandLine, CommandLineError};
use crate::vm::disks;
use crate::vm::rehearsal::Rehearsal;

/// An import.
#[derive(Debug, Args)]
pub struct ImportArguments {
    /// A migration stream or mapped-ram file of QEMU, or a save image of libvirt
    file: PathBuf,
    /// Where the image goes
    #[arg(long, value_name = "PATH")]
    to: PathBuf,
    /// Name of the VM [default: libvirt's name for it, else `vm`]
    #[arg(long)]
    name: Option<String>,
    /// Replace an image that is there already, once the new one is complete
    #[arg(long)]
    replace: bool,
    /// Compress RAM: none, auto (while the volume is what holds the writing up), zstd or zstd:LEVEL. A compressed
    /// image cannot be mapped
    #[arg(long, value_name = "HOW", default_value_t)]
    compress: Compression,
    #[command(flatten)]
    key: KeyArguments,
    /// The QEMU command line that the guest was started with; without it the image cannot be woken
    #[arg(last = true, value_name = "QEMU")]
    qemu: Vec<String>,
}

/// How the guest is started, as far as it is known.
struct Start {
    command_line: Option<Vec<String>>,
    directory: Option<PathBuf>,
    qemu: Qemu,
    cpu: Option<String>,
    hardware: Option<Hardware>,
    main_ram: Option<String>,
    backed: Vec<String>,
    disks: Vec<Disk>,
}

pub async fn import(
    arguments: ImportArguments,
    state: &StateDir,
    report: &Report,
) -> Result<ExitCode, Failure> {
    let source = Source::open(&arguments.file)?;
    let libvirt = source.libvirt().cloned();
    let of_libvirt = libvirt.as_ref().map(|header| header.domain.name.clone());
    let name = arguments
        .name
        .clone()
        .or(of_libvirt)
        .filter(|name| !name.is_empty());
    let name = checked_name(&name.unwrap_or_else(|| "vm".to_owned()))
        .map_err(|failure| failure.while_doing("give one with --name"))?;
    let start = match arguments.qemu.is_empty() {
        true => Start::unknown(&source),
        false => Start::rehearsed(&source, &name, arguments.qemu, state).await?,
    };
    if let Some(disk) = start
        .disks
        .iter()
        .find(|disk| disks::is_target(disk, &arguments.to))
    {
        return Err(Failure::new(
            Code::Refused,
            format!(
                "{} is the guest's own {}",
                arguments.to.display(),
                disks::label(disk)
            ),
        ));
    }
    let not_checked = not_checked(&source, &start);
    let (form, compression, machine) = (source.form(), source.compression(), source.machine().to_owned());
    let can_be_woken = start.command_line.is_some();
    let mut manifest = manifest(&source, &name, start);
    let total = ByteCount(source.ram().0 * 2);
    let target = std::path::absolute(&arguments.to)
        .map_err(|error| Failure::new(Code::Usage, format!("{}: {error}", arguments.to.display())))?;
    let imported = watched(report, "Importing", total, {
        let target = target.clone();
        let options = CreateOptions {
            replace: arguments.replace,
            compression: arguments.compress,
            key: arguments.key.read()?,
            ..CreateOptions::default()
        };
        move |run| {
            let staged = source.stage(&target, options, run)?;
            manifest.guest.state_when_saved = match source.libvirt() {
                Some(header) if header.was_running => GuestState::Running,
                Some(_) => GuestState::Paused,
                None => staged.guest_state().unwrap_or(GuestState::Paused),
            };
            Ok(staged.write(&manifest, run)?)
        }
    })
    .await?;
    let Imported { written, sealed } = imported;
    drop(sealed);
    let image = Image::open(&target)?;
    let object = json!({
        "result": "imported",
        "file": arguments.file,
        "image": target,
        "image_id": image.id(),
        "form": form,
        "compression": compression.to_string(),
        "machine": machine,
        "name": name,
        "data_bytes": written.data.0,
        "stored_bytes": written.stored.0,
        "zero_bytes": written.zero.0,
        "guest": image.manifest().guest.state_when_saved,
        "can_be_woken": can_be_woken,
        "not_checked": not_checked,
    });
    let mut text = format!(
        "imported {} ({form}, {compression}, machine {machine}) to {}: {} of data, {} of zeros, saved while {:?}",
        arguments.file.display(),
        target.display(),
        written.data,
        written.zero,
        image.manifest().guest.state_when_saved,
    );
    for remark in &not_checked {
        text.push_str(&format!("\nnote: {remark}"));
    }
    report.result(&object, &text);
    Ok(ExitCode::SUCCESS)
}

impl Start {
    /// What the file alone tells.
    fn unknown(source: &Source) -> Self {
        let domain = source.libvirt().map(|header| &header.domain);
        let main_ram = source.blocks().iter().find(|block| block.name == "pc.ram");
        let main_ram = main_ram.map(|block| block.name.clone());
        Self {
            command_line: None,
            directory: None,
            qemu: Qemu {
                version: String::new(),
                package: String::new(),
                binary: domain.and_then(|domain| domain.emulator.clone()),
                binary_fingerprint: None,
                memory_backend_offset: false,
                memory_backend_rom: false,
            },
            cpu: None,
            hardware: None,
            backed: main_ram.iter().cloned().collect(),
            main_ram,
            disks: domain.map(libvirt_disks).unwrap_or_default(),
        }
    }

    /// What a QEMU of the given command line shows.
    async fn rehearsed(
        source: &Source,
        name: &str,
        qemu: Vec<String>,
        state: &StateDir,
    ) -> Result<Self, Failure> {
        let usage = |error: CommandLineError| Failure::new(Code::Usage, error.to_string());
        let command_line = with_absolute_program(qemu)?;
        let line = CommandLine::parse(&command_line).map_err(usage)?;
        line.check_supervisable().map_err(usage)?;
        let directory = std::env::current_dir().map_err(|error| {
            Failure::new(Code::Usage, format!("cannot tell the working directory: {error}"))
        })?;
        let scratch = state.claim(name, None).await?;
        let seen = Rehearsal::of(&line, source.machine(), &directory, scratch.path()).await?;
        seen.check_blocks(source.blocks())?;
        if seen.main_ram.is_none() && !line.names_main_memory() {
            return Err(Failure::new(
                Code::Refused,
                format!(
                    "machine type {} has no main RAM that could be placed",
                    source.machine()
                ),
            ));
        }
        Ok(Self {
            cpu: line.cpu().map(str::to_owned),
            command_line: Some(command_line),
            directory: Some(directory),
            hardware: Some(seen.hardware),
            qemu: seen.qemu,
            main_ram: seen.main_ram,
            backed: seen.backed,
            disks: seen.disks,
        })
    }
}

fn manifest(source: &Source, name: &str, start: Start) -> Manifest {
    let saved = source.modified().duration_since(UNIX_EPOCH).unwrap_or_default();
    Manifest {
        created_unix_ms: u64::try_from(saved.as_millis()).unwrap_or(u64::MAX),
        dormouse_version: env!("CARGO_PKG_VERSION").to_owned(),
        operation: None,
        vm_name: name.to_owned(),
        qemu: start.qemu,
        machine: source.machine().to_owned(),
        machine_default_ram_id: start.main_ram,
        cpu: start.cpu,
        hardware: start.hardware,
        ram_blocks: source
            .blocks()
            .iter()
            .map(|block| RamBlock {
                name: block.name.clone(),
                length_bytes: block.length.0,
                backend: start.backed.contains(&block.name).then(|| Backend {
                    id: block.name.clone(),
                    kind: "memory-backend-file".to_owned(),
                }),
            })
            .collect(),
        command_line: start.command_line,
        working_directory: start.directory,
        disks: start.disks,
        guest: Guest {
            state_when_saved: GuestState::Paused,
            went_on: false,
        },
        timings_ms: Default::default(),
        engine: format!("import of a {}", source.form()),
    }
}

/// What the file has no means to tell.
fn not_checked(source: &Source, start: &Start) -> Vec<String> {
    let mut remarks = vec![match source.compression() {
        StreamCompression::Gzip | StreamCompression::Bzip2 | StreamCompression::Xz => format!(
            "the checksum of the {} data was right; the stream has none of its own",
            source.compression()
        ),
        _ => "the file has no checksum of RAM: what was wrong in it is wrong in the image, which is checked from now on"
            .to_owned(),
    }];
    if start.disks.is_empty() && start.command_line.is_some() {
        remarks.push("the machine has no disks".to_owned());
    } else if !start.disks.is_empty() {
        remarks.push(
            "whether the disks were written between the save and now cannot be told; from now on it can"
                .to_owned(),
        );
    }
    match &start.command_line {
        Some(_) => remarks.push(
            "RAM and machine type fit the command line; whether its devices do is for QEMU to say at the wake, before \
             the guest runs"
                .to_owned(),
        ),
        None => remarks.push(
            "how the guest is started is not known, so the image can be looked at and exported but not woken: import \
             again with `-- QEMU ARGUMENTS`"
                .to_owned(),
        ),
    }
    if let (Some(header), Some(_)) = (source.libvirt(), &start.command_line) {
        let used: Vec<&str> = start.disks.iter().map(|disk| disk.file_name.as_str()).collect();
        let missing = header
            .domain
            .disks
            .iter()
            .filter_map(|disk| disk.source.as_deref());
        let missing = missing.filter(|file| !used.contains(&file.to_string_lossy().as_ref()));
        for file in missing {
            remarks.push(format!(
                "libvirt's domain has the disk {}, the command line has not",
                file.display()
            ));
        }
    }
    remarks
}

/// Disks as libvirt names them; only to be looked at.
fn libvirt_disks(domain: &dormouse_storage::exchange::Domain) -> Vec<Disk> {
    let with_source = domain.disks.iter().filter_map(|disk| {
        let source: &Path = disk.source.as_deref()?;
        Some(Disk {
            device: disk.target.clone(),
            qdev: None,
            node_name: String::new(),
            file_name: source.to_string_lossy().into_owned(),
            format: disk.format.clone().unwrap_or_else(|| "raw".to_owned()),
            virtual_size_bytes: 0,
            read_only: disk.read_only,
            witness: disks::witness(source),
            backing: Vec::new(),
        })
    });
    with_source.collect()
}
