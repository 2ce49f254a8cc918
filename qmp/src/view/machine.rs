//! The machine: run state, machine types, memory backends, RAM blocks.

use serde::Deserialize;

use super::open_enum::open_enum;
use super::tolerant;

open_enum! {
    /// Whether the guest runs, and if not, why.
    pub enum RunState {
        /// A debugger has stopped it.
        Debug = "debug",
        /// An incoming migration has not finished.
        Inmigrate = "inmigrate",
        /// QEMU met an error inside itself.
        InternalError = "internal-error",
        /// A disk failed, and its policy is to stop.
        IoError = "io-error",
        /// Stopped by `stop`.
        Paused = "paused",
        /// Stopped, because it was migrated away with success.
        Postmigrate = "postmigrate",
        /// Started with `-S`, not run yet.
        Prelaunch = "prelaunch",
        /// Stopped for the last part of an outgoing migration.
        FinishMigrate = "finish-migrate",
        /// Stopped to load a snapshot.
        RestoreVm = "restore-vm",
        /// Running.
        Running = "running",
        /// Stopped to save a snapshot.
        SaveVm = "save-vm",
        /// The guest has powered off, and QEMU was told to stay.
        Shutdown = "shutdown",
        /// The guest sleeps in ACPI S3.
        Suspended = "suspended",
        /// A watchdog has stopped it.
        Watchdog = "watchdog",
        /// The guest has told that it panicked.
        GuestPanicked = "guest-panicked",
        /// Stopped for a COLO checkpoint.
        Colo = "colo",
    }
}

/// The reply of `query-status`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct StatusInfo {
    /// The run state.
    pub status: RunState,
    /// Whether the virtual CPUs run.
    #[serde(default)]
    pub running: bool,
}

/// An entry of `query-memdev`: a memory backend.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct MemoryBackend {
    /// Its object id. A backend that QEMU made for itself may have none.
    #[serde(deserialize_with = "tolerant")]
    pub id: Option<String>,
    /// Its size in bytes.
    #[serde(rename = "size", deserialize_with = "tolerant")]
    pub size_bytes: Option<u64>,
    /// Whether its mapping is shared, so that others who map the same file see the guest's writes.
    /// Absent from QEMU means unknown.
    #[serde(deserialize_with = "tolerant")]
    pub share: Option<bool>,
    /// Whether its memory is allocated beforehand.
    #[serde(deserialize_with = "tolerant")]
    pub prealloc: Option<bool>,
    /// Whether swap space is reserved for it.
    #[serde(deserialize_with = "tolerant")]
    pub reserve: Option<bool>,
    /// Whether it takes part in KSM.
    #[serde(deserialize_with = "tolerant")]
    pub merge: Option<bool>,
    /// Whether it is part of a core dump.
    #[serde(deserialize_with = "tolerant")]
    pub dump: Option<bool>,
}

/// The reply of `query-memory-size-summary`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct MemorySizeSummary {
    /// The memory the machine started with, in bytes.
    #[serde(rename = "base-memory", deserialize_with = "tolerant")]
    pub base_memory_bytes: Option<u64>,
    /// The memory plugged since, in bytes.
    #[serde(rename = "plugged-memory", deserialize_with = "tolerant")]
    pub plugged_memory_bytes: Option<u64>,
}

/// An entry of `query-machines`: a machine type this QEMU can be.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct MachineInfo {
    /// The name, with its version, for example `pc-q35-10.0`.
    pub name: String,
    /// The name without a version that stands for it, for example `q35`.
    #[serde(default, deserialize_with = "tolerant")]
    pub alias: Option<String>,
    /// Whether QEMU takes it when none is named.
    #[serde(default)]
    pub is_default: bool,
    /// The most virtual CPUs it can have.
    #[serde(default, deserialize_with = "tolerant")]
    pub cpu_max: Option<u32>,
    /// Whether virtual CPUs can be plugged.
    #[serde(default)]
    pub hotpluggable_cpus: bool,
    /// Whether it will go away.
    #[serde(default)]
    pub deprecated: bool,
    /// The CPU type it has when none is named.
    #[serde(default, deserialize_with = "tolerant")]
    pub default_cpu_type: Option<String>,
    /// The name of the RAM block that its own memory becomes, for example `pc.ram`.
    #[serde(default, deserialize_with = "tolerant")]
    pub default_ram_id: Option<String>,
}

