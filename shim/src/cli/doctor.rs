//! `dormouse doctor`: what can be done with a VM, what cannot, why not, and what would help.

use std::process::ExitCode;

use dormouse_qmp::{Client, ConnectOptions};
use dormouse_storage::ByteCount;

use super::DoctorArguments;
use super::hibernate::known_of;
use super::report::Report;
use crate::api::client::Supervisor;
use crate::error::{Code, Failure};
use crate::supervisor::state_dir::StateDir;
use crate::vm::diagnosis::{Diagnosis, diagnose};

pub async fn doctor(
    arguments: DoctorArguments,
    state: &StateDir,
    report: &Report,
) -> Result<ExitCode, Failure> {
    let diagnosis = match (&arguments.name, &arguments.qmp) {
        (Some(name), _) => Supervisor::of(state, name).diagnosis().await?,
        (None, Some(socket)) => {
            let client = Client::connect(socket, ConnectOptions::default()).await?;
            let record = known_of(socket, client.peer_pid()).1;
            let (command_line, shape) = record.map(|record| (record.command_line, record.shape)).unzip();
            diagnose(&client, command_line, shape.flatten().as_ref()).await?
        }
        (None, None) => return Err(Failure::new(Code::Usage, "name a VM, or a monitor with --qmp")),
    };
    report.result(&diagnosis, &describe(&diagnosis));
    Ok(ExitCode::SUCCESS)
}

fn describe(diagnosis: &Diagnosis) -> String {
    let mut lines = vec![format!(
        "QEMU {} ({}), process {}, {}",
        diagnosis.qemu_version, diagnosis.qemu_package, diagnosis.pid, diagnosis.run_state
    )];
    for finding in &diagnosis.findings {
        let answer = if finding.can { "yes" } else { "no " };
        lines.push(format!("{answer}  {}: {}", finding.subject, finding.detail));
    }
    if let Some(memory) = &diagnosis.memory {
        let touched = memory
            .touched_bytes
            .map(|bytes| format!(", {} of it touched", ByteCount(bytes)))
            .unwrap_or_default();
        lines.push(format!(
            "memory  {} of the guest{touched}, {} of its devices; a hibernation reserves {}",
            ByteCount(memory.guest_bytes),
            ByteCount(memory.device_bytes),
            ByteCount(memory.reserved_bytes)
        ));
    }
    for disk in &diagnosis.disks {
        let access = if disk.read_only { ", read-only" } else { "" };
        let witness = if disk.has_witness {
            ""
        } else {
            "; a wake cannot tell whether it was written since"
        };
        lines.push(format!(
            "{}  {} ({}, {}{access}){witness}",
            disk.label,
            disk.file_name,
            disk.format,
            ByteCount(disk.virtual_size_bytes)
        ));
    }
    match &diagnosis.blockers[..] {
        [] => lines.push("nothing stands in the way of a hibernation".to_owned()),
        blockers => lines.extend(blockers.iter().map(|blocker| format!("in the way: {blocker}"))),
    }
    lines.extend(diagnosis.remarks.iter().cloned());
    lines.join("\n")
}
