//! What becomes of an interrupted hibernation: a table, with nothing in it but what was found.
//!
//! | image | QEMU | verdict |
//! | --- | --- | --- |
//! | whole, not used | stands still since the save | end QEMU |
//! | whole, not used | has run since | the guest is the guest: the image goes, settings are put back |
//! | whole, not used | gone | hibernated |
//! | whole, being woken or used | stands still since the save, or gone | end QEMU: the guest is where the image was woken |
//! | whole, being woken or used | has run since | **a person**: it may run twice |
//! | unfinished | there | give the guest back |
//! | unfinished | gone | remove it |
//! | nothing, though it may have been sealed | stands still since the save | **a person**: somebody took the image away, and may have woken it |
//! | nothing, though it was sealed | has run since | the guest is the guest |
//! | nothing, otherwise | there | give the guest back |
//! | nothing | gone | nothing is left to do |
//!
//! A rollback that was interrupted goes on: a whole image goes whatever QEMU does. Only where QEMU is gone too a person is
//! asked: the image is all that is left of a guest that ran on from it.
//!
//! A snapshot has a table of its own. Its record says `Sealing` only once its guest was given back, and before that its image
//! is not whole. Killed between the two, a guest that runs already is left running, and one that its owner paused in that
//! instant is run:
//!
//! | guest | image | verdict |
//! | --- | --- | --- |
//! | was given back, or is gone | whole, whatever became of it since | it stays, and QEMU is not touched |
//! | was given back, or is gone | unfinished, or nothing | remove it; QEMU is not touched |
//! | may not have been given back | unfinished, or nothing | give the guest back as it was; remove it |
//!
//! QEMU's run state `postmigrate` is left by running only, and comes back by another migration only. So "stands still
//! since the save" is what QEMU says, not what we deduce.

use dormouse_qmp::view::machine::RunState;
use dormouse_storage::ImageState;
use dormouse_storage::image::Remains;

use crate::journal::Point;
use crate::machine::hibernate::machine::{Aim, GiveBack};

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    /// What was interrupted.
    pub aim: Aim,
    /// How far the hibernation was, by its record.
    pub point: Point,
    /// Whether the vCPUs ran before it.
    pub was_running: bool,
    /// What is left of the image.
    pub remains: Remains,
    /// QEMU's run state; `None` if it is gone.
    pub qemu: Option<RunState>,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Make the image durable and end QEMU.
    EndQemu,
    /// The image is the guest, and there is no QEMU to end.
    KeepImage,
    /// Remove a whole image first, if there is one; give the guest back; remove what is unfinished.
    GiveBack {
        /// What the guest is left as.
        how: GiveBack,
        /// Whether a whole image is removed.
        discard: bool,
    },
    /// QEMU is gone; remove what is unfinished.
    Sweep,
    /// The image is a snapshot; make it durable, and leave QEMU alone.
    KeepSnapshot,
    /// The guest of a snapshot was given back: remove what is unfinished, and leave QEMU alone.
    DropSnapshot,
    /// A person has to look.
    Ask(Doubt),
}

/// Why a person has to look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doubt {
    /// The guest ran on in QEMU, and its image was woken.
    RunsTwice,
    /// The image may have been sealed, and is not there.
    ImageTakenAway,
    /// QEMU is gone, and the image that is left is older than its guest was.
    ImageOlderThanGuest,
}

impl Facts {
    /// The verdict.
    pub fn verdict(&self) -> Verdict {
        if self.aim.is_snapshot() {
            return self.of_snapshot();
        }
        let stands_still = self
            .qemu
            .as_ref()
            .is_none_or(|state| *state == RunState::Postmigrate);
        let is_gone = self.qemu.is_none();
        let returning = self.point == Point::Returning;
        let as_it_was = self.as_it_was();
        match self.remains {
            Remains::Whole(ImageState::Waking | ImageState::Consumed) => match (is_gone, stands_still) {
                (true, _) => Verdict::KeepImage,
                (false, true) => Verdict::EndQemu,
                (false, false) => Verdict::Ask(Doubt::RunsTwice),
            },
            Remains::Whole(_) if returning && is_gone => Verdict::Ask(Doubt::ImageOlderThanGuest),
            Remains::Whole(_) if is_gone => Verdict::KeepImage,
            Remains::Whole(_) if stands_still && !returning => Verdict::EndQemu,
            Remains::Whole(_) => Verdict::GiveBack {
                how: if stands_still { as_it_was } else { GiveBack::AsItIs },
                discard: true,
            },
            _ if is_gone => Verdict::Sweep,
            Remains::Nothing if stands_still && matches!(self.point, Point::Sealing | Point::Sealed) => {
                Verdict::Ask(Doubt::ImageTakenAway)
            }
            Remains::Nothing if self.point == Point::Sealed => Verdict::GiveBack {
                how: GiveBack::AsItIs,
                discard: false,
            },
            Remains::Nothing | Remains::Unfinished => Verdict::GiveBack {
                how: as_it_was,
                discard: false,
            },
        }
    }

    fn of_snapshot(&self) -> Verdict {
        let is_whole = matches!(self.remains, Remains::Whole(_));
        let is_back = self.point != Point::Saving;
        match (is_whole, self.qemu.is_some()) {
            (true, there) if is_back || !there => Verdict::KeepSnapshot,
            (false, _) if is_back => Verdict::DropSnapshot,
            (false, false) => Verdict::Sweep,
            // Nothing seals it before; if anything did, its guest counts.
            (discard, _) => Verdict::GiveBack {
                how: self.as_it_was(),
                discard,
            },
        }
    }

