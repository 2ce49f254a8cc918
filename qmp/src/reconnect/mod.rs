//! Keeps a client connected to the monitor at an address, whatever happens to the connection.
//!
//! ```text
//!   Monitor ◄──standing (watch)──────┐
//!   Reports ◄──reports (broadcast)── task ──► attachment (pure): try, wait, hold, give up
//!                                     └─────► Client: one for each connection
//! ```
//!
//! A connection is lost when QEMU ends, when somebody else takes the monitor after a moment of
//! absence, or when a proxy between is restarted. The machine goes on meanwhile, and its events are
//! heard by nobody. So a new connection is more than a new socket: the state is queried anew, and
//! subscribers hear [`Report::Lost`], then [`Report::Back`] with the state as it is now, and events
//! from there on.
//!
//! Guarantees:
//!
//! - Between two connections there is always a `Lost` and, if it comes to that, a `Back`. An event
//!   of one connection is never told as one of another.
//! - The events are subscribed to before the state is queried. What happened up to then is in the
//!   snapshot; what happened since is told after it, and may be in it already.
//! - A command in flight when the connection is lost fails with
//!   [`CommandError::ConnectionLost`]. It is never reported as a success, and never sent again:
//!   whether QEMU executed it, the snapshot may tell. A client belongs to its connection; after the
//!   gap there is another one.
//! - A late answer is no loss. Only the socket ends a connection, and only the process, told by
//!   [`Monitor::process_ended`], or the limit of [`BackOff`] ends the attempts.
//! - Everything is bounded: the reports a subscriber leaves unread (it is told how many it lost),
//!   the rate of the attempts, the length of a gap.

mod attachment;
mod snapshot;

use std::sync::Arc;

use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, watch};
use tokio::time::{Instant, sleep_until, timeout_at};
use tracing::{debug, warn};

pub use attachment::BackOff;
pub use snapshot::Snapshot;

use crate::address::Address;
use crate::client::{Client, ConnectOptions};
use crate::error::{CommandError, ConnectError, ConnectionLoss};
use crate::events::{Events, Heard};
use crate::wire::message::Event;
use attachment::{Attachment, Step};

/// How to stay connected.
#[derive(Clone, Debug)]
pub struct MonitorOptions {
    /// For each connection.
    pub connect: ConnectOptions,
    /// Between connections.
    pub back_off: BackOff,
    /// How many reports a subscription holds before it starts to lose the oldest, rounded up to a
    /// power of two.
    pub report_capacity: usize,
}

impl Default for MonitorOptions {
    fn default() -> Self {
        Self {
            connect: ConnectOptions::default(),
            back_off: BackOff::default(),
            report_capacity: 1024,
        }
    }
}

/// A monitor that is connected to again and again. Clones are handles on the same; with the last
/// one the connection is let go of.
#[derive(Clone, Debug)]
pub struct Monitor {
    standing: watch::Receiver<Standing>,
    reports: broadcast::WeakSender<Arc<Report>>,
    process_ended: watch::Sender<bool>,
}

/// How things stand.
#[derive(Clone, Debug)]
pub enum Standing {
    /// Not connected; attempts are made.
    Gap,
    /// Connected.
    Attached(Attached),
    /// Not connected, and never again.
    GivenUp(GivenUp),
}

/// A connection, with the state at its beginning.
#[derive(Clone, Debug)]
pub struct Attached {
    /// The client of this connection. It may have lost it by the time it is used, and says so then.
    pub client: Client,
    /// The state when the connection was made.
    pub snapshot: Arc<Snapshot>,
}

/// What a subscriber hears.
#[derive(Clone, Debug)]
pub enum Report {
    /// QEMU sent this event.
    Event(Event),
    /// This many events or reports were lost here because they were not read in time. A gap may be
    /// among them: look at [`Monitor::standing`] and query.
    Lagged(u64),
    /// The connection is gone, and with it all events until it is back.
    Lost {
        /// What ended it.
        why: ConnectionLoss,
    },
    /// There is a connection, the first one or a new one.
    Back {
        /// The state as it is now.
        snapshot: Arc<Snapshot>,
    },
    /// There will be no connection any more. Repeated for whoever goes on asking.
    GivenUp(GivenUp),
}

