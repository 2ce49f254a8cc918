//! What a guest's RAM costs on its way into an image and back, by form: raw, compressed, encrypted. Images lie in
//! tmpfs, so that the CPUs are what is measured and not a disk.
#![allow(missing_docs, reason = "criterion's macros make public functions")]

use std::fs;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use dormouse_benches::{BLOCK, manifest, recording};
use dormouse_storage::{
    BlockSize, ByteCount, Compression, CreateOptions, GuestMemory, Image, ImageKey, ImageWriter, Layout,
    MemoryFile, Progress, Run, WORKER_THREADS, try_write_precopy,
};

const RAM: ByteCount = ByteCount::mib(128);

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(10);
    targets = save, load
}
criterion_main!(benches);

fn forms() -> [(&'static str, Compression, Option<ImageKey>); 5] {
    let key = ImageKey::from_file_content(&[7; 32]).expect("a key");
    [
        ("raw", Compression::None, None),
        ("zstd:1", Compression::Zstd(1), None),
        ("zstd:-3", Compression::Zstd(-3), None),
        ("encrypted", Compression::None, Some(key.clone())),
        ("zstd:1, encrypted", Compression::Zstd(1), Some(key)),
    ]
}

/// RAM of which a third of each page is noise and the rest repeats, so that it compresses to less than half.
fn ram() -> GuestMemory {
    let file = tempfile::tempfile_in("/dev/shm").expect("tmpfs");
    let mut state = 1_u64;
    let mut page = [0; 4096];
    for at in (0..RAM.0).step_by(page.len()) {
        for word in page[..1400].chunks_exact_mut(8) {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            word.copy_from_slice(&state.to_le_bytes());
        }
        page[1400..].fill((at >> 12) as u8);
        file.write_all_at(&page, at).expect("write");
    }
    GuestMemory::map(file, RAM).expect("map")
}

fn working<R>(work: impl FnOnce(&Run<'_>) -> R) -> R {
    work(&Run {
        threads: WORKER_THREADS,
        progress: &Progress::default(),
        cancelled: &AtomicBool::new(false),
    })
}

fn write(memory: &GuestMemory, target: &Path, compression: Compression, key: Option<ImageKey>) {
    let layout = Layout::plan(&[BlockSize {
        name: BLOCK.into(),
        length: RAM,
    }])
    .expect("layout");
    let options = CreateOptions {
        compression,
        key,
        ..CreateOptions::default()
    };
    let mut writer = ImageWriter::create(target, layout, options).expect("create");
    working(|run| writer.write_memory(BLOCK, memory, run)).expect("written");
    drop(writer.seal(&manifest(), &recording(RAM)).expect("sealed"));
}

fn save(criterion: &mut Criterion) {
    let memory = ram();
    let folder = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    let target = folder.path().join("image");
    let mut group = criterion.benchmark_group("RAM into an image");
    group.throughput(Throughput::Bytes(RAM.0));
    for (name, compression, key) in forms() {
        group.bench_function(name, |bencher| {
            bencher.iter_batched(
                || drop(fs::remove_file(&target)),
                |()| write(&memory, &target, compression, key.clone()),
                BatchSize::PerIteration,
            );
        });
    }
}

fn load(criterion: &mut Criterion) {
    let memory = ram();
    let folder = tempfile::tempdir_in("/dev/shm").expect("tmpfs");
    for (name, compression, key) in forms() {
        let target = folder.path().join("image");
        write(&memory, &target, compression, key.clone());
        let mut image = Image::open(&target).expect("open");
        if let Some(key) = &key {
            image.unlock(key).expect("the key");
        }
        let mut group = criterion.benchmark_group(format!("RAM out of an image, {name}"));
        group.throughput(Throughput::Bytes(RAM.0));
        group.bench_function("verify", |bencher| {
            bencher.iter(|| working(|run| image.verify(run)).expect("verified"));
        });
        let filled = folder.path().join("ram");
        group.bench_function("fill", |bencher| {
            bencher.iter_batched(
                || {
                    let _ = fs::remove_file(&filled);
                    MemoryFile::create(&filled, RAM).expect("memory")
                },
                |memory| working(|run| image.fill(BLOCK, &memory, run)).expect("filled"),
                BatchSize::PerIteration,
            );
        });
        group.bench_function("as a migration stream", |bencher| {
            let devices = image.device_state().expect("device state");
            bencher.iter(|| {
                try_write_precopy(&devices, image.pages(&[]).expect("pages"), &mut io::sink())
                    .expect("written");
            });
        });
        group.finish();
        fs::remove_file(&target).expect("remove");
        let _ = fs::remove_file(&filled);
    }
}
