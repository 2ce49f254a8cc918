//! How RAM gets from a running QEMU into an image, and which way this guest allows.
//!
//! ```text
//!  direct      RAM is read from the memory itself; QEMU sends its devices alone
//!              by x-ignore-shared   QEMU leaves out RAM that is shared, and its process leads to the files
//!              by cpr-transfer      QEMU hands over the files of all its RAM (QEMU 10.0)
//!  stream      all RAM comes from QEMU through sockets: any RAM, any QEMU
//! ```
//!
//! In this order, as the measurements have it. Nothing is assumed for good: what QEMU then really leaves out or hands
//! over is checked once it has done so.

use dormouse_qmp::Client;
use dormouse_qmp::capabilities::Capabilities;
use dormouse_qmp::command;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::binary::MemoryBackendAbilities;
use super::memory::{Backend, FILE_BACKEND, Memory};
use super::monitor;
use crate::error::{Code, Failure};

/// The migration mode in which QEMU hands its memory over.
pub const CPR_MODE: &str = "cpr-transfer";

/// How many channels a stream has beside its main one, unless told otherwise. A disk of 2 GB/s is filled by two (1.98
/// and 1.95 of a plain save with two and four); without a disk four bring 3.9 GB/s and two 2.5 to 2.9; on a host with
/// other work four were faster in each of six pairs of runs (10.0: 1.19 to 1.37 GB/s against 0.99 to 1.30).
const CHANNELS: u8 = 4;

/// What is wished for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Wish {
    /// The first way that this guest allows.
    #[default]
    Auto,
    /// RAM is read from the memory itself, or not at all.
    Direct,
    /// RAM comes from QEMU, even where it could be read.
    Stream,
}

/// A way for RAM to get into an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Engine {
    /// Read from the files that QEMU's process has open; QEMU leaves it out.
    Direct,
    /// Read from the descriptors that QEMU hands over.
    DirectCpr,
    /// Received from QEMU.
    Stream,
}

/// The engine that is taken, and why none before it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Choice {
    /// The engine.
    pub engine: Engine,
    /// Channels beside the main stream, where RAM comes from QEMU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub channels: Option<u8>,
    /// Why each of those that would be better cannot be taken.
    pub passed_over: Vec<String>,
}

/// What the choice depends on.
#[derive(Debug)]
pub struct Facts<'a> {
    /// The guest's memory.
    pub backends: &'a [Backend],
    /// Whether `x-ignore-shared` leaves out whatever is shared. Since QEMU 8.1 it leaves out files with a name alone.
    pub leaves_out_any_shared: bool,
    /// Whether QEMU can hand over its memory; why not.
    pub hands_over: Result<(), String>,
    /// Whether QEMU can send RAM over several channels at once; why not.
    pub multifd: Result<(), String>,
}

impl Engine {
    /// Its name, as users, images and programs are told it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::DirectCpr => "direct-cpr",
            Self::Stream => "stream",
        }
    }
}

impl<'a> Facts<'a> {
    /// Asks the QEMU whose memory was surveyed.
    pub async fn of(client: &Client, memory: &'a Memory) -> Result<Self, Failure> {
        Ok(Self {
            backends: &memory.backends,
            // The release that narrowed the capability also brought offsets to memory files.
            leaves_out_any_shared: !MemoryBackendAbilities::of(client).await?.offset,
            hands_over: hands_over(client).await?,
            multifd: Capabilities::of(client)
                .await?
                .has_migration_capability("multifd")
                .then_some(())
                .ok_or_else(|| "this QEMU has no multifd".to_owned()),
        })
    }

    /// Asks QEMU itself, where handing over is what will be tried. Not for those who only look: it takes setting the mode
    /// for the question.
    pub async fn ask_about_handing_over(&mut self, client: &Client) -> Result<(), Failure> {
        if self.against_direct().is_some() && self.against_cpr().is_none() {
            let reasons = monitor::blocked_reasons_in(client, CPR_MODE).await?;
            if !reasons.is_empty() {
                self.hands_over = Err(reasons.join("; "));
            }
        }
        Ok(())
    }

