//! Images are listed, looked into, and removed for good.

use std::fs;

use dormouse_storage::{Image, ImageState};
use dormouse_tests::{Guest, QemuBuild, Scene};
use serde_json::Value;

#[test]
fn a_list_tells_whole_images_from_what_is_left_of_others() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let folder = scene.lab.folder();
    let bytes = fs::read(&image).expect("the image can be read");
    fs::write(folder.join("short.image"), &bytes[..bytes.len() / 2]).expect("a copy");
    let mut corrupt = bytes.clone();
    let length = corrupt.len();
    corrupt[length - 10] ^= 1;
    fs::write(folder.join("corrupt.image"), corrupt).expect("a copy");
    fs::write(folder.join(".web.image.partial-1"), &bytes[..4096]).expect("a copy");
    fs::write(folder.join("alien"), b"nothing of ours").expect("another file");

    let list = scene
        .dormouse
        .image("list", folder, &["--json"])
        .expect_success()
        .result();
    let entries = list["images"].as_array().expect("images");
    let named = |name: &str| {
        let of_name = |entry: &&Value| entry["path"].as_str().is_some_and(|path| path.ends_with(name));
        entries.iter().find(of_name)
    };
    let whole = named("/guest.image").expect("the image");
    assert_eq!(whole["state"], "sealed");
    assert_eq!(whole["vm"], "guest");
    assert!(
        whole["ram_bytes"].as_u64() >= Some(scene.guest.ram_bytes()),
        "{whole}"
    );
    assert!(whole["age_seconds"].as_u64() < Some(600), "{whole}");
    assert_eq!(named("/short.image").expect("the torn copy")["state"], "torn");
    assert_eq!(
        named("/corrupt.image").expect("the corrupt copy")["state"],
        "corrupt"
    );
    assert_eq!(
        named("/.web.image.partial-1").expect("the partial image")["state"],
        "partial"
    );
    assert!(
        named("/alien").is_none() && named("/disk.img").is_none(),
        "{list}"
    );

    let for_people = scene.dormouse.image("list", folder, &[]).expect_success().stdout;
    assert!(
        for_people.contains("guest.image") && for_people.contains("sealed"),
        "{for_people}"
    );
}

#[test]
fn an_inspection_tells_what_is_in_an_image() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let inspected = scene
        .dormouse
        .image("inspect", &image, &["--json"])
        .expect_success()
        .result();
    assert_eq!(inspected["state"], "sealed");
    assert_eq!(inspected["blocks"][0]["name"], "pc.ram");
    assert_eq!(inspected["blocks"][0]["backend"], "memory-backend-file");
    assert_eq!(inspected["manifest"]["machine"], "pc-i440fx-10.0");
    let number = |name: &str| inspected[name].as_u64().unwrap_or_default();
    assert_eq!(number("data_bytes") + number("zero_bytes"), number("ram_bytes"));
    let for_people = scene
        .dormouse
        .image("inspect", &image, &[])
        .expect_success()
        .stdout;
    for words in [
        "sealed",
        "pc-i440fx-10.0",
        "pc.ram 64.0 MiB (guest RAM)",
        "disk.img",
    ] {
        assert!(for_people.contains(words), "{words}: {for_people}");
    }
}

#[test]
fn an_image_is_discarded_only_when_that_is_meant() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let discard = |options: &[&str]| {
        let options = [options, &["--json"]].concat();
        scene.dormouse.image("discard", &image, &options)
    };

    let asked = discard(&[]).expect_exit(2).result();
    let message = asked["error"]["message"].as_str().unwrap_or_default();
    assert!(
        message.contains("the memory of guest") && message.contains("--yes"),
        "{message}"
    );
    assert!(image.exists());

    let mut held = Image::open_locked(&image).expect("nobody has the image");
    held.mark(ImageState::Waking).expect("the image can be marked");
    let in_use = discard(&["--yes", "--force"]).expect_exit(3).result();
    let message = in_use["error"]["message"].as_str().unwrap_or_default();
    assert!(message.contains("in use"), "{message}");
    drop(held);

    discard(&["--yes"]).expect_exit(3);
    assert!(image.exists(), "an image that was being woken stays");
    let discarded = discard(&["--yes", "--force"]).expect_success().result();
    assert_eq!(discarded["result"], "discarded");
    assert!(!image.exists());
}

#[test]
fn the_image_that_a_guest_lives_on_is_in_use() {
    let scene = Scene::new(QemuBuild::V10_0);
    let image = scene.hibernated();
    let _woken = scene.dormouse.wake("guest", &image, &["--mode", "map"]);
    scene.guest.wait_for_more_ticks();
    let list = scene
        .dormouse
        .image("list", scene.lab.folder(), &["--json"])
        .expect_success()
        .result();
    assert_eq!(list["images"][0]["state"], "consumed", "{list}");
    assert!(list["images"][0]["held_by"].is_u64(), "{list}");
    scene
        .dormouse
        .image("discard", &image, &["--yes", "--force"])
        .expect_exit(3);
    assert!(image.exists());
    scene.guest.wait_for_more_ticks();
}
