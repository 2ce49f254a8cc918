//! A QEMU command line after one of its disks has moved to another volume.
//!
//! A wake starts what is recorded. A line that still named the old volume would start the guest on a disk that it has
//! left, so the line is changed where it names it: a `-drive`, a short form such as `-hda`, or `-blockdev` nodes, in
//! pairs or JSON. The names of nodes and drives stay, since devices refer to them; what is below a disk's format is left
//! out, as the move has copied it. A disk that merely lies elsewhere keeps all but its path.

use std::path::{Path, PathBuf};

use serde_json::json;

use super::command_line::takes_value;
use super::file_identity::FileIdentity;
use super::node_options::{self, NodeOptions};
use super::options::Options;

/// Where a disk was, and where it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MovedDisk {
    /// The file or block device that it was on.
    pub old: PathBuf,
    /// The nodes that it was on, as far as they have names of their own.
    pub old_nodes: Vec<String>,
    /// Where it is.
    pub new: PathBuf,
    /// In which format, in QEMU's word; `None`: as before, and on what it was on, so that only its path is another.
    pub format: Option<&'static str>,
    /// Whether that is a block device.
    pub is_block_device: bool,
    /// The size that a larger raw volume is pinned to.
    pub pinned_bytes: Option<u64>,
}

/// The line `arguments` with the disk where it is now; `None` if the line does not name the old volume, or in a way that
/// is not understood. `directory`: QEMU's.
pub fn rewritten(arguments: &[String], directory: &Path, disk: &MovedDisk) -> Option<Vec<String>> {
    let names_old = |file: &str| is_same(&directory.join(file), &disk.old);
    let mut line = arguments.to_vec();
    for at in 1..line.len() {
        let option = line[at - 1].trim_start_matches('-').to_owned();
        let is_option = line[at - 1].starts_with('-');
        if is_option && option == "drive" {
            let Some(mut options) = Options::parse(&line[at]) else {
                continue;
            };
            let key = ["file", "file.filename"]
                .into_iter()
                .find(|key| options.value(key).is_some_and(names_old));
            if let Some(key) = key {
                move_drive(&mut options, key, disk);
                line[at] = options.render();
                return Some(line);
            }
        }
        if is_option
            && let Some(index) = short_form(&option)
            && names_old(&line[at])
        {
            if disk.format.is_none() {
                line[at] = disk.new.to_string_lossy().into_owned();
                return Some(line);
            }
            // Volumes that move are hard disks.
            if index > 3 {
                continue;
            }
            let mut options = Options::parse("media=disk").unwrap_or_default();
            options.set("index", index.to_string());
            move_drive(&mut options, "file", disk);
            line[at - 1] = "-drive".to_owned();
            line[at] = options.render();
            return Some(line);
        }
    }
    let without_option = positional(arguments).find(|at| names_old(&arguments[*at]));
    if let (None, Some(at)) = (disk.format, without_option) {
        line[at] = disk.new.to_string_lossy().into_owned();
        return Some(line);
    }
    move_nodes(&line, disk, names_old)
}

/// Where a line names a disk without an option.
fn positional(line: &[String]) -> impl Iterator<Item = usize> {
    let mut is_value = true;
    line.iter().enumerate().filter_map(move |(at, token)| {
        let is_option = !is_value && token.len() > 1 && token.starts_with('-');
        let is_disk = !is_value && !is_option;
        is_value = is_option && takes_value(token.trim_start_matches('-'));
        is_disk.then_some(at)
    })
}

/// Whether the line names the new volume already.
pub fn is_rewritten(arguments: &[String], disk: &MovedDisk) -> bool {
    let new = disk.new.to_string_lossy();
    let doubled = new.replace(',', ",,");
    arguments
        .iter()
        .any(|argument| argument.contains(&*new) || argument.contains(&doubled))
}

/// Whether both are the same file.
pub(super) fn is_same(one: &Path, other: &Path) -> bool {
    one == other || FileIdentity::at(one).is_some_and(|identity| FileIdentity::at(other) == Some(identity))
}