/// Why an attempt to attach failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AttachError {
    /// No connection came about.
    #[error("cannot connect")]
    Connect(#[from] ConnectError),
    /// The state could not be queried.
    #[error("cannot query the state")]
    Snapshot(#[from] CommandError),
    /// The gap had lasted too long before the attempt was through.
    #[error("the attempt took too long")]
    Unfinished,
}

/// Why no more attempts are made.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GivenUp {
    /// [`Monitor::process_ended`] was called.
    #[error("the process behind the monitor is gone")]
    ProcessEnded,
    /// The gap lasted too long, or the next attempt would not have fitted into it.
    #[error("no connection came about within {after:?}")]
    Deadline {
        /// How long a gap may last.
        after: std::time::Duration,
        /// The last attempt.
        #[source]
        last: Arc<AttachError>,
    },
    /// The address was a descriptor, and its one connection is gone or did not come about.
    #[error("the address is good for one connection")]
    NotReconnectable {
        /// The attempt, when it failed.
        #[source]
        last: Option<Arc<AttachError>>,
    },
    /// The last [`Monitor`] was dropped.
    #[error("the monitor was let go of on this side")]
    Detached,
}

impl Monitor {
    /// Starts to connect to the monitor at an address, and to stay connected. Must be called within
    /// a tokio runtime.
    pub fn attach(address: impl Into<Address>, options: MonitorOptions) -> Self {
        let address = address.into();
        let (told, standing) = watch::channel(Standing::Gap);
        let (reports, _) = broadcast::channel(options.report_capacity.max(1));
        let (process_ended, ended) = watch::channel(false);
        let weak_reports = reports.downgrade();
        let now = Instant::now().into_std();
        let keeper = Keeper {
            attachment: Attachment::new(options.back_off, address.again().is_some(), now),
            address: Some(address),
            connect: options.connect,
            held: None,
            told,
            reports,
        };
        tokio::spawn(keeper.run(ended));
        Self {
            standing,
            reports: weak_reports,
            process_ended,
        }
    }

    /// How things stand now.
    pub fn standing(&self) -> Standing {
        self.standing.borrow().clone()
    }

    /// The connection there is, or the next one. Waits through a gap, and no longer than a gap may
    /// last.
    pub async fn attached(&self) -> Result<Attached, GivenUp> {
        let mut standing = self.standing.clone();
        match standing
            .wait_for(|standing| !matches!(standing, Standing::Gap))
            .await
        {
            Ok(settled) => match &*settled {
                Standing::Attached(attached) => Ok(attached.clone()),
                Standing::GivenUp(reason) => Err(reason.clone()),
                Standing::Gap => Err(GivenUp::Detached),
            },
            // The task went with its runtime.
            Err(_) => Err(GivenUp::Detached),
        }
    }

    /// Subscribes to what happens from now on. Subscribe first and look at
    /// [`standing`](Self::standing) then, and nothing falls between.
    pub fn subscribe(&self) -> Reports {
        let receiver = match self.reports.upgrade() {
            Some(reports) => reports.subscribe(),
            // Given up. A channel without a sender leads to the reason.
            None => broadcast::channel(1).1,
        };
        Reports {
            receiver,
            standing: self.standing.clone(),
        }
    }

    /// Tells that QEMU's process has ended, which its owner knows best. A gap ends at once. A
    /// connection that still stands is read to its end first.
    pub fn process_ended(&self) {
        self.process_ended.send_replace(true);
    }
}

/// A subscription made by [`Monitor::subscribe`]. It does not keep the connection.
#[derive(Debug)]
pub struct Reports {
    receiver: broadcast::Receiver<Arc<Report>>,
    standing: watch::Receiver<Standing>,
}

