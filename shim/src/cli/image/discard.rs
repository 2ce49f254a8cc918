//! `dormouse image discard`: removes an image for good, after saying what is lost.

use std::io::{BufRead, IsTerminal, Write, stderr, stdin};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Args;
use dormouse_storage::image::remove_broken;
use dormouse_storage::{Image, ImageError, ImageState, TornBecause};
use serde_json::json;

use super::age::{age_of, told};
use crate::cli::report::Report;
use crate::error::{Code, Failure, sentence};
use crate::vm::process::check_not_mapped;

/// A removal.
#[derive(Debug, Args)]
pub struct DiscardArguments {
    /// The image
    path: PathBuf,
    /// Do not ask; needed where there is no terminal to ask at
    #[arg(long)]
    yes: bool,
    /// Also remove an image that was being woken when its wake ended, or that cannot be read: look first whether its
    /// guest runs, or whether it can be saved
    #[arg(long)]
    force: bool,
}

pub fn discard(arguments: DiscardArguments, report: &Report) -> Result<ExitCode, Failure> {
    let DiscardArguments { path, yes, force } = arguments;
    let found = Found::at(&path)?;
    check_not_mapped(&path)?;
    let lost = found.lost();
    if found.needs_force() && !force {
        return Err(Failure::new(
            Code::Refused,
            format!("{}: {lost}; --force removes it all the same", path.display()),
        ));
    }
    if !yes {
        ask(&path, &lost)?;
    }
    found.remove(&path)?;
    report.result(
        &json!({"result": "discarded", "image": path, "state": found.state(), "lost": lost}),
        &format!("discarded {}: {lost}", path.display()),
    );
    Ok(ExitCode::SUCCESS)
}

/// What is at the path, and held.
enum Found {
    Image(Box<Image>),
    /// It was an image once, or was to become one.
    Broken(ImageError),
}

impl Found {
    fn at(path: &Path) -> Result<Self, Failure> {
        match Image::open_locked(path) {
            Ok(image) => Ok(Self::Image(Box::new(image))),
            Err(error @ (ImageError::Torn { .. } | ImageError::Corrupt { .. })) => Ok(Self::Broken(error)),
            Err(error) => Err(error.into()),
        }
    }

    fn state(&self) -> String {
        match self {
            Self::Image(image) => image.state().to_string(),
            Self::Broken(ImageError::Torn { .. }) => "torn".to_owned(),
            Self::Broken(_) => "corrupt".to_owned(),
        }
    }

    fn needs_force(&self) -> bool {
        match self {
            Self::Image(image) => image.state() == ImageState::Waking,
            Self::Broken(error) => !is_unfinished(error),
        }
    }

    fn lost(&self) -> String {
        let image = match self {
            Self::Image(image) => image,
            Self::Broken(error) if is_unfinished(error) => {
                return "nothing is lost: it was never completed".to_owned();
            }
            Self::Broken(error) => return format!("it cannot be woken any more ({})", sentence(error)),
        };
        let manifest = image.manifest();
        let vm = &manifest.vm_name;
        match image.state() {
            ImageState::Sealed => {
                let age = age_of(manifest)
                    .map_or_else(|| "at some time".to_owned(), |age| format!("{} ago", told(age)));
                if manifest.guest.went_on {
                    return format!("a snapshot of {vm}, taken {age}, is lost; its guest went on after it");
                }
                format!(
                    "the memory of {vm}, saved {age} ({}), is lost; its disks are then as after a power cut",
                    image.layout().ram()
                )
            }
            ImageState::Waking => format!(
                "{vm} is being woken from it, or its wake ended in between: its guest may need it, or may have run since"
            ),
            _ => format!("nothing is lost: {vm} was woken from it and has run since"),
        }
    }

    fn remove(&self, path: &Path) -> Result<(), Failure> {
        match self {
            Self::Image(image) => Ok(image.remove()?),
            Self::Broken(_) => Ok(remove_broken(path)?),
        }
    }
}

/// Its guest was given back, or ran on, when this was given up.
fn is_unfinished(error: &ImageError) -> bool {
    matches!(
        error,
        ImageError::Torn {
            because: TornBecause::NeverSealed,
            ..
        }
    )
}

fn ask(path: &Path, lost: &str) -> Result<(), Failure> {
    if !stdin().is_terminal() {
        return Err(Failure::new(
            Code::Usage,
            format!("{lost}; there is no terminal to ask at: say --yes if that is meant"),
        ));
    }
    let _ = write!(stderr(), "Discard {}? {lost}. [y/N] ", path.display());
    let mut answer = String::new();
    let read = stdin().lock().read_line(&mut answer);
    match (read, answer.trim().to_ascii_lowercase().as_str()) {
        (Ok(_), "y" | "yes") => Ok(()),
        _ => Err(Failure::new(Code::Cancelled, "not discarded")),
    }
}
