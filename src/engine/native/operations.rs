//! What a device must be able to do for the native forward: the fused operations of a layer, and nothing else.
//!
//! Enters: packed weights, activations and the [`Rows`] of a ragged step. Leaves: activations and KV. `forward` calls these
//! in order and knows no device; a device implements them and knows no model. There is a fast CPU implementation
//! (`cpu`) and a plain one that accumulates in f64 and is the oracle of all others (`oracle`).
//!
//! Activations are `[rows, width]`, f32, one row per token of the step. A linear layer rounds its input to the precision its
//! weights are multiplied in: bf16 for bf16 and fp8 weights, 8-bit groups of 32 for integer weights, f32 otherwise. Every implementation
//! does the same, so that they can be compared closely. All of them fail when memory runs out, the device fails or has no such operation, or a
//! rank of the group was lost.

#![expect(clippy::missing_errors_doc, reason = "said once for all")]

use super::adapters::LoraWeights;
use super::ragged_batch::Rows;
use super::ranks::Rank;
use super::rope::RopeTables;
use super::shapes::{AttentionShape, ExpertShape, ExpertsMet, Gate, LatentForm, LatentShape, PoolShape};
use crate::engine::timeline::MonotonicTimeline;
use crate::engine::{EngineError, Timeline};
use crate::weights::StoredMatrix;
use hbmark_core::units::Bytes;

/// Columns of an activation row that share a scale when the weights are integers.
pub const ACTIVATION_GROUP: usize = 32;

/// The operations of a step, as they are named in a breakdown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Operation {
    Embed,
    NormQkv,
    Attention,
    Output,
    GateUp,
    Down,
    Head,
    Router,
    ExpertGateUp,
    ExpertDown,
    LatentDown,
    LatentQuery,
    LatentExpand,
    LatentValue,
    DraftInput,
    AllReduce,
}

impl Operation {
    /// All of them: those of a dense model in the order of a step, then those of layers with experts, with latent attention, and that draft, and sums of ranks.
    pub const ALL: [Self; 16] = [
        Self::Embed,
        Self::NormQkv,
        Self::Attention,
        Self::Output,
        Self::GateUp,
        Self::Down,
        Self::Head,
        Self::Router,
        Self::ExpertGateUp,
        Self::ExpertDown,
        Self::LatentDown,
        Self::LatentQuery,
        Self::LatentExpand,
        Self::LatentValue,
        Self::DraftInput,
        Self::AllReduce,
    ];
    /// The name in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::Embed => "embed",
            Self::DraftInput => "draft_input",
            Self::AllReduce => "all_reduce",
            Self::NormQkv => "norm_qkv",
            Self::Attention => "attention",
            Self::Output => "output",
            Self::GateUp => "gate_up",
            Self::Down => "down",
            Self::Head => "head",
            Self::Router => "router",
            Self::ExpertGateUp => "expert_gate_up",
            Self::ExpertDown => "expert_down",
            Self::LatentDown => "latent_down",
            Self::LatentQuery => "latent_query",
            Self::LatentExpand => "latent_expand",
            Self::LatentValue => "latent_value",
        }
    }
}

/// Output rows of a linear layer and the bias that is added to them.
#[derive(Debug, Clone)]
pub struct LinearPart {
    pub matrix: StoredMatrix,
    pub bias: Option<Vec<f32>>,
}

/// How the parts of a fused linear layer are arranged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FusedLayout {
    /// One after another.
    Stacked,
    /// Tiles of rows alternate, so that one unit of work has the same tile of both: gate, up.
    Interleaved,
    /// One after another, in heads whose halves are rotated together: Q, K, V.
    Heads { head_dim: usize },
}

