//! The scheduler's knobs, from what was asked and what the engine and its memory allow.

use serde::Serialize;

use super::ServeError;
use crate::engine::Capabilities;
use crate::measure::environment::Environment;
use crate::roofline::Ledger;
use crate::serve::scheduler::{Policy, SchedulerConfig};
use crate::units::Bytes;

/// Knobs as asked for; `None` is chosen here.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Knobs {
    pub max_num_seqs: Option<usize>,
    pub max_num_batched_tokens: Option<usize>,
    pub gpu_memory_utilization: Option<f64>,
    pub num_gpu_blocks_override: Option<usize>,
    pub block_size: Option<usize>,
    pub max_model_len: Option<usize>,
    pub enable_prefix_caching: Option<bool>,
    pub enable_chunked_prefill: Option<bool>,
    pub scheduling: Policy,
    pub max_waiting: Option<usize>,
    pub max_loras: Option<usize>,
}

/// vLLM's defaults for a GPU.
const GPU: (usize, usize, usize) = (256, 2048, 16);
/// A CPU takes seconds for a step of 2048 tokens; blocks are those the native engine streams best.
const CPU: (usize, usize, usize) = (32, 512, crate::engine::native::DEFAULT_BLOCK_SIZE);
/// Share of a GPU's memory that may be used, weights and activations included; vLLM's default.
const GPU_UTILIZATION: f64 = 0.9;
/// Share of the host's free memory that KV may take: a workstation has other things to do.
const CPU_UTILIZATION: f64 = 0.25;
/// Blocks beyond which a pool is a typing error.
const MAX_BLOCKS: usize = 1 << 28;

impl Knobs {
    fn resolve(
        &self,
        defaults: (usize, usize, usize),
        max_positions: usize,
        blocks: usize,
    ) -> SchedulerConfig {
        let max_model_len = self.max_model_len.unwrap_or(max_positions).min(max_positions);
        let chunked = self.enable_chunked_prefill.unwrap_or(true);
        // Without chunking the longest request must fit one step.
        let least = if chunked { 1 } else { max_model_len };
        SchedulerConfig {
            max_num_seqs: self.max_num_seqs.unwrap_or(defaults.0),
            max_num_batched_tokens: self.max_num_batched_tokens.unwrap_or(defaults.1.max(least)),
            block_size: self.block_size.unwrap_or(defaults.2),
            num_blocks: self.num_gpu_blocks_override.unwrap_or(blocks).min(MAX_BLOCKS),
            max_model_len,
            enable_prefix_caching: self.enable_prefix_caching.unwrap_or(true),
            enable_chunked_prefill: chunked,
            scheduling: self.scheduling,
            max_waiting: self.max_waiting,
            max_loras: self.max_loras,
        }
    }

    /// Blocks that `memory` holds, and no more than all sequences at their longest need.
    fn blocks(config: &SchedulerConfig, ledger: &Ledger, memory: u64) -> Result<usize, ServeError> {
        let block = ledger.kv_bytes_per_token().0 * config.block_size as u64;
        let fit = usize::try_from(memory / block.max(1)).unwrap_or(usize::MAX);
        if fit == 0 {
            return Err(ServeError::NoRoomForKv {
                what: "one block of KV".into(),
                needed: Bytes(block),
                have: Bytes(memory),
            });
        }
        let most = config.max_num_seqs.saturating_mul(config.max_model_len.div_ceil(config.block_size));
        // A prefix cache may use whatever there is.
        Ok(if config.enable_prefix_caching { fit } else { fit.min(most) }.min(MAX_BLOCKS))
    }

    /// The knobs on a device that is not here: memory of the data sheet less weights and activations.
    pub(super) fn on_a_device(
        &self,
        ledger: &Ledger,
        memory: Option<Bytes>,
    ) -> Result<SchedulerConfig, ServeError> {
        let config = self.resolve(GPU, ledger.architecture().max_positions, 0);
        if self.num_gpu_blocks_override.is_some() {
            return Ok(config);
        }
        let share = self.gpu_memory_utilization.unwrap_or(GPU_UTILIZATION);
        let all = memory.map_or(f64::INFINITY, Bytes::as_f64) * share;
        let a = ledger.architecture();
        // The widest activations of a full step in 16 bits: gate and up beside the residual.
        let activations = (config.max_num_batched_tokens * (2 * a.ffn_size + 2 * a.hidden_size) * 2) as f64;
        let taken = ledger.resident_weights().as_f64() + activations;
        let left = all - taken;
        if left <= 0.0 {
            #[expect(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                reason = "bytes of a device"
            )]
            return Err(ServeError::NoRoomForKv {
                what: "the model without any KV".into(),
                needed: Bytes(taken as u64),
                have: Bytes(all as u64),
            });
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "bytes of a device")]
        let num_blocks = Self::blocks(&config, ledger, left as u64)?;
        Ok(SchedulerConfig { num_blocks, ..config })
    }

    /// The knobs on an engine that is loaded.
    pub(super) fn on_an_engine(
        &self,
        capabilities: &Capabilities,
        ledger: &Ledger,
        environment: &Environment,
    ) -> Result<SchedulerConfig, ServeError> {
        let asked = if capabilities.paged {
            self.clone()
        } else {
            // A cache of its own: one sequence each, from position 0, in one piece.
            Self { enable_prefix_caching: Some(false), enable_chunked_prefill: Some(false), ..self.clone() }
        };
        let mut config = asked.resolve(CPU, capabilities.max_positions, 0);
        config.max_num_seqs = config.max_num_seqs.min(capabilities.max_batch);
        config.enable_prefix_caching &= capabilities.prefix_sharing;
        if self.num_gpu_blocks_override.is_some() {
            return Ok(config);
        }
        let cpu = &environment.cpu;
        let free = cpu.memory_available_bytes.or(cpu.memory_bytes).map_or(4 << 30, |bytes| bytes.0);
        let free = cpu.memory_limit_bytes.map_or(free, |limit| free.min(limit.0));
        let share = self.gpu_memory_utilization.unwrap_or(CPU_UTILIZATION);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share of a count of bytes"
        )]
        let memory = (free as f64 * share) as u64;
        config.num_blocks = Self::blocks(&config, ledger, memory)?;
        Ok(config)
    }
}
