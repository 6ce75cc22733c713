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
