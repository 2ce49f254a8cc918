//! Loads a waiting QEMU: the devices, and whatever RAM was not placed where QEMU finds it.
//!
//! A thread of its own writes the stream, with readers beside it, while QEMU loads; both look at the interrupt. When the
//! image turns out bad in the middle the stream ends there, QEMU gives up, and the image's own error is told, not QEMU's.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use dormouse_qmp::view::migration::MigrationStatus;
use dormouse_qmp::{Client, CommandError, command};
use dormouse_storage::{Image, PrecopyError, Progress, Run, WORKER_THREADS};

use crate::error::{Code, Failure};
use crate::machine::effect::joined;
use crate::machine::interrupt::Interrupt;
use crate::vm::monitor::{self, wait_for_load_end};

/// The name under which QEMU gets its end of the socket.
const STREAM_FD: &str = "dormouse-wake-stream";

/// How long QEMU may take to load the devices once it has all of the stream.
const LOAD_TIMEOUT: Duration = Duration::from_secs(60);

/// What a load is of.
#[derive(Debug, Default)]
pub struct What {
    /// The blocks that QEMU has without it.
    pub except: Vec<String>,
    /// Whether a QEMU that cannot load it is told to stay, if it can; else it does what is its default.
    pub stay: bool,
}

/// Loads QEMU from `image`. The image comes back however it went.
pub async fn load(
    client: &Client,
    image: Image,
    What { except, stay }: What,
    progress: Arc<Progress>,
    interrupt: &Interrupt,
) -> Result<(Image, Result<(), Failure>), Failure> {
    let stream = match interrupt.or(begin(client, stay)).await {
        Ok(stream) => stream,
        Err(failure) => return Ok((image, Err(failure))),
    };
    let end = match stream.try_clone() {
        Ok(end) => end,
        Err(error) => {
            let failure = Failure::new(Code::Internal, format!("cannot keep a socket: {error}"));
            return Ok((image, Err(failure)));
        }
    };
    let flag = interrupt.clone();
    let mut writing = tokio::task::spawn_blocking(move || {
        let except: Vec<&str> = except.iter().map(String::as_str).collect();
        let run = Run {
            threads: WORKER_THREADS,
            progress: &progress,
            cancelled: flag.flag(),
        };
        let written = image.write_precopy(&except, &run, &stream);
        // QEMU has to see an end of the stream, also of one that stops in the middle.
        let _ = stream.shutdown(Shutdown::Both);
        Ok((image, written))
    });
    // A QEMU that does not read must not hold up a cancel.
    let wait = interrupt.or(joined(&mut writing)).await;
    let (image, written) = match wait {
        Ok(ended) => ended,
        Err(_) if interrupt.is_raised() => {
            let _ = end.shutdown(Shutdown::Both);
            joined(&mut writing).await?
        }
        Err(failure) => return Err(failure),
    };
    let loaded = match written {
        Err(PrecopyError::Page(error)) => Err(error.into()),
        // QEMU closed it: it says why.
        Err(PrecopyError::Output(error)) => interrupt.or(finished(client, Some(error))).await,
        Ok(()) => interrupt.or(finished(client, None)).await,
    };
    Ok((image, loaded))
}

async fn begin(client: &Client, stay: bool) -> Result<UnixStream, Failure> {
    let local = |error| Failure::new(Code::Internal, format!("cannot use a socket: {error}"));
    let stream = monitor::pass_stream(client, STREAM_FD).await?;
    let stream = stream.into_std().map_err(local)?;
    stream.set_nonblocking(false).map_err(local)?;
    let incoming = |exit_on_error| command::migrate_incoming {
        uri: Some(format!("fd:{STREAM_FD}")),
        channels: None,
        exit_on_error,
    };
    match client.execute(&incoming(stay.then_some(false))).await {
        // It takes no such argument (it came with QEMU 9.1), and looked at nothing else. To ask its schema takes longer than all
        // the rest.
        Err(CommandError::Qemu { desc, .. }) if stay && desc.contains("exit-on-error") => {
            client.execute(&incoming(None)).await?;
        }
        answered => {
            answered?;
        }
    }
    Ok(stream)
}

/// Waits until QEMU has loaded all of it. `broken`: what the socket said, if it did not take all.
async fn finished(client: &Client, broken: Option<std::io::Error>) -> Result<(), Failure> {
    let migration = wait_for_load_end(client, LOAD_TIMEOUT).await?;
    match (migration.status, broken) {
        (Some(MigrationStatus::Completed), None) => Ok(()),
        (_, broken) => {
            let why = migration
                .error_desc
                .or(broken.map(|error| error.to_string()))
                .unwrap_or_default();
            Err(Failure::new(
                Code::Refused,
                format!("QEMU did not accept the image's device state: {why}"),
            ))
        }
    }
}
