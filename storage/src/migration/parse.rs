//! From bytes to a [`Recording`].

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read};

use super::cursor::Cursor;
use super::page_sink::{PageSink, ReceiveError};
use super::recording::{Pages, RamSection, Recording, StreamBlock};
use super::wire::{self, STREAM_LIMIT};
use super::{PAGE_BYTES, StreamError};
use crate::ByteCount;

/// More RAM blocks than any machine has.
const BLOCKS_LIMIT: usize = 4096;

/// More capabilities than QEMU has.
const CAPABILITIES_LIMIT: u32 = 64;

/// Machine types have names of some twenty letters.
const MACHINE_NAME_LIMIT: u32 = 255;

/// As much of a configuration, or of commands, as is kept; QEMU's take some hundred bytes.
const KEPT_LIMIT: ByteCount = ByteCount::kib(64);

/// Few large reads: a unix socket of QEMU's hands over some 200 kB at once.
///
/// 1 GiB of random RAM from QEMU 10.0 by the main stream alone, chunks thrown away, against a reader
/// that only reads, in interleaved rounds on two busy CPUs (medians of seven): 256 KiB 0.94 of it,
/// 64 KiB 0.62, 1 MiB 0.71.
const BUFFER_BYTES: usize = 256 << 10;

/// Takes a stream in memory apart, with its pages.
pub(super) fn recording(stream: &[u8]) -> Result<Recording, StreamError> {
    limit("stream", stream.len() as u64, STREAM_LIMIT)?;
    let mut pages = Pages::default();
    match parse(stream, STREAM_LIMIT, &mut pages) {
        Ok(recording) => Ok(Recording { pages, ..recording }),
        Err(ReceiveError::Stream(error)) => Err(error),
        Err(ReceiveError::Sink(never)) => match never {},
        Err(ReceiveError::Io(error)) => unreachable!("memory is read without errors: {error}"),
    }
}

/// Receives a stream to its end: pages go to `sink` as they come, all else to the recording, which
/// has no pages then. What follows RAM must not be longer than `tail_bound`.
///
/// Memory is bounded by that, by the buffer, and by what [`StreamError::TooLong`] limits.
pub(crate) fn receive<S: PageSink>(
    input: impl Read,
    tail_bound: ByteCount,
    sink: &mut S,
) -> Result<Recording, ReceiveError<S::Error>> {
    parse(BufReader::with_capacity(BUFFER_BYTES, input), tail_bound, sink)
}

fn parse<S: PageSink>(
    input: impl BufRead,
    tail_bound: ByteCount,
    sink: &mut S,
) -> Result<Recording, ReceiveError<S::Error>> {
    let mut cursor = Cursor::new(input);
    if cursor.u32()? != wire::MAGIC {
        return Err(StreamError::NotAStream.into());
    }
    let version = cursor.u32()?;
    if version != wire::VERSION {
        return Err(StreamError::Version { found: version }.into());
    }
    let configuration = Configuration::parse(&mut cursor)?;
    let mut opening = Vec::new();
    commands(&mut cursor, &mut opening)?;
    let mut ram = Ram::start(&mut cursor, configuration.ignore_shared, sink)?;
    let mut turning = Vec::new();
    loop {
        commands(&mut cursor, &mut turning)?;
        if ram.go_on(&mut cursor, sink)? == Section::End {
            break;
        }
    }
    let tail = cursor.rest(tail_bound)?;
    Ok(Recording {
        machine: configuration.machine,
        configuration: configuration.kept,
        opening,
        section: ram.section,
        blocks: ram.blocks,
        turning,
        pages: Pages::default(),
        device_sections_bytes: device_sections_bytes(&tail)?,
        tail,
    })
}

struct Configuration {
    machine: String,
    kept: Vec<u8>,
    ignore_shared: bool,
}

impl Configuration {
    fn parse<E>(cursor: &mut Cursor<impl BufRead>) -> Result<Self, ReceiveError<E>> {
        cursor.enter("configuration");
        cursor.keep();
        let found = cursor.u8()?;
        if found != wire::CONFIGURATION {
            return Err(StreamError::NoConfiguration { found }.into());
        }
        let length = cursor.u32()?;
        limit(
            "machine name",
            length.into(),
            ByteCount(MACHINE_NAME_LIMIT.into()),
        )?;
        let machine = cursor.name(length as u8)?;
        let mut configuration = Self {
            machine,
            kept: cursor.kept(),
            ignore_shared: false,
        };
        while cursor.peek()? == Some(wire::SUBSECTION) {
            cursor.keep();
            let is_kept = configuration.subsection(cursor)?;
            let subsection = cursor.kept();
            if is_kept {
                configuration.kept.extend(subsection);
                limit("configuration", configuration.kept.len() as u64, KEPT_LIMIT)?;
            }
        }
        Ok(configuration)
    }

