//! What is compared between GPUs: ceilings and steps.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A number of each run.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Read bandwidth in bytes/s.
    Read,
    /// Copy bandwidth in bytes/s, both directions counted.
    Copy,
    /// Matrix products of a dtype in FLOP/s.
    Gemm(String),
    /// A cell's time per step in nanoseconds.
    Step(String),
}

impl Metric {
    /// A value on a scale where more is faster and effects add up.
    pub fn log_speed(&self, value: f64) -> f64 {
        if self.is_time() { -value.ln() } else { value.ln() }
    }

    /// The value of a log speed.
    pub fn value(&self, log_speed: f64) -> f64 {
        if self.is_time() { (-log_speed).exp() } else { log_speed.exp() }
    }

    /// Whether less is faster.
    pub fn is_time(&self) -> bool {
        matches!(self, Self::Step(_))
    }

    /// The unit of its raw values.
    pub fn unit(&self) -> &'static str {
        match self {
            Self::Read | Self::Copy => "bytes_per_s",
            Self::Gemm(_) => "flop_per_s",
            Self::Step(_) => "ns",
        }
    }

    /// A value with its unit.
    pub fn shown(&self, value: f64) -> String {
        match self {
            Self::Read | Self::Copy if value >= 1e12 => format!("{:.3} TB/s", value / 1e12),
            Self::Read | Self::Copy => format!("{:.1} GB/s", value / 1e9),
            Self::Gemm(_) => format!("{:.1} TFLOP/s", value / 1e12),
            Self::Step(_) if value >= 1e6 => format!("{:.3} ms", value / 1e6),
            Self::Step(_) => format!("{:.1} µs", value / 1e3),
        }
    }
}

impl fmt::Display for Metric {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Read => f.write_str("read"),
            Self::Copy => f.write_str("copy"),
            Self::Gemm(dtype) => write!(f, "gemm {dtype}"),
            Self::Step(cell) => f.write_str(cell),
        }
    }
}
