//! Numbers of the stream.

use crate::ByteCount;

/// Size of a target page: what one page record holds.
pub const PAGE_BYTES: usize = 4096;

/// The longest stream that is read or kept.
///
/// A recording with RAM out of band is well below 1 MiB, plus video RAM; a guest with its RAM in
/// the recording has to be small.
pub const STREAM_LIMIT: ByteCount = ByteCount::gib(1);

pub(crate) const MAGIC: u32 = 0x5145_564d;
pub(super) const VERSION: u32 = 3;

pub(super) const END_OF_STREAM: u8 = 0x00;
pub(super) const SECTION_START: u8 = 0x01;
pub(super) const SECTION_PART: u8 = 0x02;
pub(super) const SECTION_END: u8 = 0x03;
pub(super) const SECTION_FULL: u8 = 0x04;
pub(super) const SUBSECTION: u8 = 0x05;
pub(super) const VM_DESCRIPTION: u8 = 0x06;
pub(super) const CONFIGURATION: u8 = 0x07;
pub(super) const COMMAND: u8 = 0x08;
pub(super) const FOOTER: u8 = 0x7e;

/// The one command that says something to the loading side without asking for an answer (QEMU 10.0
/// and later).
pub(super) const COMMAND_SWITCHOVER_START: u16 = 11;

pub(super) const RAM_VERSION: u32 = 4;

/// Flags live in the bits of an offset that a page's size leaves free.
pub(super) const FLAGS_MASK: u64 = PAGE_BYTES as u64 - 1;
pub(super) const FLAG_ZERO: u64 = 0x02;
pub(super) const FLAG_MEM_SIZE: u64 = 0x04;
pub(super) const FLAG_PAGE: u64 = 0x08;
pub(super) const FLAG_EOS: u64 = 0x10;
pub(super) const FLAG_CONTINUE: u64 = 0x20;
pub(super) const FLAG_MULTIFD_FLUSH: u64 = 0x200;

pub(super) fn command_name(number: u16) -> &'static str {
    match number {
        1 => "open-return-path",
        2 => "ping",
        3 => "postcopy-advise",
        4 => "postcopy-listen",
        5 => "postcopy-run",
        6 => "postcopy-ram-discard",
        7 => "packaged",
        8 => "enable-colo",
        9 => "postcopy-resume",
        10 => "recv-bitmap",
        COMMAND_SWITCHOVER_START => "switchover-start",
        _ => "unknown",
    }
}

/// What record flags that cannot be kept mean.
pub(super) fn flags_meaning(flags: u64) -> &'static str {
    if flags & 0x01 != 0 {
        "a full page of a format before 2009"
    } else if flags & 0x40 != 0 {
        "XBZRLE, a difference to a page that is not here"
    } else if flags & 0x80 != 0 {
        "an RDMA hook"
    } else if flags & 0x100 != 0 {
        "a compressed page"
    } else {
        "not known"
    }
}
