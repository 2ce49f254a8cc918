//! What a command costs our QMP client, beside `qapi`'s own client and a blocking loop that does
//! nothing but JSON.
//!
//! All talk to the same scripted peer, each over a socket of its own. The peer has its replies ready
//! and reads no JSON; `bytes alone` is a client that does not either, so it shows where the peer and
//! the socket set the pace.
#![allow(missing_docs, reason = "criterion's macros make public functions")]

use std::hint::black_box;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::time::Duration;

use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main};
use dormouse_qmp::view::machine::StatusInfo;
use dormouse_qmp::{Client, command};
use qapi::futures::{QapiService, QmpStreamTokio};
use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::WriteHalf;

/// What `query-qmp-schema` of QEMU 10.0.2 takes in one line.
const SCHEMA_BYTES: usize = 236_000;

/// As many as our client lets be in flight.
const MANY: u64 = 8;

criterion_group!(benches, round_trip, large_reply);
criterion_main!(benches);

/// `query-status`, one at a time and eight at a time, its reply read into a type (by the blocking
/// loop, into a value).
fn round_trip(criterion: &mut Criterion) {
    let status = r#"{"status": "running", "running": true}"#;
    for clock in [Clock::Wall, Clock::Processor] {
        let mut group = group(criterion, "query-status", clock);
        for in_flight in [1, MANY] {
            group.throughput(Throughput::Elements(in_flight));
            compare(&mut group, clock, status, Asked::Status, in_flight);
        }
        group.finish();
    }
}

/// `query-qmp-schema`, one at a time: our client gives a value, `qapi`'s its own types.
fn large_reply(criterion: &mut Criterion) {
    let schema = schema();
    for clock in [Clock::Wall, Clock::Processor] {
        let mut group = group(criterion, "query-qmp-schema", clock);
        group.throughput(Throughput::Bytes(schema.len() as u64));
        compare(&mut group, clock, &schema, Asked::Schema, 1);
        measure(&mut group, "serde_json, no socket", clock, |rounds| {
            for _ in 0..rounds {
                black_box(serde_json::from_str::<Value>(black_box(&schema)).expect("JSON"));
            }
        });
        group.finish();
    }
}

/// What is read before and after.
#[derive(Clone, Copy)]
enum Clock {
    Wall,
    /// The time that the client's one thread was on a processor. The peer, the waking up and the
    /// neighbours on the machine are not in it.
    Processor,
}

impl Clock {
    fn read(self) -> Duration {
        let id = match self {
            Self::Wall => ClockId::Monotonic,
            Self::Processor => ClockId::ThreadCPUTime,
        };
        clock_gettime(id).try_into().expect("a time after the epoch")
    }
}

fn group<'a>(criterion: &'a mut Criterion, command: &str, clock: Clock) -> BenchmarkGroup<'a, WallTime> {
    let what = match clock {
        Clock::Wall => "wall time",
        Clock::Processor => "CPU time of the client",
    };
    let mut group = criterion.benchmark_group(format!("{command}, {what}"));
    group
        .warm_up_time(Duration::from_secs(1))
        .measurement_time(Duration::from_secs(3));
    group
}

fn measure(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    clock: Clock,
    mut run_rounds: impl FnMut(u64),
) {
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|rounds| {
            let start = clock.read();
            run_rounds(rounds);
            clock.read() - start
        });
    });
}

fn compare(
    group: &mut BenchmarkGroup<'_, WallTime>,
    clock: Clock,
    result: &str,
    asked: Asked,
    in_flight: u64,
) {
    compare_async::<Ours>(group, clock, result, asked, in_flight);
    compare_async::<Qapi>(group, clock, result, asked, in_flight);
    compare_blocking(group, clock, result, asked, in_flight);
}

#[derive(Clone, Copy)]
enum Asked {
    Status,
    Schema,
}

/// An asynchronous client, connected and negotiated.
trait Asynchronous: Sized {
    const NAME: &str;

    async fn connect(peer: &Peer) -> Self;
    async fn ask(&self, asked: Asked);
}

struct Ours(Client);

impl Asynchronous for Ours {
    const NAME: &str = "ours";

    async fn connect(peer: &Peer) -> Self {
        let client = Client::connect(&peer.socket(), Default::default()).await;
        Self(client.expect("a connection"))
    }