    /// Why RAM cannot be read from outside while QEMU leaves it out.
    pub fn against_direct(&self) -> Option<String> {
        self.first_against(|backend| {
            backend.reach.as_ref().err().cloned().or_else(|| {
                let left_out = backend.kind == FILE_BACKEND || self.leaves_out_any_shared;
                (!left_out).then(|| {
                    format!(
                        "it is a {}, which this QEMU sends even if it is shared; x-ignore-shared leaves out only \
                         memory-backend-file since QEMU 8.1",
                        backend.kind
                    )
                })
            })
        })
    }

    /// Why QEMU cannot hand its RAM over.
    pub fn against_cpr(&self) -> Option<String> {
        if let Err(why) = &self.hands_over {
            return Some(why.clone());
        }
        self.first_against(|backend| match &backend.reach {
            _ if !backend.shared => Some("it is private to QEMU (share=off)".to_owned()),
            // A file with a name is not handed over: whoever wants it opens it by that.
            Err(why) if backend.kind == FILE_BACKEND => Some(why.clone()),
            _ => None,
        })
    }

    fn first_against(&self, against: impl Fn(&Backend) -> Option<String>) -> Option<String> {
        self.backends
            .iter()
            .find_map(|backend| Some(format!("RAM block {}: {}", backend.id, against(backend)?)))
    }
}

/// Chooses the first engine that the facts allow. `channels`: how many a stream shall have beside its main one.
pub fn choose(wish: Wish, channels: Option<u8>, facts: &Facts<'_>) -> Result<Choice, Failure> {
    let mut passed_over = Vec::new();
    if wish != Wish::Stream {
        let ways = [
            (Engine::Direct, "x-ignore-shared", facts.against_direct()),
            (Engine::DirectCpr, "cpr-transfer", facts.against_cpr()),
        ];
        for (engine, way, against) in ways {
            match against {
                None => {
                    return Ok(Choice {
                        engine,
                        channels: None,
                        passed_over,
                    });
                }
                Some(why) => passed_over.push(format!("not direct by {way}: {why}")),
            }
        }
    }
    if wish == Wish::Direct {
        return Err(Failure::new(
            Code::Refused,
            format!(
                "the direct engine cannot save this guest: {}; let it be saved by --engine stream, or start it with \
                 `dormouse run` next time",
                passed_over.join("; ")
            ),
        ));
    }
    let channels = match (channels, &facts.multifd) {
        (None | Some(0), Err(_)) => 0,
        (Some(wanted), Err(why)) => {
            return Err(Failure::new(
                Code::Refused,
                format!("RAM cannot come over {wanted} channels: {why}; use --channels 0"),
            ));
        }
        (wanted, Ok(())) => wanted.unwrap_or(CHANNELS),
    };
    Ok(Choice {
        engine: Engine::Stream,
        channels: Some(channels),
        passed_over,
    })
}

