//! Whether a snapshot may be woken: its guest went on, most likely runs, and writes to the disks that the snapshot names.
//!
//! Two guests on one disk ruin it, and a guest whose memory is older than its disks ruins them too. So a snapshot wakes on
//! other disks than its guest went on with: copies from the moment of the snapshot, which the comparison with their
//! witnesses (`vm/disks.rs`) still has to find unchanged. A guest that writes to no disk may be woken: what else two of one
//! guest could have in common, such as an address on a network, is for who wakes it to know.

use std::path::Path;

use dormouse_storage::image::manifest::{Disk, Manifest};

use crate::error::{Code, Failure};
use crate::vm::disks::{label, witness};

/// Refuses a snapshot, woken on `disks`, that would be woken on the disks that its guest went on with, or where that cannot be told.
pub fn check_disks_apart(manifest: &Manifest, disks: &[Disk]) -> Result<(), Failure> {
    if !manifest.guest.went_on {
        return Ok(());
    }
    let shared: Vec<String> = disks.iter().filter_map(why_shared).collect();
    if shared.is_empty() {
        return Ok(());
    }
    Err(Failure::new(
        Code::Refused,
        format!(
            "the image is a snapshot, and its guest went on: {}; put copies of the disks from the moment of the snapshot \
             in their place, or say --disks-as-saved if they are such copies",
            shared.join("; ")
        ),
    ))
}

fn why_shared(disk: &Disk) -> Option<String> {
    if disk.read_only {
        return None;
    }
    let Some(then) = &disk.witness else {
        return Some(format!(
            "{}: cannot tell whether {} is another disk than the one that it went on with",
            label(disk),
            disk.file_name
        ));
    };
    // One that is missing is found by the comparison.
    let now = witness(Path::new(&disk.file_name))?;
    let is_same = (now.device_id, now.inode) == (then.device_id, then.inode);
    is_same.then(|| format!("{}: it went on with {}", label(disk), disk.file_name))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn disk(file: &Path) -> Disk {
        Disk {
            device: "ide0-hd0".into(),
            qdev: None,
            node_name: String::new(),
            file_name: file.to_string_lossy().into_owned(),
            format: "raw".into(),
            virtual_size_bytes: 4,
            read_only: false,
            witness: witness(file),
            backing: Vec::new(),
        }
    }

    #[test]
    fn the_disk_that_the_guest_went_on_with_is_told_from_a_copy_in_its_place() {
        let folder = tempfile::tempdir().unwrap();
        let [file, copy] = ["disk", "copy"].map(|name| folder.path().join(name));
        fs::write(&file, b"then").unwrap();
        let recorded = disk(&file);
        let why = why_shared(&recorded).unwrap();
        assert!(why.contains("ide0-hd0"), "{why}");
        fs::copy(&file, &copy).unwrap();
        fs::rename(&copy, &file).unwrap();
        assert_eq!(why_shared(&recorded), None);
    }

    #[test]
    fn a_disk_that_is_only_read_is_nobodys_and_one_without_a_witness_anybodys() {
        let unseen = Disk {
            witness: None,
            ..disk(Path::new("/dev/null"))
        };
        assert!(why_shared(&unseen).is_some());
        let read_only = Disk {
            read_only: true,
            ..unseen
        };
        assert_eq!(why_shared(&read_only), None);
    }
}
