//! `dormouse hibernate --all`: every VM in the state directory goes into an image of its own.
//!
//! ```text
//!   names ──► checks of all targets ──► queue ──► at most N at once ──► told as each ends ──► exit code
//!                   │ fails                │ Ctrl-C: begins no more, cancels those under way
//!                   └──────────────────────┴───────────────────────────►
//! ```
//!
//! - A VM that fails does not stop the others. Targets that cannot be are told before the first hibernation begins.
//! - A QEMU that outlived its supervisor is a failure, not passed over: its guest would be lost with the host. What a
//!   dead VM left in the state directory is nothing.
//! - The exit code is 0 only if all are in their images. 10 (a person has to look) outranks the others, of which the
//!   first by name is taken, so that it does not depend on who was faster.

use std::collections::{BTreeMap, VecDeque};
use std::path::Path;
use std::process::ExitCode;

use dormouse_storage::ByteCount;
use serde_json::json;
use tokio::task::JoinSet;

use super::super::HibernateArguments;
use super::super::report::Report;
use super::{by_supervisor, hibernated, terms, wish, with_hint};
use crate::api::client::Supervisor;
use crate::api::types::Hibernated;
use crate::error::{Code, Failure};
use crate::machine::hibernate::ImageWish;
use crate::signals::Signals;
use crate::supervisor::state_dir::{StateDir, VmRecord};

/// One writes while another waits for its devices or its seal; more would only share the disk.
const PARALLEL: u16 = 2;

/// How each VM ended.
type Outcomes = BTreeMap<String, Result<Hibernated, Failure>>;

/// Hibernates all VMs to `folder`, which is an absolute path.
pub async fn hibernate_all(
    folder: &Path,
    arguments: &HibernateArguments,
    image: &ImageWish,
    state: &StateDir,
    report: &Report,
) -> Result<ExitCode, Failure> {
    if !folder.is_dir() {
        return Err(Failure::new(
            Code::Usage,
            format!("the folder {} is not there", folder.display()),
        ));
    }
    let signals = Signals::watch()?.for_several();
    let mut outcomes = Outcomes::new();
    let mut waiting = VecDeque::new();
    for name in present(state).await? {
        let target = folder.join(format!("{name}.dormouse"));
        let checked = check_target(&target, arguments.save.replace);
        match checked.and(check_supervisor(state, &name).await) {
            Ok(()) => waiting.push_back((name, target)),
            Err(failure) => note(&mut outcomes, report, name, Err(failure)),
        }
    }
    let parallel = usize::from(arguments.parallel.unwrap_or(PARALLEL));
    let mut under_way = JoinSet::new();
    let mut cancelled = signals.clone();
    loop {
        while under_way.len() < parallel
            && let Some((name, target)) = waiting.pop_front()
        {
            let wish = (
                wish(target, arguments, image),
                terms(&arguments.save, crate::supervisor::request_queue::Priority::High),
            );
            let (state, signals, report) = (state.clone(), signals.clone(), report.of_vm(&name));
            under_way.spawn(async move {
                let ended = by_supervisor(&state, &name, wish, signals, &report).await;
                (name, ended.and_then(hibernated))
            });
        }
        tokio::select! {
            ended = under_way.join_next() => match ended {
                Some(Ok((name, outcome))) => note(&mut outcomes, report, name, outcome),
                Some(Err(error)) => return Err(Failure::new(Code::Internal, format!("a hibernation's watch ended in panic: {error}"))),
                None => break,
            },
            Ok(()) = cancelled.changed() => {
                for (name, _) in waiting.drain(..) {
                    let failure = Failure::new(Code::Cancelled, "cancelled before its hibernation was begun");
                    note(&mut outcomes, report, name, Err(failure));
                }
            }
        }
    }
    Ok(summarize(&outcomes, report))
}

