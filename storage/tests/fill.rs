//! RAM on huge pages is filled in place, and holds what RAM on small pages would.
//!
//! These tests mount a tmpfs and need root, as the continuous integration has it. Without it they fail.

mod fixture;

use std::ffi::CString;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use dormouse_storage::{
    ByteCount, Compression, CreateOptions, Image, ImageError, ImageKey, ImageWriter, MemoryFile,
};
use fixture::{Laboratory, MIB, flip_bit, working};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tempfile::TempDir;

/// A tmpfs on huge pages.
struct HugeTmpfs {
    folder: TempDir,
}

impl HugeTmpfs {
    fn of(room: u64) -> Self {
        let folder = tempfile::tempdir().expect("folder");
        let options = CString::new(format!("huge=within_size,size={room}")).expect("letters");
        mount(
            "tmpfs",
            folder.path(),
            "tmpfs",
            MountFlags::empty(),
            options.as_c_str(),
        )
        .expect("this test needs to mount a tmpfs, and is not to be skipped (root)");
        Self { folder }
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("ram")
    }

    fn filled(&self, laboratory: &Laboratory, image: &Image) -> Result<Vec<u8>, ImageError> {
        let memory = MemoryFile::create(&self.path(), laboratory.ram_length()).expect("memory");
        let filled = working(|run| image.fill("pc.ram", &memory, run));
        let held = fs::read(self.path()).expect("read");
        memory.remove().expect("removed");
        filled.map(|()| held)
    }
}

impl Drop for HugeTmpfs {
    fn drop(&mut self) {
        let _ = unmount(self.folder.path(), UnmountFlags::DETACH);
    }
}

#[test]
fn every_form_fills_huge_pages_with_the_same_bytes_and_leaves_holes() {
    let tmpfs = HugeTmpfs::of(64 * MIB);
    let key = || ImageKey::from_file_content(&[7; 32]).expect("key");
    for laboratory in [Laboratory::new(), Laboratory::compressible()] {
        for (compression, key) in [
            (Compression::None, None),
            (Compression::Zstd(1), None),
            (Compression::None, Some(key())),
            (Compression::Zstd(1), Some(key())),
        ] {
            let options = CreateOptions {
                replace: true,
                compression,
                key: key.clone(),
                ..CreateOptions::default()
            };
            let sealed = ImageWriter::create(&laboratory.target(), laboratory.layout(), options)
                .and_then(|writer| laboratory.write(writer))
                .and_then(|writer| writer.seal(&laboratory.manifest(), &laboratory.recording()))
                .expect("sealed");
            drop(sealed);
            let mut image = Image::open(&laboratory.target()).expect("image");
            if let Some(key) = &key {
                image.unlock(key).expect("unlocked");
            }
            let filled = tmpfs.filled(&laboratory, &image).expect("filled");
            assert!(filled == laboratory.ram, "{compression:?}");
            fs::remove_file(laboratory.target()).expect("removed");
        }
    }
}

#[test]
fn memory_of_zeros_takes_no_room() {
    let tmpfs = HugeTmpfs::of(64 * MIB);
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let memory = MemoryFile::create(&tmpfs.path(), laboratory.ram_length()).expect("memory");
    working(|run| image.fill("pc.ram", &memory, run)).expect("filled");
    let metadata = fs::metadata(tmpfs.path()).expect("metadata");
    assert_eq!(metadata.blksize(), 2 * MIB, "it is on huge pages");
    // Of six chunks, three hold something: in the first, the second and the third huge page.
    assert!(metadata.blocks() * 512 <= 6 * MIB, "{} blocks", metadata.blocks());
}

#[test]
fn a_flipped_bit_is_found_in_place_by_its_chunk() {
    let tmpfs = HugeTmpfs::of(64 * MIB);
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let ram = image.layout().block("pc.ram").expect("RAM").offset;
    flip_bit(&laboratory.target(), ram + 2 * MIB + 6 * 4096);
    let error = tmpfs.filled(&laboratory, &image).expect_err("corrupt");
    assert!(matches!(error, ImageError::Corrupt { .. }), "{error}");
    let told = format!("{:?}", error);
    assert!(
        told.contains("pc.ram") && told.contains(&(2 * MIB).to_string()),
        "{told}"
    );
}

#[test]
fn a_tmpfs_without_room_is_an_error_and_not_a_signal() {
    let tmpfs = HugeTmpfs::of(2 * MIB);
    let laboratory = Laboratory::new();
    let image = laboratory.image();
    let error = tmpfs.filled(&laboratory, &image).expect_err("no room");
    assert!(matches!(error, ImageError::Memory(_)), "{error}");
    assert!(laboratory.ram_length() > ByteCount(2 * MIB));
}
