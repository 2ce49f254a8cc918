//! Records how the laboratory's QEMUs answer, for tests that run without them.
//!
//! `cargo run -p dormouse-tests --bin record-transcripts` writes `tests/transcripts/VERSION.jsonl`
//! anew: one message a line, in the order of the wire, our commands and QEMU's answers and events
//! (`dormouse_qmp::fake::Transcript` says how it is read).
//!
//! What differs from run to run and says nothing is made equal: paths, clocks, host addresses, the
//! numbers in generated node names. The measurements in `query-migrate`, and how often a migration
//! passed over memory, stay as they were seen.

use std::{
    fs, io,
    io::{BufRead, BufReader},
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::net::{UnixListener, UnixStream},
    },
    path::Path,
    thread,
};

use dormouse_tests::{BootSectorGuest, Guest, Lab, PATIENCE, PlainQemu, QemuBuild, until};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde_json::{Value, json};

fn main() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("transcripts");
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let lines = record(build);
        let path = folder.join(format!("{build}.jsonl"));
        fs::write(&path, lines.join("\n") + "\n").expect("the transcript can be written");
        println!("{}: {} messages", path.display(), lines.len());
    }
}

fn record(build: QemuBuild) -> Vec<String> {
    let lab = Lab::new();
    let guest = BootSectorGuest::new(&lab, build);
    let _qemu = PlainQemu::start(&guest);
    guest.wait_for_ticks(5);

    let mut recording = Recording::start(guest.monitor_socket(), lab.folder());
    recording.say("qmp_capabilities", json!({"enable": ["oob"]}));
    what_it_is(&mut recording);
    what_it_has(&mut recording);
    what_it_refuses(&mut recording);
    a_descriptor_each_way(&mut recording, &lab);
    recording.say("stop", Value::Null);
    recording.say("query-status", Value::Null);
    a_mirror_and_an_export(&mut recording, &lab);
    recording.say("cont", Value::Null);
    recording.say("query-status", Value::Null);
    a_migration_to_nowhere(&mut recording, &lab);
    recording.lines
}

fn what_it_is(recording: &mut Recording) {
    for query in [
        "query-status",
        "query-target",
        "query-machines",
        "query-commands",
        "query-qmp-schema",
        "query-migrate-capabilities",
        "query-migrate-parameters",
    ] {
        recording.say(query, Value::Null);
    }
    recording.say("qom-list-properties", json!({"typename": "memory-backend-memfd"}));
    recording.say("qom-list-properties", json!({"typename": "no-such-type"}));
}

fn what_it_has(recording: &mut Recording) {
    for query in [
        "query-memdev",
        "query-memory-size-summary",
        "x-query-ramblock",
        "query-block",
        "query-named-block-nodes",
        "query-block-exports",
        "query-jobs",
        "query-block-jobs",
        "query-fdsets",
        "query-migrate",
    ] {
        recording.say(query, Value::Null);
    }
    recording.say_out_of_band("query-yank");
}

fn what_it_refuses(recording: &mut Recording) {
    recording.say("no-such-command", Value::Null);
    recording.say("job-dismiss", json!({"id": "no-such-job"}));
    recording.say_text("}");
}

/// A file is handed over by its name and as a set, and taken back.
fn a_descriptor_each_way(recording: &mut Recording, lab: &Lab) {
    let file = fs::File::create(lab.path("handed-over")).expect("a file can be made in the lab");
    recording.say_with_descriptor("getfd", json!({"fdname": "file"}), file.as_fd());
    recording.say_with_descriptor("add-fd", json!({"opaque": "a file"}), file.as_fd());
    let sets = recording.say("query-fdsets", Value::Null);
    recording.say("remove-fd", json!({"fdset-id": sets[0]["fdset-id"]}));
    recording.say("closefd", json!({"fdname": "file"}));
    recording.say("query-fdsets", Value::Null);
}

