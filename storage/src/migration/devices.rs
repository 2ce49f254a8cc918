//! The device sections of a recording, taken apart by the VM description that ends the stream.
//!
//! Sections have no lengths of their own. The description lists every device in the order of its
//! section, with the size of each field, so that the two together can be walked:
//!
//! ```text
//!  type 4 | u32 number | name | u32 instance | u32 version      name, instance, version as described
//!  fields                                                       sizes as described
//!  type 5 | name | u32 version | fields                         each described subsection, nested
//!  footer | u32 number                                          if the machine type has them
//! ```
//!
//! Nothing is guessed: what does not match is an error, and the walk must end where the device
//! sections end.

use serde::Deserialize;

use super::recording::Recording;
use super::slice::Slice;
use super::wire;

/// More devices than a machine has.
const DEVICES_LIMIT: usize = 16 << 10;

/// State of one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device<'a> {
    /// Name of its section (`cpu`, `0000:00:01.1/ide`).
    pub name: String,
    /// Which of several with this name.
    pub instance: u32,
    fields: Vec<Field<'a>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Field<'a> {
    name: String,
    element_bytes: usize,
    bytes: &'a [u8],
}

impl<'a> Device<'a> {
    /// The bytes of a field, if it is there and made of elements of `element_bytes` bytes. Numbers in
    /// it are big-endian.
    pub fn field(&self, name: &str, element_bytes: usize) -> Option<&'a [u8]> {
        let field = self.fields.iter().find(|field| field.name == name)?;
        (field.element_bytes == element_bytes).then_some(field.bytes)
    }
}

/// Why device sections could not be taken apart.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DevicesError {
    /// The VM description is not what QEMU writes.
    #[error("the VM description cannot be read")]
    Description(#[source] serde_json::Error),
    /// A section is not what is described at its place.
    #[error("device {device:?}: the section and its description differ at byte {at}")]
    Differs {
        /// The described device.
        device: String,
        /// Where in the device sections, in bytes.
        at: usize,
    },
    /// There is more than what is described, or more than a machine has.
    #[error("{undescribed_bytes} bytes of device state are not described")]
    Undescribed {
        /// How much.
        undescribed_bytes: usize,
    },
}

#[derive(Deserialize)]
struct Description {
    devices: Vec<DescribedDevice>,
}

#[derive(Deserialize)]
struct DescribedDevice {
    name: String,
    instance_id: u32,
    version: Option<u32>,
    #[serde(default)]
    fields: Vec<DescribedField>,
    #[serde(default)]
    subsections: Vec<DescribedSubsection>,
}

#[derive(Deserialize)]
struct DescribedSubsection {
    vmsd_name: String,
    version: u32,
    #[serde(default)]
    fields: Vec<DescribedField>,
    #[serde(default)]
    subsections: Vec<DescribedSubsection>,
}

#[derive(Deserialize)]
struct DescribedField {
    name: String,
    array_len: Option<usize>,
    size: usize,
}

impl Recording {
    /// State of every device, in the stream's order.
    ///
    /// # Errors
    ///
    /// [`DevicesError`] if the sections are not as they are described.
    pub fn devices(&self) -> Result<Vec<Device<'_>>, DevicesError> {
        let sections = self.device_sections();
        // The end of the stream, the type of the description and its length stand before it.
        let description = self
            .tail
            .get(self.device_sections_bytes + 6..)
            .unwrap_or_default();
        let description: Description =
            serde_json::from_slice(description).map_err(DevicesError::Description)?;
        let mut cursor = Slice::new(sections);
        let mut devices = Vec::new();
        for described in &description.devices {
            if devices.len() == DEVICES_LIMIT {
                break;
            }
            let device = walk(&mut cursor, described).ok_or_else(|| DevicesError::Differs {
                device: described.name.clone(),
                at: cursor.at(),
            })?;
            devices.push(device);
        }
        let undescribed_bytes = cursor.rest().len();
        if undescribed_bytes > 0 {
            return Err(DevicesError::Undescribed { undescribed_bytes });
        }
        Ok(devices)
    }
}

fn walk<'a>(cursor: &mut Slice<'a>, described: &DescribedDevice) -> Option<Device<'a>> {
    (cursor.u8()? == wire::SECTION_FULL).then_some(())?;
    let number = cursor.u32()?;
    (cursor.short_name()? == described.name).then_some(())?;
    (cursor.u32()? == described.instance_id).then_some(())?;
    let version = cursor.u32()?;
    described
        .version
        .is_none_or(|told| told == version)
        .then_some(())?;
    let fields = walk_fields(cursor, &described.fields)?;
    walk_subsections(cursor, &described.subsections)?;
    if cursor.peek() == Some(wire::FOOTER) {
        cursor.u8()?;
        (cursor.u32()? == number).then_some(())?;
    }
    Some(Device {
        name: described.name.clone(),
        instance: described.instance_id,
        fields,
    })
}

fn walk_fields<'a>(cursor: &mut Slice<'a>, described: &[DescribedField]) -> Option<Vec<Field<'a>>> {
    let fields = described.iter().map(|field| {
        let length = field.size.checked_mul(field.array_len.unwrap_or(1))?;
        Some(Field {
            name: field.name.clone(),
            element_bytes: field.size,
            bytes: cursor.bytes(length)?,
        })
    });
    fields.collect()
}

/// Nesting is as deep as the JSON parser allows, which is not deep.
fn walk_subsections(cursor: &mut Slice<'_>, described: &[DescribedSubsection]) -> Option<()> {
    for subsection in described {
        (cursor.u8()? == wire::SUBSECTION).then_some(())?;
        (cursor.short_name()? == subsection.vmsd_name).then_some(())?;
        (cursor.u32()? == subsection.version).then_some(())?;
        walk_fields(cursor, &subsection.fields)?;
        walk_subsections(cursor, &subsection.subsections)?;
    }
    Some(())
}
