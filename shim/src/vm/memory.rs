//! The RAM of a running QEMU: its blocks, and how each can be had from outside.
//!
//! A memory backend names the file that its RAM is in. The name is not enough, nor is it needed: the file may have been
//! replaced since QEMU opened it, and then a perfect image of the wrong memory would be sealed; and RAM that
//! [`ram_home`](super::ram_home) made, or that is in a memfd, has no name. What counts is what QEMU's process has
//! mapped, shared, in the length of the RAM block, and holds open.
//!
//! A survey refuses nothing: what can be made of it is [`engine`](super::engine)'s to say.

use std::collections::HashMap;
use std::fs::{self, File};
use std::path::Path;

use dormouse_qmp::Client;
use dormouse_qmp::command;
use dormouse_qmp::view::machine::{HumanReadableText, MemoryBackend};
use dormouse_storage::{BlockSize, ByteCount};

use super::block_ground::overlaps;
use super::file_identity::FileIdentity;
use crate::error::{Code, Failure};

/// The most that devices other than RAM may fill. QEMU's own devices need well under 1 MiB; a passed-through device
/// brings the state of its firmware.
pub const DEVICE_STATE_BOUND: ByteCount = ByteCount(64 << 20);

/// The kind of backend whose RAM is in a file with a name.
pub const FILE_BACKEND: &str = "memory-backend-file";

/// The kind of backend whose RAM is in a file without one.
pub const MEMFD_BACKEND: &str = "memory-backend-memfd";

/// What the kernel calls a memfd of that kind.
const MEMFD_NAME: &str = "/memfd:memory-backend-memfd";

/// The RAM blocks of a running QEMU.
#[derive(Debug)]
pub struct Memory {
    /// All blocks, in QEMU's order.
    pub blocks: Vec<BlockSize>,
    /// What is behind those that are the guest's memory; the others are ROMs, firmware tables, video memory.
    pub backends: Vec<Backend>,
}

/// The memory backend behind a RAM block.
#[derive(Debug)]
pub struct Backend {
    /// Its id, which is the block's name.
    pub id: String,
    /// Its kind (`memory-backend-memfd`).
    pub kind: String,
    /// The block's size.
    pub length: ByteCount,
    /// Whether QEMU shares it with others.
    pub shared: bool,
    /// The file that it is in, held open, or why there is none that could be.
    pub reach: Result<File, String>,
}

impl Memory {
    /// Surveys the RAM of the QEMU in process `pid`.
    pub async fn of(client: &Client, pid: u32) -> Result<Self, Failure> {
        let listing: HumanReadableText = client.query(&command::x_query_ramblock {}).await?;
        let blocks: Vec<BlockSize> = listing
            .ram_blocks()
            .into_iter()
            .map(|block| BlockSize {
                name: block.name,
                length: ByteCount(block.used_bytes),
            })
            .collect();
        let found: Vec<MemoryBackend> = client.query(&command::query_memdev {}).await?;
        let mut backends = Vec::new();
        for backend in found {
            let Some(id) = backend.id else {
                return Err(Failure::new(
                    Code::Refused,
                    "a memory backend of this QEMU has no id, so its RAM cannot be found",
                ));
            };
            // A backend that no machine or DIMM uses has no block and nothing to save.
            if let Some(block) = blocks.iter().find(|block| block.name == id) {
                backends.push(Backend::survey(client, pid, id, block.length).await?);
            }
        }
        if backends.is_empty() {
            return Err(Failure::new(
                Code::Refused,
                "no RAM block of this machine is named like its memory backend; machine types before 4.0 are not supported",
            ));
        }
        Ok(Self { blocks, backends })
    }

    /// The backend behind the block `name`.
    pub fn backend(&self, name: &str) -> Option<&Backend> {
        self.backends.iter().find(|backend| backend.id == name)
    }

    /// How much RAM is the guest's memory.
    pub fn guest_total(&self) -> ByteCount {
        self.backends.iter().map(|backend| backend.length).sum()
    }

    /// How much RAM there is.
    pub fn total(&self) -> ByteCount {
        self.blocks.iter().map(|block| block.length).sum()
    }

