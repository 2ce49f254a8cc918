//! Which process a process is: its id alone is used again.

use std::fs;

use serde::{Deserialize, Serialize};

/// A process, told from a later one with the same id by when it started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    /// Its id.
    pub pid: u32,
    /// When it started, in clock ticks since boot.
    pub start_ticks: u64,
}

impl ProcessIdentity {
    /// Of the process that has this id now; `None` when there is none, or only its remains.
    pub fn of(pid: u32) -> Option<Self> {
        Some(Self {
            pid,
            start_ticks: start_ticks(pid)?,
        })
    }

    /// Whether that process is there still.
    pub fn is_alive(&self) -> bool {
        start_ticks(self.pid) == Some(self.start_ticks)
    }
}

/// Field 22 of /proc/PID/stat.
fn start_ticks(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is the program's name in brackets and may hold anything, brackets and spaces too.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    if fields.first() == Some(&"Z") {
        return None;
    }
    fields.get(19)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_id_that_was_used_again_is_another_process() {
        let mut identity = ProcessIdentity::of(std::process::id()).unwrap();
        assert!(identity.is_alive());
        identity.start_ticks += 1;
        assert!(!identity.is_alive());
    }
}
