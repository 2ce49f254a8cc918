//! How a VM ended last, for who asks when nobody serves it any more.
//!
//! ```text
//! STATE-DIR/.endings/NAME.json    written when its QEMU has ended, before the name is free;
//!                                 removed when the next QEMU of that name is up
//! ```
//!
//! A QEMU that ends well ends with the status 0, whether its guest went into an image, powered off, or was told to
//! quit. This tells them apart. A start that fails leaves the record alone: the guest is still where it says.

use std::fs::{self, DirBuilder, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::{SystemTime, UNIX_EPOCH};

use dormouse_qmp::{Events, Heard};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::state_dir::StateDir;
use crate::api::types::{Ending, Operation};
use crate::machine::wake::feeding::Left;

/// The end of a VM's QEMU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LastEnding {
    /// The VM's name.
    pub name: String,
    /// When it was, in milliseconds since 1970 UTC.
    pub ended_unix_ms: u64,
    /// What became of the guest.
    #[serde(flatten)]
    pub how: How,
    /// What who asked for its end was told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<Ending>,
    /// The image that its memory was still coming from, which is kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unfed: Option<Left>,
}

/// What became of a guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "ended", rename_all = "kebab-case")]
pub enum How {
    /// It is in an image.
    Hibernated {
        /// The operation that brought it there.
        operation: Uuid,
        /// The image.
        image: PathBuf,
        /// Its id.
        image_id: Uuid,
    },
    /// It is on its own disk, by its own doing.
    SuspendedToDisk {
        /// The operation that had it do so.
        operation: Uuid,
    },
    /// QEMU ended as it should, and there is nothing to wake.
    Stopped {
        /// Why, in QEMU's words: `guest-shutdown`, `host-qmp-quit`, `host-signal` and so on; `None`: it did not say.
        reason: Option<String>,
    },
    /// QEMU ended as it should not.
    Crashed {
        /// Its exit code, unless a signal ended it.
        exit_code: Option<i32>,
        /// That signal.
        signal: Option<i32>,
    },
}

impl LastEnding {
    /// The end of `name` as its supervisor saw it: QEMU's status and what it said, and the operation that ran last.
    pub fn seen(
        name: &str,
        status: ExitStatus,
        reason: Option<String>,
        operation: Option<&Operation>,
    ) -> Self {
        let result = operation
            .and_then(|operation| Some((operation.id, operation.result.clone()?)))
            .filter(|(_, ending)| ending.is_of_the_guest());
        let how = match &result {
            Some((operation, Ending::Hibernated(hibernated))) => How::Hibernated {
                operation: *operation,
                image: hibernated.image.clone(),
                image_id: hibernated.image_id,
            },
            Some((operation, Ending::SuspendedToDisk(_))) => How::SuspendedToDisk {
                operation: *operation,
            },
            // The others are not of the guest.
            _ if status.success() => How::Stopped { reason },
            _ => How::Crashed {
                exit_code: status.code(),
                signal: status.signal(),
            },
        };
        let result = result.map(|(_, ending)| ending);
        Self {
            result,
            ..Self::now(name, how)
        }
    }

    /// Whether the guest ended by its own doing.
    pub fn is_of_the_guest_itself(&self) -> bool {
        matches!(&self.how, How::Stopped { reason: Some(reason) } if reason == "guest-shutdown" || reason == "guest-reset")
    }

    /// An end that has just come about.
    pub fn now(name: &str, how: How) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Self {
            name: name.to_owned(),
            ended_unix_ms: u64::try_from(since.as_millis()).unwrap_or(u64::MAX),
            how,
            result: None,
            unfed: None,
        }
    }

    /// The operation that ended it, if one did.
    pub fn operation(&self) -> Option<Uuid> {
        match &self.how {
            How::Hibernated { operation, .. } | How::SuspendedToDisk { operation } => Some(*operation),
            How::Stopped { .. } | How::Crashed { .. } => None,
        }
    }
}

impl StateDir {
    /// How the VM `name` ended last. `None`: it runs, it never did, or it ended without its supervisor.
    pub fn last_ending(&self, name: &str) -> Option<LastEnding> {
        serde_json::from_slice(&fs::read(self.ending_of(name)).ok()?).ok()
    }

    /// All VMs that ended, by name.
    pub fn last_endings(&self) -> Vec<LastEnding> {
        let entries = fs::read_dir(self.endings()).into_iter().flatten().flatten();
        let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
        let mut names: Vec<String> = names
            .filter_map(|name| name.strip_suffix(".json").map(str::to_owned))
            .collect();
        names.sort();
        names.iter().filter_map(|name| self.last_ending(name)).collect()
    }

