//! A guest that is fed from an image, with this test as the QEMU that loads it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod fixture;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use dormouse_storage::feed::{Fed, FeedError, Told};
use dormouse_storage::{ByteCount, Compression, CreateOptions, Feeder, Image, ImageKey, ImageWriter};
use fixture::{Laboratory, MIB, PAGE, SMALL_BLOCKS, flip_bit};

/// What a loading QEMU reads.
#[derive(Debug, PartialEq)]
enum Piece {
    Command(u16, Vec<u8>),
    Blocks(Vec<String>),
    Page(String, u64, Vec<u8>),
    End,
}

/// The loading side of a feed.
struct Loader {
    stream: BufReader<UnixStream>,
    /// The block of the record before.
    current: String,
    in_section: bool,
    /// Blocks in larger pages.
    larger_pages: &'static [&'static str],
}

type Feeding = JoinHandle<Result<Fed, FeedError>>;

impl Loader {
    fn of(stream: UnixStream) -> Self {
        Self {
            stream: BufReader::new(stream),
            current: String::new(),
            in_section: false,
            larger_pages: &[],
        }
    }

    /// Begins a feed of the image with these pages for each block, and reads up to the package.
    fn begin(image: &Image, late: &[&str], page_bytes: fn(&str) -> u64) -> (Self, Feeding, Arc<Told>) {
        let feeder = feeder(image, late, None);
        let told = feeder.told();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let feeding = std::thread::spawn(move || feeder.feed(theirs, move |name| Some(page_bytes(name))));
        let mut loader = Self::of(ours);
        assert_eq!(loader.take(8), b"QEVM\0\0\0\x03");
        (loader, feeding, told)
    }

    fn take(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).unwrap();
        bytes
    }

    fn number(&mut self, bytes: usize) -> u64 {
        self.take(bytes)
            .iter()
            .fold(0, |number, byte| number << 8 | u64::from(*byte))
    }

    fn name(&mut self) -> String {
        let length = self.number(1) as usize;
        String::from_utf8(self.take(length)).unwrap()
    }

    fn next(&mut self) -> Piece {
        loop {
            if self.in_section {
                match self.record() {
                    Some(page) => return page,
                    None => self.in_section = false,
                }
                if self.stream.fill_buf().unwrap().first() == Some(&0x7e) {
                    self.take(5);
                }
            }
            match self.number(1) {
                0x00 => return Piece::End,
                0x01 => {
                    self.take(4);
                    assert_eq!(self.name(), "ram");
                    self.take(8);
                    let mut left = self.number(8) & !0xfff;
                    let mut names = Vec::new();
                    while left > 0 {
                        let name = self.name();
                        left -= self.number(8);
                        // In larger pages than QEMU's own it says so.
                        if self.larger_pages.contains(&&name[..]) {
                            self.take(8);
                        }
                        names.push(name);
                    }
                    self.in_section = true;
                    return Piece::Blocks(names);
                }
                0x02 | 0x03 => {
                    self.take(4);
                    self.in_section = true;
                }
                0x07 => {
                    let length = self.number(4) as usize;
                    self.take(length);
                }
                0x08 => {
                    let number = self.number(2) as u16;
                    let length = self.number(2) as usize;
                    let payload = self.take(length);
                    if number == 7 {
                        let length = u32::from_be_bytes(payload.try_into().unwrap());
                        return Piece::Command(number, self.take(length as usize));
                    }
                    return Piece::Command(number, payload);
                }
                other => panic!("a piece of kind {other:#x}"),
            }
        }
    }

    fn record(&mut self) -> Option<Piece> {
        let word = self.number(8);
        let (offset, flags) = (word & !0xfff, word & 0xfff);
        if flags == 0x10 {
            return None;
        }
        if flags & 0x20 == 0 {
            self.current = self.name();
        }
        let content = match flags & !0x20 {
            0x02 => {
                assert_eq!(self.number(1), 0);
                vec![0; PAGE]
            }
            0x08 => self.take(PAGE),
            other => panic!("a record with flags {other:#x}"),
        };
        Some(Piece::Page(self.current.clone(), offset, content))
    }

    fn say(&mut self, kind: u16, payload: &[u8]) {
        let message = [
            &kind.to_be_bytes()[..],
            &(payload.len() as u16).to_be_bytes(),
            payload,
        ];
        self.stream.get_mut().write_all(&message.concat()).unwrap();
    }

    /// Tells that it has nothing of a block.
    fn has_nothing_of(&mut self, name: &[u8]) {
        let bitmap = vec![0; 1283_usize.div_ceil(64) * 8];
        self.say(5, &[&[name.len() as u8], name].concat());
        let bytes = (bitmap.len() as u64).to_be_bytes();
        let end = 0x0123_4567_89ab_cdef_u64.to_be_bytes();
        let bitmap = [&bytes[..], &bitmap, &end].concat();
        self.stream.get_mut().write_all(&bitmap).unwrap();
    }

    fn ask(&mut self, block: &str, offset: u64, length: u32) {
        let range = [&offset.to_be_bytes()[..], &length.to_be_bytes()];
        let name = [&[block.len() as u8], block.as_bytes()].concat();
        self.say(3, &[range.concat(), name].concat());
    }

    /// Reads pages into `memory` until the last one; none may come twice.
    fn read_to_end(&mut self, memory: &mut Memory) {
        loop {
            match self.next() {
                Piece::Page(block, offset, content) => memory.put(&block, offset, content),
                Piece::End => return,
                other => panic!("{other:?}"),
            }
        }
    }

    /// Reads up to the package, and the pages before it.
    fn read_head(&mut self) -> (Memory, Vec<u16>) {
        let (mut memory, mut order) = (Memory::default(), Vec::new());
        loop {
            match self.next() {
                Piece::Command(7, package) => {
                    assert_eq!(package[..5], [8, 0, 4, 0, 0], "listen comes first");
                    assert_eq!(package[package.len() - 5..], [8, 0, 5, 0, 0], "run comes last");
                    order.push(7);
                    return (memory, order);
                }
                Piece::Command(number, _) => order.push(number),
                Piece::Page(block, offset, content) => memory.put(&block, offset, content),
                Piece::Blocks(_) => order.push(0),
                Piece::End => panic!("the end before the package"),
            }
        }
    }
}

