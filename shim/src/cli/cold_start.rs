//! A guest that is in an image is not started cold: its memory would be lost, and its disks go on without it.
//!
//! How a VM ended is known from the state directory. What is no more at the image's place, or was woken since, stands
//! in no one's way; where that cannot be told, nothing is started.

use std::path::Path;

use dormouse_storage::{Image, ImageError, ImageState};
use uuid::Uuid;

use crate::error::{Code, Failure, sentence};
use crate::supervisor::ending::How;
use crate::supervisor::state_dir::StateDir;

/// Looks for the image that the VM `name` was hibernated into. Where it is still the guest: a refusal, or, if it is to
/// be given up, the image, held.
pub fn image_to_give_up(name: &str, state: &StateDir, discard: bool) -> Result<Option<Image>, Failure> {
    let Some(How::Hibernated { image, image_id, .. }) = state.last_ending(name).map(|ending| ending.how)
    else {
        return Ok(None);
    };
    let Some(found) = guest_in(name, &image, image_id)? else {
        return Ok(None);
    };
    if discard {
        let held = Image::open_locked(found.path())?;
        // Another may have taken its name since.
        return Ok(Some(held).filter(|held| held.id() == found.id()));
    }
    let remedy = "start cold, without its memory, with --discard-image";
    Err(refused(match found.state() {
        ImageState::Waking => format!(
            "{name} was hibernated into {}, and is being woken from it, or its wake ended in between: look for its \
             guest, or {remedy}",
            image.display()
        ),
        _ => format!(
            "{name} was hibernated into {}: wake it with `dormouse wake`, or {remedy}",
            image.display()
        ),
    }))
}

fn guest_in(name: &str, path: &Path, id: Uuid) -> Result<Option<Image>, Failure> {
    // What is on a volume that is not there is not gone.
    if path.parent().is_some_and(|folder| !folder.is_dir()) {
        return Err(refused(format!(
            "{name} was hibernated into {}, and that folder is not there; if a volume is not mounted, mount it, or \
             remove the image with `dormouse image discard`",
            path.display()
        )));
    }
    match Image::open(path) {
        Ok(image) if image.id() != id || image.state() == ImageState::Consumed => Ok(None),
        Ok(image) => Ok(Some(image)),
        Err(ImageError::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(None),
        // Somebody has put something else there, or wiped the device.
        Err(ImageError::NotAnImage { .. } | ImageError::DeviceHoldsOther { .. }) => Ok(None),
        Err(error) => Err(refused(format!(
            "{name} was hibernated into {}, which cannot be read ({}); if it is beyond repair, remove it with \
             `dormouse image discard --force`",
            path.display(),
            sentence(&error)
        ))),
    }
}

fn refused(message: String) -> Failure {
    Failure::new(Code::Refused, message)
}
