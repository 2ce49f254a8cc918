//! What a fake QEMU says, and to what.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use serde_json::{Value, json};

use super::Received;

/// How a fake QEMU behaves.
pub struct Script {
    pub(super) greeting: Option<Value>,
    pub(super) chunk_bytes: usize,
    pub(super) parse_error: Answer,
    answering: HashMap<String, Answering>,
}

type Answering = Box<dyn FnMut(&Received) -> Answer + Send>;

/// What comes back for one command.
#[derive(Clone, Debug)]
pub struct Answer {
    pub(super) delay: Duration,
    pub(super) events: Vec<(String, Value)>,
    pub(super) events_after: Vec<(String, Value)>,
    pub(super) body: Body,
    pub(super) cut_after_bytes: Option<usize>,
}

#[derive(Clone, Debug)]
pub(super) enum Body {
    Return(Value),
    Error { class: String, desc: String },
    Raw(Vec<u8>),
    Nothing,
}

impl Script {
    /// Greets as QEMU 10.0.2 with out-of-band execution, and knows `qmp_capabilities`, `getfd` and
    /// `add-fd` only.
    pub fn new() -> Self {
        Self {
            greeting: None,
            chunk_bytes: usize::MAX,
            parse_error: Answer::fails("GenericError", "JSON parse error"),
            answering: HashMap::new(),
        }
        .greeting(json!({
            "version": {"qemu": {"major": 10, "minor": 0, "micro": 2}, "package": "fake"},
            "capabilities": ["oob"],
        }))
    }

    /// Greets with this as the value of `QMP`.
    pub fn greeting(mut self, greeting: Value) -> Self {
        self.greeting = Some(json!({"QMP": greeting}));
        self
    }

    /// Accepts clients and never greets, as a monitor does that another client holds.
    pub fn silent(mut self) -> Self {
        self.greeting = None;
        self
    }

    /// Writes everything in pieces of at most so many bytes.
    pub fn in_chunks_of(mut self, bytes: usize) -> Self {
        self.chunk_bytes = bytes.max(1);
        self
    }

    /// Answers each command of this name like this.
    pub fn on(self, name: &str, answer: Answer) -> Self {
        self.on_each(name, move |_| answer.clone())
    }

    /// Answers each command of this name with what the function returns.
    pub fn on_each(mut self, name: &str, answer: impl FnMut(&Received) -> Answer + Send + 'static) -> Self {
        self.answering.insert(name.to_owned(), Box::new(answer));
        self
    }

    /// Answers a line that is no JSON like this.
    pub fn on_parse_error(mut self, answer: Answer) -> Self {
        self.parse_error = answer;
        self
    }

    pub(super) fn answer(&mut self, command: &Received) -> Option<Answer> {
        self.answering
            .get_mut(&command.name)
            .map(|answering| answering(command))
    }
}

impl Default for Script {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Script")
            .field("greeting", &self.greeting)
            .field("commands", &self.answering.keys())
            .finish_non_exhaustive()
    }
}

impl Answer {
    /// Succeeds with this value.
    pub fn returns(value: Value) -> Self {
        Self::of(Body::Return(value))
    }

    /// Fails with this error class and description.
    pub fn fails(class: &str, desc: &str) -> Self {
        Self::of(Body::Error {
            class: class.to_owned(),
            desc: desc.to_owned(),
        })
    }

    /// Sends these bytes as they are.
    pub fn raw(bytes: impl Into<Vec<u8>>) -> Self {
        Self::of(Body::Raw(bytes.into()))
    }

    /// Does not answer. The command can be answered later with
    /// [`FakeQemu::answer`](super::FakeQemu::answer).
    pub fn nothing() -> Self {
        Self::of(Body::Nothing)
    }

    /// Closes the connection without an answer.
    pub fn hangs_up() -> Self {
        Self::nothing().cut_after(0)
    }

    /// Sends this event before the answer. Several come in the order of the calls.
    pub fn with_event(mut self, name: &str, data: Value) -> Self {
        self.events.push((name.to_owned(), data));
        self
    }

    /// Sends this event after the answer. Several come in the order of the calls.
    pub fn with_event_after(mut self, name: &str, data: Value) -> Self {
        self.events_after.push((name.to_owned(), data));
        self
    }

    /// Waits before anything is sent, and answers no other command meanwhile, as QEMU does when its
    /// main loop stalls.
    pub fn after(mut self, delay: Duration) -> Self {
        self.delay = delay;
        self
    }

    /// Closes the connection after so many bytes of the answer, events not counted.
    pub fn cut_after(mut self, bytes: usize) -> Self {
        self.cut_after_bytes = Some(bytes);
        self
    }

    fn of(body: Body) -> Self {
        Self {
            delay: Duration::ZERO,
            events: Vec::new(),
            events_after: Vec::new(),
            body,
            cut_after_bytes: None,
        }
    }
}
