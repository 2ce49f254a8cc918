//! A buffer that O_DIRECT accepts.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use super::ALIGNMENT;

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
        // SAFETY: allocated in `zeroed` with this very layout, and freed only here.
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
