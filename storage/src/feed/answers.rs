//! What the loading QEMU says on the way back.
//!
//! Each message is `u16 kind | u16 length | payload`. A kind that is not known is passed over by its length. Kinds as
//! in QEMU's `migration/migration.c`, 7.2 to 11.1.

use std::io::{self, Read};

const SHUT: u16 = 1;
const PONG: u16 = 2;
const REQUEST_IN_BLOCK: u16 = 3;
const REQUEST: u16 = 4;
const RECEIVED: u16 = 5;
const RESUMED: u16 = 6;

/// Stands behind a bitmap of received pages.
const RECEIVED_END: u64 = 0x0123_4567_89ab_cdef;

/// Bits of the largest block that is believed: 64 TiB of pages.
const RECEIVED_LIMIT_BYTES: u64 = 2 << 30;

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Answer {
    /// QEMU has all, or gives up.
    Shut {
        /// Whether something went wrong.
        failed: bool,
    },
    /// It has read as far as a ping.
    Pong(u32),
    /// It needs this range of a block, named or the one before.
    Request {
        block: Option<String>,
        start: u64,
        length: u32,
    },
    /// Which pages of a block it has: a bit for each.
    Received { block: String, bitmap: Vec<u8> },
    /// It goes on after an interruption.
    Resumed,
    /// Something of a later QEMU.
    Unknown(u16),
}

/// Reads the next message; `None` at the end.
pub(super) fn next(from: &mut impl Read) -> io::Result<Option<Answer>> {
    let mut kind = [0; 2];
    match from.read_exact(&mut kind) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        read => read?,
    }
    let length = u16::from_be_bytes(array(from)?);
    let mut payload = vec![0; length.into()];
    from.read_exact(&mut payload)?;
    let kind = u16::from_be_bytes(kind);
    let answer = match kind {
        SHUT => Answer::Shut {
            failed: word(&payload, kind)? != 0,
        },
        PONG => Answer::Pong(word(&payload, kind)?),
        REQUEST_IN_BLOCK | REQUEST => {
            let (start, rest) = payload.split_first_chunk().ok_or_else(|| cut(kind))?;
            let (length, rest) = rest.split_first_chunk().ok_or_else(|| cut(kind))?;
            let block = match kind {
                REQUEST => None,
                _ => Some(name(rest, kind)?),
            };
            Answer::Request {
                block,
                start: u64::from_be_bytes(*start),
                length: u32::from_be_bytes(*length),
            }
        }
        RECEIVED => Answer::Received {
            block: name(&payload, kind)?,
            bitmap: bitmap(from)?,
        },
        RESUMED => Answer::Resumed,
        other => Answer::Unknown(other),
    };
    Ok(Some(answer))
}

fn bitmap(from: &mut impl Read) -> io::Result<Vec<u8>> {
    let bytes = u64::from_be_bytes(array(from)?);
    if bytes > RECEIVED_LIMIT_BYTES {
        return Err(invalid(format!("a bitmap of {bytes} bytes")));
    }
    let mut bitmap = Vec::new();
    // Not allocated on the word of a length.
    let read = from.take(bytes).read_to_end(&mut bitmap)?;
    if read as u64 != bytes {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    if u64::from_be_bytes(array(from)?) != RECEIVED_END {
        return Err(invalid("a bitmap without its end".to_owned()));
    }
    Ok(bitmap)
}

fn array<const N: usize>(from: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn word(payload: &[u8], kind: u16) -> io::Result<u32> {
    let word = payload.first_chunk().ok_or_else(|| cut(kind))?;
    Ok(u32::from_be_bytes(*word))
}

fn name(bytes: &[u8], kind: u16) -> io::Result<String> {
    let (length, name) = bytes.split_first().ok_or_else(|| cut(kind))?;
    let name = name.get(..usize::from(*length)).ok_or_else(|| cut(kind))?;
    String::from_utf8(name.to_vec()).map_err(|_| invalid("a name that is no text".to_owned()))
}

fn cut(kind: u16) -> io::Error {
    invalid(format!("a message of kind {kind} that is too short"))
}

fn invalid(what: String) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("QEMU sent {what} on the way back"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u16, payload: &[u8]) -> Vec<u8> {
        let length = payload.len() as u16;
        [&kind.to_be_bytes()[..], &length.to_be_bytes(), payload].concat()
    }

    #[test]
    fn every_kind_of_message_is_read_and_a_later_one_passed_over() {
        let range = [&0x5000_u64.to_be_bytes()[..], &4096_u32.to_be_bytes()].concat();
        let stream = [
            message(PONG, &7_u32.to_be_bytes()),
            message(REQUEST_IN_BLOCK, &[&range[..], b"\x06pc.ram"].concat()),
            message(REQUEST, &range),
            message(9, b"news"),
            message(RECEIVED, b"\x06pc.ram"),
            8_u64.to_be_bytes().to_vec(),
            vec![1, 2, 3, 4, 5, 6, 7, 8],
            RECEIVED_END.to_be_bytes().to_vec(),
            message(RESUMED, &1_u32.to_be_bytes()),
            message(SHUT, &0_u32.to_be_bytes()),
        ]
        .concat();
        let mut stream = &stream[..];
        let mut read = Vec::new();
        while let Some(answer) = next(&mut stream).unwrap() {
            read.push(answer);
        }
        let request = |block: Option<&str>| Answer::Request {
            block: block.map(str::to_owned),
            start: 0x5000,
            length: 4096,
        };
        assert_eq!(
            read,
            [
                Answer::Pong(7),
                request(Some("pc.ram")),
                request(None),
                Answer::Unknown(9),
                Answer::Received {
                    block: "pc.ram".to_owned(),
                    bitmap: vec![1, 2, 3, 4, 5, 6, 7, 8],
                },
                Answer::Resumed,
                Answer::Shut { failed: false },
            ]
        );
    }

    #[test]
    fn a_message_that_is_cut_or_claims_too_much_is_an_error() {
        let endless = [message(RECEIVED, b"\x01r"), u64::MAX.to_be_bytes().to_vec()].concat();
        let without_end = [message(RECEIVED, b"\x01r"), vec![0; 16]].concat();
        for stream in [
            message(PONG, b"1"),
            message(REQUEST, b"123"),
            message(REQUEST_IN_BLOCK, &[0; 12]),
            message(REQUEST_IN_BLOCK, &[&[0; 12][..], b"\x09ram"].concat()),
            message(SHUT, &[0; 4])[..5].to_vec(),
            endless,
            without_end,
        ] {
            next(&mut &stream[..]).unwrap_err();
        }
    }
}
