//! The block graph as it is now: which node is in front of which, and who uses them.
//!
//! A drive tells only its root, by a name that may be that of a filter which a job has put in. What the guest really
//! writes to is found by walking.

use std::collections::{BTreeMap, BTreeSet};

use dormouse_qmp::view::block::{BlockInfo, BlockNode};
use dormouse_qmp::{Client, command};
use serde::Deserialize;

use crate::error::Failure;

/// Drivers that pass everything on to the node behind them and have no content of their own.
const FILTERS: &[&str] = &[
    "blkdebug",
    "blkreplay",
    "blkverify",
    "compress",
    "copy-before-write",
    "copy-on-read",
    "mirror_top",
    "commit_top",
    "preallocate",
    "snapshot-access",
    "throttle",
];

/// Those of them that jobs put in and take out.
const JOB_FILTERS: &[&str] = &["mirror_top", "commit_top", "copy-before-write"];

/// The graph of one QEMU at one instant.
#[derive(Debug, Clone)]
pub struct Graph {
    nodes: BTreeMap<String, BlockNode>,
    edges: Vec<Edge>,
    drives: Vec<BlockInfo>,
}

/// Who uses a node, and how.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Edge {
    parent: String,
    /// Whether the parent is a drive, a job or an export rather than a node.
    from_outside: bool,
    child: String,
    role: String,
    shares_writing: bool,
}

#[derive(Deserialize)]
struct RawGraph {
    nodes: Vec<RawNode>,
    edges: Vec<RawEdge>,
}

#[derive(Deserialize)]
struct RawNode {
    id: u64,
    #[serde(rename = "type")]
    kind: String,
    name: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct RawEdge {
    parent: u64,
    child: u64,
    name: String,
    #[serde(default)]
    shared_perm: Vec<String>,
}

impl Graph {
    /// Asks for it. The three answers are not of one instant; whoever decides by them has to hold the graph still, which
    /// QEMU does while jobs of ours are on it.
    pub async fn of(client: &Client) -> Result<Self, Failure> {
        let drives: Vec<BlockInfo> = client.query(&command::query_block {}).await?;
        let flat = command::query_named_block_nodes { flat: Some(true) };
        let nodes: Vec<BlockNode> = client.query(&flat).await?;
        let graph: RawGraph = client.query(&command::x_debug_query_block_graph {}).await?;
        Ok(Self::new(drives, nodes, graph))
    }

    fn new(drives: Vec<BlockInfo>, nodes: Vec<BlockNode>, graph: RawGraph) -> Self {
        let named: BTreeMap<u64, &RawNode> = graph.nodes.iter().map(|node| (node.id, node)).collect();
        let edges = graph.edges.iter().filter_map(|edge| {
            let (parent, child) = (named.get(&edge.parent)?, named.get(&edge.child)?);
            Some(Edge {
                parent: parent.name.clone(),
                from_outside: parent.kind != "block-driver",
                child: child.name.clone(),
                role: edge.name.clone(),
                shares_writing: edge.shared_perm.iter().any(|permission| permission == "write"),
            })
        });
        let edges = edges.collect();
        let nodes = nodes
            .into_iter()
            .filter_map(|node| Some((node.node_name.clone()?, node)));
        Self {
            nodes: nodes.collect(),
            edges,
            drives,
        }
    }

    #[cfg(test)]
    pub fn of_nodes(nodes: Vec<BlockNode>) -> Self {
        let raw = RawGraph {
            nodes: Vec::new(),
            edges: Vec::new(),
        };
        Self::new(Vec::new(), nodes, raw)
    }

    /// What the guest sees as drives.
    pub fn drives(&self) -> &[BlockInfo] {
        &self.drives
    }

    /// A node by its name.
    pub fn node(&self, name: &str) -> Option<&BlockNode> {
        self.nodes.get(name)
    }

    /// The names of all nodes.
    pub fn node_names(&self) -> impl Iterator<Item = &str> {
        self.nodes.keys().map(String::as_str)
    }

    /// The node below, where its content comes from: `file` of a raw node or a filter, for example.
    pub fn below(&self, name: &str) -> Option<&str> {
        let child = |role: &str| {
            self.edges
                .iter()
                .find(|edge| edge.parent == name && !edge.from_outside && edge.role == role)
                .map(|edge| edge.child.as_str())
        };
        let is_filter = self.node(name).is_some_and(|node| is_filter(&node.driver));
        // A filter's content may be behind its `backing`, an image's is behind its `file`.
        match is_filter {
            true => child("file").or_else(|| child("backing")),
            false => child("file"),
        }
    }

