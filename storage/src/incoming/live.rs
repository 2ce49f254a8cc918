//! The migration of a guest that runs: one plain stream, in which pages come again when the guest wrote to them.
//!
//! No channels beside it: in one stream what came last is what counts, while over several it would take the ends of
//! rounds, which QEMU's versions tell in different ways, to know which of two contents of a page is the later one.

use std::os::unix::net::UnixStream;
use std::sync::atomic::AtomicBool;

use super::channel::socket as broken;
use super::connection::Connection;
use super::ending::Ending;
use super::main_stream::told;
use crate::ByteCount;
use crate::image::ImageError;
use crate::migration::{self, PageSink, Recording};

/// Receives the stream to its end; pages go to `sink` as they come. What follows RAM must not be longer than
/// `tail_bound`.
///
/// # Errors
///
/// What is wrong with the stream, or the sink; [`ImageError::Cancelled`], within 100 ms even if nothing comes.
pub(crate) fn receive_live(
    socket: UnixStream,
    tail_bound: ByteCount,
    sink: &mut impl PageSink<Error = ImageError>,
    cancelled: &AtomicBool,
) -> Result<Recording, ImageError> {
    let ending = Ending::by(cancelled);
    let connection = Connection::of(socket, &ending).map_err(broken)?;
    match migration::receive(connection, tail_bound, sink).map_err(told) {
        // The connection breaks off when the work is cancelled.
        Err(_) if ending.go_on().is_err() => Err(ImageError::Cancelled),
        received => received,
    }
}
