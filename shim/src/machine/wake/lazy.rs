//! The wake of a guest that runs before its memory is there: QEMU is told of a post-copy migration, and we are its source.
//!
//! ```text
//!  Load      postcopy-ram on, one end of a socket to QEMU, the feeder begins with the devices and answers from then on
//!            (loading devices may touch memory), until QEMU has loaded them and the machine stands
//!  Mark      first what a recovery needs is written down, then the image is `waking`
//!  Resume    cont; then the rest is fed, too
//!            (the wake is over; the image stays `waking` and locked)
//!  the end   the guest has all of its memory: the image is `consumed`
//! ```
//!
//! Until the end the guest depends on the image and on its feeder. If that is killed, QEMU keeps what it has and waits.

use std::os::unix::net::UnixStream;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use dormouse_qmp::view::machine::{HumanReadableText, RunState};
use dormouse_qmp::{Client, Events, Heard, command};
use dormouse_storage::feed::{Damage, Fed, FeedError, Feeder, Told};
use dormouse_storage::{ByteCount, Image};
use serde_json::json;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::error::{Code, Failure, sentence};
use crate::vm::monitor::{self, wait_for_run_state};

/// The name under which QEMU gets its end of the socket.
const FEED_FD: &str = "dormouse-feed";

/// How long QEMU may take to load the devices. They may need memory, which comes from storage.
const LOAD_TIMEOUT: Duration = Duration::from_secs(60);

/// How often it is looked whether the devices are loaded.
const POLL: Duration = Duration::from_millis(1);

/// What is wished for the time in which the guest runs and its memory comes.
#[derive(Debug, Clone, Copy, Default)]
pub struct FeedWish {
    /// The most that is read in a second for what nobody waits for.
    pub rate_limit: Option<ByteCount>,
    /// Whether the image is kept at the end, marked as used.
    pub keep_image: bool,
}

/// A feed that goes on.
#[derive(Debug)]
pub struct Feed {
    /// What is seen of it.
    pub told: Arc<Told>,
    /// Its thread.
    task: JoinHandle<Result<Fed, FeedError>>,
    /// How it ended, if it did before anybody asked.
    ended: Option<Fed>,
}

/// A feeder for the guest in `image`.
pub fn feeder(image: &Image, placed: &[&str], wish: FeedWish) -> Result<Feeder, Failure> {
    let late = placed.iter().map(|name| (*name).to_owned()).collect();
    let reader = image.reader()?;
    Feeder::new(reader, late, wish.rate_limit).map_err(|error| failed(&error))
}

/// Loads the devices and begins to feed. Returns when the machine stands and only has to be told to run.
pub async fn load(client: &Client, feeder: Feeder) -> Result<Feed, Failure> {
    let mut events = client.events();
    let capabilities = ["postcopy-ram", "events"].map(|name| json!({"capability": name, "state": true}));
    client
        .execute_raw("migrate-set-capabilities", json!({"capabilities": capabilities}))
        .await
        .map_err(|error| {
            Failure::new(
                Code::Refused,
                format!(
                    "QEMU cannot let a guest run before its memory is there: {error}; {}, or use --mode eager",
                    dormouse_storage::feed::USERFAULTFD_REMEDY
                ),
            )
        })?;
    let page_sizes = page_sizes(client).await?;
    let stream = monitor::pass_stream(client, FEED_FD).await?;
    let stream = stream.into_std().and_then(|stream| {
        stream.set_nonblocking(false)?;
        Ok(stream)
    });
    let stream =
        stream.map_err(|error| Failure::new(Code::Internal, format!("cannot use a socket pair: {error}")))?;
    client
        .execute(&command::migrate_incoming {
            uri: Some(format!("fd:{FEED_FD}")),
            channels: None,
            exit_on_error: None,
        })
        .await?;
    let told = feeder.told();
    let mut feed = Feed {
        told,
        task: tokio::task::spawn_blocking(move || feeder.feed(stream, page_sizes)),
        ended: None,
    };
    feed.wait_until_loaded(client).await?;
    if lets_go_without_its_main_loop(&mut events).await {
        feed.told.pass_zeros();
    }
    Ok(feed)
}

