//! Acts for the machine of hibernations and snapshots: one effect at a time, with an eye on cancels and on the guest.
//!
//! ```text
//!             ┌──── cancel, RESUME event ────┐
//!  effect ──► perform ──► outcome ──► machine.step ──► next effect
//! ```

use std::io;
use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dormouse_qmp::view::machine::RunState;
use dormouse_qmp::{Client, CommandError, Events, Heard, command};
use dormouse_storage::image::manifest::{Backend, Disk, Guest, GuestState as SavedState, Manifest, RamBlock};
use dormouse_storage::{
    CompleteImage, CreateOptions, ImageWriter, MemoryWritten, Progress, Recording, Run, SealedImage,
    WORKER_THREADS,
};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use uuid::Uuid;

use super::direct::{self, Source};
use super::ending::{end_qemu, give_space_back};
use super::give_back::give_guest_back;
use super::limits::Watchdog;
use super::live::{self, Follower, Passes};
use super::machine::{Aim, CancelAnswer, Effect, GiveBack, Input, Machine, Phase};
use super::plan::{Plan, preflight};
use super::target_lock::taken_in_time;
use super::{Report, Request, Storage, stream};
use crate::error::{Code, Failure, GuestState};
use crate::journal::{FORM, Journal, Point, Record};
use crate::machine::effect::{blocking, joined, milliseconds, out_of_order};
use crate::machine::interrupt::Interrupt;
use crate::machine::recover::earlier::finish_earlier;
use crate::vm::engine::Choice;
use crate::vm::memory::DEVICE_STATE_BOUND;
use crate::vm::monitor::{self, MigrationSettings, wait_for_run_state};
use crate::vm::process::ProcessEnd;
use crate::vm::process_identity::ProcessIdentity;

/// How long QEMU may take to connect for a migration.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// How long `stop` may take.
const STOP_TIMEOUT: Duration = Duration::from_secs(600);

/// How long a rollback waits for storage to let go of a partial image.
const REMOVE_TIMEOUT: Duration = Duration::from_secs(10);

/// How long QEMU may take to tell what its guest does when all is over: nobody waits for one that hangs.
const LAST_LOOK: Duration = Duration::from_secs(5);

/// How often it is looked whether the hibernation takes too long.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// What a hibernation tells while it runs.
#[derive(Debug, Clone)]
pub struct Told {
    /// Where it is.
    pub phase: Phase,
    /// How RAM gets into the image, once that is known.
    pub choice: Option<Choice>,
    /// What the image is on, once it is begun.
    pub storage: Option<Storage>,
    /// How much RAM is dealt with; meaningful in `SavingMemory`.
    pub progress: Arc<Progress>,
}

/// A request to cancel, with the place for its answer.
pub type Cancel = oneshot::Sender<CancelAnswer>;

