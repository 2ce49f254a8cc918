//! From bytes to a [`Recording`].

use std::collections::HashMap;

use super::recording::{Pages, RamSection, Recording, StreamBlock};
use super::wire::{self, Cursor, STREAM_LIMIT};
use super::{PAGE_BYTES, StreamError};
use crate::ByteCount;

/// More RAM blocks than any machine has.
const BLOCKS_LIMIT: usize = 4096;

/// More capabilities than QEMU has.
const CAPABILITIES_LIMIT: u32 = 64;

/// Machine types have names of some twenty letters.
const MACHINE_NAME_LIMIT: u32 = 255;

pub(super) fn recording(stream: &[u8]) -> Result<Recording, StreamError> {
    limit("stream", stream.len() as u64, STREAM_LIMIT)?;
    let mut cursor = Cursor::new(stream);
    if cursor.u32()? != wire::MAGIC {
        return Err(StreamError::NotAStream);
    }
    let version = cursor.u32()?;
    if version != wire::VERSION {
        return Err(StreamError::Version { found: version });
    }
    let configuration = Configuration::parse(&mut cursor)?;
    let opening = commands(&mut cursor)?.to_vec();
    let mut ram = Ram::start(&mut cursor, configuration.ignore_shared)?;
    let mut turning = Vec::new();
    loop {
        turning.extend_from_slice(commands(&mut cursor)?);
        if ram.go_on(&mut cursor)? == Section::End {
            break;
        }
    }
    let tail = cursor.rest();
    Ok(Recording {
        machine: configuration.machine,
        configuration: configuration.kept,
        opening,
        section: ram.section,
        blocks: ram.blocks,
        turning,
        pages: ram.pages,
        tail: tail.to_vec(),
        device_sections_bytes: device_sections_bytes(tail)?,
    })
}

struct Configuration {
    machine: String,
    kept: Vec<u8>,
    ignore_shared: bool,
}

impl Configuration {
    fn parse(cursor: &mut Cursor<'_>) -> Result<Self, StreamError> {
        cursor.enter("configuration");
        let start = cursor.at();
        let found = cursor.u8()?;
        if found != wire::CONFIGURATION {
            return Err(StreamError::NoConfiguration { found });
        }
        let length = cursor.u32()?;
        limit(
            "machine name",
            length.into(),
            ByteCount(MACHINE_NAME_LIMIT.into()),
        )?;
        let machine = cursor.name(length as usize)?.to_owned();
        let mut configuration = Self {
            machine,
            kept: cursor.since(start).to_vec(),
            ignore_shared: false,
        };
        while cursor.peek() == Some(wire::SUBSECTION) {
            configuration.subsection(cursor)?;
        }
        Ok(configuration)
    }

    fn subsection(&mut self, cursor: &mut Cursor<'_>) -> Result<(), StreamError> {
        let start = cursor.at();
        cursor.u8()?;
        let name = cursor.short_name()?;
        let version = cursor.u32()?;
        match (name, version) {
            ("configuration/target-page-bits", 1) => {
                let bits = cursor.u32()?;
                if bits != PAGE_BYTES.ilog2() {
                    return Err(StreamError::PageBits { bits });
                }
            }
            ("configuration/uuid", 1) => {
                cursor.array::<16>()?;
            }
            ("configuration/capabilities", 1) => return self.capabilities(cursor),
            _ => {
                return Err(StreamError::Subsection {
                    name: name.to_owned(),
                    version,
                });
            }
        }
        self.kept.extend_from_slice(cursor.since(start));
        Ok(())
    }

    /// Capabilities are dropped, but only those whose effect on the stream is known.
    fn capabilities(&mut self, cursor: &mut Cursor<'_>) -> Result<(), StreamError> {
        let count = cursor.u32()?;
        limit(
            "list of capabilities",
            count.into(),
            ByteCount(CAPABILITIES_LIMIT.into()),
        )?;
        for _ in 0..count {
            match cursor.short_name()? {
                "x-ignore-shared" => self.ignore_shared = true,
                name => {
                    return Err(StreamError::Capability {
                        name: name.to_owned(),
                    });
                }
            }
        }
        Ok(())
    }
}

