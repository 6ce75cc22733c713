//! `hbmark fleet`: a plan for a cluster, the task of one of its nodes, and the report of what came back.

mod node;
mod plan;
mod report;

use clap::{Args as ClapArgs, Subcommand};

use super::Outcome;

#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Examples:\n  hbmark fleet plan --launcher slurm --nodes 'nodes.txt' --plan quick-ceiling --out /shared/fleet/monday\n  sh /shared/fleet/monday/submit.sh\n  hbmark fleet report /shared/fleet/monday --against /shared/fleet/sunday\n\nhbmark starts nothing on other machines: a plan is scripts that you submit, and what a report says about a node is a command that you run."
)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Write the scripts or manifests for a scheduler, and the list of GPUs that are expected.
    Plan(plan::Args),
    /// On a node: run the plan on each of its GPUs, in fresh processes.
    Node(node::Args),
    /// Judge what came back: which GPU, node or rack is slow, sick or missing.
    Report(report::Args),
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    match &args.command {
        Command::Plan(args) => plan::execute(args),
        Command::Node(args) => node::execute(args),
        Command::Report(args) => report::execute(args),
    }
}
