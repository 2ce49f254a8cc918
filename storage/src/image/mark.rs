//! A change of an image's state, in both copies of its superblock, and what counts after one that failed.
//!
//! A write that failed may be on the disk all the same, or get there later. So after a failure the image counts as `waking`,
//! from which every change begins or to which it leads, and the next change has a higher generation than anything that may be
//! there: it can be repeated, and a mark can be taken back.
//!
//! `waking` has to be in both copies before anybody acts on it, since the guest then runs: a lone copy that is damaged would
//! bring `sealed` back. Any other change is done with the first.

use std::io;

use super::state::ImageState;
use super::superblock::{Superblock, WakeNote};

/// Changes the state. `write` puts a superblock into a copy, durably. `copy` is the one that tells the present state.
pub(super) fn change(
    superblock: &mut Superblock,
    copy: &mut usize,
    state: ImageState,
    mut write: impl FnMut(&Superblock, usize) -> io::Result<()>,
) -> io::Result<()> {
    let note = match state {
        ImageState::Sealed => WakeNote::default(),
        _ => superblock.note,
    };
    let changed = Superblock {
        state,
        generation: superblock.generation + 1,
        note,
        ..superblock.clone()
    };
    // What counts until both are written.
    superblock.state = ImageState::Waking;
    superblock.generation = changed.generation;
    let other = 1 - *copy;
    write(&changed, other)?;
    let first = std::mem::replace(copy, other);
    match write(&changed, first) {
        Err(error) if state == ImageState::Waking => return Err(error),
        Err(error) => {
            tracing::warn!(%state, %error, "the second copy of an image's superblock is not written")
        }
        Ok(()) => {}
    }
    *superblock = changed;
    Ok(())
}

#[cfg(test)]
mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::image::superblock::{Superblocks, beginning};

    /// What becomes of a write.
    #[derive(Debug, Clone, Copy, PartialEq)]
    enum Fate {
        Done,
        /// It fails, and is there.
        ThereAfterAll,
        /// It fails, and is not there.
        Lost,
        /// It fails in the middle.
        Torn,
    }

    const FATES: [Fate; 4] = [Fate::Done, Fate::ThereAfterAll, Fate::Lost, Fate::Torn];

    struct Disk {
        copies: [Vec<u8>; 2],
    }

    impl Disk {
        fn write(&mut self, superblock: &Superblock, copy: usize, fate: Fate) -> io::Result<()> {
            let bytes = superblock.encode();
            match fate {
                Fate::Lost => {}
                Fate::Torn => self.copies[copy][..512].copy_from_slice(&bytes[..512]),
                Fate::Done | Fate::ThereAfterAll => self.copies[copy] = bytes.to_vec(),
            }
            match fate {
                Fate::Done => Ok(()),
                _ => Err(io::Error::other("the disk failed")),
            }
        }

        fn state(&self) -> ImageState {
            state_of([&self.copies[0], &self.copies[1]])
        }

        /// What it says when either copy was damaged.
        fn states_when_damaged(&self) -> [ImageState; 2] {
            let torn = [0x5a; 4096];
            let torn = |copy: &[u8]| [&copy[..8], &torn[8..]].concat();
            let [first, second] = &self.copies;
            [state_of([&torn(first), second]), state_of([first, &torn(second)])]
        }
    }

    fn state_of(copies: [&[u8]; 2]) -> ImageState {
        match Superblocks::read(copies) {
            Superblocks::Valid { current, .. } => current.state,
            other => panic!("{other:?}"),
        }
    }

    struct Image {
        disk: Disk,
        superblock: Superblock,
        copy: usize,
    }

    impl Image {
        fn sealed(copy: usize) -> Self {
            let superblock = Superblock {
                state: ImageState::Sealed,
                generation: 2,
                ..beginning(Uuid::from_u128(7), 1 << 20)
            };
            let copies = [superblock.encode().to_vec(), superblock.encode().to_vec()];
            Self {
                disk: Disk { copies },
                superblock,
                copy,
            }
        }

        fn mark(&mut self, state: ImageState, fates: [Fate; 2]) -> io::Result<()> {
            assert!(self.superblock.state.may_become(state));
            let mut fates = fates.into_iter();
            let disk = &mut self.disk;
            change(&mut self.superblock, &mut self.copy, state, |superblock, copy| {
                disk.write(superblock, copy, fates.next().unwrap())
            })
        }
    }

    const WHOLE: [Fate; 2] = [Fate::Done, Fate::Done];

    fn all_failing() -> impl Iterator<Item = (usize, [Fate; 2])> {
        let fates = FATES
            .into_iter()
            .flat_map(|first| FATES.map(|second| [first, second]));
        fates
            .filter(|fates| *fates != WHOLE)
            .flat_map(|fates| [(0, fates), (1, fates)])
    }

    #[test]
    fn a_mark_that_failed_in_any_way_can_be_taken_back_and_the_image_wakes_again() {
        for (copy, fates) in all_failing() {
            let mut image = Image::sealed(copy);
            image.mark(ImageState::Waking, fates).expect_err("it failed");
            assert_eq!(image.superblock.state, ImageState::Waking, "{fates:?}");
            image.mark(ImageState::Sealed, WHOLE).unwrap();
            assert_eq!(image.disk.state(), ImageState::Sealed, "{fates:?}");
            image.mark(ImageState::Waking, WHOLE).unwrap();
            assert_eq!(
                image.disk.states_when_damaged(),
                [ImageState::Waking; 2],
                "{fates:?}"
            );
        }
    }

    #[test]
    fn a_guest_runs_only_when_damage_to_either_copy_lets_no_second_one_run() {
        for (copy, fates) in all_failing() {
            let mut image = Image::sealed(copy);
            if image.mark(ImageState::Waking, fates).is_ok() {
                assert_eq!(
                    image.disk.states_when_damaged(),
                    [ImageState::Waking; 2],
                    "{fates:?}"
                );
            }
        }
    }

    #[test]
    fn any_change_that_failed_can_be_made_again() {
        for state in [ImageState::Consumed, ImageState::Sealed] {
            for (copy, fates) in all_failing() {
                let mut image = Image::sealed(copy);
                image.mark(ImageState::Waking, WHOLE).unwrap();
                if image.mark(state, fates).is_err() {
                    image.mark(state, WHOLE).unwrap();
                    assert_eq!(image.disk.states_when_damaged(), [state; 2], "{fates:?}");
                }
                assert_eq!(
                    (image.superblock.state, image.disk.state()),
                    (state, state),
                    "{fates:?}"
                );
            }
        }
    }

    #[test]
    fn only_a_sealed_image_tells_nothing_of_a_wake() {
        let mut image = Image::sealed(0);
        let note = WakeNote {
            wake: Uuid::from_u128(9),
            disks_forced: true,
        };
        image.superblock.note = note;
        image.mark(ImageState::Waking, WHOLE).unwrap();
        image
            .mark(ImageState::Sealed, [Fate::Lost, Fate::Done])
            .expect_err("it failed");
        assert_eq!(image.superblock.note, note);
        image.mark(ImageState::Sealed, WHOLE).unwrap();
        assert_eq!(image.superblock.note, WakeNote::default());
    }
}
