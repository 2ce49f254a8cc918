//! What is found of an image whose writer was killed, and what is done with it. A killed writer's files are made by
//! copying them while they are written: a process cannot be killed within a test of itself.
//!
//! The test on a block device attaches a loop device and needs root.

#![allow(clippy::unwrap_used, reason = "a test may panic in its helpers too")]

mod fixture;

use std::fs;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use dormouse_storage::image::{Interrupted, Remains};
use dormouse_storage::{ByteCount, CreateOptions, Image, ImageState, ImageWriter, Unmappable};
use fixture::loop_device::LoopDevice;
use fixture::{Laboratory, working};
use uuid::Uuid;

fn id() -> Uuid {
    Uuid::from_u128(0x5eed)
}

fn begin(laboratory: &Laboratory) -> ImageWriter {
    let options = CreateOptions {
        image_id: id(),
        ..CreateOptions::default()
    };
    ImageWriter::create(&laboratory.target(), laboratory.layout(), options).unwrap()
}

fn partial(laboratory: &Laboratory) -> PathBuf {
    laboratory
        .folder
        .path()
        .join(format!(".guest.dormouse.partial-{}", id()))
}

#[test]
fn a_partial_file_is_unfinished_and_goes() {
    let laboratory = Laboratory::new();
    let interrupted = Interrupted::new(&laboratory.target(), id());
    assert_eq!(interrupted.remains().unwrap(), Remains::Nothing);
    assert!(!interrupted.remove_unfinished().unwrap());
    let writer = laboratory.write(begin(&laboratory)).unwrap();
    let kept = laboratory.folder.path().join("kept");
    fs::copy(partial(&laboratory), &kept).unwrap();
    assert!(
        interrupted.remove_unfinished().is_err(),
        "a writer that lives holds it"
    );
    drop(writer);
    fs::rename(kept, partial(&laboratory)).unwrap();
    assert_eq!(interrupted.remains().unwrap(), Remains::Unfinished);
    assert!(interrupted.remove_unfinished().unwrap());
    assert!(!interrupted.remove_unfinished().unwrap());
    assert_eq!(laboratory.names(), Vec::<String>::new());
}

#[test]
fn an_image_that_has_its_name_is_whole_and_what_lies_beside_it_goes_when_it_is_settled() {
    let laboratory = Laboratory::new();
    drop(
        laboratory
            .write(begin(&laboratory))
            .unwrap()
            .seal(&laboratory.manifest(), &laboratory.recording())
            .unwrap(),
    );
    let interrupted = Interrupted::new(&laboratory.target(), id());
    fs::hard_link(laboratory.target(), partial(&laboratory)).unwrap();
    assert_eq!(interrupted.remains().unwrap(), Remains::Whole(ImageState::Sealed));
    let settled = interrupted.settle().unwrap();
    assert_eq!(laboratory.names(), ["guest.dormouse"]);
    assert_eq!(
        Image::open(&laboratory.target()).unwrap().state(),
        ImageState::Sealed
    );
    assert!(interrupted.settle().is_err(), "it is held");
    drop(settled);
    interrupted.settle().unwrap();
    // Another image has the name: that is nobody's to touch.
    let other = Interrupted::new(&laboratory.target(), Uuid::from_u128(1));
    assert_eq!(other.remains().unwrap(), Remains::Nothing);
    assert!(other.settle().is_err() && other.remove_whole().is_err());
    interrupted.remove_whole().unwrap();
    assert_eq!(laboratory.names(), Vec::<String>::new());
}

#[test]
fn space_that_a_killed_writer_reserved_is_given_back() {
    let laboratory = Laboratory::new();
    let mut writer = begin(&laboratory);
    writer.reserve(ByteCount::mib(1)).unwrap();
    drop(
        laboratory
            .write(writer)
            .unwrap()
            .seal(&laboratory.manifest(), &laboratory.recording())
            .unwrap(),
    );
    let interrupted = Interrupted::new(&laboratory.target(), id());
    let allocated = || fs::metadata(laboratory.target()).unwrap().blocks();
    let reserved = allocated();
    let mut settled = interrupted.settle().unwrap();
    working(|run| settled.give_back(run)).unwrap();
    let given_back = allocated();
    assert!(given_back < reserved, "{given_back} of {reserved} blocks");
    working(|run| settled.give_back(run)).unwrap();
    assert_eq!(allocated(), given_back);
    drop(settled);
    let image = Image::open(&laboratory.target()).unwrap();
    working(|run| image.verify(run)).unwrap();
}

