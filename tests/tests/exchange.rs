//! Memory goes out to plain QEMU and to gdb, and comes in from what plain QEMU and libvirt save.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use dormouse_tests::{BootSectorGuest, Guest, Monitor, Outcome, PlainQemu, QemuBuild, Scene, until};
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
    expect_same(&saved.memory, &fs::read(&dump).expect("gdb dumped the memory"));
}

/// A guest of plain QEMU, saved by `migrate` to `file`, and its memory as it was then. Its QEMU is gone.
struct SavedByQemu {
    scene: Scene,
    file: PathBuf,
    memory: Vec<u8>,
}

impl SavedByQemu {
    /// Saves the guest while it runs, or `stopped`, to `uri` of a file, after `prepare`.
    fn on(
        build: QemuBuild,
        stopped: bool,
        uri: impl FnOnce(&Path) -> String,
        prepare: fn(&mut Monitor),
    ) -> Self {
        let scene = Scene::new(build);
        let file = scene.lab.path("saved");
        let qemu = PlainQemu::start(&scene.guest);
        scene.guest.wait_for_ticks(20);
        let mut monitor = scene.guest.monitor();
        if stopped {
            monitor.stop();
        }
        prepare(&mut monitor);
        monitor.execute("migrate", json!({ "uri": uri(&file) }));
        until("the end of the save", || {
            let migration = monitor.execute("query-migrate", json!({}));
            assert_ne!(migration["status"], "failed", "{migration}");
            (migration["status"] == "completed").then_some(())
        });
        monitor.wait_for_status("postmigrate");
        let memory = monitor.memory(scene.guest.ram_bytes(), &scene.lab.path("memory-before"));
        drop(qemu);
        Self { scene, file, memory }
    }

    fn stream(build: QemuBuild, stopped: bool) -> Self {
        Self::on(
            build,
            stopped,
            |file| match build {
                QemuBuild::V7_2 => format!("exec:cat > {}", file.display()),
                _ => format!("file:{}", file.display()),
            },
            |_| {},
        )
    }

    fn import(&self, file: &Path, with_command_line: bool) -> Outcome {
        let image = self.scene.image();
        let mut arguments: Vec<std::ffi::OsString> = ["image", "import", "--json"].map(Into::into).to_vec();
        arguments.extend([file.into(), "--to".into(), image.into(), "--replace".into()]);
        if with_command_line {
            arguments.extend(["--name".into(), "guest".into(), "--".into()]);
            arguments.extend(self.scene.guest.command_line());
        }
        self.scene.dormouse.execute(&arguments)
    }

    /// Woken in every way that its QEMU has, the guest's memory is as it was saved; the last time it goes
    /// on.
    fn imported_it_wakes(&self, was_running: bool) {
        let build = self.scene.guest.build();
        let modes: &[&str] = if build.maps_images() {
            &["map", "eager"]
        } else {
            &["eager"]
        };
        for mode in modes {
            let imported = self.import(&self.file, true).expect_success().result();
            assert_eq!(imported["can_be_woken"], true, "{imported}");
            assert_eq!(
                imported["guest"],
                if was_running { "running" } else { "paused" },
                "{imported}"
            );
            let image = self.scene.image();
            self.scene.dormouse.image("verify", &image, &[]).expect_success();
            let mut woken = self
                .scene
                .dormouse
                .wake("guest", &image, &["--mode", mode, "--paused"]);
            let mut monitor = self.scene.guest.monitor();
            monitor.wait_for_status("paused");
            let after = monitor.memory(self.scene.guest.ram_bytes(), &self.scene.lab.path("memory-after"));
            expect_same(&self.memory, &after);
            if *mode == "eager" {
                monitor.cont();
                assert!(self.scene.guest.wait_for_more_ticks() > BootSectorGuest::counter_in(&self.memory));
            }
            drop(monitor);
            woken.terminate();
            self.scene.lab.wait_for_no_qemu();
            // Map keeps its image as long as the guest lives.
            let _ = fs::remove_file(&image);
        }
    }

    /// The file as libvirt frames it, its stream put through `program`.
    fn framed(&self, format: u32, program: &[&str]) -> PathBuf {
        let framed = self.scene.lab.path("framed");
        let mut bytes = libvirt_header(format, true);
        match program {
            [] => bytes.extend(fs::read(&self.file).expect("the save can be read")),
            [program, arguments @ ..] => {
                let compressed = Command::new(program)
                    .args(arguments)
                    .stdin(fs::File::open(&self.file).expect("the save can be read"))
                    .stderr(Stdio::inherit())
                    .output()
                    .expect("the compressor runs");
                assert!(compressed.status.success(), "{program}");
                bytes.extend(compressed.stdout);
            }
        }
        fs::write(&framed, bytes).expect("the framed save can be written");
        framed
    }
}

/// Header and XML of a libvirt save image, with room to grow as libvirt leaves it.
fn libvirt_header(format: u32, was_running: bool) -> Vec<u8> {
    let mut text = b"<domain type='qemu'><name>guest</name><os><type machine='pc'>hvm</type></os>\
        <devices><emulator>/usr/bin/qemu-system-x86_64</emulator></devices></domain>\0"
        .to_vec();
    let cookie = text.len() as u32;
    text.extend(b"<cookie/>\0");
    text.resize(text.len() + (64 << 10), 0);
    let mut header = b"LibvirtQemudSave".to_vec();
    for word in [2, text.len() as u32, was_running.into(), format, cookie] {
        header.extend(word.to_le_bytes());
    }
    header.resize(92, 0);
    header.extend(text);
    header
}

fn an_imported_stream_wakes(build: QemuBuild, stopped: bool) {
    SavedByQemu::stream(build, stopped).imported_it_wakes(!stopped);
}

