//! A recorded stream, taken apart.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io::{self, Write};

use super::page_sink::{PageSink, ReceiveError};
use super::wire::{self, PAGE_BYTES};
use super::{Page, PageContent, StreamError, parse};
use crate::ByteCount;

/// A RAM block, as a stream lists it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamBlock {
    /// Name (`pc.ram`, `/rom@etc/acpi/tables`).
    pub name: String,
    /// Used length, a multiple of 4 KiB.
    pub used_length: ByteCount,
    /// Guest-physical address, told only when the stream was recorded with x-ignore-shared.
    pub address: Option<u64>,
}

/// A migration stream of a stopped guest, taken apart: what can be put together again for any way
/// to wake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recording {
    pub(super) machine: String,
    /// The configuration section with its type byte, without capabilities.
    pub(super) configuration: Vec<u8>,
    /// Commands before the RAM section begins.
    pub(super) opening: Vec<u8>,
    pub(super) section: RamSection,
    pub(super) blocks: Vec<StreamBlock>,
    /// Commands between the RAM section's beginning and its end.
    pub(super) turning: Vec<u8>,
    pub(super) pages: Pages,
    /// All behind the RAM section.
    pub(super) tail: Vec<u8>,
    /// How much of the tail is device sections.
    pub(super) device_sections_bytes: usize,
}

/// How the RAM section is numbered and closed; differs between versions of QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RamSection {
    pub(super) number: u32,
    pub(super) instance: u32,
    pub(super) footers: bool,
}

/// Pages by block and offset; a page that came twice holds what came last.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Pages {
    places: BTreeMap<(usize, u64), Slot>,
    contents: Vec<[u8; PAGE_BYTES]>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Slot {
    Zero,
    Data(usize),
}

impl Recording {
    /// Takes a stream apart; see the [module](super) for what is kept.
    ///
    /// # Errors
    ///
    /// [`StreamError`] names what cannot be kept: a stream that was cut, a capability that changes
    /// its form, a section before the end of RAM that is not RAM's, a page record of an unknown
    /// kind.
    pub fn parse(stream: &[u8]) -> Result<Self, StreamError> {
        parse::recording(stream)
    }

    /// The machine type, as QEMU resolved it (`pc-q35-10.0`).
    pub fn machine(&self) -> &str {
        &self.machine
    }

    /// The RAM blocks, in the stream's order.
    pub fn blocks(&self) -> &[StreamBlock] {
        &self.blocks
    }

    /// Number of the RAM section, which a synthesized stream has to keep (2 in QEMU 7.2, 1 from
    /// 10.0 on).
    pub fn ram_section_number(&self) -> u32 {
        self.section.number
    }

