//! Scripts and manifests for what starts processes on nodes: Slurm, Kubernetes, or ssh. Written, and never run.
//!
//! Enters: a [`Manifest`] and how this site is called. Leaves: files by name. Each node's task is `hbmark fleet node`, which finds its GPUs
//! itself; what a launcher's exit code says is not used, results are what lies in the folder.

mod kubernetes;
mod slurm;
mod ssh;

use crate::plan::{MANIFEST_FILE, Manifest};

/// What starts the tasks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Launcher {
    Slurm,
    Kubernetes,
    Ssh,
}

/// What scripts need to know of a site.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// The program on the nodes.
    pub program: String,
    /// The folder of results, as the nodes see it.
    pub folder: String,
    /// Slurm's partition.
    pub partition: Option<String>,
    /// Slurm's account.
    pub account: Option<String>,
    /// What Slurm calls GPUs: `gpu:8` asks for eight.
    pub gres: Option<String>,
    /// Kubernetes: the image, the namespace, the claim of the shared folder.
    pub image: String,
    pub namespace: String,
    pub claim: String,
    /// The CPU engine in the place of GPUs.
    pub emulated: bool,
}

impl Default for Site {
    fn default() -> Self {
        Self {
            program: "hbmark".into(),
            folder: String::new(),
            partition: None,
            account: None,
            gres: None,
            image: "hbmark:latest".into(),
            namespace: "default".into(),
            claim: "hbmark-fleet".into(),
            emulated: false,
        }
    }
}

/// A file to be written beside the manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanFile {
    pub name: &'static str,
    pub text: String,
    pub executable: bool,
}

/// Everything that a launcher needs, the manifest first.
///
/// # Errors
/// Never for a manifest made by this program.
pub fn files(
    launcher: Launcher,
    manifest: &Manifest,
    site: &Site,
) -> Result<Vec<PlanFile>, serde_json::Error> {
    let mut files = vec![
        PlanFile { name: MANIFEST_FILE, text: serde_json::to_string_pretty(manifest)?, executable: false },
        PlanFile {
            name: "nodes.txt",
            text: manifest.nodes.iter().map(|expected| expected.node.name.clone() + "\n").collect(),
            executable: false,
        },
    ];
    files.extend(match launcher {
        Launcher::Slurm => slurm::files(manifest, site),
        Launcher::Kubernetes => kubernetes::files(manifest, site),
        Launcher::Ssh => ssh::files(manifest, site),
    });
    Ok(files)
}

/// The command of a node's task, as words.
fn task(site: &Site) -> Vec<String> {
    let mut words =
        vec![site.program.clone(), "fleet".into(), "node".into(), "--out".into(), site.folder.clone()];
    if site.emulated {
        words.push("--emulate".into());
    }
    words
}

/// A word that a POSIX shell reads as it is.
fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,@%+".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

fn command(words: &[String]) -> String {
    words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests;
