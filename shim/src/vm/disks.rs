//! The disks of a VM, and whether they are still the ones that its memory belongs to.
//!
//! A guest's memory holds pieces of its disks. Woken on a disk that was written since, the guest would write its old
//! pieces over the new data, and nobody would notice until the filesystem is ruined. So every image carries a witness
//! of each disk (which file, its size, when it was last written), taken after QEMU has let go of the disks, and a
//! wake compares before it loads anything.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use dormouse_qmp::Client;
use dormouse_qmp::command;
use dormouse_qmp::view::block::BlockInfo;
use dormouse_storage::image::manifest::{BackingFile, Disk, DiskWitness};

use super::binary::modified_ns;
use super::file_identity::FileIdentity;
use crate::error::{Code, Failure};

/// The disks that QEMU has now; file names are taken relative to QEMU's working `directory`.
pub async fn present(client: &Client, directory: &Path) -> Result<Vec<Disk>, Failure> {
    let blocks: Vec<BlockInfo> = client.query(&command::query_block {}).await?;
    Ok(blocks
        .into_iter()
        .filter_map(|block| record(block, directory))
        .collect())
}

/// Compares the disks' files, and those below them, with what was recorded. Every difference is told. A disk that
/// cannot be compared is let through with a warning.
pub fn check_unchanged(recorded: &[Disk]) -> Result<(), Failure> {
    let mut differences = Vec::new();
    for disk in recorded {
        let own = std::iter::once((&disk.file_name, &disk.witness));
        let below = disk.backing.iter().map(|file| (&file.file_name, &file.witness));
        for (file, witness) in own.chain(below) {
            match witness {
                Some(then) => {
                    let found = difference(Path::new(file), then);
                    differences.extend(found.map(|text| format!("{}: {text}", label(disk))));
                }
                None => tracing::warn!(
                    "{}: cannot tell whether {file} was written since the save",
                    label(disk)
                ),
            }
        }
    }
    if differences.is_empty() {
        return Ok(());
    }
    Err(Failure::new(
        Code::Refused,
        format!(
            "the guest's memory does not belong to its disks any more: {}",
            differences.join("; ")
        ),
    ))
}

/// Compares the disks that a started QEMU has with the recorded ones. Every difference is told.
pub fn check_same(recorded: &[Disk], present: &[Disk]) -> Result<(), Failure> {
    let mut differences = Vec::new();
    for disk in recorded {
        let now = present
            .iter()
            .find(|now| now.qdev == disk.qdev && now.device == disk.device);
        match now {
            None => differences.push(format!("{} is missing", label(disk))),
            Some(now) if now.file_name != disk.file_name => {
                differences.push(format!(
                    "{} was {} and is now {}",
                    label(disk),
                    disk.file_name,
                    now.file_name
                ));
            }
            Some(now) if now.virtual_size_bytes != disk.virtual_size_bytes => differences.push(format!(
                "{} had {} bytes and has now {}",
                label(disk),
                disk.virtual_size_bytes,
                now.virtual_size_bytes
            )),
            Some(_) => {}
        }
    }
    for now in present {
        if !recorded
            .iter()
            .any(|disk| now.qdev == disk.qdev && now.device == disk.device)
        {
            differences.push(format!("{} was not there", label(now)));
        }
    }
    if differences.is_empty() {
        return Ok(());
    }
    Err(Failure::new(
        Code::Refused,
        format!(
            "the machine has other disks than when it was saved: {}",
            differences.join("; ")
        ),
    ))
}

/// What must not be the target of an image: a disk's file, or one below it.
pub fn is_target(disk: &Disk, target: &Path) -> bool {
    let there = FileIdentity::at(target);
    let below = disk.backing.iter().map(|file| &file.file_name);
    let mut files = std::iter::once(&disk.file_name).chain(below);
    there.is_some() && files.any(|file| there == FileIdentity::at(Path::new(file)))
}

/// How the disk is called to a person.
pub fn label(disk: &Disk) -> String {
    let name = [Some(&disk.device), disk.qdev.as_ref(), Some(&disk.node_name)]
        .into_iter()
        .flatten()
        .find(|name| !name.is_empty())
        .map_or("?", |name| name.as_str());
    format!("disk {name}")
}

fn record(block: BlockInfo, directory: &Path) -> Option<Disk> {
    let node = block.inserted?;
    let (named, virtual_size, below) = match node.image {
        Some(image) => (image.filename, image.virtual_size_bytes, image.backing_image),
        None => (node.file, None, None),
    };
    let below = std::iter::successors(below.as_deref(), |image| image.backing_image.as_deref());
    let (file_name, witness) = seen(&named, directory);
    Some(Disk {
        device: block.device,
        qdev: block.qdev,
        node_name: node.node_name.unwrap_or_default(),
        file_name,
        witness,
        format: node.driver,
        virtual_size_bytes: virtual_size.unwrap_or_default(),
        read_only: node.read_only,
        backing: below
            .map(|image| seen(&image.filename, directory))
            .map(|(file_name, witness)| BackingFile { file_name, witness })
            .collect(),
    })
}

