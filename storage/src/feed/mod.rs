//! Feeding a guest that runs already: its memory comes from the image as the source of a post-copy migration.
//!
//! ```text
//!                  ┌────────────────────────── image ───────────────────────────┐
//!                  │ chunks, read and checked         chunks, read and checked  │
//!                  ▼                                  ▼
//!            answering threads                  reading threads, in order
//!                  ▲        └── first ──►  outlet  ◄── else ──┘
//!   requests       │                         │  pages, each once; small batches
//!        └── the way back ◄── socket ── QEMU ◄┘
//! ```
//!
//! What is guaranteed:
//!
//! * **Nothing that failed a check is fed.** A page goes out only from a chunk whose checksum was right, decrypted and
//!   decompressed. A chunk that cannot be had is told at once ([`Told::damage`]), all else is fed, and the connection
//!   stays: the guest stands where it needs that chunk, and nowhere else. Storage that did not give it is asked again, until
//!   it does.
//! * A feed that goes on after an interruption ends when nothing is left but chunks that will not come: whoever waits for it
//!   learns that, and QEMU waits for another.
//! * **A page goes out once.** QEMU takes none twice. After an interruption QEMU tells what it has, and that counts. Zero
//!   pages that nobody waits for need not go out at all: they are what QEMU's memory is where nothing came.
//! * **Who waits comes first.** An answer stands back behind no more than one batch that is being written and what is
//!   in the socket. It takes its neighbours along.
//! * Pages of memory that is in larger pages go together, as QEMU needs them.
//!
//! It cannot be cancelled: the guest depends on it. It ends with all of the memory, or with the connection.

mod answer_times;
mod answers;
mod blocks;
mod error;
mod loaded;
mod outlet;
mod told;

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

pub use error::FeedError;
pub use told::{Damage, Numbers, Told};

use self::answers::Answer;
use self::blocks::{Block, Blocks, Unit};
use self::loaded::Loaded;
use self::outlet::{Outlet, bytes_of};
use crate::migration::{PAGE_BYTES, Postcopy};
use crate::rate_limit::RateLimit;
use crate::sys::probe;
use crate::{ByteCount, Image, ImageError, Recording};

/// What lets QEMU have the faults of its memory told to it.
pub const USERFAULTFD_REMEDY: &str = "run as root or with CAP_SYS_PTRACE, set vm.unprivileged_userfaultfd=1, or give access to /dev/userfaultfd (QEMU 8.1)";

/// Whether a QEMU started by this process can be fed while its guest runs; why not, and what would help.
/// `opens_device`: whether it knows `/dev/userfaultfd`.
///
/// # Errors
///
/// A sentence.
pub fn check_possible(opens_device: bool) -> Result<(), String> {
    match probe::why_no_userfaultfd(opens_device) {
        None => Ok(()),
        Some(error) => Err(format!(
            "userfaultfd is refused here ({error}); {USERFAULTFD_REMEDY}"
        )),
    }
}

/// Threads that read ahead. The loading QEMU has one thread that places pages.
const READERS: usize = 2;
/// Threads that answer: one reads while the other writes.
const ANSWERERS: usize = 2;
/// Pages of a batch, and so what an answer may have to wait for.
const BATCH_PAGES: usize = 32;
/// When storage that gave an error is asked again; twice as long after each time, up to the limit.
const ASK_AGAIN: Duration = Duration::from_millis(100);
const ASK_AGAIN_LIMIT: Duration = Duration::from_secs(5);
/// How often it is looked whether what nobody asked for may be fed.
const HOLD: Duration = Duration::from_millis(1);

/// A feed that can be begun.
#[derive(Debug)]
pub struct Feeder {
    image: Image,
    recording: Recording,
    /// Blocks that are fed while the guest runs. The others are there before it does.
    late: Vec<String>,
    rate_limit: Option<ByteCount>,
    told: Arc<Told>,
}

/// What came of a feed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fed {
    /// How much, and how long answers took.
    pub numbers: Numbers,
    /// How long it took.
    pub took: Duration,
}

/// Where the other side is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Beginning {
    /// It has nothing.
    Wake,
    /// It has something, and lost its feeder.
    Recovery,
}

