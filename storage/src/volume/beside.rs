//! Hidden files beside their targets: what is written before it gets its name, as `.NAME.KIND-ID`.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use uuid::Uuid;

use super::hold::lock;
use crate::image::ImageError;

/// The folder that `target` is in.
pub(crate) fn folder_of(target: &Path) -> &Path {
    match target.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}

/// Where a file of this kind with this id is on its way to `target`; `None` if that names no file.
pub(crate) fn path_beside(target: &Path, kind: &str, id: Uuid) -> Option<PathBuf> {
    let mut name = prefix_of(target, kind)?;
    name.push(id.to_string());
    Some(folder_of(target).join(name))
}

/// Begins a file on its way to `target`, private, locked, and open for reading and writing. What killed writers left of
/// the same kind for the same target is removed.
///
/// # Errors
///
/// [`ImageError::Io`] if the system refuses, or if `target` names no file.
pub(crate) fn create_beside(target: &Path, kind: &str, id: Uuid) -> Result<(File, PathBuf), ImageError> {
    let (Some(prefix), Some(path)) = (prefix_of(target, kind), path_beside(target, kind, id)) else {
        let source = io::Error::from(io::ErrorKind::InvalidInput);
        return Err(ImageError::io("create", target, source));
    };
    remove_leftovers(folder_of(target), &prefix);
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&path)
        .map_err(|source| ImageError::io("create", &path, source))?;
    match lock(&file, &path) {
        Ok(()) => Ok((file, path)),
        Err(error) => {
            // Nobody knows it yet.
            let _ = fs::remove_file(&path);
            Err(error)
        }
    }
}

fn prefix_of(target: &Path, kind: &str) -> Option<OsString> {
    let mut prefix = OsString::from(".");
    prefix.push(target.file_name()?);
    prefix.push(format!(".{kind}-"));
    Some(prefix)
}

/// Removes the files in `folder` whose name is `prefix` and an id, and whose writer is dead: one that is still written is
/// locked. What only looks alike is somebody else's, and stays.
fn remove_leftovers(folder: &Path, prefix: &OsStr) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let id = name.as_encoded_bytes().strip_prefix(prefix.as_encoded_bytes());
        let is_ours = id.is_some_and(|id| Uuid::try_parse_ascii(id).is_ok())
            // Opening anything else could wait for ever, or do something.
            && entry.file_type().is_ok_and(|kind| kind.is_file());
        if !is_ours {
            continue;
        }
        let path = entry.path();
        let dead = File::open(&path).is_ok_and(|file| lock(&file, &path).is_ok());
        if dead && let Err(error) = fs::remove_file(&path) {
            tracing::warn!(path = %path.display(), %error, "cannot remove what a killed writer left");
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, FlockOperation, Mode};

    use super::*;

    #[test]
    fn only_dead_files_with_an_id_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let (dead, alive) = (Uuid::new_v4(), Uuid::new_v4());
        let (dead, alive) = (
            path(&format!(".x.partial-{dead}")),
            path(&format!(".x.partial-{alive}")),
        );
        fs::write(&dead, "half").unwrap();
        let held = File::create(&alive).unwrap();
        rustix::fs::flock(&held, FlockOperation::NonBlockingLockExclusive).unwrap();
        let alike = path(".x.partial-of-mine");
        fs::write(&alike, "whole").unwrap();
        // Opened, it would wait for a writer.
        let pipe = path(&format!(".x.partial-{}", Uuid::new_v4()));
        rustix::fs::mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        remove_leftovers(folder.path(), OsStr::new(".x.partial-"));
        assert_eq!(
            [&dead, &alive, &alike, &pipe].map(|path| path.exists()),
            [false, true, true, true]
        );
    }
}
