//! From bytes to lines to messages, with limits, and with everything unknown kept as a value.

pub mod line;
pub mod message;
