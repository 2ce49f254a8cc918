//! `dormouse wake IMAGE --qmp SOCKET`: wakes the guest in a QEMU that a launcher started, and ends.
//!
//! Nobody supervises it afterwards: it is known by its monitor, as every QEMU of others is, and recorded as the machine of
//! its image for the next hibernation by that monitor.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use dormouse_qmp::{Client, ConnectError, ConnectOptions};
use dormouse_storage::Image;
use serde_json::json;
use tokio::time::Instant;

use super::{WakeArguments, request, wake_unless_signalled};
use crate::api::types::Woken as WokenDocument;
use crate::cli::hibernate::{absolute, known_of};
use crate::cli::recover::{self, wakes};
use crate::cli::report::Report;
use crate::error::Failure;
use crate::machine::wake::Mode;
use crate::machine::wake::runner::Surroundings;
use crate::machine::wake::take_over::Waiting;
use crate::signals::Signals;
use crate::supervisor::remove_used_up;
use crate::supervisor::state_dir::{StateDir, VmRecord};
use crate::vm::process_identity::ProcessIdentity;

/// How long a QEMU that was started a moment ago may take until it listens.
const LISTEN_LIMIT: Duration = Duration::from_secs(10);

/// How often its socket is tried.
const POLL: Duration = Duration::from_millis(5);

pub async fn take_over(
    arguments: WakeArguments,
    socket: &Path,
    state: &StateDir,
    report: &Report,
) -> Result<ExitCode, Failure> {
    let monitor = absolute(socket)?;
    state.make()?;
    recover::check_not_interrupted(&arguments.image, state)?;
    let client = connect(socket).await?;
    let mut signals = Signals::watch()?;
    wakes::check_over(client.peer_pid(), state)?;
    let (name, _) = known_of(socket, client.peer_pid());
    let waiting = Waiting::at(client)?;
    let process = waiting.process();
    let surroundings = Surroundings {
        vm_directory: state.path(),
        monitor_socket: &monitor,
        ram_directory: None,
        progress: Arc::default(),
        wakes: &state.wakes(),
        vm_name: &name,
        started: &|_, _| Ok(()),
        others: Some(waiting),
    };
    let woken = wake_unless_signalled(request(&arguments)?, surroundings, &mut signals, report).await?;
    remember(process, woken.command_line, state);
    let document = WokenDocument {
        operation: woken.image.manifest().operation,
        ..WokenDocument::from(woken.report)
    };
    let becomes = put_away(&woken.image, document.mode, arguments.keep_image);
    report.result(
        &json!({"result": "woken", "name": name, "qemu_pid": process.pid, "woken": document, "image": becomes.0}),
        &format!("awake in QEMU's process {}: {}{}", process.pid, document.describe(), becomes.1),
    );
    Ok(ExitCode::SUCCESS)
}

/// Connects as soon as a QEMU listens that was started a moment ago.
async fn connect(socket: &Path) -> Result<Client, Failure> {
    let deadline = Instant::now() + LISTEN_LIMIT;
    loop {
        match Client::connect(socket, ConnectOptions::default()).await {
            Err(ConnectError::Socket { .. }) if Instant::now() < deadline => tokio::time::sleep(POLL).await,
            connected => return Ok(connected?),
        }
    }
}

/// What becomes of the image, for a program and for a person.
fn put_away(image: &Image, mode: Mode, keep: bool) -> (&'static str, &'static str) {
    match (mode, keep) {
        (Mode::Map, _) => (
            "in-use",
            "\nthe image is the guest's memory until that QEMU ends, and is used up then",
        ),
        (_, true) => ("kept", ""),
        (_, false) => {
            remove_used_up(image);
            ("removed", "")
        }
    }
}

/// What its process shows has this wake in it.
fn remember(process: ProcessIdentity, command_line: Vec<String>, state: &StateDir) {
    state.sweep_machines();
    let record = VmRecord {
        qemu: Some(process),
        command_line,
        shape: None,
    };
    if let Err(error) = record.write(&state.machine(process)) {
        tracing::warn!(%error, "the next hibernation takes the machine's command line from its process");
    }
}
