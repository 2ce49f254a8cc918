//! An image as the stream of a normal migration, for a QEMU whose RAM nobody placed.
//!
//! ```text
//!                ┌─► reader 0: chunks 0, 3, 6 … ─ read, check, unpack, put into pages ─┐
//!  chunk table ──┼─► reader 1: chunks 1, 4, 7 …                                        ├─► writer, in order ─► QEMU
//!                └─► reader 2: chunks 2, 5, 8 …                                        ┘
//! ```
//!
//! QEMU takes one stream with one thread, which copies every page; all else is done beside it. Each reader is at most
//! two chunks ahead of the writer, so memory stays bounded whatever QEMU's pace. A chunk is written only after its
//! checksum was found right; at the first one that is not the stream ends in the middle.

use std::io::{self, BufWriter, Write};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread;

use super::{Image, ImageError, Mismatch};
use crate::Run;
use crate::migration::{PrecopyError, Recording, begin_pages, end_pages, write_pages};

/// Chunks of RAM that a reader holds ready, besides the one that it is at.
const AHEAD: usize = 1;

/// Small pieces (chunks of zeros, what stands around RAM) go out together; a chunk of data is larger and goes as it is.
const BUFFER_BYTES: usize = 256 << 10;

/// A chunk: block in the image, block in the stream, number in its block.
pub(super) type Place = (usize, usize, usize);

impl Image {
    /// Writes the stream of a normal migration: the devices, and every page, zeros too, of the blocks that are not in
    /// `except`. Blocking, with as many reading threads as `run` says; the calling thread writes.
    ///
    /// # Errors
    ///
    /// [`PrecopyError::Page`] with what is wrong with the image, or [`ImageError::Cancelled`];
    /// [`PrecopyError::Output`] for what `out` says. The stream then ends in the middle, which a loading QEMU takes as
    /// a failure.
    pub fn write_precopy(
        &self,
        except: &[&str],
        run: &Run<'_>,
        out: impl Write,
    ) -> Result<(), PrecopyError<ImageError>> {
        let recording = self.device_state().map_err(PrecopyError::Page)?;
        let places = places(self, &recording, except).map_err(PrecopyError::Page)?;
        let mut out = BufWriter::with_capacity(BUFFER_BYTES, out);
        let written = write_stream(self, &recording, &places, run, &mut out);
        if written.is_err() {
            // What waits in the buffer would only be more of a stream that is given up.
            let _ = out.into_parts();
        }
        written
    }
}

fn write_stream(
    image: &Image,
    recording: &Recording,
    places: &[Place],
    run: &Run<'_>,
    out: &mut impl Write,
) -> Result<(), PrecopyError<ImageError>> {
    begin_pages(recording, out)?;
    if !places.is_empty() {
        write_chunks(image, recording, places, run, out)?;
    }
    end_pages(recording, out)?;
    Ok(out.flush()?)
}

/// All chunks of the blocks that are not in `except`, in order.
pub(super) fn places(
    image: &Image,
    recording: &Recording,
    except: &[&str],
) -> Result<Vec<Place>, ImageError> {
    let mut places = Vec::new();
    let blocks = image.layout().blocks().iter().zip(image.chunk_counts());
    for (index, (placement, count)) in blocks.enumerate() {
        if except.contains(&placement.name.as_str()) {
            continue;
        }
        let in_stream = recording
            .blocks()
            .iter()
            .position(|block| block.name == placement.name)
            .ok_or_else(|| ImageError::Mismatch {
                block: placement.name.clone(),
                mismatch: Mismatch::NotRecorded,
            })?;
        places.extend((0..count).map(|chunk| (index, in_stream, chunk)));
    }
    Ok(places)
}

/// A chunk as it goes over the wire, and how much RAM that is.
type Piece = Result<(Vec<u8>, u64), PrecopyError<ImageError>>;

/// The writer's side of one reader: pieces to come, and buffers to go back.
struct Reader {
    pieces: Receiver<Piece>,
    empty: Sender<Vec<u8>>,
}

fn write_chunks(
    image: &Image,
    recording: &Recording,
    places: &[Place],
    run: &Run<'_>,
    out: &mut impl Write,
) -> Result<(), PrecopyError<ImageError>> {
    let threads = run.threads.clamp(1, places.len());
    thread::scope(|scope| {
        let readers: Vec<Reader> = (0..threads)
            .map(|first| {
                let (pieces_in, pieces) = sync_channel(AHEAD);
                let (empty, empty_out) = channel();
                let mine = places.iter().skip(first).step_by(threads);
                scope.spawn(move || read_chunks(image, recording, mine, run, &pieces_in, &empty_out));
                Reader { pieces, empty }
            })
            .collect();
        // However this ends, the channels go with `readers`, and a reader that nobody listens to ends.
        for reader in readers.iter().cycle().take(places.len()) {
            let (bytes, ram_bytes) = reader
                .pieces
                .recv()
                .map_err(|_| io::Error::other("a reader of the image ended"))??;
            if run.is_cancelled() {
                return Err(PrecopyError::Page(ImageError::Cancelled));
            }
            out.write_all(&bytes)?;
            run.progress.advance(ram_bytes);
            // The reader may be done.
            let _ = reader.empty.send(bytes);
        }
        Ok(())
    })
}

fn read_chunks<'p>(
    image: &Image,
    recording: &Recording,
    mine: impl Iterator<Item = &'p Place>,
    run: &Run<'_>,
    pieces: &SyncSender<Piece>,
    empty: &Receiver<Vec<u8>>,
) {
    let mut unpacker = image.unpacker();
    for &(block, in_stream, chunk) in mine {
        let mut piece = empty.try_recv().unwrap_or_default();
        piece.clear();
        let length = image.chunk(block, chunk).1.length;
        let read = if run.is_cancelled() {
            Err(ImageError::Cancelled)
        } else {
            image.read_chunk(block, chunk, &mut unpacker)
        };
        let made = read.map_err(PrecopyError::Page).and_then(|(bytes, start)| {
            write_pages(recording, in_stream, start, (bytes, length as usize), &mut piece)?;
            Ok((piece, u64::from(length)))
        });
        let failed = made.is_err();
        if pieces.send(made).is_err() || failed {
            return;
        }
    }
}
