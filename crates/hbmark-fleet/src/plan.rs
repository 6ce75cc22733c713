//! What every GPU of a fleet runs, and which GPUs are expected: a plan and its manifest, `fleet.json`.
//!
//! Enters: the name of a plan or a TOML file, and a list of nodes. Leaves: plain data that is saved beside the results, and a digest by which
//! results of another plan are told apart.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::nodes::Node;
use hbmark_core::input::{self, InputError};

/// The manifest's name in the folder of a fleet.
pub const MANIFEST_FILE: &str = "fleet.json";

/// Raised when a field changes its meaning or goes away.
pub const MANIFEST_VERSION: u32 = 1;

/// The largest plan or manifest that is read.
const MAX_BYTES: u64 = 64 << 20;

/// Flags of `hbmark run` that `hbmark fleet node` sets.
const OWN_FLAGS: [&str; 6] = ["--out", "--device", "--resume", "--format", "--fresh-ceilings", "-o"];

/// Fresh processes a GPU, at the least: fewer give no spread that a median stands on.
pub const MIN_PROCESSES: u32 = 3;

/// What is run on every GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plan {
    pub name: String,
    /// Fresh processes a GPU, one after the other.
    #[serde(default = "three")]
    pub processes: u32,
    /// All GPUs of a node at the same time, which share air and power; otherwise one after the other.
    #[serde(default = "yes")]
    pub at_once: bool,
    #[serde(default = "eight")]
    pub gpus_per_node: u32,
    /// Of one node, all its processes together.
    pub time_limit_minutes: u32,
    /// Arguments of `hbmark run`.
    pub arguments: Vec<String>,
    /// The report whose suspects this plan runs again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confirms: Option<String>,
}

fn three() -> u32 {
    MIN_PROCESSES
}
fn yes() -> bool {
    true
}
fn eight() -> u32 {
    8
}

/// The plans that have a name, their arguments of `hbmark run`, processes and minutes.
const NAMED: [(&str, &str, u32, u32); 2] = [
    (
        "quick-ceiling",
        "--model SmolLM2-135M --engine native --dtype bf16 --phase decode --batch 1 --context 512 --quick",
        3,
        20,
    ),
    (
        "burn-in",
        "--model Llama-3.1-8B --engine native --dtype bf16 --phase prefill,decode --batch 1,32 --context 4096",
        5,
        120,
    ),
];

/// Why there is no plan or manifest.
#[derive(Debug, thiserror::Error)]
pub enum PlanError {
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: InputError },
    #[error("{path} is not a plan: {source}")]
    Malformed { path: PathBuf, source: Box<toml::de::Error> },
    #[error("{path} is not a manifest of a fleet: {source}")]
    MalformedManifest { path: PathBuf, source: serde_json::Error },
    #[error("{path} is a manifest of version {found}; this program reads version {MANIFEST_VERSION}")]
    Version { path: PathBuf, found: u32 },
    #[error(
        "{path} was changed: its digest is {found}, and that of its plan {wanted}; make it again with `hbmark fleet plan`"
    )]
    Digest { path: PathBuf, found: String, wanted: String },
    #[error("{argument} is set by `hbmark fleet node`: leave it out of the plan's arguments")]
    OwnFlag { argument: String },
    #[error("{what} is {found} in this plan: wanted {wanted}")]
    Number { what: &'static str, found: u32, wanted: &'static str },
}

impl Plan {
    /// The plan of this name, or that of a TOML file.
    ///
    /// # Errors
    /// When it is neither, or asks for what cannot be run.
    pub fn open(given: &str) -> Result<Self, PlanError> {
        let named = NAMED.iter().find(|(name, ..)| *name == given);
        let plan = if let Some((name, arguments, processes, minutes)) = named {
            Self {
                name: (*name).to_owned(),
                processes: *processes,
                at_once: true,
                gpus_per_node: eight(),
                time_limit_minutes: *minutes,
                arguments: arguments.split(' ').map(str::to_owned).collect(),
                confirms: None,
            }
        } else {
            let path = Path::new(given);
            let text = input::read_text(path, MAX_BYTES)
                .map_err(|source| PlanError::Read { path: path.to_owned(), source })?;
            toml::from_str(&text)
                .map_err(|source| PlanError::Malformed { path: path.to_owned(), source: Box::new(source) })?
        };
        plan.check()?;
        Ok(plan)
    }

    /// Refuses what `hbmark fleet node` could not run.
    ///
    /// # Errors
    /// With the argument or number in question.
    pub fn check(&self) -> Result<(), PlanError> {
        let own = |argument: &&String| {
            OWN_FLAGS.iter().any(|flag| {
                argument.as_str() == *flag
                    || argument.strip_prefix(flag).is_some_and(|rest| rest.starts_with('='))
            })
        };
        if let Some(argument) = self.arguments.iter().find(own) {
            return Err(PlanError::OwnFlag { argument: input::plain(argument) });
        }
        for (what, found, most, wanted) in [
            ("processes", self.processes, 1_000, "1 to 1000"),
            ("gpus_per_node", self.gpus_per_node, 128, "1 to 128"),
            ("time_limit_minutes", self.time_limit_minutes, 100_000, "1 to 100000"),
        ] {
            if found == 0 || found > most {
                return Err(PlanError::Number { what, found, wanted });
            }
        }
        Ok(())
    }

