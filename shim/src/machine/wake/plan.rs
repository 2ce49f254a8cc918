//! The plan of a wake: from what the image says to the command line that QEMU gets.

use std::path::{Path, PathBuf};

use dormouse_storage::image::manifest::{Disk, GuestState as SavedState, Manifest};
use dormouse_storage::{ByteCount, Image, ImageState, feed};

use super::choice::{self, Choice};
use super::guard::{self, CheckLineError};
use super::other_disks::put_in_place;
use super::{Mode, Request, snapshot};
use crate::error::{Code, Failure};
use crate::vm::binary::{self, Binary};
use crate::vm::command_line::{CommandLine, CommandLineError, MemoryBackend, Placement};
use crate::vm::disks;
use crate::vm::own_memory::{self, OwnMemory};

/// Why a guest does not run before its RAM is there in a QEMU that somebody else started: nobody would feed it then.
pub const NOT_FED: &str = "its QEMU is not Dormouse's own, and nobody would stay to feed it";

/// A wake that can be tried.
#[derive(Debug)]
pub struct Plan {
    /// How RAM comes back.
    pub mode: Mode,
    /// Why in no better way.
    pub passed_over: Vec<String>,
    /// The command line for a QEMU that waits, with RAM still as recorded.
    line: CommandLine,
    /// The name of main RAM's block.
    main_ram: String,
    /// Whether QEMU takes `rom=off`.
    rom_property: bool,
    /// QEMU's working directory.
    pub directory: PathBuf,
    /// The blocks that the command line places, whose pages do not travel in the stream: name and size.
    pub placed: Vec<(String, ByteCount)>,
    /// Those of them whose memory stays where the command line has it.
    own: Vec<OwnMemory>,
    /// Whether the guest ran when it was saved.
    pub was_running: bool,
    /// The recorded command line, with disks that lie elsewhere where they are.
    pub recorded: Vec<String>,
    /// The disks that the guest shall have.
    pub disks: Vec<Disk>,
    /// What differs of the disks and was let through.
    pub forced_disks: Vec<String>,
}

/// The image has to be one that was never woken.
pub fn check_state(image: &Image) -> Result<(), Failure> {
    let path = image.path().display();
    let message = match image.state() {
        ImageState::Sealed => return Ok(()),
        ImageState::Writing => format!("{path} was never completed"),
        ImageState::Waking => {
            format!(
                "{path} is being woken, or its wake ended in between: its guest may have run since, which `dormouse recover` finds \
                 out. Where that finds nothing its guest has run; what is in it can be exported, or given up with `dormouse \
                 image discard`"
            )
        }
        ImageState::Consumed => {
            format!("{path} was woken already; its guest has run since and must not run again from it")
        }
    };
    Err(Failure::new(Code::ImageInvalid, message))
}

/// Decides everything that can be decided without starting the guest's QEMU. `scratch`: a folder for a socket.
pub async fn plan(image: &Image, request: &Request, scratch: &Path) -> Result<Plan, Failure> {
    let manifest = image.manifest();
    let recorded = Recorded::of(manifest, request)?;
    let forced = check_disks(manifest, &recorded.disks, request)?;
    let line = recorded.line(manifest, &request.changes)?;
    let abilities = abilities(manifest, line.program(), scratch).await?;
    let plan = lay_out(
        image,
        request,
        (recorded, line),
        abilities,
        // QEMU opens /dev/userfaultfd since the version that brought offset=, and no command tells the one.
        feed::check_possible(abilities.0),
    )?;
    Ok(Plan {
        forced_disks: forced.into_iter().collect(),
        ..plan
    })
}

/// The plan for a QEMU that a launcher starts itself, by the image alone: disks may not be there yet, and the binary may be
/// another. What the recorded QEMU could do each later one can.
pub fn plan_for_launcher(image: &Image, request: &Request) -> Result<Plan, Failure> {
    let manifest = image.manifest();
    let recorded = Recorded::of(manifest, request)?;
    let line = recorded.line(manifest, &request.changes)?;
    let abilities = (
        manifest.qemu.memory_backend_offset,
        manifest.qemu.memory_backend_rom,
    );
    lay_out(
        image,
        request,
        (recorded, line),
        abilities,
        Err(NOT_FED.to_owned()),
    )
}

