//! The processes that a test left running, found by the folder that their command lines name.

use std::{fs, path::Path};

use rustix::process::{Pid, Signal, kill_process};

/// A process whose command line names a folder of ours.
pub(crate) struct Process {
    pub(crate) pid: Pid,
    program: String,
}

impl Process {
    /// The wrappers end as the dynamic linker of an unpacked QEMU; nothing else of a test does.
    pub(crate) fn is_qemu(&self) -> bool {
        self.program.starts_with("ld-linux") || self.program.starts_with("qemu-system")
    }

    pub(crate) fn signal(&self, signal: Signal) {
        // It may have ended by itself meanwhile.
        let _ = kill_process(self.pid, signal);
    }
}

/// All living processes other than this one whose command line names `folder`.
pub(crate) fn naming(folder: &Path) -> Vec<Process> {
    let folder = folder.as_os_str().as_encoded_bytes();
    let own = std::process::id().to_string();
    let entries = fs::read_dir("/proc").expect("/proc can be read");
    entries
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name();
            let pid = name.to_str()?.parse().ok().and_then(Pid::from_raw)?;
            let command_line = fs::read(entry.path().join("cmdline")).ok()?;
            let named = name != own.as_str() && command_line.windows(folder.len()).any(|part| part == folder);
            let program = fs::read_link(entry.path().join("exe")).ok()?;
            named.then(|| Process {
                pid,
                program: program
                    .file_name()
                    .unwrap_or_default()
                    .to_string_lossy()
                    .into_owned(),
            })
        })
        .collect()
}
