//! The command line. One file per verb; this one has the arguments, and turns failures into exit codes.

mod cold_start;
mod detach;
mod doctor;
mod hibernate;
mod image;
mod key;
mod recover;
mod report;
mod run;
mod snapshot;
mod status;
mod volume;
mod wake;

use std::io::IsTerminal;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use dormouse_storage::{ByteCount, Compression};
use tracing_subscriber::EnvFilter;
use uuid::Uuid;

use crate::error::{Code, Failure};
use crate::machine::wake::Mode;
use crate::machine::wake::other_disks::OtherDisk;
use crate::supervisor::request_queue::Priority;
use crate::supervisor::state_dir::StateDir;
use crate::supervisor::{Ended, ending};
use crate::vm::engine::Wish;
use report::Report;

/// Hibernates and wakes QEMU virtual machines.
///
/// Exit codes: 0 done, 1 internal error, 2 usage, 3 refused by a check, 4 QEMU, supervisor or guest agent unreachable,
/// 5 timed out, 6 cancelled, 7 no space, 8 image invalid, 9 storage I/O error, 10 needs an operator. `run` and `wake` in
/// the foreground end with QEMU's own status once QEMU has started.
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
    /// Save a guest's memory and devices into an image and let it go on
    Snapshot(snapshot::SnapshotArguments),
    /// Bring the guest in an image back, and supervise it
    Wake(WakeArguments),
    /// Look into images, check, remove, export and import them
    #[command(subcommand)]
    Image(image::ImageVerb),
    /// Give a running guest other volumes, with all that is on them
    #[command(subcommand)]
    Volume(volume::VolumeVerb),
    /// End operations whose process was killed: a guest is given back, or its image is the guest; volumes are all
    /// switched, or none is
    Recover(RecoverArguments),
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
    /// If the VM is hibernated in an image: remove the image, with the guest's memory in it, and start cold
    #[arg(long)]
    discard_image: bool,
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
    /// When the VM has ended, write to this file how: one line of JSON, as a container's termination message
    #[arg(long, value_name = "FILE")]
    termination_message: Option<PathBuf>,
}

#[derive(Debug, Args)]
struct HibernateArguments {
    /// Name of a VM that `dormouse run` or `dormouse wake` supervises
    #[arg(required_unless_present_any = ["qmp", "all"], conflicts_with_all = ["qmp", "all"])]
    name: Option<String>,
    /// QMP socket of a QEMU without a supervisor; its monitor must be free
    #[arg(long, value_name = "SOCKET", conflicts_with = "all")]
    qmp: Option<PathBuf>,
    /// All VMs in the state directory, as before a host's shutdown. One that fails does not stop the others; the exit
    /// code is 0 when all are in their images, 10 when one needs an operator, else that of the first by name that failed
    #[arg(long, requires = "to_dir", conflicts_with = "operation_id")]
    all: bool,
    /// Where the guest goes: into an image, or onto its own disk, by itself, with its agent's help
    #[arg(long, value_enum, default_value_t)]
    mode: HibernateMode,
    /// Where the image goes
    #[arg(long, value_name = "PATH", conflicts_with = "all")]
    to: Option<PathBuf>,
    /// With --all: the folder that the images go to, each as NAME.dormouse
    #[arg(long, value_name = "DIR", requires = "all")]
    to_dir: Option<PathBuf>,
    /// With --all: how many VMs are hibernated at once; limits such as --rate-limit are for each [default: 2]
    #[arg(long, value_name = "N", requires = "all", value_parser = clap::value_parser!(u16).range(1..))]
    parallel: Option<u16>,
    /// Only tell what would stand in the way, and what the hibernation would take; the guest is not touched
    #[arg(long, conflicts_with = "all")]
    dry_run: bool,
    #[command(flatten)]
    save: SaveArguments,
    /// With --mode suspend-to-disk: the guest agent's socket [default: found by QEMU's virtio-serial ports]
    #[arg(long, value_name = "SOCKET")]
    agent: Option<PathBuf>,
}

