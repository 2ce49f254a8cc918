//! Memory of any kind, woken in each way: what the command line has put somewhere stays there, or the wake is refused by
//! name before there is a QEMU; what is nowhere in particular comes back by every way.

use std::fs;

use dormouse_tests::{Asleep, Foreign, Guest, HugePages, Monitor, QemuBuild};
use serde_json::{Value, json};

const REFUSED: i32 = 3;

/// Memory that stays where it is.
struct Own {
    arguments: &'static [&'static str],
    /// Its RAM block.
    block: &'static str,
    /// Where it is, in the words of a refusal.
    place: &'static str,
    /// Whether it can be fed to a running guest.
    is_fed: bool,
}

const MAIN: [&str; 2] = ["-machine", "memory-backend=m0"];

/// `HUGE` is a folder on hugetlbfs, `FOLDER` one on a disk.
const OWN: [Own; 9] = [
    Own {
        arguments: &[
            "-object",
            "memory-backend-memfd,id=m0,size=64M,hugetlb=on,hugetlbsize=2M",
            MAIN[0],
            MAIN[1],
        ],
        block: "m0",
        place: "huge pages of a memfd",
        is_fed: true,
    },
    Own {
        arguments: &[
            "-object",
            "memory-backend-memfd,id=m0,size=64M,hugetlb=on,share=off",
            MAIN[0],
            MAIN[1],
        ],
        block: "m0",
        place: "huge pages of a memfd",
        is_fed: true,
    },
    Own {
        arguments: &[
            "-object",
            "memory-backend-file,id=m0,size=64M,mem-path=HUGE,share=on",
            MAIN[0],
            MAIN[1],
        ],
        block: "m0",
        place: "hugetlbfs",
        is_fed: true,
    },
    Own {
        arguments: &[
            "-object",
            "memory-backend-file,id=m0,size=64M,mem-path=HUGE,share=off,prealloc=on",
            MAIN[0],
            MAIN[1],
        ],
        block: "m0",
        place: "hugetlbfs",
        is_fed: true,
    },
    Own {
        arguments: &["-mem-path", "HUGE"],
        block: "pc.ram",
        place: "hugetlbfs",
        is_fed: true,
    },
    Own {
        arguments: &[
            "-object",
            "memory-backend-memfd,id=m0,size=64M,share=off",
            MAIN[0],
            MAIN[1],
        ],
        block: "m0",
        place: "private memfd",
        is_fed: true,
    },
    // A DIMM in huge pages beside main RAM that is anywhere.
    Own {
        arguments: &[
            "-m",
            "64,slots=2,maxmem=1G",
            "-object",
            "memory-backend-memfd,id=dimm,size=32M,hugetlb=on",
            "-device",
            "pc-dimm,memdev=dimm",
        ],
        block: "dimm",
        place: "huge pages of a memfd",
        is_fed: true,
    },
    Own {
        arguments: &[
            "-object",
            "memory-backend-file,id=m0,size=64M,mem-path=FOLDER/ram,share=on",
            MAIN[0],
            MAIN[1],
        ],
        block: "m0",
        place: "/ram",
        is_fed: false,
    },
    Own {
        arguments: &[
            "-object",
            "memory-backend-file,id=m0,size=64M,mem-path=HUGE/ram,share=off",
            MAIN[0],
            MAIN[1],
        ],
        block: "m0",
        place: "/ram, private",
        is_fed: false,
    },
];

#[test]
fn own_memory_stays_where_it_is_on_qemu_7_2() {
    own_memory_stays_where_it_is(QemuBuild::V7_2);
}

#[test]
fn own_memory_stays_where_it_is_on_qemu_10_0() {
    own_memory_stays_where_it_is(QemuBuild::V10_0);
}

#[test]
fn own_memory_stays_where_it_is_on_qemu_11_1() {
    own_memory_stays_where_it_is(QemuBuild::V11_1);
}

