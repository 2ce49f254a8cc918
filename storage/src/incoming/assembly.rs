//! Pages in any order become whole chunks.
//!
//! ```text
//!            first data page                    last page, data or zero
//!  nothing ──────────────────► open (a buffer) ─────────────────────────► put ──► sink
//!     │                            └─ too many open, passed by all channels ──► put ──► sink
//!     └── every page came as zero ────────────────────────────────────────────► put ──► sink
//! ```
//!
//! What is guaranteed:
//!
//! * A chunk is put once, by the thread that completes it. Of every page of every block it is known
//!   in one bit whether it came; at the end all must have, and none twice (but for echoes).
//! * A chunk of zero pages only takes no buffer. Seldom more than a few chunks are open; more than [`OPEN_LIMIT`]
//!   only as far as the channel furthest behind needs it, and more than [`MOST_OPEN`] (1 GiB) are refused. It takes
//!   packets of which each page is in a chunk of its own to come near: some of them, up to 128 chunks each, are
//!   always too new to have been passed.
//! * No thread waits for what can only come after it: see below.
//!
//! # When zero pages come late
//!
//! QEMU before 9.0 tells zero pages in the main stream, whose buffer of 32 KiB holds 3640 of them,
//! while the channels run ahead: on a guest with a zero page in every MiB every chunk stays open
//! until the buffer is written. Waiting for it would be waiting for ever, because QEMU fills it only
//! as fast as its channels go on. So when too many chunks are open, one that all channels have
//! passed is put with zeros for what is missing: QEMU goes through a stopped guest's memory once, in
//! order, and a page that was not sent by then was found to be zero. That it was is still told, later,
//! and must be for the image to be made: its bit is not set before. A data page that comes for it
//! fails the save, the image never is.
//!
//! "Passed" is told by packet numbers, which go up in the order in which QEMU goes through memory: a
//! chunk was opened by a packet after the last one for this chunk, and every channel is beyond that
//! packet. One that ends a round is no witness, its number may be that of the end; and there is a
//! margin for neighbours that changed places (see `migration/multifd.rs`). If no chunk was passed, the
//! channel that is furthest behind takes one more buffer, and all others wait for it: it has its
//! packet, so it goes on whatever they do.
//!
//! # Echoes
//!
//! QEMU 7.2 sends the last page of a full packet again as the first of the next one when its channel
//! was quick: it looks at the packet's block after it gave the packet away. Either can come first. Such
//! a page is not a sign of a guest that runs; it is read and forgotten.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::IoSliceMut;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use super::ending::{Ending, LOOK_EVERY};
use super::error::IncomingError;
use super::page_set::{CHUNK_BYTES, CHUNK_PAGES, PageSet, pages_in, place};
use super::sink::ChunkSink;
use crate::image::{ImageError, Layout, Mismatch};
use crate::migration::{MultifdPacket, PAGE_BYTES, StreamBlock, StreamError};
use crate::sys::{AlignedBuf, PagedBuf};
use crate::{ByteCount, Progress};

/// How many chunks may be open before something is done about it.
///
/// A stopped guest of random memory takes 3 buffers with two channels and 8 with four on QEMU 10.0
/// and 11.1, 6 on 7.2 with two: so many chunks are open or on their way to the sink. On 7.2 with a
/// zero page in every MiB it takes all of these, and some of its chunks are presumed; that costs
/// nothing but the memory.
pub(super) const OPEN_LIMIT: usize = 64;

/// How many chunks may be open at all.
pub(super) const MOST_OPEN: usize = 1024;

/// All of a guest's memory on its way from pages to chunks, shared by all threads.
pub(super) struct Assembly<'a, S: ChunkSink> {
    layout: &'a Layout,
    sink: &'a S,
    progress: &'a Progress,
    ending: &'a Ending<'a>,
    blocks: Vec<Block>,
    /// From the stream's block list: what is known by then about which blocks are coming.
    listed: OnceLock<HashMap<String, usize>>,
    state: Mutex<State>,
    /// A chunk was put, a channel went on, the list came.
    moved: Condvar,
}

struct Block {
    name: String,
    pages: u64,
}

struct State {
    /// By block and chunk.
    chunks: Vec<Vec<Chunk>>,
    /// Those with a buffer, in the order in which they were opened.
    open: BTreeMap<u64, (usize, usize)>,
    opened: u64,
    /// The last packet of each connection that is a channel and has not ended, or may be one.
    channels: Vec<Option<u64>>,
    /// Where packets begin and end that can be an echo or have one.
    ends: BTreeSet<PacketEnds>,
}

