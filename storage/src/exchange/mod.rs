//! The border of the image: memory goes out to other tools in their own formats, and memory that
//! other tools saved comes in.
//!
//! ```text
//!                 ┌── stream      QEMU's migration stream      every QEMU loads it
//!  Image ─export──┼── mapped-ram  QEMU's own file, RAM in place QEMU 9.0 and later
//!                 └── elf         ELF core                      gdb, crash
//!
//!  stream, mapped-ram, libvirt's save image ──import──► staged RAM + Recording ──► ImageWriter
//! ```
//!
//! What is guaranteed:
//!
//! * **Out:** every chunk's checksum is compared as it is read; a file gets its name only when it is
//!   whole and on the disk, and takes no other file's place unasked, and an image's never.
//! * **In:** a file is recognized by its content, never by its name. Lengths are compared with
//!   limits and with the file before anything is allocated; malformed input is refused by name and
//!   never panics. A page that the format does not call zero must be there.
//! * What these formats do not have (checksums, witnesses of disks, a command line) is not invented.

mod export;
mod import;
mod new_file;

pub use export::{ElfOptions, ExportError, ExportFormat, Exported, Registers, export};
pub use import::{
    Domain, DomainDisk, ImportError, Imported, LibvirtHeader, Source, Staged, StreamCompression,
};
