//! How talking to QEMU fails.
//!
//! Three families, one for each question a caller has: could the monitor be had at all
//! ([`ConnectError`]), did this command succeed ([`CommandError`]), and why is the connection gone
//! ([`ConnectionLoss`]). QEMU's error class and its description are kept word for word. Logic may
//! look at the class; the description changes between versions.

use std::io;
use std::sync::Arc;
use std::time::Duration;

/// Why no usable monitor connection came about.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The socket cannot be connected: it is not there, nobody listens, or access is denied.
    #[error("cannot connect to the monitor socket {address}")]
    Socket {
        /// The address, as [`Address`](crate::Address) displays it.
        address: String,
        /// The system's answer.
        source: io::Error,
    },
    /// Somebody listens but never greets. A QEMU monitor serves one client at a time and lets the
    /// next one wait.
    #[error(
        "monitor busy: {address} gave no greeting within {waited:?}, most likely because another client \
         holds it; end that client, or start QEMU with one more -qmp socket of its own"
    )]
    MonitorBusy {
        /// The address, as [`Address`](crate::Address) displays it.
        address: String,
        /// How long the greeting was waited for.
        waited: Duration,
    },
    /// QEMU greeted and then did not answer `qmp_capabilities` in time, so its main loop is most
    /// likely blocked.
    #[error("QEMU at {address} greeted but did not answer the capabilities negotiation within {waited:?}")]
    NegotiationTimeout {
        /// The address, as [`Address`](crate::Address) displays it.
        address: String,
        /// The time allowed for greeting and negotiation together.
        waited: Duration,
    },
    /// QEMU refused `qmp_capabilities`.
    #[error("QEMU at {address} refused the capabilities negotiation: {class}: {desc}")]
    NegotiationRefused {
        /// The address, as [`Address`](crate::Address) displays it.
        address: String,
        /// QEMU's error class.
        class: String,
        /// QEMU's description.
        desc: String,
    },
    /// The connection was lost before it was ready, or the peer does not speak QMP.
    #[error("lost the monitor connection at {address} before it was ready")]
    Lost {
        /// The address, as [`Address`](crate::Address) displays it.
        address: String,
        /// What ended the connection.
        source: ConnectionLoss,
    },
}

/// Why a command did not bring the result that was asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// QEMU answered with an error.
    #[error("{command}: {class}: {desc}")]
    Qemu {
        /// The command.
        command: String,
        /// QEMU's error class, for example `GenericError` or `CommandNotFound`.
        class: String,
        /// QEMU's description.
        desc: String,
    },
    /// No answer came in time. QEMU may still execute the command, or may have executed it.
    #[error("{command}: no answer within {after:?}")]
    Timeout {
        /// The command.
        command: String,
        /// The deadline the command was given.
        after: Duration,
    },
    /// The connection ended first. Whether QEMU executed the command is unknown.
    #[error("{command}: the monitor connection was lost")]
    ConnectionLost {
        /// The command.
        command: String,
        /// What ended the connection.
        source: ConnectionLoss,
    },
    /// QEMU succeeded, and its reply does not have the shape that the caller reads.
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
    /// More descriptors than one command can carry. Nothing was sent, and the descriptors are
    /// closed.
    #[error("{command}: {count} file descriptors, a command carries at most {limit}")]
    TooManyDescriptors {
        /// The command.
        command: String,
        /// The descriptors given.
        count: usize,
        /// The descriptors QEMU takes with one message.
        limit: usize,
    },
    /// Out-of-band execution was not offered in the greeting. Nothing was sent.
    #[error("{command}: this monitor does not execute out-of-band")]
    OutOfBandUnavailable {
        /// The command.
        command: String,
    },
}

impl CommandError {
    /// The command that failed.
    pub fn command(&self) -> &str {
        match self {
            Self::Qemu { command, .. }
            | Self::Timeout { command, .. }
            | Self::ConnectionLost { command, .. }
            | Self::Unexpected { command, .. }
            | Self::Arguments { command, .. }
            | Self::TooManyDescriptors { command, .. }
            | Self::OutOfBandUnavailable { command } => command,
        }
    }

    /// The ending in one word, for the span of the command.
    pub(crate) fn outcome(&self) -> &'static str {
        match self {
            Self::Qemu { .. } => "refused",
            Self::Timeout { .. } => "timed out",
            Self::ConnectionLost { .. } => "lost",
            Self::Unexpected { .. } => "unexpected",
            Self::Arguments { .. } | Self::TooManyDescriptors { .. } | Self::OutOfBandUnavailable { .. } => {
                "not sent"
            }
        }
    }

    /// QEMU's error class, when it was QEMU that refused.
    pub fn class(&self) -> Option<&str> {
        match self {
            Self::Qemu { class, .. } => Some(class),
            _ => None,
        }
    }
}

/// Why a connection is gone.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectionLoss {
    /// QEMU closed the monitor: it exited, or it was told to let go of us.
    #[error("QEMU closed the connection")]
    PeerClosed,
    /// The greeting did not come in time.
    #[error("no greeting came in time")]
    GreetingTimeout,
    /// The answer to the capabilities negotiation did not come in time.
    #[error("the capabilities negotiation was not answered in time")]
    NegotiationTimeout,
    /// QEMU refused the capabilities negotiation.
    #[error("the capabilities negotiation was refused: {class}: {desc}")]
    NegotiationRefused {
        /// QEMU's error class.
        class: String,
        /// QEMU's description.
        desc: String,
    },
    /// The peer sent something that is no QMP. What follows in the stream cannot be trusted.
    #[error("the peer does not speak QMP: {what}")]
    NotQmp {
        /// What was wrong, with the beginning of what was received.
        what: String,
    },
    /// The socket failed.
    #[error("the monitor socket failed")]
    Socket(#[source] Arc<io::Error>),
    /// [`Client::close`](crate::Client::close) was called, or the last
    /// [`Client`](crate::Client) of the connection was dropped, or the runtime was shut down.
    #[error("the connection was closed on this side")]
    LocallyClosed,
}
