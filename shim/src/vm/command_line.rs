//! A QEMU command line: what it says about memory, and the same line with the memory somewhere else.
//!
//! Dormouse never invents a machine. It takes the line that the user gave and changes only where RAM comes from, who
//! may talk QMP, and what is loaded; everything else stays as it was, byte for byte and in its order. The line is kept
//! in the image as the user gave it, and changed anew for each start.

use std::path::{Path, PathBuf};

use dormouse_storage::ByteCount;

use super::options::Options;

/// QEMU's main RAM where no `-m` says otherwise (PC machines).
const DEFAULT_RAM: ByteCount = ByteCount(128 << 20);

/// Options of QEMU that take no argument. All others are followed by theirs.
const FLAGS: &[&str] = &[
    "h",
    "help",
    "version",
    "S",
    "s",
    "nographic",
    "daemonize",
    "snapshot",
    "enable-kvm",
    "no-kvm",
    "no-reboot",
    "no-shutdown",
    "no-acpi",
    "no-hpet",
    "no-fd-bootchk",
    "no-quit",
    "nodefaults",
    "no-user-config",
    "preconfig",
    "only-migratable",
    "singlestep",
    "one-insn-per-tb",
    "mem-prealloc",
    "full-screen",
    "usb",
    "win2k-hack",
    "semihosting",
    "old-param",
    "xen-attach",
    "xen-domid-restrict",
    "enable-fips",
    "curses",
    "portrait",
    "audio-help",
    "async-teardown",
    "enable-sync-profile",
    "perfmap",
    "jitdump",
];

/// Whether the option `name`, without its dashes, is followed by its argument.
pub fn takes_value(name: &str) -> bool {
    !FLAGS.contains(&name)
}

/// A command line, split into its options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandLine {
    program: String,
    items: Vec<Item>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Item {
    /// The option's name without dashes; empty for a positional argument (a disk image).
    name: String,
    tokens: Vec<String>,
}

/// A command line that Dormouse cannot work with.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum CommandLineError {
    /// There is not even a program.
    #[error("the QEMU command line is empty")]
    Empty,
    /// An option ends the line where its argument should be.
    #[error("option -{0} lacks its argument")]
    MissingArgument(String),
    /// An option whose work Dormouse does itself, or cannot supervise.
    #[error("option -{option} cannot be used here: {reason}")]
    Unsupported {
        /// The option.
        option: String,
        /// Why, and what to do instead.
        reason: &'static str,
    },
    /// A size that is no size.
    #[error("cannot read the memory size {0:?}")]
    Size(String),
    /// A memory backend without what it needs.
    #[error("cannot read the memory backend {0:?}")]
    Backend(String),
}

/// One `-object memory-backend-…` of the line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryBackend {
    /// Its id, which is also the name of its RAM block.
    pub id: String,
    /// `memory-backend-ram`, `memory-backend-memfd` or `memory-backend-file`.
    pub kind: String,
    /// Its size.
    pub size: ByteCount,
    /// Whether it says that it is shared, or that it is not.
    pub share: Option<bool>,
    /// Whether it asks for huge pages of its own (`hugetlb=on` of a memfd).
    pub hugetlb: bool,
    /// The file that it is in, or the folder that QEMU makes one in.
    pub path: Option<PathBuf>,
}

/// Where a RAM block shall live.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Placement {
    /// As the command line has it.
    AsGiven,
    /// In a file of its own, shared, so that it can be saved straight from the mapping.
    SharedFile(PathBuf),
    /// Mapped privately from inside an image.
    Image {
        /// The image.
        path: PathBuf,
        /// Where the block begins in it.
        offset: ByteCount,
        /// Whether this QEMU can be told that the memory is writable although the file is opened for reading.
        rom_property: bool,
    },
}

impl CommandLine {
    /// Splits `arguments`, of which the first is the program.
    pub fn parse(arguments: &[String]) -> Result<Self, CommandLineError> {
        let (program, rest) = arguments.split_first().ok_or(CommandLineError::Empty)?;
        let mut items = Vec::new();
        let mut rest = rest.iter();
        while let Some(token) = rest.next() {
            let name = match token.strip_prefix('-') {
                Some(name) if !name.is_empty() => name.strip_prefix('-').unwrap_or(name),
                _ => {
                    items.push(Item {
                        name: String::new(),
                        tokens: vec![token.clone()],
                    });
                    continue;
                }
            };
            let mut tokens = vec![token.clone()];
            if takes_value(name) {
                tokens.push(
                    rest.next()
                        .ok_or_else(|| CommandLineError::MissingArgument(name.to_owned()))?
                        .clone(),
                );
            }
            items.push(Item {
                name: name.to_owned(),
                tokens,
            });
        }
        Ok(Self {
            program: program.clone(),
            items,
        })
    }

