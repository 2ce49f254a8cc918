//! Images in every form, raw, compressed and encrypted, on files and on block devices.
//!
//! These tests attach loop devices and need root, as the continuous integration has it. Without it they
//! fail.

mod fixture;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;

use dormouse_storage::{
    ByteCount, Compression, Corruption, CreateOptions, Image, ImageError, ImageKey, ImageWriter, PageContent,
    Unmappable,
};
use fixture::loop_device::LoopDevice;
use fixture::{Laboratory, MIB, read_all, working};

fn key(byte: u8) -> ImageKey {
    ImageKey::from_file_content(&[byte; 32]).expect("a key")
}

fn write(laboratory: &Laboratory, target: &Path, compression: Compression, key: Option<ImageKey>) {
    let options = CreateOptions {
        replace: true,
        compression,
        key,
        ..CreateOptions::default()
    };
    let mut sealed = ImageWriter::create(target, laboratory.layout(), options)
        .and_then(|writer| laboratory.write(writer))
        .and_then(|writer| writer.seal(&laboratory.manifest(), &laboratory.recording()))
        .expect("sealed");
    working(|run| sealed.give_back(run)).expect("given back");
}

/// The RAM of `block` by way of its pages.
fn pages_of(image: &Image, block: &str, except: &str) -> Vec<u8> {
    let recording = image.device_state().expect("device state");
    let index = recording.blocks().iter().position(|found| found.name == block);
    let mut bytes = Vec::new();
    for page in image.pages(&[except]).expect("pages") {
        let page = page.expect("page");
        if Some(page.block) == index {
            assert_eq!(page.offset, bytes.len() as u64);
            match page.content {
                PageContent::Zero => bytes.resize(bytes.len() + 4096, 0),
                PageContent::Data(data) => bytes.extend(&data[..]),
            }
        }
    }
    bytes
}

#[test]
fn a_guest_comes_back_from_every_form_on_files_and_devices_over_old_data() {
    for laboratory in [Laboratory::new(), Laboratory::compressible()] {
        let device = LoopDevice::with_old_data(ByteCount::mib(32), 512);
        for target in [laboratory.target(), device.path().to_owned()] {
            for compression in [
                Compression::None,
                Compression::Zstd(1),
                Compression::Zstd(-7),
                Compression::Auto,
            ] {
                for key in [None, Some(key(1))] {
                    if target == device.path() {
                        device.fill_with_old_data();
                    } else if target.exists() {
                        fs::remove_file(&target).unwrap();
                    }
                    write(&laboratory, &target, compression, key.clone());
                    let mut image = Image::open(&target).unwrap();
                    assert_eq!(image.is_encrypted(), key.is_some());
                    if let Some(key) = &key {
                        image.unlock(key).unwrap();
                    }
                    let told = format!("{compression} {key:?} on {}", target.display());
                    assert!(laboratory.filled(&image).unwrap() == laboratory.ram, "{told}");
                    assert!(pages_of(&image, "pc.ram", "none") == laboratory.ram, "{told}");
                    assert_eq!(
                        image.device_state().unwrap().normalized(),
                        laboratory.recording().normalized(),
                        "{told}"
                    );
                    let verified = working(|run| image.verify(run)).unwrap();
                    assert!(!verified.without_key);
                    if compression == Compression::None {
                        assert_eq!(image.check_mappable().is_ok(), key.is_none(), "{told}");
                    }
                }
            }
        }
    }
}

#[test]
fn any_page_can_be_read_alone_from_every_form() {
    let laboratory = Laboratory::compressible();
    for (compression, key) in [
        (Compression::None, None),
        (Compression::Zstd(1), None),
        (Compression::Zstd(1), Some(key(1))),
    ] {
        let _ = fs::remove_file(laboratory.target());
        write(&laboratory, &laboratory.target(), compression, key.clone());
        let mut image = Image::open(&laboratory.target()).unwrap();
        let mut page = [0; 4096];
        if let Some(key) = &key {
            let error = image.random().page(0, 0, &mut page).unwrap_err();
            assert!(matches!(error, ImageError::KeyNeeded { .. }), "{error}");
            image.unlock(key).unwrap();
        }
        let mut reader = image.random();
        let pages = laboratory.ram.len() / 4096;
        // There and back, with jumps between chunks.
        for index in (0..pages)
            .chain((0..pages).rev().step_by(77))
            .chain([3, 600, 4, 601])
        {
            reader.page(0, (index * 4096) as u64, &mut page).unwrap();
            assert!(
                page[..] == laboratory.ram[index * 4096..(index + 1) * 4096],
                "page {index}"
            );
        }
        for (block, offset) in [
            (0, laboratory.ram.len() as u64),
            (0, 1),
            (9, 0),
            (0, u64::MAX - 4095),
        ] {
            let error = reader.page(block, offset, &mut page).unwrap_err();
            assert!(matches!(error, ImageError::Mismatch { .. }), "{error}");
        }
    }
}

#[test]
fn compression_saves_space_on_a_file_and_cannot_be_mapped() {
    let laboratory = Laboratory::compressible();
    write(&laboratory, &laboratory.target(), Compression::None, None);
    let plain = Image::open(&laboratory.target()).unwrap().usage().unwrap();
    assert_eq!(plain.stored, plain.data);
    assert_eq!(plain.compressed, ByteCount::ZERO);
    fs::remove_file(laboratory.target()).unwrap();
    write(&laboratory, &laboratory.target(), Compression::Zstd(1), None);
    let image = Image::open(&laboratory.target()).unwrap();
    let usage = image.usage().unwrap();
    assert_eq!(image.check_mappable(), Err(Unmappable::Compressed));
    assert_eq!((usage.data, usage.zero), (plain.data, plain.zero));
    assert!(usage.compressed > ByteCount::mib(1), "{}", usage.compressed);
    assert!(
        usage.stored.0 < plain.stored.0 / 2,
        "{} of {}",
        usage.stored,
        plain.stored
    );
    assert!(
        usage.allocated.0 + MIB < plain.allocated.0,
        "{} of {}",
        usage.allocated,
        plain.allocated
    );
}

