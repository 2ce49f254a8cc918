//! Registers of x86-64 CPUs, out of their device state and into the notes of an ELF core.
//!
//! Two notes for each CPU, as `dump-guest-memory` writes them: `NT_PRSTATUS`, which every debugger
//! reads, and QEMU's own, which has what a processor has and a process does not (descriptor tables,
//! control registers).

use crate::migration::Device;

/// A segment register.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Segment {
    selector: u32,
    base: u64,
    limit: u32,
    flags: u32,
}

/// Registers of one CPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cpu {
    /// rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, r8 to r15: the order of the instruction set.
    general: [u64; 16],
    rip: u64,
    rflags: u64,
    /// es, cs, ss, ds, fs, gs.
    segments: [Segment; 6],
    ldt: Segment,
    tr: Segment,
    gdt: Segment,
    idt: Segment,
    /// cr0 to cr4; there is no cr1.
    control: [u64; 5],
    kernel_gs_base: Option<u64>,
}

const NT_PRSTATUS: u32 = 1;
const PRSTATUS_BYTES: usize = 336;
const PRSTATUS_PID: usize = 32;
const PRSTATUS_REGISTERS: usize = 112;

impl Cpu {
    /// All CPUs among `devices`, or what stands in the way.
    pub(super) fn all(devices: &[Device<'_>]) -> Result<Vec<Self>, &'static str> {
        let mut cpus: Vec<&Device> = devices.iter().filter(|device| device.name == "cpu").collect();
        if cpus.is_empty() {
            return Err("the device state has no section \"cpu\"");
        }
        cpus.sort_by_key(|cpu| cpu.instance);
        let cpus: Option<Vec<Self>> = cpus.into_iter().map(Self::of).collect();
        cpus.ok_or("the CPUs are not described as 64-bit x86")
    }

    fn of(device: &Device<'_>) -> Option<Self> {
        let number = |name: &str| -> Option<u64> { numbers::<1>(device.field(name, 8)?).map(|[one]| one) };
        let segment = |name: &str| segments::<1>(device.field(name, 20)?).map(|[one]| one);
        Some(Self {
            general: numbers(device.field("env.regs", 8)?)?,
            rip: number("env.eip")?,
            rflags: number("env.eflags")?,
            segments: segments(device.field("env.segs", 20)?)?,
            ldt: segment("env.ldt")?,
            tr: segment("env.tr")?,
            gdt: segment("env.gdt")?,
            idt: segment("env.idt")?,
            control: [
                number("env.cr[0]")?,
                0,
                number("env.cr[2]")?,
                number("env.cr[3]")?,
                number("env.cr[4]")?,
            ],
            kernel_gs_base: number("env.kernelgsbase"),
        })
    }

    /// The `NT_PRSTATUS` note. Threads are numbered from 1 on, as `dump-guest-memory` does.
    pub(super) fn prstatus(&self, index: usize) -> Vec<u8> {
        let [
            rax,
            rcx,
            rdx,
            rbx,
            rsp,
            rbp,
            rsi,
            rdi,
            r8,
            r9,
            r10,
            r11,
            r12,
            r13,
            r14,
            r15,
        ] = self.general;
        let [es, cs, ss, ds, fs, gs] = self.segments;
        let selector = |segment: Segment| u64::from(segment.selector);
        let registers = [
            r15,
            r14,
            r13,
            r12,
            rbp,
            rbx,
            r11,
            r10,
            r9,
            r8,
            rax,
            rcx,
            rdx,
            rsi,
            rdi,
            u64::MAX, // no system call is under way
            self.rip,
            selector(cs),
            self.rflags,
            rsp,
            selector(ss),
            fs.base,
            gs.base,
            selector(ds),
            selector(es),
            selector(fs),
            selector(gs),
        ];
        let mut status = vec![0; PRSTATUS_BYTES];
        let pid = u32::try_from(index + 1).unwrap_or(u32::MAX);
        status[PRSTATUS_PID..PRSTATUS_PID + 4].copy_from_slice(&pid.to_le_bytes());
        for (place, register) in status[PRSTATUS_REGISTERS..].chunks_exact_mut(8).zip(registers) {
            place.copy_from_slice(&register.to_le_bytes());
        }
        note("CORE", NT_PRSTATUS, &status)
    }

    /// QEMU's own note.
    pub(super) fn qemu(&self) -> Vec<u8> {
        let [rax, rcx, rdx, rbx, rsp, rbp, rsi, rdi, rest @ ..] = self.general;
        let [es, cs, ss, ds, fs, gs] = self.segments;
        let mut state = Vec::new();
        for register in [rax, rbx, rcx, rdx, rsi, rdi, rsp, rbp] {
            state.extend(register.to_le_bytes());
        }
        for register in rest.into_iter().chain([self.rip, self.rflags]) {
            state.extend(register.to_le_bytes());
        }
        for segment in [cs, ds, es, fs, gs, ss, self.ldt, self.tr, self.gdt, self.idt] {
            for field in [segment.selector, segment.limit, segment.flags, 0] {
                state.extend(field.to_le_bytes());
            }
            state.extend(segment.base.to_le_bytes());
        }
        for register in self.control.into_iter().chain(self.kernel_gs_base) {
            state.extend(register.to_le_bytes());
        }
        let mut described = 1_u32.to_le_bytes().to_vec();
        described.extend((state.len() as u32 + 8).to_le_bytes());
        described.extend(state);
        note("QEMU", 0, &described)
    }
}

fn note(name: &str, kind: u32, content: &[u8]) -> Vec<u8> {
    let mut note = Vec::new();
    note.extend((name.len() as u32 + 1).to_le_bytes());
    note.extend((content.len() as u32).to_le_bytes());
    note.extend(kind.to_le_bytes());
    for part in [format!("{name}\0").as_bytes(), content] {
        note.extend(part);
        note.resize(note.len().next_multiple_of(4), 0);
    }
    note
}

fn numbers<const N: usize>(bytes: &[u8]) -> Option<[u64; N]> {
    let (numbers, rest) = bytes.as_chunks::<8>();
    let numbers: [[u8; 8]; N] = numbers.try_into().ok()?;
    rest.is_empty().then(|| numbers.map(u64::from_be_bytes))
}

fn segments<const N: usize>(bytes: &[u8]) -> Option<[Segment; N]> {
    let (segments, rest) = bytes.as_chunks::<20>();
    let segments: [[u8; 20]; N] = segments.try_into().ok()?;
    let word = |segment: &[u8; 20], at: usize| {
        u32::from_be_bytes([segment[at], segment[at + 1], segment[at + 2], segment[at + 3]])
    };
    rest.is_empty().then(|| {
        segments.map(|segment| Segment {
            selector: word(&segment, 0),
            base: u64::from(word(&segment, 4)) << 32 | u64::from(word(&segment, 8)),
            limit: word(&segment, 12),
            flags: word(&segment, 16),
        })
    })
}
