//! `--detach`: the same program once more, in the background, and a look at it until the guest runs.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::process::{ExitCode, ExitStatus, Stdio};
use std::time::Duration;

use tokio::process::{Child, Command};

use super::Supervision;
use super::report::Report;
use super::status;
use crate::api::client::Supervisor;
use crate::api::types::Vm;
use crate::error::{Code, Failure};
use crate::supervisor::state_dir::StateDir;

/// How often the supervisor in the background is asked whether it is ready.
const POLL: Duration = Duration::from_millis(2);

/// Starts this very command in the background and returns when its guest is there.
pub async fn detach(name: &str, state: &StateDir, report: &Report) -> Result<ExitCode, Failure> {
    state.make()?;
    let log_path = state.log(name);
    let local = |error: std::io::Error| {
        Failure::new(Code::Internal, format!("cannot start in the background: {error}"))
    };
    let log = File::options()
        .create(true)
        .read(true)
        .append(true)
        .open(&log_path)
        .map_err(local)?;
    let begin = log.metadata().map_err(local)?.len();
    let mut child = Command::new(std::env::current_exe().map_err(local)?)
        .args(arguments_in_background())
        .stdin(Stdio::null())
        .stdout(log.try_clone().map_err(local)?)
        .stderr(log.try_clone().map_err(local)?)
        .spawn()
        .map_err(local)?;
    match wait_until_ready(&mut child, &Supervisor::of(state, name)).await? {
        Ok(vm) => {
            report.result(&vm, &status::describe(&vm));
            Ok(ExitCode::SUCCESS)
        }
        Err(status) => {
            let said = said_since(log, begin);
            report.relay(&said, &format!("{} says:", log_path.display()));
            Ok(super::exit_like(status))
        }
    }
}

/// In the background: leaves the terminal's session, so that its end is not ours.
pub fn settle_in_background(supervision: &Supervision) -> Result<(), Failure> {
    if supervision.background {
        rustix::process::setsid()
            .map_err(|error| Failure::new(Code::Internal, format!("cannot leave the session: {error}")))?;
    }
    Ok(())
}

async fn wait_until_ready(
    child: &mut Child,
    supervisor: &Supervisor,
) -> Result<Result<Vm, ExitStatus>, Failure> {
    let pid = child.id();
    loop {
        let ended = child
            .try_wait()
            .map_err(|error| Failure::new(Code::Internal, error.to_string()))?;
        if let Some(status) = ended {
            return Ok(Err(status));
        }
        // Another supervisor of that name may answer; ours ends by itself then.
        if let Ok(vm) = supervisor.vm().await
            && Some(vm.supervisor_pid) == pid
        {
            return Ok(Ok(vm));
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Our own arguments, with the wish to detach replaced.
fn arguments_in_background() -> Vec<OsString> {
    let mut before_dashes = true;
    std::env::args_os()
        .skip(1)
        .map(|argument| {
            before_dashes &= argument != "--";
            if before_dashes && argument == "--detach" {
                "--background".into()
            } else {
                argument
            }
        })
        .collect()
}

/// What was written to the log from `begin` on.
fn said_since(mut log: File, begin: u64) -> String {
    let mut text = Vec::new();
    match log
        .seek(SeekFrom::Start(begin))
        .and_then(|_| log.read_to_end(&mut text))
    {
        Ok(_) => String::from_utf8_lossy(&text).into_owned(),
        Err(error) => error.to_string(),
    }
}
