//! The forward of a decoder-only transformer, once.
//!
//! Enters: [`ModelWeights`], the [`Rows`] of a ragged step, a paged KV pool. Leaves: logits and the greedy next token of every sequence.
//! It depends on the model's dimensions and on [`Operations`] only, so CPU and CUDA share it.
//! Prefill, chunked prefill and decode are the same call.

use std::ops::Range;

use super::adapters::{Adapters, LoraSite};
use super::operations::{
    AttentionWeights, DraftWeights, Embedding, ExpertWeights, LatentWeights, Operation, Operations,
    StepLaunch, Storage,
};
use super::ragged_batch::Rows;
use super::ranks::Rank;
use super::rope::RopeTables;
use super::routing_script::RoutingScript;
use super::shapes::{AttentionShape, ExpertShape, Gate, LatentForm, LatentShape};
use crate::engine::{EngineError, ScriptedRouting};
use hbmark_core::model::{Architecture, FeedForward};

/// One layer.
#[derive(Debug)]
pub struct LayerWeights<O: Storage> {
    pub shape: AttentionShape,
    pub attention: Projections<O>,
    /// A score of each head that every token attends to.
    pub sinks: Option<O::Vector>,
    pub output: O::Linear,
    /// Of what attention adds, where that is normed.
    pub output_norm: Option<O::Vector>,
    /// Of the feed-forward's input, where that is normed.
    pub norm: Option<O::Vector>,
    pub mlp: Mlp<O>,
    /// Of what the feed-forward adds, where that is normed.
    pub mlp_norm: Option<O::Vector>,
    /// Positions a token attends to, itself included; `None` for all.
    pub window: Option<usize>,
}

/// What makes queries, keys and values of a layer.
#[derive(Debug)]
pub enum Projections<O: Storage> {
    /// Of each head.
    Heads(AttentionWeights<O>),
    Latent(LatentWeights<O>),
}

/// The feed-forward of a layer.
#[derive(Debug)]
pub enum Mlp<O: Storage> {
    Dense {
        /// Gate and up interleaved.
        gate_up: O::Linear,
        gate: Gate,
        down: O::Linear,
    },
    Experts(ExpertWeights<O>),
}

/// A whole model, packed for a device.
#[derive(Debug)]
pub struct ModelWeights<O: Storage> {
    /// `None` when the head is also the table.
    pub table: Option<O::Table>,
    /// What its rows are multiplied with.
    pub embedding_scale: f32,
    /// Of the layer that drafts for a model.
    pub draft: Option<DraftWeights<O>>,
    pub layers: Vec<LayerWeights<O>>,
    pub norm: O::Vector,
    pub head: O::Linear,
    /// Logits are bent towards this.
    pub softcap: Option<f32>,
}

/// The widths of a model's activations.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ModelWidths {
    pub hidden: usize,
    /// Of dense layers; 0 where there are none.
    pub ffn: usize,
    /// Of the layers with experts, all experts of a row together; 0 where there are none.
    pub experts: usize,
    pub vocab: usize,
    /// Of the first layer: all of them have heads of one shape.
    pub attention: AttentionShape,
    /// Of latent attention.
    pub latent: Option<LatentShape>,
    /// Hidden states stand beside embeddings.
    pub drafts: bool,
}

impl ModelWidths {
    /// The widths of an architecture.
    pub fn of(architecture: &Architecture) -> Self {
        let a = architecture;
        let attention = AttentionShape::of(a, 0);
        let mixture = |layer| a.layer(layer).feed_forward.mixture().and_then(ExpertShape::of);
        let experts = (0..a.layers).filter_map(mixture).map(|shape| shape.inner_width()).max().unwrap_or(0);
        let dense = (0..a.layers).any(|layer| matches!(a.layer(layer).feed_forward, FeedForward::Dense(_)));
        let ffn = if dense { a.ffn_size } else { 0 };
        let latent = LatentShape::of(a, 0);
        let (hidden, vocab, drafts) = (a.hidden_size, a.vocab_size, a.draft.is_some());
        Self { hidden, ffn, experts, vocab, attention, latent, drafts }
    }

