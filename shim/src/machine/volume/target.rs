//! The file or block device that a disk goes to: what it is, whether it may be taken, and making one.
//!
//! A volume that anybody uses is not touched. QEMU's own image locks are looked for as well as mounts and other
//! exclusive holders of block devices. Neither is an image of ours that holds a guest.

use std::fmt::Display;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt, chown};
use std::path::{Path, PathBuf};

use dormouse_storage::{ByteCount, Image, ImageError, ImageState};
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};

use super::{Format, Wish};
use crate::error::{Code, Failure};
use crate::vm::file_identity::FileIdentity;
use crate::vm::process::check_not_mapped;

/// QEMU locks bytes from 100 to 300 of an image: permissions in use, and permissions not shared.
const QEMU_LOCK_BYTES: std::ops::Range<u64> = 100..300;

/// How much of a file's begin is looked at to see its format.
const HEADER_BYTES: usize = 104;

/// What a target is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    /// Where it is.
    pub path: PathBuf,
    /// Its format.
    pub format: Format,
    /// Whether it is a block device.
    pub is_block_device: bool,
    /// Whether this operation makes it.
    pub create: bool,
    /// The size of a disk on it, in bytes; of one that is made, that of the disk.
    pub size_bytes: u64,
    /// Which file or block device was looked at; `None` where there is none yet.
    #[serde(default)]
    pub identity: Option<FileIdentity>,
}

/// What has to be known of a disk to find it a target.
#[derive(Debug, Clone, Copy)]
pub struct Need<'a> {
    /// The size that the guest sees, in bytes.
    pub size_bytes: u64,
    /// What is allocated of it, in bytes, as far as it is known.
    pub allocated_bytes: Option<u64>,
    /// Whether the host's page cache is passed by.
    pub direct: bool,
    /// Whether there has to be room for it now.
    pub wants_room: bool,
    /// The file of the disk, whose owner and mode a new one gets.
    pub like: &'a Path,
}

