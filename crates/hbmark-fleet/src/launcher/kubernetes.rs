//! Kubernetes: one Job a node, bound by its hostname label, so that every GPU is covered exactly once; an index of an Indexed Job is not a node.
//! A pod takes the whole node and may be preempted by anything; what it had finished stays, and its next pod goes on.

use std::fmt::Write as _;

use super::{PlanFile, Site, task};
use crate::plan::Manifest;

/// Pods that a node's Job starts before it gives up.
const RETRIES: u32 = 3;

/// The longest name of a Job whose pods keep it whole as a label.
const MAX_NAME: usize = 63;

pub(super) fn files(manifest: &Manifest, site: &Site) -> Vec<PlanFile> {
    let mut text = format!(
        "# The plan {} ({}), one Job for each of {} nodes: kubectl apply -f fleet.yaml\n\
         # The claim {} must be there, and writable from many nodes at once (ReadWriteMany).\n\
         apiVersion: scheduling.k8s.io/v1\n\
         kind: PriorityClass\n\
         metadata:\n  name: hbmark-fleet\n\
         value: -1000\n\
         preemptionPolicy: Never\n\
         globalDefault: false\n\
         description: \"hbmark fleet: runs on idle GPUs, and yields to everything\"\n",
        manifest.plan.name.replace(['\n', '\r'], " "),
        manifest.digest,
        manifest.nodes.len(),
        json(&site.claim)
    );
    for expected in &manifest.nodes {
        job(&mut text, manifest, site, &expected.node.name, expected.gpus);
    }
    vec![PlanFile { name: "fleet.yaml", text, executable: false }]
}

/// A string of JSON is one of YAML.
fn json(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// A node's name as a DNS label: what is none gets a digest, so that two of them stay two.
fn job_name(digest: &str, node: &str) -> String {
    let mut name = format!("hbmark-{}-{}", &digest[..8], node.to_ascii_lowercase().replace(['.', '_'], "-"));
    let same = node.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-');
    if !same || name.len() > MAX_NAME {
        use sha2::{Digest, Sha256};
        let unique = format!("{:.8x}", Sha256::digest(node));
        name.truncate(MAX_NAME - unique.len() - 1);
        let _ = write!(name, "-{unique}");
    }
    name.trim_end_matches('-').to_owned()
}

fn job(text: &mut String, manifest: &Manifest, site: &Site, node: &str, gpus: u32) {
    let name = job_name(&manifest.digest, node);
    // Of a pod: a Job's own deadline runs while it waits for a node.
    let seconds = u64::from(manifest.plan.time_limit_minutes) * 60;
    let words: Vec<String> = task(site).iter().map(|word| json(word)).collect();
    let resources = if site.emulated {
        String::new()
    } else {
        format!("        resources:\n          limits:\n            nvidia.com/gpu: {gpus}\n")
    };
    let _ = write!(
        text,
        "---\n\
         apiVersion: batch/v1\n\
         kind: Job\n\
         metadata:\n\
         \x20 name: {name}\n\
         \x20 namespace: {namespace}\n\
         \x20 labels:\n\
         \x20   app.kubernetes.io/name: hbmark-fleet\n\
         \x20   hbmark/plan: {plan}\n\
         spec:\n\
         \x20 backoffLimit: {RETRIES}\n\
         \x20 template:\n\
         \x20   metadata:\n\
         \x20     labels:\n\
         \x20       app.kubernetes.io/name: hbmark-fleet\n\
         \x20       hbmark/plan: {plan}\n\
         \x20   spec:\n\
         \x20     restartPolicy: Never\n\
         \x20     activeDeadlineSeconds: {seconds}\n\
         \x20     priorityClassName: hbmark-fleet\n\
         \x20     nodeSelector:\n\
         \x20       kubernetes.io/hostname: {host}\n\
         \x20     containers:\n\
         \x20     - name: hbmark\n\
         \x20       image: {image}\n\
         \x20       command: [{words}]\n\
         \x20       env:\n\
         \x20       - name: NODE_NAME\n\
         \x20         valueFrom: {{fieldRef: {{fieldPath: spec.nodeName}}}}\n\
         \x20       - name: POD_NAME\n\
         \x20         valueFrom: {{fieldRef: {{fieldPath: metadata.name}}}}\n\
         \x20       - name: POD_NAMESPACE\n\
         \x20         valueFrom: {{fieldRef: {{fieldPath: metadata.namespace}}}}\n\
         {resources}\
         \x20       volumeMounts:\n\
         \x20       - name: results\n\
         \x20         mountPath: {folder}\n\
         \x20     volumes:\n\
         \x20     - name: results\n\
         \x20       persistentVolumeClaim:\n\
         \x20         claimName: {claim}\n",
        name = json(&name),
        namespace = json(&site.namespace),
        plan = json(&manifest.digest),
        host = json(node),
        image = json(&site.image),
        words = words.join(", "),
        resources = resources,
        folder = json(&site.folder),
        claim = json(&site.claim),
    );
}
