//! Parse, call the library, print the error, choose the exit code.

use std::process::ExitCode;

use clap::Parser;
use hbmark::cli::{Cli, Outcome};

fn main() -> ExitCode {
    let cli = Cli::parse();
    match hbmark::cli::dispatch(cli) {
        Ok(Outcome::Complete) => ExitCode::SUCCESS,
        Ok(Outcome::SomeCellsFailed) => ExitCode::from(1),
        Err(error) => {
            anstream::eprintln!("error: {}", hbmark::cli::one_line(&error));
            ExitCode::from(2)
        }
    }
}
