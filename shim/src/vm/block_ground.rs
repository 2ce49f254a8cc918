//! What a block device lies on, so that a volume is recognised as a part of another one, or as what it is a part of.
//!
//! ```text
//!  /dev/sdb1 ──► /dev/sdb          a partition, and its disk
//!  /dev/loop0 ──► /images/a.raw    a loop device, and its file
//!  /dev/dm-0 ──► /dev/sdc ...      a mapped device or RAID, and its members
//! ```
//!
//! Two volumes overlap when one lies on the other. Two partitions of one disk do not.

use std::fs;
use std::path::{Path, PathBuf};

use super::file_identity::FileIdentity;

/// Deeper stacks than this are not followed; nobody builds them.
const DEPTH: usize = 8;

/// Whether writing to one of two files or block devices changes the other.
pub fn overlap(one: &Path, other: &Path) -> bool {
    let (Some(one_is), Some(other_is)) = (FileIdentity::at(one), FileIdentity::at(other)) else {
        return false;
    };
    ground_of(one).contains(&other_is) || ground_of(other).contains(&one_is)
}

/// The file or device itself, and all that it lies on.
fn ground_of(path: &Path) -> Vec<FileIdentity> {
    let Some(own) = FileIdentity::at(path) else {
        return Vec::new();
    };
    let mut ground = vec![own];
    let mut next = 0;
    while let Some(identity) = ground.get(next).copied().filter(|_| next < DEPTH) {
        next += 1;
        let below = below(&identity);
        ground.extend(
            below
                .into_iter()
                .filter(|identity| !ground.contains(identity))
                .collect::<Vec<_>>(),
        );
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
    if let Ok(file) = fs::read_to_string(device.join("loop/backing_file")) {
        below.extend(FileIdentity::at(Path::new(file.trim_end_matches('\n'))));
    }
    let slaves = fs::read_dir(device.join("slaves"))
        .into_iter()
        .flatten()
        .flatten();
    below.extend(slaves.filter_map(|slave| numbered(&slave.path())));
    below
}

/// The device of a folder in sysfs.
fn numbered(device: &Path) -> Option<FileIdentity> {
    let numbers: PathBuf = device.join("dev");
    let numbers = fs::read_to_string(numbers).ok()?;
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
