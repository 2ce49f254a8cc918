//! Acts for the move's machine: one effect at a time, with an eye on limits, cancels and the word to switch.

use std::path::Path;
use std::pin::pin;
use std::time::Duration;

use dormouse_qmp::view::machine::RunState;
use dormouse_qmp::{Client, command};
use dormouse_storage::ByteCount;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use uuid::Uuid;

use super::bitmaps;
use super::machine::{Effect, Input, Machine, Phase, Switched};
use super::mirror::{self, BothSides, Start};
use super::nodes::{self, Zeros};
use super::plan::{self, Volume};
use super::record::{Point, Record};
use super::standing::Standing;
use super::word::{Said, Word};
use super::{Report, Request, VolumeProgress, made, recorded, verify};
use crate::error::{Code, Failure, GuestState};
use crate::journal::{Journal, Written};
use crate::machine::effect::{blocking, milliseconds, out_of_order};
use crate::machine::hibernate::runner::Cancel;
use crate::machine::recover::earlier_moves::finish_moves;
use crate::machine::recover::volumes::MoveOutcome;
use crate::vm::graph::Graph;
use crate::vm::monitor;
use crate::vm::process_identity::ProcessIdentity;

/// How often it is looked whether a volume is there that is waited for.
const TARGET_POLL: Duration = Duration::from_millis(200);

/// How often a QEMU that may be ending is looked at.
const END_POLL: Duration = Duration::from_millis(10);

/// How long a QEMU that answers no more is watched for its end.
const END_LIMIT: Duration = Duration::from_secs(5);

/// What the world is told on the way.
#[derive(Debug, Clone, PartialEq)]
pub struct Told {
    /// Where it is.
    pub phase: Phase,
    /// The disks.
    pub volumes: Vec<VolumeProgress>,
    /// What is waited for, where that is somebody's to do.
    pub waiting: Option<String>,
}

/// What others may say to a move.
#[derive(Debug)]
pub struct Heard {
    /// Cancels.
    pub cancels: mpsc::Receiver<Cancel>,
    /// Words on the way.
    pub words: mpsc::Receiver<Word>,
}

/// Moves volumes of the VM behind `client`. Returns when it is over, whichever way.
pub async fn move_volumes(
    operation: Uuid,
    client: Client,
    request: Request,
    told: watch::Sender<Told>,
    mut heard: Heard,
) -> Result<Report, Failure> {
    let (mut machine, first) = Machine::begin(request.by_hand, request.verify);
    let deadline = request.limits.total.map(|total| (Instant::now() + total, total));
    let pace = watch::Sender::new(request.speed_limit);
    let mut work = Work {
        pace: pace.subscribe(),
        pid: client.peer_pid(),
        client,
        operation,
        request,
        told,
        volumes: Vec::new(),
        qemu: None,
        start: Start::Guarded,
        both_sides: BothSides::Never,
        journal: None,
        freeze: None,
        is_recorded: false,
        stops_guest: false,
        is_stopped: false,
        in_motion: Vec::new(),
        remarks: Vec::new(),
    };
    let mut timings: Vec<(Phase, f64)> = Vec::new();
    let mut next = Some(first);
    while let Some(effect) = next {
        let (phase, begun) = (machine.phase(), Instant::now());
        work.told.send_modify(|told| told.phase = phase);
        next = settle(&mut machine, work.act(effect), (&mut heard, &pace), deadline).await;
        timings.push((phase, milliseconds(begun.elapsed())));
    }
    let failure = match machine.failure().cloned() {
        Some(failure) if machine.phase() == Phase::Uncertain => work.look_again(failure).await,
        failure => failure,
    };
    let phase = match failure {
        None => Phase::Moved,
        Some(_) => machine.phase(),
    };
    work.told.send_modify(|told| told.phase = phase);
    let guest = work.guest().await;
    match failure {
        Some(failure) => Err(Failure {
            message: [vec![failure.message], work.remarks].concat().join("; "),
            ..failure
        }
        .with_guest(guest)),
        None => Ok(Report {
            volumes: work.told.borrow().volumes.clone(),
            freeze_ms: work.freeze.map_or(0.0, milliseconds),
            timings_ms: timings,
            remarks: work.remarks,
        }),
    }
}

