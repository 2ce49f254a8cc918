//! Every kind of damage is found, and told for what it is.

mod fixture;

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

use dormouse_storage::{Corruption, Image, ImageError, ImageState, TornBecause};
use fixture::{Laboratory, MIB, flip_bit, noise, read_all, working};

const COPY: usize = 4096;

fn put(path: &Path, offset: usize, bytes: &[u8]) {
    OpenOptions::new()
        .write(true)
        .open(path)
        .expect("open")
        .write_all_at(bytes, offset as u64)
        .expect("write");
}

/// Where an area lies, read from the superblock by its documented place.
fn area(path: &Path, at: usize) -> (u64, u64) {
    let bytes = read_all(path);
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    (number(at), number(at + 8))
}

#[test]
fn one_torn_superblock_is_survived_and_two_are_not_in_every_state() {
    for states in [
        &[][..],
        &[ImageState::Waking],
        &[ImageState::Waking, ImageState::Consumed],
    ] {
        let laboratory = Laboratory::new();
        drop(laboratory.sealed());
        let path = laboratory.target();
        let mut image = Image::open_locked(&path).unwrap();
        for state in states {
            image.mark(*state).unwrap();
        }
        let state = image.state();
        drop(image);
        let whole = read_all(&path);
        for torn in 0..4 {
            let mut damaged = whole.clone();
            for copy in (0..2).filter(|copy| torn & (1 << copy) != 0) {
                damaged[copy * COPY + 512..(copy + 1) * COPY].fill(0);
            }
            fs::write(&path, damaged).unwrap();
            match Image::open(&path) {
                // Both copies tell an acknowledged state: damage to either cannot bring the older
                // one back.
                Ok(image) if torn < 3 => assert_eq!(image.state(), state),
                Err(ImageError::Torn {
                    because: TornBecause::BothSuperblocks,
                    ..
                }) if torn == 3 => {}
                other => panic!("torn {torn:#b} in state {state}: {other:?}"),
            }
        }
    }
}

#[test]
fn a_crash_in_the_middle_of_a_state_change_leaves_the_old_or_the_new_state() {
    let laboratory = Laboratory::new();
    drop(laboratory.sealed());
    let path = laboratory.target();
    let before = read_all(&path);
    Image::open_locked(&path)
        .unwrap()
        .mark(ImageState::Waking)
        .unwrap();
    let after = read_all(&path);
    for first in 0..2 {
        let second = 1 - first;
        let copy = |image: &[u8], copy: usize| image[copy * COPY..(copy + 1) * COPY].to_vec();
        // The first copy half written: the change never happened.
        let mut torn = copy(&after, first);
        torn[2048..].copy_from_slice(&copy(&before, first)[2048..]);
        fs::write(&path, &before).unwrap();
        put(&path, first * COPY, &torn);
        assert_eq!(Image::open(&path).unwrap().state(), ImageState::Sealed);
        // The first copy written, the second not or half: it did.
        put(&path, first * COPY, &copy(&after, first));
        assert_eq!(Image::open(&path).unwrap().state(), ImageState::Waking);
        put(&path, second * COPY + 2048, &[0xff; 16]);
        assert_eq!(Image::open(&path).unwrap().state(), ImageState::Waking);
        // And from there the image goes on, healed by its next change.
        let mut image = Image::open_locked(&path).unwrap();
        image.mark(ImageState::Consumed).unwrap();
        drop(image);
        put(&path, first * COPY, &[0; COPY]);
        assert_eq!(Image::open(&path).unwrap().state(), ImageState::Consumed);
    }
}

#[test]
fn a_flipped_bit_in_any_area_is_found_and_its_place_told() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let path = laboratory.target();
    let ram = image.layout().block("pc.ram").unwrap().offset;
    let bios = image.layout().block("pc.bios").unwrap().offset;
    let table = area(&path, 48);
    let device_state = area(&path, 72);
    let manifest = area(&path, 96);

    let found = |offset: u64| -> Corruption {
        flip_bit(&path, offset);
        let result = Image::open(&path).and_then(|image| working(|run| image.verify(run)));
        flip_bit(&path, offset);
        match result {
            Err(ImageError::Corrupt { source, .. }) => source,
            other => panic!("bit at {offset:#x}: {other:?}"),
        }
    };
    let chunk = |offset: u64| match found(offset) {
        Corruption::Chunk {
            block,
            offset,
            expected,
            found,
        } if expected != found => (block, offset),
        other => panic!("{other}"),
    };
    assert_eq!(chunk(ram + 77), ("pc.ram".into(), 0));
    assert_eq!(chunk(ram + 2 * MIB), ("pc.ram".into(), 2 * MIB));
    assert_eq!(
        chunk(ram + laboratory.ram.len() as u64 - 1),
        ("pc.ram".into(), 5 * MIB)
    );
    assert_eq!(chunk(bios), ("pc.bios".into(), 0));
    // A chunk of zeros, be it a hole of the guest or zeros that were there.
    for zeros in [MIB, 3 * MIB, 5 * MIB - 1] {
        let expected = zeros / MIB * MIB;
        assert!(matches!(found(ram + zeros), Corruption::NotZero { offset, .. } if offset == expected));
    }
    for (name, (offset, length)) in [
        ("chunk table", table),
        ("device state", device_state),
        ("manifest", manifest),
    ] {
        for at in [offset, offset + length / 2, offset + length - 1] {
            assert!(
                matches!(found(at), Corruption::Area { area, .. } if area == name),
                "{name} at {at:#x}"
            );
        }
    }
    assert!(working(|run| image.verify(run)).is_ok(), "every bit was put back");
}

