//! RAM of an image, block by block, for those who put it elsewhere.

use super::workers::for_each_chunk;
use super::{Image, ImageError};
use crate::Run;

impl Image {
    /// Reads all chunks of the block with this index, with as many threads as `run` says, and gives
    /// each, checked, to `take`: its offset in the block, its length, and its bytes, or `None` for
    /// zeros. What `take` makes of them comes back in order.
    pub(crate) fn for_each_chunk_of<R: Send>(
        &self,
        block: usize,
        run: &Run<'_>,
        take: impl Fn(u64, u64, Option<&[u8]>) -> Result<R, ImageError> + Sync,
    ) -> Result<Vec<R>, ImageError> {
        let count = self.chunk_counts().nth(block).unwrap_or_default();
        for_each_chunk(
            run,
            count,
            || self.unpacker(),
            |unpacker, chunk| {
                let length = self.chunk(block, chunk).1.length;
                let (bytes, start) = self.read_chunk(block, chunk, unpacker)?;
                let taken = take(start, length.into(), bytes)?;
                run.progress.advance(length.into());
                Ok(taken)
            },
            |_| Ok(()),
        )
    }
}
