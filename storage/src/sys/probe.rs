//! What the system can do, asked once and never guessed from a version.

use std::fs::File;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::OnceLock;

use io_uring::{IoUring, Probe, opcode};
use rustix::fs::{AtFlags, StatxFlags, statx};

use super::ALIGNMENT;

/// Why io_uring cannot be used by this process, or `None` if it can.
///
/// A kernel can be too old, `kernel.io_uring_disabled` set, or a container's seccomp profile can refuse
/// it, with any error that its author liked.
pub(crate) fn why_no_uring() -> Option<&'static io::Error> {
    static ANSWER: OnceLock<Option<io::Error>> = OnceLock::new();
    ANSWER.get_or_init(|| try_uring().err()).as_ref()
}

fn try_uring() -> io::Result<()> {
    let mut ring = IoUring::new(1)?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    if !probe.is_supported(opcode::Write::CODE) {
        return Err(io::Error::from(io::ErrorKind::Unsupported));
    }
    // A profile can let a ring be made and refuse to have it entered.
    // SAFETY: the entry does nothing and refers to no memory.
    let pushed = unsafe { ring.submission().push(&opcode::Nop::new().build()) };
    pushed.map_err(io::Error::other)?;
    ring.submit_and_wait(1).map(drop)
}

/// Why a program started by this process cannot have the faults of its own memory told to it, or `None` if it can: by
/// the system call, which needs CAP_SYS_PTRACE or `vm.unprivileged_userfaultfd` for faults in the kernel, or, where it
/// `opens_device`, by the device, which needs access to it.
pub(crate) fn why_no_userfaultfd(opens_device: bool) -> Option<io::Error> {
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: the call takes numbers only.
    let made = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    let Ok(made @ 0..) = i32::try_from(made) else {
        let error = io::Error::last_os_error();
        let by_device = || {
            File::options()
                .read(true)
                .write(true)
                .open("/dev/userfaultfd")
                .is_ok()
        };
        return (!opens_device || !by_device()).then_some(error);
    };
    // SAFETY: the call has just made it, and nobody else knows of it.
    drop(unsafe { OwnedFd::from_raw_fd(made) });
    None
}

/// What a file system says about O_DIRECT to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DirectIo {
    /// Nothing: kernels before 6.1, and many file systems.
    Untold,
    /// Possible with what [`ALIGNMENT`] gives.
    Possible,
    /// Impossible, or only with larger units than ours.
    Impossible,
}

/// Asks what is needed for O_DIRECT to `file`.
pub(crate) fn direct_io(file: &File) -> DirectIo {
    let Ok(told) = statx(file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) else {
        return DirectIo::Untold;
    };
    if told.stx_mask & StatxFlags::DIOALIGN.bits() == 0 {
        return DirectIo::Untold;
    }
    match (told.stx_dio_mem_align, told.stx_dio_offset_align) {
        (0, _) | (_, 0) => DirectIo::Impossible,
        (memory, offset) if memory.max(offset) as usize <= ALIGNMENT => DirectIo::Possible,
        _ => DirectIo::Impossible,
    }
}

/// Does `work` in a thread to which io_uring is refused, as container runtimes do it.
#[cfg(test)]
pub(crate) fn without_uring<R: Send>(work: impl FnOnce() -> R + Send) -> R {
    without(libc::SYS_io_uring_setup, work)
}

#[cfg(test)]
fn without<R: Send>(call: libc::c_long, work: impl FnOnce() -> R + Send) -> R {
    let rule = |code, jump_true, jump_false, value| libc::sock_filter {
        code,
        jt: jump_true,
        jf: jump_false,
        k: value,
    };
    let number = call as u32;
    // Load the number of the call; if it is that one say EPERM, else let it pass.
    let mut filter = [
        rule((libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16, 0, 0, 0),
        rule((libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16, 0, 1, number),
        rule(
            (libc::BPF_RET | libc::BPF_K) as u16,
            0,
            0,
            libc::SECCOMP_RET_ERRNO | libc::EPERM as u32,
        ),
        rule(
            (libc::BPF_RET | libc::BPF_K) as u16,
            0,
            0,
            libc::SECCOMP_RET_ALLOW,
        ),
    ];
    let confined = || {
        let program = libc::sock_fprog {
            len: filter.len() as u16,
            filter: filter.as_mut_ptr(),
        };
        // SAFETY: both calls concern this thread alone; the program and its rules live for the call.
        let result = unsafe {
            libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
            libc::prctl(
                libc::PR_SET_SECCOMP,
                libc::SECCOMP_MODE_FILTER,
                &raw const program,
            )
        };
        assert_eq!(result, 0, "{}", io::Error::last_os_error());
        work()
    };
    std::thread::scope(|scope| scope.spawn(confined).join()).expect("the work does not panic")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn io_uring_is_found_out_by_trying() {
        try_uring().unwrap();
        for call in [
            libc::SYS_io_uring_setup,
            libc::SYS_io_uring_register,
            libc::SYS_io_uring_enter,
        ] {
            let refused = without(call, || try_uring().unwrap_err());
            assert_eq!(refused.raw_os_error(), Some(libc::EPERM), "call {call}");
        }
    }

    #[test]
    fn userfaultfd_is_found_out_by_trying() {
        let refused = |opens_device| {
            let error = without(libc::SYS_userfaultfd, move || why_no_userfaultfd(opens_device));
            error.and_then(|error| error.raw_os_error())
        };
        assert_eq!(refused(false), Some(libc::EPERM));
        let has_device = File::options()
            .read(true)
            .write(true)
            .open("/dev/userfaultfd")
            .is_ok();
        assert_eq!(refused(true), (!has_device).then_some(libc::EPERM));
    }

    #[test]
    fn a_file_of_this_machine_takes_direct_writes_or_does_not_tell() {
        let file = tempfile::tempfile().unwrap();
        assert_ne!(direct_io(&file), DirectIo::Impossible);
    }
}
