//! How many different experts a step meets.
//!
//! Enters: experts in a layer, experts of a token, tokens of a step, and an assumption about the routing. Leaves: the expected number of
//! different experts of a layer, with its spread. It is an expectation and no floor: a step may meet as few as the experts of one token.

use std::fmt;
use std::str::FromStr;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

/// Seed of the draws behind [`ExpertRouting::Zipf`].
pub const ZIPF_SEED: u64 = 0;
/// Draws of a token behind it: numbers drawn, and bounds on the tokens they make.
const ZIPF_NUMBERS: usize = 1 << 23;
const ZIPF_TOKENS: (usize, usize) = (256, 16_384);
/// Numbers drawn for the fullest GPU of a group, bounds on the draws of a step that they make, and the tokens of a step that are drawn one by one.
const GROUP_NUMBERS: usize = 1 << 22;
const GROUP_DRAWS: (usize, usize) = (64, 4_096);
const GROUP_DRAWN_TOKENS: usize = 256;
/// Expected experts that no token takes, below which all are met.
const NONE_MISSED: f64 = 1e-6;
/// Steepest popularity that can be asked for: nearly all tokens then go to the same experts.
const MAX_EXPONENT: f64 = 8.0;

/// How tokens are spread over the experts of a layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum ExpertRouting {
    /// Every expert is as likely as any other, and tokens choose alone.
    #[default]
    Uniform,
    /// Tokens take turns: no expert twice before all were taken. The most a step can meet.
    Balanced,
    /// The expert of rank r is drawn with a weight of 1/r^s, without replacement within a token.
    Zipf { exponent: f64 },
}

/// What a step is expected to meet in one layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DistinctExperts {
    pub mean: f64,
    /// Standard deviation from step to step. For [`ExpertRouting::Zipf`] an upper bound: experts displace each other.
    pub deviation: f64,
}

/// The words of `--expert-routing`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "expert routing {found:?} is none of uniform, balanced and zipf:S with S from 0 to 8, such as zipf:1"
)]
pub struct UnknownRouting {
    found: String,
}

impl FromStr for ExpertRouting {
    type Err = UnknownRouting;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let unknown = || UnknownRouting { found: text.chars().take(80).collect() };
        match text.split_once(':') {
            None if text == "uniform" => Ok(Self::Uniform),
            None if text == "balanced" => Ok(Self::Balanced),
            Some(("zipf", exponent)) => {
                let exponent: f64 = exponent.parse().map_err(|_| unknown())?;
                if (0.0..=MAX_EXPONENT).contains(&exponent) {
                    Ok(Self::Zipf { exponent })
                } else {
                    Err(unknown())
                }
            }
            _ => Err(unknown()),
        }
    }
}

impl TryFrom<String> for ExpertRouting {
    type Error = UnknownRouting;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<ExpertRouting> for String {
    fn from(routing: ExpertRouting) -> Self {
        routing.to_string()
    }
}

impl fmt::Display for ExpertRouting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Uniform => f.write_str("uniform"),
            Self::Balanced => f.write_str("balanced"),
            Self::Zipf { exponent } => write!(f, "zipf:{exponent}"),
        }
    }
}

/// The routing of one kind of layer, ready to be asked for any number of tokens.
///
/// ```
/// use hbmark_core::ledger::{ExpertRouting, LayerRouting};
///
/// let uniform = LayerRouting::new(ExpertRouting::Uniform, 128, 8);
/// assert!((uniform.distinct(16).mean - 82.4).abs() < 0.05);
/// assert_eq!(LayerRouting::new(ExpertRouting::Balanced, 128, 8).distinct(16).mean, 128.0);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct LayerRouting {
    routing: ExpertRouting,
    count: usize,
    per_token: usize,
    /// Of each expert, how likely a token takes it; only where they differ.
    shares: Vec<f64>,
}

