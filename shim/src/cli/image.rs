//! `dormouse image`: looks into images. Nothing here changes one.

use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dormouse_storage::{ByteCount, Image, Progress, Run, WORKER_THREADS};
use serde_json::json;

use super::VerifyArguments;
use super::report::Report;
use crate::error::Failure;

pub fn inspect(path: &Path, report: &Report) -> Result<ExitCode, Failure> {
    let image = Image::open(path)?;
    let usage = image.usage()?;
    let manifest = image.manifest();
    let blocks: Vec<_> = image
        .layout()
        .blocks()
        .iter()
        .map(
            |block| json!({"name": block.name, "offset_bytes": block.offset, "length_bytes": block.length.0}),
        )
        .collect();
    let object = json!({
        "path": path,
        "id": image.id(),
        "state": image.state().to_string(),
        "data_bytes": usage.data.0,
        "zero_bytes": usage.zero.0,
        "device_state_bytes": usage.device_state.0,
        "allocated_bytes": usage.allocated.0,
        "blocks": blocks,
        "manifest": manifest,
    });
    let saved_ago = SystemTime::now()
        .duration_since(UNIX_EPOCH + Duration::from_millis(manifest.created_unix_ms))
        .map(|ago| humantime::format_duration(Duration::from_secs(ago.as_secs())).to_string())
        .unwrap_or_default();
    let mut text = format!(
        "image     {} ({})\nguest     {}, saved {saved_ago} ago while {:?}\nmachine   {} on QEMU {}\n\
         memory    {} of data, {} of zeros, device state {}\non disk   {}",
        image.id(),
        image.state(),
        manifest.vm_name,
        manifest.guest.state_when_saved,
        manifest.machine,
        manifest.qemu.version,
        usage.data,
        usage.zero,
        usage.device_state,
        usage.allocated,
    );
    for disk in &manifest.disks {
        text.push_str(&format!(
            "\ndisk      {} ({}, {})",
            disk.file_name,
            disk.format,
            ByteCount(disk.virtual_size_bytes)
        ));
    }
    report.result(&object, &text);
    Ok(ExitCode::SUCCESS)
}

pub fn verify(VerifyArguments { path, key }: &VerifyArguments, report: &Report) -> Result<ExitCode, Failure> {
    let mut image = Image::open(path)?;
    if let Some(key) = key.read()? {
        image.unlock(&key)?;
    }
    let progress = Progress::default();
    let cancelled = AtomicBool::new(false);
    let started = Instant::now();
    let verified = image.verify(&Run {
        threads: WORKER_THREADS,
        progress: &progress,
        cancelled: &cancelled,
    })?;
    let seconds = started.elapsed().as_secs_f64();
    let object = json!({
        "path": path,
        "result": "verified",
        "chunks": verified.chunks,
        "bytes": verified.bytes.0,
        "with_key": !verified.without_key,
        "seconds": seconds,
    });
    let text = format!(
        "{}: all {} chunks ({}) are as they were written ({seconds:.2} s){}",
        path.display(),
        verified.chunks,
        verified.bytes,
        if verified.without_key {
            "; it is encrypted, and whether it can be decrypted was not tried without its key"
        } else {
            ""
        }
    );
    report.result(&object, &text);
    Ok(ExitCode::SUCCESS)
}
