//! What three real QEMUs can do, from their recorded schemas.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod recorded;

use std::sync::{Arc, LazyLock};

use dormouse_qmp::Greeting;
use dormouse_qmp::capabilities::{Binary, Capabilities, MirrorSafety, mirror_loses_writes};
use dormouse_qmp::fake::{Answer, FakeQemu, Script};
use recorded::{VERSIONS, connected, transcript};
use serde_json::{Value, json};

fn greeting(version: &str) -> Greeting {
    serde_json::from_value(transcript(version).greeting().clone()).unwrap()
}

/// What the QEMU of this version told.
fn capabilities(version: &str) -> &'static Capabilities {
    static OF_EACH: LazyLock<[Capabilities; 3]> = LazyLock::new(|| {
        VERSIONS.map(|version| {
            let transcript = transcript(version);
            let reply = |command| transcript.returned(command).next().unwrap().clone();
            Capabilities::from_replies(
                Binary::new(&greeting(version), "x86_64"),
                reply("query-qmp-schema"),
                reply("query-commands"),
                reply("query-migrate-capabilities"),
            )
            .unwrap()
        })
    });
    let at = VERSIONS.iter().position(|of_each| *of_each == version);
    &OF_EACH[at.unwrap()]
}

/// What a question finds on 7.2, 10.0 and 11.1.
fn on_each(question: impl Fn(&Capabilities) -> bool) -> [bool; 3] {
    VERSIONS.map(|version| question(capabilities(version)))
}

const ALL: [bool; 3] = [true, true, true];
const FROM_10_0: [bool; 3] = [false, true, true];
const ON_11_1: [bool; 3] = [false, false, true];
const NONE: [bool; 3] = [false, false, false];

#[test]
fn commands_come_and_go_with_the_versions() {
    for (command, expected) in [
        ("migrate", ALL),
        ("blockdev-mirror", ALL),
        ("x-query-ramblock", ALL),
        ("block-job-change", FROM_10_0),
        ("blockdev-set-active", FROM_10_0),
        ("no-such-command", NONE),
        ("", NONE),
    ] {
        assert_eq!(on_each(|it| it.has_command(command)), expected, "{command}");
    }
}

#[test]
fn arguments_come_and_go_with_the_versions() {
    for (command, argument, expected) in [
        ("blockdev-mirror", "target-is-zero", ON_11_1),
        ("blockdev-mirror", "copy-mode", ALL),
        ("migrate", "uri", ALL),
        ("migrate", "channels", FROM_10_0),
        ("migrate", "channels/addr/+file/offset", FROM_10_0),
        ("migrate", "blk", [true, false, false]),
        ("migrate", "detach", [true, true, false]),
        ("migrate-incoming", "exit-on-error", FROM_10_0),
        ("block-export-add", "+nbd/name", ALL),
        ("block-export-add", "allow-inactive", FROM_10_0),
        ("blockdev-add", "+qcow2/file/+file/aio", ALL),
        ("blockdev-add", "+file/reconnect-delay", NONE),
        ("blockdev-add", "+nbd/reconnect-delay", ALL),
        ("blockdev-reopen", "options/+raw/file/+host_device/discard", ALL),
        ("no-such-command", "uri", NONE),
        ("stop", "uri", NONE),
        ("migrate", "", NONE),
        ("migrate", "uri/further", NONE),
    ] {
        assert_eq!(
            on_each(|it| it.has_argument(command, argument)),
            expected,
            "{command}, {argument}"
        );
    }
}

#[test]
fn migration_differs_from_version_to_version() {
    for (mode, expected) in [
        ("normal", FROM_10_0),
        ("cpr-reboot", FROM_10_0),
        ("cpr-transfer", FROM_10_0),
        ("cpr-exec", ON_11_1),
        ("no-such-mode", NONE),
    ] {
        assert_eq!(on_each(|it| it.has_migration_mode(mode)), expected, "{mode}");
    }
    for (capability, expected) in [
        ("events", ALL),
        ("multifd", ALL),
        ("background-snapshot", ALL),
        ("mapped-ram", FROM_10_0),
        ("compress", [true, false, false]),
        ("zero-blocks", [true, true, false]),
        ("no-such-capability", NONE),
    ] {
        assert_eq!(
            on_each(|it| it.has_migration_capability(capability)),
            expected,
            "{capability}"
        );
    }
    assert_eq!(on_each(|it| it.has_migration_parameter("direct-io")), FROM_10_0);
    assert_eq!(
        on_each(|it| it.has_migration_parameter("zero-page-detection")),
        FROM_10_0
    );
    assert_eq!(on_each(|it| it.has_migration_channel("main")), FROM_10_0);
    assert_eq!(on_each(|it| it.has_migration_channel("cpr")), FROM_10_0);
    for version in VERSIONS {
        let capabilities = capabilities(version);
        let compressions: Vec<&str> = capabilities.multifd_compressions().collect();
        assert_eq!(compressions, ["none", "zlib", "zstd"], "{version}");
    }
}