/// What came.
#[derive(Default)]
struct Memory {
    pages: BTreeMap<(String, u64), Vec<u8>>,
    order: Vec<(String, u64)>,
}

impl Memory {
    fn put(&mut self, block: &str, offset: u64, content: Vec<u8>) {
        let place = (block.to_owned(), offset);
        self.order.push(place.clone());
        let twice = self.pages.insert(place, content);
        assert!(twice.is_none(), "{block} at {offset:#x} came twice");
    }

    fn ram(&self) -> Vec<u8> {
        let ram = self.pages.iter().filter(|((block, _), _)| block == "pc.ram");
        ram.flat_map(|(_, content)| content.clone()).collect()
    }
}

fn feeder(image: &Image, late: &[&str], rate_limit: Option<ByteCount>) -> Feeder {
    let late = late.iter().map(|name| (*name).to_owned()).collect();
    Feeder::new(image.reader().unwrap(), late, rate_limit).unwrap()
}

fn small_pages(_: &str) -> u64 {
    PAGE as u64
}

fn until(what: &str, so: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !so() {
        assert!(Instant::now() < deadline, "waited for {what}");
        std::thread::yield_now();
    }
}

#[test]
fn pages_that_are_asked_for_come_first_and_all_come_once_from_every_form() {
    let laboratory = Laboratory::compressible();
    let key = ImageKey::from_file_content(&[7; 32]).unwrap();
    for (compression, key) in [
        (Compression::None, None),
        ("zstd".parse().unwrap(), None),
        ("zstd".parse().unwrap(), Some(key.clone())),
        (Compression::None, Some(key)),
    ] {
        // The one before.
        let _ = std::fs::remove_file(laboratory.target());
        let options = CreateOptions {
            compression,
            key: key.clone(),
            ..CreateOptions::default()
        };
        let writer = ImageWriter::create(&laboratory.target(), laboratory.layout(), options).unwrap();
        let writer = laboratory.write(writer).unwrap();
        drop(
            writer
                .seal(&laboratory.manifest(), &laboratory.recording())
                .unwrap(),
        );
        let mut image = Image::open(&laboratory.target()).unwrap();
        if let Some(key) = &key {
            image.unlock(key).unwrap();
        }
        let (mut loader, feeding, told) = Loader::begin(&image, &["pc.ram"], small_pages);
        let (mut memory, order) = loader.read_head();
        // A way back, advice, the blocks, a discard, the package.
        assert_eq!(order, [1, 3, 0, 6, 7]);
        let early: BTreeSet<_> = memory.pages.keys().map(|(block, _)| block.as_str()).collect();
        assert_eq!(early, SMALL_BLOCKS.map(|(name, _)| name).into());

        // Nothing comes that is not asked for before the guest runs.
        for page in [700, 3, 1282, 701] {
            let offset = page * PAGE as u64;
            let seen = memory.order.len();
            if !memory.pages.contains_key(&("pc.ram".to_owned(), offset)) {
                loader.ask("pc.ram", offset, PAGE as u32);
                let Piece::Page(block, found, content) = loader.next() else {
                    panic!("no page")
                };
                assert_eq!((block.as_str(), found), ("pc.ram", offset));
                memory.put(&block, found, content);
                // Its neighbours are in the same breath.
                let neighbours = 32.min(1283 - page / 32 * 32) - 1;
                for _ in 0..neighbours {
                    let Piece::Page(block, found, content) = loader.next() else {
                        panic!("no page")
                    };
                    memory.put(&block, found, content);
                }
            } else {
                assert_eq!(memory.order.len(), seen);
            }
        }
        assert!(!told.is_loaded());
        loader.say(2, &1_u32.to_be_bytes());
        until("the pong to be heard", || told.is_loaded());
        told.release();
        loader.read_to_end(&mut memory);
        loader.say(1, &0_u32.to_be_bytes());
        let fed = feeding.join().unwrap().unwrap();
        assert!(memory.ram() == laboratory.ram, "it is another memory");
        assert_eq!(fed.numbers.fed, fed.numbers.total);
        assert_eq!(fed.numbers.answers, 3);
        assert!(fed.numbers.nearly_all_within >= fed.numbers.half_within);
    }
}

