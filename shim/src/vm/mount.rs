//! Whether a file would be on the volume that it is meant for.
//!
//! A volume that is not mounted leaves an empty folder behind, and a guest's memory would fill the root file system
//! instead, where nobody looks for it.

use std::path::Path;

use rustix::fs::{AtFlags, CWD, Statx, StatxAttributes, StatxFlags, statx};

use crate::error::{Code, Failure};

/// Refuses a target that is not a file on the volume mounted at `mount`.
pub fn check_on_volume(target: &Path, mount: &Path) -> Result<(), Failure> {
    let refused = |why: String| Err(Failure::new(Code::Refused, why));
    let volume = look(mount)?;
    if !volume.stx_attributes.contains(StatxAttributes::MOUNT_ROOT) {
        return refused(format!(
            "no volume is mounted at {}: the image would go to the file system of the folder",
            mount.display()
        ));
    }
    let folder = target.parent().unwrap_or(Path::new("/"));
    // A symbolic link in between leads to where it leads; a bind mount is a volume of its own.
    if look(folder)?.stx_mnt_id == volume.stx_mnt_id {
        return Ok(());
    }
    refused(format!(
        "{} is not on the volume that is mounted at {}",
        target.display(),
        mount.display()
    ))
}

fn look(folder: &Path) -> Result<Statx, Failure> {
    let found = statx(CWD, folder, AtFlags::empty(), StatxFlags::MNT_ID);
    let found = found.map_err(|error| Failure::new(Code::Usage, format!("{}: {error}", folder.display())))?;
    // Linux 5.8.
    let tells = StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::MNT_ID)
        && found.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT);
    tells.then_some(found).ok_or_else(|| {
        let why = format!(
            "this kernel does not tell what {} is mounted on",
            folder.display()
        );
        Failure::new(Code::Refused, why)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_no_volume_and_a_mount_holds_only_what_is_on_it() {
        let folder = tempfile::tempdir().unwrap();
        let inside = folder.path().join("guest.img");
        let error = check_on_volume(&inside, folder.path()).unwrap_err();
        assert!(error.message.contains("no volume is mounted at"), "{error}");
        let error = check_on_volume(&inside, Path::new("/proc")).unwrap_err();
        assert!(error.message.contains("is not on the volume"), "{error}");
        assert_eq!(
            check_on_volume(Path::new("/proc/guest.img"), Path::new("/proc")),
            Ok(())
        );
        assert_eq!(
            check_on_volume(&inside, Path::new("/nowhere")).unwrap_err().code,
            Code::Usage
        );
    }
}
