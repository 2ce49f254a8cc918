//! RAM filled from an image, and an image as the stream of a migration, against reading it: rounds of neighbours, because
//! a disk that is shared changes its pace by the minute. The pace of reading is that of `verify`, which reads and sums
//! every chunk and puts it nowhere; `fio`, where there is one, tells the disk's own.
//!
//! ```text
//! cargo bench -p dormouse-benches --bench fill -- [--mib 1500] [--rounds 5] [--folder /tmp] [--cold]
//! ```
//!
//! Before each fill so much memory is touched and freed: a hypervisor gives memory that was not used before page by page,
//! which takes longer than all else. `--cold` leaves that out. It needs root for its tmpfs mounts.
//! Under `cargo test` it does a few MiB once, to see that it works.

use std::ffi::CString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use dormouse_benches::{BLOCK, cpu_time, manifest, median, recording};
use dormouse_storage::{
    BlockSize, ByteCount, CreateOptions, GuestMemory, Image, ImageWriter, Layout, MemoryFile, Progress, Run,
    WORKER_THREADS,
};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tempfile::TempDir;

struct Arguments {
    length: ByteCount,
    rounds: usize,
    folder: PathBuf,
    is_cold: bool,
}

fn main() {
    let arguments = Arguments::parse();
    let path = arguments.folder.join("dormouse-bench-fill.image");
    write_image(&path, arguments.length);
    let image = Image::open(&path).expect("open");
    let ways = [
        "read and summed",
        "filled, 4 KiB pages",
        "filled, huge pages",
        "as a stream",
    ];
    let mut rates = vec![(Vec::new(), Vec::new(), Vec::new()); ways.len()];
    let mut fio_rates = Vec::new();
    for _ in 0..arguments.rounds {
        fio_rates.extend(fio(&path, arguments.length));
        for (way, (rates, to_reading, cpu)) in ways.iter().zip(&mut rates) {
            let (reading, _) = timed(&arguments, || {
                image.verify(&run(&Progress::default())).expect("verified");
            });
            let (rate, cpu_seconds) = match *way {
                "filled, 4 KiB pages" => fill(&image, "never", &arguments),
                "filled, huge pages" => fill(&image, "within_size", &arguments),
                "as a stream" => timed(&arguments, || {
                    let written = image.write_precopy(&[], &run(&Progress::default()), std::io::sink());
                    written.expect("written");
                }),
                _ => timed(&arguments, || {
                    image.verify(&run(&Progress::default())).expect("verified");
                }),
            };
            rates.push(rate);
            to_reading.push(rate / reading);
            cpu.push(cpu_seconds);
        }
    }
    std::fs::remove_file(&path).expect("remove");
    println!("{:22} {:>6}  to reading  (least to most)  CPU-s/GiB", "", "GB/s");
    for (way, (mut rates, mut to_reading, mut cpu)) in ways.iter().zip(rates) {
        let ratio = median(&mut to_reading);
        let spread = format!(
            "({:.2} to {:.2})",
            to_reading[0],
            to_reading[to_reading.len() - 1]
        );
        let (rate, cpu) = (median(&mut rates) / 1e9, median(&mut cpu));
        println!("{way:22} {rate:6.2}  {ratio:10.2}  {spread:15} {cpu:10.2}");
    }
    println!("{:22} {:6.2}", "fio", median(&mut fio_rates) / 1e9);
}

impl Arguments {
    fn parse() -> Self {
        let mut parsed = Self {
            length: ByteCount::mib(1500),
            rounds: 5,
            folder: std::env::temp_dir(),
            is_cold: false,
        };
        let mut is_bench = false;
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().expect("a value");
            match argument.as_str() {
                "--mib" => parsed.length = ByteCount::mib(value().parse().expect("a number of MiB")),
                "--rounds" => parsed.rounds = value().parse().expect("a number of rounds"),
                "--folder" => parsed.folder = value().into(),
                "--cold" => parsed.is_cold = true,
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

fn run(progress: &Progress) -> Run<'_> {
    static NEVER: AtomicBool = AtomicBool::new(false);
    Run {
        threads: WORKER_THREADS,
        progress,
        cancelled: &NEVER,
    }
}

/// Bytes per second and CPU-seconds per GiB.
fn timed(arguments: &Arguments, work: impl FnOnce()) -> (f64, f64) {
    let (began, cpu_before) = (Instant::now(), cpu_time());
    work();
    let (took, cpu) = (began.elapsed(), cpu_time() - cpu_before);
    let bytes = arguments.length.0 as f64;
    (
        bytes / took.as_secs_f64(),
        cpu.as_secs_f64() / (bytes / f64::from(1 << 30)),
    )
}

fn fill(image: &Image, huge: &str, arguments: &Arguments) -> (f64, f64) {
    let tmpfs = Tmpfs::with(huge);
    if !arguments.is_cold {
        let used = Tmpfs::with(huge);
        let mut file = std::fs::File::create(used.file()).expect("create");
        let page = vec![1; 1 << 20];
        for _ in 0..(arguments.length.0 >> 20) * 3 / 2 {
            file.write_all(&page).expect("write");
        }
    }
    let memory = MemoryFile::create(&tmpfs.file(), arguments.length).expect("memory");
    timed(arguments, || {
        let progress = Progress::default();
        image.fill(BLOCK, &memory, &run(&progress)).expect("filled");
    })
}

struct Tmpfs {
    folder: TempDir,
}

impl Tmpfs {
    fn with(huge: &str) -> Self {
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
        Self { folder }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("ram")
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = unmount(self.folder.path(), UnmountFlags::DETACH);
    }
}

/// An image of RAM in which everything is random.
fn write_image(path: &Path, length: ByteCount) {
    let ram = Tmpfs::with("always");
    let mut file = std::fs::File::create(ram.file()).expect("create");
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
    let memory = GuestMemory::map(std::fs::File::open(ram.file()).expect("open"), length).expect("map");
    let layout = Layout::plan(&[BlockSize {
        name: BLOCK.into(),
        length,
    }])
    .expect("layout");
    let options = CreateOptions {
        replace: true,
        ..CreateOptions::default()
    };
    let mut writer = ImageWriter::create(path, layout, options).expect("create");
    writer.reserve(ByteCount::mib(1)).expect("reserve");
    writer
        .write_memory(BLOCK, &memory, &run(&Progress::default()))
        .expect("write");
    writer.seal(&manifest(), &recording(length)).expect("seal");
}

/// The disk's own pace in bytes per second, if `fio` is here.
fn fio(path: &Path, length: ByteCount) -> Option<f64> {
    let output = Command::new("fio")
        .args(["--name=r", "--bs=1M", "--rw=read", "--ioengine=io_uring"])
        .args(["--iodepth=8", "--direct=1", "--readonly", "--output-format=json"])
        .arg(format!("--size={}", length.0))
        .arg(format!("--filename={}", path.display()))
        .output()
        .ok()?;
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).ok()?;
    told["jobs"][0]["read"]["bw_bytes"].as_f64()
}