fn short_form(option: &str) -> Option<usize> {
    [
        "hda", "hdb", "hdc", "hdd", "cdrom", "fda", "fdb", "sd", "mtdblock", "pflash",
    ]
    .iter()
    .position(|short| *short == option)
}

fn move_drive(options: &mut Options, key: &str, disk: &MovedDisk) {
    // What is the old format's own the new one does not know.
    let of_the_format: Vec<String> = options
        .pairs()
        .map(|(key, _)| key.to_owned())
        .filter(|key| {
            let first = key.split('.').next().unwrap_or_default();
            !OF_DRIVES.contains(&first) && !OF_ALL_FORMATS.contains(&first)
        })
        .collect();
    for key in of_the_format.iter().filter(|_| disk.format.is_some()) {
        options.remove(key);
    }
    options.set(key, disk.new.to_string_lossy());
    if options.value("file.driver").is_some() {
        options.set("file.driver", protocol(disk));
    }
    if let Some(format) = disk.format {
        // Both words mean the same.
        options.remove("driver");
        options.set("format", format);
    }
    if let Some(size) = disk.pinned_bytes {
        options.set("size", size.to_string());
    }
}

fn protocol(disk: &MovedDisk) -> &'static str {
    if disk.is_block_device {
        "host_device"
    } else {
        "file"
    }
}

/// What `-drive` has beside the options of the format.
const OF_DRIVES: &[&str] = &[
    "if",
    "bus",
    "unit",
    "index",
    "media",
    "id",
    "format",
    "snapshot",
    "aio",
    "rerror",
    "werror",
    "readonly",
    "copy-on-read",
    "throttling",
    "group",
    "bps",
    "bps_rd",
    "bps_wr",
    "bps_max",
    "bps_rd_max",
    "bps_wr_max",
    "iops",
    "iops_rd",
    "iops_wr",
    "iops_max",
    "iops_rd_max",
    "iops_wr_max",
    "iops_size",
    "stats-account-invalid",
    "stats-account-failed",
    "stats-intervals",
];

/// What every format has.
const OF_ALL_FORMATS: &[&str] = &[
    "",
    "driver",
    "node-name",
    "file",
    "discard",
    "detect-zeroes",
    "cache",
    "read-only",
    "auto-read-only",
    "force-share",
];

fn move_nodes(line: &[String], disk: &MovedDisk, names_old: impl Fn(&str) -> bool) -> Option<Vec<String>> {
    let mut nodes = node_options::all(line);
    let is_ours = |node: &NodeOptions| {
        node.value("node-name")
            .is_some_and(|name| disk.old_nodes.iter().any(|old| old == name))
    };
    let Some(new_format) = disk.format else {
        return with_other_path(line, nodes, disk, names_old);
    };
    // The file is a node of its own, or a part of the node of its format.
    let file = nodes
        .iter()
        .position(|(_, node)| node.value("filename").is_some_and(&names_old));
    let above = |below: usize| {
        let name = nodes[below].1.value("node-name")?;
        nodes
            .iter()
            .position(|(_, node)| node.value("file") == Some(name))
    };
    let format = match file {
        Some(file) => above(file),
        None => Some(
            nodes
                .iter()
                .position(|(_, node)| node.value("file.filename").is_some_and(&names_old))?,
        ),
    };
    // What is between the file and the disk is more than a format.
    if format.and_then(above).is_some() {
        return None;
    }
    let Some(format) = format else {
        // A device that is on the file's node itself can only be where bytes are bytes.
        if new_format != "raw" || disk.pinned_bytes.is_some() {
            return None;
        }
        let file = file?;
        nodes[file].1.set("filename", &json!(disk.new));
        nodes[file].1.set("driver", &json!(protocol(disk)));
        return Some(with_nodes(line, &nodes, &[]));
    };
    match file {
        Some(file) => {
            nodes[file].1.set("filename", &json!(disk.new));
            nodes[file].1.set("driver", &json!(protocol(disk)));
        }
        None => {
            nodes[format].1.set("file.filename", &json!(disk.new));
            nodes[format].1.set("file.driver", &json!(protocol(disk)));
        }
    }
    let node = &mut nodes[format].1;
    node.retain(|key| OF_ALL_FORMATS.contains(&key));
    node.set("driver", &json!(new_format));
    if let Some(size) = disk.pinned_bytes {
        node.set("size", &json!(size));
    }
    // What was below is used no more, unless something else refers to it.
    let mut left_out: Vec<usize> = Vec::new();
    loop {
        let is_left = |at: &usize| !left_out.contains(at);
        let others: Vec<usize> = (0..nodes.len()).filter(is_left).collect();
        let unused = others.iter().copied().find(|at| {
            let name = nodes[*at].1.value("node-name").unwrap_or_default();
            let referred = others.iter().any(|other| {
                ["file", "backing"]
                    .iter()
                    .any(|key| nodes[*other].1.value(key) == Some(name))
            });
            *at != format && Some(*at) != file && is_ours(&nodes[*at].1) && !referred
        });
        match unused {
            Some(at) => left_out.push(at),
            None => break,
        }
    }
    Some(with_nodes(line, &nodes, &left_out))
}

