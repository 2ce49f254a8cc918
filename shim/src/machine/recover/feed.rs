//! Goes on feeding a guest whose feeder was killed.
//!
//! ```text
//!  the record ─► the image, held, still `waking` ─► QEMU's monitor ─► `postcopy-paused` ─► migrate-recover
//!             ─► QEMU tells what it has ─► it is fed the rest ─► the image is `consumed`
//! ```
//!
//! Only an image that is `consumed`, or a QEMU that says so, is believed that the guest has all: an image that is not where it
//! was is one that has to come back.
//!
//! Nothing is lost meanwhile: what QEMU has it keeps, and the guest stands where it needs what it has not. One case has no way
//! back: a QEMU whose main thread itself waits for a missing page answers no new client of its monitor. Then a person is told,
//! and it can be tried again; what such a thread waits for may be there by then only if another thread had asked for it.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use dormouse_qmp::view::migration::{MigrationInfo, MigrationStatus};
use dormouse_qmp::{Client, CommandError, ConnectOptions, command};
use dormouse_storage::feed::Fed;
use dormouse_storage::{ByteCount, Image, ImageError, ImageKey, ImageState};
use tokio::time::Instant;

use crate::error::{Code, Failure, GuestState, sentence};
use crate::machine::effect::blocking;
use crate::machine::wake::feeding::{FeedRecord, Feeding, View, used_up};
use crate::machine::wake::lazy::{self, FeedWish};
use crate::machine::wake::plan::placed_blocks;

/// How long QEMU may take to greet or to answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);

/// How long QEMU may take to notice that its feeder is gone, and to listen for another.
const PAUSE_LIMIT: Duration = Duration::from_secs(10);

/// After how long QEMU is told that its feeder is gone, if it does not see it.
const NOTICE: Duration = Duration::from_millis(500);

/// How often it is looked.
const POLL: Duration = Duration::from_millis(10);

/// What came of it.
#[derive(Debug, Clone, PartialEq)]
pub enum FeedOutcome {
    /// The guest has all of its memory.
    Complete(Fed),
    /// It had all of it before.
    WasComplete,
    /// Somebody holds the image: its supervisor lives, and feeds it.
    UnderWay(Failure),
}

/// The image of a record.
enum Held {
    /// It is held by us, and unlocked.
    Image(Box<Image>),
    /// The guest has what it needed of it.
    UsedUp,
    /// It is not there, and why.
    Away(String),
    /// Somebody else holds it.
    ByAnother(Failure),
}

/// Feeds the guest to the end. The record goes when it has all, and stays on every failure. `begun`: told what is seen of it.
pub async fn go_on(
    record: &FeedRecord,
    vm_directory: &Path,
    key: Option<ImageKey>,
    rate_limit: Option<ByteCount>,
    begun: impl FnOnce(View),
) -> Result<FeedOutcome, Failure> {
    let held = match hold(record, key).await? {
        Held::UsedUp => {
            FeedRecord::remove(vm_directory)?;
            return Ok(FeedOutcome::WasComplete);
        }
        Held::ByAnother(failure) => return Ok(FeedOutcome::UnderWay(failure)),
        held => held,
    };
    let image = record.image.display();
    if !record.qemu.is_alive() {
        let image = match held {
            Held::Away(why) => why,
            _ => format!("The image {image} is kept"),
        };
        return Err(Failure::new(
            Code::Operator,
            format!(
                "QEMU's process {} ended before the guest had all of its memory. {image}, marked as waking: its guest has run, \
                 and what was saved can be exported",
                record.qemu.pid,
            ),
        )
        .with_guest(GuestState::Stopped));
    }
    let client = connect(record).await?;
    let status = wait_until_paused(&client).await?;
    let image = match (status, held) {
        // It has everything; only the word of it was not heard any more.
        (MigrationStatus::Completed, held) => {
            if let Held::Image(image) = held {
                used_up(*image, record.keep_image, vm_directory).await?;
            } else {
                FeedRecord::remove(vm_directory)?;
            }
            return Ok(FeedOutcome::WasComplete);
        }
        (_, Held::Image(image)) => *image,
        (_, Held::Away(why)) => {
            let why = format!(
                "{why}; the guest waits for it in QEMU's process {}: bring it back and recover again",
                record.qemu.pid
            );
            return Err(Failure::new(Code::Operator, why));
        }
        (_, Held::UsedUp | Held::ByAnother(_)) => {
            return Err(Failure::new(
                Code::Internal,
                "an image is fed from that is not held",
            ));
        }
    };
    let placed: Vec<String> = placed_blocks(image.manifest())
        .into_iter()
        .map(|(name, _)| name)
        .collect();
    let placed: Vec<&str> = placed.iter().map(String::as_str).collect();
    let wish = FeedWish {
        rate_limit,
        keep_image: record.keep_image,
    };
    let feeder = lazy::feeder(&image, &placed, wish)?;
    if record.passes_zeros {
        feeder.told().pass_zeros();
    }
    let page_sizes = lazy::page_sizes(&client).await?;
    let stream = reconnect(&client, vm_directory).await?;
    let feed = lazy::go_on(feeder, stream, page_sizes);
    let feeding = Feeding::new(feed, image, record.keep_image);
    begun(feeding.view());
    let fed = feeding.run(vm_directory).await.map_err(|unfed| unfed.failure)?;
    Ok(FeedOutcome::Complete(fed))
}

