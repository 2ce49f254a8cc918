//! A QEMU program that can become another one between two starts.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use crate::{lab::Lab, qemu::QemuBuild};

/// A program in a lab that starts a QEMU build, perhaps with arguments that nobody asked for. What it starts can be
/// changed, as when a host's QEMU is updated or its owner edits what starts it.
pub struct StandIn {
    path: PathBuf,
}

impl StandIn {
    /// A program that starts `build` with the arguments that it gets.
    pub fn new(lab: &Lab, build: QemuBuild) -> Self {
        let stand_in = Self {
            path: lab.path("qemu"),
        };
        stand_in.starts(build, "");
        stand_in
    }

    /// From now on it starts `build`, with each argument edited by the script `edit` for `sed`.
    pub fn starts(&self, build: QemuBuild, edit: &str) {
        let program = build.program();
        let program = program.display();
        let script = format!(
            "#!/bin/sh\nfor argument; do\n  shift\n  set -- \"$@\" \"$(printf %s \"$argument\" | sed -e '{edit}')\"\ndone\n\
             exec {program} \"$@\"\n"
        );
        fs::write(&self.path, script).expect("the program can be written");
        fs::set_permissions(&self.path, fs::Permissions::from_mode(0o755)).expect("it can be made one");
    }

    /// The program.
    pub fn path(&self) -> &Path {
        &self.path
    }
}
