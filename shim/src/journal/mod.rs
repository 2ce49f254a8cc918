//! The journal: one small file for each operation under way, from which it can be ended well when its process is
//! killed. This is how it is kept, whatever the operation; what is drawn here is a hibernation's, and each other kind
//! has a folder and a record of its own.
//!
//! ```text
//! STATE-DIR/.operations/ID.json    the record, locked by who works on the operation
//!                       .ID.new    the next one, on its way to that name
//!
//!  hibernation   reserve  stop  devices  RAM ────────┐  seal          quit
//!  record      Saving                    └► Sealing ─┘       Sealed        (removed)
//!                └────────── a rollback after Sealing: Returning ─────────►(removed)
//!
//!  snapshot      reserve  stop  devices  RAM  guest given back ─────┐  seal
//!  record      Saving                                   └► Sealing ─┘  (removed)
//! ```
//!
//! What is guaranteed:
//!
//! * **A record is whole or not there.** It is written beside its name, synced, and takes the name in one step; the
//!   folder is synced after it. One that cannot be read nevertheless is told, and nothing is guessed or touched.
//! * **The file at the name is locked as long as its process lives**: the next one is locked before it takes the name.
//!   So an interrupted operation is told from one that is under way, and one process works on it at a time.
//! * **What a record announces has not been done when it is not there.** Only `Saving` is written before the guest is
//!   stopped, and `Sealing` while RAM is: the pause has no sync of the journal in it.
//!
//! The folder has a name that no VM can have. It lies in the state directory, which a reboot takes away as it takes
//! QEMU; where it does not, there is nothing to do but to remove what is left.

mod record;

use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock};
use rustix::io::{Errno, retry_on_intr};
use serde::Serialize;
use serde::de::DeserializeOwned;
use uuid::Uuid;

pub use record::{FORM, Point, Record};

use crate::vm::file_identity::FileIdentity;

/// The longest record that is read.
const RECORD_LIMIT: u64 = 1 << 20;

/// A kind of record.
pub trait Written: Serialize + DeserializeOwned + Clone {
    /// The form that this version writes, and the newest that it reads.
    const FORM: u32;

    /// The operation that it is of.
    fn operation(&self) -> Uuid;
}

impl Written for Record {
    const FORM: u32 = FORM;

    fn operation(&self) -> Uuid {
        self.operation
    }
}

/// An operation's record, held. Dropped, it stays: for who comes next.
#[derive(Debug)]
pub struct Journal<R = Record> {
    folder: PathBuf,
    record: R,
    /// The file at the name, open for its lock.
    held: File,
}

/// What is found under an operation's name.
#[derive(Debug)]
pub enum Found<R = Record> {
    /// Its process is gone; nobody else works on it as long as this is held.
    Interrupted(Box<Journal<R>>),
    /// Somebody works on it.
    UnderWay(Box<R>),
    /// A record that cannot be read.
    Unreadable {
        /// The record.
        path: PathBuf,
        /// Why not.
        why: String,
    },
}

impl<R: Written> Journal<R> {
    /// Begins the journal of an operation in `folder`. Fails with [`io::ErrorKind::AlreadyExists`] if there is a record of
    /// that id, which belongs to somebody else or waits for its recovery.
    pub fn begin(folder: &Path, record: R) -> io::Result<Self> {
        let held = loop {
            DirBuilder::new().recursive(true).mode(0o700).create(folder)?;
            let (held, synced) = match write(folder, &record, Place::First) {
                // Whoever ended the last operation took the folder away.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                written => written?,
            };
            if synced.is_err() {
                // Nothing was begun.
                let _ = fs::remove_file(name_of(folder, record.operation()));
            }
            synced?;
            break held;
        };
        Ok(Self {
            folder: folder.to_owned(),
            record,
            held,
        })
    }

    /// What is written down.
    pub fn record(&self) -> &R {
        &self.record
    }

