//! Choosing the next token: greedy, or temperature with top-k and top-p.
//!
//! Enters: the logits of one position. Leaves: a token that is a function of the logits, the seed, the request and the position alone,
//! so that an output does not depend on what it was batched with.

use serde::{Deserialize, Serialize};

use super::workload::splitmix64;

/// How tokens are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// Only the most likely so many; 0 is all.
    pub top_k: usize,
    /// Only the most likely that together reach this probability; 1 is all.
    pub top_p: f32,
    pub seed: u64,
}

impl Sampling {
    /// The most likely token, always.
    pub const GREEDY: Self = Self { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };
}

/// Chooses tokens; keeps its buffer.
#[derive(Debug)]
pub struct Sampler {
    how: Sampling,
    ranked: Vec<(f32, u32)>,
}

impl Sampler {
    /// A sampler.
    pub fn new(how: Sampling) -> Self {
        Self { how, ranked: Vec::new() }
    }

    /// Whether the engine's own greedy token will do.
    pub fn is_greedy(&self) -> bool {
        self.how.temperature <= 0.0
    }

    /// The token for a request at a position.
    pub fn sample(&mut self, logits: &[f32], request: usize, position: usize) -> u32 {
        let index = |i: usize| u32::try_from(i).unwrap_or(u32::MAX);
        self.ranked.clear();
        self.ranked.extend(logits.iter().enumerate().map(|(i, logit)| (*logit, index(i))));
        let descending = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        if self.is_greedy() {
            return self.ranked.iter().min_by(|a, b| descending(a, b)).map_or(0, |best| best.1);
        }
        if self.how.top_k > 0 && self.how.top_k < self.ranked.len() {
            self.ranked.select_nth_unstable_by(self.how.top_k - 1, descending);
            self.ranked.truncate(self.how.top_k);
        }
        // Sorted always: the walk below must not depend on the order a selection happened to leave.
        self.ranked.sort_unstable_by(descending);
        let Some(&(best, first)) = self.ranked.first() else { return 0 };
        let mut total = 0.0;
        for (logit, _) in &mut self.ranked {
            *logit = ((*logit - best) / self.how.temperature).exp();
            total += *logit;
        }
        let mut kept = total;
        if self.how.top_p < 1.0 {
            kept = 0.0;
            let mut count = 0;
            for (weight, _) in &self.ranked {
                kept += weight;
                count += 1;
                if kept >= self.how.top_p * total {
                    break;
                }
            }
            self.ranked.truncate(count);
        }
        let drawn = splitmix64(splitmix64(self.how.seed, request as u64), position as u64);
        // 24 bits are what an f32 in [0, 1) holds.
        let mut at = ((drawn >> 40) as f32 / (1_u32 << 24) as f32) * kept;
        for (weight, token) in &self.ranked {
            at -= weight;
            if at < 0.0 {
                return *token;
            }
        }
        self.ranked.last().map_or(first, |last| last.1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(how: Sampling, logits: &[f32]) -> Vec<usize> {
        let mut sampler = Sampler::new(how);
        let mut counts = vec![0; logits.len()];
        for position in 0..20_000 {
            counts[sampler.sample(logits, 3, position) as usize] += 1;
        }
        counts
    }

    const WARM: Sampling = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, seed: 5 };

    #[test]
    fn tokens_are_drawn_as_often_as_their_probability() {
        // ln of 0.5, 0.3, 0.2.
        let logits = [0.5_f32.ln(), 0.3_f32.ln(), 0.2_f32.ln()];
        for (count, share) in counts(WARM, &logits).into_iter().zip([0.5, 0.3, 0.2]) {
            assert!((count as f64 / 20_000.0 - share).abs() < 0.015, "{count}");
        }
        assert_eq!(counts(Sampling { top_k: 1, ..WARM }, &logits), [20_000, 0, 0]);
        assert_eq!(counts(Sampling { top_p: 0.7, ..WARM }, &logits)[2], 0);
        assert!(counts(Sampling { temperature: 0.05, ..WARM }, &logits)[0] > 19_900);
        assert_eq!(counts(Sampling::GREEDY, &logits), [20_000, 0, 0]);
    }

    #[test]
    fn the_same_request_and_position_draw_the_same_token() {
        let logits: Vec<f32> = (0_u8..100).map(|i| f32::from(i % 7)).collect();
        let draw = |request, position| Sampler::new(WARM).sample(&logits, request, position);
        assert_eq!(draw(1, 2), draw(1, 2));
        assert!((0..50).any(|position| draw(1, position) != draw(2, position)));
    }
}
