//! Three real QEMUs, as recorded: every view reads what they said, and the fake says it again.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod recorded;

use std::io::{BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use dormouse_qmp::fake::{Exchange, FakeQemu};
use dormouse_qmp::view::block::{BlockExportInfo, BlockInfo, BlockNode};
use dormouse_qmp::view::fdset::{AddedFd, FdsetInfo};
use dormouse_qmp::view::job::{BlockJobInfo, IoStatus, JobInfo, JobStatus, JobType};
use dormouse_qmp::view::machine::{
    HumanReadableText, MachineInfo, MemoryBackend, MemorySizeSummary, RunState, StatusInfo,
};
use dormouse_qmp::view::migration::{MigrationEvent, MigrationInfo, MigrationStatus};
use dormouse_qmp::{Events, Greeting, Heard, command};
use recorded::{VERSIONS, connected, transcript};
use serde::de::DeserializeOwned;
use serde_json::Value;

/// All replies to a command, read into a view.
fn views<V: DeserializeOwned>(version: &str, command: &str) -> Vec<V> {
    let views: Vec<V> = transcript(version)
        .returned(command)
        .map(|reply| serde_json::from_value(reply.clone()).unwrap())
        .collect();
    assert!(!views.is_empty(), "{command} was not recorded");
    views
}

fn first_view<V: DeserializeOwned>(version: &str, command: &str) -> V {
    views(version, command).swap_remove(0)
}

fn exchange(version: &str, command: &str) -> Exchange {
    let transcript = transcript(version);
    let mut of_this = transcript
        .exchanges()
        .iter()
        .filter(|exchange| exchange.command.as_deref() == Some(command));
    of_this.next().unwrap().clone()
}

fn names(events: &[(String, Value)]) -> Vec<&str> {
    events.iter().map(|(name, _)| name.as_str()).collect()
}

#[test]
fn the_greetings_tell_versions_and_packages() {
    for (version, full) in VERSIONS.iter().zip(["7.2.22", "10.0.2", "11.1.3"]) {
        let greeting: Greeting = serde_json::from_value(transcript(version).greeting().clone()).unwrap();
        assert_eq!(greeting.version.to_string(), full);
        assert!(
            greeting.package.starts_with(&format!("Debian 1:{full}")) || *version == "7.2",
            "{}",
            greeting.package
        );
        assert!(greeting.offers_oob());
    }
}

#[test]
fn no_path_of_the_machine_they_were_recorded_on_is_in_them() {
    // Of the recording, of QEMU's object tree, and of its RAM blocks.
    const KNOWN: [&str; 3] = ["/lab/", "/machine/", "/rom@"];
    for version in VERSIONS {
        let mut texts = Vec::new();
        for exchange in transcript(version).exchanges() {
            let events = exchange.events_before.iter().chain(&exchange.events_after);
            let said = [&exchange.arguments].into_iter().chain(&exchange.reply);
            for value in said.chain(events.map(|(_, data)| data)) {
                collect_texts(value, &mut texts);
            }
        }
        let paths: Vec<&str> = texts
            .iter()
            .flat_map(|text| text.split([' ', ':', '\'', '"']))
            .filter(|word| word.starts_with('/'))
            .collect();
        assert!(paths.contains(&"/lab/disk.img"), "{version}: {paths:?}");
        for path in paths {
            assert!(
                KNOWN.iter().any(|known| path.starts_with(known)),
                "{version}: {path}"
            );
        }
    }
}

#[test]
fn the_run_state_follows_stop_cont_and_the_migration() {
    for version in VERSIONS {
        let states: Vec<StatusInfo> = views(version, "query-status");
        let told: Vec<(&RunState, bool)> = states.iter().map(|info| (&info.status, info.running)).collect();
        let expected = [
            (&RunState::Running, true),
            (&RunState::Paused, false),
            (&RunState::Running, true),
            (&RunState::Postmigrate, false),
        ];
        assert_eq!(told, expected, "{version}");
    }
}

#[test]
fn the_machine_tells_its_memory() {
    for version in VERSIONS {
        let backends: Vec<MemoryBackend> = first_view(version, "query-memdev");
        assert_eq!(backends.len(), 1, "{version}");
        assert_eq!(backends[0].id.as_deref(), Some("pc.ram"));
        assert_eq!(
            (backends[0].size_bytes, backends[0].share),
            (Some(64 << 20), Some(false))
        );
        let summary: MemorySizeSummary = first_view(version, "query-memory-size-summary");
        assert_eq!(
            (summary.base_memory_bytes, summary.plugged_memory_bytes),
            (Some(64 << 20), Some(0))
        );

        let text: HumanReadableText = first_view(version, "x-query-ramblock");
        let blocks = text.ram_blocks();
        let ram = blocks.iter().find(|block| block.name == "pc.ram").unwrap();
        assert_eq!((ram.used_bytes, ram.total_bytes), (64 << 20, 64 << 20));
        assert_eq!(ram.page_size_bytes, Some(4096));
        let tables = blocks
            .iter()
            .find(|block| block.name == "/rom@etc/acpi/tables")
            .unwrap();
        assert!(tables.used_bytes < tables.total_bytes, "it can grow");
        // The column came with 8.0.
        assert_eq!(tables.read_only, (version != "7.2").then_some(true), "{version}");
    }
}

#[test]
fn the_machine_types_have_one_default_and_aliases() {
    for (version, newest) in VERSIONS.iter().zip(["pc-q35-7.2", "pc-q35-10.0", "pc-q35-11.1"]) {
        let machines: Vec<MachineInfo> = first_view(version, "query-machines");
        let default: Vec<&MachineInfo> = machines.iter().filter(|machine| machine.is_default).collect();
        assert_eq!(default.len(), 1, "{version}");
        assert_eq!(default[0].default_ram_id.as_deref(), Some("pc.ram"));
        let q35 = machines
            .iter()
            .find(|machine| machine.alias.as_deref() == Some("q35"))
            .unwrap();
        assert_eq!(q35.name, newest);
    }
}

#[test]
fn the_drive_tells_its_node_and_image() {
    for version in VERSIONS {
        let drives: Vec<BlockInfo> = first_view(version, "query-block");
        let drive = drives.iter().find(|drive| drive.device == "ide0-hd0").unwrap();
        let node = drive.inserted.as_ref().unwrap();
        assert_eq!(
            (node.driver.as_str(), node.file.as_str()),
            ("raw", "/lab/disk.img")
        );
        assert_eq!(node.image.as_ref().unwrap().virtual_size_bytes, Some(1 << 20));
        assert_eq!(drive.io_status, Some(IoStatus::Ok));
        // Told since 10.0.
        assert_eq!(node.active, (version != "7.2").then_some(true), "{version}");

        let nodes: Vec<BlockNode> = first_view(version, "query-named-block-nodes");
        let drivers: Vec<&str> = nodes.iter().map(|node| node.driver.as_str()).collect();
        assert!(drivers.contains(&"raw") && drivers.contains(&"file"), "{version}");
        assert!(nodes.iter().any(|other| other.node_name == node.node_name));
    }
}

#[test]
fn a_bitmap_is_told_with_its_node() {
    for version in VERSIONS {
        let drives: Vec<Vec<BlockInfo>> = views(version, "query-block");
        let nodes: Vec<&BlockNode> = drives
            .iter()
            .map(|drives| drives.iter().find_map(|drive| drive.inserted.as_ref()).unwrap())
            .collect();
        assert_eq!(nodes[0].dirty_bitmaps, None, "{version}");
        let bitmaps = nodes[1].dirty_bitmaps.as_ref().unwrap();
        assert_eq!(bitmaps.len(), 1, "{version}");
        assert_eq!(bitmaps[0].name.as_deref(), Some("bitmap"));
        assert_eq!(
            (bitmaps[0].granularity_bytes, bitmaps[0].dirty_bytes),
            (Some(65536), Some(0))
        );
        assert_eq!(
            (bitmaps[0].recording, bitmaps[0].persistent),
            (Some(true), Some(false))
        );
    }
}

#[test]
fn an_added_descriptor_is_told_with_its_set_and_gone_when_removed() {
    for version in VERSIONS {
        let added: AddedFd = first_view(version, "add-fd");
        let sets: Vec<Vec<FdsetInfo>> = views(version, "query-fdsets");
        let [before, with, after] = &sets[..] else {
            panic!("{version}: {sets:?}")
        };
        assert_eq!((before, after), (&vec![], &vec![]), "{version}");
        let [set] = &with[..] else {
            panic!("{version}: {with:?}")
        };
        assert_eq!(set.fdset_id, added.fdset_id);
        let member = &set.fds.as_ref().unwrap()[0];
        assert_eq!((member.fd, member.opaque.as_deref()), (added.fd, Some("a file")));
    }
}

#[test]
fn the_mirror_is_ready_then_concluded_and_the_export_is_there() {
    for version in VERSIONS {
        let jobs: Vec<Vec<JobInfo>> = views(version, "query-jobs");
        let told: Vec<Vec<(&JobType, &JobStatus)>> = jobs
            .iter()
            .map(|jobs| jobs.iter().map(|job| (&job.job_type, &job.status)).collect())
            .collect();
        let expected = [
            vec![],
            vec![(&JobType::Mirror, &JobStatus::Ready)],
            vec![(&JobType::Mirror, &JobStatus::Concluded)],
        ];
        assert_eq!(told, expected, "{version}");

        let block_jobs: Vec<Vec<BlockJobInfo>> = views(version, "query-block-jobs");
        let mirror = &block_jobs[1][0];
        assert_eq!((mirror.id.as_str(), mirror.ready), ("mirror", true));
        assert_eq!(
            (mirror.offset_bytes, mirror.length_bytes),
            (Some(1 << 20), Some(1 << 20))
        );
        assert_eq!(mirror.auto_dismiss, Some(false));
        // Told since 8.2.
        assert_eq!(
            mirror.actively_synced,
            (version != "7.2").then_some(false),
            "{version}"
        );

        let exports: Vec<Vec<BlockExportInfo>> = views(version, "query-block-exports");
        assert_eq!(exports[0], []);
        assert_eq!(exports[1][0].export_type, "nbd");
        assert_eq!(exports[1][0].node_name, "target");
    }
}

#[test]
fn a_migration_goes_through_device_since_10_0() {
    for version in VERSIONS {
        let transcript = transcript(version);
        let told: Vec<MigrationStatus> = transcript
            .exchanges()
            .iter()
            .flat_map(|exchange| exchange.events_before.iter().chain(&exchange.events_after))
            .filter(|(name, _)| name == "MIGRATION")
            .map(|(_, data)| {
                serde_json::from_value::<MigrationEvent>(data.clone())
                    .unwrap()
                    .status
            })
            .collect();
        let mut expected = vec![MigrationStatus::Setup, MigrationStatus::Active];
        if version != "7.2" {
            expected.push(MigrationStatus::Device);
        }
        expected.push(MigrationStatus::Completed);
        assert_eq!(told, expected, "{version}");

        let infos: Vec<MigrationInfo> = views(version, "query-migrate");
        assert_eq!(infos[0].status, None);
        let ended = &infos[1];
        assert!(ended.is_terminal() && ended.total_time_ms.is_some() && ended.downtime_ms.is_some());
        let ram = ended.ram.as_ref().unwrap();
        assert!(ram.total_bytes.unwrap() >= 64 << 20);
        assert!(
            ram.transferred_bytes.unwrap() > 17 << 20,
            "the guest's pattern is no zeros"
        );
        assert_eq!(ram.page_size_bytes, Some(4096));
    }
}

#[test]
fn events_of_a_command_come_before_its_reply() {
    for version in VERSIONS {
        assert_eq!(names(&exchange(version, "stop").events_before), ["STOP"]);
        assert_eq!(names(&exchange(version, "cont").events_before), ["RESUME"]);
        let migrate = exchange(version, "migrate");
        assert_eq!(names(&migrate.events_before), ["MIGRATION"]);
        assert!(names(&migrate.events_after).contains(&"STOP"), "{version}");
    }
}

#[test]
fn refusals_have_a_class_and_the_words_change() {
    for version in VERSIONS {
        let (class, desc) = exchange(version, "no-such-command").reply.unwrap_err();
        assert_eq!(class, "CommandNotFound");
        assert_eq!(desc, "The command no-such-command has not been found");
        let transcript = transcript(version);
        let parse_error = transcript
            .exchanges()
            .iter()
            .find(|exchange| exchange.command.is_none())
            .unwrap();
        let (class, desc) = parse_error.reply.clone().unwrap_err();
        assert_eq!(class, "GenericError");
        assert!(desc.ends_with("JSON parse error, expecting value"), "{desc}");
        // 11.1 puts the position in front.
        assert_eq!(desc.starts_with("JSON"), version != "11.1", "{desc}");
    }
}

#[tokio::test]
async fn the_fake_plays_each_transcript_from_beginning_to_end() {
    for version in VERSIONS {
        let (_qemu, client) = connected(version).await;
        let mut events = client.events();
        for exchange in transcript(version).exchanges() {
            let Some(command) = &exchange.command else {
                continue;
            };
            if command == "qmp_capabilities" {
                continue;
            }
            let arguments = exchange.arguments.clone();
            let reply = match command.as_str() {
                "getfd" => {
                    let getfd: command::getfd = serde_json::from_value(arguments).unwrap();
                    client.execute_with_fds(&getfd, a_descriptor()).await
                }
                "add-fd" => {
                    let add_fd: command::add_fd = serde_json::from_value(arguments).unwrap();
                    client.execute_with_fds(&add_fd, a_descriptor()).await
                }
                command => client.execute_raw(command, arguments).await,
            };
            match (&exchange.reply, reply) {
                (Ok(recorded), Ok(reply)) => assert!(*recorded == reply, "{version}: {command}"),
                (Err((class, _)), Err(error)) => assert_eq!(error.class(), Some(class.as_str())),
                (recorded, reply) => panic!("{version}: {command}: {recorded:?}, {reply:?}"),
            }
            for recorded in exchange.events_before.iter().chain(&exchange.events_after) {
                assert_eq!(next_event(&mut events).await, *recorded, "{version}: {command}");
            }
        }
    }
}

#[tokio::test]
async fn a_descriptor_that_is_needed_is_needed_by_the_fake_too() {
    let (_qemu, client) = connected("10.0").await;
    let error = client.execute_raw("add-fd", Value::Null).await.unwrap_err();
    assert_eq!(error.class(), Some("GenericError"));
    // The recorded answer is still there for the one who brings one.
    let add_fd = command::add_fd {
        fdset_id: None,
        opaque: None,
    };
    client.execute_with_fds(&add_fd, a_descriptor()).await.unwrap();
}

#[tokio::test]
async fn the_last_answer_of_a_transcript_stays() {
    let (_qemu, client) = connected("11.1").await;
    for _ in 0..3 {
        client.execute_raw("query-status", Value::Null).await.unwrap();
    }
    for _ in 0..2 {
        let last = client.execute_raw("query-status", Value::Null).await.unwrap();
        assert_eq!(last["status"], "postmigrate");
    }
    let error = client
        .execute_raw("never-recorded", Value::Null)
        .await
        .unwrap_err();
    assert_eq!(error.class(), Some("CommandNotFound"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_line_that_is_no_json_gets_the_recorded_answer() {
    let qemu = FakeQemu::start(transcript("11.1").script()).unwrap();
    let mut stream = BufReader::new(UnixStream::connect(qemu.path()).unwrap());
    stream
        .get_ref()
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    let mut read = || {
        let mut line = String::new();
        stream.read_line(&mut line).unwrap();
        line
    };
    assert!(read().contains("\"QMP\""));
    let mut writer = UnixStream::try_clone(stream.get_ref()).unwrap();
    writer.write_all(b"}\n").unwrap();
    let mut answer = String::new();
    stream.read_line(&mut answer).unwrap();
    assert!(
        answer.contains(":1: JSON parse error, expecting value"),
        "{answer}"
    );
}

fn collect_texts(value: &Value, texts: &mut Vec<String>) {
    match value {
        Value::String(text) => texts.push(text.clone()),
        Value::Array(elements) => elements.iter().for_each(|element| collect_texts(element, texts)),
        Value::Object(members) => members.values().for_each(|member| collect_texts(member, texts)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

fn a_descriptor() -> Vec<OwnedFd> {
    vec![tempfile::tempfile().unwrap().into()]
}

async fn next_event(events: &mut Events) -> (String, Value) {
    match tokio::time::timeout(Duration::from_secs(20), events.next()).await {
        Ok(Heard::Event(event)) => (event.name, event.data),
        other => panic!("expected an event: {other:?}"),
    }
}
