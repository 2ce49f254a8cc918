//! The guest, as its agent tells it: `guest-info` and `guest-fsfreeze-status`.
//!
//! What an agent says is the guest's word. It is read like QEMU's, and deserves less trust.

use serde::Deserialize;

use super::open_enum::open_enum;
use super::tolerant;

open_enum! {
    /// Whether the guest's file systems are frozen.
    pub enum FsfreezeStatus {
        /// They take writes.
        Thawed = "thawed",
        /// They hold writes back until they are thawed.
        Frozen = "frozen",
    }
}

/// The reply of `guest-info`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct GuestAgentInfo {
    /// The version of the agent. For reports; what it can do is in the commands.
    #[serde(deserialize_with = "tolerant")]
    pub version: Option<String>,
    /// The commands it knows.
    pub supported_commands: Vec<GuestCommandInfo>,
}

/// A command that an agent knows.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct GuestCommandInfo {
    /// Its name.
    pub name: String,
    /// Whether the administrator of the guest allows it, and the guest's state does now.
    #[serde(default)]
    pub enabled: bool,
    /// Whether a success is answered. Absent before QEMU 1.7.
    #[serde(default, deserialize_with = "tolerant")]
    pub success_response: Option<bool>,
}

impl GuestAgentInfo {
    /// Whether the agent knows the command and may execute it.
    pub fn allows(&self, command: &str) -> bool {
        self.supported_commands
            .iter()
            .any(|known| known.enabled && known.name == command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_an_agent_can_do_is_what_it_knows_and_is_allowed() {
        let info: GuestAgentInfo = serde_json::from_value(json!({
            "version": "10.0.2",
            "supported_commands": [
                {"name": "guest-ping", "enabled": true, "success-response": true},
                {"name": "guest-suspend-disk", "enabled": false, "success-response": false},
                {"name": "guest-novelty", "enabled": true, "novel": []},
            ],
        }))
        .unwrap();
        assert!(info.allows("guest-ping") && info.allows("guest-novelty"));
        assert!(!info.allows("guest-suspend-disk") && !info.allows("guest-fstrim"));
        assert_eq!(info.supported_commands[1].success_response, Some(false));
    }

    #[test]
    fn a_freeze_status_of_a_later_day_is_kept() {
        let status = |word: &str| -> FsfreezeStatus { serde_json::from_value(json!(word)).unwrap() };
        assert_eq!(status("frozen"), FsfreezeStatus::Frozen);
        assert_eq!(status("cool"), FsfreezeStatus::Other("cool".to_owned()));
    }
}
