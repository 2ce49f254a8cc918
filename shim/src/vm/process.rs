//! QEMU's process: one of our own with its monitor, and the end of any.

use std::collections::HashSet;
use std::fmt::Display;
use std::fs;
use std::io::{self, IsTerminal};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use dormouse_qmp::{Client, ConnectError, ConnectOptions};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::process::{Child, Command};
use tokio::time::Instant;

use super::block_ground::overlap;
use super::command_line::CommandLine;
use super::file_identity::FileIdentity;
use super::last_words::LastWords;
use crate::error::{Code, Failure, GuestState};

/// How long QEMU may take from its start to a monitor that greets. Slow disks, large preallocated RAM and devices whose
/// backend is not there yet count; a QEMU that ends is noticed at once.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// How long a QEMU whose monitor is closed may take to be gone.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// How often the monitor's socket is tried until QEMU listens.
const POLL: Duration = Duration::from_millis(1);

/// A QEMU that was started and has not come up. Dropped, it is killed: its guest has not run.
#[derive(Debug)]
pub struct StartingQemu {
    child: Option<Child>,
    words: Option<LastWords>,
    program: String,
    socket: PathBuf,
}

/// A running QEMU that we started. It is not killed when this is dropped: a supervisor that goes away leaves its guest
/// alone.
#[derive(Debug)]
pub struct QemuProcess {
    child: Child,
    words: Option<LastWords>,
    client: Client,
}

impl StartingQemu {
    /// Starts QEMU with our standard streams, in `directory`, with a monitor for us at `socket`.
    pub fn spawn(line: &CommandLine, directory: &Path, socket: &Path) -> Result<Self, Failure> {
        if !directory.is_dir() {
            return Err(Failure::new(
                Code::Usage,
                format!("QEMU's working directory {} is not there", directory.display()),
            ));
        }
        let mut command = command(line, socket)?;
        command.current_dir(directory);
        // A Ctrl-C at our terminal is for us to pass on when it may be. A QEMU that shares the terminal has to stay in
        // its foreground, or it could not read from it.
        if !std::io::stdin().is_terminal() {
            command.process_group(0);
        }
        Self::start(command, line.program(), socket)
    }

    /// Starts QEMU for a question: it goes with whatever asked.
    pub fn spawn_quietly(line: &CommandLine, socket: &Path) -> Result<Self, Failure> {
        let mut command = command(line, socket)?;
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .kill_on_drop(true);
        Self::start(command, line.program(), socket)
    }

    /// The process id.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref()?.id()
    }

    /// Waits until QEMU is up, which it is when its monitor greets.
    pub async fn ready(mut self) -> Result<QemuProcess, Failure> {
        // The child stays under the guard while it is waited for: a wait that is given up kills it.
        let client = match &mut self.child {
            Some(child) => tokio::select! {
                client = connect(&self.socket) => client,
                status = child.wait() => {
                    let how = match status {
                        Ok(status) => status.to_string(),
                        Err(error) => error.to_string(),
                    };
                    let words = told(&mut self.words).await;
                    Err(ended(&self.program, &format!("({how}): {words}")))
                },
            },
            None => Err(ended(&self.program, "before it was waited for")),
        }?;
        match self.child.take() {
            Some(child) => Ok(QemuProcess {
                child,
                words: self.words.take(),
                client,
            }),
            None => Err(ended(&self.program, "while it was waited for")),
        }
    }

    fn start(mut command: Command, program: &str, socket: &Path) -> Result<Self, Failure> {
        let mut child = command
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| Failure::new(Code::Usage, format!("cannot start {program}: {error}")))?;
        Ok(Self {
            words: child.stderr.take().map(LastWords::of),
            child: Some(child),
            program: program.to_owned(),
            socket: socket.to_owned(),
        })
    }
}

impl Drop for StartingQemu {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            // It may have ended by itself.
            let _ = child.start_kill();
        }
    }
}

impl QemuProcess {
    /// The monitor.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The process id; `None` once it was waited for.
    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// Waits until QEMU has ended.
    pub async fn wait(&mut self) -> Result<ExitStatus, Failure> {
        self.child
            .wait()
            .await
            .map_err(|error| Failure::new(Code::Internal, format!("cannot wait for QEMU: {error}")))
    }

