//! The mirror jobs of a move: started, watched until all are in step, and switched one after the other.
//!
//! Nothing here trusts an event: what a job does is asked for, by its id, so that whoever takes over after a crash sees
//! the same.

use std::time::Duration;

use dormouse_qmp::capabilities::{Capabilities, MirrorSafety, active_mirror_may_abort, mirror_loses_writes};
use dormouse_qmp::view::job::{BlockJobInfo, IoStatus, JobInfo, JobStatus};
use dormouse_qmp::{Client, command};
use dormouse_storage::ByteCount;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;

use super::nodes::{self, Zeros};
use super::plan::Volume;
use super::word::for_qemu;
use super::{VolumeProgress, WhenFull};
use crate::error::{Code, Failure};

/// How often the jobs are looked at while they copy.
const POLL: Duration = Duration::from_millis(50);

/// How often they are looked at while somebody waits for them.
const QUICK_POLL: Duration = Duration::from_millis(1);

/// How long a job may take to mark its disk, which is no I/O, and to end when it is told to.
const STEP_LIMIT: Duration = Duration::from_secs(60);

/// How often a job that a full volume has paused is let go on.
const RETRY_INTERVAL: Duration = Duration::from_secs(2);

/// How long there may be no less left to copy than ever before until the guest is made to wait for its writes to reach
/// the new volume too.
const CONVERGENCE_PATIENCE: Duration = Duration::from_secs(5);

/// The most that is copied in a second, per disk, as it is changed on the way.
pub type Pace = watch::Receiver<Option<ByteCount>>;

/// How the jobs stand.
#[derive(Debug, Clone, PartialEq)]
pub struct Seen {
    /// How far each is.
    pub volumes: Vec<VolumeProgress>,
    /// What is waited for, where that is somebody's to do.
    pub waiting: Option<String>,
}

/// Whether each write of the guest can be made to go to both volumes before it is acknowledged, which lets any job get in
/// step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BothSides {
    /// Once it is needed: when all are in step, or there is no less and less to copy.
    WhenNeeded,
    /// Never. This QEMU cannot change it on the way; and QEMU 7.2, which could from the start, loses writes then, and
    /// corrupts its memory when such a job is cancelled. Or it may end itself over it
    /// ([`active_mirror_may_abort`]).
    Never,
}

impl BothSides {
    /// What this QEMU can do.
    pub async fn of(client: &Client) -> Result<Self, Failure> {
        let capabilities = Capabilities::of(client).await?;
        let can = capabilities.has_command("block-job-change") && !active_mirror_may_abort(client.greeting());
        Ok(if can { Self::WhenNeeded } else { Self::Never })
    }
}

/// Whether the guest is stopped for the switch. QEMU 7.2 ends itself (a write without permission) when a job is finalized
/// while a write of the guest's waits for it; 10.0 and 11.1 do not. What is between has not been tried, so only those are
/// trusted, by a command that came with 10.0.
pub async fn stops_guest(client: &Client) -> Result<bool, Failure> {
    Ok(!Capabilities::of(client).await?.has_command("blockdev-set-active"))
}

/// How jobs are started so that no write of the guest is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// Plainly.
    Plain,
    /// With a target that cannot be unmapped, until all of the disk is marked as to be copied.
    Guarded,
}

impl Start {
    /// What this QEMU needs.
    pub async fn of(client: &Client) -> Result<Self, Failure> {
        let capabilities = Capabilities::of(client).await?;
        match mirror_loses_writes(client.greeting(), &capabilities) {
            MirrorSafety::Safe => Ok(Self::Plain),
            MirrorSafety::Affected { .. } => Ok(Self::Guarded),
            MirrorSafety::NoMirror => Err(Failure::new(Code::Refused, "this QEMU cannot mirror disks")),
        }
    }

    /// How targets are opened.
    pub fn zeros(self) -> Zeros<'static> {
        match self {
            Self::Plain => Zeros::Unmapped,
            Self::Guarded => Zeros::Written,
        }
    }
}