/// Feeds the machine until it wants something else, or is over.
async fn settle(
    machine: &mut Machine,
    act: impl Future<Output = Input>,
    (heard, pace): (&mut Heard, &watch::Sender<Option<ByteCount>>),
    deadline: Option<(Instant, Duration)>,
) -> Option<Effect> {
    let mut act = pin!(act);
    let (mut acting, mut in_time) = (true, true);
    let limit = async {
        match deadline {
            Some((at, limit)) => {
                tokio::time::sleep_until(at).await;
                limit
            }
            None => std::future::pending().await,
        }
    };
    let mut limit = pin!(limit);
    loop {
        let input = tokio::select! {
            biased;
            Some(answer) = heard.cancels.recv() => {
                // Whoever asked may be gone; the cancel counts all the same.
                let _ = answer.send(machine.answer_to_cancel());
                Input::CancelRequested
            }
            Some(Word { said, answer }) = heard.words.recv() => match said {
                Said::Complete => {
                    let _ = answer.send(machine.waits_for_a_word());
                    Input::CompleteRequested
                }
                Said::Speed(speed) => {
                    let _ = answer.send(machine.has_a_pace());
                    pace.send_replace(speed.map(ByteCount));
                    continue;
                }
            },
            limit = &mut limit, if in_time => {
                in_time = false;
                Input::LimitReached(limit)
            }
            input = &mut act, if acting => {
                acting = false;
                input
            }
            else => Input::Failed(out_of_order()),
        };
        tracing::debug!(phase = ?machine.phase(), ?input, "move of volumes");
        let next = machine.step(input);
        if next.is_some() || machine.is_over() {
            return next;
        }
    }
}

/// What one move has in its hands.
struct Work {
    client: Client,
    pid: Option<u32>,
    operation: Uuid,
    request: Request,
    told: watch::Sender<Told>,
    volumes: Vec<Volume>,
    qemu: Option<ProcessIdentity>,
    start: Start,
    both_sides: BothSides,
    /// The most that is copied in a second, per disk; may change at any time.
    pace: watch::Receiver<Option<ByteCount>>,
    journal: Option<Journal<Record>>,
    freeze: Option<Duration>,
    is_recorded: bool,
    /// Whether the guest runs, and is stopped for the switch.
    stops_guest: bool,
    /// Whether it was.
    is_stopped: bool,
    /// What differed of the copies because it was written at that moment.
    in_motion: Vec<verify::Block>,
    remarks: Vec<String>,
}

impl Work {
    async fn act(&mut self, effect: Effect) -> Input {
        let done = match effect {
            Effect::Preflight => self.preflight().await,
            Effect::Attach => self.attach().await,
            Effect::Mirror => self.mirror().await,
            Effect::Verify => self.verify().await,
            Effect::Hold => {
                let pace = self.pace.clone();
                Err(mirror::hold(&self.client, &self.volumes, pace, |seen| self.tell(seen)).await)
            }
            Effect::Intend => self.intend().await,
            Effect::Complete => self.complete().await,
            Effect::Finalize => self.finalize().await,
            Effect::Check => match self.check().await {
                Ok(switched) => return Input::Checked(switched),
                Err(failure) => Err(failure),
            },
            Effect::Commit => self.commit().await,
            Effect::Release => self.release().await,
            Effect::RollBack => self.roll_back().await,
        };
        match done {
            Ok(()) => Input::Done,
            Err(failure) => Input::Failed(failure),
        }
    }

    fn tell(&self, seen: mirror::Seen) {
        self.told.send_if_modified(|told| {
            let is_new = told.volumes != seen.volumes || told.waiting != seen.waiting;
            (told.volumes, told.waiting) = (seen.volumes, seen.waiting);
            is_new
        });
    }

    /// Waits for volumes that are to be there and are not yet, as long as was said.
    async fn wait_for_targets(&self) -> Result<(), Failure> {
        let Some(patience) = self.request.wait_for_target else {
            return Ok(());
        };
        let deadline = Instant::now() + patience;
        loop {
            let to_be_there = self.request.volumes.iter().filter(|wish| !wish.create);
            let missing = to_be_there.map(|wish| &wish.to).find(|path| !path.exists());
            let waiting = missing.map(|path| format!("{} is not there", path.display()));
            self.told.send_if_modified(|told| {
                let is_new = told.waiting != waiting;
                told.waiting.clone_from(&waiting);
                is_new
            });
            match waiting {
                None => return Ok(()),
                Some(what) if Instant::now() > deadline => {
                    let why = format!("{what} after {patience:?}");
                    return Err(Failure::new(Code::TimedOut, why));
                }
                Some(_) => tokio::time::sleep(TARGET_POLL).await,
            }
        }
    }

