//! Parse, call the library, print the error, choose the exit code.

use std::process::ExitCode;

use clap::Parser;
use hbmark::cli::Cli;

fn main() -> ExitCode {
    if hbmark::rig::is_worker() {
        return hbmark::cli::work();
    }
    if !hbmark::rig::end_with_launcher() {
        return ExitCode::from(2);
    }
    let cli = Cli::parse();
    match hbmark::cli::dispatch(cli) {
        Ok(outcome) => outcome.into(),
        Err(error) => {
            anstream::eprintln!("error: {}", hbmark::cli::one_line(&error));
            ExitCode::from(2)
        }
    }
}
