//! Telling an effect under way to end: seen by async code as a future and by worker threads as a flag.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::watch;

use crate::error::{Code, Failure};

/// A request to end, which once made stays.
#[derive(Debug, Clone)]
pub struct Interrupt {
    flag: Arc<AtomicBool>,
    raised: watch::Sender<bool>,
}

impl Interrupt {
    /// Not raised yet.
    pub fn new() -> Self {
        Self {
            flag: Arc::new(AtomicBool::new(false)),
            raised: watch::Sender::new(false),
        }
    }

    /// Makes the request.
    pub fn raise(&self) {
        self.flag.store(true, Ordering::Relaxed);
        self.raised.send_replace(true);
    }

    /// For worker threads.
    pub fn flag(&self) -> &AtomicBool {
        &self.flag
    }

    /// Whether the request was made.
    pub fn is_raised(&self) -> bool {
        self.flag.load(Ordering::Relaxed)
    }

    /// Runs `work` until its end or until the request is made.
    pub async fn or<T>(&self, work: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
        let mut raised = self.raised.subscribe();
        tokio::select! {
            result = work => result,
            // The sender lives in `self`, so waiting cannot fail.
            _ = raised.wait_for(|raised| *raised) => Err(Failure::new(Code::Cancelled, "interrupted")),
        }
    }
}
