//! The monitor socket: bytes in, lines with their descriptors out. Never blocks, knows nothing of
//! QMP.
//!
//! Lines are written one after the other, each wholly before the next begins. The descriptors of a
//! line go with its first `sendmsg` that the kernel accepts, and are closed on this side right
//! after. A line that is cut short by a full socket is continued without them. What was not sent
//! when the transport is dropped is closed with it.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use tokio::io::Interest;
use tokio::net::UnixStream;

/// How many descriptors QEMU takes with one message (`SOCKET_MAX_FDS` in its
/// `io/channel-socket.c`).
pub(crate) const DESCRIPTOR_LIMIT: usize = 16;

/// Whether something can still be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sending {
    Open,
    /// The peer takes nothing any more. What it said before can still be read.
    Closed,
}

/// Enough to take the largest usual reply (0.25 MB) in a few calls.
const READ_BYTES: usize = 64 << 10;

pub(crate) struct Transport {
    stream: UnixStream,
    outgoing: VecDeque<OutgoingLine>,
    read_buffer: Box<[u8]>,
}

struct OutgoingLine {
    bytes: Vec<u8>,
    sent: usize,
    fds: Vec<OwnedFd>,
}

impl Transport {
    pub(crate) fn new(stream: UnixStream) -> Self {
        Self {
            stream,
            outgoing: VecDeque::new(),
            read_buffer: vec![0; READ_BYTES].into(),
        }
    }

    /// Puts a line behind those that wait to be sent.
    pub(crate) fn enqueue(&mut self, bytes: Vec<u8>, fds: Vec<OwnedFd>) {
        self.outgoing.push_back(OutgoingLine { bytes, sent: 0, fds });
    }

    /// Drops the lines of which nothing has been sent. One that has been begun stays whole.
    pub(crate) fn withdraw_unsent(&mut self) {
        self.outgoing.retain(|line| line.sent > 0);
    }

    /// Waits until [`read`](Self::read) or, if there is something to send, [`flush`](Self::flush)
    /// may get further.
    pub(crate) async fn ready(&self) -> io::Result<()> {
        let interest = if self.outgoing.is_empty() {
            Interest::READABLE
        } else {
            Interest::READABLE | Interest::WRITABLE
        };
        self.stream.ready(interest).await.map(drop)
    }

    /// Takes bytes that have arrived. None means that nothing is there yet, an empty slice that
    /// nothing will come.
    pub(crate) fn read(&mut self) -> io::Result<Option<&[u8]>> {
        loop {
            match self.stream.try_read(&mut self.read_buffer) {
                Ok(length) => return Ok(Some(&self.read_buffer[..length])),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Sends as much as the socket takes.
    ///
    /// That the peer has closed is no error: a QEMU that exits answers first, and its last answers
    /// are still there to be read. What it will not receive is dropped, and reading comes to the
    /// end of the stream.
    pub(crate) fn flush(&mut self) -> io::Result<Sending> {
        while let Some(line) = self.outgoing.front_mut() {
            match self
                .stream
                .try_io(Interest::WRITABLE, || line.send(self.stream.as_fd()))
            {
                Ok(sent) => line.sent += sent,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Sending::Open),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) if is_closed_by_peer(&error) => {
                    self.outgoing.clear();
                    return Ok(Sending::Closed);
                }
                Err(error) => return Err(error),
            }
            // The kernel holds duplicates from the first byte on.
            line.fds.clear();
            if line.sent == line.bytes.len() {
                self.outgoing.pop_front();
            }
        }
        Ok(Sending::Open)
    }
}

impl OutgoingLine {
    fn send(&self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let fds: Vec<BorrowedFd<'_>> = self.fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTOR_LIMIT))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "too many file descriptors for one message",
            ));
        }
        let rest = [IoSlice::new(&self.bytes[self.sent..])];
        // Without NOSIGNAL a peer that has gone would kill the process.
        Ok(sendmsg(
            socket,
            &rest,
            &mut control,
            SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
        )?)
    }
}

fn is_closed_by_peer(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    fn pair() -> (Transport, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Transport::new(ours), theirs)
    }

    async fn read_exactly(stream: &UnixStream, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        let mut filled = 0;
        while filled < length {
            stream.readable().await.unwrap();
            match stream.try_read(&mut bytes[filled..]) {
                Ok(read) => filled += read,
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::WouldBlock),
            }
        }
        bytes
    }

    #[tokio::test]
    async fn lines_larger_than_the_socket_arrive_whole_and_in_order() {
        let (mut transport, peer) = pair();
        let lines = [vec![b'a'; 3 << 20], vec![b'b'; 10], vec![b'c'; 1 << 20]];
        for line in &lines {
            transport.enqueue(line.clone(), Vec::new());
        }
        let expected = lines.concat();
        let reader = tokio::spawn(async move { read_exactly(&peer, (4 << 20) + 10).await });
        while !transport.outgoing.is_empty() {
            transport.ready().await.unwrap();
            transport.flush().unwrap();
        }
        assert!(reader.await.unwrap() == expected);
    }

    #[tokio::test]
    async fn descriptors_are_closed_as_soon_as_the_first_part_of_their_line_is_sent() {
        let (mut transport, _peer) = pair();
        let fd: OwnedFd = tempfile::tempfile().unwrap().into();
        let number = fd.as_raw_fd();
        transport.enqueue(vec![b'x'; 8 << 20], vec![fd]);
        transport.ready().await.unwrap();
        while transport.outgoing[0].sent == 0 {
            transport.ready().await.unwrap();
            transport.flush().unwrap();
        }
        assert!(
            transport.outgoing[0].sent < 8 << 20,
            "the socket took everything, so the test shows nothing"
        );
        assert!(
            transport.outgoing[0].fds.is_empty(),
            "descriptor {number} is still held"
        );
    }

    #[tokio::test]
    async fn the_last_words_of_a_peer_that_has_gone_are_read_after_sending_has_failed() {
        let (mut transport, peer) = pair();
        peer.writable().await.unwrap();
        assert_eq!(peer.try_write(b"bye\n").unwrap(), 4);
        drop(peer);
        transport.enqueue(b"{}\n".to_vec(), vec![tempfile::tempfile().unwrap().into()]);
        transport.ready().await.unwrap();
        assert_eq!(transport.flush().unwrap(), Sending::Closed);
        let mut heard = Vec::new();
        loop {
            transport.ready().await.unwrap();
            match transport.read().unwrap() {
                Some([]) => break,
                Some(bytes) => heard.extend_from_slice(bytes),
                None => {}
            }
        }
        assert_eq!(heard, b"bye\n");
        assert!(transport.outgoing.is_empty());
    }
}
