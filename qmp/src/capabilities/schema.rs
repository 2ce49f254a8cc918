//! The index over what `query-qmp-schema` tells.
//!
//! QEMU describes its commands as a graph: a command names the type of its arguments, an object the
//! types of its members, and so on, and the names of types are arbitrary numbers that differ from
//! build to build. So a question starts at a command and follows a path of member names from there.
//!
//! ```text
//!   migrate ── arg-type ──► object ── "channels" ──► array ──► object ── "channel-type" ──► enum
//!                              migrate, channels/channel-type ───────────────────────────► main, cpr
//! ```
//!
//! What is not understood (a kind of entry of a later QEMU, a damaged one, a type that is not there)
//! is passed over: the question then finds less, and never fails.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::de::{Deserializer, IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// How many entries of a schema are taken in.
///
/// QEMU 7.2 has 1051 and 11.1 has 1230, so this leaves room for decades. The length of the line
/// they come in is limited before.
pub(super) const ENTRY_LIMIT: usize = 16_384;

/// Commands and events, and the types behind them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Schema {
    commands: BTreeMap<String, CommandEntry>,
    events: BTreeSet<String>,
    types: BTreeMap<String, Type>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct CommandEntry {
    pub(super) arguments: String,
    pub(super) returns: String,
    pub(super) allows_oob: bool,
    pub(super) features: BTreeSet<String>,
}

/// A type, as far as paths lead through it. Builtin types end a path and are not kept.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum Type {
    Object {
        members: BTreeMap<String, Member>,
        /// The types of further members, by the value of the object's tag that brings them.
        variants: BTreeMap<String, String>,
    },
    /// One of these types.
    Alternate(BTreeSet<String>),
    Array(String),
    /// The words, with the features of each.
    Enum(BTreeMap<String, BTreeSet<String>>),
}

/// A member of an object.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Member {
    pub(super) type_name: String,
    pub(super) optional: bool,
    pub(super) features: BTreeSet<String>,
}

/// Where a path has got to: a type and, if the path has chosen one, its variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Place<'a> {
    type_name: &'a str,
    case: Option<&'a str>,
}

impl<'a> Place<'a> {
    fn any(type_name: &'a str) -> Self {
        Self {
            type_name,
            case: None,
        }
    }
}

impl Schema {
    pub(super) fn command(&self, name: &str) -> Option<&CommandEntry> {
        self.commands.get(name)
    }

    pub(super) fn command_names(&self) -> impl Iterator<Item = &str> {
        self.commands.keys().map(String::as_str)
    }

    pub(super) fn has_event(&self, name: &str) -> bool {
        self.events.contains(name)
    }

    /// All members that a path leads to. More than one when variants have the same member.
    pub(super) fn members_at<'a>(&'a self, type_name: &'a str, path: &str) -> Vec<&'a Member> {
        let mut places = vec![Place::any(type_name)];
        let mut found: Vec<&Member> = Vec::new();
        for step in path.split('/') {
            if let Some(case) = step.strip_prefix('+') {
                places = self.narrowed(places, case);
                // A variant is on the way to a member, and is none itself.
                found.clear();
            } else {
                found = self.members_named(places, step);
                places = found.iter().map(|member| Place::any(&member.type_name)).collect();
            }
        }
        found
    }

    /// All words of the enumerations among these members, or of those in their arrays.
    pub(super) fn words_of<'a>(&'a self, members: &[&'a Member]) -> BTreeMap<&'a str, &'a BTreeSet<String>> {
        let places = members
            .iter()
            .map(|member| Place::any(&member.type_name))
            .collect();
        let mut words = BTreeMap::new();
        for (_, kind) in self.spread(places) {
            if let Type::Enum(of_this) = kind {
                words.extend(of_this.iter().map(|(word, features)| (word.as_str(), features)));
            }
        }
        words
    }

    fn members_named<'a>(&'a self, places: Vec<Place<'a>>, name: &str) -> Vec<&'a Member> {
        self.spread(places)
            .into_iter()
            .filter_map(|(_, kind)| match kind {
                Type::Object { members, .. } => members.get(name),
                _ => None,
            })
            .collect()
    }

    /// The objects at these places that have the variant, with that variant alone.
    fn narrowed<'a>(&'a self, places: Vec<Place<'a>>, case: &str) -> Vec<Place<'a>> {
        self.spread(places)
            .into_iter()
            .filter_map(|(place, kind)| match kind {
                Type::Object { variants, .. } => variants.get_key_value(case).map(|(case, _)| Place {
                    case: Some(case),
                    ..place
                }),
                _ => None,
            })
            .collect()
    }

