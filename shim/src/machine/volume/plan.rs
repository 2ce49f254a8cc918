//! What a move would do, found out before anything is touched: which disks are meant, whether each can be moved, and
//! whether its target will do. All that stands in the way is told at once.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use dormouse_qmp::view::block::{BlockInfo, BlockNode};
use dormouse_qmp::view::job::JobInfo;
use dormouse_qmp::view::machine::RunState;
use dormouse_qmp::view::migration::MigrationInfo;
use dormouse_qmp::{Client, command};
use dormouse_storage::ByteCount;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::bitmaps::{self, Bitmaps};
use super::nodes::Names;
use super::target::{Need, Target};
use super::{Format, Request, WhenFull, Wish};
use crate::error::{Code, Failure};
use crate::vm::block_ground::{overlap, overlaps};
use crate::vm::file_identity::FileIdentity;
use crate::vm::graph::{Graph, is_filter};
use crate::vm::monitor;
use crate::vm::process::working_directory;

/// One disk of a move, with all that is needed to do it, and to undo it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Volume {
    /// How the disk is called to a person.
    pub label: String,
    /// Its drive, where it has a name.
    pub device: String,
    /// Its device.
    pub qdev: Option<String>,
    /// The names of what is made for it.
    pub names: Names,
    /// The node that the guest is on before.
    pub old_root: String,
    /// That node and all under it, top to bottom.
    pub old_chain: Vec<String>,
    /// The file that the guest is on before.
    pub old_file: PathBuf,
    /// The size that the guest sees, in bytes.
    pub size_bytes: u64,
    /// What is allocated of it, in bytes.
    pub allocated_bytes: Option<u64>,
    /// Whether the host's page cache is passed by.
    pub direct: bool,
    /// How writes of zeros are treated before, in QEMU's words.
    pub detect_zeroes: String,
    /// Its dirty bitmaps.
    #[serde(default)]
    pub bitmaps: Bitmaps,
    /// The internal snapshots in the old volume, which stay there.
    #[serde(default)]
    pub snapshots: Vec<String>,
    /// Where it goes.
    pub target: Target,
    /// The file that was made for it, once it is.
    #[serde(default)]
    pub made: Option<FileIdentity>,
}

impl Volume {
    /// What its target has to fulfil.
    pub fn need(&self) -> Need<'_> {
        Need {
            size_bytes: self.size_bytes,
            allocated_bytes: self.allocated_bytes,
            direct: self.direct,
            wants_room: true,
            like: &self.old_file,
        }
    }
}

/// Looks at everything. `pid`: QEMU's process, where it can be seen.
pub async fn make(
    client: &Client,
    operation: Uuid,
    request: &Request,
    pid: Option<u32>,
) -> Result<Vec<Volume>, Failure> {
    if request.volumes.is_empty() {
        return Err(Failure::new(Code::Usage, "say which volumes go where"));
    }
    if request.speed_limit == Some(ByteCount(0)) {
        return Err(Failure::new(
            Code::Usage,
            "at 0 bytes a second nothing is ever moved",
        ));
    }
    check_idle(client).await?;
    let graph = Graph::of(client).await?;
    let directory = pid
        .and_then(working_directory)
        .unwrap_or_else(|| PathBuf::from("/"));
    let in_use = InUse::of(&graph, &directory, pid);
    let (mut volumes, mut refusals) = (Vec::new(), Vec::new());
    for (index, wish) in request.volumes.iter().enumerate() {
        let names = Names::of(operation, index);
        let examined = examine(client, &graph, (wish, request), names, &directory, &in_use);
        match examined.await {
            Ok(volume) => volumes.push(volume),
            Err(refusal) => refusals.push(refusal),
        }
    }
    let (mut disks, mut targets): (_, Vec<&PathBuf>) = (BTreeSet::new(), Vec::new());
    for volume in &volumes {
        if !disks.insert(volume.old_root.clone()) {
            refusals.push(Failure::new(
                Code::Usage,
                format!("{} is named twice", volume.label),
            ));
        }
        let path = &volume.target.path;
        if let Some(other) = targets
            .iter()
            .find(|other| **other == path || overlap(other, path))
        {
            let (path, other) = (path.display(), other.display());
            refusals.push(Failure::new(
                Code::Usage,
                format!("{path} is the target of two disks, or lies on or under {other}, which is another's"),
            ));
        }
        targets.push(path);
    }
    let Some(first) = refusals.first() else {
        return Ok(volumes);
    };
    let code = first.code;
    let messages: Vec<String> = refusals.into_iter().map(|refusal| refusal.message).collect();
    Err(Failure::new(code, messages.join("; ")))
}

