//! Every operation by itself against the oracle, on inputs that are the same to the bit.
//!
//! Sixteen seeds in a row have all widths of heads (64, 80, 96, 128 and 256 among them) and all groups of 1 to 16 query heads; rows,
//! columns and vocabularies are multiples of nothing. Half of the steps mix prefill, chunks and decode beside the edges of
//! blocks, half decode batches of 1 to 129.

use std::ops::Range;

use super::{Make, Nearest, THREADS};
use crate::engine::EngineError;
use crate::engine::native::operations::{Operation, Operations};
use crate::engine::native::oracle::Oracle;
use crate::engine::native::testing::scenario::{BLOCK_SIZES, decode, ragged};
use crate::engine::native::testing::{
    Sample, Scenario, compare_operations, median_tolerance, operation_tolerance, operations_alone,
};
use crate::verify::{Check, Record};

pub const AREA: &str = "native operations";
pub const SEEDS: Range<u64> = 0..16;

/// Batches of decode steps: one, what kernels take at a time, and one beside it on either side.
const BATCHES: [usize; 8] = [1, 129, 3, 64, 17, 8, 65, 33];

/// A sample and its steps. Samples eight seeds apart have heads of one width: one decodes a batch, the other a ragged mix.
fn case(seed: u64) -> (Sample, Scenario) {
    let sample = Sample::random(seed);
    let at = |count: usize| usize::try_from(seed % count as u64).expect("below the count");
    let scripts = if (seed + seed / 8).is_multiple_of(2) {
        ragged(seed)
    } else {
        decode(BATCHES[at(BATCHES.len())], seed)
    };
    let vocab = sample.architecture.vocab_size;
    let scenario = Scenario::new(&scripts, BLOCK_SIZES[at(BLOCK_SIZES.len())], vocab, seed);
    (sample, scenario)
}

/// Seven checks for each way to make operations, which has a name.
pub fn against_the_oracle<O: Operations>(
    makers: &[(&str, &Make<'_, O>)],
    seeds: Range<u64>,
    record: &mut Record<'_>,
) {
    match compared(makers, seeds) {
        Ok(compared) => {
            for ((name, _), nearest) in makers.iter().zip(compared) {
                for (operation, nearest) in Operation::ALL.iter().zip(nearest) {
                    record(nearest.check(AREA, format!("{}, {name}", operation.name()), "the oracle's"));
                }
            }
        }
        Err(error) => record(Check::failed(AREA, "all", error.to_string())),
    }
}

/// What was found for each maker and operation. The oracle, which is slow, runs once for all makers.
fn compared<O: Operations>(
    makers: &[(&str, &Make<'_, O>)],
    seeds: Range<u64>,
) -> Result<Vec<[Nearest; Operation::ALL.len()]>, EngineError> {
    let mut all = vec![<[Nearest; Operation::ALL.len()]>::default(); makers.len()];
    for seed in seeds {
        let (sample, scenario) = case(seed);
        let reference = operations_alone(&mut Oracle::new(), &sample, &scenario)?;
        for ((_, make), nearest) in makers.iter().zip(&mut all) {
            let found = operations_alone(&mut make(THREADS)?, &sample, &scenario)?;
            for error in compare_operations(&found, &reference) {
                let nearest = &mut nearest[error.operation as usize];
                let (operation, of) = (error.operation, || sample.label());
                nearest.see(error.worst, operation_tolerance(operation, &sample), of);
                nearest.see(error.median, median_tolerance(operation, &sample), of);
            }
        }
    }
    Ok(all)
}
