//! A file behind the page cache's back, where the file system allows it.
//!
//! Buffered writes cost two thirds of the disk's pace (first touch of cache pages, then writeback),
//! and they push the rest of the host's cache out; so data goes past the cache with O_DIRECT. Whether
//! that is possible is asked ([`probe::direct_io`]) where there is an answer; else a file system that
//! refuses it says EINVAL to the open, or to the first transfer. Either way it is then "buffered", reported
//! by [`DirectFile::is_direct`], and [`Writeback`] keeps the cache small.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use super::writeback::Writeback;
use super::{ALIGNMENT, probe};

/// A second, direct descriptor of a file that is open already, with the buffered one as its
/// fallback.
#[derive(Debug)]
pub(crate) struct DirectFile {
    /// Absent where the file system refused it.
    direct: Option<File>,
    buffered: File,
    /// Set by the first direct transfer that the file system refused.
    refused: AtomicBool,
    writeback: Writeback,
}

impl DirectFile {
    /// Opens `path`, which `file` must have open, a second time and past the cache.
    ///
    /// # Errors
    ///
    /// Any error of the open but EINVAL; `NotFound` if the path leads to another file by now.
    pub(crate) fn beside(file: &File, path: &Path, writable: bool) -> io::Result<Self> {
        if probe::direct_io(file) == probe::DirectIo::Impossible {
            tracing::debug!(path = %path.display(), "O_DIRECT is said to be impossible here");
            return Self::buffered(file);
        }
        let flags = libc::O_DIRECT | libc::O_CLOEXEC;
        let direct = match OpenOptions::new()
            .read(true)
            .write(writable)
            .custom_flags(flags)
            .open(path)
        {
            Ok(direct) => {
                let (ours, theirs) = (file.metadata()?, direct.metadata()?);
                if (ours.dev(), ours.ino()) != (theirs.dev(), theirs.ino()) {
                    return Err(io::Error::from(io::ErrorKind::NotFound));
                }
                Some(direct)
            }
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => None,
            Err(error) => return Err(error),
        };
        if direct.is_none() {
            tracing::debug!(path = %path.display(), "no O_DIRECT here, going through the page cache");
        }
        Ok(Self {
            direct,
            buffered: file.try_clone()?,
            refused: AtomicBool::new(false),
            writeback: Writeback::default(),
        })
    }

    /// A file whose transfers all go through the page cache.
    pub(crate) fn buffered(file: &File) -> io::Result<Self> {
        Ok(Self {
            direct: None,
            buffered: file.try_clone()?,
            refused: AtomicBool::new(false),
            writeback: Writeback::default(),
        })
    }

    /// What a transfer does that the file system refuses, for tests of those at the same time.
    #[cfg(test)]
    pub(super) fn refuse(&self) {
        self.refused.store(true, Ordering::Relaxed);
    }

    /// A file that is nothing of the kind, for tests of what is done with one.
    #[cfg(test)]
    pub(super) fn taken_for_direct(file: File) -> Self {
        Self {
            buffered: file.try_clone().expect("a descriptor"),
            direct: Some(file),
            refused: AtomicBool::new(false),
            writeback: Writeback::default(),
        }
    }

    /// Whether aligned transfers go past the page cache.
    pub(crate) fn is_direct(&self) -> bool {
        self.direct.is_some() && !self.refused.load(Ordering::Relaxed)
    }

    /// The direct descriptor, open for as long as `self` lives, if there is one. It stays good for a try after
    /// another thread's transfer was refused, which can be at any moment: this one is refused like it then.
    pub(super) fn direct_fd(&self) -> Option<RawFd> {
        self.direct.as_ref().map(AsRawFd::as_raw_fd)
    }

