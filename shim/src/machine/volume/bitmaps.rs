//! Dirty bitmaps go with their disk, so that the next incremental backup is one from the new volume.
//!
//! ```text
//!  attached   one of each name on the target, not recording: what the mirror writes is no change of the disk
//!  mirroring  the old ones record, as ever
//!  all stand still   bits are merged over, and those that recorded do so from here on; then the disks are switched
//! ```
//!
//! Nothing is written between the merge and the switch, so no bit is missing and none is there without a reason. A move
//! that is called off leaves the old ones as they were: nothing here changes them.

use std::collections::BTreeMap;

use dormouse_qmp::view::block::{BlockNode, DirtyBitmap};
use dormouse_qmp::{Client, command};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::Format;
use super::plan::Volume;
use super::target::Target;
use crate::error::{Code, Failure};
use crate::vm::graph::Graph;

/// What becomes of the bitmaps of one disk.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bitmaps {
    /// Those that go to the target.
    pub carried: Vec<Carried>,
    /// Those that do not, and why; that was agreed to.
    pub lost: Vec<String>,
}

/// A bitmap that goes to the target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Carried {
    /// Its name, on both.
    pub name: String,
    /// What one bit stands for, in bytes.
    pub granularity_bytes: Option<u64>,
    /// Whether it is kept in the image.
    pub persistent: bool,
}

/// Looks at the bitmaps of the disk whose nodes are `chain`, its root first. `may_lose`: whether it is agreed that some do
/// not go with it.
pub fn examine(graph: &Graph, chain: &[String], target: &Target, may_lose: bool) -> Result<Bitmaps, String> {
    let mut bitmaps = Bitmaps::default();
    for (depth, node) in chain.iter().enumerate() {
        for bitmap in named(graph.node(node)) {
            let name = bitmap.name.clone().unwrap_or_default();
            if bitmap.busy == Some(true) {
                return Err(format!("its dirty bitmap {name} is in use (a backup, an export)"));
            }
            match why_lost(bitmap, target).filter(|_| depth == 0) {
                Some(why) => bitmaps.lost.push(format!("{name} ({why})")),
                None if depth == 0 => bitmaps.carried.push(Carried::of(bitmap)),
                None => bitmaps
                    .lost
                    .push(format!("{name} (of node {node} below, which is left out)")),
            }
        }
    }
    if bitmaps.lost.is_empty() || may_lose {
        return Ok(bitmaps);
    }
    Err(format!(
        "dirty bitmaps would be lost: {}; with --drop-bitmaps it is moved without them, and the next backup has to be a full one",
        bitmaps.lost.join(", ")
    ))
}

impl Carried {
    fn of(bitmap: &DirtyBitmap) -> Self {
        Self {
            name: bitmap.name.clone().unwrap_or_default(),
            granularity_bytes: bitmap.granularity_bytes,
            persistent: bitmap.persistent == Some(true),
        }
    }

    fn add_to(&self, node: &str) -> Value {
        let mut data = json!({
            "node": node,
            "name": self.name,
            "persistent": self.persistent,
            "disabled": true,
        });
        if let Some(granularity) = self.granularity_bytes {
            data["granularity"] = json!(granularity);
        }
        action("add", data)
    }
}

fn why_lost(bitmap: &DirtyBitmap, target: &Target) -> Option<&'static str> {
    if bitmap.inconsistent == Some(true) {
        return Some("it was not stored properly, and holds nothing");
    }
    (bitmap.persistent == Some(true) && target.format != Format::Qcow2)
        .then_some("a raw volume cannot keep it; a qcow2 image can")
}

/// Those that have a name; jobs keep others for themselves.
fn named(node: Option<&BlockNode>) -> impl Iterator<Item = &DirtyBitmap> {
    let all = node.and_then(|node| node.dirty_bitmaps.as_ref());
    all.into_iter().flatten().filter(|bitmap| bitmap.name.is_some())
}

fn action(verb: &str, data: Value) -> Value {
    json!({"type": format!("block-dirty-bitmap-{verb}"), "data": data})
}

/// Makes the bitmaps on a target that is open, so that what speaks against them is known before anything is copied.
pub async fn prepare(client: &Client, volume: &Volume) -> Result<(), Failure> {
    let carried = volume.bitmaps.carried.iter();
    let actions: Vec<Value> = carried
        .map(|bitmap| bitmap.add_to(&volume.names.format))
        .collect();
    let path = volume.target.path.display();
    act(client, actions)
        .await
        .map_err(|failure| failure.while_doing(&format!("dirty bitmaps on {path}")))
}

