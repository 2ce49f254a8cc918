//! `dormouse wake --print-args`: the QEMU command line for a launcher that starts QEMU itself.
//!
//! The image is only read, so the answer can be had before its disks are there, and as often as is wished. What is compared
//! with them is compared by the wake.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use dormouse_storage::Image;
use serde_json::json;

use super::{WakeArguments, request};
use crate::cli::report::Report;
use crate::error::{Code, Failure};
use crate::machine::wake::plan::{check_state, plan_for_launcher};
use crate::vm::command_line::CommandLine;

/// Where a guest's RAM is, if it is filled before the guest runs: QEMU makes a file in this folder that has no name.
const RAM_DIRECTORY: &str = "/dev/shm";

pub fn print_args(arguments: WakeArguments, report: &Report) -> Result<ExitCode, Failure> {
    let path = absolute(&arguments.image)?;
    let request = request(&arguments)?;
    let image = Image::open(&path)?;
    check_state(&image)?;
    let plan = plan_for_launcher(&image, &request)?;
    let ram_directory = arguments.supervision.ram_dir.as_deref();
    let ram_directory = ram_directory.unwrap_or(Path::new(RAM_DIRECTORY));
    let mut line = plan.command_line(&image, |_| ram_directory.to_owned())?;
    if let Some(socket) = &arguments.qmp {
        line = line.with_monitor(&absolute(socket)?);
    }
    let words = words(&line);
    let told = json!({
        "result": "arguments",
        "mode": plan.mode,
        "working_directory": plan.directory,
        "arguments": words,
    });
    let text = if report.is_json() {
        String::new()
    } else {
        in_lines(&words)?
    };
    report.result(&told, &text);
    report.remark(&format!(
        "RAM comes back by {:?}; start it in {}",
        plan.mode,
        plan.directory.display()
    ));
    Ok(ExitCode::SUCCESS)
}

fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(path)
        .map_err(|error| Failure::new(Code::Usage, format!("{}: {error}", path.display())))
}

fn words(line: &CommandLine) -> Vec<String> {
    let mut words = vec![line.program().to_owned()];
    words.extend(line.arguments());
    words
}

/// One a line, which takes arguments of one line each.
fn in_lines(words: &[String]) -> Result<String, Failure> {
    match words.iter().find(|word| word.contains('\n')) {
        None => Ok(words.join("\n")),
        Some(word) => Err(Failure::new(
            Code::Usage,
            format!("the argument {word:?} has more than one line: ask with --json"),
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_argument_of_several_lines_is_not_taken_apart() {
        let words = |last: &str| ["qemu", "-append", last].map(str::to_owned);
        assert_eq!(in_lines(&words("a b")), Ok("qemu\n-append\na b".to_owned()));
        let error = in_lines(&words("a\nb")).unwrap_err();
        assert!(error.message.contains("--json"), "{error}");
    }
}
