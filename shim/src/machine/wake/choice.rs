//! Which way RAM comes back, and why not a better one.
//!
//! Without a wish the first of `map`, `lazy`, `eager` and `stream` is taken that image, QEMU, host and guest allow. No
//! way moves memory that the guest's own command line has put somewhere ([`own_memory`]): `lazy` feeds it in its place
//! where it can, and `stream` always can.
//!
//! [`own_memory`]: crate::vm::own_memory

use dormouse_storage::Unmappable;

use super::Mode;
use crate::error::{Code, Failure};
use crate::vm::own_memory::OwnMemory;

/// All ways, the best first.
const WAYS: [Mode; 4] = [Mode::Map, Mode::Lazy, Mode::Eager, Mode::Stream];

/// What a choice is made of.
#[derive(Debug)]
pub struct Facts<'a> {
    /// Whether the image can be mapped.
    pub image: Result<(), Unmappable>,
    /// Whether QEMU maps memory from inside a file.
    pub offset_property: bool,
    /// The QEMU that the guest was saved on.
    pub version: &'a str,
    /// Whether the command line wants memory shared.
    pub shares_memory: bool,
    /// Whether a guest may be fed while it runs, on this host.
    pub feeding: Result<(), String>,
    /// Memory that stays where the command line has it.
    pub own: &'a [OwnMemory],
}

/// A way, and why none of the better ones.
#[derive(Debug, PartialEq, Eq)]
pub struct Choice {
    /// The way.
    pub mode: Mode,
    /// What was against each better one; empty where the way was wished for.
    pub passed_over: Vec<String>,
}

/// Chooses.
pub fn choose(wanted: Option<Mode>, facts: &Facts<'_>) -> Result<Choice, Failure> {
    if let Some(mode) = wanted {
        return match facts.against(mode) {
            None => Ok(Choice {
                mode,
                passed_over: Vec::new(),
            }),
            Some(why) => Err(facts.refusal(mode, &why)),
        };
    }
    let mut passed_over = Vec::new();
    for mode in WAYS {
        match facts.against(mode) {
            None => return Ok(Choice { mode, passed_over }),
            Some(why) => passed_over.push(format!("not by {}: {why}", mode.name())),
        }
    }
    // Nothing is against the last way.
    Ok(Choice {
        mode: Mode::Stream,
        passed_over,
    })
}