impl Target {
    /// Looks at the target of `wish`, or at where it is to be made.
    pub fn examine(wish: &Wish, need: Need<'_>) -> Result<Self, Failure> {
        let path = &wish.to;
        let at = |error: io::Error| {
            let code = match error.kind() {
                io::ErrorKind::PermissionDenied | io::ErrorKind::NotFound => Code::Usage,
                _ => Code::StorageIo,
            };
            Failure::new(code, format!("{}: {error}", path.display()))
        };
        let metadata = match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && wish.create => {
                return Self::to_be_made(wish, need);
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(Failure::new(
                    Code::Refused,
                    format!("{} is not there; with `create` it is made", path.display()),
                ));
            }
            looked => looked.map_err(at)?,
        };
        if wish.create {
            return Err(Failure::new(
                Code::Refused,
                format!("{} is there already, so it cannot be made", path.display()),
            ));
        }
        let is_block_device = metadata.file_type().is_block_device();
        if !is_block_device && !metadata.is_file() {
            return Err(Failure::new(
                Code::Usage,
                format!("{} is no file and no block device", path.display()),
            ));
        }
        if let Some(holder) = lock_holder(&metadata) {
            return Err(Failure::new(
                Code::Refused,
                format!("{} is in use by {holder}", path.display()),
            ));
        }
        check_no_guest(path)?;
        let mut file = open(path, is_block_device, need.direct).map_err(at)?;
        let length = file.seek(SeekFrom::End(0)).map_err(at)?;
        // Another handle: what is read this way need not be aligned.
        let header = header(path).map_err(at)?;
        let seen = Qcow2Header::read(&header);
        let format = match (wish.format, &seen) {
            (Some(Format::Qcow2), None) => {
                return Err(Failure::new(
                    Code::Refused,
                    format!(
                        "{} holds no qcow2 image; with `create` one is made",
                        path.display()
                    ),
                ));
            }
            (Some(format), _) => format,
            (None, Some(_)) => Format::Qcow2,
            (None, None) => Format::Raw,
        };
        let size_bytes = match (format, seen) {
            (Format::Qcow2, Some(image)) => {
                image
                    .check()
                    .map_err(|why| Failure::new(Code::Refused, format!("{}: {why}", path.display())))?;
                image.size_bytes
            }
            _ => length,
        };
        let target = Self {
            path: path.clone(),
            format,
            is_block_device,
            create: false,
            size_bytes,
            identity: FileIdentity::of_open(&file),
        };
        target.check_size(need.size_bytes)?;
        if !is_block_device {
            // What is allocated already is used again.
            let there = metadata.blocks().saturating_mul(512);
            check_room(path, need, there)?;
        }
        Ok(target)
    }

    fn to_be_made(wish: &Wish, need: Need<'_>) -> Result<Self, Failure> {
        let path = &wish.to;
        let folder = path.parent().unwrap_or(Path::new("/"));
        if !folder.is_dir() {
            return Err(Failure::new(
                Code::Usage,
                format!("the folder {} is not there", folder.display()),
            ));
        }
        let format = wish.format.unwrap_or(Format::Raw);
        if format == Format::Qcow2 && !need.size_bytes.is_multiple_of(512) {
            return Err(Failure::new(
                Code::Refused,
                format!(
                    "a qcow2 image cannot have the disk's {} bytes, which are no multiple of 512",
                    need.size_bytes
                ),
            ));
        }
        check_room(folder, need, 0)?;
        Ok(Self {
            path: path.clone(),
            format,
            is_block_device: false,
            create: true,
            size_bytes: need.size_bytes,
            identity: None,
        })
    }

    fn check_size(&self, needed: u64) -> Result<(), Failure> {
        let (here, path) = (self.size_bytes, self.path.display());
        if here < needed {
            return Err(Failure::new(
                Code::NoSpace,
                format!(
                    "the disk has {needed} bytes and {path} only {here}: it lacks {} bytes ({})",
                    needed - here,
                    ByteCount(needed - here)
                ),
            ));
        }
        if here > needed && self.format == Format::Qcow2 {
            return Err(Failure::new(
                Code::Refused,
                format!(
                    "the disk has {needed} bytes and the qcow2 image {path} has {here}: it must have as many; make it anew"
                ),
            ));
        }
        Ok(())
    }

    /// The size that the raw node on it is pinned to, where it is larger than the disk.
    pub fn pinned(&self, disk_bytes: u64) -> Option<u64> {
        (self.format == Format::Raw && self.size_bytes > disk_bytes).then_some(disk_bytes)
    }

    /// Makes the file; a raw one in its size, and empty for QEMU to make an image in. Nothing is left where that fails.
    pub fn make(&self, need: Need<'_>) -> Result<FileIdentity, Failure> {
        let at = |error: io::Error| {
            Failure::new(
                Code::StorageIo,
                format!("cannot make {}: {error}", self.path.display()),
            )
        };
        let like = fs::metadata(need.like).ok().filter(fs::Metadata::is_file);
        let mode = like.as_ref().map_or(0o600, |like| like.mode() & 0o777);
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&self.path)
            .map_err(at)?;
        let made = FileIdentity::of_open(&file);
        let prepared = self.prepare(&file, need, like.as_ref());
        match made
            .ok_or(io::ErrorKind::NotFound.into())
            .and_then(|made| prepared.map(|()| made))
        {
            Ok(made) => Ok(made),
            Err(error) => {
                if made.is_some() && FileIdentity::at(&self.path) == made {
                    // What failed says more.
                    let _ = fs::remove_file(&self.path);
                }
                Err(at(error))
            }
        }
    }

    /// Makes a new file ready for QEMU.
    fn prepare(&self, file: &File, need: Need<'_>, like: Option<&fs::Metadata>) -> io::Result<()> {
        if let Some(like) = like {
            // Only who may gives files away; then QEMU tells that it cannot open it.
            let _ = chown(&self.path, Some(like.uid()), Some(like.gid()));
        }
        if self.format == Format::Raw {
            file.set_len(self.size_bytes)?;
        }
        file.sync_all()?;
        if let Some(folder) = self.path.parent() {
            File::open(folder)?.sync_all()?;
        }
        if need.direct {
            open(&self.path, false, true)?;
        }
        Ok(())
    }
}

/// An image of ours that holds a guest, or may, is not taken, nor one that somebody has in use.
fn check_no_guest(path: &Path) -> Result<(), Failure> {
    let refused = |why: &dyn Display| {
        Err(Failure::new(
            Code::Refused,
            format!("{} cannot be taken: {why}", path.display()),
        ))
    };
    match Image::open(path) {
        // Whoever opens it next tells what the system refuses.
        Err(ImageError::NotAnImage { .. } | ImageError::DeviceHoldsOther { .. } | ImageError::Io { .. }) => {
            return Ok(());
        }
        Ok(image) if image.state() != ImageState::Consumed => {
            let name = &image.manifest().vm_name;
            return refused(&format!(
                "it holds an image of VM {name}, which would be overwritten"
            ));
        }
        // What was never sealed holds no guest.
        Ok(_) | Err(ImageError::Torn { .. }) => {}
        Err(error) => return refused(&error),
    }
    match Image::open_locked(path) {
        Err(error @ ImageError::Locked { .. }) => refused(&error),
        _ => check_not_mapped(path),
    }
}

