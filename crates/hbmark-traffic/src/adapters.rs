//! LoRA adapters in traffic: the assignment of requests to adapters, and its cost per step by the ledger.
//!
//! Enters: the number of adapters, how requests choose among them, their size. Leaves: planned requests with their adapter, and
//! [`AdapterCost`]: distinct adapters per batch, expected and observed, and the bytes they add to a step.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use super::workload::{PlannedRequest, splitmix64};
use hbmark_core::ledger::expected_distinct_adapters;
use hbmark_core::result::serving::{AdapterCost, Assignment, ServeResult};
use hbmark_core::units::{Bytes, Nanos};

/// The adapters of a point.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AdapterMix {
    /// Number of adapters.
    pub count: usize,
    pub assignment: Assignment,
    /// Share of the requests with an adapter.
    pub share: f64,
    /// Bytes that a step reads of one adapter, on average over all.
    pub bytes_each: Bytes,
    /// Bytes of weights that a step of one token reads.
    pub weight_bytes: Bytes,
    /// Time of one more adapter in a batch, for the virtual clock.
    pub time_each: Nanos,
}

impl AdapterMix {
    /// Assigns an adapter, or none, to every request.
    pub fn assign(&self, plan: &mut [PlannedRequest], seed: u64) {
        let mut random = ChaCha8Rng::seed_from_u64(splitmix64(seed, 20));
        let weights: Vec<f64> = match self.assignment {
            Assignment::Zipf(exponent) => (1..=self.count).map(|n| (n as f64).powf(-exponent)).collect(),
            _ => vec![1.0; self.count],
        };
        let total: f64 = weights.iter().sum();
        let mut given = 0;
        for request in plan {
            let has = random.random_bool(self.share.clamp(0.0, 1.0));
            let drawn = random.random_range(0.0..total);
            if !has {
                request.adapter = None;
                continue;
            }
            let number = match self.assignment {
                Assignment::RoundRobin => given % self.count,
                Assignment::Tenant => usize::from(request.tenant) % self.count,
                Assignment::Uniform | Assignment::Zipf(_) => {
                    let mut left = drawn;
                    weights
                        .iter()
                        .position(|weight| {
                            left -= weight;
                            left < 0.0
                        })
                        .unwrap_or(self.count - 1)
                }
            };
            given += 1;
            request.adapter = u32::try_from(number).ok();
        }
    }

    /// The adapters of a point and their cost.
    pub fn cost(&self, plan: &[PlannedRequest], result: &ServeResult) -> AdapterCost {
        let mut counts = vec![0_usize; self.count];
        for adapter in plan.iter().filter_map(|p| p.adapter) {
            counts[adapter as usize] += 1;
        }
        let shares: Vec<f64> = counts.iter().map(|count| *count as f64 / plan.len().max(1) as f64).collect();
        let seen = result.mean_adapters.unwrap_or_default();
        let added = self.bytes_each.as_f64() * seen;
        AdapterCost {
            adapters: self.count,
            assignment: self.assignment,
            share: self.share,
            bytes_each: self.bytes_each,
            mean_in_batch: seen,
            expected_in_batch: expected_distinct_adapters(&shares, result.mean_batch),
            added_bytes_per_step: added,
            added_share_of_weights: added / self.weight_bytes.as_f64().max(1.0),
            predicted_tpot_ratio: None,
            measured_tpot_ratio: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assigned(assignment: Assignment, share: f64, count: usize) -> Vec<Option<u32>> {
        let mix = AdapterMix {
            count,
            assignment,
            share,
            bytes_each: Bytes(100),
            weight_bytes: Bytes(1000),
            time_each: Nanos(0.0),
        };
        let mut plan: Vec<PlannedRequest> =
            (0..10_000).map(|i| PlannedRequest { tenant: i % 3, ..PlannedRequest::default() }).collect();
        mix.assign(&mut plan, 1);
        plan.iter().map(|p| p.adapter).collect()
    }

    fn count(of: &[Option<u32>], adapter: Option<u32>) -> usize {
        of.iter().filter(|a| **a == adapter).count()
    }

    #[test]
    fn requests_get_their_adapters_as_asked() {
        let round = assigned(Assignment::RoundRobin, 1.0, 4);
        assert_eq!(round[..5], [Some(0), Some(1), Some(2), Some(3), Some(0)]);
        let half = assigned(Assignment::Uniform, 0.5, 2);
        assert!(
            (4_800..5_200).contains(&count(&half, None)) && (2_300..2_700).contains(&count(&half, Some(1)))
        );
        // 1, 1/2, 1/3 and 1/4 of 25/12.
        let zipf = assigned(Assignment::Zipf(1.0), 1.0, 4);
        assert!((4_600..5_000).contains(&count(&zipf, Some(0))), "{}", count(&zipf, Some(0)));
        assert!((1_050..1_350).contains(&count(&zipf, Some(3))));
        let tenants = assigned(Assignment::Tenant, 1.0, 2);
        assert_eq!(tenants[..4], [Some(0), Some(1), Some(0), Some(0)]);
    }

    #[test]
    fn assignments_are_read_strictly_and_written_as_read() {
        for given in ["round-robin", "uniform", "tenant", "zipf:1.5"] {
            assert_eq!(given.parse::<Assignment>().unwrap().to_string(), given);
        }
        for given in ["", "zipf", "zipf:", "zipf:-1", "zipf:NaN", "random"] {
            assert!(given.parse::<Assignment>().is_err(), "{given}");
        }
    }
}