/// The first page of a packet, and its last if it is full, by numbers of pages in the block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct PacketEnds {
    number: u64,
    /// The lowest number that can be its own, if it has that of a round's end.
    least: u64,
    block: usize,
    first: u64,
    last: Option<u64>,
}

#[derive(Default)]
struct Chunk {
    /// Pages that came, or are being read by a channel.
    came: PageSet,
    /// How many of them are there.
    there: usize,
    put: bool,
    open: Option<Box<Open>>,
}

struct Open {
    buffer: Arc<PagedBuf>,
    /// Its key in the order of opening.
    order: u64,
    /// The packet that opened it, unless its number is not reliable.
    first_packet: Option<u64>,
    last_packet: u64,
}

/// Some pages of one chunk.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Part {
    pub(super) chunk: usize,
    pub(super) data: PageSet,
    pub(super) zero: PageSet,
}

impl<'a, S: ChunkSink> Assembly<'a, S> {
    /// Nothing yet of the guest with this layout, which comes over `connections`.
    pub(super) fn of(
        layout: &'a Layout,
        sink: &'a S,
        progress: &'a Progress,
        ending: &'a Ending<'a>,
        connections: usize,
    ) -> Self {
        let blocks: Vec<_> = (layout.blocks().iter())
            .map(|block| Block {
                name: block.name.clone(),
                pages: block.length.0 / PAGE_BYTES as u64,
            })
            .collect();
        let chunks = blocks.iter().map(|block| {
            let count = block.pages.div_ceil(CHUNK_PAGES as u64);
            (0..count).map(|_| Chunk::default()).collect()
        });
        Self {
            layout,
            sink,
            progress,
            ending,
            listed: OnceLock::new(),
            state: Mutex::new(State {
                chunks: chunks.collect(),
                open: BTreeMap::new(),
                opened: 0,
                channels: vec![Some(0); connections],
                ends: BTreeSet::new(),
            }),
            moved: Condvar::new(),
            blocks,
        }
    }

    /// Takes the stream's block list and returns where each of its blocks is in the layout.
    pub(super) fn list(&self, blocks: &[StreamBlock]) -> Result<Vec<usize>, ImageError> {
        let places = self.layout.places_of(blocks)?;
        let by_name = blocks.iter().map(|block| block.name.clone());
        // The parser tells it once.
        let _ = self.listed.set(by_name.zip(places.iter().copied()).collect());
        // Whoever looked before and does not wait yet is kept from it until it does.
        drop(self.lock());
        self.moved.notify_all();
        Ok(places)
    }

    /// This connection is none of a channel, or none any more.
    pub(super) fn no_channel(&self, connection: usize) {
        self.lock().channels[connection] = None;
        self.moved.notify_all();
    }

    /// Whether all pages came.
    pub(super) fn check_whole(&self) -> Result<(), ImageError> {
        let state = self.lock();
        for (block, chunks) in self.blocks.iter().zip(&state.chunks) {
            let found = chunks.iter().map(|chunk| chunk.there as u64).sum();
            if found != block.pages {
                return Err(ImageError::Mismatch {
                    block: block.name.clone(),
                    mismatch: Mismatch::PagesMissing {
                        found,
                        needed: block.pages,
                    },
                });
            }
        }
        Ok(())
    }

    /// The state is never left half changed: nothing between two changes of it can panic.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until something changed, or a little.
    fn wait<'s>(&self, state: MutexGuard<'s, State>) -> Result<MutexGuard<'s, State>, ImageError> {
        self.ending.go_on()?;
        let (state, _) = self
            .moved
            .wait_timeout(state, LOOK_EVERY)
            .unwrap_or_else(PoisonError::into_inner);
        self.ending.go_on()?;
        Ok(state)
    }

    fn pages_of(&self, block: usize, chunk: usize) -> usize {
        pages_in(self.blocks[block].pages, chunk)
    }

    fn again(&self, block: usize, chunk: usize, page: usize) -> ImageError {
        let (block, offset) = self.at(block, chunk, page);
        IncomingError::Again { block, offset }.into()
    }

    fn at(&self, block: usize, chunk: usize, page: usize) -> (String, u64) {
        let offset = chunk as u64 * CHUNK_BYTES + (page * PAGE_BYTES) as u64;
        (self.blocks[block].name.clone(), offset)
    }

    /// Whether these data pages may come now.
    fn check(&self, block: usize, part: &Part, chunk: &Chunk) -> Result<(), ImageError> {
        if let Some(page) = chunk.came.and(part.data).first() {
            return Err(self.again(block, part.chunk, page));
        }
        if let (true, Some(page)) = (chunk.put, part.data.first()) {
            let (block, offset) = self.at(block, part.chunk, page);
            return Err(IncomingError::Late { block, offset }.into());
        }
        Ok(())
    }
}

