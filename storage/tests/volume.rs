//! Random guests on every kind of volume, by every way to write and in every form: what comes back is what went, and zeros
//! read as zeros in place.
//!
//! These tests attach loop devices and mount file systems, and need root, as the continuous integration
//! has it. Without it they fail.
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod fixture;

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use dormouse_storage::{
    Backend, BlockSize, ByteCount, Compression, CreateOptions, GuestMemory, Image, ImageKey, ImageWriter,
    Layout, MemoryFile, Recording, VolumeKind,
};
use fixture::loop_device::LoopDevice;
use fixture::small_disk::SmallDisk;
use fixture::{Laboratory, PAGE, Stream, noise, working};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use tempfile::TempDir;

const BACKENDS: [Backend; 3] = [Backend::Uring, Backend::Pwrite, Backend::Buffered];

/// Longest RAM block of a random guest, in pages: three chunks and a bit.
const MOST_PAGES: usize = 800;

#[derive(Debug, Clone, Copy, PartialEq)]
enum Content {
    Hole,
    Zero,
    Data,
}

/// How an image keeps RAM.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    Plain,
    Compressed,
    Encrypted,
}

fn any_form() -> impl Strategy<Value = Form> {
    prop_oneof![Just(Form::Plain), Just(Form::Compressed), Just(Form::Encrypted)]
}

fn key() -> ImageKey {
    ImageKey::from_file_content(&[b'k'; 32]).unwrap()
}

/// RAM blocks, each of some runs of pages.
type Blocks = Vec<Vec<(Content, usize)>>;

fn any_blocks() -> impl Strategy<Value = Blocks> {
    let content = prop_oneof![
        1 => Just(Content::Hole),
        1 => Just(Content::Zero),
        3 => Just(Content::Data)
    ];
    // Runs of a few pages, and of whole chunks and more.
    let pages = prop_oneof![1_usize..40, 200_usize..600];
    let runs = prop::collection::vec((content, pages), 1..8).prop_map(|mut runs| {
        let mut pages = 0;
        runs.retain(|(_, run)| {
            pages += run;
            pages <= MOST_PAGES || pages == *run
        });
        runs
    });
    prop::collection::vec(runs, 1..4)
}

/// A guest of such blocks.
struct Guest {
    blocks: Vec<(String, Vec<u8>, File)>,
}

impl Guest {
    fn of(blocks: &Blocks) -> Self {
        let blocks = blocks.iter().enumerate().map(|(index, runs)| {
            let pages: usize = runs.iter().map(|(_, pages)| pages).sum();
            let mut ram = vec![0; pages * PAGE];
            let file = tempfile::tempfile_in("/dev/shm").unwrap();
            file.set_len(ram.len() as u64).unwrap();
            let mut at = 0;
            for (content, pages) in runs {
                let range = at..at + pages * PAGE;
                if *content == Content::Data {
                    noise(&mut ram[range.clone()], (index * 1000 + at + 1) as u64);
                }
                if *content != Content::Hole {
                    file.write_all_at(&ram[range.clone()], at as u64).unwrap();
                }
                at = range.end;
            }
            (format!("block-{index}"), ram, file)
        });
        Self {
            blocks: blocks.collect(),
        }
    }

    fn layout(&self) -> Layout {
        let sizes = self.blocks.iter().map(|(name, ram, _)| BlockSize {
            name: name.clone(),
            length: ByteCount(ram.len() as u64),
        });
        Layout::plan(&sizes.collect::<Vec<_>>()).unwrap()
    }

    fn recording(&self) -> Recording {
        let mut stream = Stream::beginning("pc");
        stream.capabilities(&["x-ignore-shared"]);
        let blocks: Vec<_> = self
            .blocks
            .iter()
            .map(|(name, ram, _)| (name.as_str(), ram.len() as u64, Some(0)))
            .collect();
        stream.ram_start(1, &blocks).section(0x03, 1).end_of_section(1);
        stream.tail(b"\x04devices");
        Recording::parse(&stream.bytes).unwrap()
    }

