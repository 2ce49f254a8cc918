//! Bytes in memory, taken from the front; never beyond their end.

/// What is left of some bytes, and how far it is from their beginning.
pub(super) struct Slice<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Slice<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    pub(super) fn at(&self) -> usize {
        self.at
    }

    pub(super) fn peek(&self) -> Option<u8> {
        self.bytes.get(self.at).copied()
    }

    /// Everything that was taken since `start`.
    pub(super) fn since(&self, start: usize) -> &'a [u8] {
        &self.bytes[start..self.at]
    }

    pub(super) fn rest(&self) -> &'a [u8] {
        &self.bytes[self.at..]
    }

    pub(super) fn bytes(&mut self, length: usize) -> Option<&'a [u8]> {
        let (taken, _) = self.rest().split_at_checked(length)?;
        self.at += length;
        Some(taken)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Option<&'a [u8; N]> {
        self.bytes(N)?.first_chunk()
    }

    pub(super) fn u8(&mut self) -> Option<u8> {
        self.array().map(|[byte]| *byte)
    }

    pub(super) fn u16(&mut self) -> Option<u16> {
        self.array().copied().map(u16::from_be_bytes)
    }

    pub(super) fn u32(&mut self) -> Option<u32> {
        self.array().copied().map(u32::from_be_bytes)
    }

    pub(super) fn u64(&mut self) -> Option<u64> {
        self.array().copied().map(u64::from_be_bytes)
    }

    /// A name behind its length in one byte; `None` too if it is empty or not UTF-8.
    pub(super) fn short_name(&mut self) -> Option<&'a str> {
        let length = self.u8()?;
        let name = std::str::from_utf8(self.bytes(length.into())?).ok()?;
        (!name.is_empty()).then_some(name)
    }
}
