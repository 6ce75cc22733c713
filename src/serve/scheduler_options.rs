//! The scheduler's options, from what was asked and what the engine and its memory allow.

use serde::Serialize;

use super::ServeError;
use crate::engine::native::DEFAULT_BLOCK_SIZE;
use hbmark_core::ledger::Ledger;
use hbmark_core::result::serving::{Policy, SchedulerConfig, SpeculativeConfig};
use hbmark_core::result::{Capabilities, Environment};
use hbmark_core::units::{Bytes, whole};

/// Options as asked for; `None` is chosen here.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct SchedulerOptions {
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
    pub speculation: Option<SpeculativeConfig>,
}

/// Sequences and tokens of a step, and positions of a block, where nothing is said.
#[derive(Debug, Clone, Copy)]
struct Defaults {
    max_num_seqs: usize,
    max_num_batched_tokens: usize,
    block_size: usize,
}

/// vLLM's defaults for a GPU.
const GPU: Defaults = Defaults { max_num_seqs: 256, max_num_batched_tokens: 2048, block_size: 16 };
/// A CPU takes seconds for a step of 2048 tokens.
const CPU: Defaults =
    Defaults { max_num_seqs: 32, max_num_batched_tokens: 512, block_size: DEFAULT_BLOCK_SIZE };
/// Share of a GPU's memory that may be used, weights and activations included; vLLM's default.
const GPU_UTILIZATION: f64 = 0.9;
/// Share of the host's free memory that KV may take: a workstation has other things to do.
const CPU_UTILIZATION: f64 = 0.25;

/// Where KV blocks have room.
#[derive(Debug, Clone, Copy)]
pub(super) enum KvMemoryBudget {
    /// A GPU's memory, beside the weights, where its size is known.
    Gpu(Option<Bytes>),
    /// The host's free memory.
    Host(Option<Bytes>),
}

impl KvMemoryBudget {
    /// On the device of a measurement.
    pub(super) fn of(environment: &Environment, on_gpu: bool) -> Self {
        if on_gpu {
            return Self::Gpu(environment.gpu.as_ref().and_then(|gpu| gpu.memory_bytes));
        }
        let cpu = &environment.cpu;
        let free = cpu.memory_available_bytes.or(cpu.memory_bytes);
        Self::Host(free.map(|free| cpu.memory_limit_bytes.map_or(free, |limit| free.min(limit))))
    }

    fn defaults(self) -> Defaults {
        match self {
            Self::Gpu(_) => GPU,
            Self::Host(_) => CPU,
        }
    }

    /// Bytes for KV.
    fn for_kv(self, share: Option<f64>, taken: Bytes) -> Result<Bytes, ServeError> {
        let part = |all: Bytes, usual: f64| whole(all.as_f64() * share.unwrap_or(usual));
        match self {
            Self::Gpu(Some(all)) => {
                let have = Bytes(part(all, GPU_UTILIZATION));
                if have > taken {
                    return Ok(Bytes(have.0 - taken.0));
                }
                let remedy = more_memory(taken, have, all);
                let what = "the model without any KV".into();
                Err(ServeError::InsufficientKvMemory { what, needed: taken, have, remedy })
            }
            Self::Host(Some(free)) => Ok(Bytes(part(free, CPU_UTILIZATION))),
            Self::Gpu(None) | Self::Host(None) => Err(ServeError::Needs {
                what: "the KV pool",
                needs: "the size of the device's memory, which is not known here: give --num-gpu-blocks-override",
            }),
        }
    }
}

const RAISE: &str = "raise --gpu-memory-utilization, or choose a smaller model or dtype";

/// What to do where a model does not fit the share `have` of all the memory of a device: serving has one.
fn more_memory(needed: Bytes, have: Bytes, all: Bytes) -> String {
    if needed.0 < all.0 {
        return RAISE.to_owned();
    }
    format!(
        "it takes the memory of {} such devices, and serve has one: choose a smaller model or dtype; hbmark predict \
         --tensor-parallel-size has groups of devices",
        needed.0.div_ceil(have.0.max(1))
    )
}

