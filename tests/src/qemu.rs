//! The QEMU builds that the laboratory runs, and a plain QEMU without Dormouse.

use std::{
    fmt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
};

use crate::guest::Guest;

/// A QEMU build under `.lab/qemu`, brought by `tests/lab/fetch all`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum QemuBuild {
    /// QEMU 7.2, the oldest that Dormouse supports: RAM mapped at an offset is beyond it.
    V7_2,
    /// QEMU 10.0, the first that hands over its memory by `cpr-transfer`.
    V10_0,
    /// QEMU 11.1, the newest.
    V11_1,
}

impl QemuBuild {
    /// The wrapper that runs this build's `qemu-system-x86_64`; it replaces itself by QEMU.
    ///
    /// # Panics
    ///
    /// When the build is not there.
    pub fn program(self) -> PathBuf {
        existing(laboratory().join(format!("qemu/{self}/qemu-system-x86_64")))
    }

    /// The wrapper that runs this build's `qemu-img`.
    pub fn image_tool(self) -> PathBuf {
        existing(laboratory().join(format!("qemu/{self}/qemu-img")))
    }

    /// The folder of this build's modules, which the wrapper tells QEMU of.
    pub(crate) fn modules(self) -> PathBuf {
        laboratory().join(format!("qemu/{self}/root/usr/lib/x86_64-linux-gnu/qemu"))
    }

    /// Makes a qcow2 of a raw disk.
    pub fn make_qcow2(self, raw: &Path, qcow2: &Path) {
        let program = existing(laboratory().join(format!("qemu/{self}/qemu-img")));
        let mut convert = Command::new(program);
        convert.args(["convert", "-f", "raw", "-O", "qcow2"]);
        let status = convert.args([raw, qcow2]).status().expect("qemu-img can be run");
        assert!(status.success(), "qemu-img: {status}");
    }

    /// Whether guest RAM can be mapped from inside a larger file, as an image is: since 8.1.
    pub fn maps_images(self) -> bool {
        self != Self::V7_2
    }
}

impl fmt::Display for QemuBuild {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::V7_2 => "7.2",
            Self::V10_0 => "10.0",
            Self::V11_1 => "11.1",
        })
    }
}

/// The folder that `tests/lab/fetch` fills.
pub(crate) fn laboratory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the crate is in a folder of the tree")
        .join(".lab")
}

/// `path`, or a panic that says how to get it.
pub(crate) fn existing(path: PathBuf) -> PathBuf {
    assert!(
        path.exists(),
        "{} is missing: run tests/lab/fetch all",
        path.display()
    );
    path
}

/// A guest under QEMU alone; it ends with this handle.
pub struct PlainQemu {
    child: Child,
}

impl PlainQemu {
    /// Starts `guest`.
    pub fn start(guest: &impl Guest) -> Self {
        Self::start_with(guest, &[])
    }

    /// Starts the guest's QEMU with more arguments.
    pub fn start_with(guest: &impl Guest, more: &[&str]) -> Self {
        let [program, arguments @ ..] = &guest.command_line()[..] else {
            unreachable!("a command line starts with a program");
        };
        let child = Command::new(program)
            .args(arguments)
            .args(more)
            .stdin(Stdio::null())
            .spawn()
            .expect("QEMU starts");
        Self { child }
    }
}

impl Drop for PlainQemu {
    fn drop(&mut self) {
        // Already gone is fine.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
