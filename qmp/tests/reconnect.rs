//! A monitor that stays attached, against scripted QEMUs that come and go.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::future::Future;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use dormouse_qmp::fake::{Answer, FakeQemu, Script};
use dormouse_qmp::reconnect::{
    AttachError, BackOff, GivenUp, Monitor, MonitorOptions, Report, Reports, Snapshot, Standing,
};
use dormouse_qmp::view::job::JobStatus;
use dormouse_qmp::view::machine::RunState;
use dormouse_qmp::view::migration::MigrationStatus;
use dormouse_qmp::{Address, Client, CommandError, ConnectError, ConnectOptions, ConnectionLoss};
use serde_json::{Value, json};

/// Long enough for a loaded machine; what is waited for comes at once or never.
const PATIENCE: Duration = Duration::from_secs(20);
/// For what must not come.
const MOMENT: Duration = Duration::from_millis(60);

async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future)
        .await
        .expect("what was waited for did not come")
}

/// Attempts follow each other as fast as they can, so that nothing sleeps.
fn options() -> MonitorOptions {
    MonitorOptions {
        back_off: BackOff {
            first: Duration::from_millis(1),
            cap: Duration::from_millis(5),
            give_up_after: PATIENCE,
        },
        ..MonitorOptions::default()
    }
}

/// A place where one QEMU after the other can be reached.
struct Place {
    directory: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        Self {
            directory: tempfile::tempdir().unwrap(),
        }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("qmp.sock")
    }

    fn is_taken_by(&self, qemu: &FakeQemu) {
        let new = self.directory.path().join("new");
        std::os::unix::fs::symlink(qemu.path(), &new).unwrap();
        std::fs::rename(new, self.socket()).unwrap();
    }
}

/// A QEMU that answers what a snapshot asks.
fn running() -> Script {
    Script::new()
        .on(
            "query-status",
            Answer::returns(json!({"status": "running", "running": true})),
        )
        .on("query-migrate", Answer::returns(json!({})))
        .on("query-jobs", Answer::returns(json!([])))
        .on(
            "query-block",
            Answer::returns(json!([{"device": "", "qdev": "disk0"}])),
        )
        .on("query-fdsets", Answer::returns(json!([])))
}

fn migrated() -> Script {
    let job = json!({"id": "mirror0", "type": "mirror", "status": "concluded", "error": "no space"});
    running()
        .on(
            "query-status",
            Answer::returns(json!({"status": "postmigrate", "running": false})),
        )
        .on("query-migrate", Answer::returns(json!({"status": "completed"})))
        .on("query-jobs", Answer::returns(json!([job])))
        .on(
            "query-fdsets",
            Answer::returns(json!([{"fdset-id": 1, "fds": [{"fd": 9, "opaque": "ram"}]}])),
        )
}

async fn back(reports: &mut Reports) -> Arc<Snapshot> {
    match in_time(reports.next()).await {
        Report::Back { snapshot } => snapshot,
        other => panic!("{other:?}"),
    }
}

async fn lost(reports: &mut Reports) -> ConnectionLoss {
    match in_time(reports.next()).await {
        Report::Lost { why } => why,
        other => panic!("{other:?}"),
    }
}

async fn event(reports: &mut Reports) -> String {
    match in_time(reports.next()).await {
        Report::Event(event) => event.name,
        other => panic!("{other:?}"),
    }
}