    /// What is behind a monitor that is gone: a QEMU that has ended is quoted, one that was killed is
    /// not.
    pub async fn why_gone(&mut self, failure: Failure) -> Failure {
        let Ok(Ok(status)) = tokio::time::timeout(END_TIMEOUT, self.child.wait()).await else {
            return failure;
        };
        match status.code() {
            Some(_) => Failure::new(
                Code::Refused,
                format!(
                    "QEMU did not take the image and ended ({status}): {}",
                    self.last_words().await
                ),
            ),
            None => Failure::new(Code::Unreachable, format!("QEMU was killed ({status})")),
        }
    }

    /// What QEMU said last on its error output. For a QEMU that has ended.
    pub async fn last_words(&mut self) -> String {
        told(&mut self.words).await
    }

    /// Kills QEMU.
    pub async fn kill(&mut self) -> Result<(), Failure> {
        self.child
            .kill()
            .await
            .map_err(|error| Failure::new(Code::Internal, format!("cannot kill QEMU: {error}")))
    }
}

fn ended(program: &str, how: &str) -> Failure {
    Failure::new(Code::Refused, format!("{program} ended at its start {how}")).with_guest(GuestState::Stopped)
}

async fn told(words: &mut Option<LastWords>) -> String {
    match words {
        Some(words) => words.told().await,
        None => "what it said was not heard".to_owned(),
    }
}

fn command(line: &CommandLine, socket: &Path) -> Result<Command, Failure> {
    // sockaddr_un has room for 107 bytes; QEMU's own message for this does not say so.
    if socket.as_os_str().len() > 107 {
        return Err(Failure::new(
            Code::Usage,
            format!(
                "{} is too long for a socket (107 bytes); choose a shorter --state-dir",
                socket.display()
            ),
        ));
    }
    let mut command = Command::new(line.program());
    command.args(line.clone().with_monitor(socket).arguments());
    Ok(command)
}

/// Connects as soon as QEMU listens, and is greeted as soon as its machine is made.
async fn connect(socket: &Path) -> Result<Client, Failure> {
    let deadline = Instant::now() + START_TIMEOUT;
    let options = ConnectOptions::default().with_greeting_timeout(START_TIMEOUT);
    loop {
        match Client::connect(socket, options.clone()).await {
            Ok(client) => return Ok(client),
            Err(ConnectError::Socket { .. } | ConnectError::Lost { .. }) if Instant::now() < deadline => {}
            Err(error) => return Err(error.into()),
        }
        tokio::time::sleep(POLL).await;
    }
}

/// The working directory of a process.
pub fn working_directory(pid: u32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/cwd")).ok()
}

/// The command line that a process shows, with a program that is found from anywhere.
pub fn visible_command_line(pid: u32, directory: &Path) -> Result<Vec<String>, Failure> {
    let unseen = |why: &dyn Display| {
        Failure::new(
            Code::Refused,
            format!("cannot see the command line of QEMU's process {pid}: {why}"),
        )
    };
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).map_err(|error| unseen(&error))?;
    let text = bytes.strip_suffix(b"\0").unwrap_or(&bytes);
    let text = std::str::from_utf8(text).map_err(|error| unseen(&error))?;
    let mut arguments: Vec<String> = text.split('\0').map(str::to_owned).collect();
    if let Some(program) = arguments.first_mut()
        && program.contains('/')
    {
        *program = directory.join(&*program).to_string_lossy().into_owned();
    }
    Ok(arguments)
}

/// Whether the process has the file or device at `path` open, or what lies on it or under it, as far as its descriptors can
/// be seen.
pub fn has_open(pid: u32, path: &Path) -> bool {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd"));
    descriptors
        .into_iter()
        .flatten()
        .flatten()
        .any(|descriptor| overlap(path, &descriptor.path()))
}