    /// How much RAM is something else: ROMs, firmware tables, video memory.
    pub fn other_total(&self) -> ByteCount {
        self.blocks
            .iter()
            .filter(|block| self.backend(&block.name).is_none())
            .map(|block| block.length)
            .sum()
    }
}

impl Backend {
    async fn survey(client: &Client, pid: u32, id: String, length: ByteCount) -> Result<Self, Failure> {
        let path = format!("/objects/{id}");
        let kind = property(client, &path, "type")
            .await?
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let shared = property(client, &path, "share").await? == serde_json::Value::Bool(true);
        let reach = match kind.as_str() {
            _ if !shared => Err(
                "it is private to QEMU (share=off), as plain -m is, and RAM after a wake by map".to_owned(),
            ),
            FILE_BACKEND => reach_file(client, pid, (&id, &path), length).await?,
            MEMFD_BACKEND => mapped_by(pid, &id, Path::new(MEMFD_NAME), length),
            kind => Err(format!("it is a {kind}, which has no file")),
        };
        Ok(Self {
            id,
            kind,
            length,
            shared,
            reach,
        })
    }

    /// Whether writing to the file or device at `path` changes it.
    pub fn is_at(&self, path: &Path) -> bool {
        let ours = self.reach.as_ref().ok().and_then(FileIdentity::of_open);
        ours.is_some_and(|ours| overlaps(path, ours))
    }
}

async fn reach_file(
    client: &Client,
    pid: u32,
    (id, path): (&str, &str),
    length: ByteCount,
) -> Result<Result<File, String>, Failure> {
    // `offset` came with QEMU 8.1; an older QEMU has no offsets.
    let offset = property(client, path, "offset")
        .await
        .ok()
        .and_then(|value| value.as_u64())
        .unwrap_or(0);
    if offset != 0 {
        return Ok(Err(format!("it begins at offset {offset} of its file")));
    }
    let named = property(client, path, "mem-path").await?;
    let named = Path::new(named.as_str().unwrap_or_default());
    Ok(mapped_by(pid, id, named, length))
}

/// Whether the process has all of `file` mapped, shared. `None`: its mappings cannot be seen.
pub fn is_mapped_by(pid: u32, file: &File) -> Option<bool> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).ok()?;
    let identity = FileIdentity::of_open(file)?;
    let length = file.metadata().ok()?.len();
    let mapped: u64 = maps
        .lines()
        .filter_map(shared_mapping)
        .filter(|(found, ..)| *found == identity)
        .map(|(_, bytes, _)| bytes)
        .sum();
    Some(mapped >= length)
}

/// Opens the file that the process has mapped shared in `length` altogether, and opened as `named` for the backend with
/// this id. Says why not.
fn mapped_by(pid: u32, id: &str, named: &Path, length: ByteCount) -> Result<File, String> {
    let unseen = |error: std::io::Error| format!("cannot see the memory of QEMU's process {pid}: {error}");
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).map_err(unseen)?;
    let mapped = shared_mappings(&maps, id, named);
    let mut fitting = mapped
        .iter()
        .filter(|(_, bytes)| **bytes == length.0)
        .map(|(identity, _)| *identity);
    let (Some(identity), None) = (fitting.next(), fitting.next()) else {
        return Err(format!(
            "QEMU's process {pid} has not exactly one shared mapping of {} with {length}",
            named.display()
        ));
    };
    for descriptor in fs::read_dir(format!("/proc/{pid}/fd")).map_err(unseen)?.flatten() {
        let path = descriptor.path();
        if fs::metadata(&path)
            .is_ok_and(|metadata| metadata.is_file() && FileIdentity::of(&metadata) == identity)
        {
            let file = File::open(&path).map_err(unseen)?;
            // The descriptor may have become another one between the look and the open.
            if file
                .metadata()
                .is_ok_and(|metadata| FileIdentity::of(&metadata) == identity)
            {
                return Ok(file);
            }
        }
    }
    Err(format!(
        "QEMU's process {pid} does not hold {} open",
        named.display()
    ))
}

