//! Whether chunks are compressed, and when that pays.
//!
//! zstd makes 0.3 to 0.9 GB/s on two CPUs where a disk takes 2 GB/s: compression slows a good disk
//! down, and helps one that is slow, metered, or behind a network. [`Compression::Auto`] finds out while it
//! writes, window by window:
//!
//! ```text
//!                     workers wait for the volume, and compressed chunks would get through faster
//!   raw, now and then ─────────────────────────────────────────────────────────────────► compressed,
//!   one compressed    ◄───────────────────────────────────────────────────────────────── now and then a window raw
//!   to see            the volume took raw chunks faster than the CPUs compress
//! ```
//!
//! Each chunk says for itself how it is stored, so changing one's mind costs nothing.

use std::fmt;
use std::str::FromStr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

/// Levels that zstd has.
const LEVELS: std::ops::RangeInclusive<i32> = -7..=19;

/// The fastest of zstd's ordinary levels: above it a CPU takes twice the time for a tenth less.
const DEFAULT_LEVEL: i32 = 1;

/// Chunks after which a decision is made: some 30 ms of a fast disk.
const WINDOW_CHUNKS: u64 = 32;

/// One chunk of so many is compressed to see what it would bring, while workers wait for the volume anyway.
const PROBE_EVERY: u64 = 16;

/// One window of so many is raw to see what the volume takes by now.
const LOOK_EVERY: u64 = 16;

/// A change has to bring so much of the time, or the mode would swing with the disk's.
const WORTH_IT: f64 = 0.85;

/// Workers that wait less than this share of their time are not held up by the volume.
const WAITING: f64 = 0.25;

/// Whether and how chunks are compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Compression {
    /// Not at all: RAM can be mapped from the image.
    #[default]
    None,
    /// Every chunk that gets smaller by it, with this level of zstd.
    Zstd(i32),
    /// With level 1 while the volume, not the CPU, is what holds the writing up.
    Auto,
}

impl Compression {
    pub(super) fn level(self) -> Option<i32> {
        match self {
            Self::None => None,
            Self::Zstd(level) => Some(level),
            Self::Auto => Some(DEFAULT_LEVEL),
        }
    }
}

impl FromStr for Compression {
    type Err = CompressionError;

    fn from_str(text: &str) -> Result<Self, CompressionError> {
        let unknown = || CompressionError(text.to_owned());
        match text {
            "none" => Ok(Self::None),
            "auto" => Ok(Self::Auto),
            "zstd" => Ok(Self::Zstd(DEFAULT_LEVEL)),
            _ => {
                let level = text.strip_prefix("zstd:").ok_or_else(unknown)?;
                let level = level.parse().map_err(|_| unknown())?;
                LEVELS
                    .contains(&level)
                    .then_some(Self::Zstd(level))
                    .ok_or_else(unknown)
            }
        }
    }
}

impl fmt::Display for Compression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Auto => f.write_str("auto"),
            Self::Zstd(level) => write!(f, "zstd:{level}"),
        }
    }
}

/// Not a way to compress.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is none of none, auto, zstd and zstd:LEVEL with a level from -7 to 19")]
pub struct CompressionError(String);

/// Decides for every chunk whether it is compressed.
#[derive(Debug)]
pub(super) enum Decider {
    Always,
    Never,
    Measuring(Auto),
}

impl Decider {
    pub(super) fn of(compression: Compression) -> Self {
        match compression {
            Compression::None => Self::Never,
            Compression::Zstd(_) => Self::Always,
            Compression::Auto => Self::Measuring(Auto::default()),
        }
    }

    /// Whether the next chunk is to be compressed.
    pub(super) fn compress_next(&self) -> bool {
        match self {
            Self::Always => true,
            Self::Never => false,
            Self::Measuring(auto) => auto.compress_next(),
        }
    }

    /// Tells what became of a chunk.
    pub(super) fn learn(&self, written: &Written) {
        if let Self::Measuring(auto) = self {
            auto.learn(written);
        }
    }
}

/// What one chunk took of a worker.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Written {
    /// Its RAM, in bytes.
    pub(super) plain: u64,
    /// What was stored, in bytes.
    pub(super) stored: u64,
    /// Time that the worker waited for the volume.
    pub(super) waited: Duration,
    /// Time that it worked, without the compression.
    pub(super) worked: Duration,
    /// Time that it compressed, if it did.
    pub(super) compressed: Option<Duration>,
}

/// Compresses while that makes the writing faster.
#[derive(Debug, Default)]
pub(super) struct Auto {
    on: AtomicBool,
    number: AtomicU64,
    pace: Mutex<Pace>,
}

impl Auto {
    fn compress_next(&self) -> bool {
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        if self.on.load(Ordering::Relaxed) {
            return number / WINDOW_CHUNKS % LOOK_EVERY != LOOK_EVERY - 1;
        }
        number % PROBE_EVERY == PROBE_EVERY - 1
    }

    fn learn(&self, written: &Written) {
        // Nothing that could panic is done under the lock.
        let mut pace = self
            .pace
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(on) = pace.learn(written, self.on.load(Ordering::Relaxed)) {
            self.on.store(on, Ordering::Relaxed);
        }
    }
}

/// What was seen so far. All times are of one worker for one byte, in seconds.
#[derive(Debug, Default)]
struct Pace {
    window: Window,
    chunks: u64,
    /// Of raw chunks, waiting and all: what writing without compression takes.
    raw: Option<f64>,
    /// Of compressing, alone.
    compress: Option<f64>,
    /// What is left of a byte.
    ratio: Option<f64>,
}

