//! Writing an image.
//!
//! ```text
//! create ──► reserve ──┬► write_memory (each big block) ──► write_pages (the rest) ─┬► seal ──► SealedImage
//!    │          │        └► write_incoming (all of it) ──────────────────────────────┤
//!    └──────────┴────────────────────────────────────────────────────────────────────┴── dropped, failed or cancelled: nothing stays
//! ```
//!
//! Every block of the layout must have been written when the image is sealed, each once, each
//! whole. RAM on huge pages goes to the disk from where the guest has it: a chunk is scanned, summed and written
//! with O_DIRECT out of the mapping. A chunk on small pages, or that is a mixture of data and holes, or is compressed or
//! encrypted, goes through a buffer.

use std::io;
use std::ops::AddAssign;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use uuid::Uuid;

use super::chunk_writer::{ChunkWriter, Worker};
use super::chunks::{CHUNK_BYTES, Chunk, ChunkContent, ChunkTable, chunk_count, chunk_length};
use super::cipher::Cipher;
use super::codec::Codec;
use super::compression::Compression;
use super::key::ImageKey;
use super::live::{Chunks, LATER_LIMIT, Later, Live, amend};
use super::manifest::{MANIFEST_LIMIT, Manifest};
use super::received::Received;
use super::sealed::{CompleteImage, SealedImage, write_tables};
use super::workers::for_each_chunk;
use super::{ImageError, Layout, Mismatch};
use crate::incoming::{Incoming, receive_live};
use crate::migration::{PageContent, Recording};
use crate::rate_limit::RateLimit;
use crate::volume::{Backend, Volume, VolumeKind};
use crate::{ByteCount, GuestMemory, Run};

/// How an image is begun.
#[derive(Debug, Clone)]
pub struct CreateOptions {
    /// Whether a used image at the target may be replaced. A file that is not an image, an image that
    /// holds a guest, and what is in use never are; a block device is overwritten whatever else is on
    /// it, and from the beginning on.
    pub replace: bool,
    /// Id of the new image.
    pub image_id: Uuid,
    /// How RAM is to get to the disk, if that is possible; else the best that is.
    pub backend: Option<Backend>,
    /// Whether RAM is compressed.
    pub compression: Compression,
    /// The key that RAM and device state are encrypted with, if they are.
    pub key: Option<ImageKey>,
    /// The most that is written in a second.
    pub rate_limit: Option<ByteCount>,
}

impl Default for CreateOptions {
    /// A new image in a free place, as fast as it goes, neither compressed nor encrypted.
    fn default() -> Self {
        Self {
            replace: false,
            image_id: Uuid::new_v4(),
            backend: None,
            compression: Compression::None,
            key: None,
            rate_limit: None,
        }
    }
}

/// What a block turned out to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryWritten {
    /// Bytes that held something.
    pub data: ByteCount,
    /// What was written for them: less, if it was compressed.
    pub stored: ByteCount,
    /// Bytes that were zero, holes included, and were not.
    pub zero: ByteCount,
}

impl AddAssign for MemoryWritten {
    fn add_assign(&mut self, other: Self) {
        self.data += other.data;
        self.stored += other.stored;
        self.zero += other.zero;
    }
}

/// An image that is being written.
///
/// Dropped without [`ImageWriter::seal`] it leaves nothing behind.
#[derive(Debug)]
pub struct ImageWriter {
    volume: Volume,
    layout: Layout,
    image_id: Uuid,
    codec: Codec,
    rate_limit: Option<RateLimit>,
    /// Blocks of the layout that were begun. One that failed in the middle is not begun again: what
    /// it wrote could lie where the second attempt finds zeros.
    begun: Vec<bool>,
    /// Chunks of each block of the layout that was written.
    chunks: Vec<Option<Vec<Chunk>>>,
    /// What a guest that ran wrote to since, and is still to be laid over them.
    later: Later,
    /// Most that the image may need, as far as it is known: for the message when there is no room.
    bound: ByteCount,
}

