//! Whether mirroring a disk loses what the guest writes meanwhile.
//!
//! The one question here that the running QEMU cannot be asked, so the one place that looks at a
//! version number.
//!
//! The mirror job first scans the source for what is allocated. Since QEMU 8.2 its dirty bitmap has
//! been fed by a filter that learns of the job only after the scan, so a guest's write to a part
//! that was scanned and found unallocated was never copied, and the job reported ready and ended
//! well all the same (in 8.0 and 8.1 the same holds with `copy-mode=write-blocking`). It takes
//! `sync=top`, or `sync=full` with a target opened with `discard=unmap`. QEMU commit 0f51f9c342,
//! "mirror: fix missed dirty bitmap writes during startup", mends it in 10.2 and, by backport, in
//! 10.0.13 at the latest. Tried with a guest that wrote during the start of the job: 10.0.2 lost
//! 39 % of the writes; 7.2.22, 10.0.13 and 11.1.3 lost none.
//!
//! With `copy-mode=write-blocking` from the start, and a target opened with `discard=unmap`, 7.2.22 lost writes as well,
//! though seldom: 4 in 40 mirrors of a guest that wrote all the time. In `background` it lost none in 90.
//!
//! On an affected QEMU a mirror is safe when the guest's writes meet a disk that is marked dirty as
//! a whole, or none at all:
//!
//! - `sync=full`: open the target without `discard=unmap` and `detect-zeroes=unmap`, wait until
//!   `query-block-jobs` tells a length above 0, then `blockdev-reopen` the target with them.
//! - `sync=top`: stop the guest until `query-block-jobs` tells a length above 0.

use super::Capabilities;
use crate::wire::message::{Greeting, Version};

/// What [`mirror_loses_writes`] finds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MirrorSafety {
    /// No write is lost.
    Safe,
    /// Writes that the guest makes while the job starts may be lost, unless the job is started in
    /// one of the ways that avoid it. A distribution may have mended its build without showing it;
    /// only an operator can know that.
    Affected {
        /// Which QEMU this is and what it would take, for humans.
        why: String,
    },
    /// This QEMU has no `blockdev-mirror`.
    NoMirror,
}

/// Development versions have a micro number from here on, up to the release after theirs: 10.0.50
/// is on its way to 10.1.
const DEVELOPMENT_MICRO: u32 = 50;

/// Whether a `blockdev-mirror` of this QEMU loses writes of the guest during its start.
///
/// The greeting's version and package decide: affected from 8.0 up to, and without, 10.2, unless it
/// is 10.0.13 or a later 10.0. A QEMU that does not tell its version counts as affected. See the
/// module for the source of the rule.
pub fn mirror_loses_writes(greeting: &Greeting, capabilities: &Capabilities) -> MirrorSafety {
    if !capabilities.has_command("blockdev-mirror") {
        return MirrorSafety::NoMirror;
    }
    let version = greeting.version;
    if loses_no_writes(version) {
        return MirrorSafety::Safe;
    }
    let package = match greeting.package.as_str() {
        "" => String::new(),
        package => format!(" ({package})"),
    };
    MirrorSafety::Affected {
        why: format!(
            "QEMU {version}{package} may lose what the guest writes while a mirror job starts; \
             QEMU 10.0.13 and 10.2 do not"
        ),
    }
}

fn loses_no_writes(version: Version) -> bool {
    let Version { major, minor, micro } = version;
    match (major, minor) {
        (0, _) => false,
        (..7, _) | (7, ..2) => true,
        (7, _) => micro < DEVELOPMENT_MICRO,
        (10, 0) => (13..DEVELOPMENT_MICRO).contains(&micro),
        (8 | 9, _) | (10, 1) => false,
        _ => true,
    }
}

/// Whether a mirror that writes to both sides may end QEMU: from 10.1 up to, and without, 10.2.2 a small write of zeros
/// by the guest can meet an assertion. QEMU commit 4a7b1bd18d mends it. A QEMU that does not tell its version counts.
pub fn active_mirror_may_abort(greeting: &Greeting) -> bool {
    let Version { major, minor, micro } = greeting.version;
    match (major, minor) {
        (0, _) | (10, 1) => true,
        (10, 0) => micro >= DEVELOPMENT_MICRO,
        (10, 2) => micro < 2,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn safe(major: u32, minor: u32, micro: u32) -> bool {
        loses_no_writes(Version { major, minor, micro })
    }

    #[test]
    fn the_affected_versions_are_8_0_up_to_10_2_but_for_a_mended_10_0() {
        for (major, minor, micro, expected) in [
            (6, 2, 0, true),
            (7, 0, 0, true),
            (7, 2, 0, true),
            (7, 2, 22, true),
            (8, 0, 0, false),
            (8, 1, 5, false),
            (8, 2, 0, false),
            (9, 2, 4, false),
            (10, 0, 2, false),
            (10, 0, 12, false),
            (10, 0, 13, true),
            (10, 0, 14, true),
            (10, 1, 0, false),
            (10, 1, 13, false),
            (10, 2, 0, true),
            (11, 0, 0, true),
            (11, 1, 3, true),
            (12, 0, 0, true),
        ] {
            assert_eq!(safe(major, minor, micro), expected, "{major}.{minor}.{micro}");
        }
    }

    #[test]
    fn writing_to_both_sides_is_dangerous_from_10_1_to_10_2_1() {
        let greets = |major, minor, micro| Greeting {
            version: Version { major, minor, micro },
            ..Greeting::default()
        };
        for (major, minor, micro, expected) in [
            (7, 2, 22, false),
            (10, 0, 2, false),
            (10, 0, 50, true),
            (10, 1, 0, true),
            (10, 1, 9, true),
            (10, 2, 1, true),
            (10, 2, 2, false),
            (11, 1, 3, false),
            (0, 0, 0, true),
        ] {
            let found = active_mirror_may_abort(&greets(major, minor, micro));
            assert_eq!(found, expected, "{major}.{minor}.{micro}");
        }
    }

    #[test]
    fn a_development_version_counts_as_the_release_it_leads_to() {
        assert!(!safe(7, 2, 50), "towards 8.0");
        assert!(!safe(10, 0, 50), "towards 10.1");
        assert!(!safe(10, 0, 91), "a candidate of 10.1");
        assert!(!safe(10, 1, 92), "a candidate of 10.2");
        assert!(safe(10, 2, 50), "towards 11.0");
    }

    #[test]
    fn a_version_that_is_not_told_is_not_trusted() {
        assert!(!safe(0, 0, 0));
    }
}
