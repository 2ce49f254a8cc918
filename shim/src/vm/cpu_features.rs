//! CPU features by name, as far as they have one that is known here; else by where CPUID tells them.
//!
//! The names are those of `-cpu MODEL,+NAME`, so that a difference can be undone by what it is called.

use dormouse_storage::image::manifest::{CpuidRegister, FeatureWord};

/// Names of the bits of one CPUID register, lowest first; `-` where a bit has none.
struct Word {
    leaf: u32,
    register: CpuidRegister,
    names: &'static str,
}

const WORDS: &[Word] = &[
    Word {
        leaf: 1,
        register: CpuidRegister::Edx,
        names: "fpu vme de pse tsc msr pae mce cx8 apic - sep mtrr pge mca cmov pat pse36 pn clflush - ds acpi mmx \
                fxsr sse sse2 ss ht tm ia64 pbe",
    },
    Word {
        leaf: 1,
        register: CpuidRegister::Ecx,
        names: "pni pclmulqdq dtes64 monitor ds-cpl vmx smx est tm2 ssse3 cid - fma cx16 xtpr pdcm - pcid dca sse4.1 \
                sse4.2 x2apic movbe popcnt tsc-deadline aes xsave osxsave avx f16c rdrand hypervisor",
    },
    Word {
        leaf: 7,
        register: CpuidRegister::Ebx,
        names: "fsgsbase tsc-adjust sgx bmi1 hle avx2 fdp-excptn-only smep bmi2 erms invpcid rtm - zero-fcs-fds mpx - \
                avx512f avx512dq rdseed adx smap avx512ifma - clflushopt clwb intel-pt avx512pf avx512er avx512cd \
                sha-ni avx512bw avx512vl",
    },
    Word {
        leaf: 7,
        register: CpuidRegister::Ecx,
        names: "- avx512vbmi umip pku - waitpkg avx512vbmi2 - gfni vaes vpclmulqdq avx512vnni avx512bitalg - \
                avx512-vpopcntdq - la57 - - - - - rdpid - bus-lock-detect cldemote - movdiri movdir64b - sgxlc pks",
    },
    Word {
        leaf: 0x8000_0001,
        register: CpuidRegister::Edx,
        names: "- - - - - - - - - - - syscall - - - - - - - - nx - mmxext - - fxsr-opt pdpe1gb rdtscp - lm 3dnowext \
                3dnow",
    },
    Word {
        leaf: 0x8000_0001,
        register: CpuidRegister::Ecx,
        names: "lahf-lm cmp-legacy svm extapic cr8legacy abm sse4a misalignsse 3dnowprefetch osvw ibs xop skinit wdt - \
                lwp fma4 tce - nodeid-msr - tbm topoext perfctr-core perfctr-nb",
    },
];

/// What `some` has and `others` have not, by name.
pub fn beyond(some: &[FeatureWord], others: &[FeatureWord]) -> Vec<String> {
    let mut names = Vec::new();
    for word in some {
        let same = |other: &&FeatureWord| {
            (other.leaf, other.subleaf, other.register) == (word.leaf, word.subleaf, word.register)
        };
        let other = others.iter().find(same).map_or(0, |other| other.bits);
        let bits = word.bits & !other;
        names.extend(
            (0..32)
                .filter(|bit| bits & (1 << bit) != 0)
                .map(|bit| name(word, bit)),
        );
    }
    names
}

fn name(word: &FeatureWord, bit: usize) -> String {
    let known = WORDS
        .iter()
        .find(|known| known.leaf == word.leaf && known.register == word.register)
        .filter(|_| word.subleaf.unwrap_or_default() == 0)
        .and_then(|known| known.names.split_whitespace().nth(bit))
        .filter(|name| *name != "-");
    match (known, word.subleaf) {
        (Some(name), _) => name.to_owned(),
        (None, None) => format!("CPUID {:#x} {:?} bit {bit}", word.leaf, word.register),
        (None, Some(subleaf)) => format!("CPUID {:#x}.{subleaf} {:?} bit {bit}", word.leaf, word.register),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(leaf: u32, subleaf: Option<u32>, register: CpuidRegister, bits: u32) -> FeatureWord {
        FeatureWord {
            leaf,
            subleaf,
            register,
            bits,
        }
    }

    #[test]
    fn names_stand_at_their_bits() {
        for (bit, leaf, register, name) in [
            (26, 1, CpuidRegister::Edx, "sse2"),
            (31, 1, CpuidRegister::Edx, "pbe"),
            (25, 1, CpuidRegister::Ecx, "aes"),
            (31, 1, CpuidRegister::Ecx, "hypervisor"),
            (16, 7, CpuidRegister::Ebx, "avx512f"),
            (31, 7, CpuidRegister::Ebx, "avx512vl"),
            (16, 7, CpuidRegister::Ecx, "la57"),
            (31, 7, CpuidRegister::Ecx, "pks"),
            (20, 0x8000_0001, CpuidRegister::Edx, "nx"),
            (29, 0x8000_0001, CpuidRegister::Edx, "lm"),
            (2, 0x8000_0001, CpuidRegister::Ecx, "svm"),
            (22, 0x8000_0001, CpuidRegister::Ecx, "topoext"),
        ] {
            let subleaf = (leaf == 7).then_some(0);
            let found = beyond(&[word(leaf, subleaf, register, 1 << bit)], &[]);
            assert_eq!(found, [name], "{leaf:#x} {register:?} {bit}");
        }
    }

    #[test]
    fn what_has_no_name_here_is_told_by_its_place() {
        let some = [
            word(7, Some(1), CpuidRegister::Eax, 1 << 4),
            word(6, None, CpuidRegister::Eax, 4),
        ];
        assert_eq!(
            beyond(&some, &[]),
            ["CPUID 0x7.1 Eax bit 4", "CPUID 0x6 Eax bit 2"]
        );
        assert_eq!(beyond(&some, &some), Vec::<String>::new());
    }
}
