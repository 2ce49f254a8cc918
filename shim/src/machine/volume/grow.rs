//! A disk that grows under its running guest: a raw one to all of its volume, a qcow2 image to any size.
//!
//! A raw disk that moved to a larger volume has been kept at its size; that is taken away first, and then the guest is told.
//! If that fails it gets its size back. Nothing is written down: each save looks at the sizes that the disks have (see
//! `vm/disk_size.rs`), so whatever is interrupted here leaves a guest that can be saved and woken, and growing it again
//! brings it to its end.

use std::path::{Path, PathBuf};

use dormouse_qmp::view::block::{BlockInfo, BlockNode};
use dormouse_qmp::{Client, CommandError};
use serde_json::{Value, json};

use super::nodes::Names;
use super::plan;
use crate::error::{Code, Failure};
use crate::vm::graph::Graph;
use crate::vm::process::working_directory;
use crate::vm::{disks, node_options};

/// What QEMU counts sizes in, in bytes.
const SECTOR_BYTES: u64 = 512;

/// What is asked for.
#[derive(Debug, Clone)]
pub struct Request {
    /// The disk; in the same words as for a move.
    pub disk: String,
    /// Its new size, in bytes; `None`: all of its volume.
    pub size_bytes: Option<u64>,
    /// QEMU's command line, as far as it is known: QEMU does not tell all that a node was opened with.
    pub command_line: Vec<String>,
}

/// Where it is, once it is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// Done.
    Grown,
    /// Ended with the disk as it was.
    Failed,
}

/// A disk that has grown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grown {
    /// The disk.
    pub disk: String,
    /// Its volume.
    pub volume: PathBuf,
    /// Its size before, in bytes.
    pub from_bytes: u64,
    /// Its size now, in bytes.
    pub to_bytes: u64,
}

/// Grows it.
pub async fn grow(client: &Client, request: &Request) -> Result<Grown, Failure> {
    plan::check_idle(client).await?;
    let graph = Graph::of(client).await?;
    let pid = client.peer_pid();
    let directory = pid
        .and_then(working_directory)
        .unwrap_or_else(|| PathBuf::from("/"));
    let drive = plan::find(&graph, &request.disk, &directory)?;
    let label = plan::label(drive);
    let refused = |why: String| Failure::new(Code::Refused, format!("{label} cannot be grown: {why}"));
    let (root, node) = root_of(&graph, drive).ok_or_else(|| refused("it is empty".to_owned()))?;
    if node.read_only || node.active == Some(false) {
        return Err(refused("it cannot be written".to_owned()));
    }
    let file = plan::file_below(&graph, root).map_err(refused)?;
    let volume = directory.join(file);
    let from_bytes = size_of(node).ok_or_else(|| refused("its size is not told".to_owned()))?;
    let now = Now {
        driver: &node.driver,
        size_bytes: from_bytes,
        volume: &volume,
        volume_bytes: disks::witness(&volume).map(|seen| seen.size_bytes),
        is_block_device: is_block_device(&volume),
    };
    let to_bytes = now
        .decide(request.size_bytes)
        .map_err(|failure| failure.while_doing(&label))?;
    let below = graph.below(root);
    let is_pinned = now.driver == "raw" && from_bytes < to_bytes;
    if let (true, Some(below)) = (is_pinned, below) {
        check_pin(root, node).map_err(refused)?;
        set_pin(client, (root, below, node), &request.command_line, None).await?;
    }
    let resize = json!({"node-name": root, "size": to_bytes});
    if let Err(error) = client.execute_raw("block_resize", resize).await {
        // What QEMU refused the guest was not told. Whatever else went wrong, it may have been, and may use all of it.
        let was_refused = matches!(error, CommandError::Qemu { .. });
        let failure = Failure::from(error).while_doing(&label);
        if let (true, true, Some(below)) = (was_refused, is_pinned, below) {
            let pinned = Some(from_bytes);
            set_pin(client, (root, below, node), &request.command_line, pinned)
                .await
                .map_err(|again| Failure {
                    code: Code::Operator,
                    ..again.while_doing(&format!("{failure}; it does not get its size back"))
                })?;
        }
        return Err(failure);
    }
    check_size(client, root, to_bytes)
        .await
        .map_err(|failure| failure.while_doing(&label))?;
    Ok(Grown {
        disk: label,
        volume,
        from_bytes,
        to_bytes,
    })
}

