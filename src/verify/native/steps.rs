//! Whole steps of random small models: against the oracle, and against themselves however a step is cut.

use std::ops::Range;

use super::{Make, Nearest, THREADS, checked};
use crate::engine::EngineError;
use crate::engine::native::operations::Operations;
use crate::engine::native::oracle::Oracle;
use crate::engine::native::testing::sample::DTYPES;
use crate::engine::native::testing::scenario::{BLOCK_SIZES, Script, decode, ragged};
use crate::engine::native::testing::{
    Runner, Sample, Scenario, same_in_pieces, same_scenario, step_tolerance, worst,
};
use crate::verify::{Check, Record};

pub const AREA: &str = "native steps";

/// Seeds of each dtype's steps; the others have seeds of their own.
const PER_DTYPE: Range<u64> = 300..303;
const LONG: Range<u64> = 400..404;
/// One of each dtype.
pub const CUT: Range<u64> = 500..507;
/// Batches of decode steps, beside what kernels take at a time.
const BATCHES: [usize; 9] = [1, 2, 3, 5, 8, 17, 33, 64, 129];
/// Depths of the contexts of one step: many blocks, and one.
const DEPTHS: [usize; 6] = [700, 2049, 63, 1023, 256, 1];
/// Numbers of threads that must give the same bits; more than a small machine has, and odd.
const TEAMS: [usize; 3] = [1, 2, 5];
/// What may differ between the same tokens cut otherwise: the order of a row's sums depends on its position alone.
const SAME: f64 = 0.0;
/// Tokens of a chunk: of no block's size.
const CHUNK: usize = 7;

/// Steps in every dtype of weights, in batches of 1 to 129, and at long contexts, against the oracle.
pub fn against_the_oracle<O: Operations>(make: &Make<'_, O>, record: &mut Record<'_>) {
    let same = |sample: &Sample, scenario: &Scenario| {
        let error = same_scenario(make(THREADS)?, Oracle::new(), sample, scenario)?;
        Ok((error, step_tolerance(sample)))
    };
    for dtype in DTYPES {
        let cases = PER_DTYPE.map(|seed| of(Sample::of_dtype(dtype, seed), &ragged(seed)));
        record(over(format!("ragged steps, {dtype}"), "the oracle's", cases, same));
    }
    let batches = (100..).zip(BATCHES).map(|(seed, batch)| of(Sample::random(seed), &decode(batch, seed)));
    record(over("decode of 1 to 129 sequences", "the oracle's", batches, same));
    let long = LONG.map(|seed| {
        let scripts = DEPTHS.map(|cached| Script { cached, brings: vec![1] });
        of(Sample::random(seed), &scripts)
    });
    record(over("contexts of 1 to 2049", "the oracle's", long, same));
}

/// The same steps cut otherwise, over other blocks, and on other numbers of threads.
pub fn however_they_are_cut<O: Operations>(make: &Make<'_, O>, record: &mut Record<'_>) {
    record(in_pieces("ragged = looped", "each sequence alone", make, usize::MAX, CUT));
    record(in_pieces("chunked = whole prefill", "one prefill", make, CHUNK, CUT));
    record(paged(make, CUT));
    record(threads(make, CUT));
}

/// Ragged steps against each sequence by itself, at most `chunk` tokens at a time.
pub fn in_pieces<O: Operations>(
    name: &str,
    wanted: &str,
    make: &Make<'_, O>,
    chunk: usize,
    seeds: Range<u64>,
) -> Check {
    let cases = seeds.map(|seed| of(Sample::random(seed), &ragged(seed)));
    over(name, wanted, cases, |sample, scenario| {
        let error = same_in_pieces(make(THREADS)?, make(THREADS)?, sample, scenario, chunk)?;
        Ok((error, SAME))
    })
}

/// Prefill and decode over shuffled blocks of 16 against one block for each sequence.
pub fn paged<O: Operations>(make: &Make<'_, O>, seeds: Range<u64>) -> Check {
    // What lies in a cache of noise depends on its blocks, so these begin with none.
    let scripts = [
        Script { cached: 0, brings: vec![113, 0, 1] },
        Script { cached: 0, brings: vec![15, 1, 1] },
        Script { cached: 0, brings: vec![0, 17, 31] },
    ];
    let cases = seeds.map(|seed| {
        let sample = Sample::random(seed);
        let scenario = Scenario::new(&scripts, BLOCK_SIZES[0], sample.architecture.vocab_size, seed);
        (sample, scenario)
    });
    over("paged = contiguous", "one block's", cases, |sample, paged| {
        let [.., largest] = BLOCK_SIZES;
        let contiguous = Scenario::new(&scripts, largest, sample.architecture.vocab_size, sample.seed);
        let mut a = Runner::new(make(THREADS)?, sample, paged)?;
        let mut b = Runner::new(make(THREADS)?, sample, &contiguous)?;
        let error = paged.steps.iter().zip(&contiguous.steps).try_fold(0.0f64, |so_far, (rows, whole)| {
            Ok::<_, EngineError>(so_far.max(worst(&a.step(rows)?, &b.step(whole)?)))
        })?;
        Ok((error, SAME))
    })
}

/// The same bits on every number of threads.
pub fn threads<O: Operations>(make: &Make<'_, O>, seeds: Range<u64>) -> Check {
    let [alone, teams @ ..] = TEAMS;
    let cases = seeds.map(|seed| of(Sample::random(seed), &ragged(seed)));
    let name = format!("{alone}, {} and {} threads agree", teams[0], teams[1]);
    over(name, "the same bits", cases, |sample, scenario| {
        let mut one = Runner::new(make(alone)?, sample, scenario)?;
        let mut others = Vec::new();
        for team in teams {
            others.push(Runner::new(make(team)?, sample, scenario)?);
        }
        let mut different = 0.0f64;
        for rows in &scenario.steps {
            let wanted = one.step(rows)?;
            for other in &mut others {
                let found = other.step(rows)?;
                if found != wanted {
                    // Even a difference too small for a relative error is one.
                    different = different.max(worst(&found, &wanted)).max(f64::MIN_POSITIVE);
                }
            }
        }
        Ok((different, SAME))
    })
}

/// A sample and its steps, over blocks of a size that goes with the seed.
fn of(sample: Sample, scripts: &[Script]) -> (Sample, Scenario) {
    let index = usize::try_from(sample.seed % BLOCK_SIZES.len() as u64).expect("below the number of sizes");
    let scenario = Scenario::new(scripts, BLOCK_SIZES[index], sample.architecture.vocab_size, sample.seed);
    (sample, scenario)
}

/// One check over some samples: `compare` gives the error and its bound.
fn over(
    name: impl Into<String>,
    wanted: &str,
    cases: impl IntoIterator<Item = (Sample, Scenario)>,
    compare: impl Fn(&Sample, &Scenario) -> Result<(f64, f64), EngineError>,
) -> Check {
    let compared = cases.into_iter().try_fold(Nearest::default(), |mut nearest, (sample, scenario)| {
        let (found, bound) = compare(&sample, &scenario)?;
        nearest.see(found, bound, || sample.label());
        Ok(nearest)
    });
    checked(AREA, name, wanted, compared)
}