    async fn preflight(&mut self) -> Result<(), Failure> {
        let Some(qemu) = self.pid.and_then(ProcessIdentity::of) else {
            return Err(Failure::new(
                Code::Refused,
                "cannot see QEMU's process (another PID namespace?), so an interrupted move could not be told from others",
            ));
        };
        self.wait_for_targets().await?;
        self.volumes = plan::make(&self.client, self.operation, &self.request, self.pid).await?;
        self.both_sides = BothSides::of(&self.client).await?;
        self.start = Start::of(&self.client).await?;
        self.tell(mirror::Seen {
            volumes: self.volumes.iter().map(untouched).collect(),
            waiting: None,
        });
        self.qemu = Some(qemu);
        Ok(())
    }

    async fn attach(&mut self) -> Result<(), Failure> {
        let qemu = self.qemu.ok_or_else(out_of_order)?;
        let (folder, record) = (
            self.request.operations.clone(),
            Record {
                form: Record::FORM,
                operation: self.operation,
                vm_name: self.request.vm_name.clone(),
                monitor: self.request.monitor.clone(),
                machine: self.request.machine.clone(),
                qemu,
                volumes: self.volumes.clone(),
                stops_guest: false,
                is_stopped: false,
                point: Point::Moving,
            },
        );
        let begun =
            blocking(move || Journal::begin(&folder, record).map_err(|error| not_written(&error))).await?;
        self.journal = Some(begun);
        for at in 0..self.volumes.len() {
            if self.volumes[at].target.create {
                let made = self.volumes[at].clone();
                self.volumes[at].made = blocking(move || made.target.make(made.need()).map(Some)).await?;
                // It is known as ours from here on.
                self.write_down(Point::Moving).await?;
            }
        }
        for volume in &self.volumes {
            nodes::attach(&self.client, volume, self.start.zeros(), qemu.pid).await?;
            bitmaps::prepare(&self.client, volume).await?;
        }
        Ok(())
    }

    async fn mirror(&mut self) -> Result<(), Failure> {
        let (client, when_full) = (&self.client, self.request.when_full);
        for volume in &self.volumes {
            mirror::start(client, volume, (self.start, when_full), &self.pace).await?;
        }
        let (stall, pace) = (self.request.limits.stall, self.pace.clone());
        mirror::get_in_step(client, &self.volumes, (self.both_sides, stall), pace, |seen| {
            self.tell(seen)
        })
        .await
    }

    async fn verify(&mut self) -> Result<(), Failure> {
        let looked = verify::Looked::default();
        let (seen, pace) = (looked.clone(), self.pace.clone());
        // The jobs go on, and may fail meanwhile.
        let holding = mirror::hold(&self.client, &self.volumes, pace, |mut told| {
            // One after the other.
            let mut compared = seen.bytes();
            for (told, volume) in told.volumes.iter_mut().zip(&self.volumes) {
                let of_it = compared.min(volume.size_bytes);
                told.compared_bytes = Some(of_it);
                compared -= of_it;
            }
            self.tell(told);
        });
        let in_motion = tokio::select! {
            failure = holding => return Err(failure),
            in_motion = verify::compare(&self.volumes, looked) => in_motion?,
        };
        self.in_motion = in_motion;
        Ok(())
    }

    async fn intend(&mut self) -> Result<(), Failure> {
        let graph = Graph::of(&self.client).await?;
        for volume in &self.volumes {
            // Unplugged, or given another disk, while it was copied.
            if Standing::of(&graph, volume) != Standing::Old {
                return Err(Failure::new(
                    Code::Refused,
                    format!("{} is not the disk any more that it was", volume.label),
                ));
            }
        }
        self.stops_guest = mirror::stops_guest(&self.client).await?
            && monitor::run_state(&self.client).await? == RunState::Running;
        self.write_down(Point::Intending).await
    }

    async fn complete(&mut self) -> Result<(), Failure> {
        self.freeze = None;
        let begun = Instant::now();
        if self.stops_guest {
            // Whatever comes of that: who undoes it looks whether the guest stands still.
            self.is_stopped = true;
            self.client.execute(&command::stop {}).await?;
            self.write_down(Point::Intending).await?;
        }
        let limit = self.request.limits.freeze;
        let still = async {
            mirror::complete(&self.client, &self.volumes, limit).await?;
            verify::compare_still(&self.volumes, &self.in_motion).await?;
            bitmaps::carry(&self.client, &self.volumes, self.request.drop_bitmaps).await
        };
        // The guest's writes wait for all of it, and storage may answer nothing.
        let completed = tokio::time::timeout(limit, still)
            .await
            .unwrap_or_else(|_| Err(too_long(limit)));
        self.freeze = Some(begun.elapsed());
        completed
    }

