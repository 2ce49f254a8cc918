//! The state directory: one folder per VM, each held by at most one supervisor.
//!
//! ```text
//! STATE-DIR/NAME/supervisor.lock   locked as long as the supervisor lives
//!                vm.json           the QEMU that it started: kept when the supervisor is killed
//!                qmp.sock          Dormouse's own monitor of that QEMU
//!                api.sock          the supervisor's API
//!                ram/              the guest's RAM, where it has a tmpfs of its own
//! STATE-DIR/NAME.log               what a supervisor in the background says
//!           .operations/           the records of hibernations under way, see `journal`
//!           .moves/                those of moves of volumes
//!           .machines/             what a QEMU without a supervisor is made of since its disks have moved
//!           .endings/              how each VM ended last, see `ending`
//! ```

use std::env;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};
use tokio::net::UnixStream;
use tokio::time::Instant;

use crate::error::{Code, Failure, GuestState};
use crate::journal::{self, Found};
use crate::machine::wake::feeding::FeedRecord;
use crate::machine::{volume, wake};
use crate::vm::file_identity::FileIdentity;
use crate::vm::process_identity::ProcessIdentity;
use crate::vm::ram_home::RamHome;
use crate::vm::shape::Shape;

/// How long a supervisor may take from the end of its API to the end of its process: it frees the guest's RAM then.
const ENDING_LIMIT: Duration = Duration::from_secs(10);

/// How often the lock of an ending supervisor is tried.
const POLL: Duration = Duration::from_millis(5);

/// Where all VMs of this user have their folders.
#[derive(Debug, Clone)]
pub struct StateDir(PathBuf);

/// A VM's folder, held by this process and gone with it, unless the process is killed.
#[derive(Debug)]
pub struct VmDirectory {
    state: StateDir,
    path: PathBuf,
    name: String,
    keep: bool,
    /// Held open for its lock.
    _lock: File,
}

/// What outlives a supervisor that is killed: enough to find its QEMU again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmRecord {
    /// QEMU's process; `None` if it had ended when this was written.
    pub qemu: Option<ProcessIdentity>,
    /// QEMU's command line as the user gave it.
    pub command_line: Vec<String>,
    /// What the machine was made of when it was up.
    pub shape: Option<Shape>,
}

