//! The codec of QEMU's migration stream, against streams that were laid out by hand.

mod fixture;

use dormouse_storage::migration::PAGE_BYTES;
use dormouse_storage::{ByteCount, Page, PageContent, Recording, StreamError, write_precopy};
use fixture::{Stream, noise, small_page};
use proptest::prelude::*;

/// As QEMU 7.2 sends it with x-ignore-shared: RAM section 2, an address per block.
fn like_7_2() -> Stream {
    let mut stream = Stream::beginning("pc-i440fx-7.2");
    stream
        .capabilities(&["x-ignore-shared"])
        .ram_start(
            2,
            &[
                ("pc.ram", 128 << 20, Some(0)),
                ("pc.bios", 0x2000, Some(0xfffc_0000)),
                ("pc.rom", 0x1000, Some(0xc0000)),
            ],
        )
        .section(0x02, 2)
        .page((false, "pc.bios"), 0, Some(&small_page("pc.bios", 0)))
        .page((true, "pc.bios"), 0x1000, None)
        .page((false, "pc.rom"), 0, Some(&small_page("pc.rom", 0)))
        .end_of_section(2)
        .section(0x03, 2)
        .end_of_section(2)
        .tail(b"\x04\0\0\0\0\x05timer\0\0\0\0\0\0\0\x02 the rest \0\x06\0\0\0\0");
    stream
}

/// As QEMU 10.0 sends it: RAM section 1, a switchover command before the end, a UUID and page bits
/// in the configuration.
fn like_10() -> Stream {
    let mut stream = Stream::beginning("virt-10.0");
    stream
        .subsection("configuration/target-page-bits", &12_u32.to_be_bytes())
        .capabilities(&["x-ignore-shared"])
        .subsection("configuration/uuid", &[7; 16])
        .ram_start(
            1,
            &[
                ("mach-virt.ram", 1 << 30, Some(0x4000_0000)),
                ("virt.flash0", 0x1000, Some(0)),
            ],
        )
        .section(0x02, 1)
        .page((false, "virt.flash0"), 0, None);
    stream.bytes.extend(0x200_u64.to_be_bytes());
    stream.end_of_section(1).command(11, &[]).section(0x03, 1).page(
        (false, "virt.flash0"),
        0,
        Some(&small_page("f", 0)),
    );
    stream.end_of_section(1).tail(b"\x04devices");
    stream
}

/// The 7.2 stream in its normalized form, byte by byte.
const NORMALIZED_7_2: &[u8] = b"QEVM\0\0\0\x03\
    \x07\0\0\0\x0dpc-i440fx-7.2\
    \x01\0\0\0\x02\x03ram\0\0\0\0\0\0\0\x04\
    \0\0\0\0\x08\0\x30\x04\
    \x06pc.ram\0\0\0\0\x08\0\0\0\
    \x07pc.bios\0\0\0\0\0\0\x20\0\
    \x06pc.rom\0\0\0\0\0\0\x10\0\
    \0\0\0\0\0\0\0\x10\x7e\0\0\0\x02\
    \x03\0\0\0\x02\0\0\0\0\0\0\0\x10\x7e\0\0\0\x02\
    \x04\0\0\0\0\x05timer\0\0\0\0\0\0\0\x02 the rest \0\x06\0\0\0\0\
    \0\x06\0\0\0\x0f{\"devices\": []}";

