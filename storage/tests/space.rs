//! No room: told before the guest is stopped, with numbers, and nothing stays behind.
//!
//! These tests mount small tmpfs file systems and need root, as the continuous integration has it.
//! Without it they fail.

mod fixture;

use std::fs;

use dormouse_storage::exchange::{ExportError, ExportFormat, ImportError, Source, export};
use dormouse_storage::{
    Backend, BlockSize, ByteCount, CreateOptions, GuestMemory, ImageError, ImageWriter, Layout,
};
use fixture::small_disk::SmallDisk;
use fixture::{Laboratory, noise, working};
use std::os::unix::fs::FileExt;

fn writer_on(disk: &SmallDisk, ram: ByteCount, backend: Option<Backend>) -> ImageWriter {
    let layout = Layout::plan(&[BlockSize {
        name: "pc.ram".into(),
        length: ram,
    }])
    .expect("layout");
    let options = CreateOptions {
        backend,
        ..CreateOptions::default()
    };
    ImageWriter::create(&disk.path().join("image"), layout, options).expect("create")
}

#[test]
fn reserving_more_than_is_free_tells_both_numbers_and_leaves_nothing() {
    let disk = SmallDisk::of(ByteCount::mib(16));
    let mut writer = writer_on(&disk, ByteCount::mib(64), None);
    let error = writer.reserve(ByteCount::mib(1)).unwrap_err();
    let ImageError::NoSpace {
        needed,
        available,
        path,
    } = &error
    else {
        panic!("{error:?}")
    };
    assert!(
        *needed > ByteCount::mib(64 + 2 + 1 + 4) && *needed < ByteCount::mib(72),
        "{needed}"
    );
    assert!(
        *available <= ByteCount::mib(16) && *available > ByteCount::mib(15),
        "{available}"
    );
    assert_eq!(path, disk.path());
    assert_eq!(
        error.to_string(),
        format!("needs 71.0 MiB, 16.0 MiB free on {}", path.display())
    );
    drop(writer);
    assert!(disk.is_empty());
}

#[test]
fn what_was_reserved_is_there_even_if_others_fill_the_disk() {
    let laboratory = Laboratory::new();
    let disk = SmallDisk::of(ByteCount::mib(24));
    let target = disk.path().join("image");
    let options = CreateOptions::default();
    let mut writer = ImageWriter::create(&target, laboratory.layout(), options).unwrap();
    writer.reserve(ByteCount::mib(1)).unwrap();
    // Somebody else takes all the rest.
    assert!(fs::write(disk.path().join("other"), vec![1; 24 << 20]).is_err());
    working(|run| writer.write_memory("pc.ram", &laboratory.memory(), run)).unwrap();
    working(|run| writer.write_pages(&laboratory.recording(), run)).unwrap();
    let mut sealed = writer
        .seal(&laboratory.manifest(), &laboratory.recording())
        .unwrap();
    let before = sealed.allocated().unwrap();
    working(|run| sealed.give_back(run)).unwrap();
    assert!(sealed.allocated().unwrap() < before);
}

#[test]
fn a_disk_that_fills_up_under_an_unreserved_image_is_no_space_too() {
    let ram_file = tempfile::tempfile_in("/dev/shm").unwrap();
    let mut ram = vec![0; 8 << 20];
    noise(&mut ram, 5);
    ram_file.write_all_at(&ram, 0).unwrap();
    let memory = GuestMemory::map(ram_file, ByteCount::mib(8)).unwrap();
    for backend in [Backend::Uring, Backend::Pwrite, Backend::Buffered] {
        for disk in [
            SmallDisk::of(ByteCount::mib(4)),
            SmallDisk::ext4(ByteCount::mib(5)),
        ] {
            let mut writer = writer_on(&disk, ByteCount::mib(8), Some(backend));
            assert_eq!(writer.backend(), backend);
            let error = working(|run| writer.write_memory("pc.ram", &memory, run)).unwrap_err();
            assert!(
                matches!(error, ImageError::NoSpace { .. }),
                "{backend}: {error:?}"
            );
            drop(writer);
            assert!(disk.is_empty());
        }
    }
}

#[test]
fn an_export_that_has_no_room_is_told_before_and_leaves_no_file() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let disk = SmallDisk::of(ByteCount::mib(4));
    for format in [ExportFormat::Stream, ExportFormat::MappedRam] {
        let target = disk.path().join("exported");
        let error = working(|run| export(&image, &format, &target, false, run)).unwrap_err();
        let ExportError::Image(ImageError::NoSpace {
            needed, available, ..
        }) = error
        else {
            panic!("{error:?}");
        };
        assert!(
            available <= ByteCount::mib(4) && needed > available,
            "{needed} of {available}"
        );
        assert!(disk.is_empty());
    }
}

#[test]
fn an_import_that_has_no_room_for_image_and_staged_ram_is_told_before_and_leaves_nothing() {
    let laboratory = Laboratory::new();
    let file = laboratory.folder.path().join("stream");
    let image = laboratory.image();
    working(|run| export(&image, &ExportFormat::Stream, &file, false, run)).expect("exported");
    let source = Source::open(&file).expect("a stream");
    // The image alone would fit, the RAM beside it does not.
    let disk = SmallDisk::of(ByteCount(source.space_needed().expect("a number").0 - (1 << 20)));
    let target = disk.path().join("image");
    let staged = working(|run| source.stage(&target, CreateOptions::default(), run));
    let error = staged.expect_err("no room");
    assert!(
        matches!(error, ImportError::Image(ImageError::NoSpace { .. })),
        "{error:?}"
    );
    assert!(disk.is_empty());

    let disk = SmallDisk::of(ByteCount(source.space_needed().expect("a number").0 + (1 << 20)));
    let target = disk.path().join("image");
    working(|run| {
        let staged = source.stage(&target, CreateOptions::default(), run)?;
        staged.write(&laboratory.manifest(), run)
    })
    .expect("just enough room");
}
