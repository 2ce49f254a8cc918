//! Acts for the wake's machine; `others.rs` is what it does with a QEMU that somebody else started.

mod others;

use std::path::Path;
use std::pin::pin;
use std::sync::Arc;

use dormouse_qmp::view::machine::RunState;
use dormouse_storage::image::WakeNote;
use dormouse_storage::{ByteCount, Image, ImageState, MemoryFile, Progress, Run, WORKER_THREADS};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use uuid::Uuid;

use super::feeding::FeedRecord;
use super::follow_up::{FollowUp, follow_up};
use super::guard;
use super::lazy::{self, Feed};
use super::load::{What, load};
use super::machine::{Effect, Input, Machine, Owner, Phase};
use super::plan::{Plan, check_state, plan, plan_to_take_over, unless_forced};
use super::record::{Point, Record};
use super::take_over::{Qemu, Waiting};
use super::{Mode, Report, Request, resume};
use crate::error::{Code, Failure, sentence};
use crate::journal::{Journal, Written};
use crate::machine::effect::{blocking, milliseconds, out_of_order};
use crate::machine::interrupt::Interrupt;
use crate::vm::disks;
use crate::vm::monitor::{self, MigrationSettings, wait_for_run_state};
use crate::vm::process::StartingQemu;
use crate::vm::process_identity::ProcessIdentity;
use crate::vm::ram_home::{Pages, RamHome};

/// Where the guest's QEMU gets its sockets and its RAM.
pub struct Surroundings<'a> {
    /// The VM's folder in the state directory.
    pub vm_directory: &'a Path,
    /// The monitor's socket in it.
    pub monitor_socket: &'a Path,
    /// A tmpfs for RAM, where the user named one.
    pub ram_directory: Option<&'a Path>,
    /// Told how much of RAM is where it belongs, while RAM is read from the image.
    pub progress: Arc<Progress>,
    /// Where wakes are written down.
    pub wakes: &'a Path,
    /// The VM's name.
    pub vm_name: &'a str,
    /// Told of QEMU's process as soon as there is one, and how the guest is started from now on.
    pub started: &'a Started<'a>,
    /// The QEMU of others that the guest is woken in; without it one is started.
    pub others: Option<Waiting>,
}

/// Takes a process and a command line, and notes them where they outlive us.
pub type Started<'a> = dyn Fn(u32, &[String]) -> Result<(), Failure> + Sync + 'a;

/// A guest that is awake.
#[derive(Debug)]
pub struct Woken {
    /// Its QEMU.
    pub qemu: Qemu,
    /// The pages of its RAM, where that is in shared files.
    pub pages: Option<Pages>,
    /// The image, still locked. A mapped image must not change while the guest lives.
    pub image: Image,
    /// What brings its RAM while it runs, where it does not have all of it.
    pub feed: Option<Feed>,
    /// What was done.
    pub report: Report,
    /// The command line as the user gave it first, for the next hibernation.
    pub command_line: Vec<String>,
}

/// Wakes the guest in an image. A send on `cancels` ends the wake while it can be ended.
pub async fn wake(
    request: Request,
    surroundings: Surroundings<'_>,
    told: watch::Sender<Phase>,
    mut cancels: mpsc::Receiver<()>,
) -> Result<Woken, Failure> {
    let owner = match surroundings.others {
        None => Owner::Ours,
        Some(_) => Owner::Others,
    };
    let mut work = Work::new(request, surroundings);
    let (mut machine, first) = Machine::begin(owner);
    let mut next = Some(first);
    while let Some(effect) = next {
        let phase = machine.phase();
        told.send_replace(phase);
        let started = Instant::now();
        let interrupt = work.interrupt.clone();
        let input = {
            let mut act = pin!(work.perform(effect));
            loop {
                tokio::select! {
                    outcome = &mut act => break outcome.map_or_else(Input::Failed, |()| Input::Done),
                    Some(()) = cancels.recv() => {
                        if machine.step(Input::CancelRequested) == Some(Effect::Interrupt) {
                            interrupt.raise();
                        }
                    }
                }
            }
        };
        tracing::debug!(?effect, ?input, elapsed = ?started.elapsed(), "effect ended");
        if let (Phase::Consuming, Input::Failed(failure)) = (phase, &input) {
            tracing::warn!(%failure, "the guest runs, but its image could not be marked as used; remove it");
        }
        work.timings_ms.push((phase, milliseconds(started.elapsed())));
        next = machine.step(input);
    }
    told.send_replace(machine.phase());
    match machine.failure() {
        Some(failure) => Err(failure.clone()),
        None => {
            work.follow_up().await;
            work.into_woken()
        }
    }
}

