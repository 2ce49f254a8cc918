//! Guests of random memory, sent by random ways, against a sink in memory.

use std::io::Write;
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::assembly::{MOST_OPEN, OPEN_LIMIT};
use super::page_set::CHUNK_BYTES;
use super::*;
use crate::migration::{PAGE_BYTES, StreamError};
use crate::sys::AlignedBuf;
use crate::{BlockSize, Mismatch, Progress};

const PAGE: u64 = PAGE_BYTES as u64;

/// Keeps what it is given, and counts its buffers.
struct Memory {
    layout: Layout,
    blocks: Mutex<Vec<Vec<Option<Vec<u8>>>>>,
    buffers: AtomicUsize,
    most_buffers: AtomicUsize,
    zero_chunks: AtomicUsize,
}

impl Memory {
    fn of(layout: &Layout) -> Self {
        let blocks = layout.blocks().iter();
        let chunks = blocks.map(|block| vec![None; block.length.0.div_ceil(CHUNK_BYTES) as usize]);
        Self {
            layout: layout.clone(),
            blocks: Mutex::new(chunks.collect()),
            buffers: AtomicUsize::new(0),
            most_buffers: AtomicUsize::new(0),
            zero_chunks: AtomicUsize::new(0),
        }
    }

    fn ram(self) -> Vec<Vec<u8>> {
        let blocks = self.blocks.into_inner().unwrap();
        let whole = |chunks: &Vec<Option<Vec<u8>>>| {
            let chunks = chunks.iter().map(|chunk| chunk.as_deref().unwrap());
            chunks.collect::<Vec<_>>().concat()
        };
        blocks.iter().map(whole).collect()
    }
}

impl ChunkSink for Memory {
    type Lane = ();

    fn lane(&self) {}

    fn buffer(&self, (): &mut ()) -> AlignedBuf {
        let now = self.buffers.fetch_add(1, Ordering::Relaxed) + 1;
        self.most_buffers.fetch_max(now, Ordering::Relaxed);
        let mut buffer = AlignedBuf::zeroed(CHUNK_BYTES as usize);
        // What is not touched takes no memory of the test's.
        if now <= 2 * OPEN_LIMIT {
            buffer.fill(0xa5);
        }
        buffer
    }

    fn put(
        &self,
        (): &mut (),
        block: usize,
        chunk: u64,
        content: Option<AlignedBuf>,
    ) -> Result<(), ImageError> {
        let rest = self.layout.blocks()[block].length.0 - chunk * CHUNK_BYTES;
        let length = rest.min(CHUNK_BYTES) as usize;
        let bytes = match content {
            Some(buffer) => {
                self.buffers.fetch_sub(1, Ordering::Relaxed);
                buffer[..length].to_vec()
            }
            None => {
                self.zero_chunks.fetch_add(1, Ordering::Relaxed);
                vec![0; length]
            }
        };
        let before = self.blocks.lock().unwrap()[block][chunk as usize].replace(bytes);
        assert!(before.is_none(), "a chunk is put twice");
        Ok(())
    }

    fn finish(&self, (): ()) -> Result<(), ImageError> {
        Ok(())
    }
}

fn layout(pages: &[u64]) -> Layout {
    let blocks: Vec<_> = (pages.iter().enumerate())
        .map(|(index, pages)| BlockSize {
            name: name(index),
            length: ByteCount(pages * PAGE),
        })
        .collect();
    Layout::plan(&blocks).unwrap()
}

fn name(block: usize) -> String {
    format!("block-{block}")
}

/// What QEMU writes to the main connection.
struct MainStream(Vec<u8>);

impl MainStream {
    fn of(layout: &Layout) -> Self {
        let mut bytes = b"QEVM\0\0\0\x03\x07\0\0\0\x02pc\x01\0\0\0\x01\x03ram\0\0\0\0\0\0\0\x04".to_vec();
        bytes.extend((layout.ram().0 | 0x04).to_be_bytes());
        for block in layout.blocks() {
            bytes.push(block.name.len() as u8);
            bytes.extend(block.name.as_bytes());
            bytes.extend(block.length.0.to_be_bytes());
        }
        bytes.extend(0x10_u64.to_be_bytes());
        bytes.extend(b"\x7e\0\0\0\x01\x02\0\0\0\x01");
        Self(bytes)
    }

