//! What a chunk of guest RAM costs before it is written, and what taking a recorded stream apart
//! costs.
#![allow(missing_docs, reason = "criterion's macros make public functions")]

use std::hint::black_box;
use std::os::unix::fs::FileExt;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use dormouse_storage::{ByteCount, GuestMemory, Recording};

const CHUNK_BYTES: u64 = 1 << 20;
const PAGE_BYTES: usize = 4096;

criterion_group!(benches, scan, parse);
criterion_main!(benches);

/// Chunks of one kind each, in a mapping larger than the caches.
fn scan(criterion: &mut Criterion) {
    const CHUNKS: u64 = 64;
    let mut group = criterion.benchmark_group("zero scan and CRC-32 of a chunk");
    group.throughput(Throughput::Bytes(CHUNK_BYTES));
    for (name, last_byte, fill) in [("zero", 0, 0), ("zero but for its end", 1, 0), ("data", 1, 1)] {
        let file = tempfile::tempfile_in("/dev/shm").expect("tmpfs");
        let mut chunk = vec![fill; CHUNK_BYTES as usize];
        chunk[CHUNK_BYTES as usize - 1] = last_byte;
        for index in 0..CHUNKS {
            file.write_all_at(&chunk, index * CHUNK_BYTES).expect("write");
        }
        let memory = GuestMemory::map(file, ByteCount(CHUNKS * CHUNK_BYTES)).expect("map");
        let mut starts = (0..CHUNKS).map(|index| index * CHUNK_BYTES).cycle();
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let start = starts.next().unwrap_or_default();
                black_box(memory.crc32_unless_zero(start..start + CHUNK_BYTES))
            });
        });
    }
}

/// A recording with RAM out of band: 512 pages of ROMs and tables, 256 KiB of device state.
fn parse(criterion: &mut Criterion) {
    let stream = stream(512, 256 << 10);
    let mut group = criterion.benchmark_group("recorded stream");
    group.throughput(Throughput::Bytes(stream.len() as u64));
    group.bench_function("parse", |bencher| {
        bencher.iter(|| Recording::parse(black_box(&stream)).expect("a stream"));
    });
    let recording = Recording::parse(&stream).expect("a stream");
    group.bench_function("normalize", |bencher| {
        bencher.iter(|| black_box(&recording).normalized())
    });
}

fn stream(pages: usize, device_state_bytes: usize) -> Vec<u8> {
    let length = (pages * PAGE_BYTES) as u64;
    let mut stream = b"QEVM\0\0\0\x03\x07\0\0\0\x02pc\x01\0\0\0\x01\x03ram\0\0\0\0\0\0\0\x04".to_vec();
    stream.extend((length | 0x04).to_be_bytes());
    stream.extend(b"\x07pc.bios");
    stream.extend(length.to_be_bytes());
    let end_of_section = b"\0\0\0\0\0\0\0\x10\x7e\0\0\0\x01";
    stream.extend(end_of_section);
    stream.extend(b"\x02\0\0\0\x01");
    for page in 0..pages {
        let goes_on = if page > 0 { 0x20 } else { 0 };
        stream.extend(((page * PAGE_BYTES) as u64 | 0x08 | goes_on).to_be_bytes());
        if page == 0 {
            stream.extend(b"\x07pc.bios");
        }
        stream.extend([page as u8 | 1; PAGE_BYTES]);
    }
    stream.extend(end_of_section);
    stream.extend(b"\x03\0\0\0\x01");
    stream.extend(end_of_section);
    stream.extend(vec![4; device_state_bytes]);
    stream.extend(b"\0\x06\0\0\0\x02{}");
    stream
}
