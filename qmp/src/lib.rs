//! Talks QMP to a running QEMU: typed commands out, tolerant views in, file descriptors passed.
//!
//! ```text
//!   Client ──submission──► driver task ──► transport ──► monitor socket ──► QEMU
//!     ▲                        │  ▲                            │
//!     └──reply (oneshot)───────┤  └── connection (pure) ◄── wire: lines, messages
//!   Events ◄──broadcast────────┘
//! ```
//!
//! What the crate guarantees:
//!
//! - A command ends in exactly one way: QEMU's reply, QEMU's error, its deadline, or the loss of
//!   the connection. A lost connection is never reported as success.
//! - Dropping the future of a command harms no other command. Its late reply is recognised and
//!   thrown away.
//! - What QEMU says and we do not know (a field, an event, an error class, an enum value) is data
//!   and no failure.
//! - The monitor is always drained. A slow subscriber loses events, is told how many, and blocks
//!   nobody.
//! - File descriptors travel with the first byte of their own command, reach nothing else, and are
//!   closed on every path.
//!
//! Two modules build on that: [`reconnect`] stays connected and tells of the gaps, [`agent`] speaks
//! to the guest agent. What can be watched of a conversation is listed in [`trace`].
//!
//! Commands are spoken with the types that [`command`] takes from QEMU's schema; replies are read
//! into [`view`]s. What this QEMU can do is asked of it and indexed as [`capabilities`].

#![forbid(unsafe_code)]

mod address;
pub mod agent;
pub mod capabilities;
mod client;
pub mod command;
pub mod connection;
mod driver;
mod error;
mod events;
#[cfg(feature = "fake")]
pub mod fake;
pub mod reconnect;
pub mod trace;
mod transport;
pub mod view;
pub mod wire;

pub use address::{Address, AddressError};
pub use client::{Client, ConnectOptions};
pub use error::{CommandError, ConnectError, ConnectionLoss};
pub use events::{Events, Heard};
pub use wire::message::{Event, Greeting, Timestamp, Version};