/// What one wake has in its hands.
struct Work<'a> {
    request: Request,
    surroundings: Surroundings<'a>,
    interrupt: Interrupt,
    image: Option<Image>,
    plan: Option<Plan>,
    ram: Option<RamHome>,
    pages: Option<Pages>,
    qemu: Option<Qemu>,
    /// Of a QEMU of others: what was set for the load, and whether that was begun.
    settings: Option<MigrationSettings>,
    is_load_begun: bool,
    feed: Option<Feed>,
    /// This wake's id.
    operation: Uuid,
    journal: Option<Journal<Record>>,
    qemu_started: Option<Instant>,
    start_to_running_ms: f64,
    follow_up: FollowUp,
    timings_ms: Vec<(Phase, f64)>,
}

impl<'a> Work<'a> {
    fn new(request: Request, surroundings: Surroundings<'a>) -> Self {
        Self {
            request,
            surroundings,
            interrupt: Interrupt::new(),
            image: None,
            plan: None,
            ram: None,
            pages: None,
            qemu: None,
            settings: None,
            is_load_begun: false,
            feed: None,
            operation: Uuid::new_v4(),
            journal: None,
            qemu_started: None,
            start_to_running_ms: 0.0,
            follow_up: FollowUp::default(),
            timings_ms: Vec::new(),
        }
    }

    async fn perform(&mut self, effect: Effect) -> Result<(), Failure> {
        let outcome = self.act(effect).await;
        // Only as long as its guest has surely not run does the way in which QEMU ended explain everything.
        let explains = matches!(effect, Effect::Check | Effect::Load | Effect::Mark);
        match (outcome, &mut self.qemu) {
            (Err(failure), Some(Qemu::Ours(qemu))) if explains && failure.code == Code::Unreachable => {
                Err(qemu.why_gone(failure).await)
            }
            (Err(failure), Some(Qemu::Others(_))) => Err(self.failed_in_others(effect, failure).await),
            (outcome, _) => outcome,
        }
    }

    async fn act(&mut self, effect: Effect) -> Result<(), Failure> {
        let interrupt = self.interrupt.clone();
        match effect {
            Effect::Open => self.open().await,
            Effect::Prepare if self.surroundings.others.is_some() => Ok(()),
            Effect::Prepare => self.prepare().await,
            Effect::Start if self.surroundings.others.is_some() => self.take_others().await,
            Effect::Start => interrupt.or(self.start()).await,
            Effect::Check => interrupt.or(self.check()).await,
            Effect::Load if self.is_lazy() => interrupt.or(self.load_lazily()).await,
            Effect::Load => {
                self.prepare_others().await?;
                self.load().await?;
                self.put_settings_back().await;
                Ok(())
            }
            Effect::Mark => {
                self.record_feed()?;
                self.mark_waking().await
            }
            Effect::Resume => self.resume().await,
            // The guest needs it as long as it is fed from it.
            Effect::Consume if self.is_lazy() => self.end_journal().await,
            Effect::Consume => {
                self.mark(ImageState::Consumed).await?;
                self.pin().await;
                self.end_journal().await
            }
            Effect::Abandon {
                qemu: Owner::Others, ..
            } => self.leave().await,
            Effect::Abandon { unmark, .. } => self.abandon(unmark).await,
            Effect::Interrupt => Ok(()),
        }
    }

