//! A guest that is fed from its image while it runs, as `dormouse status` tells it.

use serde_json::Value;

use crate::{Scene, until};

impl Scene {
    /// How the guest's feed stands; `None` as long as nobody tells.
    pub fn feed(&self) -> Option<Value> {
        let status = self.dormouse.status("guest");
        // Its supervisor may not be up yet.
        (status.exit_code() == Some(0)).then(|| status.result()["feed"].clone())
    }

    /// Waits until the guest has all of its memory.
    pub fn wait_for_all_fed(&self) -> Value {
        until("all memory to be fed", || {
            let feed = self.feed()?;
            assert_ne!(feed["state"], "failed", "{feed}");
            (feed["state"] == "complete").then(|| {
                assert_eq!(feed["fed_bytes"], feed["total_bytes"], "{feed}");
                feed
            })
        })
    }

    /// Waits until the guest has that share of its memory, and not all of it.
    pub fn wait_for_fed_share(&self, share: f64) -> Value {
        until("some of its memory to be fed", || {
            let feed = self.feed()?;
            let fed = feed["fed_bytes"].as_f64()? / feed["total_bytes"].as_f64()?;
            assert_eq!(feed["state"], "feeding", "{feed}");
            (fed >= share).then_some(feed)
        })
    }

    /// The state that the image is in.
    pub fn image_state(&self) -> Value {
        let inspected = self.dormouse.image("inspect", &self.image(), &["--json"]);
        inspected.expect_success().result()["state"].clone()
    }
}
