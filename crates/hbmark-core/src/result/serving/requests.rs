//! Every measured request.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Measured requests in the order of their arrival. Times are whole nanoseconds since the start of the run, null for what never happened.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Requests {
    /// Scheduled, whenever the loop came to it.
    pub arrival_ns: Vec<u64>,
    /// First scheduled for a step.
    pub started_ns: Vec<Option<u64>>,
    pub first_token_ns: Vec<Option<u64>>,
    pub last_token_ns: Vec<Option<u64>>,
    pub prompt_tokens: Vec<usize>,
    pub output_tokens: Vec<usize>,
    /// Prompt tokens that were found in the cache.
    pub cached_tokens: Vec<usize>,
    /// `served`, `unfinished`, or why it was rejected.
    pub fate: Vec<String>,
}
