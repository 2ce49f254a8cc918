//! The stream in which QEMU hands its memory over as descriptors (migration mode `cpr-transfer`).
//!
//! ```text
//!  "QCPR" version 1
//!  01  name length, name, NUL   id   20      once per descriptor: the byte 20 carries it
//!  00                                        no more
//!  05  "CprState/vfio devices" version 1  00 from QEMU 11.1 on: descriptors of passed-through devices
//! ```
//!
//! The kernel ties a descriptor to one byte of the stream. Whoever receives tells which byte that
//! was for each, and an entry gets the descriptor of its own byte and no other.
//!
//! What is guaranteed: parsing never panics and never allocates on the word of a length field; a
//! stream that was cut, an entry without its descriptor and a descriptor without its entry are
//! refused; and so is whatever may stand behind the entries, unless it is known to mean nothing for
//! a guest that is saved. A passed-through device is refused by name: in this mode QEMU leaves its
//! state out of the device stream, because the device itself is handed over.
//!
//! The format was learned from QEMU's `migration/cpr.c` and `migration/cpr-transfer.c`, 10.0 to
//! 11.1. Integers are big-endian.

use std::collections::HashSet;

use super::cursor::Cursor;
use super::page_sink::ReceiveError;
use super::{StreamError, parse, wire};
use crate::ByteCount;

/// The longest stream that is read: names of more RAM blocks than any machine has.
pub const CPR_STREAM_LIMIT: ByteCount = ByteCount::mib(1);

const MAGIC: u32 = 0x5143_5052;
const VERSION: u32 = 1;
const ENTRY: u8 = 1;
const END_OF_ENTRIES: u8 = 0;
/// What QEMU sends along with a descriptor, which needs some byte to travel with.
const DESCRIPTOR_BYTE: u8 = 0x20;
/// RAM blocks have names of at most 255 bytes, and the length counts the NUL that ends one.
const NAME_LIMIT: u32 = 256;

/// What one descriptor is.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CprEntry {
    /// Its name: that of a RAM block, or of something else that QEMU hands over.
    pub name: String,
    /// Tells entries of one name apart; 0 for RAM blocks.
    pub id: u32,
}

/// Why bytes are not a list of descriptors that can be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CprError {
    /// Not QEMU's magic.
    #[error("not a stream of descriptors")]
    NotCpr,
    /// Another version of the stream than 1.
    #[error("stream of descriptors of version {found}, only {VERSION} is known")]
    Version {
        /// Version that was found.
        found: u32,
    },
    /// The stream is too long, ends in the middle, or holds a name that is none.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// A byte that none of its meanings fits.
    #[error("byte {found:#04x} at {at} in the list of descriptors")]
    Byte {
        /// The byte.
        found: u8,
        /// Where, in bytes.
        at: usize,
    },
    /// The descriptor of an entry did not come with the entry's byte.
    #[error("the descriptor of {name:?} belongs to byte {needed}, {came}", came = came(*found))]
    Unpaired {
        /// Name of the entry.
        name: String,
        /// Byte that should have carried it.
        needed: usize,
        /// Byte that carried the next descriptor, if one came at all.
        found: Option<usize>,
    },
    /// More descriptors came than there are entries.
    #[error("{found} descriptors came for {entries} entries")]
    Surplus {
        /// Descriptors.
        found: usize,
        /// Entries.
        entries: usize,
    },
    /// Two entries are called the same.
    #[error("two descriptors are called {name:?} with number {id}")]
    Twice {
        /// Their name.
        name: String,
        /// Their number.
        id: u32,
    },
    /// Devices of the host are passed through, and their state is not in the device stream.
    #[error("the guest has passed-through devices, whose state is not saved in this mode")]
    PassedThrough,
    /// Something behind the entries whose meaning is not known.
    #[error("part {name:?} of version {version} is not known")]
    Part {
        /// Its name.
        name: String,
        /// Its version.
        version: u32,
    },
}

