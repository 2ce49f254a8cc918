//! Subscriptions to what QEMU tells unasked.
//!
//! A subscription holds a bounded number of events. One that is read too slowly loses the oldest
//! events and is told how many; it never slows down the connection or another subscription. Events
//! are hints to look, not a record: after [`Heard::Lagged`], as after a new connection, the state
//! must be queried again.
//!
//! On one connection QEMU sends an event that a command caused before that command's reply. The
//! order is kept: such an event is in every subscription by the time the future of the command
//! resolves.

use std::sync::Arc;

use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;

use crate::wire::message::Event;

/// A subscription to the events of one connection, made by
/// [`Client::events`](crate::Client::events).
///
/// It does not keep the connection open.
#[derive(Debug)]
pub struct Events {
    receiver: broadcast::Receiver<Arc<Event>>,
}

/// What a subscription tells.
#[derive(Clone, Debug, PartialEq)]
pub enum Heard {
    /// QEMU sent this event.
    Event(Event),
    /// This many events were lost here because the subscription was not read in time.
    Lagged(u64),
    /// The connection is gone; nothing more will be heard.
    Closed,
}

impl Events {
    pub(crate) fn new(receiver: broadcast::Receiver<Arc<Event>>) -> Self {
        Self { receiver }
    }

    /// Waits for the next event. Safe to drop: an event that was not returned is returned by the
    /// next call.
    pub async fn next(&mut self) -> Heard {
        match self.receiver.recv().await {
            Ok(event) => Heard::Event(Arc::unwrap_or_clone(event)),
            Err(RecvError::Lagged(missed)) => Heard::Lagged(missed),
            Err(RecvError::Closed) => Heard::Closed,
        }
    }
}