#[test]
fn an_image_whose_tables_are_damaged_is_not_called_whole() {
    let laboratory = Laboratory::new();
    drop(
        laboratory
            .write(begin(&laboratory))
            .unwrap()
            .seal(&laboratory.manifest(), &laboratory.recording())
            .unwrap(),
    );
    let bytes = fs::read(laboratory.target()).unwrap();
    let manifest = b"created_unix_ms";
    let at = bytes.windows(manifest.len()).position(|part| part == manifest);
    fixture::flip_bit(&laboratory.target(), at.unwrap() as u64);
    assert!(Interrupted::new(&laboratory.target(), id()).remains().is_err());
}

#[test]
fn a_device_is_told_by_its_superblocks_and_only_what_is_ours_is_wiped() {
    let laboratory = Laboratory::new();
    let device = LoopDevice::with_old_data(ByteCount::mib(32), 512);
    let begin = |id| {
        let options = CreateOptions {
            image_id: id,
            replace: true,
            ..CreateOptions::default()
        };
        ImageWriter::create(device.path(), laboratory.layout(), options).unwrap()
    };
    let copy_of_the_beginning = |id| {
        let writer = begin(id);
        let bytes = read(&device);
        drop(writer);
        bytes
    };
    let (ours, others) = (
        copy_of_the_beginning(id()),
        copy_of_the_beginning(Uuid::from_u128(1)),
    );
    let interrupted = Interrupted::new(device.path(), id());
    for (first, second, expected) in [
        (&others, &others, Remains::Nothing),
        (&ours, &others, Remains::Unfinished),
        (&ours, &ours, Remains::Unfinished),
    ] {
        write(&device, &[&first[..4096], &second[4096..]].concat());
        assert_eq!(interrupted.remains().unwrap(), expected);
        assert_eq!(
            interrupted.remove_unfinished().unwrap(),
            expected == Remains::Unfinished
        );
    }
    assert_eq!(interrupted.remains().unwrap(), Remains::Nothing);
    assert_eq!(read(&device), vec![0; 8192]);

    // Killed between the two sealed copies.
    drop(
        laboratory
            .write(begin(id()))
            .unwrap()
            .seal(&laboratory.manifest(), &laboratory.recording())
            .unwrap(),
    );
    let sealed = read(&device);
    write(&device, &[&ours[..4096], &sealed[4096..]].concat());
    assert_eq!(interrupted.remains().unwrap(), Remains::Whole(ImageState::Sealed));
    let mut settled = interrupted.settle().unwrap();
    assert_eq!(read(&device), sealed);
    let image = Image::open(device.path()).unwrap();
    assert_eq!(
        (image.state(), image.check_mappable()),
        (ImageState::Sealed, Err(Unmappable::OldData))
    );
    // What its writer had left to do, and once more.
    for _ in 0..2 {
        working(|run| settled.give_back(run)).unwrap();
        assert_eq!(Image::open(device.path()).unwrap().check_mappable(), Ok(()));
    }
    drop(settled);
    interrupted.remove_whole().unwrap();
    assert_eq!(interrupted.remains().unwrap(), Remains::Nothing);
}

fn read(device: &LoopDevice) -> Vec<u8> {
    let mut bytes = vec![0; 8192];
    let file = fs::File::open(device.path()).unwrap();
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

fn write(device: &LoopDevice, bytes: &[u8]) {
    let file = fs::File::options().write(true).open(device.path()).unwrap();
    file.write_all_at(bytes, 0).unwrap();
    file.sync_all().unwrap();
}