    /// Writes all of `bytes` at `offset`.
    pub(crate) fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        // SAFETY: the pointer and the length come from one live slice.
        unsafe { self.write_raw_at(bytes.as_ptr(), bytes.len(), offset) }
    }

    /// Writes `length` bytes at `start` to the file at `offset`, however many writes that takes.
    ///
    /// # Safety
    ///
    /// `start` must be valid for reads of `length` bytes for the whole call. The bytes may change
    /// meanwhile: only the kernel looks at them.
    pub(super) unsafe fn write_raw_at(&self, start: *const u8, length: usize, offset: u64) -> io::Result<()> {
        let (mut done, mut cached) = (0, false);
        while done < length {
            let file = self.file_for(start as usize + done, length - done, offset + done as u64);
            let at = file_offset(offset + done as u64)?;
            // SAFETY: `done < length`, so the range stays inside what the caller vouches for.
            let written =
                unsafe { libc::pwrite64(file.as_raw_fd(), start.add(done).cast(), length - done, at) };
            match usize::try_from(written) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::WriteZero)),
                Ok(written) => {
                    done += written;
                    cached |= !self.is_the_direct_one(file);
                }
                Err(_) => self.after(io::Error::last_os_error(), file)?,
            }
        }
        if cached {
            self.writeback
                .wrote(&self.buffered, offset..offset + length as u64)?;
        }
        Ok(())
    }

    /// Fills all of `bytes` from `offset`.
    ///
    /// # Errors
    ///
    /// `UnexpectedEof` if the file ends first, besides what the system says.
    pub(crate) fn read_exact_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            let rest = &mut bytes[done..];
            let file = self.file_for(rest.as_ptr() as usize, rest.len(), offset + done as u64);
            match file.read_at(rest, offset + done as u64) {
                Ok(0) => return Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
                Ok(read) => done += read,
                Err(error) => self.after(error, file)?,
            }
        }
        Ok(())
    }

    /// The direct descriptor where it may be used: a short transfer can leave a rest that is not
    /// aligned any more.
    fn file_for(&self, address: usize, length: usize, offset: u64) -> &File {
        let aligned = (address | length).is_multiple_of(ALIGNMENT) && offset.is_multiple_of(ALIGNMENT as u64);
        match &self.direct {
            Some(direct) if aligned && self.is_direct() => direct,
            _ => &self.buffered,
        }
    }

    /// Decides after a failed transfer: `Ok` means try again.
    fn after(&self, error: io::Error, used: &File) -> io::Result<()> {
        if error.kind() == io::ErrorKind::Interrupted {
            return Ok(());
        }
        // Some file systems take the flag at open and refuse the transfer (FUSE, or a device with
        // larger sectors than ours).
        if self.is_the_direct_one(used) && error.raw_os_error() == Some(libc::EINVAL) {
            self.refused.store(true, Ordering::Relaxed);
            return Ok(());
        }
        Err(error)
    }

    fn is_the_direct_one(&self, file: &File) -> bool {
        self.direct
            .as_ref()
            .is_some_and(|direct| direct.as_raw_fd() == file.as_raw_fd())
    }
}

fn file_offset(offset: u64) -> io::Result<libc::off64_t> {
    libc::off64_t::try_from(offset).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::AlignedBuf;
    use crate::sys::writeback::WINDOW_BYTES;
    use crate::sys::writeback::tests::cached_pages;

    fn new_file(path: &Path) -> File {
        OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)
            .unwrap()
    }

    #[test]
    fn what_is_written_directly_is_read_directly_and_an_unaligned_rest_goes_through_the_cache() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let file = new_file(&path);
        let direct = DirectFile::beside(&file, &path, true).unwrap();

        let mut written = AlignedBuf::zeroed(3 * ALIGNMENT);
        for (index, byte) in written.iter_mut().enumerate() {
            *byte = (index % 251) as u8;
        }
        direct.write_all_at(&written, 8192).unwrap();
        direct.write_all_at(&written[..100], 3).unwrap();

        let mut read = AlignedBuf::zeroed(3 * ALIGNMENT);
        direct.read_exact_at(&mut read, 8192).unwrap();
        assert_eq!(read[..], written[..]);
        let mut few = [0; 100];
        direct.read_exact_at(&mut few, 3).unwrap();
        assert_eq!(few[..], written[..100]);
    }

    #[test]
    fn what_goes_through_the_cache_does_not_stay_there() {
        const LENGTH: usize = 64 << 20;
        let file = tempfile::tempfile_in("/var/tmp").unwrap();
        let buffered = DirectFile::buffered(&file).unwrap();
        assert!(!buffered.is_direct());
        let part = AlignedBuf::zeroed(1 << 20);
        for offset in (0..LENGTH).step_by(part.len()) {
            buffered.write_all_at(&part, offset as u64).unwrap();
        }
        let cached = cached_pages(&file, LENGTH) * ALIGNMENT;
        assert!(cached as u64 <= 3 * WINDOW_BYTES, "{cached} bytes");
        assert_eq!(file.metadata().unwrap().len(), LENGTH as u64);
    }

    #[test]
    fn a_read_behind_the_end_is_an_error_not_zeros() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let file = new_file(&path);
        file.set_len(ALIGNMENT as u64).unwrap();
        let direct = DirectFile::beside(&file, &path, false).unwrap();
        let mut read = AlignedBuf::zeroed(2 * ALIGNMENT);
        let error = direct.read_exact_at(&mut read, 0).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_path_that_leads_elsewhere_by_now_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let file = File::create_new(&path).unwrap();
        std::fs::rename(&path, folder.path().join("moved")).unwrap();
        File::create_new(&path).unwrap();
        let error = DirectFile::beside(&file, &path, true).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::NotFound);
    }
}
