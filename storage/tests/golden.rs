//! Images that earlier versions wrote, each kept as it was: every version must read them.
//!
//! A new format gets new files, made with `Laboratory::compressible()` and compressed; old ones stay.

mod fixture;

use std::fs;
use std::path::{Path, PathBuf};

use dormouse_storage::{ByteCount, Image, ImageKey, ImageState, Unmappable};
use fixture::{Laboratory, working};
use tempfile::TempDir;

/// Unpacks a golden image into a file of its own.
fn golden(name: &str, folder: &TempDir) -> PathBuf {
    let packed = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../tests/golden")
        .join(name);
    let bytes = zstd::decode_all(fs::File::open(packed).expect("golden image")).expect("zstd");
    let path = folder.path().join("image");
    fs::write(&path, bytes).expect("write");
    path
}

/// Checks all that an image holds, and that it can be used up.
fn check(name: &str, format: u32, key: Option<&ImageKey>) -> Image {
    let laboratory = Laboratory::compressible();
    let folder = tempfile::tempdir().expect("folder");
    let path = golden(name, &folder);
    let mut image = Image::open_locked(&path).expect("opened");
    assert_eq!(image.format(), format);
    assert_eq!(image.state(), ImageState::Sealed);
    assert_eq!(image.manifest(), &laboratory.manifest());
    assert_eq!(image.layout(), &laboratory.layout());
    if let Some(key) = key {
        image.unlock(key).expect("unlocked");
    }
    assert!(laboratory.filled(&image).expect("filled") == laboratory.ram);
    assert_eq!(
        image.device_state().expect("device state").normalized(),
        laboratory.recording().normalized()
    );
    working(|run| image.verify(run)).expect("verified");
    for state in [ImageState::Waking, ImageState::Consumed] {
        image.mark(state).expect("marked");
    }
    let again = Image::open(&path).expect("opened again");
    assert_eq!(again.state(), ImageState::Consumed);
    assert_eq!(
        again.format(),
        format,
        "a change of state does not change the format"
    );
    again
}

#[test]
fn an_image_of_format_1_is_read_mapped_and_used_up() {
    assert!(check("format-1.dormouse.zst", 1, None).check_mappable().is_ok());
}

#[test]
fn images_of_format_2_are_read_in_every_form() {
    assert!(
        check("format-2-raw.dormouse.zst", 2, None)
            .check_mappable()
            .is_ok()
    );
    let compressed = check("format-2-zstd.dormouse.zst", 2, None);
    assert_eq!(compressed.check_mappable(), Err(Unmappable::Compressed));
    assert!(compressed.usage().unwrap().compressed > ByteCount::mib(1));
    let key = ImageKey::from_file_content(&[b'k'; 32]).unwrap();
    assert!(check("format-2-encrypted.dormouse.zst", 2, Some(&key)).is_encrypted());
}