/// Whether this QEMU can hand over the files of its RAM, and what would help where it cannot.
async fn hands_over(client: &Client) -> Result<Result<(), String>, Failure> {
    if !Capabilities::of(client).await?.has_migration_mode(CPR_MODE) {
        return Ok(Err(
            "this QEMU has no migration mode cpr-transfer, which came with QEMU 10.0".to_owned(),
        ));
    }
    let get = command::qom_get {
        path: "/machine".to_owned(),
        property: "aux-ram-share".to_owned(),
    };
    let is_on = client.execute(&get).await.is_ok_and(|value| value == json!(true));
    Ok(is_on
        .then_some(())
        .ok_or_else(|| "the machine was started without aux-ram-share=on".to_owned()))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use dormouse_storage::ByteCount;

    use super::super::memory::MEMFD_BACKEND;
    use super::*;

    fn backend(kind: &str, shared: bool, reachable: bool) -> Backend {
        let reach = match reachable {
            true => Ok(File::open("/dev/null").unwrap()),
            false => Err("nobody has it open".to_owned()),
        };
        Backend {
            id: format!("of-{kind}"),
            kind: kind.to_owned(),
            length: ByteCount(1 << 20),
            shared,
            reach,
        }
    }

    fn file() -> Backend {
        backend(FILE_BACKEND, true, true)
    }

    fn memfd(reachable: bool) -> Backend {
        backend(MEMFD_BACKEND, true, reachable)
    }

    fn private() -> Backend {
        backend("memory-backend-ram", false, false)
    }

    /// A QEMU of 7.2, one of 10.0 with or without what handing over takes, or one that somebody built lean.
    #[derive(Clone, Copy)]
    enum Qemu {
        Old,
        New,
        NewWithAux,
        WithoutMultifd,
    }

    fn chosen(
        wish: Wish,
        channels: Option<u8>,
        qemu: Qemu,
        backends: Vec<Backend>,
    ) -> Result<Choice, Failure> {
        let facts = Facts {
            backends: &backends,
            leaves_out_any_shared: matches!(qemu, Qemu::Old),
            hands_over: match qemu {
                Qemu::NewWithAux => Ok(()),
                _ => Err("it cannot".to_owned()),
            },
            multifd: match qemu {
                Qemu::WithoutMultifd => Err("it has not that".to_owned()),
                _ => Ok(()),
            },
        };
        choose(wish, channels, &facts)
    }

    #[test]
    fn the_first_engine_that_all_of_the_memory_allows_is_taken() {
        use Qemu::{New, NewWithAux, Old};
        for (qemu, backends, engine) in [
            (Old, vec![file()], Engine::Direct),
            (New, vec![file(), file()], Engine::Direct),
            (NewWithAux, vec![file()], Engine::Direct),
            (Old, vec![memfd(true), file()], Engine::Direct),
            (NewWithAux, vec![memfd(true)], Engine::DirectCpr),
            (NewWithAux, vec![memfd(false), file()], Engine::DirectCpr),
            (Old, vec![memfd(false)], Engine::Stream),
            (New, vec![memfd(true)], Engine::Stream),
            (NewWithAux, vec![memfd(true), private()], Engine::Stream),
        ] {
            let described = format!("{backends:?}");
            let choice = chosen(Wish::Auto, None, qemu, backends).unwrap();
            assert_eq!(choice.engine, engine, "{described}");
        }
    }

    #[test]
    fn the_block_that_stands_in_the_way_is_named_with_its_reason() {
        use Qemu::{New, NewWithAux, Old};
        for (qemu, backends, words) in [
            (
                Old,
                vec![file(), memfd(false)],
                "of-memory-backend-memfd: nobody has it open",
            ),
            (New, vec![memfd(true)], "only memory-backend-file since QEMU 8.1"),
            (New, vec![file(), private()], "cpr-transfer: it cannot"),
            (
                NewWithAux,
                vec![memfd(true), private()],
                "of-memory-backend-ram: it is private",
            ),
            (
                NewWithAux,
                vec![backend(FILE_BACKEND, true, false)],
                "nobody has it open",
            ),
        ] {
            let failure = chosen(Wish::Direct, None, qemu, backends).unwrap_err();
            assert_eq!(failure.code, Code::Refused);
            assert!(failure.message.contains(words), "{words:?} is not in {failure}");
        }
    }

    #[test]
    fn a_stream_has_the_channels_that_are_wished_for_where_qemu_can() {
        use Qemu::{New, WithoutMultifd};
        for (wish, channels, qemu, expected) in [
            (Wish::Auto, None, New, Some(CHANNELS)),
            (Wish::Auto, Some(7), New, Some(7)),
            (Wish::Stream, Some(0), New, Some(0)),
            (Wish::Auto, None, WithoutMultifd, Some(0)),
            (Wish::Stream, Some(0), WithoutMultifd, Some(0)),
        ] {
            let choice = chosen(wish, channels, qemu, vec![private()]).unwrap();
            assert_eq!((choice.engine, choice.channels), (Engine::Stream, expected));
        }
        let failure = chosen(Wish::Auto, Some(2), WithoutMultifd, vec![private()]).unwrap_err();
        for words in ["it has not that", "--channels 0"] {
            assert!(failure.message.contains(words), "{failure}");
        }
        let direct = chosen(Wish::Auto, Some(7), New, vec![file()]).unwrap();
        assert_eq!((direct.engine, direct.channels), (Engine::Direct, None));
        let asked_for = chosen(Wish::Stream, None, New, vec![file()]).unwrap();
        assert_eq!(asked_for.engine, Engine::Stream);
    }
}
