//! Where operations are begun, waited for and cancelled: one at a time. The [`RequestQueue`] decides, this acts.

use std::pin::Pin;
use std::time::Duration;

use rustix::process::Signal;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use uuid::Uuid;

use super::operation::Prepared;
use super::request_queue::{Ask, Decision, Denial, REMEMBERED, RequestQueue};
use super::{Begun, Documents, Handle, Request, absolute, hibernation, snapshot, volume_move};
use crate::api::types::{NewOperation, Operation, OperationKind};
use crate::error::{Code, Failure};
use crate::machine::hibernate::machine::CancelAnswer;
use crate::machine::hibernate::runner::Cancel;
use crate::machine::recover::earlier_moves::finish_moves;
use crate::machine::volume::word::{Said, Word};
use crate::machine::wake::feeding::View;
use crate::machine::{suspend, volume};

/// How long a finished operation's document is kept for a watcher that has not read it, once QEMU is gone.
const FAREWELL: Duration = Duration::from_secs(2);

/// Answers to cancels on behalf of others that may wait.
const ANSWERS: usize = 8;

/// What is done for an operation.
type Work = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Who waits for a request's answer.
type Ticket = oneshot::Sender<Result<Begun, Failure>>;

/// The desk of one VM.
pub struct Desk {
    queue: RequestQueue<Ticket>,
    /// All operations that are remembered, the current one last.
    documents: watch::Sender<Documents>,
    running: Option<Running>,
    /// A signal for QEMU that waits for the operation's end.
    pub signal: Option<Signal>,
    /// What cancels on behalf of others were answered.
    answers: (mpsc::Sender<CancelAnswer>, mpsc::Receiver<CancelAnswer>),
}

struct Running {
    id: Uuid,
    task: tokio::task::JoinHandle<()>,
    cancel: mpsc::Sender<Cancel>,
    word: mpsc::Sender<Word>,
}

/// Something that the desk has to act on.
pub enum News {
    /// The operation under way has ended.
    Ended,
    /// It was cancelled for another one, and this is the answer.
    CancelAnswered(CancelAnswer),
    /// Somebody has waited long enough.
    OutOfPatience,
}

impl Desk {
    /// A desk with nothing on it. `woken_from`: the operation whose image the guest was woken from.
    pub fn new(documents: watch::Sender<Documents>, woken_from: Option<Uuid>) -> Self {
        Self {
            queue: RequestQueue::new(woken_from),
            documents,
            running: None,
            signal: None,
            answers: mpsc::channel(ANSWERS),
        }
    }

    /// Keeps a signal until the operation's end; a second one cancels that. Gives it back where there is none.
    pub fn signalled(&mut self, signal: Signal) -> Option<Signal> {
        match &self.running {
            None => return Some(signal),
            Some(_) if self.signal.is_none() => {
                tracing::warn!(
                    ?signal,
                    "an operation is under way; the signal waits for its end, a second one cancels it"
                );
                self.signal = Some(signal);
            }
            Some(running) => {
                let (tell, _) = oneshot::channel();
                // A full queue holds cancels already.
                let _ = running.cancel.try_send(tell);
            }
        }
        None
    }

    /// Answers a request, at once or when its turn has come.
    pub fn answer(&mut self, request: Request, handle: &Handle) {
        match request {
            Request::Begin(ask, ticket) => match self.queue.ask(ask, ticket, Instant::now()) {
                Decision::Begun(ask, ticket) => self.begin(ask, ticket, handle),
                Decision::Joined(id, ticket) => self.join(id, ticket),
                Decision::Denied(denial, ticket) => deny(denial, ticket),
                Decision::Waiting { cancel } => {
                    tracing::info!(cancels = ?cancel, "a request waits for the operation under way to end");
                    if cancel.is_some() {
                        self.cancel_for_another();
                    }
                }
            },
            Request::Cancel(id, answer) => self.cancel(id, answer),
            Request::Tell(id, said, answer) => self.tell(id, said, answer),
        }
    }