    /// Puts another record in the place of this one.
    pub fn rewrite(&mut self, record: R) -> io::Result<()> {
        let (held, synced) = write(&self.folder, &record, Place::Next)?;
        // It has the name, whether that is known to last or not.
        self.held = held;
        self.record = record;
        synced
    }

    /// The operation is over, and the guest where it belongs.
    pub fn end(self) -> io::Result<()> {
        fs::remove_file(name_of(&self.folder, self.record.operation()))?;
        let folder = File::open(&self.folder)?;
        folder.sync_all()?;
        // It goes with its last record.
        let _ = fs::remove_dir(&self.folder);
        Ok(())
    }
}

impl Journal {
    /// Writes down how far the hibernation is.
    pub fn advance(&mut self, point: Point) -> io::Result<()> {
        self.rewrite(Record {
            point,
            ..self.record.clone()
        })
    }
}

/// All hibernations that there are records of, and sweeps up records that never took their names.
pub fn find(folder: &Path) -> io::Result<Vec<Found>> {
    find_all(folder)
}

/// The same for any kind of record.
pub fn find_all<R: Written>(folder: &Path) -> io::Result<Vec<Found<R>>> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut paths = Vec::new();
    for entry in entries {
        let path = entry?.path();
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("json") => paths.push(path),
            Some("new") => sweep(&path),
            _ => {}
        }
    }
    paths.sort();
    let found = paths.iter().map(|path| look(folder, path));
    Ok(found
        .collect::<io::Result<Vec<_>>>()?
        .into_iter()
        .flatten()
        .collect())
}

/// `None`: it has just ended.
fn look<R: Written>(folder: &Path, path: &Path) -> io::Result<Option<Found<R>>> {
    loop {
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            opened => opened?,
        };
        let is_free = match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => true,
            Err(Errno::WOULDBLOCK) => false,
            Err(error) => return Err(error.into()),
        };
        // Between the open and the lock the next record may have taken the name.
        if FileIdentity::at(path) != FileIdentity::of_open(&file) {
            continue;
        }
        let record = match read(&file, path) {
            Ok(record) => record,
            Err(why) => {
                let path = path.to_owned();
                return Ok(Some(Found::Unreadable { path, why }));
            }
        };
        return Ok(Some(if is_free {
            Found::Interrupted(Box::new(Journal {
                folder: folder.to_owned(),
                record,
                held: file,
            }))
        } else {
            Found::UnderWay(Box::new(record))
        }));
    }
}

fn read<R: Written>(file: &File, path: &Path) -> Result<R, String> {
    let mut bytes = Vec::new();
    file.take(RECORD_LIMIT)
        .read_to_end(&mut bytes)
        .map_err(|error| error.to_string())?;
    // Looked at first: the rest of a later form may be anything.
    let value: serde_json::Value =
        serde_json::from_slice(&bytes).map_err(|error| format!("it is torn or damaged: {error}"))?;
    let form = value["form"].as_u64();
    if !form.is_some_and(|form| (1..=u64::from(R::FORM)).contains(&form)) {
        return Err(match form {
            Some(form) => format!(
                "it has form {form}, and this version of Dormouse reads up to {}",
                R::FORM
            ),
            None => "it is damaged: it tells no form".to_owned(),
        });
    }
    let record: R = serde_json::from_value(value).map_err(|error| format!("it is damaged: {error}"))?;
    if path.file_stem().and_then(|stem| stem.to_str()) == Some(record.operation().to_string().as_str()) {
        return Ok(record);
    }
    Err(format!("it is of operation {}", record.operation()))
}

fn name_of(folder: &Path, operation: Uuid) -> PathBuf {
    folder.join(format!("{operation}.json"))
}

/// Which record of an operation it is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// There must be none.
    First,
    /// It replaces the one before.
    Next,
}