/// Other work on the disks, or on all of the VM, has to be over.
pub(super) async fn check_idle(client: &Client) -> Result<(), Failure> {
    let refused = |why: String| Err(Failure::new(Code::Refused, why));
    let state = monitor::run_state(client).await?;
    let may_move = matches!(
        state,
        RunState::Running | RunState::Paused | RunState::Prelaunch | RunState::Suspended | RunState::IoError
    );
    if !may_move {
        return refused(format!("the VM is {state}, and its disks cannot be moved then"));
    }
    let migration: MigrationInfo = client.query(&command::query_migrate {}).await?;
    if migration.is_in_progress() {
        return refused("a migration is under way, which a hibernation is to QEMU".to_owned());
    }
    let jobs: Vec<JobInfo> = client.query(&command::query_jobs {}).await?;
    if let Some(job) = jobs.first() {
        return refused(format!(
            "{} job {} is {}: it has to end first",
            job.job_type, job.id, job.status
        ));
    }
    Ok(())
}

/// What this QEMU has open already.
struct InUse {
    identities: Vec<(FileIdentity, String)>,
}

impl InUse {
    fn of(graph: &Graph, directory: &Path, pid: Option<u32>) -> Self {
        let nodes = graph.node_names().filter_map(|name| {
            let file = &graph.node(name)?.file;
            Some((
                FileIdentity::at(&directory.join(file))?,
                format!("as node {name}"),
            ))
        });
        let descriptors = pid.map(|pid| fs::read_dir(format!("/proc/{pid}/fd")));
        let descriptors = descriptors.into_iter().flatten().flatten().flatten();
        let open = descriptors
            .filter_map(|entry| Some((FileIdentity::at(&entry.path())?, "by its process".to_owned())));
        Self {
            identities: nodes.chain(open).collect(),
        }
    }

    fn check(&self, path: &Path) -> Result<(), Failure> {
        let identity = FileIdentity::at(path);
        let what = match self.identities.iter().find(|(there, _)| overlaps(path, *there)) {
            None => return Ok(()),
            Some((there, how)) if Some(*there) == identity => format!("is in use by this very QEMU, {how}"),
            Some((_, how)) => format!("lies on or under what this very QEMU has open, {how}"),
        };
        Err(Failure::new(Code::Refused, format!("{} {what}", path.display())))
    }
}