/// Reads the stream. `descriptors_at` says for each descriptor, in the order in which they came,
/// the byte of the stream that carried it; the entries are returned in the same order.
///
/// # Errors
///
/// [`CprError`] names what cannot be used.
pub fn cpr_entries(stream: &[u8], descriptors_at: &[usize]) -> Result<Vec<CprEntry>, CprError> {
    parse::limit("list of descriptors", stream.len() as u64, CPR_STREAM_LIMIT)?;
    entries(stream, descriptors_at).map_err(|error| match error {
        ReceiveError::Sink(error) => error,
        ReceiveError::Stream(error) => error.into(),
        // Bytes that are there can be read.
        ReceiveError::Io(_) => CprError::NotCpr,
    })
}

type Read<T> = Result<T, ReceiveError<CprError>>;

fn refuse<T>(error: CprError) -> Read<T> {
    Err(ReceiveError::Sink(error))
}

fn entries(stream: &[u8], descriptors_at: &[usize]) -> Read<Vec<CprEntry>> {
    let mut cursor = Cursor::new(stream);
    cursor.enter("list of descriptors");
    if cursor.u32()? != MAGIC {
        return refuse(CprError::NotCpr);
    }
    let version = cursor.u32()?;
    if version != VERSION {
        return refuse(CprError::Version { found: version });
    }
    let mut entries = Vec::new();
    let mut known = HashSet::new();
    let mut descriptors = descriptors_at.iter().copied();
    loop {
        let at = cursor.at();
        match cursor.u8()? {
            END_OF_ENTRIES => break,
            ENTRY => {}
            found => return refuse(CprError::Byte { found, at }),
        }
        let entry = entry(&mut cursor, descriptors.next())?;
        if !known.insert(entry.clone()) {
            let CprEntry { name, id } = entry;
            return refuse(CprError::Twice { name, id });
        }
        entries.push(entry);
    }
    if descriptors_at.len() > entries.len() {
        return refuse(CprError::Surplus {
            found: descriptors_at.len(),
            entries: entries.len(),
        });
    }
    while cursor.peek()?.is_some() {
        part(&mut cursor)?;
    }
    Ok(entries)
}

fn entry(cursor: &mut Cursor<&[u8]>, descriptor: Option<usize>) -> Read<CprEntry> {
    let length = cursor.u32()?;
    parse::limit(
        "name of a descriptor",
        length.into(),
        ByteCount(NAME_LIMIT.into()),
    )?;
    let name = cursor.name(length.saturating_sub(1) as u8)?;
    expect(cursor, 0)?;
    let id = cursor.u32()?;
    let needed = cursor.at();
    expect(cursor, DESCRIPTOR_BYTE)?;
    match descriptor {
        Some(at) if at == needed => Ok(CprEntry { name, id }),
        found => refuse(CprError::Unpaired { name, needed, found }),
    }
}

/// What newer QEMUs tell behind the entries.
fn part(cursor: &mut Cursor<&[u8]>) -> Read<()> {
    expect(cursor, wire::SUBSECTION)?;
    let name = cursor.short_name()?;
    let version = cursor.u32()?;
    match (name.as_str(), version) {
        ("CprState/vfio devices", 1) => match cursor.u8()? {
            END_OF_ENTRIES => Ok(()),
            _ => refuse(CprError::PassedThrough),
        },
        _ => refuse(CprError::Part { name, version }),
    }
}

fn expect(cursor: &mut Cursor<&[u8]>, expected: u8) -> Read<()> {
    let at = cursor.at();
    match cursor.u8()? {
        found if found == expected => Ok(()),
        found => refuse(CprError::Byte { found, at }),
    }
}

