//! What goes out comes in again; what is malformed is refused.
#![allow(clippy::unwrap_used, reason = "a test ends where an expectation does")]

mod fixture;

use std::fs::{self, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use dormouse_storage::exchange::{
    ElfOptions, ExportError, ExportFormat, Exported, ImportError, Registers, Source, StreamCompression,
    export,
};
use dormouse_storage::image::manifest::Backend;
use dormouse_storage::{
    ByteCount, CreateOptions, Image, ImageError, ImageKey, ImageState, ImageWriter, Manifest, Progress,
    Recording, Run, StreamError,
};
use fixture::loop_device::LoopDevice;
use fixture::{Laboratory, MIB, PAGE, Stream, flip_bit, noise, read_all, working};
use proptest::prelude::*;

fn exported(image: &Image, format: &ExportFormat, target: &Path) -> Result<Exported, ExportError> {
    working(|run| export(image, format, target, false, run))
}

fn imported(laboratory: &Laboratory, file: &Path) -> Result<Image, ImportError> {
    let target = laboratory.folder.path().join("imported");
    let _ = fs::remove_file(&target);
    let source = Source::open(file)?;
    working(|run| {
        let staged = source.stage(&target, CreateOptions::default(), run)?;
        staged.write(&laboratory.manifest(), run)
    })?;
    Ok(Image::open(&target)?)
}

fn elf() -> ExportFormat {
    ExportFormat::Elf(ElfOptions {
        main_ram: "pc.ram".into(),
        max_ram_below_4g: None,
    })
}

/// All of an image that a guest would see, as one stream.
fn contents(laboratory: &Laboratory, image: &Image) -> Vec<u8> {
    let file = laboratory.folder.path().join("contents");
    exported(image, &ExportFormat::Stream, &file).unwrap();
    let bytes = read_all(&file);
    fs::remove_file(&file).unwrap();
    bytes
}

#[test]
fn what_was_exported_is_imported_as_it_was() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let before = contents(&laboratory, &image);
    for (format, name) in [
        (ExportFormat::Stream, "stream"),
        (ExportFormat::MappedRam, "mapped-ram"),
    ] {
        let file = laboratory.folder.path().join(name);
        exported(&image, &format, &file).unwrap();
        let source = Source::open(&file).unwrap();
        assert_eq!(source.machine(), "pc-i440fx-10.0");
        assert_eq!(source.blocks().len(), 3);
        let again = imported(&laboratory, &file).unwrap();
        assert!(contents(&laboratory, &again) == before, "{name}");
        assert_eq!(laboratory.filled(&again).unwrap(), laboratory.ram, "{name}");
        assert_eq!(again.state(), ImageState::Sealed);
    }
}

#[test]
fn a_cancel_that_comes_when_the_image_is_whole_is_no_failure() {
    let laboratory = Laboratory::new();
    let file = laboratory.folder.path().join("exported");
    exported(&laboratory.image(), &ExportFormat::Stream, &file).unwrap();
    let device = LoopDevice::without_zeroing(ByteCount::mib(32));
    let source = Source::open(&file).unwrap();
    let (progress, cancelled) = (Progress::default(), AtomicBool::new(false));
    let all = ByteCount(2 * source.ram().0);
    let imported = std::thread::scope(|scope| {
        scope.spawn(|| {
            // The seal syncs several times after this.
            while progress.done() < all {
                std::hint::spin_loop();
            }
            cancelled.store(true, Ordering::Relaxed);
        });
        let run = Run {
            threads: 1,
            progress: &progress,
            cancelled: &cancelled,
        };
        let staged = source
            .stage(device.path(), CreateOptions::default(), &run)
            .unwrap();
        // Small blocks are RAM too, and written like it.
        staged.write(&laboratory.manifest(), &run)
    });
    assert!(imported.is_ok(), "{:?}", imported.map(drop));
    assert_eq!(Image::open(device.path()).unwrap().state(), ImageState::Sealed);
}

