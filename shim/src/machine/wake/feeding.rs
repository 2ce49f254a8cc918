//! A guest that runs and is being fed, up to the end of it, and again after its feeder was killed.
//!
//! ```text
//!  feeding ─► complete      the image is `consumed`, and removed unless it is kept
//!     ├─► damaged           a chunk cannot be had: all else is fed, the guest stands where it needs that one; the image
//!     │                     stays `waking`, QEMU is left alone, and ended on demand: it may not be able to by itself
//!     └─► lost              QEMU ended or let go: what it had of the guest is gone; the image stays `waking`, unless
//!                           the guest shut itself down, which needs no memory any more
//! ```
//!
//! `waking` is refused by every wake: the guest has run. The file stays, because in all endings but the first it is the
//! only whole copy of the guest's memory as it was saved.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dormouse_storage::feed::{Damage, Fed, FeedError, Told};
use dormouse_storage::{ByteCount, Image, ImageState};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use uuid::Uuid;

use super::lazy::{Feed, code_of, failed};
use crate::error::{Code, Failure};
use crate::machine::effect::blocking;
use crate::vm::process_identity::ProcessIdentity;

/// The record of a feed under way, in the VM's folder.
const RECORD: &str = "feed.json";

/// What a recovery of a feed needs, should its process be killed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FeedRecord {
    /// The image.
    pub image: PathBuf,
    /// Its id.
    pub image_id: Uuid,
    /// The wake's id, which the image's mark names: what another wake has marked feeds another guest.
    pub wake: Uuid,
    /// QEMU's process.
    pub qemu: ProcessIdentity,
    /// The monitor's socket.
    pub monitor: PathBuf,
    /// Whether the image is kept at the end.
    pub keep_image: bool,
    /// Whether zero pages need not be fed.
    #[serde(default)]
    pub passes_zeros: bool,
    /// Whether the guest has yet to be run, once somebody feeds it: its wake was killed before it told QEMU to.
    pub shall_run: bool,
}

impl FeedRecord {
    /// Of a guest that `wake` woke from `image` in the QEMU `pid`.
    pub fn of(
        image: &Image,
        pid: u32,
        monitor: &Path,
        wake: Uuid,
        (keep_image, passes_zeros): (bool, bool),
    ) -> Result<Self, Failure> {
        let gone = || Failure::new(Code::Unreachable, "QEMU has ended");
        Ok(Self {
            image: image.path().to_owned(),
            image_id: image.id(),
            wake,
            qemu: ProcessIdentity::of(pid).ok_or_else(gone)?,
            monitor: monitor.to_owned(),
            keep_image,
            passes_zeros,
            shall_run: false,
        })
    }

    /// That of the VM with this folder, if it is or was being fed.
    pub fn read(vm_directory: &Path) -> Result<Option<Self>, Failure> {
        let path = vm_directory.join(RECORD);
        let cannot = |why: String| {
            let remedy = "look at its guest's QEMU and image, end what has to end, and remove the record";
            Failure::new(
                Code::Operator,
                format!("the record {} cannot be read: {why}; {remedy}", path.display()),
            )
        };
        match fs::read(&path) {
            Ok(text) => match serde_json::from_slice(&text) {
                Ok(record) => Ok(Some(record)),
                Err(error) => Err(cannot(error.to_string())),
            },
            // Nor is a VM where there is a file instead of a folder.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
            Err(error) => Err(cannot(error.to_string())),
        }
    }

    /// Writes it down for good in the VM's folder.
    pub fn write(&self, vm_directory: &Path) -> Result<(), Failure> {
        let write = || {
            let new = vm_directory.join("feed.json.new");
            let mut file = File::options()
                .create(true)
                .truncate(true)
                .write(true)
                .mode(0o600)
                .open(&new)?;
            file.write_all(&serde_json::to_vec(self)?)?;
            file.sync_all()?;
            fs::rename(new, vm_directory.join(RECORD))?;
            File::open(vm_directory)?.sync_all()
        };
        write().map_err(|error| {
            Failure::new(
                Code::StorageIo,
                format!("cannot write down from where the guest is fed: {error}"),
            )
        })
    }