    fn page(&mut self, block: usize, page: u64, content: Option<&[u8]>) {
        let flag = if content.is_some() { 0x08 } else { 0x02 };
        self.0.extend(((page * PAGE) | flag).to_be_bytes());
        let name = name(block);
        self.0.push(name.len() as u8);
        self.0.extend(name.as_bytes());
        self.0.extend(content.unwrap_or(&[0]));
    }

    fn end(mut self) -> Vec<u8> {
        self.0.extend(0x10_u64.to_be_bytes());
        self.0
            .extend(b"\x7e\0\0\0\x01\x03\0\0\0\x01\0\0\0\0\0\0\0\x10\x7e\0\0\0\x01");
        self.0.extend(b"\x04devices\0\x06\0\0\0\x02{}");
        self.0
    }
}

fn opening(channel: u8) -> Vec<u8> {
    let mut bytes = vec![0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1];
    bytes.extend([7; 16]);
    bytes.push(channel);
    bytes.extend([0; 39]);
    bytes
}

/// A packet with its payload.
fn packet(number: u64, block: usize, data: &[(u64, &[u8])], zero: &[u64]) -> Vec<u8> {
    let mut bytes = vec![0x11, 0x22, 0x33, 0x44, 0, 0, 0, 1];
    let ends_round = u32::from(data.is_empty() && zero.is_empty());
    for field in [
        ends_round,
        128,
        data.len() as u32,
        (data.len() * PAGE_BYTES) as u32,
    ] {
        bytes.extend(field.to_be_bytes());
    }
    bytes.extend(number.to_be_bytes());
    bytes.extend((zero.len() as u32).to_be_bytes());
    bytes.extend([0; 28]);
    let mut padded = [0; 256];
    padded[..name(block).len()].copy_from_slice(name(block).as_bytes());
    bytes.extend(padded);
    let pages = data.iter().map(|(page, _)| page).chain(zero);
    for page in pages.clone() {
        bytes.extend((page * PAGE).to_be_bytes());
    }
    // What stands behind the last offset is left from other packets.
    bytes.extend(vec![0xee; (128 - pages.count()) * 8]);
    bytes.extend(data.iter().flat_map(|(_, content)| content.iter().copied()));
    bytes
}

/// Sends each connection's pieces, and receives.
fn receive_pieces(
    layout: &Layout,
    connections: Vec<Vec<Vec<u8>>>,
) -> (Result<Recording, ImageError>, Memory, ByteCount) {
    let memory = Memory::of(layout);
    let progress = Progress::default();
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for pieces in connections {
        let (our, their) = UnixStream::pair().unwrap();
        ours.push(our);
        theirs.push((their, pieces));
    }
    let result = thread::scope(|scope| {
        for (mut socket, pieces) in theirs {
            scope.spawn(move || {
                // A receiver that gave up closes its end.
                pieces.iter().all(|piece| socket.write_all(piece).is_ok())
            });
        }
        let run = Run {
            threads: 1,
            progress: &progress,
            cancelled: &AtomicBool::new(false),
        };
        Incoming::of(ours)
            .unwrap()
            .receive(layout, ByteCount::kib(4), &memory, &run)
    });
    (result, memory, progress.done())
}

fn receive(layout: &Layout, connections: Vec<Vec<u8>>) -> Result<Vec<Vec<u8>>, ImageError> {
    let pieces = connections.into_iter().map(|bytes| vec![bytes]).collect();
    let (result, memory, _) = receive_pieces(layout, pieces);
    result.map(|_| memory.ram())
}

/// How a page is sent.
#[derive(Debug, Clone, Copy)]
enum Way {
    Main,
    Channel(usize),
}

#[derive(Debug, Clone)]
struct Guest {
    pages: Vec<u64>,
    channels: usize,
    /// Of each page, its block and number, whether it is zero, its way, and its place in the order.
    sent: Vec<(usize, u64, bool, Way)>,
    pages_in_packet: usize,
    zeros_in_packets: bool,
}

impl Guest {
    fn content(&self, block: usize, page: u64) -> Vec<u8> {
        let seed = (block as u64 + 1) << 32 | (page + 1);
        seed.to_le_bytes().repeat(PAGE_BYTES / 8)
    }

