//! A block device that can be pulled out, and one that has less behind it than it says.

use std::{
    fs::{self, File},
    os::fd::{AsRawFd, OwnedFd},
    path::{Path, PathBuf},
    process::Command,
};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use crate::{faults::SmallVolume, volumes::attach};

/// A block device over memory of its own, which can be taken away under whoever uses it. Blank at first.
pub struct UnpluggableDevice {
    path: PathBuf,
    memory: OwnedFd,
}

impl UnpluggableDevice {
    /// A device of so many MiB.
    pub fn new(mib: u64) -> Self {
        let memory = memfd_create("unpluggable", MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC)
            .expect("memory for a device can be made");
        ftruncate(&memory, mib << 20).expect("the device can be sized");
        let path = attach(Path::new(&format!(
            "/proc/{}/fd/{}",
            std::process::id(),
            memory.as_raw_fd()
        )));
        Self { path, memory }
    }

    /// The device.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Pulls it out: from now on every read and every write fails.
    pub fn unplug(&self) {
        // First that no write makes it grow again: one that is under way would bring a part of it back, without its content.
        fcntl_add_seals(&self.memory, SealFlags::GROW).expect("the device's memory can be kept from growing");
        ftruncate(&self.memory, 0).expect("the device's memory can be given up");
        fcntl_add_seals(&self.memory, SealFlags::SHRINK).expect("it can be kept so");
    }

    /// From now on every write fails. What was written can be read.
    pub fn take_no_more_writes(&self) {
        fcntl_add_seals(&self.memory, SealFlags::WRITE).expect("the device's memory can be sealed");
    }

    /// Copies all that is on it, as it would be found after a crash.
    pub fn copy_to(&self, file: &Path) {
        let memory = format!("/proc/self/fd/{}", self.memory.as_raw_fd());
        fs::copy(memory, file).expect("the device can be copied");
    }

    /// From now on every read behind `mib` fails.
    pub fn lose_all_behind(&self, mib: u64) {
        ftruncate(&self.memory, mib << 20).expect("the device's memory can be given up");
        // What was read before is not read again.
        let _ = Command::new("blockdev")
            .arg("--flushbufs")
            .arg(&self.path)
            .status();
    }
}

impl Drop for UnpluggableDevice {
    fn drop(&mut self) {
        // The test's outcome does not depend on it, and a device in use is detached when it is free.
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
    }
}

/// A block device over a file on a volume that may have no room for all of it, or may hang.
pub struct DeviceOnVolume {
    path: PathBuf,
}

impl DeviceOnVolume {
    /// A device of so many MiB, which reads as zeros.
    pub fn new(volume: &SmallVolume, mib: u64) -> Self {
        let backing = volume.path("device");
        let file = File::create(&backing).expect("a file can be made");
        file.set_len(mib << 20).expect("the file can be sized");
        Self {
            path: attach(&backing),
        }
    }

    /// The device.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for DeviceOnVolume {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
    }
}
