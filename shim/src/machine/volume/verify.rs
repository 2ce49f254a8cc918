//! Whether a copy is what it should be: both volumes are read and compared before the guest is switched to the new one.
//!
//! The guest goes on writing, and its writes reach both, so what is read of the two is not of one instant. Blocks that
//! differ are read again until they do not; the few that are in motion whenever they are looked at are compared when all
//! stands still for the switch. So each block has been seen to be the same on both after it was copied, and no pause gets
//! longer by what the disk holds.
//!
//! We read past QEMU, and past the page cache where that goes, so both have to be raw.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::{OFlags, SeekFrom, seek};

use super::plan::Volume;
use crate::error::{Code, Failure};
use crate::machine::effect::blocking;

/// How much is read at once.
const CHUNK_BYTES: usize = 1 << 20;

/// What is looked at again where something differs.
const BLOCK_BYTES: usize = 64 << 10;

/// What direct reads are aligned to.
const ALIGNMENT: usize = 4096;

/// How often blocks that differ are looked at again while the guest writes, and how long is waited between.
const ROUNDS: u32 = 40;
const ROUND_INTERVAL: Duration = Duration::from_millis(50);

/// How many blocks may be left for the moment of the switch: reading them takes some ten milliseconds.
const LEFT_LIMIT: usize = 256;

/// A block of one volume that differed whenever it was looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    volume: usize,
    offset: u64,
}

/// How far a comparison is.
#[derive(Debug, Clone, Default)]
pub struct Looked {
    bytes: Arc<AtomicU64>,
    ends: Arc<AtomicBool>,
}

impl Looked {
    /// What has been compared, in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn check(&self) -> io::Result<()> {
        match self.ends.load(Ordering::Relaxed) {
            true => Err(io::Error::other("nobody waits for it any more")),
            false => Ok(()),
        }
    }
}

/// Lets a comparison end that nobody waits for.
struct EndsWithUs(Looked);

impl Drop for EndsWithUs {
    fn drop(&mut self) {
        self.0.ends.store(true, Ordering::Relaxed);
    }
}

/// Compares all of these volumes with their copies, which have to be kept in step meanwhile. Returns the few blocks that
/// were in motion; `looked` is told how far it is.
pub async fn compare(volumes: &[Volume], looked: Looked) -> Result<Vec<Block>, Failure> {
    let _ends = EndsWithUs(looked.clone());
    let pairs = Pairs::of(volumes)?;
    let (all, first) = (pairs.clone(), looked.clone());
    let mut left = blocking(move || all.compare_all(&first).map_err(unreadable)).await?;
    for _ in 0..ROUNDS {
        if left.is_empty() {
            return Ok(left);
        }
        tokio::time::sleep(ROUND_INTERVAL).await;
        left = again(&pairs, left).await?;
    }
    match left.len() <= LEFT_LIMIT {
        true => Ok(left),
        false => Err(differs(volumes, &left)),
    }
}

/// Compares what was in motion, now that all stands still.
pub async fn compare_still(volumes: &[Volume], left: &[Block]) -> Result<(), Failure> {
    if left.is_empty() {
        return Ok(());
    }
    let left = again(&Pairs::of(volumes)?, left.to_vec()).await?;
    match left.is_empty() {
        true => Ok(()),
        false => Err(differs(volumes, &left)),
    }
}

async fn again(pairs: &Pairs, left: Vec<Block>) -> Result<Vec<Block>, Failure> {
    let pairs = pairs.clone();
    blocking(move || pairs.compare_blocks(&left).map_err(unreadable)).await
}

fn unreadable(error: io::Error) -> Failure {
    Failure::new(Code::StorageIo, format!("cannot compare the volumes: {error}"))
}

fn differs(volumes: &[Volume], left: &[Block]) -> Failure {
    let first = left.first().copied().unwrap_or(Block { volume: 0, offset: 0 });
    let volume = &volumes[first.volume];
    Failure::new(
        Code::StorageIo,
        format!(
            "{}: {} is not what {} is, although all was copied: {} blocks of {BLOCK_BYTES} bytes differ, the first at byte {}",
            volume.label,
            volume.target.path.display(),
            volume.old_file.display(),
            left.len(),
            first.offset
        ),
    )
}

/// Both files of each volume.
#[derive(Clone)]
struct Pairs(Arc<Vec<Pair>>);

struct Pair {
    old: File,
    new: File,
    size_bytes: u64,
}

impl Pairs {
    fn of(volumes: &[Volume]) -> Result<Self, Failure> {
        let pair = |volume: &Volume| {
            let open = |path: &Path| {
                open(path)
                    .map_err(|error| Failure::new(Code::StorageIo, format!("{}: {error}", path.display())))
            };
            Ok(Pair {
                old: open(&volume.old_file)?,
                new: open(&volume.target.path)?,
                size_bytes: volume.size_bytes,
            })
        };
        let pairs = volumes.iter().map(pair).collect::<Result<_, Failure>>()?;
        Ok(Self(Arc::new(pairs)))
    }

    fn compare_all(&self, looked: &Looked) -> io::Result<Vec<Block>> {
        let mut buffers = [Buffer::new(CHUNK_BYTES), Buffer::new(CHUNK_BYTES)];
        let mut left = Vec::new();
        let mut before = 0;
        for (volume, pair) in self.0.iter().enumerate() {
            let mut offset = 0;
            while offset < pair.size_bytes {
                looked.check()?;
                offset = pair.next_data(offset);
                let length = pair.size_bytes.saturating_sub(offset).min(CHUNK_BYTES as u64);
                let unequal = pair.unequal(offset, length as usize, &mut buffers)?;
                left.extend(unequal.map(|offset| Block { volume, offset }));
                offset += CHUNK_BYTES as u64;
                looked
                    .bytes
                    .store(before + offset.min(pair.size_bytes), Ordering::Relaxed);
            }
            before += pair.size_bytes;
        }
        Ok(left)
    }

