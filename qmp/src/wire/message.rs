//! One line of QMP is one message.
//!
//! The reading is tolerant on purpose. QEMU's vocabulary grows with every version, so unknown
//! fields are ignored, error classes and event names are plain strings, and an object that is no
//! known kind of message is kept as [`Message::Other`]. Only a line that is no JSON object at all
//! is refused: then the peer is no QEMU monitor, or the stream is damaged. Integers stay integers;
//! a size of 64 bits never passes through a float.

use serde::Deserialize;
use serde::de::{Deserializer, Error as _};
use serde_json::Value;

/// A message from QEMU.
#[derive(Clone, Debug, PartialEq)]
pub enum Message {
    /// The first message of a connection.
    Greeting(Greeting),
    /// A command succeeded.
    Reply {
        /// The id of the command, echoed.
        id: Option<Value>,
        /// What the command returned.
        result: Value,
    },
    /// A command failed, or a line of ours could not be parsed; then there is no id.
    Error {
        /// The id of the command, echoed.
        id: Option<Value>,
        /// The error class.
        class: String,
        /// The description for humans.
        desc: String,
    },
    /// Something happened.
    Event(Event),
    /// An object of a kind that we do not know.
    Other(Value),
}

/// How a QEMU monitor introduces itself.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Greeting {
    /// The version of QEMU.
    pub version: Version,
    /// The distribution's package, verbatim; often empty.
    pub package: String,
    /// What the monitor offers in the negotiation, for example `oob`.
    pub capabilities: Vec<String>,
}

/// A version of QEMU. For reports and cache keys; what a QEMU can do is asked, not derived from
/// this.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Deserialize)]
#[serde(default)]
pub struct Version {
    /// The major number.
    pub major: u32,
    /// The minor number.
    pub minor: u32,
    /// The micro number.
    pub micro: u32,
}

/// Something that QEMU tells unasked.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// The name, for example `STOP` or `BLOCK_JOB_READY`.
    pub name: String,
    /// What belongs to it; null when the event carries nothing.
    pub data: Value,
    /// When QEMU saw it happen.
    pub timestamp: Timestamp,
}

/// A time of QEMU's host clock since the epoch. Both parts are -1 when QEMU could not read its
/// clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Timestamp {
    /// Whole seconds.
    pub seconds: i64,
    /// Microseconds within the second.
    pub microseconds: i64,
}

/// Writes a command as one line, with its line end. Null stands for no arguments.
pub fn encode_command(id: u64, name: String, arguments: Value, out_of_band: bool) -> Vec<u8> {
    let verb = if out_of_band { "exec-oob" } else { "execute" };
    let mut command = serde_json::Map::new();
    command.insert(verb.to_owned(), Value::String(name));
    if !arguments.is_null() {
        command.insert("arguments".to_owned(), arguments);
    }
    command.insert("id".to_owned(), Value::from(id));
    let mut line = Value::Object(command).to_string();
    line.push('\n');
    line.into_bytes()
}

impl Message {
    /// Reads one line, given without its line end.
    pub fn parse(line: &[u8]) -> Result<Self, serde_json::Error> {
        let object: serde_json::Map<String, Value> = serde_json::from_slice(line)?;
        Self::from_object(object)
    }

    fn from_object(mut object: serde_json::Map<String, Value>) -> Result<Self, serde_json::Error> {
        let id = object.remove("id");
        // A null is a legal return value, so presence decides and not the value.
        if let Some(result) = object.remove("return") {
            return Ok(Self::Reply { id, result });
        }
        if let Some(error) = object.remove("error") {
            let ErrorBody { class, desc } = serde_json::from_value(error)?;
            return Ok(Self::Error { id, class, desc });
        }
        if let Some(name) = object.remove("event") {
            return Ok(Self::Event(Event {
                name: serde_json::from_value(name)?,
                data: object.remove("data").unwrap_or_default(),
                // The time is a comment on the event. An odd one is no reason to lose the event.
                timestamp: object
                    .remove("timestamp")
                    .and_then(|timestamp| serde_json::from_value(timestamp).ok())
                    .unwrap_or_default(),
            }));
        }
        if let Some(greeting) = object.remove("QMP") {
            return Ok(Self::Greeting(serde_json::from_value(greeting)?));
        }
        if let Some(id) = id {
            object.insert("id".to_owned(), id);
        }
        Ok(Self::Other(Value::Object(object)))
    }
}

impl Greeting {
    /// Whether the monitor offers out-of-band execution.
    pub fn offers_oob(&self) -> bool {
        self.capabilities.iter().any(|capability| capability == "oob")
    }
}

