//! What becomes of an interrupted wake: a table, with nothing in it but what was found.
//!
//! "Waits" is a QEMU that has loaded its guest and stands as it came up; "stopped" is one whose guest has run and stands.
//!
//! | point | image | QEMU gone | waits | runs | stopped |
//! | --- | --- | --- | --- | --- | --- |
//! | marked | sealed | as before | end QEMU | awake | **a person** |
//! | marked | waking, by this wake | seal again | end QEMU, seal again | awake | **a person** |
//! | marked | used, by this wake | over | awake | awake | awake |
//! | marked | woken by another | over | end QEMU | **a person** | **a person** |
//! | marked | not there | **a person** | **a person** | awake | awake |
//! | continuing | sealed | as before | **a person** | awake | **a person** |
//! | continuing | waking, by this wake | **a person** | let it run | awake | awake |
//! | continuing | used, by this wake | over | awake | awake | awake |
//! | continuing | woken by another | over | **a person** | **a person** | **a person** |
//! | continuing | not there | over | awake | awake | awake |
//!
//! "Awake" makes sure that the image is marked as used. "Let it run" is what the wake was about to do: a guest that its owner
//! paused in that instant is run; one that shall stay paused is left so. A guest that is fed from its image is left to the
//! recovery of its feed once it was to run.
//!
//! A QEMU that somebody else started is never ended. One that has nothing of the guest ("empty") is as good as gone. One that
//! has it and waits is for its owner to end: until then the image wakes nowhere.
//!
//! | point | image | of others: empty | waits |
//! | --- | --- | --- | --- |
//! | marked | sealed | as before | **its owner** |
//! | marked | waking, by this wake | seal again | **its owner** |
//! | marked | woken by another | as before | **a person** |
//!
//! The mark in an image names its wake: what another wake has marked is never sealed again.

use crate::machine::wake::record::Point;

/// What was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// How far the wake was, by its record.
    pub point: Point,
    /// Whether the guest was to run.
    pub shall_run: bool,
    /// Whether it is fed from the image while it runs.
    pub is_fed: bool,
    /// Whether somebody else started QEMU.
    pub is_of_others: bool,
    /// The image.
    pub image: Mark,
    /// QEMU.
    pub qemu: Qemu,
}

/// What the image says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mark {
    /// It is the guest.
    Sealed,
    /// This wake marked it.
    Waking,
    /// This wake used it up.
    Used,
    /// Another wake has marked it since.
    Others,
    /// It is not there, or something else is.
    NotThere,
}

/// What QEMU does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Qemu {
    /// It has ended.
    Gone,
    /// It does not answer.
    Silent,
    /// It is one of others, and has loaded nothing of the guest.
    Empty,
    /// It stands as it came up.
    Waits,
    /// Its guest runs.
    Runs,
    /// Its guest has run, and stands.
    Stopped,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The guest has not run: end QEMU, if it is there and ours, and seal the image again, if this wake marked it.
    Undo,
    /// The guest is awake: run it first, if `run`; mark the image as used, if it is there and is not.
    Finish {
        /// Whether QEMU is told to run it.
        run: bool,
    },
    /// The guest was awake, and is no more.
    Over,
    /// The recovery of its feed goes on from here.
    LeaveToFeed,
    /// A person has to look.
    Ask(Doubt),
}

/// Why a person has to look.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doubt {
    /// QEMU is gone, and was about to run the guest.
    MayHaveRun,
    /// The guest is in a QEMU, and another wake woke it as well.
    RunsTwice,
    /// The image is not there.
    ImageNotThere,
    /// The guest is in a QEMU in a state that the wake did not leave it in.
    Unexpected,
    /// QEMU does not answer.
    Silent,
    /// A QEMU of others has the guest, which has not run.
    Held,
}