async fn examine(
    client: &Client,
    graph: &Graph,
    (wish, request): (&Wish, &Request),
    names: Names,
    directory: &Path,
    in_use: &InUse,
) -> Result<Volume, Failure> {
    let drive = find(graph, &wish.disk, directory)?;
    let label = label(drive);
    let refused = |why: &str| Failure::new(Code::Refused, format!("{label} cannot be moved: {why}"));
    let root = drive
        .inserted
        .as_ref()
        .and_then(|node| node.node_name.clone())
        .ok_or_else(|| refused("it is empty"))?;
    let node = graph.node(&root).ok_or_else(|| refused("its node is not told"))?;
    if let Some(why) = verdict(graph, drive, node, &root) {
        return Err(refused(&why));
    }
    if let Some(why) = device_verdict(client, drive).await {
        return Err(refused(why));
    }
    let file = file_below(graph, &root).map_err(|why| refused(&why))?;
    let old_file = directory.join(file);
    let image = node.image.as_ref();
    let size_bytes = image
        .and_then(|image| image.virtual_size_bytes)
        .ok_or_else(|| refused("its size is not told"))?;
    let mut volume = Volume {
        label: label.clone(),
        device: drive.device.clone(),
        qdev: drive.qdev.clone(),
        names,
        old_chain: graph.chain(&root),
        old_root: root,
        size_bytes,
        allocated_bytes: image.and_then(|image| image.actual_size_bytes),
        direct: node.cache.is_some_and(|cache| cache.direct),
        detect_zeroes: node.detect_zeroes.clone().unwrap_or_else(|| "off".to_owned()),
        target: Target {
            path: wish.to.clone(),
            format: Format::Raw,
            is_block_device: false,
            create: false,
            size_bytes: 0,
            identity: None,
        },
        old_file,
        bitmaps: Bitmaps::default(),
        snapshots: snapshots(node),
        made: None,
    };
    // Before it is opened for a look.
    in_use.check(&wish.to)?;
    let need = Need {
        wants_room: request.when_full == WhenFull::Stop,
        ..volume.need()
    };
    volume.target = Target::examine(wish, need).map_err(|failure| failure.while_doing(&label))?;
    if request.verify
        && let Some(why) = not_comparable(graph, node, &volume)
    {
        return Err(refused(&format!("--verify compares raw volumes, and {why}")));
    }
    volume.bitmaps = bitmaps::examine(graph, &volume.old_chain, &volume.target, request.drop_bitmaps)
        .map_err(|why| refused(&why))?;
    Ok(volume)
}

/// How a drive is called to a person.
pub(super) fn label(drive: &BlockInfo) -> String {
    let named = [drive.device.as_str(), drive.qdev.as_deref().unwrap_or_default()];
    let name = named.into_iter().find(|name| !name.is_empty()).unwrap_or("?");
    format!("disk {name}")
}

/// The drive that a person means.
pub(super) fn find<'a>(graph: &'a Graph, disk: &str, directory: &Path) -> Result<&'a BlockInfo, Failure> {
    if disk.is_empty() {
        return Err(Failure::new(Code::Usage, "a disk has to be named"));
    }
    let identity = disk
        .contains('/')
        .then(|| FileIdentity::at(&directory.join(disk)))
        .flatten();
    let is_meant = |drive: &&BlockInfo| {
        let root = drive.inserted.as_ref();
        let by_device = drive
            .qdev
            .as_deref()
            .is_some_and(|qdev| qdev == disk || device_id(qdev) == Some(disk));
        let by_node = root.and_then(|root| root.node_name.as_deref()) == Some(disk);
        let by_file = || {
            let root = root.and_then(|root| root.node_name.as_deref())?;
            let file = file_below(graph, root).ok()?;
            FileIdentity::at(&directory.join(file))
        };
        by_device || drive.device == disk || by_node || (identity.is_some() && by_file() == identity)
    };
    let found: Vec<&BlockInfo> = graph.drives().iter().filter(is_meant).collect();
    match found[..] {
        [drive] => Ok(drive),
        [] => {
            let there: Vec<String> = graph.drives().iter().map(label).collect();
            Err(Failure::new(
                Code::Usage,
                format!("there is no disk {disk}; there are: {}", there.join(", ")),
            ))
        }
        _ => Err(Failure::new(
            Code::Usage,
            format!(
                "{disk} may be {}",
                found
                    .iter()
                    .map(|drive| label(drive))
                    .collect::<Vec<_>>()
                    .join(" or ")
            ),
        )),
    }
}

/// The id of a device by the path of its object, `/machine/peripheral/ID` or a part of it.
pub fn device_id(qdev: &str) -> Option<&str> {
    match qdev.strip_prefix("/machine/peripheral/") {
        Some(path) => path.split('/').next(),
        None => (!qdev.starts_with('/')).then_some(qdev),
    }
}