/// Looks whether it is so.
async fn check_size(client: &Client, root: &str, to_bytes: u64) -> Result<(), Failure> {
    let graph = Graph::of(client).await?;
    match graph.node(root).and_then(size_of) {
        Some(size) if size == to_bytes => Ok(()),
        size => Err(Failure::new(
            Code::Internal,
            format!("it should have {to_bytes} bytes now, and QEMU tells {size:?}"),
        )),
    }
}

fn root_of<'a>(graph: &'a Graph, drive: &'a BlockInfo) -> Option<(&'a str, &'a BlockNode)> {
    let root = drive.inserted.as_ref()?.node_name.as_deref()?;
    Some((root, graph.node(root)?))
}

fn size_of(node: &BlockNode) -> Option<u64> {
    node.image.as_ref()?.virtual_size_bytes
}

fn is_block_device(volume: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::metadata(volume).is_ok_and(|metadata| metadata.file_type().is_block_device())
}

/// A disk as it is now.
struct Now<'a> {
    driver: &'a str,
    size_bytes: u64,
    volume: &'a Path,
    volume_bytes: Option<u64>,
    is_block_device: bool,
}

impl Now<'_> {
    /// The size that it gets.
    fn decide(&self, wish: Option<u64>) -> Result<u64, Failure> {
        let refused = |why: String| Err(Failure::new(Code::Refused, why));
        let (here, path) = (self.size_bytes, self.volume.display());
        let is_raw = match self.driver {
            "raw" | "file" | "host_device" => true,
            "qcow2" => false,
            other => return refused(format!("{other} disks are not grown, only raw and qcow2 ones")),
        };
        let Some(volume) = self.volume_bytes else {
            return refused(format!("the size of {path} cannot be seen"));
        };
        let to = match wish {
            Some(wish) => wish,
            None if is_raw => volume,
            None => {
                return refused("a qcow2 image has no largest size: say how large it should be".to_owned());
            }
        };
        if to < here {
            return refused(format!(
                "it has {here} bytes, and a disk is not made smaller ({to} bytes)"
            ));
        }
        if !to.is_multiple_of(SECTOR_BYTES) {
            return refused(format!("{to} bytes are no multiple of {SECTOR_BYTES}"));
        }
        if to > volume && (is_raw || self.is_block_device) {
            return Err(Failure::new(
                Code::NoSpace,
                format!(
                    "{to} bytes are asked for and {path} has {volume}: it lacks {} bytes; make the volume larger first",
                    to - volume
                ),
            ));
        }
        if is_raw && to < volume {
            return refused(format!(
                "a raw disk grows to all of its volume: {path} has {volume} bytes, and {to} are asked for"
            ));
        }
        Ok(to)
    }
}

/// Whether the disk is smaller than its volume by nothing but its `size=`.
fn check_pin(root: &str, node: &BlockNode) -> Result<(), String> {
    let told: Option<Value> = node
        .file
        .strip_prefix("json:")
        .and_then(|told| serde_json::from_str(told).ok());
    let is_plain = told.is_some_and(|told| {
        let begins_there = told
            .get("offset")
            .is_none_or(|offset| offset == 0 || offset == "0");
        told["driver"] == "raw" && begins_there
    });
    if !is_plain {
        return Err(format!("it is only a part of its volume ({})", node.file));
    }
    match root.starts_with('#') {
        true => Err(
            "QEMU changes only nodes that have a name, and that of this disk comes from -drive; move it to another volume, \
             on which it can grow"
                .to_owned(),
        ),
        false => Ok(()),
    }
}

