//! What a writer that was killed left of its image, found by the image's id.
//!
//! ```text
//!  where the writer was            a file                        a block device             remains
//!  before its beginning            nothing                       what was there             nothing
//!  beginning, RAM, tables          .NAME.partial-ID              `writing` in a copy        unfinished
//!  seal, before it has its name    .NAME.partial-ID, sealed      `writing` in both copies   unfinished
//!  seal, with its name             the target                    `sealed` in a copy         whole
//!  after                           the target                    `sealed`, or later         whole
//! ```
//!
//! An image of another id, at the target or on the device, is none of ours and is left alone.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use uuid::Uuid;

use super::reader::read_superblocks;
use super::superblock::Superblocks;
use super::{Image, ImageError, ImageState, SealedImage};
use crate::volume::{is_block_device, open_held, partial_path, remove};

/// An image whose writer was killed, or may have been.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Interrupted {
    target: PathBuf,
    id: Uuid,
}

/// What is left of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Remains {
    /// No trace.
    Nothing,
    /// What no reader takes for an image.
    Unfinished,
    /// The image, with its tables intact, in a state that is not `writing`.
    Whole(ImageState),
}

impl Interrupted {
    /// The image `id` that was to be at `target`.
    pub fn new(target: &Path, id: Uuid) -> Self {
        Self {
            target: target.to_owned(),
            id,
        }
    }

    /// Looks what is left. Nobody is disturbed by that.
    ///
    /// # Errors
    ///
    /// Those of [`Image::open`], of an image that ought to be whole; [`ImageError::Io`].
    pub fn remains(&self) -> Result<Remains, ImageError> {
        match state_of(&self.target, self.id)? {
            Some(ImageState::Writing) => Ok(Remains::Unfinished),
            Some(_) => Ok(Remains::Whole(Image::open(&self.target)?.state())),
            None => Ok(match self.partial() {
                Some(partial) if exists(&partial)? => Remains::Unfinished,
                _ => Remains::Nothing,
            }),
        }
    }

    /// Makes durable a whole image whose writer was killed before it could tell whether it is, and removes what is left
    /// beside it. Only then may it stand in for its guest. What the writer had left to do is up to whoever asks: the space
    /// that it reserved is not given back yet, and the image is locked until the result is dropped.
    ///
    /// # Errors
    ///
    /// [`ImageError::Locked`] if somebody has the image, [`ImageError::Io`], and those of [`Image::open`].
    pub fn settle(&self) -> Result<SealedImage, ImageError> {
        let image = self.whole()?;
        image.settle()?;
        match self.partial() {
            // This image under its other name: it is held already.
            Some(partial) if image.is_at(&partial) => remove_file(&partial)?,
            // The image that was replaced.
            Some(partial) if exists(&partial)? => remove(&open_held(&partial)?, &partial, 1)?,
            _ => {}
        }
        image.into_sealed()
    }

    /// Removes for good what is unfinished; tells whether there was something.
    ///
    /// # Errors
    ///
    /// [`ImageError::Locked`] and [`ImageError::DeviceInUse`] if somebody has it, [`ImageError::Io`].
    pub fn remove_unfinished(&self) -> Result<bool, ImageError> {
        if state_of(&self.target, self.id)? == Some(ImageState::Writing) {
            let held = open_held(&self.target)?;
            // Somebody may have begun another image before it was ours.
            if state_of(&self.target, self.id)? != Some(ImageState::Writing) {
                return Ok(false);
            }
            // As its writer would have: the copy that would be sealed first.
            remove(&held, &self.target, 1)?;
            return Ok(true);
        }
        match self.partial() {
            Some(partial) if exists(&partial)? => {
                remove(&open_held(&partial)?, &partial, 1)?;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Removes for good a whole image, whose guest is elsewhere.
    ///
    /// # Errors
    ///
    /// [`ImageError::Locked`] if somebody has the image, [`ImageError::Io`], and those of [`Image::open`].
    pub fn remove_whole(&self) -> Result<(), ImageError> {
        self.whole()?.remove()
    }

    fn whole(&self) -> Result<Image, ImageError> {
        let image = Image::open_locked(&self.target)?;
        if image.id() == self.id {
            return Ok(image);
        }
        Err(ImageError::Locked {
            path: self.target.clone(),
        })
    }

    fn partial(&self) -> Option<PathBuf> {
        partial_path(&self.target, self.id).filter(|_| !is_block_device(&self.target))
    }
}

/// The state of the image `id` at `target`, if that is there.
fn state_of(target: &Path, id: Uuid) -> Result<Option<ImageState>, ImageError> {
    let file = match File::open(target) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(ImageError::io("open", target, source)),
    };
    Ok(match read_superblocks(&file, target)? {
        Superblocks::Valid { current, .. } if current.id == id => Some(current.state),
        // The other copy is of what was there before.
        Superblocks::Contradiction(copies) => copies.iter().find(|copy| copy.id == id).map(|copy| copy.state),
        _ => None,
    })
}

fn remove_file(path: &Path) -> Result<(), ImageError> {
    std::fs::remove_file(path).map_err(|source| ImageError::io("remove", path, source))
}

fn exists(path: &Path) -> Result<bool, ImageError> {
    path.try_exists()
        .map_err(|source| ImageError::io("look at", path, source))
}
