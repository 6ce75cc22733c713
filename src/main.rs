//! Parse, call the library, print the error, choose the exit code.

use std::process::ExitCode;

fn main() -> ExitCode {
    hbmark::worker::signals::survive_file_size_limit();
    if hbmark::worker::child::is_worker_process() {
        return hbmark::cli::work();
    }
    if !hbmark::worker::child::exit_with_launcher() {
        hbmark::cli::say(&format!(
            "error: the process that launched this one is gone; unset {} to start it by hand",
            hbmark::worker::child::LAUNCHED_BY
        ));
        return ExitCode::from(2);
    }
    let cli = match hbmark::cli::parse() {
        Ok(cli) => cli,
        Err(code) => return code,
    };
    match hbmark::cli::dispatch(cli) {
        Ok(outcome) => outcome.into(),
        Err(error) => {
            hbmark::cli::say_error(&error);
            ExitCode::from(2)
        }
    }
}
