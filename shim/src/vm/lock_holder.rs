//! Who holds an image, told without touching its lock: a look must not make a wake fail.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use rustix::fs::{major, minor};

/// The process that holds the lock of the file at `path`; `None` if nobody does, or if it cannot be told (locks are
/// listed by the file system's own device number, which some file systems do not show elsewhere).
pub fn holder(path: &Path) -> Option<u32> {
    let metadata = fs::metadata(path).ok()?;
    let locks = fs::read_to_string("/proc/locks").ok()?;
    holder_in(&locks, metadata.dev(), metadata.ino())
}

fn holder_in(locks: &str, device: u64, inode: u64) -> Option<u32> {
    let file = format!("{:02x}:{:02x}:{inode}", major(device), minor(device));
    locks.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        let (kind, _, access, pid, of) = (
            words.next()?,
            words.next()?,
            words.next()?,
            words.next()?,
            words.next()?,
        );
        (kind == "FLOCK" && access == "WRITE" && of == file).then(|| pid.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use rustix::fs::{FlockOperation, makedev};

    use super::*;

    #[test]
    fn only_an_exclusive_lock_of_the_very_file_has_a_holder() {
        let locks = "1: POSIX  ADVISORY  WRITE 11 fe:00:77 0 EOF\n\
                     2: FLOCK  ADVISORY  READ 12 fe:00:77 0 EOF\n\
                     2: -> FLOCK  ADVISORY  WRITE 13 fe:00:77 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 14 fe:00:777 0 EOF\n\
                     4: FLOCK  ADVISORY  WRITE 15 fe:00:77 0 EOF\n";
        assert_eq!(holder_in(locks, makedev(0xfe, 0), 77), Some(15));
        assert_eq!(holder_in(locks, makedev(0xfe, 1), 77), None);
        assert_eq!(holder_in("", 0, 0), None);
        assert_eq!(holder_in("nonsense\n5:\n", 0, 0), None);
    }

    #[test]
    fn our_own_lock_is_seen() {
        let file = tempfile::NamedTempFile::new_in("/dev/shm").unwrap();
        assert_eq!(holder(file.path()), None);
        rustix::fs::flock(file.as_file(), FlockOperation::LockExclusive).unwrap();
        assert_eq!(holder(file.path()), Some(std::process::id()));
    }
}
