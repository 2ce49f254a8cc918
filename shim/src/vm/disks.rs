//! The disks of a VM, and whether they are still the ones that its memory belongs to.
//!
//! A guest's memory holds pieces of its disks. Woken on a disk that was written since, the guest would write its old
//! pieces over the new data, and nobody would notice until the filesystem is ruined. So every image carries a witness
//! of each disk, taken after QEMU has let go of the disks, and a wake compares before it loads anything:
//!
//! | disk | what has to be as it was | what it does not see |
//! | --- | --- | --- |
//! | file | size, time of the last write | a write whose time was put back |
//! | qcow2 | that, and a CRC of its header and tables | an overwrite in place whose time was put back |
//! | block device | size, and a CRC of a sample | a write that is not in the sample |
//! | network disk | nothing: it is told that nothing is known | any |
//!
//! Inode and device are kept for people; they may differ, because a volume may have been copied or mounted elsewhere. A
//! copy has to keep the time (`cp --preserve=timestamps`, `rsync -t`): one that does not cannot be told from a disk that
//! was written. The time of the last change of the inode (ctime) is not looked at: a `chmod`, a rename, a hard link and
//! every copy change it, and none of them changes what the guest reads.

use std::fs::{self, File};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use dormouse_qmp::Client;
use dormouse_qmp::command;
use dormouse_qmp::view::block::BlockInfo;
use dormouse_storage::image::manifest::{BackingFile, Disk, DiskWitness};
use dormouse_storage::{Fingerprint, fingerprint};

use super::binary::modified_ns;
use super::block_ground::overlap;
use crate::error::{Code, Failure};

/// How long a disk may take to be read for its fingerprint: some seventy reads.
const FINGERPRINT_LIMIT: Duration = Duration::from_secs(10);

/// The disks that QEMU has now; file names are taken relative to QEMU's working `directory`.
pub async fn present(client: &Client, directory: &Path) -> Result<Vec<Disk>, Failure> {
    let blocks: Vec<BlockInfo> = client.query(&command::query_block {}).await?;
    Ok(blocks
        .into_iter()
        .filter_map(|block| record(block, directory))
        .collect())
}

/// The same disks with their fingerprints, for an image: they must not be written any more. What cannot be read has no
/// witness, and a wake says so.
pub async fn with_fingerprints(mut disks: Vec<Disk>) -> Result<Vec<Disk>, Failure> {
    let read = tokio::task::spawn_blocking(move || {
        for disk in &mut disks {
            let own = std::iter::once((&disk.file_name, &mut disk.witness));
            let below = disk.backing.iter_mut();
            let below = below.map(|file| (&file.file_name, &mut file.witness));
            for (file, witness) in own.chain(below) {
                let Some(seen) = witness else { continue };
                match read_fingerprint(Path::new(file)) {
                    Ok(fingerprint) => {
                        seen.sample_crc32 = fingerprint.sample_crc32;
                        seen.tables_crc32 = fingerprint.tables_crc32;
                    }
                    Err(why) => {
                        tracing::warn!(
                            file,
                            why,
                            "a wake will not be able to tell whether this disk was written"
                        );
                        *witness = None;
                    }
                }
            }
        }
        disks
    });
    read.await.map_err(|error| {
        Failure::new(
            Code::Internal,
            format!("reading the disks ended in panic: {error}"),
        )
    })
}