impl<'de> Deserialize<'de> for Greeting {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let body = GreetingBody::deserialize(deserializer)?;
        let capabilities = match body.capabilities {
            Value::Array(items) => items,
            Value::Null => Vec::new(),
            _ => {
                return Err(D::Error::custom("the capabilities of the greeting are no list"));
            }
        };
        Ok(Self {
            version: body.version.qemu,
            package: body.version.package,
            // A capability that is no string is one that we do not know.
            capabilities: capabilities
                .into_iter()
                .filter_map(|capability| capability.as_str().map(str::to_owned))
                .collect(),
        })
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

#[derive(Deserialize)]
struct ErrorBody {
    #[serde(default)]
    class: String,
    #[serde(default)]
    desc: String,
}

#[derive(Deserialize)]
struct GreetingBody {
    #[serde(default)]
    version: VersionBody,
    #[serde(default)]
    capabilities: Value,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct VersionBody {
    qemu: Version,
    package: String,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(line: &str) -> Message {
        Message::parse(line.as_bytes()).unwrap()
    }

    #[test]
    fn a_greeting_tells_version_package_and_capabilities() {
        let message = parse(
            r#"{"QMP": {"version": {"qemu": {"micro": 2, "minor": 0, "major": 10}, "package": "Debian 1:10.0.2+ds-2"},
                "capabilities": ["oob", "later-thing", {"odd": 1}], "motd": "hello"}}"#,
        );
        let Message::Greeting(greeting) = message else {
            panic!("{message:?}")
        };
        assert_eq!(greeting.version.to_string(), "10.0.2");
        assert_eq!(greeting.package, "Debian 1:10.0.2+ds-2");
        assert_eq!(greeting.capabilities, ["oob", "later-thing"]);
        assert!(greeting.offers_oob());
    }

    #[test]
    fn a_null_reply_is_a_reply() {
        assert_eq!(
            parse(r#"{"return": null, "id": 3}"#),
            Message::Reply {
                id: Some(json!(3)),
                result: Value::Null
            }
        );
    }

    #[test]
    fn sizes_of_64_bits_stay_exact() {
        let Message::Reply { result, .. } = parse(r#"{"return": {"size": 18446744073709551615}}"#) else {
            panic!()
        };
        assert_eq!(result["size"].as_u64(), Some(u64::MAX));
    }

    #[test]
    fn an_unknown_error_class_is_a_string_like_any_other() {
        assert_eq!(
            parse(r#"{"id": "x", "error": {"class": "NovelTrouble", "desc": "no", "position": 4}}"#),
            Message::Error {
                id: Some(json!("x")),
                class: "NovelTrouble".to_owned(),
                desc: "no".to_owned()
            }
        );
    }

    #[test]
    fn a_parse_error_of_the_peer_has_no_id() {
        let message = parse(r#"{"error": {"class": "GenericError", "desc": "JSON parse error, stray '}'"}}"#);
        assert!(matches!(message, Message::Error { id: None, .. }), "{message:?}");
    }

    #[test]
    fn an_unknown_event_with_a_clock_that_failed_is_an_event() {
        assert_eq!(
            parse(
                r#"{"timestamp": {"seconds": -1, "microseconds": -1}, "event": "NOVELTY", "data": {"a": [1]}}"#
            ),
            Message::Event(Event {
                name: "NOVELTY".to_owned(),
                data: json!({"a": [1]}),
                timestamp: Timestamp {
                    seconds: -1,
                    microseconds: -1
                },
            })
        );
    }

    #[test]
    fn an_event_needs_neither_data_nor_a_sound_timestamp() {
        for line in [
            r#"{"event": "STOP"}"#,
            r#"{"event": "STOP", "timestamp": "noon"}"#,
        ] {
            let Message::Event(event) = parse(line) else {
                panic!("{line}")
            };
            assert_eq!((event.name.as_str(), event.data), ("STOP", Value::Null));
        }
    }

    #[test]
    fn an_object_of_an_unknown_kind_is_kept_whole() {
        assert_eq!(
            parse(r#"{"progress": 5, "id": 1}"#),
            Message::Other(json!({"progress": 5, "id": 1}))
        );
    }

    #[test]
    fn a_command_is_one_line_whatever_its_arguments_hold() {
        let line = encode_command(
            7,
            "qom-set".to_owned(),
            json!({"value": "a\nb", "size": u64::MAX}),
            false,
        );
        assert_eq!(line.iter().filter(|&&byte| byte == b'\n').count(), 1);
        let read: Value = serde_json::from_slice(&line).unwrap();
        assert_eq!(
            read,
            json!({"execute": "qom-set", "arguments": {"value": "a\nb", "size": u64::MAX}, "id": 7})
        );
        assert_eq!(
            encode_command(1, "yank".to_owned(), Value::Null, true),
            b"{\"exec-oob\":\"yank\",\"id\":1}\n"
        );
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for line in [
            "",
            "[]",
            "7",
            "HTTP/1.1 400 Bad Request",
            "{\"return\": {}",
            "\u{ff}",
        ] {
            assert!(Message::parse(line.as_bytes()).is_err(), "{line}");
        }
    }
}
