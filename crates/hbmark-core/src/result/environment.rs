//! The machine and the build that a result comes from.

use serde::{Deserialize, Serialize};

use crate::units::Bytes;

/// Everything about the machine and the build that is needed to judge or repeat a result.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Environment {
    pub hostname: Option<String>,
    pub os: Option<String>,
    pub kernel: Option<String>,
    pub container: Option<String>,
    pub cpu: CpuEnvironment,
    pub gpu: Option<GpuEnvironment>,
    pub build: BuildEnvironment,
    /// Where a scheduler put this process, as far as its environment says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub placement: Option<Placement>,
}

/// Where a scheduler put a process: Slurm's variables, the names that a Kubernetes pod is given, and the task of a fleet.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Placement {
    /// `slurm` or `kubernetes`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduler: Option<String>,
    /// The scheduler's name of the node; a hostname may be a pod's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub job_id: Option<String>,
    /// The task's number in its job (SLURM_PROCID, a Job's completion index).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub task: Option<u32>,
    /// The task's number on its node (SLURM_LOCALID).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub local_task: Option<u32>,
    /// Switches or blocks down to the node, from the top: SLURM_TOPOLOGY_ADDR.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub topology: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub partition: Option<String>,
    /// How often the scheduler started this job again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restarts: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The task of `hbmark fleet node` that this run is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fleet: Option<FleetTask>,
}

/// One run of a fleet's plan on one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct FleetTask {
    /// sha256 of the plan, shortened.
    pub plan: String,
    /// The GPU's UUID, or the name of an emulated device.
    pub device: String,
    /// The place on the board that the launcher knows: NVML's number, or that of the emulated device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot: Option<u32>,
    /// Which of the fresh processes of this GPU, from 1.
    pub process: u32,
    /// GPUs of the node that were measured at the same time, this one among them.
    pub at_once: u32,
    /// No GPU was measured: the CPU engine stands for one, to try a launcher.
    pub emulated: bool,
}

/// The host processor.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct CpuEnvironment {
    pub model: Option<String>,
    #[serde(with = "crate::null_as_default")]
    #[cfg_attr(test, schemars(with = "Option<usize>"))]
    pub logical_cores: usize,
    /// Cores this process may run on (affinity and cgroup quota).
    #[serde(with = "crate::null_as_default")]
    #[cfg_attr(test, schemars(with = "Option<usize>"))]
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

/// The GPU, as NVML reports it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct GpuEnvironment {
    /// NVML's number.
    pub index: u32,
    /// The evidence that this is the GPU that CUDA used.
    pub matched_by: Option<GpuMatch>,
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
    /// Which piece of hardware it is, and what that has suffered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub board: Option<Board>,
}

/// How the name of a device begins that is not there: its kernels run on the host, for tests.
pub const SIMULATED_DEVICE: &str = "SIMULATED DEVICE";

impl GpuEnvironment {
    /// Whether no time of this device means anything.
    pub fn is_simulated(&self) -> bool {
        self.name.as_deref().is_some_and(|name| name.starts_with(SIMULATED_DEVICE))
    }
}

/// The board of a GPU: what identifies it beside the UUID, and its record of faults.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Board {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part_number: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vbios: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pci_bus_id: Option<String>,
    /// The slot on the baseboard, as the board counts them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub module_id: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remapped_rows: Option<RemappedRows>,
    /// NVIDIA's XID errors of this GPU in the kernel's log since the machine was started, where that can be read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub xids: Option<Vec<u32>>,
    /// The NVLink domain.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fabric: Option<Fabric>,
}

/// Rows of memory that were replaced by spare ones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct RemappedRows {
    pub correctable: u32,
    pub uncorrectable: u32,
    /// Takes effect at the next reset.
    pub pending: bool,
    /// A row could not be replaced.
    pub failed: bool,
}

/// A GPU's place in an NVLink fabric.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Fabric {
    /// The cluster's UUID in hexadecimal digits.
    pub cluster: String,
    pub clique: u32,
}

/// How the program was built.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct BuildEnvironment {
    pub version: String,
    pub git_revision: Option<String>,
    pub profile: String,
    pub cuda: bool,
    pub candle: String,
    pub rustc: Option<String>,
}

