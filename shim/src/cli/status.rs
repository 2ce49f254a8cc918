//! `dormouse status`: a walk over the state directory.

use std::process::ExitCode;

use serde_json::json;

use super::StatusArguments;
use super::report::Report;
use crate::api::client::Supervisor;
use crate::api::types::{OperationKind, Vm};
use crate::error::{Code, Failure};
use crate::journal::{self, Found, Record};
use crate::supervisor::state_dir::StateDir;

pub async fn status(
    arguments: StatusArguments,
    state: &StateDir,
    report: &Report,
) -> Result<ExitCode, Failure> {
    if let Some(name) = arguments.name {
        let vm = Supervisor::of(state, &name).vm().await.map_err(|failure| {
            match interrupted(state).iter().find(|record| record.vm_name == name) {
                Some(record) => Failure {
                    message: format!("{failure}; {}", describe_interrupted(record)),
                    ..failure
                },
                None => failure,
            }
        })?;
        report.result(&vm, &describe(&vm));
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
    for name in names {
        // One VM that does not answer is no reason to hide the others.
        match Supervisor::of(state, &name).vm().await {
            Ok(vm) => report.result(&vm, &describe(&vm)),
            Err(failure) => report.result(
                &json!({"name": name, "error": {"code": failure.code, "message": failure.message}}),
                &format!("{name}: {failure}"),
            ),
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

/// Hibernations whose process is gone.
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
        "its hibernation to {} was interrupted, `dormouse recover` ends it",
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
        let mode = serde_json::to_value(woken.mode).unwrap_or_default();
        text.push_str(&format!(
            "\nwoken from {} by {}: {:.0} ms from QEMU's start to running",
            woken.image.display(),
            mode.as_str().unwrap_or_default(),
            woken.start_to_running_ms
        ));
    }
    if let Some(operation) = &vm.operation {
        let kind = match operation.kind {
            OperationKind::Hibernate => "hibernation",
            OperationKind::SuspendToDisk => "suspend to disk",
            OperationKind::MoveVolumes => "move of volumes",
        };
        text.push_str(&format!("\n{kind} {}: {}", operation.id, operation.phase));
        if let Some(choice) = &operation.choice {
            text.push_str(&format!(", engine: {}", choice.engine.name()));
            for why in &choice.passed_over {
                text.push_str(&format!("\n{why}"));
            }
        }
    }
    text
}
