//! Acts for the suspend's machine: one effect at a time, with an eye on QEMU, on the limit and on cancels.
//!
//! How the guest's power-off is known: QEMU's `SHUTDOWN` event tells the reason, and comes before QEMU ends or stands
//! in the run state `shutdown` (`-no-shutdown`). Where the guest goes to ACPI S4, `SUSPEND_DISK` comes before it. A QEMU
//! that is gone without that word was killed or crashed, and its guest did not power off.

use std::path::PathBuf;
use std::pin::pin;
use std::time::Duration;

use dormouse_qmp::agent::{Agent, AgentError, AgentOptions, GuestInfo};
use dormouse_qmp::view::machine::RunState;
use dormouse_qmp::{Client, Events, Heard, command};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::machine::{Effect, Input, Machine, Phase, guest_state};
use super::{Report, Request};
use crate::error::{Code, Failure, sentence};
use crate::machine::effect::{milliseconds, out_of_order};
use crate::machine::hibernate::runner::Cancel;
use crate::vm::process::ProcessEnd;
use crate::vm::{agent_socket, monitor};

/// How often QEMU is asked for its run state while the guest saves itself. Events tell it sooner; this is for those
/// that were lost.
const POLL: Duration = Duration::from_millis(250);

/// How often the end of QEMU's process is looked for.
const END_POLL: Duration = Duration::from_millis(5);

/// How long a QEMU that answers no more is watched for its end, to tell what became of the guest.
const LAST_LOOK: Duration = Duration::from_secs(5);

/// How long QEMU may take to end once its guest is off.
const END_TIMEOUT: Duration = Duration::from_secs(60);

/// The command that it is all about.
const SUSPEND: &str = "guest-suspend-disk";

/// Suspends the guest behind `client` to its disk. Returns when it is over, whichever way.
pub async fn suspend(
    client: Client,
    request: Request,
    told: watch::Sender<Phase>,
    mut cancels: mpsc::Receiver<Cancel>,
) -> Result<Report, Failure> {
    let mut work = Work {
        client: client.clone(),
        limit: request.limit,
        channel: None,
        qemu: None,
        power_off: None,
    };
    let (mut machine, first) = Machine::begin();
    let mut next = Some(first);
    while let Some(effect) = next {
        told.send_replace(machine.phase());
        next = match effect {
            Effect::Preflight => {
                let act = work.preflight(&request);
                settle(&mut machine, act, std::future::pending(), &mut cancels).await
            }
            Effect::Ask => {
                // From before the command on, so that nothing that it causes is missed.
                let events = client.events();
                let begun = Instant::now();
                let watching = watch_for_end(&client, events, request.limit, &mut work.power_off, begun);
                let act = ask(work.channel.as_ref(), work.limit);
                settle(&mut machine, act, watching, &mut cancels).await
            }
            Effect::End => settle(&mut machine, work.end(), std::future::pending(), &mut cancels).await,
        };
    }
    told.send_replace(machine.phase());
    match machine.failure().cloned() {
        // Asked, not deduced: the guest may have done something else meanwhile.
        Some(failure) => Err(work.with_guest_state(failure).await),
        None => work.report(),
    }
}

/// Feeds the machine until it wants something else, or is over.
async fn settle(
    machine: &mut Machine,
    act: impl Future<Output = Input>,
    news: impl Future<Output = Input>,
    cancels: &mut mpsc::Receiver<Cancel>,
) -> Option<Effect> {
    let (mut act, mut news) = (pin!(act), pin!(news));
    let (mut acting, mut listening) = (true, true);
    loop {
        let input = tokio::select! {
            biased;
            Some(answer) = cancels.recv() => {
                // Whoever asked may be gone; the cancel counts all the same.
                let _ = answer.send(machine.answer_to_cancel());
                Input::CancelRequested
            }
            input = &mut news, if listening => {
                listening = false;
                input
            }
            input = &mut act, if acting => {
                acting = false;
                input
            }
            else => Input::Failed(out_of_order()),
        };
        tracing::debug!(phase = ?machine.phase(), ?input, "suspend to disk");
        let next = machine.step(input);
        if next.is_some() || machine.is_over() {
            return next;
        }
    }
}

/// The way to the guest's agent.
#[derive(Debug)]
struct Channel {
    path: PathBuf,
    agent: Agent,
}

/// How the guest went off.
#[derive(Debug, Clone, Copy, Default)]
struct PowerOff {
    by_s4: bool,
    after: Duration,
}

/// What one suspend has in its hands.
struct Work {
    client: Client,
    limit: Duration,
    channel: Option<Channel>,
    qemu: Option<ProcessEnd>,
    power_off: Option<PowerOff>,
}

impl Work {
    async fn preflight(&mut self, request: &Request) -> Input {
        match self.examine(request).await {
            Ok(()) => Input::Done,
            Err(failure) => Input::Failed(failure),
        }
    }

