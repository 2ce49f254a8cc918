//! Benches of the paths that decide the pause; they live in `benches/`, one file per path. Here is what they share: a
//! machine that has nothing but RAM.

use dormouse_storage::image::manifest::{Guest, GuestState, Manifest, Qemu};
use dormouse_storage::{ByteCount, Recording};

/// Name of its one RAM block.
pub const BLOCK: &str = "pc.ram";

/// Its device state.
pub fn recording(length: ByteCount) -> Recording {
    let mut stream = b"QEVM\0\0\0\x03\x07\0\0\0\x02pc\x01\0\0\0\x01\x03ram\0\0\0\0\0\0\0\x04".to_vec();
    stream.extend((length.0 | 0x04).to_be_bytes());
    stream.extend(b"\x06pc.ram");
    stream.extend(length.0.to_be_bytes());
    let end_of_section = b"\0\0\0\0\0\0\0\x10\x7e\0\0\0\x01";
    stream.extend(end_of_section);
    stream.extend(b"\x03\0\0\0\x01");
    stream.extend(end_of_section);
    stream.extend(b"\x04device state\0\x06\0\0\0\x02{}");
    Recording::parse(&stream).expect("a stream")
}

/// What is known of it.
pub fn manifest() -> Manifest {
    Manifest {
        created_unix_ms: 0,
        dormouse_version: String::new(),
        operation: None,
        vm_name: "bench".into(),
        qemu: Qemu {
            version: "10.0.2".into(),
            package: String::new(),
            binary: None,
            binary_fingerprint: None,
            memory_backend_offset: true,
            memory_backend_rom: true,
        },
        machine: "pc".into(),
        machine_default_ram_id: None,
        cpu: None,
        hardware: None,
        ram_blocks: vec![],
        command_line: None,
        working_directory: None,
        disks: vec![],
        guest: Guest {
            state_when_saved: GuestState::Running,
            went_on: false,
        },
        timings_ms: Default::default(),
        engine: "direct".into(),
    }
}
