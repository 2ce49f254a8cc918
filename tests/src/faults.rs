//! Faults to order: full volumes, flipped bytes, torn files, killed processes.

use std::{
    fs::{self, File, OpenOptions},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Instant,
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{
    lab::Lab,
    wait::{PATIENCE, until},
};

/// A small ext4 volume on a loop device, unmounted on drop. It takes root to make one.
pub struct SmallVolume {
    mount_point: PathBuf,
}

impl SmallVolume {
    /// A volume of `mib` MiB, file system included.
    pub fn new(lab: &Lab, mib: u64) -> Self {
        Self::named(lab, "small-volume", mib)
    }

    /// The same beside others.
    pub fn named(lab: &Lab, name: &str, mib: u64) -> Self {
        let backing = lab.path(&format!("{name}.ext4"));
        let file = File::create(&backing).expect("the volume's file can be made");
        file.set_len(mib << 20).expect("the volume's file can be sized");
        must_run(
            Command::new("mkfs.ext4")
                .args(["-q", "-F", "-m", "0"])
                .arg(&backing),
        );
        Self::mounted(lab.path(name), &backing, &["-o", "loop"])
    }

    /// A volume on a device, all of which it takes.
    pub fn on(lab: &Lab, device: &Path) -> Self {
        must_run(
            Command::new("mkfs.ext4")
                .args(["-q", "-F", "-m", "0"])
                .arg(device),
        );
        Self::mounted(lab.path("small-volume"), device, &[])
    }

    /// What is in a file that was a volume before.
    pub fn found_in(lab: &Lab, file: &Path) -> Self {
        Self::mounted(lab.path("small-volume"), file, &["-o", "loop"])
    }

    fn mounted(mount_point: PathBuf, backing: &Path, options: &[&str]) -> Self {
        fs::create_dir(&mount_point).expect("the mount point can be made");
        must_run(Command::new("mount").args(options).args([backing, &mount_point]));
        Self { mount_point }
    }

    /// The path of `name` on the volume.
    pub fn path(&self, name: &str) -> PathBuf {
        self.mount_point.join(name)
    }

    /// The names of all that is on the volume.
    pub fn content(&self) -> Vec<String> {
        files_in(&self.mount_point)
            .into_iter()
            .filter(|name| name != "lost+found")
            .collect()
    }
}

impl Drop for SmallVolume {
    fn drop(&mut self) {
        // Lazily: a process that a failed test leaves may still have a file open.
        // Quietly: the laboratory may have done it.
        let _ = Command::new("umount")
            .arg("-l")
            .arg(&self.mount_point)
            .stderr(Stdio::null())
            .status();
    }
}

fn must_run(command: &mut Command) {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(
        output.status.success(),
        "{command:?} (this takes root): {}",
        String::from_utf8_lossy(&output.stderr)
    );
}

/// A volume that answers no write until this is dropped.
pub struct Hanging<'a> {
    volume: &'a SmallVolume,
}

impl<'a> Hanging<'a> {
    /// Lets the volume hang.
    pub fn volume(volume: &'a SmallVolume) -> Self {
        must_run(Command::new("fsfreeze").arg("--freeze").arg(&volume.mount_point));
        Self { volume }
    }
}

impl Drop for Hanging<'_> {
    fn drop(&mut self) {
        must_run(
            Command::new("fsfreeze")
                .arg("--unfreeze")
                .arg(&self.volume.mount_point),
        );
    }
}

/// The names in a folder, sorted.
pub fn files_in(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .expect("the folder can be read")
        .map(|entry| entry.expect("the folder can be read").file_name())
        .map(|name| name.to_string_lossy().into_owned())
        .collect();
    names.sort();
    names
}

/// Flips one bit of the byte at `offset`. A second flip heals it.
pub fn flip(file: &Path, offset: u64) {
    let opened = OpenOptions::new().read(true).write(true).open(file);
    let opened = opened.expect("the file can be opened");
    let mut byte = [0];
    opened
        .read_exact_at(&mut byte, offset)
        .expect("the byte can be read");
    opened
        .write_all_at(&[byte[0] ^ 0x10], offset)
        .expect("the byte can be written");
    opened.sync_all().expect("the file can be synced");
}