    fn as_it_was(&self) -> GiveBack {
        if self.was_running {
            GiveBack::Running
        } else {
            GiveBack::Paused
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POINTS: [Point; 4] = [Point::Saving, Point::Sealing, Point::Sealed, Point::Returning];
    const REMAINS: [Remains; 5] = [
        Remains::Nothing,
        Remains::Unfinished,
        Remains::Whole(ImageState::Sealed),
        Remains::Whole(ImageState::Waking),
        Remains::Whole(ImageState::Consumed),
    ];

    fn all() -> impl Iterator<Item = Facts> {
        all_of(Aim::Hibernate)
    }

    fn all_of(aim: Aim) -> impl Iterator<Item = Facts> {
        let states = [
            None,
            Some(RunState::Running),
            Some(RunState::Paused),
            Some(RunState::FinishMigrate),
            Some(RunState::Postmigrate),
        ];
        POINTS.into_iter().flat_map(move |point| {
            let states = states.clone();
            REMAINS.into_iter().flat_map(move |remains| {
                states.clone().into_iter().flat_map(move |qemu| {
                    [true, false].map(|was_running| Facts {
                        aim,
                        point,
                        was_running,
                        remains,
                        qemu: qemu.clone(),
                    })
                })
            })
        })
    }

    #[test]
    fn qemu_is_ended_only_for_a_whole_image_and_a_guest_that_stood_still() {
        let mut ended = 0;
        for facts in all().filter(|facts| facts.verdict() == Verdict::EndQemu) {
            assert!(matches!(facts.remains, Remains::Whole(_)), "{facts:?}");
            assert_eq!(facts.qemu, Some(RunState::Postmigrate), "{facts:?}");
            ended += 1;
        }
        assert!(ended > 0);
    }

    #[test]
    fn a_guest_never_runs_beside_an_image_that_could_be_woken_or_was() {
        for facts in all() {
            let Verdict::GiveBack { discard, .. } = facts.verdict() else {
                continue;
            };
            match facts.remains {
                Remains::Whole(state) => assert!(state == ImageState::Sealed && discard, "{facts:?}"),
                Remains::Nothing | Remains::Unfinished => assert!(!discard, "{facts:?}"),
            }
        }
    }

    #[test]
    fn what_was_not_sealed_is_given_back_as_it_was() {
        for facts in all() {
            if facts.remains != Remains::Unfinished || facts.qemu.is_none() {
                continue;
            }
            let how = if facts.was_running {
                GiveBack::Running
            } else {
                GiveBack::Paused
            };
            let discard = false;
            assert_eq!(facts.verdict(), Verdict::GiveBack { how, discard }, "{facts:?}");
        }
    }

    #[test]
    fn an_image_that_vanished_is_asked_about_unless_a_rollback_took_it() {
        for facts in all() {
            if facts.remains != Remains::Nothing || facts.qemu != Some(RunState::Postmigrate) {
                continue;
            }
            let asked = facts.verdict() == Verdict::Ask(Doubt::ImageTakenAway);
            let may_be_sealed = matches!(facts.point, Point::Sealing | Point::Sealed);
            assert_eq!(asked, may_be_sealed, "{facts:?}");
        }
    }

    #[test]
    fn a_guest_that_ran_on_is_left_as_it_is() {
        let facts = Facts {
            aim: Aim::Hibernate,
            point: Point::Sealed,
            was_running: false,
            remains: Remains::Whole(ImageState::Sealed),
            qemu: Some(RunState::Running),
        };
        let how = GiveBack::AsItIs;
        assert_eq!(facts.verdict(), Verdict::GiveBack { how, discard: true });
        let used = Facts {
            remains: Remains::Whole(ImageState::Consumed),
            ..facts
        };
        assert_eq!(used.verdict(), Verdict::Ask(Doubt::RunsTwice));
    }

    fn snapshots() -> impl Iterator<Item = Facts> {
        all_of(Aim::Snapshot { leave_paused: false })
    }

    #[test]
    fn the_guest_of_a_snapshot_is_never_ended_and_no_person_is_asked() {
        for facts in snapshots() {
            let verdict = facts.verdict();
            assert!(
                !matches!(verdict, Verdict::EndQemu | Verdict::KeepImage | Verdict::Ask(_)),
                "{facts:?}: {verdict:?}"
            );
        }
    }

    #[test]
    fn the_guest_of_a_snapshot_is_touched_only_where_it_may_not_have_been_given_back() {
        for facts in snapshots() {
            let touched = matches!(facts.verdict(), Verdict::GiveBack { .. });
            let may_stand_still = facts.point == Point::Saving && facts.qemu.is_some();
            assert_eq!(touched, may_stand_still, "{facts:?}");
        }
    }

    #[test]
    fn a_snapshot_is_kept_once_it_is_sealed() {
        for facts in snapshots() {
            let kept = facts.verdict() == Verdict::KeepSnapshot;
            let is_whole = matches!(facts.remains, Remains::Whole(_));
            let may_be_sealed = facts.point != Point::Saving || facts.qemu.is_none();
            assert_eq!(kept, is_whole && may_be_sealed, "{facts:?}");
        }
    }
}
