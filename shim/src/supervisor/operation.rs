//! One operation as the world sees it: the machine's words turned into a document that watchers follow.

use std::sync::Arc;
use std::time::Duration;

use dormouse_qmp::Client;
use dormouse_storage::Progress;
use tokio::sync::{mpsc, watch};
use uuid::Uuid;

use crate::api::types::{Hibernated, Operation, Problem};
use crate::error::Failure;
use crate::machine::hibernate::machine::Phase;
use crate::machine::hibernate::runner::{Cancel, Told, hibernate};
use crate::machine::hibernate::{Report, Request};

/// How often the byte counts are brought up to date. People look, nobody measures with it.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Cancels that may wait for their answer.
const CANCEL_QUEUE: usize = 8;

/// An operation that has been prepared: watch it, cancel it, and [`drive`](Prepared::drive) it.
#[derive(Debug)]
pub struct Prepared {
    document: watch::Sender<Operation>,
    cancels: mpsc::Receiver<Cancel>,
    cancel: mpsc::Sender<Cancel>,
}

impl Prepared {
    /// A new operation, not begun.
    pub fn new() -> Self {
        let (cancel, cancels) = mpsc::channel(CANCEL_QUEUE);
        let document = watch::Sender::new(Operation {
            id: Uuid::new_v4(),
            version: 1,
            phase: Phase::Preflight,
            choice: None,
            storage: None,
            done_bytes: 0,
            total_bytes: 0,
            result: None,
            error: None,
        });
        Self {
            document,
            cancels,
            cancel,
        }
    }

    /// Follows the operation.
    pub fn watch(&self) -> watch::Receiver<Operation> {
        self.document.subscribe()
    }

    /// Where cancels go.
    pub fn cancel(&self) -> mpsc::Sender<Cancel> {
        self.cancel.clone()
    }

    /// Hibernates, publishing on the way. The document's last version holds the result or the error.
    pub async fn drive(self, client: Client, request: Request) -> Result<Report, Failure> {
        let Self {
            document,
            cancels,
            cancel,
        } = self;
        let id = document.borrow().id;
        let told = watch::Sender::new(Told {
            phase: Phase::Preflight,
            choice: None,
            storage: None,
            progress: Arc::new(Progress::default()),
        });
        let mut news = told.subscribe();
        let mut outcome = std::pin::pin!(hibernate(id, client, request, told, cancels));
        let outcome = loop {
            tokio::select! {
                outcome = &mut outcome => break outcome,
                // The machine drops its end when it is over; the outcome says the rest.
                Ok(()) = news.changed() => {}
                () = tokio::time::sleep(PROGRESS_INTERVAL) => {}
            }
            let told = news.borrow_and_update().clone();
            publish(&document, |operation| {
                operation.phase = told.phase;
                operation.choice = told.choice;
                operation.storage = told.storage.map(Into::into);
                operation.done_bytes = told.progress.done().0;
                operation.total_bytes = told.progress.total().0;
            });
        };
        drop(cancel);
        let phase = news.borrow().phase;
        publish(&document, |operation| {
            operation.phase = phase;
            match &outcome {
                Ok(report) => operation.result = Some(Hibernated::from(report.clone())),
                Err(failure) => operation.error = Some(Problem::from(failure)),
            }
        });
        outcome
    }
}

/// Changes the document; a new version only where something is new.
fn publish(document: &watch::Sender<Operation>, change: impl FnOnce(&mut Operation)) {
    document.send_if_modified(|operation| {
        let before = operation.clone();
        change(operation);
        let is_new = *operation != before;
        operation.version += u64::from(is_new);
        is_new
    });
}
