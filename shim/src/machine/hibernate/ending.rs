//! The end of a QEMU whose guest is in its image: brought about by who saved it, or by who recovers what was interrupted.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use dormouse_qmp::{Client, command};
use dormouse_storage::{Progress, Run, SealedImage, WORKER_THREADS};

use crate::error::{Code, Failure, GuestState, sentence};
use crate::machine::effect::blocking;
use crate::vm::process::ProcessEnd;

/// How long QEMU's process may take to end after `quit`.
const QUIT_TIMEOUT: Duration = Duration::from_secs(60);

/// Gives back what an image reserved and does not need. Space that is not given back is no reason to call a sealed image a
/// failure.
pub async fn give_space_back(mut sealed: SealedImage) {
    let given_back = blocking(move || {
        let run = Run {
            threads: WORKER_THREADS,
            progress: &Progress::default(),
            cancelled: &AtomicBool::new(false),
        };
        Ok(sealed.give_back(&run)?)
    })
    .await;
    if let Err(failure) = given_back {
        tracing::warn!(%failure, "cannot give back the image's unused space");
    }
}

/// Ends QEMU, whose guest is in `image`, and waits until it is gone.
pub async fn end_qemu(client: &Client, pid: u32, image: &Path) -> Result<(), Failure> {
    let gone = ProcessEnd::of(pid);
    // The connection may end before the answer is read; it is the process that counts.
    let answer = client.execute(&command::quit {}).await;
    let image = image.display();
    let ended = blocking(move || {
        gone.wait(QUIT_TIMEOUT)
            .map_err(|error| Failure::new(Code::Operator, format!("cannot see whether it ended: {error}")))
    })
    .await
    .map_err(|failure| {
        failure.while_doing(&format!("the image {image} is complete; QEMU's process {pid}"))
    })?;
    if ended {
        return Ok(());
    }
    let answer = answer
        .err()
        .map(|error| format!(" ({})", sentence(&error)))
        .unwrap_or_default();
    Err(Failure::new(
        Code::Operator,
        format!(
            "the image {image} is complete, but QEMU's process {pid} is still there after {QUIT_TIMEOUT:?}{answer}; \
             end it without letting the guest run, or remove the image"
        ),
    )
    .with_guest(GuestState::Paused))
}
