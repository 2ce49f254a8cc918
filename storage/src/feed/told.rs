//! What is seen of a feed while it goes on.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use super::answer_times::AnswerTimes;
use crate::ByteCount;

/// A feed, as whoever waits for it sees and steers it; shared with its threads.
#[derive(Debug)]
pub struct Told {
    total_bytes: AtomicU64,
    fed_bytes: AtomicU64,
    times: AnswerTimes,
    loaded: AtomicBool,
    released: AtomicBool,
    passes_zeros: AtomicBool,
    damage: Mutex<Vec<Damage>>,
}

/// A chunk that could not be had.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// Its RAM block.
    pub block: String,
    /// Where in it, in bytes.
    pub offset: u64,
    /// How much.
    pub length: ByteCount,
    /// Why.
    pub why: String,
    /// Whether it may come yet: storage did not give it, which is asked again.
    pub may_come: bool,
}

/// How far a feed is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Numbers {
    /// All of the guest's memory.
    pub total: ByteCount,
    /// What it has of it.
    pub fed: ByteCount,
    /// Answers to pages that it asked for.
    pub answers: u64,
    /// Half of the answers took no longer.
    pub half_within: Option<Duration>,
    /// 99 of 100 answers took no longer.
    pub nearly_all_within: Option<Duration>,
}

impl Numbers {
    /// What the guest has of its memory, from 0 to 1.
    pub fn share(&self) -> f64 {
        self.fed.0 as f64 / self.total.0.max(1) as f64
    }
}

impl Told {
    pub(super) fn new(total: ByteCount) -> Self {
        Self {
            total_bytes: AtomicU64::new(total.0),
            fed_bytes: AtomicU64::new(0),
            times: AnswerTimes::new(),
            loaded: AtomicBool::new(false),
            released: AtomicBool::new(false),
            passes_zeros: AtomicBool::new(false),
            damage: Mutex::default(),
        }
    }

    /// How far it is.
    pub fn numbers(&self) -> Numbers {
        Numbers {
            total: ByteCount(self.total_bytes.load(Ordering::Relaxed)),
            fed: ByteCount(self.fed_bytes.load(Ordering::Relaxed)),
            answers: self.times.count(),
            half_within: self.times.within(0.5),
            nearly_all_within: self.times.within(0.99),
        }
    }

    /// Whether QEMU has loaded the devices.
    pub fn is_loaded(&self) -> bool {
        self.loaded.load(Ordering::Acquire)
    }

    /// Lets what nobody asked for be fed as well. Until then the start of the guest has the machine to itself.
    pub fn release(&self) {
        self.released.store(true, Ordering::Release);
    }

    /// Lets zero pages that nobody asked for not be fed at all, which takes no time and no memory.
    ///
    /// Only for a QEMU that lets go of its memory, once all has come, without its main loop: whoever waits for a zero page then
    /// may keep the main loop waiting.
    pub fn pass_zeros(&self) {
        self.passes_zeros.store(true, Ordering::Release);
    }

    /// The chunks that could not be had so far.
    pub fn damage(&self) -> Vec<Damage> {
        self.damages().clone()
    }

    pub(super) fn is_released(&self) -> bool {
        self.released.load(Ordering::Acquire)
    }

    /// Whether zero pages that nobody asked for are not fed.
    pub fn passes_zeros(&self) -> bool {
        self.passes_zeros.load(Ordering::Acquire)
    }

    pub(super) fn loaded(&self) {
        self.loaded.store(true, Ordering::Release);
    }

    pub(super) fn fed(&self, bytes: u64) {
        self.fed_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn answered(&self, time: Duration) {
        self.times.add(time);
    }

    /// Notes a chunk that could not be had; `false` if that is known.
    pub(super) fn damaged(&self, damage: Damage) -> bool {
        let mut damages = self.damages();
        let known = damages
            .iter_mut()
            .find(|known| (&known.block, known.offset) == (&damage.block, damage.offset));
        match known {
            Some(known) => {
                let is_news = known.may_come != damage.may_come;
                *known = damage;
                is_news
            }
            None => {
                damages.push(damage);
                true
            }
        }
    }

    /// What is there could be had; whether it could not before.
    pub(super) fn mended(&self, block: &str, offsets: &Range<u64>) -> bool {
        let mut damages = self.damages();
        let before = damages.len();
        damages.retain(|known| known.block != block || !offsets.contains(&known.offset));
        damages.len() < before
    }

    fn damages(&self) -> std::sync::MutexGuard<'_, Vec<Damage>> {
        self.damage.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
