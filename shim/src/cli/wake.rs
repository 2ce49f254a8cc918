//! `dormouse wake`: brings the guest in an image back, and supervises it.

use std::process::ExitCode;

use dormouse_storage::Image;
use tokio::sync::{mpsc, watch};

use super::report::Report;
use super::{WakeArguments, detach, exit_like};
use crate::api::types::{Ram, Woken as WokenDocument};
use crate::error::{Code, Failure};
use crate::machine::wake::machine::Phase;
use crate::machine::wake::runner::{Surroundings, Woken, wake as wake_guest};
use crate::machine::wake::{Mode, Request};
use crate::signals::Signals;
use crate::supervisor::state_dir::StateDir;
use crate::supervisor::{Supervised, supervise};

pub async fn wake(arguments: WakeArguments, state: &StateDir, report: &Report) -> Result<ExitCode, Failure> {
    let name = match arguments.name {
        Some(name) => name,
        None => Image::open(&arguments.image)?.manifest().vm_name.clone(),
    };
    if arguments.supervision.detach {
        return detach::detach(&name, state, report).await;
    }
    detach::settle_in_background(&arguments.supervision)?;
    let directory = state
        .claim(&name, arguments.supervision.ram_dir.as_deref())
        .await?;
    let request = Request {
        image: arguments.image,
        mode: arguments.mode,
        paused: arguments.paused,
        keep_image: arguments.keep_image,
        verify: arguments.verify,
        changes: arguments.changes,
    };
    let surroundings = Surroundings {
        vm_directory: directory.path().to_owned(),
        monitor_socket: state.monitor_socket(&name),
        ram_directory: arguments.supervision.ram_dir,
    };
    let woken = match wake_until_signal(request, surroundings).await {
        Ok(woken) => woken,
        Err(failure) => {
            // What may have become of a guest of uncertain state is for a person to find: all traces stay.
            if failure.code == Code::Operator {
                directory.keep();
            }
            return Err(failure);
        }
    };
    let Woken {
        qemu,
        pages,
        image,
        report: done,
        command_line,
    } = woken;
    let document = WokenDocument::from(done);
    report.remark(&format!(
        "{name} is awake: {:.0} ms from QEMU's start to running ({:?})",
        document.start_to_running_ms, document.mode
    ));
    let ram = match (document.mode, pages) {
        (Mode::Eager, Some(pages)) => Ram::Shared { pages },
        (Mode::Eager, None) => Ram::AsGiven,
        (Mode::Map, _) => Ram::MappedFromImage,
    };
    // A guest that was filled from its image needs it no longer.
    let image = (document.mode == Mode::Map).then_some(image);
    let supervised = Supervised {
        directory,
        qemu,
        ram,
        image,
        woken: Some(document),
        command_line,
    };
    Ok(exit_like(supervise(supervised).await?))
}

/// Until the guest runs, a signal means that it is not wanted after all.
async fn wake_until_signal(request: Request, surroundings: Surroundings) -> Result<Woken, Failure> {
    let mut signals = Signals::watch()?;
    let (cancel, cancels) = mpsc::channel(1);
    let mut waking = std::pin::pin!(wake_guest(
        request,
        surroundings,
        watch::Sender::new(Phase::Opening),
        cancels
    ));
    loop {
        tokio::select! {
            outcome = &mut waking => return outcome,
            // One that waits already is enough.
            _ = signals.next() => drop(cancel.try_send(())),
        }
    }
}
