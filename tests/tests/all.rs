//! Before a host goes down every VM goes into an image of its own, and one that cannot keeps no other from it.

use std::path::Path;
use std::{fs, iter};

use dormouse_tests::{BootSectorGuest, Dormouse, Guest, Lab, QemuBuild, Supervisor, faults, until};
use rustix::process::Pid;
use serde_json::{Value, json};

const REFUSED: i32 = 3;
const UNREACHABLE: i32 = 4;
const CANCELLED: i32 = 6;

/// Three guests, `a`, `b` and `c`, under one state directory.
struct Host {
    supervisors: Vec<Supervisor>,
    dormouse: Dormouse,
    guests: Vec<BootSectorGuest>,
    /// Each guest has a folder of its own; the first one's is the host's too. Swept up last.
    labs: Vec<Lab>,
}

impl Host {
    const NAMES: [&str; 3] = ["a", "b", "c"];

    fn up() -> Self {
        let labs: Vec<Lab> = iter::repeat_with(Lab::new).take(3).collect();
        let dormouse = Dormouse::new(&labs[0]);
        let guest = |lab| BootSectorGuest::new(lab, QemuBuild::V10_0);
        let guests: Vec<BootSectorGuest> = labs.iter().map(guest).collect();
        let pairs = Self::NAMES.iter().zip(&guests);
        let supervisors = pairs.map(|(name, guest)| dormouse.run(name, guest)).collect();
        for guest in &guests {
            guest.wait_for_ticks(5);
        }
        fs::create_dir(labs[0].path("images")).expect("a folder can be made");
        Self {
            supervisors,
            dormouse,
            guests,
            labs,
        }
    }

    fn command<'a>(&self, folder: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        [&["hibernate", "--all", "--json", "--to-dir", folder], more].concat()
    }

    fn folder(&self) -> String {
        self.labs[0].path("images").to_string_lossy().into_owned()
    }

    /// The names of all files where images go, partial ones too.
    fn images(&self) -> Vec<String> {
        faults::files_in(Path::new(&self.folder()))
    }
}

/// What was told of one VM at the end: its result, or its error.
fn ending<'a>(objects: &'a [Value], name: &str) -> &'a Value {
    let is_ending = |object: &&Value| {
        object["name"] == name && (object.get("result").is_some() || object.get("error").is_some())
    };
    let endings: Vec<&Value> = objects.iter().filter(is_ending).collect();
    assert_eq!(endings.len(), 1, "{name} in {objects:#?}");
    endings[0]
}

#[test]
fn one_vm_that_cannot_be_saved_keeps_no_other_from_it() {
    let mut host = Host::up();
    let folder = host.folder();
    let taken = Path::new(&folder).join("b.dormouse");
    fs::write(&taken, "something else").unwrap();
    let outcome = host
        .dormouse
        .execute(&host.command(&folder, &[]))
        .expect_exit(REFUSED);
    let objects = outcome.objects();
    for name in ["a", "c"] {
        let told = ending(&objects, name);
        assert_eq!(told["result"], "hibernated", "{told}");
        assert_eq!(told["image"], format!("{folder}/{name}.dormouse"));
    }
    let told = ending(&objects, "b");
    assert_eq!(told["error"]["code"], "refused", "{told}");
    assert_eq!(
        objects[0]["name"], "b",
        "what cannot be is told first: {objects:#?}"
    );
    assert_eq!(
        outcome.result(),
        json!({"result": "all", "hibernated": ["a", "c"], "failed": ["b"]})
    );
    host.guests[1].wait_for_more_ticks();
    assert_eq!(fs::read(&taken).unwrap(), b"something else");

    // The next try takes the one that is left, and the others wake where they were.
    fs::remove_file(&taken).unwrap();
    let outcome = host
        .dormouse
        .execute(&host.command(&folder, &[]))
        .expect_success();
    assert_eq!(
        outcome.result(),
        json!({"result": "all", "hibernated": ["b"], "failed": []})
    );
    assert_eq!(host.images(), ["a.dormouse", "b.dormouse", "c.dormouse"]);
    for supervisor in &mut host.supervisors {
        supervisor.wait_for_end();
    }
    let last = host.guests[2].last_counter();
    let _woken = host
        .dormouse
        .wake("c", &Path::new(&folder).join("c.dormouse"), &[]);
    assert!(host.guests[2].wait_for_more_ticks() > last);
}

#[test]
fn a_ctrl_c_gives_back_what_is_under_way_and_begins_no_more() {
    let host = Host::up();
    let folder = host.folder();
    // 17 MiB at this rate take longer than the test.
    let slowly = ["--parallel", "1", "--rate-limit", "128K"];
    let command = host.dormouse.spawn(&host.command(&folder, &slowly));
    until("the first hibernation to write", || {
        (host.guests[0].monitor().status() == "postmigrate").then_some(())
    });
    let pid = i32::try_from(command.id()).ok().and_then(Pid::from_raw);
    faults::interrupt(pid.unwrap());
    let outcome = host.dormouse.finish(command).expect_exit(CANCELLED);
    let objects = outcome.objects();
    for name in Host::NAMES {
        assert_eq!(
            ending(&objects, name)["error"]["code"],
            "cancelled",
            "{objects:#?}"
        );
    }
    let begun = objects
        .iter()
        .any(|object| object["name"] != "a" && object.get("phase").is_some());
    assert!(!begun, "only the first was begun: {objects:#?}");
    for guest in &host.guests {
        guest.wait_for_more_ticks();
    }
    assert_eq!(host.images(), Vec::<String>::new());
}

#[test]
fn a_guest_without_its_supervisor_is_told_and_not_passed_over() {
    let mut host = Host::up();
    let folder = host.folder();
    host.supervisors[0].kill();
    let outcome = host
        .dormouse
        .execute(&host.command(&folder, &["--parallel", "3"]))
        .expect_exit(UNREACHABLE);
    let objects = outcome.objects();
    let message = ending(&objects, "a")["error"]["message"].to_string();
    assert!(message.contains("reach it with --qmp"), "{message}");
    assert_eq!(host.images(), ["b.dormouse", "c.dormouse"]);
    host.guests[0].wait_for_more_ticks();
}

#[test]
fn a_folder_that_is_not_there_is_told_and_an_empty_host_is_no_failure() {
    const USAGE: i32 = 2;
    let lab = Lab::new();
    let dormouse = Dormouse::new(&lab);
    let all = |folder: &Path| {
        let folder = folder.to_str().unwrap().to_owned();
        dormouse.execute(&["hibernate", "--all", "--json", "--to-dir", &folder])
    };
    all(&lab.path("nowhere")).expect_exit(USAGE);
    let outcome = all(lab.folder()).expect_success();
    assert_eq!(
        outcome.result(),
        json!({"result": "all", "hibernated": [], "failed": []})
    );
}
