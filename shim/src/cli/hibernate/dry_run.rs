//! `dormouse hibernate --dry-run`: tells what would come of it.

use std::path::PathBuf;

use dormouse_storage::ByteCount;

use super::{HibernateArguments, attach, wish};
use crate::api::client::Supervisor;
use crate::error::{Code, Failure};
use crate::machine::hibernate::ImageWish;
use crate::machine::hibernate::forecast::{self, Forecast};
use crate::supervisor::state_dir::StateDir;

pub async fn forecast(
    to: PathBuf,
    arguments: &HibernateArguments,
    image: ImageWish,
    state: &StateDir,
) -> Result<Forecast, Failure> {
    match (&arguments.name, &arguments.qmp) {
        (Some(name), _) => {
            Supervisor::of(state, name)
                .dry_run(&wish(to, arguments, &image))
                .await
        }
        (None, Some(socket)) => {
            let (client, request) = attach(socket, to, &arguments.save, image, state).await?;
            forecast::forecast(&client, &request).await
        }
        (None, None) => Err(Failure::new(Code::Usage, "name a VM, or a monitor with --qmp")),
    }
}

pub fn describe(forecast: &Forecast) -> String {
    let mut lines = vec![format!(
        "nothing stands in the way (engine: {}, {})",
        forecast.choice.engine.name(),
        forecast.kind
    )];
    lines.extend(forecast.choice.passed_over.iter().cloned());
    let likely = forecast
        .likely_bytes
        .map(|bytes| format!(", likely {} in the end", ByteCount(bytes)))
        .unwrap_or_default();
    let available = forecast
        .available_bytes
        .map(|bytes| format!("; {} are there", ByteCount(bytes)))
        .unwrap_or_default();
    lines.push(format!(
        "needs {} at most{likely}{available}",
        ByteCount(forecast.needed_bytes)
    ));
    lines.push(format!(
        "a volume of its own: {} with a file system, {} raw",
        ByteCount(forecast.filesystem_volume_bytes),
        ByteCount(forecast.block_volume_bytes)
    ));
    if let (Some(rate), Some(pause)) = (forecast.write_bytes_per_second, forecast.expected_pause_ms) {
        lines.push(format!(
            "written at {:.2} GB/s just now: the guest would stand still for about {pause:.0} ms",
            rate / 1e9
        ));
    }
    lines.extend(forecast.remarks.iter().cloned());
    lines.join("\n")
}
