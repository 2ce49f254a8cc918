//! Keeps the page cache from filling with what is written through it.
//!
//! Where there is no O_DIRECT, gigabytes of dirty pages would pile up until the kernel throttles the
//! writer, or until the sync at the end, which then takes as long as all of it. So what was written is sent
//! off early, window by window, and forgotten when it is on the disk:
//!
//! ```text
//!  written   ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓
//!            [ on the disk, dropped ][ being sent ][ filling
//!                                   ▲             ▲
//!              waited for, when the next is full   sent when full
//! ```
//!
//! No more than two windows are dirty or in flight, and one more for each further thread that is in the
//! middle of waiting.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::sync::{Mutex, PoisonError};

use rustix::fs::{Advice, fadvise};

/// What is sent off together.
pub(super) const WINDOW_BYTES: u64 = 8 << 20;

/// The windows of one file, shared by all who write to it.
#[derive(Debug, Default)]
pub(super) struct Writeback {
    windows: Mutex<Windows>,
}

#[derive(Debug, Default)]
struct Windows {
    /// Where what was written last begins and ends. Several writers fill it out of order, so there may
    /// be holes.
    filling: Range<u64>,
    filled_bytes: u64,
    /// Sent off, the oldest first.
    sent: VecDeque<Range<u64>>,
}

impl Writeback {
    /// Notes that `range` was written, sends a window off if one is full, and waits for the one before.
    ///
    /// # Errors
    ///
    /// What became of an earlier write: told only once, so it must not be ignored.
    pub(super) fn wrote(&self, file: &File, range: Range<u64>) -> io::Result<()> {
        let Some(full) = self.windows().fill(range) else {
            return Ok(());
        };
        sync_range(file, &full, libc::SYNC_FILE_RANGE_WRITE)?;
        let oldest = {
            let mut windows = self.windows();
            windows.sent.push_back(full);
            if windows.sent.len() > 1 {
                windows.sent.pop_front()
            } else {
                None
            }
        };
        let Some(oldest) = oldest else {
            return Ok(());
        };
        let all = libc::SYNC_FILE_RANGE_WAIT_BEFORE
            | libc::SYNC_FILE_RANGE_WRITE
            | libc::SYNC_FILE_RANGE_WAIT_AFTER;
        sync_range(file, &oldest, all)?;
        // Nobody reads it soon, and what the host has in its cache is worth more. Only advice.
        if let Some(length) = NonZeroU64::new(oldest.end - oldest.start) {
            let _ = fadvise(file, oldest.start, Some(length), Advice::DontNeed);
        }
        Ok(())
    }

    fn windows(&self) -> std::sync::MutexGuard<'_, Windows> {
        // Nothing in there panics halfway.
        self.windows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Windows {
    fn fill(&mut self, range: Range<u64>) -> Option<Range<u64>> {
        let written = range.end - range.start;
        self.filling = if self.filled_bytes == 0 {
            range
        } else {
            self.filling.start.min(range.start)..self.filling.end.max(range.end)
        };
        self.filled_bytes += written;
        if self.filled_bytes < WINDOW_BYTES {
            return None;
        }
        self.filled_bytes = 0;
        Some(self.filling.clone())
    }
}

fn sync_range(file: &File, range: &Range<u64>, flags: libc::c_uint) -> io::Result<()> {
    let offset = |offset| libc::off64_t::try_from(offset).map_err(|_| io::ErrorKind::FileTooLarge);
    let (start, length) = (offset(range.start)?, offset(range.end - range.start)?);
    // SAFETY: the call takes numbers and an open descriptor, and no memory.
    let result = unsafe { libc::sync_file_range(file.as_raw_fd(), start, length, flags) };
    if result == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        // A seccomp profile or a file system that does not know it: then all of the file is synced.
        Some(libc::ENOSYS | libc::EPERM | libc::EINVAL | libc::ESPIPE) => file.sync_data(),
        Some(libc::EINTR) => Ok(()),
        _ => Err(error),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    /// Pages of the file that are in the cache.
    pub(in crate::sys) fn cached_pages(file: &File, length: usize) -> usize {
        let map = memmap2::MmapOptions::new()
            .len(length)
            .map_raw_read_only(file)
            .unwrap();
        let mut pages = vec![0_u8; length / 4096];
        // SAFETY: the range is that of a live mapping, and there is a byte for each of its pages.
        let result = unsafe { libc::mincore(map.as_mut_ptr().cast(), length, pages.as_mut_ptr()) };
        assert_eq!(result, 0);
        pages.iter().filter(|page| **page & 1 != 0).count()
    }

    #[test]
    fn what_was_written_leaves_the_cache_but_for_the_last_windows() {
        const LENGTH: u64 = 8 * WINDOW_BYTES;
        // A disk; /tmp can be tmpfs, which is nothing but cache.
        let file = tempfile::tempfile_in("/var/tmp").unwrap();
        let writeback = Writeback::default();
        let bytes = vec![7; 1 << 20];
        for offset in (0..LENGTH).step_by(bytes.len()) {
            file.write_all_at(&bytes, offset).unwrap();
            writeback
                .wrote(&file, offset..offset + bytes.len() as u64)
                .unwrap();
            let cached = cached_pages(&file, (offset as usize + bytes.len()).next_multiple_of(4096));
            assert!(
                cached as u64 * 4096 <= 3 * WINDOW_BYTES,
                "{cached} pages at {offset}"
            );
        }
        let mut read = vec![0; 1 << 20];
        for offset in (0..LENGTH).step_by(bytes.len()) {
            file.read_exact_at(&mut read, offset).unwrap();
            assert!(read == bytes);
        }
    }

    #[test]
    fn writes_out_of_order_are_sent_off_as_one_range() {
        let mut windows = Windows::default();
        let half = WINDOW_BYTES / 2;
        assert_eq!(windows.fill(10 * half..11 * half), None);
        assert_eq!(windows.fill(8 * half..9 * half), Some(8 * half..11 * half));
        assert_eq!(windows.fill(0..half), None);
        assert_eq!(windows.fill(half..3 * half), Some(0..3 * half));
    }
}
