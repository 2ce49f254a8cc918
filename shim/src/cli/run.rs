//! `dormouse run`: starts QEMU with RAM that can be saved at full speed, and supervises it.

use std::env;
use std::path::Path;
use std::process::ExitCode;

use dormouse_storage::{ByteCount, Image};

use super::report::Report;
use super::{RunArguments, cold_start, conclude, detach, recover};
use crate::api::types::Ram;
use crate::error::{Code, Failure};
use crate::signals::Signals;
use crate::supervisor::state_dir::{StateDir, VmDirectory, checked_name};
use crate::supervisor::{Supervised, supervise};
use crate::vm::binary::{self, Binary};
use crate::vm::command_line::{CommandLine, CommandLineError, MemoryBackend, Placement};
use crate::vm::process::{QemuProcess, StartingQemu};
use crate::vm::ram_home::RamHome;

pub async fn run(arguments: RunArguments, state: &StateDir, report: &Report) -> Result<ExitCode, Failure> {
    let name = checked_name(&arguments.name)?;
    if arguments.supervision.detach {
        return detach::detach(&name, state, report).await;
    }
    detach::settle_in_background(&arguments.supervision)?;
    let command_line = with_absolute_program(arguments.qemu)?;
    let line = CommandLine::parse(&command_line).map_err(usage)?;
    line.check_supervisable().map_err(usage)?;
    let ram_dir = arguments.supervision.ram_dir.as_deref();
    let mut signals = Signals::watch()?;
    let directory = state.claim(&name, ram_dir).await?;
    recover::sweep(&name, state).await?;
    let given_up = cold_start::image_to_give_up(&name, state, arguments.discard_image)?;
    let (qemu, ram) = tokio::select! {
        up = bring_up(&line, &command_line, &directory, ram_dir, given_up) => up?,
        // What was started for this goes with it.
        _ = signals.next() => return Err(Failure::new(Code::Cancelled, "ended by a signal before the guest was up")),
    };
    let supervised = Supervised {
        directory,
        operations: state.operations(),
        moves: state.moves(),
        qemu,
        ram,
        image: None,
        feeding: None,
        remove_image: false,
        woken: None,
        command_line,
    };
    let ended = supervise(supervised, signals).await?;
    Ok(conclude(&ended, &arguments.supervision, report))
}

async fn bring_up(
    line: &CommandLine,
    command_line: &[String],
    directory: &VmDirectory,
    ram_dir: Option<&Path>,
    given_up: Option<Image>,
) -> Result<(QemuProcess, Ram), Failure> {
    let main_ram = if line.names_main_memory() {
        String::new()
    } else {
        let binary = Binary::ask(line.program(), directory.path()).await?;
        binary.main_ram_name(line)?
    };
    let size = movable_size(line)?;
    let home = if size.0 > 0 {
        Some(RamHome::prepare(directory.path(), ram_dir, size)?)
    } else {
        None
    };
    let place = |backend: &MemoryBackend| match &home {
        Some(home) if is_movable(backend) => Placement::SharedFile(home.file(&backend.id)),
        _ => Placement::AsGiven,
    };
    let line = line.with_memory(&main_ram, place).map_err(usage)?;
    let working_directory = env::current_dir()
        .map_err(|error| Failure::new(Code::Usage, format!("cannot find the working directory: {error}")))?;
    if let Some(image) = given_up {
        // Gone for good before the guest runs: the two must never be there at once.
        image.remove()?;
        tracing::warn!(
            image = %image.path().display(),
            "the image was removed with the guest's memory in it, as asked for"
        );
    }
    let starting = StartingQemu::spawn(&line, &working_directory, &directory.path().join("qmp.sock"))?;
    // From its first instant on there is a record of it, or a guard that ends it.
    directory.record(starting.pid().unwrap_or_default(), command_line, None)?;
    let qemu = starting.ready().await?;
    // QEMU has opened its RAM: the names are not needed any more.
    let ram = home.map_or(Ram::AsGiven, |home| Ram::Shared { pages: home.pages() });
    Ok((qemu, ram))
}

/// A file or huge pages that the user chose stay the guest's RAM; what is nowhere in particular is put where it can be
/// saved from.
fn is_movable(backend: &MemoryBackend) -> bool {
    matches!(
        backend.kind.as_str(),
        "memory-backend-ram" | "memory-backend-memfd"
    ) && !backend.hugetlb
}

/// How much RAM our files will have to hold.
fn movable_size(line: &CommandLine) -> Result<ByteCount, Failure> {
    let backends = line.memory_backends().map_err(usage)?;
    let mut size: u64 = backends
        .iter()
        .filter(|backend| is_movable(backend))
        .map(|backend| backend.size.0)
        .sum();
    if !line.names_main_memory() {
        size += line.ram_size().map_err(usage)?.0;
    }
    Ok(ByteCount(size))
}

/// A program given by a relative path would not be found again from elsewhere.
pub(super) fn with_absolute_program(mut command_line: Vec<String>) -> Result<Vec<String>, Failure> {
    if let Some(program) = command_line.first_mut()
        && program.contains('/')
    {
        *program = binary::locate(program)?.0.to_string_lossy().into_owned();
    }
    Ok(command_line)
}

fn usage(error: CommandLineError) -> Failure {
    Failure::new(Code::Usage, error.to_string())
}