/// Brings the bitmaps over, as they are now: some may have come or gone since. All of these disks have to stand still.
pub async fn carry(client: &Client, volumes: &[Volume], may_lose: bool) -> Result<(), Failure> {
    let flat = command::query_named_block_nodes { flat: Some(true) };
    let nodes: Vec<BlockNode> = client.query(&flat).await?;
    let nodes: BTreeMap<&str, &BlockNode> = nodes
        .iter()
        .filter_map(|node| Some((node.node_name.as_deref()?, node)))
        .collect();
    let mut actions = Vec::new();
    for volume in volumes {
        let (from, to) = (volume.old_root.as_str(), volume.names.format.as_str());
        let node = |name: &str| nodes.get(name).copied();
        let there: Vec<&str> = named(node(to))
            .filter_map(|bitmap| bitmap.name.as_deref())
            .collect();
        let mut kept = Vec::new();
        for bitmap in named(node(from)) {
            let carried = Carried::of(bitmap);
            let name = carried.name.as_str();
            let refused = |why: &str| {
                let why = format!("{}: dirty bitmap {name}: {why}", volume.label);
                Failure::new(Code::Refused, why)
            };
            if bitmap.busy == Some(true) {
                return Err(refused("it has come to be used"));
            }
            match why_lost(bitmap, &volume.target) {
                Some(_) if may_lose => continue,
                Some(why) => return Err(refused(why)),
                None => {}
            }
            if !there.contains(&name) {
                actions.push(carried.add_to(to));
            }
            let merge = json!({"node": to, "target": name, "bitmaps": [{"node": from, "name": name}]});
            actions.push(action("merge", merge));
            if bitmap.recording == Some(true) {
                actions.push(action("enable", json!({"node": to, "name": name})));
            }
            kept.push(carried.name);
        }
        let gone = volume
            .bitmaps
            .carried
            .iter()
            .filter(|carried| there.contains(&carried.name.as_str()) && !kept.contains(&carried.name));
        actions.extend(gone.map(|carried| action("remove", json!({"node": to, "name": carried.name}))));
    }
    act(client, actions)
        .await
        .map_err(|failure| failure.while_doing("dirty bitmaps"))
}

/// All of them, or none.
async fn act(client: &Client, actions: Vec<Value>) -> Result<(), Failure> {
    if !actions.is_empty() {
        client
            .execute_raw("transaction", json!({"actions": actions}))
            .await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bitmap(name: &str, more: Value) -> Value {
        let mut bitmap = json!({"name": name, "granularity": 65536, "recording": true, "persistent": false, "busy": false});
        bitmap
            .as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        bitmap
    }

    fn target(format: Format) -> Target {
        Target {
            path: "/new".into(),
            format,
            is_block_device: false,
            create: true,
            size_bytes: 512,
            identity: None,
        }
    }

    fn look(top: Value, base: Value, format: Format, may_lose: bool) -> Result<Bitmaps, String> {
        let node = |name: &str, bitmaps: Value| json!({"node-name": name, "drv": "qcow2", "file": name, "dirty-bitmaps": bitmaps});
        let nodes: Vec<BlockNode> =
            serde_json::from_value(json!([node("top", top), node("base", base)])).unwrap();
        let graph = Graph::of_nodes(nodes);
        let chain = ["top".to_owned(), "base".to_owned()];
        examine(&graph, &chain, &target(format), may_lose)
    }

    #[test]
    fn bitmaps_that_can_be_kept_go_with_the_disk() {
        let both = json!([
            bitmap("kept", json!({"persistent": true})),
            bitmap("plain", json!({}))
        ]);
        let to_qcow2 = look(both.clone(), json!([]), Format::Qcow2, false).unwrap();
        let names: Vec<&str> = to_qcow2
            .carried
            .iter()
            .map(|carried| carried.name.as_str())
            .collect();
        assert_eq!((names, to_qcow2.lost.len()), (vec!["kept", "plain"], 0));
        let refusal = look(both.clone(), json!([]), Format::Raw, false).unwrap_err();
        assert!(
            refusal.contains("kept (a raw volume") && refusal.contains("--drop-bitmaps"),
            "{refusal}"
        );
        let agreed = look(both, json!([]), Format::Raw, true).unwrap();
        assert_eq!((agreed.carried.len(), agreed.lost.len()), (1, 1));
    }

    #[test]
    fn bitmaps_that_cannot_be_carried_are_told_each_with_its_reason() {
        let refusal = look(
            json!([
                bitmap("torn", json!({"inconsistent": true})),
                {"granularity": 65536, "busy": true}
            ]),
            json!([bitmap("low", json!({}))]),
            Format::Qcow2,
            false,
        );
        let refusal = refusal.unwrap_err();
        for words in ["torn (it was not stored properly", "low (of node base below"] {
            assert!(refusal.contains(words), "{refusal}");
        }
    }

    #[test]
    fn a_bitmap_in_use_is_not_lost_by_agreement() {
        let refusal = look(
            json!([bitmap("b", json!({"busy": true}))]),
            json!([]),
            Format::Qcow2,
            true,
        );
        assert!(refusal.unwrap_err().contains("b is in use"));
    }
}