/// Hibernates the guest behind `client`, or takes a snapshot of it. Returns when it is over, whichever way.
pub async fn hibernate(
    operation: Uuid,
    client: Client,
    request: Request,
    told: watch::Sender<Told>,
    mut cancels: mpsc::Receiver<Cancel>,
) -> Result<Report, Failure> {
    let progress = Arc::clone(&told.borrow().progress);
    let mut work = Work::new(
        operation,
        client.clone(),
        request,
        Arc::clone(&progress),
        told.clone(),
    );
    let (mut machine, first) = Machine::begin(work.request.aim);
    let mut watchdog = Watchdog::new(work.request.limits, Instant::now());
    let mut given_up_at = None;
    let mut next = Some(first);
    while let Some(effect) = next {
        told.send_modify(|told| told.phase = machine.phase());
        let phase = machine.phase();
        let started = Instant::now();
        let interrupt = work.interrupt.clone();
        let mut resumed = work.watch_for_resume(effect);
        let input = {
            let mut act = pin!(work.perform(effect, machine.was_running()));
            loop {
                let news = tokio::select! {
                    input = &mut act => break input,
                    Some(answer) = cancels.recv() => {
                        // Whoever asked may be gone; the cancel counts all the same.
                        let _ = answer.send(machine.answer_to_cancel());
                        Input::CancelRequested
                    }
                    () = Work::resume_heard(&mut resumed) => Input::GuestRan,
                    () = tokio::time::sleep(LOOK_EVERY) => {
                        let Some(limit) = watchdog.look(Instant::now(), machine.phase(), progress.done()) else {
                            continue;
                        };
                        Input::OutOfTime(limit)
                    }
                };
                if machine.step(news) == Some(Effect::Interrupt) {
                    given_up_at.get_or_insert_with(Instant::now);
                    interrupt.raise();
                }
            }
        };
        tracing::debug!(?effect, ?input, elapsed = ?started.elapsed(), "effect ended");
        work.timings_ms.push((phase, milliseconds(started.elapsed())));
        next = machine.step(input);
    }
    work.end_journal(&machine).await;
    told.send_modify(|told| told.phase = machine.phase());
    match machine.failure().cloned() {
        // Asked, not deduced: somebody else may have done something to the guest as well.
        Some(failure) => Err(Failure {
            given_back_after: given_up_at
                .filter(|_| machine.phase() == Phase::Failed)
                .map(|at| work.given_back_at.unwrap_or_else(Instant::now) - at),
            ..failure.with_guest(work.guest_state().await)
        }),
        None => work.report().await,
    }
}

/// RAM on its way into the image.
enum Incoming {
    /// Memory to be read; the devices were recorded before.
    Sources(Box<Recording>, Vec<Source>),
    /// Connections that all of it comes over.
    Connections(Vec<UnixStream>),
}

/// The journal while it is written; comes back with how that went.
type Noting = JoinHandle<Result<(Journal, Result<(), Failure>), Failure>>;

/// What one hibernation has in its hands.
struct Work {
    operation: Uuid,
    /// The record of it, from before anything is changed to the end.
    journal: Option<Journal>,
    client: Client,
    request: Request,
    progress: Arc<Progress>,
    told: watch::Sender<Told>,
    interrupt: Interrupt,
    image_id: Uuid,
    plan: Option<Arc<Plan>>,
    writer: Option<ImageWriter>,
    settings: Option<MigrationSettings>,
    recording: Option<Recording>,
    incoming: Option<Incoming>,
    /// The connections that RAM comes over, held open whatever becomes of their readers.
    connections: Vec<UnixStream>,
    storage: Option<Storage>,
    written: MemoryWritten,
    /// The disks as they were while the guest stood still.
    disks: Vec<Disk>,
    complete: Option<CompleteImage>,
    sealed: Option<SealedImage>,
    /// Threads that write an image that nobody wants any more; they end when the storage lets them.
    abandoned: Option<JoinHandle<()>>,
    /// How a live save went.
    passes: Option<Passes>,
    /// Whether somebody else paused the guest while it was saved.
    paused_by_another: bool,
    begun: Instant,
    paused_at: Option<Instant>,
    given_back_at: Option<Instant>,
    pause_ms: f64,
    sealed_after_ms: f64,
    timings_ms: Vec<(Phase, f64)>,
}

impl Work {
    fn new(
        operation: Uuid,
        client: Client,
        request: Request,
        progress: Arc<Progress>,
        told: watch::Sender<Told>,
    ) -> Self {
        Self {
            operation,
            journal: None,
            client,
            request,
            progress,
            told,
            interrupt: Interrupt::new(),
            image_id: Uuid::new_v4(),
            plan: None,
            writer: None,
            settings: None,
            recording: None,
            incoming: None,
            connections: Vec::new(),
            storage: None,
            written: MemoryWritten::default(),
            disks: Vec::new(),
            complete: None,
            sealed: None,
            abandoned: None,
            passes: None,
            paused_by_another: false,
            begun: Instant::now(),
            paused_at: None,
            given_back_at: None,
            pause_ms: 0.0,
            sealed_after_ms: 0.0,
            timings_ms: Vec::new(),
        }
    }