impl Facts {
    /// The verdict.
    pub fn verdict(&self) -> Verdict {
        use Verdict::{Ask, Finish, LeaveToFeed, Over, Undo};
        let awake = Finish { run: false };
        match (self.point, self.image, self.qemu) {
            // Before it was told to run, a QEMU that waits for its memory may not answer.
            (Point::Marked, Mark::Sealed | Mark::Waking, Qemu::Silent) if self.is_fed => Undo,
            (_, _, Qemu::Silent) => Ask(Doubt::Silent),
            // It would be left beside an image that could be woken, or that would not feed it any more.
            (_, Mark::Sealed, Qemu::Runs) if self.is_fed => Ask(Doubt::Unexpected),
            (_, Mark::Waking | Mark::NotThere, Qemu::Runs) if self.is_fed => LeaveToFeed,
            (Point::Continuing, Mark::Waking, Qemu::Waits | Qemu::Stopped) if self.is_fed => LeaveToFeed,

            (Point::Marked, Mark::Sealed | Mark::Waking, Qemu::Waits) if self.is_of_others => {
                Ask(Doubt::Held)
            }
            (Point::Marked, Mark::Others, Qemu::Waits) if self.is_of_others => Ask(Doubt::RunsTwice),

            (_, Mark::Used | Mark::Others, Qemu::Gone) => Over,
            (_, Mark::Used, _) => awake,
            (Point::Marked, Mark::Others, Qemu::Empty | Qemu::Waits) => Undo,
            (_, Mark::Others, _) => Ask(Doubt::RunsTwice),

            (_, Mark::Sealed | Mark::Waking | Mark::NotThere, Qemu::Runs) => awake,
            (_, Mark::Sealed, Qemu::Gone) => Undo,
            (Point::Marked, Mark::Sealed | Mark::Waking, Qemu::Gone | Qemu::Empty | Qemu::Waits) => Undo,
            (_, Mark::Sealed, _) | (Point::Marked, Mark::Waking, Qemu::Stopped) => Ask(Doubt::Unexpected),
            (Point::Marked, Mark::NotThere, Qemu::Gone | Qemu::Empty | Qemu::Waits) => {
                Ask(Doubt::ImageNotThere)
            }
            // It was told to run what it has not.
            (Point::Continuing, Mark::Waking | Mark::NotThere, Qemu::Empty) => Ask(Doubt::Unexpected),

            (Point::Continuing, Mark::Waking, Qemu::Gone) => Ask(Doubt::MayHaveRun),
            (Point::Continuing, Mark::Waking, Qemu::Waits) => Finish { run: self.shall_run },
            (Point::Continuing, Mark::NotThere, Qemu::Gone) => Over,
            (Point::Continuing, Mark::Waking, Qemu::Stopped) | (_, Mark::NotThere, _) => awake,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MARKS: [Mark; 5] = [
        Mark::Sealed,
        Mark::Waking,
        Mark::Used,
        Mark::Others,
        Mark::NotThere,
    ];
    const QEMUS: [Qemu; 6] = [
        Qemu::Gone,
        Qemu::Silent,
        Qemu::Empty,
        Qemu::Waits,
        Qemu::Runs,
        Qemu::Stopped,
    ];

    fn facts(point: Point, image: Mark, qemu: Qemu) -> Facts {
        Facts {
            point,
            shall_run: true,
            is_fed: false,
            is_of_others: false,
            image,
            qemu,
        }
    }

    fn all() -> impl Iterator<Item = Facts> {
        let points = [Point::Marked, Point::Continuing];
        let flags = [(true, false), (true, true), (false, false), (false, true)];
        points.into_iter().flat_map(move |point| {
            MARKS.into_iter().flat_map(move |image| {
                QEMUS.into_iter().flat_map(move |qemu| {
                    flags.into_iter().map(move |(shall_run, is_fed)| Facts {
                        shall_run,
                        is_fed,
                        ..facts(point, image, qemu)
                    })
                })
            })
        })
    }

    #[test]
    fn the_table_is_as_drawn() {
        use Doubt::*;
        use Verdict::*;
        let awake = Finish { run: false };
        // In the order gone, waits, runs, stopped.
        for (point, image, row) in [
            (Point::Marked, Mark::Sealed, [Undo, Undo, awake, Ask(Unexpected)]),
            (Point::Marked, Mark::Waking, [Undo, Undo, awake, Ask(Unexpected)]),
            (Point::Marked, Mark::Used, [Over, awake, awake, awake]),
            (
                Point::Marked,
                Mark::Others,
                [Over, Undo, Ask(RunsTwice), Ask(RunsTwice)],
            ),
            (
                Point::Marked,
                Mark::NotThere,
                [Ask(ImageNotThere), Ask(ImageNotThere), awake, awake],
            ),
            (
                Point::Continuing,
                Mark::Sealed,
                [Undo, Ask(Unexpected), awake, Ask(Unexpected)],
            ),
            (
                Point::Continuing,
                Mark::Waking,
                [Ask(MayHaveRun), Finish { run: true }, awake, awake],
            ),
            (Point::Continuing, Mark::Used, [Over, awake, awake, awake]),
            (
                Point::Continuing,
                Mark::Others,
                [Over, Ask(RunsTwice), Ask(RunsTwice), Ask(RunsTwice)],
            ),
            (Point::Continuing, Mark::NotThere, [Over, awake, awake, awake]),
        ] {
            for (qemu, wanted) in [Qemu::Gone, Qemu::Waits, Qemu::Runs, Qemu::Stopped]
                .into_iter()
                .zip(row)
            {
                assert_eq!(
                    facts(point, image, qemu).verdict(),
                    wanted,
                    "{point:?} {image:?} {qemu:?}"
                );
            }
        }
    }

    #[test]
    fn a_guest_that_may_have_run_is_never_undone_and_one_that_was_not_told_to_is_never_run() {
        for facts in all() {
            let verdict = facts.verdict();
            if facts.point == Point::Continuing && facts.image != Mark::Sealed {
                assert_ne!(verdict, Verdict::Undo, "{facts:?}");
            }
            if matches!(facts.qemu, Qemu::Runs | Qemu::Stopped) {
                assert_ne!(verdict, Verdict::Undo, "{facts:?}");
            }
            if facts.point == Point::Marked || !facts.shall_run {
                assert_ne!(verdict, Verdict::Finish { run: true }, "{facts:?}");
            }
        }
    }

    #[test]
    fn a_qemu_of_others_is_not_ended_and_its_image_stays_asleep_as_long_as_it_has_the_guest() {
        use Doubt::{Held, RunsTwice};
        use Verdict::{Ask, Undo};
        for (image, waits) in [
            (Mark::Sealed, Ask(Held)),
            (Mark::Waking, Ask(Held)),
            (Mark::Others, Ask(RunsTwice)),
        ] {
            let of_others = |qemu| Facts {
                is_of_others: true,
                ..facts(Point::Marked, image, qemu)
            };
            assert_eq!(of_others(Qemu::Waits).verdict(), waits, "{image:?}");
            assert_eq!(of_others(Qemu::Empty).verdict(), Undo, "{image:?}");
        }
        for facts in all().filter(|facts| !facts.is_fed) {
            let of_others = Facts {
                is_of_others: true,
                ..facts
            };
            let is_undone = of_others.verdict() == Undo;
            assert!(
                !is_undone || matches!(facts.qemu, Qemu::Gone | Qemu::Empty),
                "{facts:?}"
            );
        }
    }

    #[test]
    fn a_guest_that_is_being_fed_and_its_image_are_left_alone() {
        for facts in all().filter(|facts| facts.is_fed && facts.image == Mark::Waking) {
            assert!(
                !matches!(facts.verdict(), Verdict::Finish { .. }),
                "{facts:?}: it has not all of its memory"
            );
        }
    }

    #[test]
    fn no_guest_is_left_running_beside_an_image_that_could_be_woken() {
        for facts in all().filter(|facts| facts.image == Mark::Sealed && facts.qemu == Qemu::Runs) {
            let verdict = facts.verdict();
            let is_marked = verdict == Verdict::Finish { run: false };
            assert!(is_marked || matches!(verdict, Verdict::Ask(_)), "{facts:?}");
        }
    }

    #[test]
    fn a_qemu_that_does_not_answer_is_ended_only_where_it_surely_has_not_run() {
        for facts in all().filter(|facts| facts.qemu == Qemu::Silent) {
            let is_sure = facts.is_fed && facts.point == Point::Marked;
            if !is_sure {
                assert_eq!(facts.verdict(), Verdict::Ask(Doubt::Silent), "{facts:?}");
            }
        }
    }
}
