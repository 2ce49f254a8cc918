//! What the QEMU at the other end can do, as it tells itself.
//!
//! [`Capabilities`] is an index over the replies of `query-qmp-schema`, `query-commands` and
//! `query-migrate-capabilities`. Ask it, and not the version number, whether a command, an argument
//! or a word is there: distributions carry features back and configure them out.
//!
//! # Paths
//!
//! An argument is named by its command and a path of member names with `/` between them. Arrays and
//! alternatives are passed through. Where an object has variants, all of them are looked into, and
//! `+` chooses one by the value of the object's tag:
//!
//! - `blockdev-mirror`, `target-is-zero`
//! - `migrate`, `channels/channel-type`
//! - `blockdev-add`, `+qcow2/file/+file/aio`
//!
//! ```
//! use dormouse_qmp::capabilities::{Capabilities, MirrorSafety, mirror_loses_writes};
//! # async fn example(client: &dormouse_qmp::Client) -> Result<(), dormouse_qmp::CommandError> {
//! let capabilities = Capabilities::of(client).await?;
//! let zeroes_are_known = capabilities.has_argument("blockdev-mirror", "target-is-zero");
//! let hands_over_memory = capabilities.has_migration_mode("cpr-transfer");
//! let compressions: Vec<&str> = capabilities.multifd_compressions().collect();
//! let mirror = mirror_loses_writes(client.greeting(), &capabilities);
//! # let _ = (zeroes_are_known, hands_over_memory, compressions, mirror == MirrorSafety::Safe);
//! # Ok(()) }
//! ```
//!
//! # Keeping them
//!
//! The reply has a quarter of a megabyte and takes QEMU some 50 ms of its main loop, so
//! [`Capabilities::of`] asks a binary once in the life of the process. To ask less often still,
//! serialize them to wherever state is kept, and [`Capabilities::remember`] them at the next start.
//! Something written by another version of this crate may be refused when it is read; ask QEMU
//! then.

mod cache;
mod mirror;
mod schema;

use std::collections::BTreeSet;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Value, json};

use crate::client::Client;
use crate::command;
use crate::error::CommandError;
use crate::wire::message::{Greeting, Version};

pub use mirror::{MirrorSafety, active_mirror_may_abort, mirror_loses_writes};

use schema::{Reported, Schema};

/// The form in which capabilities are serialized; anything else is refused when read.
const LAYOUT: u32 = 1;

/// The index of what one QEMU binary can do.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Capabilities {
    #[serde(deserialize_with = "known_layout", serialize_with = "own_layout")]
    layout: Layout,
    binary: Binary,
    commands: BTreeSet<String>,
    migration_capabilities: BTreeSet<String>,
    schema: Schema,
}

/// What tells one QEMU binary from another.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Binary {
    /// The version.
    #[serde(with = "version")]
    pub version: Version,
    /// The distribution's package, verbatim; often empty.
    pub package: String,
    /// The architecture of its guests, for example `x86_64`; empty when QEMU does not tell.
    pub target: String,
}

/// What is known of an argument or of a part of a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member<'a> {
    /// Whether it may be left out, in every variant that has it.
    pub optional: bool,
    /// What QEMU remarks about it, for example `deprecated` or `unstable`.
    pub features: BTreeSet<&'a str>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Layout;

impl Capabilities {
    /// What this QEMU can do: from memory if its binary was asked before in this process, else by
    /// asking, which takes four queries.
    pub async fn of(client: &Client) -> Result<Arc<Self>, CommandError> {
        let binary = Binary::behind(client).await?;
        if let Some(known) = cache::recall(&binary) {
            return Ok(known);
        }
        Ok(Self::ask_binary(client, binary).await?.remember())
    }

    /// Asks this QEMU what it can do, whether or not its binary was asked before.
    pub async fn ask(client: &Client) -> Result<Self, CommandError> {
        let binary = Binary::behind(client).await?;
        Self::ask_binary(client, binary).await
    }

