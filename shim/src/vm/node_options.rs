//! The options of block nodes on a command line: `-blockdev`, in pairs or JSON.

use serde_json::{Map, Value};

use super::options::Options;

/// All nodes of a line, with where on it their options are.
pub fn all(line: &[String]) -> Vec<(usize, NodeOptions)> {
    (1..line.len())
        .filter(|at| matches!(line[at - 1].as_str(), "-blockdev" | "--blockdev"))
        .filter_map(|at| Some((at, NodeOptions::parse(&line[at])?)))
        .collect()
}

/// A node's options in whichever form; keys have dots between their parts.
#[derive(Debug, Clone)]
pub enum NodeOptions {
    /// `driver=raw,node-name=n,…`
    Pairs(Options),
    /// `{"driver": "raw", …}`
    Json(Map<String, Value>),
}

impl NodeOptions {
    /// Reads either form.
    pub fn parse(text: &str) -> Option<Self> {
        if text.trim_start().starts_with('{') {
            return Some(Self::Json(serde_json::from_str(text).ok()?));
        }
        Some(Self::Pairs(Options::parse(text)?))
    }

    /// The text under a key.
    pub fn value(&self, key: &str) -> Option<&str> {
        match self {
            Self::Pairs(options) => match key {
                "driver" => options.leading(key),
                key => options.value(key),
            },
            Self::Json(map) => {
                let mut parts = key.split('.');
                let first = map.get(parts.next()?)?;
                parts.try_fold(first, |value, part| value.get(part))?.as_str()
            }
        }
    }

    /// The number under a top-level key.
    pub fn number(&self, key: &str) -> Option<u64> {
        match self {
            Self::Pairs(options) => options.value(key)?.parse().ok(),
            Self::Json(map) => {
                let value = map.get(key)?;
                value.as_u64().or_else(|| value.as_str()?.parse().ok())
            }
        }
    }

    /// Sets what is under a key.
    pub fn set(&mut self, key: &str, value: &Value) {
        match self {
            Self::Pairs(options) => {
                if key == "driver" {
                    options.remove("");
                }
                options.set(
                    key,
                    value.as_str().map_or_else(|| value.to_string(), str::to_owned),
                );
            }
            Self::Json(map) => match key.split_once('.') {
                None => drop(map.insert(key.to_owned(), value.clone())),
                Some((first, rest)) => {
                    if let Some(inner) = map.get_mut(first) {
                        inner[rest] = value.clone();
                    }
                }
            },
        }
    }

    /// Keeps only the top-level keys that `is_kept` takes.
    pub fn retain(&mut self, is_kept: impl Fn(&str) -> bool) {
        match self {
            Self::Pairs(options) => {
                let keys: Vec<String> = options.pairs().map(|(key, _)| key.to_owned()).collect();
                for key in keys
                    .iter()
                    .filter(|key| !is_kept(key.split('.').next().unwrap_or_default()))
                {
                    options.remove(key);
                }
            }
            Self::Json(map) => map.retain(|key, _| is_kept(key)),
        }
    }

    /// As QEMU reads it.
    pub fn render(&self) -> String {
        match self {
            Self::Pairs(options) => options.render(),
            Self::Json(map) => Value::Object(map.clone()).to_string(),
        }
    }
}