/// Cuts `bytes` off the end.
pub fn cut_off(file: &Path, bytes: u64) {
    let opened = OpenOptions::new().write(true).open(file);
    let opened = opened.expect("the file can be opened");
    let length = opened.metadata().expect("the file has a length").len();
    opened.set_len(length - bytes).expect("the file can be cut");
}

/// Where `wanted` is in the file for the first time.
///
/// # Panics
///
/// When it is not.
pub fn find(file: &Path, wanted: &[u8]) -> u64 {
    let content = std::fs::read(file).expect("the file can be read");
    let at = content.windows(wanted.len()).position(|part| part == wanted);
    let at = at.unwrap_or_else(|| panic!("{} does not hold what was looked for", file.display()));
    at as u64
}

/// Kills a process as the kernel does when memory runs out.
pub fn kill(pid: Pid) {
    kill_process(pid, Signal::KILL).expect("the process can be killed");
}

/// Kills a process in the instant in which `look` sees what it waits for.
///
/// # Panics
///
/// When that does not come.
pub fn kill_when(pid: Pid, what: &str, mut look: impl FnMut() -> bool) {
    // The instant may be over within a millisecond, so nothing sleeps here.
    let deadline = Instant::now() + PATIENCE;
    while !look() {
        assert!(Instant::now() < deadline, "waited {PATIENCE:?} for {what}");
    }
    kill(pid);
}

/// Lets a frozen process go on.
pub fn thaw(pid: Pid) {
    kill_process(pid, Signal::CONT).expect("the process can go on");
}

/// Freezes a process: it neither answers nor ends.
pub fn freeze(pid: Pid) {
    kill_process(pid, Signal::STOP).expect("the process can be frozen");
}

/// Asks a process to end as Ctrl-C does.
pub fn interrupt(pid: Pid) {
    kill_process(pid, Signal::INT).expect("the process is there");
}

/// Asks a process to end as a service manager does.
pub fn end(pid: Pid) {
    kill_process(pid, Signal::TERM).expect("the process is there");
}

/// Waits until a process stands at a volume that hangs: one that is only slow it waits for, too, but not so long.
pub fn wait_until_held(pid: Pid) {
    let mut looks_held = 0;
    until("the process to stand", || {
        looks_held = if is_held(pid) { looks_held + 1 } else { 0 };
        (looks_held == 20).then_some(())
    });
}

/// Whether a thread of a process waits for what cannot be interrupted, as a volume that hangs.
pub fn is_held(pid: Pid) -> bool {
    let threads = fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero()));
    threads.into_iter().flatten().flatten().any(|thread| {
        let stat = fs::read_to_string(thread.path().join("stat")).unwrap_or_default();
        let fields = stat.rsplit_once(')').map(|(_, fields)| fields.trim_start());
        fields.is_some_and(|fields| fields.starts_with('D'))
    })
}

/// Whether a process has ended, or all but its status: the end of its memory takes a while.
pub fn has_ended(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    stat.map_or(true, |stat| {
        stat.rsplit_once(')')
            .is_some_and(|(_, fields)| fields.starts_with(" Z"))
    })
}

/// Whether a process has a file open.
pub fn has_open(pid: Pid, file: &Path) -> bool {
    let descriptors = fs::read_dir(format!("/proc/{}/fd", pid.as_raw_nonzero()));
    descriptors
        .into_iter()
        .flatten()
        .flatten()
        .any(|descriptor| fs::read_link(descriptor.path()).is_ok_and(|open| open == file))
}

/// Fills the guest memory of a QEMU from `begin` on with what is not zero, so that saving it takes a while. The guest
/// does not use that part.
pub fn fill_memory(qemu: Pid, begin_mib: u64, mib: u64) {
    let descriptors =
        fs::read_dir(format!("/proc/{}/fd", qemu.as_raw_nonzero())).expect("QEMU's files can be seen");
    let ram = descriptors
        .flatten()
        .map(|descriptor| descriptor.path())
        .find(|path| {
            let name = fs::read_link(path).unwrap_or_default();
            let name = name.to_string_lossy();
            name.contains("pc.ram") || name.contains("memfd:memory-backend-memfd")
        })
        .expect("QEMU has its RAM open");
    let ram = OpenOptions::new()
        .write(true)
        .open(ram)
        .expect("guest memory can be opened");
    let filling = vec![0xa5; 1 << 20];
    for at_mib in begin_mib..begin_mib + mib {
        ram.write_all_at(&filling, at_mib << 20)
            .expect("guest memory can be written");
    }
}
