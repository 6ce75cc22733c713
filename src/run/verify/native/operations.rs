//! Every operation by itself against the oracle, on inputs that are the same to the bit.
//!
//! Sixteen seeds in a row have all widths of heads (64, 80, 96, 128 and 256 among them) and all groups of 1 to 16 query heads; rows,
//! columns and vocabularies have odd sizes. Half of the steps mix prefill, chunks and decode beside the edges of
//! blocks, half decode batches of 1 to 129. Two seeds more of each format in blocks of 256 are wider.

use super::{Extent, Kind, Nearest, Side, THREADS};
use crate::engine::EngineError;
use crate::engine::native::operations::{Operation, Operations};
use crate::engine::native::oracle::Oracle;
use crate::engine::native::testing::scenario::{BLOCK_SIZES, decode};
use crate::engine::native::testing::{Sample, Scenario, compare_operations, operations_alone};
use crate::run::verify::{Check, Record};

pub const AREA: &str = "native operations";

/// A sample and its steps. Samples eight seeds apart have heads of one width: one decodes a batch, the other a ragged mix.
fn case(extent: &Extent, sample: Sample) -> (Sample, Scenario) {
    let seed = sample.seed;
    let at = |count: usize| usize::try_from(seed % count as u64).expect("below the count");
    let scripts = if (seed + seed / 8).is_multiple_of(2) {
        (extent.ragged)(seed)
    } else {
        decode(extent.alone[at(extent.alone.len())], seed)
    };
    let vocab = sample.architecture.vocab_size;
    let scenario = Scenario::new(&scripts, BLOCK_SIZES[at(BLOCK_SIZES.len())], vocab, seed);
    (sample, scenario)
}

/// A check of each operation for each way to make operations.
pub fn against_the_oracle<O: Operations>(
    kind: &Kind,
    sides: &[Side<'_, O>],
    extent: &Extent,
    record: &mut Record<'_>,
) {
    match compared(kind, sides, extent) {
        Ok(compared) => {
            for (side, nearest) in sides.iter().zip(compared) {
                let alone = |(operation, nearest): &(&Operation, Nearest)| match **operation {
                    Operation::AllReduce => false,
                    // A device need not have it for the widths and formats of a few samples.
                    Operation::LatentExpand => nearest.compared > 0,
                    _ => true,
                };
                for (operation, nearest) in Operation::ALL.iter().zip(nearest).filter(alone) {
                    record(nearest.check(
                        AREA,
                        format!("{}, {}", operation.name(), side.name),
                        "the oracle's",
                    ));
                }
            }
        }
        Err(error) => record(Check::failed(AREA, "all", error.to_string())),
    }
}

/// What was found for each side and operation. The oracle, which is slow, runs once for all sides.
fn compared<O: Operations>(
    kind: &Kind,
    sides: &[Side<'_, O>],
    extent: &Extent,
) -> Result<Vec<[Nearest; Operation::ALL.len()]>, EngineError> {
    let mut all = vec![<[Nearest; Operation::ALL.len()]>::default(); sides.len()];
    let drawn = extent.operations.clone().map(|seed| (None, seed));
    // One seed of each brings a ragged mix, and one a batch.
    let in_blocks =
        kind.in_blocks.iter().flat_map(|dtype| extent.operations.clone().take(2).map(|s| (Some(*dtype), s)));
    let samples = drawn.chain(in_blocks).flat_map(|(dtype, seed)| kind.samples(dtype, seed));
    for (sample, scenario) in samples.map(|sample| case(extent, sample)) {
        let reference = operations_alone(&mut Oracle::new(), &sample, &scenario)?;
        for (side, nearest) in sides.iter().zip(&mut all) {
            let found = operations_alone(&mut (side.make)(THREADS)?, &sample, &scenario)?;
            for error in compare_operations(&found, &reference) {
                let nearest = &mut nearest[error.operation as usize];
                let (operation, of) = (error.operation, || sample.label());
                nearest.see(error.worst, (side.bounds.operation)(operation, &sample), of);
                nearest.see(error.median, (side.bounds.median)(operation, &sample), of);
            }
        }
    }
    Ok(all)
}
