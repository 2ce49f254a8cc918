//! A fingerprint of a guest's disk: what tells that it was written, where its time and size do not.
//!
//! ```text
//!  block device   |1 MiB|.4K....4K....4K....  64 of them  ....4K....4K.|1 MiB|   one CRC-32 of all of it
//!  qcow2          |header|   |L1 table|   |refcount table|   |some refcount blocks|   one CRC-32
//! ```
//!
//! * A **block device** has no time of its last write. A sample of fixed places is read, past the page cache: another
//!   host may have written since. The ends are where partition tables, file systems and their journals keep what
//!   changes with any use. A sample can miss a write: one of a single block most likely.
//! * A **qcow2** file changes its tables when the guest writes where it had not written before, and when a snapshot is
//!   taken or a tool rewrites it; not when data is overwritten in place. That is what the file's time is for.
//!
//! At most [`SAMPLE_BYTES`] and [`TABLE_BYTES`] are read, so that it takes some milliseconds of a guest's pause, and
//! does not grow with the disk.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt};
use std::path::Path;

use crate::sys::{self, ALIGNMENT, AlignedBuf, DirectFile};

/// What is read at each end of a block device.
const END_BYTES: u64 = 1 << 20;

/// Pieces between the ends, and the length of each.
const PIECES: u64 = 64;
const PIECE_BYTES: u64 = 4096;

/// The most that is read of a block device.
pub const SAMPLE_BYTES: u64 = 2 * END_BYTES + PIECES * PIECE_BYTES;

/// The most that is read of each of a qcow2's L1 table, refcount table, and refcount blocks.
pub const TABLE_BYTES: u64 = 1 << 20;

/// What begins a qcow2.
const QCOW2: &[u8; 4] = b"QFI\xfb";

/// Header fields and extensions are in the first cluster; this much of it.
const HEADER_BYTES: u64 = 64 << 10;

/// A fingerprint; equal ones say that nothing was found to be different.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Fingerprint {
    /// CRC-32 of a sample, for a block device.
    pub sample_crc32: Option<u32>,
    /// CRC-32 of the tables, for a qcow2.
    pub tables_crc32: Option<u32>,
}

/// Takes the fingerprint of what `path` leads to: a file or a block device.
///
/// # Errors
///
/// Whatever the system says to the open or to a read.
pub fn fingerprint(path: &Path) -> io::Result<Fingerprint> {
    let file = File::open(path)?;
    if !file.metadata()?.file_type().is_block_device() {
        let length = file.metadata()?.len();
        let read = |bytes: &mut [u8], offset| file.read_exact_at(bytes, offset);
        return Ok(Fingerprint {
            sample_crc32: None,
            tables_crc32: tables(length, &read)?,
        });
    }
    let length = sys::block_device::length(&file)?;
    let direct = DirectFile::beside(&file, path, false)?;
    let read = |bytes: &mut [u8], offset| read_direct(&direct, length, bytes, offset);
    Ok(Fingerprint {
        sample_crc32: Some(sample(length, &read)?),
        tables_crc32: tables(length, &read)?,
    })
}

/// Reads into the whole of `bytes`, from an offset.
type ReadAt<'a> = &'a dyn Fn(&mut [u8], u64) -> io::Result<()>;

/// Direct reads are of whole blocks.
fn read_direct(direct: &DirectFile, length: u64, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    let block = ALIGNMENT as u64;
    let end = offset + bytes.len() as u64;
    let (first, last) = (offset / block * block, end.next_multiple_of(block).min(length));
    if end > length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut buffer = AlignedBuf::zeroed((last - first) as usize);
    let read = &mut buffer[..(last - first) as usize];
    direct.read_exact_at(read, first)?;
    let skipped = (offset - first) as usize;
    bytes.copy_from_slice(&read[skipped..skipped + bytes.len()]);
    Ok(())
}

fn sample(length: u64, read: ReadAt<'_>) -> io::Result<u32> {
    let mut crc = crc32fast::Hasher::new();
    crc.update(&length.to_le_bytes());
    let mut add = |offset: u64, count: u64| -> io::Result<()> {
        let mut bytes = vec![0; count as usize];
        read(&mut bytes, offset)?;
        crc.update(&bytes);
        Ok(())
    };
    if length <= SAMPLE_BYTES {
        add(0, length)?;
    } else {
        add(0, END_BYTES)?;
        let stride = (length - 2 * END_BYTES) / PIECES / PIECE_BYTES * PIECE_BYTES;
        for piece in 0..PIECES {
            add(END_BYTES + piece * stride, PIECE_BYTES)?;
        }
        add(length - END_BYTES, END_BYTES)?;
    }
    Ok(crc.finalize())
}

