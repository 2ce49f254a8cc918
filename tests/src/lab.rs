//! A test's folder, and the sweeping up.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use rustix::process::{Pid, Signal};
use tempfile::TempDir;

use crate::{processes, wait::until};

/// A private folder on disk. Every process of a test names a path in it, so that whatever the test
/// started, directly or not, is found and killed when the lab is dropped, however the test ended.
///
/// Declare it first in a test: it is then dropped last.
pub struct Lab {
    folder: TempDir,
}

impl Lab {
    /// A fresh folder. It is under `/var/tmp`, which is a disk where `/tmp` may be memory, and
    /// whose short name leaves room for socket paths.
    pub fn new() -> Self {
        let folder = tempfile::Builder::new()
            .prefix("dormouse-")
            .tempdir_in("/var/tmp")
            .expect("a folder can be made in /var/tmp");
        Self { folder }
    }

    /// The path of `name` in the folder; nothing is made.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The folder itself.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// The process ids of all QEMUs of this test.
    pub fn qemu_pids(&self) -> Vec<Pid> {
        processes::naming(self.folder())
            .iter()
            .filter(|process| process.is_qemu())
            .map(|process| process.pid)
            .collect()
    }

    /// The process id of the test's only QEMU.
    ///
    /// # Panics
    ///
    /// When there is none, or more than one.
    pub fn only_qemu(&self) -> Pid {
        match self.qemu_pids()[..] {
            [pid] => pid,
            ref pids => panic!("expected one QEMU, found {}", pids.len()),
        }
    }

    /// Waits until no QEMU of this test is left.
    pub fn wait_for_no_qemu(&self) {
        until("every QEMU of the test to end", || {
            self.qemu_pids().is_empty().then_some(())
        });
    }
}

impl Default for Lab {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // A supervisor that is killed first may leave a child behind that was not there to be seen
        // in the same look, so it takes a look that finds nothing.
        for _ in 0..100 {
            let left = processes::naming(self.folder());
            if left.is_empty() {
                break;
            }
            for process in &left {
                process.signal(Signal::KILL);
            }
        }
        // A folder with a volume in it cannot be removed, whichever of the two a test dropped first.
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        for mount_point in mounts.lines().filter_map(|mount| mount.split(' ').nth(1)) {
            if Path::new(mount_point).starts_with(self.folder()) {
                // Lazily: whoever was killed may still be on its way out.
                let _ = Command::new("umount").arg("-l").arg(mount_point).status();
            }
        }
    }
}