    async fn open(&mut self) -> Result<(), Failure> {
        let path = std::path::absolute(&self.request.image).map_err(|error| {
            Failure::new(Code::Usage, format!("{}: {error}", self.request.image.display()))
        })?;
        let key = self.request.key.clone();
        let image = blocking(move || {
            let mut image = Image::open_locked(&path)?;
            check_state(&image)?;
            if let Some(key) = key {
                image.unlock(&key)?;
            }
            // Whatever is wrong with it is told before anything is done.
            image.device_state()?;
            Ok(image)
        })
        .await?;
        self.plan = Some(match self.surroundings.others {
            None => plan(&image, &self.request, self.surroundings.vm_directory).await?,
            Some(_) => plan_to_take_over(&image, &self.request)?,
        });
        self.image = Some(image);
        Ok(())
    }

    async fn prepare(&mut self) -> Result<(), Failure> {
        let plan = self.plan.as_ref().ok_or_else(out_of_order)?;
        let image = self.image.take().ok_or_else(out_of_order)?;
        let mode = plan.mode;
        let mut files = Vec::new();
        let in_our_files = plan.in_our_files();
        if in_our_files > ByteCount::ZERO {
            let Surroundings {
                vm_directory,
                ram_directory,
                ..
            } = &self.surroundings;
            let ram = RamHome::prepare(vm_directory, *ram_directory, in_our_files)?;
            if mode == Mode::Eager {
                files.extend(
                    plan.placed
                        .iter()
                        .map(|(name, length)| (name.clone(), ram.file(name), *length)),
                );
            }
            self.ram = Some(ram);
        }
        let progress = Arc::clone(&self.surroundings.progress);
        // Whatever is read on its way to QEMU is checked there.
        let verify = self.request.verify && mode == Mode::Map;
        if verify || mode == Mode::Eager {
            progress.expect(plan.placed_total());
        }
        let interrupt = self.interrupt.clone();
        let image = blocking(move || {
            let run = Run {
                threads: WORKER_THREADS,
                progress: &progress,
                cancelled: interrupt.flag(),
            };
            if verify {
                image.verify(&run)?;
            }
            for (name, path, length) in files {
                let memory = MemoryFile::create(&path, length).map_err(|error| {
                    Failure::new(
                        Code::StorageIo,
                        format!("cannot make RAM block {name}: {}", sentence(&error)),
                    )
                })?;
                image.fill(&name, &memory, &run)?;
            }
            Ok(image)
        })
        .await?;
        self.image = Some(image);
        Ok(())
    }

    async fn start(&mut self) -> Result<(), Failure> {
        let (plan, image) = self.planned()?;
        let ram = self.ram.as_ref();
        let line = plan.command_line(image, |id| ram.map(|ram| ram.file(id)).unwrap_or_default())?;
        let started = Instant::now();
        let starting = StartingQemu::spawn(&line, &plan.directory, self.surroundings.monitor_socket)?;
        // From its first instant on there is a record of it, or a guard that ends it.
        (self.surroundings.started)(starting.pid().unwrap_or_default(), &self.command_line()?)?;
        self.qemu = Some(Qemu::Ours(starting.ready().await?));
        self.qemu_started = Some(started);
        // QEMU has opened its RAM: the names are not needed any more.
        self.pages = self.ram.take().map(|ram| ram.pages());
        Ok(())
    }

    async fn check(&mut self) -> Result<(), Failure> {
        if let (Some(Qemu::Others(waiting)), Some(plan), Some(image)) =
            (&self.qemu, &mut self.plan, &self.image)
        {
            waiting.check(image, plan, &self.request).await?;
        }
        let (plan, image) = self.planned()?;
        let qemu = self.qemu()?;
        let client = qemu.client();
        if let Qemu::Ours(_) = qemu {
            guard::check_machine(image.manifest(), client).await?;
        }
        let present = disks::present(client, &plan.directory).await?;
        let compared = disks::check_same(&plan.disks, &present).and_then(|()| match qemu {
            Qemu::Ours(_) => Ok(()),
            Qemu::Others(waiting) => waiting.check_open_files(&plan.disks),
        });
        let forced = unless_forced(compared, self.request.force_disks)?;
        if let Some(plan) = &mut self.plan {
            plan.forced_disks.extend(forced);
        }
        Ok(())
    }

