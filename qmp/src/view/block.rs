//! The block layer: what `query-block`, `query-named-block-nodes` and `query-block-exports` tell.

use serde::Deserialize;

use super::job::IoStatus;
use super::tolerant;

/// An entry of `query-block`: what the guest sees as a drive.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct BlockInfo {
    /// The name given by `-drive`; empty for drives made of named nodes.
    pub device: String,
    /// The QOM path or id of the device in front of it.
    #[serde(deserialize_with = "tolerant")]
    pub qdev: Option<String>,
    /// What is in it; absent for an empty drive.
    #[serde(deserialize_with = "tolerant")]
    pub inserted: Option<BlockNode>,
    /// Whether the medium can be changed.
    pub removable: bool,
    /// Whether the guest has locked the medium in.
    pub locked: bool,
    /// Whether the tray is open; absent for devices without one.
    #[serde(deserialize_with = "tolerant")]
    pub tray_open: Option<bool>,
    /// How I/O fares; absent where the device does not watch it.
    #[serde(rename = "io-status", deserialize_with = "tolerant")]
    pub io_status: Option<IoStatus>,
}

/// A block node: an entry of `query-named-block-nodes`, or the root of a drive in [`BlockInfo`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct BlockNode {
    /// The name of the node. The root of a drive may be a filter that a job has put in.
    #[serde(rename = "node-name", deserialize_with = "tolerant")]
    pub node_name: Option<String>,
    /// The driver, for example `qcow2`, `raw`, `host_device`.
    #[serde(rename = "drv")]
    pub driver: String,
    /// The file name, or a `json:` description.
    pub file: String,
    /// Whether it is open for reading only.
    #[serde(rename = "ro")]
    pub read_only: bool,
    /// Whether the node is active: whether it may be written, and is not given over to the other
    /// side of a migration. Told since QEMU 10.0.
    #[serde(deserialize_with = "tolerant")]
    pub active: Option<bool>,
    /// The file name of the backing image.
    #[serde(deserialize_with = "tolerant")]
    pub backing_file: Option<String>,
    /// How many backing images there are.
    #[serde(deserialize_with = "tolerant")]
    pub backing_file_depth: Option<u64>,
    /// Whether what is on it is encrypted.
    #[serde(deserialize_with = "tolerant")]
    pub encrypted: Option<bool>,
    /// How writes of zeros are treated: `off`, `on` or `unmap`.
    #[serde(deserialize_with = "tolerant")]
    pub detect_zeroes: Option<String>,
    /// The cache mode.
    #[serde(deserialize_with = "tolerant")]
    pub cache: Option<BlockCache>,
    /// The image behind it.
    #[serde(deserialize_with = "tolerant")]
    pub image: Option<ImageInfo>,
    /// The dirty bitmaps on it.
    #[serde(rename = "dirty-bitmaps", deserialize_with = "tolerant")]
    pub dirty_bitmaps: Option<Vec<DirtyBitmap>>,
}

/// The cache mode of a [`BlockNode`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct BlockCache {
    /// Whether a write is acknowledged before it is stable.
    pub writeback: bool,
    /// Whether the host's page cache is passed by.
    pub direct: bool,
    /// Whether flushes are ignored.
    pub no_flush: bool,
}

/// The image of a [`BlockNode`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct ImageInfo {
    /// The file name, or a `json:` description.
    pub filename: String,
    /// The format, for example `qcow2` or `raw`.
    pub format: String,
    /// The size the guest sees.
    #[serde(rename = "virtual-size", deserialize_with = "tolerant")]
    pub virtual_size_bytes: Option<u64>,
    /// The space it takes on the host, where that is known.
    #[serde(rename = "actual-size", deserialize_with = "tolerant")]
    pub actual_size_bytes: Option<u64>,
    /// The size of a cluster, for formats that have them.
    #[serde(rename = "cluster-size", deserialize_with = "tolerant")]
    pub cluster_size_bytes: Option<u64>,
    /// Whether the image was not closed cleanly.
    #[serde(deserialize_with = "tolerant")]
    pub dirty_flag: Option<bool>,
    /// Whether it is encrypted.
    #[serde(deserialize_with = "tolerant")]
    pub encrypted: Option<bool>,
    /// The internal snapshots of a format that has them.
    #[serde(deserialize_with = "tolerant")]
    pub snapshots: Option<Vec<ImageSnapshot>>,
    /// The file name of the backing image, as recorded in this one.
    #[serde(deserialize_with = "tolerant")]
    pub backing_filename: Option<String>,
    /// The backing image.
    #[serde(deserialize_with = "tolerant")]
    pub backing_image: Option<Box<ImageInfo>>,
}

/// An internal snapshot of an [`ImageInfo`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ImageSnapshot {
    /// The name that a person gave it.
    pub name: String,
}