impl LayerRouting {
    /// A layer of `count` experts of which a token takes `per_token`.
    pub fn new(routing: ExpertRouting, count: usize, per_token: usize) -> Self {
        let per_token = per_token.min(count);
        let shares = match routing {
            ExpertRouting::Zipf { exponent } if per_token < count => zipf_shares(count, per_token, exponent),
            _ => Vec::new(),
        };
        Self { routing, count, per_token, shares }
    }

    /// The different experts that so many tokens meet.
    pub fn distinct(&self, tokens: usize) -> DistinctExperts {
        let (count, per_token) = (self.count as f64, self.per_token as f64);
        let n = tokens as f64;
        match self.routing {
            ExpertRouting::Balanced => DistinctExperts { mean: count.min(per_token * n), deviation: 0.0 },
            ExpertRouting::Zipf { .. } if !self.shares.is_empty() => {
                let missed = self.shares.iter().map(|share| (1.0 - share).powf(n));
                let (mean, variance) = missed.fold((0.0, 0.0), |(mean, variance), missed| {
                    (mean + 1.0 - missed, variance + missed * (1.0 - missed))
                });
                let deviation = if tokens <= 1 { 0.0 } else { f64::sqrt(variance) };
                DistinctExperts { mean: mean.max(per_token.min(per_token * n)), deviation }
            }
            _ => uniform(count, per_token, n),
        }
    }

    /// The most different experts that any of `ranks` GPUs meets, where each holds as many of the layer's experts as the next, whichever
    /// those are: the mean of seeded draws, and exact where tokens take turns. A step waits for that GPU.
    pub fn fullest(&self, tokens: usize, ranks: usize) -> f64 {
        let here = self.count.div_ceil(ranks.max(1));
        if tokens == 0 || self.count == 0 {
            return 0.0;
        }
        if ranks <= 1 {
            return self.distinct(tokens).mean;
        }
        if self.routing == ExpertRouting::Balanced {
            let met = self.count.min(self.per_token.saturating_mul(tokens));
            return met.div_ceil(ranks).min(here) as f64;
        }
        let missed: Vec<f64> = self.shares().map(|share| (1.0 - share).powf(tokens as f64)).collect();
        if missed.iter().sum::<f64>() < NONE_MISSED {
            return here as f64;
        }
        let draws = GROUP_NUMBERS / (self.count * tokens.min(GROUP_DRAWN_TOKENS));
        let draws = draws.clamp(GROUP_DRAWS.0, GROUP_DRAWS.1);
        let mut random = ChaCha8Rng::seed_from_u64(ZIPF_SEED);
        let mut draw = Draw::new(self);
        let mut sum = 0;
        for _ in 0..draws {
            if tokens <= GROUP_DRAWN_TOKENS {
                draw.tokens(tokens, &mut random);
            } else {
                // Of so many tokens the experts hardly displace each other.
                draw.each_alone(&missed, &mut random);
            }
            sum += draw.most_of_a_rank(ranks, &mut random);
        }
        sum as f64 / draws as f64
    }

    /// The experts of so many tokens, one token after the other, each expert of a token once: random draws with a seed, or turns that
    /// begin with expert 0.
    pub fn draw(&self, tokens: usize, seed: u64) -> Vec<u32> {
        let number = |expert: usize| u32::try_from(expert).unwrap_or(u32::MAX);
        if self.routing == ExpertRouting::Balanced {
            return (0..tokens * self.per_token).map(|turn| number(turn % self.count.max(1))).collect();
        }
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut draw = Draw::new(self);
        (0..tokens).flat_map(|_| draw.token(&mut random).map(number).collect::<Vec<_>>()).collect()
    }

    /// Of each expert, how likely a token takes it.
    fn shares(&self) -> impl Iterator<Item = f64> {
        let even = self.per_token as f64 / self.count.max(1) as f64;
        (0..self.count).map(move |expert| self.shares.get(expert).copied().unwrap_or(even))
    }
}

/// A draw of the experts that a step meets.
struct Draw {
    /// Of each expert, the mean of its exponential clock; those of a token ring first.
    waits: Vec<f64>,
    per_token: usize,
    clocks: Vec<(f64, usize)>,
    met: Vec<bool>,
}