    async fn load(&mut self) -> Result<(), Failure> {
        let (plan, image) = self.planned()?;
        let except = plan.placed.iter().map(|(name, _)| name.clone()).collect();
        let progress = match plan.mode {
            Mode::Stream => {
                self.surroundings.progress.expect(image.layout().ram());
                Arc::clone(&self.surroundings.progress)
            }
            Mode::Map | Mode::Lazy | Mode::Eager => Arc::default(),
        };
        let client = self.qemu()?.client().clone();
        let image = self.image.take().ok_or_else(out_of_order)?;
        let what = What {
            except,
            stay: matches!(self.qemu, Some(Qemu::Others(_))),
        };
        self.is_load_begun = true;
        let (image, loaded) = load(&client, image, what, progress, &self.interrupt).await?;
        self.image = Some(image);
        loaded?;
        self.interrupt
            .or(async {
                wait_for_run_state(&client, "paused", |state| *state == RunState::Paused).await?;
                Ok(())
            })
            .await
    }

    async fn load_lazily(&mut self) -> Result<(), Failure> {
        let (plan, image) = self.planned()?;
        let late: Vec<&str> = plan.placed.iter().map(|(name, _)| name.as_str()).collect();
        let feeder = lazy::feeder(image, &late, self.request.feed)?;
        let client = self.qemu()?.client().clone();
        self.feed = Some(lazy::load(&client, feeder).await?);
        Ok(())
    }

    /// Before the guest may run there is what a recovery of its feed needs.
    fn record_feed(&self) -> Result<(), Failure> {
        if !self.is_lazy() {
            return Ok(());
        }
        let (_, image) = self.planned()?;
        let pid = self.qemu()?.pid();
        let passes_zeros = self.feed.as_ref().is_some_and(|feed| feed.told.passes_zeros());
        FeedRecord::of(
            image,
            pid,
            self.surroundings.monitor_socket,
            (self.request.feed.keep_image, passes_zeros),
        )?
        .write(self.surroundings.vm_directory)
    }

    fn is_lazy(&self) -> bool {
        self.plan.as_ref().is_some_and(|plan| plan.mode == Mode::Lazy)
    }

    async fn mark(&mut self, state: ImageState) -> Result<(), Failure> {
        let mut image = self.image.take().ok_or_else(out_of_order)?;
        let (image, outcome) = blocking(move || {
            let outcome = image.mark(state);
            Ok((image, outcome))
        })
        .await?;
        self.image = Some(image);
        Ok(outcome?)
    }

    async fn mark_waking(&mut self) -> Result<(), Failure> {
        if self.journal.is_none() {
            self.begin_journal().await?;
        }
        if let Some(image) = &mut self.image {
            image.set_note(WakeNote {
                wake: self.operation,
                disks_forced: self
                    .plan
                    .as_ref()
                    .is_some_and(|plan| !plan.forced_disks.is_empty()),
            });
        }
        self.mark(ImageState::Waking).await?;
        // That may have taken long. A QEMU that is gone before it was told to run has surely not run its guest, and the
        // mark is taken back; once it was told, nobody can say.
        monitor::run_state(self.qemu()?.client()).await?;
        self.advance(Point::Continuing).await
    }

    async fn begin_journal(&mut self) -> Result<(), Failure> {
        let (_, image) = self.planned()?;
        let pid = self.qemu()?.pid();
        let gone = || Failure::new(Code::Unreachable, "QEMU has ended");
        let record = Record {
            form: Record::FORM,
            operation: self.operation,
            vm_name: self.surroundings.vm_name.to_owned(),
            image: image.path().to_owned(),
            image_id: image.id(),
            monitor: self.surroundings.monitor_socket.to_owned(),
            qemu: ProcessIdentity::of(pid).ok_or_else(gone)?,
            shall_run: self.shall_run(),
            is_fed: self.is_lazy(),
            is_of_others: matches!(self.qemu, Some(Qemu::Others(_))),
            point: Point::Marked,
        };
        let folder = self.surroundings.wakes.to_owned();
        let begun = blocking(move || Journal::begin(&folder, record).map_err(|error| not_written(&error)));
        self.journal = Some(begun.await?);
        Ok(())
    }

