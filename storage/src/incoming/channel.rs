//! One multifd channel, from its opening to its end.

use std::io::{self, ErrorKind};

use super::assembly::Feeder;
use super::connection::Connection;
use super::error::IncomingError;
use super::sink::ChunkSink;
use crate::image::ImageError;
use crate::migration::{
    MULTIFD_OPENING_BYTES, MULTIFD_PACKET_BYTES, MultifdError, MultifdOpening, MultifdPacket,
};

/// Reads the opening, of which `begun` came already, and returns the channel's number.
pub(super) fn opening(begun: [u8; 4], connection: &mut Connection<'_>) -> Result<u8, ImageError> {
    let mut bytes = [0; MULTIFD_OPENING_BYTES];
    bytes[..4].copy_from_slice(&begun);
    if connection.fill(&mut bytes[4..]).map_err(socket)? < MULTIFD_OPENING_BYTES - 4 {
        return Err(multifd(MultifdError::Short));
    }
    Ok(MultifdOpening::parse(&bytes).map_err(multifd)?.channel)
}

/// Receives packets until the channel ends.
pub(super) fn packets<S: ChunkSink>(
    connection: &mut Connection<'_>,
    feeder: &mut Feeder<'_, S>,
) -> Result<(), ImageError> {
    let mut bytes = [0; MULTIFD_PACKET_BYTES];
    loop {
        // The beginning says whether the rest has the length that we wait for.
        let (head, rest) = bytes.split_at_mut(MultifdPacket::HEAD_BYTES);
        match connection.fill(head).map_err(socket)? {
            0 => return Ok(()),
            MultifdPacket::HEAD_BYTES => MultifdPacket::check_head(head).map_err(multifd)?,
            _ => return Err(multifd(MultifdError::Short)),
        }
        if connection.fill(rest).map_err(socket)? < rest.len() {
            return Err(multifd(MultifdError::Short));
        }
        let packet = MultifdPacket::parse(&bytes).map_err(multifd)?;
        feeder.packet(&packet, |slices| {
            connection.fill_all(slices).map_err(|error| match error.kind() {
                ErrorKind::UnexpectedEof => multifd(MultifdError::Short),
                _ => socket(error),
            })
        })?;
    }
}

pub(super) fn multifd(error: MultifdError) -> ImageError {
    IncomingError::from(error).into()
}

/// A connection that is left because all is over fails too; what it says then is not the reason.
pub(super) fn socket(error: io::Error) -> ImageError {
    if error.get_ref().is_some_and(|inner| inner.is::<ImageError>()) {
        return ImageError::Cancelled;
    }
    IncomingError::from(error).into()
}