    /// All nodes under one, itself first, each once.
    pub fn chain(&self, root: &str) -> Vec<String> {
        let mut found = vec![root.to_owned()];
        let mut at = 0;
        while at < found.len() {
            let here = found[at].clone();
            for edge in &self.edges {
                if edge.parent == here && !edge.from_outside && !found.contains(&edge.child) {
                    found.push(edge.child.clone());
                }
            }
            at += 1;
        }
        found
    }

    /// Whether anybody uses this node.
    pub fn is_used(&self, name: &str) -> bool {
        self.edges.iter().any(|edge| edge.child == name)
    }

    /// Who uses this node from outside the graph: drives, jobs, exports.
    pub fn users_outside(&self, name: &str) -> BTreeSet<&str> {
        let users = self
            .edges
            .iter()
            .filter(|edge| edge.child == name && edge.from_outside);
        users.map(|edge| edge.parent.as_str()).collect()
    }

    /// Whether the drive in front of this node lets others write, as a disk of several guests does.
    pub fn is_shared_for_writing(&self, root: &str) -> bool {
        let mut drives = self
            .edges
            .iter()
            .filter(|edge| edge.child == root && edge.role == "root");
        drives.any(|edge| edge.from_outside && edge.shares_writing)
    }

    /// The first node, from `root` on, that is no filter of a job's: what the drive is on for good.
    pub fn job_content<'a>(&'a self, root: &'a str) -> &'a str {
        let mut here = root;
        while self
            .node(here)
            .is_some_and(|node| JOB_FILTERS.contains(&node.driver.as_str()))
        {
            match self.below(here) {
                Some(below) => here = below,
                None => break,
            }
        }
        here
    }
}

/// Whether a driver has no content of its own.
pub fn is_filter(driver: &str) -> bool {
    FILTERS.contains(&driver)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn graph() -> Graph {
        let nodes = json!([
            {"node-name": "format", "drv": "qcow2", "file": "/a.qcow2"},
            {"node-name": "#file", "drv": "file", "file": "/a.qcow2"},
            {"node-name": "base", "drv": "raw", "file": "/base.img"},
            {"node-name": "basefile", "drv": "file", "file": "/base.img"},
            {"node-name": "filter", "drv": "mirror_top", "file": "/a.qcow2"},
        ]);
        let raw = json!({
            "nodes": [
                {"id": 1, "type": "block-backend", "name": "/machine/peripheral/d/virtio-backend"},
                {"id": 2, "type": "block-driver", "name": "filter"},
                {"id": 3, "type": "block-driver", "name": "format"},
                {"id": 4, "type": "block-driver", "name": "#file"},
                {"id": 5, "type": "block-driver", "name": "base"},
                {"id": 6, "type": "block-driver", "name": "basefile"},
                {"id": 7, "type": "block-job", "name": "job"},
            ],
            "edges": [
                {"parent": 1, "child": 2, "name": "root", "perm": [], "shared-perm": ["write"]},
                {"parent": 2, "child": 3, "name": "backing", "perm": [], "shared-perm": []},
                {"parent": 3, "child": 4, "name": "file", "perm": [], "shared-perm": []},
                {"parent": 3, "child": 5, "name": "backing", "perm": [], "shared-perm": []},
                {"parent": 5, "child": 6, "name": "file", "perm": [], "shared-perm": []},
                {"parent": 7, "child": 3, "name": "main node", "perm": [], "shared-perm": []},
                {"parent": 7, "child": 99, "name": "unheard of", "perm": [], "shared-perm": []},
            ],
        });
        let read = |value| serde_json::from_value(value).unwrap();
        Graph::new(Vec::new(), read(nodes), serde_json::from_value(raw).unwrap())
    }

    #[test]
    fn a_disk_is_on_what_is_behind_the_filters_of_jobs() {
        let graph = graph();
        assert_eq!(graph.job_content("filter"), "format");
        assert_eq!(graph.job_content("format"), "format");
        assert_eq!(graph.below("format"), Some("#file"));
    }

    #[test]
    fn a_chain_is_all_that_is_under_a_node() {
        assert_eq!(graph().chain("format"), ["format", "#file", "base", "basefile"]);
    }

    #[test]
    fn users_are_told_apart_by_where_they_are() {
        let graph = graph();
        assert_eq!(graph.users_outside("format"), BTreeSet::from(["job"]));
        assert!(graph.is_used("base") && graph.users_outside("base").is_empty());
        assert!(graph.is_shared_for_writing("filter"));
        assert!(!graph.is_shared_for_writing("format"));
    }
}