#[test]
fn a_bad_chunk_is_told_and_not_fed_and_all_else_is() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let ram = image.layout().block("pc.ram").unwrap().offset;
    flip_bit(&laboratory.target(), ram + 2 * MIB + 5 * PAGE as u64 + 9);
    let (mut loader, feeding, told) = Loader::begin(&image, &["pc.ram"], small_pages);
    let (mut memory, _) = loader.read_head();
    told.release();
    loader.ask("pc.ram", 2 * MIB, PAGE as u32);
    let small: usize = SMALL_BLOCKS.iter().map(|(_, pages)| pages).sum();
    while memory.pages.len() < small + 1283 - 256 {
        match loader.next() {
            Piece::Page(block, offset, content) => memory.put(&block, offset, content),
            other => panic!("{other:?}"),
        }
    }
    until("the damage to be told", || !told.damage().is_empty());
    let damage = told.damage();
    assert_eq!(damage.len(), 1, "{damage:?}");
    assert_eq!(
        (damage[0].block.as_str(), damage[0].offset, damage[0].length),
        ("pc.ram", 2 * MIB, ByteCount::mib(1))
    );
    assert!(!memory.pages.contains_key(&("pc.ram".to_owned(), 2 * MIB)));
    assert!(!feeding.is_finished(), "the connection stays");
    drop(loader);
    let error = feeding.join().unwrap().unwrap_err();
    assert!(
        matches!(&error, FeedError::Damaged { missing, .. } if *missing == ByteCount::mib(1)),
        "{error:?}"
    );
}

/// Whoever goes on feeding learns that the rest will not come; QEMU waits for another.
#[test]
fn a_feed_that_goes_on_ends_when_only_a_bad_chunk_is_left() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let ram = image.layout().block("pc.ram").unwrap().offset;
    flip_bit(&laboratory.target(), ram + 2 * MIB + 5 * PAGE as u64 + 9);
    let feeder = feeder(&image, &["pc.ram"], None);
    let (ours, theirs) = UnixStream::pair().unwrap();
    let feeding = std::thread::spawn(move || feeder.go_on(theirs, |_| Some(PAGE as u64)));
    let mut loader = Loader::of(ours);
    loop {
        match loader.next() {
            Piece::Command(10, name) => loader.has_nothing_of(&name[1..]),
            Piece::Command(9, _) => break,
            other => panic!("{other:?}"),
        }
    }
    let mut memory = Memory::default();
    let small: usize = SMALL_BLOCKS.iter().map(|(_, pages)| pages).sum();
    while memory.pages.len() < small + 1283 - 256 {
        match loader.next() {
            Piece::Page(block, offset, content) => memory.put(&block, offset, content),
            other => panic!("{other:?}"),
        }
    }
    let error = feeding.join().unwrap().unwrap_err();
    assert!(
        matches!(&error, FeedError::Damaged { missing, .. } if *missing == ByteCount::mib(1)),
        "{error:?}"
    );
}