#[test]
fn a_stream_saved_while_the_guest_ran_wakes_on_qemu_7_2() {
    an_imported_stream_wakes(QemuBuild::V7_2, false);
}

#[test]
fn a_stream_saved_while_the_guest_ran_wakes_on_qemu_10_0() {
    an_imported_stream_wakes(QemuBuild::V10_0, false);
}

#[test]
fn a_stream_saved_while_the_guest_ran_wakes_on_qemu_11_1() {
    an_imported_stream_wakes(QemuBuild::V11_1, false);
}

#[test]
fn a_stream_of_a_stopped_guest_wakes_on_qemu_10_0() {
    an_imported_stream_wakes(QemuBuild::V10_0, true);
}

#[test]
fn a_stream_of_a_stopped_guest_wakes_on_qemu_11_1() {
    an_imported_stream_wakes(QemuBuild::V11_1, true);
}

#[test]
fn a_mapped_ram_file_saved_while_the_guest_ran_wakes_on_qemu_10_0() {
    let uri = |file: &Path| format!("file:{}", file.display());
    SavedByQemu::on(QemuBuild::V10_0, false, uri, with_mapped_ram).imported_it_wakes(true);
}

#[test]
fn a_mapped_ram_file_of_a_stopped_guest_wakes_on_qemu_11_1() {
    let uri = |file: &Path| format!("file:{}", file.display());
    SavedByQemu::on(QemuBuild::V11_1, true, uri, with_mapped_ram).imported_it_wakes(false);
}

#[test]
fn a_sparse_save_image_of_libvirt_wakes() {
    let uri = |file: &Path| {
        let header = libvirt_header(6, false);
        fs::write(file, &header).expect("the header can be written");
        format!("file:{},offset={}", file.display(), header.len())
    };
    SavedByQemu::on(QemuBuild::V10_0, true, uri, with_mapped_ram).imported_it_wakes(false);
}

#[test]
fn a_save_image_of_libvirt_wakes_however_it_is_compressed() {
    let mut saved = SavedByQemu::stream(QemuBuild::V10_0, true);
    let exported = |saved: &SavedByQemu| {
        let file = saved.scene.lab.path("exported");
        let options = [
            "--format",
            "stream",
            "--force",
            "--to",
            &file.to_string_lossy(),
            "--json",
        ];
        let image = saved.scene.image();
        saved
            .scene
            .dormouse
            .image("export", &image, &options)
            .expect_success();
        fs::remove_file(&image).expect("the image can be removed");
        fs::read(&file).expect("the stream can be read")
    };
    saved.import(&saved.file, false).expect_success();
    let plain = exported(&saved);
    for (format, name, program) in [
        (0, "uncompressed", &[][..]),
        (1, "gzip", &["gzip", "-c"]),
        (2, "bzip2", &["bzip2", "-c"]),
        (3, "xz", &["xz", "-c", "-0"]),
        (5, "zstd", &["zstd", "-c"]),
    ] {
        let framed = saved.framed(format, program);
        let imported = saved.import(&framed, false).expect_success().result();
        assert_eq!(imported["compression"], name);
        assert_eq!(imported["name"], "guest");
        assert_eq!(imported["guest"], "running", "as libvirt's header says");
        assert!(exported(&saved) == plain, "{name}");
    }
    saved.file = saved.framed(5, &["zstd", "-c"]);
    saved.imported_it_wakes(true);
}

#[test]
fn what_cannot_be_imported_is_refused_by_name() {
    let saved = SavedByQemu::stream(QemuBuild::V10_0, true);
    let refused = |bytes: &[u8], code: i32, words: &str| {
        let file = saved.scene.lab.path("refused");
        fs::write(&file, bytes).expect("a file can be written");
        let outcome = saved.import(&file, false).expect_exit(code).result();
        let message = outcome["error"]["message"].as_str().unwrap_or_default();
        assert!(message.contains(words), "{message}");
        assert!(!saved.scene.image().exists());
    };
    let stream = fs::read(&saved.file).expect("the save can be read");
    let mut unfinished = libvirt_header(0, true);
    unfinished[..16].copy_from_slice(b"LibvirtQemudPart");
    refused(&unfinished, 8, "did not finish");
    refused(b"something else", 8, "neither");
    refused(b"", 8, "neither");
    refused(&libvirt_header(4, true), 3, "lzop -dc");
    refused(&libvirt_header(7, true), 8, "format 7");
    refused(&stream[..stream.len() - 20_000], 8, "cut");
    refused(&stream[..stream.len() / 2], 8, "ends at byte");
    let framed = fs::read(saved.framed(1, &["gzip", "-c"])).expect("a framed save");
    refused(&framed[..framed.len() / 2], 8, "gzip data");
}

#[test]
fn a_command_line_that_makes_another_machine_is_refused_before_anything_is_written() {
    let saved = SavedByQemu::stream(QemuBuild::V10_0, true);
    let mut line = saved.scene.guest.command_line();
    let size = line.iter().position(|word| word == "-m").expect("-m") + 1;
    line[size] = "96".into();
    let mut arguments: Vec<std::ffi::OsString> = ["image", "import", "--json"].map(Into::into).to_vec();
    let image = saved.scene.image();
    arguments.extend([(&saved.file).into(), "--to".into(), (&image).into(), "--".into()]);
    arguments.extend(line);
    let outcome = saved.scene.dormouse.execute(&arguments).expect_exit(3).result();
    let message = outcome["error"]["message"].as_str().unwrap_or_default();
    assert!(
        message.contains("RAM block pc.ram was 64.0 MiB and is 96.0 MiB"),
        "{message}"
    );
    assert!(!image.exists());
}