    async fn perform(&mut self, effect: Effect, was_running: bool) -> Input {
        let interrupt = self.interrupt.clone();
        let outcome = match effect {
            Effect::Preflight => {
                let outcome = interrupt.or(self.preflight()).await;
                // A preflight that was interrupted in the middle of a question.
                monitor::mode_put_back().await;
                outcome
            }
            Effect::Reserve => self.reserve().await,
            Effect::Pause => self.pause(was_running).await,
            Effect::SaveDevices => self.save_devices().await,
            Effect::SaveMemory => self.save_memory().await,
            Effect::SaveLive => self.save_live().await,
            Effect::Sync => self.sync(was_running).await,
            Effect::Seal => self.seal().await,
            Effect::Terminate => self.terminate().await,
            Effect::GiveBack(how) => self.give_back(how).await,
            Effect::Trim => {
                self.trim().await;
                Ok(())
            }
            Effect::Discard => self.discard().await,
            Effect::RollBack(give_back) => self.roll_back(give_back).await,
            Effect::Interrupt => Ok(()),
        };
        match (effect, outcome) {
            (_, Err(failure)) => Input::Failed(failure),
            (Effect::Preflight, Ok(())) => Input::PreflightPassed {
                running: self.plan.as_ref().is_some_and(|plan| plan.running),
                live: self.plan.as_ref().is_some_and(|plan| plan.live),
            },
            (_, Ok(())) => Input::Done,
        }
    }

    /// From the pause on a guest that runs is a guest whose image is worthless.
    fn watch_for_resume(&self, effect: Effect) -> Option<Events> {
        matches!(
            effect,
            Effect::SaveDevices | Effect::SaveMemory | Effect::Sync | Effect::Seal
        )
        .then(|| self.client.events())
    }

    /// Waits for a RESUME event. What events may miss is found by the check of the run state before the seal.
    async fn resume_heard(events: &mut Option<Events>) {
        while let Some(subscription) = events {
            match subscription.next().await {
                Heard::Event(event) if event.name == "RESUME" => return,
                Heard::Event(_) | Heard::Lagged(_) => {}
                Heard::Closed => *events = None,
            }
        }
        std::future::pending::<()>().await;
    }

    async fn preflight(&mut self) -> Result<(), Failure> {
        finish_earlier(&self.client, &self.request.operations).await;
        let plan = preflight(&self.client, &self.request).await?;
        self.progress.expect(plan.memory.guest_total());
        self.told
            .send_modify(|told| told.choice = Some(plan.choice.clone()));
        self.plan = Some(Arc::new(plan));
        Ok(())
    }

    /// Before anything is changed there is a record of it.
    async fn reserve(&mut self) -> Result<(), Failure> {
        let plan = self.plan()?;
        let settings = match plan.choice.channels {
            _ if plan.live => {
                live::find_settings(&self.client, self.request.live.unwrap_or_default()).await?
            }
            None => direct::find_settings(&self.client, &plan).await?,
            Some(channels) => stream::find_settings(&self.client, channels).await?,
        };
        self.settings = Some(settings.clone());
        self.begin_journal(&plan, settings).await?;
        let (target, replace, image_id) = (self.request.target.clone(), self.request.replace, self.image_id);
        let image = self.request.image.clone();
        let (patience, interrupt) = (self.request.limits.lock, self.interrupt.clone());
        let mut task = tokio::task::spawn_blocking(move || {
            let options = CreateOptions {
                replace,
                image_id,
                backend: None,
                compression: image.compression,
                key: image.key,
                rate_limit: image.rate_limit,
            };
            let mut writer = taken_in_time(&target, patience, interrupt.flag(), || {
                ImageWriter::create(&target, plan.layout.clone(), options.clone())
            })?;
            writer.reserve(DEVICE_STATE_BOUND)?;
            Ok(writer)
        });
        let outcome = self.interrupt.or(joined(&mut task)).await;
        if !task.is_finished() {
            self.abandoned = Some(tokio::spawn(async { drop(task.await) }));
        }
        let writer = outcome?;
        self.note_storage(&writer);
        self.writer = Some(writer);
        Ok(())
    }

