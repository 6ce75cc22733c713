//! The list of checks of a GPU, run on the emulated device, right and wrong.

use super::*;
use crate::engine::Timeline;
use crate::engine::native::cuda::device::{Gemm, GemmOperands, KernelLaunch};
use crate::engine::native::cuda::emulator::{Emulated, EmulatedGraph, EmulatedMemory};
use crate::run::verify::native::QUICK;
use crate::run::verify::native::graphs;

/// Splits of 16 positions and little shared memory: the paths of long contexts and wide layers, on tiny models.
const SMALL: Tuning = Tuning {
    input_bytes: 4 << 10,
    min_split: 16,
    min_tiled_rows: 5,
    min_library_rows: usize::MAX,
    min_widened_rows: usize::MAX,
    min_prefill_rows: 2,
    max_one_shot_bytes: 2 << 10,
    rank_timeout: std::time::Duration::from_secs(30),
};

#[test]
fn the_emulated_device_passes_the_checks_of_a_gpu() {
    // Tests of the kernels go over more of them, and over every format.
    let kind = Kind { quantised: &[Dtype::Int8, Dtype::Int4, Dtype::Q4_0], ..SMALL_KIND };
    let extent = Extent { operations: 12..14, cut: 502..503, ..QUICK };
    let mut checks = Vec::new();
    on_a_device(&|| Ok(Emulated::new(7)), SMALL, (&kind, &extent), 5_003, &mut |check| checks.push(check));
    let wrong: Vec<&Check> = checks.iter().filter(|check| !check.passed).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    let count = |area| checks.iter().filter(|check| check.area == area).count();
    let areas = ["device memory", operations::AREA, steps::AREA, models::OUTPUTS, models::BYTES, "block"];
    // No sums of ranks; and latents are expanded by a test of their own, which these samples are too few for.
    assert_eq!(areas.map(count), [8, 3 * (Operation::ALL.len() - 2), 31, 47, 11, 1]);
}

/// The emulated device with a fault.
#[derive(Debug)]
struct Faulty {
    device: Emulated,
    /// A replay leaves the last kernel out.
    forgets: bool,
    /// A bit of what is downloaded is flipped.
    flips: bool,
}

impl Device for Faulty {
    type Memory = EmulatedMemory;
    type Graph = EmulatedGraph;

    fn name(&self) -> &'static str {
        "faulty"
    }
    fn multiprocessors(&self) -> u32 {
        self.device.multiprocessors
    }
    fn shared_bytes(&self) -> usize {
        self.device.shared_bytes
    }
    fn timeline(&self) -> Box<dyn Timeline + Send> {
        self.device.timeline()
    }
    fn allocate(&mut self, bytes: usize) -> Result<EmulatedMemory, EngineError> {
        self.device.allocate(bytes)
    }
    fn address(memory: &EmulatedMemory) -> u64 {
        Emulated::address(memory)
    }
    fn bytes(memory: &EmulatedMemory) -> usize {
        Emulated::bytes(memory)
    }
    fn upload(&mut self, to: &EmulatedMemory, offset: usize, source: &[u8]) -> Result<(), EngineError> {
        self.device.upload(to, offset, source)
    }
    fn download(
        &mut self,
        from: &EmulatedMemory,
        offset: usize,
        target: &mut [u8],
    ) -> Result<(), EngineError> {
        self.device.download(from, offset, target)?;
        if self.flips && target.len() > 1 {
            target[1] ^= 4;
        }
        Ok(())
    }
    fn launch(&mut self, launch: &KernelLaunch) -> Result<(), EngineError> {
        self.device.launch(launch)
    }
    fn multiply(&mut self, product: &Gemm, operands: &GemmOperands) -> Result<(), EngineError> {
        self.device.multiply(product, operands)
    }
    fn begin_capture(&mut self) -> Result<(), EngineError> {
        self.device.begin_capture()
    }
    fn end_capture(&mut self) -> Result<EmulatedGraph, EngineError> {
        let mut graph = self.device.end_capture()?;
        // The next token of the last step stays what it was.
        if self.forgets {
            graph.nodes.truncate(graph.nodes.len() - 2);
        }
        Ok(graph)
    }
    fn replay(&mut self, graph: &EmulatedGraph) -> Result<(), EngineError> {
        self.device.replay(graph)
    }
    fn synchronise(&mut self) -> Result<(), EngineError> {
        self.device.synchronise()
    }
}

fn faulty(forgets: bool, flips: bool) -> Faulty {
    Faulty { device: Emulated::new(3), forgets, flips }
}

#[test]
fn a_replay_that_leaves_kernels_out_is_not_eager() {
    let check = |forgets| {
        let make = move |_: usize| Ok(CudaOperations::with_tuning(faulty(forgets, false), SMALL));
        graphs::as_eager(&KIND, &make, 502..504)
    };
    let right = check(false);
    assert!(right.passed, "{}", right.detail);
    assert!(!check(true).passed);
}

#[test]
fn memory_that_loses_a_bit_fails_by_name() {
    let mut failed = Vec::new();
    known(&|| Ok(faulty(false, true)), 4_099, &mut |check| {
        if !check.passed {
            failed.push(check.name);
        }
    });
    assert!(failed.contains(&"the host's bytes come back".to_owned()), "{failed:?}");
    assert!(failed.contains(&"the sum of read_u1".to_owned()), "{failed:?}");
}