    /// These types and all that are reached from them without naming a member: the elements of
    /// arrays, the choices of alternates, the variants of objects.
    fn spread<'a>(&'a self, mut waiting: Vec<Place<'a>>) -> Vec<(Place<'a>, &'a Type)> {
        let mut seen = BTreeSet::new();
        let mut reached = Vec::new();
        while let Some(place) = waiting.pop() {
            // Types may be recursive, as block nodes are. Each is passed through once, so a step never
            // takes longer than the schema is large.
            if !seen.insert(place) {
                continue;
            }
            let Some(kind) = self.types.get(place.type_name) else {
                continue;
            };
            reached.push((place, kind));
            match kind {
                Type::Array(element) => waiting.push(Place::any(element)),
                Type::Alternate(choices) => {
                    waiting.extend(choices.iter().map(|choice| Place::any(choice)));
                }
                Type::Object { variants, .. } => match place.case {
                    Some(case) => waiting.extend(variants.get(case).map(|variant| Place::any(variant))),
                    None => waiting.extend(variants.values().map(|variant| Place::any(variant))),
                },
                Type::Enum(_) => {}
            }
        }
        reached
    }

    fn take(&mut self, entry: Value) {
        // What has another shape belongs to a later QEMU.
        let Ok(entry) = serde_json::from_value::<Entry>(entry) else {
            return;
        };
        let kind = match entry.meta_type.as_str() {
            "command" => {
                let command = CommandEntry {
                    arguments: entry.arg_type,
                    returns: entry.ret_type,
                    allows_oob: entry.allow_oob,
                    features: words(entry.features),
                };
                self.commands.insert(entry.name, command);
                return;
            }
            "event" => {
                self.events.insert(entry.name);
                return;
            }
            "object" => Type::Object {
                members: named_members(entry.members),
                variants: readable::<VariantEntry>(entry.variants)
                    .map(|variant| (variant.case, variant.type_name))
                    .collect(),
            },
            "alternate" => Type::Alternate(
                readable::<MemberEntry>(entry.members)
                    .map(|choice| choice.type_name)
                    .collect(),
            ),
            "array" => Type::Array(entry.element_type),
            "enum" => Type::Enum(enum_words(entry.members, entry.values)),
            _ => return,
        };
        self.types.insert(entry.name, kind);
    }
}

/// A schema as QEMU tells it: a list of entries.
pub(super) struct Reported(pub(super) Schema);

impl<'de> Deserialize<'de> for Reported {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(Entries)
    }
}

struct Entries;

impl<'de> Visitor<'de> for Entries {
    type Value = Reported;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of schema entries")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Reported, A::Error> {
        let mut schema = Schema::default();
        for _ in 0..ENTRY_LIMIT {
            match entries.next_element()? {
                Some(entry) => schema.take(entry),
                None => return Ok(Reported(schema)),
            }
        }
        while entries.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Reported(schema))
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Entry {
    name: String,
    meta_type: String,
    #[serde(default)]
    arg_type: String,
    #[serde(default)]
    ret_type: String,
    #[serde(default)]
    element_type: String,
    #[serde(default)]
    allow_oob: bool,
    #[serde(default)]
    members: Vec<Value>,
    #[serde(default)]
    variants: Vec<Value>,
    #[serde(default)]
    values: Vec<Value>,
    #[serde(default)]
    features: Vec<Value>,
}

/// A member of an object, which has a name and a type; of an alternate, which has a type; or of an
/// enumeration, which has a name.
#[derive(Deserialize)]
struct MemberEntry {
    #[serde(default)]
    name: String,
    #[serde(default, rename = "type")]
    type_name: String,
    /// Its presence makes the member optional; the value is null.
    #[serde(default, rename = "default", deserialize_with = "presence")]
    optional: bool,
    #[serde(default)]
    features: Vec<Value>,
}

#[derive(Deserialize)]
struct VariantEntry {
    case: String,
    #[serde(rename = "type")]
    type_name: String,
}

fn presence<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    IgnoredAny::deserialize(deserializer).map(|_| true)
}

fn readable<T: serde::de::DeserializeOwned>(values: Vec<Value>) -> impl Iterator<Item = T> {
    values
        .into_iter()
        .filter_map(|value| serde_json::from_value(value).ok())
}

fn words(values: Vec<Value>) -> BTreeSet<String> {
    readable(values).collect()
}

fn named_members(members: Vec<Value>) -> BTreeMap<String, Member> {
    readable::<MemberEntry>(members)
        .map(|member| {
            let described = Member {
                type_name: member.type_name,
                optional: member.optional,
                features: words(member.features),
            };
            (member.name, described)
        })
        .collect()
}