/// The disk is mirrored into a target that forgets, which is exported at the same time.
fn a_mirror_and_an_export(recording: &mut Recording, lab: &Lab) {
    let disk_bytes = fs::metadata(lab.path("disk.img"))
        .expect("the guest has a disk")
        .len();
    let bitmap = json!({"node": "ide0-hd0", "name": "bitmap", "granularity": 65536});
    recording.say("block-dirty-bitmap-add", bitmap);
    recording.say("query-block", Value::Null);
    let target = json!({"driver": "null-co", "node-name": "target", "size": disk_bytes, "read-zeroes": true});
    recording.say("blockdev-add", target);
    let mirror = json!({
        "job-id": "mirror", "device": "ide0-hd0", "target": "target", "sync": "full", "auto-dismiss": false,
    });
    recording.say("blockdev-mirror", mirror);
    recording.hear("BLOCK_JOB_READY", |_| true);
    recording.say("query-jobs", Value::Null);
    recording.say("query-block-jobs", Value::Null);
    recording.say("block-job-cancel", json!({"device": "mirror"}));
    recording.hear("JOB_STATUS_CHANGE", |data| data["status"] == "concluded");
    recording.say("query-jobs", Value::Null);
    recording.say("job-dismiss", json!({"id": "mirror"}));

    let socket = json!({"type": "unix", "data": {"path": lab.path("nbd.sock")}});
    recording.say("nbd-server-start", json!({"addr": socket}));
    let export = json!({"type": "nbd", "id": "export", "node-name": "target", "writable": true});
    recording.say("block-export-add", export);
    recording.say("query-block-exports", Value::Null);
    recording.say("block-export-del", json!({"id": "export"}));
    recording.hear("BLOCK_EXPORT_DELETED", |_| true);
    recording.say("nbd-server-stop", Value::Null);
    recording.say("blockdev-del", json!({"node-name": "target"}));
}

fn a_migration_to_nowhere(recording: &mut Recording, lab: &Lab) {
    let socket = lab.path("migration.sock");
    let listener = UnixListener::bind(&socket).expect("a socket can be bound in the lab");
    let reader = thread::spawn(move || {
        let (mut stream, _) = listener.accept().expect("QEMU connects");
        io::copy(&mut stream, &mut io::sink())
    });
    let events = json!([{"capability": "events", "state": true}]);
    recording.say("migrate-set-capabilities", json!({"capabilities": events}));
    recording.say("migrate-set-parameters", json!({"max-bandwidth": 0}));
    recording.say("migrate", json!({"uri": format!("unix:{}", socket.display())}));
    recording.hear("MIGRATION", |data| data["status"] == "completed");
    // The run state follows the migration a moment later.
    until("the run state postmigrate", || {
        (recording.look("query-status")["status"] == "postmigrate").then_some(())
    });
    recording.say("query-migrate", Value::Null);
    recording.say("query-status", Value::Null);
    reader
        .join()
        .expect("the reader does not panic")
        .expect("the migration stream can be read to its end");
}

/// A monitor session of which every message is kept.
struct Recording {
    stream: BufReader<UnixStream>,
    lines: Vec<String>,
    disguise: Disguise,
}

impl Recording {
    fn start(socket: &Path, folder: &Path) -> Self {
        let stream = until("QEMU's monitor", || UnixStream::connect(socket).ok());
        stream
            .set_read_timeout(Some(PATIENCE))
            .expect("a read timeout can be set");
        let mut recording = Self {
            stream: BufReader::new(stream),
            lines: Vec::new(),
            disguise: Disguise::new(folder),
        };
        let greeting = recording.read();
        recording.keep(greeting);
        recording
    }

    /// Executes a command; it and all that is heard up to its reply are kept. Null arguments stand
    /// for none.
    fn say(&mut self, command: &str, arguments: Value) -> Value {
        self.say_line(command_line("execute", command, arguments), &[])
    }

    fn say_out_of_band(&mut self, command: &str) -> Value {
        self.say_line(command_line("exec-oob", command, Value::Null), &[])
    }

    fn say_with_descriptor(&mut self, command: &str, arguments: Value, fd: BorrowedFd<'_>) -> Value {
        self.say_line(command_line("execute", command, arguments), &[fd])
    }

