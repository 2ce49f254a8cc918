//! The command-line program, run as a user would.

use std::{
    ffi::{OsStr, OsString},
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc,
    thread,
};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::{
    guest::Guest,
    lab::Lab,
    qemu::QemuBuild,
    wait::{PATIENCE, until},
};

/// How a Rust program ends that panicked. No command may.
const PANICKED: i32 = 101;

/// The program with one state directory.
pub struct Dormouse {
    program: PathBuf,
    state_dir: PathBuf,
    logs: PathBuf,
    modules: Option<PathBuf>,
}

impl Dormouse {
    /// The program that was built with these tests, or the one that `DORMOUSE_BIN` names; its
    /// state directory is in `lab`.
    pub fn new(lab: &Lab) -> Self {
        let program = std::env::var_os("DORMOUSE_BIN").map_or_else(built_program, PathBuf::from);
        assert!(
            program.exists(),
            "{} is missing: run cargo build -p dormouse",
            program.display()
        );
        Self {
            program,
            state_dir: lab.path("state"),
            logs: lab.folder().to_owned(),
            modules: None,
        }
    }

    /// Lets a QEMU that is started as its own process shows, without the laboratory's wrapper, find its modules.
    pub fn with_modules_of(self, build: QemuBuild) -> Self {
        Self {
            modules: Some(build.modules()),
            ..self
        }
    }

    /// The same program where nobody may handle faults of its own memory in the kernel, as in a container: without
    /// CAP_SYS_PTRACE, on a host whose `vm.unprivileged_userfaultfd` is 0. It can open `/dev/userfaultfd` only `with_device`.
    pub fn without_userfaultfd(self, lab: &Lab, with_device: bool) -> Self {
        let program = lab.path(&format!("dormouse-in-a-container-{with_device}"));
        let device = if with_device {
            ""
        } else {
            "mount --bind /dev/userfaultfd /dev/userfaultfd && mount -o remount,bind,nodev /dev/userfaultfd && "
        };
        let script = format!(
            "#!/bin/sh\nexport CONFINED={}\nexec unshare --mount --propagation slave sh -c '{device}exec setpriv \
             --bounding-set -sys_ptrace --inh-caps -sys_ptrace \"$CONFINED\" \"$@\"' sh \"$@\"\n",
            self.program.display()
        );
        fs::write(&program, script).expect("the program can be written");
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("it can be made one");
        Self { program, ..self }
    }

    /// The same program with its state directory elsewhere.
    pub fn with_state_dir(self, state_dir: PathBuf) -> Self {
        Self { state_dir, ..self }
    }

    /// Starts `guest` as `name` under a foreground supervisor, and waits for its API.
    pub fn run(&self, name: &str, guest: &impl Guest) -> Supervisor {
        let mut supervisor = self.start(name, &guest.command_line());
        let api = self.state_dir.join(name).join("api.sock");
        until(&format!("the supervisor of {name}"), || {
            supervisor.must_live();
            api.exists().then_some(())
        });
        supervisor
    }

    /// Starts a QEMU command line as `name` under a foreground supervisor, and waits for nothing.
    pub fn start(&self, name: &str, command_line: &[OsString]) -> Supervisor {
        self.supervise(name, "run", &run_arguments(name, &[], command_line))
    }

    /// Wakes `image` as `name` under a foreground supervisor. What comes of it shows in the guest.
    pub fn wake(&self, name: &str, image: &Path, options: &[&str]) -> Supervisor {
        self.supervise(name, "wake", &wake_arguments(name, image, options))
    }

    /// Tries to wake `image` as `name`, which must end by itself.
    pub fn try_wake(&self, name: &str, image: &Path, options: &[&str]) -> Outcome {
        self.finish(self.spawn(&wake_arguments(name, image, options)))
    }

    /// Hibernates `name` to `image`.
    pub fn hibernate(&self, name: &str, image: &Path) -> Outcome {
        self.finish(self.start_hibernating(name, image))
    }

    /// Starts to hibernate `name` to `image`; [`finish`](Self::finish) waits for the end.
    pub fn start_hibernating(&self, name: &str, image: &Path) -> Child {
        self.start_hibernating_with(name, image, &[])
    }

    /// Starts to hibernate `name` to `image`, with more options.
    pub fn start_hibernating_with(&self, name: &str, image: &Path, options: &[&str]) -> Child {
        let mut arguments = vec![
            OsStr::new("hibernate"),
            name.as_ref(),
            "--to".as_ref(),
            image.as_ref(),
            "--json".as_ref(),
        ];
        arguments.extend(options.iter().map(OsStr::new));
        self.spawn(&arguments)
    }

    /// Runs `dormouse recover --json` with more arguments.
    pub fn recover(&self, arguments: &[&str]) -> Outcome {
        self.finish(self.start_recovering(arguments))
    }