    /// Writes down how a VM ended, durably.
    pub fn note_ending(&self, ending: &LastEnding) -> io::Result<()> {
        let folder = self.endings();
        DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        let name = self.ending_of(&ending.name);
        let new = name.with_extension("new");
        let mut file = File::options()
            .create(true)
            .truncate(true)
            .write(true)
            .mode(0o600)
            .open(&new)?;
        file.write_all(&serde_json::to_vec(ending)?)?;
        file.sync_all()?;
        fs::rename(new, name)?;
        File::open(folder)?.sync_all()
    }

    /// The VM runs again: how it ended before means nothing any more.
    pub fn forget_ending(&self, name: &str) {
        if let Err(error) = fs::remove_file(self.ending_of(name))
            && error.kind() != io::ErrorKind::NotFound
        {
            tracing::warn!(%error, name, "cannot remove the record of how the VM ended last");
        }
        // It goes with its last record.
        let _ = fs::remove_dir(self.endings());
    }

    fn endings(&self) -> PathBuf {
        self.path().join(".endings")
    }

    fn ending_of(&self, name: &str) -> PathBuf {
        self.endings().join(format!("{name}.json"))
    }
}

/// Writes an ending for whoever started this program, such as a container's termination message: one line of JSON.
pub fn tell_in_file(ending: &LastEnding, path: &Path) -> io::Result<()> {
    let mut line = serde_json::to_vec(ending)?;
    line.push(b'\n');
    // Not beside and renamed: a container's is a mount of its own.
    fs::write(path, line)
}

/// Listens until QEMU is gone; returns why it said that it shuts down, if it did.
pub async fn shutdown_reason(mut events: Events) -> Option<String> {
    let mut reason = None;
    loop {
        match events.next().await {
            Heard::Event(event) if event.name == "SHUTDOWN" => {
                reason = event.data["reason"].as_str().map(str::to_owned).or(reason);
            }
            Heard::Event(_) | Heard::Lagged(_) => {}
            Heard::Closed => return reason,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> (tempfile::TempDir, StateDir) {
        let folder = tempfile::tempdir().unwrap();
        let state = StateDir::of(Some(folder.path().to_owned())).unwrap();
        (folder, state)
    }

    fn stopped(name: &str) -> LastEnding {
        let reason = Some("guest-shutdown".to_owned());
        LastEnding::now(name, How::Stopped { reason })
    }

    #[test]
    fn an_ending_is_known_until_the_vm_runs_again() {
        let (_guard, state) = state();
        assert_eq!(state.last_ending("a"), None);
        for name in ["b", "a"] {
            state.note_ending(&stopped(name)).unwrap();
        }
        assert_eq!(
            state.last_ending("a").map(|ending| ending.how),
            Some(stopped("a").how)
        );
        let names: Vec<String> = state
            .last_endings()
            .into_iter()
            .map(|ending| ending.name)
            .collect();
        assert_eq!(names, ["a", "b"]);
        state.forget_ending("a");
        state.forget_ending("a");
        state.forget_ending("b");
        assert_eq!(state.last_endings(), []);
        assert!(!state.path().join(".endings").exists());
    }

    #[test]
    fn a_damaged_record_is_no_ending() {
        let (_guard, state) = state();
        state.note_ending(&stopped("a")).unwrap();
        fs::write(state.ending_of("a"), "{\"name\": \"a\", \"ended\"").unwrap();
        assert_eq!(state.last_ending("a"), None);
    }

    #[test]
    fn qemus_status_and_word_tell_a_stop_from_a_crash() {
        let seen = |status, reason: Option<&str>| {
            LastEnding::seen("a", ExitStatus::from_raw(status), reason.map(str::to_owned), None).how
        };
        let reason = Some("guest-shutdown".to_owned());
        assert_eq!(seen(0, Some("guest-shutdown")), How::Stopped { reason });
        assert_eq!(
            seen(9, None),
            How::Crashed {
                exit_code: None,
                signal: Some(9)
            }
        );
        assert_eq!(
            seen(1 << 8, None),
            How::Crashed {
                exit_code: Some(1),
                signal: None
            }
        );
    }

    #[test]
    fn what_it_looks_like_to_a_program_stays() {
        let (operation, image_id) = (Uuid::from_u128(7), Uuid::from_u128(8));
        let image = PathBuf::from("/images/a");
        let how = How::Hibernated {
            operation,
            image,
            image_id,
        };
        let told = serde_json::to_value(LastEnding {
            ended_unix_ms: 5,
            ..LastEnding::now("a", how)
        });
        assert_eq!(
            told.unwrap(),
            serde_json::json!({
                "name": "a", "ended_unix_ms": 5, "ended": "hibernated", "operation": operation,
                "image": "/images/a", "image_id": image_id,
            })
        );
    }
}
