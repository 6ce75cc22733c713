//! Plain ssh, for clusters without a scheduler and for drained nodes, on which Slurm does not run.

use super::{PlanFile, Site, command, quoted, task};
use crate::plan::Manifest;

pub(super) fn files(manifest: &Manifest, site: &Site) -> Vec<PlanFile> {
    let mut words = task(site);
    words.extend(["--node".to_owned(), "NODE".to_owned()]);
    // The name stands in no quotes; names of nodes have no character that a shell reads otherwise.
    let task = command(&words);
    let text = format!(
        "#!/bin/sh\n\
         # Runs the plan {name} ({digest}) on {nodes} nodes over ssh, HBMARK_PARALLEL of them at a time. Run it again: finished runs stay.\n\
         # The folder must be the same on all nodes; without a shared disk, copy each node's part afterwards.\n\
         set -eu\n\
         here=$(cd \"$(dirname \"$0\")\" && pwd)\n\
         mkdir -p {folder}/logs\n\
         xargs -P \"${{HBMARK_PARALLEL:-64}}\" -I NODE sh -c \\\n\
         \x20   'timeout {minutes}m ssh -n -o BatchMode=yes -o ConnectTimeout=15 NODE {inner} > {folder_inner}/logs/NODE.out 2>&1 || echo \"NODE: see its log\" >&2' \\\n\
         \x20   < \"$here/nodes.txt\"\n",
        name = quoted(&manifest.plan.name),
        digest = manifest.digest,
        nodes = manifest.nodes.len(),
        minutes = manifest.plan.time_limit_minutes,
        folder = quoted(&site.folder),
        inner = within(&quoted(&task)),
        folder_inner = within(&quoted(&site.folder)),
    );
    vec![PlanFile { name: "ssh.sh", text, executable: true }]
}

/// Text within single quotes of a shell.
fn within(text: &str) -> String {
    text.replace('\'', r"'\''")
}