    /// Makes this what [`of`](Self::of) finds for its binary from now on.
    ///
    /// The memory holds a handful of binaries and forgets the one that was not looked for the
    /// longest. A binary without a package string is not held: it cannot be told from another build
    /// of the same sources.
    pub fn remember(self) -> Arc<Self> {
        let shared = Arc::new(self);
        cache::remember(Arc::clone(&shared));
        shared
    }

    /// Reads the three replies themselves, for those who have them from elsewhere.
    ///
    /// `query_commands` and `query_migrate_capabilities` may be null, which stands for a QEMU that
    /// does not know the query. Only a schema that is no list at all is refused.
    pub fn from_replies(
        binary: Binary,
        query_qmp_schema: Value,
        query_commands: Value,
        query_migrate_capabilities: Value,
    ) -> Result<Self, serde_json::Error> {
        let Reported(schema) = serde_json::from_value(query_qmp_schema)?;
        let mut commands = words(&query_commands, "name");
        if commands.is_empty() {
            commands = schema.command_names().map(str::to_owned).collect();
        }
        Ok(Self {
            layout: Layout,
            binary,
            commands,
            migration_capabilities: words(&query_migrate_capabilities, "capability"),
            schema,
        })
    }

    async fn ask_binary(client: &Client, binary: Binary) -> Result<Self, CommandError> {
        let schema = client.execute(&command::query_qmp_schema {}).await?;
        let commands = answer_if_known(client.execute(&command::query_commands {}).await)?;
        let migration = answer_if_known(client.execute(&command::query_migrate_capabilities {}).await)?;
        Self::from_replies(binary, schema, commands, migration).map_err(|source| CommandError::Unexpected {
            command: "query-qmp-schema".to_owned(),
            source,
        })
    }

    /// The binary this was learned from.
    pub fn binary(&self) -> &Binary {
        &self.binary
    }

    /// Whether there is this command.
    pub fn has_command(&self, name: &str) -> bool {
        self.commands.contains(name)
    }

    /// Whether there is this event.
    pub fn has_event(&self, name: &str) -> bool {
        self.schema.has_event(name)
    }

    /// Whether QEMU executes the command out-of-band.
    pub fn allows_oob(&self, command: &str) -> bool {
        self.schema
            .command(command)
            .is_some_and(|command| command.allows_oob)
    }

    /// Whether QEMU remarks this about the command, for example `deprecated` or `unstable`.
    pub fn command_has_feature(&self, command: &str, feature: &str) -> bool {
        self.schema
            .command(command)
            .is_some_and(|command| command.features.contains(feature))
    }

    /// Whether the command takes this argument.
    pub fn has_argument(&self, command: &str, argument: &str) -> bool {
        !self.arguments_at(command, argument).is_empty()
    }

    /// What is known of an argument; none, if the command does not take it.
    pub fn argument(&self, command: &str, argument: &str) -> Option<Member<'_>> {
        Member::merged(&self.arguments_at(command, argument))
    }

    /// Whether the reply of the command may have this member.
    ///
    /// The paths are those of arguments: `query-block-jobs`, `actively-synced`.
    pub fn has_return(&self, command: &str, member: &str) -> bool {
        self.schema
            .command(command)
            .is_some_and(|entry| !self.schema.members_at(&entry.returns, member).is_empty())
    }

    /// Whether the argument may have this word as its value, or as an element of it.
    pub fn enum_has(&self, command: &str, argument: &str, value: &str) -> bool {
        self.enum_values(command, argument).any(|word| word == value)
    }

    /// All words that the argument may have; none, if there is no such argument or it is no
    /// enumeration.
    pub fn enum_values<'a>(
        &'a self,
        command: &str,
        argument: &str,
    ) -> impl Iterator<Item = &'a str> + use<'a> {
        let members = self.arguments_at(command, argument);
        self.schema.words_of(&members).into_keys()
    }

    /// Whether there is this migration capability, for example `mapped-ram`.
    ///
    /// What is built in, not what is switched on: that is of the running QEMU, and to be asked each
    /// time.
    pub fn has_migration_capability(&self, name: &str) -> bool {
        self.migration_capabilities.contains(name)
    }

    /// Whether there is this migration parameter, for example `direct-io`.
    pub fn has_migration_parameter(&self, name: &str) -> bool {
        self.has_argument("migrate-set-parameters", name)
    }

    /// Whether there is this migration mode, for example `cpr-transfer`.
    ///
    /// QEMU before 8.2 has no modes, not even `normal`.
    pub fn has_migration_mode(&self, mode: &str) -> bool {
        self.enum_has("migrate-set-parameters", "mode", mode)
    }

    /// Whether `migrate` takes channels, and one of this type, `main` or `cpr`.
    pub fn has_migration_channel(&self, channel_type: &str) -> bool {
        self.enum_has("migrate", "channels/channel-type", channel_type)
    }

    /// The compressions that multifd channels can have, for example `zstd`.
    pub fn multifd_compressions(&self) -> impl Iterator<Item = &str> {
        self.enum_values("migrate-set-parameters", "multifd-compression")
    }

    fn arguments_at(&self, command: &str, argument: &str) -> Vec<&schema::Member> {
        match self.schema.command(command) {
            Some(entry) => self.schema.members_at(&entry.arguments, argument),
            None => Vec::new(),
        }
    }
}

