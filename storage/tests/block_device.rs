//! Images on raw block devices: what may be overwritten, what is found after every kind of end, and
//! old data underneath.
//!
//! These tests attach loop devices and need root, as the continuous integration has it. Without it they
//! fail.

mod fixture;

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use dormouse_storage::{
    Backend, ByteCount, Image, ImageError, ImageState, Progress, Run, TornBecause, VolumeKind,
};
use fixture::loop_device::LoopDevice;
use fixture::{Laboratory, MIB, working};

const COPY: usize = 4096;
const LENGTH: ByteCount = ByteCount::mib(32);

fn read_at(device: &LoopDevice, offset: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    File::open(device.path())
        .expect("open")
        .read_exact_at(&mut bytes, offset)
        .expect("read");
    bytes
}

fn write_at(device: &LoopDevice, offset: u64, bytes: &[u8]) {
    let file = File::options().write(true).open(device.path()).expect("open");
    file.write_all_at(bytes, offset).expect("write");
    file.sync_all().expect("sync");
}

fn use_up(path: &Path) {
    let mut image = Image::open_locked(path).expect("the image can be opened");
    for state in [ImageState::Waking, ImageState::Consumed] {
        image.mark(state).expect("the image can be marked");
    }
}

#[test]
fn a_guest_comes_back_from_a_device_with_either_sector_size_over_old_data() {
    for sector_bytes in [512, 4096] {
        let laboratory = Laboratory::new();
        let device = LoopDevice::with_old_data(LENGTH, sector_bytes);
        let sealed = laboratory.sealed_at(&device.symlink(), true);
        assert_eq!(sealed.kind(), VolumeKind::BlockDevice);
        drop(sealed);
        let image = Image::open_locked(device.path()).unwrap();
        assert_eq!(image.state(), ImageState::Sealed);
        assert_eq!(image.manifest(), &laboratory.manifest());
        assert!(laboratory.filled(&image).unwrap() == laboratory.ram);
        assert_eq!(
            image.device_state().unwrap().normalized(),
            laboratory.recording().normalized()
        );
    }
}

#[test]
fn zeros_read_as_zeros_in_place_after_the_space_was_given_back() {
    for sector_bytes in [512, 4096] {
        let laboratory = Laboratory::new();
        let device = LoopDevice::with_old_data(LENGTH, sector_bytes);
        let mut sealed = laboratory.sealed_at(device.path(), true);
        assert!(working(|run| sealed.give_back(run)).unwrap());
        drop(sealed);
        let image = Image::open(device.path()).unwrap();
        let placement = image.layout().block("pc.ram").unwrap();
        assert!(read_at(&device, placement.offset, laboratory.ram.len()) == laboratory.ram);
        working(|run| image.verify(run)).unwrap();
    }
}

#[test]
fn zeros_are_written_to_a_device_that_cannot_make_them_and_that_can_be_cancelled() {
    let laboratory = Laboratory::new();
    let device = LoopDevice::without_zeroing(LENGTH);
    device.fill_with_old_data();
    let mut sealed = laboratory.sealed_at(device.path(), true);
    let (progress, cancelled) = (Progress::new(sealed.zero()), AtomicBool::new(true));
    let run = Run {
        threads: 1,
        progress: &progress,
        cancelled: &cancelled,
    };
    assert!(matches!(sealed.give_back(&run), Err(ImageError::Cancelled)));
    assert_eq!(progress.done(), ByteCount::ZERO);
    let image = Image::open(device.path()).unwrap();
    assert!(laboratory.filled(&image).unwrap() == laboratory.ram);

    cancelled.store(false, Ordering::Relaxed);
    assert!(sealed.give_back(&run).unwrap());
    assert_eq!(
        (progress.done(), progress.total()),
        (sealed.zero(), ByteCount::mib(3))
    );
    let placement = image.layout().block("pc.ram").unwrap();
    assert!(read_at(&device, placement.offset, laboratory.ram.len()) == laboratory.ram);
    let gap = read_at(&device, 512 << 10, 4096);
    assert!(
        gap.iter().any(|byte| *byte != 0),
        "this device was to make no zeros itself"
    );
}

