//! Checking a whole image.

use rustix::fs::{SeekFrom, seek};

use super::chunks::ChunkContent;
use super::codec::Unpacker;
use super::error::{Corruption, ImageError};
use super::reader::Image;
use super::workers::for_each_chunk;
use crate::sys;
use crate::{ByteCount, Run};

/// What was checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verified {
    /// Chunks of RAM, zero ones included.
    pub chunks: u64,
    /// RAM in them.
    pub bytes: ByteCount,
    /// Whether an encrypted image was checked without its key: that what is stored is what was written,
    /// not that it can be decrypted.
    pub without_key: bool,
}

impl Image {
    /// Checks every chunk and the device state; table and manifest were checked when the image was
    /// opened.
    ///
    /// Chunks that were zero must still read as zeros, because RAM can be mapped straight from the
    /// image; holes are not read. Of an encrypted image that was not unlocked, what is stored is checked, and
    /// not its meaning.
    ///
    /// # Errors
    ///
    /// [`ImageError::Corrupt`] with the first chunk that is not what was written,
    /// [`ImageError::Cancelled`], [`ImageError::Io`].
    pub fn verify(&self, run: &Run<'_>) -> Result<Verified, ImageError> {
        let without_key = self.is_encrypted() && !self.is_unlocked();
        if !without_key {
            self.device_state()?;
        }
        let places: Vec<(usize, usize)> = self
            .chunk_counts()
            .enumerate()
            .flat_map(|(block, count)| (0..count).map(move |chunk| (block, chunk)))
            .collect();
        for_each_chunk(
            run,
            places.len(),
            || self.unpacker(),
            |unpacker, index| {
                let (block, chunk) = places[index];
                self.verify_chunk(block, chunk, unpacker, without_key)?;
                run.progress.advance(self.chunk(block, chunk).1.length.into());
                Ok(())
            },
            |_| Ok(()),
        )?;
        Ok(Verified {
            chunks: places.len() as u64,
            bytes: self.layout().ram(),
            without_key,
        })
    }

    fn verify_chunk(
        &self,
        block: usize,
        chunk: usize,
        unpacker: &mut Unpacker,
        without_key: bool,
    ) -> Result<(), ImageError> {
        let (placement, entry, start) = self.chunk(block, chunk);
        match entry.content {
            ChunkContent::Stored(stored) if without_key => {
                return self.read_stored(block, chunk, &stored, unpacker);
            }
            ChunkContent::Stored(_) => return self.read_chunk(block, chunk, unpacker).map(|_| ()),
            // Nobody looks at its place.
            ChunkContent::Zero if self.check_mappable().is_err() => return Ok(()),
            ChunkContent::Zero => {}
        }
        let offset = placement.offset + start;
        let next_data = seek(self.file(), SeekFrom::Data(offset));
        // Told to be a hole, up to the chunk's end at least; an error means that the file system
        // cannot tell.
        if next_data == Err(rustix::io::Errno::NXIO)
            || next_data.is_ok_and(|data| data >= offset + u64::from(entry.length))
        {
            return Ok(());
        }
        let bytes = &mut unpacker.stored[..entry.length as usize];
        self.read_raw(bytes, offset)?;
        if !sys::is_zero(bytes) {
            let source = Corruption::NotZero {
                block: placement.name.clone(),
                offset: start,
            };
            return Err(ImageError::corrupt(self.path(), source));
        }
        Ok(())
    }
}