    /// Width of the values of all heads: the input of the output projection.
    pub fn values(&self) -> usize {
        self.latent.map_or(self.attention.attended_width(), |latent| latent.heads * latent.value_dim)
    }
}

/// Activations between operations, kept from step to step.
#[derive(Debug)]
struct Activations<O: Operations> {
    rows: usize,
    outputs: usize,
    hidden: O::Buffer,
    /// Embeddings with hidden states behind them.
    joined: Option<O::Buffer>,
    attention: AttentionActivations<O>,
    inner: O::Buffer,
    expert_inner: Option<O::Buffer>,
    logits: O::Buffer,
}

/// Those around attention.
#[derive(Debug)]
struct AttentionActivations<O: Operations> {
    query: O::Buffer,
    attended: O::Buffer,
    latent: Option<LatentActivations<O>>,
}

/// Those of latent attention.
#[derive(Debug)]
struct LatentActivations<O: Operations> {
    /// What stands for the queries.
    compressed: O::Buffer,
    values: O::Buffer,
}

impl<O: Operations> Activations<O> {
    fn new(
        operations: &mut O,
        widths: &ModelWidths,
        rows: usize,
        outputs: usize,
    ) -> Result<Self, EngineError> {
        let latent = widths.latent.map(|latent| {
            Ok::<_, EngineError>(LatentActivations {
                compressed: operations.buffer(rows, latent.compressed_width())?,
                values: operations.buffer(rows, widths.values())?,
            })
        });
        Ok(Self {
            rows,
            outputs,
            hidden: operations.buffer(rows, widths.hidden)?,
            joined: if widths.drafts { Some(operations.buffer(rows, 2 * widths.hidden)?) } else { None },
            attention: AttentionActivations {
                query: operations.buffer(rows, widths.attention.query_width())?,
                attended: operations.buffer(rows, widths.attention.attended_width())?,
                latent: latent.transpose()?,
            },
            inner: operations.buffer(rows, widths.ffn)?,
            expert_inner: match widths.experts {
                0 => None,
                width => Some(operations.buffer(rows, width)?),
            },
            logits: operations.buffer(outputs, widths.vocab)?,
        })
    }
}

const HAS_LATENT: &str = "all layers of a model have one kind of attention";

/// A model and the state of its steps, without the KV pool.
#[derive(Debug)]
pub struct Forward<O: Operations> {
    widths: ModelWidths,
    weights: ModelWeights<O>,
    /// LoRA adapters of the layers.
    adapters: Adapters<O>,
    /// Picks the experts in place of the routers.
    script: Option<RoutingScript>,
    ropes: RopeTables,
    /// Its place in a tensor parallel group, and the first token of its logits.
    rank: Option<(Rank, usize)>,
    activations: Option<Activations<O>>,
    /// K and V of the layer in work, in steps whose latent attention is expanded.
    expanded: Option<O::Pool>,
    next: Vec<u32>,
    /// Of the last step.
    outputs: usize,
}

impl<O: Operations> Forward<O> {
    /// A forward over packed weights.
    pub fn new(widths: ModelWidths, weights: ModelWeights<O>, ropes: RopeTables) -> Self {
        let adapters = Adapters::new(weights.layers.len());
        let script = None;
        let (rank, activations, expanded, next) = (None, None, None, Vec::new());
        Self { widths, weights, adapters, script, ropes, rank, activations, expanded, next, outputs: 0 }
    }

    /// From the next step on a script picks the experts of a model that has any, or its routers do again.
    pub fn script_routing(&mut self, script: Option<ScriptedRouting>) {
        let shape = self.weights.layers.iter().find_map(|layer| match &layer.mlp {
            Mlp::Experts(experts) => Some(experts.shape),
            Mlp::Dense { .. } => None,
        });
        self.script = script.zip(shape).map(|(ScriptedRouting { routing, seed }, shape)| {
            RoutingScript::new(routing, seed, shape.count, shape.per_row)
        });
    }

    /// The forward of one rank of a tensor parallel group, whose weights are its parts, and whose logits are those of a part of the vocabulary.
    pub fn of_rank(self, rank: Rank, vocabulary: &Range<usize>) -> Self {
        let widths = ModelWidths { vocab: vocabulary.len(), ..self.widths };
        Self { rank: Some((rank, vocabulary.start)), widths, ..self }
    }

