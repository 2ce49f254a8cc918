//! From a [`Recording`] and pages back to a stream that QEMU loads.

use std::convert::Infallible;
use std::io::{self, BufWriter, Write};

use super::recording::{Recording, write_name};
use super::{PAGE_BYTES, Page, PageContent, wire};
use crate::sys;

/// Many small records go out as few large writes; a socket takes some 200 kB at once.
const BUFFER_BYTES: usize = 256 << 10;

/// Writes a stream that loads into a QEMU without its RAM: what stands before the pages, one RAM
/// part section with `pages`, the end of RAM, the tail.
///
/// Zero pages are written too: a block of the loading QEMU need not be zero, a ROM is not. Pages of
/// one block that follow each other do not repeat its name. Without pages the stream is the
/// [normalized](Recording::normalized) one.
///
/// # Errors
///
/// Those of `out`, and [`io::ErrorKind::InvalidInput`] for a page that the recording's blocks have
/// no place for.
pub fn write_precopy<'p>(
    recording: &Recording,
    pages: impl IntoIterator<Item = Page<'p>>,
    out: &mut impl Write,
) -> io::Result<()> {
    let pages = pages.into_iter().map(Ok::<_, Infallible>);
    try_write_precopy(recording, pages, out).map_err(|error| match error {
        PrecopyError::Output(error) => error,
        PrecopyError::Page(never) => match never {},
    })
}

/// Does as [`write_precopy`] with pages that may fail to come; the stream then ends in the middle,
/// which the loading QEMU takes as a failure.
///
/// # Errors
///
/// [`PrecopyError::Page`] with what the pages said, [`PrecopyError::Output`] for all else.
pub fn try_write_precopy<'p, E>(
    recording: &Recording,
    pages: impl IntoIterator<Item = Result<Page<'p>, E>>,
    out: &mut impl Write,
) -> Result<(), PrecopyError<E>> {
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, out);
    recording.write_head(&mut out)?;
    let mut current = None;
    for page in pages {
        let page = page.map_err(PrecopyError::Page)?;
        if current.is_none() {
            recording.write_section_type(wire::SECTION_PART, &mut out)?;
        }
        write_page(recording, &page, current, &mut out)?;
        current = Some(page.block);
    }
    if current.is_some() {
        recording.write_section_end(&mut out)?;
    }
    recording.write_end(&mut out)?;
    Ok(out.flush()?)
}

/// What stands before the pages of a stream that has some.
pub(crate) fn begin_pages(recording: &Recording, out: &mut impl Write) -> io::Result<()> {
    recording.write_head(out)?;
    recording.write_section_type(wire::SECTION_PART, out)
}

/// `length` bytes of the block with this index from `start` on, zeros where there are no `bytes`, as they go over the
/// wire. They can follow pages of any block.
pub(crate) fn write_pages(
    recording: &Recording,
    block: usize,
    start: u64,
    (bytes, length): (Option<&[u8]>, usize),
    out: &mut impl Write,
) -> io::Result<()> {
    let mut current = None;
    for at in (0..length).step_by(PAGE_BYTES) {
        let bytes = bytes.and_then(|bytes| bytes.get(at..)?.first_chunk());
        let page = Page {
            block,
            offset: start + at as u64,
            content: match bytes {
                Some(bytes) if !sys::is_zero(bytes) => PageContent::Data(bytes.into()),
                _ => PageContent::Zero,
            },
        };
        write_page(recording, &page, current, out)?;
        current = Some(block);
    }
    Ok(())
}

/// What follows the last page.
pub(crate) fn end_pages(recording: &Recording, out: &mut impl Write) -> io::Result<()> {
    recording.write_section_end(out)?;
    recording.write_end(out)
}

/// Why a stream could not be written to its end.
#[derive(Debug, thiserror::Error)]
pub enum PrecopyError<E> {
    /// A page could not be had.
    #[error("a page could not be read")]
    Page(#[source] E),
    /// The stream could not be written, or had no place for a page.
    #[error("the migration stream could not be written")]
    Output(#[from] io::Error),
}

pub(super) fn write_page(
    recording: &Recording,
    page: &Page<'_>,
    current: Option<usize>,
    out: &mut impl Write,
) -> io::Result<()> {
    let block = recording
        .blocks()
        .get(page.block)
        .filter(|block| page.offset < block.used_length.0);
    let Some(block) = block.filter(|_| page.offset & wire::FLAGS_MASK == 0) else {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "no place for a page at {:#x} of RAM block number {}",
                page.offset, page.block
            ),
        ));
    };
    let goes_on = current == Some(page.block);
    let flags = match page.content {
        PageContent::Zero => wire::FLAG_ZERO,
        PageContent::Data(_) => wire::FLAG_PAGE,
    } | if goes_on { wire::FLAG_CONTINUE } else { 0 };
    out.write_all(&(page.offset | flags).to_be_bytes())?;
    if !goes_on {
        write_name(&block.name, out)?;
    }
    match &page.content {
        PageContent::Zero => out.write_all(&[0]),
        PageContent::Data(bytes) => out.write_all(&bytes[..]),
    }
}
