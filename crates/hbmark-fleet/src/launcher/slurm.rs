//! Slurm: one job a node. A drained node then holds up its own job alone, where one job over all nodes would wait for it forever; and a job
//! that is killed, requeued or out of time costs its node alone.

use super::{PlanFile, Site, command, quoted, task};
use crate::plan::Manifest;

pub(super) fn files(manifest: &Manifest, site: &Site) -> Vec<PlanFile> {
    vec![
        PlanFile { name: "fleet.sbatch", text: batch(manifest, site), executable: true },
        PlanFile { name: "submit.sh", text: submit(manifest, site), executable: true },
    ]
}

fn batch(manifest: &Manifest, site: &Site) -> String {
    let plan = &manifest.plan;
    let (minutes, gpus) = (plan.time_limit_minutes, plan.gpus_per_node);
    let gres = site.gres.clone().unwrap_or_else(|| format!("gpu:{gpus}"));
    let option = |name: &str, value: &Option<String>| {
        value.as_ref().map_or_else(String::new, |value| format!("#SBATCH --{name}={}\n", quoted(value)))
    };
    // GPUs of a node are chosen by UUID by the one task that sees them all: binding one to each task would leave it to Slurm.
    format!(
        "#!/bin/sh\n\
         # One node of the plan {name} ({digest}). Submitted by submit.sh, once a node.\n\
         #SBATCH --nodes=1\n\
         #SBATCH --ntasks=1\n\
         #SBATCH --exclusive\n\
         #SBATCH --time={minutes}\n\
         #SBATCH --requeue\n\
         #SBATCH --open-mode=append\n\
         #SBATCH --gres={gres}\n\
         {partition}{account}\
         # Results are the files in the folder. The step's exit code is this script's, for sacct.\n\
         exec srun --nodes=1 --ntasks=1 --gres={gres} --kill-on-bad-exit=0 --wait=0 {task}\n",
        name = quoted(&plan.name),
        digest = manifest.digest,
        partition = option("partition", &site.partition),
        account = option("account", &site.account),
        task = command(&task(site)),
    )
}

fn submit(manifest: &Manifest, site: &Site) -> String {
    // What Slurm calls the job ends in the node's name: `%N` in the name of a log would be the host's.
    format!(
        "#!/bin/sh\n\
         # Submits one job for each of {nodes} nodes. Run it again for nodes that are back: tasks go on where they stopped.\n\
         # A node that is down or drained keeps its job pending: `squeue --name hbmark-NODE`, `scancel --name hbmark-NODE`.\n\
         set -eu\n\
         here=$(cd \"$(dirname \"$0\")\" && pwd)\n\
         logs={folder}/logs\n\
         mkdir -p \"$logs\"\n\
         while read -r node; do\n\
         \x20   sbatch --job-name=\"hbmark-$node\" --nodelist=\"$node\" --output=\"$logs/$node-%j.out\" \"$here/fleet.sbatch\"\n\
         done < \"$here/nodes.txt\"\n",
        nodes = manifest.nodes.len(),
        folder = quoted(&site.folder),
    )
}
