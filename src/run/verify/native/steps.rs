//! Whole steps of random small models: against the oracle, and against themselves with the step split otherwise.

use super::{Extent, Kind, Nearest, Side, THREADS, checked};
use crate::engine::EngineError;
use crate::engine::native::operations::Operations;
use crate::engine::native::oracle::Oracle;
use crate::engine::native::testing::scenario::{BLOCK_SIZES, Script, decode, verify};
use crate::engine::native::testing::{Runner, Sample, Scenario, same_in_pieces, same_scenario, worst};
use crate::run::verify::{Check, Record};

pub const AREA: &str = "native steps";

/// Depths of the contexts of one step: many blocks, and one.
const DEPTHS: [usize; 6] = [700, 2049, 63, 1023, 256, 1];
/// Numbers of threads that must give the same bits; more than a small machine has, and odd.
const TEAMS: [usize; 3] = [1, 2, 5];
/// Sequences of a verify step, at the most: each brings up to nine tokens.
const MOST_VERIFIED: usize = 9;
/// The tolerance where the bits must be the same.
const SAME: f64 = 0.0;
/// Tokens of a chunk: of no block's size.
const CHUNK: usize = 7;

/// Steps in every dtype of weights, in batches, and at long contexts, against the oracle.
pub fn against_the_oracle<O: Operations>(
    kind: &Kind,
    side: Side<'_, O>,
    extent: &Extent,
    record: &mut Record<'_>,
) {
    let same = |sample: &Sample, scenario: &Scenario| {
        let error = same_scenario((side.make)(THREADS)?, Oracle::new(), sample, scenario)?;
        Ok((error, (side.bounds.step)(sample)))
    };
    let name = |what: String| if side.name == "cpu" { what } else { format!("{what}, {}", side.name) };
    for dtype in kind.dtypes() {
        let drawn = extent.per_dtype.clone().flat_map(|seed| kind.samples(Some(dtype), seed));
        let cases = drawn.map(|sample| of(&(extent.ragged)(sample.seed), sample));
        record(over(name(format!("ragged steps, {dtype}")), "the oracle's", cases, same));
    }
    let batches = (100..).zip(extent.batches).flat_map(|(seed, batch)| {
        kind.samples(None, seed).map(move |sample| of(&decode(*batch, seed), sample))
    });
    let most = extent.batches.iter().max().copied().unwrap_or(0);
    record(over(name(format!("decode of 1 to {most} sequences")), "the oracle's", batches, same));
    let few = extent.batches.iter().filter(|batch| **batch <= MOST_VERIFIED);
    let verified = (150..).zip(few).flat_map(|(seed, batch)| {
        kind.samples(None, seed).map(move |sample| of(&verify(*batch, seed), sample))
    });
    let verified = verified.map(|(sample, scenario)| (sample, scenario.with_every_logit()));
    record(over(name("verify steps of 1 to 8 draft tokens".to_owned()), "the oracle's", verified, same));
    let long = extent.long.clone().filter_map(|seed| {
        // Experts know no context.
        let scripts = DEPTHS.map(|cached| Script { cached, brings: vec![1] });
        Some(of(&scripts, kind.dense(None, seed)?))
    });
    record(over(name("contexts of 1 to 2049".to_owned()), "the oracle's", long, same));
}

/// The same steps split otherwise, and over other blocks.
pub fn however_they_are_cut<O: Operations>(
    kind: &Kind,
    side: Side<'_, O>,
    extent: &Extent,
    record: &mut Record<'_>,
) {
    record(in_pieces("ragged = looped", "each sequence alone", kind, side, usize::MAX, extent));
    record(in_pieces("chunked = whole prefill", "one prefill", kind, side, CHUNK, extent));
    record(paged(kind, side, extent));
}

/// Ragged steps against each sequence by itself, at most `chunk` tokens at a time.
pub fn in_pieces<O: Operations>(
    name: &str,
    wanted: &str,
    kind: &Kind,
    side: Side<'_, O>,
    chunk: usize,
    extent: &Extent,
) -> Check {
    let samples = extent.cut.clone().flat_map(|seed| kind.samples_to_cut(seed));
    let cases = samples.map(|sample| of(&(extent.ragged)(sample.seed), sample));
    over(name, wanted, cases, |sample, scenario| {
        let (whole, pieces) = ((side.make)(THREADS)?, (side.make)(THREADS)?);
        let error = same_in_pieces(whole, pieces, sample, scenario, chunk)?;
        Ok((error, (side.bounds.cut)(sample)))
    })
}

/// Prefill and decode over shuffled blocks of 16 against one block for each sequence.
pub fn paged<O: Operations>(kind: &Kind, side: Side<'_, O>, extent: &Extent) -> Check {
    // The content of a synthetic cache depends on its blocks, so these begin with none.
    let scripts = extent.prompts.map(|brings| Script { cached: 0, brings: brings.to_vec() });
    let cases = extent.cut.clone().flat_map(|seed| kind.samples_to_cut(seed)).map(|sample| {
        let scenario = Scenario::new(&scripts, BLOCK_SIZES[0], sample.architecture.vocab_size, sample.seed);
        (sample, scenario)
    });
    over("paged = contiguous", "one block's", cases, |sample, paged| {
        let [.., largest] = BLOCK_SIZES;
        let contiguous = Scenario::new(&scripts, largest, sample.architecture.vocab_size, sample.seed);
        let mut a = Runner::new((side.make)(THREADS)?, sample, paged)?;
        let mut b = Runner::new((side.make)(THREADS)?, sample, &contiguous)?;
        let error = paged.steps.iter().zip(&contiguous.steps).try_fold(0.0f64, |so_far, (rows, whole)| {
            Ok::<_, EngineError>(so_far.max(worst(&a.step(rows)?, &b.step(whole)?)))
        })?;
        Ok((error, SAME))
    })
}

/// The same bits on every number of threads.
pub fn threads<O: Operations>(kind: &Kind, side: Side<'_, O>, extent: &Extent) -> Check {
    let [alone, teams @ ..] = TEAMS;
    let samples = extent.cut.clone().flat_map(|seed| kind.samples_to_cut(seed));
    let cases = samples.map(|sample| of(&(extent.ragged)(sample.seed), sample));
    let make = side.make;
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
pub fn of(scripts: &[Script], sample: Sample) -> (Sample, Scenario) {
    let index = usize::try_from(sample.seed % BLOCK_SIZES.len() as u64).expect("below the number of sizes");
    let scenario = Scenario::new(scripts, BLOCK_SIZES[index], sample.architecture.vocab_size, sample.seed);
    (sample, scenario)
}

/// One check over some samples: `compare` gives the error and its bound.
pub fn over(
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
