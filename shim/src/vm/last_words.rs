//! What a QEMU said on its error output, for whoever has to tell why it ended.
//!
//! QEMU's error output goes on to ours as it comes; the last of it is kept. QEMU takes no harm when nobody reads any
//! more: it ignores the signal for that.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::process::ChildStderr;
use tokio::task::JoinHandle;

/// How much is kept: QEMU says why it ends in a line or two.
const KEPT_BYTES: usize = 2048;

/// How long the rest may take once QEMU has ended. What it started may still hold its error output open.
const REST: Duration = Duration::from_millis(500);

/// The error output of one QEMU.
#[derive(Debug)]
pub struct LastWords {
    kept: Arc<Mutex<VecDeque<u8>>>,
    reader: JoinHandle<()>,
}

impl LastWords {
    /// Begins to listen, for as long as there is something to hear.
    pub fn of(mut output: ChildStderr) -> Self {
        let kept = Arc::new(Mutex::new(VecDeque::new()));
        let keep = Arc::clone(&kept);
        let reader = tokio::spawn(async move {
            let mut own = tokio::io::stderr();
            let mut piece = vec![0; 4096];
            while let Ok(length @ 1..) = output.read(&mut piece).await {
                let said = &piece[..length];
                {
                    let mut kept = keep.lock().unwrap_or_else(PoisonError::into_inner);
                    kept.extend(said);
                    let excess = kept.len().saturating_sub(KEPT_BYTES);
                    kept.drain(..excess);
                }
                // Without an error output of our own the words are kept all the same.
                let _ = own.write_all(said).await;
                let _ = own.flush().await;
            }
        });
        Self { kept, reader }
    }

    /// What it said last, on one line, once it has ended.
    pub async fn told(&mut self) -> String {
        // The reader ends with the output; where it does not, what is there has to do.
        let _ = tokio::time::timeout(REST, &mut self.reader).await;
        let kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes: Vec<u8> = kept.iter().copied().collect();
        on_one_line(&String::from_utf8_lossy(&bytes))
    }
}

fn on_one_line(text: &str) -> String {
    let lines: Vec<&str> = text
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
        .collect();
    match lines.as_slice() {
        [] => "it said nothing".to_owned(),
        lines => lines.join("; "),
    }
}

#[cfg(test)]
mod tests {
    use std::process::Stdio;

    use super::*;

    async fn last_words_of(script: &str) -> String {
        let mut child = tokio::process::Command::new("sh")
            .args(["-c", script])
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut words = LastWords::of(child.stderr.take().unwrap());
        child.wait().await.unwrap();
        words.told().await
    }

    #[tokio::test]
    async fn what_was_said_last_is_kept_and_no_more() {
        assert_eq!(
            last_words_of("echo one >&2; echo two >&2").await,
            "one; two".to_owned()
        );
        assert_eq!(last_words_of("true").await, "it said nothing");
        let much = last_words_of("yes | head -c 100000 >&2; echo the end >&2").await;
        assert!(
            much.ends_with("y; the end") && much.len() < 2 * KEPT_BYTES,
            "{much}"
        );
    }

    #[tokio::test]
    async fn a_child_that_holds_the_output_open_is_not_waited_for() {
        assert_eq!(
            last_words_of("echo gone >&2; sleep 1 & echo $! > /dev/null").await,
            "gone"
        );
    }
}
