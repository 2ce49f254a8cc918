//! Writes in flight: a small io_uring and what it is writing from.
//!
//! The kernel reads a write's bytes at any time until it tells the write's end, so what they lie in must
//! live that long, whatever happens here. It is therefore **owned by the ring** ([`Source`]): a buffer
//! moves in and comes back with the result; of a mapping the ring holds a share. A ring that is dropped,
//! by a panic too, waits for the writes in flight first. Where it cannot wait it leaks their sources. A
//! ring that is leaked leaks them too. So no safe caller can have the kernel read freed memory.
//!
//! Tried and not kept, three lanes of four writes, as with the constant in `volume::lane`:
//!
//! * **Registered buffers.** The kernel pins them for writing, and guest RAM is mapped for reading only: EFAULT.
//!   Pinning all of RAM would also be more than the 8 MiB that an ordinary user may lock.
//! * **`DEFER_TASKRUN` with `SINGLE_ISSUER`.** 1.05 of `fio` beside 1.18 with 4 KiB pages, 1.31 beside 1.40 with
//!   huge ones, at the same CPU time, and a ring would be tied to the thread that made it.
//! * **Two writes of 512 KiB for each chunk**, because 256 pages are two more than the disk's 254 segments: 0.27
//!   CPU-seconds per GiB beside 0.25, no faster.

use std::io;
use std::mem;
use std::ops::Range;
use std::sync::Arc;
use std::thread;

use io_uring::{IoUring, opcode, types};

use super::{AlignedBuf, DirectFile, mapping::SharedRange};

/// What a write takes its bytes from.
#[derive(Debug)]
pub(crate) enum Source {
    /// A part of guest RAM.
    Mapped(SharedRange),
    /// The first bytes of a buffer, as many as are named.
    Buffer(AlignedBuf, usize),
}

/// A write that came to its end.
#[derive(Debug)]
pub(crate) struct Written {
    /// What it was written from, to be used again.
    pub(crate) source: Source,
    /// Where it was to go.
    pub(crate) offset: u64,
    /// What became of it.
    pub(crate) result: io::Result<()>,
}

/// A ring of writes to one file.
pub(crate) struct Ring {
    ring: IoUring,
    io: Arc<DirectFile>,
    /// What is in flight; the place is the write's name in the kernel.
    in_flight: Vec<Option<(Source, u64)>>,
}

impl Ring {
    /// A ring that has up to `depth` writes in flight, to a file that must be direct.
    ///
    /// # Errors
    ///
    /// Any by which a kernel, a limit or a seccomp profile refuses.
    pub(crate) fn new(io: Arc<DirectFile>, depth: usize) -> io::Result<Self> {
        let entries = u32::try_from(depth).unwrap_or(u32::MAX);
        // No interrupt is needed to tell a completion: whoever needs one asks for it.
        let ring = IoUring::builder()
            .setup_coop_taskrun()
            .build(entries)
            .or_else(|_| IoUring::new(entries))?;
        Ok(Self {
            ring,
            io,
            in_flight: (0..depth).map(|_| None).collect(),
        })
    }