/// How a guest gets into an image.
#[derive(Debug, Args)]
struct SaveArguments {
    /// Refuse unless a volume is mounted at this folder and the image goes to it: a volume that is not mounted leaves an
    /// empty folder on another file system
    #[arg(long, value_name = "DIR")]
    volume_mount: Option<PathBuf>,
    /// Replace an image that is there already, once the new one is complete
    #[arg(long)]
    replace: bool,
    /// How RAM gets into the image
    #[arg(long, value_enum, default_value_t)]
    engine: Wish,
    /// Channels that QEMU sends RAM over, where it does: 0 is one plain stream [default: 4 where QEMU can]
    #[arg(long, value_name = "N")]
    channels: Option<u8>,
    /// Compress RAM: none, auto (while the volume is what holds the writing up), zstd or zstd:LEVEL. A compressed
    /// image cannot be mapped
    #[arg(long, value_name = "HOW", default_value_t)]
    compress: Compression,
    /// Write at most so much in a second (bytes, or with a suffix: 200M, 1.5G)
    #[arg(long, value_name = "BYTES", value_parser = byte_count)]
    rate_limit: Option<ByteCount>,
    /// Give up, and the guest back, if the image is not complete after this time (30s, 5m) [default: no limit]; of a
    /// suspend to disk: how long the guest may take until it is off [default: 5m]
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    timeout: Option<Duration>,
    /// Give up, and the guest back, if there is no progress for this time [default: 2m]
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    stall_timeout: Option<Duration>,
    #[command(flatten)]
    terms: TermArguments,
    #[command(flatten)]
    key: KeyArguments,
}

/// On which terms an operation is asked for.
#[derive(Debug, Args)]
struct TermArguments {
    /// The operation's id. The same command again with the same id joins the operation or tells how it ended, and never
    /// does it twice
    #[arg(long, value_name = "UUID")]
    operation_id: Option<Uuid>,
    /// How much it matters: an operation under way that matters less is cancelled, its guest given back, and then this
    /// one begins [default: normal; with --all: high]
    #[arg(long, value_enum, conflicts_with = "qmp")]
    priority: Option<Priority>,
    /// How long to wait for another operation under way, for whoever holds the image's target, and with --qmp for another
    /// client of the monitor [default: not at all]
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    lock_timeout: Option<Duration>,
}

/// Where a guest goes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum HibernateMode {
    /// Memory and devices are saved into an image, which wakes the guest anywhere
    #[default]
    Image,
    /// The guest agent is told to suspend the guest to its own disk (guest-suspend-disk), the guest powers off, QEMU ends;
    /// the guest resumes when it is started again with its disks
    SuspendToDisk,
}

/// The key of an encrypted image: 32 random bytes, or 64 hexadecimal digits.
#[derive(Debug, Args)]
pub struct KeyArguments {
    /// File with the image's key: 32 random bytes, or 64 hexadecimal digits
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Open file descriptor to read the image's key from
    #[arg(long, value_name = "FD", conflicts_with = "key_file")]
    key_fd: Option<u32>,
}

#[derive(Debug, Args)]
struct WakeArguments {
    /// The image
    image: PathBuf,
    /// Name of the VM [default: the one that it was saved with]
    #[arg(long, conflicts_with = "print_args")]
    name: Option<String>,
    /// Only print the QEMU command line for a launcher that starts QEMU itself, one argument a line, with --json as a
    /// list; reads nothing but the image
    #[arg(long, conflicts_with_all = ["paused", "keep_image", "verify"])]
    print_args: bool,
    /// Monitor of a QEMU that a launcher started with -incoming defer, and as --print-args says: the guest is woken in it, and
    /// the command ends. With --print-args: where QEMU shall have that monitor
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["name", "detach", "termination_message"])]
    qmp: Option<PathBuf>,
    /// How RAM comes back [default: map where it can be, else lazy where the host allows, else eager]
    #[arg(long)]
    mode: Option<Mode>,
    /// With lazy: read at most so much in a second (bytes, or with a suffix: 200M, 1.5G) of what the guest does not wait for
    #[arg(long, value_name = "BYTES", value_parser = byte_count)]
    rate_limit: Option<ByteCount>,
    /// Leave the guest paused
    #[arg(long)]
    paused: bool,
    /// Keep the image, marked as used, after the guest runs
    #[arg(long)]
    keep_image: bool,
    /// Of a snapshot: its disks are copies from the moment of the snapshot, also where Dormouse cannot see that they are
    /// other disks than those that its guest went on with
    #[arg(long)]
    disks_as_saved: bool,
    /// A disk that lies elsewhere than at the save: the id of its device, drive or node, or its old file, and where it is
    /// now. It must hold what it held at the save; may be repeated
    #[arg(long = "disk", value_name = "ID=PATH")]
    disks: Vec<OtherDisk>,
    /// Wake the guest although its disks were written since the save, or are other disks: it will write what its memory
    /// holds of them over what is there now. What differs is logged, told, and noted in the image
    #[arg(long)]
    force_disks: bool,
    /// Check every chunk of RAM first, also in a mode that would not
    #[arg(long)]
    verify: bool,
    #[command(flatten)]
    key: KeyArguments,
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
struct RecoverArguments {
    /// Name of a VM [default: all]
    #[arg(conflicts_with = "qmp")]
    name: Option<String>,
    /// QMP socket of a QEMU without a supervisor
    #[arg(long, value_name = "SOCKET")]
    qmp: Option<PathBuf>,
    /// Of a guest whose memory still comes from its image: read at most so much in a second of what it does not wait for
    #[arg(long, value_name = "BYTES", value_parser = byte_count)]
    rate_limit: Option<ByteCount>,
    #[command(flatten)]
    key: KeyArguments,
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
            Verb::Snapshot(arguments) => snapshot::snapshot(arguments, &state, report).await,
            Verb::Wake(arguments) => wake::wake(arguments, &state, report).await,
            Verb::Image(verb) => image::image(verb, &state, report).await,
            Verb::Volume(verb) => volume::volume(verb, &state, report).await,
            Verb::Recover(arguments) => recover::recover(arguments, &state, report).await,
            Verb::Status(arguments) => status::status(arguments, &state, report).await,
            Verb::Doctor(arguments) => doctor::doctor(arguments, &state, report).await,
        }
    })
}

