//! Checks of the native engine: operations, steps, recorded steps, whole models, and the bytes they move.
//!
//! Enters: a way to make operations. Leaves: checks in six areas. Operations and steps of random small models are compared with the oracle
//! ([`operations`], [`steps`]) and, where a device records steps, with unrecorded ones ([`graphs`]); small models of every family with the
//! stock engine and the byte ledger ([`models`]). One list of checks serves every device: `cargo test` runs that of a GPU on the emulated one, over
//! fewer seeds ([`Extent`]). Left for a GPU are its compiler, its libraries, its rounding and all times.

#[cfg(any(test, feature = "cuda"))]
mod gpu;
#[cfg(any(test, feature = "cuda"))]
mod graphs;
#[cfg(any(test, feature = "cuda"))]
mod groups;
mod models;
mod operations;
mod steps;

use std::ops::Range;

use super::{Check, Record};
use crate::engine::EngineError;
use crate::engine::native::cpu::{CpuOperations, InstructionSet};
use crate::engine::native::operations::Operation;
use crate::engine::native::testing::scenario::{self, Script};
use crate::engine::native::testing::{Sample, median_tolerance, operation_tolerance, step_tolerance};
use hbmark_core::model::Dtype;

#[cfg(feature = "cuda")]
pub use gpu::on_a_gpu;

/// Threads where nothing depends on their number: enough to share work.
const THREADS: usize = 2;

/// Makes operations on so many threads.
type Make<'a, O> = dyn Fn(usize) -> Result<O, EngineError> + 'a;

/// Makes the sample of a seed, in a dtype or in the seed's own.
type MakeSample = fn(Option<Dtype>, u64) -> Sample;

/// What a kind of device runs.
#[derive(Debug, Clone, Copy)]
struct Kind {
    /// Dtypes of weights that are compared with stock in f32.
    plain: &'static [Dtype],
    /// Dtypes that are compared with their own dequantised weights, as candle lacks them.
    quantised: &'static [Dtype],
    /// The same of blocks of 256, for which models are widened.
    in_blocks: &'static [Dtype],
    /// The sample that is made of a seed, in a dtype or in the seed's own; `None` where the device has no kernels for it.
    draw: fn(MakeSample, Option<Dtype>, u64) -> Option<Sample>,
    /// The dtype of mixtures where a step is cut in two ways: a cut may change how this device rounds, and rounding whom a router chooses. `None`
    /// is each seed's own.
    mixtures_to_cut: Option<Dtype>,
}

/// Everything is drawn.
const CPU: Kind = Kind {
    plain: &[Dtype::F32, Dtype::Bf16, Dtype::F16],
    quantised: &[
        Dtype::Int8,
        Dtype::Fp8,
        Dtype::Mxfp8,
        Dtype::Q8_0,
        Dtype::Q4_0,
        Dtype::Mxfp4,
        Dtype::Nvfp4,
        Dtype::Int4,
    ],
    in_blocks: &[Dtype::Q4K, Dtype::Q5K, Dtype::Q6K],
    draw: |make, dtype, seed| Some(make(dtype, seed)),
    mixtures_to_cut: None,
};

impl Kind {
    fn dtypes(&self) -> impl Iterator<Item = Dtype> {
        self.plain.iter().chain(self.quantised).chain(self.in_blocks).copied()
    }

    /// The dense sample of a seed.
    fn dense(&self, dtype: Option<Dtype>, seed: u64) -> Option<Sample> {
        (self.draw)(Sample::dense, dtype, seed)
    }

    /// The samples of a seed: dense, with the layers of other families for every second one, and with experts.
    fn samples(&self, dtype: Option<Dtype>, seed: u64) -> impl Iterator<Item = Sample> {
        self.samples_and_mixture(dtype, dtype, seed)
    }

    /// Those that are cut otherwise.
    fn samples_to_cut(&self, seed: u64) -> impl Iterator<Item = Sample> {
        self.samples_and_mixture(None, self.mixtures_to_cut, seed)
    }

    fn samples_and_mixture(
        &self,
        dtype: Option<Dtype>,
        of_mixture: Option<Dtype>,
        seed: u64,
    ) -> impl Iterator<Item = Sample> {
        let varied = seed.is_multiple_of(2).then(|| (self.draw)(Sample::varied, dtype, seed)).flatten();
        let mixture = (self.draw)(Sample::mixture, of_mixture, seed);
        self.dense(dtype, seed).into_iter().chain(varied).chain(mixture)
    }
}

/// Tolerances between two ways to compute.
#[derive(Debug, Clone, Copy)]
struct Bounds {
    operation: fn(Operation, &Sample) -> f64,
    median: fn(Operation, &Sample) -> f64,
    step: fn(&Sample) -> f64,
    /// Between the same tokens split otherwise.
    cut: fn(&Sample) -> f64,
}

/// Sums in f32 whose order may differ; of one row it depends on the row's position alone, but for latent attention, whose form depends on the step.
const PLAIN: Bounds = Bounds {
    operation: operation_tolerance,
    median: median_tolerance,
    step: step_tolerance,
    cut: |sample| if sample.architecture.latent.is_some() { step_tolerance(sample) } else { 0.0 },
};

/// A named way to make operations.
struct Side<'a, O> {
    name: &'a str,
    make: &'a Make<'a, O>,
    bounds: Bounds,
}

// Derived ones would want operations that can be cloned.
impl<O> Clone for Side<'_, O> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<O> Copy for Side<'_, O> {}