/// Starts the job of one volume.
pub async fn start(
    client: &Client,
    volume: &Volume,
    (how, when_full): (Start, WhenFull),
    pace: &Pace,
) -> Result<(), Failure> {
    let speed = match how {
        Start::Plain => for_qemu(*pace.borrow()),
        // What is copied before the target may be unmapped is not sparse, so that is little.
        Start::Guarded => 1,
    };
    let arguments = json!({
        "job-id": volume.names.job,
        "device": volume.old_root,
        "target": volume.names.format,
        "filter-node-name": volume.names.filter,
        "sync": "full",
        "copy-mode": "background",
        "speed": speed,
        "on-source-error": "report",
        "on-target-error": match when_full {
            WhenFull::Stop => "report",
            // It pauses for that error only.
            WhenFull::Wait => "enospc",
        },
        "auto-finalize": false,
        "auto-dismiss": false,
    });
    client
        .execute_raw("blockdev-mirror", arguments)
        .await
        .map_err(|error| Failure::from(error).while_doing(&volume.label))?;
    if how == Start::Guarded {
        make_sparse(client, volume).await?;
        let speed = *pace.borrow();
        set_speed(client, volume, speed).await?;
    }
    Ok(())
}

async fn set_speed(client: &Client, volume: &Volume, speed: Option<ByteCount>) -> Result<(), Failure> {
    let speed = json!({"device": volume.names.job, "speed": for_qemu(speed)});
    client
        .execute_raw("block-job-set-speed", speed)
        .await
        .map_err(|error| Failure::from(error).while_doing(&volume.label))?;
    Ok(())
}

/// Brings the jobs to a pace that was changed.
async fn keep_pace(client: &Client, volumes: &[Volume], pace: &mut Pace) -> Result<(), Failure> {
    if pace.has_changed().unwrap_or(false) {
        let speed = *pace.borrow_and_update();
        for volume in volumes {
            set_speed(client, volume, speed).await?;
        }
    }
    Ok(())
}

