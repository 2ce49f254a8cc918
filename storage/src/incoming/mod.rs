//! A guest's memory as it comes over sockets: a migration whose pages go straight into the chunks of
//! an image.
//!
//! ```text
//!  QEMU ── main stream ──► main_stream ──┐ pages       chunks
//!       ── channel 0 ────► channel ──────┼──► assembly ──────► ChunkSink (the image)
//!       ── channel 1 ────► channel ──────┘
//! ```
//!
//! Each connection has a thread, which receives, completes chunks, and hands them to the sink itself:
//! while one waits for QEMU another sums and writes. A connection says by its first four bytes what it
//! is. Without channels all pages come in the main stream.
//!
//! What is guaranteed:
//!
//! * Data pages are read from their sockets right to their places (those of the main stream through
//!   its buffer), and memory is bounded: see [`assembly`].
//! * All pages of all blocks came, each once, or there is an error. A guest that runs while it is
//!   saved sends pages twice, and is refused; a save that means to let it run has a way of its own
//!   ([`live`], `image/live.rs`).
//! * Nothing that comes from a connection panics, or is taken for a length before it was looked at.
//! * When one thread fails, or the work is cancelled, all end within 100 ms, also when QEMU says
//!   nothing. The error is that of the thread that failed first.
//!
//! # How fast
//!
//! 1 to 1.5 GiB of random RAM, QEMU 10.0, two channels, two CPUs, against threads that only read the
//! same sockets, in interleaved rounds: with chunks thrown away 2.3 to 3.9 GB/s against 2.1 to 3.9 (as
//! fast, for the kernel's copies are nearly all of it) at 0.13 CPU-seconds per GiB against 0.11; with
//! CRC-32 no slower at 0.16. Four channels are faster on an idle machine (5.2 GB/s) and not on a busy
//! one. So the disk is the limit, and two channels are enough.
//!
//! Tried and not kept: reading each payload with `MSG_WAITALL` (1.12 of a reader that only reads,
//! 1.15 without, medians of seven). A receive buffer does not count for unix sockets. QEMU's send
//! buffer can only be set where we made its end of a pair: 1 MiB gave 0.9 to 2.4 of the default's
//! pace in five rounds, 4 MiB 0.3 to 1.1.
//!
//! # The end
//!
//! The end of a connection is the end of what it has to say: QEMU closes all of them when the
//! migration is over. What tells a migration that was cut is that something is missing.

mod assembly;
mod channel;
mod connection;
mod ending;
mod error;
mod live;
mod main_stream;
mod page_set;
mod sink;
#[cfg(test)]
mod tests;

use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::sync::PoisonError;
use std::thread;

pub use error::IncomingError;
pub(crate) use live::receive_live;
pub(crate) use sink::ChunkSink;

use crate::image::{ImageError, Layout};
use crate::migration::{MULTIFD_MAGIC, MultifdError, Recording, STREAM_MAGIC};
use crate::{ByteCount, Run};
use assembly::{Assembly, Feeder};
use connection::Connection;
use ending::Ending;

/// The main connection and all channels that QEMU can be told to use.
const CONNECTIONS_LIMIT: usize = 256;

/// A migration that is coming in: its main connection and, with multifd, its channels.
#[derive(Debug)]
pub struct Incoming {
    connections: Vec<UnixStream>,
}

impl Incoming {
    /// A migration over these connections, in any order: each says itself what it is.
    ///
    /// # Errors
    ///
    /// [`IncomingError::Connections`] if there are none or too many.
    pub fn of(connections: Vec<UnixStream>) -> Result<Self, IncomingError> {
        match connections.len() {
            1..=CONNECTIONS_LIMIT => Ok(Self { connections }),
            found => Err(IncomingError::Connections {
                found,
                limit: CONNECTIONS_LIMIT,
            }),
        }
    }

