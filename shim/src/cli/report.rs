//! How things are told: sentences and a progress bar to a person, JSON lines to a program.

use std::io::{IsTerminal, Write, stderr, stdout};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use serde_json::json;

use crate::api::types::Operation;
use crate::error::Failure;
use crate::machine::effect::milliseconds;

/// Where a verb tells what it does.
#[derive(Debug, Clone)]
pub struct Report {
    json: bool,
    /// The VM that is spoken of, where there are several.
    vm: Option<String>,
}

impl Report {
    /// JSON lines, or words.
    pub fn new(json: bool) -> Self {
        Self { json, vm: None }
    }

    /// The same for one VM of several: all that is told has its name.
    pub fn of_vm(&self, name: &str) -> Self {
        Self {
            json: self.json,
            vm: Some(name.to_owned()),
        }
    }

    /// Whether it is told to a program.
    pub fn is_json(&self) -> bool {
        self.json
    }

    /// The result: an object for programs, a text for people.
    pub fn result(&self, object: &impl Serialize, text: &str) {
        if self.json {
            print_json(&self.named(object))
        } else {
            print_line(&format!("{}{text}", self.prefix()))
        }
    }

    /// What was reached beside a guest that has the terminal's output: an object for programs, a remark for people.
    pub fn milestone(&self, object: &impl Serialize, text: &str) {
        if self.json {
            print_json(&self.named(object));
        } else {
            self.remark(text);
        }
    }

    /// A last line beside a guest that has the terminal's output: for programs alone.
    pub fn last_line(&self, object: &impl Serialize) {
        if self.json {
            print_json(object);
        }
    }

    /// A remark beside a guest that has the terminal's output: on the error output, and only for people.
    pub fn remark(&self, text: &str) {
        if !self.json {
            // A closed error output is no reason to fail.
            let _ = writeln!(stderr(), "dormouse: {}{text}", self.prefix());
        }
    }

    /// Why it failed.
    pub fn failure(&self, failure: &Failure) {
        if self.json {
            let mut error = json!({
                "code": failure.code,
                "disposition": failure.code.disposition(),
                "guest": failure.guest,
                "message": failure.message,
            });
            if let Some(after) = failure.given_back_after {
                error["given_back_ms"] = json!(milliseconds(after));
            }
            print_json(&self.named(&json!({"error": error})));
        } else {
            let guest = serde_json::to_value(failure.guest).unwrap_or_default();
            match (guest.as_str().unwrap_or_default(), failure.given_back_after) {
                ("unknown", _) => self.remark(&failure.message),
                (guest, None) => self.remark(&format!("{failure} (guest: {guest})")),
                (guest, Some(after)) => self.remark(&format!(
                    "{failure} (guest: {guest}, given back within {:.0} ms)",
                    milliseconds(after).ceil()
                )),
            }
        }
    }

    /// What the same program said elsewhere: its error object to a program, all of it to a person.
    pub fn relay(&self, said: &str, title: &str) {
        match said.lines().rev().find(|line| line.starts_with("{\"error\"")) {
            Some(line) if self.json => print_line(line),
            _ => self.remark(&format!("{title}\n{}", said.trim_end())),
        }
    }

    /// A teller of an operation's progress. Of several at once there is no bar.
    pub fn progress(&self) -> Progress {
        let bar = if self.json || self.vm.is_some() || !stderr().is_terminal() {
            ProgressBar::hidden()
        } else {
            ProgressBar::no_length()
        };
        if let Ok(style) =
            ProgressStyle::with_template("{msg} {bar:30} {bytes}/{total_bytes} {bytes_per_sec} {eta}")
        {
            bar.set_style(style);
        }
        Progress {
            report: self.clone(),
            bar,
            begun: Mutex::new(None),
        }
    }

    fn named<'a, T>(&'a self, object: &'a T) -> Named<'a, T> {
        Named {
            name: self.vm.as_deref(),
            object,
        }
    }

    fn prefix(&self) -> String {
        self.vm
            .as_ref()
            .map(|name| format!("{name}: "))
            .unwrap_or_default()
    }
}

/// An object with the name of its VM, where there are several.
#[derive(Serialize)]
struct Named<'a, T> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    #[serde(flatten)]
    object: &'a T,
}

/// Tells an operation's progress.
#[derive(Debug)]
pub struct Progress {
    report: Report,
    bar: ProgressBar,
    /// When bytes began to count.
    begun: Mutex<Option<Instant>>,
}

impl Progress {
    /// Tells where the operation is.
    pub fn tell(&self, operation: &Operation) {
        let (done, total) = (operation.done_bytes, operation.total_bytes);
        if self.report.json {
            let (rate, eta) = self.rate_and_eta(done, total);
            let mut news = json!({
                "operation": operation.id,
                "phase": operation.phase,
                "bytes": done,
                "total": total,
                "rate": rate,
                "eta": eta,
            });
            if let Some(waiting) = &operation.waiting {
                news["waiting"] = json!(waiting);
            }
            print_json(&self.report.named(&news));
        } else {
            let waiting = operation.waiting.as_ref();
            let waiting = waiting.map(|what| format!(", waiting: {what}"));
            let phase = format!("{}{}", operation.phase, waiting.unwrap_or_default());
            self.show(&phase, done, total);
        }
    }

    /// Tells how far work of our own is.
    pub fn tell_work(&self, phase: &str, done: u64, total: u64) {
        if self.report.json {
            let (rate, eta) = self.rate_and_eta(done, total);
            print_json(&json!({"phase": phase, "bytes": done, "total": total, "rate": rate, "eta": eta}));
        } else {
            self.show(phase, done, total);
        }
    }

    fn show(&self, phase: &str, done: u64, total: u64) {
        self.bar.set_message(phase.to_owned());
        self.bar.set_length(total);
        self.bar.set_position(done);
    }

    /// Takes the bar off the terminal.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }

    /// Bytes per second so far, and seconds until all are done; `None` while there is nothing to tell them by.
    fn rate_and_eta(&self, done: u64, total: u64) -> (Option<f64>, Option<f64>) {
        let Ok(mut begun) = self.begun.lock() else {
            return (None, None);
        };
        if done == 0 {
            return (None, None);
        }
        let elapsed = begun.get_or_insert_with(Instant::now).elapsed();
        if elapsed < Duration::from_millis(1) {
            return (None, None);
        }
        let rate = done as f64 / elapsed.as_secs_f64();
        let left = total.saturating_sub(done) as f64;
        (Some(rate), Some(left / rate))
    }
}

/// A closed pipe must not end a supervisor in panic, so nothing here uses `println!`.
fn print_line(text: &str) {
    let _ = writeln!(stdout(), "{text}");
}

fn print_json(object: &impl Serialize) {
    if let Ok(text) = serde_json::to_string(object) {
        print_line(&text);
    }
}