    /// The program.
    pub fn program(&self) -> &str {
        &self.program
    }

    /// The arguments after the program.
    pub fn arguments(&self) -> Vec<String> {
        self.items
            .iter()
            .flat_map(|item| item.tokens.iter().cloned())
            .collect()
    }

    /// Refuses what a supervised machine cannot have.
    pub fn check_supervisable(&self) -> Result<(), CommandLineError> {
        for (option, reason) in [
            (
                "daemonize",
                "the supervisor is QEMU's parent; `--detach` puts both in the background",
            ),
            ("incoming", "`dormouse wake` loads images"),
            ("preconfig", "the supervisor would wait for ever"),
            (
                "mem-path",
                "use -object memory-backend-file,share=on and -machine memory-backend=ID",
            ),
            (
                "readconfig",
                "what it says about memory cannot be seen; put it on the command line",
            ),
        ] {
            if self.has(option) {
                return Err(CommandLineError::Unsupported {
                    option: option.to_owned(),
                    reason,
                });
            }
        }
        Ok(())
    }

    /// Whether writes to a disk go to a temporary overlay, which is gone when QEMU ends.
    pub fn has_temporary_disks(&self) -> bool {
        self.has("snapshot") || self.values("drive").any(|drive| drive.is_on("snapshot"))
    }

    /// The ids of all devices that the line makes and names.
    pub fn device_ids(&self) -> Vec<String> {
        self.values("device")
            .filter_map(|device| device.value("id").map(str::to_owned))
            .collect()
    }

    /// The first option that uses a file descriptor which whoever started QEMU had opened for it.
    pub fn inherited_descriptor(&self) -> Option<&str> {
        let keys = ["fd", "fds", "vhostfd", "vhostfds"];
        self.items
            .iter()
            .find(|item| {
                item.name == "add-fd"
                    || ["netdev", "chardev", "device", "object", "net"].contains(&item.name.as_str())
                        && item
                            .tokens
                            .get(1)
                            .and_then(|text| Options::parse(text))
                            .is_some_and(|options| keys.iter().any(|key| options.value(key).is_some()))
            })
            .map(|item| item.tokens.last().map_or(item.name.as_str(), String::as_str))
    }

    /// Whether memory has to stay shared with others (a vhost-user backend, a virtiofs daemon): the user's own backends
    /// say so, or are of the kind that is shared unless told otherwise.
    pub fn shares_memory(&self) -> bool {
        let mut objects = self.items.iter().filter_map(Item::memory_backend_options);
        objects.any(|options| match options.value("share") {
            Some(_) => options.is_on("share"),
            None => matches!(
                options.leading("qom-type"),
                Some("memory-backend-memfd" | "memory-backend-shm")
            ),
        })
    }

    /// The CPU model and features, as given.
    pub fn cpu(&self) -> Option<&str> {
        self.items
            .iter()
            .rev()
            .find(|item| item.name == "cpu")
            .map(|item| item.tokens[1].as_str())
    }

    /// The machine type as given, which may be an alias.
    pub fn machine(&self) -> Option<String> {
        let machines: Vec<Options> = self.machine_options().collect();
        machines
            .iter()
            .rev()
            .find_map(|machine| machine.leading("type").map(str::to_owned))
    }

    /// From where on RAM is moved above 4 GiB, where the line says so.
    pub fn max_ram_below_4g(&self) -> Result<Option<ByteCount>, CommandLineError> {
        let texts = self.machine_options();
        let texts = texts.filter_map(|machine| machine.value("max-ram-below-4g").map(str::to_owned));
        texts
            .last()
            .map(|text| parse_size(&text, 1).ok_or(CommandLineError::Size(text)))
            .transpose()
    }

    /// The size of main RAM.
    pub fn ram_size(&self) -> Result<ByteCount, CommandLineError> {
        let text = self
            .values("m")
            .filter_map(|m| m.leading("size").map(str::to_owned))
            .last();
        match text {
            None => Ok(DEFAULT_RAM),
            Some(text) => parse_size(&text, 1 << 20).ok_or(CommandLineError::Size(text)),
        }
    }