    fn write(&self, target: &Path, backend: Backend, form: Form) -> ImageWriter {
        let options = CreateOptions {
            replace: true,
            backend: Some(backend),
            compression: match form {
                Form::Compressed => Compression::Zstd(1),
                Form::Plain | Form::Encrypted => Compression::None,
            },
            key: (form == Form::Encrypted).then(key),
            ..CreateOptions::default()
        };
        let mut writer = ImageWriter::create(target, self.layout(), options).unwrap();
        writer.reserve(ByteCount::kib(64)).unwrap();
        for (name, ram, file) in &self.blocks {
            let length = ByteCount(ram.len() as u64);
            let memory = GuestMemory::map(file.try_clone().unwrap(), length).unwrap();
            let written = working(|run| writer.write_memory(name, &memory, run)).unwrap();
            assert_eq!(written.data + written.zero, length);
        }
        writer
    }

    fn check(&self, target: &Path, form: Form, zeros_are_zeros: bool) {
        let mut image = Image::open(target).unwrap();
        if image.is_encrypted() {
            image.unlock(&key()).unwrap();
        }
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        for (name, ram, _) in &self.blocks {
            let path = folder.path().join(name);
            let memory = MemoryFile::create(&path, ByteCount(ram.len() as u64)).unwrap();
            working(|run| image.fill(name, &memory, run)).unwrap();
            assert!(
                std::fs::read(&path).unwrap() == *ram,
                "{name} came back as another"
            );
            if image.check_mappable().is_ok() {
                let mut mapped = vec![0xff; ram.len()];
                let offset = image.layout().block(name).unwrap().offset;
                File::open(target)
                    .unwrap()
                    .read_exact_at(&mut mapped, offset)
                    .unwrap();
                assert!(mapped == *ram, "{name} is another in its place");
            }
        }
        if form == Form::Plain {
            assert_eq!(image.check_mappable().is_ok(), zeros_are_zeros);
        }
        working(|run| image.verify(run)).unwrap();
    }
}

/// Where images are put, and what keeps it there.
enum Place {
    Folder(TempDir),
    Disk(SmallDisk),
    Device(LoopDevice),
}

impl Place {
    fn target(&self) -> PathBuf {
        match self {
            Self::Folder(folder) => folder.path().join("image"),
            Self::Disk(disk) => disk.path().join("image"),
            Self::Device(device) => device.path().to_owned(),
        }
    }

    /// What is used there when this was asked for.
    fn backend(&self, asked: Backend) -> Backend {
        match self {
            // ramfs has no O_DIRECT.
            Self::Disk(_) => Backend::Buffered,
            _ => asked,
        }
    }

    fn kind(&self) -> VolumeKind {
        match self {
            Self::Device(_) => VolumeKind::BlockDevice,
            _ => VolumeKind::File,
        }
    }
}

fn random_guests_come_back_from(place: &Place) {
    let laboratory = Laboratory::new();
    let mut runner = TestRunner::new(Config {
        cases: 9,
        failure_persistence: None,
        ..Config::default()
    });
    let target = place.target();
    runner
        .run(&(any_blocks(), any_form()), |(blocks, form)| {
            let guest = Guest::of(&blocks);
            for backend in BACKENDS {
                let writer = guest.write(&target, backend, form);
                assert_eq!(
                    (writer.backend(), writer.kind()),
                    (place.backend(backend), place.kind())
                );
                let mut sealed = writer.seal(&laboratory.manifest(), &guest.recording()).unwrap();
                guest.check(&target, form, place.kind() == VolumeKind::File);
                assert!(working(|run| sealed.give_back(run)).unwrap());
                guest.check(&target, form, true);
                sealed.remove().unwrap();
                assert!(Image::open(&target).is_err());
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn random_guests_come_back_from_a_file_on_a_disk() {
    random_guests_come_back_from(&Place::Folder(tempfile::tempdir().unwrap()));
}

#[test]
fn random_guests_come_back_from_a_file_on_tmpfs() {
    random_guests_come_back_from(&Place::Folder(tempfile::tempdir_in("/dev/shm").unwrap()));
}

#[test]
fn random_guests_come_back_from_a_file_system_without_direct_io() {
    random_guests_come_back_from(&Place::Disk(SmallDisk::ramfs()));
}

#[test]
fn random_guests_come_back_from_a_device_with_small_sectors_and_old_data() {
    random_guests_come_back_from(&Place::Device(LoopDevice::with_old_data(ByteCount::mib(32), 512)));
}

#[test]
fn random_guests_come_back_from_a_device_with_large_sectors_and_old_data() {
    random_guests_come_back_from(&Place::Device(LoopDevice::with_old_data(
        ByteCount::mib(32),
        4096,
    )));
}
