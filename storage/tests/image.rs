//! Images from beginning to end: written, read back, marked, refused.

mod fixture;

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::atomic::{AtomicBool, Ordering};

use dormouse_storage::image::WakeNote;
use dormouse_storage::{
    ByteCount, Image, ImageError, ImageState, MemoryFile, Mismatch, PageContent, Progress, Recording, Run,
    try_write_precopy,
};
use fixture::{Laboratory, MIB, PAGE, SMALL_BLOCKS, noise, read_all, small_page, working};
use uuid::Uuid;

#[test]
fn ram_comes_back_byte_by_byte_with_its_holes_and_an_odd_end() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    assert!(laboratory.filled(&image).unwrap() == laboratory.ram);
    // The very bytes can be mapped from the file.
    let placement = image.layout().block("pc.ram").unwrap();
    let mut mapped = vec![0xff; laboratory.ram.len()];
    File::open(laboratory.target())
        .unwrap()
        .read_exact_at(&mut mapped, placement.offset)
        .unwrap();
    assert!(mapped == laboratory.ram);
    assert_eq!(placement.offset % (2 * MIB), 0);
}

#[test]
fn writing_tells_data_from_zeros_and_does_not_allocate_the_guests_holes() {
    let laboratory = Laboratory::new();
    let memory = laboratory.memory();
    let extents = memory.data_extents().unwrap();
    let mut writer = laboratory.create(false).unwrap();
    let progress = Progress::new(memory.length());
    let cancelled = AtomicBool::new(false);
    let run = Run {
        threads: 3,
        progress: &progress,
        cancelled: &cancelled,
    };
    let written = writer.write_memory("pc.ram", &memory, &run).unwrap();
    assert_eq!(written.data, ByteCount(2 * MIB + 3 * PAGE as u64));
    assert_eq!(written.zero, ByteCount(3 * MIB));
    assert_eq!(
        (progress.done(), progress.total()),
        (memory.length(), memory.length())
    );
    assert_eq!(memory.data_extents().unwrap(), extents);
}

#[test]
fn what_the_image_tells_of_itself_is_what_was_written() {
    let laboratory = Laboratory::new();
    let mut sealed = laboratory.sealed();
    let reserved = sealed.allocated().unwrap();
    working(|run| sealed.give_back(run)).unwrap();
    let allocated = sealed.allocated().unwrap();
    assert!(allocated < reserved, "{allocated} of {reserved}");
    assert_eq!(sealed.path(), laboratory.target());
    drop(sealed);

    let image = Image::open(&laboratory.target()).unwrap();
    assert_eq!(image.state(), ImageState::Sealed);
    assert_eq!(image.manifest(), &laboratory.manifest());
    assert_eq!(image.layout(), &laboratory.layout());
    assert_eq!(
        image.device_state().unwrap().normalized(),
        laboratory.recording().normalized()
    );
    let usage = image.usage().unwrap();
    assert_eq!(usage.zero, ByteCount(3 * MIB));
    assert_eq!(usage.data + usage.zero, image.layout().ram());
    assert_eq!(usage.allocated, allocated);
    assert!(
        allocated < usage.data + ByteCount::mib(1),
        "{allocated} for {}",
        usage.data
    );
    let verified = working(|run| image.verify(run)).unwrap();
    assert_eq!((verified.chunks, verified.bytes), (8, image.layout().ram()));
    assert!(laboratory.filled(&image).unwrap() == laboratory.ram);
    assert_eq!(fs::metadata(laboratory.target()).unwrap().mode() & 0o777, 0o600);
}

#[test]
fn small_blocks_come_back_as_pages_that_load_beside_mapped_ram() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let state = image.device_state().unwrap();
    let mut stream = Vec::new();
    try_write_precopy(&state, image.pages(&["pc.ram"]).unwrap(), &mut stream).unwrap();

    let loaded = Recording::parse(&stream).unwrap();
    assert_eq!(loaded.normalized(), state.normalized());
    let pages: Vec<_> = loaded.pages().collect();
    assert_eq!(
        pages.len(),
        SMALL_BLOCKS.iter().map(|(_, pages)| pages).sum::<usize>()
    );
    for page in pages {
        let name = loaded.blocks()[page.block].name.as_str();
        let index = page.offset as usize / PAGE;
        match page.content {
            PageContent::Zero => assert_eq!(index % 3, 1, "{name} {index}"),
            PageContent::Data(bytes) => {
                assert!(bytes[..] == small_page(name, index)[..], "{name} {index}")
            }
        }
    }
}

