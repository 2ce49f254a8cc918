//! What is left of an image that cannot be opened.

use std::path::Path;

use super::reader::read_superblocks;
use super::superblock::Superblocks;
use super::{Image, ImageError};
use crate::volume::{open_held, remove};

/// Removes what was an image once and cannot be opened as one, as durably as [`Image::remove`].
///
/// # Errors
///
/// [`ImageError::NotAnImage`] if it never was one, [`ImageError::HoldsGuest`] if it can be opened after
/// all, [`ImageError::Locked`] if somebody has it, [`ImageError::Io`].
pub fn remove_broken(path: &Path) -> Result<(), ImageError> {
    let held = open_held(path)?;
    match Image::open(path) {
        Ok(image) => {
            return Err(ImageError::HoldsGuest {
                path: path.to_owned(),
                state: image.state(),
            });
        }
        Err(ImageError::Torn { .. } | ImageError::Corrupt { .. }) => {}
        Err(error) => return Err(error),
    }
    // The copy that does not count first: a crash in between leaves what is there now.
    let first = match read_superblocks(&held, path)? {
        Superblocks::Valid { copy, .. } => 1 - copy,
        _ => 0,
    };
    remove(&held, path, first)
}