impl Client {
    /// Whether objects of this QOM type have this property: `memory-backend-ram`, `share`, or
    /// `pc-i440fx-10.0-machine`, `aux-ram-share`.
    ///
    /// The schema does not know properties, so this asks QEMU each time. A type that QEMU does not
    /// have has no properties.
    pub async fn has_object_property(&self, typename: &str, property: &str) -> Result<bool, CommandError> {
        let reply = self
            .execute_raw("qom-list-properties", json!({"typename": typename}))
            .await;
        match reply {
            Ok(properties) => Ok(words(&properties, "name").contains(property)),
            Err(error) if error.class() == Some("DeviceNotFound") => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Binary {
    /// The binary of this greeting, with guests of this architecture.
    pub fn new(greeting: &Greeting, target: impl Into<String>) -> Self {
        Self {
            version: greeting.version,
            package: greeting.package.clone(),
            target: target.into(),
        }
    }

    async fn behind(client: &Client) -> Result<Self, CommandError> {
        let reply = answer_if_known(client.execute(&command::query_target {}).await)?;
        let target = reply["arch"].as_str().unwrap_or_default();
        Ok(Self::new(client.greeting(), target))
    }
}

impl<'a> Member<'a> {
    fn merged(members: &[&'a schema::Member]) -> Option<Self> {
        if members.is_empty() {
            return None;
        }
        let features = members.iter().flat_map(|member| &member.features);
        Some(Self {
            optional: members.iter().all(|member| member.optional),
            features: features.map(String::as_str).collect(),
        })
    }
}

/// Null for a query that this QEMU refuses.
fn answer_if_known(reply: Result<Value, CommandError>) -> Result<Value, CommandError> {
    match reply {
        Err(CommandError::Qemu { .. }) => Ok(Value::Null),
        reply => reply,
    }
}

/// One member of each object in a list, as far as it is a string.
fn words(list: &Value, member: &str) -> BTreeSet<String> {
    list.as_array()
        .into_iter()
        .flatten()
        .filter_map(|entry| entry[member].as_str().map(str::to_owned))
        .collect()
}

fn own_layout<S: Serializer>(_: &Layout, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_u32(LAYOUT)
}

fn known_layout<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Layout, D::Error> {
    match u32::deserialize(deserializer)? {
        LAYOUT => Ok(Layout),
        other => Err(serde::de::Error::custom(format!(
            "capabilities in layout {other}, expected {LAYOUT}"
        ))),
    }
}

mod version {
    use super::{Deserialize, Deserializer, Serialize, Serializer, Version};

    pub(super) fn serialize<S: Serializer>(version: &Version, serializer: S) -> Result<S::Ok, S::Error> {
        (version.major, version.minor, version.micro).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Version, D::Error> {
        let (major, minor, micro) = Deserialize::deserialize(deserializer)?;
        Ok(Version { major, minor, micro })
    }
}
