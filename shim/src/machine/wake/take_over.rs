//! A wake in a QEMU that a launcher started itself, with `-incoming defer`.
//!
//! ```text
//!  Start    its run state is `inmigrate`, and nobody began to load it
//!  Check    it is the machine that was saved, on the disks that are meant; where its RAM is says how RAM comes back
//!  Load     written down first; it will not run the guest by itself; its RAM is filled, where that is a file of its own;
//!           then as a QEMU of ours
//!  ...      the mark, `cont`, seen running, the image used, as ever
//!  pinned   a mapped image is the guest's memory: QEMU gets a descriptor of it, and with that its lock
//! ```
//!
//! Such a QEMU is never ended. Before the load it is not changed at all. One that failed to load anything loads nothing else;
//! from the load on it may have the guest, and as long as it may, the image wakes nowhere else.

use std::fs::OpenOptions;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use dormouse_qmp::view::machine::{MachineInfo, RunState};
use dormouse_qmp::view::migration::{MigrationInfo, MigrationStatus};
use dormouse_qmp::{Client, command};
use dormouse_storage::image::manifest::{Disk, Manifest};
use dormouse_storage::{Image, MemoryFile, Progress, Run, WORKER_THREADS};
use tokio::time::Instant;

use super::plan::Plan;
use super::{Mode, Request, guard};
use crate::error::{Code, Failure, sentence};
use crate::machine::effect::blocking;
use crate::machine::interrupt::Interrupt;
use crate::vm::disks::label;
use crate::vm::file_identity::FileIdentity;
use crate::vm::launched_memory::{self, Home};
use crate::vm::monitor::{self, MigrationSettings};
use crate::vm::process::{QemuProcess, open_files, working_directory};
use crate::vm::process_identity::ProcessIdentity;

/// The name under which QEMU keeps the image that its memory is mapped from.
const PIN: &str = "dormouse-image";

/// How often a load under way is looked at.
const POLL: Duration = Duration::from_millis(5);

/// How long the end of a load that nobody feeds any more may take.
const END_LIMIT: Duration = Duration::from_secs(10);

/// The QEMU that a guest is woken in.
#[derive(Debug)]
pub enum Qemu {
    /// It was started for this.
    Ours(QemuProcess),
    /// Somebody else started it.
    Others(Waiting),
}

impl Qemu {
    /// The monitor.
    pub fn client(&self) -> &Client {
        match self {
            Self::Ours(qemu) => qemu.client(),
            Self::Others(waiting) => &waiting.client,
        }
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        match self {
            Self::Ours(qemu) => qemu.pid().unwrap_or_default(),
            Self::Others(waiting) => waiting.process.pid,
        }
    }
}

/// A QEMU of others.
#[derive(Debug)]
pub struct Waiting {
    client: Client,
    process: ProcessIdentity,
}

impl Waiting {
    /// The QEMU at the other end, whose process has to be one that can be seen.
    pub fn at(client: Client) -> Result<Self, Failure> {
        let process = client.peer_pid().and_then(ProcessIdentity::of).ok_or_else(|| {
            Failure::new(
                Code::Refused,
                "the process behind this monitor cannot be seen, so nobody could tell later whether it has the guest: share \
                 its process namespace",
            )
        })?;
        Ok(Self { client, process })
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.process.pid
    }

    /// Which process it is.
    pub fn process(&self) -> ProcessIdentity {
        self.process
    }

    /// Refuses a QEMU that does not wait for an image.
    pub async fn check_waits(&self) -> Result<(), Failure> {
        let state = monitor::run_state(&self.client).await?;
        if state != RunState::Inmigrate {
            return Err(Failure::new(
                Code::Refused,
                format!(
                    "QEMU's process {} does not wait for an image, it is {state}: start it with -incoming defer (`dormouse wake \
                     --print-args` tells with what else)",
                    self.pid()
                ),
            ));
        }
        let migration: MigrationInfo = self.client.query(&command::query_migrate {}).await?;
        match migration.status {
            None | Some(MigrationStatus::None) => Ok(()),
            Some(status) => Err(Failure::new(
                Code::Refused,
                format!(
                    "QEMU's process {} was told to load something already (its migration is {status:?}), and loads nothing \
                     else: start another, with -incoming defer",
                    self.pid()
                ),
            )),
        }
    }

