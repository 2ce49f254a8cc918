//! The writer's whole path against the disk's own pace: guest RAM of random bytes in tmpfs is scanned,
//! summed, written and sealed, in rounds interleaved with `fio`, because a disk that is shared changes its
//! pace by the minute. Ratios of neighbours, and their median, are what counts.
//!
//! ```text
//! cargo bench -p dormouse-benches --bench writer -- [--mib 2000] [--rounds 5] [--folder /tmp] [--only PART]
//! ```
//!
//! It needs root for its tmpfs mounts and about twice `--mib` of memory; without `fio` it tells rates only.
//! Under `cargo test` it writes a few MiB once, to see that it works.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use dormouse_benches::{BLOCK, cpu_time, manifest, median, recording};
use dormouse_storage::{
    Backend, BlockSize, ByteCount, CreateOptions, GuestMemory, ImageWriter, Layout, Progress, Run,
};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tempfile::TempDir;

struct Arguments {
    length: ByteCount,
    rounds: usize,
    folder: PathBuf,
    only: String,
}

/// One way to write: how many threads, and how each writes.
struct Way {
    backend: Backend,
    threads: usize,
}

/// What a way did with one kind of RAM.
#[derive(Default)]
struct Figures {
    bytes_per_second: Vec<f64>,
    to_fio: Vec<f64>,
    cpu_seconds_per_gib: Vec<f64>,
}

fn main() {
    let arguments = Arguments::parse();
    let rams = [
        Ram::of("4 KiB pages", "never", arguments.length),
        Ram::of("huge pages", "always", arguments.length),
    ];
    let ways: Vec<Way> = [
        (Backend::Pwrite, 2),
        (Backend::Pwrite, 3),
        (Backend::Pwrite, 4),
        (Backend::Uring, 1),
        (Backend::Uring, 2),
        (Backend::Uring, 3),
        (Backend::Buffered, 3),
    ]
    .map(|(backend, threads)| Way { backend, threads })
    .into();
    let mut rows: Vec<(String, &Ram, &Way, Figures)> = Vec::new();
    for ram in &rams {
        for way in &ways {
            let name = format!("{}, {} x {}", ram.name, way.backend, way.threads);
            if name.contains(&arguments.only) {
                rows.push((name, ram, way, Figures::default()));
            }
        }
    }
    for _ in 0..arguments.rounds {
        for (_, ram, way, figures) in &mut rows {
            let fio = fio(&arguments);
            let (rate, cpu) = write(ram, way, &arguments);
            figures.bytes_per_second.push(rate);
            figures.cpu_seconds_per_gib.push(cpu);
            figures.to_fio.extend(fio.map(|fio| rate / fio));
        }
    }
    println!(
        "{:32} {:>8} {:>8}  {:20} {:>12}",
        "", "GB/s", "to fio", "  (least to most)", "CPU-s/GiB"
    );
    for (name, _, _, mut figures) in rows {
        let rate = median(&mut figures.bytes_per_second) / 1e9;
        let cpu = median(&mut figures.cpu_seconds_per_gib);
        let ratio = median(&mut figures.to_fio);
        let spread = match (figures.to_fio.first(), figures.to_fio.last()) {
            (Some(least), Some(most)) => format!("({least:.2} to {most:.2})"),
            _ => String::new(),
        };
        println!("{name:32} {rate:8.2} {ratio:8.2}  {spread:20} {cpu:12.3}");
    }
}

impl Arguments {
    fn parse() -> Self {
        let mut parsed = Self {
            length: ByteCount::mib(2000),
            rounds: 5,
            folder: std::env::temp_dir(),
            only: String::new(),
        };
        let mut is_bench = false;
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().expect("a value");
            match argument.as_str() {
                "--mib" => parsed.length = ByteCount::mib(value().parse().expect("a number of MiB")),
                "--rounds" => parsed.rounds = value().parse().expect("a number of rounds"),
                "--folder" => parsed.folder = value().into(),
                "--only" => parsed.only = value(),
                // From cargo.
                "--bench" => is_bench = true,
                _ => {}
            }
        }
        if !is_bench {
            (parsed.length, parsed.rounds) = (ByteCount::mib(8), 1);
        }
        parsed
    }
}