impl SchedulerOptions {
    fn resolve(&self, defaults: Defaults, max_positions: usize) -> SchedulerConfig {
        let max_model_len = self.max_model_len.unwrap_or(max_positions).min(max_positions);
        let chunked = self.enable_chunked_prefill.unwrap_or(true);
        // Without chunking the longest request must fit one step.
        let least = if chunked { 1 } else { max_model_len };
        SchedulerConfig {
            max_num_seqs: self.max_num_seqs.unwrap_or(defaults.max_num_seqs),
            max_num_batched_tokens: self
                .max_num_batched_tokens
                .unwrap_or(defaults.max_num_batched_tokens.max(least)),
            block_size: self.block_size.unwrap_or(defaults.block_size),
            num_blocks: self.num_gpu_blocks_override.unwrap_or(0),
            max_model_len,
            enable_prefix_caching: self.enable_prefix_caching.unwrap_or(true),
            enable_chunked_prefill: chunked,
            scheduling: self.scheduling,
            max_waiting: self.max_waiting,
            max_loras: self.max_loras,
            speculation: self.speculation.clone(),
        }
    }

    /// Blocks that `memory` holds, and no more than all sequences at their longest need. A block of an engine has room for all layers of its
    /// positions; of a model of one it has what sequences of `typical` positions keep of as many, so that as many fit as their caches do.
    fn blocks(
        config: &SchedulerConfig,
        ledger: &Ledger,
        memory: u64,
        typical: Option<usize>,
    ) -> Result<usize, ServeError> {
        let position = typical
            .map_or(ledger.kv_bytes_per_token().as_f64(), |positions| ledger.kept_per_position(positions));
        let block = whole((position * config.block_size as f64).ceil());
        let fit = usize::try_from(memory / block.max(1)).unwrap_or(usize::MAX);
        if fit == 0 {
            return Err(ServeError::InsufficientKvMemory {
                what: "one block of KV".into(),
                needed: Bytes(block),
                have: Bytes(memory),
                remedy: RAISE.into(),
            });
        }
        let most = config.max_num_seqs.saturating_mul(config.max_model_len.div_ceil(config.block_size));
        // A prefix cache may use whatever there is.
        Ok(if config.enable_prefix_caching { fit } else { fit.min(most) }
            .min(SchedulerConfig::MAX_NUM_BLOCKS))
    }

    /// The options in a room for KV, beside weights and the activations of a step; `typical` positions of a sequence where no engine has the blocks.
    pub(super) fn for_budget(
        &self,
        budget: KvMemoryBudget,
        ledger: &Ledger,
        typical: Option<usize>,
    ) -> Result<SchedulerConfig, ServeError> {
        let a = ledger.architecture();
        let config = self.resolve(budget.defaults(), a.max_positions);
        if self.num_gpu_blocks_override.is_some() {
            return Ok(config);
        }
        // The widest activations of a full step in 16 bits: gate and up beside the residual.
        let activations =
            config.max_num_batched_tokens.saturating_mul((2 * a.ffn_size + 2 * a.hidden_size) * 2);
        let taken = ledger.resident_weights() + Bytes(activations as u64);
        let memory = budget.for_kv(self.gpu_memory_utilization, taken)?;
        let num_blocks = Self::blocks(&config, ledger, memory.0, typical)?;
        Ok(SchedulerConfig { num_blocks, ..config })
    }

