//! The machine a result was made on, as plain data.
//!
//! Enters: /proc, /sys, NVML. Leaves: [`Environment`], stored in every report. A fact that is not known is null, never 0.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::units::Bytes;

/// Everything about the machine and the build that a stranger needs to judge or repeat a result.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Environment {
    pub hostname: Option<String>,
    pub os: Option<String>,
    pub kernel: Option<String>,
    pub container: Option<String>,
    pub cpu: CpuEnvironment,
    pub gpu: Option<GpuEnvironment>,
    pub build: BuildEnvironment,
}

/// The host processor.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct CpuEnvironment {
    pub model: Option<String>,
    pub logical_cores: usize,
    /// Cores this process may run on (affinity and cgroup quota).
    pub usable_cores: usize,
    /// CPU quota of the cgroup in cores, when there is one.
    pub quota_cores: Option<f64>,
    pub features: Vec<String>,
    pub governor: Option<String>,
    pub frequency_mhz: Option<f64>,
    pub last_cache_bytes: Option<Bytes>,
    pub memory_bytes: Option<Bytes>,
    pub memory_available_bytes: Option<Bytes>,
    pub memory_limit_bytes: Option<Bytes>,
    pub transparent_huge_pages: Option<String>,
    pub numa_nodes: Option<usize>,
    pub load_1m: Option<f64>,
    pub hypervisor: Option<String>,
}

/// The GPU, as NVML tells it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct GpuEnvironment {
    pub index: u32,
    pub name: Option<String>,
    pub uuid: Option<String>,
    pub driver: Option<String>,
    pub cuda_driver: Option<String>,
    pub compute_capability: Option<String>,
    pub memory_bytes: Option<Bytes>,
    pub memory_used_bytes: Option<Bytes>,
    pub memory_bus_width_bits: Option<u32>,
    pub max_memory_clock_mhz: Option<u32>,
    pub max_sm_clock_mhz: Option<u32>,
    pub sm_clock_mhz: Option<u32>,
    pub memory_clock_mhz: Option<u32>,
    pub power_limit_watts: Option<f64>,
    pub temperature_celsius: Option<f64>,
    pub throttle_reasons: Vec<String>,
    pub ecc: Option<bool>,
    pub mig: Option<bool>,
    pub persistence: Option<bool>,
    pub mps: Option<bool>,
    /// Other processes with a context on this GPU.
    pub other_processes: Option<usize>,
}

/// How the program was built.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct BuildEnvironment {
    pub version: String,
    pub git_revision: Option<String>,
    pub profile: String,
    pub cuda: bool,
    pub candle: String,
    pub rustc: Option<String>,
}