/// `None`: it is no qcow2. What the header says is believed only within the file.
fn tables(length: u64, read: ReadAt<'_>) -> io::Result<Option<u32>> {
    let mut crc = crc32fast::Hasher::new();
    let mut add = |offset: u64, count: u64| -> io::Result<Vec<u8>> {
        let count = count.min(length.saturating_sub(offset));
        let mut bytes = vec![0; count as usize];
        read(&mut bytes, offset)?;
        crc.update(&bytes);
        Ok(bytes)
    };
    if length < 104 {
        return Ok(None);
    }
    let mut magic = [0; QCOW2.len()];
    read(&mut magic, 0)?;
    if magic != *QCOW2 {
        return Ok(None);
    }
    let header = add(0, HEADER_BYTES)?;
    let u32_at = |at: usize| u32::from_be_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let u64_at = |at: usize| u64::from(u32_at(at)) << 32 | u64::from(u32_at(at + 4));
    let cluster = 1_u64 << u32_at(20).clamp(9, 21);
    let l1_bytes = u64::from(u32_at(36)) * 8;
    add(u64_at(40), l1_bytes.min(TABLE_BYTES))?;
    let refcount_table_bytes = u64::from(u32_at(56)) * cluster;
    let refcounts = add(u64_at(48), refcount_table_bytes.min(TABLE_BYTES))?;
    let blocks: Vec<u64> = refcounts
        .chunks_exact(8)
        .filter_map(|entry| entry.try_into().ok().map(u64::from_be_bytes))
        .filter(|offset| *offset != 0)
        .collect();
    // The last ones are where the file grew; the others spread evenly.
    let wanted = (TABLE_BYTES / cluster).max(1) as usize;
    let step = blocks.len().div_ceil(wanted).max(1);
    for offset in blocks.iter().rev().step_by(step) {
        add(*offset, cluster)?;
    }
    Ok(Some(crc.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample_of(device: &[u8]) -> u32 {
        let read = |bytes: &mut [u8], offset: u64| {
            let from = offset as usize;
            bytes.copy_from_slice(&device[from..from + bytes.len()]);
            Ok(())
        };
        sample(device.len() as u64, &read).unwrap()
    }

    #[test]
    fn a_sample_is_bounded_and_has_both_ends_and_what_is_between() {
        let length = 64 << 20;
        let read_bytes = std::cell::Cell::new(0);
        let read = |bytes: &mut [u8], offset: u64| {
            read_bytes.set(read_bytes.get() + bytes.len() as u64);
            assert!(offset + bytes.len() as u64 <= length && offset.is_multiple_of(PIECE_BYTES));
            Ok(())
        };
        sample(length, &read).unwrap();
        assert_eq!(read_bytes.get(), SAMPLE_BYTES);

        let mut device = vec![7; length as usize];
        let before = sample_of(&device);
        let stride = (length - 2 * END_BYTES) / PIECES / PIECE_BYTES * PIECE_BYTES;
        for seen in [0, END_BYTES - 1, END_BYTES + 5 * stride, length - 1] {
            device[seen as usize] ^= 1;
            assert_ne!(sample_of(&device), before, "{seen}");
            device[seen as usize] ^= 1;
        }
        assert_eq!(sample_of(&device), before);
        device.extend([7; 4096]);
        assert_ne!(sample_of(&device), before, "it is longer");
    }

    #[test]
    fn a_small_device_is_read_whole() {
        let mut device = vec![0; 4096 * 7];
        let before = sample_of(&device);
        for at in (0..device.len()).step_by(4096) {
            device[at] = 1;
            assert_ne!(sample_of(&device), before);
            device[at] = 0;
        }
    }

    /// A qcow2 of 64 KiB clusters: header, refcount table, one refcount block, L1 table, one cluster of data.
    fn qcow2() -> Vec<u8> {
        let cluster = 64 << 10;
        let mut file = vec![0; 5 * cluster];
        file[..4].copy_from_slice(QCOW2);
        file[4..8].copy_from_slice(&3_u32.to_be_bytes());
        file[20..24].copy_from_slice(&16_u32.to_be_bytes());
        file[36..40].copy_from_slice(&2_u32.to_be_bytes());
        file[40..48].copy_from_slice(&(3 * cluster as u64).to_be_bytes());
        file[48..56].copy_from_slice(&(cluster as u64).to_be_bytes());
        file[56..60].copy_from_slice(&1_u32.to_be_bytes());
        file[cluster..cluster + 8].copy_from_slice(&(2 * cluster as u64).to_be_bytes());
        file
    }

    fn of(content: &[u8]) -> Fingerprint {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), content).unwrap();
        fingerprint(file.path()).unwrap()
    }

    #[test]
    fn the_tables_of_a_qcow2_are_in_its_fingerprint_and_its_data_is_not() {
        let cluster = 64 << 10;
        let mut file = qcow2();
        let before = of(&file);
        assert!(before.tables_crc32.is_some() && before.sample_crc32.is_none());
        for (what, at) in [
            ("header", 24),
            ("extensions", 200),
            ("refcount table", cluster + 8),
            ("refcount block", 2 * cluster + 6),
            ("L1 table", 3 * cluster + 9),
        ] {
            file[at] ^= 1;
            assert_ne!(of(&file), before, "{what}");
            file[at] ^= 1;
        }
        file[4 * cluster] ^= 1;
        assert_eq!(of(&file), before);
    }

    #[test]
    fn what_is_no_qcow2_has_no_tables_and_a_torn_one_harms_nobody() {
        assert_eq!(of(b"QFI\xfb"), Fingerprint::default());
        assert_eq!(of(&[0; 4096]), Fingerprint::default());
        let whole = qcow2();
        for length in [104, 4096, 70_000, 200_000] {
            assert!(of(&whole[..length]).tables_crc32.is_some(), "{length}");
        }
        let mut wild = whole;
        wild[20..60].fill(0xff);
        assert!(of(&wild).tables_crc32.is_some());
    }
}
