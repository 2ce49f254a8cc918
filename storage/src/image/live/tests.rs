//! A guest that writes to random pages in rounds, against what it wrote last.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::thread;

use proptest::prelude::*;

use super::super::key::ImageKey;
use super::super::manifest::Manifest;
use super::super::{CreateOptions, Image, ImageWriter, Layout};
use super::*;
use crate::image::Compression;
use crate::{BlockSize, MemoryFile, Run};

const PAGES: [u64; 3] = [300, 259, 5];

/// A page, and what is written to it: zeros, or a page of this byte and noise.
type PageWrite = (usize, u64, Option<u8>);

#[derive(Debug, Clone, Copy)]
enum Form {
    Plain,
    Compressed,
    Encrypted,
}

fn layout() -> Layout {
    let blocks = PAGES.iter().enumerate().map(|(index, pages)| BlockSize {
        name: format!("block-{index}"),
        length: ByteCount(pages * PAGE_BYTES as u64),
    });
    Layout::plan(&blocks.collect::<Vec<_>>()).unwrap()
}

fn content(byte: u8, page: u64) -> Vec<u8> {
    let mut state = (u64::from(byte) << 32) | page | 1;
    let mut bytes = vec![byte; PAGE_BYTES];
    // Half of it does not compress.
    for word in bytes[..PAGE_BYTES / 2].chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes());
    }
    bytes
}

/// As QEMU sends it without channels.
fn stream(writes: &[PageWrite]) -> Vec<u8> {
    let mut bytes = b"QEVM\0\0\0\x03\x07\0\0\0\x02pc\x01\0\0\0\x01\x03ram\0\0\0\0\0\0\0\x04".to_vec();
    let total: u64 = PAGES.iter().sum::<u64>() * PAGE_BYTES as u64;
    bytes.extend((total | 0x04).to_be_bytes());
    for (index, pages) in PAGES.iter().enumerate() {
        bytes.push(7);
        bytes.extend(format!("block-{index}").as_bytes());
        bytes.extend((pages * PAGE_BYTES as u64).to_be_bytes());
    }
    let end_of_section = |bytes: &mut Vec<u8>| {
        bytes.extend(0x10_u64.to_be_bytes());
        bytes.extend(b"\x7e\0\0\0\x01");
    };
    end_of_section(&mut bytes);
    for part in writes.chunks(100) {
        bytes.extend(b"\x02\0\0\0\x01");
        for (block, page, byte) in part {
            let flag = if byte.is_some() { 0x08 } else { 0x02 };
            bytes.extend(((page * PAGE_BYTES as u64) | flag).to_be_bytes());
            bytes.push(7);
            bytes.extend(format!("block-{block}").as_bytes());
            match byte {
                Some(byte) => bytes.extend(content(*byte, *page)),
                None => bytes.push(0),
            }
        }
        end_of_section(&mut bytes);
    }
    bytes.extend(b"\x03\0\0\0\x01");
    end_of_section(&mut bytes);
    bytes.extend(b"\x04devices\0\x06\0\0\0\x02{}");
    bytes
}

fn manifest() -> Manifest {
    let json = r#"{
        "created_unix_ms": 1, "dormouse_version": "0", "vm_name": "web", "machine": "pc",
        "qemu": {"version": "10.0.2"}, "ram_blocks": [], "engine": "stream", "guest": {"state_when_saved": "running"}
    }"#;
    serde_json::from_str(json).unwrap()
}

fn key() -> ImageKey {
    ImageKey::from_file_content(&[7; 32]).unwrap()
}

/// What the writes leave, by block.
fn last_of(writes: &[PageWrite]) -> Vec<Vec<u8>> {
    let mut blocks: Vec<Vec<u8>> = PAGES.map(|pages| vec![0; pages as usize * PAGE_BYTES]).to_vec();
    for (block, page, byte) in writes {
        let at = *page as usize * PAGE_BYTES;
        let bytes = byte.map_or_else(|| vec![0; PAGE_BYTES], |byte| content(byte, *page));
        blocks[*block][at..at + PAGE_BYTES].copy_from_slice(&bytes);
    }
    blocks
}

