//! Tensor parallel groups of GPUs against the CPU: a step of each kind, whose parts are summed over peer memory.
//!
//! Enters: the operations of each GPU. Leaves: a check of the logits and of the greedy tokens of a prefill and of decodes, kernel by kernel, recorded and
//! replayed.

use std::path::Path;

use super::THREADS;
use crate::engine::native::cpu::CpuOperations;
use crate::engine::native::cuda::device::Device;
use crate::engine::native::cuda::operations::CudaOperations;
use crate::engine::native::{DEFAULT_BLOCK_SIZE, NativeSession, ParallelSession};
use crate::engine::relative_error;
use crate::engine::{EngineError, SequenceId, Session, StepBatch};
use crate::run::verify::{Check, Record};
use crate::weights::OpenModel;
use hbmark_core::model::{Dtype, parse_config};

const AREA: &str = "groups";

/// Heads, channels and a vocabulary that eight GPUs can share, the last of them in unequal parts.
const CONFIG: &str = r#"{"model_type":"qwen3","hidden_size":256,"num_hidden_layers":3,"num_attention_heads":16,
    "num_key_value_heads":8,"head_dim":16,"intermediate_size":512,"vocab_size":1003,"max_position_embeddings":256,
    "rms_norm_eps":1e-5,"rope_theta":10000.0,"hidden_act":"silu","torch_dtype":"float32","use_sliding_window":false,
    "attention_bias":false,"tie_word_embeddings":false}"#;

/// Prompts, of which the longest makes sums that are made in two parts where the most bytes of one part are few; and decodes behind them.
const LENGTHS: [usize; 3] = [1, 70, 17];
const DECODES: usize = 6;
const VOCABULARY: u32 = 1003;

/// The order of sums differs.
const TOLERANCE: f64 = 1e-4;

/// Checks a group.
pub fn against_the_cpu<D: Device + 'static>(operations: Vec<CudaOperations<D>>, record: &mut Record<'_>) {
    let name = format!("{} GPUs = the CPU", operations.len());
    record(match compared(operations) {
        Ok((error, same)) => {
            let tokens = if same { "the same tokens" } else { "other tokens" };
            let detail = format!("logits within {error:.1e}, at most {TOLERANCE:.0e}; {tokens}");
            Check::new(AREA, name, error <= TOLERANCE && same, detail)
        }
        Err(error) => Check::failed(AREA, name, error.to_string()),
    });
}

fn compared<D: Device + 'static>(operations: Vec<CudaOperations<D>>) -> Result<(f64, bool), EngineError> {
    let architecture = parse_config(CONFIG, Path::new("built in")).expect("the built-in config is valid");
    let model = OpenModel::synthetic("small", architecture, 7);
    let (dtype, block_size) = (Dtype::F32, DEFAULT_BLOCK_SIZE);
    let cpu = CpuOperations::new(THREADS)?;
    let mut wanted = NativeSession::load(cpu, &model, dtype, block_size, &mut |_| {})?;
    let mut found = ParallelSession::on_gpus(&model, (dtype, dtype), operations, block_size, &mut |_| {})?;
    let (mut worst, mut same) = (0.0f64, true);
    for step in 0..=DECODES {
        let mut batch = StepBatch::default();
        for (sequence, length) in LENGTHS.into_iter().enumerate() {
            let (count, start) = if step == 0 { (length, 0) } else { (1, length + step - 1) };
            let places = (0u32..).zip(0..count);
            let first = u32::try_from(sequence * 11 + step * 5).expect("a few sequences and steps");
            let tokens = places.map(|(at, _)| (at * 37 + first) % VOCABULARY).collect();
            let id = SequenceId(sequence as u64);
            batch.sequences.extend(StepBatch::uniform(id, &[tokens], start).sequences);
        }
        let mut tokens = [Vec::new(), Vec::new()];
        wanted.step(&batch)?;
        wanted.next_tokens(&mut tokens[0])?;
        found.step(&batch)?;
        found.next_tokens(&mut tokens[1])?;
        let of_both = (wanted.logits()?, found.logits()?);
        for (wanted, found) in of_both.0.iter().zip(&of_both.1) {
            worst = worst.max(relative_error(found, wanted));
        }
        same &= tokens[0] == tokens[1];
    }
    Ok((worst, same))
}

#[cfg(all(test, debug_assertions))]
mod tests {
    use super::*;
    use crate::engine::native::cuda::emulator::Emulated;
    use crate::engine::native::cuda::kernels::Tuning;

    fn checked(fails_in: Option<usize>) -> Check {
        let tuning = Tuning {
            max_one_shot_bytes: 8 << 10,
            rank_timeout: std::time::Duration::from_secs(if fails_in.is_some() { 3 } else { 120 }),
            ..Tuning::default()
        };
        let mut devices = Emulated::group(4);
        devices[2].fails_in = fails_in;
        let operations = devices.into_iter().map(|device| CudaOperations::with_tuning(device, tuning));
        let mut checks = Vec::new();
        against_the_cpu(operations.collect(), &mut |check| checks.push(check));
        checks.remove(0)
    }

    #[test]
    fn a_group_that_is_right_passes_and_one_with_a_fault_does_not() {
        let right = checked(None);
        assert!(right.passed && right.detail.contains("the same tokens"), "{right:?}");
        let wrong = checked(Some(3));
        assert!(!wrong.passed && wrong.detail.contains("a planted fault"), "{wrong:?}");
    }
}