    async fn finalize(&mut self) -> Result<(), Failure> {
        let begun = Instant::now();
        let finalized = mirror::finalize(&self.client, &self.volumes).await;
        if finalized.is_ok() && self.is_stopped {
            go_on(&self.client).await?;
        }
        self.freeze = self.freeze.map(|freeze| freeze + begun.elapsed());
        finalized
    }

    async fn check(&mut self) -> Result<Switched, Failure> {
        let graph = Graph::of(&self.client).await?;
        let standings = Standing::of_all(&graph, &self.volumes);
        self.told.send_modify(|told| {
            for (volume, standing) in told.volumes.iter_mut().zip(&standings) {
                volume.switched = *standing == Standing::New;
            }
        });
        let are_all = |wanted| standings.iter().all(|standing| *standing == wanted);
        if are_all(Standing::New) && self.is_stopped {
            // Where a job was switched and told an error it stands still yet.
            go_on(&self.client).await?;
        }
        Ok(match () {
            () if are_all(Standing::New) => Switched::All,
            () if are_all(Standing::Old) => Switched::None,
            () => Switched::Some,
        })
    }

    async fn commit(&mut self) -> Result<(), Failure> {
        self.write_down(Point::Committed).await?;
        let qemu = self.qemu.ok_or_else(out_of_order)?;
        for volume in &self.volumes {
            let lost = volume.bitmaps.lost.iter();
            self.remarks
                .extend(lost.map(|what| format!("{}: without the dirty bitmap {what}", volume.label)));
            if !volume.snapshots.is_empty() {
                self.remarks.push(format!(
                    "{}: its internal snapshots ({}) are in {} only",
                    volume.label,
                    volume.snapshots.join(", "),
                    volume.old_file.display()
                ));
            }
        }
        let remarks = recorded::update(&self.client, &self.request.machine, qemu, &self.volumes).await?;
        self.remarks.extend(remarks);
        self.is_recorded = true;
        Ok(())
    }

    async fn release(&mut self) -> Result<(), Failure> {
        let remarks = release(&self.client, &self.volumes, self.pid).await?;
        self.remarks.extend(remarks);
        // What could not be recorded yet is tried once more.
        if self.is_recorded {
            self.end_journal().await;
        }
        Ok(())
    }

    async fn roll_back(&mut self) -> Result<(), Failure> {
        let qemu = self.qemu.ok_or_else(out_of_order)?;
        self.remarks = roll_back(&self.client, &self.volumes, qemu, self.is_stopped).await?;
        self.end_journal().await;
        Ok(())
    }

    /// A failure that left open where the guest is: what a recovery would do is done now, since no job may be left that
    /// the guest's writes wait for. `None`: it is on its new volumes, as it should be.
    async fn look_again(&mut self, failure: Failure) -> Option<Failure> {
        self.journal = None;
        let ended = match finish_moves(&self.client, &self.request.operations).await {
            Ok(ended) => ended,
            Err(still) => {
                self.remarks.push(still.to_string());
                return Some(failure);
            }
        };
        let ended = ended.into_iter().find(|ended| ended.operation == self.operation);
        let Some(ended) = ended else { return Some(failure) };
        self.remarks.extend(ended.remarks);
        if ended.outcome == MoveOutcome::VolumesMoved {
            self.told
                .send_modify(|told| told.volumes.iter_mut().for_each(|volume| volume.switched = true));
            self.remarks.push(failure.message);
            return None;
        }
        self.remarks.push(ended.outcome.text().to_owned());
        Some(failure)
    }

    async fn write_down(&mut self, point: Point) -> Result<(), Failure> {
        let mut journal = self.journal.take().ok_or_else(out_of_order)?;
        let record = Record {
            volumes: self.volumes.clone(),
            stops_guest: self.stops_guest,
            is_stopped: self.is_stopped,
            point,
            ..journal.record().clone()
        };
        let (journal, written) = blocking(move || {
            let written = journal.rewrite(record);
            Ok((journal, written))
        })
        .await?;
        self.journal = Some(journal);
        written.map_err(|error| not_written(&error))
    }

    /// The disks are where they belong. A record that stays says nothing else, and is ended by a recovery.
    async fn end_journal(&mut self) {
        let Some(journal) = self.journal.take() else {
            return;
        };
        if let Err(failure) = blocking(move || journal.end().map_err(|error| not_written(&error))).await {
            self.remarks.push(format!(
                "{failure}; the next operation on the guest ends it, or `dormouse recover`"
            ));
        }
    }