/// A RAM block, from the text of `x-query-ramblock`.
///
/// The text is made for humans and gained columns over time (QEMU 7.2 ends at the total size; 8.0
/// added the host address and whether the block is read-only), so reading starts at the columns all
/// versions have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RamBlock {
    /// The name, unique and the same on both sides of a migration, for example `pc.ram` or
    /// `0000:00:02.0/vga.vram`.
    pub name: String,
    /// The size of the host pages behind it, in bytes.
    pub page_size_bytes: Option<u64>,
    /// Where it lies in QEMU's RAM address space, in bytes.
    pub offset_bytes: u64,
    /// The part in use, in bytes. This is what a migration sends.
    pub used_bytes: u64,
    /// The size it can grow to, in bytes.
    pub total_bytes: u64,
    /// Whether it is read-only, where QEMU tells.
    pub read_only: Option<bool>,
}

/// The reply of `x-query-ramblock`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct HumanReadableText {
    /// The text.
    pub human_readable_text: String,
}

impl HumanReadableText {
    /// Reads the text as RAM blocks. Lines that are none, such as the heading, are passed over.
    pub fn ram_blocks(&self) -> Vec<RamBlock> {
        self.human_readable_text
            .lines()
            .filter_map(RamBlock::parse)
            .collect()
    }
}

impl RamBlock {
    /// Reads one line: name, page size with its unit, then offset, used and total in hexadecimal.
    fn parse(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split_whitespace().collect();
        // The name comes first and may itself look like anything, so the sizes are sought behind
        // it.
        let sizes = (3..words.len())
            .find(|&at| words[at..].iter().take(3).filter_map(|word| hex(word)).count() == 3)?;
        Some(Self {
            name: words[..sizes - 2].join(" "),
            page_size_bytes: page_size_bytes(words[sizes - 2], words[sizes - 1]),
            offset_bytes: hex(words[sizes])?,
            used_bytes: hex(words[sizes + 1])?,
            total_bytes: hex(words[sizes + 2])?,
            read_only: words[sizes + 3..].iter().find_map(|&word| match word {
                "ro" => Some(true),
                "rw" => Some(false),
                _ => None,
            }),
        })
    }
}

fn hex(word: &str) -> Option<u64> {
    u64::from_str_radix(word.strip_prefix("0x")?, 16).ok()
}