#[test]
fn a_wrong_key_and_no_key_are_told_apart_from_damage() {
    let laboratory = Laboratory::new();
    write(&laboratory, &laboratory.target(), Compression::Auto, Some(key(1)));
    let mut image = Image::open(&laboratory.target()).unwrap();
    assert!(matches!(image.device_state(), Err(ImageError::KeyNeeded { .. })));
    assert!(matches!(
        laboratory.filled(&image),
        Err(ImageError::KeyNeeded { .. })
    ));
    let error = image.unlock(&key(2)).unwrap_err();
    assert!(matches!(error, ImageError::WrongKey { .. }), "{error}");
    assert!(matches!(image.device_state(), Err(ImageError::KeyNeeded { .. })));
    // What is stored can be checked by anyone.
    assert!(working(|run| image.verify(run)).unwrap().without_key);
    image.unlock(&key(1)).unwrap();
    assert!(laboratory.filled(&image).unwrap() == laboratory.ram);
}

#[test]
fn an_image_that_is_not_encrypted_is_not_taken_for_one_that_is() {
    let laboratory = Laboratory::new();
    write(&laboratory, &laboratory.target(), Compression::None, None);
    let error = Image::open(&laboratory.target())
        .unwrap()
        .unlock(&key(1))
        .unwrap_err();
    assert!(matches!(error, ImageError::NotEncrypted { .. }), "{error}");
}

#[test]
fn nothing_of_the_guest_can_be_read_in_an_encrypted_image() {
    let laboratory = Laboratory::new();
    write(&laboratory, &laboratory.target(), Compression::None, Some(key(1)));
    let bytes = read_all(&laboratory.target());
    let contains = |secret: &[u8]| bytes.windows(secret.len()).any(|window| window == secret);
    assert!(!contains(&laboratory.ram[..32]));
    assert!(!contains(b"device state"));
    fs::remove_file(laboratory.target()).unwrap();
    write(&laboratory, &laboratory.target(), Compression::None, None);
    let bytes = read_all(&laboratory.target());
    let contains = |secret: &[u8]| bytes.windows(secret.len()).any(|window| window == secret);
    assert!(
        contains(&laboratory.ram[..32]) && contains(b"device state"),
        "and in another they can"
    );
}

/// Changes bytes of an image and makes the checksums right again that anyone can make.
fn forge(path: &Path, at_in_manifest: &[u8], replacement: &[u8]) {
    let mut bytes = read_all(path);
    let number =
        |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes")) as usize;
    let (offset, length) = (number(&bytes, 96), number(&bytes, 104));
    let manifest = &mut bytes[offset..offset + length];
    let at = manifest
        .windows(at_in_manifest.len())
        .position(|window| window == at_in_manifest)
        .expect("it is there");
    manifest[at..at + replacement.len()].copy_from_slice(replacement);
    let crc32 = crc32fast::hash(manifest);
    for copy in [0, 4096] {
        bytes[copy + 112..copy + 116].copy_from_slice(&crc32.to_le_bytes());
        let crc32 = crc32fast::hash(&bytes[copy..copy + 4092]);
        bytes[copy + 4092..copy + 4096].copy_from_slice(&crc32.to_le_bytes());
    }
    File::options()
        .write(true)
        .open(path)
        .expect("open")
        .write_all_at(&bytes, 0)
        .expect("write");
}

#[test]
fn a_forged_manifest_of_an_encrypted_image_is_not_authentic() {
    let laboratory = Laboratory::new();
    write(&laboratory, &laboratory.target(), Compression::None, Some(key(1)));
    forge(&laboratory.target(), b"\"web\"", b"\"wab\"");
    let mut image = Image::open(&laboratory.target()).unwrap();
    assert_eq!(image.manifest().vm_name, "wab");
    image.unlock(&key(1)).unwrap();
    let error = image.device_state().unwrap_err();
    assert!(
        matches!(
            error,
            ImageError::Corrupt {
                source: Corruption::DeviceStateNotAuthentic,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn a_rate_limit_holds_the_writing_back_and_a_cancel_is_heard() {
    use std::sync::atomic::{AtomicBool, Ordering};

    let laboratory = Laboratory::new();
    let options = CreateOptions {
        rate_limit: Some(ByteCount(1)),
        ..CreateOptions::default()
    };
    let mut writer = ImageWriter::create(&laboratory.target(), laboratory.layout(), options).unwrap();
    let progress = dormouse_storage::Progress::default();
    let cancelled = AtomicBool::new(false);
    let run = dormouse_storage::Run {
        threads: 2,
        progress: &progress,
        cancelled: &cancelled,
    };
    let error = std::thread::scope(|scope| {
        let written = scope.spawn(|| writer.write_memory("pc.ram", &laboratory.memory(), &run));
        // The first chunk goes through; the next would have to wait for days.
        while progress.done().0 < MIB {
            std::thread::yield_now();
        }
        cancelled.store(true, Ordering::Relaxed);
        written.join().unwrap().unwrap_err()
    });
    assert!(matches!(error, ImageError::Cancelled), "{error}");
}
