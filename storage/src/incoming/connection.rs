//! A connection to QEMU that can be left while QEMU says nothing.

use std::io::{self, ErrorKind, IoSliceMut, Read};
use std::os::unix::net::UnixStream;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;

use super::ending::{Ending, LOOK_EVERY};

/// As long as until the next look whether all is over.
const WAIT: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: LOOK_EVERY.subsec_nanos() as i64,
};

/// Reads from a socket until all is over.
pub(super) struct Connection<'a> {
    socket: UnixStream,
    ending: &'a Ending<'a>,
}

impl<'a> Connection<'a> {
    pub(super) fn of(socket: UnixStream, ending: &'a Ending<'a>) -> io::Result<Self> {
        // Whoever takes over from a save that was given up reads the same sockets, and takes them as they are here: that is
        // never changed back.
        socket.set_nonblocking(true)?;
        Ok(Self { socket, ending })
    }

    /// Fills `bytes` and returns how many came before the end: all, unless it ended.
    pub(super) fn fill(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let mut done = 0;
        while done < bytes.len() {
            match self.read(&mut bytes[done..])? {
                0 => break,
                read => done += read,
            }
        }
        Ok(done)
    }

    /// Fills all slices, in their order.
    ///
    /// # Errors
    ///
    /// `UnexpectedEof` if the connection ends before.
    pub(super) fn fill_all(&mut self, mut slices: &mut [IoSliceMut<'_>]) -> io::Result<()> {
        while !slices.is_empty() {
            match self.patiently(|mut socket| socket.read_vectored(slices))? {
                0 => return Err(ErrorKind::UnexpectedEof.into()),
                read => IoSliceMut::advance_slices(&mut slices, read),
            }
        }
        Ok(())
    }

    /// Waits until there is something to read, but not for long.
    fn wait(&self) -> io::Result<()> {
        let mut socket = [PollFd::new(&self.socket, PollFlags::IN)];
        match poll(&mut socket, Some(&WAIT)) {
            Ok(_) | Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn patiently(&self, mut read: impl FnMut(&UnixStream) -> io::Result<usize>) -> io::Result<usize> {
        loop {
            self.ending.go_on().map_err(io::Error::other)?;
            match read(&self.socket) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.wait()?,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                result => return result,
            }
        }
    }
}

impl Read for Connection<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.patiently(|mut socket| socket.read(bytes))
    }
}