/// What a disk's nodes say against a move.
fn verdict(graph: &Graph, drive: &BlockInfo, root: &BlockNode, name: &str) -> Option<String> {
    if drive.removable {
        return Some("it is a removable medium (a CD-ROM, say)".to_owned());
    }
    if root.read_only {
        return Some("it is read-only".to_owned());
    }
    if root.active == Some(false) {
        return Some("QEMU has given it over to a migration".to_owned());
    }
    if graph.is_shared_for_writing(name) {
        return Some(
            "it is shared with other guests (share-rw), which would go on writing to the old volume"
                .to_owned(),
        );
    }
    if is_encrypted(graph, name) {
        return Some("it is encrypted, and its copy would not be".to_owned());
    }
    let path = std::iter::successors(Some(name), |name| graph.below(name));
    if let Some(filter) = path
        .filter_map(|name| graph.node(name))
        .find(|node| is_filter(&node.driver))
    {
        return Some(format!(
            "it is behind a {} node, which would be left out with the old volume",
            filter.driver
        ));
    }
    graph.chain(name).iter().skip(1).find_map(|node| {
        graph
            .users_outside(node)
            .into_iter()
            .next()
            .map(|user| format!("{user} uses its node {node}"))
    })
}

fn is_encrypted(graph: &Graph, root: &str) -> bool {
    graph
        .chain(root)
        .iter()
        .filter_map(|name| graph.node(name))
        .any(|node| {
            let by_image = node.image.as_ref().and_then(|image| image.encrypted);
            node.driver == "luks" || node.encrypted == Some(true) || by_image == Some(true)
        })
}

fn snapshots(root: &BlockNode) -> Vec<String> {
    let all = root
        .image
        .iter()
        .flat_map(|image| image.snapshots.iter().flatten());
    all.map(|snapshot| snapshot.name.clone()).collect()
}

/// Why the bytes of both volumes cannot be compared as they lie there.
fn not_comparable(graph: &Graph, root: &BlockNode, volume: &Volume) -> Option<String> {
    let is_file = |driver: &str| driver == "file" || driver == "host_device";
    let below = graph.below(&volume.old_root).and_then(|below| graph.node(below));
    let is_plain = match root.driver.as_str() {
        "raw" => below.is_some_and(|below| is_file(&below.driver)),
        driver => is_file(driver),
    };
    // A part of a volume describes itself by where it begins.
    if !is_plain || root.file.contains("\"offset\"") {
        return Some(format!("the old one is {} ({})", root.driver, root.file));
    }
    (volume.target.format != Format::Raw).then(|| "the new one is qcow2".to_owned())
}

/// What a disk's device says against a move: commands that go past the block layer are not copied.
async fn device_verdict(client: &Client, drive: &BlockInfo) -> Option<&'static str> {
    let qdev = drive.qdev.as_deref()?;
    let path = match qdev.starts_with('/') {
        true => qdev.to_owned(),
        false => format!("/machine/peripheral/{qdev}"),
    };
    let get = command::qom_get {
        path,
        property: "type".to_owned(),
    };
    let kind = client.execute(&get).await.ok()?;
    match kind.as_str()? {
        "scsi-block" | "scsi-generic" => {
            Some("it is a device passed through (a LUN), whose commands go past QEMU")
        }
        "scsi-cd" | "ide-cd" => Some("it is a CD-ROM"),
        _ => None,
    }
}

/// The file or block device at the bottom.
pub(super) fn file_below<'a>(graph: &'a Graph, root: &'a str) -> Result<&'a str, String> {
    let mut here = root;
    loop {
        let node = graph.node(here).ok_or("one of its nodes is not told")?;
        match (node.driver.as_str(), graph.below(here)) {
            ("file" | "host_device", _) => return Ok(&node.file),
            (_, Some(below)) => here = below,
            (driver, None) => {
                return Err(format!(
                    "it is on {driver}, and only files and block devices are moved"
                ));
            }
        }
    }
}