impl Feeder {
    /// A feeder from `image`; `late`: the blocks that are the guest's memory. `rate_limit`: for what nobody waits for.
    ///
    /// # Errors
    ///
    /// [`FeedError::Image`].
    pub fn new(image: Image, late: Vec<String>, rate_limit: Option<ByteCount>) -> Result<Self, FeedError> {
        let recording = image.device_state()?;
        let total = recording.blocks().iter().map(|block| block.used_length).sum();
        Ok(Self {
            image,
            recording,
            late,
            rate_limit,
            told: Arc::new(Told::new(total)),
        })
    }

    /// What is seen of it.
    pub fn told(&self) -> Arc<Told> {
        self.told.clone()
    }

    /// Wakes the guest in the QEMU at the other end, and feeds it: blocking, until it has all, or the connection ends.
    /// `page_bytes`: the page size of a RAM block's memory by its name. What nobody asks for waits for
    /// [`Told::release`].
    ///
    /// # Errors
    ///
    /// [`FeedError`]; the guest may have run.
    pub fn feed(
        self,
        stream: UnixStream,
        page_bytes: impl Fn(&str) -> Option<u64>,
    ) -> Result<Fed, FeedError> {
        self.begin(stream, page_bytes, Beginning::Wake)
    }

    /// Goes on with a guest whose feeder was lost: asks QEMU what it has, and feeds it the rest.
    ///
    /// # Errors
    ///
    /// [`FeedError`].
    pub fn go_on(
        self,
        stream: UnixStream,
        page_bytes: impl Fn(&str) -> Option<u64>,
    ) -> Result<Fed, FeedError> {
        self.told.loaded();
        self.told.release();
        self.begin(stream, page_bytes, Beginning::Recovery)
    }

    fn begin(
        self,
        stream: UnixStream,
        page_bytes: impl Fn(&str) -> Option<u64>,
        beginning: Beginning,
    ) -> Result<Fed, FeedError> {
        let started = Instant::now();
        let blocks = Blocks::of(&self.image, &self.recording, page_bytes)?;
        let lost = |source| FeedError::Lost {
            missing: self.told.numbers().total,
            source: Some(source),
        };
        let (out, mut back) = (
            stream.try_clone().map_err(lost)?,
            stream.try_clone().map_err(lost)?,
        );
        let outlet = Outlet::new(&self.recording, &blocks, &self.told, out);
        match beginning {
            Beginning::Wake => {
                let head = self.head(&blocks, &outlet)?;
                outlet.send_other(&head).map_err(lost)?;
            }
            Beginning::Recovery => self.ask_what_it_has(&blocks, &outlet, &mut back)?,
        }
        let work = Work {
            image: &self.image,
            blocks: &blocks,
            outlet: &outlet,
            told: &self.told,
            units: blocks.units(),
            next: AtomicUsize::new(0),
            reading: AtomicUsize::new(READERS),
            ends_short: beginning == Beginning::Recovery,
            requests: Mutex::default(),
            requested: Condvar::new(),
            over: AtomicBool::new(false),
            stream: &stream,
            rate_limit: self.rate_limit.map(|limit| RateLimit::new(limit, Instant::now())),
        };
        let end = thread::scope(|scope| {
            for _ in 0..ANSWERERS {
                scope.spawn(|| work.until_over(|| work.answer()));
            }
            for _ in 0..READERS {
                scope.spawn(|| work.until_over(|| work.read_ahead()));
            }
            let end = work.listen(&mut back);
            work.end();
            end
        });
        let missing = ByteCount(bytes_of(outlet.left()));
        match end {
            Ok(Some(false)) if missing == ByteCount::ZERO => Ok(Fed {
                numbers: self.told.numbers(),
                took: started.elapsed(),
            }),
            Ok(Some(_)) => Err(FeedError::Refused),
            end => match self.told.damage().iter().find(|damage| !damage.may_come) {
                Some(first) if missing > ByteCount::ZERO => Err(FeedError::Damaged {
                    missing,
                    first: first.why.clone(),
                }),
                _ => Err(FeedError::Lost {
                    missing,
                    source: end.err(),
                }),
            },
        }
    }

