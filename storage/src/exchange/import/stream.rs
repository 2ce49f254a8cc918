//! A migration stream, read front to back through whatever compresses it.

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom};
use std::path::Path;

use super::staging::Staging;
use super::{DEVICE_STATE_LIMIT, ImportError, StreamCompression, stream_error};
use crate::migration::{PAGE_BYTES, PageSink, ReceiveError, Recording, StreamBlock, receive};
use crate::{BlockSize, ImageError, Run};

const BUFFER_BYTES: usize = 256 << 10;

/// The longest name of a machine type.
const MACHINE_NAME_LIMIT: u32 = 255;

/// A stream in a file.
pub(super) struct Input<'a> {
    pub(super) path: &'a Path,
    pub(super) file: &'a File,
    pub(super) start: u64,
    pub(super) compression: StreamCompression,
}

impl<'a> Input<'a> {
    fn reader(&self) -> Result<Box<dyn Read + 'a>, ImportError> {
        let mut file = self.file;
        let opened = file.seek(SeekFrom::Start(self.start)).and_then(|_| {
            self.compression
                .reader(BufReader::with_capacity(BUFFER_BYTES, file))
        });
        opened.map_err(|error| self.failed(error))
    }

    /// A decompressor tells damage as an error of reading.
    fn failed(&self, source: io::Error) -> ImportError {
        let by_system = source.raw_os_error().is_some();
        if self.compression == StreamCompression::None || by_system {
            return ImageError::io("read", self.path, source).into();
        }
        ImportError::Compressed {
            path: self.path.to_owned(),
            compression: self.compression,
            source,
        }
    }
}

/// The machine type and the RAM blocks: what stands before the first page.
pub(super) fn look(input: &Input<'_>) -> Result<(String, Vec<BlockSize>), ImportError> {
    let mut head = [0; 4 + 4 + 1 + 4];
    let mut reader = input.reader()?;
    let mut machine = Vec::new();
    reader
        .read_exact(&mut head)
        .and_then(|()| {
            let length = u32::from_be_bytes([head[9], head[10], head[11], head[12]]);
            let limit = length.min(MACHINE_NAME_LIMIT);
            reader.by_ref().take(limit.into()).read_to_end(&mut machine)
        })
        .map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof if input.compression == StreamCompression::None => {
                ImportError::Unknown {
                    path: input.path.to_owned(),
                }
            }
            _ => input.failed(error),
        })?;
    drop(reader);
    let mut beginning = Beginning;
    match receive(input.reader()?, DEVICE_STATE_LIMIT, &mut beginning) {
        Err(ReceiveError::Sink(blocks)) => Ok((String::from_utf8_lossy(&machine).into_owned(), blocks)),
        Err(ReceiveError::Stream(error)) => Err(stream_error(input.path, error)),
        Err(ReceiveError::Io(error)) => Err(input.failed(error)),
        // A stream without blocks is refused before this.
        Ok(_) => Err(ImportError::Unknown {
            path: input.path.to_owned(),
        }),
    }
}

/// Ends the reading as soon as the blocks are told.
struct Beginning;

impl PageSink for Beginning {
    type Error = Vec<BlockSize>;

    fn blocks(&mut self, blocks: &[StreamBlock]) -> Result<(), Self::Error> {
        Err(blocks
            .iter()
            .map(|block| super::size(&block.name, block.used_length.0))
            .collect())
    }

    fn zero(&mut self, _: usize, _: u64) -> Result<(), Self::Error> {
        Ok(())
    }

    fn data(
        &mut self,
        _: usize,
        _: u64,
        fill: impl FnOnce(&mut [u8; PAGE_BYTES]) -> Result<(), ReceiveError<Self::Error>>,
    ) -> Result<(), ReceiveError<Self::Error>> {
        fill(&mut [0; PAGE_BYTES])
    }
}

/// Reads all of the stream. Every page of every block has to come, once at least.
pub(super) fn stage(
    input: &Input<'_>,
    staging: &mut Staging,
    run: &Run<'_>,
) -> Result<Recording, ImportError> {
    let mut reader = input.reader()?;
    let mut sink = Sink { staging, run };
    let recording = receive(&mut reader, DEVICE_STATE_LIMIT, &mut sink).map_err(|error| match error {
        ReceiveError::Sink(error) => error.into(),
        ReceiveError::Stream(error) => stream_error(input.path, error),
        ReceiveError::Io(error) => input.failed(error),
    })?;
    sink.staging.flush()?;
    for (index, block) in recording.blocks().iter().enumerate() {
        let needed = block.used_length.0 / PAGE_BYTES as u64;
        let found = staging.pages_of(index);
        if found != needed {
            return Err(ImportError::PagesMissing {
                block: block.name.clone(),
                found,
                needed,
            });
        }
    }
    Ok(recording)
}

struct Sink<'a> {
    staging: &'a mut Staging,
    run: &'a Run<'a>,
}

impl PageSink for Sink<'_> {
    type Error = ImageError;

    fn blocks(&mut self, blocks: &[StreamBlock]) -> Result<(), ImageError> {
        let staged = self.staging.blocks().iter();
        let told = blocks
            .iter()
            .map(|block| (block.name.as_str(), block.used_length));
        // They were read before, so only a file that changes meanwhile differs.
        if !staged.map(|block| (block.name.as_str(), block.length)).eq(told) {
            return Err(ImageError::Io {
                operation: "read twice",
                path: std::path::PathBuf::from("the file to be imported"),
                source: io::Error::other("it changed meanwhile"),
            });
        }
        Ok(())
    }

    fn zero(&mut self, block: usize, offset: u64) -> Result<(), ImageError> {
        self.taken()?;
        self.staging.put(block, offset, None)
    }

    fn data(
        &mut self,
        block: usize,
        offset: u64,
        fill: impl FnOnce(&mut [u8; PAGE_BYTES]) -> Result<(), ReceiveError<ImageError>>,
    ) -> Result<(), ReceiveError<ImageError>> {
        self.taken().map_err(ReceiveError::Sink)?;
        let mut page = [0; PAGE_BYTES];
        fill(&mut page)?;
        self.staging
            .put(block, offset, Some(&page))
            .map_err(ReceiveError::Sink)
    }
}

impl Sink<'_> {
    fn taken(&self) -> Result<(), ImageError> {
        if self.run.is_cancelled() {
            return Err(ImageError::Cancelled);
        }
        self.run.progress.advance(PAGE_BYTES as u64);
        Ok(())
    }
}
