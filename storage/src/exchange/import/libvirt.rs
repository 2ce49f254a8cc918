//! The file that `virsh save` and `managedsave` write.
//!
//! ```text
//!  0    16 bytes  "LibvirtQemudSave", or "LibvirtQemudPart" as long as it is not finished
//!  16   u32       version: 2
//!       u32       length of what lies between header and stream
//!       u32       1 if the guest ran
//!       u32       format: 0 raw, 1 gzip, 2 bzip2, 3 xz, 4 lzop, 5 zstd, 6 sparse (mapped-ram)
//!       u32       offset of the cookie in what follows, 0 if there is none
//!       14 × u32  reserved
//!  92             domain XML with a zero byte; cookie, XML too; zeros to let the XML grow
//!                 the stream
//! ```
//!
//! Integers are in the byte order of the host that wrote the file. Learned from libvirt's
//! `src/qemu/qemu_saveimage.h`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::{Domain, ImportError, StreamCompression};
use crate::{ByteCount, ImageError};

pub(super) const HEADER_BYTES: usize = 92;

const MAGIC_FINISHED: &[u8; 16] = b"LibvirtQemudSave";
const MAGIC_PARTIAL: &[u8; 16] = b"LibvirtQemudPart";
const NEWEST_VERSION: u32 = 2;

/// Domain XML has some 10 KiB, the cookie less, and libvirt adds 64 KiB to grow.
const TEXT_LIMIT: ByteCount = ByteCount::mib(16);

/// What stands before the stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LibvirtHeader {
    /// Whether the guest ran, and is to run again when it is restored.
    pub was_running: bool,
    /// The domain, as its XML describes it.
    pub domain: Domain,
    pub(super) compression: StreamCompression,
    pub(super) sparse: bool,
    pub(super) stream_start: u64,
}

impl LibvirtHeader {
    /// Reads the header of which `beginning` are the first bytes; `None` if this is no such file.
    pub(super) fn read(path: &Path, file: &File, beginning: &[u8]) -> Result<Option<Self>, ImportError> {
        if beginning.starts_with(MAGIC_PARTIAL) {
            return Err(ImportError::Incomplete {
                path: path.to_owned(),
            });
        }
        if !beginning.starts_with(MAGIC_FINISHED) {
            return Ok(None);
        }
        let wrong = |what: String| ImportError::LibvirtHeader(what);
        let (words, _) = beginning[MAGIC_FINISHED.len()..].as_chunks::<4>();
        let Some([version, length, was_running, format, cookie]) = words.first_chunk::<5>() else {
            return Err(wrong(format!("the file has {} bytes", beginning.len())));
        };
        // A version that is too high is one in the other byte order.
        let is_little = u32::from_le_bytes(*version) <= NEWEST_VERSION;
        let number = |word: &[u8; 4]| match is_little {
            true => u32::from_le_bytes(*word),
            false => u32::from_be_bytes(*word),
        };
        let version = number(version);
        if version == 0 || version > NEWEST_VERSION {
            return Err(wrong(format!(
                "version {version}, only those up to {NEWEST_VERSION} are known"
            )));
        }
        let (compression, sparse) = match number(format) {
            0 => (StreamCompression::None, false),
            1 => (StreamCompression::Gzip, false),
            2 => (StreamCompression::Bzip2, false),
            3 => (StreamCompression::Xz, false),
            4 => (StreamCompression::Lzop, false),
            5 => (StreamCompression::Zstd, false),
            6 => (StreamCompression::None, true),
            other => return Err(wrong(format!("format {other} is not known"))),
        };
        let length = ByteCount(number(length).into());
        if length > TEXT_LIMIT {
            return Err(wrong(format!("{length} of XML, at most {TEXT_LIMIT} are read")));
        }
        let failed = |source| ImageError::io("read", path, source);
        let stream_start = HEADER_BYTES as u64 + length.0;
        let file_length = file.metadata().map_err(failed)?.len();
        if file_length < stream_start {
            return Err(wrong(format!(
                "{length} of XML, but the file has {}",
                ByteCount(file_length)
            )));
        }
        let mut text = vec![0; length.0 as usize];
        file.read_exact_at(&mut text, HEADER_BYTES as u64)
            .map_err(failed)?;
        let cookie = number(cookie) as usize;
        if cookie > text.len() {
            return Err(wrong(format!(
                "the cookie lies at {cookie}, behind the XML's end"
            )));
        }
        let xml = text.split(|byte| *byte == 0).next().unwrap_or_default();
        let xml = std::str::from_utf8(xml).map_err(|_| wrong("the XML is not UTF-8".to_owned()))?;
        Ok(Some(Self {
            was_running: number(was_running) != 0,
            domain: Domain::parse(xml)?,
            compression,
            sparse,
            stream_start,
        }))
    }
}