#[test]
fn the_list_of_migration_capabilities_agrees_with_the_schema() {
    for version in VERSIONS {
        let capabilities = capabilities(version);
        let words: Vec<&str> = capabilities
            .enum_values("migrate-set-capabilities", "capabilities/capability")
            .collect();
        assert!(words.len() > 15, "{version}: {words:?}");
        for word in words {
            assert!(capabilities.has_migration_capability(word), "{version}: {word}");
        }
    }
}

#[test]
fn out_of_band_are_few_commands_and_not_those_that_run_the_guest() {
    for command in ["migrate-recover", "migrate-pause", "yank", "query-yank"] {
        assert_eq!(on_each(|it| it.allows_oob(command)), ALL, "{command}");
    }
    for command in ["stop", "migrate", "no-such-command"] {
        assert_eq!(on_each(|it| it.allows_oob(command)), NONE, "{command}");
    }
}

#[test]
fn members_tell_their_features_and_whether_they_can_be_left_out() {
    for version in VERSIONS {
        let capabilities = capabilities(version);
        let argument = |argument| capabilities.argument("blockdev-mirror", argument).unwrap();
        assert!(!argument("sync").optional && argument("copy-mode").optional);
        assert!(capabilities.command_has_feature("drive-backup", "deprecated"));
        assert!(!capabilities.command_has_feature("stop", "deprecated"));
        assert_eq!(capabilities.argument("blockdev-mirror", "no-such"), None);
    }
    // Since when the types of the jobs' commands are the same for all kinds of jobs.
    assert_eq!(
        on_each(|it| it.command_has_feature("block-job-complete", "deprecated")),
        ON_11_1
    );
    let detach = capabilities("10.0");
    assert!(detach.argument("migrate", "detach").unwrap().features.is_empty());
}

#[test]
fn replies_and_events_can_be_looked_up_like_arguments() {
    assert_eq!(
        on_each(|it| it.has_return("query-block-jobs", "actively-synced")),
        FROM_10_0
    );
    assert_eq!(
        on_each(|it| it.has_return("query-status", "singlestep")),
        [true, false, false]
    );
    assert_eq!(on_each(|it| it.has_return("stop", "anything")), NONE);
    assert_eq!(on_each(|it| it.has_event("MIGRATION_PASS")), ALL);
    assert_eq!(on_each(|it| it.has_event("migrate")), NONE);
}

#[test]
fn mirroring_loses_writes_on_10_0_2_only() {
    let on = |version| mirror_loses_writes(&greeting(version), capabilities(version));
    assert_eq!(on("7.2"), MirrorSafety::Safe);
    assert_eq!(on("11.1"), MirrorSafety::Safe);
    let MirrorSafety::Affected { why } = on("10.0") else {
        panic!("10.0.2 is affected")
    };
    assert!(
        why.starts_with("QEMU 10.0.2 (Debian 1:10.0.2+ds-2+deb13u1"),
        "{why}"
    );
    assert_eq!(
        mirror_loses_writes(&greeting("10.0"), &Capabilities::default()),
        MirrorSafety::NoMirror
    );
}

#[test]
fn capabilities_on_disk_are_the_same_when_read_again() {
    for version in VERSIONS {
        let capabilities = capabilities(version);
        let written = serde_json::to_vec(capabilities).unwrap();
        assert!(written.len() < 300_000, "{} bytes", written.len());
        let read: Capabilities = serde_json::from_slice(&written).unwrap();
        assert!(read == *capabilities, "{version}");
    }
}

#[test]
fn capabilities_written_by_another_version_of_the_crate_are_refused() {
    let mut written = serde_json::to_value(Capabilities::default()).unwrap();
    assert!(serde_json::from_value::<Capabilities>(written.clone()).is_ok());
    written["layout"] = json!(0);
    let error = serde_json::from_value::<Capabilities>(written.clone()).unwrap_err();
    assert!(error.to_string().contains("layout 0"), "{error}");
    written.as_object_mut().unwrap().remove("layout");
    assert!(serde_json::from_value::<Capabilities>(written).is_err());
}

#[tokio::test]
async fn a_binary_is_asked_once_whatever_the_connection() {
    let (qemu, client) = connected("10.0").await;
    let first = Capabilities::of(&client).await.unwrap();
    let second = Capabilities::of(&client).await.unwrap();
    assert!(Arc::ptr_eq(&first, &second));
    assert_eq!(first.binary().target, "x86_64");
    let (other_qemu, other_client) = connected("10.0").await;
    assert!(Arc::ptr_eq(
        &first,
        &Capabilities::of(&other_client).await.unwrap()
    ));
    let asked = |qemu: &FakeQemu| {
        qemu.received()
            .iter()
            .filter(|command| command.name == "query-qmp-schema")
            .count()
    };
    assert_eq!((asked(&qemu), asked(&other_qemu)), (1, 0));
    assert!(Capabilities::ask(&other_client).await.unwrap() == *first);
    assert_eq!(asked(&other_qemu), 1);

    let (_qemu, client) = connected("11.1").await;
    let newer = Capabilities::of(&client).await.unwrap();
    assert!(newer.has_argument("blockdev-mirror", "target-is-zero"));
}

