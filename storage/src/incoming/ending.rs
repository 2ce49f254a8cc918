//! How all threads come to an end when one has to.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::image::ImageError;

/// How long a thread that has nothing to do is without a look at whether all is over.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Whether to go on, shared by all threads: the first failure ends the others, as a cancel does.
pub(super) struct Ending<'a> {
    cancelled: &'a AtomicBool,
    failed: AtomicBool,
    because: Mutex<Option<ImageError>>,
}

impl<'a> Ending<'a> {
    pub(super) fn by(cancelled: &'a AtomicBool) -> Self {
        Self {
            cancelled,
            failed: AtomicBool::new(false),
            because: Mutex::new(None),
        }
    }

    /// # Errors
    ///
    /// [`ImageError::Cancelled`] when the caller has to end, whoever wants it.
    pub(super) fn go_on(&self) -> Result<(), ImageError> {
        if self.failed.load(Ordering::Relaxed) || self.cancelled.load(Ordering::Relaxed) {
            return Err(ImageError::Cancelled);
        }
        Ok(())
    }

    /// Ends all threads, because of this if it is the first.
    pub(super) fn fail(&self, because: ImageError) {
        let mut first = self.because.lock().unwrap_or_else(PoisonError::into_inner);
        // A thread that only obeyed has nothing to say.
        if first.is_none() && !matches!(because, ImageError::Cancelled) {
            *first = Some(because);
        }
        drop(first);
        self.failed.store(true, Ordering::Relaxed);
    }

    /// Why not all went well, if it did not.
    ///
    /// # Errors
    ///
    /// What the first thread that failed said; [`ImageError::Cancelled`] if none did but somebody
    /// asked for the end.
    pub(super) fn result(self) -> Result<(), ImageError> {
        let because = self.because.into_inner().unwrap_or_else(PoisonError::into_inner);
        match because {
            Some(because) => Err(because),
            None if self.failed.into_inner() => Err(ImageError::Cancelled),
            None => Ok(()),
        }
    }

    /// Ends all threads if this one panics before the guard is let go of, so that nobody waits for
    /// it.
    pub(super) fn even_if_it_panics(&self) -> PanicGuard<'_, 'a> {
        PanicGuard(self)
    }
}

/// See [`Ending::even_if_it_panics`].
pub(super) struct PanicGuard<'e, 'a>(&'e Ending<'a>);

impl Drop for PanicGuard<'_, '_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.failed.store(true, Ordering::Relaxed);
        }
    }
}
