//! A prediction for several GPUs that hold one model: how it lies over them, and what its steps exchange.

use serde::{Deserialize, Serialize};

use crate::model::Dtype;
use crate::units::Bytes;

/// How a predicted model lies over GPUs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct GroupSummary {
    pub tensor_parallel_size: usize,
    pub pipeline_parallel_size: usize,
    /// Whether the GPUs of a stage hold whole experts, and not a slice of each.
    pub expert_parallel: bool,
    pub gpus: usize,
    /// What the collectives are priced at; null where the table has no link between so many of the device.
    pub link: Option<Link>,
    /// Of each dtype, the stages in order.
    pub stages: Vec<StageSummary>,
}

/// How GPUs reach each other within one machine, by a data sheet.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Link {
    pub name: String,
    /// Of one GPU in one direction, to all others together.
    pub bytes_per_s: f64,
    /// To one other GPU, where each has links of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_peer_bytes_per_s: Option<f64>,
    /// The most that it reaches.
    pub gpus: usize,
    /// The switch adds numbers up itself: an all-reduce sends each byte once.
    pub reduces: bool,
    pub source: String,
}

/// The fullest GPU of a stage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct StageSummary {
    pub dtype: Dtype,
    pub first_layer: usize,
    pub layers: usize,
    /// Weights on it.
    pub weight_bytes: Bytes,
    /// Of these, what the other GPUs of the stage hold as well.
    pub replicated_bytes: Bytes,
    /// What a token adds to its cache.
    pub kv_bytes_per_token: Bytes,
}

/// Where the time of a predicted step of a group goes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct GroupStep {
    /// The floor of the slowest GPU of each stage, without what it exchanges.
    pub stages_ns: Vec<f64>,
    /// What is exchanged in a step, over all stages.
    pub collectives: Vec<CollectiveRow>,
    /// All of it at the speed of the link; null where that is not known.
    pub collectives_ns: Option<f64>,
    /// The time between two steps with as many batches in flight as there are stages: that of the slowest stage.
    pub interval_ns: f64,
    /// The step with its all-reduces as others measured them on this device, and the rest at the speed of the link.
    pub measured: Vec<MeasuredStep>,
}

impl GroupStep {
    /// Whether what is exchanged takes longer, at the speed of the link, than the work of all stages.
    pub fn is_bound_by_collectives(&self) -> bool {
        self.collectives_ns.is_some_and(|exchanged| exchanged > self.stages_ns.iter().sum())
    }
}

/// Which exchange between GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum CollectiveKind {
    AllReduce,
    AllGather,
    /// From a stage to the next.
    Send,
}

/// Equal exchanges of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct CollectiveRow {
    pub kind: CollectiveKind,
    /// What is exchanged: `hidden states after each mixer and feed-forward`.
    pub what: String,
    pub count: usize,
    /// Of the result, on each GPU.
    pub bytes: Bytes,
    /// What each GPU must send for one at the least.
    pub sent_bytes: Bytes,
    /// All of them at the speed of the link.
    pub link_ns: Option<f64>,
}

/// A step with measured all-reduces.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct MeasuredStep {
    /// Whose: `NCCL 2.29.2`.
    pub by: String,
    pub source: String,
    pub all_reduces_ns: f64,
    pub step_ns: f64,
}
