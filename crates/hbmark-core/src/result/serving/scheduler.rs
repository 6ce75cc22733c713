//! The scheduler's settings.

use serde::{Deserialize, Serialize};

use crate::stats::splitmix64;

/// The scheduling policy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, clap::ValueEnum)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// First come, first served.
    #[default]
    Fcfs,
    /// The lowest number first, then first come.
    Priority,
}

/// Speculative decoding whose acceptance is scripted, by vLLM's names: what a draft proposes is accepted or not as the seed says, whatever the
/// model would have written. Drafting takes no time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct SpeculativeConfig {
    /// The share of steps that accept the draft token at each position: as many as a step has draft tokens, none larger than the one before.
    pub synthetic_acceptance_rates: Vec<f64>,
    pub seed: u64,
}

impl SpeculativeConfig {
    /// Draft tokens of a step, at the most.
    pub fn num_speculative_tokens(&self) -> usize {
        self.synthetic_acceptance_rates.len()
    }

    /// How many of so many draft tokens of a request are accepted behind a position: the same however steps are batched. On average that is the sum of
    /// their rates.
    pub fn accepted(&self, request: usize, position: usize, draft_tokens: usize) -> usize {
        let drawn =
            splitmix64(self.seed ^ splitmix64(request as u64) ^ splitmix64((position as u64) << 1 | 1));
        // Its upper 53 bits as a number from 0 to below 1.
        let drawn = (drawn >> 11) as f64 / (1_u64 << 53) as f64;
        self.synthetic_acceptance_rates.iter().take(draft_tokens).take_while(|rate| drawn < **rate).count()
    }
}

/// What became of draft tokens, over all verify steps of a run, by vLLM's counters.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct DraftCounts {
    /// Verify steps of sequences.
    pub num_drafts: u64,
    pub num_draft_tokens: u64,
    pub num_accepted_tokens: u64,
    /// By the position of the draft token in its step.
    pub num_accepted_tokens_per_pos: Vec<u64>,
}

impl DraftCounts {
    /// Takes note of a verify step of a sequence.
    pub fn count(&mut self, draft_tokens: usize, accepted: usize) {
        self.num_drafts += 1;
        self.num_draft_tokens += draft_tokens as u64;
        self.num_accepted_tokens += accepted as u64;
        for position in self.num_accepted_tokens_per_pos.iter_mut().take(accepted) {
            *position += 1;
        }
    }

    /// Tokens that a verify step brought a sequence on average: 1 + accepted / drafts. `None` without one.
    pub fn mean_acceptance_length(&self) -> Option<f64> {
        (self.num_drafts > 0).then(|| 1.0 + self.num_accepted_tokens as f64 / self.num_drafts as f64)
    }
}

/// The configuration, by vLLM's names.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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
    /// Speculative decoding; `None` without.
    #[serde(default)]
    pub speculation: Option<SpeculativeConfig>,
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

    /// Admits whatever comes, in the order of arrival, with chunked prefill and prefix caching in blocks of sixteen.
    pub const UNLIMITED: Self = Self {
        max_num_seqs: Self::MAX_NUM_SEQS,
        max_num_batched_tokens: Self::MAX_NUM_BATCHED_TOKENS,
        block_size: 16,
        num_blocks: Self::MAX_NUM_BLOCKS,
        max_model_len: usize::MAX,
        enable_prefix_caching: true,
        enable_chunked_prefill: true,
        scheduling: Policy::Fcfs,
        max_waiting: None,
        max_loras: None,
        speculation: None,
    };

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
