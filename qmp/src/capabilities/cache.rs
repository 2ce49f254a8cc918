//! What the QEMUs of this process can do, each binary asked once.
//!
//! The binary is told by its version, its package string and its target. Without a package string
//! (a build from the sources as they are) two builds with different options look the same, so such
//! a binary is asked each time.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use super::{Binary, Capabilities};

/// A host seldom has more QEMU packages than an upgrade leaves in use; an entry takes about 0.5 MB.
const ENTRY_LIMIT: usize = 8;

/// Shared by all connections of the process, which have no owner in common. It is held for the
/// length of a look, never across an await.
static KNOWN: Mutex<Cache> = Mutex::new(Cache::new());

/// Finds a binary that was asked before.
pub(super) fn recall(binary: &Binary) -> Option<Arc<Capabilities>> {
    KNOWN
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .recall(binary)
}

/// Keeps what a binary can do, if it can be told from others.
pub(super) fn remember(capabilities: Arc<Capabilities>) {
    KNOWN
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .remember(capabilities);
}

/// The most recently used last.
#[derive(Debug)]
struct Cache {
    entries: VecDeque<Arc<Capabilities>>,
}

impl Cache {
    const fn new() -> Self {
        Self {
            entries: VecDeque::new(),
        }
    }

    fn recall(&mut self, binary: &Binary) -> Option<Arc<Capabilities>> {
        let at = self.entries.iter().position(|entry| entry.binary() == binary)?;
        let entry = self.entries.remove(at)?;
        self.entries.push_back(Arc::clone(&entry));
        Some(entry)
    }

    fn remember(&mut self, capabilities: Arc<Capabilities>) {
        let binary = capabilities.binary();
        if binary.package.is_empty() {
            return;
        }
        self.entries.retain(|entry| entry.binary() != binary);
        if self.entries.len() == ENTRY_LIMIT {
            self.entries.pop_front();
        }
        self.entries.push_back(capabilities);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_package(package: &str) -> Arc<Capabilities> {
        let binary = Binary {
            package: package.to_owned(),
            ..Binary::default()
        };
        Arc::new(Capabilities {
            binary,
            ..Capabilities::default()
        })
    }

    fn knows(cache: &mut Cache, package: &str) -> bool {
        cache.recall(of_package(package).binary()).is_some()
    }

    #[test]
    fn the_least_recently_used_is_forgotten_first() {
        let mut cache = Cache::new();
        for number in 0..ENTRY_LIMIT {
            cache.remember(of_package(&number.to_string()));
        }
        assert!(knows(&mut cache, "0"));
        cache.remember(of_package("one more"));
        assert!(knows(&mut cache, "0") && knows(&mut cache, "one more"));
        assert!(!knows(&mut cache, "1"));
        assert_eq!(cache.entries.len(), ENTRY_LIMIT);
    }

    #[test]
    fn a_binary_has_one_entry() {
        let mut cache = Cache::new();
        let first = of_package("a");
        cache.remember(Arc::clone(&first));
        let second = of_package("a");
        cache.remember(Arc::clone(&second));
        assert!(Arc::ptr_eq(&cache.recall(first.binary()).unwrap(), &second));
        assert_eq!(cache.entries.len(), 1);
    }

    #[test]
    fn binaries_of_one_package_for_different_targets_are_different() {
        let mut cache = Cache::new();
        cache.remember(of_package("a"));
        let mut other = of_package("a").binary().clone();
        other.target = "aarch64".to_owned();
        assert!(cache.recall(&other).is_none());
    }

    #[test]
    fn a_build_without_a_package_string_is_not_kept() {
        let mut cache = Cache::new();
        cache.remember(of_package(""));
        assert!(!knows(&mut cache, ""));
    }
}