#[test]
fn all_ram_can_be_streamed_into_a_guest_whose_ram_is_anonymous() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let mut stream = Vec::new();
    try_write_precopy(
        &image.device_state().unwrap(),
        image.pages(&[]).unwrap(),
        &mut stream,
    )
    .unwrap();
    let loaded = Recording::parse(&stream).unwrap();
    let mut ram = vec![0xff; laboratory.ram.len()];
    for page in loaded
        .pages()
        .filter(|page| loaded.blocks()[page.block].name == "pc.ram")
    {
        let at = page.offset as usize;
        match page.content {
            PageContent::Zero => ram[at..at + PAGE].fill(0),
            PageContent::Data(bytes) => ram[at..at + PAGE].copy_from_slice(&bytes[..]),
        }
    }
    assert!(ram == laboratory.ram);
}

#[test]
fn a_writer_that_is_dropped_leaves_nothing() {
    let laboratory = Laboratory::new();
    let writer = laboratory.written(false).unwrap();
    assert_eq!(laboratory.names().len(), 1, "the partial file");
    assert!(laboratory.names()[0].starts_with(".guest.dormouse.partial-"));
    drop(writer);
    assert!(laboratory.names().is_empty());
}

#[test]
fn an_existing_target_is_kept_unless_it_may_be_replaced() {
    let laboratory = Laboratory::new();
    let first = laboratory.image();
    assert!(matches!(
        laboratory.create(false),
        Err(ImageError::TargetExists { .. })
    ));
    // Even one that appears while the image is being written.
    fs::rename(laboratory.target(), laboratory.folder.path().join("aside")).unwrap();
    let writer = laboratory.written(false).unwrap();
    fs::rename(laboratory.folder.path().join("aside"), laboratory.target()).unwrap();
    let error = writer
        .seal(&laboratory.manifest(), &laboratory.recording())
        .unwrap_err();
    assert!(matches!(error, ImageError::TargetExists { .. }), "{error}");
    assert_eq!(Image::open(&laboratory.target()).unwrap().id(), first.id());
    assert_eq!(laboratory.names(), ["guest.dormouse"]);

    use_up(&laboratory);
    let second = laboratory
        .written(true)
        .unwrap()
        .seal(&laboratory.manifest(), &laboratory.recording())
        .unwrap();
    assert_ne!(Image::open(second.path()).unwrap().id(), first.id());
    assert_eq!(laboratory.names(), ["guest.dormouse"]);
}

#[test]
fn a_replacement_that_is_given_up_keeps_the_old_image() {
    let laboratory = Laboratory::new();
    let first = laboratory.image().id();
    use_up(&laboratory);
    drop(laboratory.written(true).unwrap());
    assert_eq!(Image::open(&laboratory.target()).unwrap().id(), first);
    assert_eq!(laboratory.names(), ["guest.dormouse"]);
}

#[test]
fn what_is_not_an_image_or_is_in_use_is_never_replaced() {
    let laboratory = Laboratory::new();
    fs::write(laboratory.target(), "a letter").unwrap();
    assert!(matches!(
        laboratory.create(true),
        Err(ImageError::NotAnImage { .. })
    ));
    assert_eq!(read_all(&laboratory.target()), b"a letter");
    fs::remove_file(laboratory.target()).unwrap();
    fs::create_dir(laboratory.target()).unwrap();
    assert!(matches!(
        laboratory.create(true),
        Err(ImageError::NotAnImage { .. })
    ));
    fs::remove_dir(laboratory.target()).unwrap();

    drop(laboratory.sealed());
    let held = Image::open_locked(&laboratory.target()).unwrap();
    assert!(matches!(laboratory.create(true), Err(ImageError::Locked { .. })));
    drop(held);
    use_up(&laboratory);
    assert!(laboratory.create(true).is_ok());
}

#[test]
fn an_image_that_holds_a_guest_is_never_replaced() {
    let laboratory = Laboratory::new();
    drop(laboratory.sealed());
    for state in [ImageState::Waking, ImageState::Sealed] {
        let refused = laboratory.create(true);
        assert!(
            matches!(refused, Err(ImageError::HoldsGuest { .. })),
            "{refused:?}"
        );
        Image::open_locked(&laboratory.target())
            .unwrap()
            .mark(state)
            .unwrap();
    }
}

#[test]
fn what_a_wake_notes_lasts_until_the_image_is_sealed_again() {
    let laboratory = Laboratory::new();
    drop(laboratory.sealed());
    let note = WakeNote {
        wake: Uuid::from_u128(7),
        disks_forced: true,
    };
    let mut image = Image::open_locked(&laboratory.target()).unwrap();
    image.set_note(note);
    image.mark(ImageState::Waking).unwrap();
    drop(image);
    let mut image = Image::open_locked(&laboratory.target()).unwrap();
    assert_eq!(image.note(), note);
    image.mark(ImageState::Sealed).unwrap();
    drop(image);
    let mut image = Image::open_locked(&laboratory.target()).unwrap();
    assert_eq!(image.note(), WakeNote::default());
    image.set_note(note);
    for state in [ImageState::Waking, ImageState::Consumed] {
        image.mark(state).unwrap();
    }
    drop(image);
    assert_eq!(Image::open(&laboratory.target()).unwrap().note(), note);
}