#[test]
fn an_image_that_is_given_up_leaves_wiped_superblocks_and_a_blank_beginning() {
    let laboratory = Laboratory::new();
    let device = LoopDevice::with_old_data(LENGTH, 512);
    let writer = laboratory
        .create_at(device.path(), true, None)
        .and_then(|writer| laboratory.write(writer))
        .unwrap();
    assert!(matches!(
        Image::open(device.path()),
        Err(ImageError::Torn {
            because: TornBecause::NeverSealed,
            ..
        })
    ));
    drop(writer);
    assert_eq!(read_at(&device, 0, 2 * COPY), vec![0; 2 * COPY]);
    assert!(matches!(
        Image::open(device.path()),
        Err(ImageError::NotAnImage { .. })
    ));
}

#[test]
fn a_sealed_image_that_is_removed_is_not_found_again() {
    let laboratory = Laboratory::new();
    let device = LoopDevice::blank(LENGTH, 512);
    laboratory.sealed_at(device.path(), false).remove().unwrap();
    assert!(device.path().exists());
    assert!(matches!(
        Image::open(device.path()),
        Err(ImageError::NotAnImage { .. })
    ));
    // And the device is as good as new.
    drop(laboratory.sealed_at(device.path(), false));
    use_up(device.path());
    assert!(matches!(
        Image::open(device.path()).unwrap().remove(),
        Err(ImageError::NotLocked { .. })
    ));
    Image::open_locked(device.path()).unwrap().remove().unwrap();
    assert_eq!(read_at(&device, 0, 2 * COPY), vec![0; 2 * COPY]);
    drop(laboratory.sealed_at(device.path(), false));
}

#[test]
fn a_blank_device_is_taken_and_anything_else_only_to_replace_it() {
    let laboratory = Laboratory::new();
    let create = |device: &LoopDevice, replace| laboratory.create_at(device.path(), replace, None).map(drop);
    // Where ext4, btrfs and LVM tell of themselves.
    for offset in [1024 + 56, (64 << 10) + 64, 512] {
        let device = LoopDevice::blank(LENGTH, 512);
        write_at(&device, offset, b"magic");
        let before = read_at(&device, 0, MIB as usize);
        assert!(matches!(
            create(&device, false),
            Err(ImageError::DeviceHoldsOther { .. })
        ));
        assert!(read_at(&device, 0, MIB as usize) == before, "nothing was changed");
        create(&device, true).unwrap();
    }
    create(&LoopDevice::blank(LENGTH, 512), false).unwrap();
}

#[test]
fn a_guest_on_a_device_is_never_overwritten_and_a_used_image_only_to_replace_it() {
    let laboratory = Laboratory::new();
    let device = LoopDevice::blank(LENGTH, 512);
    drop(laboratory.sealed_at(device.path(), false));
    for state in [ImageState::Waking, ImageState::Sealed] {
        for replace in [false, true] {
            let refused = laboratory.create_at(device.path(), replace, None);
            assert!(
                matches!(refused, Err(ImageError::HoldsGuest { .. })),
                "{refused:?}"
            );
        }
        Image::open_locked(device.path()).unwrap().mark(state).unwrap();
    }
    use_up(device.path());
    let refused = laboratory.create_at(device.path(), false, None);
    assert!(
        matches!(refused, Err(ImageError::TargetExists { .. })),
        "{refused:?}"
    );
    drop(laboratory.sealed_at(device.path(), true));
}

#[test]
fn a_snapshot_on_a_device_is_overwritten_only_to_replace_it() {
    let laboratory = Laboratory::new();
    let device = LoopDevice::blank(LENGTH, 512);
    drop(laboratory.snapshot_at(device.path()));
    let refused = laboratory.create_at(device.path(), false, None);
    assert!(
        matches!(refused, Err(ImageError::TargetExists { .. })),
        "{refused:?}"
    );
    // Nobody would take what is overwritten for the snapshot, from the first write on.
    let writer = laboratory.create_at(device.path(), true, None).unwrap();
    assert!(matches!(Image::open(device.path()), Err(ImageError::Torn { .. })));
    drop(laboratory.write(writer).unwrap());
}

