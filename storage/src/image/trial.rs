//! Whether an image would have room, and how fast it would be written: tried with a file that is never an image.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use uuid::Uuid;

use super::ImageError;
use super::chunks::CHUNK_BYTES;
use super::workers::for_each_chunk;
use crate::volume::{Backend, Lane, Volume, VolumeKind, is_block_device, length_of};
use crate::{ByteCount, Run};

/// How much is written to see how fast that is: enough to be beyond a disk's first breath, little enough not to disturb.
const TRIED: ByteCount = ByteCount::mib(256);

/// What was found out about a place for an image.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Trial {
    /// A file or a block device.
    pub kind: VolumeKind,
    /// How RAM would get there; `None` for a block device, which is not tried.
    pub backend: Option<Backend>,
    /// Room there: of a file what is free, where its file system tells, of a device its size.
    pub available: Option<ByteCount>,
    /// What was written, and in which time it was on the disk; `None` for a block device.
    pub written: Option<(ByteCount, Duration)>,
}

/// Looks whether `needed` bytes would have room at `target`, by allocating them, and how fast some are written. All of it
/// is gone afterwards. On a block device nothing is written: only its size is looked at.
///
/// # Errors
///
/// [`ImageError::NoSpace`] with the numbers; [`ImageError::Cancelled`]; [`ImageError::Io`] if the system refuses.
pub fn try_volume(target: &Path, needed: ByteCount, run: &Run<'_>) -> Result<Trial, ImageError> {
    let failed = |source| ImageError::io("look at", target, source);
    if is_block_device(target) {
        let device = File::open(target).map_err(failed)?;
        let available = length_of(&device).map_err(failed)?.unwrap_or_default();
        if available < needed {
            return Err(ImageError::NoSpace {
                needed,
                available,
                path: target.to_owned(),
            });
        }
        return Ok(Trial {
            kind: VolumeKind::BlockDevice,
            backend: None,
            available: Some(available),
            written: None,
        });
    }
    let id = Uuid::new_v4();
    // One name for all, of which the volume makes one of its own: what a killed trial left is swept up by the next.
    let beside = target.with_file_name("dormouse-trial");
    let volume = Volume::create(&beside, false, id, None)?;
    let available = volume.available()?;
    volume.reserve(needed)?;
    let noise = noise();
    let chunk = noise.len() as u64;
    let count = TRIED.0.min(needed.0) / chunk;
    let started = Instant::now();
    let write = |lane: &mut Lane, index: usize| {
        let mut buffer = lane.buffer();
        buffer[..noise.len()].copy_from_slice(&noise);
        // No two the same, for volumes that would notice.
        buffer[..8].copy_from_slice(&(index as u64).to_le_bytes());
        lane.write_buffer(buffer, noise.len(), index as u64 * chunk + (2 << 20))
            .map_err(|source| volume.failed("try", needed, source))
    };
    let finish = |mut lane: Lane| {
        lane.finish()
            .map_err(|source| volume.failed("try", needed, source))
    };
    for_each_chunk(run, count as usize, || volume.lane(), write, finish)?;
    volume
        .sync_data()
        .map_err(|source| volume.failed("try", needed, source))?;
    Ok(Trial {
        kind: VolumeKind::File,
        backend: Some(volume.backend()),
        available,
        written: Some((ByteCount(count * chunk), started.elapsed())),
    })
}

/// A chunk that nothing can make smaller.
fn noise() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let mut noise = vec![0; CHUNK_BYTES as usize];
    for word in noise.chunks_exact_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes());
    }
    noise
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::Progress;

    fn tried(target: &Path, needed: ByteCount) -> Result<Trial, ImageError> {
        try_volume(
            target,
            needed,
            &Run {
                threads: 2,
                progress: &Progress::default(),
                cancelled: &AtomicBool::new(false),
            },
        )
    }

    #[test]
    fn a_trial_writes_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let trial = tried(&folder.path().join("image"), ByteCount::mib(5)).unwrap();
        assert_eq!(trial.kind, VolumeKind::File);
        assert_eq!(trial.written.map(|(written, _)| written), Some(ByteCount::mib(5)));
        assert!(trial.available > Some(ByteCount::mib(5)));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn what_has_no_room_is_told_with_both_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let needed = ByteCount::gib(1 << 20);
        let error = tried(&folder.path().join("image"), needed).unwrap_err();
        assert!(
            matches!(error, ImageError::NoSpace { needed: told, .. } if told == needed),
            "{error}"
        );
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
