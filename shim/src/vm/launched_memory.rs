//! Where a QEMU that waits for an image has its RAM: mapped from that very image, in files that can be filled, or where only
//! QEMU itself can write.

use std::fs::File;
use std::path::{Path, PathBuf};

use dormouse_qmp::{Client, CommandError, command};
use dormouse_storage::Image;
use rustix::fs::fstatfs;
use serde_json::Value;

use super::file_identity::FileIdentity;
use super::memory::{Backend, FILE_BACKEND, Memory};
use crate::error::{Code, Failure};

/// What `statfs` says of hugetlbfs, whose files take no writes.
const HUGETLBFS: i64 = 0x9584_58f6;

/// Where a RAM block is.
#[derive(Debug)]
pub enum Home {
    /// Mapped privately from the image, from where the image has this block.
    Image,
    /// In a shared file, held open.
    Shared(File),
    /// Where nobody else can write, and why.
    Elsewhere(String),
}

/// Where each of the blocks is that `image` places. Refuses memory that would write into the image.
pub async fn homes(client: &Client, pid: u32, image: &Image) -> Result<Vec<(String, Home)>, Failure> {
    let memory = Memory::of(client, pid).await?;
    let mut homes = Vec::new();
    for block in &image.manifest().ram_blocks {
        if block.backend.is_none() {
            continue;
        }
        let home = match memory.backend(&block.name) {
            // Its stream brings it wherever it is.
            None => Home::Elsewhere("no memory backend has its name".to_owned()),
            Some(_) => home(client, (pid, &memory), image, &block.name).await?,
        };
        homes.push((block.name.clone(), home));
    }
    Ok(homes)
}

async fn home(
    client: &Client,
    (pid, memory): (u32, &Memory),
    image: &Image,
    name: &str,
) -> Result<Home, Failure> {
    let Some(backend) = memory.backend(name) else {
        return Ok(Home::Elsewhere("no memory backend has its name".to_owned()));
    };
    if backend.kind == FILE_BACKEND && is_of_image(client, pid, image, backend).await? {
        return of_image(client, image, backend).await;
    }
    Ok(match &backend.reach {
        Ok(file) if fstatfs(file).is_ok_and(|found| found.f_type == HUGETLBFS) => {
            Home::Elsewhere("it is on huge pages of its own, which only QEMU can fill".to_owned())
        }
        Ok(file) => match file.try_clone() {
            Ok(file) => Home::Shared(file),
            Err(error) => Home::Elsewhere(format!("its file cannot be held: {error}")),
        },
        Err(why) => Home::Elsewhere(why.clone()),
    })
}

/// Whether the backend's file is the image, by the name that QEMU opened, in its own view of the files.
async fn is_of_image(client: &Client, pid: u32, image: &Image, backend: &Backend) -> Result<bool, Failure> {
    let named = property(client, &backend.id, "mem-path").await?;
    let named = Path::new(named.as_str().unwrap_or_default());
    let seen = if named.is_absolute() {
        let below_root = named.strip_prefix("/").unwrap_or(named);
        PathBuf::from(format!("/proc/{pid}/root")).join(below_root)
    } else {
        PathBuf::from(format!("/proc/{pid}/cwd")).join(named)
    };
    let identity = FileIdentity::at(image.path());
    let found = FileIdentity::at(&seen).or_else(|| FileIdentity::at(named));
    Ok(identity.is_some() && found == identity)
}

async fn of_image(client: &Client, image: &Image, backend: &Backend) -> Result<Home, Failure> {
    if backend.shared {
        return Err(Failure::new(
            Code::Refused,
            format!(
                "RAM block {} is mapped shared (share=on) from the image: the guest would write into it; `dormouse wake \
                 --print-args` tells how to start QEMU",
                backend.id
            ),
        ));
    }
    if let Err(why) = image.check_mappable() {
        return Ok(Home::Elsewhere(format!("its RAM cannot be mapped: {why}")));
    }
    let offset = property(client, &backend.id, "offset")
        .await?
        .as_u64()
        .unwrap_or(0);
    let wanted = image.layout().block(&backend.id).map(|block| block.offset);
    if Some(offset) == wanted {
        return Ok(Home::Image);
    }
    Err(Failure::new(
        Code::Refused,
        format!(
            "RAM block {} is mapped from the image at {offset}, where something else is: it lies at {}",
            backend.id,
            wanted.unwrap_or_default()
        ),
    ))
}

/// What the backend says; null for what this QEMU does not know.
async fn property(client: &Client, id: &str, property: &str) -> Result<Value, Failure> {
    let get = command::qom_get {
        path: format!("/objects/{id}"),
        property: property.to_owned(),
    };
    match client.execute(&get).await {
        Err(CommandError::Qemu { .. }) => Ok(Value::Null),
        told => Ok(told?),
    }
}