/// Where the rows of the embedding come from.
#[derive(Debug)]
pub enum Embedding<'a, O: Storage + ?Sized> {
    /// A separate table.
    Table(&'a O::Table),
    /// The head is also the table.
    Head(&'a O::Linear),
}

/// The weights of one attention layer.
#[derive(Debug)]
pub struct AttentionWeights<O: Storage + ?Sized> {
    /// `None` where the input is not normed.
    pub norm: Option<O::Vector>,
    /// Q, K and V stacked.
    pub qkv: O::Linear,
    /// Norms of Q and of K, over each head or over all of them.
    pub head_norms: Option<(O::Vector, O::Vector)>,
}

/// The weights of one layer of latent attention, with K and V absorbed: queries are brought to the latent, and what they attend to from it.
#[derive(Debug)]
pub struct LatentWeights<O: Storage + ?Sized> {
    pub shape: LatentShape,
    pub norm: O::Vector,
    /// What stands for the queries, the latent and the key stacked.
    pub down: O::Linear,
    pub latent_norm: O::Vector,
    /// The norm of what stands for the queries, and from there to them.
    pub query: Option<(O::Vector, O::Linear)>,
    /// From each head's query to the latent: `[heads · kv_rank, nope_dim]`, a part per head.
    pub key_up: O::Linear,
    /// From the latent to each head's key: `[heads · nope_dim, kv_rank]`, a part per head.
    pub key: O::Linear,
    /// From the latent to each head's value: `[heads · value_dim, kv_rank]`, a part per head.
    pub value_up: O::Linear,
}

/// What makes the input of a layer that drafts for a model.
#[derive(Debug)]
pub struct DraftWeights<O: Storage + ?Sized> {
    /// Of the embedding and of the hidden state, where they are normed.
    pub norms: Option<[O::Vector; 2]>,
    /// The model's hidden state, of every row. There is no model beside the layer, so it is noise.
    pub state: O::Vector,
    /// From both, one behind the other, to the input.
    pub projection: O::Linear,
}

/// Gate, up and down of one expert.
#[derive(Debug)]
pub struct ExpertMlp<O: Storage + ?Sized> {
    /// Gate and up interleaved.
    pub gate_up: O::Linear,
    pub down: O::Linear,
}

/// The weights of a layer with experts.
#[derive(Debug)]
pub struct ExpertWeights<O: Storage + ?Sized> {
    pub shape: ExpertShape,
    /// A row for each expert; then, where the shared expert has a gate of its own, one for that.
    pub router: O::Linear,
    /// Added to logits before a softmax; to sigmoids where experts are chosen, and not to their shares.
    pub router_bias: Option<O::Vector>,
    pub routed: Vec<ExpertMlp<O>>,
    /// The expert that every row passes.
    pub shared: Option<ExpertMlp<O>>,
    /// What the device keeps of all of them together.
    pub table: O::ExpertTable,
}

/// How a step continues after `begin`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StepLaunch {
    /// Operation by operation.
    PerOperation,
    /// The whole step is enqueued already.
    WholeGraph,
}

/// What a device keeps, of a model and of its steps, and how that gets there and back.
pub trait Storage: std::fmt::Debug + Send {
    /// A fused linear layer, packed for streaming.
    type Linear: std::fmt::Debug + Send;
    /// A vector of f32: a norm's weights.
    type Vector: std::fmt::Debug + Send;
    /// An embedding table that is not also the head.
    type Table: std::fmt::Debug + Send;
    /// Activations, `[rows, width]`, f32.
    type Buffer: std::fmt::Debug + Send;
    /// K and V of all layers, in blocks.
    type Pool: std::fmt::Debug + Send;
    /// What is kept of the experts of a layer together.
    type ExpertTable: std::fmt::Debug + Send;

    /// Packs a linear layer.
    fn linear(&mut self, parts: Vec<LinearPart>, layout: FusedLayout) -> Result<Self::Linear, EngineError>;
    /// Keeps a vector.
    fn vector(&mut self, values: Vec<f32>) -> Result<Self::Vector, EngineError>;
    /// Keeps an embedding table.
    fn table(&mut self, matrix: StoredMatrix) -> Result<Self::Table, EngineError>;
    /// Takes note of the experts of a layer.
    fn expert_table(
        &mut self,
        routed: &[ExpertMlp<Self>],
        shared: Option<&ExpertMlp<Self>>,
    ) -> Result<Self::ExpertTable, EngineError>;
    /// Makes activations.
    fn buffer(&mut self, rows: usize, width: usize) -> Result<Self::Buffer, EngineError>;
    /// Makes a pool without blocks.
    fn pool(&mut self, shape: PoolShape) -> Result<Self::Pool, EngineError>;
    /// Creates a pool without blocks for K and V that are made of the latents of another.
    fn expanded_pool(&mut self, shape: &LatentShape, latents: &Self::Pool)
    -> Result<Self::Pool, EngineError>;
    /// Gives the rows of a buffer another width, no larger than that they were made with. What they held is void.
    fn set_width(buffer: &mut Self::Buffer, width: usize);
    /// Allocates blocks `0..blocks`.
    fn reserve(&mut self, pool: &mut Self::Pool, blocks: usize) -> Result<(), EngineError>;
    /// Writes random normal K and V into the whole blocks of a sequence, as a prefill of that depth would leave them. They depend on the
    /// seed and on the place in the sequence, and not on which blocks of the pool these are.
    fn fill_blocks(&mut self, pool: &mut Self::Pool, blocks: &[u32], seed: u64) -> Result<(), EngineError>;
    /// Waits, and copies the first `rows` rows of a buffer to the host, in place of what `values` holds.
    fn read_into(
        &mut self,
        buffer: &Self::Buffer,
        rows: usize,
        values: &mut Vec<f32>,
    ) -> Result<(), EngineError>;
    /// The same row by row in new buffers.
    fn read(&mut self, buffer: &Self::Buffer, rows: usize) -> Result<Vec<Vec<f32>>, EngineError> {
        let mut values = Vec::new();
        self.read_into(buffer, rows, &mut values)?;
        let width = (values.len() / rows.max(1)).max(1);
        Ok(values.chunks(width).map(<[f32]>::to_vec).collect())
    }
    /// As in results: `cpu`, `cuda:0`.
    fn device_name(&self) -> String {
        "cpu".into()
    }
    /// Whether its buffers lie in the memory of this process.
    fn in_host_memory(&self) -> bool {
        true
    }
}

