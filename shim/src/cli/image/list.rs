//! `dormouse image list`: the images in a folder, whole or not.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use dormouse_storage::{ByteCount, Image, ImageError};
use serde::Serialize;
use serde_json::json;

use super::age::{age_of, told};
use crate::cli::report::Report;
use crate::error::{Code, Failure, sentence};
use crate::vm::lock_holder::holder;

/// A look at a folder.
#[derive(Debug, Args)]
pub struct ListArguments {
    /// The folder; those in it are not looked into
    #[arg(default_value = ".")]
    folder: PathBuf,
}

/// What is told of an image, or of what was to be one.
#[derive(Debug, Serialize)]
struct Entry {
    path: PathBuf,
    /// `sealed`, `waking`, `consumed`; `partial`, `torn`, `corrupt`, `newer` or `unreadable` for what is no whole image.
    state: String,
    /// Whether its guest went on.
    snapshot: bool,
    vm: Option<String>,
    machine: Option<String>,
    ram_bytes: Option<u64>,
    allocated_bytes: Option<u64>,
    age_seconds: Option<u64>,
    /// The process that holds it, where that can be told.
    held_by: Option<u32>,
    /// What is wrong with it.
    problem: Option<String>,
}

pub fn list(arguments: ListArguments, report: &Report) -> Result<ExitCode, Failure> {
    let folder = &arguments.folder;
    let failed = |error| Failure::new(Code::Usage, format!("cannot read {}: {error}", folder.display()));
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(failed)? {
        paths.push(entry.map_err(failed)?.path());
    }
    paths.sort();
    let entries: Vec<Entry> = paths.iter().filter_map(|path| Entry::of(path)).collect();
    report.result(
        &json!({"folder": folder, "images": entries}),
        &table(folder, &entries),
    );
    Ok(ExitCode::SUCCESS)
}

impl Entry {
    /// `None` for what has nothing to do with images.
    fn of(path: &Path) -> Option<Self> {
        // Opening a pipe would wait for a writer.
        let metadata = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
        let unfinished = unfinished(path);
        let (state, problem) = match Image::open(path) {
            Ok(image) => return Some(Self::whole(path, &image)),
            Err(ImageError::NotAnImage { .. }) if unfinished.is_none() => return None,
            Err(_) if unfinished.is_some() => ("partial", unfinished.map(str::to_owned)),
            Err(error) => {
                let state = match &error {
                    ImageError::Torn { .. } => "torn",
                    ImageError::Corrupt { .. } => "corrupt",
                    ImageError::NewerFormat { .. } => "newer",
                    _ => "unreadable",
                };
                (state, Some(sentence(&error)))
            }
        };
        let modified = metadata.modified().ok();
        Some(Self {
            path: path.to_owned(),
            state: state.to_owned(),
            snapshot: false,
            vm: None,
            machine: None,
            ram_bytes: None,
            allocated_bytes: Some(std::os::unix::fs::MetadataExt::blocks(&metadata) * 512),
            age_seconds: modified.and_then(|at| at.elapsed().ok()).map(|age| age.as_secs()),
            held_by: holder(path),
            problem,
        })
    }

    fn whole(path: &Path, image: &Image) -> Self {
        let manifest = image.manifest();
        Self {
            path: path.to_owned(),
            state: image.state().to_string(),
            snapshot: manifest.guest.went_on,
            vm: Some(manifest.vm_name.clone()),
            machine: Some(manifest.machine.clone()),
            ram_bytes: Some(image.layout().ram().0),
            allocated_bytes: image.usage().ok().map(|usage| usage.allocated.0),
            age_seconds: age_of(manifest).map(|age| age.as_secs()),
            held_by: holder(path),
            problem: None,
        }
    }

    fn line(&self) -> [String; 6] {
        let unknown = || "-".to_owned();
        let size = |bytes: Option<u64>| bytes.map_or_else(unknown, |bytes| ByteCount(bytes).to_string());
        let mut state = self.state.clone();
        if self.snapshot {
            state.push_str(", snapshot");
        }
        if let Some(pid) = self.held_by {
            state.push_str(&format!(", in use by process {pid}"));
        }
        [
            self.path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned(),
            self.vm.clone().unwrap_or_else(unknown),
            size(self.ram_bytes),
            size(self.allocated_bytes),
            self.age_seconds
                .map_or_else(unknown, |seconds| told(std::time::Duration::from_secs(seconds))),
            state,
        ]
    }
}

/// What kind of unfinished file this name belongs to.
fn unfinished(path: &Path) -> Option<&'static str> {
    let name = path.file_name()?.to_str()?;
    let name = name.strip_prefix('.')?;
    if name.contains(".partial-") {
        Some(
            "an image that is being written, or was given up: the next one to the same name removes what is left",
        )
    } else if name.contains(".export-") {
        Some(
            "an export that is being written, or was given up: the next one to the same name removes what is left",
        )
    } else {
        None
    }
}

fn table(folder: &Path, entries: &[Entry]) -> String {
    if entries.is_empty() {
        return format!("no images in {}", folder.display());
    }
    let head = ["IMAGE", "VM", "RAM", "ON DISK", "AGE", "STATE"].map(str::to_owned);
    let rows: Vec<[String; 6]> = std::iter::once(head)
        .chain(entries.iter().map(Entry::line))
        .collect();
    let width = |column: usize| {
        rows.iter()
            .map(|row| row[column].chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..5).map(width).collect();
    let mut lines: Vec<String> = rows
        .iter()
        .map(|row| {
            let cells = row
                .iter()
                .zip(&widths)
                .map(|(cell, width)| format!("{cell:<width$}  "));
            format!("{}{}", cells.collect::<String>(), row[5])
        })
        .collect();
    for entry in entries {
        if let Some(problem) = &entry.problem {
            lines.push(format!("{}: {problem}", entry.path.display()));
        }
    }
    lines.join("\n")
}