    /// All that comes before the guest runs.
    fn head(&self, blocks: &Blocks, outlet: &Outlet<'_>) -> Result<Vec<u8>, FeedError> {
        let postcopy = Postcopy::of(&self.recording);
        let late: Vec<&str> = self.late.iter().map(String::as_str).collect();
        let early: Vec<_> = self.image.pages(&late)?.collect::<Result<_, ImageError>>()?;
        let first_late = self.late.iter().find_map(|name| blocks.index_of(name));
        let first_late = first_late
            .ok_or_else(|| FeedError::Mismatch("no RAM block is to be fed to a running guest".to_owned()))?;
        let mut head = Vec::new();
        let written = (|| {
            postcopy.opening(blocks.page_sizes(), &mut head)?;
            postcopy.blocks(&blocks.page_size_of_each(), &mut head)?;
            postcopy.pages(early, &mut head)?;
            let page = blocks.blocks[first_late].together * PAGE_BYTES;
            postcopy.discard(first_late, 0, page as u64, &mut head)?;
            postcopy.package(&mut head)
        })();
        written.map_err(|error: io::Error| FeedError::Mismatch(format!("no stream for QEMU: {error}")))?;
        for (index, block) in blocks.blocks.iter().enumerate() {
            if !self.late.contains(&block.name) {
                self.told.fed(bytes_of(outlet.has_all_of(index)));
            }
        }
        Ok(head)
    }

    /// The handshake after an interruption, up to QEMU's going on.
    fn ask_what_it_has(
        &self,
        blocks: &Blocks,
        outlet: &Outlet<'_>,
        back: &mut UnixStream,
    ) -> Result<(), FeedError> {
        let lost = |source: Option<io::Error>| FeedError::Lost {
            missing: self.told.numbers().total,
            source,
        };
        let postcopy = Postcopy::of(&self.recording);
        for (index, block) in blocks.blocks.iter().enumerate() {
            let mut question = Vec::new();
            postcopy
                .ask_received(index, &mut question)
                .and_then(|()| outlet.send_other(&question))
                .map_err(|error| lost(Some(error)))?;
            loop {
                match answers::next(back).map_err(|error| lost(Some(error)))? {
                    Some(Answer::Received { block: name, bitmap }) if name == block.name => {
                        let has = outlet.has(index, &bitmap).ok_or_else(|| {
                            FeedError::Mismatch(format!("QEMU tells too little of what it has of {name}"))
                        })?;
                        self.told.fed(bytes_of(has));
                        break;
                    }
                    None => return Err(lost(None)),
                    Some(Answer::Shut { .. }) => return Err(FeedError::Refused),
                    Some(other) => tracing::debug!(?other, "heard before what QEMU has"),
                }
            }
        }
        let mut go_on = Vec::new();
        postcopy
            .resume(&mut go_on)
            .and_then(|()| outlet.send_other(&go_on))
            .and_then(|()| outlet.end_if_complete())
            .map_err(|error| lost(Some(error)))
    }
}

/// What the threads of a feed share.
struct Work<'a> {
    image: &'a Image,
    blocks: &'a Blocks,
    outlet: &'a Outlet<'a>,
    told: &'a Told,
    units: Vec<Unit>,
    next: AtomicUsize,
    /// Threads that read ahead still.
    reading: AtomicUsize,
    /// Whether it ends with nothing left but what will not come.
    ends_short: bool,
    requests: Mutex<Requests>,
    requested: Condvar,
    over: AtomicBool,
    stream: &'a UnixStream,
    rate_limit: Option<RateLimit>,
}

/// Pages that QEMU waits for.
#[derive(Debug, Clone)]
struct Request {
    block: usize,
    pages: Range<usize>,
    /// Since when; `None`: nobody waits, they could not be read when their turn came.
    heard: Option<Instant>,
    /// How long after an error it is tried again.
    pause: Duration,
}

#[derive(Debug, Default)]
struct Requests {
    now: VecDeque<Request>,
    /// Those that storage gave an error for, and when they are tried again.
    later: Vec<(Instant, Request)>,
    /// How many are being answered.
    taken: usize,
}

/// Whether a unit was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Had {
    Yes,
    /// Storage gave an error.
    NotYet,
    Never,
}

