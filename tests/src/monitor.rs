//! A blocking QMP client of a few lines: a guest's second monitor, to look at it past Dormouse.

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    path::Path,
};

use serde_json::{Value, json};

use crate::wait::{PATIENCE, until};

/// A session on a guest's second monitor.
pub struct Monitor {
    stream: BufReader<UnixStream>,
}

impl Monitor {
    /// Waits for QEMU to listen at `socket` and greets it.
    pub fn connect(socket: &Path) -> Self {
        let stream = until("QEMU's second monitor", || UnixStream::connect(socket).ok());
        stream
            .set_read_timeout(Some(PATIENCE))
            .expect("a read timeout can be set");
        let mut monitor = Self {
            stream: BufReader::new(stream),
        };
        // An event for whoever was here before can come first.
        while monitor.read().get("QMP").is_none() {}
        monitor.execute("qmp_capabilities", json!({}));
        monitor
    }

    /// Runs one command and returns what QEMU returned.
    ///
    /// # Panics
    ///
    /// When QEMU answers with an error, not at all, or ends.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Value {
        self.write(&json!({ "execute": command, "arguments": arguments }));
        loop {
            let mut message = self.read();
            if let Some(error) = message.get("error") {
                panic!("{command}: {error}");
            }
            // What has no "return" is an event.
            if let Some(returned) = message.get_mut("return") {
                return returned.take();
            }
        }
    }

    /// Runs one command and waits until QEMU has told of `event`.
    pub fn execute_until(&mut self, command: &str, event: &str) {
        self.write(&json!({ "execute": command }));
        while self.read()["event"] != event {}
    }

    /// In one piece: QEMU acts on a command when its last brace is there, and may be gone before more comes.
    fn write(&mut self, command: &Value) {
        let written = self.stream.get_mut().write_all(format!("{command}\n").as_bytes());
        written.expect("QEMU reads its monitor");
    }

    /// QEMU's run state, such as `running` or `paused`.
    pub fn status(&mut self) -> String {
        let status = self.execute("query-status", json!({}));
        status["status"].as_str().unwrap_or_default().to_owned()
    }

    /// Waits for a run state.
    pub fn wait_for_status(&mut self, wanted: &str) {
        until(&format!("the run state {wanted}"), || {
            (self.status() == wanted).then_some(())
        });
    }

    /// Pauses the guest.
    pub fn stop(&mut self) {
        self.execute("stop", json!({}));
    }

    /// Lets the guest go on.
    pub fn cont(&mut self) {
        self.execute("cont", json!({}));
    }

    /// The first `bytes` of the guest's physical memory, by way of the file `through`.
    pub fn memory(&mut self, bytes: u64, through: &Path) -> Vec<u8> {
        self.execute(
            "pmemsave",
            json!({ "val": 0, "size": bytes, "filename": through }),
        );
        std::fs::read(through).expect("QEMU wrote the guest's memory")
    }

    fn read(&mut self) -> Value {
        let mut line = String::new();
        let length = self
            .stream
            .read_line(&mut line)
            .expect("QEMU answers on its second monitor");
        assert!(length > 0, "QEMU closed its second monitor");
        serde_json::from_str(&line).expect("QEMU speaks JSON")
    }
}