    /// Receives the guest with this layout to its end, on a thread for each connection; see the
    /// [module](self). What follows RAM in the main stream must not be longer than `tail_bound`.
    pub(crate) fn receive<S: ChunkSink>(
        self,
        layout: &Layout,
        tail_bound: ByteCount,
        sink: &S,
        run: &Run<'_>,
    ) -> Result<Recording, ImageError> {
        let ending = Ending::by(run.cancelled);
        let received = {
            let assembly = Assembly::of(layout, sink, run.progress, &ending, self.connections.len());
            let parts = Parts {
                tail_bound,
                assembly: &assembly,
                ending: &ending,
                known: Mutex::new(Known::of(self.connections.len())),
            };
            let parts = &parts;
            thread::scope(|scope| {
                for (index, socket) in self.connections.into_iter().enumerate() {
                    let name = format!("incoming-{index}");
                    let work = move || parts.connection(index, socket);
                    if let Err(error) = thread::Builder::new().name(name).spawn_scoped(scope, work) {
                        parts.ending.fail(IncomingError::from(error).into());
                        break;
                    }
                }
            });
            let recording = parts.lock().recording.take();
            assembly.check_whole().map(|()| recording)
        };
        ending.result()?;
        // All threads ended well, so one of them was the main stream's.
        received?.ok_or_else(|| IncomingError::MainStreams { found: 0 }.into())
    }
}

/// What the threads have in common.
struct Parts<'a, S: ChunkSink> {
    tail_bound: ByteCount,
    assembly: &'a Assembly<'a, S>,
    ending: &'a Ending<'a>,
    known: Mutex<Known>,
}

/// What is known of the connections.
struct Known {
    /// Connections that did not say yet what they are.
    silent: usize,
    main_streams: usize,
    channels: [bool; 256],
    recording: Option<Recording>,
}

impl Known {
    fn of(connections: usize) -> Self {
        Self {
            silent: connections,
            main_streams: 0,
            channels: [false; 256],
            recording: None,
        }
    }
}

impl<S: ChunkSink> Parts<'_, S> {
    /// The whole life of a connection.
    fn connection(&self, index: usize, socket: UnixStream) {
        let _guard = self.ending.even_if_it_panics();
        if let Err(error) = self.receive(index, socket) {
            self.ending.fail(error);
        }
        self.assembly.no_channel(index);
    }

    fn receive(&self, index: usize, socket: UnixStream) -> Result<(), ImageError> {
        let mut connection = Connection::of(socket, self.ending).map_err(channel::socket)?;
        let mut begun = [0; 4];
        let bytes = connection.fill(&mut begun).map_err(channel::socket)?;
        if bytes < begun.len() {
            return Err(IncomingError::Nothing { bytes }.into());
        }
        match u32::from_be_bytes(begun) {
            STREAM_MAGIC => {
                self.assembly.no_channel(index);
                self.introduced(true)?;
                let feeder = Feeder::of(self.assembly, None);
                let recording = main_stream::receive(begun, connection, self.tail_bound, feeder)?;
                self.lock().recording = Some(recording);
                Ok(())
            }
            MULTIFD_MAGIC => {
                self.introduced(false)?;
                let number = channel::opening(begun, &mut connection)?;
                if std::mem::replace(&mut self.lock().channels[usize::from(number)], true) {
                    return Err(channel::multifd(MultifdError::Twice { channel: number }));
                }
                let mut feeder = Feeder::of(self.assembly, Some(index));
                channel::packets(&mut connection, &mut feeder)?;
                feeder.finish()
            }
            _ => Err(IncomingError::NotAMigration { found: begun }.into()),
        }
    }

    /// A connection said what it is. When all have, one must be the main stream's; without it the
    /// channels would wait for ever to hear of the RAM blocks.
    fn introduced(&self, main_stream: bool) -> Result<(), ImageError> {
        let mut known = self.lock();
        known.silent -= 1;
        known.main_streams += usize::from(main_stream);
        let found = known.main_streams;
        if found > 1 || (known.silent == 0 && found == 0) {
            return Err(IncomingError::MainStreams { found }.into());
        }
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