/// What adapters add to linear layers.
pub trait LoraOperations: Storage {
    /// Whether [`lora`](Self::lora) is implemented.
    fn supports_lora(&self) -> bool {
        false
    }
    /// Computes what the adapters of the step add to the next linear layer, `delta[row] = B · (A · norm(input[row]))` for the rows of
    /// each adapter; that layer's own operation adds it to its `width` outputs, parts one after another.
    fn lora(
        &mut self,
        _rows: &Rows,
        _adapters: &[Option<LoraWeights<Self>>],
        _width: usize,
        _norm: Option<(&Self::Vector, f32)>,
        _input: &Self::Buffer,
    ) -> Result<(), EngineError> {
        super::refuse(
            format!("LoRA adapters on {}", self.device_name()),
            "only its operations on a CPU add them; choose --device cpu",
        )
    }
}

/// The operations around latent attention.
pub trait LatentOperations: Storage {
    /// `q, c, k = W · norm(hidden) + b`; `norm(c)` and `rope(k)` go to the pool as one vector, and what stands for the queries to `compressed` as `norm(q)`;
    /// queries themselves as they are.
    #[expect(clippy::too_many_arguments, reason = "one fused operation")]
    fn latent_down(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        weights: &LatentWeights<Self>,
        ropes: &RopeTables,
        layer: usize,
        hidden: &Self::Buffer,
        pool: &mut Self::Pool,
        compressed: &mut Self::Buffer,
    ) -> Result<(), EngineError>;
    /// Whether the device has the expanded form of latent attention for a step, and room for it.
    fn can_expand(&self, _rows: &Rows, _weights: &LatentWeights<Self>, _pool: &Self::Pool) -> bool {
        true
    }
    /// The form of latent attention in a step.
    fn latent_form(&self, rows: &Rows, weights: &LatentWeights<Self>, pool: &Self::Pool) -> LatentForm {
        if self.can_expand(rows, weights, pool) { weights.shape.form(rows) } else { LatentForm::Absorbed }
    }
    /// `q = W · compressed`, or `compressed` where there is no such projection; `query = [U · q; rope(q)]` of each head, of the elements
    /// that meet the latent and of those that meet the key. In the expanded form `query = [q; rope(q)]`.
    #[expect(clippy::too_many_arguments, reason = "one fused operation")]
    fn latent_query(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        weights: &LatentWeights<Self>,
        ropes: &RopeTables,
        form: LatentForm,
        compressed: &Self::Buffer,
        query: &mut Self::Buffer,
    ) -> Result<(), EngineError>;
    /// `K[head] = [key · latent; rotary key]` and `V[head] = V · latent` of every position that a step sees, from what a layer of the pool keeps.
    fn latent_expand(
        &mut self,
        rows: &Rows,
        weights: &LatentWeights<Self>,
        layer: usize,
        pool: &Self::Pool,
        expanded: &mut Self::Pool,
    ) -> Result<(), EngineError>;
    /// `values[head] = V · attended[head]`.
    fn latent_value(
        &mut self,
        rows: &Rows,
        weights: &LatentWeights<Self>,
        attended: &Self::Buffer,
        values: &mut Self::Buffer,
    ) -> Result<(), EngineError>;
}

