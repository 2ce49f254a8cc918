//! The guests: what QEMU is told to start, and what they must be saying.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
};

use crate::{
    lab::Lab,
    monitor::Monitor,
    qemu::{QemuBuild, existing, laboratory},
    wait::until,
};

/// What every guest of the laboratory has.
pub trait Guest {
    /// The QEMU program and its arguments.
    fn command_line(&self) -> Vec<OsString>;

    /// The socket of the monitor that is the test's own.
    fn monitor_socket(&self) -> &Path;

    /// The size of the guest's RAM.
    fn ram_bytes(&self) -> u64;

    /// A session on the test's own monitor.
    fn monitor(&self) -> Monitor {
        Monitor::connect(self.monitor_socket())
    }
}

/// What every guest is started with; the serial log is appended to, so that it outlives a QEMU.
pub(crate) struct Body {
    pub(crate) build: QemuBuild,
    program: PathBuf,
    more: Vec<OsString>,
    pub(crate) ram_mib: u64,
    pub(crate) disk: PathBuf,
    serial_log: PathBuf,
    pub(crate) monitor_socket: PathBuf,
}

impl Body {
    pub(crate) fn new(lab: &Lab, build: QemuBuild, ram_mib: u64) -> Self {
        Self {
            build,
            program: build.program(),
            more: Vec::new(),
            ram_mib,
            disk: lab.path("disk.img"),
            serial_log: lab.path("serial.log"),
            monitor_socket: lab.path("second-monitor.sock"),
        }
    }

    pub(crate) fn command_line(&self, disk_interface: &str, more: &[OsString]) -> Vec<OsString> {
        let disk = self.disk.display();
        let serial_log = self.serial_log.display();
        let monitor_socket = self.monitor_socket.display();
        let mut line = vec![self.program.clone().into_os_string()];
        line.extend(
            [
                "-accel".into(),
                "tcg".into(),
                "-m".into(),
                self.ram_mib.to_string(),
                "-nodefaults".into(),
                "-no-reboot".into(),
                "-display".into(),
                "none".into(),
                "-drive".into(),
                format!("file={disk},format=raw,if={disk_interface}"),
                "-chardev".into(),
                format!("file,id=log,path={serial_log},append=on"),
                "-serial".into(),
                "chardev:log".into(),
                "-qmp".into(),
                format!("unix:{monitor_socket},server=on,wait=off"),
            ]
            .map(OsString::from),
        );
        line.extend_from_slice(more);
        line.extend_from_slice(&self.more);
        line
    }

    /// The complete lines of the serial log so far.
    pub(crate) fn said(&self) -> Vec<String> {
        // The file is there once QEMU runs.
        let log = fs::read(&self.serial_log).unwrap_or_default();
        let complete = log
            .iter()
            .rposition(|&byte| byte == b'\n')
            .map_or(0, |end| end + 1);
        String::from_utf8_lossy(&log[..complete])
            .lines()
            .map(|line| line.trim_end().to_owned())
            .collect()
    }
}

/// A guest of one boot sector that is up in a fraction of a second. It checks a pattern in its
/// memory, prints its counter a hundred times a second and writes it to its disk before that; see
/// `tests/guest/boot_sector.S`.
pub struct BootSectorGuest {
    body: Body,
}

impl BootSectorGuest {
    const COUNTER_ADDRESS: usize = 0x6000;
    const PATTERN: std::ops::Range<usize> = 0x10_0000..0x110_0000;
    const SECTOR_BYTES: usize = 512;
    const COUNTER_SECTORS: std::ops::RangeInclusive<usize> = 1..=64;

    /// A guest with 64 MiB of RAM, 17 MiB of it not zero, and a disk of its own.
    pub fn new(lab: &Lab, build: QemuBuild) -> Self {
        Self::with_ram(lab, build, 64)
    }

    /// The same guest with `ram_mib` MiB of RAM.
    pub fn with_ram(lab: &Lab, build: QemuBuild, ram_mib: u64) -> Self {
        let body = Body::new(lab, build, ram_mib);
        let original = existing(laboratory().join("guest/boot_sector.img"));
        fs::copy(original, &body.disk).expect("the guest's disk can be copied");
        Self { body }
    }

    /// Has it started by another program.
    pub fn start_by(&mut self, program: &Path) {
        self.body.program = program.to_owned();
    }

    /// Has it started with more arguments, after all others.
    pub fn start_with(&mut self, more: &[&str]) {
        self.body.more.extend(more.iter().map(OsString::from));
    }

    /// The QEMU that runs it.
    pub fn build(&self) -> QemuBuild {
        self.body.build
    }

    /// The guest's disk.
    pub fn disk(&self) -> &Path {
        &self.body.disk
    }

    /// All counters that the guest printed.
    ///
    /// # Panics
    ///
    /// When it said anything that it must not: that its memory is broken, a number that is not
    /// higher than the one before, or `ready` again, which would be a reboot.
    pub fn counters(&self) -> Vec<u32> {
        let mut lines = self.body.said().into_iter();
        let Some(first) = lines.next() else {
            return Vec::new();
        };
        assert_eq!(first, "ready", "the guest's first word");
        let counters: Vec<u32> = lines
            .map(|line| {
                u32::from_str_radix(&line, 16)
                    .unwrap_or_else(|_| panic!("the guest said {line:?} instead of its counter"))
            })
            .collect();
        if let Some(pair) = counters.windows(2).find(|pair| pair[0] >= pair[1]) {
            panic!("the guest's counter went from {} to {}", pair[0], pair[1]);
        }
        counters
    }

