//! Huge pages for guests.

use std::{
    ffi::CString,
    fs::{self, File},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FlockOperation, flock},
    mount::{MountFlags, UnmountFlags, mount, unmount},
};
use tempfile::TempDir;

/// How many huge pages of 2 MiB the host keeps.
const KEPT: &str = "/proc/sys/vm/nr_hugepages";

/// Some huge pages of the host, and a hugetlbfs to have them from. Given back when this is dropped.
///
/// It needs root, as the continuous integration has it; without it the test fails.
pub struct HugePages {
    pages: u64,
    folder: TempDir,
}

impl HugePages {
    /// So many pages of 2 MiB.
    pub fn keep(pages: u64) -> Self {
        let folder = tempfile::tempdir_in("/var/tmp").expect("a folder can be made");
        let options = CString::new("pagesize=2M").expect("letters");
        mount(
            "hugetlbfs",
            folder.path(),
            "hugetlbfs",
            MountFlags::empty(),
            options.as_c_str(),
        )
        .expect("this test needs hugetlbfs, and is not to be skipped (root)");
        change_kept(|kept| kept + pages);
        Self { pages, folder }
    }

    /// A folder on hugetlbfs.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        // Whatever a QEMU has open still goes with it.
        let _ = unmount(self.folder.path(), UnmountFlags::DETACH);
        change_kept(|kept| kept.saturating_sub(self.pages));
    }
}

/// Others do the same at the same time.
fn change_kept(change: impl Fn(u64) -> u64) {
    let lock = PathBuf::from("/var/tmp/dormouse-huge-pages.lock");
    let lock = File::create(lock).expect("a lock can be made");
    flock(&lock, FlockOperation::LockExclusive).expect("a lock can be waited for");
    let kept: u64 = fs::read_to_string(KEPT)
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .expect("the host tells its huge pages");
    fs::write(KEPT, change(kept).to_string()).expect("this test needs to keep huge pages (root)");
    let now: u64 = fs::read_to_string(KEPT)
        .ok()
        .and_then(|text| text.trim().parse().ok())
        .expect("the host tells its huge pages");
    assert!(now >= change(kept), "the host has no huge pages left: {now}");
}
