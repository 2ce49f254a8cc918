//! One operation as the world sees it: the machine's words turned into a document that watchers follow.

use std::sync::Arc;
use std::time::Duration;

use dormouse_qmp::Client;
use dormouse_storage::Progress;
use tokio::sync::{mpsc, watch};
use uuid::Uuid;

use crate::api::types::{Ending, Operation, OperationKind, Problem};
use crate::error::Failure;
use crate::machine::hibernate::machine::Aim;
use crate::machine::hibernate::runner::{Cancel, Told};
use crate::machine::volume::runner::Heard;
use crate::machine::volume::word::Word;
use crate::machine::{hibernate, suspend, volume};

/// How often the byte counts are brought up to date. People look, nobody measures with it.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// Cancels that may wait for their answer.
const CANCEL_QUEUE: usize = 8;

/// An operation that has been prepared: watch it, cancel it, and then do it.
#[derive(Debug)]
pub struct Prepared {
    document: watch::Sender<Operation>,
    cancels: mpsc::Receiver<Cancel>,
    cancel: mpsc::Sender<Cancel>,
    words: mpsc::Receiver<Word>,
    word: mpsc::Sender<Word>,
}

impl Prepared {
    /// A new operation, not begun.
    pub fn new(id: Uuid, kind: OperationKind) -> Self {
        let (cancel, cancels) = mpsc::channel(CANCEL_QUEUE);
        let (go_on, words) = mpsc::channel(CANCEL_QUEUE);
        let document = watch::Sender::new(Operation {
            id,
            kind,
            version: 1,
            phase: word(hibernate::machine::Phase::Preflight),
            choice: None,
            storage: None,
            done_bytes: 0,
            total_bytes: 0,
            volumes: Vec::new(),
            waiting: None,
            result: None,
            error: None,
        });
        Self {
            document,
            cancels,
            cancel,
            words,
            word: go_on,
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

    /// Where words go that what waits for them may go on.
    pub fn word(&self) -> mpsc::Sender<Word> {
        self.word.clone()
    }

    /// Hibernates or takes a snapshot, publishing on the way. The document's last version holds the result or the error.
    pub async fn hibernate(
        self,
        client: Client,
        request: hibernate::Request,
    ) -> Result<hibernate::Report, Failure> {
        let Self {
            document,
            cancels,
            cancel,
            ..
        } = self;
        let id = document.borrow().id;
        let told = watch::Sender::new(Told {
            phase: hibernate::machine::Phase::Preflight,
            choice: None,
            storage: None,
            progress: Arc::new(Progress::default()),
        });
        let mut news = told.subscribe();
        let mut outcome = std::pin::pin!(hibernate::runner::hibernate(id, client, request, told, cancels));
        let outcome = loop {
            tokio::select! {
                outcome = &mut outcome => break outcome,
                // The machine drops its end when it is over; the outcome says the rest.
                Ok(()) = news.changed() => {}
                () = tokio::time::sleep(PROGRESS_INTERVAL) => {}
            }
            let told = news.borrow_and_update().clone();
            publish(&document, |operation| {
                operation.phase = word(told.phase);
                operation.choice = told.choice;
                operation.storage = told.storage.map(Into::into);
                operation.done_bytes = told.progress.done().0;
                operation.total_bytes = told.progress.total().0;
            });
        };
        drop(cancel);
        let phase = news.borrow().phase;
        let ending = |report: &hibernate::Report| match report.aim {
            Aim::Hibernate => Ending::Hibernated(Box::new(report.clone().into())),
            Aim::Snapshot { .. } => Ending::Snapshot(Box::new(report.clone().into())),
        };
        conclude(&document, phase, outcome.as_ref().map(ending));
        outcome
    }

    /// Suspends to disk, in the same way.
    pub async fn suspend_to_disk(
        self,
        client: Client,
        request: suspend::Request,
    ) -> Result<suspend::Report, Failure> {
        let Self {
            document,
            cancels,
            cancel,
            ..
        } = self;
        let told = watch::Sender::new(suspend::machine::Phase::Preflight);
        let mut news = told.subscribe();
        let mut outcome = std::pin::pin!(suspend::runner::suspend(client, request, told, cancels));
        let outcome = loop {
            tokio::select! {
                outcome = &mut outcome => break outcome,
                Ok(()) = news.changed() => {}
            }
            let phase = *news.borrow_and_update();
            publish(&document, |operation| operation.phase = word(phase));
        };
        drop(cancel);
        let phase = *news.borrow();
        let ending = |report: &suspend::Report| Ending::SuspendedToDisk(report.clone().into());
        conclude(&document, phase, outcome.as_ref().map(ending));
        outcome
    }

    /// Moves volumes, in the same way.
    pub async fn move_volumes(
        self,
        client: Client,
        request: volume::Request,
    ) -> Result<volume::Report, Failure> {
        let Self {
            document,
            cancels,
            words,
            // Held to the end: what nobody can be asked for any more would be waited for in vain.
            cancel: _cancel,
            word: _word,
        } = self;
        let id = document.borrow().id;
        let told = watch::Sender::new(volume::runner::Told {
            phase: volume::machine::Phase::Preflight,
            volumes: Vec::new(),
            waiting: None,
        });
        let mut news = told.subscribe();
        let heard = Heard { cancels, words };
        let mut outcome = std::pin::pin!(volume::runner::move_volumes(id, client, request, told, heard));
        let outcome = loop {
            tokio::select! {
                outcome = &mut outcome => break outcome,
                Ok(()) = news.changed() => {}
            }
            publish_volumes(&document, &news.borrow_and_update());
        };
        publish_volumes(&document, &news.borrow());
        let phase = news.borrow().phase;
        let ending = |report: &volume::Report| Ending::VolumesMoved(report.clone().into());
        conclude(&document, phase, outcome.as_ref().map(ending));
        outcome
    }

    /// Lets a disk grow. That takes moments, and is not cancelled.
    pub async fn grow_volume(
        self,
        client: Client,
        request: volume::grow::Request,
    ) -> Result<volume::grow::Grown, Failure> {
        let Self { document, .. } = self;
        let outcome = volume::grow::grow(&client, &request).await;
        let phase = match outcome {
            Ok(_) => volume::grow::Phase::Grown,
            Err(_) => volume::grow::Phase::Failed,
        };
        let ending = |grown: &volume::grow::Grown| Ending::VolumeGrown(grown.clone().into());
        conclude(&document, phase, outcome.as_ref().map(ending));
        outcome
    }
}

fn publish_volumes(document: &watch::Sender<Operation>, told: &volume::runner::Told) {
    publish(document, |operation| {
        operation.phase = word(told.phase);
        operation.done_bytes = told.volumes.iter().map(|volume| volume.done_bytes).sum();
        operation.total_bytes = told.volumes.iter().map(|volume| volume.total_bytes).sum();
        operation.volumes.clone_from(&told.volumes);
        operation.waiting.clone_from(&told.waiting);
    });
}

/// A phase as the world reads it.
fn word(phase: impl std::fmt::Debug) -> String {
    format!("{phase:?}")
}

fn conclude(
    document: &watch::Sender<Operation>,
    phase: impl std::fmt::Debug,
    outcome: Result<Ending, &Failure>,
) {
    publish(document, |operation| {
        operation.phase = word(phase);
        // What is over waits for nothing.
        operation.waiting = None;
        match outcome {
            Ok(ending) => operation.result = Some(ending),
            Err(failure) => operation.error = Some(Problem::from(failure)),
        }
    });
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
