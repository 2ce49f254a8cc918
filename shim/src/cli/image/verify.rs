//! `dormouse image verify`: reads all of an image and checks it.

use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use dormouse_storage::Image;
use serde_json::json;

use super::watched;
use crate::cli::report::Report;
use crate::error::Failure;

pub async fn verify(path: &Path, report: &Report) -> Result<ExitCode, Failure> {
    let image = Image::open(path)?;
    let started = Instant::now();
    let total = image.layout().ram();
    let verified = watched(report, "Verifying", total, move |run| Ok(image.verify(run)?)).await?;
    let seconds = started.elapsed().as_secs_f64();
    let object = json!({
        "path": path,
        "result": "verified",
        "chunks": verified.chunks,
        "bytes": verified.bytes.0,
        "seconds": seconds,
    });
    let text = format!(
        "{}: all {} chunks ({}) are as they were written ({seconds:.2} s)",
        path.display(),
        verified.chunks,
        verified.bytes
    );
    report.result(&object, &text);
    Ok(ExitCode::SUCCESS)
}