/// Reads a size as QEMU prints it for humans: `4 KiB`, `2 MiB`, `1 GiB`. Page sizes are powers of
/// two below 1000 of their unit, so what is printed is exact.
fn page_size_bytes(number: &str, unit: &str) -> Option<u64> {
    let shift = match unit {
        "B" => 0,
        "KiB" => 10,
        "MiB" => 20,
        "GiB" => 30,
        "TiB" => 40,
        _ => return None,
    };
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_known_run_state_is_read_and_an_unknown_one_is_kept() {
        let status = |word: &str| -> StatusInfo {
            serde_json::from_value(json!({"status": word, "singlestep": false, "running": false})).unwrap()
        };
        assert_eq!(status("postmigrate").status, RunState::Postmigrate);
        assert_eq!(status("finish-migrate").status, RunState::FinishMigrate);
        assert_eq!(status("dreaming").status, RunState::Other("dreaming".to_owned()));
        assert_eq!(status("dreaming").status.to_string(), "dreaming");
    }

    #[test]
    fn memory_backends_keep_sizes_exact_and_miss_nothing_when_fields_are_missing() {
        let backends: Vec<MemoryBackend> = serde_json::from_value(json!([
            {"id": "pc.ram", "size": 17179869184u64, "merge": true, "dump": true, "prealloc": false, "share": true,
             "reserve": true, "host-nodes": [], "policy": "default", "novel": {}},
            {"size": 9007199254740993u64, "share": "sometimes"},
        ]))
        .unwrap();
        assert_eq!(backends[0].id.as_deref(), Some("pc.ram"));
        assert_eq!(
            (backends[0].size_bytes, backends[0].share),
            (Some(16 << 30), Some(true))
        );
        assert_eq!(backends[1].size_bytes, Some(9_007_199_254_740_993));
        assert_eq!(backends[1].share, None);
    }

    #[test]
    fn machine_types_are_read_with_and_without_what_is_optional() {
        let machines: Vec<MachineInfo> = serde_json::from_value(json!([
            {"hotpluggable-cpus": true, "name": "pc-q35-10.0", "numa-mem-supported": true, "alias": "q35",
             "is-default": true, "default-cpu-type": "qemu64-x86_64-cpu", "cpu-max": 4096, "deprecated": false,
             "default-ram-id": "pc.ram", "acpi": true},
            {"name": "none"},
        ]))
        .unwrap();
        assert_eq!(machines[0].default_ram_id.as_deref(), Some("pc.ram"));
        assert_eq!((machines[0].cpu_max, machines[0].is_default), (Some(4096), true));
        assert_eq!(
            (machines[1].default_ram_id.as_deref(), machines[1].is_default),
            (None, false)
        );
    }

    #[test]
    fn ram_blocks_of_an_old_qemu_are_read() {
        let text = "              Block Name    PSize              Offset               Used              Total\n\
                    \x20                 pc.ram    4 KiB  0x0000000000000000 0x0000000010000000 0x0000000010000000\n\
                    \x20  0000:00:02.0/vga.vram    4 KiB  0x0000000010080000 0x0000000001000000 0x0000000001000000\n";
        let blocks = HumanReadableText {
            human_readable_text: text.to_owned(),
        }
        .ram_blocks();
        assert_eq!(blocks.len(), 2);
        assert_eq!(blocks[0].name, "pc.ram");
        assert_eq!(
            (blocks[0].page_size_bytes, blocks[0].used_bytes),
            (Some(4096), 256 << 20)
        );
        assert_eq!(
            (blocks[1].name.as_str(), blocks[1].offset_bytes),
            ("0000:00:02.0/vga.vram", 0x1008_0000)
        );
        assert_eq!(blocks[1].read_only, None);
    }

    #[test]
    fn ram_blocks_of_a_new_qemu_are_read_with_odd_names_and_large_pages() {
        let text = "              Block Name    PSize              Offset               Used              Total                HVA  RO\n\
                    \x20               /objects/0x10    2 MiB  0x0000000000000000 0x0000000400000000 0x0000000400000000 0x00007f12ebe00000  rw\n\
                    \x20  /rom@etc/acpi/tables    4 KiB  0x0000000401000000 0x0000000000020000 0x0000000000200000 0x00007f12eb400000  ro\n\
                    \n\
                    some later remark\n";
        let blocks = HumanReadableText {
            human_readable_text: text.to_owned(),
        }
        .ram_blocks();
        assert_eq!(blocks.len(), 2);
        assert_eq!(
            (blocks[0].name.as_str(), blocks[0].page_size_bytes),
            ("/objects/0x10", Some(2 << 20))
        );
        assert_eq!(
            (blocks[0].used_bytes, blocks[0].read_only),
            (16 << 30, Some(false))
        );
        assert_eq!(
            (blocks[1].used_bytes, blocks[1].total_bytes),
            (0x20000, 0x20_0000)
        );
        assert_eq!(blocks[1].read_only, Some(true));
    }
}
