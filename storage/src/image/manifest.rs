//! The manifest: what a person and a waking supervisor must know about the guest in an image.
//!
//! JSON, at most [`MANIFEST_LIMIT`] long, read tolerantly: a field that this version does not know
//! is passed over, so that a later version may add some without a new format. What the *bytes* of
//! the image mean is never told here but in the superblock and the chunk table, both of which carry
//! the format's version.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::ByteCount;

/// The longest manifest that is written or read.
pub const MANIFEST_LIMIT: ByteCount = ByteCount::mib(4);

/// Everything that was known about a guest when it was saved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// When the guest was saved, in milliseconds since 1970 UTC.
    pub created_unix_ms: u64,
    /// Version of Dormouse that wrote the image.
    pub dormouse_version: String,
    /// The operation that made the image, by which a command that is repeated finds it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub operation: Option<Uuid>,
    /// Name of the guest.
    pub vm_name: String,
    /// The QEMU that the guest ran on.
    pub qemu: Qemu,
    /// Machine type as QEMU resolved it (`pc-i440fx-10.0`, never the alias `pc`).
    pub machine: String,
    /// Id that a memory backend must have to stand in for this machine's plain `-m` (`pc.ram` on
    /// x86).
    pub machine_default_ram_id: Option<String>,
    /// CPU model as it was given (`-cpu`), if it was.
    pub cpu: Option<String>,
    /// What the machine was made of, as QEMU told it; images of earlier versions do not say.
    #[serde(default)]
    pub hardware: Option<Hardware>,
    /// RAM blocks of the guest.
    pub ram_blocks: Vec<RamBlock>,
    /// QEMU's arguments as the user gave them, program first, where they were visible.
    pub command_line: Option<Vec<String>>,
    /// Folder in which that command line was given; relative paths in it start here.
    pub working_directory: Option<PathBuf>,
    /// Disks of the guest, with what tells whether somebody wrote to them since.
    #[serde(default)]
    pub disks: Vec<Disk>,
    /// The guest itself.
    pub guest: Guest,
    /// How long each phase of the save took, in milliseconds, by the phase's name.
    #[serde(default)]
    pub timings_ms: BTreeMap<String, f64>,
    /// How RAM came into the image: `direct` (read from the guest's memory, which QEMU left out),
    /// `direct-cpr` (read from memory that QEMU handed over), `stream` (sent by QEMU).
    pub engine: String,
}

/// The QEMU that a guest ran on, and what it could do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Qemu {
    /// Version, as `query-version` tells it (`10.0.2`).
    pub version: String,
    /// Package string beside the version, often the distribution's (`Debian 1:10.0.2+ds-2`); may be
    /// empty.
    #[serde(default)]
    pub package: String,
    /// Path of the program.
    pub binary: Option<PathBuf>,
    /// What the program's file looked like.
    pub binary_fingerprint: Option<BinaryFingerprint>,
    /// Whether `memory-backend-file` takes `offset=` (QEMU 8.1 and later): RAM can be mapped out of
    /// the image.
    #[serde(default)]
    pub memory_backend_offset: bool,
    /// Whether `memory-backend-file` takes `rom=` (QEMU 8.2 and later): a read-only image can be
    /// mapped.
    #[serde(default)]
    pub memory_backend_rom: bool,
}

/// A cheap likeness of a program file; a change of either means another build.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct BinaryFingerprint {
    /// Length of the file in bytes.
    pub size_bytes: u64,
    /// Time of its last change, in nanoseconds since 1970 UTC.
    pub mtime_ns: i64,
}

/// What a machine is made of, whatever command line made it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hardware {
    /// Its CPUs.
    #[serde(default)]
    pub cpus: Cpus,
    /// Devices that the command line made, in QEMU's order.
    #[serde(default)]
    pub devices: Vec<Device>,
    /// What lies on the first PCI bus, by address (`03.0`): the vendor's and the device's number
    /// (`8086:100e`).
    #[serde(default)]
    pub pci_functions: BTreeMap<String, String>,
}

/// The CPUs of a machine, which are all of one kind.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cpus {
    /// How many there are.
    #[serde(default)]
    pub count: usize,
    /// QEMU's type of them (`qemu64-x86_64-cpu`).
    #[serde(default)]
    pub kind: Option<String>,
    /// Their features, as the guest sees them by CPUID; words without any are left out.
    #[serde(default)]
    pub features: Vec<FeatureWord>,
}

/// One register's worth of CPU features.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FeatureWord {
    /// CPUID leaf (EAX on input).
    pub leaf: u32,
    /// CPUID subleaf (ECX on input), where the leaf has some.
    #[serde(default)]
    pub subleaf: Option<u32>,
    /// The register that they come back in.
    pub register: CpuidRegister,
    /// The features that are there.
    pub bits: u32,
}

