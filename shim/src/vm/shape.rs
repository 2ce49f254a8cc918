//! What a machine is made of, as far as its command line makes it.
//!
//! A wake relaunches the command line. A machine whose devices or disks were changed while it ran (plugged, unplugged,
//! ejected, snapshotted) would come up as another one, and its image could not be loaded, or worse, could. So a
//! supervisor notes the shape at the start, and a hibernation compares.

use std::collections::BTreeMap;
use std::path::Path;

use dormouse_qmp::{Client, command};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::command_line::CommandLine;
use super::disks;
use crate::error::Failure;

/// Where QEMU keeps the devices that users make, with an id and without.
pub const DEVICE_FOLDERS: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];

/// The shape of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Devices by name, with their types.
    devices: BTreeMap<String, String>,
    /// What is in each disk drive, by the drive's label.
    disks: BTreeMap<String, String>,
}

impl Shape {
    /// The shape now; `directory` is QEMU's.
    pub async fn of(client: &Client, directory: &Path) -> Result<Self, Failure> {
        let mut devices = BTreeMap::new();
        for folder in DEVICE_FOLDERS {
            devices.extend(children(client, folder).await?);
        }
        let present = disks::present(client, directory).await?;
        let disks = present
            .iter()
            .map(|disk| (disks::label(disk), disk.file_name.clone()))
            .collect();
        Ok(Self { devices, disks })
    }

    /// The same machine with another file in one of its drives.
    pub fn set_disk(&mut self, label: String, file: String) {
        self.disks.insert(label, file);
    }

    /// How the shape `now` differs, in words that name what to undo.
    pub fn changes(&self, now: &Self) -> Vec<String> {
        let gone = missing(&self.devices, &now.devices)
            .map(|(name, kind)| format!("device {name} ({kind}) was unplugged"));
        let new = missing(&now.devices, &self.devices).map(|(name, kind)| {
            format!("device {name} ({kind}) was plugged in while the guest ran; unplug it first")
        });
        let emptied = missing(&self.disks, &now.disks).map(|(disk, file)| match now.disks.get(disk) {
            Some(other) => format!("{disk} was {file} at the start and is now {other}"),
            None => format!("{disk} was {file} at the start and is gone or empty; put it back"),
        });
        let filled = now
            .disks
            .iter()
            .filter(|(disk, _)| !self.disks.contains_key(*disk))
            .map(|(disk, file)| {
                format!("{disk} was not there or empty at the start and is now {file}; take it out")
            });
        gone.chain(new).chain(emptied).chain(filled).collect()
    }
}

/// What can be told of changes to a machine whose start nobody noted: what QEMU itself calls hot-plugged, and what the
/// command line names and is not there.
pub async fn visible_changes(client: &Client, line: &CommandLine) -> Result<Vec<String>, Failure> {
    let mut changes = Vec::new();
    for folder in DEVICE_FOLDERS {
        let present = children(client, folder).await?;
        for name in present.keys() {
            let get = command::qom_get {
                path: format!("{folder}/{name}"),
                property: "hotplugged".to_owned(),
            };
            if client.execute(&get).await.is_ok_and(|value| value == json!(true)) {
                changes.push(format!(
                    "device {name} was plugged in while the guest ran; unplug it first"
                ));
            }
        }
        if folder == DEVICE_FOLDERS[0] {
            let gone = line
                .device_ids()
                .into_iter()
                .filter(|id| !present.contains_key(id));
            changes.extend(gone.map(|id| format!("device {id} was unplugged")));
        }
    }
    Ok(changes)
}

/// The objects in a folder of QEMU's object tree, with their types.
pub(super) async fn children(client: &Client, folder: &str) -> Result<BTreeMap<String, String>, Failure> {
    let members = client
        .execute(&command::qom_list {
            path: folder.to_owned(),
        })
        .await?;
    Ok(members
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|member| {
            let kind = member["type"]
                .as_str()?
                .strip_prefix("child<")?
                .strip_suffix('>')?;
            Some((member["name"].as_str()?.to_owned(), kind.to_owned()))
        })
        .collect())
}

/// What `here` has and `there` has not, or has otherwise.
fn missing<'a>(
    here: &'a BTreeMap<String, String>,
    there: &'a BTreeMap<String, String>,
) -> impl Iterator<Item = (&'a String, &'a String)> {
    here.iter()
        .filter(|(name, value)| there.get(*name) != Some(value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shape(devices: &[(&str, &str)], disks: &[(&str, &str)]) -> Shape {
        let map = |pairs: &[(&str, &str)]| {
            pairs
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()))
                .collect()
        };
        Shape {
            devices: map(devices),
            disks: map(disks),
        }
    }

    #[test]
    fn a_machine_that_is_as_it_was_has_no_changes() {
        let machine = shape(&[("net0", "virtio-net-pci")], &[("disk ide0-hd0", "/a.img")]);
        assert!(machine.changes(&machine.clone()).is_empty());
    }

    #[test]
    fn what_was_plugged_unplugged_ejected_and_snapshotted_is_named() {
        let before = shape(
            &[("net0", "virtio-net-pci")],
            &[("disk vda", "/a.img"), ("disk cd", "/a.iso")],
        );
        let after = shape(
            &[("net1", "e1000")],
            &[("disk vda", "/b.qcow2"), ("disk vdb", "/c.img")],
        );
        let changes = before.changes(&after).join("\n");
        for words in [
            "device net0 (virtio-net-pci) was unplugged",
            "device net1 (e1000) was plugged in",
            "disk vda was /a.img at the start and is now /b.qcow2",
            "disk cd was /a.iso at the start and is gone or empty",
            "disk vdb was not there or empty at the start and is now /c.img",
        ] {
            assert!(changes.contains(words), "{words:?} is not in\n{changes}");
        }
    }
}