    /// The LoRA adapters.
    pub fn adapters(&mut self) -> &mut Adapters<O> {
        &mut self.adapters
    }

    /// One step. `done` is called after each operation was enqueued, and may query the device.
    ///
    /// # Panics
    /// Never: the activations are allocated first.
    pub fn step(
        &mut self,
        operations: &mut O,
        rows: &Rows,
        pool: &mut O::Pool,
        done: &mut dyn FnMut(&mut O, Operation),
    ) -> Result<(), EngineError> {
        self.ensure_capacity(operations, rows)?;
        self.ensure_expanded(operations, rows, pool)?;
        let enqueued = self.enqueue(operations, rows, pool, done);
        if enqueued.is_err() {
            operations.abandon();
        }
        enqueued
    }

    fn enqueue(
        &mut self,
        operations: &mut O,
        rows: &Rows,
        pool: &mut O::Pool,
        done: &mut dyn FnMut(&mut O, Operation),
    ) -> Result<(), EngineError> {
        let Self { widths, weights, adapters, script, ropes, rank, activations, expanded, next, outputs } =
            self;
        let act = activations.as_mut().expect("room was made above");
        let eps = widths.attention.norm_eps;

        *outputs = rows.served();
        let mixtures = weights.layers.iter().enumerate().filter_map(|(index, layer)| match &layer.mlp {
            Mlp::Experts(_) => Some(index),
            Mlp::Dense { .. } => None,
        });
        let scripted = script.as_mut().map(|script| script.choose(mixtures, rows));
        operations.take_script(scripted)?;
        let mut scripted = scripted.unwrap_or_default();
        if operations.begin(rows, ropes, pool)? == StepLaunch::WholeGraph {
            return Ok(());
        }
        let embedding =
            weights.table.as_ref().map_or(Embedding::Head(&weights.head), |table| Embedding::Table(table));
        operations.embed(rows, embedding, weights.embedding_scale, &mut act.hidden)?;
        done(operations, Operation::Embed);
        if let Some(draft) = &weights.draft {
            let joined = act.joined.as_mut().expect("widths have room for what a drafting layer joins");
            operations.join_state(rows, draft, eps, &mut act.hidden, joined)?;
            operations.project_add(rows, &draft.projection, None, joined, &mut act.hidden)?;
            done(operations, Operation::DraftInput);
        }
        for (index, layer) in weights.layers.iter().enumerate() {
            let with_eps = |norm| (norm, eps);
            let shape = &layer.shape;
            let mut form = LatentForm::Absorbed;
            let hidden = &act.hidden;
            let AttentionActivations { query, latent, .. } = &mut act.attention;
            match &layer.attention {
                Projections::Heads(weights) => {
                    let normed = weights.norm.as_ref().map(with_eps);
                    adapters.add(operations, rows, (index, LoraSite::Qkv), widths, normed, hidden)?;
                    operations.norm_qkv(rows, shape, weights, ropes, index, hidden, pool, query)?;
                    done(operations, Operation::NormQkv);
                }
                Projections::Latent(weights) => {
                    let LatentActivations { compressed, .. } = latent.as_mut().expect(HAS_LATENT);
                    operations.latent_down(rows, shape, weights, ropes, index, hidden, pool, compressed)?;
                    done(operations, Operation::LatentDown);
                    form = operations.latent_form(rows, weights, pool);
                    O::set_width(query, weights.shape.query_width_of(form));
                    operations.latent_query(rows, shape, weights, ropes, form, compressed, query)?;
                    done(operations, Operation::LatentQuery);
                }
            }
            let attended =
                attend(operations, rows, (index, layer), form, &mut act.attention, (pool, expanded), done)?;
            adapters.add(operations, rows, (index, LoraSite::Output), widths, None, attended)?;
            let mut added = layer.output_norm.as_ref().map(with_eps);
            let normed = begin_sum(operations, rows, member(rank), &mut added, &mut act.hidden)?;
            operations.project_add(rows, &layer.output, added, attended, &mut act.hidden)?;
            done(operations, Operation::Output);
            sum_of_ranks(operations, rows, member(rank), normed, &mut act.hidden, done)?;
            let norm = layer.norm.as_ref().map(with_eps);
            let mut added = layer.mlp_norm.as_ref().map(with_eps);
            let normed;
            match &layer.mlp {
                Mlp::Dense { gate_up, gate, down } => {
                    let site = (index, LoraSite::GateUp);
                    adapters.add(operations, rows, site, widths, norm, &act.hidden)?;
                    operations.norm_gate_up(rows, norm, *gate, gate_up, &act.hidden, &mut act.inner)?;
                    done(operations, Operation::GateUp);
                    adapters.add(operations, rows, (index, LoraSite::Down), widths, None, &act.inner)?;
                    normed = begin_sum(operations, rows, member(rank), &mut added, &mut act.hidden)?;
                    operations.project_add(rows, down, added, &act.inner, &mut act.hidden)?;
                    done(operations, Operation::Down);
                }
                Mlp::Experts(experts) => {
                    let inner = act.expert_inner.as_mut().expect("widths have room for the layers' experts");
                    let norm = norm.expect("the input of experts is normed");
                    let (own, rest) =
                        scripted.split_at(scripted.len().min(rows.len() * experts.shape.per_row));
                    scripted = rest;
                    let own = (!own.is_empty()).then_some(own);
                    operations.route(rows, norm, experts, own, &act.hidden)?;
                    done(operations, Operation::Router);
                    operations.expert_gate_up(rows, norm, experts, &act.hidden, inner)?;
                    done(operations, Operation::ExpertGateUp);
                    normed = begin_sum(operations, rows, member(rank), &mut added, &mut act.hidden)?;
                    operations.expert_down(rows, experts, inner, &mut act.hidden)?;
                    done(operations, Operation::ExpertDown);
                }
            }
            sum_of_ranks(operations, rows, member(rank), normed, &mut act.hidden, done)?;
        }
        let ModelWeights { norm, head, softcap, .. } = weights;
        operations.head(rows, norm, eps, head, *softcap, &act.hidden, &mut act.logits, next)?;
        if let Some((rank, first)) = rank {
            operations.first_of_ranks(rows, rank, *first, &act.logits, next)?;
        }
        done(operations, Operation::Head);
        operations.end(rows)
    }