/// Opens the disk's node again as it is, but with this size, or all of its volume.
async fn set_pin(
    client: &Client,
    (root, below, node): (&str, &str, &BlockNode),
    command_line: &[String],
    size_bytes: Option<u64>,
) -> Result<(), Failure> {
    let cache = node.cache.unwrap_or_default();
    let mut options = json!({
        "driver": "raw",
        "node-name": root,
        "file": below,
        "cache": {"direct": cache.direct, "no-flush": cache.no_flush},
        "detect-zeroes": node.detect_zeroes.as_deref().unwrap_or("off"),
        "discard": discard(root, command_line),
    });
    if let Some(size) = size_bytes {
        options["size"] = json!(size);
    }
    let reopen = json!({"options": [options]});
    client.execute_raw("blockdev-reopen", reopen).await?;
    Ok(())
}

/// Whether what the guest discards is given back to the volume, which QEMU does not tell of a node.
fn discard(root: &str, command_line: &[String]) -> String {
    let nodes = node_options::all(command_line);
    let on_line = nodes
        .iter()
        .find(|(_, node)| node.value("node-name") == Some(root));
    match on_line {
        Some((_, node)) => node.value("discard").unwrap_or("ignore").to_owned(),
        None if Names::is_format(root) => "unmap".to_owned(),
        // Plugged in by somebody: not giving space back does no harm.
        None => "ignore".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now(driver: &str) -> Now<'_> {
        Now {
            driver,
            size_bytes: 1024,
            volume: Path::new("/v"),
            volume_bytes: Some(4096),
            is_block_device: false,
        }
    }

    fn refusal(now: &Now<'_>, wish: Option<u64>) -> (Code, String) {
        let failure = now.decide(wish).unwrap_err();
        (failure.code, failure.message)
    }

    #[test]
    fn a_raw_disk_grows_to_all_of_its_volume() {
        let raw = now("raw");
        assert_eq!((raw.decide(None), raw.decide(Some(4096))), (Ok(4096), Ok(4096)));
        let (code, why) = refusal(&raw, Some(2048));
        assert!(code == Code::Refused && why.contains("4096"), "{why}");
    }

    #[test]
    fn a_disk_is_not_made_smaller_nor_larger_than_its_volume() {
        for driver in ["raw", "qcow2"] {
            let (code, why) = refusal(&now(driver), Some(512));
            assert!(code == Code::Refused && why.contains("not made smaller"), "{why}");
        }
        let (code, why) = refusal(&now("raw"), Some(5120));
        assert!(code == Code::NoSpace && why.contains("lacks 1024 bytes"), "{why}");
        let on_device = Now {
            is_block_device: true,
            ..now("qcow2")
        };
        assert_eq!(refusal(&on_device, Some(5120)).0, Code::NoSpace);
    }

    #[test]
    fn a_qcow2_image_grows_to_any_size_that_is_said() {
        assert_eq!(now("qcow2").decide(Some(1 << 40)), Ok(1 << 40));
        assert_eq!(refusal(&now("qcow2"), None).0, Code::Refused);
        assert_eq!(refusal(&now("qcow2"), Some(1025)).0, Code::Refused);
    }

    #[test]
    fn a_part_of_a_volume_and_a_node_without_a_name_are_left_alone() {
        let node = |file: &str| BlockNode {
            file: file.to_owned(),
            ..BlockNode::default()
        };
        let pinned =
            r#"json:{"driver": "raw", "size": "4194304", "file": {"driver": "file", "filename": "/v"}}"#;
        assert_eq!(check_pin("fmt", &node(pinned)), Ok(()));
        assert!(check_pin("#block1", &node(pinned)).is_err());
        let part = r#"json:{"driver": "raw", "offset": 512, "file": {"driver": "file", "filename": "/v"}}"#;
        for file in [part, "/v"] {
            assert!(check_pin("fmt", &node(file)).is_err(), "{file}");
        }
    }

    #[test]
    fn a_node_keeps_whether_it_discards() {
        let line = [
            "qemu",
            "-blockdev",
            "raw,node-name=a,file=f,discard=unmap",
            "-blockdev",
            "raw,node-name=b,file=g",
        ]
        .map(str::to_owned);
        let found = ["a", "b", "dm0-0-format", "plugged"].map(|root| discard(root, &line));
        assert_eq!(found, ["unmap", "ignore", "unmap", "ignore"]);
    }
}
