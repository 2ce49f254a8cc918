//! Memory that a guest's own command line has put somewhere in particular: a wake leaves it there.
//!
//! Whoever gave a guest huge pages, a file or private memory meant it, and sized the host for it. So such memory is
//! filled by QEMU, in its place, or the wake is refused; it is never put anywhere else.
//!
//! | on the command line | whose | before the guest runs (`eager`, `map`) | behind it (`lazy`) | by QEMU (`stream`) |
//! | --- | --- | --- | --- | --- |
//! | `-m`, `memory-backend-ram`, a shared memfd, a shared file in a folder on tmpfs | ours to place | yes | yes | yes |
//! | huge pages: a memfd with `hugetlb=on`, hugetlbfs | its own | no | in place | yes |
//! | private: a memfd or a folder on tmpfs with `share=off` | its own | no | in place | yes |
//! | a shared file of a name, on tmpfs or hugetlbfs | its own | no | in place | yes |
//! | a private file of a name; a file on any other file system; any other kind | its own | no | no | yes |
//!
//! QEMU empties the file below memory that is fed to a running guest, also if it has that file mapped privately; a file
//! of a name may hold what others need.

use std::path::Path;

use super::command_line::{CommandLine, CommandLineError, MemoryBackend};

/// `TMPFS_MAGIC` and `HUGETLBFS_MAGIC` of statfs(2).
const TMPFS_MAGIC: u64 = 0x0102_1994;
const HUGETLBFS_MAGIC: u64 = 0x9584_58f6;

/// Memory that stays where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnMemory {
    /// Its RAM block.
    pub id: String,
    /// Where it is, in words.
    place: String,
    /// Why it cannot be fed while the guest runs.
    unfeedable: Option<&'static str>,
}

impl OwnMemory {
    /// Why it is put nowhere else.
    pub fn against_moving(&self) -> String {
        format!(
            "RAM block {} is {} by the guest's own command line, and stays there",
            self.id, self.place
        )
    }

    /// Why it cannot be fed while the guest runs.
    pub fn against_feeding(&self) -> Option<String> {
        let why = self.unfeedable?;
        Some(format!("RAM block {} is {}, and {why}", self.id, self.place))
    }
}

/// The guest's own memory on a command line of a QEMU in `directory`; `main_ram`: the name of main RAM's block.
pub fn of(line: &CommandLine, main_ram: &str, directory: &Path) -> Result<Vec<OwnMemory>, CommandLineError> {
    let memory = line.guest_memory(main_ram)?;
    Ok(memory
        .iter()
        .filter_map(|backend| own(backend, directory))
        .collect())
}

