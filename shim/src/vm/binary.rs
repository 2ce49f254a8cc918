//! What a QEMU binary can do, asked from the binary itself.

use std::env;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use dormouse_qmp::view::machine::MachineInfo;
use dormouse_qmp::{Client, CommandError, command};
use dormouse_storage::image::manifest::{BinaryFingerprint, Qemu};

use super::command_line::CommandLine;
use super::process::StartingQemu;
use crate::error::{Code, Failure};

/// A binary that has been asked.
#[derive(Debug, Clone)]
pub struct Binary {
    /// What an image remembers of it.
    pub qemu: Qemu,
    machines: Vec<MachineInfo>,
}

impl Binary {
    /// Starts `program` with no machine at all and asks it. `scratch` is a folder for the monitor's socket.
    pub async fn ask(program: &str, scratch: &Path) -> Result<Self, Failure> {
        locate(program)?;
        let socket = scratch.join("ask.sock");
        let arguments = [program, "-machine", "none", "-nodefaults", "-display", "none"].map(str::to_owned);
        let line = CommandLine::parse(&arguments)
            .map_err(|error| Failure::new(Code::Internal, error.to_string()))?;
        let mut qemu = StartingQemu::spawn_quietly(&line, &socket)?.ready().await?;
        let client = qemu.client().clone();
        let machines: Vec<MachineInfo> = client
            .query(&command::query_machines { compat_props: None })
            .await?;
        let record = describe(&client, program).await?;
        qemu.kill().await?;
        // A QEMU that is killed leaves its socket.
        let _ = fs::remove_file(&socket);
        Ok(Self {
            qemu: record,
            machines,
        })
    }

    /// The binary has to have this very machine type.
    pub fn check_knows(&self, machine: &str) -> Result<(), Failure> {
        if self.machines.iter().any(|known| known.name == machine) {
            return Ok(());
        }
        Err(Failure::new(
            Code::Refused,
            format!(
                "QEMU {} does not know the machine type {machine} that the guest was saved on",
                self.qemu.version
            ),
        ))
    }

    /// The name of main RAM's block on the machine type that `line` asks for.
    pub fn main_ram_name(&self, line: &CommandLine) -> Result<String, Failure> {
        let wanted = line.machine();
        let machine = match &wanted {
            Some(name) => self
                .machines
                .iter()
                .find(|machine| machine.name == *name || machine.alias.as_ref() == Some(name)),
            None => self.machines.iter().find(|machine| machine.is_default),
        };
        let machine = machine.ok_or_else(|| {
            Failure::new(
                Code::Usage,
                match wanted {
                    Some(name) => format!("QEMU {} has no machine type {name:?}", self.qemu.version),
                    None => format!(
                        "QEMU {} has no default machine type; give one with -machine",
                        self.qemu.version
                    ),
                },
            )
        })?;
        machine.default_ram_id.clone().ok_or_else(|| {
            Failure::new(
                Code::Refused,
                format!(
                    "machine type {} has no main RAM that could be placed",
                    machine.name
                ),
            )
        })
    }
}

/// What an image remembers of the QEMU at the other end, which was started as `program`.
pub async fn describe(client: &Client, program: &str) -> Result<Qemu, Failure> {
    let located = locate(program).ok();
    let abilities = MemoryBackendAbilities::of(client).await?;
    let greeting = client.greeting();
    Ok(Qemu {
        version: greeting.version.to_string(),
        package: greeting.package.clone(),
        binary: located.as_ref().map(|(path, _)| path.clone()),
        binary_fingerprint: located.map(|(_, fingerprint)| fingerprint),
        memory_backend_offset: abilities.offset,
        memory_backend_rom: abilities.rom,
    })
}

/// What `memory-backend-file` takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryBackendAbilities {
    /// `offset=` (QEMU 8.1): memory may begin anywhere in its file.
    pub offset: bool,
    /// `rom=` (QEMU 8.2): memory may be writable though its file is opened for reading.
    pub rom: bool,
}

impl MemoryBackendAbilities {
    /// Asks the QEMU at the other end.
    pub async fn of(client: &Client) -> Result<Self, CommandError> {
        Ok(Self {
            offset: client
                .has_object_property("memory-backend-file", "offset")
                .await?,
            rom: client.has_object_property("memory-backend-file", "rom").await?,
        })
    }
}

/// Finds a program the way a shell does, and its fingerprint.
pub fn locate(program: &str) -> Result<(PathBuf, BinaryFingerprint), Failure> {
    let candidates: Vec<PathBuf> = if program.contains('/') {
        vec![PathBuf::from(program)]
    } else {
        env::split_paths(&env::var_os("PATH").unwrap_or_default())
            .map(|folder| folder.join(program))
            .collect()
    };
    for candidate in candidates {
        if let Ok(metadata) = fs::metadata(&candidate)
            && metadata.is_file()
            && metadata.permissions().mode() & 0o111 != 0
        {
            let path = fs::canonicalize(&candidate).unwrap_or(candidate);
            let fingerprint = BinaryFingerprint {
                size_bytes: metadata.size(),
                mtime_ns: modified_ns(&metadata),
            };
            return Ok((path, fingerprint));
        }
    }
    Err(Failure::new(
        Code::Usage,
        format!("cannot find the program {program:?}"),
    ))
}

/// A file's modification time in nanoseconds since 1970.
pub fn modified_ns(metadata: &fs::Metadata) -> i64 {
    metadata
        .mtime()
        .saturating_mul(1_000_000_000)
        .saturating_add(metadata.mtime_nsec())
}
