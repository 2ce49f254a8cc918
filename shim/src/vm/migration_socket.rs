//! A socket on which we are the target of a migration.
//!
//! QEMU has to be able to connect to it wherever it lives: under another user, in another folder tree. So it has an
//! abstract name where QEMU can be told one (since 8.2), for which only the network namespace counts. For an older QEMU
//! it is in a folder of its own, which belongs to QEMU's user. That others may be able to connect as well does not
//! matter: nobody but QEMU's process is let in.

use std::fs;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, chown};
use std::os::unix::net::{SocketAddr, UnixListener as StdListener};
use std::path::{Path, PathBuf};

use dormouse_qmp::Client;
use dormouse_qmp::capabilities::Capabilities;
use serde_json::{Value, json};
use tokio::net::{UnixListener, UnixStream};
use uuid::Uuid;

use crate::error::{Code, Failure};

/// A socket that listens for QEMU.
#[derive(Debug)]
pub struct MigrationSocket {
    listener: UnixListener,
    name: Name,
    pid: u32,
}

#[derive(Debug)]
enum Name {
    Abstract(String),
    InFolder(Folder),
}

/// A folder that goes, with the socket in it, when nobody listens any more.
#[derive(Debug)]
struct Folder(PathBuf);

impl MigrationSocket {
    /// Listens for the QEMU behind `client`, which is the process `pid`.
    pub async fn listen(client: &Client, pid: u32) -> Result<Self, Failure> {
        let takes_channels = Capabilities::of(client)
            .await?
            .has_argument("migrate", "channels");
        let listening = if takes_channels {
            Self::with_abstract_name(pid)
        } else {
            Self::in_folder_of(&std::env::temp_dir(), pid)
        };
        listening.map_err(|error| {
            Failure::new(
                Code::Internal,
                format!("cannot listen for QEMU's migration: {error}"),
            )
        })
    }

    /// The socket as a channel of kind `kind` (`main`, `cpr`), for a `migrate` that takes channels.
    pub fn channel(&self, kind: &str) -> Value {
        let (path, is_abstract) = match &self.name {
            Name::Abstract(name) => (Path::new(name).to_owned(), true),
            Name::InFolder(folder) => (folder.socket(), false),
        };
        json!({
            "channel-type": kind,
            "addr": {"transport": "socket", "type": "unix", "path": path, "abstract": is_abstract},
        })
    }

    /// What `migrate` is told, for a migration with no other channel.
    pub fn arguments(&self) -> Value {
        match &self.name {
            Name::Abstract(_) => json!({"channels": [self.channel("main")]}),
            Name::InFolder(folder) => json!({"uri": format!("unix:{}", folder.socket().display())}),
        }
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
                    tracing::warn!(?pid, "somebody else than QEMU connected to a migration's socket");
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

    fn with_abstract_name(pid: u32) -> io::Result<Self> {
        let name = format!("dormouse-{}", Uuid::new_v4());
        let address = SocketAddr::from_abstract_name(&name)?;
        let listener = StdListener::bind_addr(&address)?;
        Self::of(listener, Name::Abstract(name), pid)
    }

    fn in_folder_of(parent: &Path, pid: u32) -> io::Result<Self> {
        let folder = Folder(parent.join(format!("dormouse-{}", Uuid::new_v4())));
        fs::DirBuilder::new().mode(0o700).create(&folder.0)?;
        let listener = StdListener::bind(folder.socket())?;
        // As it is made it is ours alone; another user's QEMU gets both.
        let theirs = fs::metadata(format!("/proc/{pid}"))?.uid();
        if theirs != fs::metadata(&folder.0)?.uid() {
            chown(folder.socket(), Some(theirs), None)?;
            chown(&folder.0, Some(theirs), None)?;
        }
        Self::of(listener, Name::InFolder(folder), pid)
    }

    fn of(listener: StdListener, name: Name, pid: u32) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        Ok(Self {
            listener: UnixListener::from_std(listener)?,
            name,
            pid,
        })
    }
}

impl Folder {
    fn socket(&self) -> PathBuf {
        self.0.join("migration.sock")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left of them is empty and nobody's.
        let _ = fs::remove_file(self.socket());
        let _ = fs::remove_dir(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream as StdStream;
    use std::time::Duration;

    use super::*;

    fn connect(socket: &MigrationSocket) -> StdStream {
        match &socket.name {
            Name::Abstract(name) => StdStream::connect_addr(&SocketAddr::from_abstract_name(name).unwrap()),
            Name::InFolder(folder) => StdStream::connect(folder.socket()),
        }
        .unwrap()
    }

    #[tokio::test]
    async fn the_process_that_is_waited_for_is_let_in_and_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let us = std::process::id();
        for (ours, anothers) in [
            (
                MigrationSocket::with_abstract_name(us),
                MigrationSocket::with_abstract_name(1),
            ),
            (
                MigrationSocket::in_folder_of(folder.path(), us),
                MigrationSocket::in_folder_of(folder.path(), 1),
            ),
        ] {
            let (ours, anothers) = (ours.unwrap(), anothers.unwrap());
            let _connected = connect(&ours);
            ours.accept().await.unwrap();
            let _connected = connect(&anothers);
            let waited = tokio::time::timeout(Duration::from_millis(50), anothers.accept()).await;
            assert!(waited.is_err(), "{waited:?}");
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "nothing is left");
    }
}