/// A register that CPUID answers in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the names are the processor's")]
pub enum CpuidRegister {
    #[serde(rename = "EAX")]
    Eax,
    #[serde(rename = "EBX")]
    Ebx,
    #[serde(rename = "ECX")]
    Ecx,
    #[serde(rename = "EDX")]
    Edx,
}

/// A device that the command line made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Its id; QEMU's own number for it (`device[0]`) where it has none.
    pub name: String,
    /// QEMU's type of it (`virtio-net-pci`).
    pub kind: String,
    /// The bus that it is on (`pci.0`).
    #[serde(default)]
    pub bus: Option<String>,
    /// Its place on a PCI bus (`03.0`).
    #[serde(default)]
    pub address: Option<String>,
}

/// One RAM block of the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RamBlock {
    /// Name in the migration stream (`pc.ram`, `/rom@etc/acpi/tables`).
    pub name: String,
    /// Used length in bytes.
    pub length_bytes: u64,
    /// The memory backend behind it, where there is one.
    pub backend: Option<Backend>,
}

/// A memory backend object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Backend {
    /// Its QOM id.
    pub id: String,
    /// Its type (`memory-backend-memfd`).
    pub kind: String,
}

/// One disk of the guest.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// Device name, as `query-block` tells it; may be empty.
    pub device: String,
    /// QOM path or id of the guest's device, where there is one.
    pub qdev: Option<String>,
    /// Name of the top block node.
    pub node_name: String,
    /// File or device that holds the disk.
    pub file_name: String,
    /// Image format (`raw`, `qcow2`).
    pub format: String,
    /// Size that the guest sees, in bytes.
    pub virtual_size_bytes: u64,
    /// Whether the guest may not write to it.
    pub read_only: bool,
    /// What the file looked like when the guest was saved; `None` where it could not be seen.
    pub witness: Option<DiskWitness>,
    /// The files below it, where it is an overlay: nearest first.
    #[serde(default)]
    pub backing: Vec<BackingFile>,
}

/// A file below an overlay.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackingFile {
    /// Its name.
    pub file_name: String,
    /// What it looked like when the guest was saved; `None` where it could not be seen.
    pub witness: Option<DiskWitness>,
}

/// What a disk's file looked like: a difference at wake means that it was written or replaced
/// since.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskWitness {
    /// Number of the device that the file is on (for a block device: its own).
    pub device_id: u64,
    /// Inode number.
    pub inode: u64,
    /// Length in bytes.
    pub size_bytes: u64,
    /// Time of the last change, in nanoseconds since 1970 UTC; 0 for a block device, which has none.
    pub mtime_ns: i64,
    /// For a block device: CRC-32 of a sample of it (see [`fingerprint`](crate::fingerprint)).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sample_crc32: Option<u32>,
    /// For a qcow2: CRC-32 of its header and tables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tables_crc32: Option<u32>,
}

/// The guest itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Guest {
    /// What it was doing when the save was asked for, and will do again once woken.
    pub state_when_saved: GuestState,
    /// Whether the guest went on in its QEMU after this: the image is a snapshot, not the only copy of
    /// its guest, and what the guest's disks hold moves on from it.
    #[serde(default)]
    pub went_on: bool,
}

/// What a guest was doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GuestState {
    /// Its CPUs ran.
    Running,
    /// Somebody had paused it.
    Paused,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_witness_from_before_fingerprints_is_read() {
        let json = r#"{"device_id": 1, "inode": 2, "size_bytes": 3, "mtime_ns": 4}"#;
        let witness: DiskWitness = serde_json::from_str(json).unwrap();
        assert_eq!((witness.sample_crc32, witness.tables_crc32), (None, None));
        assert_eq!(witness.mtime_ns, 4);
    }

    #[test]
    fn unknown_fields_are_passed_over_and_absent_ones_are_none() {
        let json = r#"{
            "created_unix_ms": 1, "dormouse_version": "9.0.0", "vm_name": "web", "machine": "pc-q35-10.0",
            "qemu": {"version": "10.0.2", "colour": "blue"}, "ram_blocks": [], "engine": "direct",
            "guest": {"state_when_saved": "paused"}, "from_the_future": [1, 2, 3]
        }"#;
        let manifest: Manifest = serde_json::from_str(json).unwrap();
        assert_eq!(manifest.guest.state_when_saved, GuestState::Paused);
        assert_eq!(manifest.qemu.binary, None);
        assert!(!manifest.guest.went_on);
        assert!(manifest.disks.is_empty());
        let again: Manifest = serde_json::from_slice(&serde_json::to_vec(&manifest).unwrap()).unwrap();
        assert_eq!(again, manifest);
    }
}