/// Limits of disturbance above which a block is rejected.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Cores busy with other processes.
    pub foreign_cores: f64,
    /// Cores that the hypervisor gave to others, or that a CPU quota held back, while they were wanted here.
    pub steal_cores: f64,
}

impl Default for Limits {
    fn default() -> Self {
        // Two ticks above the noise of the shortest window for load; one for steal, which is not ours to subtract.
        Self { foreign_cores: 0.2, steal_cores: 0.1 }
    }
}

/// Cores that a block on a GPU needs: the thread that launches, and the driver's.
const GPU_WORKER_CORES: usize = 2;

/// The share of all cores that the hypervisor may take: no more than what a result is certain to.
const STEAL_SHARE: f64 = 0.01;

impl Limits {
    /// Those of blocks on so many cores.
    pub fn of_cores(cores: usize) -> Self {
        let limits = Self::default();
        Self { steal_cores: limits.steal_cores.max(STEAL_SHARE * cores as f64), ..limits }
    }

    /// Those of blocks on a GPU of a machine of so many cores. The threads of others are not in the way while there are cores beside the
    /// worker's: they may keep half of those busy.
    pub fn beside_gpu(cores: usize) -> Self {
        let limits = Self::of_cores(cores);
        let others = cores.saturating_sub(GPU_WORKER_CORES) as f64 / 2.0;
        Self { foreign_cores: limits.foreign_cores.max(others), ..limits }
    }

    /// Those of blocks that were measured on a machine; a run on some of its cores bore no more than these.
    pub fn of(environment: &Environment) -> Self {
        let cores = environment.cpu.logical_cores;
        if environment.gpu.is_some() { Self::beside_gpu(cores) } else { Self::of_cores(cores) }
    }
}

/// The evidence that NVML's GPU is the one that CUDA uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum GpuMatch {
    Uuid,
    PciBusId,
    /// The number alone: in a machine with unequal GPUs it may be another one.
    Number,
}

/// What [`Environment::product`] says where nothing tells it.
pub const UNKNOWN_PRODUCT: &str = "unknown product";

impl Environment {
    /// The product a run was on: the GPU's name where it was on one that tells it, the CPU's model otherwise.
    pub fn product(&self, on_gpu: bool) -> &str {
        let gpu = self.gpu.as_ref().filter(|_| on_gpu).and_then(|gpu| gpu.name.as_deref());
        gpu.or(self.cpu.model.as_deref()).unwrap_or(UNKNOWN_PRODUCT)
    }

    /// The machine's name: the scheduler's, or the hostname; that of a container is its own, and another one when it is started again.
    fn node(&self) -> Option<&str> {
        let placed = self.placement.as_ref().and_then(|placement| placement.node.as_deref());
        placed.or(self.hostname.as_deref().filter(|_| self.container.is_none()))
    }

    /// The first fact in which two machines differ, as far as times depend on it: what, here, and there.
    pub fn difference(&self, other: &Self) -> Option<(&'static str, String, String)> {
        let facts = |e: &Self| {
            let gpu = e.gpu.as_ref();
            let text = |value: Option<String>| value.unwrap_or_else(|| "unknown".into());
            [
                ("the node", text(e.node().map(str::to_owned))),
                ("the CPU", text(e.cpu.model.clone())),
                ("the number of cores", e.cpu.logical_cores.to_string()),
                ("the number of usable cores", e.cpu.usable_cores.to_string()),
                ("the memory", text(e.cpu.memory_bytes.map(|bytes| bytes.0.to_string()))),
                ("the GPU", text(gpu.and_then(|gpu| gpu.name.clone()))),
                ("the GPU's UUID", text(gpu.and_then(|gpu| gpu.uuid.clone()))),
                ("the GPU's driver", text(gpu.and_then(|gpu| gpu.driver.clone()))),
            ]
        };
        let pairs = facts(self).into_iter().zip(facts(other));
        pairs.map(|((what, here), (_, there))| (what, here, there)).find(|(_, here, there)| here != there)
    }

    /// Memory of the device a run used: the GPU's where there is one, the host's within its container otherwise.
    pub fn device_memory(&self) -> Option<Bytes> {
        match &self.gpu {
            Some(gpu) => gpu.memory_bytes,
            None => match (self.cpu.memory_bytes, self.cpu.memory_limit_bytes) {
                (Some(all), Some(limit)) => Some(all.min(limit)),
                (all, limit) => all.or(limit),
            },
        }
    }
}
