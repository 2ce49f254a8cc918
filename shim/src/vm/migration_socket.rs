//! A socket on which we are the target of a migration.
//!
//! QEMU has to be able to connect to it wherever it lives: under another user, in another folder tree. So it has an
//! abstract name, for which only the network namespace counts; that anybody could connect to such a socket does not
//! matter, because nobody but QEMU's process is let in.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener as StdListener};

use serde_json::{Value, json};
use tokio::net::{UnixListener, UnixStream};
use uuid::Uuid;

use crate::error::{Code, Failure};

/// A socket that listens for QEMU.
#[derive(Debug)]
pub struct MigrationSocket {
    listener: UnixListener,
    name: String,
    pid: u32,
}

impl MigrationSocket {
    /// Listens for the process `pid`.
    pub fn listen(pid: u32) -> Result<Self, Failure> {
        let name = format!("dormouse-{}", Uuid::new_v4());
        let local = |error: io::Error| {
            Failure::new(
                Code::Internal,
                format!("cannot listen for QEMU's migration: {error}"),
            )
        };
        let address = SocketAddr::from_abstract_name(&name).map_err(local)?;
        let listener = StdListener::bind_addr(&address).map_err(local)?;
        listener.set_nonblocking(true).map_err(local)?;
        Ok(Self {
            listener: UnixListener::from_std(listener).map_err(local)?,
            name,
            pid,
        })
    }

    /// The socket as a channel of kind `kind` (`main`, `cpr`), as `migrate` takes it.
    pub fn channel(&self, kind: &str) -> Value {
        json!({
            "channel-type": kind,
            "addr": {"transport": "socket", "type": "unix", "path": self.name, "abstract": true},
        })
    }

    /// Waits until QEMU connects. Whoever else does is turned away.
    pub async fn accept(&self) -> Result<UnixStream, Failure> {
        loop {
            let accepted = self.listener.accept().await.and_then(|(stream, _)| {
                let pid = stream.peer_cred()?.pid();
                Ok((stream, pid))
            });
            match accepted {
                Ok((stream, Some(pid))) if u32::try_from(pid) == Ok(self.pid) => return Ok(stream),
                Ok((_, pid)) => {
                    tracing::warn!(?pid, "somebody else than QEMU connected to a migration's socket")
                }
                Err(error) => {
                    return Err(Failure::new(
                        Code::Internal,
                        format!("cannot accept QEMU's migration: {error}"),
                    ));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connect(socket: &MigrationSocket) -> std::os::unix::net::UnixStream {
        let address = SocketAddr::from_abstract_name(&socket.name).unwrap();
        std::os::unix::net::UnixStream::connect_addr(&address).unwrap()
    }

    #[tokio::test]
    async fn the_process_that_is_waited_for_is_let_in_and_no_other() {
        let ours = MigrationSocket::listen(std::process::id()).unwrap();
        let _connected = connect(&ours);
        ours.accept().await.unwrap();

        let anothers = MigrationSocket::listen(1).unwrap();
        let _connected = connect(&anothers);
        let waited = tokio::time::timeout(std::time::Duration::from_millis(50), anothers.accept()).await;
        assert!(waited.is_err(), "{waited:?}");
    }
}
