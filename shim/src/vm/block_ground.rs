//! What a block device lies on, so that a volume is recognised as a part of another one, or as what it is a part of.
//!
//! ```text
//!  /dev/sdb1 ──► /dev/sdb          a partition, and its disk
//!  /dev/loop0 ──► /images/a.raw    a loop device, and its file
//!  /dev/dm-0 ──► /dev/sdc ...      a mapped device or RAID, and its members
//! ```
//!
//! Two volumes overlap when one lies on the other. Two partitions of one disk do not.

use std::fs::{self, File};
use std::path::Path;

use dormouse_storage::loop_backing;

use super::file_identity::FileIdentity;

/// Whether writing to one of two files or block devices changes the other.
pub fn overlap(one: &Path, other: &Path) -> bool {
    FileIdentity::at(other).is_some_and(|other| overlaps(one, other))
}

/// Whether writing to the file or block device at `path` changes the one that `other` is.
pub fn overlaps(path: &Path, other: FileIdentity) -> bool {
    let Some(own) = FileIdentity::at(path) else {
        return false;
    };
    ground_of(own).contains(&other) || ground_of(other).contains(&own)
}

/// The file or device itself, and all that it lies on.
fn ground_of(identity: FileIdentity) -> Vec<FileIdentity> {
    let mut ground = vec![identity];
    let mut next = 0;
    while let Some(identity) = ground.get(next).copied() {
        next += 1;
        for below in below(&identity) {
            if !ground.contains(&below) {
                ground.push(below);
            }
        }
    }
    ground
}

fn below(identity: &FileIdentity) -> Vec<FileIdentity> {
    if identity.inode != 0 {
        return Vec::new();
    }
    let link = format!("/sys/dev/block/{}:{}", identity.major, identity.minor);
    let Ok(device) = fs::canonicalize(link) else {
        return Vec::new();
    };
    let mut below = Vec::new();
    if device.join("partition").exists() {
        below.extend(device.parent().and_then(numbered));
    }
    below.extend(below_loop(&device));
    let slaves = fs::read_dir(device.join("slaves"))
        .into_iter()
        .flatten()
        .flatten();
    below.extend(slaves.filter_map(|slave| numbered(&slave.path())));
    below
}

/// What a loop device lies on. Its file's name is of another mount namespace, maybe, or of none any more, so it is only
/// asked where the device itself cannot be.
fn below_loop(device: &Path) -> Option<FileIdentity> {
    let file = fs::read_to_string(device.join("loop/backing_file")).ok()?;
    let node = Path::new("/dev").join(device.file_name()?);
    let by_device = File::open(&node)
        .ok()
        .filter(|open| FileIdentity::of_open(open) == numbered(device))
        .and_then(|open| loop_backing(&open).ok());
    match by_device {
        Some(backing) => Some(FileIdentity::of_numbers(
            backing.device,
            backing.inode,
            backing.own_device,
        )),
        None => FileIdentity::at(Path::new(file.trim_end_matches('\n'))),
    }
}

/// The device of a folder in sysfs.
fn numbered(device: &Path) -> Option<FileIdentity> {
    let numbers = fs::read_to_string(device.join("dev")).ok()?;
    let (major, minor) = numbers.trim().split_once(':')?;
    Some(FileIdentity {
        major: major.parse().ok()?,
        minor: minor.parse().ok()?,
        inode: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_overlaps_itself_by_any_name_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let [one, link, other] = ["one", "link", "other"].map(|name| folder.path().join(name));
        fs::write(&one, "1").unwrap();
        fs::write(&other, "1").unwrap();
        fs::hard_link(&one, &link).unwrap();
        assert!(overlap(&one, &link));
        assert!(!overlap(&one, &other));
        assert!(!overlap(&one, &folder.path().join("missing")));
    }
}
