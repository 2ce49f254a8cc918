//! `dormouse image export`: what is in an image, for other tools.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::{Args, ValueEnum};
use dormouse_storage::exchange::{self, ElfOptions, ExportFormat, Registers};
use dormouse_storage::{Image, ImageState};
use serde_json::json;

use super::{opened, watched};
use crate::cli::KeyArguments;
use crate::cli::report::Report;
use crate::error::{Code, Failure};
use crate::vm::command_line::CommandLine;

/// An export.
#[derive(Debug, Args)]
pub struct ExportArguments {
    /// The image, in any state
    image: PathBuf,
    /// What it becomes
    #[arg(long)]
    format: Format,
    /// Where the file goes
    #[arg(long, value_name = "FILE")]
    to: PathBuf,
    /// Replace a file that is there already (an image of ours is never replaced)
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    key: KeyArguments,
}

/// The formats, by their names in the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// QEMU's file with every page at its place, for QEMU 9.0 and later with the capability mapped-ram
    MappedRam,
    /// QEMU's plain migration stream, for -incoming of every QEMU
    Stream,
    /// An ELF core of physical memory, for gdb and crash
    Elf,
}

pub async fn export(arguments: ExportArguments, report: &Report) -> Result<ExitCode, Failure> {
    let ExportArguments {
        image: path,
        format,
        to,
        force,
        key,
    } = arguments;
    let image = opened(&path, &key)?;
    let wanted = match format {
        Format::MappedRam => ExportFormat::MappedRam,
        Format::Stream => ExportFormat::Stream,
        Format::Elf => ExportFormat::Elf(elf_options(&image)?),
    };
    let (state, was_encrypted) = (image.state(), image.is_encrypted());
    let (total, started) = (image.layout().ram(), Instant::now());
    let exported = watched(report, "Exporting", total, {
        let to = to.clone();
        move |run| Ok(exchange::export(&image, &wanted, &to, force, run)?)
    })
    .await?;
    let seconds = started.elapsed().as_secs_f64();
    let name = format
        .to_possible_value()
        .map(|value| value.get_name().to_owned());
    let registers = exported.registers.as_ref().map(|registers| match registers {
        Registers::Cpus(count) => json!({"cpus": count}),
        Registers::Missing(reason) => json!({"missing": reason}),
    });
    let object = json!({
        "result": "exported",
        "image": path,
        "image_state": state.to_string(),
        "format": name,
        "file": to,
        "length_bytes": exported.length.0,
        "allocated_bytes": exported.allocated.0,
        "left_out": exported.left_out,
        "registers": registers,
        "seconds": seconds,
    });
    let mut text = format!(
        "exported to {}: {} long, {} on disk ({seconds:.2} s)",
        to.display(),
        exported.length,
        exported.allocated
    );
    if let Some(Registers::Missing(reason)) = &exported.registers {
        text.push_str(&format!("\nwithout registers: {reason}"));
    }
    if !exported.left_out.is_empty() {
        text.push_str(&format!(
            "\nwithout {}: their addresses are not known",
            exported.left_out.join(", ")
        ));
    }
    if was_encrypted {
        text.push_str("\nthe image is encrypted, this file is not");
    }
    if format != Format::Elf {
        text.push_str(&format!("\n{}", twice(state)));
    }
    report.result(&object, &text);
    Ok(ExitCode::SUCCESS)
}

/// A guest that runs from two copies of its memory ruins its disks.
fn twice(state: ImageState) -> &'static str {
    match state {
        ImageState::Sealed => {
            "the image holds the same guest: run it from one of the two only, or its disks will be ruined"
        }
        _ => {
            "the image was woken: its guest has run since, and running it from this file on the same disks ruins them"
        }
    }
}

fn elf_options(image: &Image) -> Result<ElfOptions, Failure> {
    let manifest = image.manifest();
    let line = manifest
        .command_line
        .as_deref()
        .map(CommandLine::parse)
        .transpose();
    let below = line.and_then(|line| line.map_or(Ok(None), |line| line.max_ram_below_4g()));
    let below =
        below.map_err(|error| Failure::new(Code::Refused, format!("the recorded command line: {error}")))?;
    Ok(ElfOptions {
        main_ram: manifest.machine_default_ram_id.clone().unwrap_or_default(),
        max_ram_below_4g: below.map(|bytes| bytes.0),
    })
}
