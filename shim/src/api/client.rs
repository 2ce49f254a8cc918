//! A client of one supervisor's API.

use std::path::PathBuf;
use std::time::Duration;

use axum::http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tokio::time::Instant;
use uuid::Uuid;

use super::types::{
    Cancelled, Completed, NewOperation, NewSpeed, Operation, Problem, SpeedChanged, Terms, Vm,
};
use crate::error::{Code, Failure, sentence};
use crate::machine::hibernate::forecast::Forecast;
use crate::machine::hibernate::machine::CancelAnswer;
use crate::supervisor::state_dir::StateDir;
use crate::vm::diagnosis::Diagnosis;

/// How long a supervisor is waited for whose guest is in its image.
const END_LIMIT: Duration = Duration::from_secs(5);

/// How long a supervisor may take to tell what its VM does. QEMU is asked for some of it.
const ANSWER_LIMIT: Duration = Duration::from_secs(35);

/// How often it is looked for.
const POLL: Duration = Duration::from_millis(2);

/// A VM's supervisor, as its clients know it. Each call is a connection of its own: calls are few and may wait long.
#[derive(Debug, Clone)]
pub struct Supervisor {
    name: String,
    socket: PathBuf,
}

impl Supervisor {
    /// The supervisor of the VM `name`, which may not be there.
    pub fn of(state: &StateDir, name: &str) -> Self {
        Self {
            name: name.to_owned(),
            socket: state.api_socket(name),
        }
    }

    /// The VM's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the VM does. A supervisor that does not say so in a while is not waited for.
    pub async fn vm(&self) -> Result<Vm, Failure> {
        let told = self.call(Method::GET, "/v1/vm", None::<&()>);
        tokio::time::timeout(ANSWER_LIMIT, told)
            .await
            .unwrap_or_else(|_| {
                let why = format!(
                    "the supervisor of VM {} does not answer within {ANSWER_LIMIT:?}",
                    self.name
                );
                Err(Failure::new(Code::Unreachable, why))
            })
    }

    /// What can be done with the VM.
    pub async fn diagnosis(&self) -> Result<Diagnosis, Failure> {
        self.call(Method::GET, "/v1/vm/diagnosis", None::<&()>).await
    }

    /// Begins an operation, or joins it. May wait, as the terms have it.
    pub async fn begin(&self, wish: &NewOperation, terms: &Terms) -> Result<Operation, Failure> {
        let id = terms.id.map(|id| format!("id={id}&")).unwrap_or_default();
        let (priority, patience_ms) = (terms.priority, terms.patience_ms);
        let path = format!("/v1/operations?{id}priority={priority}&patience_ms={patience_ms}");
        self.call(Method::POST, &path, Some(wish)).await
    }

    /// What an operation would take.
    pub async fn dry_run(&self, wish: &NewOperation) -> Result<Forecast, Failure> {
        self.call(Method::POST, "/v1/operations/dry-run", Some(wish))
            .await
    }

    /// What an operation does, once there is something newer than version `seen`.
    pub async fn news(&self, id: Uuid, seen: u64) -> Result<Operation, Failure> {
        self.call(
            Method::GET,
            &format!("/v1/operations/{id}?seen={seen}"),
            None::<&()>,
        )
        .await
    }

    /// Asks for the guest back.
    pub async fn cancel(&self, id: Uuid) -> Result<CancelAnswer, Failure> {
        let cancelled: Cancelled = self
            .call(Method::POST, &format!("/v1/operations/{id}/cancel"), None::<&()>)
            .await?;
        Ok(cancelled.answer)
    }

    /// Has the volumes of a move switched that waits for this word. Returns whether it was waited for.
    pub async fn complete(&self, id: Uuid) -> Result<bool, Failure> {
        let completed: Completed = self
            .call(
                Method::POST,
                &format!("/v1/operations/{id}/complete"),
                None::<&()>,
            )
            .await?;
        Ok(completed.was_waited_for)
    }

    /// Changes how much of a move is copied in a second. Returns whether there was still something to be copied.
    pub async fn change_speed(&self, id: Uuid, bytes_per_second: Option<u64>) -> Result<bool, Failure> {
        let changed: SpeedChanged = self
            .call(
                Method::POST,
                &format!("/v1/operations/{id}/speed"),
                Some(&NewSpeed { bytes_per_second }),
            )
            .await?;
        Ok(changed.in_time)
    }

    /// Whether the supervisor is there.
    pub async fn serves(&self) -> bool {
        UnixStream::connect(&self.socket).await.is_ok()
    }

    /// Waits until the supervisor serves no more, for a limited time.
    pub async fn wait_for_end(&self) {
        let deadline = Instant::now() + END_LIMIT;
        while Instant::now() < deadline && self.serves().await {
            tokio::time::sleep(POLL).await;
        }
    }

    async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        body: Option<&impl Serialize>,
    ) -> Result<T, Failure> {
        let lost = |error: &dyn std::error::Error| {
            Failure::new(
                Code::Unreachable,
                format!(
                    "cannot reach the supervisor of VM {}: {}",
                    self.name,
                    sentence(error)
                ),
            )
        };
        let internal = |error: &dyn std::error::Error| Failure::new(Code::Internal, sentence(error));
        let stream = UnixStream::connect(&self.socket)
            .await
            .map_err(|error| lost(&error))?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream))
            .await
            .map_err(|error| lost(&error))?;
        tokio::spawn(connection);
        let bytes = match body {
            Some(body) => Bytes::from(serde_json::to_vec(body).map_err(|error| internal(&error))?),
            None => Bytes::new(),
        };
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "dormouse")
            .header("content-type", "application/json")
            .body(Full::new(bytes))
            .map_err(|error| internal(&error))?;
        let response = sender.send_request(request).await.map_err(|error| lost(&error))?;
        let status = response.status();
        let bytes = response
            .into_body()
            .collect()
            .await
            .map_err(|error| lost(&error))?
            .to_bytes();
        if status.is_success() {
            return serde_json::from_slice(&bytes).map_err(|error| internal(&error));
        }
        Err(serde_json::from_slice::<Problem>(&bytes)
            .map_or_else(|_| unexplained(status, &bytes), Failure::from))
    }
}

/// A refusal that did not come from our own routes, such as a body that is no JSON.
fn unexplained(status: StatusCode, body: &[u8]) -> Failure {
    Failure::new(
        Code::Internal,
        format!(
            "the supervisor answered {status}: {}",
            String::from_utf8_lossy(body)
        ),
    )
}
