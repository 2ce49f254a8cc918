//! Benches of the paths that decide the pause; they live in `benches/`, one file per path. Here is what they share: a
//! machine that has nothing but RAM.

use std::time::Duration;

use dormouse_storage::image::manifest::{Guest, GuestState, Manifest, Qemu};
use dormouse_storage::{ByteCount, Recording};
use rustix::time::{ClockId, clock_gettime};

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

/// CPU time of this process so far.
pub fn cpu_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The figure in the middle; they are sorted by this.
pub fn median(figures: &mut [f64]) -> f64 {
    figures.sort_unstable_by(f64::total_cmp);
    match figures {
        [] => f64::NAN,
        figures => figures[figures.len() / 2],
    }
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