/// Reads `200M`, `1.5G` or plain bytes; suffixes are binary, as QEMU's are.
fn byte_count(text: &str) -> Result<ByteCount, String> {
    let wrong = || format!("{text:?} is not a number of bytes such as 4096, 200M or 1.5G");
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" => 0,
        "k" | "K" => 10,
        "m" | "M" => 20,
        "g" | "G" => 30,
        "t" | "T" => 40,
        _ => return Err(wrong()),
    };
    let number: f64 = digits.parse().map_err(|_| wrong())?;
    let bytes = number * (1_u64 << shift) as f64;
    // Beyond this not every number of bytes is a floating point one.
    if !(1.0..=9e15).contains(&bytes) {
        return Err(wrong());
    }
    Ok(ByteCount(bytes as u64))
}

/// Tells how a supervised VM ended, and ends like its QEMU.
fn conclude(ended: &Ended, supervision: &Supervision, report: &Report) -> ExitCode {
    if let Some(path) = &supervision.termination_message
        && let Err(error) = ending::tell_in_file(&ended.ending, path)
    {
        tracing::warn!(%error, path = %path.display(), "cannot write the termination message");
    }
    report.last_line(&ended.ending);
    exit_like(ended.status)
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
    fn bytes_are_read_with_and_without_a_suffix() {
        assert_eq!(byte_count("4096"), Ok(ByteCount(4096)));
        assert_eq!(byte_count("200M"), Ok(ByteCount::mib(200)));
        assert_eq!(byte_count("1.5g"), Ok(ByteCount::mib(1536)));
        for bad in ["", "M", "0", "-1M", "1X", "1MM", "inf", "NaN", "1e30"] {
            assert!(byte_count(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_hibernation_names_its_vm_in_one_way() {
        assert!(Cli::try_parse_from(["dormouse", "hibernate", "--to", "x"]).is_err());
        assert!(Cli::try_parse_from(["dormouse", "hibernate", "a", "--qmp", "s", "--to", "x"]).is_err());
        Cli::try_parse_from(["dormouse", "hibernate", "--qmp", "s", "--to", "x"]).unwrap();
        Cli::try_parse_from(["dormouse", "hibernate", "--all", "--to-dir", "x"]).unwrap();
        Cli::try_parse_from([
            "dormouse",
            "hibernate",
            "a",
            "--mode",
            "suspend-to-disk",
            "--timeout",
            "90s",
        ])
        .unwrap();
        assert!(Cli::try_parse_from(["dormouse", "hibernate", "--all", "--to", "x"]).is_err());
        assert!(Cli::try_parse_from(["dormouse", "hibernate", "--all", "a", "--to-dir", "x"]).is_err());
        assert!(Cli::try_parse_from(["dormouse", "hibernate", "a", "--to", "x", "--parallel", "2"]).is_err());
    }
}
