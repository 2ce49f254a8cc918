//! How talking to a guest agent fails.

use std::io;
use std::time::Duration;

use crate::error::ConnectionLoss;

/// Why a guest agent could not be reached, or did not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AgentError {
    /// The socket cannot be connected. A listen queue that stays full is told as `WouldBlock`.
    #[error("cannot connect to the guest agent's socket {address}")]
    Socket {
        /// The address, as [`Address`](crate::Address) displays it.
        address: String,
        /// The system's answer.
        source: io::Error,
    },
    /// Nobody answered `guest-sync-delimited`. The command was not sent.
    #[error(
        "{command}: no guest agent answered within {after:?}; none runs in the guest, the guest is \
         stopped, or another client holds the channel"
    )]
    Absent {
        /// The command that was to follow.
        command: String,
        /// The deadline the command was given.
        after: Duration,
    },
    /// The agent was there and did not answer this command in time. It may still execute it, or may
    /// have executed it.
    #[error("{command}: no answer from the guest agent within {after:?}")]
    Timeout {
        /// The command.
        command: String,
        /// The deadline the command was given.
        after: Duration,
    },
    /// The command waited behind others until its deadline. It was not sent.
    #[error("{command}: the guest agent was busy with other commands for {after:?}")]
    Busy {
        /// The command.
        command: String,
        /// The deadline the command was given.
        after: Duration,
    },
    /// The agent answered with an error.
    #[error("{command}: {class}: {desc}")]
    Refused {
        /// The command.
        command: String,
        /// The error class.
        class: String,
        /// The description.
        desc: String,
    },
    /// What came in place of the answer is no message. Whether the agent executed the command is
    /// unknown; the next command begins by coming into step again.
    #[error("{command}: the guest agent's answer cannot be read: {what}")]
    Garbled {
        /// The command.
        command: String,
        /// What was wrong.
        what: String,
    },
    /// The agent succeeded, and its reply does not have the shape that the caller reads.
    #[error("{command}: the reply has an unexpected shape")]
    Unexpected {
        /// The command.
        command: String,
        /// Where the reply and the view differ.
        source: serde_json::Error,
    },
    /// The arguments cannot be written as JSON. Nothing was sent.
    #[error("{command}: the arguments cannot be written as JSON")]
    Arguments {
        /// The command.
        command: String,
        /// What cannot be written.
        source: serde_json::Error,
    },
    /// The channel was lost first: QEMU is gone. When the command was sent, whether the agent
    /// executed it is unknown.
    #[error("{command}: the channel to the guest agent was lost")]
    ConnectionLost {
        /// The command.
        command: String,
        /// Whether it was sent.
        sent: bool,
        /// What ended the channel.
        source: ConnectionLoss,
    },
}

impl AgentError {
    /// The error class, when it was the agent that refused.
    pub fn class(&self) -> Option<&str> {
        match self {
            Self::Refused { class, .. } => Some(class),
            _ => None,
        }
    }

    /// The ending in one word, for the span of the command.
    pub(super) fn outcome(&self) -> &'static str {
        match self {
            Self::Refused { .. } => "refused",
            Self::Timeout { .. } => "timed out",
            Self::ConnectionLost { .. } => "lost",
            Self::Garbled { .. } => "garbled",
            Self::Unexpected { .. } => "unexpected",
            Self::Absent { .. } | Self::Busy { .. } | Self::Arguments { .. } | Self::Socket { .. } => {
                "not sent"
            }
        }
    }
}