#[test]
fn zeros_take_no_space_in_a_file_that_can_have_holes() {
    let mut laboratory = Laboratory::new();
    laboratory.folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let image = laboratory.image();
    for (format, name) in [(ExportFormat::MappedRam, "mapped-ram"), (elf(), "elf")] {
        let file = laboratory.folder.path().join(name);
        let written = exported(&image, &format, &file).unwrap();
        assert!(written.length.0 > 5 * MIB, "{name}: {written:?}");
        assert!(written.allocated.0 < 2 * MIB, "{name}: {written:?}");
        assert_eq!(fs::metadata(&file).unwrap().blocks() * 512, written.allocated.0);
    }
}

#[test]
fn a_core_has_ram_at_its_address_and_says_what_it_lacks() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let file = laboratory.folder.path().join("core");
    let written = exported(&image, &elf(), &file).unwrap();
    assert_eq!(written.left_out, ["/rom@etc/acpi/tables"]);
    // The fixture's device state is no state of devices.
    assert!(matches!(written.registers, Some(Registers::Missing(_))));
    let core = read_all(&file);
    assert_eq!(core[..6], *b"\x7fELF\x02\x01");
    let u16_at = |at: usize| u16::from_le_bytes(core[at..at + 2].try_into().unwrap());
    let u64_at = |at: usize| u64::from_le_bytes(core[at..at + 8].try_into().unwrap()) as usize;
    let headers = (0..usize::from(u16_at(56))).map(|index| 64 + index * 56);
    let loads: Vec<_> = headers
        .filter(|at| core[*at] == 1)
        .map(|at| (u64_at(at + 24), u64_at(at + 8), u64_at(at + 32)))
        .collect();
    let [(0, ram_at, ram_length), (bios_address, bios_at, bios_length)] = loads[..] else {
        panic!("{loads:x?}");
    };
    assert!(core[ram_at..ram_at + ram_length] == laboratory.ram);
    assert_eq!(bios_address + bios_length, 4 << 30);
    assert_eq!(
        core[bios_at..bios_at + PAGE],
        fixture::small_page("pc.bios", 0)[..]
    );

    let unknown = ExportFormat::Elf(ElfOptions {
        main_ram: "ram-node0".into(),
        max_ram_below_4g: None,
    });
    let error = exported(&image, &unknown, &laboratory.folder.path().join("other")).unwrap_err();
    assert!(matches!(error, ExportError::MainRam { block } if block == "ram-node0"));
}

#[test]
fn a_damaged_image_is_not_exported_and_leaves_no_file() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    flip_bit(&laboratory.target(), 2 * MIB + 77);
    let names = laboratory.names();
    for format in [ExportFormat::Stream, ExportFormat::MappedRam, elf()] {
        let error = exported(&image, &format, &laboratory.folder.path().join("out")).unwrap_err();
        assert!(
            matches!(error, ExportError::Image(ImageError::Corrupt { .. })),
            "{error:?}"
        );
        assert_eq!(laboratory.names(), names);
    }
}

#[test]
fn a_cancelled_export_leaves_no_file() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let names = laboratory.names();
    let (progress, cancelled) = (Progress::default(), AtomicBool::new(true));
    let run = Run {
        threads: 2,
        progress: &progress,
        cancelled: &cancelled,
    };
    for format in [ExportFormat::Stream, ExportFormat::MappedRam, elf()] {
        let error = export(
            &image,
            &format,
            &laboratory.folder.path().join("out"),
            false,
            &run,
        )
        .unwrap_err();
        assert!(matches!(error, ExportError::Image(ImageError::Cancelled)));
        assert_eq!(laboratory.names(), names);
    }
}

#[test]
fn no_image_is_replaced_by_an_export() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let replace = |target: &Path| working(|run| export(&image, &ExportFormat::Stream, target, true, run));
    assert!(matches!(
        replace(&laboratory.target()),
        Err(ExportError::Image(ImageError::HoldsGuest { .. }))
    ));
    let other = laboratory.folder.path().join("other");
    fs::write(&other, b"old").unwrap();
    replace(&other).unwrap();
    assert!(read_all(&other).starts_with(b"QEVM"));
}

