//! A main stream and two multifd channels with anything on them, into an image: all of the guest arrives, or there is an error;
//! nothing panics and nothing waits for ever.
//!
//! The input is a row of steps, each with its arguments: a packet, a page record of the main stream, raw bytes.

#![no_main]

use std::collections::HashSet;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;
use std::thread;

use dormouse_storage::{BlockSize, ByteCount, CreateOptions, ImageWriter, Incoming, Layout, Progress, Run};
use libfuzzer_sys::fuzz_target;

/// Two whole chunks and a short one, and a block that is smaller than a chunk.
const BLOCKS: [(&str, u16); 2] = [("pc.ram", 515), ("rom", 2)];

fuzz_target!(|input: &[u8]| {
    let sent = Sent::by(input);
    let sizes = BLOCKS.map(|(name, pages)| BlockSize {
        name: name.to_owned(),
        length: ByteCount(u64::from(pages) << 12),
    });
    let layout = Layout::plan(&sizes).expect("a layout");
    // Without a name until it is sealed, which it is not.
    let target = std::path::PathBuf::from(format!("/dev/shm/fuzz-multifd-{}", std::process::id()));
    let mut writer = ImageWriter::create(&target, layout.clone(), CreateOptions::default())
        .expect("an image can be begun");
    let progress = Progress::default();
    let run = Run {
        threads: 1,
        progress: &progress,
        cancelled: &AtomicBool::new(false),
    };
    let (ours, theirs): (Vec<_>, Vec<_>) = (0..3)
        .map(|_| UnixStream::pair().expect("a pair of sockets"))
        .unzip();
    let result = thread::scope(|scope| {
        for (mut socket, bytes) in theirs.into_iter().zip(&sent.connections) {
            // Whoever gave up closed its end.
            scope.spawn(move || socket.write_all(bytes));
        }
        let incoming = Incoming::of(ours).expect("three connections");
        writer.write_incoming(incoming, ByteCount::kib(64), &run)
    });
    if let Ok((_, written)) = result {
        assert_eq!(written.data + written.zero, layout.ram());
        assert_eq!(progress.done(), layout.ram());
        let all: usize = BLOCKS.iter().map(|(_, pages)| usize::from(*pages)).sum();
        assert!(
            sent.has_raw_bytes || sent.pages.len() == all,
            "{} pages of {all} were sent",
            sent.pages.len()
        );
    }
});

#[derive(Default)]
struct Sent {
    /// The main stream first.
    connections: [Vec<u8>; 3],
    pages: HashSet<(usize, u16)>,
    has_raw_bytes: bool,
}

impl Sent {
    fn by(input: &[u8]) -> Self {
        let mut sent = Self {
            connections: [main_beginning(), opening(0), opening(1)],
            ..Self::default()
        };
        let mut input = input.iter().copied();
        while sent.step(&mut input).is_some() {}
        let main = &mut sent.connections[0];
        main.extend(b"\0\0\0\0\0\0\0\x10\x7e\0\0\0\x01\x03\0\0\0\x01\0\0\0\0\0\0\0\x10\x7e\0\0\0\x01");
        main.extend(b"\x04devices\0\x06\0\0\0\x02{}");
        sent
    }

    fn step(&mut self, input: &mut impl Iterator<Item = u8>) -> Option<()> {
        match input.next()? % 3 {
            0 => {
                let channel = 1 + usize::from(input.next()? % 2);
                let block = usize::from(input.next()? % 2);
                let [number, flags, data, zero] =
                    [input.next()?, input.next()?, input.next()?, input.next()?];
                let first = u16::from_be_bytes([input.next()?, input.next()?]);
                let (data, zero) = (u16::from(data % 129), u16::from(zero));
                let packet = packet(block, number, flags, (first, data, zero));
                self.connections[channel].extend(packet);
                self.pages
                    .extend((0..data + zero).map(|page| (block, first.wrapping_add(page))));
            }
            1 => {
                let block = usize::from(input.next()? % 2);
                let [count, data] = [input.next()?, input.next()?];
                let first = u16::from_be_bytes([input.next()?, input.next()?]);
                for page in (0..u16::from(count)).map(|page| first.wrapping_add(page)) {
                    let flag = if data % 2 == 1 { 0x08 } else { 0x02 };
                    let main = &mut self.connections[0];
                    main.extend((u64::from(page) << 12 | flag).to_be_bytes());
                    main.push(BLOCKS[block].0.len() as u8);
                    main.extend(BLOCKS[block].0.as_bytes());
                    if data % 2 == 1 {
                        main.extend(content(page));
                    } else {
                        main.push(0);
                    }
                    self.pages.insert((block, page));
                }
            }
            _ => {
                self.has_raw_bytes = true;
                let connection = usize::from(input.next()? % 3);
                let length = input.next()?;
                self.connections[connection].extend(input.take(length.into()));
            }
        }
        Some(())
    }
}

fn main_beginning() -> Vec<u8> {
    let mut bytes = b"QEVM\0\0\0\x03\x07\0\0\0\x02pc\x01\0\0\0\x01\x03ram\0\0\0\0\0\0\0\x04".to_vec();
    let total: u64 = BLOCKS.iter().map(|(_, pages)| u64::from(*pages) << 12).sum();
    bytes.extend((total | 0x04).to_be_bytes());
    for (name, pages) in BLOCKS {
        bytes.push(name.len() as u8);
        bytes.extend(name.as_bytes());
        bytes.extend((u64::from(pages) << 12).to_be_bytes());
    }
    bytes.extend(b"\0\0\0\0\0\0\0\x10\x7e\0\0\0\x01\x02\0\0\0\x01");
    bytes
}

fn opening(channel: u8) -> Vec<u8> {
    let mut bytes = b"\x11\x22\x33\x44\0\0\0\x01".to_vec();
    bytes.extend([0; 16]);
    bytes.push(channel);
    bytes.extend([0; 39]);
    bytes
}

/// A packet with its payload; its pages follow each other, first those with data.
fn packet(block: usize, number: u8, flags: u8, (first, data, zero): (u16, u16, u16)) -> Vec<u8> {
    let mut bytes = b"\x11\x22\x33\x44\0\0\0\x01".to_vec();
    bytes.extend(u32::from(flags).to_be_bytes());
    bytes.extend(128_u32.to_be_bytes());
    bytes.extend(u32::from(data).to_be_bytes());
    bytes.extend((u32::from(data) << 12).to_be_bytes());
    bytes.extend(u64::from(number).to_be_bytes());
    bytes.extend(u32::from(zero).to_be_bytes());
    bytes.extend([0; 28]);
    let mut name = [0; 256];
    name[..BLOCKS[block].0.len()].copy_from_slice(BLOCKS[block].0.as_bytes());
    bytes.extend(name);
    for page in (0..128).map(|page| first.wrapping_add(page)) {
        bytes.extend((u64::from(page) << 12).to_be_bytes());
    }
    (0..data).for_each(|page| bytes.extend(content(first.wrapping_add(page))));
    bytes
}

fn content(page: u16) -> Vec<u8> {
    (page | 1).to_be_bytes().repeat(2048)
}
