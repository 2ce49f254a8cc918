//! What can be watched of the conversation, through `tracing`.
//!
//! | target | level | what |
//! | --- | --- | --- |
//! | `dormouse_qmp::trace` | TRACE | every line sent and received, verbatim; of descriptors their number only |
//! | `dormouse_qmp::command` | DEBUG | a span for each command: `name`, `id`, `outcome`, `elapsed_us` |
//!
//! Both are off unless a subscriber asks for them, with `RUST_LOG=dormouse_qmp::trace=trace` for
//! example, and then cost one load and one branch for each line. Lines are shown as they are on the
//! wire, with whatever secrets an argument carries.

use tokio::time::Instant;
use tracing::{Span, debug, debug_span, field, trace};

/// Shows a line that is about to be sent.
pub(crate) fn sent(peer: &str, line: &[u8], descriptors: usize) {
    trace!(
        target: "dormouse_qmp::trace",
        peer,
        descriptors,
        line = %String::from_utf8_lossy(line.trim_ascii_end()),
        "sent"
    );
}

/// Shows a line that was received.
pub(crate) fn received(peer: &str, line: &[u8]) {
    trace!(
        target: "dormouse_qmp::trace",
        peer,
        line = %String::from_utf8_lossy(line),
        "received"
    );
}

/// The span of one command. It ends with the outcome that was told, or, when its future was dropped
/// before, as `withdrawn`.
pub(crate) struct CommandSpan {
    span: Span,
    /// Absent when nobody watches.
    begun: Option<Instant>,
    outcome: &'static str,
}

impl CommandSpan {
    pub(crate) fn begin(name: &str, id: u64) -> Self {
        let span = debug_span!(
            target: "dormouse_qmp::command",
            "command",
            name,
            id,
            outcome = field::Empty,
            elapsed_us = field::Empty,
        );
        Self {
            begun: (!span.is_disabled()).then(Instant::now),
            span,
            outcome: "withdrawn",
        }
    }

    pub(crate) fn end(mut self, outcome: &'static str) {
        self.outcome = outcome;
    }
}

impl Drop for CommandSpan {
    fn drop(&mut self) {
        if let Some(begun) = self.begun {
            self.span.record("outcome", self.outcome);
            let elapsed_us = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
            self.span.record("elapsed_us", elapsed_us);
            debug!(target: "dormouse_qmp::command", parent: &self.span, "ended");
        }
    }
}
