//! A wake on disks that lie elsewhere than at the save: volumes that were mounted at other paths, or copies.
//!
//! The recorded command line is started with the new paths in the places of the old ones, and recorded so for the next
//! hibernation. The disks at the new paths have to be what those at the old ones were.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use dormouse_storage::image::manifest::Disk;

use crate::error::{Code, Failure};
use crate::machine::volume::plan::device_id;
use crate::vm::disks::label;
use crate::vm::file_identity::FileIdentity;
use crate::vm::moved_disk::{MovedDisk, rewritten};

/// A disk, and where it is now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OtherDisk {
    /// The id of its device, drive or node, or its file at the save.
    pub disk: String,
    /// Its file or block device now.
    pub path: PathBuf,
}

impl FromStr for OtherDisk {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once('=') {
            Some((disk, path)) if !disk.is_empty() && !path.is_empty() => Ok(Self {
                disk: disk.to_owned(),
                path: path.into(),
            }),
            _ => Err(format!("{text:?} is not ID=PATH")),
        }
    }
}

/// The recorded disks and the recorded command line with each of the `others` at its new place. `directory`: QEMU's.
pub fn put_in_place(
    recorded: &[Disk],
    line: &[String],
    directory: &Path,
    others: &[OtherDisk],
) -> Result<(Vec<Disk>, Vec<String>), Failure> {
    let (mut disks, mut line) = (recorded.to_vec(), line.to_vec());
    let mut moved = Vec::new();
    for other in others {
        let index = find(recorded, &other.disk)?;
        let disk = &recorded[index];
        if moved.contains(&index) {
            return Err(Failure::new(
                Code::Usage,
                format!("{} is named twice", label(disk)),
            ));
        }
        moved.push(index);
        let new = std::path::absolute(&other.path)
            .map_err(|error| Failure::new(Code::Usage, format!("{}: {error}", other.path.display())))?;
        let change = MovedDisk {
            old: disk.file_name.clone().into(),
            old_nodes: vec![disk.node_name.clone()],
            is_block_device: is_block_device(&new),
            new,
            format: None,
            pinned_bytes: None,
        };
        line = rewritten(&line, directory, &change).ok_or_else(|| {
            Failure::new(
                Code::Refused,
                format!(
                    "{}: the recorded command line does not name {} in a way that could be changed",
                    label(disk),
                    disk.file_name
                ),
            )
        })?;
        disks[index].file_name = change.new.to_string_lossy().into_owned();
    }
    Ok((disks, line))
}

fn is_block_device(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    std::fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_block_device())
}

/// The disk that a person means.
fn find(recorded: &[Disk], wanted: &str) -> Result<usize, Failure> {
    let is_meant = |disk: &Disk| {
        let qdev = disk.qdev.as_deref();
        let is_file = || {
            disk.file_name == wanted
                || wanted.contains('/')
                    && FileIdentity::at(Path::new(wanted)).is_some_and(|identity| {
                        FileIdentity::at(Path::new(&disk.file_name)) == Some(identity)
                    })
        };
        qdev.is_some_and(|qdev| qdev == wanted || device_id(qdev) == Some(wanted))
            || disk.device == wanted
            || disk.node_name == wanted
            || is_file()
    };
    let found: Vec<usize> = (0..recorded.len())
        .filter(|index| is_meant(&recorded[*index]))
        .collect();
    match found[..] {
        [index] => Ok(index),
        [] => {
            let there: Vec<String> = recorded
                .iter()
                .map(|disk| format!("{} ({})", label(disk), disk.file_name))
                .collect();
            Err(Failure::new(
                Code::Usage,
                format!("the image has no disk {wanted}; it has: {}", there.join(", ")),
            ))
        }
        _ => {
            let several: Vec<String> = found.iter().map(|index| label(&recorded[*index])).collect();
            Err(Failure::new(
                Code::Usage,
                format!("{wanted} may be {}", several.join(" or ")),
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(device: &str, qdev: Option<&str>, node: &str, file: &str) -> Disk {
        Disk {
            device: device.into(),
            qdev: qdev.map(str::to_owned),
            node_name: node.into(),
            file_name: file.into(),
            format: "raw".into(),
            virtual_size_bytes: 4,
            read_only: false,
            witness: None,
            backing: Vec::new(),
        }
    }

    fn recorded() -> Vec<Disk> {
        vec![
            disk("ide0-hd0", None, "#block1", "/old/a.img"),
            disk(
                "",
                Some("/machine/peripheral/d1/virtio-backend"),
                "fmt",
                "/old/b.img",
            ),
        ]
    }

    fn placed(line: &[&str], others: &[&str]) -> Result<(Vec<Disk>, Vec<String>), Failure> {
        let line: Vec<String> = line.iter().map(|&token| token.to_owned()).collect();
        let others: Vec<OtherDisk> = others.iter().map(|text| text.parse().unwrap()).collect();
        put_in_place(&recorded(), &line, Path::new("/old"), &others)
    }

    #[test]
    fn a_disk_is_known_by_each_of_its_names_in_each_form_of_the_line() {
        for name in ["ide0-hd0", "#block1", "/old/a.img"] {
            for (line, new) in [
                (["-hda", "a.img"], ["-hda", "/new/a"]),
                (["-nographic", "a.img"], ["-nographic", "/new/a"]),
                (
                    [
                        "-drive",
                        "file=a.img,format=qcow2,if=ide,backing.file.filename=/x",
                    ],
                    [
                        "-drive",
                        "format=qcow2,if=ide,backing.file.filename=/x,file=/new/a",
                    ],
                ),
            ] {
                let line = ["qemu", line[0], line[1]];
                let (disks, line) = placed(&line, &[&format!("{name}=/new/a")]).unwrap();
                assert_eq!(line[1..], new);
                assert_eq!(disks[0].file_name, "/new/a");
                assert_eq!(disks[1], recorded()[1]);
            }
        }
    }

    #[test]
    fn nodes_in_pairs_and_json_keep_all_but_their_path() {
        for name in ["d1", "fmt", "/old/b.img"] {
            let line = [
                "qemu",
                "-blockdev",
                r#"{"driver":"file","node-name":"p","filename":"/old/b.img","cache":{"direct":true}}"#,
                "-blockdev",
                "driver=qcow2,node-name=fmt,file=p,lazy-refcounts=on",
            ];
            let (_, placed) = placed(&line, &[&format!("{name}=/new/b")]).unwrap();
            let node: serde_json::Value = serde_json::from_str(&placed[2]).unwrap();
            assert_eq!(
                node,
                serde_json::json!({"driver": "file", "node-name": "p", "filename": "/new/b", "cache": {"direct": true}})
            );
            assert_eq!(placed[4], line[4]);
        }
    }

    #[test]
    fn what_is_not_there_or_named_twice_is_refused_with_what_there_is() {
        let line = ["qemu", "-hda", "a.img"];
        let error = placed(&line, &["nobody=/new"]).unwrap_err();
        assert_eq!(error.code, Code::Usage);
        assert!(
            error.message.contains("disk ide0-hd0 (/old/a.img)") && error.message.contains("/old/b.img"),
            "{error}"
        );
        let error = placed(&line, &["ide0-hd0=/new", "#block1=/newer"]).unwrap_err();
        assert!(error.message.contains("named twice"), "{error}");
        let error = placed(&line, &["d1=/new"]).unwrap_err();
        assert_eq!(error.code, Code::Refused);
        assert!("nothing".parse::<OtherDisk>().is_err());
    }
}