    /// The guest needs no more feeding.
    pub fn remove(vm_directory: &Path) -> Result<(), Failure> {
        let path = vm_directory.join(RECORD);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(Failure::new(
                Code::StorageIo,
                format!(
                    "the guest has all of its memory, and the record of that cannot be removed: {}: {error}",
                    path.display()
                ),
            )),
            _ => Ok(()),
        }
    }
}

/// A guest that is being fed.
#[derive(Debug)]
pub struct Feeding {
    feed: Feed,
    image: Image,
    keep_image: bool,
    state: watch::Sender<State>,
    began: Instant,
}

/// How a feed stands.
#[derive(Debug, Clone, PartialEq)]
pub enum State {
    /// It goes on.
    Feeding,
    /// The guest has all of its memory.
    Complete(Fed),
    /// It will not get all of it.
    Failed(Failure),
}

/// A guest that did not get all of its memory: why, and the image, which is still held.
#[derive(Debug)]
pub struct Unfed {
    /// Why.
    pub failure: Failure,
    /// What was left of the feed.
    pub left: Left,
    image: Image,
    keep_image: bool,
}

/// A feed that came to no end, for who asks later.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Left {
    /// The image, which is kept.
    pub image: PathBuf,
    /// Its id.
    pub image_id: Uuid,
    /// What the guest had of its memory, in bytes.
    pub fed_bytes: u64,
    /// All of it, in bytes.
    pub total_bytes: u64,
}

/// What others see of a feed.
#[derive(Debug, Clone)]
pub struct View {
    told: Arc<Told>,
    state: watch::Receiver<State>,
    began: Instant,
}

impl Feeding {
    /// A feed that was begun.
    pub fn new(feed: Feed, image: Image, keep_image: bool) -> Self {
        Self {
            feed,
            image,
            keep_image,
            state: watch::Sender::new(State::Feeding),
            began: Instant::now(),
        }
    }

    /// What others see of it.
    pub fn view(&self) -> View {
        View {
            told: self.feed.told.clone(),
            state: self.state.subscribe(),
            began: self.began,
        }
    }

    /// Feeds to the end, and does what is then to be done with the image. Returns one that could not be put away.
    pub async fn run(mut self, vm_directory: &Path) -> Result<(Fed, Option<Box<Spent>>), Box<Unfed>> {
        match self.feed.ended().await {
            Ok(fed) => {
                tracing::info!(?fed, "the guest has all of its memory");
                let spent = Spent {
                    image: self.image,
                    keep: self.keep_image,
                };
                let (spent, is_put_away) = spent.put_away(vm_directory).await;
                let left = is_put_away.err().and_then(|failure| {
                    // It stays `waking`, which no wake takes either, and a recovery sees from QEMU that all is there.
                    tracing::warn!(%failure, "the guest has all of its memory, but its image could not be put away yet");
                    spent.map(Box::new)
                });
                self.state.send_replace(State::Complete(fed));
                Ok((fed, left))
            }
            Err(error) => {
                let image = self.image.path();
                let more = match &error {
                    FeedError::Damaged { .. } => "the guest stands where it needs it, all else it has",
                    _ => "the guest cannot go on without it",
                };
                let failure = failed(&error);
                let failure = Failure {
                    message: format!(
                        "{}; {more}. The image {} is kept, marked as waking: its guest has run",
                        failure.message,
                        image.display()
                    ),
                    ..failure
                };
                tracing::warn!(%failure, "the guest did not get all of its memory");
                self.state.send_replace(State::Failed(failure.clone()));
                let numbers = self.feed.told.numbers();
                Err(Box::new(Unfed {
                    failure,
                    left: Left {
                        image: image.to_owned(),
                        image_id: self.image.id(),
                        fed_bytes: numbers.fed.0,
                        total_bytes: numbers.total.0,
                    },
                    image: self.image,
                    keep_image: self.keep_image,
                }))
            }
        }
    }
}

