//! Fills the RAM of a guest to be woken, before its QEMU is started.
//!
//! ```text
//!  new RAM on huge pages   a chunk that is stored as it is ── O_DIRECT ──► its place in RAM, and its checksum there
//!  any other               a chunk ── O_DIRECT ──► a buffer, its checksum, unpacked ── write ──► RAM
//! ```
//!
//! Zero chunks are left holes. In place nothing is copied, and nobody waits for the file's lock, which writes to one file
//! take one after the other; with small pages each of them would be a fault and a piece of its own to the disk, so there
//! the copy is cheaper. What takes the most is memory that was not used before: the kernel clears it, and a hypervisor
//! may have to find it first.

use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

use super::chunks::{Chunk, ChunkContent, Form, Stored};
use super::codec::Unpacker;
use super::error::Mismatch;
use super::workers::for_each_chunk;
use super::{Image, ImageError};
use crate::memory::{MemoryError, PAGE_BYTES};
use crate::sys::HUGE_PAGE_BYTES;
use crate::{MemoryFile, Run};

impl Image {
    /// Fills the RAM of a guest to be woken: blocking, with as many threads as `run` says. Zero
    /// chunks are left holes.
    ///
    /// When this fails, what was filled so far stays. RAM that others have ([`MemoryFile::mapped`]) gets a chunk only after
    /// its checksum was found right; new RAM may be left with a bad one in it, and is to be thrown away.
    ///
    /// # Errors
    ///
    /// [`ImageError::Corrupt`] names the first bad chunk; [`ImageError::Mismatch`] if there is no
    /// such block or its length is another; [`ImageError::Memory`] if the RAM's file has no room;
    /// [`ImageError::Cancelled`]; [`ImageError::Io`].
    pub fn fill(&self, block: &str, into: &MemoryFile, run: &Run<'_>) -> Result<(), ImageError> {
        let mismatch = |mismatch| ImageError::Mismatch {
            block: block.to_owned(),
            mismatch,
        };
        let index = self
            .layout()
            .index_of(block)
            .ok_or_else(|| mismatch(Mismatch::Unknown))?;
        let planned = self.layout().blocks()[index].length;
        if planned != into.length() {
            return Err(mismatch(Mismatch::Length {
                planned,
                found: into.length(),
            }));
        }
        if into.is_new_on_huge_pages() {
            self.fill_in_place(index, into, run)
        } else {
            self.fill_by_writes(index, into, run)
        }
    }

    fn fill_by_writes(&self, block: usize, into: &MemoryFile, run: &Run<'_>) -> Result<(), ImageError> {
        let count = self.chunk_counts().nth(block).unwrap_or_default();
        for_each_chunk(
            run,
            count,
            || self.unpacker(),
            |unpacker, chunk| {
                self.write_chunk_into(block, chunk, unpacker, into)?;
                run.progress.advance(self.chunk(block, chunk).1.length.into());
                Ok(())
            },
            |_| Ok(()),
        )?;
        Ok(())
    }

    /// A thread works on a whole huge page, which is cleared at its first touch: a second one would wait for that.
    fn fill_in_place(&self, block: usize, into: &MemoryFile, run: &Run<'_>) -> Result<(), ImageError> {
        let mut mapping = into.map_alone()?;
        let chunk_bytes = self.chunk_bytes() as usize;
        let together = (HUGE_PAGE_BYTES / chunk_bytes).max(1);
        let pieces: Vec<Mutex<&mut [u8]>> = mapping
            .bytes()
            .chunks_mut(together * chunk_bytes)
            .map(Mutex::new)
            .collect();
        for_each_chunk(
            run,
            pieces.len(),
            || self.unpacker(),
            |unpacker, piece| {
                // Each is taken once.
                let mut ram = pieces[piece].lock().unwrap_or_else(PoisonError::into_inner);
                for (nth, ram) in ram.chunks_mut(chunk_bytes).enumerate() {
                    let chunk = piece * together + nth;
                    match self.chunk(block, chunk).1 {
                        Chunk {
                            content: ChunkContent::Stored(stored),
                            length,
                        } if is_ram_itself(&stored, length) => {
                            self.read_chunk_into(block, chunk, &stored, ram, into)?;
                        }
                        _ => self.write_chunk_into(block, chunk, unpacker, into)?,
                    }
                    run.progress.advance(ram.len() as u64);
                }
                Ok(())
            },
            |_| Ok(()),
        )?;
        Ok(())
    }

    fn read_chunk_into(
        &self,
        block: usize,
        chunk: usize,
        stored: &Stored,
        ram: &mut [u8],
        into: &MemoryFile,
    ) -> Result<(), ImageError> {
        let (placement, _, start) = self.chunk(block, chunk);
        let read = self.read_raw(ram, placement.offset + start);
        read.map_err(|error| match error {
            // The kernel could not make a page for what it read.
            ImageError::Io { source, .. } if source.raw_os_error() == Some(libc::EFAULT) => {
                no_room(into, io::ErrorKind::StorageFull.into())
            }
            error => error,
        })?;
        self.check_sum(block, chunk, stored, ram)
    }

    fn write_chunk_into(
        &self,
        block: usize,
        chunk: usize,
        unpacker: &mut Unpacker,
        into: &MemoryFile,
    ) -> Result<(), ImageError> {
        let (content, start) = self.read_chunk(block, chunk, unpacker)?;
        let filled = match content {
            // Not into a mapping: where there is no room, a write fails and a touch kills.
            Some(bytes) => into.file().write_all_at(bytes, start),
            None => into.clear(start, self.chunk(block, chunk).1.length.into()),
        };
        filled.map_err(|source| no_room(into, source))
    }
}

/// Whether what is stored for a chunk is the RAM itself, in whole pages.
fn is_ram_itself(stored: &Stored, length: u32) -> bool {
    stored.form == Form::Raw
        && stored.seal.is_none()
        && stored.length == length
        && u64::from(length).is_multiple_of(PAGE_BYTES)
}

fn no_room(into: &MemoryFile, source: io::Error) -> ImageError {
    ImageError::Memory(MemoryError::File {
        operation: "fill",
        path: into.path().to_owned(),
        source,
    })
}
