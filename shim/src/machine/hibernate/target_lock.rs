//! Waiting for whoever holds the image's target, for as long as was said.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use dormouse_storage::ImageError;

use crate::error::{Code, Failure};
use crate::vm::lock_holder::holder;

/// How often it is tried. A lock has no way to be waited for with a deadline.
const POLL: Duration = Duration::from_millis(50);

/// Does `take`, again and again while somebody holds the target, until `patience` ends or `cancelled` is raised. Blocks.
///
/// # Errors
///
/// Code 5 after the wait, 3 without any; what `take` says else.
pub fn taken_in_time<T>(
    target: &Path,
    patience: Duration,
    cancelled: &AtomicBool,
    mut take: impl FnMut() -> Result<T, ImageError>,
) -> Result<T, Failure> {
    let deadline = Instant::now() + patience;
    loop {
        let error = match take() {
            Err(error @ (ImageError::Locked { .. } | ImageError::DeviceInUse { .. })) => error,
            other => return Ok(other?),
        };
        if cancelled.load(Ordering::Relaxed) {
            return Err(ImageError::Cancelled.into());
        }
        if Instant::now() >= deadline {
            let mut failure = Failure::from(error);
            if let Some(pid) = holder(target) {
                failure.message.push_str(&format!(" (process {pid})"));
            }
            if patience > Duration::ZERO {
                failure.code = Code::TimedOut;
                failure = failure.while_doing(&format!("waited {}", humantime::format_duration(patience)));
            }
            return Err(failure);
        }
        #[allow(
            clippy::disallowed_methods,
            reason = "a worker thread polls a lock until its deadline"
        )]
        std::thread::sleep(POLL);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn locked() -> ImageError {
        let path = "/image".into();
        ImageError::Locked { path }
    }

    #[test]
    fn a_target_that_is_held_is_refused_at_once_or_after_the_time_that_was_said() {
        let (no, path) = (AtomicBool::new(false), Path::new("/image"));
        for (patience_ms, code) in [(0, Code::Refused), (60, Code::TimedOut)] {
            let patience = Duration::from_millis(patience_ms);
            let refused = taken_in_time::<()>(path, patience, &no, || Err(locked()));
            assert_eq!(refused.unwrap_err().code, code);
        }
    }

    #[test]
    fn a_target_that_comes_free_is_taken_and_a_cancel_ends_the_wait() {
        let (no, path) = (AtomicBool::new(false), Path::new("/image"));
        let mut tries = 0;
        let taken = taken_in_time(path, Duration::from_secs(60), &no, || {
            tries += 1;
            if tries < 3 { Err(locked()) } else { Ok(tries) }
        });
        assert_eq!(taken, Ok(3));
        let cancelled = AtomicBool::new(true);
        let refused = taken_in_time::<()>(path, Duration::from_secs(60), &cancelled, || Err(locked()));
        assert_eq!(refused.unwrap_err().code, Code::Cancelled);
    }
}
