//! From files of other tools to an image.
//!
//! ```text
//!  Source::open ── recognizes by content, reads what stands before RAM: machine, RAM blocks, libvirt's XML
//!       │
//!  Source::stage ── begins the image; reads all of the file: RAM into files without a name beside the target, the
//!       │           rest into a Recording
//!  Staged::write ── through ImageWriter, like any image
//! ```
//!
//! RAM is staged because the page that counts can come last: a stream that was saved while the guest
//! ran sends pages again and again. Staging takes the space of the RAM that is not zero, beside the
//! image's own, until the image is sealed.
//!
//! None of these formats has a checksum of its own over RAM. What can be checked is: structure,
//! lengths, the checksums of a compressed container, that every page came, that the stream has its
//! end.

mod compression;
mod domain;
mod libvirt;
mod mapped_ram;
mod staging;
mod stream;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

pub use compression::StreamCompression;
pub use domain::{Domain, DomainDisk};
pub use libvirt::LibvirtHeader;

use self::staging::Staging;
use super::new_file::free_in;
use crate::image::manifest::{GuestState, Manifest};
use crate::migration::{MappedFile, ReadError, Recording, StreamError};
use crate::volume::{folder_of, is_block_device};
use crate::{
    BlockSize, ByteCount, CreateOptions, ImageError, ImageWriter, Layout, MemoryWritten, Run, SealedImage,
};

/// The longest device state that is taken from a file.
const DEVICE_STATE_LIMIT: ByteCount = ByteCount::gib(1);

/// The most that is reserved for the device state of a stream, which shows its length at its end only.
const DEVICE_STATE_RESERVE: ByteCount = ByteCount::mib(64);

/// A file whose memory can become an image.
#[derive(Debug)]
pub struct Source {
    path: PathBuf,
    file: File,
    modified: SystemTime,
    libvirt: Option<LibvirtHeader>,
    /// Where the stream begins in the file.
    start: u64,
    form: Form,
    machine: String,
    blocks: Vec<BlockSize>,
}

#[derive(Debug)]
enum Form {
    Stream(StreamCompression),
    MappedRam(MappedFile),
}

/// Memory on its way into an image.
#[derive(Debug)]
pub struct Staged {
    writer: ImageWriter,
    staging: Staging,
    recording: Recording,
}

/// What became of an import.
#[derive(Debug)]
pub struct Imported {
    /// The image.
    pub sealed: SealedImage,
    /// Its RAM.
    pub written: MemoryWritten,
}

/// Why a file could not become an image.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The image, or the disk that it goes to.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// The file begins like nothing that is known.
    #[error(
        "{path} is neither a migration stream or mapped-ram file of QEMU nor a save image of libvirt", path = path.display()
    )]
    Unknown {
        /// The file.
        path: PathBuf,
    },
    /// libvirt never finished writing it.
    #[error("{path} is a save image that libvirt did not finish: the save failed or was interrupted", path = path.display())]
    Incomplete {
        /// The file.
        path: PathBuf,
    },
    /// The header of a libvirt image is not one.
    #[error("header of libvirt's save image: {0}")]
    LibvirtHeader(String),
    /// The XML in a libvirt image cannot be read.
    #[error("the domain XML in libvirt's save image cannot be read")]
    Xml(#[source] roxmltree::Error),
    /// The stream is compressed in a way that is not supported.
    #[error(
        "{path} is compressed with lzop, which is not supported; decompress it (`tail -c +{position} {path} | lzop -dc > STREAM`) \
         and import that", path = path.display(), position = start + 1
    )]
    Lzop {
        /// The file.
        path: PathBuf,
        /// Where the compressed stream begins.
        start: u64,
    },
    /// The stream in the file is none that can be kept.
    #[error("{path} cannot be imported", path = path.display())]
    Stream {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: StreamError,
    },
    /// Compressed data is damaged or ends early.
    #[error("the {compression} data in {path} is damaged", path = path.display())]
    Compressed {
        /// The file.
        path: PathBuf,
        /// How it is compressed.
        compression: StreamCompression,
        /// What the decompressor says.
        #[source]
        source: io::Error,
    },
    /// The stream lacks pages.
    #[error(
        "RAM block {block:?}: the stream holds {found} of its {needed} pages; a save with x-ignore-shared or with free page \
         hints leaves RAM out"
    )]
    PagesMissing {
        /// The block.
        block: String,
        /// Pages that came.
        found: u64,
        /// Pages that it has.
        needed: u64,
    },
}

