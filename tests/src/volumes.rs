//! Volumes other than files.

use std::{
    fs::File,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::lab::Lab;

/// A block device full of old data: a loop device over a file in the laboratory, detached when this is dropped.
///
/// It needs root, as the continuous integration has it; without it the test fails.
pub struct LoopDevice {
    path: PathBuf,
}

impl LoopDevice {
    /// A device of so many MiB.
    pub fn with_old_data(lab: &Lab, mib: usize) -> Self {
        let disk = lab.path("volume");
        let mut file = File::create(&disk).expect("a file can be made");
        // Not zero, not an image, and different everywhere.
        let mut state = 1_u64;
        for _ in 0..mib {
            let mut old = vec![0; 1 << 20];
            for word in old.chunks_exact_mut(8) {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                word.copy_from_slice(&state.to_le_bytes());
            }
            file.write_all(&old).expect("the file can be filled");
        }
        Self { path: attach(&disk) }
    }

    /// A device over a file that is there.
    pub fn over(file: &Path) -> Self {
        Self { path: attach(file) }
    }

    /// Makes its first partition, of so many sectors from `begin` on, and returns it. It goes with the device.
    pub fn partition(&self, begin: u64, sectors: u64) -> PathBuf {
        // Partitions that were not read from a table outlive the file under them: one of a run that was killed.
        self.forget_partition();
        let status = Command::new("addpart")
            .arg(&self.path)
            .args([1, begin, sectors].map(|number| number.to_string()))
            .status();
        assert!(
            status.is_ok_and(|status| status.success()),
            "a partition can be made"
        );
        PathBuf::from(format!("{}p1", self.path.display()))
    }

    fn forget_partition(&self) {
        // There is none as a rule, and the command says so.
        let _ = Command::new("delpart")
            .arg(&self.path)
            .arg("1")
            .stderr(Stdio::null())
            .status();
    }

    /// The device.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        self.forget_partition();
        // The test's outcome does not depend on it, and a device in use is detached when it is free.
        let _ = Command::new("losetup").arg("--detach").arg(&self.path).status();
    }
}

/// Makes a block device of a file.
pub(crate) fn attach(file: &Path) -> PathBuf {
    let output = Command::new("losetup")
        .args(["--find", "--show"])
        .arg(file)
        .output()
        .expect("losetup can be run");
    assert!(
        output.status.success(),
        "this test needs a loop device and is not to be skipped (root, /dev/loop-control): {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let path = String::from_utf8(output.stdout).expect("a path");
    PathBuf::from(path.trim())
}