    /// Whether nothing is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.in_flight.iter().all(Option::is_none)
    }

    /// Whether a write has to end before another can begin.
    pub(crate) fn is_full(&self) -> bool {
        self.in_flight.iter().all(Option::is_some)
    }

    /// Begins a write; the ring must not be full and the file must be direct, or have been a moment ago.
    ///
    /// # Errors
    ///
    /// What the kernel says to a ring that takes no more; the ring is good only to be dropped then.
    pub(crate) fn begin(&mut self, source: Source, offset: u64) -> io::Result<()> {
        let (place, file) = match (
            self.in_flight.iter().position(Option::is_none),
            self.io.direct_fd(),
        ) {
            (Some(place), Some(file)) => (place, file),
            _ => return Err(io::Error::from(io::ErrorKind::InvalidInput)),
        };
        let (start, length) = source.bytes();
        let length = u32::try_from(length).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
        let write = opcode::Write::new(types::Fd(file), start, length)
            .offset(offset)
            .build()
            .user_data(place as u64);
        self.in_flight[place] = Some((source, offset));
        // SAFETY: the bytes are valid until the write has ended, because `in_flight` owns what they lie
        // in until then: it is taken out only by `reap` with the kernel's word for it, and when the ring
        // is dropped `Drop` waits for that word or leaks it. The file is kept open by `io`, which the
        // ring owns as well.
        let pushed = unsafe { self.ring.submission().push(&write) };
        if pushed.is_err() {
            // Every entry is handed to the kernel at once, so there is room for as many as places.
            self.in_flight[place] = None;
            return Err(io::Error::from(io::ErrorKind::WouldBlock));
        }
        self.enter(0)
    }

    /// Takes the writes that have ended, at least `wait` of those in flight.
    ///
    /// A write that the kernel did not do whole is ended here, one transfer after the other.
    ///
    /// # Errors
    ///
    /// What the kernel says to a wait; the ring is good only to be dropped then. Errors of writes are
    /// told with each.
    pub(crate) fn reap(&mut self, wait: usize) -> io::Result<Vec<Written>> {
        let in_flight = self.in_flight.iter().flatten().count();
        if self.ring.completion().len() < wait.min(in_flight) {
            self.enter(wait.min(in_flight))?;
        }
        let mut ended = Vec::new();
        for completion in self.ring.completion() {
            let place = self.in_flight.get_mut(completion.user_data() as usize);
            if let Some((source, offset)) = place.and_then(Option::take) {
                ended.push((source, offset, completion.result()));
            }
        }
        let written = ended.into_iter().map(|(source, offset, result)| Written {
            result: self.complete(&source, offset, result),
            source,
            offset,
        });
        Ok(written.collect())
    }

    fn complete(&self, source: &Source, offset: u64, result: i32) -> io::Result<()> {
        let (_, length) = source.bytes();
        let done = match usize::try_from(result) {
            Ok(done) if done == length => return Ok(()),
            // A write of nothing could go on for ever.
            Ok(0) => return Err(io::Error::from(io::ErrorKind::WriteZero)),
            Ok(done) => done,
            Err(_) => {
                let error = io::Error::from_raw_os_error(-result);
                match error.raw_os_error() {
                    // Refused for its alignment, or not at this moment: the plain way knows what to do.
                    Some(libc::EINVAL | libc::EAGAIN | libc::EINTR) => 0,
                    _ => return Err(error),
                }
            }
        };
        source.write_from(done, &self.io, offset)
    }

    /// Hands over what was pushed and waits for so many completions.
    fn enter(&mut self, wait: usize) -> io::Result<()> {
        loop {
            match self.ring.submit_and_wait(wait) {
                Ok(_) => return Ok(()),
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR) => {}
                    // No memory for a request at the moment, or completions to be taken first, which
                    // are never more than there is room for.
                    Some(libc::EAGAIN | libc::EBUSY) => thread::yield_now(),
                    _ => return Err(error),
                },
            }
        }
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        while !self.is_idle() {
            let waited = self.enter(1);
            // Their results interest nobody any more.
            while let Some(completion) = self.ring.completion().next() {
                if let Some(place) = self.in_flight.get_mut(completion.user_data() as usize) {
                    *place = None;
                }
            }
            if let Err(error) = waited {
                tracing::error!(%error, "writes in flight cannot be waited for; their memory is kept");
                mem::forget(mem::take(&mut self.in_flight));
                mem::forget(Arc::clone(&self.io));
                return;
            }
        }
    }
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ring({} places)", self.in_flight.len())
    }
}

impl Source {
    /// A source of a part of guest RAM.
    pub(crate) fn mapped(mapping: &super::Mapping, range: &Range<usize>) -> Self {
        Self::Mapped(mapping.share(range))
    }

    /// The bytes' address and number. They are valid for as long as `self` lives, wherever it moves.
    fn bytes(&self) -> (*const u8, usize) {
        match self {
            Self::Mapped(range) => range.bytes(),
            Self::Buffer(buffer, length) => (buffer[..*length].as_ptr(), *length),
        }
    }

    /// Writes what comes after the first `done` bytes, the plain way.
    pub(crate) fn write_from(&self, done: usize, file: &DirectFile, offset: u64) -> io::Result<()> {
        let (start, length) = self.bytes();
        assert!(done <= length, "{done} bytes of {length} were written");
        // SAFETY: the range lies in the bytes of `self`, which live for the whole call.
        unsafe { file.write_raw_at(start.add(done), length - done, offset + done as u64) }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::io::{PipeReader, Read, Write};
    use std::os::unix::fs::FileExt;
    use std::path::Path;
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::sys::{ALIGNMENT, Mapping};

    const PART: usize = 16 * ALIGNMENT;

    fn file_in(folder: &Path) -> (File, Arc<DirectFile>) {
        let path = folder.join("file");
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)
            .unwrap();
        let direct = DirectFile::beside(&file, &path, true).unwrap();
        assert!(
            direct.is_direct(),
            "this test needs a disk with O_DIRECT for its temporary files"
        );
        (file, Arc::new(direct))
    }

    fn buffer(byte: u8) -> AlignedBuf {
        let mut buffer = AlignedBuf::zeroed(PART);
        buffer.fill(byte);
        buffer
    }

    fn read(file: &File, offset: usize, length: usize) -> Vec<u8> {
        let mut bytes = vec![0xee; length];
        file.read_exact_at(&mut bytes, offset as u64).unwrap();
        bytes
    }

    #[test]
    fn writes_come_back_with_their_buffers_and_are_where_they_belong() {
        let folder = tempfile::tempdir().unwrap();
        let (file, direct) = file_in(folder.path());
        let mut ring = Ring::new(direct, 4).unwrap();
        let (mut begun, mut ended) = (0_u8, vec![]);
        while begun < 40 {
            if ring.is_full() {
                ended.extend(ring.reap(1).unwrap());
            }
            let offset = usize::from(begun) * PART;
            ring.begin(Source::Buffer(buffer(begun), PART), offset as u64)
                .unwrap();
            begun += 1;
        }
        ended.extend(ring.reap(4).unwrap());
        assert!(ring.is_idle());
        assert_eq!(ended.len(), 40);
        for written in ended {
            written.result.unwrap();
            let byte = (written.offset as usize / PART) as u8;
            assert!(matches!(&written.source, Source::Buffer(buffer, PART) if buffer[0] == byte));
            assert_eq!(read(&file, written.offset as usize, PART), vec![byte; PART]);
        }
    }