/// Opened as QEMU will open it, and not written. A block device that is mounted, or that another device is made of, is
/// not opened.
fn open(path: &Path, is_block_device: bool, direct: bool) -> io::Result<File> {
    let mut flags = OFlags::CLOEXEC;
    if is_block_device {
        flags |= OFlags::EXCL;
    }
    if direct {
        flags |= OFlags::DIRECT;
    }
    let flags = i32::try_from(flags.bits()).map_err(io::Error::other)?;
    let opened = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(flags)
        .open(path);
    opened.map_err(|error| match error.raw_os_error() {
        Some(code) if code == rustix::io::Errno::BUSY.raw_os_error() => io::Error::new(
            error.kind(),
            "the device is in use: mounted, or part of another device",
        ),
        Some(code) if direct && code == rustix::io::Errno::INVAL.raw_os_error() => io::Error::new(
            error.kind(),
            "the disk passes the host's page cache by (cache.direct), and this filesystem cannot",
        ),
        _ => error,
    })
}

fn header(path: &Path) -> io::Result<Vec<u8>> {
    let mut header = Vec::new();
    File::open(path)?
        .take(HEADER_BYTES as u64)
        .read_to_end(&mut header)?;
    Ok(header)
}

/// Who holds a lock of QEMU's on the file, as far as that is told. Such locks belong to open files, and not to processes.
pub fn lock_holder(metadata: &fs::Metadata) -> Option<String> {
    let locks = fs::read_to_string("/proc/locks").ok()?;
    locked(&locks, metadata.dev(), metadata.ino())
}

fn locked(locks: &str, device: u64, inode: u64) -> Option<String> {
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let name = format!("{major:02x}:{minor:02x}:{inode}");
    locks.lines().find_map(|line| {
        // 1: OFDLCK ADVISORY READ -1 fe:00:1234 100 101
        let fields: Vec<&str> = line.split_whitespace().filter(|field| *field != "->").collect();
        let [_, _, _, _, pid, file, start, end] = fields[..] else {
            return None;
        };
        let start: u64 = start.parse().ok()?;
        let end = end.parse().unwrap_or(u64::MAX);
        let is_image_lock = start < QEMU_LOCK_BYTES.end && end >= QEMU_LOCK_BYTES.start;
        (file == name && is_image_lock).then(|| match pid {
            "-1" => "another QEMU".to_owned(),
            pid => format!("process {pid}"),
        })
    })
}

fn check_room(path: &Path, need: Need<'_>, there: u64) -> Result<(), Failure> {
    if !need.wants_room {
        return Ok(());
    }
    let wanted = need
        .allocated_bytes
        .unwrap_or(0)
        .min(need.size_bytes)
        .saturating_sub(there);
    let Ok(free) = rustix::fs::statvfs(path) else {
        return Ok(());
    };
    let free = free.f_bavail.saturating_mul(free.f_frsize);
    if wanted <= free {
        return Ok(());
    }
    Err(Failure::new(
        Code::NoSpace,
        format!(
            "the disk takes {} and {} has {} free: {} bytes are lacking",
            ByteCount(wanted),
            path.display(),
            ByteCount(free),
            wanted - free
        ),
    ))
}

/// What the begin of a qcow2 image says, as far as it matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Qcow2Header {
    has_backing: bool,
    is_encrypted: bool,
    has_data_file: bool,
    size_bytes: u64,
}

impl Qcow2Header {
    /// By QEMU's docs/interop/qcow2: big-endian, magic "QFI\xfb", version, backing file's offset, …
    fn read(header: &[u8]) -> Option<Self> {
        let word = |at: usize| header.get(at..at + 8)?.try_into().ok().map(u64::from_be_bytes);
        let half = |at: usize| header.get(at..at + 4)?.try_into().ok().map(u32::from_be_bytes);
        if !header.starts_with(b"QFI\xfb") {
            return None;
        }
        let features = if half(4)? >= 3 { word(72).unwrap_or(0) } else { 0 };
        Some(Self {
            has_backing: word(8)? != 0,
            size_bytes: word(24)?,
            is_encrypted: half(32)? != 0,
            has_data_file: features & 4 != 0,
        })
    }

