//! What an image is good for at this moment.

use std::fmt;

/// State of an image.
///
/// ```text
/// writing ──► sealed ──► waking ──► consumed
///                ▲          │
///                └──────────┘   the wake failed before the guest ran
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ImageState {
    /// Being written; never seen under its final name.
    Writing,
    /// The image is the guest.
    Sealed,
    /// A guest is being woken from it and may run already.
    Waking,
    /// The guest runs; the image is history.
    Consumed,
}

impl ImageState {
    /// Whether an image in this state may become `next`.
    pub fn may_become(self, next: Self) -> bool {
        matches!(
            (self, next),
            (Self::Writing, Self::Sealed)
                | (Self::Sealed, Self::Waking)
                | (Self::Waking, Self::Consumed | Self::Sealed)
        )
    }
}

impl fmt::Display for ImageState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Writing => "writing",
            Self::Sealed => "sealed",
            Self::Waking => "waking",
            Self::Consumed => "consumed",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_follow_each_other_in_the_drawn_order_only() {
        use ImageState::*;
        let legal = [
            (Writing, Sealed),
            (Sealed, Waking),
            (Waking, Consumed),
            (Waking, Sealed),
        ];
        for from in [Writing, Sealed, Waking, Consumed] {
            for to in [Writing, Sealed, Waking, Consumed] {
                assert_eq!(from.may_become(to), legal.contains(&(from, to)), "{from} to {to}");
            }
        }
    }
}
