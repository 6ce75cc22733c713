//! `hbmark fleet plan`.

use std::path::PathBuf;

use anyhow::{Context, bail};
use clap::Args as ClapArgs;

use crate::cli::{Outcome, print, say};
use crate::machine::atomic_file::write_atomic;
use hbmark_fleet::confirm::confirming;
use hbmark_fleet::launcher::{self, Launcher, Site};
use hbmark_fleet::nodes;
use hbmark_fleet::plan::{MIN_PROCESSES, Manifest, Plan};
use hbmark_fleet::result::FleetReport;
use hbmark_report::analysis::words::counted;

/// The largest list of nodes that is read.
const MAX_LIST_BYTES: u64 = 16 << 20;

/// What starts the tasks.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum LauncherName {
    /// One job a node: `sbatch -w NODE --exclusive`.
    Slurm,
    /// One Job a node, of low priority.
    Kubernetes,
    /// A script over ssh.
    Ssh,
}

impl From<LauncherName> for Launcher {
    fn from(name: LauncherName) -> Self {
        match name {
            LauncherName::Slurm => Self::Slurm,
            LauncherName::Kubernetes => Self::Kubernetes,
            LauncherName::Ssh => Self::Ssh,
        }
    }
}

#[derive(Debug, ClapArgs)]
#[command(
    after_help = "Examples:\n  sinfo -h -o %N | hbmark fleet plan --launcher slurm --nodes - --plan quick-ceiling --out /shared/fleet/monday\n  hbmark fleet plan --launcher kubernetes --nodes nodes.txt --plan burn-in --image registry.example/hbmark:0.1 --claim results --out fleet\n  hbmark fleet plan --launcher slurm --only-suspects /shared/fleet/monday/report/fleet-report.json --plan quick-ceiling --out /shared/fleet/monday-again\n\nPlans: quick-ceiling (minutes: bandwidth, GEMM, one small decode; 3 processes), burn-in (an 8B model; 5 processes), or a TOML file:\n  name = \"nightly\"\n  processes = 3              # fresh processes a GPU\n  at_once = true             # all GPUs of a node together: they share air and power; false: in turn\n  gpus_per_node = 8\n  time_limit_minutes = 30    # of a node\n  arguments = [\"--model\", \"Llama-3.1-8B\", \"--engine\", \"native\", \"--quick\"]   # of `hbmark run`"
)]
pub struct Args {
    /// What starts the tasks.
    #[arg(long, value_enum)]
    launcher: LauncherName,
    /// A list of nodes, - for stdin: one name a line or Slurm's node[001-016]; a second word on a line is the rack.
    #[arg(long, value_name = "FILE", required_unless_present = "only_suspects")]
    nodes: Option<PathBuf>,
    /// quick-ceiling, burn-in, or a TOML file.
    #[arg(long, default_value = "quick-ceiling")]
    plan: String,
    /// Folder for the scripts, the manifest (fleet.json) and, on a shared disk, the results.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Run the suspects of a report again, with healthy nodes beside them: only what is slow twice is called slow.
    #[arg(long, value_name = "REPORT", conflicts_with = "nodes")]
    only_suspects: Option<PathBuf>,
    /// GPUs that each node should have, where the plan says not or otherwise.
    #[arg(long, value_name = "N")]
    gpus_per_node: Option<u32>,
    /// The folder of results as the nodes see it [default: --out; with Kubernetes /results].
    #[arg(long, value_name = "PATH")]
    folder: Option<String>,
    /// hbmark on the nodes.
    #[arg(long, value_name = "PATH", default_value = "hbmark")]
    program: String,
    /// Slurm's partition.
    #[arg(long, help_heading = "Slurm")]
    partition: Option<String>,
    /// Slurm's account.
    #[arg(long, help_heading = "Slurm")]
    account: Option<String>,
    /// Slurm's name of a node's GPUs [default: gpu:N].
    #[arg(long, help_heading = "Slurm")]
    gres: Option<String>,
    /// The container image.
    #[arg(long, default_value = "hbmark:latest", help_heading = "Kubernetes")]
    image: String,
    /// The namespace of the Jobs.
    #[arg(long, default_value = "default", help_heading = "Kubernetes")]
    namespace: String,
    /// The PersistentVolumeClaim that results are written to.
    #[arg(long, default_value = "hbmark-fleet", help_heading = "Kubernetes")]
    claim: String,
    /// Try the launcher without GPUs: the CPU engine runs in their place, and every result says so.
    #[arg(long)]
    emulate: bool,
}