/// A dirty bitmap of a [`BlockNode`].
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct DirtyBitmap {
    /// The name; absent for bitmaps that jobs keep for themselves.
    #[serde(deserialize_with = "tolerant")]
    pub name: Option<String>,
    /// The dirty bytes.
    #[serde(rename = "count", deserialize_with = "tolerant")]
    pub dirty_bytes: Option<u64>,
    /// The bytes that one bit stands for.
    #[serde(rename = "granularity", deserialize_with = "tolerant")]
    pub granularity_bytes: Option<u64>,
    /// Whether new writes are recorded.
    #[serde(deserialize_with = "tolerant")]
    pub recording: Option<bool>,
    /// Whether an operation uses it, so that it cannot be changed.
    #[serde(deserialize_with = "tolerant")]
    pub busy: Option<bool>,
    /// Whether it is stored in the image.
    #[serde(deserialize_with = "tolerant")]
    pub persistent: Option<bool>,
    /// Whether it was not stored properly and can only be deleted.
    #[serde(deserialize_with = "tolerant")]
    pub inconsistent: Option<bool>,
}

/// An entry of `query-block-exports`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct BlockExportInfo {
    /// The id.
    pub id: String,
    /// How it is exported, for example `nbd` or `vhost-user-blk`.
    #[serde(rename = "type", default)]
    pub export_type: String,
    /// The node that is exported.
    #[serde(default)]
    pub node_name: String,
    /// Whether it is being removed.
    #[serde(default)]
    pub shutting_down: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_drive_tells_its_root_node_and_image() {
        let drives: Vec<BlockInfo> = serde_json::from_value(json!([
            {"io-status": "ok", "device": "", "locked": false, "removable": false,
             "inserted": {"iops_rd": 0, "detect_zeroes": "off", "active": true, "image": {"virtual-size": 21474836480u64,
                 "filename": "/pvc/disk.qcow2", "cluster-size": 65536, "format": "qcow2", "actual-size": 3221225472u64,
                 "format-specific": {"type": "qcow2", "data": {"compat": "1.1"}}, "dirty-flag": false,
                 "backing-image": {"virtual-size": 10, "filename": "base", "format": "raw"}},
                 "iops_wr": 0, "ro": false, "node-name": "libvirt-1-format", "backing_file_depth": 0, "drv": "qcow2",
                 "iops": 0, "bps_wr": 0, "write_threshold": 0, "encrypted": false, "bps": 0, "bps_rd": 0,
                 "cache": {"no-flush": false, "direct": true, "writeback": true}, "file": "/pvc/disk.qcow2",
                 "dirty-bitmaps": [{"recording": true, "busy": false, "count": 65536, "granularity": 65536}]},
             "qdev": "/machine/peripheral/virtio-disk0/virtio-backend", "type": "unknown"},
            {"io-status": "puzzled", "device": "ide1-cd0", "locked": false, "removable": true, "tray_open": false,
             "qdev": "/machine/unattached/device[23]", "type": "unknown"},
        ]))
        .unwrap();
        let node = drives[0].inserted.as_ref().unwrap();
        assert_eq!(
            (node.node_name.as_deref(), node.driver.as_str()),
            (Some("libvirt-1-format"), "qcow2")
        );
        assert_eq!((node.read_only, node.active), (false, Some(true)));
        assert!(node.cache.unwrap().direct);
        let image = node.image.as_ref().unwrap();
        assert_eq!(
            (image.virtual_size_bytes, image.actual_size_bytes),
            (Some(20 << 30), Some(3 << 30))
        );
        assert_eq!(image.backing_image.as_ref().unwrap().format, "raw");
        assert_eq!(node.dirty_bitmaps.as_ref().unwrap()[0].dirty_bytes, Some(65536));
        assert_eq!(drives[1].inserted, None);
        assert_eq!((drives[1].removable, drives[1].tray_open), (true, Some(false)));
        assert_eq!(drives[1].io_status, Some(IoStatus::Other("puzzled".to_owned())));
    }

    #[test]
    fn a_node_of_an_old_qemu_does_not_tell_whether_it_is_active() {
        let node: BlockNode = serde_json::from_value(json!({
            "node-name": "target", "drv": "host_device", "ro": true, "file": "/dev/vda", "backing_file_depth": 0,
            "image": {"filename": "/dev/vda", "format": "host_device", "virtual-size": 1073741824, "actual-size": 0},
        }))
        .unwrap();
        assert_eq!((node.active, node.read_only), (None, true));
    }

    #[test]
    fn an_export_of_an_unknown_type_is_an_export() {
        let exports: Vec<BlockExportInfo> = serde_json::from_value(json!([
            {"node-name": "target", "shutting-down": false, "type": "nbd", "id": "dormouse-nbd-vda"},
            {"node-name": "n", "shutting-down": true, "type": "carrier-pigeon", "id": "e", "leases": 3},
        ]))
        .unwrap();
        assert_eq!(
            (exports[0].export_type.as_str(), exports[0].shutting_down),
            ("nbd", false)
        );
        assert_eq!(
            (exports[1].export_type.as_str(), exports[1].shutting_down),
            ("carrier-pigeon", true)
        );
    }
}