/// How much is compared.
#[derive(Debug, Clone)]
struct Extent {
    /// Seeds of operations alone, and the batches of decode steps among them.
    operations: Range<u64>,
    alone: &'static [usize],
    /// The ragged steps of a seed.
    ragged: fn(u64) -> Vec<Script>,
    /// Seeds of the steps of each dtype.
    per_dtype: Range<u64>,
    /// Batches of decode steps, beside what kernels take at a time.
    batches: &'static [usize],
    /// Seeds of long contexts.
    long: Range<u64>,
    /// Seeds of steps that are cut otherwise.
    cut: Range<u64>,
    /// Tokens that three sequences bring to three steps.
    prompts: [[usize; 3]; 3],
    /// Greedy steps that must agree in f32.
    greedy: usize,
    /// Depths of the contexts whose bytes are counted.
    depths: &'static [usize],
}

/// Everything: seconds on a device.
const WHOLE: Extent = Extent {
    operations: 0..16,
    // One, what kernels take at a time, and one beside it on either side.
    alone: &[1, 129, 3, 64, 17, 8, 65, 33],
    ragged: scenario::ragged,
    per_dtype: 300..303,
    batches: &[1, 2, 3, 5, 8, 17, 33, 64, 129],
    long: 400..404,
    cut: 500..507,
    prompts: [[113, 0, 1], [15, 1, 1], [0, 17, 31]],
    greedy: 128,
    // Beside the edges of blocks, and deeper.
    depths: &[63, 64, 65, 500],
};

/// Every check, over as little as shows that it holds.
const QUICK: Extent = Extent {
    operations: 9..14,
    alone: &[1, 6, 3, 9],
    ragged: few,
    per_dtype: 300..301,
    batches: &[1, 9],
    long: 400..401,
    cut: 502..504,
    prompts: [[17, 0, 1], [5, 1, 1], [0, 9, 2]],
    greedy: 4,
    depths: &[17],
};

/// Decode, a prompt long enough for the tensor cores, and one on top of a cache.
fn few(_seed: u64) -> Vec<Script> {
    let script = |cached, brings: [usize; 2]| Script { cached, brings: brings.to_vec() };
    vec![script(17, [1, 1]), script(0, [9, 1]), script(5, [0, 3])]
}

/// How much is compared: fewer samples of everything in a shortened verification.
fn extent(quick: bool) -> &'static Extent {
    if quick { &QUICK } else { &WHOLE }
}

/// All checks with the kernels of this processor.
pub fn on_the_cpu(quick: bool, record: &mut Record<'_>) {
    on_the_cpu_over(extent(quick), record);
}

fn on_the_cpu_over(extent: &Extent, record: &mut Record<'_>) {
    let sets = InstructionSet::available();
    let makers: Vec<_> =
        sets.iter().map(|&set| (set.name(), move |threads| CpuOperations::with_set(threads, set))).collect();
    let sides: Vec<Side<'_, CpuOperations>> =
        makers.iter().map(|(name, make)| Side { name, make, bounds: PLAIN }).collect();
    let best = Side { name: "cpu", make: &CpuOperations::new, bounds: PLAIN };
    operations::against_the_oracle(&CPU, &sides, extent, record);
    steps::against_the_oracle(&CPU, best, extent, record);
    steps::however_they_are_cut(&CPU, best, extent, record);
    record(steps::threads(&CPU, best, extent));
    models::against_stock(&CPU, best.make, extent.greedy, record);
    let counted = [&[Dtype::F32, Dtype::Bf16], CPU.quantised].concat();
    models::mixtures(best.make, extent.greedy, &counted, record);
    models::bytes(&CPU, best.make, extent.depths, record);
}

/// Of all comparisons of a check, the one nearest to its bound or furthest beyond it.
#[derive(Debug, Clone, Default)]
struct Nearest {
    compared: usize,
    /// Of the bound; above one it is broken.
    share: f64,
    found: f64,
    bound: f64,
    of: String,
}

impl Nearest {
    /// Compares one more; `of` says what it was.
    fn see(&mut self, found: f64, bound: f64, of: impl FnOnce() -> String) {
        self.compared += 1;
        let share = match (bound > 0.0, found > 0.0) {
            (true, _) => found / bound,
            (false, true) => f64::INFINITY,
            (false, false) => 0.0,
        };
        if self.compared == 1 || share > self.share {
            (self.share, self.found, self.bound, self.of) = (share, found, bound, of());
        }
    }

    fn check(self, area: &'static str, name: impl Into<String>, wanted: &str) -> Check {
        let Self { compared, share, found, bound, of } = self;
        let passed = compared > 0 && share <= 1.0;
        let at = if passed { String::new() } else { format!(" ({of})") };
        let detail = format!(
            "wanted {wanted}, {compared} compared; nearest to its bound: found {} off, may differ by {}{at}",
            scientific(found, 1),
            scientific(bound, 0)
        );
        Check::new(area, name, passed, detail)
    }
}

/// A relative error with so many decimals; nothing is plainly 0.
fn scientific(error: f64, decimals: usize) -> String {
    if error == 0.0 { "0".to_owned() } else { format!("{error:.decimals$e}") }
}

/// A check from what was compared, or from why it could not be.
fn checked(
    area: &'static str,
    name: impl Into<String>,
    wanted: &str,
    compared: Result<Nearest, EngineError>,
) -> Check {
    match compared {
        Ok(nearest) => nearest.check(area, name, wanted),
        Err(error) => Check::failed(area, name, error.to_string()),
    }
}

#[cfg(test)]
mod tests;