fn own(backend: &MemoryBackend, directory: &Path) -> Option<OwnMemory> {
    let (place, unfeedable) = match (backend.kind.as_str(), &backend.path) {
        ("memory-backend-memfd", _) if backend.hugetlb => {
            ("in huge pages of a memfd (hugetlb=on)".to_owned(), None)
        }
        ("memory-backend-memfd", _) if backend.share == Some(false) => {
            ("in a private memfd (share=off)".to_owned(), None)
        }
        ("memory-backend-ram" | "memory-backend-memfd" | "memory-backend-shm", _) => return None,
        ("memory-backend-file", Some(path)) => {
            let path = directory.join(path);
            in_file(&path, path.is_dir(), ground(&path), backend.share == Some(true))?
        }
        (kind, _) => (
            format!("in a {kind}"),
            Some("what that takes while a guest runs is not known"),
        ),
    };
    Some(OwnMemory {
        id: backend.id.clone(),
        place,
        unfeedable,
    })
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ground {
    Tmpfs,
    Hugetlbfs,
    Other,
}

/// The place in words, and what is against feeding it.
fn in_file(
    path: &Path,
    is_folder: bool,
    ground: Ground,
    shared: bool,
) -> Option<(String, Option<&'static str>)> {
    let sharing = if shared { "" } else { ", private (share=off)" };
    let (kind, unfeedable) = match (ground, is_folder) {
        (Ground::Tmpfs, true) if shared => return None,
        (Ground::Other, _) => (
            "in a file",
            Some("QEMU feeds a running guest only where its memory is on tmpfs or hugetlbfs"),
        ),
        (_, false) if !shared => (
            "in a file",
            Some("QEMU would empty that file below the guest's private memory"),
        ),
        (Ground::Hugetlbfs, _) => ("in huge pages (hugetlbfs)", None),
        (Ground::Tmpfs, true) => ("in a folder on tmpfs", None),
        (Ground::Tmpfs, false) => ("in a file on tmpfs", None),
    };
    Some((format!("{kind}, {}{sharing}", path.display()), unfeedable))
}

/// What the file, or the folder in which QEMU will make it, lies on.
fn ground(path: &Path) -> Ground {
    let found = rustix::fs::statfs(path).or_else(|_| rustix::fs::statfs(path.parent().unwrap_or(path)));
    match found.map(|found| found.f_type as u64) {
        Ok(TMPFS_MAGIC) => Ground::Tmpfs,
        Ok(HUGETLBFS_MAGIC) => Ground::Hugetlbfs,
        _ => Ground::Other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(line: &str) -> Vec<(String, Option<String>)> {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let line = CommandLine::parse(&words).unwrap();
        of(&line, "pc.ram", Path::new("/dev"))
            .unwrap()
            .iter()
            .map(|own| (own.against_moving(), own.against_feeding()))
            .collect()
    }

    #[test]
    fn memory_that_is_nowhere_in_particular_is_not_the_guests_own() {
        for line in [
            "qemu -m 64",
            "qemu -object memory-backend-ram,id=m0,size=64M,share=on -numa node,memdev=m0",
            "qemu -object memory-backend-memfd,id=m0,size=64M -machine memory-backend=m0",
            "qemu -object memory-backend-file,id=m0,size=64M,mem-path=/dev/shm,share=on -machine memory-backend=m0",
            "qemu -object memory-backend-file,id=m0,size=64M,mem-path=shm,share=on -machine memory-backend=m0",
        ] {
            assert_eq!(seen(line), [], "{line}");
        }
    }

    #[test]
    fn what_was_put_somewhere_is_named_with_its_place() {
        let folder = tempfile::tempdir_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        let on_disk = format!("qemu -m 64 -mem-path {}", folder.path().display());
        for (line, place, is_fed) in [
            (
                "qemu -object memory-backend-memfd,id=m0,size=64M,hugetlb=on -machine memory-backend=m0",
                "huge pages",
                true,
            ),
            (
                "qemu -object memory-backend-memfd,id=m0,size=64M,share=off -machine memory-backend=m0",
                "share=off",
                true,
            ),
            (
                "qemu -object memory-backend-file,id=m0,size=64M,mem-path=/dev/shm -numa node,memdev=m0",
                "share=off",
                true,
            ),
            ("qemu -m 64 -mem-path /dev/shm", "/dev/shm", true),
            (
                "qemu -m 64 -object memory-backend-file,id=d,size=1M,mem-path=/dev/shm/x-none,share=on",
                "x-none",
                true,
            ),
            (
                "qemu -m 64 -object memory-backend-file,id=d,size=1M,mem-path=/dev/shm/x-none",
                "x-none",
                false,
            ),
            (on_disk.as_str(), "in a file", false),
            (
                "qemu -m 64 -object memory-backend-epc,id=e,size=1M",
                "memory-backend-epc",
                false,
            ),
        ] {
            let own = seen(line);
            let [(against_moving, against_feeding)] = &own[..] else {
                panic!("{line}: {own:?}");
            };
            assert!(against_moving.contains(place), "{against_moving}");
            assert_eq!(against_feeding.is_none(), is_fed, "{line}: {against_feeding:?}");
        }
    }

    #[test]
    fn huge_pages_of_a_file_system_are_fed_in_place_whether_shared_or_not() {
        for (is_folder, shared, is_fed) in [
            (true, true, true),
            (true, false, true),
            (false, true, true),
            (false, false, false),
        ] {
            let (place, unfeedable) = in_file(
                Path::new("/dev/hugepages/x"),
                is_folder,
                Ground::Hugetlbfs,
                shared,
            )
            .unwrap();
            assert!(place.contains("/dev/hugepages/x"), "{place}");
            assert_eq!(unfeedable.is_none(), is_fed, "{place}");
        }
    }
}