impl Work<'_> {
    /// Reads what QEMU says until it says that it ends, or ends. Tells whether it says that it failed.
    fn listen(&self, back: &mut UnixStream) -> io::Result<Option<bool>> {
        let mut current = None;
        while let Some(answer) = answers::next(back)? {
            match answer {
                Answer::Shut { failed } => return Ok(Some(failed)),
                Answer::Pong(_) => self.told.loaded(),
                Answer::Request { block, start, length } => {
                    current = match block {
                        Some(name) => self.blocks.index_of(&name),
                        None => current,
                    };
                    let pages = self.pages_of(current, start, length).ok_or_else(|| {
                        let what = format!("QEMU asks for {length} bytes at {start:#x} of no RAM block");
                        io::Error::new(io::ErrorKind::InvalidData, what)
                    })?;
                    self.ask(pages);
                }
                other => tracing::debug!(?other, "heard from QEMU"),
            }
        }
        Ok(None)
    }

    fn pages_of(&self, block: Option<usize>, start: u64, length: u32) -> Option<(usize, Range<usize>)> {
        let block = block?;
        let first = usize::try_from(start / PAGE_BYTES as u64).ok()?;
        let end = usize::try_from((start + u64::from(length)).div_ceil(PAGE_BYTES as u64)).ok()?;
        let Block { pages, together, .. } = self.blocks.blocks[block];
        // What goes only together is asked for together; a later QEMU may see it otherwise.
        let (first, end) = (first / together * together, end.next_multiple_of(together));
        (first < end && end <= pages).then_some((block, first..end))
    }

    fn ask(&self, (block, pages): (usize, Range<usize>)) {
        let heard = Instant::now();
        let mut first = pages.start;
        // One request for each unit.
        while let Some(unit) = self.blocks.unit_at(block, first).filter(|_| first < pages.end) {
            let end = pages.end.min(unit.first_page + unit.pages);
            self.queue().now.push_back(Request {
                block,
                pages: first..end,
                heard: Some(heard),
                pause: ASK_AGAIN,
            });
            self.requested.notify_one();
            first = end;
        }
    }

    /// Answers requests until it is over.
    fn answer(&self) -> io::Result<()> {
        let mut loaded = Loaded::new(self.image, self.blocks);
        while let Some(request) = self.next_request() {
            self.answer_one(&mut loaded, request)?;
            self.queue().taken -= 1;
            self.end_if_short();
        }
        Ok(())
    }

    fn answer_one(&self, loaded: &mut Loaded, request: Request) -> io::Result<()> {
        let Some(unit) = self.blocks.unit_at(request.block, request.pages.start) else {
            return Ok(());
        };
        // It went out while the request was on its way, so its unit could be read.
        if self.outlet.is_sent(request.block, request.pages.clone()) {
            self.is_here(unit);
            return Ok(());
        }
        match self.load(loaded, unit) {
            Had::Yes => {}
            Had::NotYet => {
                self.try_later(request);
                return Ok(());
            }
            Had::Never => return Ok(()),
        }
        if let Some(heard) = request.heard {
            // The pages themselves first, their neighbours in the same breath.
            let batch = self.batch_around(unit, request.pages.start);
            let sent = self.outlet.send(loaded, unit, request.pages.clone(), true)?
                + self.outlet.send(loaded, unit, batch, false)?;
            self.told.answered(heard.elapsed());
            self.told.fed(bytes_of(sent));
        }
        // What is read anyway goes too, as long as nobody waits for something else. What could not be read when its turn
        // came goes in any case: nothing else brings it.
        for batch in self.batches(unit) {
            if request.heard.is_some() && (!self.queue().now.is_empty() || !self.told.is_released()) {
                break;
            }
            let sent = self.outlet.send(loaded, unit, batch, false)?;
            self.told.fed(bytes_of(sent));
        }
        Ok(())
    }

    /// Feeds what nobody asked for.
    fn read_ahead(&self) -> io::Result<()> {
        self.read_in_order()?;
        self.reading.fetch_sub(1, Ordering::SeqCst);
        self.end_if_short();
        Ok(())
    }

    /// Ends a feed that has nothing left to do, but for what will not come.
    fn end_if_short(&self) {
        let has_nothing_left = || {
            let queue = self.queue();
            queue.now.is_empty() && queue.later.is_empty() && queue.taken == 0
        };
        if self.ends_short
            && self.reading.load(Ordering::SeqCst) == 0
            && has_nothing_left()
            && self.outlet.left() > 0
        {
            self.outlet.shut(self.stream);
        }
    }

    fn read_in_order(&self) -> io::Result<()> {
        while !self.told.is_released() {
            if self.is_over() {
                return Ok(());
            }
            thread::park_timeout(HOLD);
        }
        let mut loaded = Loaded::new(self.image, self.blocks);
        while !self.is_over() {
            let Some(unit) = self.units.get(self.next.fetch_add(1, Ordering::Relaxed)) else {
                break;
            };
            let pages = unit.first_page..unit.first_page + unit.pages;
            if self.outlet.is_sent(unit.block, pages) {
                continue;
            }
            match self.load(&mut loaded, *unit) {
                Had::Yes => {}
                Had::NotYet => {
                    self.try_later(Request {
                        block: unit.block,
                        pages: unit.first_page..unit.first_page + unit.pages,
                        heard: None,
                        pause: ASK_AGAIN,
                    });
                    // Else all that is left of a large image would fail at once.
                    thread::park_timeout(ASK_AGAIN);
                    continue;
                }
                Had::Never => continue,
            }
            if let Some(limit) = &self.rate_limit
                && loaded.holds_data(*unit)
                && !limit.wait(bytes_of(unit.pages), &self.over)
            {
                break;
            }
            for batch in self.batches(*unit) {
                let sent = self.outlet.send(&loaded, *unit, batch, false)?;
                self.told.fed(bytes_of(sent));
            }
        }
        Ok(())
    }

    /// Reads a unit.
    fn load(&self, loaded: &mut Loaded, unit: Unit) -> Had {
        let block = &self.blocks.blocks[unit.block].name;
        let Err((page, error)) = loaded.read(self.image, self.blocks, unit) else {
            self.is_here(unit);
            return Had::Yes;
        };
        let may_come = matches!(error, ImageError::Io { .. });
        let damage = Damage {
            block: block.clone(),
            may_come,
            offset: bytes_of(page),
            length: ByteCount(bytes_of(unit.pages.min(self.blocks.chunk_pages))),
            why: sentence(&error),
        };
        let why = damage.why.clone();
        if self.told.damaged(damage) {
            tracing::error!(
                why,
                may_come,
                "some of the guest's memory cannot be had: it stands where it needs that"
            );
        }
        if may_come { Had::NotYet } else { Had::Never }
    }

    fn try_later(&self, mut request: Request) {
        let due = Instant::now() + request.pause;
        request.pause = ASK_AGAIN_LIMIT.min(request.pause * 2);
        self.queue().later.push((due, request));
        self.requested.notify_one();
    }

    /// Storage gave it, which it may not have done before, to whoever asked.
    fn is_here(&self, unit: Unit) {
        let pages = unit.first_page..unit.first_page + unit.pages;
        let offsets = bytes_of(pages.start)..bytes_of(pages.end);
        let block = &self.blocks.blocks[unit.block].name;
        if self.told.mended(block, &offsets) {
            tracing::info!(block, ?offsets, "memory that could not be had has come after all");
        }
    }

    fn batch_pages(&self, unit: Unit) -> usize {
        BATCH_PAGES.max(self.blocks.blocks[unit.block].together)
    }

    fn batch_around(&self, unit: Unit, page: usize) -> Range<usize> {
        let batch = self.batch_pages(unit);
        let first = page / batch * batch;
        first.max(unit.first_page)..(first + batch).min(unit.first_page + unit.pages)
    }

    fn batches(&self, unit: Unit) -> impl Iterator<Item = Range<usize>> + use<> {
        let (batch, end) = (self.batch_pages(unit), unit.first_page + unit.pages);
        (unit.first_page..end)
            .step_by(batch)
            .map(move |first| first..(first + batch).min(end))
    }

    fn next_request(&self) -> Option<Request> {
        let mut queue = self.queue();
        loop {
            if self.is_over() {
                return None;
            }
            if let Some(request) = queue.now.pop_front() {
                queue.taken += 1;
                return Some(request);
            }
            let next = queue.later.iter().enumerate().min_by_key(|(_, (due, _))| *due);
            let next = next.map(|(index, (due, _))| (index, due.saturating_duration_since(Instant::now())));
            queue = match next {
                Some((index, Duration::ZERO)) => {
                    queue.taken += 1;
                    return Some(queue.later.swap_remove(index).1);
                }
                Some((_, wait)) => {
                    let waited = self.requested.wait_timeout(queue, wait);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.requested.wait(queue).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Does the work of a thread. A connection that cannot be written to is at its end, for all.
    fn until_over(&self, work: impl FnOnce() -> io::Result<()>) {
        if let Err(error) = work() {
            tracing::debug!(%error, "cannot feed");
            self.outlet.shut(self.stream);
        }
    }

    fn end(&self) {
        self.over.store(true, Ordering::SeqCst);
        // Under the lock, so that nobody misses it between a look and a wait.
        drop(self.queue());
        self.requested.notify_all();
        self.outlet.shut(self.stream);
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    fn queue(&self) -> MutexGuard<'_, Requests> {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An error with what it comes from.
fn sentence(error: &ImageError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
