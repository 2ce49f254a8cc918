//! What QEMU sends over a main connection and multifd channels arrives in an image byte by byte.

use std::{
    fs,
    io::Read,
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    sync::atomic::AtomicBool,
};

use dormouse_storage::{
    BlockSize, ByteCount, CreateOptions, Image, ImageWriter, Incoming, Layout, Manifest, MemoryWritten,
    PageContent, Progress, Recording, Run, migration::PAGE_BYTES,
};
use dormouse_tests::{BootSectorGuest, Guest, Lab, Monitor, PlainQemu, QemuBuild};
use serde_json::json;

/// Where a PC's first MiB of physical memory shows something else than RAM.
const VIDEO_AND_ROMS: std::ops::Range<usize> = 0xa_0000..0x10_0000;

const MIB: usize = 1 << 20;

#[test]
fn memory_arrives_whole_from_qemu_7_2() {
    memory_arrives_whole(QemuBuild::V7_2, &[0, 1, 3]);
}

#[test]
fn memory_arrives_whole_from_qemu_10_0() {
    memory_arrives_whole(QemuBuild::V10_0, &[0, 1, 3]);
}

#[test]
fn memory_arrives_whole_from_qemu_11_1() {
    memory_arrives_whole(QemuBuild::V11_1, &[0, 1, 3]);
}

fn memory_arrives_whole(build: QemuBuild, channels: &[u32]) {
    let lab = Lab::new();
    let guest = BootSectorGuest::new(&lab, build);
    let _qemu = PlainQemu::start(&guest);
    guest.wait_for_ticks(5);
    let mut monitor = guest.monitor();
    monitor.stop();
    let layout = layout(&mut monitor, &lab);
    for count in channels {
        monitor.cont();
        guest.wait_for_more_ticks();
        monitor.stop();
        let memory = monitor.memory(guest.ram_bytes(), &lab.path("memory"));
        let (image, written) = receive(&mut monitor, &lab, &layout, *count);
        let arrived = block(&image, "pc.ram");
        assert_eq!(arrived.len(), memory.len());
        for ram in [0..VIDEO_AND_ROMS.start, VIDEO_AND_ROMS.end..memory.len()] {
            assert!(
                memory[ram.clone()] == arrived[ram.clone()],
                "{ram:#x?}, by {count} channels"
            );
        }
        assert!(written.data >= ByteCount::mib(16) && written.zero > written.data);
        assert_eq!(BootSectorGuest::pattern_faults(&arrived), Vec::<usize>::new());
    }
}

/// QEMU 7.2 tells zero pages late: with one in every MiB no MiB is complete until it does.
#[test]
fn a_guest_with_a_zero_page_in_every_mib_arrives_whole_from_qemu_7_2() {
    a_zero_page_in_every_mib(QemuBuild::V7_2);
}

#[test]
fn a_guest_with_a_zero_page_in_every_mib_arrives_whole_from_qemu_11_1() {
    a_zero_page_in_every_mib(QemuBuild::V11_1);
}

fn a_zero_page_in_every_mib(build: QemuBuild) {
    const RAM_MIB: usize = 160;
    const FILLED_FROM_MIB: usize = 32;

    let lab = Lab::new();
    let guest = BootSectorGuest::with_ram(&lab, build, RAM_MIB as u64);
    let ram_folder = tempfile::tempdir_in("/dev/shm").expect("a folder can be made in memory");
    let ram = ram_folder.path().join("ram");
    let mut content = vec![0; RAM_MIB * MIB];
    let pages = content.chunks_mut(PAGE_BYTES).enumerate();
    for (number, page) in pages.skip(FILLED_FROM_MIB * MIB / PAGE_BYTES) {
        if number % 256 != number / 256 % 256 {
            page.copy_from_slice(&(number as u64).to_le_bytes().repeat(PAGE_BYTES / 8));
        }
    }
    fs::write(&ram, &content).expect("memory has room");
    let backend = format!(
        "memory-backend-file,id=main,size={RAM_MIB}M,share=on,mem-path={}",
        ram.display()
    );
    let arguments = ["-object", &backend, "-machine", "memory-backend=main"];
    let _qemu = PlainQemu::start_with(&guest, &arguments);
    guest.wait_for_ticks(5);
    let mut monitor = guest.monitor();
    monitor.stop();
    let layout = layout(&mut monitor, &lab);
    monitor.cont();
    guest.wait_for_more_ticks();
    monitor.stop();
    let content = fs::read(&ram).expect("the guest's memory can be read");
    let (image, _) = receive(&mut monitor, &lab, &layout, 2);
    assert!(block(&image, "main") == content);
}