fn own_memory_stays_where_it_is(build: QemuBuild) {
    // One guest at a time.
    let huge = HugePages::keep(32);
    let folder = tempfile::tempdir_in("/var/tmp").expect("a folder can be made");
    for own in &OWN {
        let words: Vec<String> = own
            .arguments
            .iter()
            .map(|word| {
                word.replace("HUGE", &huge.path().to_string_lossy())
                    .replace("FOLDER", &folder.path().to_string_lossy())
            })
            .collect();
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let foreign = Foreign::start(build, &words);
        let scene = &foreign.scene;
        let before = foreign.memory("before");
        let home = home_of(&mut scene.guest.monitor(), own.block);
        foreign.hibernate(&[]).expect_success();
        scene.lab.wait_for_no_qemu();
        let asleep = Asleep::keep(scene, foreign.image(), before);

        let unwished = if own.is_fed { "lazy" } else { "stream" };
        let ways = [(&[][..], unwished), (&["--mode", "stream"], "stream")];
        for (options, mode) in ways.into_iter().take(if own.is_fed { 2 } else { 1 }) {
            let (mut supervisor, woken) = asleep.wakes(options);
            assert_eq!(woken["mode"], mode, "{woken} {words:?}");
            let told = woken["passed_over"].to_string();
            assert_eq!(told.contains(own.place), options.is_empty(), "{told}");
            let now = home_of(&mut scene.guest.monitor(), own.block);
            assert_eq!(home, now, "{mode} {words:?}");
            supervisor.terminate();
            scene.lab.wait_for_no_qemu();
        }
        for (mode, is_refused) in [("eager", true), ("map", true), ("lazy", !own.is_fed)] {
            if is_refused {
                let refused = asleep
                    .tries_to_wake(&["--json", "--mode", mode])
                    .expect_exit(REFUSED);
                let message = refused.result()["error"]["message"].to_string();
                let named = format!("RAM block {}", own.block);
                for word in [&named, own.place, "--mode stream"] {
                    assert!(message.contains(word), "{word:?} is not in {message}");
                }
            }
        }
        // What a private file of a name holds is not the guest's, and no wake empties it.
        let file = huge.path().join("ram");
        if file.exists() {
            fs::remove_file(file).expect("the file can be removed");
        }
    }
}

#[test]
fn memory_of_several_backends_comes_back_by_every_way_on_qemu_7_2() {
    memory_of_several_backends_comes_back_by_every_way(QemuBuild::V7_2);
}

#[test]
fn memory_of_several_backends_comes_back_by_every_way_on_qemu_10_0() {
    memory_of_several_backends_comes_back_by_every_way(QemuBuild::V10_0);
}

#[test]
fn memory_of_several_backends_comes_back_by_every_way_on_qemu_11_1() {
    memory_of_several_backends_comes_back_by_every_way(QemuBuild::V11_1);
}

/// Two nodes and a DIMM, nowhere in particular.
fn memory_of_several_backends_comes_back_by_every_way(build: QemuBuild) {
    let foreign = Foreign::start(
        build,
        &[
            "-m",
            "64,slots=2,maxmem=1G",
            "-object",
            "memory-backend-ram,id=n0,size=32M",
            "-object",
            "memory-backend-ram,id=n1,size=32M",
            "-numa",
            "node,memdev=n0",
            "-numa",
            "node,memdev=n1",
            "-object",
            "memory-backend-ram,id=dimm,size=64M",
            "-device",
            "pc-dimm,memdev=dimm",
        ],
    );
    let scene = &foreign.scene;
    let before = foreign.memory("before");
    foreign.hibernate(&[]).expect_success();
    scene.lab.wait_for_no_qemu();
    let asleep = Asleep::keep(scene, foreign.image(), before);
    let unwished = if build.maps_images() { "map" } else { "lazy" };
    for mode in ["lazy", "map", "eager", "stream", ""] {
        if mode == "map" && !build.maps_images() {
            continue;
        }
        let options = if mode.is_empty() {
            vec![]
        } else {
            vec!["--mode", mode]
        };
        let (mut supervisor, woken) = asleep.wakes(&options);
        assert_eq!(woken["mode"], if mode.is_empty() { unwished } else { mode });
        supervisor.terminate();
        scene.lab.wait_for_no_qemu();
    }
}

#[test]
fn memory_that_was_plugged_in_is_refused_by_name_and_the_guest_goes_on() {
    for build in [QemuBuild::V7_2, QemuBuild::V10_0, QemuBuild::V11_1] {
        let foreign = Foreign::start(build, &["-m", "64,slots=2,maxmem=1G"]);
        let guest = &foreign.scene.guest;
        let mut monitor = guest.monitor();
        monitor.execute(
            "object-add",
            json!({"qom-type": "memory-backend-ram", "id": "mem1", "size": 64 << 20}),
        );
        monitor.execute(
            "device_add",
            json!({"driver": "pc-dimm", "id": "dimm1", "memdev": "mem1"}),
        );
        drop(monitor);
        let refused = foreign.hibernate(&[]).expect_exit(REFUSED);
        let message = refused.result()["error"]["message"].to_string();
        assert!(
            message.contains("dimm1") && message.contains("plugged in"),
            "{message}"
        );
        guest.wait_for_more_ticks();
        foreign.expect_no_image();
    }
}

/// Page size and sharing of a RAM block, in QEMU's words.
fn home_of(monitor: &mut Monitor, block: &str) -> (String, Value) {
    let listing = monitor.execute("human-monitor-command", json!({"command-line": "info ramblock"}));
    let listing = listing.as_str().unwrap_or_default();
    let line = listing
        .lines()
        .find(|line| line.trim_start().starts_with(block))
        .unwrap_or_else(|| panic!("{block} is not in {listing}"));
    let page_size = line.split_whitespace().skip(1).take(2).collect();
    let backends = monitor.execute("query-memdev", json!({}));
    let backend = backends
        .as_array()
        .into_iter()
        .flatten()
        .find(|backend| backend["id"] == block);
    (
        page_size,
        backend.map(|found| found["share"].clone()).unwrap_or_default(),
    )
}