#[test]
fn a_page_whose_bit_is_not_set_is_zero_whatever_is_at_its_place() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let file = laboratory.folder.path().join("mapped-ram");
    exported(&image, &ExportFormat::MappedRam, &file).unwrap();
    // The first block's bitmap lies behind its header, which ends with the offset of the pages.
    let bytes = read_all(&file);
    let header = bytes
        .windows(7)
        .position(|window| window == b"\x06pc.ram")
        .unwrap()
        + 7;
    let bitmap = u64::from_be_bytes(bytes[header + 20..header + 28].try_into().unwrap());
    assert_eq!(bytes[bitmap as usize], 0xff, "the first pages hold something");
    let changed = OpenOptions::new().write(true).open(&file).unwrap();
    changed.write_all_at(&[0b1111_1101], bitmap).unwrap();
    let again = imported(&laboratory, &file).unwrap();
    let mut expected = laboratory.ram.clone();
    expected[PAGE..2 * PAGE].fill(0);
    assert!(laboratory.filled(&again).unwrap() == expected);
}

const SMALL: [(&str, u64, Option<u64>); 2] =
    [("pc.ram", 70 * PAGE as u64, None), ("pc.bios", PAGE as u64, None)];

/// A stream of two small blocks in which these pages come in this order: number and seed; 0 is a page
/// of zeros.
fn small_stream(pages: &[(usize, u64)]) -> Vec<u8> {
    let mut stream = Stream::beginning("pc-q35-10.0");
    stream.ram_start(2, &SMALL).section(0x02, 2);
    stream.page((false, "pc.bios"), 0, Some(&page_of(7)));
    for (index, (page, seed)) in pages.iter().enumerate() {
        let content = (*seed != 0).then(|| page_of(*seed));
        stream.page((index > 0, "pc.ram"), (page * PAGE) as u64, content.as_deref());
    }
    stream
        .end_of_section(2)
        .section(0x03, 2)
        .end_of_section(2)
        .tail(b"\x04device state");
    stream.bytes
}

fn page_of(seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; PAGE];
    if seed != 0 {
        noise(&mut bytes, seed);
    }
    bytes
}

fn every_page() -> Vec<(usize, u64)> {
    (0..70).map(|page| (page, page as u64 % 3)).collect()
}

fn small_ram(image: &Image) -> Vec<u8> {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = folder.path().join("ram");
    let length = image.layout().block("pc.ram").unwrap().length;
    let memory = dormouse_storage::MemoryFile::create(&path, length).unwrap();
    working(|run| image.fill("pc.ram", &memory, run)).unwrap();
    read_all(&path)
}

fn written(laboratory: &Laboratory, bytes: &[u8]) -> PathBuf {
    let file = laboratory.folder.path().join("saved");
    fs::write(&file, bytes).unwrap();
    file
}

#[test]
fn a_stream_that_lacks_a_page_is_refused_with_the_numbers() {
    let laboratory = Laboratory::new();
    let pages = every_page();
    let file = written(&laboratory, &small_stream(&pages[1..]));
    let names = laboratory.names();
    let error = imported(&laboratory, &file).unwrap_err();
    assert!(
        matches!(&error, ImportError::PagesMissing { block, found: 69, needed: 70 } if block == "pc.ram"),
        "{error}"
    );
    assert_eq!(laboratory.names(), names);
}

