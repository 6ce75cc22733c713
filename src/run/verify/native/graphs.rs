//! Recorded steps against the same steps kernel by kernel, bit for bit.
//!
//! A graph may hold addresses and sizes, and must not hold tokens, positions and blocks: two steps of a batch alternate, four times, so that
//! they are eager, then recorded, then replayed, and stale results of one cannot pass for results of the other.

use std::ops::Range;

use super::steps::{of, over};
use super::{Check, Kind, THREADS};
use crate::engine::EngineError;
use crate::engine::native::cuda::device::Device;
use crate::engine::native::cuda::operations::CudaOperations;
use crate::engine::native::operations::{Steps, Storage};
use crate::engine::native::testing::scenario::{decode, verify};
use crate::engine::native::testing::{Runner, worst};

/// Sequences of the batches: one, and what kernels take otherwise.
const BATCHES: [usize; 3] = [1, 3, 9];
/// Times that each step runs: eager, recorded, replayed; and eager once more where the second step moved the scratch of the first.
const TIMES: usize = 4;

/// Graph = eager.
pub fn as_eager<D: Device>(
    kind: &Kind,
    make: &super::Make<'_, CudaOperations<D>>,
    seeds: Range<u64>,
) -> Check {
    let cases = seeds.enumerate().filter_map(|(index, seed)| {
        let sample = kind.dense(None, seed)?;
        let batch = BATCHES[index % BATCHES.len()];
        // Every second batch verifies draft tokens.
        if index % 2 == 1 {
            let (sample, scenario) = of(&verify(batch, seed), sample);
            return Some((sample, scenario.with_every_logit()));
        }
        Some(of(&decode(batch, seed), sample))
    });
    over("graph = eager", "the same bits", cases, |sample, scenario| {
        let mut eager = Runner::new(make(THREADS)?, sample, scenario)?;
        eager.operations().allow_whole_graph(false);
        let mut graph = Runner::new(make(THREADS)?, sample, scenario)?;
        let mut different = 0.0f64;
        for _ in 0..TIMES {
            for rows in &scenario.steps {
                let (wanted, found) = (eager.step(rows)?, graph.step(rows)?);
                let tokens = eager.next_tokens()?.to_vec();
                if found != wanted || graph.next_tokens()? != tokens {
                    different = different.max(worst(&found, &wanted)).max(f64::MIN_POSITIVE);
                }
            }
        }
        if graph.operations().replays() < scenario.steps.len() * (TIMES - 2)
            || eager.operations().replays() > 0
        {
            let detail =
                format!("{} replays of {} steps", graph.operations().replays(), scenario.steps.len() * TIMES);
            return Err(EngineError::Device { device: graph.operations().device_name(), detail });
        }
        Ok((different, 0.0))
    })
}