/// Puts a record in its place, locked; and whether that is known to last.
fn write(folder: &Path, record: &impl Written, place: Place) -> io::Result<(File, io::Result<()>)> {
    let new = folder.join(format!(".{}.new", record.operation()));
    let mut file = loop {
        let file = File::options()
            .create(true)
            .truncate(false)
            .read(true)
            .write(true)
            .mode(0o600)
            .open(&new)?;
        // Whoever sweeps up holds it for an instant, and another writer until it has its name.
        retry_on_intr(|| flock(&file, FlockOperation::LockExclusive))?;
        if FileIdentity::at(&new) == FileIdentity::of_open(&file) {
            break file;
        }
    };
    file.set_len(0)?;
    file.write_all(&serde_json::to_vec(record)?)?;
    file.sync_all()?;
    let name = name_of(folder, record.operation());
    match place {
        Place::First => {
            // A link takes no name that is taken, on any file system.
            let linked = fs::hard_link(&new, &name);
            fs::remove_file(&new)?;
            linked?;
        }
        Place::Next => fs::rename(&new, &name)?,
    }
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    Ok((file, synced))
}

/// Removes a record that its writer was killed with before it took its name.
fn sweep(new: &Path) {
    let Ok(file) = File::open(new) else {
        return;
    };
    let is_dead = flock(&file, FlockOperation::NonBlockingLockExclusive).is_ok();
    // Locked until it is gone: a writer that opened it meanwhile sees that it is.
    if is_dead && FileIdentity::at(new) == FileIdentity::of_open(&file) {
        // The next look finds it again.
        let _ = fs::remove_file(new);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::sync::atomic::{AtomicBool, Ordering};

    use serde_json::json;

    use super::*;
    use crate::machine::hibernate::machine::Aim;
    use crate::vm::process_identity::ProcessIdentity;

    fn record() -> Record {
        Record {
            form: FORM,
            aim: Aim::Hibernate,
            operation: Uuid::from_u128(7),
            vm_name: "web".to_owned(),
            target: "/images/web".into(),
            image_id: Uuid::from_u128(8),
            monitor: "/run/web.sock".into(),
            qemu: ProcessIdentity {
                pid: 7,
                start_ticks: 8,
            },
            was_running: true,
            settings: serde_json::from_value(json!({
                "capabilities": [{"capability": "events", "state": false}],
                "parameters": {"max-bandwidth": 128 << 20},
                "needed": {"max-bandwidth": 0},
            }))
            .unwrap(),
            point: Point::Saving,
        }
    }

    fn folder() -> (tempfile::TempDir, PathBuf) {
        let guard = tempfile::tempdir().unwrap();
        let folder = guard.path().join(".operations");
        (guard, folder)
    }

    #[test]
    fn a_record_is_under_way_as_long_as_it_is_held_and_interrupted_after_that() {
        let (_guard, folder) = folder();
        let mut journal = Journal::begin(&folder, record()).unwrap();
        for point in [Point::Saving, Point::Sealing, Point::Sealed, Point::Returning] {
            journal.advance(point).unwrap();
            let found = find(&folder).unwrap();
            assert!(
                matches!(&found[..], [Found::UnderWay(record)] if record.point == point),
                "{found:?}"
            );
        }
        drop(journal);
        let mut found = find(&folder).unwrap();
        let Some(Found::Interrupted(held)) = found.pop() else {
            panic!("{found:?}")
        };
        assert_eq!(
            held.record(),
            &Record {
                point: Point::Returning,
                ..record()
            }
        );
        assert!(
            matches!(find(&folder).unwrap()[..], [Found::UnderWay(_)]),
            "held by who looked first"
        );
        held.end().unwrap();
        assert!(!folder.exists());
        assert!(find(&folder).unwrap().is_empty());
    }

    #[test]
    fn no_record_takes_the_place_of_another_operations() {
        let (_guard, folder) = folder();
        let other = Record {
            vm_name: "db".to_owned(),
            ..record()
        };
        let journal = Journal::begin(&folder, record()).unwrap();
        for _ in 0..2 {
            let error = Journal::begin(&folder, other.clone()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
            assert_eq!(
                fs::read_dir(&folder).unwrap().count(),
                1,
                "nothing is left beside it"
            );
        }
        // Nor that of one that was interrupted.
        drop(journal);
        Journal::begin(&folder, other.clone()).unwrap_err();
        let Some(Found::Interrupted(journal)) = find(&folder).unwrap().pop() else {
            panic!("it is gone")
        };
        assert_eq!(journal.record(), &record());
        journal.end().unwrap();
        Journal::begin(&folder, other).unwrap();
    }

    #[test]
    fn a_record_is_written_while_others_look_and_sweep() {
        let (_guard, folder) = folder();
        let mut journal = Journal::begin(&folder, record()).unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    while !is_over.load(Ordering::Relaxed) {
                        let found = find(&folder).unwrap();
                        assert!(matches!(&found[..], [Found::UnderWay(_)]), "{found:?}");
                    }
                });
            }
            let written: Vec<_> = (0..150).map(|_| journal.advance(Point::Sealing)).collect();
            is_over.store(true, Ordering::Relaxed);
            written.into_iter().collect::<io::Result<()>>().unwrap();
        });
    }

    #[test]
    fn a_record_is_for_its_owner_alone() {
        let (_guard, folder) = folder();
        let _journal = Journal::begin(&folder, record()).unwrap();
        let name = name_of(&folder, record().operation);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&name), mode(&folder)), (0o600, 0o700));
    }

    #[test]
    fn a_record_that_was_cut_anywhere_is_told_and_stays() {
        let (_guard, folder) = folder();
        drop(Journal::begin(&folder, record()).unwrap());
        let name = name_of(&folder, record().operation);
        let whole = fs::read(&name).unwrap();
        for length in 0..whole.len() {
            let mut zeroed = whole.clone();
            zeroed[length..].fill(0);
            for torn in [&whole[..length], &zeroed] {
                fs::write(&name, torn).unwrap();
                let found = find(&folder).unwrap();
                assert!(
                    matches!(&found[..], [Found::Unreadable { path, .. }] if *path == name),
                    "{length}: {found:?}"
                );
            }
        }
        assert!(name.exists());
    }

    #[test]
    fn a_record_of_another_form_or_of_another_operation_is_told() {
        let (_guard, folder) = folder();
        drop(Journal::begin(&folder, Record { form: 3, ..record() }).unwrap());
        let [Found::Unreadable { why, .. }] = &find(&folder).unwrap()[..] else {
            panic!("it was read")
        };
        assert!(why.contains("form 3"), "{why}");
        let (_guard, folder) = self::folder();
        drop(Journal::begin(&folder, record()).unwrap());
        let other = name_of(&folder, Uuid::from_u128(9));
        fs::rename(name_of(&folder, record().operation), other).unwrap();
        assert!(matches!(find(&folder).unwrap()[..], [Found::Unreadable { .. }]));
    }

    #[test]
    fn a_record_of_the_first_form_is_of_a_hibernation() {
        let (_guard, folder) = folder();
        drop(Journal::begin(&folder, record()).unwrap());
        let name = name_of(&folder, record().operation);
        let mut first: serde_json::Value = serde_json::from_slice(&fs::read(&name).unwrap()).unwrap();
        first["form"] = json!(1);
        first.as_object_mut().unwrap().remove("aim");
        fs::write(&name, first.to_string()).unwrap();
        let [Found::Interrupted(journal)] = &find(&folder).unwrap()[..] else {
            panic!("it was not read")
        };
        assert_eq!(journal.record(), &Record { form: 1, ..record() });
    }

    #[test]
    fn what_a_killed_writer_left_beside_the_name_goes_and_the_record_before_it_counts() {
        let (_guard, folder) = folder();
        let mut journal = Journal::begin(&folder, record()).unwrap();
        let new = folder.join(format!(".{}.new", record().operation));
        fs::write(&new, "{\"form\": 1, \"op").unwrap();
        assert!(matches!(&find(&folder).unwrap()[..], [Found::UnderWay(_)]));
        assert!(!new.exists());
        journal.advance(Point::Sealing).unwrap();
    }
}
