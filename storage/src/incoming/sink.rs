//! Where whole chunks go.

use crate::image::ImageError;
use crate::sys::AlignedBuf;

/// Takes whole chunks, in any order, from several threads.
pub(crate) trait ChunkSink: Sync {
    /// A thread's own.
    type Lane;

    /// A lane for a thread; each thread makes its own.
    fn lane(&self) -> Self::Lane;

    /// A buffer of a chunk's length; what is in it is arbitrary.
    ///
    /// It need not come back over the same lane: often the thread that begins a chunk is not the one
    /// that completes it.
    fn buffer(&self, lane: &mut Self::Lane) -> AlignedBuf;

    /// Takes the chunk with this index of the block with this index in the layout, each once. `None`
    /// is one whose every page was told to be zero; another may hold nothing but zeros too. Behind
    /// the end of the block, in a chunk that is shorter than the others, the content is arbitrary.
    fn put(
        &self,
        lane: &mut Self::Lane,
        block: usize,
        chunk: u64,
        content: Option<AlignedBuf>,
    ) -> Result<(), ImageError>;

    /// Ends a thread's lane: after this all that it put is taken.
    fn finish(&self, lane: Self::Lane) -> Result<(), ImageError>;
}
