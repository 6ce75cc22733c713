//! What a sweep varies.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

/// The variable of a sweep.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum SweepVariable {
    Rate,
    Concurrency,
    MaxNumSeqs,
    MaxNumBatchedTokens,
    NumGpuBlocksOverride,
    BlockSize,
    InputLen,
    OutputLen,
    PrefixShare,
}

/// What is not a variable of a sweep.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("a sweep over {given} is not known; the variables are {}", SweepVariable::ALL.map(SweepVariable::name).join(", "))]
pub struct UnknownVariable {
    pub given: String,
}

impl SweepVariable {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Rate,
        Self::Concurrency,
        Self::MaxNumSeqs,
        Self::MaxNumBatchedTokens,
        Self::NumGpuBlocksOverride,
        Self::BlockSize,
        Self::InputLen,
        Self::OutputLen,
        Self::PrefixShare,
    ];

    /// As it is given and saved: the flag without its dashes.
    pub fn name(self) -> &'static str {
        match self {
            Self::Rate => "rate",
            Self::Concurrency => "concurrency",
            Self::MaxNumSeqs => "max-num-seqs",
            Self::MaxNumBatchedTokens => "max-num-batched-tokens",
            Self::NumGpuBlocksOverride => "num-gpu-blocks-override",
            Self::BlockSize => "block-size",
            Self::InputLen => "input-len",
            Self::OutputLen => "output-len",
            Self::PrefixShare => "prefix-share",
        }
    }

    /// Whether it is how much is asked of the system, and not how the system or the requests are.
    pub fn is_load(self) -> bool {
        matches!(self, Self::Rate | Self::Concurrency)
    }

    /// Whether it is a setting of our own scheduler.
    pub fn is_of_scheduler(self) -> bool {
        matches!(
            self,
            Self::MaxNumSeqs | Self::MaxNumBatchedTokens | Self::NumGpuBlocksOverride | Self::BlockSize
        )
    }
}

impl fmt::Display for SweepVariable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for SweepVariable {
    type Err = UnknownVariable;
    fn from_str(given: &str) -> Result<Self, UnknownVariable> {
        let known = Self::ALL.into_iter().find(|variable| variable.name() == given);
        known.ok_or_else(|| UnknownVariable { given: given.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_is_saved_under_the_name_that_it_is_given_by() {
        for variable in SweepVariable::ALL {
            assert_eq!(serde_json::to_value(variable).unwrap(), variable.name());
            assert_eq!(variable.name().parse(), Ok(variable));
        }
        let unknown = "max_num_seqs".parse::<SweepVariable>().unwrap_err().to_string();
        assert!(unknown.ends_with("the variables are rate, concurrency, max-num-seqs, max-num-batched-tokens, num-gpu-blocks-override, block-size, input-len, output-len, prefix-share"), "{unknown}");
    }
}