/// The RAM blocks of a guest, which stands still, by a migration that is read and thrown away.
fn layout(monitor: &mut Monitor, lab: &Lab) -> Layout {
    let mut stream = Vec::new();
    let [connection] = &mut migrate(monitor, lab, 0)[..] else {
        panic!("one connection was asked for")
    };
    connection.read_to_end(&mut stream).expect("QEMU sends a stream");
    monitor.wait_for_status("postmigrate");
    let recording = Recording::parse(&stream).expect("QEMU's stream can be parsed");
    let blocks: Vec<_> = (recording.blocks().iter())
        .map(|block| BlockSize {
            name: block.name.clone(),
            length: block.used_length,
        })
        .collect();
    Layout::plan(&blocks).expect("a guest fits an image")
}

/// Lets QEMU migrate, and returns its connections: the main one and, if there are any, channels.
fn migrate(monitor: &mut Monitor, lab: &Lab, channels: u32) -> Vec<UnixStream> {
    let multifd = json!({ "capability": "multifd", "state": channels > 0 });
    monitor.execute("migrate-set-capabilities", json!({ "capabilities": [multifd] }));
    let mut parameters = json!({ "max-bandwidth": 0 });
    if channels > 0 {
        parameters["multifd-channels"] = channels.into();
    }
    monitor.execute("migrate-set-parameters", parameters);
    let socket = lab.path("incoming.sock");
    // Left by the migration before.
    let _ = fs::remove_file(&socket);
    let listener = UnixListener::bind(&socket).expect("a socket can be made");
    monitor.execute("migrate", json!({ "uri": format!("unix:{}", socket.display()) }));
    let accept = |_| listener.accept().expect("QEMU connects").0;
    (0..=channels).map(accept).collect()
}

/// Receives a guest that stands still into an image.
fn receive(monitor: &mut Monitor, lab: &Lab, layout: &Layout, channels: u32) -> (Image, MemoryWritten) {
    let target = lab.path(&format!("by-{channels}-channels.dormouse"));
    let mut writer = ImageWriter::create(&target, layout.clone(), CreateOptions::default())
        .expect("an image can be begun");
    let incoming = Incoming::of(migrate(monitor, lab, channels)).expect("connections");
    let progress = Progress::new(layout.ram());
    let run = Run {
        threads: 1,
        progress: &progress,
        cancelled: &AtomicBool::new(false),
    };
    let (recording, written) = writer
        .write_incoming(incoming, ByteCount::mib(16), &run)
        .unwrap_or_else(|error| panic!("by {channels} channels: {error:?}"));
    assert_eq!(progress.done(), progress.total());
    monitor.wait_for_status("postmigrate");
    drop(
        writer
            .seal(&manifest(recording.machine()), &recording)
            .expect("the image is whole"),
    );
    (open(&target), written)
}

fn open(target: &Path) -> Image {
    Image::open(target).expect("the image can be read")
}

/// A block of an image, every page of which must be there.
fn block(image: &Image, name: &str) -> Vec<u8> {
    let recording = image.device_state().expect("device state");
    let wanted = recording.blocks().iter().position(|block| block.name == name);
    let wanted = wanted.unwrap_or_else(|| panic!("no block {name:?}"));
    let others: Vec<_> = recording
        .blocks()
        .iter()
        .map(|block| block.name.as_str())
        .collect();
    let others: Vec<_> = others.into_iter().filter(|other| *other != name).collect();
    let mut bytes = Vec::new();
    for page in image.pages(&others).expect("pages") {
        let page = page.expect("a page can be read");
        assert_eq!((page.block, page.offset), (wanted, bytes.len() as u64));
        match page.content {
            PageContent::Zero => bytes.resize(bytes.len() + PAGE_BYTES, 0),
            PageContent::Data(content) => bytes.extend(&content[..]),
        }
    }
    bytes
}

fn manifest(machine: &str) -> Manifest {
    serde_json::from_value(json!({
        "created_unix_ms": 1_700_000_000_000_u64,
        "dormouse_version": "0.1.0",
        "vm_name": "guest",
        "qemu": {
            "version": "10.0.2", "package": "", "binary": null, "binary_fingerprint": null,
            "memory_backend_offset": true, "memory_backend_rom": true,
        },
        "machine": machine,
        "machine_default_ram_id": "pc.ram",
        "cpu": null,
        "ram_blocks": [],
        "command_line": null,
        "working_directory": null,
        "disks": [],
        "guest": { "state_when_saved": "paused" },
        "timings_ms": {},
        "engine": "stream",
    }))
    .expect("a manifest")
}
