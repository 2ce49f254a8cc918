//! What the parser needs from others: a place for each page, and who says what went wrong.

use std::io;

use super::{PAGE_BYTES, StreamBlock, StreamError};

/// Takes the pages of a stream, one by one, in the order in which they come.
///
/// A page may come several times if the guest ran while it was saved; what comes last holds.
pub(crate) trait PageSink {
    /// Why it cannot take something.
    type Error;

    /// The RAM blocks, told once and before the first page. Pages name them by their index.
    fn blocks(&mut self, blocks: &[StreamBlock]) -> Result<(), Self::Error>;

    /// A page of zeros; it lies in its block.
    fn zero(&mut self, block: usize, offset: u64) -> Result<(), Self::Error>;

    /// A page, which `fill` reads from the stream to wherever it shall be; it lies in its block.
    /// `fill` must be called unless an error is returned.
    fn data(
        &mut self,
        block: usize,
        offset: u64,
        fill: impl FnOnce(&mut [u8; PAGE_BYTES]) -> Result<(), ReceiveError<Self::Error>>,
    ) -> Result<(), ReceiveError<Self::Error>>;
}

/// Why a stream was not received to its end.
#[derive(Debug)]
pub(crate) enum ReceiveError<E> {
    /// It could not be read.
    Io(io::Error),
    /// It is not one that can be kept.
    Stream(StreamError),
    /// Its pages could not be taken.
    Sink(E),
}

impl<E> From<StreamError> for ReceiveError<E> {
    fn from(error: StreamError) -> Self {
        Self::Stream(error)
    }
}