/// The words of an enumeration. `values` is what QEMU had before 6.2 and is to go away.
fn enum_words(members: Vec<Value>, values: Vec<Value>) -> BTreeMap<String, BTreeSet<String>> {
    if members.is_empty() {
        return words(values)
            .into_iter()
            .map(|word| (word, BTreeSet::new()))
            .collect();
    }
    readable::<MemberEntry>(members)
        .map(|member| (member.name, words(member.features)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn schema(entries: Value) -> Schema {
        serde_json::from_value::<Reported>(entries).unwrap().0
    }

    fn has(schema: &Schema, path: &str) -> bool {
        !schema.members_at("arguments", path).is_empty()
    }

    /// A node names its file by reference or in place, recursively, as in `blockdev-add`.
    fn nodes() -> Schema {
        schema(json!([
            {"name": "arguments", "meta-type": "object", "tag": "driver",
             "members": [{"name": "driver", "type": "drivers"}, {"name": "discard", "type": "str", "default": null}],
             "variants": [{"case": "raw", "type": "raw"}, {"case": "nbd", "type": "nbd"}]},
            {"name": "raw", "meta-type": "object", "members": [{"name": "file", "type": "node-or-name"}]},
            {"name": "nbd", "meta-type": "object",
             "members": [{"name": "reconnect-delay", "type": "int", "default": null, "features": ["unstable"]}]},
            {"name": "node-or-name", "meta-type": "alternate", "members": [{"type": "str"}, {"type": "arguments"}]},
            {"name": "drivers", "meta-type": "enum", "members": [{"name": "raw"}, {"name": "nbd", "features": ["deprecated"]}],
             "values": ["not looked at"]},
        ]))
    }

    #[test]
    fn a_path_leads_through_variants_alternates_and_recursion() {
        let nodes = nodes();
        assert!(has(&nodes, "discard"));
        assert!(has(&nodes, "reconnect-delay"), "any variant will do");
        assert!(has(&nodes, "file/file/file/reconnect-delay"));
        assert!(!has(&nodes, "file/file/file/reconnect"));
        assert!(!has(&nodes, "discard/anything"));
        assert!(!has(&nodes, ""));
    }

    #[test]
    fn a_path_can_choose_the_variant() {
        let nodes = nodes();
        assert!(has(&nodes, "+nbd/reconnect-delay"));
        assert!(has(&nodes, "+nbd/discard"), "what all variants have");
        assert!(!has(&nodes, "+raw/reconnect-delay"));
        assert!(has(&nodes, "+raw/file/+nbd/reconnect-delay"));
        assert!(!has(&nodes, "+qcow2/file"));
        assert!(!has(&nodes, "+nbd"), "a variant is no member");
        assert!(!has(&nodes, "discard/+nbd"));
    }

    #[test]
    fn a_member_tells_whether_it_is_optional_and_its_features() {
        let nodes = nodes();
        let driver = nodes.members_at("arguments", "driver");
        assert!(!driver[0].optional && driver[0].features.is_empty());
        let delay = nodes.members_at("arguments", "reconnect-delay");
        assert!(delay[0].optional && delay[0].features.contains("unstable"));
    }

    #[test]
    fn the_words_of_an_enumeration_are_its_members_and_its_values_where_it_has_none() {
        let nodes = nodes();
        let words = nodes.words_of(&nodes.members_at("arguments", "driver"));
        assert_eq!(words.keys().copied().collect::<Vec<_>>(), ["nbd", "raw"]);
        assert!(words["nbd"].contains("deprecated"));
        let old = schema(json!([
            {"name": "arguments", "meta-type": "object", "members": [{"name": "modes", "type": "[mode]"}]},
            {"name": "[mode]", "meta-type": "array", "element-type": "mode"},
            {"name": "mode", "meta-type": "enum", "values": ["normal"]},
        ]));
        let words = old.words_of(&old.members_at("arguments", "modes"));
        assert_eq!(words.keys().copied().collect::<Vec<_>>(), ["normal"]);
    }

    #[test]
    fn what_is_not_understood_is_passed_over() {
        let schema = schema(json!([
            7, null, {}, {"name": "nameless kind"}, {"meta-type": "object"},
            {"name": "x", "meta-type": "of-a-later-day", "members": {"a": 1}},
            {"name": "damaged", "meta-type": "object", "members": "none"},
            {"name": "go", "meta-type": "command", "arg-type": "arguments", "allow-oob": true, "novelty": [1]},
            {"name": "come", "meta-type": "command", "arg-type": "nowhere"},
            {"name": "WENT", "meta-type": "event", "arg-type": "arguments"},
            {"name": "arguments", "meta-type": "object", "members": [3, {"name": ["?"]}, {"name": "where", "type": "x"}],
             "variants": [null, {"case": "a"}]},
        ]));
        assert!(has(&schema, "where"));
        assert!(!has(&schema, "where/to"));
        assert!(schema.command("go").is_some_and(|go| go.allows_oob));
        assert!(schema.members_at("nowhere", "where").is_empty());
        assert!(schema.has_event("WENT") && !schema.has_event("go"));
    }

    #[test]
    fn types_that_contain_each_other_end_somewhere() {
        let schema = schema(json!([
            {"name": "arguments", "meta-type": "array", "element-type": "other"},
            {"name": "other", "meta-type": "alternate", "members": [{"type": "arguments"}, {"type": "other"}]},
        ]));
        assert!(!has(&schema, "a/b/c"));
    }

    #[test]
    fn a_schema_without_end_is_taken_in_up_to_the_limit() {
        let events: Vec<Value> = (0..ENTRY_LIMIT + 5)
            .map(|number| json!({"name": format!("E{number}"), "meta-type": "event"}))
            .collect();
        let schema = schema(Value::Array(events));
        assert_eq!(schema.events.len(), ENTRY_LIMIT);
    }

    #[test]
    fn what_is_no_list_is_no_schema() {
        assert!(serde_json::from_value::<Reported>(json!({"return": []})).is_err());
    }
}
