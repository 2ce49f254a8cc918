//! QEMU's memory by descriptors: we pose as the QEMU that a running one is to be replaced by.
//!
//! ```text
//!  we                                    QEMU
//!  mode=cpr-transfer, migrate ─────────► connects to the socket for descriptors
//!  read entries, keep descriptors ◄───── name and descriptor of each RAM block, then its end of the stream
//!  close it ───────────────────────────► connects to the main socket
//!  read the device stream ◄───────────── devices, and no page of what was handed over
//! ```
//!
//! QEMU goes on only once our end of the first socket is closed: until then a cancel or a failure leaves it where it
//! was. The descriptors are those of the files that the guest's memory is in; holding them touches nothing.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;

use dormouse_qmp::Client;
use dormouse_storage::migration::{CPR_STREAM_LIMIT, cpr_entries};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::json;
use tokio::io::Interest;
use tokio::net::UnixStream;

use super::memory::is_mapped_by;
use super::migration_socket::MigrationSocket;
use crate::error::{Code, Failure, sentence};

/// Descriptors that one read may bring. The kernel ends a read behind a byte that carries some, and QEMU sends one with
/// each; 253 is what the kernel lets one message have.
const DESCRIPTORS_PER_READ: usize = 253;

/// Files of RAM blocks, by the blocks' names.
pub type HandedOver = HashMap<String, File>;

/// Has the QEMU in process `pid` hand over its memory and migrate its devices; returns the files, and the stream that
/// the devices come in.
pub async fn take_over(client: &Client, pid: u32) -> Result<(HandedOver, UnixStream), Failure> {
    let main = MigrationSocket::listen(client, pid).await?;
    let cpr = MigrationSocket::listen(client, pid).await?;
    let migrate = async {
        let channels = json!({"channels": [main.channel("main"), cpr.channel("cpr")]});
        Ok(client.execute_raw("migrate", channels).await?)
    };
    let handed_over = async { receive(&cpr.accept().await?, pid).await };
    // QEMU connects before it answers, and what it refuses it answers without connecting.
    let (_, files) = tokio::try_join!(migrate, handed_over)?;
    drop(cpr);
    let stream = super::monitor::unless_migration_ends(client, main.accept()).await?;
    Ok((files, stream))
}

/// Reads entries and descriptors up to the end of the stream.
async fn receive(stream: &UnixStream, pid: u32) -> Result<HandedOver, Failure> {
    let mut bytes = Vec::new();
    let mut files = Vec::new();
    let mut carried_at = Vec::new();
    loop {
        let (part, descriptors) = stream
            .async_io(Interest::READABLE, || read_with_descriptors(stream))
            .await
            .map_err(|error| {
                Failure::new(
                    Code::Unreachable,
                    format!("QEMU's list of descriptors broke off: {error}"),
                )
            })?;
        if part.is_empty() {
            break;
        }
        bytes.extend(part);
        // A read ends with the byte that carries them.
        carried_at.extend(descriptors.iter().map(|_| bytes.len() - 1));
        files.extend(descriptors.into_iter().map(File::from));
        if bytes.len() as u64 > CPR_STREAM_LIMIT.0 {
            return Err(refused(&format!("it is longer than {CPR_STREAM_LIMIT}")));
        }
    }
    let entries = cpr_entries(&bytes, &carried_at).map_err(|error| refused(&sentence(&error)))?;
    let mut handed_over = HandedOver::new();
    for (entry, file) in entries.into_iter().zip(files) {
        // QEMU hands over more than RAM: sockets and devices, which a woken guest opens anew.
        if entry.id == 0 && file.metadata().is_ok_and(|metadata| metadata.is_file()) {
            if is_mapped_by(pid, &file) == Some(false) {
                return Err(refused(&format!(
                    "the file of {} is not what QEMU's process {pid} has mapped",
                    entry.name
                )));
            }
            handed_over.insert(entry.name, file);
        }
    }
    Ok(handed_over)
}

/// One read, with the descriptors that came along.
fn read_with_descriptors(stream: &UnixStream) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut bytes = vec![0; 4096];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_PER_READ))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let message = recvmsg(
        stream,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut ancillary,
        RecvFlags::CMSG_CLOEXEC,
    )?;
    let descriptors = ancillary
        .drain()
        .flat_map(|message| match message {
            RecvAncillaryMessage::ScmRights(descriptors) => descriptors.collect(),
            _ => Vec::new(),
        })
        .collect();
    bytes.truncate(message.bytes);
    Ok((bytes, descriptors))
}

fn refused(why: &str) -> Failure {
    Failure::new(
        Code::Refused,
        format!("cannot use the memory that QEMU hands over: {why}"),
    )
}