    /// The memory backends that the line makes.
    pub fn memory_backends(&self) -> Result<Vec<MemoryBackend>, CommandLineError> {
        self.items
            .iter()
            .filter_map(|item| item.memory_backend_options().map(|options| (item, options)))
            .map(|(item, options)| {
                let bad = || CommandLineError::Backend(item.tokens[1].clone());
                Ok(MemoryBackend {
                    id: options.value("id").ok_or_else(bad)?.to_owned(),
                    kind: options.leading("qom-type").ok_or_else(bad)?.to_owned(),
                    size: options
                        .value("size")
                        .and_then(|size| parse_size(size, 1))
                        .ok_or_else(bad)?,
                    share: options.value("share").map(|_| options.is_on("share")),
                    hugetlb: options.is_on("hugetlb"),
                    path: options.value("mem-path").map(PathBuf::from),
                })
            })
            .collect()
    }

    /// All memory of the guest: the line's own backends and, with the id `main_ram`, main RAM where none of them is that.
    pub fn guest_memory(&self, main_ram: &str) -> Result<Vec<MemoryBackend>, CommandLineError> {
        let mut backends = self.memory_backends()?;
        backends.extend(self.plain_main_memory(main_ram)?);
        Ok(backends)
    }

    /// Main RAM as `-m` makes it, with the file or folder that `-mem-path` names.
    fn plain_main_memory(&self, main_ram: &str) -> Result<Option<MemoryBackend>, CommandLineError> {
        if self.names_main_memory() {
            return Ok(None);
        }
        let path = self.items.iter().rev().find(|item| item.name == "mem-path");
        let path = path.and_then(|item| item.tokens.get(1)).map(PathBuf::from);
        let kind = match path {
            Some(_) => "memory-backend-file",
            None => "memory-backend-ram",
        };
        Ok(Some(MemoryBackend {
            id: main_ram.to_owned(),
            kind: kind.to_owned(),
            size: self.ram_size()?,
            share: None,
            hugetlb: false,
            path,
        }))
    }

    /// Whether main RAM comes from one of the line's own backends.
    pub fn names_main_memory(&self) -> bool {
        self.machine_options()
            .any(|machine| machine.value("memory-backend").is_some())
            || self.values("numa").any(|numa| numa.value("memdev").is_some())
    }

    /// The same line with RAM where `place` wants it. Main RAM without a backend gets one with the id `main_ram`, the
    /// machine's own name for that block, so that migration streams fit either way.
    pub fn with_memory(
        &self,
        main_ram: &str,
        place: impl Fn(&MemoryBackend) -> Placement,
    ) -> Result<Self, CommandLineError> {
        let mut line = self.clone();
        let mut placements: Vec<Placement> = self.memory_backends()?.iter().map(&place).collect();
        let objects = line
            .items
            .iter_mut()
            .filter(|item| item.memory_backend_options().is_some());
        for (item, placement) in objects.zip(&placements) {
            if let Some(mut options) = item.memory_backend_options()
                && placement.apply(&mut options)
            {
                item.tokens[1] = options.render();
            }
        }
        if let Some(backend) = self.plain_main_memory(main_ram)?
            && let placement = place(&backend)
            && placement != Placement::AsGiven
        {
            // It says where main RAM is, as the placement does now; QEMU refuses both.
            line.items.retain(|item| item.name != "mem-path");
            let mut options = Options::parse("memory-backend-ram").unwrap_or_default();
            options.set("id", main_ram);
            options.set("size", backend.size.0.to_string());
            placement.apply(&mut options);
            placements.push(placement);
            line.push("object", options.render());
            line.push("machine", format!("memory-backend={main_ram}"));
        }
        if placements
            .iter()
            .any(|placement| matches!(placement, Placement::Image { .. }))
        {
            // Touching every page at the start would read the whole image.
            line.items.retain(|item| item.name != "mem-prealloc");
        }
        Ok(line)
    }

    /// The same line with a monitor for Dormouse at `socket`.
    pub fn with_monitor(mut self, socket: &Path) -> Self {
        // `-qmp` is what every QEMU takes: 11.1 deprecates `-mon`, and has the object that replaces it alone.
        let mut monitor = Options::parse("").unwrap_or_default();
        monitor.set("", format!("unix:{}", socket.to_string_lossy()));
        monitor.set("server", "on");
        monitor.set("wait", "off");
        self.push("qmp", monitor.render());
        self
    }

