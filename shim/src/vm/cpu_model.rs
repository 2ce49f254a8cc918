//! What a CPU as it is given means for where its guest can go.

/// What there is to know beforehand of a guest whose CPU is whatever the host has. A wake compares the features; this tells
/// why it may refuse on another host.
pub fn bound_to_host(cpu: Option<&str>) -> Option<String> {
    let cpu = cpu?;
    let (model, properties) = cpu.split_once(',').unwrap_or((cpu, ""));
    let is_given = |wanted: &[&str]| properties.split(',').any(|property| wanted.contains(&property));
    let why = if matches!(model, "host" | "max") {
        "has what this host and this QEMU have"
    } else if is_given(&["migratable=off", "migratable=no"]) {
        "may have features that no migration keeps"
    } else if is_given(&["+invtsc", "invtsc=on", "invtsc=yes", "invtsc"]) {
        "counts time at the pace of this host"
    } else {
        return None;
    };
    Some(format!(
        "the guest's CPU ({cpu}) {why}: its image wakes only where the CPU has the same; a named model without that wakes on more hosts"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cpu_that_is_whatever_the_host_has_is_told() {
        for (cpu, words) in [
            ("host", Some("what this host")),
            ("max,-avx2", Some("what this host")),
            ("Skylake-Server,migratable=off", Some("no migration keeps")),
            ("qemu64,+invtsc", Some("the pace of this host")),
            ("qemu64,-invtsc", None),
            ("hostile", None),
        ] {
            let told = bound_to_host(Some(cpu));
            match words {
                Some(words) => assert!(
                    told.as_ref().is_some_and(|told| told.contains(words)),
                    "{cpu}: {told:?}"
                ),
                None => assert_eq!(told, None, "{cpu}"),
            }
        }
        assert_eq!(bound_to_host(None), None);
    }
}