    /// Compares the machine, and says in `plan` how RAM comes back.
    pub async fn check(&self, image: &Image, plan: &mut Plan, request: &Request) -> Result<(), Failure> {
        plan.directory = working_directory(self.pid()).unwrap_or_else(|| PathBuf::from("/"));
        let manifest = image.manifest();
        let mut refused = Vec::new();
        for compared in [
            self.check_machine_type(manifest).await,
            guard::check_machine(manifest, &self.client).await,
        ] {
            match compared {
                Err(failure) if failure.code == Code::Refused => refused.push(failure.message),
                compared => compared?,
            }
        }
        if !refused.is_empty() {
            return Err(Failure::new(Code::Refused, refused.join("; ")));
        }
        let homes = launched_memory::homes(&self.client, self.pid(), image).await?;
        plan.settle_mode(image, choose(&homes, request.mode)?);
        Ok(())
    }

    async fn check_machine_type(&self, manifest: &Manifest) -> Result<(), Failure> {
        let get = command::qom_get {
            path: "/machine".to_owned(),
            property: "type".to_owned(),
        };
        let told: serde_json::Value = self.client.execute(&get).await?;
        let kind = told.as_str().unwrap_or_default();
        let kind = kind.strip_suffix("-machine").unwrap_or(kind);
        if kind == manifest.machine {
            return Ok(());
        }
        // An image that was imported may have the name that a type goes by.
        let machines: Vec<MachineInfo> = self
            .client
            .query(&command::query_machines { compat_props: None })
            .await?;
        let is_alias = machines
            .iter()
            .any(|machine| machine.name == kind && machine.alias.as_ref() == Some(&manifest.machine));
        if is_alias {
            return Ok(());
        }
        Err(Failure::new(
            Code::Refused,
            format!("the machine type was {}, is {kind}", manifest.machine),
        ))
    }

    /// The disks that it has open have to be the files that were compared, and not others that had their names before.
    pub fn check_open_files(&self, disks: &[Disk]) -> Result<(), Failure> {
        let Some(open) = open_files(self.pid()) else {
            tracing::warn!("cannot see which files QEMU has open, and takes its disks by their names");
            return Ok(());
        };
        let others: Vec<String> = disks
            .iter()
            .filter(|disk| disk.witness.is_some())
            .filter(|disk| {
                let file = FileIdentity::at(Path::new(&disk.file_name));
                file.is_some_and(|file| !open.contains(&file))
            })
            .map(|disk| format!("{} is not what is at {} now", label(disk), disk.file_name))
            .collect();
        if others.is_empty() {
            return Ok(());
        }
        Err(Failure::new(
            Code::Refused,
            format!(
                "QEMU's process {} has other disks open: {}",
                self.pid(),
                others.join("; ")
            ),
        ))
    }

