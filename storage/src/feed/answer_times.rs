//! How long answers took, in buckets that are close enough for percentiles and free of locks.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Eight to each doubling: a percentile is told at most an eighth too long.
const STEPS: u64 = 8;
/// From a microsecond to more than an hour.
const BUCKETS: usize = 33 * STEPS as usize;

/// Counts of answers by the time that they took.
pub(super) struct AnswerTimes(Box<[AtomicU64]>);

impl AnswerTimes {
    pub(super) fn new() -> Self {
        Self((0..BUCKETS).map(|_| AtomicU64::new(0)).collect())
    }

    pub(super) fn add(&self, time: Duration) {
        let bucket = bucket_of(time.as_micros().try_into().unwrap_or(u64::MAX));
        self.0[bucket].fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count(&self) -> u64 {
        self.0.iter().map(|bucket| bucket.load(Ordering::Relaxed)).sum()
    }

    /// The time that no more than `share` of the answers were within; `None` without any.
    pub(super) fn within(&self, share: f64) -> Option<Duration> {
        let count = self.count();
        let wanted = (count as f64 * share).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (index, bucket) in self.0.iter().enumerate() {
            seen += bucket.load(Ordering::Relaxed);
            if seen >= wanted && count > 0 {
                return Some(Duration::from_micros(end_of(index)));
            }
        }
        None
    }
}

fn bucket_of(micros: u64) -> usize {
    let doublings = u64::from(micros.max(STEPS).ilog2()) - u64::from(STEPS.ilog2());
    // Below `STEPS` every microsecond has a bucket; from there on the first bits behind the highest choose it.
    let index = doublings * STEPS + (micros >> doublings);
    usize::try_from(index).unwrap_or(BUCKETS).min(BUCKETS - 1)
}

/// The longest time in a bucket.
fn end_of(index: usize) -> u64 {
    let index = index as u64;
    let doublings = (index / STEPS).saturating_sub(1);
    let step = index - doublings * STEPS;
    ((step + 1) << doublings) - 1
}

impl std::fmt::Debug for AnswerTimes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "AnswerTimes({})", self.count())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_never_told_too_short_and_at_most_an_eighth_too_long() {
        for micros in (0..10_000).chain([123_456, 7_654_321, 3_600_000_000]) {
            let times = AnswerTimes::new();
            times.add(Duration::from_micros(micros));
            let told = times.within(0.99).unwrap().as_micros() as u64;
            assert!(
                (micros..=micros + micros / 8).contains(&told),
                "{micros} is told as {told}"
            );
        }
    }

    #[test]
    fn the_slow_ones_show_in_the_high_percentile_alone() {
        let times = AnswerTimes::new();
        assert_eq!(times.within(0.5), None);
        for _ in 0..98 {
            times.add(Duration::from_micros(5));
        }
        times.add(Duration::from_millis(50));
        times.add(Duration::from_millis(50));
        assert_eq!(times.within(0.5), Some(Duration::from_micros(5)));
        assert!(times.within(0.99).unwrap() >= Duration::from_millis(50));
        assert_eq!(times.count(), 100);
    }
}
