//! A connection to QEMU that can be left while QEMU says nothing.

use std::io::{self, ErrorKind, IoSliceMut, Read};
use std::os::unix::net::UnixStream;

use super::ending::{Ending, LOOK_EVERY};

/// Reads from a socket until all is over.
pub(super) struct Connection<'a> {
    socket: UnixStream,
    ending: &'a Ending<'a>,
}

impl<'a> Connection<'a> {
    pub(super) fn of(socket: UnixStream, ending: &'a Ending<'a>) -> io::Result<Self> {
        // A listener that was not blocking can have handed it on so.
        socket.set_nonblocking(false)?;
        socket.set_read_timeout(Some(LOOK_EVERY))?;
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

    fn patiently(&self, mut read: impl FnMut(&UnixStream) -> io::Result<usize>) -> io::Result<usize> {
        loop {
            self.ending.go_on().map_err(io::Error::other)?;
            match read(&self.socket) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
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