#[tokio::test]
async fn what_was_kept_on_disk_spares_the_question() {
    let schema = json!([{"name": "stop", "meta-type": "command"}]);
    let greeting =
        json!({"version": {"qemu": {"major": 9, "minor": 1, "micro": 0}, "package": "kept-on-disk"}});
    let script = Script::new()
        .greeting(greeting.clone())
        .on("query-qmp-schema", Answer::hangs_up());
    let qemu = FakeQemu::start(script).unwrap();
    let binary = Binary::new(&serde_json::from_value(greeting).unwrap(), "");
    let kept = Capabilities::from_replies(binary, schema, Value::Null, Value::Null).unwrap();
    let kept = kept.remember();
    let client = dormouse_qmp::Client::connect(qemu.path(), Default::default())
        .await
        .unwrap();
    assert!(Arc::ptr_eq(&Capabilities::of(&client).await.unwrap(), &kept));
    assert!(kept.has_command("stop"), "the schema stands in for the list");
}

#[tokio::test]
async fn a_qemu_that_refuses_all_but_the_schema_can_still_be_asked() {
    let script = Script::new().on(
        "query-qmp-schema",
        Answer::returns(json!([{"name": "stop", "meta-type": "command"}])),
    );
    let qemu = FakeQemu::start(script).unwrap();
    let client = dormouse_qmp::Client::connect(qemu.path(), Default::default())
        .await
        .unwrap();
    let capabilities = Capabilities::ask(&client).await.unwrap();
    assert!(capabilities.has_command("stop") && !capabilities.has_migration_capability("events"));
    assert_eq!(capabilities.binary().target, "");
}

#[tokio::test]
async fn a_schema_that_is_none_is_an_error_that_names_the_command() {
    let script = Script::new().on("query-qmp-schema", Answer::returns(json!({"entries": []})));
    let qemu = FakeQemu::start(script).unwrap();
    let client = dormouse_qmp::Client::connect(qemu.path(), Default::default())
        .await
        .unwrap();
    let error = Capabilities::of(&client).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "query-qmp-schema: the reply has an unexpected shape"
    );
}

#[tokio::test]
async fn properties_are_asked_of_the_type_and_a_type_that_is_not_there_has_none() {
    let (_qemu, client) = connected("10.0").await;
    // In the order of the recording.
    let has = |typename| client.has_object_property(typename, "share");
    assert!(has("memory-backend-memfd").await.unwrap());
    assert!(!has("no-such-type").await.unwrap());
}

/// A schema with random damage: parts taken out or replaced by something else.
#[test]
fn a_damaged_schema_is_read_and_asked_without_a_panic() {
    let transcript = transcript("10.0");
    let whole = transcript.returned("query-qmp-schema").next().unwrap();
    for seed in 1..=40 {
        let mut damaged = whole.clone();
        Damage(seed).to(&mut damaged);
        let Ok(capabilities) =
            Capabilities::from_replies(Binary::default(), damaged.clone(), damaged.clone(), damaged)
        else {
            continue;
        };
        for argument in [
            "channels/addr/+file/offset",
            "+qcow2/file/file/file",
            "//",
            "+",
            "+/+",
        ] {
            for command in ["migrate", "blockdev-add", "blockdev-reopen", ""] {
                let _ = capabilities.argument(command, argument);
                let _ = capabilities.enum_values(command, argument).count();
            }
        }
    }
}

struct Damage(u64);

impl Damage {
    fn to(&mut self, value: &mut Value) {
        if self.one_in(200) {
            let instead = [
                json!(null),
                json!([[]]),
                json!({"name": 1}),
                json!(-1),
                json!("1"),
            ];
            *value = instead[self.below(5)].clone();
        }
        match value {
            Value::Array(elements) => {
                elements.retain(|_| !self.one_in(50));
                elements.iter_mut().for_each(|element| self.to(element));
            }
            Value::Object(members) => {
                members.retain(|_, _| !self.one_in(50));
                members.values_mut().for_each(|member| self.to(member));
            }
            _ => {}
        }
    }

    fn one_in(&mut self, number: usize) -> bool {
        self.below(number) == 0
    }

    fn below(&mut self, limit: usize) -> usize {
        // xorshift64
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        usize::try_from(self.0 >> 33).unwrap() % limit
    }
}