    fn note_storage(&mut self, writer: &ImageWriter) {
        self.storage = Some(Storage {
            kind: writer.kind(),
            backend: writer.backend(),
        });
        self.told.send_modify(|told| told.storage = self.storage);
    }

    async fn pause(&mut self, was_running: bool) -> Result<(), Failure> {
        self.paused_at = Some(Instant::now());
        if was_running {
            // `stop` waits for the disks. It cannot be taken back: a guest that is stopped after we gave up would stay
            // stopped, so we wait longer than any disk should need.
            self.client
                .with_deadline(STOP_TIMEOUT)
                .execute(&command::stop {})
                .await?;
        }
        let state = wait_for_run_state(&self.client, "paused", |state| {
            matches!(state, RunState::Paused | RunState::Running)
        });
        match state.await? {
            RunState::Running => Err(run_by_another()),
            _ => Ok(()),
        }
    }

    /// Has QEMU send its devices, and learns where the memory is, or gets the connections that it will come over.
    ///
    /// An interrupt waits until QEMU has connected, which takes it some milliseconds: cancelled before, QEMU 7.2 waits
    /// for ever for its channels, and later ones refuse the next migration.
    async fn save_devices(&mut self) -> Result<(), Failure> {
        let plan = self.plan()?;
        let client = self.client.clone();
        // Who ran the guest from now on is heard; who did before is seen.
        if monitor::run_state(&client).await? != RunState::Paused {
            return Err(run_by_another());
        }
        self.incoming = match plan.choice.channels {
            None => {
                self.set().await?;
                let connected = in_time(direct::connect(&client, &plan)).await?;
                let record = direct::record(&client, &plan, connected);
                let (recording, sources) = self.interrupt.or(record).await?;
                self.progress
                    .expect(sources.iter().map(|source| source.length).sum());
                Some(Incoming::Sources(Box::new(recording), sources))
            }
            Some(channels) => {
                self.set().await?;
                let connections = in_time(stream::connect(&client, &plan, channels)).await?;
                self.connections = connections
                    .iter()
                    .map(UnixStream::try_clone)
                    .collect::<io::Result<_>>()
                    .map_err(|error| {
                        Failure::new(Code::Internal, format!("cannot hold a connection: {error}"))
                    })?;
                self.progress.expect(plan.memory.total());
                Some(Incoming::Connections(connections))
            }
        };
        Ok(())
    }

    /// Sets what a save needs. What was found is known before anything is changed, so that an interrupt at any point
    /// leaves something to put back.
    async fn set(&self) -> Result<(), Failure> {
        let settings = self.settings.as_ref().ok_or_else(out_of_order)?;
        Ok(settings.apply(&self.client).await?)
    }

    async fn save_memory(&mut self) -> Result<(), Failure> {
        let plan = self.plan()?;
        let mut writer = self.writer.take().ok_or_else(out_of_order)?;
        let incoming = self.incoming.take().ok_or_else(out_of_order)?;
        let is_stream = matches!(incoming, Incoming::Connections(_));
        // That of a snapshot says too that its guest is back.
        let noting = (!self.request.aim.is_snapshot()).then(|| self.note(Point::Sealing));
        let (progress, interrupt) = (Arc::clone(&self.progress), self.interrupt.clone());
        let mut task = tokio::task::spawn_blocking(move || {
            let run = Run {
                threads: WORKER_THREADS,
                progress: &progress,
                cancelled: interrupt.flag(),
            };
            let (recording, written) = match incoming {
                Incoming::Sources(recording, sources) => {
                    let written = direct::write_memory(&mut writer, sources, &run)?;
                    writer.write_pages(&recording, &run)?;
                    (*recording, written)
                }
                Incoming::Connections(connections) => stream::write_memory(&mut writer, connections, &run)?,
            };
            Ok((writer, recording, written))
        });
        let outcome = self.interrupt.or(joined(&mut task)).await;
        if !task.is_finished() {
            // The guest does not wait for storage that hangs: the threads only read its memory.
            self.abandoned = Some(tokio::spawn(async { drop(task.await) }));
        }
        // Written down while memory is; where that went wrong, the guest's end would be anybody's guess.
        let noted = match noting {
            Some(noting) => self.noted(noting).await,
            None => Ok(()),
        };
        let (writer, recording, written) = match outcome {
            Err(failure) if is_stream => return Err(stream::reason(&self.client, failure).await),
            outcome => outcome?,
        };
        if is_stream {
            self.interrupt.or(stream::settle(&self.client)).await?;
            plan.check_blocks(&recording)?;
        }
        noted?;
        self.disks = self.interrupt.or(self.disks_at_rest(&plan)).await?;
        // A file system can refuse what it allowed at first.
        self.note_storage(&writer);
        (self.writer, self.recording, self.written) = (Some(writer), Some(recording), written);
        Ok(())
    }