async fn given_up(reports: &mut Reports) -> GivenUp {
    match in_time(reports.next()).await {
        Report::GivenUp(reason) => reason,
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_qemu_that_dies_and_comes_back_is_another_state_behind_a_gap() {
    let place = Place::new();
    let first = FakeQemu::start(running().on("slow", Answer::nothing())).unwrap();
    place.is_taken_by(&first);
    let monitor = Monitor::attach(place.socket(), options());
    let mut reports = monitor.subscribe();
    let before = back(&mut reports).await;
    assert_eq!(before.status.status, RunState::Running);
    assert_eq!(before.block[0].qdev.as_deref(), Some("disk0"));
    first.emit("RESUME", Value::Null);
    assert_eq!(event(&mut reports).await, "RESUME");

    let client = in_time(monitor.attached()).await.unwrap().client;
    let in_flight = tokio::spawn({
        let client = client.clone();
        async move { client.execute_raw("slow", Value::Null).await }
    });
    in_time(first.wait_for("slow", 1)).await;
    drop(first);
    assert!(matches!(lost(&mut reports).await, ConnectionLoss::PeerClosed));
    let error = in_time(in_flight).await.unwrap().unwrap_err();
    assert!(matches!(error, CommandError::ConnectionLost { .. }), "{error:?}");
    assert!(matches!(monitor.standing(), Standing::Gap));

    let second = FakeQemu::start(migrated().on("slow", Answer::returns(json!({})))).unwrap();
    place.is_taken_by(&second);
    let after = back(&mut reports).await;
    assert_eq!(after.status.status, RunState::Postmigrate);
    assert_eq!(after.migration.status, Some(MigrationStatus::Completed));
    assert_eq!(after.jobs[0].status, JobStatus::Concluded);
    assert_eq!(
        after.fdsets[0].fds.as_ref().unwrap()[0].opaque.as_deref(),
        Some("ram")
    );
    second.emit("STOP", Value::Null);
    assert_eq!(event(&mut reports).await, "STOP");
    assert!(
        second.wait_for("slow", 0).await.is_empty(),
        "what was in flight is never repeated"
    );
    assert!(client.is_closed(), "a client belongs to its connection");
    let attached = in_time(monitor.attached()).await.unwrap();
    assert_eq!(attached.snapshot, after);
    attached.client.execute_raw("slow", Value::Null).await.unwrap();
}

#[tokio::test]
async fn a_qemu_that_is_not_there_yet_is_waited_for() {
    let place = Place::new();
    let monitor = Monitor::attach(place.socket(), options());
    assert!(
        tokio::time::timeout(MOMENT, monitor.attached()).await.is_err(),
        "nobody is there"
    );
    let qemu = FakeQemu::start(running()).unwrap();
    place.is_taken_by(&qemu);
    let attached = in_time(monitor.attached()).await.unwrap();
    assert!(attached.snapshot.status.running);
}

#[tokio::test]
async fn what_happens_while_the_state_is_queried_is_told_after_it() {
    let block = Answer::returns(json!([])).with_event("JOB_STATUS_CHANGE", json!({"id": "a"}));
    let qemu = FakeQemu::start(running().on("query-block", block)).unwrap();
    let monitor = Monitor::attach(qemu.path(), options());
    let mut reports = monitor.subscribe();
    back(&mut reports).await;
    assert_eq!(event(&mut reports).await, "JOB_STATUS_CHANGE");
}

#[tokio::test]
async fn a_qemu_that_is_slow_to_tell_its_state_is_asked_again_and_not_left() {
    let mut stalls = 2;
    let script = running().on_each("query-jobs", move |_| {
        stalls -= 1;
        if stalls >= 0 {
            Answer::nothing()
        } else {
            Answer::returns(json!([]))
        }
    });
    let qemu = FakeQemu::start(script).unwrap();
    let hasty = MonitorOptions {
        connect: ConnectOptions {
            command_deadline: MOMENT,
            ..ConnectOptions::default()
        },
        ..options()
    };
    let monitor = Monitor::attach(qemu.path(), hasty);
    in_time(monitor.attached()).await.unwrap();
    assert_eq!(qemu.wait_for("query-jobs", 3).await.len(), 3);
    assert_eq!(qemu.wait_for("qmp_capabilities", 1).await.len(), 1);
}

#[tokio::test]
async fn a_state_that_cannot_be_queried_is_no_attachment() {
    let script = running().on("query-jobs", Answer::fails("GenericError", "not today"));
    let qemu = FakeQemu::start(script).unwrap();
    let mut brief = options();
    brief.back_off.give_up_after = MOMENT;
    let monitor = Monitor::attach(qemu.path(), brief);
    let reason = in_time(monitor.attached()).await.unwrap_err();
    let GivenUp::Deadline { last, .. } = &reason else {
        panic!("{reason:?}")
    };
    assert!(
        matches!(&**last, AttachError::Snapshot(error) if error.command() == "query-jobs"),
        "{last:?}"
    );
    // Each attempt left the monitor free.
    Client::connect(qemu.path(), ConnectOptions::default())
        .await
        .unwrap();
}

#[tokio::test]
async fn a_gap_that_lasts_too_long_is_the_end_and_is_told_to_all_who_ask() {
    let mut brief = options();
    brief.back_off.give_up_after = MOMENT;
    let monitor = Monitor::attach(Place::new().socket(), brief);
    let mut reports = monitor.subscribe();
    for _ in 0..2 {
        let reason = given_up(&mut reports).await;
        let GivenUp::Deadline { after, last } = &reason else {
            panic!("{reason:?}")
        };
        assert_eq!(*after, MOMENT);
        assert!(matches!(
            &**last,
            AttachError::Connect(ConnectError::Socket { .. })
        ));
    }
    assert!(monitor.attached().await.is_err());
    assert!(matches!(
        given_up(&mut monitor.subscribe()).await,
        GivenUp::Deadline { .. }
    ));
}

#[tokio::test]
async fn a_process_that_is_gone_is_not_waited_for() {
    let monitor = Monitor::attach(Place::new().socket(), options());
    let mut reports = monitor.subscribe();
    assert!(matches!(monitor.standing(), Standing::Gap));
    monitor.process_ended();
    assert!(matches!(given_up(&mut reports).await, GivenUp::ProcessEnded));
}

#[tokio::test]
async fn an_attempt_under_way_is_left_when_the_process_is_gone() {
    let qemu = FakeQemu::start(Script::new().on("qmp_capabilities", Answer::nothing())).unwrap();
    let monitor = Monitor::attach(qemu.path(), options());
    in_time(qemu.wait_for("qmp_capabilities", 1)).await;
    monitor.process_ended();
    let reason = in_time(monitor.attached()).await.unwrap_err();
    assert!(matches!(reason, GivenUp::ProcessEnded), "{reason:?}");
}

#[tokio::test]
async fn the_last_words_of_a_process_that_is_gone_are_heard() {
    let qemu = FakeQemu::start(running()).unwrap();
    let monitor = Monitor::attach(qemu.path(), options());
    let mut reports = monitor.subscribe();
    back(&mut reports).await;
    monitor.process_ended();
    qemu.emit("SHUTDOWN", json!({"reason": "guest-shutdown"}));
    assert_eq!(event(&mut reports).await, "SHUTDOWN");
    qemu.hang_up();
    lost(&mut reports).await;
    assert!(matches!(given_up(&mut reports).await, GivenUp::ProcessEnded));
}

#[tokio::test]
async fn a_peer_that_drops_each_connection_at_once_is_a_gap_that_ends() {
    let leaving = Script::new().on("qmp_capabilities", Answer::hangs_up());
    let qemu = FakeQemu::start(leaving).unwrap();
    let mut brief = options();
    brief.back_off.give_up_after = MOMENT;
    let monitor = Monitor::attach(qemu.path(), brief);
    let reason = in_time(monitor.attached()).await.unwrap_err();
    assert!(matches!(reason, GivenUp::Deadline { .. }), "{reason:?}");
    let attempts = qemu.wait_for("qmp_capabilities", 2).await.len();
    assert!(attempts <= 60, "{attempts} attempts in 60 ms");
}

#[tokio::test]
async fn a_descriptor_is_attached_to_once() {
    let qemu = FakeQemu::start(running()).unwrap();
    let stream = StdUnixStream::connect(qemu.path()).unwrap();
    let monitor = Monitor::attach(Address::from(stream), options());
    let mut reports = monitor.subscribe();
    back(&mut reports).await;
    qemu.hang_up();
    lost(&mut reports).await;
    assert!(matches!(
        given_up(&mut reports).await,
        GivenUp::NotReconnectable { last: None }
    ));
}

#[tokio::test]
async fn the_connection_ends_with_the_last_monitor_whoever_still_listens() {
    let qemu = FakeQemu::start(running()).unwrap();
    let monitor = Monitor::attach(qemu.path(), options());
    let clone = monitor.clone();
    let mut reports = monitor.subscribe();
    back(&mut reports).await;
    drop(monitor);
    qemu.emit("STOP", Value::Null);
    assert_eq!(event(&mut reports).await, "STOP");
    drop(clone);
    assert!(matches!(given_up(&mut reports).await, GivenUp::Detached));
    // Only one client is served at a time.
    Client::connect(qemu.path(), ConnectOptions::default())
        .await
        .unwrap();
}

#[tokio::test]
async fn a_subscriber_that_lags_is_told_how_far_and_finds_the_end() {
    let qemu = FakeQemu::start(running()).unwrap();
    let small = MonitorOptions {
        report_capacity: 4,
        ..options()
    };
    let monitor = Monitor::attach(qemu.path(), small);
    let mut reports = monitor.subscribe();
    let mut probe = monitor.subscribe();
    back(&mut probe).await;
    for _ in 0..10 {
        qemu.emit("TICK", Value::Null);
        assert_eq!(event(&mut probe).await, "TICK");
    }
    assert!(matches!(in_time(reports.next()).await, Report::Lagged(7)));
    drop(monitor);
    for _ in 0..4 {
        assert_eq!(event(&mut reports).await, "TICK");
    }
    assert!(matches!(given_up(&mut reports).await, GivenUp::Detached));
}