/// The file that QEMU names, and what it looks like. A name such as nbd://host/disk or json:{…} is no path; it is kept
/// for the comparison of names.
fn seen(named: &str, directory: &Path) -> (String, Option<DiskWitness>) {
    let is_path = !named.is_empty() && !named.split('/').next().unwrap_or_default().contains(':');
    if !is_path {
        return (named.to_owned(), None);
    }
    let file = directory.join(named);
    (file.to_string_lossy().into_owned(), witness(&file))
}

/// What the file looks like now. Regular files only: size and time of a device node say nothing about what is on the
/// device.
pub fn witness(file: &Path) -> Option<DiskWitness> {
    let metadata = fs::metadata(file).ok().filter(fs::Metadata::is_file)?;
    Some(DiskWitness {
        device_id: metadata.dev(),
        inode: metadata.ino(),
        size_bytes: metadata.size(),
        mtime_ns: modified_ns(&metadata),
    })
}

/// The inode may differ (the volume may have been copied or mounted elsewhere); size and time must not.
fn difference(file: &Path, then: &DiskWitness) -> Option<String> {
    let Some(now) = witness(file) else {
        return Some(format!("{} is missing", file.display()));
    };
    if now.size_bytes != then.size_bytes {
        return Some(format!(
            "{} had {} bytes and has now {}",
            file.display(),
            then.size_bytes,
            now.size_bytes
        ));
    }
    if now.mtime_ns != then.mtime_ns {
        let seconds = (now.mtime_ns - then.mtime_ns) as f64 / 1e9;
        return Some(format!(
            "{} was written since the save ({seconds:+.3} s)",
            file.display()
        ));
    }
    None
}

#[cfg(test)]
mod tests {
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
    fn a_disk_written_since_the_save_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), b"then").unwrap();
        let recorded = [disk(file.path())];
        assert_eq!(check_unchanged(&recorded), Ok(()));
        let later =
            fs::metadata(file.path()).unwrap().modified().unwrap() + std::time::Duration::from_secs(1);
        fs::File::options()
            .write(true)
            .open(file.path())
            .unwrap()
            .set_modified(later)
            .unwrap();
        let error = check_unchanged(&recorded).unwrap_err();
        assert!(
            error.message.contains("was written since the save (+1.000 s)"),
            "{error}"
        );
    }

    #[test]
    fn a_file_below_an_overlay_counts_like_the_disk() {
        let (overlay, base) = (
            tempfile::NamedTempFile::new().unwrap(),
            tempfile::NamedTempFile::new().unwrap(),
        );
        let mut recorded = disk(overlay.path());
        let file_name = base.path().to_string_lossy().into_owned();
        recorded.backing.push(BackingFile {
            file_name,
            witness: witness(base.path()),
        });
        assert_eq!(check_unchanged(std::slice::from_ref(&recorded)), Ok(()));
        fs::write(base.path(), b"more").unwrap();
        assert!(check_unchanged(&[recorded]).is_err());
    }

    #[test]
    fn no_image_goes_to_a_disk_nor_below_it_whatever_it_is_called() {
        let folder = tempfile::tempdir().unwrap();
        let [overlay, base, other] = ["overlay", "base", "other"].map(|name| folder.path().join(name));
        for file in [&overlay, &base, &other] {
            fs::write(file, b"").unwrap();
        }
        let link = folder.path().join("link");
        fs::hard_link(&base, &link).unwrap();
        let mut disk = disk(&overlay);
        disk.backing.push(BackingFile {
            file_name: base.to_string_lossy().into_owned(),
            witness: None,
        });
        assert!([&overlay, &base, &link].iter().all(|file| is_target(&disk, file)));
        assert!(!is_target(&disk, &other));
        assert!(!is_target(&disk, &folder.path().join("missing")));
    }

    #[test]
    fn a_device_node_is_no_witness() {
        assert_eq!(witness(Path::new("/dev/null")), None);
    }

    #[test]
    fn a_missing_or_resized_disk_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let recorded = [disk(file.path())];
        fs::write(file.path(), b"more").unwrap();
        assert!(
            check_unchanged(&recorded)
                .unwrap_err()
                .message
                .contains("had 0 bytes and has now 4")
        );
        fs::remove_file(file.path()).unwrap();
        assert!(
            check_unchanged(&recorded)
                .unwrap_err()
                .message
                .contains("is missing")
        );
    }

    #[test]
    fn other_disks_than_the_recorded_ones_are_told_apart() {
        let (a, b) = (disk(Path::new("/a")), disk(Path::new("/b")));
        assert_eq!(
            check_same(std::slice::from_ref(&a), std::slice::from_ref(&a)),
            Ok(())
        );
        assert!(
            check_same(std::slice::from_ref(&a), std::slice::from_ref(&b))
                .unwrap_err()
                .message
                .contains("was /a and is now /b")
        );
        assert!(
            check_same(std::slice::from_ref(&a), &[])
                .unwrap_err()
                .message
                .contains("is missing")
        );
        assert!(
            check_same(&[], std::slice::from_ref(&a))
                .unwrap_err()
                .message
                .contains("was not there")
        );
    }
}
