//! `dormouse hibernate --mode suspend-to-disk`: the guest saves itself; there is no image, and nothing that says how
//! one is made.

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use dormouse_qmp::{Client, ConnectOptions};
use dormouse_storage::Compression;

use super::super::HibernateArguments;
use super::super::report::Report;
use super::{absolute, as_ms, attend, by_supervisor, operation_id, something_else, terms};
use crate::api::types::{Ending, NewOperation, OperationKind, SuspendedToDisk};
use crate::error::{Code, Failure};
use crate::machine::suspend::Request;
use crate::signals::Signals;
use crate::supervisor::operation::Prepared;
use crate::supervisor::request_queue::Priority;
use crate::supervisor::state_dir::StateDir;
use crate::vm::engine::Wish;

/// A guest writes all that it uses of its memory to its disk, and may have to make room first.
const LIMIT: Duration = Duration::from_secs(300);

/// Has one guest suspend itself.
pub async fn suspend_to_disk(
    arguments: &HibernateArguments,
    state: &StateDir,
    report: &Report,
) -> Result<ExitCode, Failure> {
    if let Some(option) = option_of_images(arguments) {
        return Err(Failure::new(
            Code::Usage,
            format!("{option} says something of an image, and --mode suspend-to-disk makes none"),
        ));
    }
    let request = Request {
        agent: arguments.agent.as_deref().map(absolute).transpose()?,
        limit: arguments.save.timeout.unwrap_or(LIMIT),
    };
    let suspended = match (&arguments.name, &arguments.qmp) {
        (Some(name), _) => {
            let wish = NewOperation::SuspendToDisk {
                agent: request.agent,
                limit_ms: as_ms(request.limit),
            };
            let signals = Signals::watch()?.for_several();
            match by_supervisor(
                state,
                name,
                (wish, terms(&arguments.save, Priority::Normal)),
                signals,
                report,
            )
            .await?
            {
                Ending::SuspendedToDisk(suspended) => suspended,
                _ => {
                    return Err(something_else());
                }
            }
        }
        (None, Some(socket)) => by_ourselves(socket, arguments, request, report).await?,
        (None, None) => return Err(Failure::new(Code::Usage, "name a VM, or a monitor with --qmp")),
    };
    report.result(&suspended, &describe(&suspended));
    Ok(ExitCode::SUCCESS)
}

/// Takes the monitor for one operation.
async fn by_ourselves(
    socket: &Path,
    arguments: &HibernateArguments,
    request: Request,
    report: &Report,
) -> Result<SuspendedToDisk, Failure> {
    let signals = Signals::watch()?;
    let client = Client::connect(socket, ConnectOptions::default()).await?;
    let prepared = Prepared::new(operation_id(&arguments.save), OperationKind::SuspendToDisk);
    let (documents, cancel, progress) = (prepared.watch(), prepared.cancel(), report.progress());
    let work = prepared.suspend_to_disk(client, request);
    let outcome = attend(work, documents, &cancel, signals, &progress).await;
    progress.finish();
    outcome.map(SuspendedToDisk::from)
}

/// The first option that has no meaning here. Silence would let a user believe in an image.
fn option_of_images(arguments: &HibernateArguments) -> Option<&'static str> {
    let key = &arguments.save.key;
    let given = [
        ("--all", arguments.all),
        ("--to", arguments.to.is_some()),
        ("--replace", arguments.save.replace),
        ("--engine", arguments.save.engine != Wish::default()),
        ("--channels", arguments.save.channels.is_some()),
        ("--compress", arguments.save.compress != Compression::default()),
        ("--rate-limit", arguments.save.rate_limit.is_some()),
        ("--stall-timeout", arguments.save.stall_timeout.is_some()),
        ("--key-file", key.key_file.is_some()),
        ("--key-fd", key.key_fd.is_some()),
    ];
    given
        .iter()
        .find(|(_, is_given)| *is_given)
        .map(|(option, _)| *option)
}

fn describe(suspended: &SuspendedToDisk) -> String {
    let seen = if suspended.by_s4 {
        "the machine went to ACPI S4"
    } else {
        "the guest powered off plainly: that it had saved itself is its agent's word"
    };
    format!(
        "suspended to its own disk, off after {:.1} s; {seen}",
        suspended.power_off_ms / 1000.0
    )
}
