//! All unsafe code of the crate: a mapping of guest RAM, aligned buffers, direct I/O, io_uring.
//!
//! Guest RAM may change under us (another process maps it too), so its bytes never leave this
//! module as a slice: [`Mapping`] answers questions about a range (is it zero, what is its CRC-32)
//! and writes a range to a file.

mod aligned;
pub(crate) mod block_device;
mod direct;
mod mapping;
mod own_mapping;
mod paged;
pub(crate) mod probe;
pub(crate) mod uring;
mod writeback;

pub(crate) use aligned::{AlignedBuf, HUGE_PAGE_BYTES};
pub(crate) use direct::DirectFile;
pub(crate) use mapping::Mapping;
pub(crate) use own_mapping::OwnMapping;
pub(crate) use paged::PagedBuf;

/// What O_DIRECT asks of memory addresses, file offsets and lengths at most on the devices of
/// today.
pub(crate) const ALIGNMENT: usize = 4096;

/// Whether every byte is zero, at the speed of memory.
///
/// A non-zero chunk is told by its first word nearly always; the rest is a fold that the compiler
/// turns into vector instructions, left every KiB so that a chunk which begins with zeros costs no
/// more than it must.
pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    const STRIDE: usize = 1024;

    let (strides, rest) = bytes.as_chunks::<STRIDE>();
    if bytes.first_chunk::<8>().is_some_and(|word| *word != [0; 8]) {
        return false;
    }
    strides.iter().all(|stride| {
        let (words, _) = stride.as_chunks::<8>();
        words.iter().fold(0, |all, word| all | u64::from_ne_bytes(*word)) == 0
    }) && rest.iter().all(|byte| *byte == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_set_bit_anywhere_is_seen() {
        for length in [0, 1, 7, 8, 1023, 1024, 1025, 4096, 5000] {
            let mut bytes = vec![0_u8; length];
            assert!(is_zero(&bytes), "{length} zeros");
            for position in 0..length {
                bytes[position] = 0x10;
                assert!(!is_zero(&bytes), "bit at {position} of {length}");
                bytes[position] = 0;
            }
        }
    }
}
