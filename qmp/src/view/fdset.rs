//! Sets of file descriptors: what `query-fdsets` and `add-fd` tell.
//!
//! A set belongs to QEMU as a whole and not to the monitor that made it. QEMU 7.2 drops sets that
//! nobody uses when the last monitor is disconnected, QEMU 10.0 keeps them, so whoever makes one
//! removes it, and looks here for those of an earlier life.

use serde::Deserialize;

use super::tolerant;

/// An entry of `query-fdsets`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct FdsetInfo {
    /// The id of the set, the number in `/dev/fdset/…`.
    pub fdset_id: i64,
    /// The descriptors in it; absent when QEMU tells them in a way not known here.
    #[serde(default, deserialize_with = "tolerant")]
    pub fds: Option<Vec<FdsetMember>>,
}

/// A descriptor in a set.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct FdsetMember {
    /// Its number in QEMU.
    pub fd: i64,
    /// What `add-fd` was told to remember with it.
    #[serde(default, deserialize_with = "tolerant")]
    pub opaque: Option<String>,
}

/// The reply of `add-fd`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct AddedFd {
    /// The id of the set that the descriptor was added to.
    pub fdset_id: i64,
    /// Its number in QEMU.
    pub fd: i64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn sets_are_read_with_and_without_what_was_remembered() {
        let sets: Vec<FdsetInfo> = serde_json::from_value(json!([
            {"fdset-id": 3, "fds": [{"fd": 20, "opaque": "dormouse:ram"}, {"fd": 21, "novel": 1}]},
            {"fdset-id": 4},
            {"fdset-id": 5, "fds": "many"},
        ]))
        .unwrap();
        let members = sets[0].fds.as_ref().unwrap();
        assert_eq!((sets[0].fdset_id, members[0].fd), (3, 20));
        assert_eq!(members[0].opaque.as_deref(), Some("dormouse:ram"));
        assert_eq!(members[1].opaque, None);
        assert_eq!((&sets[1].fds, &sets[2].fds), (&None, &None));
    }

    #[test]
    fn a_set_without_an_id_is_none() {
        assert!(serde_json::from_value::<FdsetInfo>(json!({"fds": []})).is_err());
    }
}