/// Storage gives nothing behind the first chunk of RAM, until what this returns is called.
fn lose_all_but_the_first_chunk(laboratory: &Laboratory, image: &Image) -> impl FnOnce() + use<> {
    let ram = image.layout().block("pc.ram").unwrap().offset;
    let whole = std::fs::read(laboratory.target()).unwrap();
    let file = std::fs::File::options()
        .write(true)
        .open(laboratory.target())
        .unwrap();
    file.set_len(ram + MIB).unwrap();
    move || std::os::unix::fs::FileExt::write_all_at(&file, &whole, 0).unwrap()
}

/// Storage loses the end of the image for a while: what cannot be read then is asked for again until it can.
#[test]
fn what_storage_does_not_give_is_asked_for_until_it_does() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let (mut loader, feeding, told) = Loader::begin(&image, &["pc.ram"], small_pages);
    let (mut memory, _) = loader.read_head();
    let give_back = lose_all_but_the_first_chunk(&laboratory, &image);
    // Somebody waits for a page of it, and the rest has its turn.
    loader.ask("pc.ram", 2 * MIB, PAGE as u32);
    until("the storage to fail", || !told.damage().is_empty());
    told.release();
    let small: usize = SMALL_BLOCKS.iter().map(|(_, pages)| pages).sum();
    let chunks = || laboratory.ram.chunks(MIB as usize).enumerate();
    let is_lost = |(nth, chunk): &(usize, &[u8])| *nth > 0 && chunk.iter().any(|byte| *byte != 0);
    let comes: usize = chunks()
        .filter(|chunk| !is_lost(chunk))
        .map(|(_, chunk)| chunk.len() / PAGE)
        .sum();
    while memory.pages.len() < small + comes {
        match loader.next() {
            Piece::Page(block, offset, content) => memory.put(&block, offset, content),
            other => panic!("{other:?}"),
        }
    }
    until("all else to fail", || {
        told.damage().len() == chunks().filter(is_lost).count()
    });
    assert!(
        told.damage().iter().all(|damage| damage.may_come),
        "{:?}",
        told.damage()
    );
    assert!(!feeding.is_finished());
    give_back();
    loader.read_to_end(&mut memory);
    assert!(told.damage().is_empty(), "{:?}", told.damage());
    loader.say(1, &0_u32.to_be_bytes());
    feeding.join().unwrap().unwrap();
    assert!(memory.ram() == laboratory.ram);
}

/// Somebody else's request brought the chunk in the meantime.
#[test]
fn what_came_by_another_request_is_not_told_as_missing_any_more() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let (mut loader, feeding, told) = Loader::begin(&image, &["pc.ram"], small_pages);
    let (mut memory, _) = loader.read_head();
    let give_back = lose_all_but_the_first_chunk(&laboratory, &image);
    loader.ask("pc.ram", 2 * MIB, PAGE as u32);
    until("the storage to fail", || !told.damage().is_empty());
    give_back();
    loader.ask("pc.ram", 2 * MIB + PAGE as u64, PAGE as u32);
    // Its neighbour, which was asked for first, comes in the same breath.
    let neighbour = ("pc.ram".to_owned(), 2 * MIB);
    while !memory.pages.contains_key(&neighbour) {
        match loader.next() {
            Piece::Page(block, offset, content) => memory.put(&block, offset, content),
            other => panic!("{other:?}"),
        }
    }
    told.release();
    loader.read_to_end(&mut memory);
    until("the damage to be mended", || told.damage().is_empty());
    loader.say(1, &0_u32.to_be_bytes());
    feeding.join().unwrap().unwrap();
    assert!(memory.ram() == laboratory.ram);
}