    async fn guest(&self) -> GuestState {
        match monitor::run_state(&self.client).await {
            Ok(RunState::Running) => GuestState::Running,
            Ok(_) => GuestState::Paused,
            Err(_) => match self.pid.and_then(ProcessIdentity::of) {
                None => GuestState::Stopped,
                Some(_) => GuestState::Unknown,
            },
        }
    }
}

fn too_long(limit: Duration) -> Failure {
    let why = format!(
        "the volumes are not ready to be switched {limit:?} after they were to stand still, and the guest's writes wait"
    );
    Failure::new(Code::TimedOut, why)
}

fn not_written(error: &std::io::Error) -> Failure {
    Failure::new(
        Code::StorageIo,
        format!("cannot keep the operation's record: {error}"),
    )
}

fn untouched(volume: &Volume) -> VolumeProgress {
    VolumeProgress {
        disk: volume.label.clone(),
        from: volume.old_file.display().to_string(),
        to: volume.target.path.clone(),
        done_bytes: 0,
        total_bytes: volume.size_bytes,
        ready: false,
        speed_limit_bytes: None,
        compared_bytes: None,
        switched: false,
    }
}

/// Lets a guest go on that was stopped for the switch.
pub async fn go_on(client: &Client) -> Result<(), Failure> {
    if monitor::run_state(client).await? == RunState::Paused {
        client.execute(&command::cont {}).await?;
    }
    Ok(())
}

/// Lets go of the old volumes of a guest that is on its new ones. Returns what could not be, and does no harm.
pub async fn release(client: &Client, volumes: &[Volume], pid: Option<u32>) -> Result<Vec<String>, Failure> {
    let mut remarks = Vec::new();
    mirror::end(client, volumes).await?;
    for volume in volumes {
        if volume.detect_zeroes != "unmap"
            && let Err(failure) = nodes::reopen(client, volume, Zeros::AsBefore(&volume.detect_zeroes)).await
        {
            remarks.push(format!(
                "{}: zeros are still looked for in what it writes: {failure}",
                volume.label
            ));
        }
        for node in nodes::remove(client, &volume.old_chain).await? {
            remarks.push(format!(
                "{}: node {node} of the old volume is still there",
                volume.label
            ));
        }
    }
    let graph = Graph::of(client).await?;
    // What others use of an old chain, a common base image, stays open for them.
    let gone = |volume: &&Volume| volume.old_chain.iter().all(|node| graph.node(node).is_none());
    let files: Vec<&Path> = volumes
        .iter()
        .filter(gone)
        .map(|volume| volume.old_file.as_path())
        .collect();
    for file in nodes::still_open(pid, &files).into_iter().flatten() {
        remarks.push(format!("QEMU still has {} open", file.display()));
    }
    Ok(remarks)
}

/// Ends the jobs of a guest that is on its old volumes, closes the targets, and removes those that were made; a QEMU that
/// is gone has done the first two. `volumes`: all of the move. Returns what is left.
pub async fn roll_back(
    client: &Client,
    volumes: &[Volume],
    qemu: ProcessIdentity,
    stops_guest: bool,
) -> Result<Vec<String>, Failure> {
    let removed = async {
        close_targets(client, volumes, stops_guest).await?;
        made::remove(client, qemu, volumes).await
    };
    match removed.await {
        Err(_) if is_gone(qemu).await => Ok(made::left(volumes)),
        removed => removed,
    }
}

/// Ends the jobs of disks that are not on their targets, and closes those.
pub async fn close_targets(client: &Client, volumes: &[Volume], stops_guest: bool) -> Result<(), Failure> {
    mirror::end(client, volumes).await?;
    if stops_guest {
        go_on(client).await?;
    }
    for volume in volumes {
        let names = [volume.names.format.clone(), volume.names.file.clone()];
        if let Some(node) = nodes::remove(client, &names).await?.first() {
            return Err(Failure::new(
                Code::Refused,
                format!("node {node} cannot be closed"),
            ));
        }
    }
    Ok(())
}

/// Whether QEMU is gone; one that is ending is waited for.
async fn is_gone(qemu: ProcessIdentity) -> bool {
    let deadline = Instant::now() + END_LIMIT;
    while qemu.is_alive() {
        if Instant::now() > deadline {
            return false;
        }
        tokio::time::sleep(END_POLL).await;
    }
    true
}
