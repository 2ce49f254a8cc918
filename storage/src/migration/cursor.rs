//! The cursor that reads a stream front to back, whatever it comes from, and never holds more of it
//! than one field.

use std::io::{BufRead, ErrorKind, Read};

use super::StreamError;
use super::page_sink::ReceiveError;
use crate::ByteCount;

/// A stream being read.
pub(super) struct Cursor<R> {
    input: R,
    at: usize,
    /// What is being read, for errors.
    part: &'static str,
    /// What was read since [`Cursor::keep`].
    kept: Option<Vec<u8>>,
}

impl<R: BufRead> Cursor<R> {
    pub(super) fn new(input: R) -> Self {
        Self {
            input,
            at: 0,
            part: "header",
            kept: None,
        }
    }

    pub(super) fn at(&self) -> usize {
        self.at
    }

    pub(super) fn enter(&mut self, part: &'static str) {
        self.part = part;
    }

    /// The next byte, which is not taken; `None` at the end.
    pub(super) fn peek<E>(&mut self) -> Result<Option<u8>, ReceiveError<E>> {
        loop {
            match self.input.fill_buf() {
                Ok(ready) => return Ok(ready.first().copied()),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(ReceiveError::Io(error)),
            }
        }
    }

    /// From here on what is read is kept too.
    pub(super) fn keep(&mut self) {
        self.kept = Some(Vec::new());
    }

    /// What was read since [`Cursor::keep`].
    pub(super) fn kept(&mut self) -> Vec<u8> {
        self.kept.take().unwrap_or_default()
    }

    /// All that is left, which must not be more than `bound`.
    pub(super) fn rest<E>(&mut self, bound: ByteCount) -> Result<Vec<u8>, ReceiveError<E>> {
        let mut rest = Vec::new();
        // One byte more tells that there is too much.
        let limit = bound.0.saturating_add(1);
        let mut input = self.input.by_ref().take(limit);
        input.read_to_end(&mut rest).map_err(ReceiveError::Io)?;
        self.at += rest.len();
        let length = ByteCount(rest.len() as u64);
        if length > bound {
            return Err(ReceiveError::Stream(StreamError::TooLong {
                part: "device state",
                length,
                limit: bound,
            }));
        }
        Ok(rest)
    }

    /// Fills `bytes` from the stream.
    pub(super) fn fill<E>(&mut self, bytes: &mut [u8]) -> Result<(), ReceiveError<E>> {
        let mut done = 0;
        while done < bytes.len() {
            match self.input.read(&mut bytes[done..]) {
                Ok(0) => {
                    return Err(ReceiveError::Stream(StreamError::Short {
                        at: self.at + done,
                        part: self.part,
                    }));
                }
                Ok(read) => done += read,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(ReceiveError::Io(error)),
            }
        }
        self.at += done;
        if let Some(kept) = &mut self.kept {
            kept.extend_from_slice(bytes);
        }
        Ok(())
    }

    pub(super) fn array<const N: usize, E>(&mut self) -> Result<[u8; N], ReceiveError<E>> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    pub(super) fn u8<E>(&mut self) -> Result<u8, ReceiveError<E>> {
        self.array().map(|[byte]| byte)
    }

    pub(super) fn u16<E>(&mut self) -> Result<u16, ReceiveError<E>> {
        self.array().map(u16::from_be_bytes)
    }

    pub(super) fn u32<E>(&mut self) -> Result<u32, ReceiveError<E>> {
        self.array().map(u32::from_be_bytes)
    }

    pub(super) fn u64<E>(&mut self) -> Result<u64, ReceiveError<E>> {
        self.array().map(u64::from_be_bytes)
    }

    /// A name of at most 255 bytes.
    pub(super) fn name<E>(&mut self, length: u8) -> Result<String, ReceiveError<E>> {
        let mut name = vec![0; length.into()];
        self.fill(&mut name)?;
        let name = String::from_utf8(name).ok().filter(|name| !name.is_empty());
        name.ok_or(ReceiveError::Stream(StreamError::Name { part: self.part }))
    }

    /// A name behind its length in one byte.
    pub(super) fn short_name<E>(&mut self) -> Result<String, ReceiveError<E>> {
        let length = self.u8()?;
        self.name(length)
    }

    /// Bytes that say nothing to us.
    pub(super) fn skip<E>(&mut self, length: u16) -> Result<(), ReceiveError<E>> {
        self.fill(&mut vec![0; length.into()])
    }
}