    /// The pages that came in the stream, by block and offset, each once.
    pub fn pages(&self) -> impl Iterator<Item = Page<'_>> {
        self.pages.all()
    }

    /// The device sections: the tail without the end of the stream and the VM description.
    pub fn device_sections(&self) -> &[u8] {
        &self.tail[..self.device_sections_bytes]
    }

    /// The loadable form without capabilities, addresses and pages: what an image stores.
    ///
    /// Parsing it gives a recording whose normalized form is the same again.
    pub fn normalized(&self) -> Vec<u8> {
        let mut stream = Vec::with_capacity(self.tail.len() + 4096);
        // Writing to memory does not fail.
        let _ = self.write_head(&mut stream);
        let _ = self.write_end(&mut stream);
        stream
    }

    /// How many pages came for the block with this index.
    pub(crate) fn page_count(&self, block: usize) -> u64 {
        self.pages.places.range((block, 0)..=(block, u64::MAX)).count() as u64
    }

    /// The pages that came for the block with this index, by offset.
    pub(crate) fn block_pages(&self, block: usize) -> impl Iterator<Item = Page<'_>> {
        let places = self.pages.places.range((block, 0)..=(block, u64::MAX));
        places.map(|(place, slot)| self.pages.page(place, slot))
    }

    /// All that stands before the pages.
    pub(super) fn write_head(&self, out: &mut impl Write) -> io::Result<()> {
        self.write_configuration(out)?;
        self.write_block_list(|_| None, out)
    }

    /// What a stream begins with.
    pub(super) fn write_configuration(&self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(&wire::MAGIC.to_be_bytes())?;
        out.write_all(&wire::VERSION.to_be_bytes())?;
        out.write_all(&self.configuration)?;
        out.write_all(&self.opening)
    }

    /// The section that begins RAM. `page_size`: of the block with this index, where the loading QEMU expects to be told.
    pub(super) fn write_block_list(
        &self,
        page_size: impl Fn(usize) -> Option<u64>,
        out: &mut impl Write,
    ) -> io::Result<()> {
        self.write_section_type(wire::SECTION_START, out)?;
        out.write_all(b"\x03ram")?;
        out.write_all(&self.section.instance.to_be_bytes())?;
        out.write_all(&wire::RAM_VERSION.to_be_bytes())?;
        let total: ByteCount = self.blocks.iter().map(|block| block.used_length).sum();
        out.write_all(&(total.0 | wire::FLAG_MEM_SIZE).to_be_bytes())?;
        for (index, block) in self.blocks.iter().enumerate() {
            write_name(&block.name, out)?;
            out.write_all(&block.used_length.0.to_be_bytes())?;
            if let Some(size) = page_size(index) {
                out.write_all(&size.to_be_bytes())?;
            }
        }
        self.write_section_end(out)
    }

    /// All that stands behind the pages.
    pub(super) fn write_end(&self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(&self.turning)?;
        self.write_section_type(wire::SECTION_END, out)?;
        self.write_section_end(out)?;
        out.write_all(&self.tail)
    }

    pub(super) fn write_section_type(&self, section_type: u8, out: &mut impl Write) -> io::Result<()> {
        out.write_all(&[section_type])?;
        out.write_all(&self.section.number.to_be_bytes())
    }

    pub(super) fn write_section_end(&self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(&wire::FLAG_EOS.to_be_bytes())?;
        if self.section.footers {
            self.write_section_type(wire::FOOTER, out)?;
        }
        Ok(())
    }
}

impl PageSink for Pages {
    type Error = Infallible;

    fn blocks(&mut self, _: &[StreamBlock]) -> Result<(), Infallible> {
        Ok(())
    }

    fn zero(&mut self, block: usize, offset: u64) -> Result<(), Infallible> {
        self.places.insert((block, offset), Slot::Zero);
        Ok(())
    }

    fn data(
        &mut self,
        block: usize,
        offset: u64,
        fill: impl FnOnce(&mut [u8; PAGE_BYTES]) -> Result<(), ReceiveError<Infallible>>,
    ) -> Result<(), ReceiveError<Infallible>> {
        let new = self.contents.len();
        let index = match self.places.insert((block, offset), Slot::Data(new)) {
            // Its old place is free to be used again, so that pages sent over and over do not pile
            // up.
            Some(Slot::Data(old)) => {
                self.places.insert((block, offset), Slot::Data(old));
                old
            }
            _ => {
                self.contents.push([0; PAGE_BYTES]);
                new
            }
        };
        fill(&mut self.contents[index])
    }
}

impl Pages {
    fn all(&self) -> impl Iterator<Item = Page<'_>> {
        self.places.iter().map(|(place, slot)| self.page(place, slot))
    }

    fn page(&self, &(block, offset): &(usize, u64), slot: &Slot) -> Page<'_> {
        let content = match *slot {
            Slot::Zero => PageContent::Zero,
            Slot::Data(index) => PageContent::Data((&self.contents[index]).into()),
        };
        Page {
            block,
            offset,
            content,
        }
    }
}

/// Writes a name behind its length in one byte; names come from such a byte, so they fit.
pub(super) fn write_name(name: &str, out: &mut impl Write) -> io::Result<()> {
    out.write_all(&[name.len() as u8])?;
    out.write_all(name.as_bytes())
}