fn came(at: Option<usize>) -> String {
    at.map_or_else(
        || "but none came".to_owned(),
        |at| format!("but came with byte {at}"),
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A stream with these entries, and where their descriptors are.
    fn stream(entries: &[CprEntry], behind: &[u8]) -> (Vec<u8>, Vec<usize>) {
        let mut bytes = b"QCPR\0\0\0\x01".to_vec();
        let mut descriptors = Vec::new();
        for CprEntry { name, id } in entries {
            bytes.push(ENTRY);
            bytes.extend((name.len() as u32 + 1).to_be_bytes());
            bytes.extend(name.as_bytes());
            bytes.push(0);
            bytes.extend(id.to_be_bytes());
            descriptors.push(bytes.len());
            bytes.push(DESCRIPTOR_BYTE);
        }
        bytes.push(END_OF_ENTRIES);
        bytes.extend(behind);
        (bytes, descriptors)
    }

    fn named(name: &str) -> CprEntry {
        CprEntry {
            name: name.to_owned(),
            id: 0,
        }
    }

    const NO_VFIO: &[u8] = b"\x05\x15CprState/vfio devices\0\0\0\x01\0";

    #[test]
    fn what_qemu_10_0_and_11_1_send_is_read() {
        let entries = [named("m0"), named("/rom@etc/acpi/tables")];
        for behind in [&b""[..], NO_VFIO] {
            let (bytes, descriptors) = stream(&entries, behind);
            assert_eq!(cpr_entries(&bytes, &descriptors).unwrap(), entries);
        }
    }

    #[test]
    fn an_entry_gets_its_own_descriptor_or_none() {
        let entries = [named("m0"), named("m1")];
        let (bytes, descriptors) = stream(&entries, b"");
        let swapped = [descriptors[1], descriptors[0]];
        for (descriptors, words) in [
            (&descriptors[..1], "byte 33, but none came"),
            (&descriptors[1..], "but came with byte 33"),
            (&swapped, "but came with byte 33"),
            (&[descriptors[0], descriptors[1], 34], "3 descriptors came for 2"),
        ] {
            let error = cpr_entries(&bytes, descriptors).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn passed_through_devices_and_parts_that_nobody_knows_are_refused_by_name() {
        let mut vfio = NO_VFIO.to_vec();
        *vfio.last_mut().unwrap() = 1;
        let (bytes, descriptors) = stream(&[named("m0")], &vfio);
        assert_eq!(cpr_entries(&bytes, &descriptors), Err(CprError::PassedThrough));
        let (bytes, descriptors) = stream(&[named("m0")], b"\x05\x04news\0\0\0\x02");
        let error = cpr_entries(&bytes, &descriptors).unwrap_err();
        assert_eq!(error.to_string(), "part \"news\" of version 2 is not known");
    }

    #[test]
    fn a_name_that_comes_twice_is_refused() {
        let (bytes, descriptors) = stream(&[named("m0"), named("m0")], b"");
        let error = cpr_entries(&bytes, &descriptors).unwrap_err();
        assert!(matches!(error, CprError::Twice { .. }), "{error}");
    }

    proptest! {
        #[test]
        fn a_list_is_read_back_and_no_shorter_one_is_taken_for_whole(
            names in prop::collection::hash_set("[a-z/@.:]{1,40}", 0..12),
            id in any::<u32>(),
        ) {
            let entries: Vec<CprEntry> = names.into_iter().map(|name| CprEntry { name, id }).collect();
            let (bytes, descriptors) = stream(&entries, b"");
            prop_assert_eq!(cpr_entries(&bytes, &descriptors), Ok(entries));
            for length in 0..bytes.len() {
                prop_assert!(cpr_entries(&bytes[..length], &descriptors).is_err());
            }
        }

        #[test]
        fn no_bytes_make_it_panic(
            mut bytes in prop::collection::vec(any::<u8>(), 0..200),
            begins_well in any::<bool>(),
            descriptors in prop::collection::vec(any::<usize>(), 0..4),
        ) {
            if begins_well {
                bytes.splice(0..0, *b"QCPR\0\0\0\x01\x01\0\0");
            }
            let _ = cpr_entries(&bytes, &descriptors);
        }
    }
}
