//! The recorded conversations with real QEMUs, and a client that talks to one played again.

use dormouse_qmp::fake::{FakeQemu, Transcript};
use dormouse_qmp::{Client, ConnectOptions};

/// The versions, the oldest first.
pub const VERSIONS: [&str; 3] = ["7.2", "10.0", "11.1"];

/// The transcript of one of [`VERSIONS`].
pub fn transcript(version: &str) -> Transcript {
    let text = match version {
        "7.2" => include_str!("../../../tests/transcripts/7.2.jsonl"),
        "10.0" => include_str!("../../../tests/transcripts/10.0.jsonl"),
        "11.1" => include_str!("../../../tests/transcripts/11.1.jsonl"),
        other => panic!("no transcript of QEMU {other}"),
    };
    Transcript::parse(text).unwrap()
}

/// A client of a fake that plays the transcript.
pub async fn connected(version: &str) -> (FakeQemu, Client) {
    let qemu = FakeQemu::start(transcript(version).script()).unwrap();
    let client = Client::connect(qemu.path(), ConnectOptions::default())
        .await
        .unwrap();
    (qemu, client)
}
