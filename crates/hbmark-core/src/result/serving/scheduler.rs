//! The scheduler's settings.

/// The scheduling policy.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    Default,
    serde::Serialize,
    serde::Deserialize,
    schemars::JsonSchema,
    clap::ValueEnum,
)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// First come, first served.
    #[default]
    Fcfs,
    /// The lowest number first, then first come.
    Priority,
}

/// The configuration, by vLLM's names.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize, serde::Deserialize, schemars::JsonSchema)]
pub struct SchedulerConfig {
    /// Sequences that run at once.
    pub max_num_seqs: usize,
    /// Tokens of one step.
    pub max_num_batched_tokens: usize,
    /// Positions of a KV block.
    pub block_size: usize,
    /// Blocks of the pool.
    pub num_blocks: usize,
    /// Positions of prompt and output together.
    pub max_model_len: usize,
    pub enable_prefix_caching: bool,
    pub enable_chunked_prefill: bool,
    pub scheduling: Policy,
    /// Requests that may wait; more are rejected. `None` admits all.
    pub max_waiting: Option<usize>,
    /// Different adapters that run at once; `None` is all there are. The next request in rank waits for a slot and is not overtaken, so that a
    /// rare adapter is not starved by common ones.
    #[serde(default)]
    pub max_loras: Option<usize>,
}

/// A setting beyond what a scheduler is built for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{name} {value} is not between 1 and {most}; give a number in that range")]
pub struct SettingOutOfRange {
    pub name: &'static str,
    pub value: usize,
    pub most: usize,
}

impl SchedulerConfig {
    /// Beyond these a number is a typing error: each is many times what any server is run with, and none takes memory or time by itself.
    pub const MAX_NUM_SEQS: usize = 1 << 16;
    pub const MAX_NUM_BATCHED_TOKENS: usize = 1 << 24;
    pub const MAX_BLOCK_SIZE: usize = 1 << 16;
    pub const MAX_NUM_BLOCKS: usize = 1 << 28;

    /// Checks every number against its range.
    ///
    /// # Errors
    /// The first that is out of it.
    pub fn check(&self) -> Result<(), SettingOutOfRange> {
        let settings = [
            ("max-num-seqs", self.max_num_seqs, Self::MAX_NUM_SEQS),
            ("max-num-batched-tokens", self.max_num_batched_tokens, Self::MAX_NUM_BATCHED_TOKENS),
            ("block-size", self.block_size, Self::MAX_BLOCK_SIZE),
            ("num-gpu-blocks-override", self.num_blocks, Self::MAX_NUM_BLOCKS),
        ];
        match settings.into_iter().find(|(_, value, most)| !(1..=*most).contains(value)) {
            Some((name, value, most)) => Err(SettingOutOfRange { name, value, most }),
            None => Ok(()),
        }
    }
}