    /// Waits, and copies the logits of the last step, `[outputs, vocab]`, into a buffer that is used again.
    pub fn read_logits(&self, operations: &mut O, logits: &mut Vec<f32>) -> Result<(), EngineError> {
        let activations = self.activations.as_ref().ok_or(EngineError::NoStepRun)?;
        operations.read_into(&activations.logits, self.outputs, logits)
    }

    /// The same row by row in new buffers.
    pub fn logits(&self, operations: &mut O) -> Result<Vec<Vec<f32>>, EngineError> {
        let activations = self.activations.as_ref().ok_or(EngineError::NoStepRun)?;
        operations.read(&activations.logits, self.outputs)
    }

    /// Waits, and returns the greedy next tokens of the last step.
    pub fn next_tokens(&mut self, operations: &mut O) -> Result<&[u32], EngineError> {
        operations.await_next(&mut self.next)?;
        if self.next.is_empty() { Err(EngineError::NoStepRun) } else { Ok(&self.next) }
    }

    /// Activations and angles for a step of this size; they only grow, so a steady decode finds them there.
    fn ensure_capacity(&mut self, operations: &mut O, rows: &Rows) -> Result<(), EngineError> {
        let positions = rows.sequences.iter().map(super::ragged_batch::SequenceRows::positions_after).max();
        self.ropes.extend_to(positions.unwrap_or(0));
        let (need_rows, need_outputs) = (rows.len(), rows.outputs.len());
        let (have_rows, have_outputs) = self.activations.as_ref().map_or((0, 0), |a| (a.rows, a.outputs));
        if need_rows > have_rows || need_outputs > have_outputs {
            // The old ones are freed first: a long prefill leaves no room for both.
            self.activations = None;
            let (rows, outputs) = (need_rows.max(have_rows), need_outputs.max(have_outputs));
            self.activations = Some(Activations::new(operations, &self.widths, rows, outputs)?);
        }
        Ok(())
    }