    /// Has QEMU send all of the guest while it runs, and writes it.
    async fn save_live(&mut self) -> Result<(), Failure> {
        let plan = self.plan()?;
        let mut writer = self.writer.take().ok_or_else(out_of_order)?;
        let mut follower = Follower::of(&self.client, self.request.live.unwrap_or_default());
        self.set().await?;
        let connection = in_time(stream::connect_plain(&self.client)).await?;
        let held = connection
            .try_clone()
            .map_err(|error| Failure::new(Code::Internal, format!("cannot hold a connection: {error}")))?;
        self.connections = vec![held];
        let (progress, interrupt) = (Arc::clone(&self.progress), self.interrupt.clone());
        let mut task = tokio::task::spawn_blocking(move || {
            let run = Run {
                threads: 1,
                progress: &progress,
                cancelled: interrupt.flag(),
            };
            let recording = writer.write_live(connection, DEVICE_STATE_BOUND, &run)?;
            Ok((writer, recording))
        });
        let outcome = {
            let mut saved = pin!(self.interrupt.or(joined(&mut task)));
            loop {
                tokio::select! {
                    biased;
                    outcome = &mut saved => break outcome,
                    // A QEMU that does not answer shows in the stream as well.
                    followed = follower.follow(&self.progress) => if let Err(failure) = followed {
                        break Err(failure);
                    },
                }
            }
        };
        self.paused_by_another = follower.paused_by_another;
        self.paused_at = follower.paused_at;
        if !task.is_finished() {
            self.interrupt.raise();
            self.abandoned = Some(tokio::spawn(async { drop(task.await) }));
        }
        let (writer, recording) = match outcome {
            Err(failure) => return Err(stream::reason(&self.client, failure).await),
            Ok(saved) => saved,
        };
        self.interrupt.or(stream::settle(&self.client)).await?;
        plan.check_blocks(&recording)?;
        // An event that was missed.
        self.paused_at.get_or_insert_with(Instant::now);
        self.passes = Some(follower.conclude().await?);
        self.disks = self.interrupt.or(self.disks_at_rest(&plan)).await?;
        self.note_storage(&writer);
        (self.writer, self.recording) = (Some(writer), Some(recording));
        Ok(())
    }

    /// A guest that somebody else paused while it was saved stays so.
    fn as_others_left_it(&self, how: GiveBack) -> GiveBack {
        match how {
            GiveBack::Running if self.paused_by_another => GiveBack::Paused,
            how => how,
        }
    }

    /// The disks, while the guest stands still.
    async fn disks_at_rest(&self, plan: &Plan) -> Result<Vec<Disk>, Failure> {
        let disks = plan.disks(&self.client).await?;
        still_stopped(&monitor::run_state(&self.client).await?)?;
        Ok(disks)
    }