    /// The options on an engine that is loaded.
    pub(super) fn for_engine(
        &self,
        capabilities: &Capabilities,
        budget: KvMemoryBudget,
        ledger: &Ledger,
    ) -> Result<SchedulerConfig, ServeError> {
        let most = self.max_num_seqs.unwrap_or(budget.defaults().max_num_seqs).min(capabilities.max_batch);
        let prefixes = self.enable_prefix_caching.unwrap_or(true) && capabilities.prefix_sharing;
        let model_len =
            self.max_model_len.unwrap_or(capabilities.max_positions).min(capabilities.max_positions);
        let mut asked = Self {
            max_num_seqs: Some(most),
            enable_prefix_caching: Some(prefixes),
            max_model_len: Some(model_len),
            // What the engine's blocks have, whatever others would choose.
            block_size: self.block_size.or(Some(DEFAULT_BLOCK_SIZE)),
            ..self.clone()
        };
        if !capabilities.paged {
            // A cache of its own: one sequence each, from position 0, in one piece.
            (asked.enable_prefix_caching, asked.enable_chunked_prefill) = (Some(false), Some(false));
        }
        asked.for_budget(budget, ledger, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::native;
    use hbmark_core::model::{Dtype, test_shapes};
    use hbmark_core::result::{CpuEnvironment, GpuEnvironment};

    fn environment() -> Environment {
        let gib = |n: u64| Some(Bytes(n << 30));
        let cpu = CpuEnvironment { memory_available_bytes: gib(1000), ..CpuEnvironment::default() };
        let gpu = GpuEnvironment { memory_bytes: gib(80), ..GpuEnvironment::default() };
        Environment { cpu, gpu: Some(gpu), ..Environment::default() }
    }

    fn engine() -> Capabilities {
        let all = native::capabilities(&test_shapes::llama_3_1_8b(), "cuda:0", false);
        Capabilities { max_batch: 1024, ..all }
    }

    fn ledger() -> Ledger {
        let shape = test_shapes::llama_3_1_8b();
        Ledger::new(&shape, &shape.inventory(Dtype::Bf16), Dtype::Bf16)
    }

    #[test]
    fn a_pool_on_a_gpu_is_of_its_memory_and_not_of_the_hosts() {
        let on = |gpu| {
            SchedulerOptions::default()
                .for_engine(&engine(), KvMemoryBudget::of(&environment(), gpu), &ledger())
                .unwrap()
        };
        let held = |config: &SchedulerConfig| {
            (config.num_blocks * config.block_size) as f64 * ledger().kv_bytes_per_token().as_f64()
                / f64::from(1 << 30)
        };
        let gpu = on(true);
        assert_eq!(
            (gpu.max_num_seqs, gpu.max_num_batched_tokens, gpu.block_size),
            (256, 2048, DEFAULT_BLOCK_SIZE)
        );
        // 90 % of 80 GiB, less 15 GiB of weights and a little for activations.
        assert!((56.5..57.1).contains(&held(&gpu)), "{}", held(&gpu));
        let host = on(false);
        assert_eq!((host.max_num_seqs, host.max_num_batched_tokens), (32, 512));
        assert!((249.9..250.1).contains(&held(&host)), "{}", held(&host));
    }

    #[test]
    fn a_memory_of_unknown_size_needs_a_number_of_blocks() {
        let budget = KvMemoryBudget::of(&Environment::default(), true);
        let error = SchedulerOptions::default().for_budget(budget, &ledger(), None).unwrap_err().to_string();
        assert!(error.contains("--num-gpu-blocks-override"), "{error}");
        let told = SchedulerOptions { num_gpu_blocks_override: Some(100), ..SchedulerOptions::default() };
        assert_eq!(told.for_budget(budget, &ledger(), None).unwrap().num_blocks, 100);
    }

    #[test]
    fn a_modelled_pool_holds_as_many_sequences_as_their_windows_and_states_leave_room_for() {
        let memory = Bytes(151_397_597_184);
        let pool = |name: &str, typical: Option<usize>| {
            let shape = hbmark_core::model::presets::find(name).unwrap().architecture;
            let ledger = Ledger::new(&shape, &shape.inventory(Dtype::Bf16), Dtype::Bf16);
            let budget = KvMemoryBudget::Gpu(Some(memory));
            SchedulerOptions::default().for_budget(budget, &ledger, typical).unwrap().num_blocks
        };
        // On an H200 predict says that 26 sequences of 32,768 positions fit beside Gemma-3-27B, of which five layers in six keep 1,024.
        let sequences = |typical| pool("Gemma-3-27B", typical) / (32_768 / 16);
        assert_eq!((sequences(None), sequences(Some(32_768))), (4, 26));
        assert_eq!(pool("Gemma-3-27B", None), pool("Gemma-3-27B", Some(1_024)));
        // A short sequence of Qwen3.5-27B keeps more state than KV.
        assert!(pool("Qwen3.5-27B", Some(256)) < pool("Qwen3.5-27B", None) / 2);
    }
}