    /// The same line for a QEMU that waits for an image: of the machine type that the image was saved from, stopped,
    /// and without what would start the guest in another way.
    pub fn for_wake(mut self, machine: &str) -> Self {
        self.items
            .retain(|item| !matches!(item.name.as_str(), "S" | "incoming" | "loadvm" | "daemonize"));
        self.push("machine", format!("type={machine}"));
        self.push("incoming", "defer".to_owned());
        self.items.push(Item {
            name: "S".to_owned(),
            tokens: vec!["-S".to_owned()],
        });
        self
    }

    /// The same line with more at its end.
    pub fn with_changes(mut self, changes: &[String]) -> Result<Self, CommandLineError> {
        let mut arguments = vec![self.program.clone()];
        arguments.extend_from_slice(changes);
        let changes = Self::parse(&arguments)?;
        changes.check_supervisable()?;
        self.items.extend(changes.items);
        Ok(self)
    }

    fn has(&self, option: &str) -> bool {
        self.items.iter().any(|item| item.name == option)
    }

    fn values<'a>(&'a self, option: &'a str) -> impl Iterator<Item = Options> + 'a {
        self.items
            .iter()
            .filter(move |item| item.name == option)
            .filter_map(|item| Options::parse(item.tokens.get(1)?))
    }

    fn machine_options(&self) -> impl Iterator<Item = Options> + '_ {
        self.values("machine").chain(self.values("M"))
    }

    fn push(&mut self, option: &str, value: String) {
        self.items.push(Item {
            name: option.to_owned(),
            tokens: vec![format!("-{option}"), value],
        });
    }
}

impl Item {
    fn memory_backend_options(&self) -> Option<Options> {
        let options = (self.name == "object").then(|| Options::parse(self.tokens.get(1)?))??;
        options
            .leading("qom-type")?
            .starts_with("memory-backend-")
            .then_some(options)
    }
}

impl Placement {
    /// Rewrites a backend's options; `false`: they stay as they are.
    fn apply(&self, options: &mut Options) -> bool {
        let Some(id) = options.value("id").map(str::to_owned) else {
            return false;
        };
        let size = options.value("size").unwrap_or_default().to_owned();
        let mut moved = Options::parse("memory-backend-file").unwrap_or_default();
        moved.set("id", id);
        moved.set("size", size);
        // Host placement and dump policy belong to the guest's owner; all else says where the memory lies.
        let kept = [
            "prealloc",
            "prealloc-threads",
            "merge",
            "dump",
            "policy",
            "host-nodes",
            "reserve",
        ];
        for (key, value) in options.pairs() {
            if kept.contains(&key) || key.starts_with("host-nodes.") {
                moved.set(key, value);
            }
        }
        match self {
            Self::AsGiven => return false,
            Self::SharedFile(path) => {
                moved.set("mem-path", path.to_string_lossy());
                moved.set("share", "on");
            }
            Self::Image {
                path,
                offset,
                rom_property,
            } => {
                // Touching every page at the start would read the whole image.
                moved.remove("prealloc");
                moved.remove("prealloc-threads");
                moved.set("mem-path", path.to_string_lossy());
                moved.set("offset", offset.0.to_string());
                moved.set("share", "off");
                if *rom_property {
                    moved.set("readonly", "on");
                    moved.set("rom", "off");
                }
            }
        }
        *options = moved;
        true
    }
}

