//! Memory goes out to plain QEMU and to gdb, and comes in from what plain QEMU and libvirt save.

use std::path::{Path, PathBuf};
use std::process::Command;

use dormouse_tests::{BootSectorGuest, Guest, Monitor, PlainQemu, QemuBuild, Scene};
use serde_json::json;

/// A paused guest of `build`, hibernated: its image, and its memory as it was.
struct Saved {
    scene: Scene,
    memory: Vec<u8>,
    registers: String,
}

impl Saved {
    fn on(build: QemuBuild) -> Self {
        let scene = Scene::new(build);
        let mut supervisor = scene.run();
        let mut monitor = scene.guest.monitor();
        monitor.stop();
        let memory = monitor.memory(scene.guest.ram_bytes(), &scene.lab.path("memory-before"));
        let registers = monitor.execute("human-monitor-command", json!({"command-line": "info registers"}));
        drop(monitor);
        scene.dormouse.hibernate("guest", &scene.image()).expect_success();
        supervisor.wait_for_end();
        scene.lab.wait_for_no_qemu();
        Self {
            memory,
            registers: registers.as_str().unwrap_or_default().to_owned(),
            scene,
        }
    }

    fn export(&self, format: &str) -> PathBuf {
        let file = self.scene.lab.path(&format!("exported.{format}"));
        let options = ["--format", format, "--to", &file.to_string_lossy(), "--json"];
        let exported = self
            .scene
            .dormouse
            .image("export", &self.scene.image(), &options)
            .expect_success();
        assert_eq!(exported.result()["result"], "exported");
        file
    }

    /// A QEMU without Dormouse loads `uri` and goes on where the guest was.
    fn goes_on_in_plain_qemu(&self, uri: &str, prepare: impl FnOnce(&mut Monitor)) {
        let _qemu = PlainQemu::start_with(&self.scene.guest, &["-S", "-incoming", "defer"]);
        let mut monitor = self.scene.guest.monitor();
        prepare(&mut monitor);
        monitor.execute("migrate-incoming", json!({ "uri": uri }));
        monitor.wait_for_status("paused");
        self.is_in(&mut monitor);
        self.goes_on(&mut monitor);
    }

    fn is_in(&self, monitor: &mut Monitor) {
        let after = monitor.memory(self.scene.guest.ram_bytes(), &self.scene.lab.path("memory-after"));
        expect_same(&self.memory, &after);
    }

    fn goes_on(&self, monitor: &mut Monitor) {
        let saved_at = BootSectorGuest::counter_in(&self.memory);
        monitor.cont();
        assert!(self.scene.guest.wait_for_more_ticks() > saved_at);
    }
}

fn expect_same(before: &[u8], after: &[u8]) {
    let first_difference = before.iter().zip(after).position(|(a, b)| a != b);
    assert_eq!(
        (before.len(), first_difference),
        (after.len(), None),
        "sizes and first difference of the memory before and after"
    );
}

fn file_uri(build: QemuBuild, file: &Path) -> String {
    match build {
        QemuBuild::V7_2 => format!("exec:cat {}", file.display()),
        _ => format!("file:{}", file.display()),
    }
}

fn with_mapped_ram(monitor: &mut Monitor) {
    monitor.execute(
        "migrate-set-capabilities",
        json!({"capabilities": [{"capability": "mapped-ram", "state": true}]}),
    );
}

fn with_parallel_direct_mapped_ram(monitor: &mut Monitor) {
    with_mapped_ram(monitor);
    monitor.execute(
        "migrate-set-capabilities",
        json!({"capabilities": [{"capability": "multifd", "state": true}]}),
    );
    monitor.execute(
        "migrate-set-parameters",
        json!({"multifd-channels": 3, "direct-io": true}),
    );
}

fn an_exported_stream_goes_on(build: QemuBuild) {
    let saved = Saved::on(build);
    let file = saved.export("stream");
    saved.goes_on_in_plain_qemu(&file_uri(build, &file), |_| {});
}

fn an_exported_mapped_ram_file_goes_on(build: QemuBuild, prepare: fn(&mut Monitor)) {
    let saved = Saved::on(build);
    let file = saved.export("mapped-ram");
    saved.goes_on_in_plain_qemu(&file_uri(build, &file), prepare);
}

#[test]
fn an_exported_stream_goes_on_in_plain_qemu_7_2() {
    an_exported_stream_goes_on(QemuBuild::V7_2);
}

#[test]
fn an_exported_stream_goes_on_in_plain_qemu_10_0() {
    an_exported_stream_goes_on(QemuBuild::V10_0);
}

#[test]
fn an_exported_stream_goes_on_in_plain_qemu_11_1() {
    an_exported_stream_goes_on(QemuBuild::V11_1);
}

#[test]
fn an_exported_mapped_ram_file_goes_on_in_plain_qemu_10_0() {
    an_exported_mapped_ram_file_goes_on(QemuBuild::V10_0, with_mapped_ram);
}

#[test]
fn an_exported_mapped_ram_file_goes_on_in_plain_qemu_11_1() {
    an_exported_mapped_ram_file_goes_on(QemuBuild::V11_1, with_mapped_ram);
}

#[test]
fn an_exported_mapped_ram_file_is_loaded_in_parallel_and_past_the_cache_by_qemu_10_0() {
    an_exported_mapped_ram_file_goes_on(QemuBuild::V10_0, with_parallel_direct_mapped_ram);
}

#[test]
fn an_exported_mapped_ram_file_is_loaded_in_parallel_and_past_the_cache_by_qemu_11_1() {
    an_exported_mapped_ram_file_goes_on(QemuBuild::V11_1, with_parallel_direct_mapped_ram);
}

#[test]
fn gdb_reads_memory_and_registers_out_of_an_exported_core() {
    let saved = Saved::on(QemuBuild::V10_0);
    let core = saved.export("elf");
    let dump = saved.scene.lab.path("memory-by-gdb");
    let gdb = Command::new("gdb")
        .args(["-batch", "-nx", "-ex"])
        .arg(format!("core-file {}", core.display()))
        .args(["-ex", "info registers rip rax rsp cs", "-ex"])
        .arg(format!(
            "dump binary memory {} 0 {:#x}",
            dump.display(),
            saved.memory.len()
        ))
        .output()
        .expect("gdb runs");
    let said = String::from_utf8_lossy(&gdb.stdout);
    for (in_gdb, in_qemu) in [("rip", "EIP"), ("rax", "EAX"), ("rsp", "ESP")] {
        let by_gdb = said
            .lines()
            .find_map(|line| line.strip_prefix(in_gdb)?.split_whitespace().next())
            .unwrap_or_else(|| panic!("no {in_gdb}: {gdb:?}"));
        let by_gdb = u64::from_str_radix(by_gdb.trim_start_matches("0x"), 16);
        let by_qemu = saved
            .registers
            .split_whitespace()
            .find_map(|word| word.strip_prefix(in_qemu)?.strip_prefix('='))
            .unwrap_or_else(|| panic!("no {in_qemu}: {}", saved.registers));
        assert_eq!(by_gdb, u64::from_str_radix(by_qemu, 16), "{in_gdb}");
    }
    expect_same(
        &saved.memory,
        &std::fs::read(&dump).expect("gdb dumped the memory"),
    );
}
