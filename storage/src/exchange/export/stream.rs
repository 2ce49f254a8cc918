//! A plain migration stream: every page of every block, zeros as records, then the devices.

use std::cell::Cell;
use std::io;

use super::SPACE_BESIDE;
use crate::exchange::new_file::NewFile;
use crate::migration::{PAGE_BYTES, PrecopyError, try_write_precopy};
use crate::{ByteCount, Image, ImageError, Run};

pub(super) fn write(image: &Image, new: &NewFile, run: &Run<'_>) -> Result<(), ImageError> {
    let usage = image.usage()?;
    let records = ByteCount(image.layout().ram().0 / PAGE_BYTES as u64 * 9);
    new.check_space(usage.data + usage.device_state + records + SPACE_BESIDE)?;
    let devices = image.device_state()?;
    // A stream has one order, so one thread reads and writes.
    let unreported = Cell::new(0);
    let pages = image.pages(&[])?.map(|page| {
        unreported.set(unreported.get() + PAGE_BYTES as u64);
        if unreported.get() >= 1 << 20 {
            run.progress.advance(unreported.take());
            if run.is_cancelled() {
                return Err(ImageError::Cancelled);
            }
        }
        page
    });
    try_write_precopy(&devices, pages, &mut new.file()).map_err(|error| match error {
        PrecopyError::Page(error) => error,
        PrecopyError::Output(error) if error.kind() == io::ErrorKind::InvalidInput => {
            ImageError::io("put together a stream of", image.path(), error)
        }
        PrecopyError::Output(error) => new.failed(error),
    })?;
    run.progress.advance(unreported.take());
    Ok(())
}