/// The operations of layers with experts.
pub trait ExpertOperations: Storage {
    /// Before [`begin`](Steps::begin) of a model with experts: those that a script picks in the next step, layer by layer, or none. A device that
    /// launches whole steps takes them to where a recorded one finds them.
    fn take_script(&mut self, _chosen: Option<&[u32]>) -> Result<(), EngineError> {
        Ok(())
    }
    /// Chooses the experts of each row: those with the largest scores of `router · norm(hidden)`, the first of equal ones, with their scores as
    /// shares (`ExpertShape`); or `scripted` ones, so many per row, with the shares that the router gives them: the next ones of those
    /// that [`take_script`](Self::take_script) was given. The choice is kept for the two operations that follow.
    fn route(
        &mut self,
        rows: &Rows,
        norm: (&Self::Vector, f32),
        experts: &ExpertWeights<Self>,
        scripted: Option<&[u32]>,
        hidden: &Self::Buffer,
    ) -> Result<(), EngineError>;
    /// `inner[row][i] = gate(G · norm(hidden) + b) ∘ (U · norm(hidden) + b)` of the i-th expert of each row, by its number, then of the shared one; norm
    /// and rows are those that were routed.
    fn expert_gate_up(
        &mut self,
        rows: &Rows,
        norm: (&Self::Vector, f32),
        experts: &ExpertWeights<Self>,
        hidden: &Self::Buffer,
        inner: &mut Self::Buffer,
    ) -> Result<(), EngineError>;
    /// `hidden += Σ share · (down · inner[row][i] + b)` over the experts of each row and the shared one.
    fn expert_down(
        &mut self,
        rows: &Rows,
        experts: &ExpertWeights<Self>,
        inner: &Self::Buffer,
        hidden: &mut Self::Buffer,
    ) -> Result<(), EngineError>;
    /// Waits, and returns the experts that rows were routed to since the last call.
    fn take_experts_met(&mut self) -> ExpertsMet;
    /// Waits, and returns the bytes of routed experts that the last step read in [`expert_gate_up`](Self::expert_gate_up) and in
    /// [`expert_down`](Self::expert_down), where [`take_bytes_moved`](Operations::take_bytes_moved) could not count them without waiting.
    fn await_expert_bytes(&mut self) -> Result<[Bytes; 2], EngineError> {
        Ok([Bytes(0); 2])
    }
}

/// How a step begins and ends.
pub trait Steps: Storage {
    /// Copies the rows of the next step to the device, with the angles of their positions and the places of their blocks. Returns
    /// [`StepLaunch::WholeGraph`] where the device launched the whole step as a recorded graph.
    fn begin(
        &mut self,
        rows: &Rows,
        ropes: &RopeTables,
        pool: &Self::Pool,
    ) -> Result<StepLaunch, EngineError>;
    /// The last operation of a step was enqueued.
    fn end(&mut self, _rows: &Rows) -> Result<(), EngineError> {
        Ok(())
    }
    /// Leaves a step that failed after [`begin`](Self::begin), so that whatever comes next finds the device as between steps.
    fn abandon(&mut self) {}
    /// The number of rows with padding, where steps of nearby sizes share a recorded graph.
    fn padded(&self, rows: &Rows) -> usize {
        rows.len()
    }
    /// Whether steps may be launched as one graph. While they may not, every operation is enqueued by itself and can be timed.
    fn allow_whole_graph(&mut self, _allowed: bool) {}
}

