//! The signals that ask a program to end.

use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;

use crate::error::{Code, Failure};

/// A watch for SIGTERM, SIGINT and SIGHUP. None is lost between two looks, so one watch has to serve a whole wait.
pub struct Signals {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    hangup: tokio::signal::unix::Signal,
}

impl Signals {
    /// Watches from now on; from now on they end this process no more by themselves.
    pub fn watch() -> Result<Self, Failure> {
        let watch = |kind| {
            signal(kind)
                .map_err(|error| Failure::new(Code::Internal, format!("cannot watch for signals: {error}")))
        };
        Ok(Self {
            terminate: watch(SignalKind::terminate())?,
            interrupt: watch(SignalKind::interrupt())?,
            hangup: watch(SignalKind::hangup())?,
        })
    }

    /// The same watch for several who wait, each with a clone of the receiver: a change is a signal, whichever it is.
    pub fn for_several(mut self) -> watch::Receiver<()> {
        let (tell, told) = watch::channel(());
        tokio::spawn(async move {
            loop {
                self.next().await;
                // Nobody waits any more.
                if tell.send(()).is_err() {
                    return;
                }
            }
        });
        told
    }

    /// The next signal.
    pub async fn next(&mut self) -> Signal {
        tokio::select! {
            _ = self.terminate.recv() => Signal::TERM,
            _ = self.interrupt.recv() => Signal::INT,
            _ = self.hangup.recv() => Signal::HUP,
        }
    }
}
