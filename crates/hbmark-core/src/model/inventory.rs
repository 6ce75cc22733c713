//! The list of tensors of a model, each with its shape, stored size and role.
//!
//! Enters: an [`Architecture`](super::Architecture) and a storage format, or the headers of real files. Leaves:
//! an [`Inventory`]. The byte ledger, synthetic weights, file validation and memory predictions all read this one list,
//! so bytes are counted from tensors and never from a parameter count.

use serde::{Deserialize, Serialize};

use super::format::MX_GROUP;
use crate::units::Bytes;

/// What a tensor is for; decides how often a step reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// The token table: B rows a step, unless it is also the head.
    Embedding,
    /// The output projection.
    Head,
    /// A linear layer outside the experts.
    Matrix,
    /// A linear layer of one routed expert: read only when a token is routed to it.
    Expert,
    /// A linear layer every token passes, in a mixture-of-experts layer.
    SharedExpert,
    /// The expert router.
    Router,
    Norm,
    Bias,
    /// Scales and zeros of quantised weights that are read with [`Role::Matrix`] tensors.
    Scale,
    /// Scales of routed experts.
    ExpertScale,
    /// Biases of routed experts.
    ExpertBias,
    /// Present in the file and never read by a step (rotary tables, unused heads).
    Unused,
}

/// One tensor as stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct TensorInfo {
    pub name: String,
    pub shape: Vec<usize>,
    /// Storage format as the file or the generator names it: `bf16`, `f32`, `q8_0`...
    pub storage: String,
    pub bytes: Bytes,
    pub role: Role,
    /// The layer it belongs to, if any.
    pub layer: Option<usize>,
}

impl TensorInfo {
    /// Rows and columns of a matrix: those of all experts below each other where they are one tensor, of which plain ones are
    /// `[experts, input, out]` where a family stores them `by_input`. `None` where it is not a matrix.
    pub fn rows_and_columns(&self, by_input: bool) -> Option<(usize, usize)> {
        match *self.shape.as_slice() {
            _ if self.role == Role::ExpertBias => None,
            [rows, columns] => Some((rows, columns)),
            [count, input, out] if by_input && matches!(self.storage.as_str(), "f32" | "bf16" | "f16") => {
                Some((count * out, input))
            }
            [count, out, input] => Some((count * out, input)),
            _ => None,
        }
    }

    /// Its shape as checkpoints state it: blocks of mxfp4 are `[experts, out, blocks, 16]` bytes, two weights in each.
    pub fn shape_in_files(&self) -> Vec<usize> {
        match self.shape.as_slice() {
            [count, out, input] if self.storage == "mxfp4" && self.name.ends_with("_blocks") => {
                vec![*count, *out, input.div_ceil(MX_GROUP), MX_GROUP / 2]
            }
            shape => shape.to_vec(),
        }
    }

    /// Elements of the tensor.
    pub fn elements(&self) -> u64 {
        self.shape.iter().map(|&d| d as u64).product()
    }
}

/// Every tensor of a model.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Inventory {
    pub tensors: Vec<TensorInfo>,
}

impl Inventory {
    /// Bytes of all tensors together: what has to fit in memory.
    pub fn total_bytes(&self) -> Bytes {
        self.tensors.iter().map(|t| t.bytes).sum()
    }

    /// Parameters, counting every tensor but scales once, and without what no step reads.
    pub fn parameters(&self) -> u64 {
        self.tensors
            .iter()
            .filter(|t| !matches!(t.role, Role::Scale | Role::ExpertScale | Role::Unused))
            .map(TensorInfo::elements)
            .sum()
    }

    /// The first tensor in blocks of 256 whose rows are not whole blocks: ggml stores no such rows.
    pub fn rows_that_blocks_do_not_divide(&self) -> Option<&TensorInfo> {
        let blocks = |t: &&TensorInfo| matches!(t.storage.as_str(), "q4_k" | "q5_k" | "q6_k");
        self.tensors.iter().filter(blocks).find(|t| t.shape.last().is_some_and(|row| row % 256 != 0))
    }

    /// Bytes of the tensors with a role.
    pub fn bytes_of(&self, role: Role) -> Bytes {
        self.tensors.iter().filter(|t| t.role == role).map(|t| t.bytes).sum()
    }
}