    async fn ask(&self, asked: Asked) {
        match asked {
            Asked::Status => {
                let reply: Result<StatusInfo, _> = self.0.query(&command::query_status {}).await;
                black_box(reply.expect("a status"));
            }
            Asked::Schema => {
                let reply = self.0.execute(&command::query_qmp_schema {}).await;
                black_box(reply.expect("a schema"));
            }
        }
    }
}

struct Qapi(QapiService<QmpStreamTokio<WriteHalf<tokio::net::UnixStream>>>);

impl Asynchronous for Qapi {
    const NAME: &str = "qapi";

    async fn connect(peer: &Peer) -> Self {
        let stream = QmpStreamTokio::open_uds(peer.socket())
            .await
            .expect("a connection");
        let (service, _) = stream.negotiate().await.expect("a negotiation").spawn_tokio();
        Self(service)
    }

    async fn ask(&self, asked: Asked) {
        match asked {
            Asked::Status => {
                black_box(self.0.execute(command::query_status {}).await.expect("a status"));
            }
            Asked::Schema => {
                black_box(
                    self.0
                        .execute(command::query_qmp_schema {})
                        .await
                        .expect("a schema"),
                );
            }
        }
    }
}

fn compare_async<C: Asynchronous>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    clock: Clock,
    result: &str,
    asked: Asked,
    in_flight: u64,
) {
    let peer = Peer::start(result);
    // One thread, so that the peer has the other processor of a small machine, and so that all the
    // client does is in that thread's time.
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let client = runtime.block_on(C::connect(&peer));
    let name = format!("{}, {in_flight} in flight", C::NAME);
    measure(group, &name, clock, |rounds| {
        runtime.block_on(ask_for_rounds(&client, asked, in_flight, rounds));
    });
}

/// Keeps as many commands in flight by as many callers, who each ask the next when they are
/// answered.
async fn ask_for_rounds<C: Asynchronous>(client: &C, asked: Asked, in_flight: u64, rounds: u64) {
    let caller = || async {
        for _ in 0..rounds {
            client.ask(asked).await;
        }
    };
    match in_flight {
        1 => caller().await,
        MANY => {
            let [a, b, c, d, e, f, g, h] = std::array::from_fn(|_| caller());
            tokio::join!(a, b, c, d, e, f, g, h);
        }
        _ => panic!("one or {MANY}"),
    }
}

/// The loop with JSON and without; what is in flight is written at once and then read.
fn compare_blocking(
    group: &mut BenchmarkGroup<'_, WallTime>,
    clock: Clock,
    result: &str,
    asked: Asked,
    in_flight: u64,
) {
    let peer = Peer::start(result);
    let mut blocking = Blocking::connect(&peer).expect("a connection");
    let command = match asked {
        Asked::Status => "query-status",
        Asked::Schema => "query-qmp-schema",
    };
    let name = format!("serde_json loop, {in_flight} in flight");
    measure(group, &name, clock, |rounds| {
        for _ in 0..rounds {
            blocking.ask(command, in_flight).expect("replies");
        }
    });
    let line = json!({"execute": command, "id": 1}).to_string() + "\n";
    let lines = line.repeat(in_flight as usize);
    let name = format!("bytes alone, {in_flight} in flight");
    measure(group, &name, clock, |rounds| {
        for _ in 0..rounds {
            blocking.exchange(&lines, in_flight).expect("replies");
        }
    });
}

struct Blocking {
    stream: BufReader<UnixStream>,
    next_id: u64,
    line: String,
}

impl Blocking {
    fn connect(peer: &Peer) -> io::Result<Self> {
        let stream = UnixStream::connect(peer.socket())?;
        let mut blocking = Self {
            // As large as the read buffer of our client.
            stream: BufReader::with_capacity(64 << 10, stream),
            next_id: 1,
            line: String::new(),
        };
        blocking.stream.read_line(&mut blocking.line)?;
        blocking.ask("qmp_capabilities", 1)?;
        Ok(blocking)
    }

