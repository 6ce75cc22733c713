//! Intervals and comparisons on synthetic runs whose true mean is known, through the code of the protocol.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

use super::{Check, Record};
use hbmark_core::result::{Block, block_means};
use hbmark_core::stats::{CONFIDENCE, balanced_order, order_test, t_interval_log};

const RUNS: usize = 10_000;
/// Blocks at the first look of the protocol.
const BLOCKS: usize = 10;
/// Steps in a block: those of a step of half a millisecond in a block of a tenth of a second.
const STEPS: usize = 200;

/// How the steps of a synthetic run vary.
#[derive(Clone, Copy)]
enum Noise {
    Independent,
    /// Each step keeps this share of the last one's deviation.
    Ar1(f64),
    /// A slow step now and then: this share of them takes so many times longer.
    Bimodal {
        share: f64,
        times: f64,
    },
}

/// Steps of one run around a mean of one.
fn block(noise: Noise, state: &mut f64, random: &mut ChaCha8Rng) -> Block {
    let mut step = || {
        let normal: f64 = StandardNormal.sample(random);
        match noise {
            Noise::Independent => 1.0 + 0.02 * normal,
            Noise::Ar1(memory) => {
                *state = memory * *state + 0.02 * normal;
                1.0 + *state
            }
            Noise::Bimodal { share, times } => {
                let mean = 1.0 + share * (times - 1.0);
                let level = if random.random_bool(share) { times } else { 1.0 };
                (level + 0.01 * normal) / mean
            }
        }
    };
    Block { interval_ns: (0..STEPS).map(|_| step()).collect(), ..Block::default() }
}

/// How many of ten thousand 95 % intervals hold the true mean: 95 ± 1 %.
pub fn coverage(record: &mut Record<'_>) {
    let kinds = [
        ("independent steps", Noise::Independent),
        ("AR(1) steps", Noise::Ar1(0.8)),
        ("bimodal steps", Noise::Bimodal { share: 0.1, times: 1.5 }),
    ];
    for (index, (name, noise)) in kinds.into_iter().enumerate() {
        let mut random = ChaCha8Rng::seed_from_u64(950 + index as u64);
        let covered = (0..RUNS)
            .filter(|_| {
                let mut state = 0.0;
                let blocks: Vec<Block> = (0..BLOCKS).map(|_| block(noise, &mut state, &mut random)).collect();
                let means = block_means(&blocks, 1, |b| &b.interval_ns);
                t_interval_log(&means, CONFIDENCE).is_some_and(|i| i.low <= 1.0 && 1.0 <= i.high)
            })
            .count();
        let share = covered as f64 / RUNS as f64 * 100.0;
        let detail = format!("{share:.2} % of {RUNS} runs of {BLOCKS} blocks hold the mean, wanted 95 ± 1 %");
        record(Check::new("coverage", name, (share - 95.0).abs() <= 1.0, detail));
    }
}

/// A thing compared with itself is called different in 3.4 to 6.6 % of the comparisons at the 5 % level.
pub fn comparisons(record: &mut Record<'_>) {
    const COMPARISONS: usize = 1_000;
    const ROUNDS: usize = 12;
    let mut random = ChaCha8Rng::seed_from_u64(1_000);
    let rejected = (0..COMPARISONS)
        .filter(|index| {
            let mut round = || {
                // Launches differ, and the machine drifts over the rounds; both sides of a round share the drift.
                let (a, b): (f64, f64) =
                    (StandardNormal.sample(&mut random), StandardNormal.sample(&mut random));
                0.01 * (b - a)
            };
            let later: Vec<Option<f64>> = (0..ROUNDS).map(|_| Some(round())).collect();
            let b_second = balanced_order(ROUNDS, &mut ChaCha8Rng::seed_from_u64(*index as u64));
            order_test(&[later], &b_second, *index as u64)[0].is_some_and(|test| test.p <= 0.05)
        })
        .count();
    let share = rejected as f64 / COMPARISONS as f64 * 100.0;
    let detail =
        format!("{share:.1} % of {COMPARISONS} comparisons of {ROUNDS} rounds reject, wanted 3.4 to 6.6 %");
    record(Check::new("comparison", "A beside itself", (3.4..=6.6).contains(&share), detail));
}
