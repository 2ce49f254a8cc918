//! What the effects of all machines need: blocking work off the async threads, and one way to measure time.

use std::time::Duration;

use tokio::task::JoinHandle;

use crate::error::{Code, Failure};

/// Runs blocking work on a thread of its own.
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    joined(&mut tokio::task::spawn_blocking(work)).await
}

/// Waits for work on a thread of its own.
pub async fn joined<T>(task: &mut JoinHandle<Result<T, Failure>>) -> Result<T, Failure> {
    task.await.unwrap_or_else(|error| {
        Err(Failure::new(
            Code::Internal,
            format!("a worker ended in panic: {error}"),
        ))
    })
}

/// A duration as people and JSON are told it.
pub fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// A machine asks for its effects in one order only, so this is a bug.
pub fn out_of_order() -> Failure {
    Failure::new(
        Code::Internal,
        "an effect was asked for before the one that it needs",
    )
}