#[test]
fn the_first_of_several_bad_chunks_is_told() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let ram = image.layout().block("pc.ram").unwrap().offset;
    for offset in [5 * MIB, 2 * MIB, 4 * MIB] {
        flip_bit(&laboratory.target(), ram + offset);
    }
    let error = working(|run| image.verify(run)).unwrap_err();
    assert!(
        matches!(&error, ImageError::Corrupt { source: Corruption::Chunk { offset, .. }, .. } if *offset == 2 * MIB),
        "{error:?}"
    );
}

#[test]
fn a_bad_chunk_never_reaches_a_guest() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let layout = image.layout();
    flip_bit(
        &laboratory.target(),
        layout.block("pc.ram").unwrap().offset + 2 * MIB,
    );
    flip_bit(&laboratory.target(), layout.block("pc.bios").unwrap().offset);
    assert!(matches!(
        laboratory.filled(&image),
        Err(ImageError::Corrupt { .. })
    ));
    assert!(matches!(
        image
            .pages(&["pc.ram"])
            .and_then(|pages| pages.collect::<Result<Vec<_>, _>>()),
        Err(ImageError::Corrupt { .. })
    ));
    let mut pages = image.pages(&["pc.bios"]).unwrap();
    assert!(pages.any(|page| page.is_err()));
    assert!(pages.next().is_none(), "nothing follows an error");
}

#[test]
fn a_file_that_was_cut_is_torn_wherever_it_was_cut() {
    let laboratory = Laboratory::new();
    working(|run| laboratory.sealed().give_back(run)).unwrap();
    let path = laboratory.target();
    let whole = read_all(&path);
    for length in [
        whole.len() - 1,
        whole.len() - 4096,
        3 * MIB as usize,
        2 * COPY,
        COPY + 7,
        COPY,
    ] {
        fs::write(&path, &whole[..length]).unwrap();
        let error = Image::open(&path).unwrap_err();
        assert!(
            matches!(
                error,
                ImageError::Torn {
                    because: TornBecause::Short { .. },
                    ..
                }
            ),
            "{length}: {error:?}"
        );
    }
    fs::write(&path, &whole[..100]).unwrap();
    assert!(matches!(
        Image::open(&path),
        Err(ImageError::Torn {
            because: TornBecause::BothSuperblocks,
            ..
        })
    ));
    // More than there should be does no harm.
    let mut longer = whole.clone();
    longer.extend([0xff; 100]);
    fs::write(&path, longer).unwrap();
    assert!(Image::open(&path).is_ok());
}

#[test]
fn an_image_that_was_never_sealed_is_torn() {
    let laboratory = Laboratory::new();
    let writer = laboratory.written(false).unwrap();
    let partial = laboratory.folder.path().join(&laboratory.names()[0]);
    let error = Image::open(&partial).unwrap_err();
    assert!(
        matches!(
            error,
            ImageError::Torn {
                because: TornBecause::NeverSealed,
                ..
            }
        ),
        "{error}"
    );
    drop(writer);
}

#[test]
fn a_file_of_another_kind_is_not_an_image() {
    let laboratory = Laboratory::new();
    let path = laboratory.target();
    let mut noisy = vec![0; 100_000];
    noise(&mut noisy, 9);
    for content in [&b""[..], b"QEVM", &[0; 8192], &noisy] {
        fs::write(&path, content).unwrap();
        assert!(matches!(Image::open(&path), Err(ImageError::NotAnImage { .. })));
    }
    assert!(matches!(
        Image::open(laboratory.folder.path()),
        Err(ImageError::NotAnImage { .. })
    ));
    fs::remove_file(&path).unwrap();
    assert!(matches!(
        Image::open(&path),
        Err(ImageError::Io {
            operation: "open",
            ..
        })
    ));
}

#[test]
fn a_newer_format_is_told_with_both_versions() {
    let laboratory = Laboratory::new();
    drop(laboratory.sealed());
    let path = laboratory.target();
    let mut copy = read_all(&path)[..COPY].to_vec();
    copy[8..12].copy_from_slice(&3_u32.to_le_bytes());
    let crc32 = crc32fast::hash(&copy[..COPY - 4]);
    copy[COPY - 4..].copy_from_slice(&crc32.to_le_bytes());
    put(&path, 0, &copy);
    put(&path, COPY, &copy);
    let error = Image::open(&path).unwrap_err();
    assert!(matches!(
        error,
        ImageError::NewerFormat {
            found: 3,
            supported: 2,
            ..
        }
    ));
    assert_eq!(
        error.to_string(),
        format!("{} has format 3, this version reads up to 2", path.display())
    );
}

#[test]
fn a_superblock_with_a_right_checksum_and_impossible_areas_is_corrupt() {
    let laboratory = Laboratory::new();
    drop(laboratory.sealed());
    let path = laboratory.target();
    for (at, value) in [(48, 0_u64), (56, u64::MAX), (72, 4096), (104, 5 << 20)] {
        let mut copy = read_all(&path)[..COPY].to_vec();
        let good = copy.clone();
        copy[at..at + 8].copy_from_slice(&value.to_le_bytes());
        let crc32 = crc32fast::hash(&copy[..COPY - 4]);
        copy[COPY - 4..].copy_from_slice(&crc32.to_le_bytes());
        put(&path, 0, &copy);
        put(&path, COPY, &copy);
        let error = Image::open(&path).unwrap_err();
        assert!(
            matches!(
                error,
                ImageError::Corrupt {
                    source: Corruption::Superblock(_),
                    ..
                }
            ),
            "{at}: {error:?}"
        );
        put(&path, 0, &good);
        put(&path, COPY, &good);
    }
    assert!(Image::open(&path).is_ok());
    drop(File::open(&path));
}