#[test]
fn a_snapshot_is_not_the_only_copy_of_its_guest_and_may_be_replaced() {
    let laboratory = Laboratory::new();
    drop(laboratory.snapshot_at(&laboratory.target()));
    assert!(matches!(
        laboratory.create(false),
        Err(ImageError::TargetExists { .. })
    ));
    drop(laboratory.create(true).unwrap());
    // But not while it is being woken: then it is a guest of its own.
    Image::open_locked(&laboratory.target())
        .unwrap()
        .mark(ImageState::Waking)
        .unwrap();
    assert!(matches!(
        laboratory.create(true),
        Err(ImageError::HoldsGuest { .. })
    ));
}

#[test]
fn what_a_killed_writer_left_is_swept_up_and_what_is_written_is_not() {
    let laboratory = Laboratory::new();
    let dead = ".guest.dormouse.partial-11111111-1111-1111-1111-111111111111";
    fs::write(laboratory.folder.path().join(dead), "torn").unwrap();
    let first = laboratory.written(false).unwrap();
    assert_eq!(laboratory.names().len(), 1, "{:?}", laboratory.names());
    let second = laboratory.written(false).unwrap();
    assert_eq!(laboratory.names().len(), 2, "{:?}", laboratory.names());
    drop((first, second));
}

/// A guest was woken from the image.
#[test]
fn removing_an_image_leaves_alone_what_took_its_name_meanwhile() {
    let laboratory = Laboratory::new();
    drop(laboratory.sealed());
    let used_up = Image::open_locked(&laboratory.target()).unwrap();
    let elsewhere = laboratory.folder.path().join("elsewhere");
    fs::rename(laboratory.target(), &elsewhere).unwrap();
    let next = laboratory.image().id();
    used_up.remove().unwrap();
    assert_eq!(Image::open(&laboratory.target()).unwrap().id(), next);
    assert!(matches!(
        Image::open(&elsewhere).unwrap_err(),
        ImageError::NotAnImage { .. }
    ));

    // A sealed image whose guest runs on must not be woken from where somebody put it.
    let laboratory = Laboratory::new();
    let sealed = laboratory.sealed();
    fs::rename(laboratory.target(), &elsewhere).unwrap();
    sealed.remove().unwrap();
    assert!(Image::open(&elsewhere).is_err());
}

#[test]
fn removing_an_image_by_a_link_removes_the_image() {
    let laboratory = Laboratory::new();
    drop(laboratory.sealed());
    let link = laboratory.folder.path().join("link");
    std::os::unix::fs::symlink(laboratory.target(), &link).unwrap();
    Image::open_locked(&link).unwrap().remove().unwrap();
    assert_eq!(laboratory.names(), ["link"]);
}

fn use_up(laboratory: &Laboratory) {
    let mut image = Image::open_locked(&laboratory.target()).expect("the image can be opened");
    for state in [ImageState::Waking, ImageState::Consumed] {
        image.mark(state).expect("the image can be marked");
    }
}

#[test]
fn an_image_has_one_owner_and_any_number_of_readers() {
    let laboratory = Laboratory::new();
    let sealed = laboratory.sealed();
    assert!(matches!(
        Image::open_locked(&laboratory.target()),
        Err(ImageError::Locked { .. })
    ));
    assert!(Image::open(&laboratory.target()).is_ok());
    drop(sealed);
    let owner = Image::open_locked(&laboratory.target()).unwrap();
    assert!(matches!(
        Image::open_locked(&laboratory.target()),
        Err(ImageError::Locked { .. })
    ));
    let mut reader = Image::open(&laboratory.target()).unwrap();
    assert!(matches!(
        reader.mark(ImageState::Waking),
        Err(ImageError::NotLocked { .. })
    ));
    drop(owner);
}

#[test]
fn state_changes_survive_reopening_and_only_the_legal_ones_happen() {
    let laboratory = Laboratory::new();
    drop(laboratory.sealed());
    let path = laboratory.target();
    let legal = [
        ImageState::Waking,
        ImageState::Sealed,
        ImageState::Waking,
        ImageState::Consumed,
    ];
    for state in legal {
        let mut image = Image::open_locked(&path).unwrap();
        for refused in [
            ImageState::Writing,
            ImageState::Sealed,
            ImageState::Waking,
            ImageState::Consumed,
        ] {
            if !image.state().may_become(refused) {
                let error = image.mark(refused).unwrap_err();
                assert!(
                    matches!(error, ImageError::WrongState { wanted, .. } if wanted == refused),
                    "{error}"
                );
            }
        }
        image.mark(state).unwrap();
        assert_eq!(image.state(), state);
        drop(image);
        assert_eq!(Image::open(&path).unwrap().state(), state);
    }
    let error = Image::open_locked(&path)
        .unwrap()
        .mark(ImageState::Sealed)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("{} is consumed and cannot become sealed", path.display())
    );
}

