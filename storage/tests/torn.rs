//! Whatever happens to the bytes of an image, a guest is never woken with other memory than it had: the damage is
//! found, or it lies where nothing is.

mod fixture;

use std::fs;
use std::path::PathBuf;

use dormouse_storage::{Compression, CreateOptions, Image, ImageError, ImageKey, ImageState, ImageWriter};
use fixture::{Laboratory, MIB, noise, read_all, working};
use proptest::prelude::*;
use tempfile::TempDir;

const PAGE: usize = 4096;

/// An image of one form, to be damaged over and over.
struct Specimen {
    laboratory: Laboratory,
    key: Option<ImageKey>,
    whole: Vec<u8>,
    /// Where one thing ends and another begins.
    boundaries: Vec<usize>,
    folder: TempDir,
}

impl Specimen {
    fn of(compression: Compression, key: Option<ImageKey>) -> Self {
        let laboratory = Laboratory::compressible();
        let options = CreateOptions {
            compression,
            key: key.clone(),
            ..CreateOptions::default()
        };
        let writer = ImageWriter::create(&laboratory.target(), laboratory.layout(), options).expect("create");
        let sealed = laboratory
            .write(writer)
            .and_then(|writer| writer.seal(&laboratory.manifest(), &laboratory.recording()));
        working(|run| sealed.expect("sealed").give_back(run)).expect("given back");
        let whole = read_all(&laboratory.target());
        let image = Image::open(&laboratory.target()).expect("open");
        let mut boundaries = vec![0, 8, 12, 16, 32, 40, 48, 120, 128, 160, PAGE - 4, PAGE, 2 * PAGE];
        for block in image.layout().blocks() {
            let chunks = (block.offset..block.offset + block.length.0).step_by(MIB as usize);
            boundaries.extend(chunks.map(|chunk| chunk as usize));
            boundaries.push((block.offset + block.length.0) as usize);
        }
        let number = |at: usize| u64::from_le_bytes(whole[at..at + 8].try_into().expect("8 bytes")) as usize;
        for area in [48, 72, 96] {
            boundaries.extend([number(area), number(area) + number(area + 8)]);
        }
        boundaries.push(whole.len());
        Self {
            laboratory,
            key,
            whole,
            boundaries,
            folder: tempfile::tempdir_in("/dev/shm").expect("folder"),
        }
    }

    fn all() -> Vec<Self> {
        let key = ImageKey::from_file_content(&[1; 32]).expect("key");
        vec![
            Self::of(Compression::None, None),
            Self::of(Compression::Zstd(1), None),
            Self::of(Compression::Zstd(1), Some(key)),
        ]
    }

    /// Reads a damaged image as a wake does; `Ok` tells whether anything was wrong.
    fn read(&self, damaged: &[u8]) -> Result<(), ImageError> {
        let path: PathBuf = self.folder.path().join("image");
        fs::write(&path, damaged).expect("write");
        let mut image = Image::open(&path)?;
        if let Some(key) = &self.key {
            image.unlock(key)?;
        }
        let devices = image.device_state()?;
        let filled = self.laboratory.filled(&image)?;
        working(|run| image.verify(run))?;
        // Nothing was found, so nothing may be wrong.
        assert_eq!(image.state(), ImageState::Sealed);
        assert!(filled == self.laboratory.ram, "another memory");
        assert_eq!(devices.normalized(), self.laboratory.recording().normalized());
        assert_eq!(image.manifest(), &self.laboratory.manifest());
        Ok(())
    }
}

#[test]
fn an_image_cut_at_any_boundary_is_refused() {
    for specimen in Specimen::all() {
        specimen.read(&specimen.whole).unwrap();
        for boundary in &specimen.boundaries {
            for cut in [boundary.saturating_sub(1), *boundary, boundary + 1] {
                if cut < specimen.whole.len() {
                    specimen.read(&specimen.whole[..cut]).unwrap_err();
                }
            }
        }
    }
}

#[test]
fn a_byte_changed_on_either_side_of_any_boundary_is_found_or_harmless() {
    for specimen in Specimen::all() {
        let mut damaged = specimen.whole.clone();
        let mut found = 0;
        for boundary in &specimen.boundaries {
            for at in [boundary.wrapping_sub(1), *boundary] {
                if at < damaged.len() {
                    damaged[at] ^= 0x40;
                    found += usize::from(specimen.read(&damaged).is_err());
                    damaged[at] ^= 0x40;
                }
            }
        }
        assert!(found > 10, "only {found} were found");
    }
}

#[test]
fn a_write_that_was_torn_at_any_sector_is_found() {
    // What a crash leaves while the superblocks go from `writing` to `sealed`, over old data.
    for specimen in Specimen::all() {
        let mut old = vec![0; 2 * PAGE];
        noise(&mut old, 9);
        for sector in (0..2 * PAGE).step_by(512) {
            let mut damaged = specimen.whole.clone();
            damaged[sector..2 * PAGE].copy_from_slice(&old[sector..]);
            // With its first copy whole an image is one.
            assert_eq!(specimen.read(&damaged).is_ok(), sector >= PAGE, "{sector}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]
    #[test]
    fn random_damage_is_found_or_harmless(
        places in prop::collection::vec((any::<prop::sample::Index>(), 1_usize..9000, any::<u64>()), 1..4),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        for specimen in Specimen::all() {
            let mut damaged = specimen.whole.clone();
            for (place, length, seed) in &places {
                let at = place.index(damaged.len());
                let end = damaged.len().min(at + length);
                noise(&mut damaged[at..end], *seed);
            }
            if let Some(cut) = &cut {
                damaged.truncate(cut.index(damaged.len()));
            }
            let _ = specimen.read(&damaged);
        }
    }
}