    /// Room for K and V of a step whose latent attention is expanded.
    fn ensure_expanded(
        &mut self,
        operations: &mut O,
        rows: &Rows,
        pool: &O::Pool,
    ) -> Result<(), EngineError> {
        // Layers may be stored in several formats, and a device has kernels for some.
        let mut latents = self.weights.layers.iter().filter_map(|layer| match &layer.attention {
            Projections::Latent(weights) => Some(weights),
            Projections::Heads(_) => None,
        });
        let expands =
            |weights: &&LatentWeights<O>| operations.latent_form(rows, weights, pool) == LatentForm::Expanded;
        let Some(weights) = latents.find(expands) else { return Ok(()) };
        let expanded = match &mut self.expanded {
            Some(expanded) => expanded,
            None => self.expanded.insert(operations.expanded_pool(&weights.shape, pool)?),
        };
        operations.reserve(expanded, rows.tables.len())
    }
}

/// Attention of a layer behind its projections; what its output projection takes.
fn attend<'a, O: Operations>(
    operations: &mut O,
    rows: &Rows,
    (index, layer): (usize, &LayerWeights<O>),
    form: LatentForm,
    activations: &'a mut AttentionActivations<O>,
    (pool, expanded): (&O::Pool, &mut Option<O::Pool>),
    done: &mut dyn FnMut(&mut O, Operation),
) -> Result<&'a O::Buffer, EngineError> {
    let (shape, window, sinks) = (&layer.shape, layer.window, layer.sinks.as_ref());
    let AttentionActivations { query, attended, latent } = activations;
    let Projections::Latent(weights) = &layer.attention else {
        operations.attention(rows, shape, window, sinks, index, query, pool, attended)?;
        done(operations, Operation::Attention);
        return Ok(attended);
    };
    let LatentActivations { values, .. } = latent.as_mut().expect(HAS_LATENT);
    match form {
        LatentForm::Absorbed => {
            operations.attention(rows, shape, window, sinks, index, query, pool, attended)?;
            done(operations, Operation::Attention);
            operations.latent_value(rows, weights, attended, values)?;
            done(operations, Operation::LatentValue);
        }
        LatentForm::Expanded => {
            let expanded = expanded.as_mut().expect("room was made before the step");
            operations.latent_expand(rows, weights, index, pool, expanded)?;
            done(operations, Operation::LatentExpand);
            let shape = weights.shape.expanded(shape);
            operations.attention(rows, &shape, window, sinks, 0, query, expanded, values)?;
            done(operations, Operation::Attention);
        }
    }
    Ok(values)
}

/// The rank of a tensor parallel group.
fn member(rank: &mut Option<(Rank, usize)>) -> Option<&mut Rank> {
    rank.as_mut().map(|(rank, _)| rank)
}

/// Weights of a norm and its ε.
type Norm<'a, O> = Option<(&'a <O as Storage>::Vector, f32)>;

/// Before something is added to the residual that all ranks of a tensor parallel group have alike. Its norm is taken away: that is of the sum.
fn begin_sum<'a, O: Operations>(
    operations: &mut O,
    rows: &Rows,
    rank: Option<&mut Rank>,
    norm: &mut Norm<'a, O>,
    hidden: &mut O::Buffer,
) -> Result<Norm<'a, O>, EngineError> {
    let Some(rank) = rank else { return Ok(None) };
    operations.begin_sum(rows, rank, norm.is_some(), hidden)?;
    Ok(norm.take())
}

/// The residual with what all ranks added to it.
fn sum_of_ranks<O: Operations>(
    operations: &mut O,
    rows: &Rows,
    rank: Option<&mut Rank>,
    norm: Norm<'_, O>,
    hidden: &mut O::Buffer,
    done: &mut dyn FnMut(&mut O, Operation),
) -> Result<(), EngineError> {
    let Some(rank) = rank else { return Ok(()) };
    operations.all_reduce(rows, rank, norm, hidden)?;
    done(operations, Operation::AllReduce);
    Ok(())
}