impl Draw {
    fn new(layer: &LayerRouting) -> Self {
        let exponent = match layer.routing {
            ExpertRouting::Zipf { exponent } => exponent,
            ExpertRouting::Uniform | ExpertRouting::Balanced => 0.0,
        };
        let waits = (0..layer.count).map(|rank| (rank as f64 + 1.0).powf(exponent)).collect();
        Self { waits, per_token: layer.per_token, clocks: Vec::new(), met: vec![false; layer.count] }
    }

    fn tokens(&mut self, tokens: usize, random: &mut ChaCha8Rng) {
        self.met.fill(false);
        for _ in 0..tokens {
            self.ring(random);
            for (_, expert) in &self.clocks[..self.per_token.min(self.clocks.len())] {
                self.met[*expert] = true;
            }
        }
    }

    /// The experts of one token: those whose clocks ring first.
    fn token(&mut self, random: &mut ChaCha8Rng) -> impl Iterator<Item = usize> {
        self.ring(random);
        self.clocks[..self.per_token.min(self.clocks.len())].iter().map(|(_, expert)| *expert)
    }

    /// Sets the clocks, those of a token's experts in front.
    fn ring(&mut self, random: &mut ChaCha8Rng) {
        self.clocks.clear();
        self.clocks.extend(self.waits.iter().enumerate().map(|(expert, wait)| {
            let uniform: f64 = random.random();
            (-(1.0 - uniform).ln() * wait, expert)
        }));
        let last = self.per_token.clamp(1, self.clocks.len()) - 1;
        self.clocks.select_nth_unstable_by(last, |a, b| a.0.total_cmp(&b.0));
    }

    fn each_alone(&mut self, missed: &[f64], random: &mut ChaCha8Rng) {
        for (met, missed) in self.met.iter_mut().zip(missed) {
            *met = random.random::<f64>() >= *missed;
        }
    }

    /// Deals the experts out, and counts the met ones of the GPU that has the most.
    fn most_of_a_rank(&mut self, ranks: usize, random: &mut ChaCha8Rng) -> usize {
        for last in (1..self.met.len()).rev() {
            self.met.swap(last, random.random_range(0..=last));
        }
        let of = |rank: usize| self.met.iter().skip(rank).step_by(ranks).filter(|met| **met).count();
        (0..ranks).map(of).max().unwrap_or(0)
    }
}

/// `E·(1 − (1 − k/E)^n)`, and the variance of the number of boxes that n draws of k different ones leave empty.
fn uniform(count: f64, per_token: f64, tokens: f64) -> DistinctExperts {
    if count < 1.0 {
        return DistinctExperts { mean: 0.0, deviation: 0.0 };
    }
    let one = (1.0 - per_token / count).powf(tokens);
    let mean = count * (1.0 - one);
    let both = if count > 1.0 {
        ((count - per_token) * (count - per_token - 1.0) / (count * (count - 1.0))).max(0.0).powf(tokens)
    } else {
        0.0
    };
    let variance = count * one * (1.0 - one) + count * (count - 1.0) * (both - one * one);
    DistinctExperts { mean, deviation: variance.max(0.0).sqrt() }
}

