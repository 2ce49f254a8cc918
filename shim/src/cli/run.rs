//! `dormouse run`: starts QEMU with RAM that can be saved at full speed, and supervises it.

use std::env;
use std::process::ExitCode;

use dormouse_storage::ByteCount;

use super::report::Report;
use super::{RunArguments, detach, exit_like};
use crate::api::types::Ram;
use crate::error::{Code, Failure};
use crate::supervisor::state_dir::StateDir;
use crate::supervisor::{Supervised, supervise};
use crate::vm::binary::{self, Binary};
use crate::vm::command_line::{CommandLine, CommandLineError, MemoryBackend, Placement};
use crate::vm::process::QemuProcess;
use crate::vm::ram_home::RamHome;

pub async fn run(arguments: RunArguments, state: &StateDir, report: &Report) -> Result<ExitCode, Failure> {
    if arguments.supervision.detach {
        return detach::detach(&arguments.name, state, report).await;
    }
    detach::settle_in_background(&arguments.supervision)?;
    let command_line = with_absolute_program(arguments.qemu)?;
    let line = CommandLine::parse(&command_line).map_err(usage)?;
    line.check_supervisable().map_err(usage)?;
    let ram_dir = arguments.supervision.ram_dir.as_deref();
    let directory = state.claim(&arguments.name, ram_dir).await?;
    let binary = Binary::ask(line.program(), directory.path()).await?;
    let main_ram = if line.names_main_memory() {
        String::new()
    } else {
        binary.main_ram_name(&line)?
    };
    let size = movable_size(&line)?;
    let ram_home = if size.0 > 0 {
        Some(RamHome::prepare(directory.path(), ram_dir, size)?)
    } else {
        None
    };
    let socket = directory.path().join("qmp.sock");
    let qemu = start(&line, &main_ram, ram_home.as_ref(), &socket).await?;
    // QEMU has opened its RAM: the names are not needed any more.
    let ram = ram_home.map_or(Ram::AsGiven, |home| Ram::Shared { pages: home.pages() });
    let supervised = Supervised {
        directory,
        qemu,
        ram,
        image: None,
        woken: None,
        command_line,
    };
    Ok(exit_like(supervise(supervised).await?))
}

async fn start(
    line: &CommandLine,
    main_ram: &str,
    home: Option<&RamHome>,
    socket: &std::path::Path,
) -> Result<QemuProcess, Failure> {
    let place = |backend: &MemoryBackend| match home {
        Some(home) if is_movable(backend) => Placement::SharedFile(home.file(&backend.id)),
        _ => Placement::AsGiven,
    };
    let line = line.with_memory(main_ram, place).map_err(usage)?;
    let directory = env::current_dir()
        .map_err(|error| Failure::new(Code::Usage, format!("cannot find the working directory: {error}")))?;
    QemuProcess::start(&line, &directory, socket).await
}

/// A file that the user chose stays the guest's RAM; what is nowhere in particular is put where it can be saved from.
fn is_movable(backend: &MemoryBackend) -> bool {
    matches!(
        backend.kind.as_str(),
        "memory-backend-ram" | "memory-backend-memfd"
    )
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
fn with_absolute_program(mut command_line: Vec<String>) -> Result<Vec<String>, Failure> {
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
