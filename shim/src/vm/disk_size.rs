//! The size of raw disks on a command line: `size=` of a disk that is smaller than its volume.
//!
//! A disk that moved to a larger volume keeps its size by it, and one that has grown since does not. What a guest's memory
//! belongs to is the size that the disk has at the save, so that is what the line is brought in accord with then, whoever
//! changed it and whether he came to his end.

use std::path::Path;

use dormouse_storage::image::manifest::Disk;
use serde_json::json;

use super::moved_disk::is_same;
use super::node_options::{self, NodeOptions};
use super::options::Options;

/// The line with the sizes that these disks have now. What is not understood stays as it is, and a wake compares.
pub fn as_now(arguments: &[String], directory: &Path, disks: &[Disk]) -> Vec<String> {
    let mut line = arguments.to_vec();
    for disk in disks.iter().filter(|disk| disk.format == "raw") {
        // One whose volume cannot be seen is left as it is.
        let Some(volume) = &disk.witness else { continue };
        let size = (disk.virtual_size_bytes < volume.size_bytes).then_some(disk.virtual_size_bytes);
        set_size(&mut line, directory, Path::new(&disk.file_name), size);
    }
    line
}

/// Sets or removes `size=` where the raw disk on `file` is named.
fn set_size(line: &mut [String], directory: &Path, file: &Path, size: Option<u64>) {
    let names_it = |named: &str| is_same(&directory.join(named), file);
    for at in 1..line.len() {
        if !matches!(line[at - 1].as_str(), "-drive" | "--drive") {
            continue;
        }
        let Some(mut options) = Options::parse(&line[at]) else {
            continue;
        };
        let named = ["file", "file.filename"].map(|key| options.value(key).is_some_and(names_it));
        // What begins in the middle of its volume is smaller by that.
        if !named.contains(&true) || options.value("offset").is_some() {
            continue;
        }
        let there = options.value("size").map(str::to_owned);
        if there == size.map(|size| size.to_string()) {
            return;
        }
        options.remove("size");
        if let Some(size) = size {
            options.set("size", size.to_string());
        }
        line[at] = options.render();
        return;
    }
    let nodes = node_options::all(line);
    let file_node = nodes
        .iter()
        .find(|(_, node)| node.value("filename").is_some_and(names_it))
        .and_then(|(_, node)| node.value("node-name").map(str::to_owned));
    let is_on_it = |node: &NodeOptions| {
        let by_name = file_node.is_some() && node.value("file") == file_node.as_deref();
        by_name || node.value("file.filename").is_some_and(names_it)
    };
    let disk = nodes
        .into_iter()
        .find(|(_, node)| node.value("driver") == Some("raw") && is_on_it(node));
    let Some((at, mut node)) = disk else { return };
    let before = node.clone();
    node.retain(|key| key != "size");
    if let Some(size) = size {
        node.set("size", &json!(size));
    }
    if node.number("size") != before.number("size") && before.number("offset").is_none() {
        line[at] = node.render();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now(line: &[&str], size: Option<u64>) -> Vec<String> {
        let mut line: Vec<String> = line.iter().map(|&token| token.to_owned()).collect();
        set_size(&mut line, Path::new("/run"), Path::new("/run/disk"), size);
        line
    }

    #[test]
    fn a_drive_gets_loses_and_keeps_its_size() {
        let pinned = ["qemu", "-drive", "file=disk,format=raw,size=512,if=none"];
        assert_eq!(now(&pinned, None)[2], "file=disk,format=raw,if=none");
        assert_eq!(
            now(&pinned, Some(1024))[2],
            "file=disk,format=raw,if=none,size=1024"
        );
        assert_eq!(now(&pinned, Some(512)), pinned);
        let other = ["qemu", "-drive", "file=other,size=512"];
        assert_eq!(now(&other, None), other);
    }

    #[test]
    fn a_node_gets_loses_and_keeps_its_size_in_either_form() {
        let json = r#"{"driver":"raw","file":"prot","node-name":"fmt","size":512}"#;
        for file in [
            "driver=file,node-name=prot,filename=/run/disk",
            r#"{"driver":"file","node-name":"prot","filename":"disk"}"#,
        ] {
            let line = ["qemu", "-blockdev", file, "-blockdev", json];
            assert!(!now(&line, None)[4].contains("size"), "{:?}", now(&line, None));
            assert_eq!(now(&line, Some(512)), line);
            let pairs = [
                "qemu",
                "-blockdev",
                file,
                "-blockdev",
                "driver=raw,node-name=fmt,file=prot",
            ];
            assert_eq!(now(&pairs, None), pairs);
            assert!(now(&pairs, Some(512))[4].ends_with(",size=512"));
        }
        let inside = [
            "qemu",
            "-blockdev",
            "raw,file.driver=file,file.filename=disk,size=512,node-name=fmt",
        ];
        assert!(!now(&inside, None)[2].contains("size"));
    }

    #[test]
    fn a_disk_in_the_middle_of_its_volume_is_left_alone() {
        let line = ["qemu", "-drive", "file=disk,format=raw,offset=512"];
        assert_eq!(now(&line, Some(512)), line);
    }
}