    /// A pipe that is full: the kernel takes a write to it and reads the write's bytes only when somebody has
    /// made room.
    fn full_pipe() -> (PipeReader, Arc<DirectFile>) {
        const CAPACITY: usize = 64 << 10;
        let (reader, mut writer) = std::io::pipe().unwrap();
        writer.write_all(&[0; CAPACITY]).unwrap();
        let file = File::from(std::os::fd::OwnedFd::from(writer));
        (reader, Arc::new(DirectFile::taken_for_direct(file)))
    }

    fn make_room(reader: &mut PipeReader) {
        reader.read_exact(&mut [0; 64 << 10]).unwrap();
    }

    #[test]
    fn a_ring_that_is_dropped_with_a_write_in_flight_waits_for_it_in_a_panic_too() {
        let (mut reader, pipe) = full_pipe();
        let mut ring = Ring::new(pipe, 2).unwrap();
        ring.begin(Source::Buffer(buffer(7), ALIGNMENT), 0).unwrap();
        assert!(ring.reap(0).unwrap().is_empty(), "the write was to be in flight");
        let (dropped, is_dropped) = mpsc::channel();
        let other_end = thread::spawn(move || {
            let too_early = is_dropped.recv_timeout(Duration::from_millis(300)).is_ok();
            make_room(&mut reader);
            let mut written = vec![0; ALIGNMENT];
            reader.read_exact(&mut written).unwrap();
            (too_early, written)
        });
        let unwound = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            let _ring = ring;
            panic!("in the middle");
        }));
        assert!(unwound.is_err());
        // Nobody listens any more if it was waited for.
        let _ = dropped.send(());
        assert_eq!(other_end.join().unwrap(), (false, vec![7; ALIGNMENT]));
    }

    #[test]
    fn guest_ram_stays_mapped_until_it_is_written_though_its_owner_let_go() {
        let (mut reader, pipe) = full_pipe();
        let ram = tempfile::tempfile_in("/dev/shm").unwrap();
        ram.write_all_at(&[9; ALIGNMENT], 0).unwrap();
        let mapping = Mapping::of(&ram, ALIGNMENT).unwrap();
        let mut ring = Ring::new(pipe, 2).unwrap();
        ring.begin(Source::mapped(&mapping, &(0..ALIGNMENT)), 0).unwrap();
        assert!(ring.reap(0).unwrap().is_empty(), "the write was to be in flight");
        drop((mapping, ram));
        make_room(&mut reader);
        for written in ring.reap(1).unwrap() {
            written.result.unwrap();
        }
        let mut written = vec![0; ALIGNMENT];
        reader.read_exact(&mut written).unwrap();
        assert_eq!(written, vec![9; ALIGNMENT]);
    }

    #[test]
    fn what_the_file_system_refuses_to_write_directly_is_written_the_plain_way() {
        let folder = tempfile::tempdir().unwrap();
        let (file, direct) = file_in(folder.path());
        let mut ring = Ring::new(Arc::clone(&direct), 1).unwrap();
        ring.begin(Source::Buffer(buffer(3), 100), 0).unwrap();
        for written in ring.reap(1).unwrap() {
            written.result.unwrap();
        }
        assert_eq!(read(&file, 0, 100), [3; 100]);
        assert!(direct.is_direct(), "one odd length says nothing of the others");
    }

    #[test]
    fn a_write_that_begins_as_another_threads_is_refused_is_written_all_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let (file, direct) = file_in(folder.path());
        let mut ring = Ring::new(Arc::clone(&direct), 1).unwrap();
        direct.refuse();
        ring.begin(Source::Buffer(buffer(3), PART), 0).unwrap();
        for written in ring.reap(1).unwrap() {
            written.result.unwrap();
        }
        assert_eq!(read(&file, 0, PART), [3; PART]);
    }

    #[test]
    fn an_error_is_told_with_its_place_and_its_buffer() {
        let folder = tempfile::tempdir().unwrap();
        let (file, _) = file_in(folder.path());
        let read_only = DirectFile::beside(&file, &folder.path().join("file"), false).unwrap();
        let mut ring = Ring::new(Arc::new(read_only), 1).unwrap();
        ring.begin(Source::Buffer(buffer(1), PART), 8192).unwrap();
        let written = ring.reap(1).unwrap().pop().unwrap();
        assert_eq!(written.offset, 8192);
        assert_eq!(written.result.unwrap_err().raw_os_error(), Some(libc::EBADF));
        assert!(matches!(written.source, Source::Buffer(..)));
    }
}
