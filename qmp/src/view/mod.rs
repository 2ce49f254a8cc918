//! What we hear from QEMU, read tolerantly.
//!
//! A view names the fields that the product looks at and ignores the rest. Every enumeration has an
//! `Other` that keeps the word QEMU used, and every field that some version leaves out, every
//! number among them, is optional; a field whose type has changed reads as absent. Only what a
//! reply is pointless without, such as the name of a named thing, makes reading fail.
//!
//! Sizes are bytes and times are milliseconds, as the names of the fields say.

mod open_enum;

pub mod block;
pub mod fdset;
pub mod guest;
pub mod job;
pub mod machine;
pub mod migration;

use serde::de::{Deserialize, DeserializeOwned, Deserializer};
use serde_json::Value;

/// Reads a field that may be absent, null, or of a type that only a later QEMU knows.
fn tolerant<'de, D: Deserializer<'de>, T: DeserializeOwned>(deserializer: D) -> Result<Option<T>, D::Error> {
    let value = Value::deserialize(deserializer)?;
    Ok(serde_json::from_value(value).ok())
}
