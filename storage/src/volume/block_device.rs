//! A raw block device as the place of an image: it begins at offset 0.
//!
//! A device has no names to change, so what a reader finds is decided by the two copies of the
//! superblock alone:
//!
//! ```text
//!                    copy at 0   copy at 4096                  a reader finds
//!  what was there    old         old                           what was there; never a guest (see below)
//!  begin             writing     old                           torn, or a contradiction
//!                    writing     writing      ── sync ──       torn: never sealed
//!  RAM, tables       writing     writing      ── sync ──       torn: never sealed
//!  seal              writing     SEALED       ── sync ──       the image
//!                    SEALED      SEALED       ── sync ──       the image
//!  given up          writing     zeros        ── sync ──       torn: never sealed
//!                    zeros       zeros        ── sync ──       nothing
//! ```
//!
//! * **Begin.** Both copies are on the disk before any RAM is, so that an old image underneath, whose
//!   RAM is about to be overwritten, cannot be taken for a whole one.
//! * **Seal.** All that a sealed superblock speaks of was synced before the first sealed copy is sent.
//!   Each copy is a write of its own, and the other one is whole and of this image meanwhile: a copy
//!   that is torn by a crash leaves `writing` before the first sync and `sealed` after it.
//! * **Given up.** The copy at 4096 goes first, because it was sealed first: if only that one was, a
//!   crash between the two leaves `writing`. Whoever gives up after both were waits for the second sync
//!   before the guest runs on.
//!
//! # What may be overwritten
//!
//! | on the device | without `replace` | with it |
//! | --- | --- | --- |
//! | zeros in its first MiB, where file systems, partition tables, LVM, LUKS and RAID tell of themselves | yes | yes |
//! | an image that a killed writer left `writing` | yes, as the partial file beside a target is swept up | yes |
//! | a consumed image, a snapshot, or one with damaged superblocks | [`ImageError::TargetExists`] | yes |
//! | another sealed image, or a waking one | [`ImageError::HoldsGuest`] | [`ImageError::HoldsGuest`] |
//! | an image of a later format | [`ImageError::NewerFormat`] | [`ImageError::NewerFormat`] |
//! | anything else | [`ImageError::DeviceHoldsOther`] | yes: a device is made to be overwritten, a file that is no image never is |
//!
//! What is overwritten is gone from the beginning on, not only from the seal on as it is with files.
//!
//! A device on which neither the seal nor the wipe worked is told as [`ImageError::MayBeSealed`]. One
//! that is in use (mounted, swap, part of another device, a running QEMU's disk, or held by another Dormouse), read-only
//! or of larger sectors than 4096 bytes is refused in any case.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;

use super::hold::open_held;
use crate::ByteCount;
use crate::image::reader::{is_dispensable, read_superblocks};
use crate::image::superblock::{COPY_BYTES, COPY_OFFSETS, FORMAT_VERSION, Superblocks};
use crate::image::{ImageError, ImageState};
use crate::sys::{self, ALIGNMENT, AlignedBuf, block_device};

/// What must be zero on a device that counts as blank.
const TELLTALE_BYTES: usize = 1 << 20;

/// A device that is being written, held.
#[derive(Debug)]
pub(super) struct DeviceInWriting {
    pub(super) file: File,
    path: PathBuf,
    length: ByteCount,
    /// Whether the superblocks are ours to wipe.
    begun: bool,
    /// Set when a seal failed and wiping as well.
    may_be_sealed: AtomicBool,
}

