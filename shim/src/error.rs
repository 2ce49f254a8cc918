//! What can go wrong, as the outside world is told of it.
//!
//! Every failure carries a stable [`Code`], what the caller can do about it ([`Disposition`]), and what became of the
//! guest ([`GuestState`]). Exit codes of the command line and problems of the API are derived from these three and
//! from nothing else. The message holds the numbers that help; the cause is folded into it once, where the failure is
//! made, so that it reads as one sentence.

use std::io::ErrorKind;
use std::time::Duration;

use dormouse_qmp::{CommandError, ConnectError};
use dormouse_storage::IncomingError;
use dormouse_storage::exchange::{ExportError, ImportError};
use dormouse_storage::image::ImageError;
use serde::{Deserialize, Serialize};

/// A failed operation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
#[error("{message}")]
pub struct Failure {
    /// What kind of failure this is.
    pub code: Code,
    /// What the guest does now.
    pub guest: GuestState,
    /// One sentence for a person.
    pub message: String,
    /// How long the guest took to be given back, from the moment in which that was wanted; `None` where it was not taken,
    /// or nobody wanted it before what went wrong had ended by itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub given_back_after: Option<Duration>,
}

/// The kinds of failure that callers tell apart. Names and numbers are a contract. The last ones weigh most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Code {
    /// A bug in Dormouse.
    Internal,
    /// The request itself is wrong.
    Usage,
    /// A check said no: a blocker, a guard, something busy.
    Refused,
    /// QEMU, the supervisor or the guest agent cannot be reached, or the monitor is taken.
    Unreachable,
    /// A limit on time ran out.
    TimedOut,
    /// Cancelled on request.
    Cancelled,
    /// The storage has not enough room.
    NoSpace,
    /// The image is torn, corrupt, alien, of a newer format, or already used.
    ImageInvalid,
    /// Storage answered with an error.
    StorageIo,
    /// The outcome is not certain: a person has to look.
    Operator,
}

/// Who can do something about a failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Disposition {
    /// The same request may work later.
    Retry,
    /// Another request is needed.
    ChangeRequest,
    /// A person has to look at the machine first.
    Operator,
    /// A bug in Dormouse: report it.
    Bug,
}

/// What a guest does, as far as it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GuestState {
    /// Its vCPUs run.
    Running,
    /// It exists in QEMU and does not run.
    Paused,
    /// It has no QEMU.
    Stopped,
    /// It could not be asked.
    Unknown,
}

impl Failure {
    /// A failure about a guest whose state nobody has looked at.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            code,
            guest: GuestState::Unknown,
            message: message.into(),
            given_back_after: None,
        }
    }

    /// The same failure, knowing what the guest does.
    pub fn with_guest(self, guest: GuestState) -> Self {
        Self { guest, ..self }
    }

    /// The same failure, with what was being done put before its message.
    pub fn while_doing(self, action: &str) -> Self {
        Self {
            message: format!("{action}: {}", self.message),
            ..self
        }
    }

    /// The exit code of the command line.
    pub fn exit_code(&self) -> u8 {
        self.code.exit_code()
    }
}

impl Code {
    /// The exit code of the command line, as documented in the README.
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Internal => 1,
            Self::Usage => 2,
            Self::Refused => 3,
            Self::Unreachable => 4,
            Self::TimedOut => 5,
            Self::Cancelled => 6,
            Self::NoSpace => 7,
            Self::ImageInvalid => 8,
            Self::StorageIo => 9,
            Self::Operator => 10,
        }
    }

    /// Who can do something about it.
    pub fn disposition(self) -> Disposition {
        match self {
            Self::Internal => Disposition::Bug,
            Self::Usage | Self::Refused | Self::NoSpace | Self::ImageInvalid => Disposition::ChangeRequest,
            Self::Unreachable | Self::TimedOut | Self::Cancelled => Disposition::Retry,
            Self::StorageIo | Self::Operator => Disposition::Operator,
        }
    }
}