    fn compare_blocks(&self, blocks: &[Block]) -> io::Result<Vec<Block>> {
        let mut buffers = [Buffer::new(BLOCK_BYTES), Buffer::new(BLOCK_BYTES)];
        let mut left = Vec::new();
        for block in blocks {
            let pair = &self.0[block.volume];
            let length = (pair.size_bytes - block.offset).min(BLOCK_BYTES as u64);
            if pair
                .unequal(block.offset, length as usize, &mut buffers)?
                .next()
                .is_some()
            {
                left.push(*block);
            }
        }
        Ok(left)
    }
}

impl Pair {
    /// Where the next chunk begins in which either has anything but a hole; at the end where there is none.
    fn next_data(&self, offset: u64) -> u64 {
        let data = |file: &File| match seek(file, SeekFrom::Data(offset)) {
            Ok(data) => data,
            // Nothing more in it. Whatever else is wrong shows when it is read.
            Err(rustix::io::Errno::NXIO) => self.size_bytes,
            Err(_) => offset,
        };
        let next = data(&self.old).min(data(&self.new)).max(offset);
        if next >= self.size_bytes {
            return self.size_bytes;
        }
        next - next % CHUNK_BYTES as u64
    }

    /// The blocks of a stretch that differ.
    fn unequal<'a>(
        &self,
        offset: u64,
        length: usize,
        [old, new]: &'a mut [Buffer; 2],
    ) -> io::Result<impl Iterator<Item = u64> + use<'a>> {
        let (old, new) = (
            old.read(&self.old, offset, length)?,
            new.read(&self.new, offset, length)?,
        );
        let equal = old == new;
        let blocks = old.chunks(BLOCK_BYTES).zip(new.chunks(BLOCK_BYTES));
        Ok(blocks
            .enumerate()
            .filter(move |(_, (old, new))| !equal && old != new)
            .map(move |(at, _)| offset + (at * BLOCK_BYTES) as u64))
    }
}

/// Past the page cache where that goes, so that what the storage holds is looked at.
fn open(path: &Path) -> io::Result<File> {
    let opened = |flags: OFlags| {
        let flags = i32::try_from(flags.bits()).map_err(io::Error::other)?;
        OpenOptions::new().read(true).custom_flags(flags).open(path)
    };
    opened(OFlags::CLOEXEC | OFlags::DIRECT).or_else(|_| opened(OFlags::CLOEXEC))
}

/// A buffer for direct reads.
struct Buffer {
    memory: Vec<u8>,
    begin: usize,
}

impl Buffer {
    fn new(bytes: usize) -> Self {
        let memory = vec![0; bytes + ALIGNMENT];
        let begin = memory.as_ptr().align_offset(ALIGNMENT);
        Self { memory, begin }
    }

    /// So many bytes from there on.
    fn read(&mut self, file: &File, offset: u64, length: usize) -> io::Result<&[u8]> {
        let wanted = length.next_multiple_of(ALIGNMENT);
        let buffer = &mut self.memory[self.begin..self.begin + wanted];
        let mut done = 0;
        while done < length {
            match file.read_at(&mut buffer[done..], offset + done as u64)? {
                0 => return Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
                read => done += read,
            }
        }
        Ok(&buffer[..length])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A disk that is no multiple of anything, on a volume that is larger.
    const SIZE: u64 = (3 << 20) + 512;

    fn pairs() -> (tempfile::TempDir, Pairs) {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, size: u64| {
            let path = folder.path().join(name);
            let file = File::create(&path).unwrap();
            file.set_len(size).unwrap();
            file.write_all_at(&[7; 4096], 2 << 20).unwrap();
            open(&path).unwrap()
        };
        let pair = Pair {
            old: file("old", SIZE),
            new: file("new", SIZE + 4096),
            size_bytes: SIZE,
        };
        (folder, Pairs(Arc::new(vec![pair])))
    }

    fn write(folder: &tempfile::TempDir, name: &str, byte: u8, offset: u64) {
        let file = OpenOptions::new().write(true).open(folder.path().join(name));
        file.unwrap().write_all_at(&[byte], offset).unwrap();
    }

    #[test]
    fn volumes_that_hold_the_same_are_the_same_whatever_is_beyond_the_disk() {
        let (folder, pairs) = pairs();
        write(&folder, "new", 1, SIZE);
        let looked = Looked::default();
        assert_eq!(pairs.compare_all(&looked).unwrap(), []);
        assert_eq!(looked.bytes(), SIZE);
    }

    #[test]
    fn each_byte_that_differs_is_found_also_where_the_other_has_a_hole() {
        for name in ["old", "new"] {
            for offset in [0, 70_000, (2 << 20) + 4095, SIZE - 1] {
                let (folder, pairs) = pairs();
                write(&folder, name, 1, offset);
                let left = pairs.compare_all(&Looked::default()).unwrap();
                let block = Block {
                    volume: 0,
                    offset: offset - offset % BLOCK_BYTES as u64,
                };
                assert_eq!(left, [block], "{offset} of {name}");
                assert_eq!(pairs.compare_blocks(&left).unwrap(), left);
                let other = if name == "old" { "new" } else { "old" };
                write(&folder, other, 1, offset);
                assert_eq!(pairs.compare_blocks(&left).unwrap(), []);
            }
        }
    }

    #[test]
    fn a_comparison_that_nobody_waits_for_ends() {
        let (_folder, pairs) = pairs();
        let looked = Looked::default();
        drop(EndsWithUs(looked.clone()));
        assert!(pairs.compare_all(&looked).is_err());
    }
}