/// Lets jobs go on that a full volume has paused: if it is full still they pause again.
async fn retry(client: &Client, volumes: &[Volume], jobs: &[Job]) -> Result<(), Failure> {
    for (volume, _) in volumes.iter().zip(jobs).filter(|(_, job)| job.is_full) {
        let resume = command::job_resume {
            id: volume.names.job.clone(),
        };
        match client.execute(&resume).await {
            // Somebody else was faster.
            Ok(_) | Err(dormouse_qmp::CommandError::Qemu { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Waits until the job has marked all of its disk as to be copied, and lets the target be sparse from then on.
async fn make_sparse(client: &Client, volume: &Volume) -> Result<(), Failure> {
    let deadline = Instant::now() + STEP_LIMIT;
    loop {
        let jobs = look(client, std::slice::from_ref(volume)).await?;
        // Until it has, it tells a length of 0.
        if jobs.iter().any(|job| job.length_bytes > 0) {
            break;
        }
        if Instant::now() > deadline {
            let why = format!(
                "{}: the job has not begun to copy after {STEP_LIMIT:?}",
                volume.label
            );
            return Err(Failure::new(Code::TimedOut, why));
        }
        tokio::time::sleep(QUICK_POLL).await;
    }
    nodes::reopen(client, volume, Zeros::Unmapped)
        .await
        .map_err(|failure| failure.while_doing(&volume.label))
}

/// Waits until all jobs are in step. `tell` is told how far they are; `stall`: how long it may go without there being
/// less to copy than ever before.
pub async fn get_in_step(
    client: &Client,
    volumes: &[Volume],
    (both_sides, stall): (BothSides, Duration),
    mut pace: Pace,
    tell: impl Fn(Seen),
) -> Result<(), Failure> {
    let (mut least_left, mut since) = (u64::MAX, Instant::now());
    let (mut asked, mut retried) = (false, Instant::now());
    loop {
        keep_pace(client, volumes, &mut pace).await?;
        let jobs = look(client, volumes).await?;
        tell(seen(volumes, &jobs));
        let left = jobs.iter().map(Job::left_bytes).sum();
        let is_full = jobs.iter().any(|job| job.is_full);
        if is_full && retried.elapsed() > RETRY_INTERVAL {
            retry(client, volumes, &jobs).await?;
            retried = Instant::now();
        }
        // Waiting for room is not waiting in vain.
        if left < least_left || is_full {
            (least_left, since) = (least_left.min(left), Instant::now());
        }
        let all_ready = jobs.iter().all(|job| job.ready);
        let waited = since.elapsed();
        if both_sides == BothSides::WhenNeeded && !asked && (all_ready || waited > CONVERGENCE_PATIENCE) {
            for volume in volumes {
                write_to_both_sides(client, volume).await?;
            }
            asked = true;
        }
        // A job that waits for room was in step before, at the most.
        let in_step = all_ready
            && !is_full
            && (both_sides != BothSides::WhenNeeded || jobs.iter().all(|job| job.both_sides));
        if in_step {
            return Ok(());
        }
        if waited > stall {
            return Err(Failure::new(
                Code::TimedOut,
                format!(
                    "there are {left} bytes left to copy, and there were no less than {least_left} for {waited:.0?}: the \
                     new volume is slower than the guest writes, or does not answer"
                ),
            ));
        }
        tokio::time::sleep(if all_ready { QUICK_POLL } else { POLL }).await;
    }
}

async fn write_to_both_sides(client: &Client, volume: &Volume) -> Result<(), Failure> {
    let change = json!({"id": volume.names.job, "type": "mirror", "copy-mode": "write-blocking"});
    client
        .execute_raw("block-job-change", change)
        .await
        .map_err(|error| Failure::from(error).while_doing(&volume.label))?;
    Ok(())
}

/// Watches jobs that are in step until one fails.
pub async fn hold(client: &Client, volumes: &[Volume], mut pace: Pace, tell: impl Fn(Seen)) -> Failure {
    let mut retried = Instant::now();
    loop {
        let looked = async {
            keep_pace(client, volumes, &mut pace).await?;
            let jobs = look(client, volumes).await?;
            tell(seen(volumes, &jobs));
            if retried.elapsed() > RETRY_INTERVAL {
                retry(client, volumes, &jobs).await?;
                retried = Instant::now();
            }
            Ok(())
        };
        if let Err(failure) = looked.await {
            return failure;
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Has all jobs copy what is left and stand still. The guest's writes wait from then on, so there is a limit.
pub async fn complete(client: &Client, volumes: &[Volume], limit: Duration) -> Result<(), Failure> {
    let deadline = Instant::now() + limit;
    for volume in volumes {
        // Nothing is held back while the guest waits.
        set_speed(client, volume, None).await?;
    }
    for volume in volumes {
        // Once, and never again: QEMU does not take it twice.
        client
            .execute(&command::job_complete {
                id: volume.names.job.clone(),
            })
            .await
            .map_err(|error| Failure::from(error).while_doing(&volume.label))?;
    }
    loop {
        let jobs = look(client, volumes).await?;
        if jobs.iter().all(|job| job.status == JobStatus::Pending) {
            return Ok(());
        }
        if let Some(what) = full(volumes, &jobs) {
            return Err(Failure::new(Code::NoSpace, what));
        }
        if Instant::now() > deadline {
            return Err(Failure::new(
                Code::TimedOut,
                format!(
                    "the volumes do not stand still {limit:?} after they were told to, and the guest's writes wait"
                ),
            ));
        }
        tokio::time::sleep(QUICK_POLL).await;
    }
}

/// Switches the volumes, one after the other, and stops at the first that cannot be: as long as that is the first of
/// all, none is.
pub async fn finalize(client: &Client, volumes: &[Volume]) -> Result<(), Failure> {
    for volume in volumes {
        let finalize = command::job_finalize {
            id: volume.names.job.clone(),
        };
        client
            .execute(&finalize)
            .await
            .map_err(|error| Failure::from(error).while_doing(&volume.label))?;
        if let Some(error) = wait_for_end(client, &volume.names.job).await? {
            return Err(job_failure(&volume.label, &error));
        }
    }
    Ok(())
}

/// Ends what there is of the jobs of these volumes, whichever way, and has QEMU forget them.
pub async fn end(client: &Client, volumes: &[Volume]) -> Result<(), Failure> {
    let jobs: Vec<JobInfo> = client.query(&command::query_jobs {}).await?;
    let is_ours = |id: &str| {
        volumes
            .iter()
            .any(|volume| volume.names.job == id || volume.names.create == id)
    };
    let ours: Vec<&JobInfo> = jobs.iter().filter(|job| is_ours(&job.id)).collect();
    for job in &ours {
        if !job.status.is_terminal() {
            // One that ends just now is waited for all the same.
            let _ = client.execute(&command::job_cancel { id: job.id.clone() }).await;
        }
    }
    for job in ours {
        wait_for_end(client, &job.id).await?;
        match client.execute(&command::job_dismiss { id: job.id.clone() }).await {
            Ok(_) | Err(dormouse_qmp::CommandError::Qemu { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Waits until a job has ended, and returns why it failed, if it did.
async fn wait_for_end(client: &Client, id: &str) -> Result<Option<String>, Failure> {
    let deadline = Instant::now() + STEP_LIMIT;
    loop {
        let jobs: Vec<JobInfo> = client.query(&command::query_jobs {}).await?;
        match jobs.into_iter().find(|job| job.id == id) {
            None => return Ok(None),
            Some(job) if job.status.is_terminal() => return Ok(job.error),
            Some(job) if Instant::now() > deadline => {
                let why = format!("job {id} is still {} after {STEP_LIMIT:?}", job.status);
                return Err(Failure::new(Code::TimedOut, why));
            }
            Some(_) => tokio::time::sleep(QUICK_POLL).await,
        }
    }
}

/// What matters of a job that has to go on.
#[derive(Debug, Clone)]
struct Job {
    status: JobStatus,
    length_bytes: u64,
    offset_bytes: u64,
    ready: bool,
    both_sides: bool,
    /// Whether a full volume has paused it.
    is_full: bool,
    speed_limit_bytes: Option<u64>,
}

impl Job {
    /// A job that has not looked at its disk yet has all of it left.
    fn left_bytes(&self) -> u64 {
        match self.length_bytes {
            0 => u64::MAX / 1024,
            length => length.saturating_sub(self.offset_bytes),
        }
    }
}

/// All jobs of these volumes, in their order; one that has ended is a failure.
async fn look(client: &Client, volumes: &[Volume]) -> Result<Vec<Job>, Failure> {
    let jobs: Vec<BlockJobInfo> = client.query(&command::query_block_jobs {}).await?;
    let mut found = Vec::with_capacity(volumes.len());
    for volume in volumes {
        let job = jobs.iter().find(|job| job.id == volume.names.job);
        let Some(job) = job else {
            return Err(Failure::new(
                Code::Refused,
                format!("{}: its job is gone; did somebody else end it?", volume.label),
            ));
        };
        let status = job.status.clone().unwrap_or(JobStatus::Running);
        if status.is_terminal() || status == JobStatus::Aborting {
            let error = match &job.error {
                Some(error) => error.clone(),
                // In 11.1 the block job tells none where the job does.
                None => error_of(client, &job.id).await?,
            };
            return Err(job_failure(&volume.label, &error));
        }
        found.push(Job {
            ready: job.ready,
            both_sides: job.actively_synced == Some(true),
            is_full: job.io_status == Some(IoStatus::NoSpace),
            speed_limit_bytes: job.speed_bytes_per_second.filter(|speed| *speed > 0),
            length_bytes: job.length_bytes.unwrap_or(0),
            offset_bytes: job.offset_bytes.unwrap_or(0),
            status,
        });
    }
    Ok(found)
}

async fn error_of(client: &Client, id: &str) -> Result<String, Failure> {
    let jobs: Vec<JobInfo> = client.query(&command::query_jobs {}).await?;
    let job = jobs.into_iter().find(|job| job.id == id);
    let error = job.and_then(|job| job.error);
    Ok(error.unwrap_or_else(|| "the job was ended".to_owned()))
}

/// QEMU has no codes for these; its words are the C library's.
fn job_failure(label: &str, error: &str) -> Failure {
    let code = match error {
        _ if error.contains("No space left") => Code::NoSpace,
        _ if error.contains("Input/output error") => Code::StorageIo,
        _ => Code::Refused,
    };
    Failure::new(code, format!("{label}: {error}"))
}

/// Which volumes are full, if any is.
fn full(volumes: &[Volume], jobs: &[Job]) -> Option<String> {
    let full = volumes.iter().zip(jobs).filter(|(_, job)| job.is_full);
    let full: Vec<String> = full
        .map(|(volume, _)| format!("{}: {} is full", volume.label, volume.target.path.display()))
        .collect();
    (!full.is_empty()).then(|| full.join("; "))
}

fn seen(volumes: &[Volume], jobs: &[Job]) -> Seen {
    Seen {
        volumes: progress(volumes, jobs),
        waiting: full(volumes, jobs).map(|what| format!("{what}; the copy goes on when there is room")),
    }
}

fn progress(volumes: &[Volume], jobs: &[Job]) -> Vec<VolumeProgress> {
    let of = |(volume, job): (&Volume, &Job)| VolumeProgress {
        disk: volume.label.clone(),
        from: volume.old_file.display().to_string(),
        to: volume.target.path.clone(),
        done_bytes: job.offset_bytes,
        total_bytes: job.length_bytes,
        ready: job.ready,
        speed_limit_bytes: job.speed_limit_bytes,
        compared_bytes: None,
        switched: false,
    };
    volumes.iter().zip(jobs).map(of).collect()
}