    /// Reads a subsection and says whether it is kept.
    fn subsection<E>(&mut self, cursor: &mut Cursor<impl BufRead>) -> Result<bool, ReceiveError<E>> {
        cursor.u8()?;
        let name = cursor.short_name()?;
        let version = cursor.u32()?;
        match (name.as_str(), version) {
            ("configuration/target-page-bits", 1) => {
                let bits = cursor.u32()?;
                if bits != PAGE_BYTES.ilog2() {
                    return Err(StreamError::PageBits { bits }.into());
                }
                Ok(true)
            }
            ("configuration/uuid", 1) => cursor.array::<16, _>().map(|_| true),
            ("configuration/capabilities", 1) => self.capabilities(cursor).map(|()| false),
            _ => Err(StreamError::Subsection { name, version }.into()),
        }
    }

    /// Capabilities are dropped, but only those whose effect on the stream is known.
    fn capabilities<E>(&mut self, cursor: &mut Cursor<impl BufRead>) -> Result<(), ReceiveError<E>> {
        let count = cursor.u32()?;
        limit(
            "list of capabilities",
            count.into(),
            ByteCount(CAPABILITIES_LIMIT.into()),
        )?;
        for _ in 0..count {
            let name = cursor.short_name()?;
            match name.as_str() {
                "x-ignore-shared" => self.ignore_shared = true,
                _ => return Err(StreamError::Capability { name }.into()),
            }
        }
        Ok(())
    }
}

/// Commands that a loading QEMU takes without answering, kept behind those in `kept`.
fn commands<E>(cursor: &mut Cursor<impl BufRead>, kept: &mut Vec<u8>) -> Result<(), ReceiveError<E>> {
    cursor.enter("commands");
    while cursor.peek()? == Some(wire::COMMAND) {
        cursor.keep();
        cursor.u8()?;
        let number = cursor.u16()?;
        let length = cursor.u16()?;
        if number != wire::COMMAND_SWITCHOVER_START {
            return Err(StreamError::Command {
                name: wire::command_name(number),
                number,
            }
            .into());
        }
        cursor.skip(length)?;
        kept.extend(cursor.kept());
        limit("commands", kept.len() as u64, KEPT_LIMIT)?;
    }
    Ok(())
}

struct Ram {
    section: RamSection,
    blocks: Vec<StreamBlock>,
    by_name: HashMap<String, usize>,
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
    fn start<S: PageSink>(
        cursor: &mut Cursor<impl BufRead>,
        ignore_shared: bool,
        sink: &mut S,
    ) -> Result<Self, ReceiveError<S::Error>> {
        cursor.enter("beginning of RAM");
        let at = cursor.at();
        let section_type = cursor.u8()?;
        if section_type != wire::SECTION_START && section_type != wire::SECTION_FULL {
            return Err(StreamError::SectionType { section_type, at }.into());
        }
        let number = cursor.u32()?;
        let name = cursor.short_name()?;
        if name != "ram" || section_type != wire::SECTION_START {
            return Err(StreamError::Section { name, section_type }.into());
        }
        let instance = cursor.u32()?;
        let version = cursor.u32()?;
        if version != wire::RAM_VERSION {
            return Err(StreamError::RamVersion { found: version }.into());
        }
        let mut ram = Self {
            section: RamSection {
                number,
                instance,
                footers: false,
            },
            blocks: Vec::new(),
            by_name: HashMap::new(),
            ignore_shared,
            current: None,
        };
        ram.records(cursor, sink)?;
        if ram.blocks.is_empty() {
            return Err(StreamError::BlockList("it is missing").into());
        }
        // Machine types before 2.3 have no footers; whichever it is, all sections do the same.
        ram.section.footers = cursor.peek()? == Some(wire::FOOTER);
        ram.footer(cursor)?;
        Ok(ram)
    }

    /// The next section, which must be RAM's.
    fn go_on<S: PageSink>(
        &mut self,
        cursor: &mut Cursor<impl BufRead>,
        sink: &mut S,
    ) -> Result<Section, ReceiveError<S::Error>> {
        cursor.enter("RAM");
        let at = cursor.at();
        let section = match cursor.u8()? {
            wire::SECTION_PART => Section::Part,
            wire::SECTION_END => Section::End,
            section_type @ (wire::SECTION_START | wire::SECTION_FULL) => {
                cursor.u32()?;
                let name = cursor.short_name()?;
                return Err(StreamError::Section { name, section_type }.into());
            }
            section_type => return Err(StreamError::SectionType { section_type, at }.into()),
        };
        self.number(cursor)?;
        self.records(cursor, sink)?;
        self.footer(cursor)?;
        Ok(section)
    }