impl Source {
    /// Opens a file, recognizes it by its content, and reads all that stands before RAM.
    ///
    /// # Errors
    ///
    /// [`ImportError`] tells what the file is instead, or what is wrong with it.
    pub fn open(path: &Path) -> Result<Self, ImportError> {
        let failed = |operation, source| ImageError::io(operation, path, source);
        let file = File::open(path).map_err(|source| failed("open", source))?;
        let metadata = file.metadata().map_err(|source| failed("look at", source))?;
        let modified = metadata.modified().map_err(|source| failed("look at", source))?;
        let beginning = beginning_of(&file).map_err(|source| failed("read", source))?;
        let libvirt = LibvirtHeader::read(path, &file, &beginning)?;
        let (start, compression, sparse) = match &libvirt {
            Some(header) => (header.stream_start, header.compression, header.sparse),
            None if beginning.starts_with(b"QEVM") => (0, StreamCompression::None, false),
            None => {
                return Err(ImportError::Unknown {
                    path: path.to_owned(),
                });
            }
        };
        if compression == StreamCompression::Lzop {
            return Err(ImportError::Lzop {
                path: path.to_owned(),
                start,
            });
        }
        let mapped = match compression {
            StreamCompression::None => MappedFile::read(&file, start).map_err(|error| match error {
                ReadError::Stream(error) => stream_error(path, error),
                ReadError::Io(source) => failed("read", source).into(),
            })?,
            _ => None,
        };
        if sparse && mapped.is_none() {
            return Err(ImportError::LibvirtHeader(
                "it says that the file is sparse, but no mapped-ram stream follows".to_owned(),
            ));
        }
        let (form, machine, blocks) = match mapped {
            Some(mapped) => {
                let sizes = mapped.blocks.iter().map(|block| size(&block.name, block.length));
                let sizes = sizes.collect();
                // It has no pages, so this looks at the rest of the file.
                let recording = Recording::parse(&mapped.plain).map_err(|error| stream_error(path, error))?;
                let machine = recording.machine().to_owned();
                (Form::MappedRam(mapped), machine, sizes)
            }
            None => {
                let (machine, blocks) = stream::look(&stream::Input {
                    path,
                    file: &file,
                    start,
                    compression,
                })?;
                (Form::Stream(compression), machine, blocks)
            }
        };
        Layout::plan(&blocks).map_err(ImageError::Layout)?;
        Ok(Self {
            path: path.to_owned(),
            file,
            modified,
            libvirt,
            start,
            form,
            machine,
            blocks,
        })
    }