    /// Gives the guest of a snapshot back. All that is still written comes from memory of ours.
    async fn give_back(&mut self, how: GiveBack) -> Result<(), Failure> {
        let how = self.as_others_left_it(how);
        let settings = self.settings.take();
        let back = give_guest_back(&self.client, how, &mut self.connections, settings).await?;
        self.pause_ms = self
            .paused_at
            .map(|at| milliseconds(back - at))
            .unwrap_or_default();
        self.connections.clear();
        Ok(())
    }

    async fn sync(&mut self, was_running: bool) -> Result<(), Failure> {
        let manifest = self.manifest(was_running)?;
        let noting = (self.request.aim.is_snapshot()).then(|| self.note(Point::Sealing));
        let writer = self.writer.take().ok_or_else(out_of_order)?;
        let recording = self.recording.take().ok_or_else(out_of_order)?;
        let mut task = tokio::task::spawn_blocking(move || Ok(writer.complete(&manifest, &recording)?));
        let outcome = self.interrupt.or(joined(&mut task)).await;
        let noted = match noting {
            Some(noting) => self.noted(noting).await,
            None => Ok(()),
        };
        if !task.is_finished() {
            // Storage that hangs is left to itself: what comes of it is dropped, and was no image.
            self.abandoned = Some(tokio::spawn(async { drop(task.await) }));
        }
        let complete = outcome?;
        self.written = complete.written();
        self.complete = Some(complete);
        noted
    }

    async fn seal(&mut self) -> Result<(), Failure> {
        let goes_on = self.request.aim.is_snapshot();
        if !goes_on {
            still_stopped(&monitor::run_state(&self.client).await?)?;
        }
        let complete = self.complete.take().ok_or_else(out_of_order)?;
        self.sealed = Some(blocking(move || Ok(complete.seal()?)).await?);
        self.sealed_after_ms = milliseconds(self.begun.elapsed());
        if goes_on {
            return Ok(());
        }
        self.pause_ms = self
            .paused_at
            .map(|at| milliseconds(at.elapsed()))
            .unwrap_or_default();
        // Once more: from here on only `quit` follows, and a guest that ran since has left its image behind. A QEMU that
        // does not answer any more has not run it: the image is the guest now, and stays.
        match monitor::run_state(&self.client).await {
            Ok(state) => still_stopped(&state),
            Err(_) => Ok(()),
        }
    }

    async fn terminate(&mut self) -> Result<(), Failure> {
        let plan = self.plan()?;
        self.note_anyway(Point::Sealed).await;
        end_qemu(&self.client, plan.pid, &self.request.target).await?;
        self.trim().await;
        Ok(())
    }

    /// Gives back space that the sealed image does not use, and lets go of it.
    async fn trim(&mut self) {
        if let Some(sealed) = self.sealed.take() {
            give_space_back(sealed).await;
        }
    }

    /// Removes the image; its guest is not touched.
    async fn discard(&mut self) -> Result<(), Failure> {
        self.remove_sealed().await?;
        self.remove_partial_image().await;
        Ok(())
    }

    async fn roll_back(&mut self, give_back: GiveBack) -> Result<(), Failure> {
        let give_back = self.as_others_left_it(give_back);
        self.note_return().await;
        // A whole image must be gone before its guest runs. A partial one is nobody's guest, and waits.
        self.remove_sealed().await?;
        let settings = self.settings.take();
        let given_back = give_guest_back(&self.client, give_back, &mut self.connections, settings).await;
        self.given_back_at = Some(Instant::now());
        self.remove_partial_image().await;
        given_back.map(drop)
    }

    async fn remove_sealed(&mut self) -> Result<(), Failure> {
        match self.sealed.take() {
            Some(sealed) => blocking(move || Ok(sealed.remove()?)).await,
            None => Ok(()),
        }
    }