/// `stream` as libvirt frames it.
fn framed(stream: &[u8], format: u32, big_endian: bool) -> Vec<u8> {
    let text = b"<domain><name>web</name></domain>\0\0\0\0";
    let mut file = b"LibvirtQemudSave".to_vec();
    for word in [2, text.len() as u32, 1, format, 0] {
        file.extend(if big_endian {
            word.to_be_bytes()
        } else {
            word.to_le_bytes()
        });
    }
    file.resize(92, 0);
    file.extend(text);
    file.extend(stream);
    file
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

#[test]
fn a_save_image_of_libvirt_is_read_in_either_byte_order_and_unpacked() {
    let laboratory = Laboratory::new();
    let stream = small_stream(&every_page());
    for (file, compression) in [
        (framed(&stream, 0, false), StreamCompression::None),
        (framed(&stream, 0, true), StreamCompression::None),
        (framed(&gzip(&stream), 1, false), StreamCompression::Gzip),
        (
            framed(&zstd::encode_all(&stream[..], 1).unwrap(), 5, true),
            StreamCompression::Zstd,
        ),
    ] {
        let file = written(&laboratory, &file);
        let source = Source::open(&file).unwrap();
        assert_eq!(source.compression(), compression);
        let header = source.libvirt().unwrap();
        assert!(header.was_running);
        assert_eq!(header.domain.name, "web");
        let image = imported(&laboratory, &file).unwrap();
        let expected: Vec<u8> = every_page().iter().flat_map(|(_, seed)| page_of(*seed)).collect();
        assert!(small_ram(&image) == expected, "{compression}");
    }
}

#[test]
fn headers_of_libvirt_that_lie_are_refused() {
    let laboratory = Laboratory::new();
    let good = framed(&small_stream(&every_page()), 0, false);
    let with = |at: usize, word: u32| {
        let mut file = good.clone();
        file[at..at + 4].copy_from_slice(&word.to_le_bytes());
        Source::open(&written(&laboratory, &file)).unwrap_err()
    };
    for (at, word, words) in [
        (16, 0, "version 0"),
        (16, 3, "version"),
        (20, u32::MAX, "at most 16.0 MiB"),
        (20, 15 << 20, "but the file has"),
        (28, 9, "format 9"),
        (28, 6, "no mapped-ram stream follows"),
        (32, 10_000, "cookie"),
    ] {
        let error = with(at, word);
        assert!(error.to_string().contains(words), "{at}: {error}");
    }
    let error = Source::open(&written(&laboratory, &good[..50])).unwrap_err();
    assert!(matches!(error, ImportError::LibvirtHeader(_)), "{error}");
    let error = Source::open(&written(&laboratory, b"LibvirtQemudSave")).unwrap_err();
    assert!(matches!(error, ImportError::LibvirtHeader(_)), "{error}");
}

#[test]
fn a_mapped_ram_file_whose_offsets_lie_is_refused() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let file = laboratory.folder.path().join("mapped-ram");
    exported(&image, &ExportFormat::MappedRam, &file).unwrap();
    let bytes = read_all(&file);
    let header = bytes
        .windows(7)
        .position(|window| window == b"\x06pc.ram")
        .unwrap()
        + 7;
    let changed = OpenOptions::new().write(true).open(&file).unwrap();
    for (field, value) in [
        (0, u64::MAX),
        (0, 12),
        (12, 8192),
        (20, u64::MAX),
        (20, 0),
        (28, u64::MAX - 4096),
        (28, 0),
    ] {
        let at = (header + field) as u64;
        changed.write_all_at(&value.to_be_bytes(), at).unwrap();
        let error = Source::open(&file).unwrap_err();
        assert!(
            matches!(
                &error,
                ImportError::Stream {
                    source: StreamError::BlockList(_),
                    ..
                }
            ),
            "{field}: {error:?}"
        );
        changed
            .write_all_at(&bytes[header + field..header + field + 8], at)
            .unwrap();
    }
    Source::open(&file).unwrap();
}