    /// Starts `dormouse recover --json`.
    pub fn start_recovering(&self, arguments: &[&str]) -> Child {
        let mut all = vec!["recover", "--json"];
        all.extend(arguments);
        self.spawn(&all)
    }

    /// The records of operations in the state directory: each one's name, and what it says.
    pub fn records(&self) -> Vec<(PathBuf, Value)> {
        let entries = fs::read_dir(self.state_dir.join(".operations"));
        let paths = entries.into_iter().flatten().flatten().map(|entry| entry.path());
        let records = paths.filter(|path| path.extension() == Some(OsStr::new("json")));
        records
            .filter_map(|path| {
                let text = fs::read(&path).ok()?;
                Some((path, serde_json::from_slice(&text).unwrap_or_default()))
            })
            .collect()
    }

    /// What the records of moves of volumes say.
    pub fn moves(&self) -> Vec<Value> {
        let entries = fs::read_dir(self.state_dir.join(".moves"));
        let paths = entries.into_iter().flatten().flatten().map(|entry| entry.path());
        let records = paths.filter(|path| path.extension() == Some(OsStr::new("json")));
        records
            .filter_map(|path| serde_json::from_slice(&fs::read(path).ok()?).ok())
            .collect()
    }

    /// The records of wakes: each one's name, and what it says.
    pub fn wakes(&self) -> Vec<(PathBuf, Value)> {
        let entries = fs::read_dir(self.state_dir.join(".wakes"));
        let paths = entries.into_iter().flatten().flatten().map(|entry| entry.path());
        let records = paths.filter(|path| path.extension() == Some(OsStr::new("json")));
        records
            .filter_map(|path| {
                let record = serde_json::from_slice(&fs::read(&path).ok()?).ok()?;
                Some((path, record))
            })
            .collect()
    }

    /// Hibernates the QEMU behind the monitor at `socket` to `image`, without a supervisor.
    pub fn hibernate_by_monitor(&self, socket: &Path, image: &Path) -> Outcome {
        self.finish(self.start_hibernating_by_monitor(socket, image, &[]))
    }

    /// Starts to hibernate the QEMU behind the monitor at `socket`, with more options.
    pub fn start_hibernating_by_monitor(&self, socket: &Path, image: &Path, options: &[&str]) -> Child {
        let mut arguments = vec![
            OsStr::new("hibernate"),
            "--qmp".as_ref(),
            socket.as_ref(),
            "--to".as_ref(),
            image.as_ref(),
            "--json".as_ref(),
        ];
        arguments.extend(options.iter().map(OsStr::new));
        self.spawn(&arguments)
    }

    /// Takes a snapshot of `name` to `image`.
    pub fn snapshot(&self, name: &str, image: &Path, options: &[&str]) -> Outcome {
        self.finish(self.start_taking_snapshot(&[name.as_ref()], image, options))
    }

    /// Starts to take a snapshot of `whom`, a name, or `--qmp` and a monitor's socket.
    pub fn start_taking_snapshot(&self, whom: &[&OsStr], image: &Path, options: &[&str]) -> Child {
        let mut arguments = vec![OsStr::new("snapshot")];
        arguments.extend(whom);
        arguments.extend(["--to".as_ref(), image.as_os_str(), "--json".as_ref()]);
        arguments.extend(options.iter().map(OsStr::new));
        self.spawn(&arguments)
    }

    /// Runs any command to its end.
    pub fn execute(&self, arguments: &[impl AsRef<OsStr>]) -> Outcome {
        self.finish(self.spawn(arguments))
    }

    /// Tries to start a QEMU command line as `name`, which must end by itself.
    pub fn try_run(&self, name: &str, options: &[&str], command_line: &[OsString]) -> Outcome {
        self.execute(&run_arguments(name, options, command_line))
    }

    /// The monitor that belongs to the supervisor of `name`.
    pub fn own_monitor(&self, name: &str) -> PathBuf {
        self.state_dir.join(name).join("qmp.sock")
    }

    /// The state directory.
    pub fn state_dir(&self) -> &Path {
        &self.state_dir
    }

    /// Runs `dormouse image VERB IMAGE`.
    pub fn image(&self, verb: &str, image: &Path, options: &[&str]) -> Outcome {
        let mut arguments = vec![OsStr::new("image"), verb.as_ref(), image.as_ref()];
        arguments.extend(options.iter().map(OsStr::new));
        self.finish(self.spawn(&arguments))
    }

    /// Runs `dormouse status NAME --json`.
    pub fn status(&self, name: &str) -> Outcome {
        self.finish(self.spawn(&["status", name, "--json"]))
    }

    /// Waits for a command to end, reading what it says meanwhile.
    pub fn finish(&self, command: Child) -> Outcome {
        let (tell, ended) = mpsc::channel();
        thread::spawn(move || tell.send(command.wait_with_output()));
        let output = ended
            .recv_timeout(PATIENCE)
            .unwrap_or_else(|_| panic!("waited {PATIENCE:?} for a command of dormouse to end"))
            .expect("our own child can be waited for");
        let outcome = Outcome {
            status: output.status,
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        };
        assert_ne!(outcome.exit_code(), Some(PANICKED), "{outcome:#?}");
        outcome
    }

