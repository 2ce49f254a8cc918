//! The pieces of a post-copy stream that are made of an image: devices first, memory behind them.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    thread,
};

use dormouse_storage::{Image, migration::Postcopy};
use dormouse_tests::{BootSectorGuest, Guest, PlainQemu, QemuBuild, Scene, until};
use serde_json::json;

#[test]
fn the_pieces_of_an_image_wake_its_guest_on_qemu_7_2() {
    the_pieces_of_an_image_wake_its_guest(QemuBuild::V7_2);
}

#[test]
fn the_pieces_of_an_image_wake_its_guest_on_qemu_10_0() {
    the_pieces_of_an_image_wake_its_guest(QemuBuild::V10_0);
}

#[test]
fn the_pieces_of_an_image_wake_its_guest_on_qemu_11_1() {
    the_pieces_of_an_image_wake_its_guest(QemuBuild::V11_1);
}

fn the_pieces_of_an_image_wake_its_guest(build: QemuBuild) {
    let scene = Scene::new(build);
    let image = scene.hibernated();
    let (guest, lab) = (&scene.guest, &scene.lab);
    let saved_at = guest.last_counter();
    let image = Image::open(&image).unwrap();
    let recording = image.device_state().unwrap();
    let postcopy = Postcopy::of(&recording);

    let _qemu = PlainQemu::start_with(guest, &["-incoming", "defer"]);
    let mut monitor = guest.monitor();
    let on = json!({"capabilities": [{"capability": "postcopy-ram", "state": true}]});
    monitor.execute("migrate-set-capabilities", on);
    let socket = lab.path("incoming.sock");
    let uri = format!("unix:{}", socket.display());
    monitor.execute("migrate-incoming", json!({"uri": uri}));
    let mut stream = until("QEMU to listen", || UnixStream::connect(&socket).ok());
    // What it asks for comes anyway; read, so that it is never held up.
    let mut asked = stream.try_clone().unwrap();
    thread::spawn(move || asked.read_to_end(&mut Vec::new()));

    let main = recording
        .blocks()
        .iter()
        .position(|block| block.name == "pc.ram")
        .unwrap();
    let mut head = Vec::new();
    postcopy.opening(4096, &mut head).unwrap();
    postcopy.blocks(&[], &mut head).unwrap();
    let small = image.pages(&["pc.ram"]).unwrap().map(Result::unwrap);
    postcopy.pages(small, &mut head).unwrap();
    postcopy.discard(main, 0, 4096, &mut head).unwrap();
    postcopy.package(&mut head).unwrap();
    stream.write_all(&head).unwrap();
    // QEMU may need a page of it before it answers anything, so all follows at once.
    let names: Vec<&str> = recording
        .blocks()
        .iter()
        .map(|block| block.name.as_str())
        .collect();
    let others: Vec<&str> = names.into_iter().filter(|name| *name != "pc.ram").collect();
    let rest = image.pages(&others).unwrap().map(Result::unwrap);
    let mut body = Vec::new();
    postcopy.pages(rest, &mut body).unwrap();
    postcopy.end(&mut body).unwrap();
    stream.write_all(&body).unwrap();
    until("all of its memory to be there", || {
        let migration = monitor.execute("query-migrate", json!({}));
        (migration["status"] == "completed").then_some(())
    });
    if monitor.status() != "running" {
        monitor.cont();
    }
    assert!(guest.wait_for_more_ticks() >= saved_at);
    monitor.stop();
    let memory = monitor.memory(guest.ram_bytes(), &lab.path("memory"));
    assert_eq!(BootSectorGuest::pattern_faults(&memory), Vec::<usize>::new());
    assert!(BootSectorGuest::counter_in(&memory) > saved_at);
}