#[test]
fn a_7_2_recording_is_taken_apart_and_normalized_to_the_byte() {
    let recording = Recording::parse(&like_7_2().bytes).unwrap();
    assert_eq!(recording.machine(), "pc-i440fx-7.2");
    assert_eq!(recording.ram_section_number(), 2);
    let blocks: Vec<_> = recording
        .blocks()
        .iter()
        .map(|block| (block.name.as_str(), block.used_length, block.address))
        .collect();
    assert_eq!(
        blocks,
        [
            ("pc.ram", ByteCount::mib(128), Some(0)),
            ("pc.bios", ByteCount::kib(8), Some(0xfffc_0000)),
            ("pc.rom", ByteCount::kib(4), Some(0xc0000)),
        ]
    );
    let pages: Vec<_> = recording.pages().collect();
    assert_eq!(
        pages
            .iter()
            .map(|page| (page.block, page.offset))
            .collect::<Vec<_>>(),
        [(1, 0), (1, 0x1000), (2, 0)]
    );
    assert_eq!(pages[1].content, PageContent::Zero);
    let PageContent::Data(bytes) = &pages[2].content else {
        panic!()
    };
    assert!(bytes[..] == small_page("pc.rom", 0)[..]);
    assert_eq!(
        recording.device_sections(),
        b"\x04\0\0\0\0\x05timer\0\0\0\0\0\0\0\x02 the rest \0\x06\0\0\0\0"
    );
    assert_eq!(recording.normalized(), NORMALIZED_7_2);
}

#[test]
fn a_10_0_recording_keeps_what_the_loading_side_must_hear_and_takes_the_last_of_two_pages() {
    let recording = Recording::parse(&like_10().bytes).unwrap();
    assert_eq!(
        (recording.machine(), recording.ram_section_number()),
        ("virt-10.0", 1)
    );
    let pages: Vec<_> = recording.pages().collect();
    assert_eq!(pages.len(), 1);
    let PageContent::Data(bytes) = &pages[0].content else {
        panic!()
    };
    assert!(bytes[..] == small_page("f", 0)[..]);
    let normalized = recording.normalized();
    let holds = |part: &[u8]| normalized.windows(part.len()).any(|window| window == part);
    assert!(holds(b"configuration/target-page-bits") && holds(b"configuration/uuid"));
    assert!(!holds(b"capabilities"));
    assert!(
        holds(&[0x08, 0, 11, 0, 0, 0x03, 0, 0, 0, 1]),
        "the switchover command stands before the end of RAM"
    );
}

#[test]
fn the_normalized_form_is_its_own_normalized_form() {
    for stream in [like_7_2(), like_10()] {
        let normalized = Recording::parse(&stream.bytes).unwrap().normalized();
        let again = Recording::parse(&normalized).unwrap();
        assert_eq!(again.normalized(), normalized);
        assert_eq!(again.pages().count(), 0);
        assert!(again.blocks().iter().all(|block| block.address.is_none()));
    }
}

#[test]
fn pages_put_back_make_a_stream_with_the_same_pages() {
    for stream in [like_7_2(), like_10()] {
        let recording = Recording::parse(&stream.bytes).unwrap();
        let normalized = Recording::parse(&recording.normalized()).unwrap();
        let mut out = Vec::new();
        write_precopy(&normalized, recording.pages(), &mut out).unwrap();
        let again = Recording::parse(&out).unwrap();
        assert!(again.pages().eq(recording.pages()));
        assert_eq!(again.normalized(), recording.normalized());

        let mut without = Vec::new();
        write_precopy(&normalized, [], &mut without).unwrap();
        assert_eq!(without, recording.normalized());
    }
}

#[test]
fn a_stream_without_footers_stays_without() {
    let mut stream = Stream::beginning("pc-i440fx-2.2");
    stream.ram_start(3, &[("pc.ram", 0x1000, None)]);
    stream.bytes.truncate(stream.bytes.len() - 5);
    stream.section(0x03, 3).bytes.extend(0x10_u64.to_be_bytes());
    stream.tail(b"");
    let recording = Recording::parse(&stream.bytes).unwrap();
    assert_eq!(recording.normalized(), stream.bytes);
}

#[test]
fn a_stream_that_was_cut_anywhere_is_refused() {
    for stream in [like_7_2(), like_10()] {
        for length in 0..stream.bytes.len() {
            assert!(
                Recording::parse(&stream.bytes[..length]).is_err(),
                "{length} of {}",
                stream.bytes.len()
            );
        }
    }
}

