//! A guest agent to order: it listens where a client looks for it, and says what its script says.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    thread,
};

use serde_json::{Value, json};

/// What the agent does once it is told to suspend the guest to its disk.
pub type Suspend = Box<dyn Fn() -> Option<Value> + Send>;

/// Listens at `socket`, in the place of whoever listened there before, and plays an agent that knows `commands`. What
/// `suspend` returns is its answer to `guest-suspend-disk`; without one it is silent, as an agent is that succeeds.
pub fn play_agent(socket: &Path, commands: &'static [&'static str], suspend: Suspend) {
    // Nothing there is fine.
    let _ = fs::remove_file(socket);
    let listener = UnixListener::bind(socket).expect("the agent can listen");
    thread::spawn(move || {
        for client in listener.incoming() {
            let client = client.expect("a client can be accepted");
            serve(BufReader::new(client), commands, &suspend);
        }
    });
}

fn serve(mut client: BufReader<UnixStream>, commands: &[&str], suspend: &Suspend) {
    loop {
        let mut line = Vec::new();
        // A client that goes away in the middle is one that is gone.
        if client.read_until(b'\n', &mut line).unwrap_or(0) == 0 {
            return;
        }
        let text = line.strip_prefix(b"\xff").unwrap_or(&line);
        let command: Value = serde_json::from_slice(text).expect("a client speaks JSON");
        let answer = match command["execute"].as_str() {
            Some("guest-sync-delimited") => Some(json!({"return": command["arguments"]["id"]})),
            Some("guest-info") => {
                let known = commands.iter().map(|name| json!({"name": name, "enabled": true}));
                let known: Vec<Value> = known.collect();
                Some(json!({"return": {"version": "10.0.2", "supported_commands": known}}))
            }
            Some("guest-suspend-disk") => suspend(),
            other => panic!("the agent was asked for {other:?}"),
        };
        if let Some(answer) = answer {
            let mut bytes = if line.len() > text.len() {
                vec![0xff]
            } else {
                Vec::new()
            };
            bytes.extend_from_slice(format!("{answer}\n").as_bytes());
            // As above.
            let _ = client.get_mut().write_all(&bytes);
        }
    }
}
