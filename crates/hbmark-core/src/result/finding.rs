//! Findings of a diagnosis, with their evidence.

use serde::{Deserialize, Serialize};

/// How much a finding matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// As it should be.
    Ok,
    /// Worth knowing when numbers are compared.
    Note,
    /// Disturbs a measurement.
    Warn,
    /// Keeps something from working.
    Problem,
}

/// One thing found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Finding {
    /// The rule's stable name: `memory_bound_decode`, `unexplained`...
    pub rule: String,
    pub severity: Severity,
    pub symptom: String,
    /// The likely regime or cause.
    pub regime: String,
    /// With numbers, one a cell.
    pub evidence: Vec<String>,
    /// What to measure next to confirm or refute it.
    pub next: String,
    /// What to do first, if it holds.
    pub response: String,
    /// The cells it is about; empty where it is about the whole run.
    pub cells: Vec<String>,
}