/// The names of all VMs that live, with a supervisor or without.
async fn present(state: &StateDir) -> Result<Vec<String>, Failure> {
    let names = state.names().map_err(|error| {
        let path = state.path().display();
        Failure::new(
            Code::Usage,
            format!("cannot read the state directory {path}: {error}"),
        )
    })?;
    let mut present = Vec::new();
    for name in names {
        let lives = VmRecord::read(&state.path().join(&name)).is_some_and(|record| record.living().is_some());
        if lives || Supervisor::of(state, &name).serves().await {
            present.push(name);
        }
    }
    Ok(present)
}

async fn check_supervisor(state: &StateDir, name: &str) -> Result<(), Failure> {
    if Supervisor::of(state, name).serves().await {
        return Ok(());
    }
    let failure = Failure::new(Code::Unreachable, "it has no supervisor");
    Err(with_hint(failure, state, name))
}

/// What is there already and may be replaced is for the writer to judge: an image that holds a guest never is.
fn check_target(target: &Path, replace: bool) -> Result<(), Failure> {
    match target.symlink_metadata() {
        Ok(_) if !replace => Err(Failure::new(
            Code::Refused,
            format!("{} exists", target.display()),
        )),
        _ => Ok(()),
    }
}

/// Tells how a VM ended, at once, and remembers it.
fn note(outcomes: &mut Outcomes, report: &Report, name: String, outcome: Result<Hibernated, Failure>) {
    let report = report.of_vm(&name);
    match &outcome {
        Ok(hibernated) => report.result(hibernated, &describe(hibernated)),
        Err(failure) => report.failure(failure),
    }
    outcomes.insert(name, outcome);
}

fn describe(hibernated: &Hibernated) -> String {
    let paused = hibernated
        .pause_ms
        .map(|pause_ms| format!(", paused {pause_ms:.0} ms"))
        .unwrap_or_default();
    format!(
        "hibernated to {}, {} stored as {}{paused}",
        hibernated.image.display(),
        ByteCount(hibernated.data_bytes),
        ByteCount(hibernated.stored_bytes),
    )
}

fn summarize(outcomes: &Outcomes, report: &Report) -> ExitCode {
    let names = |wanted: bool| -> Vec<&String> {
        let chosen = outcomes.iter().filter(|(_, outcome)| outcome.is_ok() == wanted);
        chosen.map(|(name, _)| name).collect()
    };
    let (hibernated, failed) = (names(true), names(false));
    report.result(
        &json!({"result": "all", "hibernated": hibernated, "failed": failed}),
        &format!("{} hibernated, {} not", hibernated.len(), failed.len()),
    );
    ExitCode::from(exit_code(
        outcomes.values().filter_map(|outcome| outcome.as_ref().err()),
    ))
}

/// The failures come in the order of their VMs' names.
fn exit_code<'a>(failures: impl Iterator<Item = &'a Failure>) -> u8 {
    let codes: Vec<Code> = failures.map(|failure| failure.code).collect();
    match codes.first() {
        None => 0,
        Some(_) if codes.contains(&Code::Operator) => Code::Operator.exit_code(),
        Some(first) => first.exit_code(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_code_is_the_first_failures_unless_a_person_has_to_look() {
        let code = |codes: &[Code]| {
            let failures: Vec<Failure> = codes.iter().map(|code| Failure::new(*code, "")).collect();
            exit_code(failures.iter())
        };
        assert_eq!(code(&[]), 0);
        assert_eq!(code(&[Code::NoSpace, Code::Refused]), 7);
        assert_eq!(code(&[Code::Refused, Code::Operator, Code::NoSpace]), 10);
    }

    #[test]
    fn a_target_that_is_there_is_told_before_anything_begins() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("a.dormouse");
        check_target(&target, false).unwrap();
        // A dangling link too: its name would be replaced.
        std::os::unix::fs::symlink("nowhere", &target).unwrap();
        assert_eq!(check_target(&target, false).unwrap_err().code, Code::Refused);
        check_target(&target, true).unwrap();
    }
}
