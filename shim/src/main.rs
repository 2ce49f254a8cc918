//! The `dormouse` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    dormouse::cli::main()
}