/// A thread's way into the assembly.
pub(super) struct Feeder<'a, S: ChunkSink> {
    assembly: &'a Assembly<'a, S>,
    lane: S::Lane,
    /// The connection, if it is a channel's.
    channel: Option<usize>,
    /// Buffers that were asked for and then not needed, because another thread was faster.
    spare: Vec<AlignedBuf>,
}

/// A chunk that is complete, and its buffer if it has one.
type Complete = (usize, Option<Arc<PagedBuf>>);

impl<'a, S: ChunkSink> Feeder<'a, S> {
    pub(super) fn of(assembly: &'a Assembly<'a, S>, channel: Option<usize>) -> Self {
        Self {
            assembly,
            lane: assembly.sink.lane(),
            channel,
            spare: Vec::new(),
        }
    }

    /// Takes a packet; `read` fills the slices, in their order, with its payload.
    pub(super) fn packet(
        &mut self,
        packet: &MultifdPacket<'_>,
        read: impl FnOnce(&mut [IoSliceMut<'_>]) -> Result<(), ImageError>,
    ) -> Result<(), ImageError> {
        let Some(name) = packet.block else {
            return self.commit(0, &[], packet.number);
        };
        let block = self.block(name)?;
        let mut parts = self.parts(block, packet)?;
        let buffers = self.open(block, &mut parts, packet)?;
        let is_taken = |offset| {
            let (chunk, page) = place(offset);
            let mut parts = parts.iter();
            parts.any(|part| part.chunk == chunk && part.data.contains(page))
        };
        // A packet has two ends, so there are no more echoes in it.
        let mut echoes = [[0; PAGE_BYTES]; 2];
        let mut unused = echoes.iter_mut();
        let mut slices = Vec::new();
        for run in runs(packet.data_pages(), is_taken) {
            let (chunk, page) = place(run.start);
            let pages = if run.is_taken {
                let buffer = buffers.iter().find(|(of, _)| *of == chunk);
                buffer.and_then(|(_, buffer)| buffer.claim(page, run.pages))
            } else {
                unused.next().map(|echo| &mut echo[..])
            };
            slices.push(IoSliceMut::new(
                pages.ok_or_else(|| self.assembly.again(block, chunk, page))?,
            ));
        }
        if !slices.is_empty() {
            read(&mut slices)?;
        }
        // Before the pages are told to be there, so that whoever completes the chunk has it alone.
        drop(slices);
        drop(buffers);
        self.commit(block, &parts, packet.number)
    }

    /// Which pages of a chunk came so far.
    pub(super) fn came(&self, block: usize, chunk: usize) -> PageSet {
        self.assembly.lock().chunks[block][chunk].came
    }

    /// See [`Assembly::list`].
    pub(super) fn list(&self, blocks: &[StreamBlock]) -> Result<Vec<usize>, ImageError> {
        self.assembly.list(blocks)
    }

    /// How many pages a chunk has.
    pub(super) fn pages_of(&self, block: usize, chunk: usize) -> usize {
        self.assembly.pages_of(block, chunk)
    }

    /// A page that came twice.
    pub(super) fn again(&self, block: usize, chunk: usize, page: usize) -> ImageError {
        self.assembly.again(block, chunk, page)
    }

    /// The buffer of a chunk for the main stream, opened if it is not yet. Pages are to be claimed
    /// there, the buffer then let go of, and the pages [committed](Self::commit).
    pub(super) fn open_one(&mut self, block: usize, chunk: usize) -> Result<Arc<PagedBuf>, ImageError> {
        let assembly = self.assembly;
        let mut state = assembly.lock();
        loop {
            let full = state.chunks[block][chunk].open.is_none() && state.open.len() >= OPEN_LIMIT;
            if full {
                // It tells pages in order, and needs one chunk at a time.
                return Err(IncomingError::Scattered { limit: OPEN_LIMIT }.into());
            }
            if let Some(buffer) = state.open(block, chunk, Witness::default(), &mut self.spare) {
                return Ok(buffer);
            }
            drop(state);
            self.spare.push(assembly.sink.buffer(&mut self.lane));
            state = assembly.lock();
        }
    }

    /// Buffers of all parts that have data, opened where they are not yet, for a packet's pages,
    /// which are taken down as coming; echoes are taken out of the parts. The pages are to be claimed
    /// there, the buffers then let go of, and the pages [committed](Self::commit).
    fn open(
        &mut self,
        block: usize,
        parts: &mut [Part],
        packet: &MultifdPacket<'_>,
    ) -> Result<Vec<(usize, Arc<PagedBuf>)>, ImageError> {
        let assembly = self.assembly;
        let mut state = assembly.lock();
        let last = self.channel.and_then(|channel| state.channels[channel]);
        let ends = PacketEnds::of(packet, block, last.unwrap_or(0));
        loop {
            if let Some(ends) = ends {
                state.take_out_echoes(parts, ends);
            }
            let mut missing = 0;
            for part in parts.iter().filter(|part| !part.data.is_empty()) {
                let chunk = &state.chunks[block][part.chunk];
                assembly.check(block, part, chunk)?;
                missing += usize::from(chunk.open.is_none());
            }
            if missing > 0 && state.open.len() + missing > OPEN_LIMIT {
                if let Some((block, complete)) = state.presume() {
                    drop(state);
                    self.put(block, complete)?;
                    state = assembly.lock();
                    continue;
                }
                if !self.may_exceed(&state) {
                    state = assembly.wait(state)?;
                    continue;
                }
                if state.open.len() + missing > MOST_OPEN {
                    return Err(IncomingError::Scattered { limit: MOST_OPEN }.into());
                }
            }
            if self.spare.len() < missing {
                drop(state);
                while self.spare.len() < missing {
                    self.spare.push(assembly.sink.buffer(&mut self.lane));
                }
                state = assembly.lock();
                continue;
            }
            state.ends.extend(ends);
            let with_data = parts.iter().filter(|part| !part.data.is_empty());
            let opened = with_data.filter_map(|part| {
                let chunk = &mut state.chunks[block][part.chunk];
                chunk.came = chunk.came.or(part.data);
                let buffer = state.open(block, part.chunk, packet.into(), &mut self.spare)?;
                Some((part.chunk, buffer))
            });
            return Ok(opened.collect());
        }
    }

    /// Tells that pages are there, in their buffers if they have data, and puts the chunks that are
    /// complete by that.
    pub(super) fn commit(&mut self, block: usize, parts: &[Part], number: u64) -> Result<(), ImageError> {
        let assembly = self.assembly;
        let mut complete = Vec::new();
        let mut state = assembly.lock();
        for part in parts {
            let chunk = &mut state.chunks[block][part.chunk];
            if self.channel.is_none() {
                assembly.check(block, part, chunk)?;
                chunk.came = chunk.came.or(part.data);
            }
            // Another thread may be about to read a page that is told to be zero here.
            let claimed = chunk.open.as_ref().map(|open| PageSet(open.buffer.claimed()));
            let came = chunk.came.or(claimed.unwrap_or_default());
            if let Some(page) = came.and(part.zero).first() {
                return Err(assembly.again(block, part.chunk, page));
            }
            chunk.came = chunk.came.or(part.zero);
            chunk.there += part.data.len() + part.zero.len();
            if !chunk.put && chunk.there == assembly.pages_of(block, part.chunk) {
                complete.push(state.close(block, part.chunk));
            }
        }
        if let Some(last) = self.channel.and_then(|channel| state.channels[channel].as_mut()) {
            *last = number.max(*last);
            state.forget_old_ends();
        }
        drop(state);
        assembly.moved.notify_all();
        for complete in complete {
            self.put(block, complete)?;
        }
        Ok(())
    }

    /// Ends this thread's lane.
    pub(super) fn finish(self) -> Result<(), ImageError> {
        if let Some(channel) = self.channel {
            self.assembly.no_channel(channel);
        }
        self.assembly.sink.finish(self.lane)
    }

    fn put(&mut self, block: usize, (chunk, buffer): Complete) -> Result<(), ImageError> {
        let assembly = self.assembly;
        assembly.ending.go_on()?;
        let pages = assembly.pages_of(block, chunk);
        let content = match buffer.map(Arc::into_inner) {
            None => None,
            Some(Some(buffer)) => Some(buffer.filled(pages)),
            // Somebody has it who was given no page in it: all had come.
            Some(None) => return Err(assembly.again(block, chunk, 0)),
        };
        assembly.sink.put(&mut self.lane, block, chunk as u64, content)?;
        assembly.progress.advance((pages * PAGE_BYTES) as u64);
        Ok(())
    }

    /// The index of a block in the layout. A channel can be ahead of the block list.
    fn block(&self, name: &str) -> Result<usize, ImageError> {
        let mut state = self.assembly.lock();
        loop {
            if let Some(listed) = self.assembly.listed.get() {
                let unknown = || StreamError::UnknownBlock {
                    name: name.to_owned(),
                };
                return Ok(*listed
                    .get(name)
                    .ok_or_else(unknown)
                    .map_err(IncomingError::from)?);
            }
            state = self.assembly.wait(state)?;
        }
    }

    /// The pages of a packet by chunk; they lie in their block, and none is there twice.
    fn parts(&self, block: usize, packet: &MultifdPacket<'_>) -> Result<Vec<Part>, ImageError> {
        let mut parts: Vec<Part> = Vec::new();
        let of = &self.assembly.blocks[block];
        let data = packet.data_pages().map(|offset| (offset, true));
        let zero = packet.zero_pages().map(|offset| (offset, false));
        for (offset, is_data) in data.chain(zero) {
            if offset / PAGE_BYTES as u64 >= of.pages {
                let outside = StreamError::PageOutside {
                    block: of.name.clone(),
                    offset,
                    length: ByteCount(of.pages * PAGE_BYTES as u64),
                };
                return Err(IncomingError::from(outside).into());
            }
            let (chunk, page) = place(offset);
            let index = match parts.iter().rposition(|part| part.chunk == chunk) {
                Some(index) => index,
                None => {
                    parts.push(Part {
                        chunk,
                        ..Part::default()
                    });
                    parts.len() - 1
                }
            };
            let part = &mut parts[index];
            let new = !part.data.or(part.zero).contains(page);
            let set = if is_data { &mut part.data } else { &mut part.zero };
            if !set.insert(page) || !new {
                return Err(self.assembly.again(block, chunk, page));
            }
        }
        Ok(parts)
    }

    /// Whether this thread may open more than the limit: only the channel furthest behind.
    fn may_exceed(&self, state: &State) -> bool {
        let channels = state.channels.iter().enumerate();
        let last = channels.filter_map(|(connection, packet)| Some((packet.as_ref()?, connection)));
        last.min().is_none_or(|(_, behind)| self.channel == Some(behind))
    }
}

impl State {
    /// The buffer of a chunk, which is opened if it is not; `None` only if that takes a buffer and
    /// there is none.
    fn open(
        &mut self,
        block: usize,
        chunk: usize,
        witness: Witness,
        spare: &mut Vec<AlignedBuf>,
    ) -> Option<Arc<PagedBuf>> {
        let of = &mut self.chunks[block][chunk];
        let open = match &mut of.open {
            Some(open) => open,
            closed => {
                let buffer = Arc::new(PagedBuf::of(spare.pop()?));
                let order = self.opened;
                self.opened += 1;
                self.open.insert(order, (block, chunk));
                closed.insert(Box::new(Open {
                    buffer,
                    order,
                    first_packet: witness.reliable,
                    last_packet: witness.number,
                }))
            }
        };
        open.last_packet = open.last_packet.max(witness.number);
        Some(Arc::clone(&open.buffer))
    }

    /// Takes a chunk out of those that wait for pages, to be put.
    fn close(&mut self, block: usize, chunk: usize) -> Complete {
        let of = &mut self.chunks[block][chunk];
        of.put = true;
        let open = of.open.take();
        if let Some(open) = &open {
            self.open.remove(&open.order);
        }
        (chunk, open.map(|open| open.buffer))
    }

    /// A chunk that all channels have passed, closed, with its block.
    fn presume(&mut self) -> Option<(usize, Complete)> {
        let (all_are_beyond, margin) = (self.all_are_beyond()?, self.margin());
        let open = |(block, chunk): (usize, usize)| self.chunks[block][chunk].open.as_ref();
        let passed = (self.open.values())
            .filter_map(|place| open(*place)?.first_packet)
            .filter(|first| first.saturating_add(margin) < all_are_beyond)
            .max()?;
        let (block, chunk) = *self.open.values().find(|place| {
            open(**place).is_some_and(|open| {
                // Nobody is filling it.
                open.last_packet.saturating_add(margin) < passed && Arc::strong_count(&open.buffer) == 1
            })
        })?;
        Some((block, self.close(block, chunk)))
    }

    /// Takes those pages out of a packet's parts that came before at the other end of a neighbour.
    fn take_out_echoes(&self, parts: &mut [Part], ends: PacketEnds) {
        let mut take_out = |page: u64, is_echo: &dyn Fn() -> bool| {
            let (chunk, page) = place(page * PAGE_BYTES as u64);
            let part = parts.iter_mut().find(|part| part.chunk == chunk);
            let part = part.filter(|_| self.chunks[ends.block][chunk].came.contains(page));
            if let Some(part) = part.filter(|_| is_echo()) {
                part.data.remove(page);
            }
        };
        take_out(ends.first, &|| {
            let before = PacketEnds::lowest(ends.least.saturating_sub(1))..PacketEnds::lowest(ends.number);
            self.ends.range(before).any(|before| ends.echoes(before))
        });
        if let Some(last) = ends.last {
            let after = PacketEnds::lowest(ends.number)..;
            take_out(last, &|| {
                self.ends.range(after.clone()).any(|after| after.echoes(&ends))
            });
        }
    }

    /// Ends of packets that all channels have passed have no echo any more.
    fn forget_old_ends(&mut self) {
        let Some(passed) = self.all_are_beyond() else {
            return;
        };
        while self.ends.first().is_some_and(|ends| ends.number < passed) {
            self.ends.pop_first();
        }
    }

    /// Every channel has sent a packet of this number or a higher one.
    fn all_are_beyond(&self) -> Option<u64> {
        self.channels.iter().flatten().min().copied()
    }

    /// How far apart neighbours are that can have changed places: those that channels were sending at
    /// the same time.
    fn margin(&self) -> u64 {
        2 * self.channels.iter().flatten().count() as u64
    }
}

impl PacketEnds {
    /// None if the packet has no data. `last` is the number of the packet before it on its channel.
    fn of(packet: &MultifdPacket<'_>, block: usize, last: u64) -> Option<Self> {
        let page = |offset: u64| offset / PAGE_BYTES as u64;
        let data = packet.data_pages();
        let is_full = data.len() == MultifdPacket::PAGES_LIMIT;
        let overtaken = packet.ends_round && last < packet.number;
        Some(Self {
            number: packet.number,
            least: if overtaken { last + 1 } else { packet.number },
            block,
            first: page(packet.data_pages().next()?),
            last: data.last().filter(|_| is_full).map(page),
        })
    }

    /// Whether this packet begins with the echo of the last page of one before it.
    fn echoes(&self, before: &Self) -> bool {
        let next = before.number.saturating_add(1);
        before.block == self.block
            && before.last == Some(self.first)
            && (self.least..=self.number).contains(&next)
    }

    /// Before all packets of this number.
    fn lowest(number: u64) -> Self {
        Self {
            number,
            least: 0,
            block: 0,
            first: 0,
            last: None,
        }
    }
}

/// What the number of a packet says about when it was sent.
#[derive(Clone, Copy, Default)]
struct Witness {
    /// It was sent as this one or before.
    number: u64,
    /// The same, if it was sent as this one.
    reliable: Option<u64>,
}

impl From<&MultifdPacket<'_>> for Witness {
    fn from(packet: &MultifdPacket<'_>) -> Self {
        Self {
            number: packet.number,
            reliable: Some(packet.number).filter(|_| !packet.ends_round),
        }
    }
}

/// Pages that follow each other within one chunk, all of them taken or none.
struct PageRun {
    start: u64,
    pages: usize,
    is_taken: bool,
}

/// Few long slices are read faster than many pages. Pages that are not taken are by themselves.
fn runs(offsets: impl Iterator<Item = u64>, is_taken: impl Fn(u64) -> bool) -> Vec<PageRun> {
    let mut runs: Vec<PageRun> = Vec::new();
    for offset in offsets {
        let is_taken = is_taken(offset);
        match runs.last_mut() {
            Some(run)
                if offset == run.start + (run.pages * PAGE_BYTES) as u64
                    && !offset.is_multiple_of(CHUNK_BYTES)
                    && is_taken
                    && run.is_taken =>
            {
                run.pages += 1;
            }
            _ => runs.push(PageRun {
                start: offset,
                pages: 1,
                is_taken,
            }),
        }
    }
    runs
}