impl Facts<'_> {
    fn against(&self, mode: Mode) -> Option<String> {
        let moves = || self.own.first().map(OwnMemory::against_moving);
        match mode {
            Mode::Map => moves().or_else(|| self.against_map()),
            Mode::Lazy => self
                .feeding
                .clone()
                .err()
                .or_else(|| self.own.iter().find_map(OwnMemory::against_feeding)),
            Mode::Eager => moves(),
            Mode::Stream => None,
        }
    }

    fn against_map(&self) -> Option<String> {
        if let Err(why) = self.image {
            return Some(why.to_string());
        }
        if !self.offset_property {
            return Some(format!(
                "QEMU (the guest was saved on {}) cannot map memory from inside a file: memory-backend-file has no \
                 offset=, which came with QEMU 8.1",
                self.version
            ));
        }
        self.shares_memory.then(|| {
            "the guest's command line wants its memory shared (share=on), and memory mapped from an image is private"
                .to_owned()
        })
    }

    fn refusal(&self, mode: Mode, why: &str) -> Failure {
        let what = match mode {
            Mode::Map => "RAM cannot be mapped from the image",
            Mode::Lazy => "the guest cannot run before its RAM is there",
            Mode::Eager => "RAM cannot be filled before QEMU has it",
            Mode::Stream => "RAM cannot come through QEMU",
        };
        let others: Vec<String> = WAYS
            .into_iter()
            .filter(|other| *other != mode && self.against(*other).is_none())
            .map(|other| format!("--mode {}", other.name()))
            .collect();
        Failure::new(
            Code::Refused,
            format!("{what}: {why}; use {}", others.join(" or ")),
        )
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::vm::command_line::CommandLine;
    use crate::vm::own_memory;

    fn facts(own: &[OwnMemory]) -> Facts<'_> {
        Facts {
            image: Ok(()),
            offset_property: true,
            version: "7.2.22",
            shares_memory: false,
            feeding: Ok(()),
            own,
        }
    }

    fn own(line: &str) -> Vec<OwnMemory> {
        let words: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        let line = CommandLine::parse(&words).unwrap();
        own_memory::of(&line, "pc.ram", Path::new("/")).unwrap()
    }

    #[test]
    fn without_a_wish_the_best_way_is_taken_that_image_and_host_and_guest_allow() {
        let fed_in_place = own("qemu -m 64 -object memory-backend-memfd,id=dimm,size=64M,hugetlb=on");
        let only_by_qemu = own("qemu -m 64 -mem-path /usr");
        let cannot = || Err("reason".to_owned());
        for (own, maps, feeding, mode, passed_over) in [
            (&[][..], true, Ok(()), Mode::Map, 0),
            (&[], true, cannot(), Mode::Map, 0),
            (&[], false, Ok(()), Mode::Lazy, 1),
            (&[], false, cannot(), Mode::Eager, 2),
            (&fed_in_place, true, Ok(()), Mode::Lazy, 1),
            (&fed_in_place, true, cannot(), Mode::Stream, 3),
            (&only_by_qemu, true, Ok(()), Mode::Stream, 3),
        ] {
            let facts = Facts {
                offset_property: maps,
                feeding,
                ..facts(own)
            };
            let choice = choose(None, &facts).unwrap();
            assert_eq!(
                (choice.mode, choice.passed_over.len()),
                (mode, passed_over),
                "{facts:?}: {choice:?}"
            );
        }
    }

    #[test]
    fn a_wish_is_granted_or_refused_with_its_reason_and_what_can_be_had() {
        let huge = own("qemu -m 64 -object memory-backend-memfd,id=dimm,size=64M,hugetlb=on");
        let on_disk = own("qemu -m 64 -mem-path /usr");
        let old = Facts {
            offset_property: false,
            ..facts(&[])
        };
        let unfed = Facts {
            feeding: Err("it rains".to_owned()),
            ..facts(&[])
        };
        for (facts, wanted, words) in [
            (
                &old,
                Mode::Map,
                &["QEMU 8.1", "use --mode lazy or --mode eager"][..],
            ),
            (
                &unfed,
                Mode::Lazy,
                &["it rains", "use --mode map or --mode eager"],
            ),
            (
                &facts(&huge),
                Mode::Map,
                &["dimm", "hugetlb=on", "use --mode lazy or --mode stream"],
            ),
            (
                &facts(&huge),
                Mode::Eager,
                &["dimm", "hugetlb=on", "use --mode lazy or --mode stream"],
            ),
            (
                &facts(&on_disk),
                Mode::Lazy,
                &["pc.ram", "/usr", "use --mode stream"],
            ),
        ] {
            let message = choose(Some(wanted), facts).unwrap_err().message;
            for word in words {
                assert!(message.contains(word), "{word:?} is not in {message}");
            }
        }
        for mode in [Mode::Lazy, Mode::Stream] {
            assert_eq!(choose(Some(mode), &facts(&huge)).unwrap().mode, mode);
        }
        assert_eq!(choose(Some(Mode::Eager), &unfed).unwrap().passed_over, [""; 0]);
    }

    #[test]
    fn whatever_is_against_a_map_is_named() {
        assert_eq!(facts(&[]).against(Mode::Map), None);
        let shared = Facts {
            shares_memory: true,
            ..facts(&[])
        };
        assert!(shared.against(Mode::Map).unwrap().contains("share=on"));
        for (why, words) in [
            (Unmappable::Encrypted, "encrypted"),
            (Unmappable::Compressed, "compressed"),
            (Unmappable::OldData, "old data"),
        ] {
            let image = Facts {
                image: Err(why),
                ..facts(&[])
            };
            let why = image.against(Mode::Map).unwrap();
            assert!(why.contains(words), "{why}");
        }
    }
}
