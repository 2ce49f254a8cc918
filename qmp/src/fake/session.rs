//! The task of a fake QEMU: serves one client after the other.

use std::io::{self, IoSliceMut};
use std::mem::MaybeUninit;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde_json::{Value, json};
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{mpsc, watch};

use super::Received;
use super::script::{Answer, Body, Script};
use crate::transport::DESCRIPTOR_LIMIT;
use crate::wire::line::{LINE_LIMIT_BYTES, LineBuffer};

/// What a test wants to happen now.
#[derive(Debug)]
pub(super) enum Cue {
    Send(Vec<u8>),
    Answer { id: Value, answer: Answer },
    HangUp,
}

pub(super) struct Session {
    script: Script,
    cues: mpsc::UnboundedReceiver<Cue>,
    received: watch::Sender<Vec<Received>>,
    descriptors: Arc<Mutex<Vec<OwnedFd>>>,
}

/// The side of one client.
struct Served {
    stream: UnixStream,
    lines: LineBuffer,
    /// Received with the socket and not taken by a command.
    arrived: Vec<OwnedFd>,
    negotiated: bool,
}

/// Whether to go on with this client.
type Flow = ControlFlow<()>;

impl Session {
    pub(super) fn new(
        script: Script,
        cues: mpsc::UnboundedReceiver<Cue>,
        received: watch::Sender<Vec<Received>>,
        descriptors: Arc<Mutex<Vec<OwnedFd>>>,
    ) -> Self {
        Self {
            script,
            cues,
            received,
            descriptors,
        }
    }

    pub(super) async fn serve(mut self, listener: UnixListener) {
        while let Ok((stream, _)) = listener.accept().await {
            let mut served = Served {
                stream,
                lines: LineBuffer::new(LINE_LIMIT_BYTES),
                arrived: Vec::new(),
                negotiated: false,
            };
            self.serve_one(&mut served).await;
        }
    }

    async fn serve_one(&mut self, served: &mut Served) {
        if let Some(greeting) = self.script.greeting.clone()
            && self.send(served, &line_of(&greeting)).await.is_break()
        {
            return;
        }
        loop {
            let flow = tokio::select! {
                ready = served.stream.readable() => match ready {
                    Ok(()) => self.receive(served).await,
                    Err(_) => Flow::Break(()),
                },
                cue = self.cues.recv() => match cue {
                    Some(Cue::Send(bytes)) => self.send(served, &bytes).await,
                    Some(Cue::Answer { id, answer }) => self.answer(served, &id, answer).await,
                    Some(Cue::HangUp) | None => Flow::Break(()),
                },
            };
            if flow.is_break() {
                return;
            }
        }
    }

    async fn receive(&mut self, served: &mut Served) -> Flow {
        match served.read() {
            Ok(0) => return Flow::Break(()),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Flow::Continue(()),
            Err(_) => return Flow::Break(()),
        }
        while let Ok(Some(line)) = served.lines.next_line() {
            let Ok(command) = serde_json::from_slice::<Value>(&line) else {
                let answer = self.script.parse_error.clone();
                self.answer(served, &Value::Null, answer).await?;
                continue;
            };
            self.execute(served, &command).await?;
        }
        Flow::Continue(())
    }

    async fn execute(&mut self, served: &mut Served, command: &Value) -> Flow {
        let (out_of_band, name) = match (command["execute"].as_str(), command["exec-oob"].as_str()) {
            (Some(name), _) => (false, name),
            (None, Some(name)) => (true, name),
            (None, None) => {
                let desc = "QMP input lacks member 'execute'";
                return self
                    .send(served, &error_line(&command["id"], "GenericError", desc))
                    .await;
            }
        };
        // Further descriptors of the same message are closed, as QEMU does.
        let descriptor = if takes_descriptor(name) {
            served.arrived.drain(..).next()
        } else {
            None
        };
        let received = Received {
            name: name.to_owned(),
            arguments: command["arguments"].clone(),
            id: command["id"].clone(),
            out_of_band,
            took_descriptor: descriptor.is_some(),
        };
        self.descriptors
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .extend(descriptor);
        let answer = self.decide(served, &received);
        self.received.send_modify(|all| all.push(received));
        self.answer(served, &command["id"], answer).await
    }