/// Guest RAM of random bytes in a tmpfs of its own.
struct Ram {
    name: &'static str,
    length: ByteCount,
    folder: TempDir,
}

impl Ram {
    fn of(name: &'static str, huge: &str, length: ByteCount) -> Self {
        let folder = tempfile::tempdir().expect("folder");
        let options = CString::new(format!("huge={huge}")).expect("options");
        mount(
            "tmpfs",
            folder.path(),
            "tmpfs",
            MountFlags::empty(),
            options.as_c_str(),
        )
        .expect("mounting a tmpfs needs root");
        let mut file = File::create(folder.path().join("ram")).expect("create");
        let mut state = 0x9e37_79b9_7f4a_7c15_u64;
        let mut chunk = vec![0; 1 << 20];
        for _ in 0..length.0 >> 20 {
            for word in chunk.chunks_exact_mut(8) {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                word.copy_from_slice(&state.to_le_bytes());
            }
            file.write_all(&chunk).expect("write");
        }
        Self { name, length, folder }
    }

    /// As when a guest is saved: a mapping that nobody has touched.
    fn memory(&self) -> GuestMemory {
        let file = File::open(self.folder.path().join("ram")).expect("open");
        GuestMemory::map(file, self.length).expect("map")
    }
}

impl Drop for Ram {
    fn drop(&mut self) {
        let _ = unmount(self.folder.path(), UnmountFlags::DETACH);
    }
}

/// Writes an image; tells bytes per second, from the first chunk to the end of the seal, and CPU-seconds
/// per GiB.
fn write(ram: &Ram, way: &Way, arguments: &Arguments) -> (f64, f64) {
    let target = arguments.folder.join("dormouse-bench.image");
    let length = ram.length;
    let layout = Layout::plan(&[BlockSize {
        name: BLOCK.into(),
        length,
    }])
    .expect("layout");
    let options = CreateOptions {
        backend: Some(way.backend),
        ..CreateOptions::default()
    };
    let mut writer = ImageWriter::create(&target, layout, options).expect("create");
    writer.reserve(ByteCount::mib(1)).expect("reserve");
    let recording = recording(length);
    let run = Run {
        threads: way.threads,
        progress: &Progress::default(),
        cancelled: &AtomicBool::new(false),
    };
    assert_eq!(writer.backend(), way.backend, "this machine has no such way");

    let (began, cpu_before) = (Instant::now(), cpu_time());
    writer.write_memory(BLOCK, &ram.memory(), &run).expect("write");
    let sealed = writer.seal(&manifest(), &recording).expect("seal");
    let (took, cpu) = (began.elapsed(), cpu_time() - cpu_before);

    sealed.remove().expect("remove");
    let gib = length.0 as f64 / f64::from(1 << 30);
    (length.0 as f64 / took.as_secs_f64(), cpu.as_secs_f64() / gib)
}

/// The disk's own pace in bytes per second, if `fio` is here.
fn fio(arguments: &Arguments) -> Option<f64> {
    let file = arguments.folder.join("dormouse-bench.fio");
    let output = Command::new("fio")
        .args(["--name=w", "--bs=1M", "--rw=write", "--ioengine=io_uring"])
        .args([
            "--iodepth=8",
            "--direct=1",
            "--end_fsync=1",
            "--output-format=json",
        ])
        .arg(format!("--size={}", arguments.length.0))
        .arg(format!("--filename={}", Path::new(&file).display()))
        .output()
        .ok()?;
    let _ = fs::remove_file(&file);
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
    told["jobs"][0]["write"]["bw_bytes"].as_f64()
}
