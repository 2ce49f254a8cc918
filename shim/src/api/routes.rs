//! The routes, over a [`Handle`] on the supervisor.

use std::io;
use std::path::Path;
use std::time::Duration;

use axum::extract::{Path as UrlPath, Query, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::Deserialize;
use tokio::net::UnixListener;
use tokio::sync::{oneshot, watch};
use uuid::Uuid;

use super::types::{
    Cancelled, Completed, MemoryFeed, NewOperation, NewSpeed, Operation, Problem, SpeedChanged, Terms, Vm,
};
use crate::error::{Code, Failure};
use crate::machine::hibernate::forecast::{Forecast, forecast};
use crate::machine::volume::word::Said;
use crate::supervisor::{Handle, Request, hibernation};
use crate::vm::diagnosis::{Diagnosis, diagnose};
use crate::vm::monitor;

/// How long a watcher waits for news before it is told that there is none.
const WATCH_LIMIT: Duration = Duration::from_secs(20);

/// How long the server waits for clients to finish when it stops.
const STOP_LIMIT: Duration = Duration::from_secs(1);

/// A server that runs until it is stopped.
#[derive(Debug)]
pub struct Server {
    stop: oneshot::Sender<()>,
    task: tokio::task::JoinHandle<io::Result<()>>,
}

impl Server {
    /// Listens on `socket`.
    pub fn start(socket: &Path, handle: Handle) -> io::Result<Self> {
        let listener = UnixListener::bind(socket)?;
        let (stop, stopped) = oneshot::channel();
        let serve = axum::serve(listener, router(handle)).with_graceful_shutdown(async {
            let _ = stopped.await;
        });
        Ok(Self {
            stop,
            task: tokio::spawn(serve.into_future()),
        })
    }

    /// Lets the clients that are being answered finish, and ends.
    pub async fn stop(self) {
        let _ = self.stop.send(());
        let _ = tokio::time::timeout(STOP_LIMIT, self.task).await;
    }
}

fn router(handle: Handle) -> Router {
    Router::new()
        .route("/v1/vm", get(vm))
        .route("/v1/vm/diagnosis", get(diagnosis))
        .route("/v1/operations", post(begin))
        .route("/v1/operations/dry-run", post(dry_run))
        .route("/v1/operations/{id}", get(watch_operation))
        .route("/v1/operations/{id}/cancel", post(cancel))
        .route("/v1/operations/{id}/complete", post(complete))
        .route("/v1/operations/{id}/speed", post(change_speed))
        .fallback(async || Failure::new(Code::Usage, "there is no such route"))
        .with_state(handle)
}

async fn vm(State(handle): State<Handle>) -> Result<Json<Vm>, Failure> {
    let operation = handle.last_operation();
    Ok(Json(Vm {
        run_state: monitor::run_state(&handle.client).await?.to_string(),
        qemu_version: handle.client.greeting().version.to_string(),
        name: handle.name,
        supervisor_pid: std::process::id(),
        pid: handle.pid,
        ram: handle.ram,
        operation,
        woken: handle.woken,
        feed: handle.feed.as_ref().map(MemoryFeed::from),
    }))
}

async fn diagnosis(State(handle): State<Handle>) -> Result<Json<Diagnosis>, Failure> {
    let machine = handle.machine();
    Ok(Json(
        diagnose(&handle.client, Some(machine.command_line), machine.shape.as_ref()).await?,
    ))
}

async fn begin(
    State(handle): State<Handle>,
    Query(terms): Query<Terms>,
    Json(wish): Json<NewOperation>,
) -> Result<Response, Failure> {
    let (answer, answered) = oneshot::channel();
    let begun = ask(&handle, Request::Begin(terms.of(wish), answer), answered).await?;
    let status = if begun.joined {
        StatusCode::OK
    } else {
        StatusCode::CREATED
    };
    let operation = begun.operation.borrow().clone();
    Ok((status, Json(operation)).into_response())
}

async fn dry_run(
    State(handle): State<Handle>,
    Json(wish): Json<NewOperation>,
) -> Result<Json<Forecast>, Failure> {
    let request = hibernation(wish, Duration::ZERO, &handle)?;
    Ok(Json(forecast(&handle.client, &request).await?))
}

/// The last version that a watcher has seen.
#[derive(Deserialize)]
struct Seen {
    seen: Option<u64>,
}

async fn watch_operation(
    State(handle): State<Handle>,
    UrlPath(id): UrlPath<Uuid>,
    Query(Seen { seen }): Query<Seen>,
) -> Result<Json<Operation>, Failure> {
    let mut documents = documents(&handle, id)?;
    if let Some(seen) = seen {
        let news = documents.wait_for(|operation| operation.version > seen);
        // Without news within the limit the watcher gets what there is.
        let closed = matches!(tokio::time::timeout(WATCH_LIMIT, news).await, Ok(Err(_)));
        let operation = documents.borrow();
        if closed && operation.result.is_none() && operation.error.is_none() {
            return Err(Failure::new(Code::Internal, "the operation ended without a word"));
        }
    }
    let operation = documents.borrow().clone();
    if operation.result.is_some() || operation.error.is_some() {
        handle.read.send_replace(Some(id));
    }
    Ok(Json(operation))
}

async fn cancel(
    State(handle): State<Handle>,
    UrlPath(id): UrlPath<Uuid>,
) -> Result<Json<Cancelled>, Failure> {
    let (answer, answered) = oneshot::channel();
    Ok(Json(Cancelled {
        answer: ask(&handle, Request::Cancel(id, answer), answered).await?,
    }))
}

async fn complete(
    State(handle): State<Handle>,
    UrlPath(id): UrlPath<Uuid>,
) -> Result<Json<Completed>, Failure> {
    let (answer, answered) = oneshot::channel();
    Ok(Json(Completed {
        was_waited_for: ask(&handle, Request::Tell(id, Said::Complete, answer), answered).await?,
    }))
}

async fn change_speed(
    State(handle): State<Handle>,
    UrlPath(id): UrlPath<Uuid>,
    Json(NewSpeed { bytes_per_second }): Json<NewSpeed>,
) -> Result<Json<SpeedChanged>, Failure> {
    if bytes_per_second == Some(0) {
        return Err(Failure::new(
            Code::Usage,
            "at most 0 bytes in a second would never end",
        ));
    }
    let (answer, answered) = oneshot::channel();
    let request = Request::Tell(id, Said::Speed(bytes_per_second), answer);
    Ok(Json(SpeedChanged {
        in_time: ask(&handle, request, answered).await?,
    }))
}

async fn ask<T>(
    handle: &Handle,
    request: Request,
    answered: oneshot::Receiver<Result<T, Failure>>,
) -> Result<T, Failure> {
    let ending = || Failure::new(Code::Unreachable, "the VM has ended");
    handle.requests.send(request).await.map_err(|_| ending())?;
    answered.await.unwrap_or_else(|_| Err(ending()))
}

fn documents(handle: &Handle, id: Uuid) -> Result<watch::Receiver<Operation>, Failure> {
    handle
        .operation(id)
        .ok_or_else(|| Failure::new(Code::Usage, format!("there is no operation {id}")))
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        let problem = Problem::from(&self);
        let status = StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (
            status,
            [(CONTENT_TYPE, "application/problem+json")],
            Json(problem),
        )
            .into_response()
    }
}