impl ImageWriter {
    /// Begins an image that will be at `target`: in a hidden file beside it, or on the block device
    /// that it leads to.
    ///
    /// # Errors
    ///
    /// [`ImageError::TargetExists`], [`ImageError::HoldsGuest`], [`ImageError::NotAnImage`] and
    /// [`ImageError::NewerFormat`] if what is there must stay, [`ImageError::Locked`] and
    /// [`ImageError::DeviceInUse`] if somebody has it, [`ImageError::ReadOnly`] and
    /// [`ImageError::SectorSize`] for a device that cannot hold an image, [`ImageError::Io`] if the
    /// system refuses, or has no random numbers to encrypt with.
    pub fn create(target: &Path, layout: Layout, options: CreateOptions) -> Result<Self, ImageError> {
        let cipher = match &options.key {
            None => None,
            Some(key) => Some(Cipher::new(key).ok_or_else(|| {
                ImageError::io(
                    "find random numbers for",
                    target,
                    io::Error::other("the system has none"),
                )
            })?),
        };
        let volume = Volume::create(target, options.replace, options.image_id, options.backend)?;
        let bound = layout.hard_bound(ByteCount::ZERO);
        volume
            .expect_length(layout.ram_end())
            .map_err(|source| volume.failed("size", bound, source))?;
        let begun = vec![false; layout.blocks().len()];
        let chunks = vec![None; layout.blocks().len()];
        Ok(Self {
            volume,
            layout,
            image_id: options.image_id,
            codec: Codec::new(options.compression, cipher),
            rate_limit: options
                .rate_limit
                .map(|limit| RateLimit::new(limit, Instant::now())),
            begun,
            chunks,
            later: Later::default(),
            bound,
        })
    }

    /// Reserves all that the image can need, if its device state is not longer than
    /// `device_state_bound`, so that a guest is not stopped for an image that has no room.
    /// [`SealedImage::give_back`] returns what was too much.
    ///
    /// On a file system that cannot reserve, free space is looked at instead.
    ///
    /// # Errors
    ///
    /// [`ImageError::NoSpace`] with the numbers, [`ImageError::Io`] if the system refuses.
    pub fn reserve(&mut self, device_state_bound: ByteCount) -> Result<(), ImageError> {
        self.bound = self.layout.hard_bound(device_state_bound);
        self.volume.reserve(self.bound)
    }

    /// How RAM gets to the disk.
    pub fn backend(&self) -> Backend {
        self.volume.backend()
    }

    /// What the image is on.
    pub fn kind(&self) -> VolumeKind {
        self.volume.kind()
    }

    /// Writes the RAM of `block`: blocking, with as many threads as `run` says.
    ///
    /// # Errors
    ///
    /// [`ImageError::Mismatch`] if the layout has no such block, one of another length, or its writing
    /// was begun before, even if that failed; [`ImageError::Cancelled`]; [`ImageError::NoSpace`] and [`ImageError::Io`]
    /// from the disk.
    pub fn write_memory(
        &mut self,
        block: &str,
        memory: &GuestMemory,
        run: &Run<'_>,
    ) -> Result<MemoryWritten, ImageError> {
        let index = self.block_to_write(block, memory.length())?;
        let extents = memory.data_extents()?;
        let count = chunk_count(memory.length(), CHUNK_BYTES) as usize;
        let chunks = self.chunk_writer(run.cancelled);
        let write = |worker: &mut Worker, chunk: usize| {
            let chunk = chunks.write_from(worker, (index, chunk as u64), memory, &extents)?;
            run.progress.advance(chunk.length.into());
            Ok(chunk)
        };
        let end = |worker| chunks.finish(worker);
        let chunks = for_each_chunk(run, count, || chunks.worker(), write, end)?;
        let written = written(&chunks);
        self.chunks[index] = Some(chunks);
        Ok(written)
    }

    /// Writes every block that [`ImageWriter::write_memory`] did not, from the pages that came in
    /// the stream: ROMs, tables, video RAM.
    ///
    /// # Errors
    ///
    /// [`ImageError::Mismatch`] if the recording lacks such a block or some of its pages, or has it
    /// in another length; [`ImageError::Cancelled`]; [`ImageError::NoSpace`] and [`ImageError::Io`] from the
    /// disk.
    pub fn write_pages(&mut self, recording: &Recording, run: &Run<'_>) -> Result<(), ImageError> {
        let missing: Vec<String> = (self.layout.blocks().iter().zip(&self.chunks))
            .filter(|(_, chunks)| chunks.is_none())
            .map(|(block, _)| block.name.clone())
            .collect();
        for name in missing {
            let mismatch = |mismatch| ImageError::Mismatch {
                block: name.clone(),
                mismatch,
            };
            let in_stream = recording.blocks().iter().position(|block| block.name == name);
            let in_stream = in_stream.ok_or_else(|| mismatch(Mismatch::NotRecorded))?;
            let index = self.block_to_write(&name, recording.blocks()[in_stream].used_length)?;
            // A stopped guest's stream holds each page of a block that it holds at all. Taking a
            // missing page for zero would wake a guest without a part of its memory.
            let needed = self.layout.blocks()[index].length.0 / crate::migration::PAGE_BYTES as u64;
            let found = recording.page_count(in_stream);
            if found != needed {
                return Err(mismatch(Mismatch::PagesMissing { found, needed }));
            }
            self.chunks[index] = Some(self.write_block_pages(index, recording, in_stream, run)?);
        }
        Ok(())
    }