/// Commands that a loading QEMU takes without answering.
fn commands<'a>(cursor: &mut Cursor<'a>) -> Result<&'a [u8], StreamError> {
    cursor.enter("commands");
    let start = cursor.at();
    while cursor.peek() == Some(wire::COMMAND) {
        cursor.u8()?;
        let number = cursor.u16()?;
        let length = cursor.u16()?;
        if number != wire::COMMAND_SWITCHOVER_START {
            return Err(StreamError::Command {
                name: wire::command_name(number),
                number,
            });
        }
        cursor.bytes(length.into())?;
    }
    Ok(cursor.since(start))
}

struct Ram {
    section: RamSection,
    blocks: Vec<StreamBlock>,
    by_name: HashMap<String, usize>,
    pages: Pages,
    ignore_shared: bool,
    /// The block that a record with the continue flag belongs to.
    current: Option<usize>,
}

#[derive(PartialEq)]
enum Section {
    Part,
    End,
}

impl Ram {
    /// The section that begins RAM, with its block list.
    fn start(cursor: &mut Cursor<'_>, ignore_shared: bool) -> Result<Self, StreamError> {
        cursor.enter("beginning of RAM");
        let at = cursor.at();
        let section_type = cursor.u8()?;
        if section_type != wire::SECTION_START && section_type != wire::SECTION_FULL {
            return Err(StreamError::SectionType { section_type, at });
        }
        let number = cursor.u32()?;
        let name = cursor.short_name()?;
        if name != "ram" || section_type != wire::SECTION_START {
            return Err(StreamError::Section {
                name: name.to_owned(),
                section_type,
            });
        }
        let instance = cursor.u32()?;
        let version = cursor.u32()?;
        if version != wire::RAM_VERSION {
            return Err(StreamError::RamVersion { found: version });
        }
        let mut ram = Self {
            section: RamSection {
                number,
                instance,
                footers: false,
            },
            blocks: Vec::new(),
            by_name: HashMap::new(),
            pages: Pages::default(),
            ignore_shared,
            current: None,
        };
        ram.records(cursor)?;
        if ram.blocks.is_empty() {
            return Err(StreamError::BlockList("it is missing"));
        }
        // Machine types before 2.3 have no footers; whichever it is, all sections do the same.
        ram.section.footers = cursor.peek() == Some(wire::FOOTER);
        ram.footer(cursor)?;
        Ok(ram)
    }

    /// The next section, which must be RAM's.
    fn go_on(&mut self, cursor: &mut Cursor<'_>) -> Result<Section, StreamError> {
        cursor.enter("RAM");
        let at = cursor.at();
        let section = match cursor.u8()? {
            wire::SECTION_PART => Section::Part,
            wire::SECTION_END => Section::End,
            section_type @ (wire::SECTION_START | wire::SECTION_FULL) => {
                cursor.u32()?;
                let name = cursor.short_name()?.to_owned();
                return Err(StreamError::Section { name, section_type });
            }
            section_type => return Err(StreamError::SectionType { section_type, at }),
        };
        self.number(cursor)?;
        self.records(cursor)?;
        self.footer(cursor)?;
        Ok(section)
    }

    fn number(&self, cursor: &mut Cursor<'_>) -> Result<(), StreamError> {
        match cursor.u32()? {
            found if found == self.section.number => Ok(()),
            found => Err(StreamError::SectionNumber {
                found,
                expected: self.section.number,
            }),
        }
    }

    fn footer(&self, cursor: &mut Cursor<'_>) -> Result<(), StreamError> {
        if !self.section.footers {
            return Ok(());
        }
        let at = cursor.at();
        match cursor.u8()? {
            wire::FOOTER => self.number(cursor),
            section_type => Err(StreamError::SectionType { section_type, at }),
        }
    }

