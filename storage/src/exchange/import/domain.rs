//! What is of use in libvirt's domain XML.

use std::path::PathBuf;

use roxmltree::{Document, Node, ParsingOptions};
use uuid::Uuid;

use super::ImportError;

/// More elements and texts than a domain has.
const NODES_LIMIT: u32 = 1 << 20;

/// A domain, as far as it is of use here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Domain {
    /// Its name.
    pub name: String,
    /// Its id.
    pub uuid: Option<Uuid>,
    /// Machine type as it is written there; may be an alias.
    pub machine: Option<String>,
    /// The QEMU program.
    pub emulator: Option<PathBuf>,
    /// Its disks, in the order of the XML.
    pub disks: Vec<DomainDisk>,
}

/// A disk of a domain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DomainDisk {
    /// The guest's device (`vda`).
    pub target: String,
    /// The file or block device; `None` for an empty drive or a disk over the network.
    pub source: Option<PathBuf>,
    /// The image format (`qcow2`), if it is told.
    pub format: Option<String>,
    /// Whether the guest may not write to it.
    pub read_only: bool,
}

impl Domain {
    pub(super) fn parse(xml: &str) -> Result<Self, ImportError> {
        // Without a document type there are no entities that could grow.
        let options = ParsingOptions {
            allow_dtd: false,
            nodes_limit: NODES_LIMIT,
            ..ParsingOptions::default()
        };
        let document = Document::parse_with_options(xml, options).map_err(ImportError::Xml)?;
        let domain = document.root_element();
        if !domain.has_tag_name("domain") {
            return Err(ImportError::LibvirtHeader(format!(
                "the XML describes a {:?} instead of a domain",
                domain.tag_name().name()
            )));
        }
        let devices = child(domain, "devices");
        let disks = devices.into_iter().flat_map(|devices| devices.children());
        let disks = disks.filter(|node| node.has_tag_name("disk"));
        Ok(Self {
            name: text(domain, "name").unwrap_or_default(),
            uuid: text(domain, "uuid").and_then(|text| text.parse().ok()),
            machine: child(domain, "os")
                .and_then(|os| child(os, "type"))
                .and_then(|kind| kind.attribute("machine"))
                .map(str::to_owned),
            emulator: devices
                .and_then(|devices| text(devices, "emulator"))
                .map(PathBuf::from),
            disks: disks.map(disk).collect(),
        })
    }
}

fn disk(node: Node<'_, '_>) -> DomainDisk {
    let attribute = |element: &str, name: &str| child(node, element)?.attribute(name).map(str::to_owned);
    DomainDisk {
        target: attribute("target", "dev").unwrap_or_default(),
        source: attribute("source", "file")
            .or_else(|| attribute("source", "dev"))
            .map(PathBuf::from),
        format: attribute("driver", "type"),
        read_only: child(node, "readonly").is_some(),
    }
}

fn child<'a, 'input>(node: Node<'a, 'input>, name: &str) -> Option<Node<'a, 'input>> {
    node.children().find(|child| child.has_tag_name(name))
}

fn text(node: Node<'_, '_>, name: &str) -> Option<String> {
    let text = child(node, name)?.text()?.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_of_use_is_found_and_all_else_is_passed_over() {
        let domain = Domain::parse(
            "<domain type='kvm' id='3'>
               <name>web</name><uuid>f81d4fae-7dec-11d0-a765-00a0c91e6bf6</uuid>
               <memory unit='KiB'>1048576</memory>
               <os><type arch='x86_64' machine='pc-q35-9.2'>hvm</type></os>
               <devices>
                 <emulator>/usr/bin/qemu-system-x86_64</emulator>
                 <disk type='file' device='disk'>
                   <driver name='qemu' type='qcow2'/><source file='/srv/web &amp; db.qcow2' index='1'/>
                   <backingStore type='file'><format type='raw'/><source file='/srv/base.img'/></backingStore>
                   <target dev='vda' bus='virtio'/>
                 </disk>
                 <disk type='block' device='cdrom'><source dev='/dev/sr0'/><target dev='sda'/><readonly/></disk>
                 <disk type='network' device='disk'><source protocol='rbd' name='a/b'/><target dev='vdb'/></disk>
               </devices>
             </domain>",
        )
        .unwrap();
        assert_eq!(domain.name, "web");
        assert_eq!(domain.machine.as_deref(), Some("pc-q35-9.2"));
        assert_eq!(
            domain.emulator,
            Some(PathBuf::from("/usr/bin/qemu-system-x86_64"))
        );
        assert!(domain.uuid.is_some());
        let sources: Vec<_> = domain.disks.iter().map(|disk| disk.source.as_deref()).collect();
        assert_eq!(
            sources,
            [
                Some("/srv/web & db.qcow2".as_ref()),
                Some("/dev/sr0".as_ref()),
                None
            ]
        );
        assert_eq!(domain.disks[0].format.as_deref(), Some("qcow2"));
        assert_eq!(
            domain.disks.iter().map(|disk| disk.read_only).collect::<Vec<_>>(),
            [false, true, false]
        );
    }

    #[test]
    fn entities_that_grow_are_refused() {
        let bomb = "<!DOCTYPE d [<!ENTITY a 'aaaaaaaaaa'><!ENTITY b '&a;&a;&a;&a;'>]><domain><name>&b;</name></domain>";
        assert!(matches!(Domain::parse(bomb), Err(ImportError::Xml(_))));
        assert!(matches!(
            Domain::parse("<network/>"),
            Err(ImportError::LibvirtHeader(_))
        ));
    }
}