    /// Brings it to where a QEMU of ours is before its load: RAM filled, settings that the image's stream needs, and no word
    /// that lets the guest run by itself. Returns what was found of the settings.
    pub async fn prepare(
        &self,
        image: &Image,
        plan: &Plan,
        request: &Request,
        (progress, interrupt): (&Arc<Progress>, &Interrupt),
    ) -> Result<MigrationSettings, Failure> {
        let mut files = Vec::new();
        if plan.mode == Mode::Eager {
            let homes = launched_memory::homes(&self.client, self.pid(), image).await?;
            for (name, home) in homes {
                if let Home::Shared(file) = home {
                    files.push((name, file));
                }
            }
        }
        let verify = request.verify && plan.mode == Mode::Map;
        if verify || plan.mode == Mode::Eager {
            progress.expect(plan.placed_total());
        }
        let (placed, progress, interrupt) = (plan.placed.clone(), Arc::clone(progress), interrupt.clone());
        let image = image.reader()?;
        blocking(move || {
            let run = Run {
                threads: WORKER_THREADS,
                progress: &progress,
                cancelled: interrupt.flag(),
            };
            if verify {
                image.verify(&run)?;
            }
            for (name, file) in files {
                let Some((_, length)) = placed.iter().find(|(placed, _)| *placed == name) else {
                    continue;
                };
                // The file has no name that leads to it; its descriptor does.
                let path = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
                let not_open = |error: &dyn std::error::Error| {
                    Failure::new(
                        Code::StorageIo,
                        format!("cannot write to RAM block {name} of QEMU: {}", sentence(error)),
                    )
                };
                let file = OpenOptions::new()
                    .read(true)
                    .write(true)
                    .open(&path)
                    .map_err(|error| not_open(&error))?;
                let memory = MemoryFile::mapped(file, &path, *length).map_err(|error| not_open(&error))?;
                image.fill(&name, &memory, &run)?;
            }
            Ok(())
        })
        .await?;
        let settings = MigrationSettings::find(&self.client, &[], &[]).await?;
        settings.apply(&self.client).await?;
        // In this run state it only says that the guest is not run by itself once it is loaded.
        self.client.execute(&command::stop {}).await?;
        Ok(settings)
    }

    /// Gives QEMU a descriptor of the image, whose lock is held with it as long as QEMU lives.
    pub async fn pin(&self, image: &Image) -> Result<(), Failure> {
        let held = image.hold()?;
        let keep = command::getfd {
            fdname: PIN.to_owned(),
        };
        self.client.execute_with_fds(&keep, vec![held]).await?;
        Ok(())
    }

    /// A load that failed left nothing of the guest in QEMU, or a person is told.
    pub async fn check_left_empty(&self) -> Result<(), Failure> {
        if !self.process.is_alive() {
            return Ok(());
        }
        match has_the_guest(&self.client).await {
            Ok(false) => Ok(()),
            Ok(true) => Err(self.held()),
            Err(failure) if self.ends_soon().await => {
                tracing::debug!(%failure, "QEMU has ended");
                Ok(())
            }
            Err(failure) => Err(self.held().while_doing(&failure.message)),
        }
    }

    /// Whether a QEMU whose monitor is gone is gone too, or on its way.
    async fn ends_soon(&self) -> bool {
        let deadline = Instant::now() + END_LIMIT;
        while self.process.is_alive() && Instant::now() < deadline {
            tokio::time::sleep(POLL).await;
        }
        !self.process.is_alive()
    }

    /// What is to be done about a guest in a QEMU that may not run it.
    pub fn held(&self) -> Failure {
        let pid = self.pid();
        let message = if self.process.is_alive() {
            format!(
                "QEMU's process {pid} has the guest, which has not run, and is not Dormouse's to end: have its owner end it without \
                 running the guest; then `dormouse recover` gives the image back, which wakes nowhere until then"
            )
        } else {
            format!(
                "QEMU's process {pid} has ended, and has not run the guest: `dormouse recover` gives the image back"
            )
        };
        Failure::new(Code::Operator, message)
    }

    /// A failure to load, with what it means for this QEMU.
    pub fn not_loaded(&self, failure: Failure) -> Failure {
        let pid = self.pid();
        let what = if self.process.is_alive() {
            format!(
                "QEMU's process {pid} is left to its owner, and loads nothing any more: start another for the next try"
            )
        } else {
            format!("QEMU's process {pid} has ended; why, it told who started it")
        };
        Failure {
            message: format!("{}; {what}. The image is as it was", failure.message),
            ..failure
        }
    }
}

