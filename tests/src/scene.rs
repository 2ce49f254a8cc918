//! What most tests begin with: a boot-sector guest, and the program that runs it.

use std::path::PathBuf;

use crate::{BootSectorGuest, Dormouse, Lab, QemuBuild, Supervisor};

/// A boot-sector guest, and the program that runs it under the name `guest`.
pub struct Scene {
    // Dropped in this order: the lab sweeps up last.
    /// The program.
    pub dormouse: Dormouse,
    /// The guest.
    pub guest: BootSectorGuest,
    /// The test's folder.
    pub lab: Lab,
}

impl Scene {
    /// A guest for `build`, not started.
    pub fn new(build: QemuBuild) -> Self {
        Self::of(build, BootSectorGuest::new)
    }

    /// A guest with `ram_mib` MiB of RAM, not started.
    pub fn with_ram(build: QemuBuild, ram_mib: u64) -> Self {
        Self::of(build, |lab, build| BootSectorGuest::with_ram(lab, build, ram_mib))
    }

    /// Starts the guest under a supervisor and lets it count a little.
    pub fn run(&self) -> Supervisor {
        let supervisor = self.dormouse.run("guest", &self.guest);
        self.guest.wait_for_ticks(5);
        supervisor
    }

    /// Where the guest's image goes.
    pub fn image(&self) -> PathBuf {
        self.lab.path("guest.image")
    }

    /// Starts the guest, hibernates it, and returns its image.
    pub fn hibernated(&self) -> PathBuf {
        let mut supervisor = self.run();
        self.dormouse.hibernate("guest", &self.image()).expect_success();
        supervisor.wait_for_end();
        self.lab.wait_for_no_qemu();
        self.image()
    }

    fn of(build: QemuBuild, guest: impl FnOnce(&Lab, QemuBuild) -> BootSectorGuest) -> Self {
        let lab = Lab::new();
        Self {
            dormouse: Dormouse::new(&lab),
            guest: guest(&lab, build),
            lab,
        }
    }
}