impl From<CommandError> for Failure {
    fn from(error: CommandError) -> Self {
        let code = match &error {
            CommandError::ConnectionLost { .. } => Code::Unreachable,
            CommandError::Timeout { .. } => Code::TimedOut,
            CommandError::Unexpected { .. } => Code::Internal,
            _ => Code::Refused,
        };
        Self::new(code, sentence(&error))
    }
}

impl From<ConnectError> for Failure {
    fn from(error: ConnectError) -> Self {
        Self::new(Code::Unreachable, sentence(&error))
    }
}

impl From<ImageError> for Failure {
    fn from(error: ImageError) -> Self {
        Self::new(Code::from(&error), sentence(&error))
    }
}

impl From<&ImageError> for Code {
    fn from(error: &ImageError) -> Self {
        match error {
            ImageError::NotAnImage { .. }
            | ImageError::NewerFormat { .. }
            | ImageError::Torn { .. }
            | ImageError::Corrupt { .. }
            | ImageError::Stream(_)
            | ImageError::WrongKey { .. }
            | ImageError::NotEncrypted { .. }
            | ImageError::WrongState { .. } => Self::ImageInvalid,
            ImageError::Locked { .. }
            | ImageError::DeviceInUse { .. }
            | ImageError::ReadOnly { .. }
            | ImageError::SectorSize { .. }
            | ImageError::DeviceHoldsOther { .. }
            | ImageError::TargetExists { .. }
            | ImageError::HoldsGuest { .. } => Self::Refused,
            ImageError::KeyNeeded { .. } => Self::Usage,
            // Somebody ran it.
            ImageError::Incoming(IncomingError::Again { .. }) => Self::Refused,
            ImageError::NoSpace { .. } => Self::NoSpace,
            ImageError::Cancelled => Self::Cancelled,
            // A wrong path is the caller's to mend, not the storage's.
            ImageError::Io { source, .. }
                if matches!(
                    source.kind(),
                    ErrorKind::NotFound | ErrorKind::PermissionDenied | ErrorKind::IsADirectory
                ) =>
            {
                Self::Usage
            }
            ImageError::Io { .. } | ImageError::Memory(_) => Self::StorageIo,
            // What QEMU sends is not ours to mend; what we make of its connections is.
            ImageError::Incoming(error) => match error {
                IncomingError::Socket(_) => Self::Unreachable,
                IncomingError::Stream(_)
                | IncomingError::Multifd(_)
                | IncomingError::Again { .. }
                | IncomingError::Late { .. }
                | IncomingError::Scattered { .. } => Self::Refused,
                _ => Self::Internal,
            },
            // The guest lives on, and the device may tell otherwise.
            ImageError::MayBeSealed { .. } => Self::Operator,
            _ => Self::Internal,
        }
    }
}

impl From<ExportError> for Failure {
    fn from(error: ExportError) -> Self {
        match error {
            ExportError::Image(error) => error.into(),
            other => Self::new(Code::Refused, sentence(&other)),
        }
    }
}

impl From<ImportError> for Failure {
    fn from(error: ImportError) -> Self {
        let code = match error {
            ImportError::Image(error) => return error.into(),
            ImportError::Lzop { .. } => Code::Refused,
            _ => Code::ImageInvalid,
        };
        Self::new(code, sentence(&error))
    }
}

/// An error with its causes, as one sentence.
pub fn sentence(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        // Some libraries repeat their cause in their own message.
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_that_qemu_breaks_off_is_no_bug_of_ours() {
        let code = |error: IncomingError| Failure::from(ImageError::from(error)).code;
        let again = IncomingError::Again {
            block: "pc.ram".into(),
            offset: 4096,
        };
        assert_eq!(code(again), Code::Refused);
        assert_eq!(code(IncomingError::Scattered { limit: 64 }), Code::Refused);
        let reset = std::io::Error::from(ErrorKind::ConnectionReset);
        assert_eq!(code(IncomingError::Socket(reset)), Code::Unreachable);
        assert_eq!(code(IncomingError::MainStreams { found: 0 }), Code::Internal);
    }
}
