//! `dormouse status`: a walk over the state directory: VMs that live, that ended, whose hibernation was interrupted.

use std::process::ExitCode;
use std::time::{Duration, UNIX_EPOCH};

use dormouse_storage::{ByteCount, Image};
use serde::Serialize;
use serde_json::json;

use super::StatusArguments;
use super::report::Report;
use crate::api::client::Supervisor;
use crate::api::types::{FeedState, MemoryFeed, OperationKind, Vm};
use crate::error::{Code, Failure};
use crate::journal::{self, Found, Record};
use crate::machine::wake::feeding::FeedRecord;
use crate::supervisor::ending::{How, LastEnding};
use crate::supervisor::state_dir::{StateDir, VmRecord};
use crate::vm::lock_holder::holder;

pub async fn status(
    arguments: StatusArguments,
    state: &StateDir,
    report: &Report,
) -> Result<ExitCode, Failure> {
    if let Some(name) = arguments.name {
        match Supervisor::of(state, &name).vm().await {
            Ok(vm) => report.result(&vm, &describe(&vm)),
            Err(failure) => ended(&name, failure, state, report)?,
        }
        return Ok(ExitCode::SUCCESS);
    }
    let names = state.names().map_err(|error| {
        Failure::new(
            Code::Usage,
            format!(
                "cannot read the state directory {}: {error}",
                state.path().display()
            ),
        )
    })?;
    for ending in state.last_endings() {
        if !names.contains(&ending.name) {
            tell_ending(&ending, report);
        }
    }
    for name in names {
        // One VM that does not answer is no reason to hide the others.
        match Supervisor::of(state, &name).vm().await {
            Ok(vm) => report.result(&vm, &describe(&vm)),
            Err(failure) => {
                let failure = with_stopped_feed(&name, failure, state);
                report.result(
                    &json!({"name": name, "error": {"code": failure.code, "message": failure.message}}),
                    &format!("{name}: {failure}"),
                );
            }
        }
    }
    for record in interrupted(state) {
        let object = json!({
            "name": record.vm_name,
            "interrupted": {"operation": record.operation, "point": record.point, "image": record.target},
        });
        report.result(
            &object,
            &format!("{}: {}", record.vm_name, describe_interrupted(&record)),
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// A VM that nobody serves: whether its hibernation was interrupted, else how it ended last.
fn ended(name: &str, failure: Failure, state: &StateDir, report: &Report) -> Result<(), Failure> {
    let interrupted = interrupted(state);
    if let Some(record) = interrupted.iter().find(|record| record.vm_name == name) {
        return Err(Failure {
            message: format!("{failure}; {}", describe_interrupted(record)),
            ..failure
        });
    }
    let lives = VmRecord::read(&state.path().join(name)).is_some_and(|record| record.living().is_some());
    match state.last_ending(name) {
        Some(ending) if !lives => tell_ending(&ending, report),
        _ => return Err(with_stopped_feed(name, failure, state)),
    }
    Ok(())
}

/// A guest whose supervisor is gone may have been fed by it.
fn with_stopped_feed(name: &str, failure: Failure, state: &StateDir) -> Failure {
    let record = match FeedRecord::read(&state.path().join(name)) {
        Ok(None) => return failure,
        Ok(Some(record)) => record,
        Err(unreadable) => {
            return Failure {
                message: format!("{failure}; {unreadable}"),
                ..failure
            };
        }
    };
    let image = record.image.display();
    let more = match (record.qemu.is_alive(), holder(&record.image)) {
        (false, _) => format!(
            "its QEMU is gone, too, before the guest had all of its memory from {image}, which is kept: the guest has run"
        ),
        (true, Some(pid)) => format!("its memory comes from {image}, by process {pid}"),
        (true, None) => format!(
            "its memory was still coming from {image}: the guest stands where it needs more, and `dormouse recover \
             {name}` feeds it the rest"
        ),
    };
    Failure {
        message: format!("{failure}; {more}"),
        ..failure
    }
}

fn tell_ending(ending: &LastEnding, report: &Report) {
    let image = image_now(&ending.how);
    report.result(
        &EndingNow {
            ending,
            image_now: image.as_deref(),
        },
        &describe_ending(ending, image.as_deref()),
    );
}

/// An ending, and what can be seen today.
#[derive(Serialize)]
struct EndingNow<'a> {
    #[serde(flatten)]
    ending: &'a LastEnding,
    /// The state of the image: `sealed` as long as it holds the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    image_now: Option<&'a str>,
}

fn image_now(how: &How) -> Option<String> {
    let How::Hibernated { image, image_id, .. } = how else {
        return None;
    };
    Some(match Image::open(image) {
        Ok(image) if image.id() == *image_id => image.state().to_string(),
        Ok(_) => "replaced".to_owned(),
        Err(_) => "not there".to_owned(),
    })
}

fn describe_ending(ending: &LastEnding, image_now: Option<&str>) -> String {
    let what = match &ending.how {
        How::Hibernated { image, .. } => format!("hibernated into {}", image.display()),
        How::SuspendedToDisk { .. } => "suspended to its own disk".to_owned(),
        How::Stopped { reason: Some(reason) } => format!("stopped ({reason})"),
        How::Stopped { reason: None } => "stopped".to_owned(),
        How::Crashed {
            signal: Some(signal), ..
        } => format!("crashed, QEMU was ended by signal {signal}"),
        How::Crashed {
            exit_code: Some(code),
            ..
        } => format!("crashed, QEMU ended with {code}"),
        How::Crashed { .. } => "crashed".to_owned(),
    };
    let at = UNIX_EPOCH + Duration::from_millis(ending.ended_unix_ms);
    let since = match image_now {
        None | Some("sealed") => String::new(),
        Some(state) => format!("; that image is {state} now"),
    };
    let unfed = ending.unfed.as_ref().map_or_else(String::new, |left| {
        format!(
            "; it had {} of its {} of memory from {}, which is kept, marked as waking: its guest has run",
            ByteCount(left.fed_bytes),
            ByteCount(left.total_bytes),
            left.image.display()
        )
    });
    let (name, at) = (&ending.name, humantime::format_rfc3339_seconds(at));
    format!("{name}: {what} at {at}{since}{unfed}")
}

/// Hibernations and snapshots whose process is gone.
fn interrupted(state: &StateDir) -> Vec<Record> {
    let found = journal::find(&state.operations()).unwrap_or_default();
    found
        .into_iter()
        .filter_map(|found| match found {
            Found::Interrupted(journal) => Some(journal.record().clone()),
            Found::UnderWay(_) | Found::Unreadable { .. } => None,
        })
        .collect()
}

fn describe_interrupted(record: &Record) -> String {
    format!(
        "its {} to {} was interrupted, `dormouse recover` ends it",
        record.aim,
        record.target.display()
    )
}

/// What a person is told of a VM.
pub fn describe(vm: &Vm) -> String {
    let mut text = format!(
        "{}: {}, QEMU {} (process {})",
        vm.name, vm.run_state, vm.qemu_version, vm.pid
    );
    if let Some(woken) = &vm.woken {
        text.push_str(&format!(
            "\nwoken from {} {}",
            woken.image.display(),
            woken.describe()
        ));
    }
    if let Some(feed) = &vm.feed {
        text.push_str(&format!("\n{}", describe_feed(feed)));
    }
    if let Some(operation) = &vm.operation {
        let kind = match operation.kind {
            OperationKind::Hibernate => "hibernation",
            OperationKind::Snapshot => "snapshot",
            OperationKind::SuspendToDisk => "suspend to disk",
            OperationKind::MoveVolumes => "move of volumes",
            OperationKind::GrowVolume => "growth of a disk",
        };
        text.push_str(&format!("\n{kind} {}: {}", operation.id, operation.phase));
        if let Some(waiting) = &operation.waiting {
            text.push_str(&format!(", waiting: {waiting}"));
        }
        if let Some(choice) = &operation.choice {
            text.push_str(&format!(", engine: {}", choice.engine.name()));
            for why in &choice.passed_over {
                text.push_str(&format!("\n{why}"));
            }
        }
    }
    text
}

fn describe_feed(feed: &MemoryFeed) -> String {
    let (fed, total) = (ByteCount(feed.fed_bytes), ByteCount(feed.total_bytes));
    let share = feed.fed_bytes as f64 / feed.total_bytes.max(1) as f64 * 100.0;
    let pace = ByteCount(feed.bytes_per_second);
    let mut text = match feed.state {
        FeedState::Feeding => {
            let rest = feed.remaining_ms.map_or_else(String::new, |ms| {
                format!(", the rest in about {} s", (ms as f64 / 1000.0).ceil())
            });
            format!("its memory comes while it runs: {share:.0} % of {total}, {pace}/s{rest}")
        }
        FeedState::Complete => format!("all of its memory is there: {total} came while it ran, {pace}/s"),
        FeedState::Damaged | FeedState::Failed => {
            format!("not all of its memory comes: it has {fed} of {total}")
        }
    };
    if let (Some(half), Some(nearly_all)) = (feed.answer_p50_us, feed.answer_p99_us) {
        text.push_str(&format!(
            "\nit waited for pages {} times, half of them within {}, 99 % within {}",
            feed.answers,
            in_ms(half),
            in_ms(nearly_all)
        ));
    }
    if let Some(error) = &feed.error {
        text.push_str(&format!("\n{}", error.detail));
    }
    text
}

fn in_ms(micros: u64) -> String {
    format!("{:.1} ms", micros as f64 / 1000.0)
}