impl StateDir {
    /// The directory that the user named, or `dormouse` in the runtime directory.
    pub fn of(named: Option<PathBuf>) -> io::Result<Self> {
        let path = named.unwrap_or_else(|| {
            let runtime = env::var_os("XDG_RUNTIME_DIR").filter(|path| !path.is_empty());
            runtime
                .map_or_else(default_runtime_directory, PathBuf::from)
                .join("dormouse")
        });
        Ok(Self(std::path::absolute(path)?))
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Where the supervisor of `name` listens.
    pub fn api_socket(&self, name: &str) -> PathBuf {
        self.0.join(name).join("api.sock")
    }

    /// Where the monitor of `name` is.
    pub fn monitor_socket(&self, name: &str) -> PathBuf {
        self.0.join(name).join("qmp.sock")
    }

    /// Whether the monitor at `socket` is that of the VM `name`, however its path is spelled.
    pub fn is_monitor_of(&self, name: &str, socket: &Path) -> bool {
        let ours = self.monitor_socket(name);
        let folder = |socket: &Path| socket.parent().and_then(FileIdentity::at);
        socket == ours
            || (socket.file_name() == ours.file_name()
                && folder(&ours).is_some()
                && folder(socket) == folder(&ours))
    }

    /// Where operations are written down.
    pub fn operations(&self) -> PathBuf {
        self.0.join(".operations")
    }

    /// Where moves of volumes are written down.
    pub fn moves(&self) -> PathBuf {
        self.0.join(".moves")
    }

    /// Where wakes are written down.
    pub fn wakes(&self) -> PathBuf {
        self.0.join(".wakes")
    }

    /// Where it is kept what a QEMU that nobody supervises is made of, once its disks have moved.
    pub fn machine(&self, qemu: ProcessIdentity) -> PathBuf {
        self.0
            .join(".machines")
            .join(format!("{}-{}", qemu.pid, qemu.start_ticks))
    }

    /// Forgets the machines of QEMUs that are gone.
    pub fn sweep_machines(&self) {
        let entries = fs::read_dir(self.0.join(".machines"));
        for entry in entries.into_iter().flatten().flatten() {
            if VmRecord::read(&entry.path()).is_some_and(|record| record.living().is_none()) {
                // The next look finds it again.
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }

    /// Whether an operation on this QEMU was interrupted.
    pub fn is_interrupted(&self, pid: u32) -> bool {
        let Some(qemu) = ProcessIdentity::of(pid) else {
            return false;
        };
        let found = journal::find(&self.operations()).unwrap_or_default();
        let moves = journal::find_all::<volume::record::Record>(&self.moves()).unwrap_or_default();
        let wakes = journal::find_all::<wake::record::Record>(&self.wakes()).unwrap_or_default();
        found
            .iter()
            .any(|found| matches!(found, Found::Interrupted(journal) if journal.record().qemu == qemu))
            || moves
                .iter()
                .any(|found| matches!(found, Found::Interrupted(journal) if journal.record().qemu == qemu))
            || wakes
                .iter()
                .any(|found| matches!(found, Found::Interrupted(journal) if journal.record().qemu == qemu))
    }

    /// What a supervisor of `name` in the background writes to.
    pub fn log(&self, name: &str) -> PathBuf {
        self.0.join(format!("{name}.log"))
    }

    /// The names of all VMs that have a folder.
    pub fn names(&self) -> io::Result<Vec<String>> {
        let entries = match fs::read_dir(&self.0) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let mut names: Vec<String> = entries
            .flatten()
            .filter(|entry| entry.path().join("supervisor.lock").exists())
            .filter_map(|entry| entry.file_name().into_string().ok())
            .filter(|name| !name.starts_with('.'))
            .collect();
        names.sort();
        Ok(names)
    }

    /// Makes the directory itself. One that belongs to another user is not taken: its owner could replace what is in it.
    pub fn make(&self) -> Result<(), Failure> {
        let at = |why: &dyn std::fmt::Display| {
            Failure::new(
                Code::Usage,
                format!("cannot use the state directory {}: {why}", self.0.display()),
            )
        };
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.0)
            .map_err(|error| at(&error))?;
        let owner = fs::metadata(&self.0).map_err(|error| at(&error))?.uid();
        if owner == rustix::process::geteuid().as_raw() {
            Ok(())
        } else {
            Err(at(&format!("it belongs to user {owner}")))
        }
    }

    /// Takes the folder of `name` for this process and clears what a dead supervisor left in it. Refused while another
    /// supervisor lives, or a QEMU of an earlier one.
    pub async fn claim(&self, name: &str, ram_directory: Option<&Path>) -> Result<VmDirectory, Failure> {
        self.make()?;
        let path = self.0.join(name);
        let at =
            |error: io::Error| Failure::new(Code::Usage, format!("cannot use {}: {error}", path.display()));
        let lock_path = path.join("supervisor.lock");
        let lock = loop {
            fs::DirBuilder::new()
                .recursive(true)
                .mode(0o700)
                .create(&path)
                .map_err(at)?;
            let options = File::options()
                .create(true)
                .truncate(false)
                .write(true)
                .mode(0o600)
                .open(&lock_path);
            let lock = match options {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                opened => opened.map_err(at)?,
            };
            self.lock(name, &lock).await?;
            // An ending supervisor takes its folder away before it lets go of the lock.
            if FileIdentity::at(&lock_path) == FileIdentity::of_open(&lock) {
                break lock;
            }
        };
        if let Some(pid) = VmRecord::look(&path)?.and_then(|record| record.living()) {
            let hint = if FeedRecord::read(&path)?.is_some() {
                format!("; its memory still comes from an image: `dormouse recover {name}` feeds it the rest")
            } else if self.is_interrupted(pid) {
                format!("; an operation on it was interrupted: `dormouse recover {name}` ends that first")
            } else {
                String::new()
            };
            return Err(Failure::new(
                Code::Refused,
                format!(
                    "VM {name} still runs without its supervisor, as process {pid}; its monitor is {}{hint}",
                    self.monitor_socket(name).display()
                ),
            )
            .with_guest(GuestState::Running));
        }
        RamHome::remove_leftovers(&path, ram_directory);
        for leftover in [
            "vm.json",
            "qmp.sock",
            "api.sock",
            "ask.sock",
            "feed.json",
            "feed.sock",
        ] {
            let _ = fs::remove_file(path.join(leftover));
        }
        Ok(VmDirectory {
            state: self.clone(),
            path,
            name: name.to_owned(),
            keep: false,
            _lock: lock,
        })
    }
}

impl StateDir {
    /// Takes the lock. A supervisor that serves its API no more is ending, and has its lock only for moments.
    async fn lock(&self, name: &str, lock: &File) -> Result<(), Failure> {
        let deadline = Instant::now() + ENDING_LIMIT;
        while let Err(error) = flock(lock, FlockOperation::NonBlockingLockExclusive) {
            let serves = UnixStream::connect(self.api_socket(name)).await.is_ok();
            if error != Errno::WOULDBLOCK || serves || Instant::now() > deadline {
                return Err(Failure::new(
                    Code::Refused,
                    format!("VM {name} has a supervisor already"),
                ));
            }
            tokio::time::sleep(POLL).await;
        }
        Ok(())
    }
}

impl VmDirectory {
    /// Where it is.
    pub fn state(&self) -> &StateDir {
        &self.state
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where the monitor of its QEMU is.
    pub fn monitor_socket(&self) -> PathBuf {
        self.path.join("qmp.sock")
    }

    /// The VM's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Remembers the QEMU that was started.
    pub fn record(&self, pid: u32, command_line: &[String], shape: Option<&Shape>) -> Result<(), Failure> {
        let record = VmRecord {
            qemu: ProcessIdentity::of(pid),
            command_line: command_line.to_vec(),
            shape: shape.cloned(),
        };
        record
            .write(&self.path)
            .map_err(|error| Failure::new(Code::StorageIo, format!("cannot write the VM's record: {error}")))
    }

    /// Leaves the folder for a person to look at.
    pub fn keep(mut self) {
        self.keep = true;
    }
}

/// Takes the folder away, and releases the lock after it.
impl Drop for VmDirectory {
    fn drop(&mut self) {
        if self.keep {
            return;
        }
        // The name goes first and at once, so that whoever claims it next never shares a folder with its remains.
        let remains = self
            .path
            .with_file_name(format!(".{}.ended-{}", self.name, std::process::id()));
        let removed = fs::rename(&self.path, &remains).and_then(|()| fs::remove_dir_all(&remains));
        if let Err(error) = removed {
            tracing::warn!(%error, directory = %self.path.display(), "cannot remove the VM's folder");
        }
    }
}

impl VmRecord {
    /// The record in a VM's folder, if there is one that can be read.
    pub fn read(directory: &Path) -> Option<Self> {
        Self::look(directory).ok().flatten()
    }

    /// The record in a VM's folder. With one that cannot be read nobody knows whether its QEMU lives.
    fn look(directory: &Path) -> Result<Option<Self>, Failure> {
        let path = directory.join("vm.json");
        let read = match fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            read => read,
        };
        let record = read.and_then(|text| Ok(serde_json::from_slice(&text)?));
        record.map(Some).map_err(|error| {
            Failure::new(
                Code::Operator,
                format!(
                    "the VM's record {} cannot be read: {error}; make sure that no QEMU of it runs, and remove the record",
                    path.display()
                ),
            )
        })
    }

    /// Puts the record into a folder, which is made if there is none, durably: what a guest wakes from is made of it.
    pub fn write(&self, directory: &Path) -> io::Result<()> {
        fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)?;
        let new = directory.join("vm.json.new");
        let mut file = File::options()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .open(&new)?;
        file.write_all(&serde_json::to_vec(self)?)?;
        file.sync_all()?;
        fs::rename(new, directory.join("vm.json"))?;
        File::open(directory)?.sync_all()
    }

    /// Its QEMU, if that is there still.
    pub fn living(&self) -> Option<u32> {
        self.qemu.filter(ProcessIdentity::is_alive).map(|qemu| qemu.pid)
    }
}

fn default_runtime_directory() -> PathBuf {
    if rustix::process::geteuid().is_root() {
        return PathBuf::from("/run");
    }
    env::temp_dir().join(format!("dormouse-{}", rustix::process::geteuid().as_raw()))
}

/// Checks a VM's name: it becomes a folder, a part of a socket's path and a word in logs.
pub fn checked_name(name: &str) -> Result<String, Failure> {
    let fine = !name.is_empty()
        && name.len() <= 63
        && !name.starts_with(['.', '-'])
        && name
            .chars()
            .all(|c| c.is_ascii_alphanumeric() || "._-".contains(c));
    if fine {
        return Ok(name.to_owned());
    }
    Err(Failure::new(
        Code::Usage,
        format!(
            "{name:?} is no name for a VM: use 1 to 63 letters, digits, '.', '_' and '-', beginning with a letter or digit"
        ),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state_dir() -> (tempfile::TempDir, StateDir) {
        let directory = tempfile::tempdir().unwrap();
        let state = StateDir::of(Some(directory.path().to_owned())).unwrap();
        (directory, state)
    }

    #[tokio::test(start_paused = true)]
    async fn a_vm_has_one_supervisor_at_a_time() {
        let (_guard, state) = state_dir();
        let held = state.claim("a", None).await.unwrap();
        assert_eq!(state.claim("a", None).await.unwrap_err().code, Code::Refused);
        state.claim("b", None).await.unwrap();
        drop(held);
        state.claim("a", None).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_vm_whose_qemu_outlived_its_supervisor_is_not_taken_for_dead() {
        let (_guard, state) = state_dir();
        let held = state.claim("a", None).await.unwrap();
        held.record(std::process::id(), &["qemu".to_owned()], None)
            .unwrap();
        held.keep();
        let error = state.claim("a", None).await.unwrap_err();
        assert!(error.message.contains("still runs"), "{error}");
    }

    #[test]
    fn names_cannot_leave_the_state_directory() {
        for name in ["", "..", "../a", "a/b", "-a", ".a", "a b", &"a".repeat(64)] {
            assert_eq!(checked_name(name).unwrap_err().code, Code::Usage, "{name:?}");
        }
        assert_eq!(checked_name("web-1.example_a").unwrap(), "web-1.example_a");
    }

    #[tokio::test]
    async fn a_name_can_be_claimed_while_its_last_supervisor_is_ending() {
        let (_guard, state) = state_dir();
        for _ in 0..50 {
            let held = state.claim("a", None).await.unwrap();
            let next = state.clone();
            let next = tokio::spawn(async move { next.claim("a", None).await });
            tokio::task::yield_now().await;
            drop(held);
            let held = next.await.unwrap().unwrap();
            assert!(held.path().join("supervisor.lock").exists());
            drop(held);
        }
    }
}
