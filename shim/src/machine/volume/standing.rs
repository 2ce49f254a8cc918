//! Which volume a disk of a move is on. There are three answers, and only the live graph gives them.

use super::plan::Volume;
use crate::vm::graph::Graph;

/// Where a disk is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    /// On the volume that it had before.
    Old,
    /// On the target.
    New,
    /// Neither: unplugged, emptied, or on something that somebody else has put there. That may lie on the target.
    Elsewhere,
}

impl Standing {
    /// Of one disk.
    pub fn of(graph: &Graph, volume: &Volume) -> Self {
        Self::on(content_of(graph, volume).as_deref(), volume)
    }

    /// Of all disks, in their order.
    pub fn of_all(graph: &Graph, volumes: &[Volume]) -> Vec<Self> {
        volumes.iter().map(|volume| Self::of(graph, volume)).collect()
    }

    fn on(node: Option<&str>, volume: &Volume) -> Self {
        match node {
            Some(node) if node == volume.names.format => Self::New,
            Some(node) if node == volume.old_root => Self::Old,
            _ => Self::Elsewhere,
        }
    }
}

/// The node that this volume's guest writes to now; `None` if its drive is gone or empty.
fn content_of(graph: &Graph, volume: &Volume) -> Option<String> {
    let drive = graph
        .drives()
        .iter()
        .find(|drive| drive.qdev == volume.qdev && drive.device == volume.device)?;
    let root = drive.inserted.as_ref()?.node_name.as_deref()?;
    Some(graph.job_content(root).to_owned())
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::machine::volume::Format;
    use crate::machine::volume::bitmaps::Bitmaps;
    use crate::machine::volume::nodes::Names;
    use crate::machine::volume::target::Target;

    #[test]
    fn a_disk_that_is_not_on_its_target_is_not_therefore_on_its_old_volume() {
        let volume = Volume {
            label: "disk d".to_owned(),
            device: "d".to_owned(),
            qdev: None,
            names: Names::of(Uuid::nil(), 0),
            old_root: "fmt".to_owned(),
            old_chain: vec!["fmt".to_owned()],
            old_file: "/old".into(),
            size_bytes: 512,
            allocated_bytes: None,
            direct: false,
            detect_zeroes: "off".to_owned(),
            bitmaps: Bitmaps::default(),
            snapshots: Vec::new(),
            target: Target {
                path: "/new".into(),
                format: Format::Raw,
                is_block_device: false,
                create: true,
                size_bytes: 512,
                identity: None,
            },
            made: None,
        };
        let new = volume.names.format.clone();
        for (node, standing) in [
            (Some("fmt"), Standing::Old),
            (Some(new.as_str()), Standing::New),
            // A snapshot on the target, say.
            (Some("overlay"), Standing::Elsewhere),
            (None, Standing::Elsewhere),
        ] {
            assert_eq!(Standing::on(node, &volume), standing, "{node:?}");
        }
    }
}