impl Reports {
    /// Waits for the next report. Safe to drop: a report that was not returned is returned by the
    /// next call.
    pub async fn next(&mut self) -> Report {
        match self.receiver.recv().await {
            Ok(report) => Arc::unwrap_or_clone(report),
            Err(RecvError::Lagged(missed)) => Report::Lagged(missed),
            // The reason is told before the channel ends.
            Err(RecvError::Closed) => match &*self.standing.borrow() {
                Standing::GivenUp(reason) => Report::GivenUp(reason.clone()),
                Standing::Gap | Standing::Attached(_) => Report::GivenUp(GivenUp::Detached),
            },
        }
    }
}

/// The task behind a [`Monitor`].
struct Keeper {
    attachment: Attachment,
    /// Absent when it was good for one connection and has been used.
    address: Option<Address>,
    connect: ConnectOptions,
    held: Option<(Client, Events)>,
    told: watch::Sender<Standing>,
    reports: broadcast::Sender<Arc<Report>>,
}

impl Keeper {
    async fn run(mut self, mut ended: watch::Receiver<bool>) {
        let reason = loop {
            let step = self.attachment.step();
            if let Step::GiveUp(reason) = step {
                break reason;
            }
            tokio::select! {
                () = self.take(step) => {}
                changed = ended.changed() => match changed {
                    Ok(()) => self.attachment.process_ended(),
                    Err(_) => self.attachment.detach(),
                },
            }
        };
        debug!(%reason, "no longer attached to the monitor");
        self.told.send_replace(Standing::GivenUp(reason));
    }

    /// Takes a step, or a part of it. May be dropped at any point where it waits: an attempt is given
    /// up then, an event is not lost.
    async fn take(&mut self, step: Step) {
        match step {
            Step::Attempt { until } => self.attempt(Instant::from_std(until)).await,
            Step::Wait { until } => {
                sleep_until(Instant::from_std(until)).await;
                self.attachment.advance(Instant::now().into_std());
            }
            Step::Hold => self.hear().await,
            Step::GiveUp(_) => {}
        }
    }

    async fn attempt(&mut self, until: Instant) {
        let again = self.address.as_ref().and_then(Address::again);
        let Some(address) = again.or_else(|| self.address.take()) else {
            return self.attachment.detach();
        };
        let attempt = timeout_at(until, attach(address, self.connect.clone())).await;
        let now = Instant::now().into_std();
        match attempt.unwrap_or(Err(AttachError::Unfinished)) {
            Ok((client, events, snapshot)) => {
                self.attachment.attached(now);
                let snapshot = Arc::new(snapshot);
                self.told.send_replace(Standing::Attached(Attached {
                    client: client.clone(),
                    snapshot: Arc::clone(&snapshot),
                }));
                self.held = Some((client, events));
                self.report(Report::Back { snapshot });
            }
            Err(error) => {
                debug!(%error, "an attempt to attach failed");
                self.attachment.failed(now, error);
            }
        }
    }

    async fn hear(&mut self) {
        let Some((client, events)) = &mut self.held else {
            return self.attachment.detach();
        };
        let report = match events.next().await {
            Heard::Event(event) => Report::Event(event),
            Heard::Lagged(missed) => Report::Lagged(missed),
            Heard::Closed => {
                let why = client.closed().await;
                warn!(%why, "the monitor connection is lost");
                self.held = None;
                self.attachment.lost(Instant::now().into_std());
                self.told.send_replace(Standing::Gap);
                Report::Lost { why }
            }
        };
        self.report(report);
    }

    fn report(&self, report: Report) {
        // That nobody has subscribed is no failure.
        let _ = self.reports.send(Arc::new(report));
    }
}

/// Connects and queries the state.
///
/// A QEMU whose main loop stalls answers no query in time, and is asked again: it is there.
async fn attach(
    address: Address,
    options: ConnectOptions,
) -> Result<(Client, Events, Snapshot), AttachError> {
    let client = Client::connect(address, options).await?;
    let events = client.events();
    loop {
        match Snapshot::query(&client).await {
            Ok(snapshot) => return Ok((client, events, snapshot)),
            Err(error @ CommandError::Timeout { .. }) if !client.is_closed() => {
                debug!(%error, "asking again");
            }
            Err(error) => return Err(error.into()),
        }
    }
}