/// How QEMU lets go of its memory when all has come. Since 10.2 its main loop does it, which may stand itself for a page
/// by then that never comes; such a QEMU says that it loads its devices.
async fn lets_go_without_its_main_loop(events: &mut Events) -> bool {
    let mut runs = false;
    // What it has said so far.
    while let Ok(Heard::Event(event)) = tokio::time::timeout(Duration::ZERO, events.next()).await {
        match event.data["status"].as_str() {
            Some("postcopy-device") if event.name == "MIGRATION" => return false,
            Some("postcopy-active") if event.name == "MIGRATION" => runs = true,
            _ => {}
        }
    }
    runs
}

/// Goes on with a guest whose feeder was killed, over a connection that QEMU waits for.
pub fn go_on(
    feeder: Feeder,
    stream: UnixStream,
    page_sizes: impl Fn(&str) -> Option<u64> + Send + 'static,
) -> Feed {
    Feed {
        told: feeder.told(),
        task: tokio::task::spawn_blocking(move || feeder.go_on(stream, page_sizes)),
        ended: None,
    }
}

/// The page sizes of QEMU's RAM blocks.
pub async fn page_sizes(client: &Client) -> Result<impl Fn(&str) -> Option<u64> + use<>, Failure> {
    let listing: HumanReadableText = client.query(&command::x_query_ramblock {}).await?;
    let blocks = listing.ram_blocks();
    Ok(move |name: &str| {
        let block = blocks.iter().find(|block| block.name == name)?;
        block.page_size_bytes
    })
}

impl Feed {
    async fn wait_until_loaded(&mut self, client: &Client) -> Result<(), Failure> {
        let told = self.told.clone();
        let loaded = async {
            let deadline = Instant::now() + LOAD_TIMEOUT;
            while !told.is_loaded() {
                if Instant::now() > deadline {
                    return Err(Failure::new(
                        Code::TimedOut,
                        format!("QEMU has not loaded the devices after {LOAD_TIMEOUT:?}"),
                    ));
                }
                tokio::time::sleep(POLL).await;
            }
            wait_for_run_state(client, "paused", |state| *state == RunState::Paused).await?;
            Ok(())
        };
        let damaged = async {
            loop {
                if let Some(damage) = self.told.damage().first() {
                    return Failure::new(code_of(damage), damage.why.clone());
                }
                tokio::time::sleep(POLL).await;
            }
        };
        let mut loaded = pin!(loaded);
        tokio::select! {
            biased;
            loaded = &mut loaded => loaded,
            failure = damaged => Err(failure),
            ended = &mut self.task => match joined(ended) {
                // Whoever looks at a machine's memory through another monitor has all of it asked for.
                Ok(fed) => {
                    self.ended = Some(fed);
                    loaded.await
                }
                // A QEMU that cannot load says why on its error output and ends, which is looked at for this code.
                Err(FeedError::Lost { .. } | FeedError::Refused) => Err(Failure::new(
                    Code::Unreachable,
                    "QEMU did not accept the image's device state",
                )),
                Err(error) => Err(failed(&error)),
            },
        }
    }

    /// Waits for the end.
    pub async fn ended(&mut self) -> Result<Fed, FeedError> {
        match self.ended.take() {
            Some(fed) => Ok(fed),
            None => joined((&mut self.task).await),
        }
    }
}

fn joined(ended: Result<Result<Fed, FeedError>, tokio::task::JoinError>) -> Result<Fed, FeedError> {
    ended.unwrap_or_else(|error| Err(FeedError::Mismatch(format!("the feed ended in panic: {error}"))))
}

/// What memory that cannot be had is to the outside.
pub fn code_of(damage: &Damage) -> Code {
    if damage.may_come {
        Code::StorageIo
    } else {
        Code::ImageInvalid
    }
}

/// What a feed that failed is to the outside.
pub fn failed(error: &FeedError) -> Failure {
    let code = match error {
        FeedError::Image(error) => Code::from(error),
        FeedError::Damaged { .. } => Code::ImageInvalid,
        FeedError::Mismatch(_) | FeedError::Refused => Code::Refused,
        _ => Code::Unreachable,
    };
    Failure::new(code, sentence(error))
}