    fn decide(&mut self, served: &mut Served, command: &Received) -> Answer {
        if !served.negotiated && command.name != "qmp_capabilities" {
            let desc = "Expecting capabilities negotiation with 'qmp_capabilities'";
            return Answer::fails("CommandNotFound", desc);
        }
        let again = std::mem::replace(&mut served.negotiated, true);
        if let Some(answer) = self.script.answer(command) {
            return answer;
        }
        match command.name.as_str() {
            "qmp_capabilities" if again => Answer::fails(
                "CommandNotFound",
                "Capabilities negotiation is already complete, command ignored",
            ),
            "qmp_capabilities" => Answer::returns(json!({})),
            name => missing_descriptor(command).unwrap_or_else(|| match name {
                "getfd" => Answer::returns(json!({})),
                "add-fd" => Answer::returns(json!({"fdset-id": 0, "fd": 20})),
                name => Answer::fails(
                    "CommandNotFound",
                    &format!("The command {name} has not been found"),
                ),
            }),
        }
    }

    async fn answer(&mut self, served: &Served, id: &Value, answer: Answer) -> Flow {
        if !answer.delay.is_zero() {
            tokio::time::sleep(answer.delay).await;
        }
        for (name, data) in answer.events {
            self.send(served, &event_line(&name, data)).await?;
        }
        let bytes = match answer.body {
            Body::Return(value) => line_of(&with_id(json!({"return": value}), id)),
            Body::Error { class, desc } => error_line(id, &class, &desc),
            Body::Raw(bytes) => bytes,
            Body::Nothing => Vec::new(),
        };
        match answer.cut_after_bytes {
            Some(cut) => {
                self.send(served, &bytes[..cut.min(bytes.len())]).await?;
                return Flow::Break(());
            }
            None => self.send(served, &bytes).await?,
        }
        for (name, data) in answer.events_after {
            self.send(served, &event_line(&name, data)).await?;
        }
        Flow::Continue(())
    }

    async fn send(&mut self, served: &Served, bytes: &[u8]) -> Flow {
        for chunk in bytes.chunks(self.script.chunk_bytes) {
            if served.write(chunk).await.is_err() {
                return Flow::Break(());
            }
            // Lets the client see the piece by itself.
            tokio::task::yield_now().await;
        }
        Flow::Continue(())
    }
}

impl Served {
    /// Reads once, bytes and descriptors. Descriptors replace those that no command took, as in
    /// QEMU.
    fn read(&mut self) -> io::Result<usize> {
        let mut bytes = vec![0; 64 << 10];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTOR_LIMIT))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let length = self.stream.try_io(Interest::READABLE, || {
            let mut into = [IoSliceMut::new(&mut bytes)];
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            Ok(recvmsg(self.stream.as_fd(), &mut into, &mut control, flags)?.bytes)
        })?;
        let arrived: Vec<OwnedFd> = control
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(fds) => Some(fds),
                _ => None,
            })
            .flatten()
            .collect();
        if !arrived.is_empty() {
            self.arrived = arrived;
        }
        self.lines.extend(&bytes[..length]);
        Ok(length)
    }

    async fn write(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            self.stream.writable().await?;
            match self.stream.try_write(bytes) {
                Ok(written) => bytes = &bytes[written..],
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

pub(super) fn event_line(name: &str, data: Value) -> Vec<u8> {
    let timestamp = json!({"seconds": 1_700_000_000, "microseconds": 1});
    line_of(&json!({"timestamp": timestamp, "event": name, "data": data}))
}

fn error_line(id: &Value, class: &str, desc: &str) -> Vec<u8> {
    line_of(&with_id(json!({"error": {"class": class, "desc": desc}}), id))
}

fn with_id(mut answer: Value, id: &Value) -> Value {
    if !id.is_null() {
        answer["id"] = id.clone();
    }
    answer
}

fn line_of(message: &Value) -> Vec<u8> {
    // QEMU ends its lines like this.
    format!("{message}\r\n").into_bytes()
}

/// What a command gets that needs a descriptor and came without.
pub(super) fn missing_descriptor(command: &Received) -> Option<Answer> {
    let is_missing = takes_descriptor(&command.name) && !command.took_descriptor;
    is_missing.then(|| Answer::fails("GenericError", "No file descriptor supplied via SCM_RIGHTS"))
}

fn takes_descriptor(name: &str) -> bool {
    matches!(name, "getfd" | "add-fd")
}