#[test]
fn what_a_killed_writer_left_is_taken_and_a_damaged_image_only_to_replace_it() {
    let laboratory = Laboratory::new();
    let device = LoopDevice::blank(LENGTH, 512);
    let writer = laboratory.create_at(device.path(), false, None).unwrap();
    let begun = read_at(&device, 0, 2 * COPY);
    drop(writer);
    write_at(&device, 0, &begun);
    drop(laboratory.create_at(device.path(), false, None).unwrap());

    let mut damaged = begun;
    for copy in 0..2 {
        damaged[copy * COPY + 100] ^= 1;
    }
    write_at(&device, 0, &damaged);
    let refused = laboratory.create_at(device.path(), false, None);
    assert!(
        matches!(refused, Err(ImageError::TargetExists { .. })),
        "{refused:?}"
    );
    drop(laboratory.create_at(device.path(), true, None).unwrap());
}

#[test]
fn a_crash_at_any_write_of_the_seal_leaves_the_image_or_none_and_never_what_was_there_before() {
    let laboratory = Laboratory::new();
    let device = LoopDevice::blank(LENGTH, 512);
    drop(laboratory.sealed_at(device.path(), false));
    let old_id = Image::open(device.path()).unwrap().id();
    use_up(device.path());
    let old = read_at(&device, 0, 2 * COPY);
    let writer = laboratory
        .create_at(device.path(), true, None)
        .and_then(|writer| laboratory.write(writer))
        .unwrap();
    let writing = read_at(&device, 0, 2 * COPY);
    drop(
        writer
            .seal(&laboratory.manifest(), &laboratory.recording())
            .unwrap(),
    );
    let sealed = read_at(&device, 0, 2 * COPY);
    let new_id = Image::open(device.path()).unwrap().id();
    assert_ne!(old_id, new_id);

    // Each step writes one copy, in any number of sectors; then come the wipe's steps.
    let zeros = vec![0; 2 * COPY];
    let steps = [
        (&old, &writing, 0, false, false),
        (&old, &writing, 1, false, false),
        (&writing, &sealed, 1, false, true),
        (&writing, &sealed, 0, true, true),
        (&writing, &zeros, 1, false, false),
        (&writing, &zeros, 0, false, false),
    ];
    let mut on_disk = old.clone();
    for (from, to, copy, before, after) in steps {
        if from == &writing {
            // The other copy as it is when this step begins.
            on_disk.copy_from_slice(from);
            if copy == 0 {
                on_disk[COPY..].copy_from_slice(&to[COPY..]);
            }
        }
        for sectors in 0..=8 {
            let at = copy * COPY;
            on_disk[at..at + COPY].copy_from_slice(&from[at..at + COPY]);
            on_disk[at..at + sectors * 512].copy_from_slice(&to[at..at + sectors * 512]);
            write_at(&device, 0, &on_disk);
            let found = Image::open(device.path()).map(|image| (image.id(), image.state()));
            match (found, if sectors == 8 { after } else { before }) {
                (Ok((id, ImageState::Sealed)), _) if id == new_id && (before || after) => {}
                (Ok((id, ImageState::Consumed)), _) if id == old_id && from == &old && sectors < 8 => {}
                (Err(ImageError::Torn { .. } | ImageError::Corrupt { .. }), false) => {}
                (Err(ImageError::NotAnImage { .. }), false) if to == &zeros => {}
                other => panic!("copy {copy}, {sectors} sectors: {other:?}"),
            }
        }
    }
}

#[test]
fn a_device_that_is_too_small_is_told_with_both_numbers() {
    let laboratory = Laboratory::new();
    let device = LoopDevice::blank(ByteCount::mib(8), 512);
    let mut writer = laboratory.create_at(device.path(), false, None).unwrap();
    let error = writer.reserve(ByteCount::mib(1)).unwrap_err();
    let ImageError::NoSpace {
        needed,
        available,
        path,
    } = &error
    else {
        panic!("{error:?}")
    };
    assert!(*needed > ByteCount::mib(12), "{needed}");
    assert_eq!((*available, path.as_path()), (ByteCount::mib(8), device.path()));
    drop(writer);
    assert_eq!(read_at(&device, 0, 2 * COPY), vec![0; 2 * COPY]);
}

#[test]
fn a_device_of_no_length_to_speak_of_has_no_space() {
    let laboratory = Laboratory::new();
    let device = LoopDevice::blank(ByteCount(4096), 512);
    let error = laboratory.create_at(device.path(), false, None).unwrap_err();
    assert!(
        matches!(&error, ImageError::NoSpace { available, .. } if *available == ByteCount(4096)),
        "{error:?}"
    );
}