#[derive(Debug, Default, Clone, Copy)]
struct Window {
    raw_bytes: u64,
    raw_waited: f64,
    raw_worked: f64,
    tried_bytes: u64,
    tried_stored: u64,
    tried_compressed: f64,
    tried_all: f64,
}

impl Pace {
    /// Takes a chunk in; tells the new mode at the end of a window.
    fn learn(&mut self, written: &Written, on: bool) -> Option<bool> {
        let window = &mut self.window;
        match written.compressed {
            Some(compressed) => {
                window.tried_bytes += written.plain;
                window.tried_stored += written.stored;
                window.tried_compressed += compressed.as_secs_f64();
                window.tried_all += (written.waited + written.worked + compressed).as_secs_f64();
            }
            None => {
                window.raw_bytes += written.plain;
                window.raw_waited += written.waited.as_secs_f64();
                window.raw_worked += written.worked.as_secs_f64();
            }
        }
        self.chunks += 1;
        if !self.chunks.is_multiple_of(WINDOW_CHUNKS) {
            return None;
        }
        let window = std::mem::take(&mut self.window);
        Some(self.decide(&window, on))
    }

    fn decide(&mut self, window: &Window, on: bool) -> bool {
        let raw_all = window.raw_waited + window.raw_worked;
        if window.raw_bytes > 0 {
            self.raw = Some(raw_all / window.raw_bytes as f64);
        }
        if window.tried_bytes > 0 {
            self.compress = Some(window.tried_compressed / window.tried_bytes as f64);
            self.ratio = Some(window.tried_stored as f64 / window.tried_bytes as f64);
        }
        let (Some(raw), Some(compress), Some(ratio)) = (self.raw, self.compress, self.ratio) else {
            return on;
        };
        if on {
            // What it takes is seen, what it would take otherwise was seen last time.
            let with = if window.tried_bytes > 0 {
                window.tried_all / window.tried_bytes as f64
            } else {
                return on;
            };
            return raw >= with * WORTH_IT;
        }
        if raw_all == 0.0 || window.raw_waited / raw_all < WAITING {
            return false;
        }
        let worked = window.raw_worked / window.raw_bytes as f64;
        // The volume needs the time for what is left, the worker its own for all of it; whoever is slower tells the pace.
        let with = (raw * ratio).max(worked + compress);
        with < raw * WORTH_IT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Lets the controller write so many chunks to a volume that gives each worker so many MB/s, with so much
    /// time for compressing a MiB to this share. Tells whether it compresses in the end.
    fn settles(auto: &Auto, chunks: u64, volume_mb_s: f64, compress_ms: f64, ratio: f64) -> bool {
        for _ in 0..chunks {
            let compress = auto.compress_next();
            let stored = if compress { MIB as f64 * ratio } else { MIB as f64 };
            let (worked, compressed) = (0.0002, compress_ms / 1000.0);
            let busy = worked + if compress { compressed } else { 0.0 };
            // The volume works while the worker does.
            let waited = (stored / (volume_mb_s * 1e6) - busy).max(0.0);
            auto.learn(&Written {
                plain: MIB,
                stored: stored as u64,
                waited: Duration::from_secs_f64(waited),
                worked: Duration::from_secs_f64(worked),
                compressed: compress.then(|| Duration::from_secs_f64(compressed)),
            });
        }
        auto.on.load(Ordering::Relaxed)
    }

    #[test]
    fn it_compresses_for_a_slow_volume_only_and_only_what_gets_smaller() {
        for (volume_mb_s, compress_ms, ratio, expected) in [
            (100.0, 3.0, 0.4, true),
            (100.0, 3.0, 0.99, false),
            (1000.0, 3.0, 0.4, false),
            (1000.0, 0.1, 0.4, true),
            (10_000.0, 0.1, 0.1, false),
        ] {
            let settled = settles(&Auto::default(), 1000, volume_mb_s, compress_ms, ratio);
            assert_eq!(settled, expected, "{volume_mb_s} MB/s, {compress_ms} ms, {ratio}");
        }
    }

    #[test]
    fn it_changes_its_mind_when_the_volume_or_the_memory_does() {
        let auto = Auto::default();
        assert!(settles(&auto, 1000, 100.0, 3.0, 0.4));
        assert!(!settles(&auto, 2000, 5000.0, 3.0, 0.4), "the volume recovered");
        assert!(settles(&auto, 2000, 50.0, 3.0, 0.4), "and went down again");
        assert!(
            !settles(&auto, 2000, 50.0, 30.0, 1.0),
            "nothing gets smaller any more"
        );
    }

    #[test]
    fn ways_to_compress_are_read_as_they_are_told() {
        for compression in [
            Compression::None,
            Compression::Auto,
            Compression::Zstd(-7),
            Compression::Zstd(19),
        ] {
            assert_eq!(compression.to_string().parse(), Ok(compression));
        }
        assert_eq!("zstd".parse(), Ok(Compression::Zstd(1)));
        for bad in ["", "zst", "zstd:", "zstd:20", "zstd:-8", "zstd:fast", "gzip"] {
            let error = bad.parse::<Compression>().unwrap_err();
            assert!(error.to_string().contains("zstd:LEVEL"), "{error}");
        }
    }
}