    fn number<E>(&self, cursor: &mut Cursor<impl BufRead>) -> Result<(), ReceiveError<E>> {
        match cursor.u32()? {
            found if found == self.section.number => Ok(()),
            found => Err(StreamError::SectionNumber {
                found,
                expected: self.section.number,
            }
            .into()),
        }
    }

    fn footer<E>(&self, cursor: &mut Cursor<impl BufRead>) -> Result<(), ReceiveError<E>> {
        if !self.section.footers {
            return Ok(());
        }
        let at = cursor.at();
        match cursor.u8()? {
            wire::FOOTER => self.number(cursor),
            section_type => Err(StreamError::SectionType { section_type, at }.into()),
        }
    }

    /// Records up to the mark that ends a section's.
    fn records<S: PageSink>(
        &mut self,
        cursor: &mut Cursor<impl BufRead>,
        sink: &mut S,
    ) -> Result<(), ReceiveError<S::Error>> {
        loop {
            let header = cursor.u64()?;
            let (offset, flags) = (header & !wire::FLAGS_MASK, header & wire::FLAGS_MASK);
            match flags {
                wire::FLAG_EOS => return Ok(()),
                // Says that multifd channels are to be waited for, so that an older content of a page
                // does not come after a newer one; the guest is stopped, there is one of each.
                wire::FLAG_MULTIFD_FLUSH => {}
                wire::FLAG_MEM_SIZE => {
                    self.block_list(cursor, offset)?;
                    sink.blocks(&self.blocks).map_err(ReceiveError::Sink)?;
                }
                _ => match flags & !wire::FLAG_CONTINUE {
                    wire::FLAG_ZERO => {
                        let block = self.block_of(cursor, flags)?;
                        self.check_inside(block, offset)?;
                        if cursor.u8()? != 0 {
                            return Err(StreamError::Flags {
                                flags,
                                reason: "a page filled with another byte than zero",
                            }
                            .into());
                        }
                        sink.zero(block, offset).map_err(ReceiveError::Sink)?;
                    }
                    wire::FLAG_PAGE => {
                        let block = self.block_of(cursor, flags)?;
                        self.check_inside(block, offset)?;
                        sink.data(block, offset, |page| cursor.fill(page))?;
                    }
                    _ => {
                        return Err(StreamError::Flags {
                            flags,
                            reason: wire::flags_meaning(flags),
                        }
                        .into());
                    }
                },
            }
        }
    }

    fn block_list<E>(
        &mut self,
        cursor: &mut Cursor<impl BufRead>,
        total: u64,
    ) -> Result<(), ReceiveError<E>> {
        if !self.blocks.is_empty() {
            return Err(StreamError::BlockList("it is told twice").into());
        }
        let mut missing = total;
        while missing > 0 {
            if self.blocks.len() == BLOCKS_LIMIT {
                return Err(StreamError::BlockList("it has more than 4096 blocks").into());
            }
            let name = cursor.short_name()?;
            let used_length = cursor.u64()?;
            let address = if self.ignore_shared {
                Some(cursor.u64()?)
            } else {
                None
            };
            if used_length == 0 || !used_length.is_multiple_of(PAGE_BYTES as u64) {
                return Err(StreamError::BlockList("a length is not a number of pages").into());
            }
            missing = missing
                .checked_sub(used_length)
                .ok_or(StreamError::BlockList("its lengths are more than their total"))?;
            if self.by_name.insert(name.clone(), self.blocks.len()).is_some() {
                return Err(StreamError::BlockList("two blocks have one name").into());
            }
            self.blocks.push(StreamBlock {
                name,
                used_length: ByteCount(used_length),
                address,
            });
        }
        Ok(())
    }

    fn block_of<E>(
        &mut self,
        cursor: &mut Cursor<impl BufRead>,
        flags: u64,
    ) -> Result<usize, ReceiveError<E>> {
        if flags & wire::FLAG_CONTINUE != 0 {
            let none = StreamError::Flags {
                flags,
                reason: "goes on in a block, but none was named",
            };
            return self.current.ok_or(none.into());
        }
        let name = cursor.short_name()?;
        let Some(block) = self.by_name.get(&name).copied() else {
            return Err(StreamError::UnknownBlock { name }.into());
        };
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
