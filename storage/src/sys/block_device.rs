//! What the kernel tells about a block device, and the one call that makes it zero.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd;

use rustix::fs::{FallocateFlags, SeekFrom, seek};
use rustix::io::Errno;

/// Length of the device in bytes.
///
/// Moves the descriptor's offset, which nobody here uses.
pub(crate) fn length(device: &File) -> io::Result<u64> {
    // The same number that BLKGETSIZE64 tells, and also where that one is filtered.
    Ok(seek(device, SeekFrom::End(0))?)
}

/// Bytes of a logical sector: the least that the device reads or writes, and what a direct write must
/// be aligned to.
pub(crate) fn sector_bytes(device: &File) -> io::Result<u32> {
    Ok(rustix::fs::ioctl_blksszget(device)?)
}

/// Whether the device takes no writes.
pub(crate) fn is_read_only(device: &File) -> io::Result<bool> {
    let mut read_only: libc::c_int = 0;
    // SAFETY: BLKROGET writes one `int` to the address, which is that of a live `int`.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), BLKROGET, &raw mut read_only) };
    if result == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(read_only != 0)
}

/// Whether somebody else holds a record lock on the device. QEMU has some on each disk that it uses; it makes no claim
/// of its own on a device.
pub(crate) fn is_record_locked(device: &File) -> io::Result<bool> {
    let mut lock = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        // To the end, wherever that is.
        l_len: 0,
        l_pid: 0,
    };
    // SAFETY: F_OFD_GETLK reads and writes one `flock` at the address, which is that of a live one.
    let result = unsafe { libc::fcntl(device.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) };
    if result == -1 {
        return Err(io::Error::last_os_error());
    }
    Ok(libc::c_int::from(lock.l_type) != libc::F_UNLCK)
}

/// What a loop device lies on, as the kernel knows it: also where no name leads to it any more, or not from here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoopBacking {
    /// The device number of the file system that the file is on.
    pub device: u64,
    /// The file's inode number there.
    pub inode: u64,
    /// The file's own device number if it is a device, else 0.
    pub own_device: u64,
}

/// What the loop device lies on. An error for what is none.
pub fn loop_backing(device: &File) -> io::Result<LoopBacking> {
    // The first three of the 29 words are the numbers that are wanted.
    let mut status = [0_u64; 29];
    // SAFETY: LOOP_GET_STATUS64 writes a `loop_info64`, which is 232 bytes long and consists of whole words' alignment, to the
    // address, which is that of a live array of this size.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_GET_STATUS64, status.as_mut_ptr()) };
    if result == -1 {
        return Err(io::Error::last_os_error());
    }
    let [device, inode, own_device, ..] = status;
    Ok(LoopBacking {
        device,
        inode,
        own_device,
    })
}

/// From `linux/loop.h`, which libc does not have.
const LOOP_GET_STATUS64: libc::Ioctl = 0x4c05;

/// `_IO(0x12, 94)`, which libc does not have.
const BLKROGET: libc::Ioctl = 0x125e;

/// Makes `range` read as zeros, if the device can do that without being sent the zeros; tells whether
/// it could. The range must consist of whole sectors.
pub(crate) fn zero_cheaply(device: &File, range: &Range<u64>) -> io::Result<bool> {
    // On a block device: write zeroes, unmapping allowed, no fallback to written pages.
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    match rustix::fs::fallocate(device, flags, range.start, range.end - range.start) {
        Ok(()) => Ok(true),
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