/// Takes the image and unlocks it.
async fn hold(record: &FeedRecord, key: Option<ImageKey>) -> Result<Held, Failure> {
    let (path, id) = (record.image.clone(), record.image_id);
    blocking(move || {
        let at = path.display();
        let away = |why: String| Ok(Held::Away(format!("The image {id} is not at {at}: {why}")));
        match path.try_exists() {
            Ok(true) => {}
            Ok(false) => return away("there is nothing".into()),
            Err(error) => return away(error.to_string()),
        }
        let mut image = match Image::open_locked(&path) {
            Ok(image) => image,
            Err(error @ ImageError::Locked { .. }) => return Ok(Held::ByAnother(error.into())),
            Err(error @ (ImageError::NotAnImage { .. } | ImageError::Io { .. })) => {
                return away(sentence(&error));
            }
            Err(error) => return Err(error.into()),
        };
        if image.id() != id {
            return away(format!("there is the image {}", image.id()));
        }
        match image.state() {
            ImageState::Consumed => return Ok(Held::UsedUp),
            ImageState::Waking => {}
            state => {
                let why = format!("{at} is {state}, although a guest was fed from it");
                return Err(Failure::new(Code::Operator, why));
            }
        }
        if let Some(key) = key {
            image.unlock(&key)?;
        }
        Ok(Held::Image(Box::new(image)))
    })
    .await
}

async fn connect(record: &FeedRecord) -> Result<Client, Failure> {
    let silent = |why: String| {
        Failure::new(
            Code::Operator,
            format!(
                "QEMU's process {} does not answer its monitor ({why}): it may wait for memory itself. The guest has not lost \
                 anything; try again, and leave QEMU and the image {} alone",
                record.qemu.pid,
                record.image.display()
            ),
        )
    };
    let options = ConnectOptions::default().with_greeting_timeout(ANSWER_LIMIT);
    let client = Client::connect(&record.monitor, options)
        .await
        .map_err(|error| silent(sentence(&error)))?;
    match client.peer_pid() {
        Some(found) if found == record.qemu.pid => Ok(client.with_deadline(ANSWER_LIMIT)),
        _ => Err(Failure::new(
            Code::Operator,
            format!(
                "a guest is fed in QEMU's process {}, but at its monitor {} is another process",
                record.qemu.pid,
                record.monitor.display()
            ),
        )),
    }
}

/// Waits until QEMU knows that its feeder is gone, or has all.
async fn wait_until_paused(client: &Client) -> Result<MigrationStatus, Failure> {
    let begin = Instant::now();
    let mut is_told = false;
    loop {
        let migration: MigrationInfo = client.query(&command::query_migrate {}).await?;
        let is_over = begin.elapsed() > PAUSE_LIMIT;
        match migration.status {
            Some(status @ (MigrationStatus::PostcopyPaused | MigrationStatus::Completed)) => {
                return Ok(status);
            }
            Some(MigrationStatus::PostcopyActive) if !is_told && begin.elapsed() > NOTICE => {
                // It is refused where QEMU has noticed by now.
                let refused = client.execute_oob(&command::migrate_pause {}).await.err();
                tracing::debug!(?refused, "QEMU was told that its feeder is gone");
                is_told = true;
            }
            status if is_over || status == Some(MigrationStatus::Failed) => {
                let status = status.map_or_else(|| "none".into(), |status| format!("{status:?}"));
                let why = format!("QEMU does not wait for a feeder: its migration is {status}");
                return Err(Failure::new(Code::Operator, why));
            }
            _ => tokio::time::sleep(POLL).await,
        }
    }
}

/// Has QEMU listen, in the VM's folder, which is ours alone, and connects.
async fn reconnect(client: &Client, vm_directory: &Path) -> Result<UnixStream, Failure> {
    let socket = vm_directory.join("feed.sock");
    // One of an earlier attempt.
    let _ = std::fs::remove_file(&socket);
    let recover = command::migrate_recover {
        uri: format!("unix:{}", socket.display()),
    };
    match client.execute_oob(&recover).await {
        Ok(_) => {}
        Err(CommandError::Qemu { desc, .. }) => {
            let why = format!("QEMU takes no other feeder: {desc}");
            return Err(Failure::new(Code::Operator, why));
        }
        Err(error) => return Err(error.into()),
    }
    let deadline = Instant::now() + PAUSE_LIMIT;
    loop {
        match UnixStream::connect(&socket) {
            Ok(stream) => {
                let _ = std::fs::remove_file(&socket);
                return Ok(stream);
            }
            Err(error) if Instant::now() > deadline => {
                let why = format!("QEMU does not listen at {}: {error}", socket.display());
                return Err(Failure::new(Code::Operator, why));
            }
            Err(_) => tokio::time::sleep(POLL).await,
        }
    }
}
