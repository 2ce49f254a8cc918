//! The pieces of a post-copy stream, for whoever plays its source: the loading guest runs at once, and its pages follow.
//!
//! ```text
//!  opening   header, configuration; a way back for answers, advise
//!  blocks    the block list
//!  pages     those that must be there before the guest runs: ROMs, firmware tables
//!  discard   at least one range, without which QEMU mistakes the order (its load then waits for itself)
//!  package   as one piece, read whole before any of it is done: listen, device sections, run
//!  pages     what the guest asks for, and all others; each page once
//!  end       end of RAM, end of the stream
//!
//!  after an interruption, on a new connection: for each block the question what was received, resume, pages, end
//! ```
//!
//! The order is the caller's to keep; what the loading QEMU says on the way back is
//! read by [`feed`](crate::feed). Commands as in
//! QEMU's `docs/devel/migration/postcopy.rst`, `migration/savevm.c` and `migration/ram.c`, 7.2 to 11.1.

use std::io::{self, Write};

use super::precopy::write_page;
use super::recording::Recording;
use super::{PAGE_BYTES, Page, wire};

const OPEN_RETURN_PATH: u16 = 1;
const PING: u16 = 2;
const ADVISE: u16 = 3;
const LISTEN: u16 = 4;
const RUN: u16 = 5;
const RAM_DISCARD: u16 = 6;
const PACKAGED: u16 = 7;
const RESUME: u16 = 9;
const ASK_RECEIVED: u16 = 10;

/// Version of the list of discarded ranges.
const DISCARD_VERSION: u8 = 0;

/// Writes the pieces of a post-copy stream for the machine of a recording.
#[derive(Debug, Clone, Copy)]
pub struct Postcopy<'a> {
    recording: &'a Recording,
}

impl<'a> Postcopy<'a> {
    /// The pieces for this machine.
    pub fn of(recording: &'a Recording) -> Self {
        Self { recording }
    }

    /// What everything begins with. `page_sizes`: the page sizes in bytes of all the loading guest's RAM blocks, ORed.
    ///
    /// # Errors
    ///
    /// Those of `out`.
    pub fn opening(&self, page_sizes: u64, out: &mut impl Write) -> io::Result<()> {
        self.recording.write_configuration(out)?;
        command(OPEN_RETURN_PATH, &[], out)?;
        let target_page = PAGE_BYTES as u64;
        command(
            ADVISE,
            &[page_sizes.to_be_bytes(), target_page.to_be_bytes()].concat(),
            out,
        )
    }

    /// The block list. `page_sizes`: the page size in bytes of each block's memory in the loading guest. It expects to be
    /// told of huge pages, which have to be the same on both sides, and of no others.
    ///
    /// # Errors
    ///
    /// Those of `out`.
    pub fn blocks(&self, page_sizes: &[u64], out: &mut impl Write) -> io::Result<()> {
        let huge = |index: usize| {
            let size = page_sizes.get(index).copied();
            size.filter(|size| *size != PAGE_BYTES as u64)
        };
        self.recording.write_block_list(huge, out)
    }

    /// Some pages. None may come twice in a stream.
    ///
    /// # Errors
    ///
    /// Those of `out`, and [`io::ErrorKind::InvalidInput`] for a page that the blocks have no place for.
    pub fn pages<'p>(
        &self,
        pages: impl IntoIterator<Item = Page<'p>>,
        out: &mut impl Write,
    ) -> io::Result<()> {
        self.recording.write_section_type(wire::SECTION_PART, out)?;
        let mut current = None;
        for page in pages {
            write_page(self.recording, &page, current, out)?;
            current = Some(page.block);
        }
        self.recording.write_section_end(out)
    }

    /// Has the loading QEMU forget `length` bytes at `start` of the block with this index, if it has any.
    ///
    /// # Errors
    ///
    /// Those of `out`, and [`io::ErrorKind::InvalidInput`] if there is no such block.
    pub fn discard(&self, block: usize, start: u64, length: u64, out: &mut impl Write) -> io::Result<()> {
        let block = self
            .recording
            .blocks()
            .get(block)
            .ok_or(io::ErrorKind::InvalidInput)?;
        let name = block.name.as_bytes();
        // The name came from a length in one byte.
        let mut list = vec![DISCARD_VERSION, name.len() as u8];
        list.extend(name);
        list.push(0);
        list.extend(start.to_be_bytes());
        list.extend(length.to_be_bytes());
        command(RAM_DISCARD, &list, out)
    }

    /// The devices, after which the loading guest runs, or waits for `cont` as its QEMU was told.
    ///
    /// # Errors
    ///
    /// Those of `out`.
    pub fn package(&self, out: &mut impl Write) -> io::Result<()> {
        let mut package = Vec::new();
        command(LISTEN, &[], &mut package)?;
        package.extend(self.recording.device_sections());
        command(PING, &1_u32.to_be_bytes(), &mut package)?;
        command(RUN, &[], &mut package)?;
        // Far below 4 GiB: a recording is limited.
        command(PACKAGED, &(package.len() as u32).to_be_bytes(), out)?;
        out.write_all(&package)
    }

    /// Asks a QEMU that lost its source which pages it has of the block with this index.
    ///
    /// # Errors
    ///
    /// Those of `out`, and [`io::ErrorKind::InvalidInput`] if there is no such block.
    pub fn ask_received(&self, block: usize, out: &mut impl Write) -> io::Result<()> {
        let block = self.recording.blocks().get(block);
        let name = &block.ok_or(io::ErrorKind::InvalidInput)?.name;
        command(
            ASK_RECEIVED,
            &[&[name.len() as u8], name.as_bytes()].concat(),
            out,
        )
    }

    /// Has a QEMU that lost its source, and has told what it has, go on.
    ///
    /// # Errors
    ///
    /// Those of `out`.
    pub fn resume(&self, out: &mut impl Write) -> io::Result<()> {
        command(RESUME, &[], out)
    }

    /// The end, when all pages were written.
    ///
    /// # Errors
    ///
    /// Those of `out`.
    pub fn end(&self, out: &mut impl Write) -> io::Result<()> {
        self.recording.write_section_type(wire::SECTION_END, out)?;
        self.recording.write_section_end(out)?;
        out.write_all(&[wire::END_OF_STREAM])
    }
}

fn command(number: u16, payload: &[u8], out: &mut impl Write) -> io::Result<()> {
    // All but a package's are short; a package's bytes follow the command.
    let length = u16::try_from(payload.len()).map_err(|_| io::ErrorKind::InvalidInput)?;
    out.write_all(&[wire::COMMAND])?;
    out.write_all(&number.to_be_bytes())?;
    out.write_all(&length.to_be_bytes())?;
    out.write_all(payload)
}
