//! Fleets made up from a seed, with planted faults: for tests, and for the table of the verdict's power and false names.
//!
//! Every GPU has a speed of its own (a natural spread of 0.5 %), every process another 0.3 % on top where nothing else is asked for, every node
//! 0.1 %.

use std::io;
use std::path::Path;

use hbmark_core::result::{Board, Environment, FleetTask, GpuEnvironment, Placement, Spread, saved};
use hbmark_report::samples;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, Normal, StudentT};

use crate::folder::Run;
use crate::metric::Metric;

/// GPUs of a node.
pub const GPUS_PER_NODE: usize = 8;
/// Nodes of a rack.
pub const NODES_PER_RACK: usize = 4;

/// A planted fault.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fault {
    /// One GPU reads this share slower.
    SlowGpu(f64),
    /// One GPU is held down in some of its processes.
    Throttling,
    /// One GPU leaves no result.
    Dead,
    /// All GPUs of one node are this share slower.
    SlowNode(f64),
    /// All GPUs of one rack are this share slower.
    SlowRack(f64),
}

/// How the natural spread of GPUs and that of processes is distributed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tails {
    Normal,
    /// GPUs by Student's t with four degrees of freedom: one in two hundred is beyond 4.6 times the scale.
    Heavy,
    /// Processes by the same.
    HeavyProcesses,
}

/// A fleet that is made up.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Simulated {
    pub gpus: usize,
    pub processes: usize,
    pub seed: u64,
    pub tails: Tails,
    /// Standard deviation over the processes of one GPU; of heavy tails the scale.
    pub process_spread: f64,
    pub fault: Option<Fault>,
    /// Of this plan.
    pub again: bool,
}

impl Simulated {
    pub fn new(gpus: usize, seed: u64, fault: Option<Fault>) -> Self {
        Self { gpus, processes: 3, seed, tails: Tails::Normal, process_spread: 0.003, fault, again: false }
    }

    /// The GPU, node or rack that has the fault.
    pub fn victim(&self) -> usize {
        ChaCha8Rng::seed_from_u64(self.seed ^ 0x5eed).random_range(0..self.gpus)
    }

    /// Its runs. The same seed makes the same GPUs; `again` measures them once more.
    pub fn runs(&self) -> Vec<Run> {
        let mut hardware = ChaCha8Rng::seed_from_u64(self.seed);
        let mut noise = ChaCha8Rng::seed_from_u64(self.seed.wrapping_mul(31) + 1 + u64::from(self.again));
        let normal = |sd| Normal::new(0.0, sd).expect("a spread above zero");
        let (gpu_spread, node_spread, process_spread) =
            (normal(0.005), normal(0.001), normal(self.process_spread));
        let heavy = StudentT::new(4.0).expect("degrees above zero");
        let victim = self.victim();
        let mut runs = Vec::with_capacity(self.gpus * self.processes);
        let mut node_effect = 0.0;
        for gpu in 0..self.gpus {
            let node = gpu / GPUS_PER_NODE;
            if gpu % GPUS_PER_NODE == 0 {
                node_effect = node_spread.sample(&mut hardware);
            }
            let own = match self.tails {
                Tails::Normal | Tails::HeavyProcesses => gpu_spread.sample(&mut hardware),
                Tails::Heavy => 0.005 * heavy.sample(&mut hardware),
            };
            let fault = self.fault.map_or(Some(0.0), |fault| fault.effect(gpu, victim));
            for process in 0..self.processes {
                let noise_of = match self.tails {
                    Tails::Normal | Tails::Heavy => process_spread.sample(&mut noise),
                    Tails::HeavyProcesses => self.process_spread * heavy.sample(&mut noise),
                };
                let held: f64 = noise.random_range(0.0..1.0);
                let Some(fault) = fault else { continue };
                let throttled = self.fault == Some(Fault::Throttling) && gpu == victim && held < 0.7;
                let log = own + node_effect + noise_of + fault + if throttled { (0.7_f64).ln() } else { 0.0 };
                runs.push(run(gpu, node, process, 4.3e12 * log.exp()));
            }
        }
        runs
    }

    /// Writes its first results below a folder, as the processes of a plan with this digest would; their bytes.
    ///
    /// # Errors
    /// When a file cannot be written.
    pub fn write(&self, folder: &Path, files: usize, digest: &str) -> io::Result<usize> {
        let mut report = samples::measured();
        let mut bytes = 0;
        for (index, run) in self.runs().into_iter().take(files).enumerate() {
            let at =
                folder.join(&run.node).join(&run.gpu).join(format!("run-{}", index % self.processes + 1));
            report.started_at = Some(run.started_at);
            report.environment = Environment {
                gpu: Some(GpuEnvironment {
                    uuid: Some(run.gpu),
                    name: Some(run.device),
                    board: Some(Board { module_id: run.slot, ..Board::default() }),
                    ..GpuEnvironment::default()
                }),
                placement: Some(Placement {
                    node: Some(run.node),
                    fleet: Some(FleetTask { plan: digest.to_owned(), ..FleetTask::default() }),
                    ..Placement::default()
                }),
                ..Environment::default()
            };
            let read = run.values[0].1;
            if let Some(ceilings) = &mut report.ceilings {
                ceilings.read_bytes_per_s = Spread { median: read, low: read * 0.999, high: read * 1.001 };
            }
            std::fs::create_dir_all(&at)?;
            let text = saved::write(&report)?;
            bytes += text.len();
            std::fs::write(at.join("result.json"), text)?;
        }
        Ok(bytes)
    }
}

impl Fault {
    /// On the log scale; `None` where there is no result.
    fn effect(self, gpu: usize, victim: usize) -> Option<f64> {
        let same = |size: usize| gpu / size == victim / size;
        match self {
            Self::SlowGpu(share) if gpu == victim => Some((1.0 - share).ln()),
            Self::SlowNode(share) if same(GPUS_PER_NODE) => Some((1.0 - share).ln()),
            Self::SlowRack(share) if same(GPUS_PER_NODE * NODES_PER_RACK) => Some((1.0 - share).ln()),
            Self::Dead if gpu == victim => None,
            _ => Some(0.0),
        }
    }
}

/// The name of a simulated node.
pub fn node_name(node: usize) -> String {
    format!("node{node:04}")
}

/// The UUID of a simulated GPU.
pub fn gpu_name(gpu: usize) -> String {
    format!("GPU-{gpu:08}")
}

/// The rack of a simulated node.
pub fn rack_name(node: usize) -> String {
    format!("rack{:03}", node / NODES_PER_RACK)
}

fn run(gpu: usize, node: usize, process: usize, read: f64) -> Run {
    Run {
        started_at: format!("2026-01-01T00:{process:02}:00Z"),
        gpu: gpu_name(gpu),
        node: node_name(node),
        rack: Some(rack_name(node)),
        slot: u32::try_from(gpu % GPUS_PER_NODE).ok(),
        device: "NVIDIA H200".into(),
        at_once: Some(8),
        values: vec![(Metric::Read, read)],
        datasheet_bytes_per_s: Some(4.8e12),
        ..Run::default()
    }
}
