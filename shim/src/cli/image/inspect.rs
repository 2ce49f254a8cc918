//! `dormouse image inspect`: what is in an image.

use std::path::Path;
use std::process::ExitCode;

use dormouse_storage::image::manifest::{Disk, Manifest};
use dormouse_storage::{ByteCount, Image, Usage};
use serde_json::json;

use super::age::{age_of, told};
use crate::cli::report::Report;
use crate::error::Failure;
use crate::vm::lock_holder::holder;

pub fn inspect(path: &Path, report: &Report) -> Result<ExitCode, Failure> {
    let image = Image::open(path)?;
    let usage = image.usage()?;
    let manifest = image.manifest();
    let held_by = holder(path);
    let blocks: Vec<_> = image
        .layout()
        .blocks()
        .iter()
        .map(|block| {
            json!({
                "name": block.name,
                "offset_bytes": block.offset,
                "length_bytes": block.length.0,
                "backend": backend(manifest, &block.name),
            })
        })
        .collect();
    let object = json!({
        "path": path,
        "id": image.id(),
        "format": image.format(),
        "state": image.state().to_string(),
        "snapshot": manifest.guest.went_on,
        "disks_forced": image.note().disks_forced,
        "held_by": held_by,
        "age_seconds": age_of(manifest).map(|age| age.as_secs()),
        "ram_bytes": image.layout().ram().0,
        "data_bytes": usage.data.0,
        "stored_bytes": usage.stored.0,
        "compressed_bytes": usage.compressed.0,
        "compression_ratio": ratio(&usage),
        "zero_bytes": usage.zero.0,
        "device_state_bytes": usage.device_state.0,
        "allocated_bytes": usage.allocated.0,
        "encrypted": image.is_encrypted(),
        "mappable": image.check_mappable().is_ok(),
        "blocks": blocks,
        "manifest": manifest,
    });
    report.result(&object, &describe(&image, &usage, held_by));
    Ok(ExitCode::SUCCESS)
}

fn describe(image: &Image, usage: &Usage, held_by: Option<u32>) -> String {
    let manifest = image.manifest();
    let mut lines = Vec::new();
    let mut line = |name: &str, text: String| lines.push(format!("{name:<10}{text}"));
    let held = held_by.map_or_else(String::new, |pid| format!(", in use by process {pid}"));
    line(
        "image",
        format!(
            "{} ({}{held}), format {}",
            image.id(),
            image.state(),
            image.format()
        ),
    );
    let age = age_of(manifest).map_or_else(|| "in the future".to_owned(), |age| format!("{} ago", told(age)));
    line(
        "guest",
        format!(
            "{}, saved {age} while {:?}, by {}{}",
            manifest.vm_name,
            manifest.guest.state_when_saved,
            manifest.engine,
            if manifest.guest.went_on {
                "; a snapshot: it went on"
            } else {
                ""
            }
        ),
    );
    let qemu = match manifest.qemu.version.as_str() {
        "" => "a QEMU that is not known".to_owned(),
        version => format!("QEMU {version}"),
    };
    line("machine", format!("{} on {qemu}", manifest.machine));
    line("memory", memory(image, usage));
    for block in image.layout().blocks() {
        let kind = match backend(manifest, &block.name) {
            Some(_) => "guest RAM",
            None => "of a device",
        };
        line("block", format!("{} {} ({kind})", block.name, block.length));
    }
    line(
        "on disk",
        format!(
            "{}{}{}",
            usage.allocated,
            if image.is_encrypted() { ", encrypted" } else { "" },
            match image.check_mappable() {
                Ok(()) => ", can be mapped".to_owned(),
                Err(why) => format!(", cannot be mapped: {why}"),
            }
        ),
    );
    for disk in &manifest.disks {
        line("disk", describe_disk(disk));
    }
    if image.note().disks_forced {
        line(
            "forced",
            "its guest was woken although its disks were not as they were at the save".to_owned(),
        );
    }
    if manifest.command_line.is_none() {
        line("start", "not known: this image cannot be woken".to_owned());
    }
    lines.join("\n")
}

fn memory(image: &Image, usage: &Usage) -> String {
    let compressed = match ratio(usage) {
        Some(ratio) if usage.compressed > ByteCount::ZERO => format!(
            " ({} of it compressed, {} in all, {ratio:.2} to 1)",
            usage.compressed, usage.stored
        ),
        _ => String::new(),
    };
    format!(
        "{}: {} of data{compressed}, {} of zeros; device state {}",
        image.layout().ram(),
        usage.data,
        usage.zero,
        usage.device_state
    )
}

fn describe_disk(disk: &Disk) -> String {
    let mut text = format!(
        "{} ({}, {})",
        disk.file_name,
        disk.format,
        ByteCount(disk.virtual_size_bytes)
    );
    if disk.read_only {
        text.push_str(", read-only");
    }
    for file in &disk.backing {
        text.push_str(&format!(", on {}", file.file_name));
    }
    if disk.witness.is_none() {
        text.push_str("; whether it was written since cannot be told");
    }
    text
}

/// The kind of the memory backend behind a block.
fn backend<'a>(manifest: &'a Manifest, name: &str) -> Option<&'a str> {
    let block = manifest.ram_blocks.iter().find(|block| block.name == name)?;
    block.backend.as_ref().map(|backend| backend.kind.as_str())
}

/// How many bytes of data stand in one that is stored.
fn ratio(usage: &Usage) -> Option<f64> {
    (usage.stored > ByteCount::ZERO).then(|| usage.data.0 as f64 / usage.stored.0 as f64)
}
