//! Some threads, one row of chunks.
//!
//! Workers take chunks in order, one at a time, so that writes go forward over the disk and whoever
//! is fast does more. They look at the cancel flag before each chunk. When one fails the others end
//! with the chunk they have; among several failures the one with the lowest number is told, and
//! since chunks are taken in order it is truly the first.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use super::ImageError;
use crate::Run;

/// Does `work` for every number below `count` and returns the results in order. Each worker has its
/// own state from `begin`, and `end` is the last that is done with it, also after a failure.
pub(crate) fn for_each_chunk<S, R: Send>(
    run: &Run<'_>,
    count: usize,
    begin: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize) -> Result<R, ImageError> + Sync,
    end: impl Fn(S) -> Result<(), ImageError> + Sync,
) -> Result<Vec<R>, ImageError> {
    let next = AtomicUsize::new(0);
    let failed = AtomicBool::new(false);
    let worker = || {
        let mut state = begin();
        let mut results = Vec::new();
        while !failed.load(Ordering::Relaxed) {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                break;
            }
            let result = if run.is_cancelled() {
                Err(ImageError::Cancelled)
            } else {
                work(&mut state, index)
            };
            if result.is_err() {
                failed.store(true, Ordering::Relaxed);
            }
            results.push((index, result));
        }
        if let Err(error) = end(state) {
            failed.store(true, Ordering::Relaxed);
            // Of no number, so after all that have one.
            results.push((usize::MAX, Err(error)));
        }
        results
    };
    let threads = run.threads.clamp(1, count.max(1));
    let mut results: Vec<_> = thread::scope(|scope| {
        let workers: Vec<_> = (1..threads).map(|_| scope.spawn(worker)).collect();
        // The calling thread works too.
        let mut results = worker();
        for worker in workers {
            match worker.join() {
                Ok(others) => results.extend(others),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        results
    });
    results.sort_unstable_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ByteCount, Progress};

    fn run_with<R: Send>(
        threads: usize,
        cancelled: bool,
        work: impl Fn(usize) -> Result<R, ImageError> + Sync,
    ) -> Result<Vec<R>, ImageError> {
        let progress = Progress::new(ByteCount::ZERO);
        let cancelled = AtomicBool::new(cancelled);
        for_each_chunk(
            &Run {
                threads,
                progress: &progress,
                cancelled: &cancelled,
            },
            100,
            || (),
            |(), index| work(index),
            |()| Ok(()),
        )
    }

    #[test]
    fn results_come_in_order_however_many_threads_work() {
        for threads in [0, 1, 3, 500] {
            assert_eq!(
                run_with(threads, false, Ok).unwrap(),
                (0..100).collect::<Vec<_>>()
            );
        }
    }

    #[test]
    fn the_first_failure_is_told_not_the_fastest() {
        let error = run_with(4, false, |index| -> Result<(), _> {
            if index < 10 {
                return Ok(());
            }
            Err(ImageError::Mismatch {
                block: index.to_string(),
                mismatch: super::super::Mismatch::Missing,
            })
        });
        assert!(matches!(error, Err(ImageError::Mismatch { block, .. }) if block == "10"));
    }

    #[test]
    fn a_cancel_ends_the_work_before_the_next_chunk() {
        let worked = AtomicUsize::new(0);
        let result = run_with(4, true, |_| {
            worked.fetch_add(1, Ordering::Relaxed);
            Ok(())
        });
        assert!(matches!(result, Err(ImageError::Cancelled)));
        assert_eq!(worked.into_inner(), 0);
    }
}