    async fn examine(&mut self, request: &Request) -> Result<(), Failure> {
        let refused = |why: String| Err(Failure::new(Code::Refused, why));
        let pid = match self.client.peer_pid() {
            Some(pid) => pid,
            None => {
                return refused(
                    "cannot see QEMU's process (another PID namespace?), so its end cannot be seen"
                        .to_owned(),
                );
            }
        };
        self.qemu = Some(ProcessEnd::of(pid));
        let state = monitor::run_state(&self.client).await?;
        if state != RunState::Running {
            return refused(format!(
                "the guest does not run but is {state}, so its agent cannot answer"
            ));
        }
        let path = match &request.agent {
            Some(path) => path.clone(),
            None => agent_socket::find(&self.client, pid).await?,
        };
        let agent = Agent::connect(path.as_path(), AgentOptions::default())
            .await
            .map_err(|error| not_asked(&error))?;
        match agent.execute(&GuestInfo {}).await {
            Ok(info) if info.allows(SUSPEND) => {}
            Ok(info) => {
                let version = info.version.unwrap_or_else(|| "of no version".to_owned());
                return refused(format!(
                    "the guest agent ({version}) does not know {SUSPEND}, or may not do it"
                ));
            }
            // It may be this question alone that it does not answer.
            Err(AgentError::Refused { .. }) => {}
            Err(error) => return Err(not_asked(&error)),
        }
        self.channel = Some(Channel { path, agent });
        Ok(())
    }

    /// QEMU ends by itself, unless it was told to stay.
    async fn end(&mut self) -> Input {
        let Some(qemu) = &self.qemu else {
            return Input::Failed(out_of_order());
        };
        let deadline = Instant::now() + END_TIMEOUT;
        let mut told = false;
        while !qemu.is_over() {
            if Instant::now() > deadline {
                return Input::Failed(Failure::new(
                    Code::TimedOut,
                    format!("it is still there after {END_TIMEOUT:?}"),
                ));
            }
            if !told && matches!(monitor::run_state(&self.client).await, Ok(RunState::Shutdown)) {
                // It is the process that counts, not the answer.
                let _ = self.client.execute(&command::quit {}).await;
                told = true;
            }
            tokio::time::sleep(END_POLL).await;
        }
        Input::Done
    }

    async fn with_guest_state(&self, failure: Failure) -> Failure {
        let state = monitor::run_state(&self.client).await.ok();
        let is_over = || self.qemu.as_ref().is_some_and(ProcessEnd::is_over);
        // A QEMU that answers no more is most likely on its way out.
        let deadline = Instant::now() + LAST_LOOK;
        while state.is_none() && !is_over() && Instant::now() < deadline {
            tokio::time::sleep(END_POLL).await;
        }
        let runs = state.map(|state| state == RunState::Running);
        failure.with_guest(guest_state(runs, is_over()))
    }

    fn report(self) -> Result<Report, Failure> {
        let power_off = self.power_off.ok_or_else(out_of_order)?;
        Ok(Report {
            agent: self.channel.ok_or_else(out_of_order)?.path,
            by_s4: power_off.by_s4,
            power_off_ms: milliseconds(power_off.after),
        })
    }
}

/// The agent has until the limit to refuse: whatever the guest tries may fail late.
async fn ask(channel: Option<&Channel>, limit: Duration) -> Input {
    let Some(channel) = channel else {
        return Input::Failed(out_of_order());
    };
    match channel.agent.with_deadline(limit).suspend_to_disk().await {
        Ok(suspension) => {
            tracing::debug!(?suspension, "the agent took the command");
            Input::Done
        }
        Err(error @ AgentError::Garbled { .. }) => {
            // It went out, and what the guest does shows in QEMU.
            tracing::warn!(%error, "the agent's answer means nothing");
            Input::Done
        }
        Err(error) => Input::Failed(not_asked(&error)),
    }
}

/// The guest goes on: its agent refused, or never got the command.
fn not_asked(error: &AgentError) -> Failure {
    let code = match error {
        AgentError::Refused { .. } => Code::Refused,
        AgentError::Arguments { .. } => Code::Internal,
        _ => Code::Unreachable,
    };
    Failure::new(code, sentence(error))
}

/// Watches QEMU until its guest is off, it ends otherwise, or the limit is reached.
async fn watch_for_end(
    client: &Client,
    events: Events,
    limit: Duration,
    power_off: &mut Option<PowerOff>,
    begun: Instant,
) -> Input {
    let mut by_s4 = false;
    match tokio::time::timeout(limit, heard_of_end(client, events, &mut by_s4)).await {
        Ok(None) => {
            *power_off = Some(PowerOff {
                by_s4,
                after: begun.elapsed(),
            });
            Input::PoweredOff
        }
        Ok(Some(otherwise)) => Input::EndedOtherwise(otherwise),
        Err(_) => Input::LimitReached(limit),
    }
}

/// `None`: the guest powered off; else why QEMU ends.
async fn heard_of_end(client: &Client, mut events: Events, by_s4: &mut bool) -> Option<String> {
    let mut stands_off = false;
    loop {
        tokio::select! {
            biased;
            heard = events.next() => match heard {
                Heard::Event(event) if event.name == "SUSPEND_DISK" => *by_s4 = true,
                Heard::Event(event) if event.name == "SHUTDOWN" => {
                    return otherwise(event.data["reason"].as_str().unwrap_or_default());
                }
                Heard::Event(_) | Heard::Lagged(_) => {}
                Heard::Closed if *by_s4 => return None,
                Heard::Closed => return Some("QEMU, or the way to it, was gone".to_owned()),
            },
            // An event that told why came before the run state, and was read above.
            () = std::future::ready(()), if stands_off => return None,
            () = tokio::time::sleep(POLL) => {
                stands_off = matches!(monitor::run_state(client).await, Ok(RunState::Shutdown));
            }
        }
    }
}

/// A guest that resets or panics has not saved itself, and neither has one whose QEMU was told to end.
fn otherwise(reason: &str) -> Option<String> {
    (reason != "guest-shutdown").then(|| format!("QEMU ended ({reason})"))
}
