//! Where a monitor, or a guest agent, can be reached.
//!
//! | written as | means |
//! | --- | --- |
//! | `/run/vm/qmp.sock`, `qmp.sock` | a socket in the file system |
//! | `@name` | a socket of that name in Linux's abstract namespace |
//! | `./@name`, `./fd:3` | files of such names |
//!
//! A descriptor that was handed over is an address too: `Address::from(owned_fd)`. It displays as
//! `fd:3` and cannot be parsed from that: taking possession of a number that somebody wrote down is
//! a promise that nobody else owns it, which only the code that inherited it can give. It can do so
//! with `OwnedFd`, in its own name.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use tokio::net::UnixStream;
use tokio::time::Instant;

/// An address of a monitor or a guest agent.
#[derive(Debug)]
pub enum Address {
    /// A socket in the file system. The kernel takes paths of up to 107 bytes.
    Path(PathBuf),
    /// A socket in the abstract namespace, by its name without the leading zero byte; up to 107
    /// bytes. It belongs to the network namespace of the process.
    Abstract(Vec<u8>),
    /// A connected stream socket that was handed over. It serves one connection, and is made
    /// non-blocking for whoever else holds it too.
    Inherited(OwnedFd),
}

/// Why a text is no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AddressError {
    /// There is nothing.
    #[error("the address is empty")]
    Empty,
    /// An abstract name of no bytes stands for "any free name", which cannot be connected to.
    #[error("the abstract address has no name behind its @")]
    Nameless,
    /// A descriptor by its number.
    #[error("a descriptor cannot be taken by its number; write ./fd:… for a file of such a name")]
    Descriptor,
}

impl Address {
    /// The address once more, for one more connection. None for a descriptor, which is one
    /// connection and no more.
    pub fn again(&self) -> Option<Self> {
        match self {
            Self::Path(path) => Some(Self::Path(path.clone())),
            Self::Abstract(name) => Some(Self::Abstract(name.clone())),
            Self::Inherited(_) => None,
        }
    }

    /// Connects, and waits while the queue of those who want to connect is full. The error is
    /// `WouldBlock` when it is still full at the deadline.
    ///
    /// While a client holds the monitor, QEMU accepts nobody. The first one who comes fits into the
    /// listen queue and waits for its greeting there; for the next one the connect itself fails
    /// with `EAGAIN`. Both are the same situation.
    pub(crate) async fn connect(self, deadline: Instant) -> io::Result<UnixStream> {
        const RETRY_INTERVAL: Duration = Duration::from_millis(20);
        let path = match self {
            Self::Path(path) => path,
            Self::Abstract(name) => {
                // How tokio, like the kernel, tells an abstract name from a path.
                let marked = [&[0], name.as_slice()].concat();
                OsString::from_vec(marked).into()
            }
            Self::Inherited(fd) => return adopt(fd),
        };
        loop {
            match UnixStream::connect(&path).await {
                Err(error)
                    if error.kind() == io::ErrorKind::WouldBlock
                        && Instant::now() + RETRY_INTERVAL < deadline =>
                {
                    tokio::time::sleep(RETRY_INTERVAL).await;
                }
                ended => return ended,
            }
        }
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if text.is_empty() {
            return Err(AddressError::Empty);
        }
        if text.starts_with("fd:") {
            return Err(AddressError::Descriptor);
        }
        match text.strip_prefix('@') {
            Some("") => Err(AddressError::Nameless),
            Some(name) => Ok(Self::Abstract(name.as_bytes().to_vec())),
            None => Ok(Self::Path(text.into())),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) if reads_as_no_path(path) => write!(f, "./{}", path.display()),
            Self::Path(path) => write!(f, "{}", path.display()),
            Self::Abstract(name) => write!(f, "@{}", String::from_utf8_lossy(name)),
            Self::Inherited(fd) => write!(f, "fd:{}", fd.as_raw_fd()),
        }
    }
}

/// Makes a stream of a descriptor. One of another kind, or a socket that is not connected, is
/// refused.
fn adopt(fd: OwnedFd) -> io::Result<UnixStream> {
    let stream = StdUnixStream::from(fd);
    stream.peer_addr()?;
    stream.set_nonblocking(true)?;
    UnixStream::from_std(stream)
}

fn reads_as_no_path(path: &Path) -> bool {
    let bytes = path.as_os_str().as_bytes();
    bytes.starts_with(b"@") || bytes.starts_with(b"fd:")
}

impl From<PathBuf> for Address {
    fn from(path: PathBuf) -> Self {
        Self::Path(path)
    }
}

impl From<&PathBuf> for Address {
    fn from(path: &PathBuf) -> Self {
        Self::Path(path.clone())
    }
}

impl From<&Path> for Address {
    fn from(path: &Path) -> Self {
        Self::Path(path.to_owned())
    }
}

impl From<OwnedFd> for Address {
    fn from(fd: OwnedFd) -> Self {
        Self::Inherited(fd)
    }
}

impl From<StdUnixStream> for Address {
    fn from(stream: StdUnixStream) -> Self {
        Self::Inherited(stream.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_read_as_it_is_written() {
        for text in [
            "/run/vm/qmp.sock",
            "qmp.sock",
            "@name",
            "./@name",
            "./fd:3",
            "@@",
            "a@b",
        ] {
            let address: Address = text.parse().unwrap();
            assert_eq!(address.to_string(), text);
            assert_eq!(
                matches!(address, Address::Abstract(_)),
                text.starts_with('@'),
                "{text}"
            );
        }
    }

    #[test]
    fn what_cannot_be_connected_is_told_when_it_is_read() {
        let refusal = |text: &str| text.parse::<Address>().unwrap_err();
        assert_eq!(refusal(""), AddressError::Empty);
        assert_eq!(refusal("@"), AddressError::Nameless);
        assert_eq!(refusal("fd:3"), AddressError::Descriptor);
    }

    #[test]
    fn a_path_that_looks_like_something_else_is_written_so_that_it_reads_as_a_path() {
        for name in ["@name", "fd:3"] {
            let written = Address::from(Path::new(name)).to_string();
            let read: Address = written.parse().unwrap();
            assert!(matches!(read, Address::Path(_)), "{written}");
        }
    }

    #[test]
    fn all_but_a_descriptor_can_be_connected_again() {
        let (ours, _theirs) = StdUnixStream::pair().unwrap();
        assert!(Address::from(ours).again().is_none());
        for text in ["/a", "@a"] {
            let address: Address = text.parse().unwrap();
            assert_eq!(address.again().unwrap().to_string(), text);
        }
    }

    #[tokio::test]
    async fn a_descriptor_that_is_no_connected_socket_is_refused() {
        let now = Instant::now();
        let file: OwnedFd = tempfile::tempfile().unwrap().into();
        assert!(Address::from(file).connect(now).await.is_err());
        let alone = rustix::net::socket(
            rustix::net::AddressFamily::UNIX,
            rustix::net::SocketType::STREAM,
            None,
        );
        assert!(Address::from(alone.unwrap()).connect(now).await.is_err());
    }
}
