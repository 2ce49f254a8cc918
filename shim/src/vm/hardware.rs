//! What a machine is made of: its CPUs and devices, as QEMU tells them, and how two machines differ.
//!
//! A hibernation writes it into the image. A wake compares the machine that came up before it loads anything: QEMU
//! itself finds some differences while it loads, in words about sections and fields, and others never.

use dormouse_qmp::command::Command;
use dormouse_qmp::{Client, CommandError, command};
use dormouse_storage::image::manifest::{CpuidRegister, Cpus, Device, FeatureWord, Hardware};
use serde_json::Value;

use super::cpu_features;
use super::shape::{DEVICE_FOLDERS, children};
use crate::error::Failure;

/// What the machine at the other end is made of. What its QEMU does not tell is left out.
pub async fn of(client: &Client) -> Result<Hardware, Failure> {
    let (cpus, devices, pci) =
        tokio::join!(cpus(client), devices(client), told(client, command::query_pci {}));
    Ok(Hardware {
        cpus: cpus?,
        devices: devices?,
        pci_functions: pci_functions(&pci?),
    })
}

/// How the machine `now` differs from the one that was saved, in words for a person.
pub fn differences(saved: &Hardware, now: &Hardware) -> Vec<String> {
    let mut differences = Vec::new();
    let (then, cpus) = (&saved.cpus, &now.cpus);
    if then.count != cpus.count {
        differences.push(format!("CPUs were {}, are {}", then.count, cpus.count));
    }
    if then.kind != cpus.kind {
        let name = |kind: &Option<String>| kind.clone().unwrap_or_else(|| "not known".to_owned());
        differences.push(format!(
            "the CPU model was {}, is {}",
            name(&then.kind),
            name(&cpus.kind)
        ));
    }
    let missing = cpu_features::beyond(&then.features, &cpus.features);
    if !missing.is_empty() {
        differences.push(format!("CPU features are missing: {}", missing.join(", ")));
    }
    let devices = device_differences(&saved.devices, &now.devices);
    // A device that differs has another number on the bus too.
    if devices.is_empty() {
        differences.extend(pci_differences(saved, now));
    }
    differences.extend(devices);
    differences
}

/// CPU features that the guest did not have. It never looked for them, so they do no harm.
pub fn new_features(saved: &Hardware, now: &Hardware) -> Vec<String> {
    cpu_features::beyond(&now.cpus.features, &saved.cpus.features)
}

async fn cpus(client: &Client) -> Result<Cpus, Failure> {
    let all = told(client, command::query_cpus_fast {}).await?;
    let all = all.as_array().map(Vec::as_slice).unwrap_or_default();
    let Some(path) = all.first().and_then(|cpu| cpu["qom-path"].as_str()) else {
        return Ok(Cpus::default());
    };
    let (kind, features) = tokio::join!(
        property(client, path, "type"),
        property(client, path, "feature-words")
    );
    Ok(Cpus {
        count: all.len(),
        kind: kind?.as_str().map(str::to_owned),
        features: feature_words(&features?),
    })
}

fn feature_words(told: &Value) -> Vec<FeatureWord> {
    let number = |value: &Value| u32::try_from(value.as_u64()?).ok();
    let words = told.as_array().into_iter().flatten().filter_map(|word| {
        Some(FeatureWord {
            leaf: number(&word["cpuid-input-eax"])?,
            subleaf: number(&word["cpuid-input-ecx"]),
            register: match word["cpuid-register"].as_str()? {
                "EAX" => CpuidRegister::Eax,
                "EBX" => CpuidRegister::Ebx,
                "ECX" => CpuidRegister::Ecx,
                "EDX" => CpuidRegister::Edx,
                _ => return None,
            },
            bits: number(&word["features"])?,
        })
    });
    let mut words: Vec<FeatureWord> = words.filter(|word| word.bits != 0).collect();
    words.sort_by_key(|word| (word.leaf, word.subleaf, word.register as u8));
    words
}

async fn devices(client: &Client) -> Result<Vec<Device>, Failure> {
    let mut devices = Vec::new();
    for folder in DEVICE_FOLDERS {
        for (name, kind) in children(client, folder).await? {
            let path = format!("{folder}/{name}");
            let (bus, address) = tokio::join!(
                property(client, &path, "parent_bus"),
                property(client, &path, "addr")
            );
            let bus = bus?;
            devices.push(Device {
                bus: bus
                    .as_str()
                    .and_then(|path| path.rsplit('/').next())
                    .filter(|name| !name.is_empty())
                    .map(str::to_owned),
                // Slot and function, as they lie in PCI's own numbering.
                address: address?
                    .as_u64()
                    .map(|place| format!("{:02x}.{}", place >> 3, place & 7)),
                name,
                kind,
            });
        }
    }
    Ok(devices)
}

/// What lies on the first bus. Those behind bridges get their numbers from the guest, and its memory has them.
fn pci_functions(told: &Value) -> std::collections::BTreeMap<String, String> {
    let buses = told.as_array().into_iter().flatten();
    let first = buses.filter(|bus| bus["bus"] == 0);
    let functions = first.flat_map(|bus| bus["devices"].as_array().into_iter().flatten());
    functions
        .filter_map(|function| {
            let number = |value: &Value| value.as_u64();
            let (slot, part) = (number(&function["slot"])?, number(&function["function"])?);
            let id = &function["id"];
            let (vendor, device) = (number(&id["vendor"])?, number(&id["device"])?);
            Some((format!("{slot:02x}.{part}"), format!("{vendor:04x}:{device:04x}")))
        })
        .collect()
}

