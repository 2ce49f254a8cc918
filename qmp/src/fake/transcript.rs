//! A recorded conversation with a real QEMU, to be played again.
//!
//! One message a line, as it was on the wire, in its order: what QEMU said (the greeting, events,
//! replies) and what it was told. A line of ours that was no JSON stands as `{"text": "…"}`. Ids are
//! left out. An event that came after a reply and before the next command belongs to the former.
//!
//! ```text
//! {"QMP": {"version": …}}
//! {"execute": "qmp_capabilities", …}
//! {"return": {}}
//! {"execute": "stop"}
//! {"event": "STOP", …}
//! {"return": {}}
//! ```

use std::collections::{HashMap, VecDeque};

use serde_json::Value;

use super::script::{Answer, Script};
use super::session::missing_descriptor;
use crate::wire::message::Message;

/// A recorded conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct Transcript {
    greeting: Value,
    exchanges: Vec<Exchange>,
}

/// One thing said to QEMU, and what came of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Exchange {
    /// The name of the command; none for a line that was no JSON.
    pub command: Option<String>,
    /// Its arguments; null when it had none.
    pub arguments: Value,
    /// The events before the reply: names and data.
    pub events_before: Vec<(String, Value)>,
    /// What QEMU returned, or class and description of its error.
    pub reply: Result<Value, (String, String)>,
    /// The events after the reply: names and data.
    pub events_after: Vec<(String, Value)>,
}

/// Why a transcript cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TranscriptError {
    /// A line is no message.
    #[error("line {line} of the transcript is no message")]
    Unreadable {
        /// The number of the line, from 1.
        line: usize,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// A line does not belong where it stands: a reply to nothing, a command before the greeting.
    #[error("line {line} of the transcript is out of place")]
    OutOfPlace {
        /// The number of the line, from 1.
        line: usize,
    },
    /// It ends before the greeting, or before the reply to the last command.
    #[error("the transcript breaks off")]
    Truncated,
}

impl Transcript {
    /// Reads a transcript.
    pub fn parse(text: &str) -> Result<Self, TranscriptError> {
        let mut reader = Reader::default();
        for (index, text) in text.lines().enumerate() {
            let line = index + 1;
            let message = serde_json::from_str(text)
                .and_then(|value| Ok((Message::parse(text.as_bytes())?, value)))
                .map_err(|source| TranscriptError::Unreadable { line, source })?;
            if !reader.take(message.0, message.1) {
                return Err(TranscriptError::OutOfPlace { line });
            }
        }
        match (reader.greeting, reader.asked) {
            (Some(greeting), None) => Ok(Self {
                greeting,
                exchanges: reader.exchanges,
            }),
            _ => Err(TranscriptError::Truncated),
        }
    }

    /// What QEMU greeted with, as the value of `QMP`.
    pub fn greeting(&self) -> &Value {
        &self.greeting
    }

    /// All that was said, in its order, the negotiation included.
    pub fn exchanges(&self) -> &[Exchange] {
        &self.exchanges
    }

    /// What QEMU returned to each command of this name that it did not refuse.
    pub fn returned<'a>(&'a self, command: &'a str) -> impl Iterator<Item = &'a Value> {
        self.exchanges
            .iter()
            .filter(move |exchange| exchange.command.as_deref() == Some(command))
            .filter_map(|exchange| exchange.reply.as_ref().ok())
    }

    /// A script that answers as QEMU did.
    ///
    /// Each command gets the answers to its name in their recorded order, with the events around
    /// them; the last one stays for all further times. The arguments do not matter, a descriptor that
    /// is needed does. A line that is no JSON gets the recorded answer to such a line.
    pub fn script(&self) -> Script {
        let mut answers: HashMap<&str, VecDeque<Answer>> = HashMap::new();
        let mut script = Script::new().greeting(self.greeting.clone());
        for exchange in &self.exchanges {
            match exchange.command.as_deref() {
                // The fake knows the rules of the negotiation itself.
                Some("qmp_capabilities") => {}
                Some(name) => answers.entry(name).or_default().push_back(exchange.answer()),
                None => script = script.on_parse_error(exchange.answer()),
            }
        }
        for (name, mut recorded) in answers {
            script = script.on_each(name, move |command| {
                if let Some(refusal) = missing_descriptor(command) {
                    return refusal;
                }
                let next = match recorded.len() {
                    1 => recorded.front().cloned(),
                    _ => recorded.pop_front(),
                };
                next.unwrap_or_else(Answer::nothing)
            });
        }
        script
    }
}

impl Exchange {
    fn answer(&self) -> Answer {
        let mut answer = match &self.reply {
            Ok(value) => Answer::returns(value.clone()),
            Err((class, desc)) => Answer::fails(class, desc),
        };
        for (name, data) in &self.events_before {
            answer = answer.with_event(name, data.clone());
        }
        for (name, data) in &self.events_after {
            answer = answer.with_event_after(name, data.clone());
        }
        answer
    }
}