    /// Resolves when there is something to act on.
    pub async fn news(&mut self) -> News {
        let deadline = self.queue.deadline();
        let ended = async {
            match &mut self.running {
                Some(running) => {
                    if let Err(error) = (&mut running.task).await {
                        tracing::error!(%error, "an operation ended in panic");
                    }
                }
                None => std::future::pending().await,
            }
        };
        let out_of_patience = async {
            match deadline {
                Some(deadline) => tokio::time::sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = ended => News::Ended,
            Some(answer) = self.answers.1.recv() => News::CancelAnswered(answer),
            () = out_of_patience => News::OutOfPatience,
        }
    }

    /// Acts on it. Returns the signal that waited for the operation's end, once nothing else is begun.
    pub fn act(&mut self, news: &News, handle: &Handle) -> Option<Signal> {
        match news {
            News::Ended => {
                self.running = None;
                self.queue.ended();
                let last = self.documents.borrow().last().cloned();
                if last.is_some_and(|operation| operation.borrow().ended_the_guest()) {
                    self.deny_all(RequestQueue::guest_gone);
                }
                while self.running.is_none()
                    && let Some((ask, ticket)) = self.queue.next(Instant::now())
                {
                    // Who waited may be gone, and wants nothing any more.
                    if ticket.is_closed() {
                        self.queue.not_begun();
                    } else {
                        self.begin(ask, ticket, handle);
                    }
                }
                if self.running.is_none() {
                    return self.signal.take();
                }
            }
            // One that leaves the guest is over soon, and its guest is still there.
            News::CancelAnswered(CancelAnswer::TooLate) if !self.leaves_the_guest() => {
                self.deny_all(RequestQueue::too_late);
            }
            News::CancelAnswered(_) => {}
            News::OutOfPatience => self.deny_all(|queue| queue.expired(Instant::now())),
        }
        None
    }

    fn leaves_the_guest(&self) -> bool {
        let documents = self.documents.borrow();
        let kind = documents.last().map(|operation| operation.borrow().kind);
        matches!(kind, Some(OperationKind::Snapshot | OperationKind::MoveVolumes))
    }

    fn deny_all(&mut self, take: impl FnOnce(&mut RequestQueue<Ticket>) -> Vec<(Denial, Ticket)>) {
        for (denial, ticket) in take(&mut self.queue) {
            deny(denial, ticket);
        }
    }

    fn begin(&mut self, ask: Ask, ticket: Ticket, handle: &Handle) {
        match self.start(ask, handle) {
            Ok(operation) => {
                self.documents.send_modify(|documents| {
                    // As many as the queue remembers, and the current one.
                    if documents.len() > REMEMBERED {
                        documents.remove(0);
                    }
                    documents.push(operation.clone());
                });
                for ticket in self.queue.joining() {
                    told(ticket, Ok(Begun::joined(operation.clone())));
                }
                told(ticket, Ok(Begun::new(operation)));
            }
            Err(failure) => {
                self.queue.not_begun();
                told(ticket, Err(failure));
            }
        }
    }

    fn join(&self, id: Uuid, ticket: Ticket) {
        let operation = find(&self.documents.borrow(), id);
        let internal = || Failure::new(Code::Internal, format!("operation {id} is known but not kept"));
        told(ticket, operation.map(Begun::joined).ok_or_else(internal));
    }

    fn start(&mut self, ask: Ask, handle: &Handle) -> Result<watch::Receiver<Operation>, Failure> {
        if let Some(failure) = handle.feed.as_ref().and_then(View::in_the_way) {
            return Err(failure);
        }
        let Ask {
            id, wish, patience, ..
        } = ask;
        let client = handle.client.clone();
        let prepared = Prepared::new(id, wish.kind());
        let (documents, cancel, word) = (prepared.watch(), prepared.cancel(), prepared.word());
        let work: Work = match wish {
            NewOperation::Hibernate { .. } => {
                let request = hibernation(wish, patience, handle)?;
                Box::pin(async move {
                    match prepared.hibernate(client, request).await {
                        Ok(report) => tracing::info!(image = %report.image.display(), "hibernated"),
                        Err(failure) => {
                            tracing::warn!(code = ?failure.code, guest = ?failure.guest, %failure, "not hibernated")
                        }
                    }
                })
            }
            NewOperation::Snapshot(wish) => {
                let request = snapshot(wish, patience, handle)?;
                Box::pin(async move {
                    match prepared.hibernate(client, request).await {
                        Ok(report) => tracing::info!(image = %report.image.display(), "snapshot taken"),
                        Err(failure) => {
                            tracing::warn!(code = ?failure.code, guest = ?failure.guest, %failure, "no snapshot")
                        }
                    }
                })
            }
            NewOperation::SuspendToDisk { agent, limit_ms } => {
                let request = suspend::Request {
                    agent: agent.map(absolute).transpose()?,
                    limit: Duration::from_millis(limit_ms),
                };
                Box::pin(async move {
                    match prepared.suspend_to_disk(client, request).await {
                        Ok(report) => tracing::info!(agent = %report.agent.display(), "suspended to disk"),
                        Err(failure) => {
                            tracing::warn!(code = ?failure.code, guest = ?failure.guest, %failure, "not suspended")
                        }
                    }
                })
            }
            NewOperation::MoveVolumes { .. } => {
                let request = volume_move(wish, handle)?;
                Box::pin(async move {
                    match prepared.move_volumes(client, request).await {
                        Ok(report) => tracing::info!(volumes = report.volumes.len(), "volumes moved"),
                        Err(failure) => {
                            tracing::warn!(code = ?failure.code, guest = ?failure.guest, %failure, "volumes not moved")
                        }
                    }
                })
            }
            NewOperation::GrowVolume { disk, size_bytes } => {
                let request = volume::grow::Request {
                    disk,
                    size_bytes,
                    command_line: handle.machine().command_line,
                };
                Box::pin(async move {
                    match prepared.grow_volume(client, request).await {
                        Ok(grown) => tracing::info!(to_bytes = grown.to_bytes, "{} grew", grown.disk),
                        Err(failure) => tracing::warn!(code = ?failure.code, %failure, "no disk grew"),
                    }
                })
            }
        };
        let (client, moves) = (handle.client.clone(), handle.moves.clone());
        let task = tokio::spawn(async move {
            if let Err(failure) = finish_moves(&client, &moves).await {
                tracing::warn!(%failure, "an earlier move is not over");
            }
            work.await;
        });
        self.running = Some(Running {
            id,
            task,
            cancel,
            word,
        });
        Ok(documents)
    }

    /// Cancels the operation under way because another one matters more.
    fn cancel_for_another(&self) {
        let Some(running) = &self.running else { return };
        let (cancel, answers) = (running.cancel.clone(), self.answers.0.clone());
        tokio::spawn(async move {
            // Nobody listens once QEMU has ended.
            let _ = answers.send(ask_to_cancel(&cancel).await).await;
        });
    }

    fn cancel(&mut self, id: Uuid, answer: oneshot::Sender<Result<CancelAnswer, Failure>>) {
        let withdrawn = self.queue.withdraw(id);
        if !withdrawn.is_empty() {
            for ticket in withdrawn {
                let failure = Failure::new(Code::Cancelled, "cancelled before it was begun");
                told(ticket, Err(failure));
            }
            let _ = answer.send(Ok(CancelAnswer::Accepted));
            return;
        }
        match &self.running {
            Some(running) if running.id == id => {
                let cancel = running.cancel.clone();
                tokio::spawn(async move {
                    let _ = answer.send(Ok(ask_to_cancel(&cancel).await));
                });
            }
            _ => {
                let refusal = Failure::new(Code::Refused, format!("no operation {id} is under way"));
                let _ = answer.send(Err(refusal));
            }
        }
    }

    fn tell(&self, id: Uuid, said: Said, answer: oneshot::Sender<Result<bool, Failure>>) {
        let Some(running) = self.running.as_ref().filter(|running| running.id == id) else {
            let refusal = Failure::new(Code::Refused, format!("no operation {id} is under way"));
            let _ = answer.send(Err(refusal));
            return;
        };
        let word = running.word.clone();
        tokio::spawn(async move {
            let (tell, told) = oneshot::channel();
            let word = word.send(Word { said, answer: tell });
            let counted = word.await.is_ok() && told.await.unwrap_or(false);
            let _ = answer.send(Ok(counted));
        });
    }

    /// After QEMU's end: lets the operation come to its own.
    pub async fn wait_for_end(&mut self) {
        if let Some(running) = &mut self.running
            && let Err(error) = (&mut running.task).await
        {
            tracing::error!(%error, "an operation ended in panic");
        }
        self.running = None;
    }

    /// Lets a watcher read how the last operation ended.
    pub async fn farewell(&self, handle: &Handle) {
        let last = self.documents.borrow().last().cloned();
        let id = last.map(|operation| operation.borrow().id);
        if id.is_some() {
            let mut read = handle.read.subscribe();
            // A watcher that went away reads nothing; the limit is for that.
            let _ = tokio::time::timeout(FAREWELL, read.wait_for(|read| *read == id)).await;
        }
    }
}

/// The operation of that id.
pub fn find(documents: &Documents, id: Uuid) -> Option<watch::Receiver<Operation>> {
    documents
        .iter()
        .find(|operation| operation.borrow().id == id)
        .cloned()
}

async fn ask_to_cancel(cancel: &mpsc::Sender<Cancel>) -> CancelAnswer {
    let (tell, told) = oneshot::channel();
    match cancel.send(tell).await {
        Ok(()) => told.await.unwrap_or(CancelAnswer::AlreadyEnding),
        Err(_) => CancelAnswer::AlreadyEnding,
    }
}

fn deny(denial: Denial, ticket: Ticket) {
    told(ticket, Err(denial.into()));
}

/// Whoever asked may be gone by now; the operation goes on, as it would after an answer.
fn told(ticket: Ticket, answer: Result<Begun, Failure>) {
    let _ = ticket.send(answer);
}