fn saved(
    folder: &std::path::Path,
    form: Form,
    limit: usize,
    writes: &[PageWrite],
) -> Result<Image, ImageError> {
    let target = folder.join("image");
    let options = CreateOptions {
        compression: match form {
            Form::Compressed => "zstd".parse::<Compression>().unwrap(),
            _ => Compression::None,
        },
        key: matches!(form, Form::Encrypted).then(key),
        ..CreateOptions::default()
    };
    let mut writer = ImageWriter::create(&target, layout(), options)?;
    writer.reserve(ByteCount::mib(1))?;
    let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    let bytes = stream(writes);
    let sender = thread::spawn(move || theirs.write_all(&bytes));
    let progress = Progress::default();
    let run = Run {
        threads: 1,
        progress: &progress,
        cancelled: &false.into(),
    };
    let recording = writer.write_live_with_limit(ours, ByteCount::mib(1), &run, limit);
    sender.join().unwrap().unwrap();
    let complete = writer.complete(&manifest(), &recording?)?;
    let written = complete.written();
    assert_eq!(written.data + written.zero, layout().ram());
    drop(complete.seal()?);
    let mut image = Image::open(&target)?;
    if matches!(form, Form::Encrypted) {
        image.unlock(&key())?;
    }
    Ok(image)
}

fn check(form: Form, limit: usize, writes: &[PageWrite]) {
    let folder = tempfile::tempdir().unwrap();
    let image = saved(folder.path(), form, limit, writes).unwrap();
    let raw = File::open(image.path()).unwrap();
    for (block, expected) in layout().blocks().iter().zip(last_of(writes)) {
        let path = folder.path().join(&block.name);
        let memory = MemoryFile::create(&path, block.length).unwrap();
        let progress = Progress::default();
        let run = Run {
            threads: 1,
            progress: &progress,
            cancelled: &false.into(),
        };
        image.fill(&block.name, &memory, &run).unwrap();
        let found = fs::read(&path).unwrap();
        assert!(found == expected, "{} is not what came last", block.name);
        // As a mapping finds it, zeros too.
        if image.check_mappable().is_ok() {
            let mut mapped = vec![1; expected.len()];
            raw.read_exact_at(&mut mapped, block.offset).unwrap();
            assert!(mapped == expected, "{} lies there as something else", block.name);
        }
    }
}

/// Every page once, in order, and then some again.
fn rounds() -> impl Strategy<Value = Vec<PageWrite>> {
    let content = || prop_oneof![2 => any::<u8>().prop_map(Some), 1 => Just(None)];
    let total = PAGES.iter().sum::<u64>() as usize;
    let first = prop::collection::vec(content(), total);
    let again = (0..PAGES.len(), any::<prop::sample::Index>(), content());
    // Whole chunks too become zero.
    let emptied = prop::option::of(Just((1_usize, 0..256_u64)));
    (first, prop::collection::vec(again, 0..200), emptied).prop_map(|(first, again, emptied)| {
        let places = PAGES.iter().enumerate();
        let places = places.flat_map(|(block, pages)| (0..*pages).map(move |page| (block, page)));
        let mut writes: Vec<PageWrite> = places
            .zip(first)
            .map(|((block, page), byte)| (block, page, byte))
            .collect();
        writes.extend(again.into_iter().map(|(block, page, byte)| {
            let page = page.index(PAGES[block] as usize) as u64;
            (block, page, byte)
        }));
        if let Some((block, pages)) = emptied {
            writes.extend(pages.map(|page| (block, page, None)));
        }
        writes
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn memory_is_what_was_written_last_whatever_was_kept_and_however_it_is_stored(
        writes in rounds(),
        form in prop_oneof![Just(Form::Plain), Just(Form::Compressed), Just(Form::Encrypted)],
        limit in prop_oneof![Just(16_usize), Just(100), Just(100_000)],
    ) {
        check(form, limit, &writes);
    }
}

#[test]
fn a_page_that_never_came_fails_the_save() {
    let all: Vec<PageWrite> = (0..PAGES.len())
        .flat_map(|block| (0..PAGES[block]).map(move |page| (block, page, Some(3))))
        .collect();
    for missing in [0, 299, 300, all.len() - 1] {
        let mut writes = all.clone();
        let (block, ..) = writes.remove(missing);
        let folder = tempfile::tempdir().unwrap();
        match saved(folder.path(), Form::Plain, 10, &writes) {
            Err(ImageError::Mismatch {
                block: named,
                mismatch: Mismatch::PagesMissing { .. },
            }) => assert_eq!(named, format!("block-{block}")),
            other => panic!("{other:?}"),
        }
        assert!(!folder.path().join("image").exists());
    }
}

#[test]
fn pages_may_come_for_the_first_time_in_any_order() {
    let mut writes: Vec<PageWrite> = (0..PAGES.len())
        .flat_map(|block| (0..PAGES[block]).map(move |page| (block, page, Some(page as u8))))
        .collect();
    writes.reverse();
    writes.rotate_left(77);
    check(Form::Plain, 20, &writes);
}