/// How likely a token takes each expert, from draws with [`ZIPF_SEED`].
///
/// The experts of a token are those whose exponential clocks of rates 1/r^s ring first: a draw without replacement (Efraimidis and
/// Spirakis, 2006).
fn zipf_shares(count: usize, per_token: usize, exponent: f64) -> Vec<f64> {
    let tokens = (ZIPF_NUMBERS / count).clamp(ZIPF_TOKENS.0, ZIPF_TOKENS.1);
    let waits: Vec<f64> = (0..count).map(|rank| (rank as f64 + 1.0).powf(exponent)).collect();
    let mut random = ChaCha8Rng::seed_from_u64(ZIPF_SEED);
    let mut taken = vec![0_u32; count];
    let mut clocks: Vec<(f64, usize)> = Vec::with_capacity(count);
    for _ in 0..tokens {
        clocks.clear();
        clocks.extend(waits.iter().enumerate().map(|(expert, wait)| {
            let uniform: f64 = random.random();
            (-(1.0 - uniform).ln() * wait, expert)
        }));
        clocks.select_nth_unstable_by(per_token - 1, |a, b| a.0.total_cmp(&b.0));
        for (_, expert) in &clocks[..per_token] {
            taken[*expert] += 1;
        }
    }
    taken.iter().map(|times| f64::from(*times) / tokens as f64).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of E experts and k per token: uniform and 1/rank at 1, 4, 16 and 64 tokens.
    #[test]
    fn distinct_experts_are_those_of_the_formula_and_of_the_simulation() {
        for (count, per_token, uniform, zipf) in [
            (128, 8, [8.0, 29.1, 82.4, 125.9], [8.0, 23.5, 57.4, 105.5]),
            (128, 4, [4.0, 15.3, 51.0, 111.2], [4.0, 12.7, 35.5, 78.7]),
            (256, 8, [8.0, 30.5, 102.0, 222.0], [8.0, 25.0, 69.0, 152.5]),
        ] {
            let even = LayerRouting::new(ExpertRouting::Uniform, count, per_token);
            let skewed = LayerRouting::new(ExpertRouting::Zipf { exponent: 1.0 }, count, per_token);
            for (at, tokens) in [1, 4, 16, 64].into_iter().enumerate() {
                let found = even.distinct(tokens).mean;
                assert!((found - uniform[at]).abs() < 0.5, "{count} {per_token} {tokens}: {found}");
                let found = skewed.distinct(tokens).mean;
                assert!((found / zipf[at] - 1.0).abs() < 0.02, "{count} {per_token} {tokens}: {found}");
            }
        }
    }

    #[test]
    fn drawn_experts_are_different_within_a_token_and_meet_what_is_expected() {
        for routing in
            [ExpertRouting::Uniform, ExpertRouting::Balanced, ExpertRouting::Zipf { exponent: 1.0 }]
        {
            let layer = LayerRouting::new(routing, 32, 4);
            let (steps, tokens) = (400, 8);
            let drawn = layer.draw(steps * tokens, 3);
            assert_eq!(drawn, layer.draw(steps * tokens, 3));
            assert!(drawn.iter().all(|expert| *expert < 32));
            let distinct = |experts: &[u32]| experts.iter().collect::<std::collections::HashSet<_>>().len();
            assert!(drawn.chunks(4).all(|token| distinct(token) == 4), "{routing}");
            let met: usize = drawn.chunks(4 * tokens).map(distinct).sum();
            let mean = met as f64 / steps as f64;
            assert!((mean / layer.distinct(tokens).mean - 1.0).abs() < 0.02, "{routing}: {mean}");
        }
        let unlike = LayerRouting::new(ExpertRouting::Uniform, 32, 4);
        assert_ne!(unlike.draw(9, 3), unlike.draw(9, 4));
    }

    #[test]
    fn the_spread_is_that_of_random_draws() {
        // 4 tokens of 2 of 8 experts, drawn many times.
        let mut random = ChaCha8Rng::seed_from_u64(7);
        let told = LayerRouting::new(ExpertRouting::Uniform, 8, 2).distinct(4);
        let (mut sum, mut squares, rounds) = (0.0, 0.0, 40_000);
        for _ in 0..rounds {
            let mut met = [false; 8];
            for _ in 0..4 {
                let first = random.random_range(0..8);
                let second = (first + random.random_range(1..8)) % 8;
                (met[first], met[second]) = (true, true);
            }
            let distinct = met.iter().filter(|met| **met).count() as f64;
            sum += distinct;
            squares += distinct * distinct;
        }
        let mean = sum / f64::from(rounds);
        let deviation = (squares / f64::from(rounds) - mean * mean).sqrt();
        assert!((told.mean - mean).abs() < 0.03, "{told:?} and {mean}");
        assert!((told.deviation - deviation).abs() < 0.03, "{told:?} and {deviation}");
    }

    #[test]
    fn a_skew_meets_fewer_and_turns_meet_the_most() {
        let of = |routing| LayerRouting::new(routing, 64, 4).distinct(8).mean;
        let (skewed, uniform) = (of(ExpertRouting::Zipf { exponent: 1.2 }), of(ExpertRouting::Uniform));
        assert!(skewed < uniform && uniform < of(ExpertRouting::Balanced));
        assert!((of(ExpertRouting::Balanced) - 32.0).abs() < 1e-9);
        // No skew is uniform.
        assert!((of(ExpertRouting::Zipf { exponent: 0.0 }) / uniform - 1.0).abs() < 0.01);
    }

    #[test]
    fn one_token_meets_its_own_experts_and_many_meet_all() {
        for routing in
            [ExpertRouting::Uniform, ExpertRouting::Balanced, ExpertRouting::Zipf { exponent: 1.0 }]
        {
            let layer = LayerRouting::new(routing, 32, 4);
            assert!((layer.distinct(1).mean - 4.0).abs() < 1e-9, "{routing}");
            assert!(layer.distinct(1).deviation < 1e-6, "{routing}");
            assert!((layer.distinct(100_000).mean - 32.0).abs() < 1e-6, "{routing}");
            assert!(layer.distinct(0).mean.abs() < 1e-9, "{routing}");
        }
        assert!(LayerRouting::new(ExpertRouting::Uniform, 0, 0).distinct(3).mean.abs() < 1e-9);
        let all = LayerRouting::new(ExpertRouting::Zipf { exponent: 1.0 }, 2, 2).distinct(3).mean;
        assert!((all - 2.0).abs() < 1e-9);
    }

    #[test]
    fn the_fullest_gpu_meets_more_than_its_share_and_never_more_than_it_holds() {
        let uniform = LayerRouting::new(ExpertRouting::Uniform, 256, 8);
        // Two experts of four, two GPUs with two each: both on one GPU in 2 of 6 pairs, 1/3 * 2 + 2/3 * 1.
        let small = LayerRouting::new(ExpertRouting::Uniform, 4, 2).fullest(1, 2);
        assert!((small - 4.0 / 3.0).abs() < 0.03, "{small}");
        for routing in
            [ExpertRouting::Uniform, ExpertRouting::Balanced, ExpertRouting::Zipf { exponent: 1.0 }]
        {
            let layer = LayerRouting::new(routing, 256, 8);
            for tokens in [1, 16, 64, 255, 300] {
                let (fullest, mean) = (layer.fullest(tokens, 8), layer.distinct(tokens).mean / 8.0);
                assert!(fullest >= mean - 0.02 && fullest <= 32.0, "{routing} {tokens}: {fullest} of {mean}");
            }
            assert!((layer.fullest(7, 1) - layer.distinct(7).mean).abs() < 1e-9);
        }
        assert!((uniform.fullest(1, 8) - 2.55).abs() < 0.2, "{}", uniform.fullest(1, 8));
        assert!((uniform.fullest(100_000, 8) - 32.0).abs() < 1e-9);
        assert!((uniform.fullest(0, 8)).abs() < 1e-9);
        // Counted one by one and each alone, the same.
        let (drawn, alone) = (uniform.fullest(256, 8), uniform.fullest(257, 8));
        assert!((drawn - alone).abs() < 0.2, "{drawn} and {alone}");
        let turns = LayerRouting::new(ExpertRouting::Balanced, 128, 8);
        assert_eq!((turns.fullest(1, 8), turns.fullest(3, 16), turns.fullest(64, 8)), (1.0, 2.0, 16.0));
    }

    #[test]
    fn words_are_read_and_others_named() {
        for word in ["uniform", "balanced", "zipf:1.2"] {
            assert_eq!(word.parse::<ExpertRouting>().unwrap().to_string(), word);
        }
        for word in ["zipf", "zipf:-1", "zipf:nan", "zipf:99", "even", ""] {
            assert!(word.parse::<ExpertRouting>().unwrap_err().to_string().contains("zipf:S"), "{word}");
        }
    }
}