    /// By what results of this plan are recognised: of everything but its name, its time limit and the size of a node.
    ///
    /// # Panics
    /// Never: strings and numbers are JSON.
    pub fn digest(&self) -> String {
        let what = (&self.arguments, self.processes, self.at_once, &self.confirms);
        let text = serde_json::to_vec(&what).expect("strings and numbers are JSON");
        format!("{:.16x}", Sha256::digest(text))
    }
}

/// A node, and how many GPUs it should have.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExpectedNode {
    #[serde(flatten)]
    pub node: Node,
    pub gpus: u32,
}

/// Which GPUs are expected, and what they run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    pub schema_version: u32,
    pub kind: ManifestKind,
    /// Of the plan.
    pub digest: String,
    pub plan: Plan,
    pub nodes: Vec<ExpectedNode>,
}

/// Marks a manifest among other JSON files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ManifestKind {
    #[serde(rename = "fleet_manifest")]
    FleetManifest,
}

impl Manifest {
    pub fn new(plan: Plan, nodes: Vec<Node>) -> Self {
        let gpus = plan.gpus_per_node;
        Self {
            schema_version: MANIFEST_VERSION,
            kind: ManifestKind::FleetManifest,
            digest: plan.digest(),
            plan,
            nodes: nodes.into_iter().map(|node| ExpectedNode { node, gpus }).collect(),
        }
    }

    /// GPUs of all nodes.
    pub fn gpus(&self) -> usize {
        self.nodes.iter().map(|node| node.gpus as usize).sum()
    }

    /// Reads a saved manifest.
    ///
    /// # Errors
    /// When it cannot be read, is of another version, or does not fit its digest.
    pub fn read(path: &Path) -> Result<Self, PlanError> {
        let text = input::read_text(path, MAX_BYTES)
            .map_err(|source| PlanError::Read { path: path.to_owned(), source })?;
        Self::parse(&text, path)
    }

    pub(crate) fn parse(text: &str, path: &Path) -> Result<Self, PlanError> {
        let budget = text.len().saturating_mul(8).saturating_add(1 << 20);
        let found: Self = input::json::from_str(text, budget)
            .map_err(|source| PlanError::MalformedManifest { path: path.to_owned(), source })?;
        if found.schema_version != MANIFEST_VERSION {
            return Err(PlanError::Version { path: path.to_owned(), found: found.schema_version });
        }
        found.plan.check()?;
        let wanted = found.plan.digest();
        if found.digest != wanted {
            return Err(PlanError::Digest {
                path: path.to_owned(),
                found: input::plain(&found.digest),
                wanted,
            });
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn named_plans_can_be_run_and_have_enough_processes() {
        for (name, ..) in NAMED {
            let plan = Plan::open(name).unwrap();
            assert!(plan.processes >= MIN_PROCESSES, "{name}");
        }
    }

    #[test]
    fn a_plan_of_a_file_is_read_with_defaults_and_refused_with_reasons() {
        let folder = tempfile::tempdir().unwrap();
        let open = |text: &str| {
            let path = folder.path().join("plan.toml");
            std::fs::write(&path, text).unwrap();
            Plan::open(path.to_str().unwrap())
        };
        let plan = open("name = 'a'\ntime_limit_minutes = 5\narguments = ['--quick']").unwrap();
        assert_eq!((plan.processes, plan.gpus_per_node, plan.at_once), (3, 8, true));
        for (text, wanted) in [
            ("name = 'a'\ntime_limit_minutes = 5\narguments = ['--out=x']", "--out=x is set by"),
            ("name = 'a'\ntime_limit_minutes = 0\narguments = []", "time_limit_minutes is 0"),
            ("name = 'a'\ntime_limit_minutes = 5\narguments = []\nproceses = 4", "unknown field"),
        ] {
            let found = open(text).unwrap_err().to_string();
            assert!(found.contains(wanted), "{found}");
        }
        assert!(Plan::open("no-such-plan").unwrap_err().to_string().contains("cannot read no-such-plan"));
    }

    #[test]
    fn a_manifest_that_was_changed_is_refused() {
        let plan = Plan::open("quick-ceiling").unwrap();
        let manifest = Manifest::new(plan, crate::nodes::parse("n[1-3]").unwrap());
        let text = serde_json::to_string(&manifest).unwrap();
        let path = Path::new("fleet.json");
        assert_eq!(Manifest::parse(&text, path).unwrap(), manifest);
        assert_eq!(manifest.gpus(), 24);
        let changed = text.replace("--quick", "--smoke");
        assert!(Manifest::parse(&changed, path).unwrap_err().to_string().contains("was changed"));
    }
}