    /// The guest has what it needs; storage that hangs only delays the report, and not for ever.
    async fn remove_partial_image(&mut self) {
        let unsealed = (self.writer.take(), self.complete.take());
        let abandoned = self.abandoned.take();
        let removed = tokio::spawn(async move {
            let _ = tokio::task::spawn_blocking(move || drop(unsealed)).await;
            if let Some(abandoned) = abandoned {
                let _ = abandoned.await;
            }
        });
        if tokio::time::timeout(REMOVE_TIMEOUT, removed).await.is_err() {
            tracing::warn!(
                target = %self.request.target.display(),
                "the storage does not answer; the partial image beside the target is removed when it does"
            );
        }
    }

    /// What the guest does now.
    async fn guest_state(&self) -> GuestState {
        match monitor::run_state(&self.client.with_deadline(LAST_LOOK)).await {
            Ok(RunState::Running) => GuestState::Running,
            Ok(_) => GuestState::Paused,
            Err(error) => self.guest_state_without_answer(&error).await,
        }
    }

    /// A QEMU that hung up is most likely ending, which the end of its memory takes a while for.
    async fn guest_state_without_answer(&self, error: &CommandError) -> GuestState {
        let Some(plan) = &self.plan else {
            return GuestState::Unknown;
        };
        let end = ProcessEnd::of(plan.pid);
        if end.is_over() {
            return GuestState::Stopped;
        }
        let hung_up = matches!(error, CommandError::ConnectionLost { .. });
        let patience = if hung_up { LAST_LOOK } else { Duration::ZERO };
        match blocking(move || Ok(end.wait(patience).unwrap_or(false))).await {
            Ok(true) => GuestState::Stopped,
            _ => GuestState::Unknown,
        }
    }

    async fn begin_journal(&mut self, plan: &Plan, settings: MigrationSettings) -> Result<(), Failure> {
        let qemu = ProcessIdentity::of(plan.pid)
            .ok_or_else(|| Failure::new(Code::Unreachable, "QEMU's process is gone"))?;
        let record = Record {
            form: FORM,
            aim: self.request.aim,
            operation: self.operation,
            vm_name: self.request.vm_name.clone(),
            target: self.request.target.clone(),
            image_id: self.image_id,
            monitor: self.request.monitor.clone(),
            qemu,
            was_running: plan.running,
            settings,
            point: Point::Saving,
        };
        let folder = self.request.operations.clone();
        self.journal =
            Some(blocking(move || Journal::begin(&folder, record).map_err(|error| unwritten(&error))).await?);
        Ok(())
    }

    /// Begins to write down how far it is.
    fn note(&mut self, point: Point) -> Noting {
        let journal = self.journal.take();
        tokio::task::spawn_blocking(move || match journal {
            None => Err(out_of_order()),
            Some(mut journal) => {
                let noted = journal.advance(point).map_err(|error| unwritten(&error));
                Ok((journal, noted))
            }
        })
    }

    /// Waits until it is written down.
    async fn noted(&mut self, mut noting: Noting) -> Result<(), Failure> {
        let (journal, noted) = joined(&mut noting).await?;
        self.journal = Some(journal);
        noted
    }

    /// Writes down what happens whether that can be written down or not.
    async fn note_anyway(&mut self, point: Point) {
        let noting = self.note(point);
        if let Err(failure) = self.noted(noting).await {
            tracing::warn!(%failure, ?point, "a recovery would not know how far the hibernation came");
        }
    }

    /// Before a whole image is removed, or what was to become one: without that a missing image is one that somebody
    /// took away, whose guest may run elsewhere.
    async fn note_return(&mut self) {
        let may_be_sealed = |journal: &Journal| journal.record().point != Point::Saving;
        if self.journal.as_ref().is_some_and(may_be_sealed) {
            self.note_anyway(Point::Returning).await;
        }
    }

    /// What is over needs no record; what is not certain does, as long as there is a QEMU: also an image that may be
    /// sealed although its guest was given back.
    async fn end_journal(&mut self, machine: &Machine) {
        let is_doubtful = machine.phase() == Phase::Uncertain
            || machine
                .failure()
                .is_some_and(|failure| failure.code == Code::Operator);
        if is_doubtful && self.guest_state().await != GuestState::Stopped {
            return;
        }
        if let Some(journal) = self.journal.take()
            && let Err(failure) = blocking(move || journal.end().map_err(|error| unwritten(&error))).await
        {
            tracing::warn!(%failure, "the record of an operation that is over stays behind");
        }
    }