    fn check(&self) -> Result<(), &'static str> {
        if self.has_backing {
            return Err("the image has a backing file, and volumes are moved whole");
        }
        if self.is_encrypted {
            return Err("the image is encrypted, and there is no key for it here");
        }
        if self.has_data_file {
            return Err("the image has its data in another file");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wish(to: &Path) -> Wish {
        Wish {
            disk: "d".to_owned(),
            to: to.to_owned(),
            format: None,
            create: false,
        }
    }

    fn need(size_bytes: u64) -> Need<'static> {
        Need {
            size_bytes,
            allocated_bytes: Some(0),
            direct: false,
            wants_room: true,
            like: Path::new("/nowhere"),
        }
    }

    #[test]
    fn a_target_that_is_smaller_by_a_little_is_told_in_bytes() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(1_000_000).unwrap();
        let failure = Target::examine(&wish(file.path()), need(1_010_000)).unwrap_err();
        assert_eq!(failure.code, Code::NoSpace);
        for number in ["1010000", "1000000", "lacks 10000 bytes"] {
            assert!(failure.message.contains(number), "{failure}");
        }
    }

    #[test]
    fn a_larger_raw_target_is_pinned_to_the_disks_size() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(2048).unwrap();
        let target = Target::examine(&wish(file.path()), need(1024)).unwrap();
        assert_eq!((target.pinned(1024), target.pinned(2048)), (Some(1024), None));
    }

    #[test]
    fn a_target_is_made_only_where_that_was_said_and_nothing_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new");
        let made = Wish {
            create: true,
            ..wish(&path)
        };
        let failure = Target::examine(&wish(&path), need(512)).unwrap_err();
        assert!(failure.message.contains("`create`"), "{failure}");
        let target = Target::examine(&made, need(512)).unwrap();
        let identity = target.make(need(512)).unwrap();
        assert_eq!(Some(identity), FileIdentity::at(&path));
        assert_eq!(fs::metadata(&path).unwrap().len(), 512);
        assert_eq!(Target::examine(&made, need(512)).unwrap_err().code, Code::Refused);
        assert_eq!(target.make(need(512)).unwrap_err().code, Code::StorageIo);
    }

    #[test]
    fn a_target_that_cannot_be_made_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new");
        let made = Wish {
            create: true,
            ..wish(&path)
        };
        // No file system has files of this size.
        let too_large = need(u64::MAX);
        let target = Target::examine(&made, too_large).unwrap();
        assert_eq!(target.make(too_large).unwrap_err().code, Code::StorageIo);
        assert!(!path.exists());
    }

    #[test]
    fn a_qcow2_image_is_known_by_its_begin() {
        let mut header = vec![0; HEADER_BYTES];
        header[..4].copy_from_slice(b"QFI\xfb");
        header[7] = 3;
        header[24..32].copy_from_slice(&(1_u64 << 30).to_be_bytes());
        let image = Qcow2Header::read(&header).unwrap();
        assert_eq!((image.size_bytes, image.check()), (1 << 30, Ok(())));
        header[15] = 1;
        assert!(Qcow2Header::read(&header).unwrap().check().is_err());
        assert_eq!(Qcow2Header::read(b"QFI"), None);
        assert_eq!(Qcow2Header::read(&[0; 512]), None);
    }

    #[test]
    fn qemus_locks_are_told_from_others() {
        let device = rustix::fs::makedev(0xfe, 0);
        let locks = "1: FLOCK  ADVISORY  WRITE 7 fe:00:5 0 EOF\n\
                     2: OFDLCK ADVISORY  READ -1 fe:00:6 100 101\n\
                     3: POSIX  ADVISORY  WRITE 9 fe:00:7 1073741824 1073742335\n";
        assert_eq!(locked(locks, device, 6).as_deref(), Some("another QEMU"));
        assert_eq!(locked(locks, device, 7), None);
        // A lock on the whole file may be anybody's, and covers QEMU's bytes.
        assert_eq!(locked(locks, device, 5).as_deref(), Some("process 7"));
        assert_eq!(locked(locks, device, 8), None);
    }
}