    fn ask(&mut self, command: &str, in_flight: u64) -> io::Result<()> {
        let mut commands = String::new();
        let first = self.next_id;
        self.next_id += in_flight;
        for id in first..self.next_id {
            commands += &json!({"execute": command, "id": id}).to_string();
            commands.push('\n');
        }
        self.stream.get_mut().write_all(commands.as_bytes())?;
        for id in first..self.next_id {
            self.line.clear();
            self.stream.read_line(&mut self.line)?;
            let reply: Value = serde_json::from_str(&self.line)?;
            assert_eq!(reply["id"], id);
            black_box(reply);
        }
        Ok(())
    }

    fn exchange(&mut self, commands: &str, in_flight: u64) -> io::Result<()> {
        self.stream.get_mut().write_all(commands.as_bytes())?;
        for _ in 0..in_flight {
            self.stream.skip_until(b'\n')?;
        }
        Ok(())
    }
}

/// A scripted monitor on a thread of its own, which serves one client and ends with it.
///
/// It answers every command with one result, all that it has read with one write.
struct Peer {
    directory: TempDir,
}

impl Peer {
    fn start(result: &str) -> Self {
        let peer = Self {
            directory: tempfile::tempdir().expect("a directory"),
        };
        let listener = UnixListener::bind(peer.socket()).expect("a socket");
        let result = result.to_owned();
        std::thread::spawn(move || {
            let (stream, _) = listener.accept().expect("a client");
            // The client goes when its bench is over; that is no failure.
            let _ = serve(&stream, &result);
        });
        peer
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("qmp.sock")
    }
}

fn serve(mut stream: &UnixStream, result: &str) -> io::Result<()> {
    let greeting = json!({"QMP": {
        "version": {"qemu": {"major": 10, "minor": 0, "micro": 2}, "package": ""},
        "capabilities": ["oob"],
    }});
    stream.write_all(format!("{greeting}\r\n").as_bytes())?;
    let mut commands = BufReader::new(stream);
    let mut line = String::new();
    let mut replies = String::new();
    while commands.read_line(&mut line)? > 0 {
        let result = if line.contains("qmp_capabilities") {
            "{}"
        } else {
            result
        };
        replies += "{\"return\": ";
        replies += result;
        // No client here writes anything behind the number, and one writes none.
        if let Some((_, id)) = line.trim_end().split_once("\"id\":") {
            replies += ", \"id\": ";
            replies += id.trim_end_matches('}');
        }
        replies += "}\r\n";
        line.clear();
        if !commands.buffer().contains(&b'\n') {
            stream.write_all(replies.as_bytes())?;
            replies.clear();
        }
    }
    Ok(())
}

/// A schema in the form, the mix and the size of the real one: half objects of four members, some
/// enums, a few of the rest.
fn schema() -> String {
    let mut entries = Vec::new();
    let mut bytes = 0;
    for index in 0.. {
        let entry = entry(index);
        bytes += entry.len() + ", ".len();
        entries.push(entry);
        if bytes >= SCHEMA_BYTES {
            break;
        }
    }
    format!("[{}]", entries.join(", "))
}

fn entry(index: usize) -> String {
    let name = index.to_string();
    match index % 11 {
        0 | 1 => format!(
            r#"{{"name": "block-command-{name}", "ret-type": "{name}", "meta-type": "command", "arg-type": "{name}"}}"#
        ),
        2 => format!(r#"{{"name": "[{name}]", "element-type": "{name}", "meta-type": "array"}}"#),
        3 => {
            let words = ["none", "auto", "threads", "native", "io_uring", "unsafe"];
            let members = words.map(|word| format!(r#"{{"name": "{word}"}}"#)).join(", ");
            let values = words.map(|word| format!(r#""{word}""#)).join(", ");
            format!(
                r#"{{"name": "{name}", "members": [{members}], "meta-type": "enum", "values": [{values}]}}"#
            )
        }
        4 => format!(r#"{{"name": "DEVICE_CHANGE_{name}", "meta-type": "event", "arg-type": "{name}"}}"#),
        _ => format!(
            r#"{{"name": "{name}", "members": [{{"name": "device", "type": "str"}}, {{"name": "children", "type": "[586]"}}, {{"name": "rewrite-corrupted", "default": null, "type": "bool"}}, {{"name": "read-pattern", "default": null, "type": "599"}}], "meta-type": "object"}}"#
        ),
    }
}
