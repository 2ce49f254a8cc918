//! The ways in which libvirt compresses a stream, by the programs that it runs for it.

use std::fmt;
use std::io::{BufRead, Read};

use lzma_rust2::XzReader;

/// The most memory that an xz stream may ask for, in KiB: `xz -9` takes 64 MiB.
const XZ_MEMORY_KIB: u32 = 256 << 10;

/// How a stream is compressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StreamCompression {
    /// Not at all.
    None,
    /// gzip; carries a CRC-32.
    Gzip,
    /// bzip2; carries a CRC-32 of each block.
    Bzip2,
    /// xz; carries a CRC-64, usually.
    Xz,
    /// lzop, which is not supported.
    Lzop,
    /// zstd; carries a checksum if its writer wished so.
    Zstd,
}

impl StreamCompression {
    /// The stream in `input`.
    pub(super) fn reader<'a>(self, input: impl BufRead + 'a) -> std::io::Result<Box<dyn Read + 'a>> {
        Ok(match self {
            Self::None | Self::Lzop => Box::new(input),
            Self::Gzip => Box::new(flate2::bufread::MultiGzDecoder::new(input)),
            Self::Bzip2 => Box::new(bzip2::bufread::MultiBzDecoder::new(input)),
            Self::Xz => Box::new(XzReader::new_mem_limit(input, true, XZ_MEMORY_KIB)),
            Self::Zstd => Box::new(zstd::Decoder::with_buffer(input)?),
        })
    }
}

impl fmt::Display for StreamCompression {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "uncompressed",
            Self::Gzip => "gzip",
            Self::Bzip2 => "bzip2",
            Self::Xz => "xz",
            Self::Lzop => "lzop",
            Self::Zstd => "zstd",
        })
    }
}
