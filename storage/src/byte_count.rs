//! A number of bytes, told to people in binary units.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign};

use serde::{Deserialize, Serialize};

/// A number of bytes.
///
/// Displays as people read it: `"512 B"`, `"4.3 GiB"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ByteCount(pub u64);

impl ByteCount {
    /// No bytes.
    pub const ZERO: Self = Self(0);

    /// So many KiB.
    pub const fn kib(kib: u64) -> Self {
        Self(kib << 10)
    }

    /// So many MiB.
    pub const fn mib(mib: u64) -> Self {
        Self(mib << 20)
    }

    /// So many GiB.
    pub const fn gib(gib: u64) -> Self {
        Self(gib << 30)
    }
}

impl fmt::Display for ByteCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        if self.0 < 1024 {
            return write!(f, "{} B", self.0);
        }
        let mut value = self.0 as f64 / 1024.0;
        let mut unit = 0;
        // 1023.95 would round to "1024.0": it belongs to the next unit already.
        while value >= 1023.95 && unit + 1 < UNITS.len() {
            value /= 1024.0;
            unit += 1;
        }
        write!(f, "{value:.1} {}", UNITS[unit])
    }
}

impl Add for ByteCount {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl AddAssign for ByteCount {
    fn add_assign(&mut self, other: Self) {
        self.0 += other.0;
    }
}

impl Sum for ByteCount {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::ZERO, Add::add)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_is_told_in_the_largest_unit_that_keeps_it_above_one() {
        let told: Vec<String> = [0, 1023, 1024, 1536, 1_048_575, 4_617_089_843, u64::MAX]
            .map(|bytes| ByteCount(bytes).to_string())
            .to_vec();
        assert_eq!(
            told,
            [
                "0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "4.3 GiB", "16.0 EiB"
            ]
        );
    }
}
