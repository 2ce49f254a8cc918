//! What can be watched, and that nothing is shown to those who do not ask.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dormouse_qmp::fake::{Answer, FakeQemu, Script};
use dormouse_qmp::{Client, ConnectOptions, command};
use serde_json::{Value, json};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Level, Metadata, Subscriber};

/// Writes down what it is shown, up to a level.
#[derive(Clone)]
struct Watcher {
    up_to: Level,
    seen: Arc<Mutex<Vec<String>>>,
}

impl Watcher {
    fn up_to(level: Level) -> Self {
        Self {
            up_to: level,
            seen: Arc::default(),
        }
    }

    fn seen(&self, kind: &str) -> Vec<String> {
        let seen = self.seen.lock().unwrap();
        seen.iter()
            .filter(|line| line.starts_with(kind))
            .cloned()
            .collect()
    }

    fn note(&self, kind: &str, fields: Fields) {
        self.seen.lock().unwrap().push(format!("{kind}{}", fields.0));
    }
}

struct Fields(String);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, " {}={value:?}", field.name()).unwrap();
    }
}

impl Subscriber for Watcher {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= &self.up_to && metadata.target().starts_with("dormouse_qmp::")
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let mut fields = Fields(String::new());
        attributes.record(&mut fields);
        self.note("span", fields);
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, values: &Record<'_>) {
        let mut fields = Fields(String::new());
        values.record(&mut fields);
        self.note("record", fields);
    }

    fn event(&self, event: &Event<'_>) {
        let mut fields = Fields(String::new());
        event.record(&mut fields);
        self.note(event.metadata().target(), fields);
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

async fn connected(script: Script) -> (FakeQemu, Client) {
    let qemu = FakeQemu::start(script).unwrap();
    let client = Client::connect(qemu.path(), ConnectOptions::default())
        .await
        .unwrap();
    (qemu, client)
}

/// The line that was shown, which is as it was on the wire.
fn line_of(shown: &str) -> Value {
    serde_json::from_str(shown.split_once("line=").unwrap().1).unwrap()
}

#[tokio::test]
async fn every_line_is_shown_verbatim_and_of_descriptors_their_number() {
    let watcher = Watcher::up_to(Level::TRACE);
    let _watching = tracing::subscriber::set_default(watcher.clone());
    let (qemu, client) = connected(Script::new()).await;
    let getfd = command::getfd {
        fdname: "a".to_owned(),
    };
    let file = tempfile::tempfile().unwrap();
    client.execute_with_fds(&getfd, vec![file.into()]).await.unwrap();
    let lines = watcher.seen("dormouse_qmp::trace");
    let peer = format!("peer={:?}", qemu.path().to_str().unwrap());
    assert_eq!(lines.len(), 5, "{lines:#?}");
    assert!(lines.iter().all(|line| line.contains(&peer)), "{lines:#?}");
    assert!(lines[0].contains("message=received") && lines[0].contains("{\"QMP\":"));
    assert!(lines[1].contains("message=sent") && lines[1].contains("descriptors=0"));
    assert!(lines[3].contains("message=sent") && lines[3].contains("descriptors=1"));
    assert_eq!(
        line_of(&lines[3]),
        json!({"execute": "getfd", "arguments": {"fdname": "a"}, "id": 1})
    );
    assert_eq!(line_of(&lines[4]), json!({"return": {}, "id": 1}));
}

#[tokio::test]
async fn a_command_is_a_span_with_its_outcome_and_no_line_of_it_is_shown() {
    let watcher = Watcher::up_to(Level::DEBUG);
    let _watching = tracing::subscriber::set_default(watcher.clone());
    let script = Script::new()
        .on("stop", Answer::returns(json!({})))
        .on("slow", Answer::nothing());
    let (_qemu, client) = connected(script).await;
    client.execute(&command::stop {}).await.unwrap();
    client.execute_raw("dream", Value::Null).await.unwrap_err();
    let hasty = client.with_deadline(Duration::from_millis(20));
    hasty.execute_raw("slow", Value::Null).await.unwrap_err();
    let dropped = tokio::time::timeout(Duration::from_millis(20), client.execute_raw("slow", Value::Null));
    assert!(dropped.await.is_err());
    client.close().await;
    client.execute_raw("late", Value::Null).await.unwrap_err();

    assert_eq!(
        watcher.seen("span"),
        [
            "span name=\"stop\" id=1",
            "span name=\"dream\" id=2",
            "span name=\"slow\" id=3",
            "span name=\"slow\" id=4",
            "span name=\"late\" id=5",
        ]
    );
    assert_eq!(
        watcher.seen("record outcome"),
        ["returned", "refused", "timed out", "withdrawn", "lost"]
            .map(|outcome| format!("record outcome={outcome:?}"))
    );
    assert_eq!(watcher.seen("record elapsed_us").len(), 5);
    assert_eq!(watcher.seen("dormouse_qmp::trace"), [""; 0]);
}

#[tokio::test]
async fn nothing_of_a_conversation_is_shown_to_those_who_do_not_ask() {
    let watcher = Watcher::up_to(Level::INFO);
    let _watching = tracing::subscriber::set_default(watcher.clone());
    let (_qemu, client) = connected(Script::new().on("stop", Answer::returns(json!({})))).await;
    client.execute(&command::stop {}).await.unwrap();
    assert_eq!(watcher.seen(""), [""; 0]);
}