fn device_differences(saved: &[Device], now: &[Device]) -> Vec<String> {
    let find = |devices: &[Device], name: &str| devices.iter().find(|device| device.name == name).cloned();
    let mut differences = Vec::new();
    for then in saved {
        match find(now, &then.name) {
            None => differences.push(format!(
                "device {} ({}) is not there",
                label(&then.name),
                place(then)
            )),
            Some(device) if device != *then => differences.push(format!(
                "device {} was {}, is {}",
                label(&then.name),
                place(then),
                place(&device)
            )),
            Some(_) => {}
        }
    }
    let new = now.iter().filter(|device| find(saved, &device.name).is_none());
    differences.extend(
        new.map(|device| format!("device {} ({}) was not there", label(&device.name), place(device))),
    );
    differences
}

fn pci_differences(saved: &Hardware, now: &Hardware) -> Vec<String> {
    let addresses = saved.pci_functions.keys().chain(now.pci_functions.keys());
    let addresses: std::collections::BTreeSet<&String> = addresses.collect();
    addresses
        .into_iter()
        .filter_map(|address| {
            let [then, now] = [saved, now].map(|hardware| hardware.pci_functions.get(address));
            let name = |id: Option<&String>| id.map_or("nothing", String::as_str).to_owned();
            (then != now).then(|| format!("at {address} on PCI was {}, is {}", name(then), name(now)))
        })
        .collect()
}

/// QEMU numbers devices without an id itself.
fn label(name: &str) -> String {
    match name
        .strip_prefix("device[")
        .and_then(|rest| rest.strip_suffix(']'))
    {
        Some(number) => format!("number {number} of those without an id"),
        None => name.to_owned(),
    }
}

/// `virtio-net-pci at 03.0 on pci.0`.
fn place(device: &Device) -> String {
    let mut text = device.kind.clone();
    if let Some(address) = &device.address {
        text.push_str(&format!(" at {address}"));
    }
    if let Some(bus) = &device.bus {
        text.push_str(&format!(" on {bus}"));
    }
    text
}

async fn property(client: &Client, path: &str, property: &str) -> Result<Value, Failure> {
    let get = command::qom_get {
        path: path.to_owned(),
        property: property.to_owned(),
    };
    told(client, get).await
}

/// What this QEMU has to say; null where it has nothing.
async fn told<C: Command>(client: &Client, command: C) -> Result<Value, Failure> {
    match client.execute(&command).await {
        Err(CommandError::Qemu { .. }) => Ok(Value::Null),
        answered => Ok(answered?),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn device(name: &str, kind: &str, address: &str) -> Device {
        Device {
            name: name.into(),
            kind: kind.into(),
            bus: Some("pci.0".into()),
            address: Some(address.into()),
        }
    }

    fn machine() -> Hardware {
        Hardware {
            cpus: Cpus {
                count: 1,
                kind: Some("qemu64-x86_64-cpu".into()),
                features: feature_words(&json!([
                    {"cpuid-register": "EDX", "cpuid-input-eax": 1, "features": 0x0600_0000},
                    {"cpuid-register": "ECX", "cpuid-input-eax": 1, "features": 0},
                    {"cpuid-register": "EBX", "cpuid-input-eax": 7, "cpuid-input-ecx": 0, "features": 0x20},
                ])),
            },
            devices: vec![
                device("net0", "virtio-net-pci", "03.0"),
                device("device[0]", "e1000", "02.0"),
            ],
            pci_functions: pci_functions(&json!([
                {"bus": 0, "devices": [
                    {"slot": 3, "function": 0, "id": {"vendor": 0x1af4, "device": 0x1000}},
                    {"slot": 31, "function": 2, "id": {"vendor": 0x8086, "device": 0x2922}},
                ]},
                {"bus": 5, "devices": [{"slot": 3, "function": 0, "id": {"vendor": 1, "device": 2}}]},
            ])),
        }
    }

    #[test]
    fn the_same_machine_has_no_differences() {
        assert_eq!(differences(&machine(), &machine()), Vec::<String>::new());
        assert_eq!(new_features(&machine(), &machine()), Vec::<String>::new());
    }

    #[test]
    fn every_difference_is_told_with_what_was_and_what_is() {
        let mut now = machine();
        now.cpus.count = 2;
        now.cpus.kind = Some("max-x86_64-cpu".into());
        now.cpus.features.remove(1);
        now.devices = vec![
            device("net0", "e1000", "03.0"),
            device("net1", "virtio-net-pci", "04.0"),
        ];
        assert_eq!(
            differences(&machine(), &now),
            [
                "CPUs were 1, are 2",
                "the CPU model was qemu64-x86_64-cpu, is max-x86_64-cpu",
                "CPU features are missing: avx2",
                "device net0 was virtio-net-pci at 03.0 on pci.0, is e1000 at 03.0 on pci.0",
                "device number 0 of those without an id (e1000 at 02.0 on pci.0) is not there",
                "device net1 (virtio-net-pci at 04.0 on pci.0) was not there",
            ]
        );
    }

    #[test]
    fn what_the_board_has_is_compared_too() {
        let mut now = machine();
        now.pci_functions.remove("1f.2");
        now.pci_functions.insert("05.0".into(), "8086:100e".into());
        assert_eq!(
            differences(&machine(), &now),
            [
                "at 05.0 on PCI was nothing, is 8086:100e",
                "at 1f.2 on PCI was 8086:2922, is nothing",
            ]
        );
    }

    #[test]
    fn features_that_came_since_are_no_difference_but_told() {
        let mut now = machine();
        now.cpus.features[0].bits |= 1;
        assert_eq!(differences(&machine(), &now), Vec::<String>::new());
        assert_eq!(new_features(&machine(), &now), ["fpu"]);
    }
}