/// Two devices as QEMU writes and describes them: an array, a structure, a subsection in a subsection.
fn described_devices() -> Vec<u8> {
    let mut stream = Stream::beginning("pc-q35-10.0");
    stream.ram_start(2, &SMALL).section(0x03, 2).end_of_section(2);
    let mut sections = b"\x04\0\0\0\x09\x03cpu\0\0\0\x01\0\0\0\x0c".to_vec();
    sections.extend(b"AAAABBBBCCCC-S");
    sections.extend(b"\x05\x07cpu/sub\0\0\0\x01xy\x05\x09cpu/sub/2\0\0\0\x02z");
    sections.extend(b"\x7e\0\0\0\x09");
    sections.extend(b"\x04\0\0\0\x0a\x03old\0\0\0\0\0\0\0\x05data\x7e\0\0\0\x0a");
    let description = br#"{"page_size": 4096, "devices": [
        {"name": "cpu", "instance_id": 1, "vmsd_name": "cpu", "version": 12, "fields": [
            {"name": "regs", "array_len": 3, "type": "uint32", "size": 4},
            {"name": "flag", "type": "uint8", "size": 1},
            {"name": "seg", "type": "struct", "struct": {"vmsd_name": "segment", "version": 1, "fields": []}, "size": 1}],
         "subsections": [{"vmsd_name": "cpu/sub", "version": 1, "fields": [{"name": "a", "type": "buffer", "size": 2}],
            "subsections": [{"vmsd_name": "cpu/sub/2", "version": 2, "fields": [{"name": "b", "type": "x", "size": 1}]}]}]},
        {"name": "old", "instance_id": 0, "size": 4, "fields": [{"name": "data", "size": 4, "type": "buffer"}]}]}"#;
    stream.bytes.extend(sections);
    stream.bytes.extend([0x00, 0x06]);
    stream.bytes.extend((description.len() as u32).to_be_bytes());
    stream.bytes.extend(description);
    stream.bytes
}

#[test]
fn devices_are_taken_apart_by_their_description() {
    let recording = Recording::parse(&described_devices()).unwrap();
    let devices = recording.devices().unwrap();
    let names: Vec<_> = devices
        .iter()
        .map(|device| (device.name.as_str(), device.instance))
        .collect();
    assert_eq!(names, [("cpu", 1), ("old", 0)]);
    assert_eq!(devices[0].field("regs", 4), Some(&b"AAAABBBBCCCC"[..]));
    assert_eq!(devices[0].field("regs", 8), None);
    assert_eq!(devices[0].field("nothing", 4), None);
    assert_eq!(devices[1].field("data", 4), Some(&b"data"[..]));
}

#[test]
fn the_manifest_of_an_import_is_the_callers() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let file = laboratory.folder.path().join("stream");
    exported(&image, &ExportFormat::Stream, &file).unwrap();
    let again = imported(&laboratory, &file).unwrap();
    let manifest: &Manifest = again.manifest();
    assert_eq!(manifest, &laboratory.manifest());
}