pub fn execute(args: &Args) -> anyhow::Result<Outcome> {
    let mut plan = Plan::open(&args.plan)?;
    if let Some(gpus) = args.gpus_per_node {
        plan.gpus_per_node = gpus;
        plan.check()?;
    }
    if plan.processes < MIN_PROCESSES {
        say(&format!(
            "note: {} processes a GPU; with fewer than {MIN_PROCESSES} a report says `too few`",
            plan.processes
        ));
    }
    let (plan, nodes) = match &args.only_suspects {
        Some(report) => {
            let Some(found) = confirming(&FleetReport::read(report)?, plan) else {
                bail!("{} names no suspect: there is nothing to run again", report.display());
            };
            found
        }
        None => (plan, nodes::parse(&list(args)?)?),
    };
    let manifest = Manifest::new(plan, nodes);
    std::fs::create_dir_all(&args.out)
        .with_context(|| format!("cannot create the folder {}", args.out.display()))?;
    let files = launcher::files(args.launcher.into(), &manifest, &site(args)?)?;
    for file in &files {
        let path = args.out.join(file.name);
        write_atomic(&path, &file.text)?;
        if file.executable {
            use std::os::unix::fs::PermissionsExt;
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755))
                .with_context(|| format!("cannot make {} executable", path.display()))?;
        }
    }
    print(&summary(args, &manifest))?;
    Ok(Outcome::Complete)
}

/// The text of the list of nodes.
fn list(args: &Args) -> anyhow::Result<String> {
    let path = args.nodes.as_ref().context("give a list of nodes with --nodes")?;
    if path.as_os_str() == "-" {
        let mut text = String::new();
        std::io::Read::read_to_string(&mut std::io::Read::take(std::io::stdin(), MAX_LIST_BYTES), &mut text)
            .context("cannot read the list of nodes from stdin")?;
        return Ok(text);
    }
    hbmark_core::input::read_text(path, MAX_LIST_BYTES)
        .with_context(|| format!("cannot read the list of nodes {}", path.display()))
}

fn site(args: &Args) -> anyhow::Result<Site> {
    let folder = match (&args.folder, args.launcher) {
        (Some(folder), _) => folder.clone(),
        (None, LauncherName::Kubernetes) => "/results".to_owned(),
        (None, _) => {
            let whole =
                args.out.canonicalize().with_context(|| format!("cannot find {}", args.out.display()))?;
            whole.to_str().context("the path of --out is not UTF-8; give --folder")?.to_owned()
        }
    };
    Ok(Site {
        program: args.program.clone(),
        folder,
        partition: args.partition.clone(),
        account: args.account.clone(),
        gres: args.gres.clone(),
        image: args.image.clone(),
        namespace: args.namespace.clone(),
        claim: args.claim.clone(),
        emulated: args.emulate,
    })
}

fn summary(args: &Args, manifest: &Manifest) -> String {
    let out = args.out.display();
    let plan = &manifest.plan;
    let next = match args.launcher {
        LauncherName::Slurm => format!("sh {out}/submit.sh"),
        LauncherName::Kubernetes => {
            format!(
                "copy {out}/fleet.json to the top of the claim {}, then: kubectl apply -f {out}/fleet.yaml",
                args.claim
            )
        }
        LauncherName::Ssh => format!("sh {out}/ssh.sh"),
    };
    format!(
        "plan {} ({}): {}, {}, processes of each: {}, {} on a node\nwritten to {out}\nnext: {next}\nthen: hbmark fleet report {out}",
        plan.name,
        manifest.digest,
        counted(manifest.nodes.len(), "node"),
        counted(manifest.gpus(), "GPU"),
        plan.processes,
        if plan.at_once { "all GPUs at once" } else { "one GPU after the other" },
    )
}
