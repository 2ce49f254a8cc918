//! Where QEMU listens for whoever talks to the guest's agent: the virtio-serial port that the agent looks for inside the
//! guest, and the character device behind it.

use std::path::{Path, PathBuf};

use dormouse_qmp::{Client, command};
use serde_json::Value;

use super::process;
use super::shape::DEVICE_FOLDERS;
use crate::error::{Code, Failure};

/// The port's name; agents know no other.
const PORT: &str = "org.qemu.guest_agent.0";

/// Finds the socket. Refused where there is none that can be connected to.
pub async fn find(client: &Client, pid: u32) -> Result<PathBuf, Failure> {
    let chardev = chardev_of_port(client).await?.ok_or_else(|| {
        refused(format!(
            "the machine has no virtio-serial port named {PORT} for a guest agent; if the agent is reached in another \
             way, name its socket with --agent"
        ))
    })?;
    let chardevs = client.execute(&command::query_chardev {}).await?;
    let entries = chardevs.as_array().map(Vec::as_slice).unwrap_or_default();
    let file = entries
        .iter()
        .find(|entry| entry["label"] == chardev.as_str())
        .and_then(|entry| entry["filename"].as_str())
        .unwrap_or_default();
    let socket = listening_at(file).ok_or_else(|| {
        refused(format!(
            "the guest agent's character device {chardev} is {file:?}, and not a unix socket that QEMU listens on"
        ))
    })?;
    // QEMU's own path may be relative to where it was started.
    let directory = process::working_directory(pid).unwrap_or_else(|| PathBuf::from("/"));
    Ok(directory.join(socket))
}

/// The character device of the port, wherever the port was plugged.
async fn chardev_of_port(client: &Client) -> Result<Option<String>, Failure> {
    for folder in DEVICE_FOLDERS {
        let list = command::qom_list {
            path: folder.to_owned(),
        };
        let children = client.execute(&list).await?;
        for child in children.as_array().into_iter().flatten() {
            if child["type"] != "child<virtserialport>" {
                continue;
            }
            let path = format!("{folder}/{}", child["name"].as_str().unwrap_or_default());
            if property(client, &path, "name").await? == PORT {
                return Ok(Some(property(client, &path, "chardev").await?));
            }
        }
    }
    Ok(None)
}

/// A text property; empty where there is none.
async fn property(client: &Client, path: &str, property: &str) -> Result<String, Failure> {
    let get = command::qom_get {
        path: path.to_owned(),
        property: property.to_owned(),
    };
    let value: Value = client.execute(&get).await?;
    Ok(value.as_str().unwrap_or_default().to_owned())
}

/// The path in what `query-chardev` calls a file name, where that is a unix socket to connect to.
fn listening_at(file: &str) -> Option<&Path> {
    let address = file.strip_prefix("disconnected:").unwrap_or(file);
    let path = address.strip_prefix("unix:")?.strip_suffix(",server=on")?;
    // A socket without a place in the file system has no path to join.
    let is_abstract = path.ends_with(",abstract=on") || path.ends_with(",tight=off");
    (!path.is_empty() && !is_abstract).then(|| Path::new(path))
}

fn refused(why: String) -> Failure {
    Failure::new(Code::Refused, why)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_unix_socket_that_qemu_listens_on_can_be_connected_to() {
        let at = |file| listening_at(file).map(|path| path.to_str().unwrap());
        assert_eq!(
            at("disconnected:unix:/run/qga.sock,server=on"),
            Some("/run/qga.sock")
        );
        assert_eq!(at("unix:qga.sock,server=on"), Some("qga.sock"));
        assert_eq!(at("unix:/run/a,b,server=on"), Some("/run/a,b"));
        for other in [
            "",
            "unix:/run/qga.sock",
            "disconnected:tcp:127.0.0.1:4444,server=on",
            "unix:qga,abstract=on,server=on",
            "unix:,server=on",
            "null",
        ] {
            assert_eq!(at(other), None, "{other}");
        }
    }
}
