//! Cuts a stream of bytes into lines of a limited length.
//!
//! The limit is checked while bytes arrive, so a peer that never ends its line costs at most the
//! limit. No byte is looked at twice in search of a line's end.

use bytes::{Buf, BytesMut};

/// The longest line that is accepted, in bytes.
///
/// The largest reply QEMU is known to give, `query-qmp-schema`, has 0.25 MB. QEMU's own parser
/// takes 64 MiB from us; a quarter of that is generous for what it says.
pub const LINE_LIMIT_BYTES: usize = 16 << 20;

/// Received bytes, waiting to be complete lines.
#[derive(Debug)]
pub struct LineBuffer {
    received: BytesMut,
    /// How much of `received` is known to hold no line end.
    searched: usize,
    limit_bytes: usize,
}

/// A line is longer than the limit; nothing after it can be understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a line longer than {limit_bytes} bytes")]
pub struct LineTooLong {
    /// The limit.
    pub limit_bytes: usize,
}

impl LineBuffer {
    /// An empty buffer that accepts lines of up to `limit_bytes`, the line end not counted.
    pub fn new(limit_bytes: usize) -> Self {
        Self {
            received: BytesMut::new(),
            searched: 0,
            limit_bytes,
        }
    }

    /// Adds bytes as they were received.
    pub fn extend(&mut self, bytes: &[u8]) {
        self.received.extend_from_slice(bytes);
    }

    /// Takes the next complete line that is not blank, without its line end (`\n` or `\r\n`).
    pub fn next_line(&mut self) -> Result<Option<BytesMut>, LineTooLong> {
        loop {
            let found = self.received[self.searched..]
                .iter()
                .position(|&byte| byte == b'\n');
            let length = found.map_or(self.received.len(), |offset| self.searched + offset);
            if length > self.limit_bytes {
                return Err(LineTooLong {
                    limit_bytes: self.limit_bytes,
                });
            }
            if found.is_none() {
                self.searched = length;
                return Ok(None);
            }
            let mut line = self.received.split_to(length);
            self.received.advance(1);
            self.searched = 0;
            line.truncate(line.trim_ascii_end().len());
            if !line.is_empty() {
                return Ok(Some(line));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(buffer: &mut LineBuffer) -> Vec<String> {
        std::iter::from_fn(|| buffer.next_line().unwrap())
            .map(|line| String::from_utf8(line.to_vec()).unwrap())
            .collect()
    }

    #[test]
    fn lines_are_the_same_wherever_the_stream_is_cut() {
        let stream = b"{\"a\":1}\r\n\r\n{\"b\":\"two\"}\n{}\n";
        for size in 1..=stream.len() {
            let mut buffer = LineBuffer::new(64);
            let mut found = Vec::new();
            for part in stream.chunks(size) {
                buffer.extend(part);
                found.extend(lines(&mut buffer));
            }
            assert_eq!(
                found,
                ["{\"a\":1}", "{\"b\":\"two\"}", "{}"],
                "cut every {size} bytes"
            );
        }
    }

    #[test]
    fn an_unfinished_line_stays_until_its_end_arrives() {
        let mut buffer = LineBuffer::new(64);
        buffer.extend(b"one\ntw");
        assert_eq!(lines(&mut buffer), ["one"]);
        assert_eq!(lines(&mut buffer), [""; 0]);
        buffer.extend(b"o\n");
        assert_eq!(lines(&mut buffer), ["two"]);
    }

    #[test]
    fn a_line_at_the_limit_is_accepted_and_one_byte_more_is_not() {
        let mut buffer = LineBuffer::new(4);
        buffer.extend(b"1234\n");
        assert_eq!(lines(&mut buffer), ["1234"]);
        buffer.extend(b"12345\n");
        assert_eq!(buffer.next_line(), Err(LineTooLong { limit_bytes: 4 }));
    }

    #[test]
    fn an_endless_line_is_refused_before_its_end() {
        let mut buffer = LineBuffer::new(4);
        buffer.extend(b"12345");
        assert_eq!(buffer.next_line(), Err(LineTooLong { limit_bytes: 4 }));
    }
}