    fn ram(&self) -> Vec<Vec<u8>> {
        let mut ram: Vec<_> = (self.pages.iter())
            .map(|pages| vec![0; (pages * PAGE) as usize])
            .collect();
        for (block, page, zero, _) in &self.sent {
            if !zero {
                ram[*block][(page * PAGE) as usize..][..PAGE_BYTES]
                    .copy_from_slice(&self.content(*block, *page));
            }
        }
        ram
    }

    /// The bytes of each connection, the main one first.
    fn streams(&self) -> Vec<Vec<u8>> {
        let mut main = MainStream::of(&layout(&self.pages));
        let mut channels: Vec<_> = (0..self.channels).map(|channel| opening(channel as u8)).collect();
        let mut number = 0;
        for (channel, bytes) in channels.iter_mut().enumerate() {
            bytes.extend(packet(channel as u64, 0, &[], &[]));
        }
        for (block, _) in self.pages.iter().enumerate() {
            for (channel, bytes) in channels.iter_mut().enumerate() {
                let is_mine = |way: &Way| matches!(way, Way::Channel(of) if *of == channel);
                let mine: Vec<_> = (self.sent.iter())
                    .filter(|(of, _, zero, way)| {
                        *of == block && is_mine(way) && (!zero || self.zeros_in_packets)
                    })
                    .collect();
                for pages in mine.chunks(self.pages_in_packet) {
                    let data: Vec<_> = (pages.iter())
                        .filter(|(_, _, zero, _)| !zero)
                        .map(|(_, page, ..)| (*page, self.content(block, *page)))
                        .collect();
                    let data: Vec<_> = data.iter().map(|(page, content)| (*page, &content[..])).collect();
                    let zero = pages.iter().filter(|(_, _, zero, _)| *zero);
                    let zero: Vec<_> = zero.map(|(_, page, ..)| *page).collect();
                    bytes.extend(packet(number, block, &data, &zero));
                    number += 1;
                }
            }
        }
        for (block, page, zero, way) in &self.sent {
            match way {
                Way::Main if !zero => main.page(*block, *page, Some(&self.content(*block, *page))),
                Way::Channel(_) if !zero || self.zeros_in_packets => {}
                _ => main.page(*block, *page, None),
            }
        }
        let mut streams = vec![main.end()];
        streams.extend(channels);
        streams
    }
}