/// Whether QEMU has loaded a guest, once nothing is under way any more.
pub async fn has_the_guest(client: &Client) -> Result<bool, Failure> {
    let deadline = Instant::now() + END_LIMIT;
    loop {
        let migration: MigrationInfo = client.query(&command::query_migrate {}).await?;
        if migration.status == Some(MigrationStatus::Completed) {
            return Ok(true);
        }
        if !migration.is_in_progress() {
            let state = monitor::run_state(client).await?;
            return Ok(!matches!(state, RunState::Inmigrate | RunState::Prelaunch));
        }
        if Instant::now() > deadline {
            return Err(Failure::new(
                Code::TimedOut,
                format!("QEMU is still loading after {END_LIMIT:?}"),
            ));
        }
        tokio::time::sleep(POLL).await;
    }
}

/// How RAM comes back: as QEMU's memory is, and as was wished.
fn choose(homes: &[(String, Home)], wanted: Option<Mode>) -> Result<Mode, Failure> {
    let refused = |what: String| {
        Failure::new(
            Code::Refused,
            format!("{what}; `dormouse wake --print-args` tells what QEMU has to be started with"),
        )
    };
    let differing = |mode: Mode| {
        homes.iter().find_map(|(name, home)| match (mode, home) {
            (Mode::Map, Home::Image) | (Mode::Eager, Home::Shared(_)) => None,
            (Mode::Map, Home::Shared(_)) => Some(format!("RAM block {name} is not mapped from the image")),
            (Mode::Map | Mode::Eager, Home::Elsewhere(why)) => Some(format!("RAM block {name}: {why}")),
            (_, Home::Image) => Some(format!("RAM block {name} is mapped from the image")),
            (Mode::Stream | Mode::Lazy, _) => None,
        })
    };
    let is_mapped = |(_, home): &(String, Home)| matches!(home, Home::Image);
    let mode = match wanted {
        Some(mode) => mode,
        None if homes.iter().any(is_mapped) => Mode::Map,
        None if differing(Mode::Eager).is_none() => Mode::Eager,
        None => Mode::Stream,
    };
    match differing(mode) {
        None => Ok(mode),
        Some(why) => Err(refused(format!("RAM cannot come back by {}: {why}", mode.name()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn homes(each: &[&str]) -> Vec<(String, Home)> {
        let home = |name: &&str| match *name {
            "image" => Home::Image,
            "shared" => Home::Shared(tempfile::tempfile().unwrap()),
            why => Home::Elsewhere(why.to_owned()),
        };
        each.iter()
            .map(|name| ("pc.ram".to_owned(), home(name)))
            .collect()
    }

    #[test]
    fn ram_comes_back_as_qemus_memory_is() {
        for (each, mode) in [
            (&["image", "image"][..], Mode::Map),
            (&["shared", "shared"], Mode::Eager),
            (&["shared", "it is private"], Mode::Stream),
            (&["it is private"], Mode::Stream),
        ] {
            assert_eq!(choose(&homes(each), None), Ok(mode), "{each:?}");
            assert_eq!(choose(&homes(each), Some(mode)), Ok(mode), "{each:?}");
        }
        assert_eq!(choose(&homes(&["shared"]), Some(Mode::Stream)), Ok(Mode::Stream));
    }

    #[test]
    fn memory_that_does_not_fit_the_wish_is_refused_with_the_reason() {
        for (each, wanted, words) in [
            (
                &["image", "it is private"][..],
                None,
                "by map: RAM block pc.ram: it is private",
            ),
            (&["shared"], Some(Mode::Map), "not mapped from the image"),
            (&["it is private"], Some(Mode::Eager), "it is private"),
            (&["image"], Some(Mode::Eager), "is mapped from the image"),
            (&["image"], Some(Mode::Stream), "is mapped from the image"),
        ] {
            let error = choose(&homes(each), wanted).unwrap_err();
            assert!(
                error.message.contains(words) && error.message.contains("--print-args"),
                "{error}"
            );
        }
    }
}
