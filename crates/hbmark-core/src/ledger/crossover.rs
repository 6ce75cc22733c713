//! Where the regime changes along an axis: the batch that becomes compute-bound, the context whose KV exceeds the weights,
//! and what fits in memory.
//!
//! Enters: a [`Ledger`], a [`Roof`], a memory size. Leaves: numbers, and [`Crossover`] rows that explain them. All are found
//! by search on the ledger itself, so that windows, experts and tied tables count; the textbook figure is given too.

use super::step::{Ledger, StepShape};
use super::verdict::{Floor, Roof};
use crate::model::{Attention, Mixer, Reach};
use crate::result::{Bound, Crossover, CrossoverKind};
use crate::units::Bytes;

/// The share of a device's memory that a run may fill: the rest goes to the context, the allocator and the libraries.
pub const MEMORY_USE: f64 = 0.9;
/// No batch beyond this is looked at.
pub(in crate::ledger) const MAX_BATCH: usize = 1 << 17;

/// The smallest number in `1..=limit` for which `holds`, given that it holds for all above the first.
fn first(limit: usize, holds: impl Fn(usize) -> bool) -> Option<usize> {
    if limit == 0 || !holds(limit) {
        return None;
    }
    let (mut low, mut high) = (1, limit);
    while low < high {
        let middle = low.midpoint(high);
        if holds(middle) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    Some(low)
}

/// The largest number in `1..=limit` for which `fits`, given that it fits for all below the last.
pub(in crate::ledger) fn last(limit: usize, fits: impl Fn(usize) -> bool) -> Option<usize> {
    match first(limit, |n| !fits(n)) {
        Some(1) => None,
        Some(too_many) => Some(too_many - 1),
        None => (limit > 0).then_some(limit),
    }
}

/// The smallest batch whose decode step at `context` takes longer to compute than to read, if any does: at a long context
/// the KV of each sequence costs more time than its arithmetic, and no batch helps.
pub fn compute_bound_batch(ledger: &Ledger, roof: &Roof, context: usize) -> Option<usize> {
    roof.peak.as_ref()?;
    first(MAX_BATCH, |batch| Floor::new(&ledger.decode(batch, context), roof).bound() == Bound::Compute)
}

/// The textbook figure: weights only, every one read as stored once and multiplied once per sequence:
/// `bytes per weight / 2 · peak / bandwidth`. Of a mixture of experts all are read, as at any such batch, and a sequence multiplies its own.
pub fn critical_batch_size(ledger: &Ledger, roof: &Roof) -> Option<f64> {
    let peak = roof.peak.as_ref()?;
    Some(all_weights(ledger).as_f64() / ledger.decode(1, 0).flops.0 * peak.rate.0 / roof.bandwidth.0)
}

/// The weights of a step that meets every expert.
fn all_weights(ledger: &Ledger) -> Bytes {
    ledger.decode(MAX_BATCH, 0).bytes.weights
}

/// The shortest prompt, within the model's positions, whose prefill takes longer to compute than to read.
pub fn compute_bound_prompt(ledger: &Ledger, roof: &Roof, batch: usize) -> Option<usize> {
    roof.peak.as_ref()?;
    first(ledger.architecture().max_positions, |tokens| {
        Floor::new(&ledger.prefill(batch, tokens), roof).bound() == Bound::Compute
    })
}

/// The shortest context, within the model's positions, at which a step reads more KV than weights.
pub fn kv_exceeds_weights(ledger: &Ledger, batch: usize) -> Option<usize> {
    let limit = ledger.architecture().max_positions;
    let exceeds = |context| {
        let bytes = ledger.decode(batch, context).bytes;
        bytes.kv_read > bytes.weights
    };
    let Some(chunk) = chunk(ledger) else { return first(limit, exceeds) };
    // A new chunk reads little again. Within one the KV grows with the context, and from the end of one to the end of the next.
    let partial = || exceeds(limit).then_some(limit / chunk + 1);
    let found = first(limit / chunk, |chunks| exceeds(chunks * chunk - 1)).or_else(partial)?;
    let (start, end) = (((found - 1) * chunk).max(1), (found * chunk - 1).min(limit));
    first(end + 1 - start, |n| exceeds(start + n - 1)).map(|n| start + n - 1)
}

/// Positions of a chunk, where layers attend to their own.
fn chunk(ledger: &Ledger) -> Option<usize> {
    let architecture = ledger.architecture();
    (0..architecture.layers).find_map(|layer| match architecture.layer(layer).mixer {
        Mixer::Attention(Attention { reach: Reach::Chunk { tokens }, .. }) => Some(tokens.max(1)),
        _ => None,
    })
}

fn fits(ledger: &Ledger, shape: StepShape, memory: Bytes) -> bool {
    ledger.memory(shape).as_f64() <= memory.as_f64() * MEMORY_USE
}

/// The largest batch that can decode at `context` in a device's memory.
pub fn max_batch_that_fits(ledger: &Ledger, context: usize, memory: Bytes) -> Option<usize> {
    last(MAX_BATCH, |batch| fits(ledger, StepShape::decode(batch, context), memory))
}

/// The longest context, within the model's positions, at which `batch` sequences can decode in a device's memory.
pub fn max_context_that_fits(ledger: &Ledger, batch: usize, memory: Bytes) -> Option<usize> {
    // The new token takes the last position.
    let limit = ledger.architecture().max_positions.saturating_sub(1);
    last(limit, |context| fits(ledger, StepShape::decode(batch, context), memory))
}

/// The rows of a report: per context the compute-bound batch and the batch that fits, per batch the context whose KV
/// exceeds the weights and the context that fits.
pub fn crossovers(
    ledger: &Ledger,
    roof: &Roof,
    memory: Option<Bytes>,
    batches: &[usize],
    contexts: &[usize],
) -> Vec<Crossover> {
    let mut rows = Vec::new();
    if let (Some(batch), Some(peak)) = (critical_batch_size(ledger, roof), &roof.peak) {
        rows.push(Crossover {
            what: CrossoverKind::CriticalBatchSize,
            value: Some(batch),
            unit: "sequences".to_owned(),
            explanation: format!(
                "weights alone: {} at {} against {} ({})",
                all_weights(ledger),
                roof.bandwidth,
                peak.rate,
                peak.dtype
            ),
        });
    }
    // Beyond the model's positions there is no step.
    for &context in contexts.iter().filter(|context| **context < ledger.architecture().max_positions) {
        rows.push(compute_bound_row(ledger, roof, context));
        if let Some(memory) = memory {
            rows.push(fit_row(
                CrossoverKind::MaxBatchThatFits,
                max_batch_that_fits(ledger, context, memory),
                || format!("at context {context} in {}", available(memory)),
            ));
        }
    }
    for &batch in batches {
        rows.extend(roof.peak.as_ref().map(|_| compute_bound_prompt_row(ledger, roof, batch)));
        let value = kv_exceeds_weights(ledger, batch);
        rows.push(Crossover {
            what: CrossoverKind::KvExceedsWeightsContext,
            value: value.map(|context| context as f64),
            unit: "tokens".to_owned(),
            explanation: match value {
                Some(context) if chunk(ledger).is_some() => {
                    format!("batch {batch} first reads more KV than weights at context {context}; a new chunk reads less")
                }
                Some(context) => format!("batch {batch} reads more KV than weights from context {context}"),
                None => format!(
                    "batch {batch} reads more weights than KV at every context up to {}",
                    ledger.architecture().max_positions
                ),
            },
        });
        if let Some(memory) = memory {
            rows.push(fit_row(
                CrossoverKind::MaxContextThatFits,
                max_context_that_fits(ledger, batch, memory),
                || {
                    format!(
                        "at batch {batch} in {}, of at most {} positions",
                        available(memory),
                        ledger.architecture().max_positions
                    )
                },
            ));
        }
    }
    rows
}

pub(in crate::ledger) fn available(memory: Bytes) -> String {
    format!("{:.0} % of {}", MEMORY_USE * 100.0, memory.capacity())
}

/// Sequences of which a mixture of experts has read every expert.
const MANY: usize = 1 << 16;

fn compute_bound_row(ledger: &Ledger, roof: &Roof, context: usize) -> Crossover {
    let value = compute_bound_batch(ledger, roof, context);
    Crossover {
        what: CrossoverKind::ComputeBoundBatch,
        value: value.map(|batch| batch as f64),
        unit: "sequences".to_owned(),
        explanation: match (value, &roof.peak) {
            (Some(batch), _) => {
                format!("at context {context}, batch {batch} takes longer to compute than to read")
            }
            (None, Some(_)) => {
                // What one more sequence adds to the memory's time, and to the arithmetic's. The second sequence of a mixture of experts
                // reads experts that the first did not; beside many it adds its own KV alone.
                let bytes = |batch: usize| ledger.decode(batch, context).bytes.ideal().0;
                let added = |batch: usize| Bytes(bytes(batch + 1).saturating_sub(bytes(batch)));
                let (second, next) = (added(1), added(MANY));
                let beside = if next == second { "" } else { " beside many" };
                let read = next.at(roof.bandwidth);
                let flops = ledger.decode(1, context).flops;
                let compute = roof.peak.as_ref().map(|peak| flops.at(peak.rate)).unwrap_or_default();
                format!(
                    "at context {context} no batch is compute-bound: one more sequence{beside} takes {read} to read and {compute} to compute"
                )
            }
            (None, None) => format!("at context {context}: no matrix-product peak is known for this dtype"),
        },
    }
}

fn compute_bound_prompt_row(ledger: &Ledger, roof: &Roof, batch: usize) -> Crossover {
    let value = compute_bound_prompt(ledger, roof, batch);
    Crossover {
        what: CrossoverKind::ComputeBoundPrompt,
        value: value.map(|tokens| tokens as f64),
        unit: "tokens".to_owned(),
        explanation: match value {
            Some(tokens) => {
                let tokens_each = if tokens == 1 { "token" } else { "tokens" };
                format!("a prefill of batch {batch} is compute-bound from {tokens} prompt {tokens_each} each")
            }
            None => format!(
                "a prefill of batch {batch} is memory-bound at every length up to {}",
                ledger.architecture().max_positions
            ),
        },
    }
}

pub(in crate::ledger) fn fit_row(
    what: CrossoverKind,
    value: Option<usize>,
    place: impl Fn() -> String,
) -> Crossover {
    Crossover {
        what,
        value: value.map(|value| value as f64),
        unit: if what == CrossoverKind::MaxBatchThatFits { "sequences" } else { "tokens" }.to_owned(),
        explanation: match value {
            Some(value) => format!("{value} {}", place()),
            None => format!("does not fit {}", place()),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::devices;
    use crate::model::test_shapes as shapes;
    use crate::model::{Architecture, Dtype};

    fn ledger(architecture: &Architecture, dtype: Dtype) -> Ledger {
        Ledger::new(architecture, &architecture.inventory(dtype), Dtype::Bf16)
    }

    fn roof(device: &str, dtype: Dtype) -> Roof {
        Roof::of_model(devices::find(device).expect("a row"), dtype, &shapes::llama_3_1_8b())
    }

    /// Peak over bandwidth at 2 B and 2 FLOPs per weight: 312e12/2.039e12, 989.4e12/3.352e12, 989.5e12/4.8e12.
    #[test]
    fn the_critical_batch_size_is_153_295_and_206() {
        let ledger = ledger(&shapes::llama_3_1_8b(), Dtype::Bf16);
        for (device, batch) in [("a100-80-sxm", 153.0), ("h100-sxm", 295.0), ("h200-sxm", 206.0)] {
            let found = critical_batch_size(&ledger, &roof(device, Dtype::Bf16)).expect("a peak");
            assert!((found - batch).abs() < 1.0, "{device}: {found}");
        }
        // int8 halves the bytes of the linear layers, not those of the head: a little more than half.
        let int8 = self::ledger(&shapes::llama_3_1_8b(), Dtype::Int8);
        let found = critical_batch_size(&int8, &roof("h100-sxm", Dtype::Int8)).expect("a peak");
        assert!((295.0 / 2.0..295.0 * 0.56).contains(&found), "{found}");
    }

    #[test]
    fn the_compute_bound_batch_grows_with_context_until_there_is_none() {
        let ledger = ledger(&shapes::llama_3_1_8b(), Dtype::Bf16);
        let roof = roof("h100-sxm", Dtype::Bf16);
        let at = |context| compute_bound_batch(&ledger, &roof, context);
        let (short, longer) = (at(1).expect("exists"), at(128).expect("exists"));
        assert!((295..300).contains(&short), "{short}");
        assert!(longer > short);
        // A sequence does 15.0 GFLOP, 15.2 µs; its KV of 8192 positions is 1.07 GB, 320 µs.
        assert_eq!(at(8192), None);
        // It is a crossing: one sequence fewer is memory-bound.
        let bound = |batch| Floor::new(&ledger.decode(batch, 128), &roof).bound();
        assert_eq!((bound(longer - 1), bound(longer)), (Bound::Memory, Bound::Compute));
    }

    #[test]
    fn a_prefill_is_compute_bound_from_about_the_critical_batch_size_of_tokens() {
        let ledger = ledger(&shapes::llama_3_1_8b(), Dtype::Bf16);
        let roof = roof("h100-sxm", Dtype::Bf16);
        let tokens = compute_bound_prompt(&ledger, &roof, 1).expect("exists");
        assert!((295..330).contains(&tokens), "{tokens}");
        let bound = |tokens| Floor::new(&ledger.prefill(1, tokens), &roof).bound();
        assert_eq!((bound(tokens - 1), bound(tokens)), (Bound::Memory, Bound::Compute));
        // Eight prompts read the weights once.
        let eight = compute_bound_prompt(&ledger, &roof, 8).expect("exists");
        assert!((tokens / 8..=tokens / 8 + 2).contains(&eight), "{eight}");
    }

    #[test]
    fn crossovers_name_no_context_that_the_model_has_not() {
        let ledger = ledger(&shapes::llama_3_1_8b(), Dtype::Bf16);
        let rows = crossovers(&ledger, &roof("h100-sxm", Dtype::Bf16), None, &[1], &[512, 1 << 20]);
        let said: Vec<&str> = rows.iter().map(|row| row.explanation.as_str()).collect();
        assert!(!said.iter().any(|line| line.contains("1048576")), "{said:?}");
        // 67 MB of KV at 3.35 TB/s, 15.3 GFLOP at 989 TFLOP/s.
        assert!(
            said.iter().any(|line| line.contains("takes 20.1 µs to read and 15.4 µs to compute")),
            "{said:?}"
        );
    }

    #[test]
    fn kv_exceeds_the_weights_where_the_division_says() {
        let ledger = ledger(&shapes::llama_3_1_8b(), Dtype::Bf16);
        // 15,009,849,344 / 131,072 = 114,516.06 at batch 1; 14,314.5 at batch 8.
        assert_eq!(kv_exceeds_weights(&ledger, 1), Some(114_517));
        assert_eq!(kv_exceeds_weights(&ledger, 8), Some(14_315));
        // A window of 4096 at batch 1 never reads 14.2 GB of KV.
        let windowed = self::ledger(&shapes::mistral_7b(), Dtype::Bf16);
        assert_eq!(kv_exceeds_weights(&windowed, 1), None);
    }

    #[test]
    fn under_chunked_attention_the_first_context_whose_kv_exceeds_the_weights_is_found() {
        let scout = crate::model::presets::find("Llama-4-Scout-17B-16E").expect("a shape").architecture;
        let ledger = ledger(&scout, Dtype::Bf16);
        for batch in [8, 32, 128, 512] {
            let exceeds = |context| {
                let bytes = ledger.decode(batch, context).bytes;
                bytes.kv_read > bytes.weights
            };
            // One by one, as far as the answer; chunks are of 8,192.
            let wanted = (1..scout.max_positions).find(|context| exceeds(*context));
            assert_eq!(kv_exceeds_weights(&ledger, batch), wanted, "batch {batch}");
        }
        // A step of 32 exceeds them at the end of a chunk, and no longer where the next begins.
        let first = kv_exceeds_weights(&ledger, 32).expect("a context");
        let bytes = ledger.decode(32, first.next_multiple_of(8192)).bytes;
        assert!(bytes.kv_read < bytes.weights, "{first}");
    }

    #[test]
    fn what_fits_is_what_the_memory_sum_says() {
        let ledger = ledger(&shapes::llama_3_1_8b(), Dtype::Bf16);
        let memory = devices::find("h100-sxm").expect("a row").memory_bytes;
        // 0.9 · 85.899e9 − 16.061e9 = 61.249e9; a sequence at 8192 takes 8193 · 131,072 + 128,256 · 4 B = 1.0744e9: 57.
        assert_eq!(max_batch_that_fits(&ledger, 8192, memory), Some(57));
        // Batch 8: (77,309,411,328 − 16,060,522,496 − 8·128,256·4) / 8 / 131,072 = 58,407 positions, one the new token's.
        let context = max_context_that_fits(&ledger, 8, memory).expect("fits");
        assert!(fits(&ledger, StepShape::decode(8, context), memory));
        assert!(!fits(&ledger, StepShape::decode(8, context + 1), memory));
        assert_eq!(context, 58_406);
        // Batch 1 is limited by the model, and 70B in bf16 does not fit at all.
        assert_eq!(max_context_that_fits(&ledger, 1, memory), Some(131_071));
        let large = self::ledger(&shapes::llama_3_1_70b(), Dtype::Bf16);
        assert_eq!(max_batch_that_fits(&large, 1, memory), None);
    }

    #[test]
    fn one_more_sequence_of_a_mixture_of_experts_adds_its_kv_alone() {
        let ledger = ledger(&shapes::qwen3_30b_a3b(), Dtype::Bf16);
        let spec = devices::find("h200-sxm").expect("a row");
        let rows =
            crossovers(&ledger, &roof("h200-sxm", Dtype::Bf16), Some(spec.memory_bytes), &[1], &[4096]);
        let row = rows.iter().find(|row| row.what == CrossoverKind::ComputeBoundBatch).expect("a row");
        assert_eq!(row.value, None);
        // 4,096 positions of 48 layers, 4 heads of keys and of values, 128 dimensions of 2 B are 403 MB: 84 µs at 4.8 TB/s.
        assert!(row.explanation.contains("one more sequence beside many takes 83."), "{}", row.explanation);
    }

    #[test]
    fn rows_say_what_was_found_and_why_not() {
        let ledger = ledger(&shapes::llama_3_1_8b(), Dtype::Bf16);
        let spec = devices::find("h100-sxm").expect("a row");
        let rows =
            crossovers(&ledger, &roof("h100-sxm", Dtype::Bf16), Some(spec.memory_bytes), &[8], &[8192]);
        let text: Vec<_> = rows.iter().map(|row| format!("{}: {}", row.what, row.explanation)).collect();
        assert_eq!(
            text,
            [
                "critical batch size: weights alone: 15.0 GB at 3.35 TB/s against 989 TFLOP/s (bf16)",
                "compute-bound batch: at context 8192 no batch is compute-bound: one more sequence takes 320 µs to read and 19.5 µs to compute",
                "max batch that fits: 57 at context 8192 in 90 % of 80 GiB",
                "compute-bound prompt: a prefill of batch 8 is compute-bound from 40 prompt tokens each",
                "context where KV bytes exceed weight bytes: batch 8 reads more KV than weights from context 14315",
                "max context that fits: 58406 at batch 8 in 90 % of 80 GiB, of at most 131072 positions",
            ]
        );
    }

    #[test]
    fn searches_find_the_ends_of_their_range() {
        assert_eq!(first(10, |n| n >= 1), Some(1));
        assert_eq!(first(10, |n| n >= 10), Some(10));
        assert_eq!(first(10, |n| n > 10), None);
        assert_eq!(last(10, |n| n <= 10), Some(10));
        assert_eq!(last(10, |n| n <= 3), Some(3));
        assert_eq!(last(10, |_| false), None);
        assert_eq!(last(0, |_| true), None);
    }
}