    fn manifest(&self, was_running: bool) -> Result<Manifest, Failure> {
        let plan = self.plan()?;
        Ok(Manifest {
            created_unix_ms: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map(|since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
                .unwrap_or_default(),
            dormouse_version: env!("CARGO_PKG_VERSION").to_owned(),
            operation: Some(self.operation),
            vm_name: self.request.vm_name.clone(),
            qemu: plan.qemu.clone(),
            machine: plan.machine.clone(),
            machine_default_ram_id: plan.main_ram.clone(),
            cpu: plan.cpu.clone(),
            hardware: Some(plan.hardware.clone()),
            ram_blocks: plan
                .memory
                .blocks
                .iter()
                .map(|block| RamBlock {
                    name: block.name.clone(),
                    length_bytes: block.length.0,
                    backend: plan.memory.backend(&block.name).map(|backend| Backend {
                        id: backend.id.clone(),
                        kind: backend.kind.clone(),
                    }),
                })
                .collect(),
            command_line: Some(plan.command_line.clone()),
            working_directory: Some(plan.directory.clone()),
            disks: self.disks.clone(),
            guest: Guest {
                state_when_saved: if was_running && !self.paused_by_another {
                    SavedState::Running
                } else {
                    SavedState::Paused
                },
                went_on: self.request.aim.is_snapshot(),
            },
            timings_ms: self
                .timings_ms
                .iter()
                .map(|(phase, elapsed)| (format!("{phase:?}"), *elapsed))
                .collect(),
            engine: plan.choice.engine.name().to_owned(),
        })
    }

    fn plan(&self) -> Result<Arc<Plan>, Failure> {
        self.plan.clone().ok_or_else(out_of_order)
    }

    async fn report(self) -> Result<Report, Failure> {
        let guest = match self.request.aim {
            Aim::Hibernate => GuestState::Stopped,
            Aim::Snapshot { .. } => self.guest_state().await,
        };
        Ok(Report {
            aim: self.request.aim,
            guest,
            choice: self.plan()?.choice.clone(),
            image: self.request.target,
            image_id: self.image_id,
            storage: self.storage.ok_or_else(out_of_order)?,
            live: self.passes,
            data: self.written.data,
            stored: self.written.stored,
            zero: self.written.zero,
            timings_ms: self.timings_ms,
            pause_ms: self.pause_ms,
            sealed_after_ms: self.sealed_after_ms,
        })
    }
}

fn unwritten(error: &io::Error) -> Failure {
    if error.kind() == io::ErrorKind::AlreadyExists {
        return Failure::new(
            Code::Refused,
            "an operation of that id is under way elsewhere, or was interrupted (`dormouse recover` ends it)",
        );
    }
    Failure::new(
        Code::StorageIo,
        format!("cannot write the operation's record in the state directory: {error}"),
    )
}

/// Waits for QEMU to connect, and not for ever.
async fn in_time<T>(connect: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    tokio::time::timeout(CONNECT_TIMEOUT, connect)
        .await
        .unwrap_or_else(|_| {
            Err(Failure::new(
                Code::TimedOut,
                format!("QEMU did not connect to send the guest within {CONNECT_TIMEOUT:?}"),
            ))
        })
}

fn run_by_another() -> Failure {
    Failure::new(
        Code::Refused,
        "another client made the guest run as soon as it was stopped",
    )
}

/// The run state after a migration is one that only another migration brings back once it was left. So a guest that
/// somebody ran, even if stopped again, is noticed.
fn still_stopped(state: &RunState) -> Result<(), Failure> {
    if *state == RunState::Postmigrate {
        return Ok(());
    }
    Err(Failure::new(
        Code::Refused,
        format!("somebody else changed the guest's run state to {state} while its memory was being saved"),
    ))
}