/// Storage that hangs must not hold up more than this.
fn read_fingerprint(file: &Path) -> Result<Fingerprint, String> {
    let (tell, told) = mpsc::channel();
    let path = file.to_owned();
    thread::spawn(move || tell.send(fingerprint(&path)));
    match told.recv_timeout(FINGERPRINT_LIMIT) {
        Ok(read) => read.map_err(|error| error.to_string()),
        Err(_) => Err(format!("it was not read within {FINGERPRINT_LIMIT:?}")),
    }
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

/// What must not be the target of an image: a disk's file or device, one below it, or what lies on these or under them.
pub fn is_target(disk: &Disk, target: &Path) -> bool {
    let below = disk.backing.iter().map(|file| &file.file_name);
    let mut files = std::iter::once(&disk.file_name).chain(below);
    files.any(|file| overlap(target, Path::new(file)))
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

/// The file of a raw disk that is smaller than it, as one that moved to a larger volume is. QEMU describes such a disk
/// instead of naming its file, and in other words after the next start.
fn described_file(named: &str) -> Option<String> {
    let disk: serde_json::Value = serde_json::from_str(named.strip_prefix("json:")?).ok()?;
    let is_plain = disk["driver"] == "raw"
        && disk
            .get("offset")
            .is_none_or(|offset| offset == 0 || offset == "0");
    let file = &disk["file"];
    let is_file = file["driver"] == "file" || file["driver"] == "host_device";
    (is_plain && is_file).then(|| file["filename"].as_str().map(str::to_owned))?
}

/// The file that QEMU names, and what it looks like. A name such as nbd://host/disk or json:{…} is no path; it is kept
/// for the comparison of names.
fn seen(named: &str, directory: &Path) -> (String, Option<DiskWitness>) {
    let described = described_file(named);
    let named = described.as_deref().unwrap_or(named);
    let is_path = !named.is_empty() && !named.split('/').next().unwrap_or_default().contains(':');
    if !is_path {
        return (named.to_owned(), None);
    }
    let file = directory.join(named);
    (file.to_string_lossy().into_owned(), witness(&file))
}

/// What the file or block device looks like now, without its fingerprint.
pub fn witness(file: &Path) -> Option<DiskWitness> {
    let metadata = fs::metadata(file).ok()?;
    let (device_id, size_bytes, mtime_ns) = if metadata.is_file() {
        (metadata.dev(), metadata.size(), modified_ns(&metadata))
    } else if metadata.file_type().is_block_device() {
        // The time of a device node says nothing about what is on the device.
        let end = File::open(file).and_then(|mut device| device.seek(SeekFrom::End(0)));
        (metadata.rdev(), end.ok()?, 0)
    } else {
        return None;
    };
    Some(DiskWitness {
        device_id,
        inode: metadata.ino(),
        size_bytes,
        mtime_ns,
        sample_crc32: None,
        tables_crc32: None,
    })
}

/// The inode may differ (the volume may have been copied or mounted elsewhere); size, time and fingerprint must not.
fn difference(file: &Path, then: &DiskWitness) -> Option<String> {
    let name = file.display();
    let Some(now) = witness(file) else {
        return Some(format!("{name} is missing"));
    };
    if now.size_bytes != then.size_bytes {
        return Some(format!(
            "{name} had {} bytes and has now {}",
            then.size_bytes, now.size_bytes
        ));
    }
    if now.mtime_ns != then.mtime_ns {
        let seconds = (now.mtime_ns - then.mtime_ns) as f64 / 1e9;
        return Some(format!(
            "{name} was written since the save ({seconds:+.3} s), or is a copy that did not keep its time"
        ));
    }
    if then.sample_crc32.is_none() && then.tables_crc32.is_none() {
        if then.mtime_ns == 0 {
            tracing::warn!("cannot tell whether {name} was written since the save");
        }
        return None;
    }
    let found = match read_fingerprint(file) {
        Ok(found) => found,
        Err(why) => {
            return Some(format!(
                "{name} cannot be read, to see whether it was written: {why}"
            ));
        }
    };
    if found.sample_crc32 != then.sample_crc32 {
        return Some(format!(
            "{name} was written since the save: a sample of it is not what it was"
        ));
    }
    (found.tables_crc32 != then.tables_crc32).then(|| {
        format!(
            "{name} was written since the save: its qcow2 tables are not what they were, although its time is"
        )
    })
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

    #[tokio::test]
    async fn a_qcow2_that_was_rewritten_is_named_even_if_its_time_was_put_back() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let mut qcow2 = vec![0; 4096];
        qcow2[..4].copy_from_slice(b"QFI\xfb");
        fs::write(file.path(), &qcow2).unwrap();
        let recorded = with_fingerprints(vec![disk(file.path())]).await.unwrap();
        assert!(recorded[0].witness.unwrap().tables_crc32.is_some());
        assert_eq!(check_unchanged(&recorded), Ok(()));
        let then = fs::metadata(file.path()).unwrap().modified().unwrap();
        qcow2[60] = 1;
        fs::write(file.path(), &qcow2).unwrap();
        let written = File::options().write(true).open(file.path()).unwrap();
        written.set_modified(then).unwrap();
        let error = check_unchanged(&recorded).unwrap_err();
        assert!(error.message.contains("qcow2 tables"), "{error}");
    }

    #[tokio::test]
    async fn a_disk_that_cannot_be_read_has_no_witness() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let seen = disk(file.path());
        drop(file);
        assert_eq!(with_fingerprints(vec![seen]).await.unwrap()[0].witness, None);
    }

    #[test]
    fn a_character_device_is_no_witness() {
        assert_eq!(witness(Path::new("/dev/null")), None);
    }

    #[test]
    fn a_disk_that_is_smaller_than_its_file_is_known_by_the_file() {
        for size in ["512", "\"512\""] {
            let named = format!(
                r#"json:{{"driver":"raw","size":{size},"file":{{"driver":"file","filename":"/a"}}}}"#
            );
            assert_eq!(seen(&named, Path::new("/")).0, "/a");
        }
        let inside = r#"json:{"driver":"raw","offset":512,"file":{"driver":"file","filename":"/a"}}"#;
        assert_eq!(seen(inside, Path::new("/")).0, inside);
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