#[test]
fn a_device_that_fails_in_the_middle_holds_no_image_and_is_no_matter_of_space() {
    for backend in [Backend::Uring, Backend::Pwrite, Backend::Buffered] {
        let laboratory = Laboratory::new();
        let device = LoopDevice::overcommitted(LENGTH, ByteCount::mib(1));
        let failed = laboratory
            .create_at(device.path(), false, Some(backend))
            .and_then(|writer| {
                assert_eq!(writer.backend(), backend);
                laboratory.write(writer)
            })
            .and_then(|writer| writer.seal(&laboratory.manifest(), &laboratory.recording()));
        assert!(
            matches!(&failed, Err(ImageError::Io { .. })),
            "{backend}: {failed:?}"
        );
        assert_eq!(read_at(&device, 0, 2 * COPY), vec![0; 2 * COPY], "{backend}");
    }
}

#[test]
fn a_read_only_device_is_refused_by_its_name() {
    let laboratory = Laboratory::new();
    let device = LoopDevice::read_only(LENGTH);
    let error = laboratory.create_at(device.path(), true, None).unwrap_err();
    assert!(matches!(error, ImageError::ReadOnly { .. }), "{error:?}");
    assert_eq!(
        error.to_string(),
        format!("{} is read-only", device.path().display())
    );
}

#[test]
fn somebody_who_looks_at_a_device_for_a_moment_is_waited_for() {
    let laboratory = Laboratory::new();
    let device = LoopDevice::blank(LENGTH, 512);
    let looking = File::open(device.path()).unwrap();
    rustix::fs::flock(&looking, rustix::fs::FlockOperation::LockShared).unwrap();
    let (created, waiting) = mpsc::channel::<()>();
    let looker = std::thread::spawn(move || {
        let early = waiting.recv_timeout(Duration::from_millis(200)).is_ok();
        drop(looking);
        early
    });
    let writer = laboratory.create_at(device.path(), false, None).unwrap();
    let _ = created.send(());
    assert!(!looker.join().unwrap(), "the lock was not waited for");
    drop(writer);
}

#[test]
fn a_device_that_somebody_uses_is_refused_and_told_who() {
    let laboratory = Laboratory::new();
    let device = LoopDevice::blank(LENGTH, 512);
    let sealed = laboratory.sealed_at(device.path(), false);
    for refused in [
        laboratory.create_at(device.path(), true, None).map(drop),
        Image::open_locked(device.path()).map(drop),
    ] {
        assert!(matches!(refused, Err(ImageError::Locked { .. })), "{refused:?}");
    }
    assert!(Image::open(device.path()).is_ok(), "looking is fine");
    drop(sealed);
    use_up(device.path());

    let made = Command::new("mkfs.ext4")
        .args(["-q", "-F"])
        .arg(device.path())
        .status()
        .expect("mkfs.ext4");
    assert!(made.success());
    let folder = tempfile::tempdir().unwrap();
    let mount = |verb: &str, arguments: &[&Path]| {
        let status = Command::new(verb).args(arguments).status().expect("mount");
        assert!(status.success(), "{verb} needs root");
    };
    mount("mount", &[device.path(), folder.path()]);
    fs::write(folder.path().join("letter"), "dear").unwrap();
    let refused = laboratory.create_at(device.path(), true, None);
    mount("umount", &[folder.path()]);
    let error = refused.unwrap_err();
    assert!(matches!(error, ImageError::DeviceInUse { .. }), "{error:?}");
    assert_eq!(
        error.to_string(),
        format!(
            "{} is in use: mounted, swap, a part of another device, or a disk of a running QEMU",
            device.path().display()
        )
    );
}

#[test]
fn a_device_that_is_the_disk_of_a_running_qemu_is_refused() {
    let laboratory = Laboratory::new();
    let device = LoopDevice::with_old_data(LENGTH, 512);
    // What QEMU does with a disk, though with bytes of its choice.
    let disk = File::open(device.path()).unwrap();
    rustix::fs::fcntl_lock(&disk, rustix::fs::FlockOperation::NonBlockingLockShared).unwrap();
    let error = laboratory.create_at(device.path(), true, None).unwrap_err();
    assert!(matches!(error, ImageError::DeviceInUse { .. }), "{error:?}");
    drop(disk);
    drop(laboratory.create_at(device.path(), true, None).unwrap());
}
