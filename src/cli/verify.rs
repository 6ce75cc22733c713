//! `hbmark verify`.
use super::Outcome;
use clap::Args as ClapArgs;
#[derive(Debug, ClapArgs)]
pub struct Args {}
pub fn execute(_args: &Args) -> anyhow::Result<Outcome> {
    Ok(Outcome::Complete)
}