impl Unfed {
    /// The guest shut itself down: what it had not got of its memory it will never need.
    pub async fn guest_is_off(self, vm_directory: &Path) -> Result<(), Failure> {
        Spent {
            image: self.image,
            keep: self.keep_image,
        }
        .put_away(vm_directory)
        .await
        .1
    }
}

/// An image that its guest needs no more.
#[derive(Debug)]
pub struct Spent {
    /// It.
    pub image: Image,
    /// Whether it is kept.
    pub keep: bool,
}

impl Spent {
    /// Marks it as used, and removes it unless it is kept. Where that fails it comes back, to be tried again.
    ///
    /// The record goes between the mark and the image: whoever finds one, and no image, knows that one is missing.
    pub async fn put_away(mut self, vm_directory: &Path) -> (Option<Self>, Result<(), Failure>) {
        let vm_directory = vm_directory.to_owned();
        let put_away = blocking(move || {
            let is_done = self.try_to(&vm_directory);
            Ok((Some(self), is_done))
        });
        put_away.await.unwrap_or_else(|failure| (None, Err(failure)))
    }

    fn try_to(&mut self, vm_directory: &Path) -> Result<(), Failure> {
        if self.image.state() != ImageState::Consumed {
            self.image.mark(ImageState::Consumed)?;
        }
        FeedRecord::remove(vm_directory)?;
        if !self.keep {
            self.image.remove()?;
        }
        Ok(())
    }
}

impl View {
    /// How it stands, and what is seen of it.
    pub fn state(&self) -> (State, dormouse_storage::feed::Numbers, Vec<Damage>) {
        (
            self.state.borrow().clone(),
            self.told.numbers(),
            self.told.damage(),
        )
    }

    /// How much came in a second, so far or in all, and how long the rest takes at that pace.
    pub fn pace(&self) -> (ByteCount, Option<Duration>) {
        let (state, numbers, damage) = self.state();
        let took = match &state {
            State::Complete(fed) => fed.took,
            _ => self.began.elapsed(),
        };
        let per_second = numbers.fed.0 as f64 / took.as_secs_f64().max(1e-3);
        let left = numbers.total.0.saturating_sub(numbers.fed.0) as f64;
        let comes = state == State::Feeding && damage.is_empty() && per_second >= 1.0;
        let rest = comes.then(|| Duration::from_secs_f64(left / per_second));
        (ByteCount(per_second as u64), rest)
    }

    /// Why the guest stands for good where it needs memory that does not come. Such a QEMU cannot always end by itself: it
    /// waits for its CPUs first.
    pub fn failure(&self) -> Option<Failure> {
        let (state, _, damage) = self.state();
        match (state, damage.first()) {
            (State::Complete(_), _) | (State::Feeding, None) => None,
            (State::Failed(failure), _) => Some(failure),
            (State::Feeding, Some(first)) => {
                // What will not come any more says most.
                let worst = damage.iter().find(|damage| !damage.may_come).unwrap_or(first);
                let again = if worst.may_come {
                    "; storage is asked again until it gives it"
                } else {
                    ""
                };
                Some(Failure::new(
                    code_of(worst),
                    format!(
                        "some of the guest's memory cannot be had, and the guest stands where it needs it: {}{again}",
                        worst.why
                    ),
                ))
            }
        }
    }

    /// Why the guest's memory cannot be saved yet, or any more.
    pub fn in_the_way(&self) -> Option<Failure> {
        if let Some(failure) = self.failure() {
            return Some(Failure {
                code: Code::Refused,
                ..failure.while_doing("not all of the guest's memory is there")
            });
        }
        let (state, numbers, _) = self.state();
        if state != State::Feeding {
            return None;
        }
        let again = match self.pace().1 {
            Some(rest) => format!("in about {} s", rest.as_secs_f64().ceil()),
            None => "when it is there".to_owned(),
        };
        Some(Failure::new(
            Code::Refused,
            format!(
                "memory is still coming from the image ({:.0} % of {} done); try again {again}",
                numbers.share() * 100.0,
                numbers.total
            ),
        ))
    }
}
