//! `dormouse wake`: brings the guest in an image back, and supervises it.

mod print_args;
mod take_over;

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use dormouse_storage::Image;
use rustix::process::{getpid, kill_process};
use serde_json::json;
use tokio::sync::{mpsc, watch};

use super::report::Report;
use super::{WakeArguments, conclude, detach, recover};
use crate::api::types::{Ram, Woken as WokenDocument};
use crate::error::{Code, Failure};
use crate::machine::effect::out_of_order;
use crate::machine::wake::feeding::Feeding;
use crate::machine::wake::lazy::FeedWish;
use crate::machine::wake::machine::Phase;
use crate::machine::wake::runner::{Surroundings, Woken, wake as wake_guest};
use crate::machine::wake::take_over::Qemu;
use crate::machine::wake::{Mode, Request};
use crate::signals::Signals;
use crate::supervisor::state_dir::{StateDir, checked_name};
use crate::supervisor::{Supervised, remove_used_up, supervise};

/// How often progress is told while RAM is read.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

pub async fn wake(arguments: WakeArguments, state: &StateDir, report: &Report) -> Result<ExitCode, Failure> {
    if arguments.print_args {
        return print_args::print_args(arguments, report);
    }
    if let Some(socket) = arguments.qmp.clone() {
        return take_over::take_over(arguments, &socket, state, report).await;
    }
    let name = match &arguments.name {
        Some(name) => name.clone(),
        None => Image::open(&arguments.image)?.manifest().vm_name.clone(),
    };
    // The name in an image is somebody's word.
    let name = checked_name(&name)?;
    if arguments.supervision.detach {
        return detach::detach(&name, state, report).await;
    }
    detach::settle_in_background(&arguments.supervision)?;
    let mut signals = Signals::watch()?;
    let ram_dir = arguments.supervision.ram_dir.as_deref();
    let directory = state.claim(&name, ram_dir).await?;
    recover::check_not_interrupted(&arguments.image, state)?;
    recover::sweep(&name, state).await?;
    let request = request(&arguments)?;
    let surroundings = Surroundings {
        vm_directory: directory.path(),
        monitor_socket: &state.monitor_socket(&name),
        ram_directory: ram_dir,
        progress: Arc::default(),
        wakes: &state.wakes(),
        vm_name: &name,
        started: &|pid, command_line| directory.record(pid, command_line, None),
        others: None,
    };
    let woken = match wake_unless_signalled(request, surroundings, &mut signals, report).await {
        Ok(woken) => woken,
        Err(failure) => {
            // What may have become of a guest of uncertain state is for a person to find: all traces stay.
            if failure.code == Code::Operator {
                directory.keep();
            }
            return Err(failure);
        }
    };
    let Qemu::Ours(qemu) = woken.qemu else {
        return Err(out_of_order());
    };
    let document = WokenDocument {
        operation: woken.image.manifest().operation,
        ..WokenDocument::from(woken.report)
    };
    report.milestone(
        &json!({"result": "woken", "name": name, "woken": document}),
        &format!("{name} is awake: {}", document.describe()),
    );
    let ram = match (document.mode, woken.pages) {
        (Mode::Eager | Mode::Lazy, Some(pages)) => Ram::Shared { pages },
        (Mode::Eager | Mode::Lazy, None) | (Mode::Stream, _) => Ram::AsGiven,
        (Mode::Map, _) => Ram::MappedFromImage,
    };
    let (image, feeding) = match woken.feed {
        Some(feed) => (None, Some(Feeding::new(feed, woken.image, arguments.keep_image))),
        None => (after_wake(woken.image, document.mode, arguments.keep_image), None),
    };
    let supervised = Supervised {
        directory,
        operations: state.operations(),
        moves: state.moves(),
        qemu,
        ram,
        image,
        feeding,
        remove_image: !arguments.keep_image,
        woken: Some(document),
        command_line: woken.command_line,
    };
    let ended = supervise(supervised, signals).await?;
    Ok(conclude(&ended, &arguments.supervision, report))
}

/// What is asked for.
fn request(arguments: &WakeArguments) -> Result<Request, Failure> {
    Ok(Request {
        image: arguments.image.clone(),
        mode: arguments.mode,
        paused: arguments.paused,
        verify: arguments.verify,
        disks_as_saved: arguments.disks_as_saved,
        force_disks: arguments.force_disks,
        other_disks: arguments.disks.clone(),
        changes: arguments.changes.clone(),
        key: arguments.key.read()?,
        feed: FeedWish {
            rate_limit: arguments.rate_limit,
            keep_image: arguments.keep_image,
        },
    })
}

/// A mapped image is the guest's memory and stays, locked, as long as the guest. A guest that was filled from its image
/// needs it no longer.
fn after_wake(image: Image, mode: Mode, keep: bool) -> Option<Image> {
    if mode == Mode::Map {
        return Some(image);
    }
    if !keep {
        remove_used_up(&image);
    }
    None
}

/// Until the guest may run, a signal means that it is not wanted after all.
async fn wake_unless_signalled(
    request: Request,
    surroundings: Surroundings<'_>,
    signals: &mut Signals,
    report: &Report,
) -> Result<Woken, Failure> {
    let memory = Arc::clone(&surroundings.progress);
    let (cancel, cancels) = mpsc::channel(1);
    let told = watch::Sender::new(Phase::Opening);
    let phase = told.subscribe();
    let mut look = tokio::time::interval(PROGRESS_INTERVAL);
    look.tick().await;
    let progress = report.progress();
    let mut waking = std::pin::pin!(wake_guest(request, surroundings, told, cancels));
    let mut signalled = None;
    let woken = loop {
        tokio::select! {
            woken = &mut waking => break woken,
            _ = look.tick() => {
                let (done, total) = (memory.done().0, memory.total().0);
                if total > 0 {
                    progress.tell_work(&format!("{:?}", *phase.borrow()), done, total);
                }
            }
            signal = signals.next() => {
                signalled = Some(signal);
                // One that waits already is enough.
                let _ = cancel.try_send(());
            }
        }
    };
    progress.finish();
    let woken = woken?;
    if let Some(signal) = signalled {
        // It came too late for a cancel, so it is for the guest: the supervisor hears it again.
        let _ = kill_process(getpid(), signal);
    }
    Ok(woken)
}