/// Refuses a device that the memory of a guest lies on, whichever that is: writing to it changes that guest's memory.
pub fn check_not_mapped(target: &Path) -> Result<(), Failure> {
    let is_device = fs::metadata(target).is_ok_and(|found| found.file_type().is_block_device());
    match is_device.then(|| who_maps(target)).flatten() {
        None => Ok(()),
        Some(pid) => Err(Failure::new(
            Code::Refused,
            format!(
                "process {pid} has {} mapped: a guest was woken from it, and its memory is there as long as it runs",
                target.display()
            ),
        )),
    }
}

/// A process that has the device at `path` mapped into its memory, as a guest that was woken from it may: such a mapping is no
/// claim on the device. Processes that may not be looked into are not seen.
fn who_maps(path: &Path) -> Option<u32> {
    let device = FileIdentity::at(path)?;
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    processes
        .filter_map(|process| process.file_name().to_str()?.parse().ok())
        .find(|&pid| maps(pid, device))
}

fn maps(pid: u32, device: FileIdentity) -> bool {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd"))
        .into_iter()
        .flatten()
        .flatten();
    // A mapping is told by a name only, which is that of the descriptor it was made by.
    let mut names = descriptors
        .filter(|descriptor| FileIdentity::at(&descriptor.path()) == Some(device))
        .filter_map(|descriptor| fs::read_link(descriptor.path()).ok())
        .peekable();
    if names.peek().is_none() {
        return false;
    }
    let mappings = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    names.any(|name| {
        let name = name.to_string_lossy();
        mappings
            .lines()
            .any(|mapping| mapping.ends_with(&*name) && mapping[..mapping.len() - name.len()].ends_with(' '))
    })
}

/// The files and devices that the process has open; `None` if that cannot be seen.
pub fn open_files(pid: u32) -> Option<HashSet<FileIdentity>> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    let files = descriptors.flatten();
    Some(
        files
            .filter_map(|descriptor| FileIdentity::at(&descriptor.path()))
            .collect(),
    )
}

/// The end of a process that need not be our child. Made while the process surely lives, so that a process id that is
/// used again is not taken for it.
#[derive(Debug)]
pub struct ProcessEnd(io::Result<OwnedFd>);

impl ProcessEnd {
    /// Begins to watch the process.
    pub fn of(pid: u32) -> Self {
        let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
        Self(match pid {
            None => Err(io::ErrorKind::NotFound.into()),
            Some(pid) => pidfd_open(pid, PidfdFlags::empty()).map_err(io::Error::from),
        })
    }

    /// Kills it.
    pub fn kill(&self) -> io::Result<()> {
        let process = self.0.as_ref().map_err(|error| io::Error::from(error.kind()))?;
        Ok(pidfd_send_signal(process, Signal::KILL)?)
    }

    /// Whether it is over now.
    pub fn is_over(&self) -> bool {
        match &self.0 {
            Ok(_) => self.wait(Duration::ZERO).unwrap_or(false),
            Err(error) => error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error()),
        }
    }

    /// Waits; whether it ended within the limit.
    pub fn wait(&self, limit: Duration) -> io::Result<bool> {
        let process = self.0.as_ref().map_err(|error| io::Error::from(error.kind()))?;
        let limit = Timespec::try_from(limit).map_err(io::Error::other)?;
        let mut watched = [PollFd::new(process, PollFlags::IN)];
        Ok(poll(&mut watched, Some(&limit))? > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_process_has_open_is_seen_whatever_it_is_called() {
        let folder = tempfile::tempdir().unwrap();
        let [held, link, closed] = ["held", "link", "closed"].map(|name| folder.path().join(name));
        let _open = fs::File::create(&held).unwrap();
        fs::hard_link(&held, &link).unwrap();
        fs::write(&closed, b"").unwrap();
        let ours = std::process::id();
        assert!(has_open(ours, &held) && has_open(ours, &link));
        assert!(!has_open(ours, &closed));
        assert!(!has_open(ours, &folder.path().join("missing")));
        let open = open_files(ours).unwrap();
        assert!(open.contains(&FileIdentity::at(&link).unwrap()));
        assert!(!open.contains(&FileIdentity::at(&closed).unwrap()));
    }
}
