//! `dormouse status`: a walk over the state directory.

use std::process::ExitCode;

use serde_json::json;

use super::report::Report;
use super::{StatusArguments, detach};
use crate::api::client::Supervisor;
use crate::error::{Code, Failure};
use crate::supervisor::state_dir::StateDir;

pub async fn status(
    arguments: StatusArguments,
    state: &StateDir,
    report: &Report,
) -> Result<ExitCode, Failure> {
    if let Some(name) = arguments.name {
        let vm = Supervisor::of(state, &name).vm().await?;
        report.result(&vm, &detach::describe(&vm));
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
            Ok(vm) => report.result(&vm, &detach::describe(&vm)),
            Err(failure) => report.result(
                &json!({"name": name, "error": {"code": failure.code, "message": failure.message}}),
                &format!("{name}: {failure}"),
            ),
        }
    }
    Ok(ExitCode::SUCCESS)
}