fn any_guest() -> impl Strategy<Value = Guest> {
    let pages = prop::collection::vec(1_u64..600, 1..4);
    (pages, 0_usize..4, 1_usize..=128, any::<bool>()).prop_flat_map(
        |(pages, channels, pages_in_packet, zeros_in_packets)| {
            let all: Vec<(usize, u64)> = (pages.iter().enumerate())
                .flat_map(|(block, pages)| (0..*pages).map(move |page| (block, page)))
                .collect();
            let kinds = prop::collection::vec((any::<u8>(), any::<u8>()), all.len());
            (Just(all).prop_shuffle(), kinds).prop_map(move |(all, kinds)| {
                let sent = all.into_iter().zip(kinds).map(|((block, page), (zero, way))| {
                    let way = match usize::from(way) % (8 * channels + 1) {
                        0 => Way::Main,
                        way => Way::Channel(way % channels),
                    };
                    // The last chunk of a long block is all zero in some guests.
                    (block, page, zero % 3 == 0 || page >= 512, way)
                });
                Guest {
                    pages: pages.clone(),
                    channels,
                    sent: sent.collect(),
                    pages_in_packet,
                    zeros_in_packets,
                }
            })
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn pages_in_any_order_over_any_number_of_connections_become_the_guests_memory(
        guest in any_guest(),
        pieces in prop::collection::vec(1_usize..100_000, 1..6),
        rotate in any::<prop::sample::Index>(),
    ) {
        let layout = layout(&guest.pages);
        let mut connections: Vec<Vec<Vec<u8>>> = guest.streams().into_iter().map(|mut bytes| {
            let mut cut = Vec::new();
            for length in pieces.iter().cycle() {
                if bytes.is_empty() {
                    break;
                }
                let rest = bytes.split_off((*length).min(bytes.len()));
                cut.push(std::mem::replace(&mut bytes, rest));
            }
            cut
        }).collect();
        let count = connections.len();
        connections.rotate_left(rotate.index(count));
        let (result, memory, done) = receive_pieces(&layout, connections);
        let recording = result.unwrap();
        prop_assert_eq!(recording.device_sections(), b"\x04devices");
        prop_assert_eq!(recording.blocks().len(), guest.pages.len());
        prop_assert_eq!(done, layout.ram());
        prop_assert!(memory.ram() == guest.ram());
    }

    #[test]
    fn a_connection_that_is_cut_is_an_error(
        guest in any_guest(), which in any::<prop::sample::Index>(), at in any::<prop::sample::Index>(),
    ) {
        let mut streams = guest.streams();
        let which = which.index(streams.len());
        let at = at.index(streams[which].len());
        // A channel may end behind any packet; if that was all it had to say nothing is missing.
        let had_pages = streams[which][at..].len() > 1344 || which == 0;
        streams[which].truncate(at);
        let result = receive(&layout(&guest.pages), streams);
        prop_assert!(result.is_err() || !had_pages);
    }

    #[test]
    fn changed_bytes_never_panic_and_never_hang(
        guest in any_guest(),
        changes in prop::collection::vec(
            (any::<prop::sample::Index>(), any::<prop::sample::Index>(), any::<u8>(), any::<bool>()), 1..4,
        ),
    ) {
        let mut streams = guest.streams();
        for (which, at, byte, early) in changes {
            let which = which.index(streams.len());
            let bytes = &mut streams[which];
            let among = if early { bytes.len().min(1500) } else { bytes.len() };
            bytes[at.index(among)] = byte;
        }
        let _ = receive(&layout(&guest.pages), streams);
    }

    #[test]
    fn a_guest_without_one_of_its_pages_is_refused(
        mut guest in any_guest(), which in any::<prop::sample::Index>(),
    ) {
        let (block, ..) = guest.sent.remove(which.index(guest.sent.len()));
        let pages = guest.pages[block];
        let result = receive(&layout(&guest.pages), guest.streams());
        let missing = Mismatch::PagesMissing { found: pages - 1, needed: pages };
        prop_assert!(
            matches!(&result, Err(ImageError::Mismatch { block: of, mismatch })
                if *of == name(block) && *mismatch == missing),
            "{:?}", result.map(drop)
        );
    }

    #[test]
    fn a_guest_that_ran_is_refused(
        mut guest in any_guest(), which in any::<prop::sample::Index>(), zero: bool, way: prop::sample::Index,
    ) {
        let (block, page, ..) = guest.sent[which.index(guest.sent.len())];
        let way = match way.index(guest.channels + 1) {
            0 => Way::Main,
            way => Way::Channel(way - 1),
        };
        guest.sent.push((block, page, zero, way));
        let result = receive(&layout(&guest.pages), guest.streams());
        prop_assert!(
            matches!(&result, Err(ImageError::Incoming(IncomingError::Again { block: of, offset }))
                if *of == name(block) && *offset == page * PAGE),
            "{:?}", result.map(drop)
        );
    }
}

/// A guest of which every chunk has one page of data and one zero page that QEMU tells only after
/// all data: its other zero pages come at once.
fn late_zeros(chunks: usize, late: impl Fn(&mut MainStream)) -> Result<Memory, ImageError> {
    let layout = layout(&[chunks as u64 * 256]);
    let content = [9; PAGE_BYTES];
    let mut channels = [opening(0), opening(1)];
    for chunk in 0..chunks as u64 {
        let first = chunk * 256;
        for (half, pages) in [first..first + 128, first + 129..first + 256]
            .into_iter()
            .enumerate()
        {
            let number = 2 * chunk + half as u64;
            let data = [(pages.start, &content[..])];
            let zero: Vec<_> = (pages.start + 1..pages.end).collect();
            channels[half].extend(packet(number, 0, &data, &zero));
        }
    }
    let beginning = MainStream::of(&layout);
    let begun = beginning.0.len();
    let mut main = beginning;
    late(&mut main);
    let main = main.end();
    let memory = Memory::of(&layout);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        let (our, their) = UnixStream::pair().unwrap();
        ours.push(our);
        theirs.push(their);
    }
    thread::scope(|scope| {
        scope.spawn(move || {
            theirs[0].write_all(&main[..begun]).unwrap();
            thread::scope(|scope| {
                let [_, sockets @ ..] = &mut theirs[..] else {
                    unreachable!()
                };
                for (socket, bytes) in sockets.iter_mut().zip(&channels) {
                    scope.spawn(move || {
                        let sent = socket.write_all(bytes);
                        sent.and_then(|()| socket.shutdown(Shutdown::Write)).unwrap();
                    });
                }
            });
            // Only now, when the channels took all they had.
            theirs[0].write_all(&main[begun..]).unwrap();
        });
        let (progress, cancelled) = (Progress::default(), AtomicBool::new(false));
        let run = Run {
            threads: 1,
            progress: &progress,
            cancelled: &cancelled,
        };
        Incoming::of(ours)
            .unwrap()
            .receive(&layout, ByteCount::kib(4), &memory, &run)
    })?;
    Ok(memory)
}

#[test]
fn zero_pages_that_are_told_after_all_else_take_neither_the_memory_nor_the_save() {
    let chunks = 4 * OPEN_LIMIT;
    let memory = late_zeros(chunks, |main| {
        (0..chunks as u64).for_each(|chunk| main.page(0, chunk * 256 + 128, None));
    })
    .unwrap();
    let most = memory.most_buffers.load(Ordering::Relaxed);
    assert!((OPEN_LIMIT..OPEN_LIMIT + 8).contains(&most), "{most} buffers");
    let ram = &memory.ram()[0];
    for (page, bytes) in ram.chunks(PAGE_BYTES).enumerate() {
        let byte = u8::from(page % 256 == 0 || page % 256 == 129) * 9;
        assert!(bytes == [byte; PAGE_BYTES], "page {page}");
    }
}

#[test]
fn a_zero_page_that_was_presumed_and_never_told_is_missing() {
    let chunks = 2 * OPEN_LIMIT;
    let error = late_zeros(chunks, |main| {
        (1..chunks as u64).for_each(|chunk| main.page(0, chunk * 256 + 128, None));
    });
    let pages = chunks as u64 * 256;
    assert!(
        matches!(error.map(drop), Err(ImageError::Mismatch { mismatch: Mismatch::PagesMissing { found, needed }, .. })
            if found == pages - 1 && needed == pages)
    );
}

#[test]
fn a_presumed_page_that_is_data_after_all_fails_the_save() {
    // Far more than the sockets hold: the page is presumed by the time the channels are written.
    let error = late_zeros(8 * OPEN_LIMIT, |main| main.page(0, 128, Some(&[1; PAGE_BYTES])));
    assert!(
        matches!(error.map(drop), Err(ImageError::Incoming(IncomingError::Late { offset, .. })) if offset == 128 * PAGE)
    );
}

/// Packets of which each page is in a chunk of its own, over one channel, and nothing else.
fn scattered(chunks: u64, ends_round: bool) -> (Result<(), ImageError>, usize) {
    let layout = layout(&[chunks * 256]);
    let content = [9; PAGE_BYTES];
    let mut channel = opening(0);
    for number in 0..chunks / 128 {
        let data: Vec<_> = (0..128)
            .map(|page| ((number * 128 + page) * 256, &content[..]))
            .collect();
        let mut packet = packet(number + 1, 0, &data, &[]);
        packet[11] = ends_round.into();
        channel.extend(packet);
    }
    let connections = vec![vec![MainStream::of(&layout).end()], vec![channel]];
    let (result, memory, _) = receive_pieces(&layout, connections);
    (result.map(drop), memory.most_buffers.into_inner())
}

#[test]
fn packets_that_touch_a_chunk_with_each_page_do_not_take_unbounded_memory() {
    let (result, most) = scattered(MOST_OPEN as u64 + 256, false);
    assert!(matches!(
        result,
        Err(ImageError::Mismatch {
            mismatch: Mismatch::PagesMissing { .. },
            ..
        })
    ));
    assert!(most <= MOST_OPEN, "{most} buffers");
    // Nothing tells how far the channel is.
    let (result, most) = scattered(MOST_OPEN as u64 + 256, true);
    assert!(matches!(
        result,
        Err(ImageError::Incoming(IncomingError::Scattered {
            limit: MOST_OPEN
        }))
    ));
    assert!(most <= MOST_OPEN, "{most} buffers");
}

#[test]
fn a_chunk_of_zero_pages_takes_no_buffer() {
    let layout = layout(&[600]);
    let mut main = MainStream::of(&layout);
    (0..600).for_each(|page| main.page(0, page, None));
    let (result, memory, _) = receive_pieces(&layout, vec![vec![main.end()]]);
    result.unwrap();
    assert_eq!(memory.most_buffers.into_inner(), 0);
    assert_eq!(memory.zero_chunks.into_inner(), 3);
}

#[test]
fn pages_in_no_order_over_the_main_stream_do_not_take_more_than_the_limit() {
    let chunks = OPEN_LIMIT as u64 + 1;
    let layout = layout(&[chunks * 256]);
    let mut main = MainStream::of(&layout);
    (0..chunks).for_each(|chunk| main.page(0, chunk * 256, Some(&[1; PAGE_BYTES])));
    let error = receive(&layout, vec![main.end()]).map(drop);
    assert!(matches!(
        error,
        Err(ImageError::Incoming(IncomingError::Scattered {
            limit: OPEN_LIMIT
        }))
    ));
}

#[test]
fn connections_that_are_no_migration_are_refused() {
    let layout = layout(&[1]);
    let main = || {
        let mut main = MainStream::of(&layout);
        main.page(0, 0, None);
        main.end()
    };
    let refused = |connections| match receive(&layout, connections) {
        Err(ImageError::Incoming(error)) => error,
        other => panic!("{:?}", other.map(drop)),
    };
    assert!(matches!(
        Incoming::of(Vec::new()),
        Err(IncomingError::Connections { found: 0, .. })
    ));
    assert!(matches!(
        refused(vec![main(), b"GET ".to_vec()]),
        IncomingError::NotAMigration { found } if &found == b"GET "
    ));
    assert!(matches!(
        refused(vec![b"QE".to_vec()]),
        IncomingError::Nothing { bytes: 2 }
    ));
    assert!(matches!(
        refused(vec![main(), main()]),
        IncomingError::MainStreams { found: 2 }
    ));
    assert!(matches!(
        refused(vec![opening(0), opening(1)]),
        IncomingError::MainStreams { found: 0 }
    ));
    assert!(matches!(
        refused(vec![main(), opening(3), opening(3)]),
        IncomingError::Multifd(MultifdError::Twice { channel: 3 })
    ));
    let mut compressed = opening(0);
    compressed.extend(packet(0, 0, &[], &[]));
    compressed[64 + 11] = 4;
    assert!(matches!(
        refused(vec![main(), compressed]),
        IncomingError::Multifd(MultifdError::Compression { method: "zstd" })
    ));
    // A packet of device state is shorter, and nothing may follow it.
    let mut state = opening(0);
    state.extend(b"\x11\x22\x33\x44\0\0\0\x01\0\0\0\x40");
    assert!(matches!(
        refused(vec![main(), state]),
        IncomingError::Multifd(MultifdError::DeviceState)
    ));
    let mut long = main();
    long.splice(long.len() - 8..long.len() - 8, vec![1; 5000]);
    assert!(matches!(
        refused(vec![long]),
        IncomingError::Stream(StreamError::TooLong {
            part: "device state",
            ..
        })
    ));
}

#[test]
fn blocks_that_are_not_those_of_the_layout_are_refused() {
    let planned = layout(&[2, 3]);
    let mismatch = |pages: &[u64]| {
        let mut main = MainStream::of(&layout(pages));
        main.page(0, 0, None);
        match receive(&planned, vec![main.end()]) {
            Err(ImageError::Mismatch { block, mismatch }) => (block, mismatch),
            other => panic!("{:?}", other.map(drop)),
        }
    };
    assert_eq!(mismatch(&[2]), (name(1), Mismatch::NotRecorded));
    assert_eq!(mismatch(&[2, 3, 4]), (name(2), Mismatch::Unknown));
    let lengths = Mismatch::Length {
        planned: ByteCount::kib(12),
        found: ByteCount::kib(4),
    };
    assert_eq!(mismatch(&[2, 1]), (name(1), lengths));
}

/// All threads end soon when `end` is done to three silent connections.
fn ends_soon(end: impl FnOnce(&AtomicBool, &mut Vec<UnixStream>) + Send) -> ImageError {
    let layout = layout(&[600]);
    let memory = Memory::of(&layout);
    let (progress, cancelled) = (Progress::default(), AtomicBool::new(false));
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for bytes in [MainStream::of(&layout).0, opening(0), opening(1)] {
        let (our, mut their) = UnixStream::pair().unwrap();
        their.write_all(&bytes).unwrap();
        ours.push(our);
        theirs.push(their);
    }
    let run = Run {
        threads: 1,
        progress: &progress,
        cancelled: &cancelled,
    };
    thread::scope(|scope| {
        let work = scope.spawn(|| {
            Incoming::of(ours)
                .unwrap()
                .receive(&layout, ByteCount::kib(4), &memory, &run)
        });
        end(&cancelled, &mut theirs);
        let since = Instant::now();
        let result = work.join().unwrap();
        // More than what is promised: the machine may be busy.
        assert!(since.elapsed() < Duration::from_secs(1), "{:?}", since.elapsed());
        result.unwrap_err()
    })
}

#[test]
fn a_cancel_ends_all_threads_though_nobody_says_anything() {
    let error = ends_soon(|cancelled, _| cancelled.store(true, Ordering::Relaxed));
    assert!(matches!(error, ImageError::Cancelled));
}

#[test]
fn a_failure_of_one_connection_ends_all_and_is_told() {
    let error = ends_soon(|_, connections| connections[2].write_all(&[0; 12]).unwrap());
    assert!(matches!(
        error,
        ImageError::Incoming(IncomingError::Multifd(MultifdError::Magic { found: 0 }))
    ));
    let error = ends_soon(|_, connections| connections[0].shutdown(Shutdown::Both).unwrap());
    assert!(matches!(
        error,
        ImageError::Incoming(IncomingError::Stream(StreamError::Short { part: "RAM", .. }))
    ));
}

/// Two full packets and what is left of three MiB, on two channels; the second one, as told, begins
/// with the last page of the first.
fn with_an_echo(order: [usize; 2], change: impl Fn(&mut [Vec<u8>; 3])) -> Result<Vec<Vec<u8>>, ImageError> {
    let layout = layout(&[768]);
    let content: Vec<_> = (0..768_u64)
        .map(|page| (page + 1).to_le_bytes().repeat(PAGE_BYTES / 8))
        .collect();
    let data = |pages: std::ops::Range<u64>| -> Vec<(u64, &[u8])> {
        pages.map(|page| (page, &content[page as usize][..])).collect()
    };
    let mut packets = [
        packet(4, 0, &data(0..128), &[]),
        packet(5, 0, &data(127..255), &[]),
        packet(6, 0, &data(255..300), &[]),
    ];
    change(&mut packets);
    let mut main = MainStream::of(&layout);
    for page in 300..768 {
        main.page(0, page, Some(&content[page as usize]));
    }
    // Within one channel they come in this order.
    let mut channel = opening(0);
    order.iter().for_each(|index| channel.extend(&packets[*index]));
    let mut other = opening(1);
    (0..3)
        .filter(|index| !order.contains(index))
        .for_each(|index| other.extend(&packets[index]));
    let ram = receive(&layout, vec![main.end(), channel, other])?;
    assert!(ram[0] == content.concat());
    Ok(ram)
}

#[test]
fn an_echo_is_forgotten_whichever_comes_first() {
    with_an_echo([0, 1], |_| ()).unwrap();
    with_an_echo([1, 0], |_| ()).unwrap();
    for _ in 0..10 {
        with_an_echo([1, 2], |_| ()).unwrap();
    }
}

#[test]
fn an_echo_that_the_end_of_a_round_overtook_is_one_too() {
    let overtaken = |packets: &mut [Vec<u8>; 3]| {
        packets[1][11] = 1;
        packets[1][31] = 99;
    };
    with_an_echo([0, 1], overtaken).unwrap();
    with_an_echo([1, 0], overtaken).unwrap();
    for _ in 0..10 {
        with_an_echo([0, 2], overtaken).unwrap();
    }
}

#[test]
fn what_only_looks_like_an_echo_is_a_guest_that_ran() {
    let again = |change: &dyn Fn(&mut [Vec<u8>; 3])| {
        let error = with_an_echo([0, 1], change).unwrap_err();
        assert!(
            matches!(error, ImageError::Incoming(IncomingError::Again { offset, .. }) if offset == 127 * PAGE),
            "{error:?}"
        );
    };
    // Not the next packet.
    again(&|packets| packets[1][31] = 7);
    // Not the first page.
    again(&|packets| {
        let offsets = 320..336;
        packets[1][offsets].rotate_left(8);
    });
}