    /// Writes all RAM of a guest from a migration, as it comes, to its end. What follows RAM in the migration must
    /// not be longer than `tail_bound`. One thread works for each connection, whatever `run` says.
    ///
    /// # Errors
    ///
    /// [`ImageError::Mismatch`] if a block was written before or is not all there; [`ImageError::Incoming`] with
    /// what is wrong with the migration; [`ImageError::Cancelled`], within 100 ms even if nothing
    /// comes; [`ImageError::NoSpace`] and [`ImageError::Io`] from the disk.
    pub fn write_incoming(
        &mut self,
        incoming: Incoming,
        tail_bound: ByteCount,
        run: &Run<'_>,
    ) -> Result<(Recording, MemoryWritten), ImageError> {
        for block in self.layout.blocks().to_vec() {
            self.block_to_write(&block.name, block.length)?;
        }
        let received = Received::by(self.chunk_writer(run.cancelled));
        let recording = incoming.receive(&self.layout, tail_bound, &received, run)?;
        let chunks = received.into_chunks();
        let mut all = MemoryWritten::default();
        for of_block in chunks.iter().flatten() {
            all += written(of_block);
        }
        self.chunks = chunks;
        Ok((recording, all))
    }

    /// Writes all RAM of a guest that runs from a migration over one plain stream, to its end: of pages that come more than
    /// once the last counts. Some of those are kept in memory (at most 256 MiB) until [`ImageWriter::complete`]: when this
    /// returns, the guest is not needed any more.
    ///
    /// # Errors
    ///
    /// As those of [`ImageWriter::write_incoming`].
    pub fn write_live(
        &mut self,
        stream: UnixStream,
        tail_bound: ByteCount,
        run: &Run<'_>,
    ) -> Result<Recording, ImageError> {
        self.write_live_with_limit(stream, tail_bound, run, LATER_LIMIT)
    }

    pub(super) fn write_live_with_limit(
        &mut self,
        stream: UnixStream,
        tail_bound: ByteCount,
        run: &Run<'_>,
        later_limit: usize,
    ) -> Result<Recording, ImageError> {
        for block in self.layout.blocks().to_vec() {
            self.block_to_write(&block.name, block.length)?;
        }
        let mut live = Live::by(self.chunk_writer(run.cancelled), run.progress, later_limit);
        let recording = receive_live(stream, tail_bound, &mut live, run.cancelled)?;
        let (chunks, later) = live.finish()?;
        self.chunks = chunks
            .into_iter()
            .map(|of_block| of_block.into_iter().collect())
            .collect();
        self.later = later;
        Ok(recording)
    }

    /// Makes the image whole and gives it its name, in this order: chunk table, device state,
    /// manifest; data sync; the sealed superblock; sync; rename; sync of the folder. After `Ok` the
    /// image is the guest.
    ///
    /// # Errors
    ///
    /// [`ImageError::Mismatch`] if a block was not written or the recording has other blocks;
    /// [`ImageError::ManifestTooLong`]; [`ImageError::TargetExists`] if somebody took the name
    /// meanwhile; [`ImageError::NoSpace`] and [`ImageError::Io`] from the disk. On any error there
    /// is no image.
    pub fn seal(self, manifest: &Manifest, recording: &Recording) -> Result<SealedImage, ImageError> {
        self.complete(manifest, recording)?.seal()
    }

    /// The part of [`ImageWriter::seal`] that takes time: writes chunk table, device state and manifest, and brings
    /// everything to the disk. Nobody finds the image yet; dropped, the result leaves nothing behind, as the
    /// writer does.
    ///
    /// # Errors
    ///
    /// As those of [`ImageWriter::seal`].
    pub fn complete(
        mut self,
        manifest: &Manifest,
        recording: &Recording,
    ) -> Result<CompleteImage, ImageError> {
        self.check_whole(recording)?;
        let manifest = serde_json::to_vec(manifest)
            .map_err(|source| ImageError::io("describe", self.volume.path(), io::Error::other(source)))?;
        let length = ByteCount(manifest.len() as u64);
        if length > MANIFEST_LIMIT {
            return Err(ImageError::ManifestTooLong {
                length,
                limit: MANIFEST_LIMIT,
            });
        }
        self.amend_with_later()?;
        let chunks = std::mem::take(&mut self.chunks).into_iter().flatten().collect();
        let table = ChunkTable {
            layout: self.layout.clone(),
            chunks,
            encrypted: self.codec.cipher().is_some(),
        };
        let sealed = write_tables(
            &self.volume,
            self.image_id,
            &table,
            recording.normalized(),
            &manifest,
            self.codec.cipher(),
        )
        .map_err(|source| self.failed("complete", source))?;
        Ok(CompleteImage {
            volume: self.volume,
            bound: self.bound,
            table,
            superblock: sealed,
        })
    }

