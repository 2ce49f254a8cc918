//! The part of `dormouse recover` for wakes.

use uuid::Uuid;

use super::{Wanted, records, unreadable};
use crate::cli::report::Report;
use crate::error::{Code, Failure, GuestState};
use crate::journal::{self, Found};
use crate::machine::recover::wake_runner::{RecoveredWake, WakeOutcome, recover as recover_one};
use crate::machine::wake::record::Record;
use crate::supervisor::state_dir::StateDir;

/// The wakes that are meant.
pub(super) fn look(state: &StateDir, wanted: &Wanted) -> Result<Vec<Found<Record>>, Failure> {
    let found = records::<Record>(&state.wakes())?;
    let is_wanted = |found: &Found<Record>| match found {
        Found::Interrupted(journal) => takes(wanted, journal.record()),
        Found::UnderWay(record) => takes(wanted, record),
        // It may be of any.
        Found::Unreadable { .. } => true,
    };
    Ok(found.into_iter().filter(is_wanted).collect())
}

fn takes(wanted: &Wanted, record: &Record) -> bool {
    wanted.takes_vm(&record.vm_name, &record.monitor)
}

/// Brings each to its end and tells which. Returns the worst that came of it, and which were not: whether their guests may be
/// fed is not known.
pub(super) async fn recover(
    wakes: Vec<Found<Record>>,
    state: &StateDir,
    wanted: &Wanted,
    report: &Report,
) -> (Option<Code>, Vec<Uuid>) {
    let (mut worst, mut unsettled) = (None, Vec::new());
    for found in wakes {
        unsettled.extend(match &found {
            Found::Interrupted(journal) => Some(journal.record().operation),
            Found::UnderWay(record) => Some(record.operation),
            Found::Unreadable { path, .. } => {
                let stem = path.file_stem().and_then(|stem| stem.to_str());
                stem.and_then(|stem| stem.parse().ok())
            }
        });
        let failure = match found {
            Found::Interrupted(journal) => {
                let record = journal.record().clone();
                match recover_one(*journal).await {
                    Ok(recovered) => {
                        unsettled.retain(|wake| *wake != record.operation);
                        if recovered.guest == GuestState::Stopped {
                            free_name(state, &record).await;
                        }
                        report.result(&recovered, &describe(&recovered));
                        continue;
                    }
                    Err(failure) => failure.while_doing(&title(&record)),
                }
            }
            // Nothing is wrong with it, so only who asks for it by name is told.
            Found::UnderWay(_) if matches!(wanted, Wanted::All) => continue,
            Found::UnderWay(record) => {
                Failure::new(Code::Refused, format!("{}: it is under way", title(&record)))
            }
            Found::Unreadable { path, why } => unreadable(&path, &why),
        };
        report.failure(&failure);
        worst = worst.max(Some(failure.code));
    }
    (worst, unsettled)
}

/// Before a VM of this name starts: a wake whose QEMU is gone is ended.
pub async fn sweep(name: &str, state: &StateDir) {
    for found in journal::find_all::<Record>(&state.wakes()).unwrap_or_default() {
        let Found::Interrupted(journal) = found else {
            continue;
        };
        let record = journal.record();
        if record.vm_name != *name || record.qemu.is_alive() {
            continue;
        }
        let title = title(record);
        match recover_one(*journal).await {
            Ok(recovered) => tracing::info!(outcome = ?recovered.outcome, "{title}: recovered"),
            Err(failure) => tracing::warn!(%failure, "{title}: `dormouse recover` says what is to be done"),
        }
    }
}

/// An image whose wake was interrupted is not woken while that wake's QEMU is there: its guest is in both.
pub fn check_not_interrupted(image: Uuid, state: &StateDir) -> Result<(), Failure> {
    refuse_if(state, |record| record.image_id == image)
}

/// A guest whose wake was interrupted is not saved anew before that is over: its image may be sealed again.
pub fn check_over(pid: Option<u32>, state: &StateDir) -> Result<(), Failure> {
    refuse_if(state, |record| Some(record.qemu.pid) == pid)
}

fn refuse_if(state: &StateDir, is_meant: impl Fn(&Record) -> bool) -> Result<(), Failure> {
    for found in records::<Record>(&state.wakes())? {
        let journal = match found {
            Found::Interrupted(journal) => journal,
            Found::UnderWay(_) => continue,
            Found::Unreadable { path, why } => return Err(unreadable(&path, &why)),
        };
        let record = journal.record();
        if is_meant(record) && record.qemu.is_alive() {
            return Err(Failure::new(
                Code::Refused,
                format!(
                    "the {} was interrupted, and QEMU's process {} is still there: `dormouse recover` ends that first",
                    title(record),
                    record.qemu.pid
                ),
            ));
        }
    }
    Ok(())
}

/// The folder of a VM whose supervisor was killed goes with its QEMU.
async fn free_name(state: &StateDir, record: &Record) {
    let folder = state.path().join(&record.vm_name);
    if state.is_monitor_of(&record.vm_name, &record.monitor) && folder.exists() {
        // Taken and dropped. Somebody else may take it as well.
        let _ = state.claim(&record.vm_name, None).await;
    }
}

fn title(record: &Record) -> String {
    format!("wake {} of {}", record.operation, record.vm_name)
}

fn describe(recovered: &RecoveredWake) -> String {
    let (name, image) = (&recovered.name, recovered.image.display());
    let what = match recovered.outcome {
        WakeOutcome::Awake => format!(
            "awake, without a supervisor; its image {image} is used up (where its memory is mapped from it, keep it as long as \
             QEMU runs)"
        ),
        WakeOutcome::NotWoken => format!("not woken, its guest has not run; wake it again from {image}"),
        WakeOutcome::HasEnded => "it was awake, and QEMU has ended since".to_owned(),
        WakeOutcome::BeingFed => format!("awake, and its memory is still in {image}, which must stay"),
    };
    format!("{name}: {what}")
}
