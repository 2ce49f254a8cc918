//! QEMU's process: one of our own with its monitor, and the end of any.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use dormouse_qmp::{Client, ConnectError, ConnectOptions, command};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tokio::process::{Child, Command};
use tokio::time::Instant;

use super::command_line::CommandLine;
use crate::error::{Code, Failure, GuestState, sentence};

/// How long QEMU may take from its start to a monitor that can be connected. Slow disks and large preallocated RAM
/// count; a QEMU that ends is noticed at once.
const START_TIMEOUT: Duration = Duration::from_secs(120);

/// How often the monitor's socket is tried until QEMU listens.
const POLL: Duration = Duration::from_millis(1);

/// How long QEMU may take to end after `quit`.
const QUIT_TIMEOUT: Duration = Duration::from_secs(30);

/// A running QEMU that we started. It is not killed when this is dropped: a supervisor that goes away leaves its guest
/// alone.
#[derive(Debug)]
pub struct QemuProcess {
    child: Child,
    client: Client,
}

impl QemuProcess {
    /// Starts QEMU with our terminal and waits for its monitor.
    pub async fn start(line: &CommandLine, directory: &Path, socket: &Path) -> Result<Self, Failure> {
        let mut command = Self::command(line, socket)?;
        command.current_dir(directory);
        Self::spawn(command, line.program(), socket).await
    }

    /// Starts QEMU for a question: its output is only shown when it fails.
    pub async fn start_quietly(line: &CommandLine, socket: &Path) -> Result<Self, Failure> {
        let mut command = Self::command(line, socket)?;
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .kill_on_drop(true);
        Self::spawn(command, line.program(), socket).await
    }

    /// The monitor.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The process id.
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

    /// Ends QEMU: asks it, and kills it if it does not go. Only for a QEMU whose guest has never run or is in an image.
    pub async fn quit(&mut self) -> Result<(), Failure> {
        // The connection usually ends before the answer is read; either way it is the process that counts.
        let _ = self.client.execute(&command::quit {}).await;
        if tokio::time::timeout(QUIT_TIMEOUT, self.child.wait())
            .await
            .is_err()
        {
            self.kill().await?;
        }
        Ok(())
    }

    /// Kills QEMU.
    pub async fn kill(&mut self) -> Result<(), Failure> {
        self.child
            .kill()
            .await
            .map_err(|error| Failure::new(Code::Internal, format!("cannot kill QEMU: {error}")))
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

    async fn spawn(mut command: Command, program: &str, socket: &Path) -> Result<Self, Failure> {
        let mut child = command
            .spawn()
            .map_err(|error| Failure::new(Code::Usage, format!("cannot start {program}: {error}")))?;
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            match Client::connect(socket, ConnectOptions::default()).await {
                Ok(client) => return Ok(Self { child, client }),
                Err(ConnectError::Socket { .. } | ConnectError::Lost { .. }) if Instant::now() < deadline => {
                }
                Err(error) => {
                    let _ = child.kill().await;
                    return Err(error.into());
                }
            }
            let ended = child
                .try_wait()
                .map_err(|error| Failure::new(Code::Internal, sentence(&error)))?;
            if let Some(status) = ended {
                return Err(Failure::new(
                    Code::Refused,
                    format!("{program} ended at its start ({status}); it says why above"),
                )
                .with_guest(GuestState::Stopped));
            }
            tokio::time::sleep(POLL).await;
        }
    }
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

    /// Waits; whether it ended within the limit.
    pub fn wait(self, limit: Duration) -> io::Result<bool> {
        let process = self.0?;
        let limit = Timespec::try_from(limit).map_err(io::Error::other)?;
        let mut watched = [PollFd::new(&process, PollFlags::IN)];
        Ok(poll(&mut watched, Some(&limit))? > 0)
    }
}