#[test]
fn a_page_without_a_place_is_refused_when_it_is_written() {
    let recording = Recording::parse(&like_7_2().bytes).unwrap();
    for (block, offset) in [(3, 0), (2, 0x1000), (1, 0x800)] {
        let page = Page {
            block,
            offset,
            content: PageContent::Zero,
        };
        let error = write_precopy(&recording, [page], &mut Vec::new()).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
    }
}

#[test]
fn what_cannot_be_kept_is_refused_by_its_name() {
    let error = |build: &dyn Fn(&mut Stream)| {
        let mut stream = Stream::beginning("pc");
        build(&mut stream);
        Recording::parse(&stream.bytes).unwrap_err()
    };
    let ram = |stream: &mut Stream| {
        stream.ram_start(1, &[("pc.ram", 0x2000, None)]).section(0x02, 1);
    };
    assert_eq!(error(&|stream| stream.bytes[0] = b'q'), StreamError::NotAStream);
    assert_eq!(
        error(&|stream| stream.bytes[7] = 2),
        StreamError::Version { found: 2 }
    );
    assert_eq!(
        error(&|stream| stream.bytes[8] = 1),
        StreamError::NoConfiguration { found: 1 }
    );
    assert!(matches!(
        error(&|stream| stream.bytes[9] = 1),
        StreamError::TooLong {
            part: "machine name",
            ..
        }
    ));
    assert_eq!(
        error(&|stream| {
            stream.capabilities(&["x-ignore-shared", "mapped-ram"]);
        }),
        StreamError::Capability {
            name: "mapped-ram".into()
        }
    );
    assert_eq!(
        error(&|stream| {
            stream.subsection("configuration/new", &[]);
        }),
        StreamError::Subsection {
            name: "configuration/new".into(),
            version: 1
        }
    );
    assert_eq!(
        error(&|stream| {
            stream.subsection("configuration/target-page-bits", &16_u32.to_be_bytes());
        }),
        StreamError::PageBits { bits: 16 }
    );
    assert_eq!(
        error(&|stream| {
            stream.command(2, &[0; 4]);
        }),
        StreamError::Command {
            name: "ping",
            number: 2
        }
    );
    assert_eq!(
        error(&|stream| {
            stream.section(0x04, 0).bytes.extend(b"\x11virtio-mem-early!");
        }),
        StreamError::Section {
            name: "virtio-mem-early!".into(),
            section_type: 4
        }
    );
    let mut of_version = Stream::beginning("pc");
    of_version
        .section(0x01, 1)
        .bytes
        .extend(b"\x03ram\0\0\0\0\0\0\0\x05");
    assert_eq!(
        Recording::parse(&of_version.bytes),
        Err(StreamError::RamVersion { found: 5 })
    );
    for (flags, meaning) in [
        (0x40_u64, "XBZRLE"),
        (0x80, "RDMA"),
        (0x101, "2009"),
        (0x100, "compressed"),
        (0x30, "not known"),
    ] {
        let refused = error(&|stream| {
            ram(stream);
            stream.bytes.extend(flags.to_be_bytes());
        });
        assert!(
            matches!(refused, StreamError::Flags { flags: found, reason } if found == flags && reason.contains(meaning))
        );
    }
    assert_eq!(
        error(&|stream| {
            ram(stream);
            stream.page((false, "vga"), 0, None);
        }),
        StreamError::UnknownBlock { name: "vga".into() }
    );
    assert_eq!(
        error(&|stream| {
            ram(stream);
            stream.page((false, "pc.ram"), 0x2000, None);
        }),
        StreamError::PageOutside {
            block: "pc.ram".into(),
            offset: 0x2000,
            length: ByteCount(0x2000)
        }
    );
    assert!(matches!(
        error(&|stream| {
            ram(stream);
            stream.page((true, ""), 0, None);
        }),
        StreamError::Flags { flags: 0x22, .. }
    ));
    assert!(matches!(
        error(&|stream| {
            ram(stream);
            stream.page((false, "pc.ram"), 0, Some(&[1]));
            stream.bytes.truncate(stream.bytes.len() - 8 - 8);
            stream.bytes.extend(2_u64.to_be_bytes());
            stream.bytes.extend(b"\x06pc.ram\x01");
        }),
        StreamError::Flags { flags: 0x02, .. }
    ));
    assert_eq!(
        error(&|stream| {
            ram(stream);
            stream.end_of_section(9);
        }),
        StreamError::SectionNumber {
            found: 9,
            expected: 1
        }
    );
    assert_eq!(
        error(&|stream| {
            ram(stream);
            stream
                .end_of_section(1)
                .section(0x03, 1)
                .end_of_section(1)
                .bytes
                .extend(b"\x04no end\0");
        }),
        StreamError::Cut
    );
}

