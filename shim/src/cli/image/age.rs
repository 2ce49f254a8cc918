//! How old an image is.

use std::time::{Duration, UNIX_EPOCH};

use dormouse_storage::Manifest;

/// How long ago the guest was saved; `None` if a clock says that it will be.
pub fn age_of(manifest: &Manifest) -> Option<Duration> {
    let saved = UNIX_EPOCH.checked_add(Duration::from_millis(manifest.created_unix_ms))?;
    saved.elapsed().ok()
}

/// An age as people say it: the two largest units.
pub fn told(age: Duration) -> String {
    let text = humantime::format_duration(Duration::from_secs(age.as_secs())).to_string();
    text.split(' ').take(2).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_age_has_two_units_at_most() {
        assert_eq!(told(Duration::from_secs(0)), "0s");
        assert_eq!(told(Duration::from_secs(61)), "1m 1s");
        assert_eq!(told(Duration::from_secs(2 * 86400 + 3 * 3600 + 59)), "2days 3h");
    }
}
