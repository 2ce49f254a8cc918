//! QEMU's option strings: `a,key=value,other=value`, with `,,` for a comma inside a value, or a JSON object.

use serde_json::Value;

/// The key/value pairs of one option string, in order. The leading value without a key has the empty key.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Options(Vec<(String, String)>);

impl Options {
    /// Reads either form. `None`: a JSON form that is no flat object.
    pub fn parse(text: &str) -> Option<Self> {
        if text.trim_start().starts_with('{') {
            Self::parse_json(text)
        } else {
            Some(Self::parse_pairs(text))
        }
    }

    /// The value of `key`; the last one wins, as in QEMU.
    pub fn value(&self, key: &str) -> Option<&str> {
        self.0
            .iter()
            .rev()
            .find(|(k, _)| k == key)
            .map(|(_, v)| v.as_str())
    }

    /// The leading value without a key, or the one under `implied`.
    pub fn leading(&self, implied: &str) -> Option<&str> {
        self.value("").or_else(|| self.value(implied))
    }

    /// All pairs, in order.
    pub fn pairs(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// Sets `key`, dropping what it had.
    pub fn set(&mut self, key: &str, value: impl Into<String>) {
        self.remove(key);
        self.0.push((key.to_owned(), value.into()));
    }

    /// Drops `key`.
    pub fn remove(&mut self, key: &str) {
        self.0.retain(|(k, _)| k != key);
    }

    /// Whether a boolean key is on; QEMU writes `on`, `yes`, `true` and `y`, and a bare key for on.
    pub fn is_on(&self, key: &str) -> bool {
        matches!(self.value(key), Some("on" | "yes" | "true" | "y"))
            || self.0.iter().any(|(k, v)| k.is_empty() && v == key)
    }

    /// The comma form that QEMU reads.
    pub fn render(&self) -> String {
        let pairs: Vec<String> = self
            .0
            .iter()
            .map(|(key, value)| {
                let value = value.replace(',', ",,");
                if key.is_empty() {
                    value
                } else {
                    format!("{key}={value}")
                }
            })
            .collect();
        pairs.join(",")
    }

    fn parse_pairs(text: &str) -> Self {
        let mut pairs = Vec::new();
        let mut current = String::new();
        let mut rest = text.chars().peekable();
        while let Some(character) = rest.next() {
            match character {
                ',' if rest.peek() == Some(&',') => {
                    rest.next();
                    current.push(',');
                }
                ',' => pairs.push(std::mem::take(&mut current)),
                other => current.push(other),
            }
        }
        pairs.push(current);
        Self(
            pairs
                .into_iter()
                .filter(|pair| !pair.is_empty())
                .map(|pair| match pair.split_once('=') {
                    Some((key, value)) => (key.to_owned(), value.to_owned()),
                    None => (String::new(), pair),
                })
                .collect(),
        )
    }

    fn parse_json(text: &str) -> Option<Self> {
        let Value::Object(members) = serde_json::from_str(text).ok()? else {
            return None;
        };
        let mut pairs = Vec::new();
        for (key, value) in members {
            let value = match value {
                Value::String(text) => text,
                Value::Bool(on) => if on { "on" } else { "off" }.to_owned(),
                Value::Number(number) => number.to_string(),
                Value::Array(items) => {
                    // The only arrays among memory backend properties are lists of NUMA nodes.
                    for (index, item) in items.iter().enumerate() {
                        pairs.push((format!("{key}.{index}"), item.as_u64()?.to_string()));
                    }
                    continue;
                }
                Value::Null | Value::Object(_) => return None,
            };
            pairs.push((if key == "qom-type" { String::new() } else { key }, value));
        }
        pairs.sort_by_key(|(key, _)| !key.is_empty());
        Some(Self(pairs))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_come_back_as_they_were() {
        for text in [
            "memory-backend-ram,id=m0,size=1G",
            "file=/a,,b.img,format=raw",
            "q35",
            "size=1G,slots=2",
        ] {
            assert_eq!(Options::parse(text).unwrap().render(), text);
        }
    }

    #[test]
    fn a_doubled_comma_is_part_of_the_value() {
        assert_eq!(
            Options::parse("mem-path=/a,,b,share=on")
                .unwrap()
                .value("mem-path"),
            Some("/a,b")
        );
    }

    #[test]
    fn the_last_value_of_a_key_wins() {
        assert_eq!(
            Options::parse("accel=kvm,accel=tcg").unwrap().value("accel"),
            Some("tcg")
        );
    }

    #[test]
    fn json_objects_are_read_like_pairs() {
        let options =
            Options::parse(r#"{"id":"m0","size":1073741824,"qom-type":"memory-backend-ram","share":true,"host-nodes":[0,1]}"#)
                .unwrap();
        assert_eq!(
            options.render(),
            "memory-backend-ram,host-nodes.0=0,host-nodes.1=1,id=m0,share=on,size=1073741824"
        );
    }

    #[test]
    fn nested_json_is_not_flattened_by_guess() {
        assert_eq!(Options::parse(r#"{"id":"m0","x":{"y":1}}"#), None);
    }

    #[test]
    fn a_bare_key_is_on() {
        assert!(Options::parse("file=a.img,snapshot").unwrap().is_on("snapshot"));
        assert!(
            !Options::parse("file=a.img,snapshot=off")
                .unwrap()
                .is_on("snapshot")
        );
    }
}
