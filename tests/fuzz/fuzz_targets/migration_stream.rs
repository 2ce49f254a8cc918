//! Any bytes as a migration stream: refused with a reason, or taken apart so that every way to put
//! it together again gives a stream of the same guest.

#![no_main]

use dormouse_storage::{ByteCount, Page, Recording, write_precopy};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|stream: &[u8]| {
    let Ok(recording) = Recording::parse(stream) else {
        return;
    };
    pages_have_a_place_each(&recording);

    let normalized = recording.normalized();
    let again = Recording::parse(&normalized).expect("a normalized stream is a stream");
    assert_eq!(again.pages().count(), 0);
    assert!(again.blocks().iter().all(|block| block.address.is_none()));
    assert_same_guest(&recording, &again);
    assert_eq!(again.normalized(), normalized);

    let mut written = Vec::new();
    write_precopy(&recording, recording.pages(), &mut written).expect("its own pages have a place");
    let again = Recording::parse(&written).expect("a written stream is a stream");
    assert_same_guest(&recording, &again);
    assert!(again.pages().eq(recording.pages()));
    assert_eq!(again.normalized(), normalized);
});

fn pages_have_a_place_each(recording: &Recording) {
    let place = |page: &Page<'_>| (page.block, page.offset);
    assert!(
        recording.pages().is_sorted_by(|a, b| place(a) < place(b)),
        "a page is told twice"
    );
    for Page { block, offset, .. } in recording.pages() {
        let used_length = recording.blocks()[block].used_length;
        assert!(offset.is_multiple_of(4096) && ByteCount(offset) < used_length);
    }
}

fn assert_same_guest(one: &Recording, other: &Recording) {
    let blocks = |recording: &Recording| -> Vec<_> {
        let blocks = recording.blocks().iter();
        blocks
            .map(|block| (block.name.clone(), block.used_length))
            .collect()
    };
    assert_eq!(one.machine(), other.machine());
    assert_eq!(one.ram_section_number(), other.ram_section_number());
    assert_eq!(blocks(one), blocks(other));
    assert_eq!(one.device_sections(), other.device_sections());
}