    /// Lays what came later over what was written.
    fn amend_with_later(&mut self) -> Result<(), ImageError> {
        let later = std::mem::take(&mut self.later);
        if later.is_empty() {
            return Ok(());
        }
        let mut chunks: Chunks = std::mem::take(&mut self.chunks)
            .into_iter()
            .map(|of_block| of_block.into_iter().flatten().map(Some).collect())
            .collect();
        let never = AtomicBool::new(false);
        let writer = self.chunk_writer(&never);
        let mut worker = writer.worker();
        amend(&writer, &mut worker, later, &mut chunks)?;
        writer.finish(worker)?;
        self.chunks = chunks
            .into_iter()
            .map(|of_block| of_block.into_iter().collect())
            .collect();
        Ok(())
    }

    fn block_to_write(&mut self, name: &str, found: ByteCount) -> Result<usize, ImageError> {
        let mismatch = |mismatch| ImageError::Mismatch {
            block: name.to_owned(),
            mismatch,
        };
        let index = self
            .layout
            .index_of(name)
            .ok_or_else(|| mismatch(Mismatch::Unknown))?;
        let planned = self.layout.blocks()[index].length;
        if planned != found {
            return Err(mismatch(Mismatch::Length { planned, found }));
        }
        if std::mem::replace(&mut self.begun[index], true) {
            return Err(mismatch(Mismatch::Twice));
        }
        Ok(index)
    }

    fn write_block_pages(
        &self,
        block: usize,
        recording: &Recording,
        in_stream: usize,
        run: &Run<'_>,
    ) -> Result<Vec<Chunk>, ImageError> {
        let length = self.layout.blocks()[block].length;
        let writer = self.chunk_writer(run.cancelled);
        let mut worker = writer.worker();
        let mut pages = recording.block_pages(in_stream).peekable();
        let mut chunks = Vec::new();
        for index in 0..chunk_count(length, CHUNK_BYTES) {
            if run.is_cancelled() {
                return Err(ImageError::Cancelled);
            }
            let start = index * u64::from(CHUNK_BYTES);
            let end = start + u64::from(chunk_length(length.0, CHUNK_BYTES, index));
            let mut buffer = worker.buffer();
            buffer.fill(0);
            while let Some(page) = pages.next_if(|page| page.offset < end) {
                if let PageContent::Data(bytes) = page.content {
                    let at = (page.offset - start) as usize;
                    buffer[at..at + bytes.len()].copy_from_slice(&bytes[..]);
                }
            }
            chunks.push(writer.write(&mut worker, (block, index), buffer)?);
        }
        writer.finish(worker)?;
        Ok(chunks)
    }

    fn chunk_writer<'a>(&'a self, cancelled: &'a AtomicBool) -> ChunkWriter<'a> {
        ChunkWriter {
            volume: &self.volume,
            layout: &self.layout,
            codec: &self.codec,
            rate_limit: self.rate_limit.as_ref(),
            bound: self.bound,
            cancelled,
        }
    }

    /// Whether every block was written and the recording has the same blocks.
    fn check_whole(&self, recording: &Recording) -> Result<(), ImageError> {
        let mismatch = |name: &str, mismatch| {
            Err(ImageError::Mismatch {
                block: name.to_owned(),
                mismatch,
            })
        };
        for (placement, chunks) in self.layout.blocks().iter().zip(&self.chunks) {
            if chunks.is_none() {
                return mismatch(&placement.name, Mismatch::Missing);
            }
            if !recording
                .blocks()
                .iter()
                .any(|block| block.name == placement.name)
            {
                return mismatch(&placement.name, Mismatch::NotRecorded);
            }
        }
        for block in recording.blocks() {
            match self.layout.block(&block.name) {
                None => return mismatch(&block.name, Mismatch::Unknown),
                Some(placement) if placement.length != block.used_length => {
                    let mismatched = Mismatch::Length {
                        planned: placement.length,
                        found: block.used_length,
                    };
                    return mismatch(&block.name, mismatched);
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    fn failed(&self, operation: &'static str, source: io::Error) -> ImageError {
        self.volume.failed(operation, self.bound, source)
    }
}

pub(super) fn written(chunks: &[Chunk]) -> MemoryWritten {
    let mut written = MemoryWritten::default();
    for chunk in chunks {
        let length = ByteCount(chunk.length.into());
        match chunk.content {
            ChunkContent::Zero => written.zero += length,
            ChunkContent::Stored(stored) => {
                written.data += length;
                written.stored += ByteCount(stored.length.into());
            }
        }
    }
    written
}