/// How much of each file with the last name of `named` is mapped shared, by the text of /proc/PID/maps. A file without
/// a name shows the one that it had. In a folder that was named in place of a file, QEMU makes one for each backend.
fn shared_mappings(maps: &str, id: &str, named: &Path) -> HashMap<FileIdentity, u64> {
    let made = format!("qemu_back_mem.{id}.");
    let mut mapped = HashMap::new();
    for line in maps.lines() {
        let Some((identity, bytes, path)) = shared_mapping(line) else {
            continue;
        };
        let path = Path::new(path.strip_suffix(" (deleted)").unwrap_or(path));
        let is_made = || {
            let name = path.file_name().unwrap_or_default();
            path.parent() == Some(named) && name.as_encoded_bytes().starts_with(made.as_bytes())
        };
        if path.file_name() == named.file_name() || is_made() {
            *mapped.entry(identity).or_default() += bytes;
        }
    }
    mapped
}

/// Reads a line such as `7f12-7f34 rw-s 00000000 00:2e 3   /dev/shm/pc.ram`.
fn shared_mapping(line: &str) -> Option<(FileIdentity, u64, &str)> {
    let mut rest = line;
    let mut word = || {
        let (word, after) = rest.trim_start().split_once(' ')?;
        rest = after;
        Some(word)
    };
    let (range, permissions, _offset, device, inode) = (word()?, word()?, word()?, word()?, word()?);
    let (begin, end) = range.split_once('-')?;
    let bytes = hexadecimal(end)?.checked_sub(hexadecimal(begin)?)?;
    let (major, minor) = device.split_once(':')?;
    let identity = FileIdentity {
        major: u32::try_from(hexadecimal(major)?).ok()?,
        minor: u32::try_from(hexadecimal(minor)?).ok()?,
        inode: inode.parse().ok()?,
    };
    permissions
        .ends_with('s')
        .then_some((identity, bytes, rest.trim_start()))
}

fn hexadecimal(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok()
}

async fn property(client: &Client, path: &str, property: &str) -> Result<serde_json::Value, Failure> {
    Ok(client
        .execute(&command::qom_get {
            path: path.to_owned(),
            property: property.to_owned(),
        })
        .await?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
7f0000000000-7f0000200000 rw-s 00000000 00:2e 3                          /run/dormouse/a/ram/pc.ram
7f0000200000-7f0000400000 rw-s 00200000 00:2e 3                          /run/dormouse/a/ram/pc.ram
7f0000400000-7f0000600000 rw-p 00000000 00:2e 4                          /elsewhere/pc.ram
7f0000600000-7f0000800000 rw-s 00000000 00:2e 5                          /odd name/pc.ram (deleted)
7f0000800000-7f0000a00000 rw-p 00000000 00:00 0
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
";

    #[test]
    fn the_parts_of_one_file_count_together_and_private_ones_not_at_all() {
        let identity = |inode| FileIdentity {
            major: 0,
            minor: 0x2e,
            inode,
        };
        let mapped = shared_mappings(MAPS, "pc.ram", Path::new("/run/dormouse/a/ram/pc.ram"));
        assert_eq!(
            mapped,
            HashMap::from([(identity(3), 4 << 20), (identity(5), 2 << 20)])
        );
        assert!(shared_mappings(MAPS, "m0", Path::new("/m0")).is_empty());
    }

    #[test]
    fn a_file_that_qemu_made_in_a_named_folder_is_told_by_its_backend() {
        let maps = "\
7f0000000000-7f0000200000 rw-s 00000000 00:2e 3    /dev/shm/qemu_back_mem.m0.LUdmBx (deleted)
7f0000200000-7f0000400000 rw-s 00000000 00:2e 4    /dev/shm/qemu_back_mem.m01.XUdmBx (deleted)
7f0000400000-7f0000600000 rw-s 00000000 00:2e 5    /tmp/qemu_back_mem.m0.LUdmBx (deleted)
";
        let found = shared_mappings(maps, "m0", Path::new("/dev/shm"));
        assert_eq!(
            found
                .iter()
                .map(|(found, bytes)| (found.inode, *bytes))
                .collect::<Vec<_>>(),
            [(3, 2 << 20)]
        );
    }

    #[test]
    fn ram_that_no_process_has_mapped_is_refused() {
        let error = mapped_by(
            std::process::id(),
            "pc.ram",
            Path::new("/dev/shm/pc.ram"),
            ByteCount(4096),
        )
        .unwrap_err();
        assert!(error.contains("not exactly one shared mapping"), "{error}");
    }
}
