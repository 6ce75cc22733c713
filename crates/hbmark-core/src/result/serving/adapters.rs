//! What low-rank adapters cost under load.

use std::str::FromStr;

use serde::{Deserialize, Serialize};

use super::latency::ServeResult;
use crate::units::Bytes;

/// The adapters of a point and their cost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct AdapterCost {
    /// How many are loaded.
    pub adapters: usize,
    pub assignment: Assignment,
    /// Share of the requests that have one.
    pub share: f64,
    pub bytes_each: Bytes,
    /// Different adapters in a step, on average.
    pub mean_in_batch: f64,
    /// The same by the requests' shares, if those of a batch were drawn independently.
    pub expected_in_batch: f64,
    /// Ledger: what the adapters in a step's batch add to what it reads.
    pub added_bytes_per_step: f64,
    pub added_share_of_weights: f64,
    /// Median TPOT over that of the row without adapters, if bytes were all that counted.
    pub predicted_tpot_ratio: Option<f64>,
    /// The same as measured.
    pub measured_tpot_ratio: Option<f64>,
}

impl AdapterCost {
    /// Compares the point with the baseline without adapters.
    pub fn against(&mut self, own: &ServeResult, without: &ServeResult) {
        let median = |r: &ServeResult| r.tpot_ns.as_ref()?.p50.map(super::latency::Quantity::value);
        self.predicted_tpot_ratio = Some(1.0 + self.added_share_of_weights);
        self.measured_tpot_ratio = median(own)
            .zip(median(without))
            .map(|(own, without)| own / without)
            .filter(|ratio| ratio.is_finite());
    }
}

/// How a request gets its adapter.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Assignment {
    /// One after the other.
    #[default]
    RoundRobin,
    /// Any, all as likely.
    Uniform,
    /// The n-th as likely as n to the minus this.
    Zipf(f64),
    /// A tenant's own.
    Tenant,
}

/// What is not an assignment.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "--lora-assignment `{given}`: wanted round-robin, uniform, tenant or zipf:S with S from 0 to 5, as in zipf:1"
)]
pub struct UnknownAssignment {
    pub given: String,
}

impl FromStr for Assignment {
    type Err = UnknownAssignment;

    fn from_str(given: &str) -> Result<Self, UnknownAssignment> {
        let wrong = || UnknownAssignment { given: given.chars().take(40).collect() };
        match given.split_once(':') {
            None if given == "round-robin" => Ok(Self::RoundRobin),
            None if given == "uniform" => Ok(Self::Uniform),
            None if given == "tenant" => Ok(Self::Tenant),
            Some(("zipf", exponent)) => {
                let exponent: f64 = exponent.parse().map_err(|_| wrong())?;
                if (0.0..=5.0).contains(&exponent) { Ok(Self::Zipf(exponent)) } else { Err(wrong()) }
            }
            _ => Err(wrong()),
        }
    }
}

impl std::fmt::Display for Assignment {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::RoundRobin => f.write_str("round-robin"),
            Self::Uniform => f.write_str("uniform"),
            Self::Zipf(exponent) => write!(f, "zipf:{exponent}"),
            Self::Tenant => f.write_str("tenant"),
        }
    }
}