fn with_other_path(
    line: &[String],
    mut nodes: Vec<(usize, NodeOptions)>,
    disk: &MovedDisk,
    names_old: impl Fn(&str) -> bool,
) -> Option<Vec<String>> {
    for (_, node) in &mut nodes {
        for (key, driver) in [("filename", "driver"), ("file.filename", "file.driver")] {
            if node.value(key).is_some_and(&names_old) {
                node.set(key, &json!(disk.new));
                if node.value(driver).is_some() {
                    node.set(driver, &json!(protocol(disk)));
                }
                return Some(with_nodes(line, &nodes, &[]));
            }
        }
    }
    None
}

fn with_nodes(line: &[String], nodes: &[(usize, NodeOptions)], left_out: &[usize]) -> Vec<String> {
    let mut line = line.to_vec();
    for (at, node) in nodes {
        line[*at] = node.render();
    }
    let mut gone: Vec<usize> = left_out.iter().map(|node| nodes[*node].0).collect();
    gone.sort_unstable();
    for at in gone.into_iter().rev() {
        line.drain(at - 1..=at);
    }
    line
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn disk(format: &'static str) -> MovedDisk {
        MovedDisk {
            old: "/old/a.img".into(),
            old_nodes: ["fmt", "prot", "base", "basefile"].map(str::to_owned).to_vec(),
            new: "/new/b".into(),
            format: Some(format),
            is_block_device: false,
            pinned_bytes: None,
        }
    }

    fn moved(line: &[&str], disk: &MovedDisk) -> Option<Vec<String>> {
        let line: Vec<String> = line.iter().map(|&token| token.to_owned()).collect();
        rewritten(&line, Path::new("/old"), disk)
    }

    #[test]
    fn a_drive_keeps_all_but_its_file_and_format() {
        let line = [
            "qemu",
            "-drive",
            "file=a.img,format=qcow2,if=none,id=d,cache=none,backing.file.filename=/x",
        ];
        assert_eq!(
            moved(&line, &disk("raw")).unwrap()[2],
            "if=none,id=d,cache=none,file=/new/b,format=raw"
        );
        let pinned = MovedDisk {
            pinned_bytes: Some(512),
            ..disk("raw")
        };
        assert!(moved(&line, &pinned).unwrap()[2].ends_with("format=raw,size=512"));
    }

    #[test]
    fn a_drive_keeps_no_option_of_a_format_that_it_has_left() {
        let options = "l2-cache-size=4M,lazy-refcounts=on,cache-clean-interval=9,encrypt.format=luks,encrypt.key-secret=k,\
                       key-secret=k,pass-discard-request=on,overlap-check=all,offset=512,size=1M";
        let drive = format!(
            "file=a.img,format=qcow2,{options},if=virtio,cache=none,aio=native,bps=5,file.locking=off"
        );
        assert_eq!(
            moved(&["qemu", "-drive", &drive], &disk("raw")).unwrap()[2],
            "if=virtio,cache=none,aio=native,bps=5,file.locking=off,file=/new/b,format=raw"
        );
    }

    #[test]
    fn nodes_that_were_moved_before_have_other_names_in_qemu_than_on_the_line() {
        let line = [
            "qemu",
            "-blockdev",
            "driver=file,node-name=prot,filename=/old/a.img",
            "-blockdev",
            "driver=qcow2,node-name=fmt,file=prot",
        ];
        let again = MovedDisk {
            old_nodes: ["dm1-0-format", "dm1-0-file"].map(str::to_owned).to_vec(),
            ..disk("raw")
        };
        let now = moved(&line, &again).unwrap();
        assert!(
            now[4].contains("driver=raw") && !now[4].contains("qcow2"),
            "{now:?}"
        );
    }

    #[test]
    fn a_disk_with_more_above_its_file_than_a_format_is_left_alone() {
        let line = [
            "qemu",
            "-blockdev",
            "driver=file,node-name=prot,filename=/old/a.img",
            "-blockdev",
            "driver=throttle,node-name=between,throttle-group=g,file=prot",
            "-blockdev",
            "driver=qcow2,node-name=fmt,file=between",
        ];
        assert_eq!(moved(&line, &disk("raw")), None);
    }

    #[test]
    fn a_short_form_becomes_a_drive() {
        assert_eq!(
            moved(&["qemu", "-hdb", "a.img"], &disk("qcow2")).unwrap()[1..],
            ["-drive", "media=disk,index=1,file=/new/b,format=qcow2"]
        );
    }

    #[test]
    fn nodes_keep_their_names_and_lose_what_was_below_them() {
        let line = [
            "qemu",
            "-blockdev",
            "driver=file,node-name=basefile,filename=/old/base",
            "-blockdev",
            "driver=raw,node-name=base,file=basefile",
            "-blockdev",
            r#"{"driver":"file","node-name":"prot","filename":"/old/a.img","cache":{"direct":true}}"#,
            "-blockdev",
            r#"{"driver":"qcow2","node-name":"fmt","file":"prot","backing":"base","lazy-refcounts":true}"#,
            "-device",
            "virtio-blk-pci,drive=fmt",
        ];
        let now = moved(&line, &disk("raw")).unwrap();
        assert_eq!(now.len(), 7, "{now:?}");
        let read = |at: usize| serde_json::from_str::<Value>(&now[at]).unwrap();
        assert_eq!(
            (read(2), read(4)),
            (
                json!({"driver": "file", "node-name": "prot", "filename": "/new/b", "cache": {"direct": true}}),
                json!({"driver": "raw", "node-name": "fmt", "file": "prot"})
            )
        );
    }

    #[test]
    fn a_node_with_its_file_in_it_is_rewritten_as_well() {
        let line = [
            "qemu",
            "-blockdev",
            "qcow2,node-name=fmt,file.driver=file,file.filename=/old/a.img",
        ];
        let device = MovedDisk {
            is_block_device: true,
            ..disk("raw")
        };
        assert_eq!(
            moved(&line, &device).unwrap()[2],
            "node-name=fmt,file.filename=/new/b,file.driver=host_device,driver=raw"
        );
    }

    #[test]
    fn a_line_that_does_not_name_the_disk_is_not_changed() {
        let line = [
            "qemu",
            "-drive",
            "file=/old/other.img",
            "-blockdev",
            "driver=file,node-name=x,filename=/y",
        ];
        assert_eq!(moved(&line, &disk("raw")), None);
        let only_file = [
            "qemu",
            "-blockdev",
            "driver=file,node-name=prot,filename=/old/a.img",
        ];
        assert_eq!(moved(&only_file, &disk("qcow2")), None);
        assert!(moved(&only_file, &disk("raw")).is_some());
    }
}