    /// Records up to the mark that ends a section's.
    fn records(&mut self, cursor: &mut Cursor<'_>) -> Result<(), StreamError> {
        loop {
            let header = cursor.u64()?;
            let (offset, flags) = (header & !wire::FLAGS_MASK, header & wire::FLAGS_MASK);
            match flags {
                wire::FLAG_EOS => return Ok(()),
                // Says that multifd channels are to be waited for; the pages of a recording are all
                // in it.
                wire::FLAG_MULTIFD_FLUSH => {}
                wire::FLAG_MEM_SIZE => self.block_list(cursor, offset)?,
                _ => match flags & !wire::FLAG_CONTINUE {
                    wire::FLAG_ZERO => {
                        let block = self.block_of(cursor, flags)?;
                        self.check_inside(block, offset)?;
                        if cursor.u8()? != 0 {
                            return Err(StreamError::Flags {
                                flags,
                                reason: "a page filled with another byte than zero",
                            });
                        }
                        self.pages.put_zero(block, offset);
                    }
                    wire::FLAG_PAGE => {
                        let block = self.block_of(cursor, flags)?;
                        self.check_inside(block, offset)?;
                        self.pages.put_data(block, offset, cursor.array()?);
                    }
                    _ => {
                        return Err(StreamError::Flags {
                            flags,
                            reason: wire::flags_meaning(flags),
                        });
                    }
                },
            }
        }
    }

    fn block_list(&mut self, cursor: &mut Cursor<'_>, total: u64) -> Result<(), StreamError> {
        if !self.blocks.is_empty() {
            return Err(StreamError::BlockList("it is told twice"));
        }
        let mut missing = total;
        while missing > 0 {
            if self.blocks.len() == BLOCKS_LIMIT {
                return Err(StreamError::BlockList("it has more than 4096 blocks"));
            }
            let name = cursor.short_name()?.to_owned();
            let used_length = cursor.u64()?;
            let address = if self.ignore_shared {
                Some(cursor.u64()?)
            } else {
                None
            };
            if used_length == 0 || !used_length.is_multiple_of(PAGE_BYTES as u64) {
                return Err(StreamError::BlockList("a length is not a number of pages"));
            }
            missing = missing
                .checked_sub(used_length)
                .ok_or(StreamError::BlockList("its lengths are more than their total"))?;
            if self.by_name.insert(name.clone(), self.blocks.len()).is_some() {
                return Err(StreamError::BlockList("two blocks have one name"));
            }
            self.blocks.push(StreamBlock {
                name,
                used_length: ByteCount(used_length),
                address,
            });
        }
        Ok(())
    }

    fn block_of(&mut self, cursor: &mut Cursor<'_>, flags: u64) -> Result<usize, StreamError> {
        if flags & wire::FLAG_CONTINUE != 0 {
            return self.current.ok_or(StreamError::Flags {
                flags,
                reason: "goes on in a block, but none was named",
            });
        }
        let name = cursor.short_name()?;
        let block = self
            .by_name
            .get(name)
            .copied()
            .ok_or_else(|| StreamError::UnknownBlock {
                name: name.to_owned(),
            })?;
        self.current = Some(block);
        Ok(block)
    }

    fn check_inside(&self, block: usize, offset: u64) -> Result<(), StreamError> {
        let StreamBlock {
            name, used_length, ..
        } = &self.blocks[block];
        // Both are numbers of pages.
        if offset < used_length.0 {
            return Ok(());
        }
        Err(StreamError::PageOutside {
            block: name.clone(),
            offset,
            length: *used_length,
        })
    }
}

/// Where the device sections of a tail end: before the end of stream and the VM description, which
/// ends with the stream.
///
/// The sections themselves have no lengths. The description is a JSON object and so without zero
/// bytes; looking for its header from the back meets the true one first, and the length in it must
/// fit, so that a cut is told.
fn device_sections_bytes(tail: &[u8]) -> Result<usize, StreamError> {
    const HEADER_BYTES: usize = 6;
    let is_description = |at: usize, header: &[u8]| {
        let description = &tail[at + HEADER_BYTES..];
        let length = [header[2], header[3], header[4], header[5]];
        header[..2] == [wire::END_OF_STREAM, wire::VM_DESCRIPTION]
            && u32::from_be_bytes(length) as usize == description.len()
            && description.starts_with(b"{")
            && description.ends_with(b"}")
    };
    let headers = tail.windows(HEADER_BYTES).enumerate().rev();
    let mut ends = headers.filter(|(at, header)| is_description(*at, header));
    ends.next().map(|(at, _)| at).ok_or(StreamError::Cut)
}

pub(super) fn limit(part: &'static str, length: u64, limit: ByteCount) -> Result<(), StreamError> {
    if length > limit.0 {
        return Err(StreamError::TooLong {
            part,
            length: ByteCount(length),
            limit,
        });
    }
    Ok(())
}