#[derive(Default)]
struct Reader {
    greeting: Option<Value>,
    exchanges: Vec<Exchange>,
    asked: Option<Asked>,
}

struct Asked {
    command: Option<String>,
    arguments: Value,
    events: Vec<(String, Value)>,
}

impl Reader {
    /// Takes the next line. False when it is out of place.
    fn take(&mut self, message: Message, line: Value) -> bool {
        match message {
            Message::Greeting(_) if self.greeting.is_none() => {
                self.greeting = Some(line["QMP"].clone());
                true
            }
            Message::Other(said) if self.greeting.is_some() && self.asked.is_none() => {
                let name = said["execute"].as_str().or(said["exec-oob"].as_str());
                self.asked = Some(Asked {
                    command: name.map(str::to_owned),
                    arguments: said["arguments"].clone(),
                    events: Vec::new(),
                });
                name.is_some() || said["text"].is_string()
            }
            Message::Event(event) => {
                let heard = (event.name, event.data);
                match (&mut self.asked, self.exchanges.last_mut()) {
                    (Some(asked), _) => asked.events.push(heard),
                    (None, Some(last)) => last.events_after.push(heard),
                    (None, None) => return false,
                }
                true
            }
            Message::Reply { result, .. } => self.answered(Ok(result)),
            Message::Error { class, desc, .. } => self.answered(Err((class, desc))),
            Message::Greeting(_) | Message::Other(_) => false,
        }
    }

    fn answered(&mut self, reply: Result<Value, (String, String)>) -> bool {
        let Some(asked) = self.asked.take() else {
            return false;
        };
        self.exchanges.push(Exchange {
            command: asked.command,
            arguments: asked.arguments,
            events_before: asked.events,
            reply,
            events_after: Vec::new(),
        });
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const GREETING: &str = r#"{"QMP": {"version": {"qemu": {"major": 10, "minor": 0, "micro": 2}, "package": ""}, "capabilities": []}}"#;

    fn parse(lines: &[&str]) -> Result<Transcript, TranscriptError> {
        Transcript::parse(&[&[GREETING], lines].concat().join("\n"))
    }

    #[test]
    fn events_belong_to_the_command_they_came_with() {
        let transcript = parse(&[
            r#"{"execute": "stop"}"#,
            r#"{"event": "STOP"}"#,
            r#"{"return": {}}"#,
            r#"{"event": "LATER", "data": {"a": 1}}"#,
            r#"{"execute": "nothing", "arguments": {"b": 2}}"#,
            r#"{"error": {"class": "CommandNotFound", "desc": "no"}}"#,
            r#"{"text": "}"}"#,
            r#"{"error": {"class": "GenericError", "desc": "what?"}}"#,
        ])
        .unwrap();
        let [stop, nothing, text] = transcript.exchanges() else {
            panic!("{transcript:?}")
        };
        assert_eq!(stop.events_before, [("STOP".to_owned(), Value::Null)]);
        assert_eq!(stop.events_after, [("LATER".to_owned(), json!({"a": 1}))]);
        assert_eq!(nothing.arguments, json!({"b": 2}));
        assert_eq!(
            nothing.reply,
            Err(("CommandNotFound".to_owned(), "no".to_owned()))
        );
        assert_eq!(text.command, None);
        assert_eq!(transcript.returned("stop").count(), 1);
        assert_eq!(transcript.returned("nothing").count(), 0);
    }

    #[test]
    fn a_line_out_of_place_is_told_by_its_number() {
        for (lines, number) in [
            (&[r#"{"return": {}}"#][..], 2),
            (&[r#"{"event": "STOP"}"#], 2),
            (&[r#"{"execute": "stop"}"#, r#"{"execute": "cont"}"#], 3),
            (&[GREETING], 2),
            (&[r#"{"something": "else"}"#], 2),
        ] {
            let error = parse(lines).unwrap_err();
            assert!(
                matches!(error, TranscriptError::OutOfPlace { line } if line == number),
                "{lines:?}: {error:?}"
            );
        }
        let error = parse(&[r#"{"execute": "stop"}"#, "stop"]).unwrap_err();
        assert!(
            matches!(error, TranscriptError::Unreadable { line: 3, .. }),
            "{error:?}"
        );
    }

    #[test]
    fn a_transcript_that_breaks_off_is_refused() {
        for text in ["".to_owned(), format!("{GREETING}\n{{\"execute\": \"stop\"}}")] {
            let error = Transcript::parse(&text).unwrap_err();
            assert!(matches!(error, TranscriptError::Truncated), "{error:?}");
        }
    }
}
