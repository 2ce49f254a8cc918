//! `dormouse image verify`: reads all of an image and checks it.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use clap::Args;
use serde_json::json;

use super::{opened, watched};
use crate::cli::KeyArguments;
use crate::cli::report::Report;
use crate::error::Failure;

/// A check.
#[derive(Debug, Args)]
pub struct VerifyArguments {
    /// The image
    path: PathBuf,
    #[command(flatten)]
    key: KeyArguments,
}

pub async fn verify(
    VerifyArguments { path, key }: VerifyArguments,
    report: &Report,
) -> Result<ExitCode, Failure> {
    let image = opened(&path, &key)?;
    let started = Instant::now();
    let total = image.layout().ram();
    let verified = watched(report, "Verifying", total, move |run| Ok(image.verify(run)?)).await?;
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