/// The plan for a QEMU that a launcher has started. How RAM comes back is settled when it is seen.
pub fn plan_to_take_over(image: &Image, request: &Request) -> Result<Plan, Failure> {
    // Where its memory is may be the launcher's own idea, so a wish is judged by that.
    let mode = request.mode.filter(|mode| *mode == Mode::Lazy);
    let by_the_image = Request {
        mode,
        ..request.clone()
    };
    let plan = plan_for_launcher(image, &by_the_image)?;
    let forced = check_disks(image.manifest(), &plan.disks, request)?;
    Ok(Plan {
        forced_disks: forced.into_iter().collect(),
        ..plan
    })
}

/// Compares the disks' files with what they were at the save. Returns what differs and was let through.
fn check_disks(manifest: &Manifest, on: &[Disk], request: &Request) -> Result<Option<String>, Failure> {
    if !request.disks_as_saved {
        snapshot::check_disks_apart(manifest, on)?;
    }
    unless_forced(disks::check_unchanged(on), request.force_disks)
}

/// The recorded machine, with disks that lie elsewhere where they are.
struct Recorded {
    command_line: Vec<String>,
    directory: PathBuf,
    disks: Vec<Disk>,
}

impl Recorded {
    fn of(manifest: &Manifest, request: &Request) -> Result<Self, Failure> {
        let recorded = manifest.command_line.as_ref().ok_or_else(|| {
            Failure::new(
                Code::Refused,
                "the image does not say how its guest was started; import it again, with the QEMU command line after `--`"
                    .to_owned(),
            )
        })?;
        let directory = manifest
            .working_directory
            .clone()
            .unwrap_or_else(|| PathBuf::from("/"));
        let (disks, command_line) =
            put_in_place(&manifest.disks, recorded, &directory, &request.other_disks)?;
        Ok(Self {
            command_line,
            directory,
            disks,
        })
    }

    /// The command line, which has to make the machine that was saved.
    fn line(&self, manifest: &Manifest, changes: &[String]) -> Result<CommandLine, Failure> {
        let line = CommandLine::parse(&self.command_line).map_err(unusable)?;
        guard::check_line(manifest, &line, changes).map_err(|error| match error {
            CheckLineError::Differs(failure) => failure,
            CheckLineError::Line(error) => Failure::new(
                Code::Usage,
                format!("QEMU's command line with its changes: {error}"),
            ),
        })?;
        Ok(line)
    }
}

fn unusable(error: CommandLineError) -> Failure {
    Failure::new(Code::Refused, format!("the recorded command line: {error}"))
}

fn lay_out(
    image: &Image,
    request: &Request,
    (recorded, line): (Recorded, CommandLine),
    (offset_property, rom_property): (bool, bool),
    feeding: Result<(), String>,
) -> Result<Plan, Failure> {
    let manifest = image.manifest();
    let main_ram = manifest.machine_default_ram_id.clone().unwrap_or_default();
    if main_ram.is_empty() && !line.names_main_memory() {
        return Err(Failure::new(
            Code::Refused,
            "the image does not say which RAM block is the machine's main RAM",
        ));
    }
    let line = line
        .for_wake(&manifest.machine)
        .with_changes(&request.changes)
        .map_err(|error| {
            Failure::new(
                Code::Usage,
                format!("the changes to QEMU's command line: {error}"),
            )
        })?;
    let own = own_memory::of(&line, &main_ram, &recorded.directory).map_err(unusable)?;
    let facts = choice::Facts {
        image: image.check_mappable(),
        offset_property,
        version: &manifest.qemu.version,
        shares_memory: line.shares_memory(),
        feeding,
        own: &own,
    };
    let Choice { mode, passed_over } = choice::choose(request.mode, &facts)?;
    for why in &passed_over {
        tracing::info!("{why}");
    }
    let placed = placed_in(mode, manifest);
    Ok(Plan {
        mode,
        passed_over,
        own,
        line,
        main_ram,
        rom_property,
        directory: recorded.directory,
        recorded: recorded.command_line,
        disks: recorded.disks,
        placed,
        was_running: manifest.guest.state_when_saved == SavedState::Running,
        forced_disks: Vec::new(),
    })
}