#[test]
fn a_cancel_ends_writing_filling_and_verifying() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let progress = Progress::default();
    let cancelled = AtomicBool::new(false);
    let run = Run {
        threads: 2,
        progress: &progress,
        cancelled: &cancelled,
    };
    cancelled.store(true, Ordering::Relaxed);
    assert!(matches!(image.verify(&run), Err(ImageError::Cancelled)));
    let ram = MemoryFile::create(&laboratory.folder.path().join("ram"), laboratory.ram_length()).unwrap();
    assert!(matches!(
        image.fill("pc.ram", &ram, &run),
        Err(ImageError::Cancelled)
    ));
    use_up(&laboratory);
    let mut writer = laboratory.create(true).unwrap();
    assert!(matches!(
        writer.write_memory("pc.ram", &laboratory.memory(), &run),
        Err(ImageError::Cancelled)
    ));
    assert_eq!(progress.done(), ByteCount::ZERO);
    // A cancelled block is not a written one, and the writer is only good to be dropped.
    let again = working(|run| writer.write_memory("pc.ram", &laboratory.memory(), run));
    assert!(matches!(
        again,
        Err(ImageError::Mismatch {
            mismatch: Mismatch::Twice,
            ..
        })
    ));
    assert!(
        writer
            .seal(&laboratory.manifest(), &laboratory.recording())
            .is_err()
    );
}

#[test]
fn a_guest_that_is_not_whole_is_not_sealed() {
    let laboratory = Laboratory::new();
    let seal =
        |writer: dormouse_storage::ImageWriter| writer.seal(&laboratory.manifest(), &laboratory.recording());
    let mut writer = laboratory.create(false).unwrap();
    working(|run| writer.write_memory("pc.ram", &laboratory.memory(), run)).unwrap();
    let again = working(|run| writer.write_memory("pc.ram", &laboratory.memory(), run));
    assert!(matches!(
        again,
        Err(ImageError::Mismatch {
            mismatch: Mismatch::Twice,
            ..
        })
    ));
    let error = seal(writer).unwrap_err();
    assert!(
        matches!(&error, ImageError::Mismatch { block, mismatch: Mismatch::Missing } if block == "pc.bios"),
        "{error}"
    );

    // RAM that is shared has no pages in the stream: forgetting it must not make it zero.
    let mut writer = laboratory.create(false).unwrap();
    let error = working(|run| writer.write_pages(&laboratory.recording(), run)).unwrap_err();
    assert!(
        matches!(
            error,
            ImageError::Mismatch {
                mismatch: Mismatch::PagesMissing { found: 0, .. },
                ..
            }
        ),
        "{error}"
    );
    let error = working(|run| writer.write_memory("pc.bios", &laboratory.memory(), run)).unwrap_err();
    assert!(
        matches!(
            error,
            ImageError::Mismatch {
                mismatch: Mismatch::Length { .. },
                ..
            }
        ),
        "{error}"
    );
    let error = working(|run| writer.write_memory("mem0", &laboratory.memory(), run)).unwrap_err();
    assert!(
        matches!(
            error,
            ImageError::Mismatch {
                mismatch: Mismatch::Unknown,
                ..
            }
        ),
        "{error}"
    );
    drop(writer);
    assert!(laboratory.names().is_empty());
}

#[test]
fn a_manifest_beyond_its_limit_is_refused_before_anything_is_published() {
    let laboratory = Laboratory::new();
    let mut manifest = laboratory.manifest();
    manifest.vm_name = "n".repeat(5 << 20);
    let error = laboratory
        .written(false)
        .unwrap()
        .seal(&manifest, &laboratory.recording())
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "the manifest takes 5.0 MiB, at most 4.0 MiB are kept"
    );
    assert!(laboratory.names().is_empty());
}

#[test]
fn filling_needs_a_block_and_a_memory_of_the_same_length() {
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let short = MemoryFile::create(&laboratory.folder.path().join("short"), ByteCount(PAGE as u64)).unwrap();
    let error = working(|run| image.fill("pc.ram", &short, run)).unwrap_err();
    assert!(
        matches!(
            error,
            ImageError::Mismatch {
                mismatch: Mismatch::Length { .. },
                ..
            }
        ),
        "{error}"
    );
    let error = working(|run| image.fill("mem0", &short, run)).unwrap_err();
    assert!(
        matches!(
            error,
            ImageError::Mismatch {
                mismatch: Mismatch::Unknown,
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn noise_is_noise() {
    let mut bytes = [0; 64];
    noise(&mut bytes, 0);
    assert!(bytes.chunks(8).all(|word| word != [0; 8]));
}