    async fn advance(&mut self, point: Point) -> Result<(), Failure> {
        let mut journal = self.journal.take().ok_or_else(out_of_order)?;
        let (journal, written) = blocking(move || {
            let record = Record {
                point,
                ..journal.record().clone()
            };
            let written = journal.rewrite(record);
            Ok((journal, written))
        })
        .await?;
        self.journal = Some(journal);
        written.map_err(|error| not_written(&error))
    }

    async fn end_journal(&mut self) -> Result<(), Failure> {
        let Some(journal) = self.journal.take() else {
            return Ok(());
        };
        blocking(move || {
            if let Err(error) = journal.end() {
                tracing::warn!(%error, "the record of a wake that is over could not be removed");
            }
            Ok(())
        })
        .await
    }

    async fn resume(&mut self) -> Result<(), Failure> {
        // From `cont` on the guest may run, whatever becomes of us: it gets all of its memory.
        if let Some(feed) = &self.feed {
            feed.told.release();
        }
        if self.shall_run() {
            resume::run(self.qemu()?.client()).await?;
        }
        self.start_to_running_ms = self
            .qemu_started
            .map(|at| milliseconds(at.elapsed()))
            .unwrap_or_default();
        Ok(())
    }

    fn shall_run(&self) -> bool {
        self.plan.as_ref().is_some_and(|plan| plan.was_running) && !self.request.paused
    }

    async fn follow_up(&mut self) {
        if let Some(qemu) = &self.qemu {
            self.follow_up = follow_up(qemu.client(), qemu.pid(), self.shall_run()).await;
        }
    }

    async fn abandon(&mut self, unmark: bool) -> Result<(), Failure> {
        if self.journal.as_ref().map(|journal| journal.record().point) == Some(Point::Continuing) {
            // The guest has surely not run. Not written down, a person would have to look, were we killed now.
            let _ = self.advance(Point::Marked).await;
        }
        if let Some(Qemu::Ours(mut qemu)) = self.qemu.take() {
            qemu.kill().await?;
        }
        self.ram = None;
        if unmark
            && self
                .image
                .as_ref()
                .is_some_and(|image| image.state() == ImageState::Waking)
        {
            self.mark(ImageState::Sealed).await?;
        }
        self.end_journal().await
    }

    fn planned(&self) -> Result<(&Plan, &Image), Failure> {
        self.plan
            .as_ref()
            .zip(self.image.as_ref())
            .ok_or_else(out_of_order)
    }

    fn qemu(&self) -> Result<&Qemu, Failure> {
        self.qemu.as_ref().ok_or_else(out_of_order)
    }

    /// How the guest is started from now on: what was changed at this wake stays.
    fn command_line(&self) -> Result<Vec<String>, Failure> {
        let mut command_line = self.planned()?.0.recorded.clone();
        command_line.extend_from_slice(&self.request.changes);
        Ok(command_line)
    }

    fn into_woken(self) -> Result<Woken, Failure> {
        let command_line = self.command_line()?;
        let (Some(plan), Some(image), Some(qemu)) = (self.plan, self.image, self.qemu) else {
            return Err(out_of_order());
        };
        Ok(Woken {
            report: Report {
                image: image.path().to_owned(),
                image_id: image.id(),
                mode: plan.mode,
                passed_over: plan.passed_over,
                timings_ms: self.timings_ms,
                start_to_running_ms: self.start_to_running_ms,
                forced_disks: plan.forced_disks,
                follow_up: self.follow_up,
            },
            qemu,
            pages: self.pages,
            image,
            feed: self.feed,
            command_line,
        })
    }
}

fn not_written(error: &std::io::Error) -> Failure {
    Failure::new(
        Code::StorageIo,
        format!("cannot write down how far the wake is: {error}"),
    )
}