    /// What the file is, in words.
    pub fn form(&self) -> &'static str {
        match (&self.libvirt, &self.form) {
            (None, Form::Stream(_)) => "QEMU migration stream",
            (None, Form::MappedRam(_)) => "QEMU mapped-ram file",
            (Some(_), Form::Stream(_)) => "libvirt save image",
            (Some(_), Form::MappedRam(_)) => "libvirt save image, sparse",
        }
    }

    /// How the stream in it is compressed.
    pub fn compression(&self) -> StreamCompression {
        match self.form {
            Form::Stream(compression) => compression,
            Form::MappedRam(_) => StreamCompression::None,
        }
    }

    /// What libvirt wrote before the stream.
    pub fn libvirt(&self) -> Option<&LibvirtHeader> {
        self.libvirt.as_ref()
    }

    /// The machine type.
    pub fn machine(&self) -> &str {
        &self.machine
    }

    /// The RAM blocks.
    pub fn blocks(&self) -> &[BlockSize] {
        &self.blocks
    }

    /// When the file was written last: the best that is known of when the guest was saved.
    pub fn modified(&self) -> SystemTime {
        self.modified
    }

    /// RAM of all blocks together. [`Source::stage`] and [`Staged::write`] each report as much.
    pub fn ram(&self) -> ByteCount {
        self.blocks.iter().map(|block| block.length).sum()
    }

    /// The most that is needed in the folder of the image while it is made: for the image and for the
    /// staged RAM.
    pub fn space_needed(&self) -> Result<ByteCount, ImportError> {
        let layout = Layout::plan(&self.blocks).map_err(ImageError::Layout)?;
        Ok(layout.hard_bound(self.device_state_bound()) + self.staged_bound())
    }

    /// How long the device state can be, as far as it can be told before.
    fn device_state_bound(&self) -> ByteCount {
        match &self.form {
            Form::MappedRam(MappedFile { plain, .. }) => ByteCount(plain.len() as u64),
            Form::Stream(StreamCompression::None) => self.file_length().min(DEVICE_STATE_RESERVE),
            Form::Stream(_) => DEVICE_STATE_RESERVE,
        }
    }

    fn file_length(&self) -> ByteCount {
        ByteCount(self.file.metadata().map_or(u64::MAX, |metadata| metadata.len()))
    }

    /// How much RAM that is not zero there can be.
    fn staged_bound(&self) -> ByteCount {
        match self.form {
            Form::Stream(StreamCompression::None) => self.file_length().min(self.ram()),
            _ => self.ram(),
        }
    }

    /// Begins the image at `target` and reads all of the file; RAM is kept in files without names in the
    /// folder of `target`, or in `/var/tmp` if that is a block device.
    ///
    /// # Errors
    ///
    /// [`ImportError`] names what is wrong with the file; [`ImageError::NoSpace`],
    /// [`ImageError::Cancelled`], [`ImageError::Io`], and those of [`ImageWriter::create`].
    pub fn stage(&self, target: &Path, options: CreateOptions, run: &Run<'_>) -> Result<Staged, ImportError> {
        let (folder, needed) = match is_block_device(target) {
            // There the image has its own place.
            true => (PathBuf::from("/var/tmp"), self.staged_bound()),
            false => (folder_of(target).to_owned(), self.space_needed()?),
        };
        let available = free_in(&folder)?;
        if available < needed {
            return Err(ImageError::NoSpace {
                needed,
                available,
                path: folder,
            }
            .into());
        }
        // First, so that a target that is taken is told before hours of reading.
        let layout = Layout::plan(&self.blocks).map_err(ImageError::Layout)?;
        let mut writer = ImageWriter::create(target, layout, options)?;
        writer.reserve(self.device_state_bound())?;
        let mut staging = Staging::create(&folder, &self.blocks)?;
        let recording = match &self.form {
            Form::MappedRam(MappedFile { blocks, plain }) => {
                mapped_ram::stage(&self.file, &self.path, blocks, &staging, run)?;
                Recording::parse(plain).map_err(|error| stream_error(&self.path, error))?
            }
            Form::Stream(compression) => {
                let input = stream::Input {
                    path: &self.path,
                    file: &self.file,
                    start: self.start,
                    compression: *compression,
                };
                stream::stage(&input, &mut staging, run)?
            }
        };
        Ok(Staged {
            writer,
            staging,
            recording,
        })
    }
}

impl Staged {
    /// What the guest was doing when the save began, if the device state tells.
    pub fn guest_state(&self) -> Option<GuestState> {
        let devices = self.recording.devices().ok()?;
        let global = devices.iter().find(|device| device.name == "globalstate")?;
        let name = global.field("runstate", 32).or(global.field("runstate", 100))?;
        let name = name.split(|byte| *byte == 0).next()?;
        match name {
            b"running" => Some(GuestState::Running),
            b"paused" | b"prelaunch" => Some(GuestState::Paused),
            _ => None,
        }
    }

    /// Writes the image. A cancel after the seal only leaves space that is not given back.
    ///
    /// # Errors
    ///
    /// As [`ImageWriter`]'s.
    pub fn write(self, manifest: &Manifest, run: &Run<'_>) -> Result<Imported, ImportError> {
        let mut writer = self.writer;
        let mut written = MemoryWritten::default();
        for (name, memory) in self.staging.into_memory()? {
            let block = writer.write_memory(&name, &memory, run)?;
            written.data += block.data;
            written.stored += block.stored;
            written.zero += block.zero;
        }
        let mut sealed = writer.seal(manifest, &self.recording)?;
        // The image is whole: space that is not given back, or a cancel now, does not make it none.
        if let Err(error) = sealed.give_back(run) {
            tracing::warn!(%error, path = %sealed.path().display(), "cannot give back the image's unused space");
        }
        Ok(Imported { sealed, written })
    }
}

fn stream_error(path: &Path, source: StreamError) -> ImportError {
    ImportError::Stream {
        path: path.to_owned(),
        source,
    }
}

fn size(name: &str, length: u64) -> BlockSize {
    BlockSize {
        name: name.to_owned(),
        length: ByteCount(length),
    }
}

/// What decides what the file is; shorter for a shorter file.
fn beginning_of(file: &File) -> io::Result<Vec<u8>> {
    let mut beginning = vec![0; libvirt::HEADER_BYTES];
    let mut length = 0;
    while length < beginning.len() {
        match file.read_at(&mut beginning[length..], length as u64) {
            Ok(0) => break,
            Ok(read) => length += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    beginning.truncate(length);
    Ok(beginning)
}