#[test]
fn block_lists_that_do_not_add_up_are_refused() {
    for blocks in [
        &[("a", 0x1000, None), ("a", 0x1000, None)][..],
        &[("a", 0x800, None), ("b", 0x800, None)],
        &[],
    ] {
        let mut stream = Stream::beginning("pc");
        stream
            .ram_start(1, blocks)
            .section(0x03, 1)
            .end_of_section(1)
            .tail(b"");
        let error = Recording::parse(&stream.bytes).unwrap_err();
        assert!(matches!(error, StreamError::BlockList(_)), "{error}");
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(bytes: Vec<u8>) {
        let _ = Recording::parse(&bytes);
        let mut marked = b"QEVM\0\0\0\x03\x07\0\0\0\x01a".to_vec();
        marked.extend(bytes);
        let _ = Recording::parse(&marked);
    }

    #[test]
    fn changed_bytes_never_panic_and_what_still_parses_normalizes(
        which in 0..2,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut stream = if which == 0 { like_7_2() } else { like_10() };
        for (at, byte) in changes {
            let at = at.index(stream.bytes.len());
            stream.bytes[at] = byte;
        }
        if let Ok(recording) = Recording::parse(&stream.bytes) {
            let normalized = recording.normalized();
            prop_assert_eq!(Recording::parse(&normalized).map(|again| again.normalized()), Ok(normalized));
        }
    }

    #[test]
    fn pages_in_any_order_and_number_come_back_each_once_with_what_came_last(
        sent in prop::collection::vec((0_usize..2, 0_u64..4, any::<Option<u8>>()), 0..40),
    ) {
        let names = ["first", "second"];
        let mut stream = Stream::beginning("pc");
        stream.ram_start(1, &[("first", 4 << 12, None), ("second", 4 << 12, None)]).section(0x02, 1);
        let mut model = std::collections::BTreeMap::new();
        let mut current = None;
        for (block, page, content) in &sent {
            let content = content.map(|seed| {
                let mut bytes = [0; PAGE_BYTES];
                noise(&mut bytes, seed.into());
                bytes
            });
            let goes_on = current == Some(*block);
            stream.page((goes_on, names[*block]), page << 12, content.as_ref().map(|bytes| &bytes[..]));
            current = Some(*block);
            model.insert((*block, page << 12), content);
        }
        stream.end_of_section(1).section(0x03, 1).end_of_section(1).tail(b"\x04devices");
        let recording = Recording::parse(&stream.bytes).unwrap();
        let mut out = Vec::new();
        write_precopy(&recording, recording.pages(), &mut out).unwrap();
        for recording in [&recording, &Recording::parse(&out).unwrap()] {
            let found: std::collections::BTreeMap<_, _> = recording
                .pages()
                .map(|page| ((page.block, page.offset), match page.content {
                    PageContent::Zero => None,
                    PageContent::Data(bytes) => Some(*bytes),
                }))
                .collect();
            prop_assert!(found == model);
        }
    }
}