#[test]
fn after_an_interruption_only_what_qemu_has_not_comes() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    for missing in [
        vec![],
        vec![0],
        vec![1282],
        vec![5, 6, 700, 1280],
        (0..1283).collect(),
    ] {
        let feeder = feeder(&image, &["pc.ram"], None);
        let told = feeder.told();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let feeding = std::thread::spawn(move || feeder.go_on(theirs, |_| Some(PAGE as u64)));
        let mut loader = Loader::of(ours);
        let mut asked = Vec::new();
        loop {
            match loader.next() {
                Piece::Command(10, name) => {
                    let name = String::from_utf8(name[1..].to_vec()).unwrap();
                    let mut bitmap = vec![0xff; 1283_usize.div_ceil(64) * 8];
                    for page in missing.iter().filter(|_| name == "pc.ram") {
                        bitmap[page / 8] &= !(1 << (page % 8));
                    }
                    // Something that was under way.
                    loader.say(2, &1_u32.to_be_bytes());
                    loader.say(5, &[&[name.len() as u8], name.as_bytes()].concat());
                    let bytes = (bitmap.len() as u64).to_be_bytes();
                    let end = 0x0123_4567_89ab_cdef_u64.to_be_bytes();
                    let bitmap = [&bytes[..], &bitmap, &end].concat();
                    loader.stream.get_mut().write_all(&bitmap).unwrap();
                    asked.push(name);
                }
                Piece::Command(9, _) => break,
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(asked, ["pc.ram", "pc.bios", "/rom@etc/acpi/tables"]);
        loader.say(6, &1_u32.to_be_bytes());
        if let Some(page) = missing.last() {
            loader.ask("pc.ram", (page * PAGE) as u64, PAGE as u32);
        }
        let mut memory = Memory::default();
        loader.read_to_end(&mut memory);
        loader.say(1, &0_u32.to_be_bytes());
        feeding.join().unwrap().unwrap();
        let came: Vec<usize> = memory
            .pages
            .keys()
            .map(|(_, offset)| *offset as usize / PAGE)
            .collect();
        assert_eq!(came, missing);
        for ((_, offset), content) in memory.pages {
            assert!(content == laboratory.ram[offset as usize..][..PAGE]);
        }
        assert_eq!(told.numbers().fed, told.numbers().total);
    }
}

#[test]
fn memory_in_larger_pages_goes_in_whole_ones() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let page_bytes = |name: &str| if name == "pc.bios" { 16 << 12 } else { 1 << 12 };
    let (mut loader, feeding, told) = Loader::begin(&image, &["pc.ram", "pc.bios"], page_bytes);
    loader.larger_pages = &["pc.bios"];
    let (mut memory, _) = loader.read_head();
    loader.ask("pc.bios", 37 << 12, 1 << 12);
    told.release();
    loader.read_to_end(&mut memory);
    loader.say(1, &0_u32.to_be_bytes());
    feeding.join().unwrap().unwrap();
    let bios = memory
        .order
        .iter()
        .enumerate()
        .filter(|(_, (block, _))| block == "pc.bios");
    let bios: Vec<_> = bios
        .map(|(at, (_, offset))| (at, *offset as usize >> 12))
        .collect();
    assert_eq!(bios.len(), 64);
    for whole in bios.chunks(16) {
        let (at, first) = whole[0];
        assert_eq!(first % 16, 0);
        let in_order: Vec<_> = (0..16).map(|index| (at + index, first + index)).collect();
        assert_eq!(whole, in_order, "nothing comes between");
    }
    // Pages that do not fit the block are no pages of it.
    let feeder = feeder(&image, &["pc.ram"], None);
    let (_ours, theirs) = UnixStream::pair().unwrap();
    let error = feeder.feed(theirs, |_| Some(2 << 20)).unwrap_err();
    assert!(
        matches!(&error, FeedError::Mismatch(why) if why.contains("pc.ram")),
        "{error}"
    );
}

#[test]
fn a_qemu_that_ends_or_says_that_it_failed_is_told() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let (mut loader, feeding, _) = Loader::begin(&image, &["pc.ram"], small_pages);
    loader.read_head();
    drop(loader);
    let error = feeding.join().unwrap().unwrap_err();
    assert!(
        matches!(&error, FeedError::Lost { missing, .. } if *missing == laboratory.ram_length()),
        "{error:?}"
    );
    let (mut loader, feeding, _) = Loader::begin(&image, &["pc.ram"], small_pages);
    loader.read_head();
    loader.say(1, &1_u32.to_be_bytes());
    assert!(matches!(feeding.join().unwrap(), Err(FeedError::Refused)));
}
