//! The RAM of a running QEMU, as somebody outside can reach it.
//!
//! A memory backend names the file that its RAM is in. A name is not enough: the file may have been replaced since
//! QEMU opened it, and then a perfect image of the wrong memory would be sealed. So a file counts only when QEMU's
//! process holds the very same inode open.

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use dormouse_qmp::Client;
use dormouse_qmp::command;
use dormouse_qmp::view::machine::{HumanReadableText, MemoryBackend};
use dormouse_storage::{BlockSize, ByteCount};

use crate::error::{Code, Failure};

/// The RAM blocks of a running QEMU.
#[derive(Debug)]
pub struct Memory {
    /// All blocks, in QEMU's order.
    pub blocks: Vec<BlockSize>,
    /// Those that can be read from outside.
    pub shared: Vec<SharedBlock>,
}

/// A RAM block in a file that we hold open.
#[derive(Debug)]
pub struct SharedBlock {
    /// The block's name, which is its backend's id.
    pub name: String,
    /// Its size.
    pub length: ByteCount,
    /// The file.
    pub file: File,
    /// The name that QEMU knows the file by.
    pub path: PathBuf,
}

impl Memory {
    /// Finds the RAM of the QEMU in process `pid`. Every backend has to be one that can be read from outside; the
    /// error names the first that cannot.
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
        let backends: Vec<MemoryBackend> = client.query(&command::query_memdev {}).await?;
        let mut shared = Vec::new();
        for backend in backends {
            let Some(id) = backend.id else {
                return Err(Failure::new(
                    Code::Refused,
                    "a memory backend of this QEMU has no id, so its RAM cannot be found",
                ));
            };
            // A backend that no machine or DIMM uses has no block and nothing to save.
            if let Some(block) = blocks.iter().find(|block| block.name == id) {
                shared.push(SharedBlock::open(client, pid, &id, block.length).await?);
            }
        }
        Ok(Self { blocks, shared })
    }

    /// Whether `name` is read from outside.
    pub fn is_shared(&self, name: &str) -> bool {
        self.shared.iter().any(|block| block.name == name)
    }

    /// How much RAM is read from outside.
    pub fn shared_total(&self) -> ByteCount {
        ByteCount(self.shared.iter().map(|block| block.length.0).sum())
    }

    /// How much RAM has to come through QEMU: ROMs, firmware tables, video memory.
    pub fn streamed_total(&self) -> ByteCount {
        ByteCount(
            self.blocks
                .iter()
                .filter(|block| !self.is_shared(&block.name))
                .map(|block| block.length.0)
                .sum(),
        )
    }
}

impl SharedBlock {
    async fn open(client: &Client, pid: u32, id: &str, length: ByteCount) -> Result<Self, Failure> {
        let path = format!("/objects/{id}");
        let kind = property(client, &path, "type")
            .await?
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let private = |why: String| {
            Failure::new(
                Code::Refused,
                format!(
                    "RAM block {id} cannot be saved by the direct engine: {why}; start the guest with `dormouse run`, \
                     or with -object memory-backend-file,id={id},share=on,mem-path=FILE-ON-TMPFS"
                ),
            )
        };
        if kind != "memory-backend-file" {
            return Err(private(format!("it is a {kind}, which has no file")));
        }
        if property(client, &path, "share").await? != serde_json::Value::Bool(true) {
            return Err(private(
                "it is private to QEMU (share=off), as after a wake with --mode map".to_owned(),
            ));
        }
        // `offset` came with QEMU 8.1; an older QEMU has no offsets.
        let offset = property(client, &path, "offset")
            .await
            .ok()
            .and_then(|value| value.as_u64())
            .unwrap_or(0);
        if offset != 0 {
            return Err(private(format!("it begins at offset {offset} of its file")));
        }
        let named = property(client, &path, "mem-path").await?;
        let named = PathBuf::from(named.as_str().unwrap_or_default());
        let path = working_directory(pid)
            .map(|directory| directory.join(&named))
            .unwrap_or(named);
        let file = open_as_qemu_has_it(pid, &path).map_err(private)?;
        Ok(Self {
            name: id.to_owned(),
            length,
            file,
            path,
        })
    }
}

/// The working directory of a process.
pub fn working_directory(pid: u32) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/cwd")).ok()
}

/// Opens `path` if it is what the process has open, else says why not.
fn open_as_qemu_has_it(pid: u32, path: &Path) -> Result<File, String> {
    let file =
        File::open(path).map_err(|error| format!("cannot open its file {}: {error}", path.display()))?;
    let metadata = file
        .metadata()
        .map_err(|error| format!("cannot examine its file {}: {error}", path.display()))?;
    if !metadata.is_file() {
        return Err(format!("{} is no regular file", path.display()));
    }
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd"))
        .map_err(|error| format!("cannot see the open files of QEMU's process {pid}: {error}"))?;
    let same = |held: fs::Metadata| (held.dev(), held.ino()) == (metadata.dev(), metadata.ino());
    if descriptors
        .flatten()
        .any(|descriptor| fs::metadata(descriptor.path()).is_ok_and(same))
    {
        Ok(file)
    } else {
        Err(format!(
            "{} is not the file that QEMU's process {pid} holds open",
            path.display()
        ))
    }
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

    #[test]
    fn a_file_that_was_replaced_under_its_name_is_not_taken_for_ram() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pc.ram");
        let held = File::create(&path).unwrap();
        let pid = std::process::id();
        open_as_qemu_has_it(pid, &path).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, b"another").unwrap();
        // Our own attempt to look must not count as QEMU holding the file, so another process stands for QEMU.
        let error = open_as_qemu_has_it(1, &path).unwrap_err();
        assert!(
            error.contains("is not the file") || error.contains("cannot see"),
            "{error}"
        );
        drop(held);
    }
}
