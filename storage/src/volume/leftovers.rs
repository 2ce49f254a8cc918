//! What writers that were killed left beside their targets.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::Path;

use rustix::fs::FlockOperation;
use uuid::Uuid;

/// Removes the files in `folder` whose name is `prefix` and an id, and whose writer is dead: one that is still written is
/// locked. What only looks alike is somebody else's, and stays.
pub(crate) fn remove_leftovers(folder: &Path, prefix: &OsStr) {
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
        let dead = File::open(&path)
            .is_ok_and(|file| rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok());
        if dead && let Err(error) = fs::remove_file(&path) {
            tracing::warn!(path = %path.display(), %error, "cannot remove what a killed writer left");
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, Mode};

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
