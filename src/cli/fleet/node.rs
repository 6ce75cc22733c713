//! `hbmark fleet node`.

use std::path::PathBuf;

use anyhow::{Context, ensure};
use clap::Args as ClapArgs;

use crate::cli::{Outcome, say};
use crate::machine::{environment, nvml, placement};
use crate::run::fleet::{NodeDevice, NodeTask, run_node};
use crate::worker::signals::Interrupts;
use hbmark_fleet::nodes::is_name;
use hbmark_fleet::plan::{MANIFEST_FILE, Manifest};

#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Examples:\n  hbmark fleet node --out /shared/fleet/monday\n  hbmark fleet node --out try --emulate\n\nStarted again it goes on: finished runs are left alone, unfinished ones are resumed. It is what the scripts of `hbmark fleet plan` start."
)]
pub struct Args {
    /// The folder of the plan: its fleet.json says what to run; results go to DIR/NODE/UUID/run-N.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// This node's name [default: the scheduler's (SLURMD_NODENAME, NODE_NAME), else the hostname].
    #[arg(long)]
    node: Option<String>,
    /// Only these GPUs, by UUID, comma-separated [default: all that CUDA_VISIBLE_DEVICES leaves].
    #[arg(long, value_name = "UUID", value_delimiter = ',', conflicts_with = "emulate")]
    gpu: Vec<String>,
    /// Try the launcher without GPUs: the CPU engine runs in their place, and every result says so.
    #[arg(long)]
    emulate: bool,
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    let manifest = Manifest::read(&args.out.join(MANIFEST_FILE))?;
    let node = args
        .node
        .clone()
        .or_else(|| placement::of_this_process().and_then(|placement| placement.node))
        .or_else(|| environment::collect(None).hostname)
        .context("this node has no name; give --node")?;
    ensure!(is_name(&node), "`{node}` is not a name of a node; give --node");
    if !manifest.nodes.iter().any(|expected| expected.node.name == node) {
        say(&format!("note: {node} is not in {MANIFEST_FILE}; it is run all the same"));
    }
    let devices = devices(args, &node, manifest.plan.gpus_per_node)?;
    let interrupts = Interrupts::listen().context("cannot listen for signals")?;
    let count = devices.len();
    let task = NodeTask {
        program: std::env::current_exe().context("cannot find the path of this program")?,
        folder: args.out.join(&node),
        node: node.clone(),
        plan: &manifest.plan,
        devices,
        emulated: args.emulate,
        interrupts: interrupts.clone(),
    };
    let record = run_node(&task, &|line| say(&format!("{node}: {line}")))?;
    let finished = record.tasks.iter().filter(|task| task.finished == task.wanted).count();
    say(&format!("{node}: {finished} of {count} GPUs have all their {} results", manifest.plan.processes));
    if let Some(signal) = interrupts.signal() {
        return Ok(Outcome::Stopped(signal));
    }
    Ok(if finished == count { Outcome::Complete } else { Outcome::SomeCellsFailed })
}

/// The devices of this node.
fn devices(args: &Args, node: &str, expected: u32) -> anyhow::Result<Vec<NodeDevice>> {
    if args.emulate {
        say("EMULATED: the CPU engine runs in the place of GPUs; no GPU is measured");
        let each = (0..expected).map(|slot| NodeDevice { name: format!("emulated-{node}-{slot}"), slot });
        return Ok(each.collect());
    }
    let visible = nvml::visible_gpus().context(
        "NVML finds no driver: a GPU's UUID is read from it (--emulate tries the launcher without)",
    )?;
    for wanted in &args.gpu {
        ensure!(visible.iter().any(|(_, uuid)| uuid == wanted), "this node shows no GPU {wanted}");
    }
    let chosen = visible.into_iter().filter(|(_, uuid)| args.gpu.is_empty() || args.gpu.contains(uuid));
    let devices: Vec<NodeDevice> = chosen.map(|(slot, name)| NodeDevice { name, slot }).collect();
    if devices.len() < expected as usize && args.gpu.is_empty() {
        say(&format!("warning: {node} shows {} GPUs, and {expected} are expected", devices.len()));
    }
    Ok(devices)
}
