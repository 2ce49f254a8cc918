//! The command line. One file per verb; this one has the arguments, and turns failures into exit codes.

mod detach;
mod doctor;
mod hibernate;
mod image;
mod report;
mod run;
mod status;
mod wake;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use tracing_subscriber::EnvFilter;

use crate::error::{Code, Failure};
use crate::machine::wake::Mode;
use crate::supervisor::state_dir::StateDir;
use report::Report;

/// Hibernates and wakes QEMU virtual machines.
///
/// Exit codes: 0 done, 1 internal error, 2 usage, 3 refused by a check, 4 QEMU or supervisor unreachable, 5 timed out,
/// 6 cancelled, 7 no space, 8 image invalid, 9 storage I/O error, 10 needs an operator. `run` and `wake` in the
/// foreground end with QEMU's own status once QEMU has started.
#[derive(Debug, Parser)]
#[command(name = "dormouse", version, max_term_width = 100)]
struct Cli {
    /// Folder for the VMs' sockets and records [default: `dormouse` in the runtime directory]
    #[arg(long, global = true, env = "DORMOUSE_STATE_DIR", value_name = "DIR")]
    state_dir: Option<PathBuf>,
    /// Print JSON lines: progress, then one result or error object
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Start QEMU so that its guest can be hibernated at full speed, and supervise it
    Run(RunArguments),
    /// Save a guest's memory and devices into an image and end its QEMU
    Hibernate(HibernateArguments),
    /// Bring the guest in an image back, and supervise it
    Wake(WakeArguments),
    /// Look into images, check, remove, export and import them
    #[command(subcommand)]
    Image(image::ImageVerb),
    /// Show what VMs do
    Status(StatusArguments),
    /// Tell what can be done with a VM, what cannot, why not, and what would help
    Doctor(DoctorArguments),
}

#[derive(Debug, Args)]
struct RunArguments {
    /// Name of the VM
    #[arg(long, default_value = "vm")]
    name: String,
    #[command(flatten)]
    supervision: Supervision,
    /// The QEMU command line
    #[arg(last = true, required = true, value_name = "QEMU")]
    qemu: Vec<String>,
}

#[derive(Debug, Args)]
struct Supervision {
    /// Return once the guest runs, and supervise in the background
    #[arg(long)]
    detach: bool,
    /// This is the process in the background
    #[arg(long, hide = true)]
    background: bool,
    /// Folder on tmpfs for the guest's RAM [default: a tmpfs of its own on huge pages, else /dev/shm]
    #[arg(long, env = "DORMOUSE_RAM_DIR", value_name = "DIR")]
    ram_dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct HibernateArguments {
    /// Name of a VM that `dormouse run` or `dormouse wake` supervises
    #[arg(required_unless_present = "qmp", conflicts_with = "qmp")]
    name: Option<String>,
    /// QMP socket of a QEMU without a supervisor; its monitor must be free
    #[arg(long, value_name = "SOCKET")]
    qmp: Option<PathBuf>,
    /// Where the image goes
    #[arg(long, value_name = "PATH")]
    to: PathBuf,
    /// Replace an image that is there already, once the new one is complete
    #[arg(long)]
    replace: bool,
}

#[derive(Debug, Args)]
struct WakeArguments {
    /// The image
    image: PathBuf,
    /// Name of the VM [default: the one that it was saved with]
    #[arg(long)]
    name: Option<String>,
    /// How RAM comes back [default: map where QEMU can, else eager]
    #[arg(long)]
    mode: Option<Mode>,
    /// Leave the guest paused
    #[arg(long)]
    paused: bool,
    /// Keep the image, marked as used, after the guest runs
    #[arg(long)]
    keep_image: bool,
    /// Check every chunk of RAM first, also in a mode that would not
    #[arg(long)]
    verify: bool,
    #[command(flatten)]
    supervision: Supervision,
    /// Arguments for QEMU after the recorded ones
    #[arg(last = true, value_name = "QEMU CHANGES")]
    changes: Vec<String>,
}

#[derive(Debug, Args)]
struct DoctorArguments {
    /// Name of a supervised VM
    #[arg(required_unless_present = "qmp", conflicts_with = "qmp")]
    name: Option<String>,
    /// QMP socket of a QEMU without a supervisor; its monitor must be free
    #[arg(long, value_name = "SOCKET")]
    qmp: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct StatusArguments {
    /// Name of a VM [default: all]
    name: Option<String>,
}

/// Runs the program with the process's own arguments.
pub fn main() -> ExitCode {
    let cli = Cli::parse();
    let report = Report::new(cli.json);
    // Logs are for whoever operates this; what a person at the terminal needs is told by the verbs themselves.
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::try_from_env("DORMOUSE_LOG").unwrap_or_else(|_| EnvFilter::new("warn")))
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();
    match start(cli, &report) {
        Ok(code) => code,
        Err(failure) => {
            report.failure(&failure);
            ExitCode::from(failure.exit_code())
        }
    }
}

fn start(cli: Cli, report: &Report) -> Result<ExitCode, Failure> {
    let state = StateDir::of(cli.state_dir)
        .map_err(|error| Failure::new(Code::Usage, format!("cannot find the state directory: {error}")))?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(|error| Failure::new(Code::Internal, format!("cannot start the runtime: {error}")))?;
    runtime.block_on(async {
        match cli.verb {
            Verb::Run(arguments) => run::run(arguments, &state, report).await,
            Verb::Hibernate(arguments) => hibernate::hibernate(arguments, &state, report).await,
            Verb::Wake(arguments) => wake::wake(arguments, &state, report).await,
            Verb::Image(verb) => image::image(verb, &state, report).await,
            Verb::Status(arguments) => status::status(arguments, &state, report).await,
            Verb::Doctor(arguments) => doctor::doctor(arguments, &state, report).await,
        }
    })
}

/// The exit code of a program that is QEMU to whoever started it.
fn exit_like(status: std::process::ExitStatus) -> ExitCode {
    use std::os::unix::process::ExitStatusExt;
    // As a shell has it: 128 and the signal's number.
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal))
        .unwrap_or(1);
    ExitCode::from(u8::try_from(code).unwrap_or(1))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_argument_table_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_follows_the_dashes_is_qemus() {
        let cli = Cli::try_parse_from([
            "dormouse", "run", "--name", "a", "--", "qemu", "-m", "64", "--json",
        ])
        .unwrap();
        let Verb::Run(arguments) = cli.verb else {
            panic!("{cli:?}")
        };
        assert_eq!(arguments.qemu, ["qemu", "-m", "64", "--json"]);
        assert!(!cli.json);
    }

    #[test]
    fn a_hibernation_names_its_vm_in_one_way() {
        assert!(Cli::try_parse_from(["dormouse", "hibernate", "--to", "x"]).is_err());
        assert!(Cli::try_parse_from(["dormouse", "hibernate", "a", "--qmp", "s", "--to", "x"]).is_err());
        Cli::try_parse_from(["dormouse", "hibernate", "--qmp", "s", "--to", "x"]).unwrap();
    }
}
