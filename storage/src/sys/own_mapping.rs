//! Memory in a file that nobody else has.

use std::fs::File;
use std::io;

use memmap2::{Advice, MmapMut, MmapOptions};

/// The first bytes of a file of ours, mapped shared and for writing.
#[derive(Debug)]
pub(crate) struct OwnMapping {
    map: MmapMut,
}

impl OwnMapping {
    /// Maps the first `length` bytes, which must be there. The caller made the file and has shown it to nobody: nobody
    /// else maps, writes or shrinks it while this lives.
    pub(crate) fn of(file: &File, length: usize) -> io::Result<Self> {
        // SAFETY: as the caller vouches, nobody else changes these bytes or takes the pages away.
        let map = unsafe { MmapOptions::new().len(length).map_mut(file)? };
        // Only a hint, for systems that give huge pages to who asks for them.
        let _ = map.advise(Advice::HugePage);
        Ok(Self { map })
    }

    /// Its bytes. Where the file system has no room for a page, touching it is a SIGBUS; a read from a file into it is
    /// an error.
    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        &mut self.map
    }
}
