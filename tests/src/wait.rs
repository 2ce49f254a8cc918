//! Waiting for something to be so, with a deadline.

use std::time::{Duration, Instant};

/// How long a test waits for what should take a second: slow machines are no failure.
pub const PATIENCE: Duration = Duration::from_secs(60);

const PAUSE_BETWEEN_LOOKS: Duration = Duration::from_millis(10);

/// Looks every 10 ms until `look` returns something, and panics with `what` after [`PATIENCE`].
pub fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(seen) = look() {
            return seen;
        }
        assert!(Instant::now() < deadline, "waited {PATIENCE:?} for {what}");
        pause();
    }
}

/// Whether `look` sees it within `limit`.
pub fn within(limit: Duration, mut look: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + limit;
    loop {
        if look() {
            return true;
        }
        if Instant::now() > deadline {
            return false;
        }
        pause();
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "the one place where the laboratory polls, between two looks before a deadline"
)]
fn pause() {
    std::thread::sleep(PAUSE_BETWEEN_LOOKS);
}