/// Reads a size as QEMU does: a number, with a suffix of K, M, G or T (any case); without one in `unit` bytes.
fn parse_size(text: &str, unit: u64) -> Option<ByteCount> {
    let text = text.trim();
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let scale = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" => unit,
        "B" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        "T" => 1 << 40,
        _ => return None,
    };
    let bytes = match digits.split_once('.') {
        None => match digits.strip_prefix("0x") {
            Some(hexadecimal) => u64::from_str_radix(hexadecimal, 16).ok()?.checked_mul(scale)?,
            None => digits.parse::<u64>().ok()?.checked_mul(scale)?,
        },
        Some((whole, fraction)) => {
            let denominator = 10_u64.checked_pow(u32::try_from(fraction.len()).ok()?)?;
            let fraction = fraction.parse::<u64>().ok()?.checked_mul(scale)? / denominator;
            whole
                .parse::<u64>()
                .ok()?
                .checked_mul(scale)?
                .checked_add(fraction)?
        }
    };
    (bytes > 0).then_some(ByteCount(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(text: &str) -> CommandLine {
        CommandLine::parse(&text.split_whitespace().map(str::to_owned).collect::<Vec<_>>()).unwrap()
    }

    fn text(line: &CommandLine) -> String {
        line.arguments().join(" ")
    }

    fn on_tmpfs(backend: &MemoryBackend) -> Placement {
        Placement::SharedFile(PathBuf::from(format!("/ram/{}", backend.id)))
    }

    #[test]
    fn plain_memory_becomes_a_shared_file_with_the_machines_own_id() {
        let line = line("qemu -M q35 -m 512 -nodefaults")
            .with_memory("pc.ram", on_tmpfs)
            .unwrap();
        assert_eq!(
            text(&line),
            "-M q35 -m 512 -nodefaults -object \
             memory-backend-file,id=pc.ram,size=536870912,mem-path=/ram/pc.ram,share=on -machine memory-backend=pc.ram"
        );
    }

    #[test]
    fn an_anonymous_backend_is_moved_and_keeps_its_numa_policy() {
        let line = line(
            "qemu -object memory-backend-ram,id=m0,size=1G,policy=bind,host-nodes=0 -numa node,memdev=m0",
        );
        assert_eq!(
            text(&line.with_memory("pc.ram", on_tmpfs).unwrap()),
            "-object memory-backend-file,id=m0,size=1G,policy=bind,host-nodes=0,mem-path=/ram/m0,share=on \
             -numa node,memdev=m0"
        );
    }

    #[test]
    fn a_backend_in_json_keeps_its_list_of_nodes() {
        let json = r#"{"qom-type":"memory-backend-memfd","id":"m0","size":1048576,"host-nodes":[0],"policy":"bind"}"#;
        let arguments = ["qemu", "-object", json, "-numa", "node,memdev=m0"].map(str::to_owned);
        let moved = text(
            &CommandLine::parse(&arguments)
                .unwrap()
                .with_memory("pc.ram", on_tmpfs)
                .unwrap(),
        );
        assert!(
            moved.contains("host-nodes.0=0") && moved.contains("policy=bind"),
            "{moved}"
        );
    }

    #[test]
    fn descriptors_that_somebody_opened_for_qemu_are_noticed() {
        assert_eq!(
            line("qemu -netdev tap,id=n,fd=7").inherited_descriptor(),
            Some("tap,id=n,fd=7")
        );
        assert_eq!(
            line("qemu -add-fd fd=3,set=1").inherited_descriptor(),
            Some("fd=3,set=1")
        );
        assert_eq!(
            line("qemu -netdev user,id=n -chardev socket,id=c,path=/fd=1").inherited_descriptor(),
            None
        );
    }

    #[test]
    fn a_backend_for_a_dimm_does_not_stand_for_main_memory() {
        let line = line(
            "qemu -m 1G,slots=2,maxmem=4G -object memory-backend-ram,id=dimm,size=512M -device pc-dimm,memdev=dimm",
        );
        let moved = text(&line.with_memory("pc.ram", on_tmpfs).unwrap());
        assert!(moved.contains("id=dimm,size=512M,mem-path=/ram/dimm"), "{moved}");
        assert!(
            moved.contains("id=pc.ram,size=1073741824,mem-path=/ram/pc.ram"),
            "{moved}"
        );
    }

    #[test]
    fn a_wake_maps_the_image_and_waits_for_the_stream() {
        let woken = line("qemu -M q35 -m 64 -S -loadvm x")
            .for_wake("pc-q35-10.0")
            .with_memory("pc.ram", |_| Placement::Image {
                path: "/pvc/a.img".into(),
                offset: ByteCount(2 << 20),
                rom_property: true,
            })
            .unwrap();
        assert_eq!(
            text(&woken),
            "-M q35 -m 64 -machine type=pc-q35-10.0 -incoming defer -S -object memory-backend-file,id=pc.ram,\
             size=67108864,mem-path=/pvc/a.img,offset=2097152,share=off,readonly=on,rom=off \
             -machine memory-backend=pc.ram"
        );
    }

    #[test]
    fn a_wake_places_what_somebody_else_put_anywhere() {
        let image = |backend: &MemoryBackend| Placement::Image {
            path: format!("/{}", backend.id).into(),
            offset: ByteCount(2 << 20),
            rom_property: false,
        };
        let line = line("qemu -m 64 -mem-path /dev/hugepages -mem-prealloc -S -incoming defer");
        let mapped = line.clone().for_wake("pc").with_memory("pc.ram", image).unwrap();
        assert!(!text(&mapped).contains("hugepages") && !text(&mapped).contains("mem-prealloc"));
        let eager = line.for_wake("pc").with_memory("pc.ram", on_tmpfs).unwrap();
        assert!(!text(&eager).contains("hugepages") && text(&eager).contains("mem-prealloc"));
        assert_eq!(text(&eager).matches("-incoming").count(), 1);

        let json =
            r#"{"qom-type":"memory-backend-memfd","id":"m0","size":1048576,"share":true,"hugetlb":true}"#;
        let arguments = [
            "qemu",
            "-object",
            json,
            "-machine",
            "memory-backend=m0,aux-ram-share=on",
        ]
        .map(str::to_owned);
        let memfd = CommandLine::parse(&arguments).unwrap();
        assert!(memfd.shares_memory());
        assert_eq!(
            text(&memfd.with_memory("pc.ram", on_tmpfs).unwrap()),
            "-object memory-backend-file,id=m0,size=1048576,mem-path=/ram/m0,share=on -machine \
             memory-backend=m0,aux-ram-share=on"
        );
    }

    #[test]
    fn what_stays_as_given_stays_to_the_letter() {
        let text_given =
            "-m 64 -mem-path /dev/hugepages -object memory-backend-memfd,id=dimm,size=32M,hugetlb=on";
        let line = line(&format!("qemu {text_given}"));
        assert_eq!(
            text(&line.with_memory("pc.ram", |_| Placement::AsGiven).unwrap()),
            text_given
        );
        let memory = line.guest_memory("pc.ram").unwrap();
        let seen: Vec<_> = memory
            .iter()
            .map(|backend| (backend.id.as_str(), backend.hugetlb, backend.path.as_deref()))
            .collect();
        assert_eq!(
            seen,
            [
                ("dimm", true, None),
                ("pc.ram", false, Some(Path::new("/dev/hugepages")))
            ]
        );
    }

    #[test]
    fn the_monitor_is_reachable_under_any_path() {
        assert_eq!(
            text(&line("qemu").with_monitor(Path::new("/run/a,b/qmp.sock"))),
            "-qmp unix:/run/a,,b/qmp.sock,server=on,wait=off"
        );
    }

    #[test]
    fn sizes_are_read_as_qemu_reads_them() {
        for (text, bytes) in [
            ("512", 512 << 20),
            ("2G", 2 << 30),
            ("size=1g,slots=2,maxmem=8G", 1 << 30),
            ("0.5G", 512 << 20),
            ("65536k", 64 << 20),
        ] {
            assert_eq!(
                line(&format!("qemu -m {text}")).ram_size(),
                Ok(ByteCount(bytes)),
                "{text}"
            );
        }
        assert_eq!(line("qemu").ram_size(), Ok(DEFAULT_RAM));
        for bad in ["many", "1Q", "-3", "0", "99999999999999T"] {
            assert_eq!(
                line(&format!("qemu -m {bad}")).ram_size(),
                Err(CommandLineError::Size(bad.to_owned()))
            );
        }
    }

    #[test]
    fn an_argument_that_looks_like_an_option_is_left_alone() {
        let line = line("qemu -append -m -m 64");
        assert_eq!(line.ram_size(), Ok(ByteCount(64 << 20)));
    }

    #[test]
    fn what_cannot_be_supervised_is_refused_by_name() {
        for option in [
            "-daemonize",
            "-incoming defer",
            "-mem-path /dev/hugepages",
            "--readconfig a.cfg",
        ] {
            let error = line(&format!("qemu {option}")).check_supervisable().unwrap_err();
            assert!(matches!(error, CommandLineError::Unsupported { .. }), "{error}");
        }
        assert_eq!(
            CommandLine::parse(&["qemu".into(), "-m".into()]),
            Err(CommandLineError::MissingArgument("m".into()))
        );
    }

    #[test]
    fn a_temporary_overlay_is_noticed_in_both_spellings() {
        assert!(line("qemu -snapshot a.img").has_temporary_disks());
        assert!(line("qemu -drive file=a.img,snapshot=on").has_temporary_disks());
        assert!(!line("qemu -drive file=a.img").has_temporary_disks());
    }
}