#[test]
fn pages_of_a_rom_are_all_there_in_a_mapped_ram_file() {
    // A loading QEMU leaves what is absent as it finds it, and a fresh ROM is not zero.
    let laboratory = Laboratory::new();
    let mut manifest = laboratory.manifest();
    manifest.ram_blocks[0].backend = Some(Backend {
        id: "pc.ram".into(),
        kind: "memory-backend-file".into(),
    });
    let writer = laboratory.written(false).unwrap();
    drop(writer.seal(&manifest, &laboratory.recording()).unwrap());
    let image = Image::open(&laboratory.target()).unwrap();
    let file = laboratory.folder.path().join("mapped-ram");
    exported(&image, &ExportFormat::MappedRam, &file).unwrap();
    let bytes = read_all(&file);
    let bits = |name: &[u8]| {
        let header = bytes
            .windows(name.len())
            .position(|window| window == name)
            .unwrap()
            + name.len();
        let u64_at = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
        let pages = u64_at(header) / PAGE;
        let bitmap = u64_at(header + 20);
        (0..pages)
            .filter(|page| bytes[bitmap + page / 8] & (1 << (page % 8)) != 0)
            .count()
    };
    assert_eq!(bits(b"\x07pc.bios"), 64);
    let in_ram = laboratory.ram.chunks(PAGE);
    assert_eq!(
        bits(b"\x06pc.ram"),
        in_ram.filter(|page| page.iter().any(|byte| *byte != 0)).count()
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn pages_that_come_again_hold_what_came_last(again in prop::collection::vec((0_usize..70, 0_u64..4), 0..200)) {
        let laboratory = Laboratory::new();
        let mut pages = every_page();
        pages.extend(again);
        let mut expected = vec![0; 70 * PAGE];
        for (page, seed) in &pages {
            expected[page * PAGE..(page + 1) * PAGE].copy_from_slice(&page_of(*seed));
        }
        let image = imported(&laboratory, &written(&laboratory, &small_stream(&pages))).unwrap();
        prop_assert!(small_ram(&image) == expected);
        working(|run| image.verify(run)).unwrap();
    }

    #[test]
    fn changed_saves_never_panic(
        packed in 0_usize..3,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let laboratory = Laboratory::new();
        let stream = small_stream(&every_page());
        let mut file = match packed {
            0 => stream,
            1 => framed(&stream, 0, false),
            _ => framed(&gzip(&stream), 1, false),
        };
        for (place, byte) in changes {
            // Mostly where the structure is.
            let length = file.len().min(400);
            file[place.index(length)] = byte;
        }
        if let Some(cut) = cut {
            file.truncate(cut.index(file.len()));
        }
        let _ = imported(&laboratory, &written(&laboratory, &file));
    }

    #[test]
    fn changed_mapped_ram_files_never_panic(
        changes in prop::collection::vec((0_u64..200, any::<u8>(), any::<bool>()), 1..6),
    ) {
        let laboratory = Laboratory::new();
        let image = laboratory.image();
        let file = laboratory.folder.path().join("mapped-ram");
        exported(&image, &ExportFormat::MappedRam, &file).unwrap();
        let changed = OpenOptions::new().write(true).open(&file).unwrap();
        for (place, byte, second) in changes {
            // Around the first block's header, and the second's.
            let base = if second { 6 * MIB + 3 * PAGE as u64 } else { 0 };
            changed.write_all_at(&[byte], base + place).unwrap();
        }
        let _ = imported(&laboratory, &file);
    }

    #[test]
    fn changed_devices_never_panic(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4)) {
        let mut stream = described_devices();
        for (place, byte) in changes {
            let at = place.index(stream.len());
            stream[at] = byte;
        }
        if let Ok(recording) = Recording::parse(&stream) {
            let _ = recording.devices();
        }
    }
}

#[test]
fn a_compressed_and_encrypted_image_is_exported_in_the_clear_with_its_key_alone() {
    let laboratory = Laboratory::new();
    let plain = contents(&laboratory, &laboratory.image());
    let target = laboratory.folder.path().join("secret");
    let key = ImageKey::from_file_content(&[7; 32]).unwrap();
    let options = CreateOptions {
        compression: "zstd".parse().unwrap(),
        key: Some(key.clone()),
        ..CreateOptions::default()
    };
    let writer = ImageWriter::create(&target, laboratory.layout(), options).unwrap();
    let writer = laboratory.write(writer).unwrap();
    drop(
        writer
            .seal(&laboratory.manifest(), &laboratory.recording())
            .unwrap(),
    );
    let mut image = Image::open(&target).unwrap();
    let names = laboratory.names();
    let out = laboratory.folder.path().join("out");
    for format in [ExportFormat::Stream, ExportFormat::MappedRam, elf()] {
        let error = exported(&image, &format, &out).unwrap_err();
        assert!(
            matches!(error, ExportError::Image(ImageError::KeyNeeded { .. })),
            "{error:?}"
        );
        assert_eq!(laboratory.names(), names);
    }
    image.unlock(&key).unwrap();
    assert!(contents(&laboratory, &image) == plain);
    exported(&image, &ExportFormat::MappedRam, &out).unwrap();
    assert!(contents(&laboratory, &imported(&laboratory, &out).unwrap()) == plain);
}
