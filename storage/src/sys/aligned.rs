//! A buffer that O_DIRECT accepts.

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use super::ALIGNMENT;

/// The huge page of x86 and, with 4 KiB pages, of arm64.
pub(crate) const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Zeroed memory whose address and length are multiples of [`ALIGNMENT`].
pub(crate) struct AlignedBuf {
    start: NonNull<u8>,
    layout: Layout,
}

impl AlignedBuf {
    /// A buffer of at least `length` bytes and at least one page, all zero.
    ///
    /// # Panics
    ///
    /// Panics if `length` is close to the address space's; callers ask for chunks and for areas
    /// whose limits were checked.
    pub(crate) fn zeroed(length: usize) -> Self {
        let length = length.max(1).next_multiple_of(ALIGNMENT);
        let layout = Layout::from_size_align(length, ALIGNMENT)
            .expect("a buffer is far smaller than the address space");
        // SAFETY: `layout` has a non-zero size, checked just above.
        let start = unsafe { alloc_zeroed(layout) };
        match NonNull::new(start) {
            Some(start) => Self { start, layout },
            None => handle_alloc_error(layout),
        }
    }

    /// A buffer as [`AlignedBuf::zeroed`] makes it, on huge pages where the system gives them: a device is handed few long
    /// pieces of memory instead of many of a page.
    pub(crate) fn on_huge_pages(length: usize) -> Self {
        let length = length.max(1).next_multiple_of(HUGE_PAGE_BYTES);
        let layout = Layout::from_size_align(length, HUGE_PAGE_BYTES)
            .expect("a buffer is far smaller than the address space");
        // SAFETY: `layout` has a non-zero size, checked just above.
        let Some(start) = NonNull::new(unsafe { alloc(layout) }) else {
            handle_alloc_error(layout)
        };
        // SAFETY: these are whole pages of an allocation of our own, and the advice changes no content. Only a hint: a
        // system that does not know it gives small pages.
        unsafe { libc::madvise(start.as_ptr().cast(), length, libc::MADV_HUGEPAGE) };
        // SAFETY: `start` is valid for writes of `layout.size()` bytes, which are initialized by this.
        unsafe { start.as_ptr().write_bytes(0, length) };
        Self { start, layout }
    }

    /// Its length, told without looking at its bytes.
    pub(super) fn length(&self) -> usize {
        self.layout.size()
    }
}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start` is valid for `layout.size()` initialized bytes, owned by `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.layout.size()) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes the access the only one.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.layout.size()) }
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: allocated with this very layout, and freed only here.
        unsafe { dealloc(self.start.as_ptr(), self.layout) }
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedBuf({} bytes)", self.layout.size())
    }
}

// SAFETY: the buffer owns plain bytes; nothing in it is tied to a thread.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared references only read.
unsafe impl Sync for AlignedBuf {}