/// The native forward's operations on a device: those of every layer, and with them all others. Every operation is enqueued or done when it
/// returns; none waits for a device.
pub trait Operations: Steps + LoraOperations + LatentOperations + ExpertOperations {
    /// `hidden[row] = scale · table[token of row]`.
    fn embed(
        &mut self,
        rows: &Rows,
        embedding: Embedding<'_, Self>,
        scale: f32,
        hidden: &mut Self::Buffer,
    ) -> Result<(), EngineError>;
    /// `joined[row] = [norm(hidden[row]); norm(state)]`, each as it is where there are no norms; `hidden` is zeros then, for
    /// [`project_add`](Self::project_add) to add to.
    fn join_state(
        &mut self,
        rows: &Rows,
        draft: &DraftWeights<Self>,
        norm_eps: f32,
        hidden: &mut Self::Buffer,
        joined: &mut Self::Buffer,
    ) -> Result<(), EngineError>;
    /// `q, k, v = rope(head_norm(W · norm(hidden) + b))`; k and v go to the pool, q is returned.
    #[expect(clippy::too_many_arguments, reason = "one fused operation")]
    fn norm_qkv(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        weights: &AttentionWeights<Self>,
        ropes: &RopeTables,
        layer: usize,
        hidden: &Self::Buffer,
        pool: &mut Self::Pool,
        query: &mut Self::Buffer,
    ) -> Result<(), EngineError>;
    /// `out = softmax(bend(scale · q · Kᵀ)) · V` over the positions up to each row's own, no further back than the window; a head's sink is
    /// one more score, whose V is zero.
    #[expect(clippy::too_many_arguments, reason = "one fused operation")]
    fn attention(
        &mut self,
        rows: &Rows,
        shape: &AttentionShape,
        window: Option<usize>,
        sinks: Option<&Self::Vector>,
        layer: usize,
        query: &Self::Buffer,
        pool: &Self::Pool,
        out: &mut Self::Buffer,
    ) -> Result<(), EngineError>;
    /// `hidden += norm(W · input + b)`, without a norm where there is none.
    fn project_add(
        &mut self,
        rows: &Rows,
        weights: &Self::Linear,
        norm: Option<(&Self::Vector, f32)>,
        input: &Self::Buffer,
        hidden: &mut Self::Buffer,
    ) -> Result<(), EngineError>;
    /// `out = gate(G · norm(hidden) + b) ∘ (U · norm(hidden) + b)`, without a norm where there is none.
    fn norm_gate_up(
        &mut self,
        rows: &Rows,
        norm: Option<(&Self::Vector, f32)>,
        gate: Gate,
        weights: &Self::Linear,
        hidden: &Self::Buffer,
        out: &mut Self::Buffer,
    ) -> Result<(), EngineError>;
    /// `logits[output] = head · norm(hidden[row of output])` ([`Rows::outputs`]), bent towards `softcap` where there is one, and its first
    /// largest entry.
    #[expect(clippy::too_many_arguments, reason = "one fused operation")]
    fn head(
        &mut self,
        rows: &Rows,
        norm: &Self::Vector,
        norm_eps: f32,
        head: &Self::Linear,
        softcap: Option<f32>,
        hidden: &Self::Buffer,
        logits: &mut Self::Buffer,
        next: &mut Vec<u32>,
    ) -> Result<(), EngineError>;
    /// Waits, and returns the largest entries of the last head where [`Self::head`] could not give them without waiting.
    fn await_next(&mut self, _next: &mut Vec<u32>) -> Result<(), EngineError> {
        Ok(())
    }
    /// Marks in the order of the operations.
    fn timeline(&self) -> Box<dyn Timeline + Send> {
        Box::new(MonotonicTimeline::default())
    }
    /// Before the operation that adds a rank's part of a sum to `hidden`, which all ranks of a tensor parallel group have alike. `normed`: the sum
    /// is normed before it is added.
    fn begin_sum(
        &mut self,
        rows: &Rows,
        rank: &mut Rank,
        normed: bool,
        hidden: &mut Self::Buffer,
    ) -> Result<(), EngineError>;
    /// `hidden` with what all ranks added since [`begin_sum`](Self::begin_sum), their sum normed where a norm is given.
    fn all_reduce(
        &mut self,
        rows: &Rows,
        rank: &mut Rank,
        norm: Option<(&Self::Vector, f32)>,
        hidden: &mut Self::Buffer,
    ) -> Result<(), EngineError>;
    /// The largest entries of the last head over all ranks, whose parts of the vocabulary follow each other; that of this one begins at `first`.
    fn first_of_ranks(
        &mut self,
        rows: &Rows,
        rank: &mut Rank,
        first: usize,
        logits: &Self::Buffer,
        next: &mut Vec<u32>,
    ) -> Result<(), EngineError>;
    /// Bytes read and written by the operations since the last call, counted where they ran, without waiting; activations are not.
    fn take_bytes_moved(&mut self) -> Bytes;
    /// Threads of a CPU that were left out of a job, on average over the jobs since the last call.
    fn take_threads_away(&mut self) -> Option<f64> {
        None
    }
    /// Instruction sets of a CPU's kernels by name.
    fn kernels(&self) -> Vec<String> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::Operation;

    #[test]
    fn an_operation_is_found_at_its_own_number() {
        assert!(Operation::ALL.iter().enumerate().all(|(at, operation)| *operation as usize == at));
    }
}