    /// Starts any command; [`finish`](Self::finish) waits for the end.
    pub fn spawn(&self, arguments: &[impl AsRef<OsStr>]) -> Child {
        self.command(arguments)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("dormouse starts")
    }

    fn supervise(&self, name: &str, verb: &str, arguments: &[OsString]) -> Supervisor {
        let log = self.logs.join(format!("{verb}-{name}.log"));
        let output = fs::File::create(&log).expect("the supervisor's log can be made");
        let errors = output.try_clone().expect("a file handle can be cloned");
        let child = self
            .command(arguments)
            .stdout(output)
            .stderr(errors)
            .spawn()
            .expect("dormouse starts");
        Supervisor { child, log }
    }

    fn command(&self, arguments: &[impl AsRef<OsStr>]) -> Command {
        let mut command = Command::new(&self.program);
        command
            .arg("--state-dir")
            .arg(&self.state_dir)
            .args(arguments)
            .stdin(Stdio::null());
        if let Some(modules) = &self.modules {
            command.env("QEMU_MODULE_DIR", modules);
        }
        command
    }
}

/// Test executables are in the `deps` folder beside the programs.
fn built_program() -> PathBuf {
    let test = std::env::current_exe().expect("a test knows its own path");
    let folder = test.parent().and_then(Path::parent);
    folder
        .expect("a test executable is two folders deep")
        .join("dormouse")
}

fn run_arguments(name: &str, options: &[&str], command_line: &[OsString]) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = vec!["run".into(), "--name".into(), name.into()];
    arguments.extend(options.iter().map(OsString::from));
    arguments.push("--".into());
    arguments.extend_from_slice(command_line);
    arguments
}

fn wake_arguments(name: &str, image: &Path, options: &[&str]) -> Vec<OsString> {
    let mut arguments: Vec<OsString> = vec!["wake".into(), image.into()];
    arguments.extend(["--name", name].map(OsString::from));
    arguments.extend(options.iter().map(OsString::from));
    arguments
}

/// A `dormouse run` or `dormouse wake` in the foreground. Dropping it kills the supervisor alone;
/// the QEMU that it leaves is swept up by the [`Lab`]. When the test fails its log is shown.
pub struct Supervisor {
    child: Child,
    log: PathBuf,
}

impl Supervisor {
    /// What it printed so far.
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Waits for it to end by itself, which it does after its guest.
    pub fn wait_for_end(&mut self) -> ExitStatus {
        until("the supervisor to end", || {
            self.child.try_wait().expect("our own child can be waited for")
        })
    }

    /// Its process.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Asks it to end the guest and itself, and waits for both.
    pub fn terminate(&mut self) -> ExitStatus {
        self.signal(Signal::TERM);
        self.wait_for_end()
    }

    /// Kills it; its QEMU lives on.
    pub fn kill(&mut self) {
        self.signal(Signal::KILL);
        self.wait_for_end();
    }

    /// Asks it to end, and does not wait.
    pub fn ask_to_end(&self) {
        self.signal(Signal::TERM);
    }

    fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("our own child can be signalled");
    }

    fn must_live(&mut self) {
        let ended = self.child.try_wait().expect("our own child can be waited for");
        if let Some(status) = ended {
            panic!("the supervisor ended early: {status}");
        }
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        if thread::panicking() {
            eprintln!("--- {}\n{}---", self.log.display(), self.log());
        }
        // Already gone is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// How a command ended and what it said.
#[derive(Debug)]
pub struct Outcome {
    status: ExitStatus,
    /// Standard output; with `--json`, one object a line.
    pub stdout: String,
    /// Standard error, for people.
    pub stderr: String,
}

impl Outcome {
    /// The exit code; `None` when a signal ended it.
    pub fn exit_code(&self) -> Option<i32> {
        self.status.code()
    }

    /// All JSON lines.
    pub fn objects(&self) -> Vec<Value> {
        let read =
            |line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{line:?} is not JSON: {error}"));
        self.stdout.lines().map(read).collect()
    }

    /// The last JSON line: the result, or the error.
    pub fn result(&self) -> Value {
        let last = self.stdout.lines().next_back().unwrap_or_default();
        serde_json::from_str(last)
            .unwrap_or_else(|error| panic!("the last line is not JSON ({error}): {self:#?}"))
    }

    /// Insists on an exit code.
    #[track_caller]
    pub fn expect_exit(self, code: i32) -> Self {
        assert_eq!(self.exit_code(), Some(code), "{self:#?}");
        self
    }

    /// Insists on success.
    #[track_caller]
    pub fn expect_success(self) -> Self {
        self.expect_exit(0)
    }
}