/// What a comparison of disks found is a refusal, or, where it is forced, something to be told and remembered.
pub fn unless_forced(compared: Result<(), Failure>, force: bool) -> Result<Option<String>, Failure> {
    match compared {
        Ok(()) => Ok(None),
        Err(failure) if force && failure.code == Code::Refused => {
            tracing::warn!(
                "the guest is woken all the same (--force-disks): {}",
                failure.message
            );
            Ok(Some(failure.message))
        }
        Err(failure) => Err(failure),
    }
}

impl Plan {
    /// The command line with RAM mapped from `image`, or in the files that `file_of` names.
    pub fn command_line(
        &self,
        image: &Image,
        file_of: impl Fn(&str) -> PathBuf,
    ) -> Result<CommandLine, Failure> {
        let place = |backend: &MemoryBackend| match (self.mode, image.layout().block(&backend.id)) {
            (_, None) | (Mode::Stream, _) => Placement::AsGiven,
            _ if self.is_own(&backend.id) => Placement::AsGiven,
            (Mode::Eager | Mode::Lazy, Some(_)) => Placement::SharedFile(file_of(&backend.id)),
            (Mode::Map, Some(block)) => Placement::Image {
                path: image.path().to_owned(),
                offset: ByteCount(block.offset),
                rom_property: self.rom_property,
            },
        };
        self.line.with_memory(&self.main_ram, place).map_err(unusable)
    }

    /// RAM comes back in another way than was planned.
    pub fn settle_mode(&mut self, image: &Image, mode: Mode) {
        self.mode = mode;
        self.placed = placed_in(mode, image.manifest());
    }

    /// How much RAM the placed blocks are.
    pub fn placed_total(&self) -> ByteCount {
        ByteCount(self.placed.iter().map(|(_, length)| length.0).sum())
    }

    /// How much RAM goes into files of ours.
    pub fn in_our_files(&self) -> ByteCount {
        let ours = self.placed.iter().filter(|(name, _)| !self.is_own(name));
        match self.mode {
            Mode::Lazy | Mode::Eager => ByteCount(ours.map(|(_, length)| length.0).sum()),
            Mode::Map | Mode::Stream => ByteCount::ZERO,
        }
    }

    fn is_own(&self, name: &str) -> bool {
        self.own.iter().any(|own| own.id == name)
    }
}

fn placed_in(mode: Mode, manifest: &Manifest) -> Vec<(String, ByteCount)> {
    match mode {
        Mode::Stream => Vec::new(),
        Mode::Map | Mode::Lazy | Mode::Eager => placed_blocks(manifest),
    }
}

/// The blocks of guest memory that a wake places, by the manifest: RAM that a memory backend stands for. What is left
/// are ROMs, firmware tables and video memory.
pub fn placed_blocks(manifest: &Manifest) -> Vec<(String, ByteCount)> {
    manifest
        .ram_blocks
        .iter()
        .filter(|block| block.backend.is_some())
        .map(|block| (block.name.clone(), ByteCount(block.length_bytes)))
        .collect()
}

/// Whether the binary takes `offset=` and `rom=`. The image remembers, so that a wake need not ask; a binary that
/// looks different is asked again.
async fn abilities(manifest: &Manifest, program: &str, scratch: &Path) -> Result<(bool, bool), Failure> {
    let (path, fingerprint) = binary::locate(program)?;
    let remembered = &manifest.qemu;
    if remembered.binary.as_ref() == Some(&path) && remembered.binary_fingerprint == Some(fingerprint) {
        return Ok((remembered.memory_backend_offset, remembered.memory_backend_rom));
    }
    tracing::info!(
        program,
        "not the binary that the guest was saved with; asking it what it can do"
    );
    let binary = Binary::ask(program, scratch).await?;
    guard::check_version(&remembered.version, &binary.qemu.version)?;
    binary.check_knows(&manifest.machine)?;
    let qemu = binary.qemu;
    Ok((qemu.memory_backend_offset, qemu.memory_backend_rom))
}