    /// The counter that the guest printed last; 0 before the first.
    pub fn last_counter(&self) -> u32 {
        self.counters().last().copied().unwrap_or(0)
    }

    /// Waits until the guest has printed `ticks` counters in its life.
    pub fn wait_for_ticks(&self, ticks: usize) {
        until(&format!("{ticks} ticks of the guest"), || {
            (self.counters().len() >= ticks).then_some(())
        });
    }

    /// Waits for twenty more ticks than there are now, and returns the last counter.
    pub fn wait_for_more_ticks(&self) -> u32 {
        self.wait_for_ticks(self.counters().len() + 20);
        self.last_counter()
    }

    /// What the guest said so far, for [`goes_back_to`](Self::goes_back_to).
    pub fn log(&self) -> Vec<u8> {
        fs::read(&self.body.serial_log).expect("the guest's log can be read")
    }

    /// Makes what the guest says from now on follow what it had said at an earlier point of its life.
    pub fn goes_back_to(&self, log: &[u8]) {
        fs::write(&self.body.serial_log, log).expect("the guest's log can be written");
    }

    /// The highest counter on the guest's disk.
    pub fn counter_on_disk(&self) -> u32 {
        let disk = fs::read(self.disk()).expect("the guest's disk can be read");
        Self::COUNTER_SECTORS
            .map(|sector| dword(&disk, sector * Self::SECTOR_BYTES))
            .max()
            .unwrap_or(0)
    }

    /// The counter in a copy of the guest's memory.
    pub fn counter_in(memory: &[u8]) -> u32 {
        dword(memory, Self::COUNTER_ADDRESS)
    }

    /// The addresses in a copy of the guest's memory where the pattern is not what it should be.
    pub fn pattern_faults(memory: &[u8]) -> Vec<usize> {
        Self::PATTERN
            .step_by(4)
            .filter(|&address| dword(memory, address) != pattern_at(address))
            .collect()
    }

    /// Bytes that are in the guest's memory once, in the middle of the pattern, and therefore once
    /// in an image that holds this memory as it is.
    pub fn landmark() -> Vec<u8> {
        let start = Self::PATTERN.start + Self::PATTERN.len() / 2;
        (start..start + 64)
            .step_by(4)
            .flat_map(|address| pattern_at(address).to_le_bytes())
            .collect()
    }
}

impl Guest for BootSectorGuest {
    fn command_line(&self) -> Vec<OsString> {
        self.body.command_line("ide", &[])
    }

    fn monitor_socket(&self) -> &Path {
        &self.body.monitor_socket
    }

    fn ram_bytes(&self) -> u64 {
        self.body.ram_mib << 20
    }
}

fn pattern_at(address: usize) -> u32 {
    let address = u32::try_from(address).expect("guest addresses are below 4 GiB");
    address.wrapping_mul(0x9e37_79b1) ^ 0x5eed_5eed
}

fn dword(bytes: &[u8], at: usize) -> u32 {
    let field = bytes[at..at + 4].try_into().expect("four bytes");
    u32::from_le_bytes(field)
}

/// A Linux guest: it says `tick N` ten times a second, and every 20 ticks whether 32 MiB of random
/// data in its RAM are still what they were; see `tests/guest/init`.
pub struct LinuxGuest {
    body: Body,
}

impl LinuxGuest {
    /// A guest with 256 MiB of RAM and a small virtio disk of its own.
    pub fn new(lab: &Lab, build: QemuBuild) -> Self {
        let body = Body::new(lab, build, 256);
        let disk = fs::File::create(&body.disk).expect("the guest's disk can be made");
        disk.set_len(1 << 20).expect("the guest's disk can be sized");
        Self { body }
    }

    /// The number of the last tick; 0 before the first.
    ///
    /// # Panics
    ///
    /// When the guest found its memory broken, or counted anything but on.
    pub fn last_tick(&self) -> u32 {
        let said = self.body.said();
        assert!(
            !said.iter().any(|line| line.contains("BROKEN")),
            "the guest found its memory broken"
        );
        let ticks = said.iter().filter_map(|line| line.strip_prefix("tick "));
        let mut last = 0;
        for tick in ticks {
            assert_eq!(tick.parse(), Ok(last + 1), "the tick after {last}");
            last += 1;
        }
        last
    }

    /// Waits for tick `number`.
    pub fn wait_for_tick(&self, number: u32) {
        until(&format!("tick {number} of the Linux guest"), || {
            (self.last_tick() >= number).then_some(())
        });
    }

    /// How often the guest found its memory intact.
    pub fn memory_checks(&self) -> usize {
        let said = self.body.said();
        said.iter().filter(|line| *line == "memory intact").count()
    }

    /// Waits until the guest has found its memory intact `times` in its life.
    pub fn wait_for_memory_checks(&self, times: usize) {
        until(&format!("memory check {times} of the Linux guest"), || {
            (self.memory_checks() >= times).then_some(())
        });
    }
}

impl Guest for LinuxGuest {
    fn command_line(&self) -> Vec<OsString> {
        let guest = laboratory().join("guest");
        self.body.command_line(
            "virtio",
            &[
                "-kernel".into(),
                existing(guest.join("vmlinuz")).into(),
                "-initrd".into(),
                existing(guest.join("initramfs.gz")).into(),
                "-append".into(),
                "console=ttyS0 quiet".into(),
            ],
        )
    }

    fn monitor_socket(&self) -> &Path {
        &self.body.monitor_socket
    }

    fn ram_bytes(&self) -> u64 {
        self.body.ram_mib << 20
    }
}