impl DeviceInWriting {
    /// Takes hold of the device if it may be overwritten. Nothing on it is changed yet.
    pub(super) fn take(path: &Path, replace: bool) -> Result<Self, ImageError> {
        let file = open_held(path)?;
        let failed = |source| ImageError::io("look at", path, source);
        let found = block_device::sector_bytes(&file).map_err(failed)?;
        if found as usize > ALIGNMENT {
            return Err(ImageError::SectorSize {
                path: path.to_owned(),
                found,
                limit: ALIGNMENT as u32,
            });
        }
        if block_device::is_read_only(&file).map_err(failed)? {
            return Err(ImageError::ReadOnly {
                path: path.to_owned(),
            });
        }
        if block_device::is_record_locked(&file).map_err(failed)? {
            return Err(ImageError::DeviceInUse {
                path: path.to_owned(),
            });
        }
        let length = ByteCount(block_device::length(&file).map_err(failed)?);
        check_content(&file, path, length, replace)?;
        Ok(Self {
            file,
            path: path.to_owned(),
            length,
            begun: false,
            may_be_sealed: AtomicBool::new(false),
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn length(&self) -> ByteCount {
        self.length
    }

    /// Makes what was on the device no image any more, and durably one that is being written.
    pub(super) fn begin(&mut self, copy: &[u8; COPY_BYTES]) -> io::Result<()> {
        if self.length.0 < COPY_OFFSETS[1] + COPY_BYTES as u64 {
            return Err(Errno::NOSPC.into());
        }
        self.begun = true;
        for offset in COPY_OFFSETS {
            self.file.write_all_at(copy, offset)?;
        }
        self.file.sync_data()
    }

    /// Makes both copies say `sealed`, one after the other. All else must have been synced.
    pub(super) fn seal(&self, copy: &[u8; COPY_BYTES]) -> io::Result<()> {
        let sealed = COPY_OFFSETS.iter().rev().try_for_each(|offset| {
            self.file.write_all_at(copy, *offset)?;
            self.file.sync_data()
        });
        // At once, because whether that worked belongs to what is told of the failure.
        if sealed.is_err() && wipe(&self.file, 1).is_err() {
            self.may_be_sealed.store(true, Ordering::Relaxed);
        }
        sealed
    }

    /// Whether a seal failed in such a way that a reader may find a sealed image.
    pub(super) fn may_be_sealed(&self) -> bool {
        self.may_be_sealed.load(Ordering::Relaxed)
    }

    /// The device with the image that is whole on it.
    pub(super) fn publish(mut self) -> io::Result<File> {
        let file = self.file.try_clone()?;
        self.begun = false;
        Ok(file)
    }
}

impl Drop for DeviceInWriting {
    fn drop(&mut self) {
        if self.begun
            // The copy that would be sealed first goes first.
            && let Err(error) = wipe(&self.file, 1)
        {
            tracing::error!(path = %self.path.display(), %error, "an image that was given up could not be wiped from the device");
        }
    }
}

/// Makes the image on a device none, durably. `first` is the copy that goes first: a crash between the
/// two leaves the other one alone, so it must not be the one that says more of a guest.
pub(super) fn wipe(device: &File, first: usize) -> io::Result<()> {
    let wipe = || {
        [first, 1 - first].iter().try_for_each(|copy| {
            device.write_all_at(&[0; COPY_BYTES], COPY_OFFSETS[*copy])?;
            device.sync_data()
        })
    };
    // A sync also tells what became of RAM that went through the page cache, once. Then it is written and
    // synced anew, because what failed is not dirty any more.
    wipe().or_else(|_| wipe())
}

fn check_content(device: &File, path: &Path, length: ByteCount, replace: bool) -> Result<(), ImageError> {
    let may_be_replaced = |refused| if replace { Ok(()) } else { Err(refused) };
    match read_superblocks(device, path)? {
        Superblocks::Valid { current, .. } => match current.state {
            ImageState::Writing => Ok(()),
            ImageState::Consumed | ImageState::Sealed if is_dispensable(device, path, &current) => {
                may_be_replaced(ImageError::TargetExists {
                    path: path.to_owned(),
                })
            }
            state => Err(ImageError::HoldsGuest {
                path: path.to_owned(),
                state,
            }),
        },
        Superblocks::Torn | Superblocks::Contradiction(_) => may_be_replaced(ImageError::TargetExists {
            path: path.to_owned(),
        }),
        Superblocks::Newer(found) => Err(ImageError::NewerFormat {
            path: path.to_owned(),
            found,
            supported: FORMAT_VERSION,
        }),
        Superblocks::Alien => {
            let mut telltale = AlignedBuf::zeroed(TELLTALE_BYTES);
            let looked_at = &mut telltale[..length.0.min(TELLTALE_BYTES as u64) as usize];
            device
                .read_exact_at(looked_at, 0)
                .map_err(|source| ImageError::io("read", path, source))?;
            if sys::is_zero(looked_at) {
                return Ok(());
            }
            may_be_replaced(ImageError::DeviceHoldsOther {
                path: path.to_owned(),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seal_that_fails_is_wiped_and_told_if_that_fails_too() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let device = |file| DeviceInWriting {
            file,
            path: "/dev/test".into(),
            length: ByteCount::mib(1),
            begun: false,
            may_be_sealed: AtomicBool::new(false),
        };
        let whole = device(file.reopen().unwrap());
        whole.seal(&[7; COPY_BYTES]).unwrap();
        assert!(!whole.may_be_sealed());
        assert_eq!(std::fs::read(file.path()).unwrap(), [7; 2 * COPY_BYTES]);

        let broken = device(File::open(file.path()).unwrap());
        broken.seal(&[7; COPY_BYTES]).unwrap_err();
        assert!(broken.may_be_sealed());
    }
}