    fn say_line(&mut self, line: Value, fds: &[BorrowedFd<'_>]) -> Value {
        self.write(&line.to_string(), fds);
        self.keep(line);
        self.reply(true)["return"].take()
    }

    /// Sends what is no command.
    fn say_text(&mut self, text: &str) {
        self.keep(json!({"text": text}));
        self.write(text, &[]);
        self.reply(true);
    }

    /// Executes a command of which only the events meanwhile are kept.
    fn look(&mut self, command: &str) -> Value {
        self.write(&command_line("execute", command, Value::Null).to_string(), &[]);
        self.reply(false)["return"].take()
    }

    /// Waits for an event. It and all events before it are kept.
    fn hear(&mut self, event: &str, wanted: impl Fn(&Value) -> bool) {
        let is_it = |message: &Value| message["event"] == event && wanted(&message["data"]);
        // It may have come before the reply to the command that led to it.
        let already = self.lines.iter().rev().map_while(|line| {
            let message: Value = serde_json::from_str(line).expect("what was kept is JSON");
            message.get("execute").is_none().then_some(message)
        });
        if already.into_iter().any(|message| is_it(&message)) {
            return;
        }
        loop {
            let message = self.read();
            self.keep(message.clone());
            if is_it(&message) {
                return;
            }
        }
    }

    fn reply(&mut self, is_kept: bool) -> Value {
        loop {
            let message = self.read();
            let is_event = message.get("event").is_some();
            if is_kept || is_event {
                self.keep(message.clone());
            }
            if !is_event {
                return message;
            }
        }
    }

    fn keep(&mut self, mut message: Value) {
        self.disguise.apply(&mut message);
        self.lines.push(message.to_string());
    }

    fn write(&mut self, line: &str, fds: &[BorrowedFd<'_>]) {
        let line = format!("{line}\n");
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(fds));
        }
        let bytes = [io::IoSlice::new(line.as_bytes())];
        let sent = sendmsg(self.stream.get_ref(), &bytes, &mut control, SendFlags::NOSIGNAL)
            .expect("QEMU reads its monitor");
        assert_eq!(sent, line.len(), "a command is shorter than a socket's buffer");
    }

    fn read(&mut self) -> Value {
        let mut line = String::new();
        let length = self.stream.read_line(&mut line).expect("QEMU answers");
        assert!(length > 0, "QEMU closed its monitor");
        serde_json::from_str(&line).expect("QEMU speaks JSON")
    }
}

fn command_line(verb: &str, command: &str, arguments: Value) -> Value {
    let mut line = json!({ verb: command });
    if !arguments.is_null() {
        line["arguments"] = arguments;
    }
    line
}

/// Makes equal what differs from run to run.
struct Disguise {
    folder: String,
    /// The generated node names in the order in which they were seen.
    node_names: Vec<String>,
}

impl Disguise {
    /// Host addresses are above, sizes and offsets of the laboratory's guests are below.
    const LOWEST_HOST_ADDRESS: u64 = 1 << 40;

    fn new(folder: &Path) -> Self {
        Self {
            folder: folder.display().to_string(),
            node_names: Vec::new(),
        }
    }

    fn apply(&mut self, value: &mut Value) {
        match value {
            Value::Object(object) => {
                if let Some(timestamp) = object.get_mut("timestamp") {
                    *timestamp = json!({"seconds": 1_700_000_000, "microseconds": 0});
                }
                object.values_mut().for_each(|member| self.apply(member));
            }
            Value::Array(elements) => elements.iter_mut().for_each(|element| self.apply(element)),
            Value::String(text) => *text = self.text(text),
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }

    fn text(&mut self, text: &str) -> String {
        if text.starts_with("#block") {
            return self.node_name(text);
        }
        text.replace(&self.folder, "/lab")
            .split(' ')
            .map(|word| {
                if is_host_address(word) {
                    "0x00007f0000000000"
                } else {
                    word
                }
            })
            .collect::<Vec<_>>()
            .join(" ")
    }

    fn node_name(&mut self, name: &str) -> String {
        let at = match self.node_names.iter().position(|seen| seen == name) {
            Some(at) => at,
            None => {
                self.node_names.push(name.to_owned());
                self.node_names.len() - 1
            }
        };
        format!("#block{at:03}")
    }
}

fn is_host_address(word: &str) -> bool {
    word.strip_prefix("0x")
        .and_then(|digits| u64::from_str_radix(digits, 16).ok())
        .is_some_and(|address| address >= Disguise::LOWEST_HOST_ADDRESS)
}
