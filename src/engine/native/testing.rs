//! Compares one implementation of the operations with another.
//!
//! Enters: two implementations, a random small model ([`sample`]) and ragged steps ([`scenario`]). Leaves: how far apart their outputs are:
//! of each operation alone, of whole steps, and of the same steps split otherwise. Tests and `hbmark verify`
//! pass a device and the [`Oracle`](super::oracle::Oracle).

pub mod sample;
pub mod scenario;

use super::forward::{Forward, LayerWeights, Mlp, ModelWeights, ModelWidths, Projections};
use super::operations::{Embedding, LatentWeights, Operation, Operations};
use super::ragged_batch::Rows;
use super::rope::RopeTables;
use super::routing_script::RoutingScript;
use super::shapes::{LatentForm, PoolShape};
use super::{random_kv, weights};
use crate::engine::relative_error;
use crate::engine::{EngineError, ScriptedRouting};
use crate::weights::{Packing, StoredMatrix};
use hbmark_core::ledger::ExpertRouting;
use hbmark_core::model::{Architecture, Dtype};

pub use sample::Sample;
#[cfg(any(test, feature = "cuda"))]
pub(crate) use sample::nth;
pub use scenario::Scenario;

/// Largest allowed error of one operation on inputs that are the same to the bit, relative to the largest output of its row.
///
/// *Source*: sums of at most a few thousand products in f32. An operation that norms its input first may find a value so close to the
/// middle between two of a coarser format that implementations round it apart; in rows as narrow as a sample's,
/// one such step of bf16 (2⁻⁸) or of 8 bits (1/127) in one input of a sum is seen in the output. So is one of K in the pool.
pub fn operation_tolerance(operation: Operation, sample: &Sample) -> f64 {
    let plain_inputs = matches!(sample.dtype, Dtype::F32 | Dtype::F16);
    let plain = match operation {
        Operation::Embed => return 0.0,
        Operation::Attention | Operation::Output | Operation::Down | Operation::AllReduce => true,
        Operation::GateUp
        | Operation::Head
        | Operation::DraftInput
        | Operation::Router
        | Operation::ExpertGateUp
        | Operation::ExpertDown
        | Operation::LatentQuery
        | Operation::LatentValue => plain_inputs,
        Operation::NormQkv | Operation::LatentDown | Operation::LatentExpand => {
            plain_inputs && sample.kv_dtype == Dtype::F32
        }
    };
    match (plain, operation, sample.kv_dtype) {
        (true, ..) => SUMS_IN_F32,
        // One step of three bits of mantissa, or of 8 bits, in an element of K or V.
        (false, Operation::NormQkv, Dtype::Fp8) => 0.13,
        (false, Operation::NormQkv, Dtype::Int8) => 2e-2,
        _ => 1e-2,
    }
}

/// As [`operation_tolerance`], of the row in the middle.
pub fn median_tolerance(operation: Operation, sample: &Sample) -> f64 {
    operation_tolerance(operation, sample).min(MEDIAN)
}

/// How far two implementations of an operation lie apart.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OperationError {
    pub operation: Operation,
    /// Of the row that is furthest off.
    pub worst: f64,
    /// Of the row in the middle. Inputs are rounded apart in few rows, so this shows whether both round at all, and alike.
    pub median: f64,
}

impl OperationError {
    fn new(operation: Operation, found: &[Vec<f32>], reference: &[Vec<f32>]) -> Self {
        let mut errors = errors(found, reference);
        errors.sort_by(f64::total_cmp);
        let median = errors.get(errors.len() / 2).copied().unwrap_or(0.0);
        Self { operation, worst: errors.last().copied().unwrap_or(0.0), median }
    }

    /// Whether both are within what `sample` allows.
    #[cfg(test)]
    pub fn passed(&self, sample: &Sample) -> bool {
        self.worst <= operation_tolerance(self.operation, sample)
            && self.median <= median_tolerance(self.operation, sample)
    }
}

/// Sums whose order differs.
const SUMS_IN_F32: f64 = 5e-6;
/// The same in the row in the middle, where K and V were rounded apart in some position that it sees.
const MEDIAN: f64 = 5e-5;

/// Largest allowed error of the logits of a step, relative to the largest logit of a sequence.
///
/// *Source*: as [`operation_tolerance`], over the layers of a sample.
pub fn step_tolerance(sample: &Sample) -> f64 {
    match (sample.dtype, sample.kv_dtype) {
        (Dtype::F32 | Dtype::F16, Dtype::F32) => 2e-5,
        (Dtype::F32 | Dtype::F16, Dtype::Fp8) => 5e-2,
        (Dtype::F32 | Dtype::F16, Dtype::Int8) => 1e-2,
        (Dtype::F32 | Dtype::F16, _) => 5e-3,
        (_, Dtype::Fp8) => 1e-1,
        _ => 5e-2,
    }
}

/// What each operation left, a row per token or sequence.
pub type Outputs = Vec<(Operation, Vec<Vec<f32>>)>;

/// Packs tensors that come in the order of the inventory, and makes a forward of them.
pub fn forward_of<O: Operations>(
    operations: &mut O,
    architecture: &Architecture,
    tensors: impl IntoIterator<Item = (String, crate::weights::StoredTensor)>,
) -> Result<Forward<O>, EngineError> {
    let weights = weights::assemble(operations, architecture, tensors)?;
    Ok(Forward::new(ModelWidths::of(architecture), weights, RopeTables::new(architecture)?))
}

/// A sample on a device, with a pool.
#[derive(Debug)]
pub struct Runner<O: Operations> {
    operations: O,
    forward: Forward<O>,
    pool: O::Pool,
    /// Behind the blocks of the scenario.
    spare: u32,
    rows: Rows,
}

impl<O: Operations> Runner<O> {
    /// Packs a sample and makes the pool of a scenario, noise in the blocks that are to hold some.
    pub fn new(operations: O, sample: &Sample, scenario: &Scenario) -> Result<Self, EngineError> {
        Self::with_tensors(operations, sample, scenario, sample.tensors())
    }

    /// As [`new`](Self::new), with other weights of the sample's shapes.
    pub fn with_tensors(
        mut operations: O,
        sample: &Sample,
        scenario: &Scenario,
        tensors: impl IntoIterator<Item = (String, crate::weights::StoredTensor)>,
    ) -> Result<Self, EngineError> {
        let forward = forward_of(&mut operations, &sample.architecture, tensors)?;
        let pool = pool_of(&mut operations, sample, scenario, &scenario.filled)?;
        operations.take_bytes_moved();
        let spare = u32::try_from(scenario.blocks).unwrap_or(u32::MAX);
        Ok(Self { operations, forward, pool, spare, rows: Rows::default() })
    }

    /// Takes in an adapter, stored as precisely as a session would.
    #[cfg(test)]
    pub fn take_adapter(
        &mut self,
        sample: &Sample,
        adapter: &crate::weights::Adapter,
    ) -> Result<usize, EngineError> {
        let packing = Packing::of(super::kv_dtype(sample.dtype), 0).unwrap_or(Packing::Bf16);
        let widths = ModelWidths::of(&sample.architecture);
        Ok(self.forward.adapters().take(&mut self.operations, &widths, adapter, packing)?.0)
    }

    /// One step; its logits, of each sequence.
    pub fn step(&mut self, rows: &Rows) -> Result<Vec<Vec<f32>>, EngineError> {
        self.rows.clone_from(rows);
        self.rows.pad(self.operations.padded(rows), self.spare);
        self.forward.step(&mut self.operations, &self.rows, &mut self.pool, &mut |_, _| {})?;
        self.forward.logits(&mut self.operations)
    }

    /// A step as many: each sequence by itself, at most `chunk` tokens at a time. The logits after its last token, of each sequence.
    pub fn step_in_pieces(&mut self, rows: &Rows, chunk: usize) -> Result<Vec<Vec<f32>>, EngineError> {
        let mut all = Vec::new();
        for sequence in &rows.sequences {
            let mut last = Vec::new();
            for piece in scenario::pieces(rows, sequence, chunk) {
                last = self.step(&piece)?;
            }
            all.append(&mut last);
        }
        Ok(all)
    }

    /// Greedy tokens of the last step.
    #[cfg(any(test, feature = "cuda"))]
    pub fn next_tokens(&mut self) -> Result<&[u32], EngineError> {
        self.forward.next_tokens(&mut self.operations)
    }

    /// The operations, to ask for the bytes they moved.
    #[cfg(any(test, feature = "cuda"))]
    pub fn operations(&mut self) -> &mut O {
        &mut self.operations
    }
}

/// Relative error of each row: infinite where there is a row too many, or something that is not a number.
fn errors(found: &[Vec<f32>], reference: &[Vec<f32>]) -> Vec<f64> {
    if found.len() != reference.len() {
        return vec![f64::INFINITY];
    }
    let row = |(found, reference): (&Vec<f32>, &Vec<f32>)| {
        if found.len() == reference.len() { relative_error(found, reference) } else { f64::INFINITY }
    };
    found.iter().zip(reference).map(row).collect()
}

/// Largest relative error of any row.
pub fn worst(found: &[Vec<f32>], reference: &[Vec<f32>]) -> f64 {
    errors(found, reference).into_iter().fold(0.0, f64::max)
}

/// Runs one step on both; the largest relative error of the logits of `a`.
pub fn same_step<A: Operations, B: Operations>(
    a: &mut Runner<A>,
    b: &mut Runner<B>,
    rows: &Rows,
) -> Result<f64, EngineError> {
    Ok(worst(&a.step(rows)?, &b.step(rows)?))
}

/// Runs a scenario on both; the largest relative error of any step.
pub fn same_scenario<A: Operations, B: Operations>(
    a: A,
    b: B,
    sample: &Sample,
    scenario: &Scenario,
) -> Result<f64, EngineError> {
    let (mut a, mut b) = (Runner::new(a, sample, scenario)?, Runner::new(b, sample, scenario)?);
    // Two experts may be so near to each other that what is rounded apart before them decides: both sides then follow a script.
    let close = matches!((sample.dtype, sample.kv_dtype), (Dtype::F32 | Dtype::F16, Dtype::F32));
    if !close {
        let script = ScriptedRouting { routing: ExpertRouting::Uniform, seed: sample.seed };
        a.forward.script_routing(Some(script));
        b.forward.script_routing(Some(script));
    }
    scenario.steps.iter().try_fold(0.0f64, |worst, rows| Ok(worst.max(same_step(&mut a, &mut b, rows)?)))
}

/// Runs a scenario ragged on one and in pieces on the other: with chunks that no prompt reaches, ragged against looped; with
/// smaller ones, whole against chunked prefill.
pub fn same_in_pieces<O: Operations>(
    whole: O,
    in_pieces: O,
    sample: &Sample,
    scenario: &Scenario,
    chunk: usize,
) -> Result<f64, EngineError> {
    let mut whole = Runner::new(whole, sample, scenario)?;
    let mut in_pieces = Runner::new(in_pieces, sample, scenario)?;
    scenario.steps.iter().try_fold(0.0f64, |so_far, rows| {
        Ok(so_far.max(worst(&in_pieces.step_in_pieces(rows, chunk)?, &whole.step(rows)?)))
    })
}

/// Runs every operation alone on both, all of them on the same random inputs and a pool full of noise, and compares what `a` leaves
/// with what `b` does. The second of the two errors of `norm_qkv` is of K and V.
#[cfg(test)]
pub fn operation_errors<A: Operations, B: Operations>(
    a: &mut A,
    b: &mut B,
    sample: &Sample,
    scenario: &Scenario,
) -> Result<Vec<OperationError>, EngineError> {
    let found = operations_alone(a, sample, scenario)?;
    Ok(compare_operations(&found, &operations_alone(b, sample, scenario)?))
}

/// Compares what [`operations_alone`] gave for two implementations.
pub fn compare_operations(found: &Outputs, reference: &Outputs) -> Vec<OperationError> {
    let both = found.iter().zip(reference).filter_map(|((operation, found), (_, reference))| {
        if found.len() != reference.len() {
            return Some(OperationError::new(*operation, found, reference));
        }
        // The reference has what a device need not have.
        let rows = found.iter().zip(reference).filter(|(found, _)| !found.is_empty());
        let (found, reference): (Vec<_>, Vec<_>) = rows.map(|(a, b)| (a.clone(), b.clone())).unzip();
        (!found.is_empty()).then(|| OperationError::new(*operation, &found, &reference))
    });
    both.collect()
}

fn pool_of<O: Operations>(
    operations: &mut O,
    sample: &Sample,
    scenario: &Scenario,
    filled: &[u32],
) -> Result<O::Pool, EngineError> {
    let shape = PoolShape::of(&sample.architecture, scenario.block_size, sample.kv_dtype);
    let mut pool = operations.pool(shape)?;
    // And one that no sequence has.
    operations.reserve(&mut pool, scenario.blocks + 1)?;
    operations.fill_blocks(&mut pool, filled, scenario.seed)?;
    Ok(pool)
}

/// Activations made of noise: rows of a table, fetched as embeddings are.
fn activations<O: Operations>(
    operations: &mut O,
    rows: &Rows,
    (ropes, pool): (&RopeTables, &O::Pool),
    width: usize,
    stream: usize,
) -> Result<O::Buffer, EngineError> {
    let mut values = vec![0.0; rows.len() * width];
    random_kv::fill(0, stream, 0, false, &mut values);
    let table = operations.table(StoredMatrix::from_f32_rows(rows.len(), width, &values, Packing::F32))?;
    let mut buffer = operations.buffer(rows.len(), width)?;
    let numbered = Rows { tokens: (0..).take(rows.len()).collect(), ..rows.clone() };
    operations.begin(&numbered, ropes, pool)?;
    operations.embed(&numbered, Embedding::Table(&table), 1.0, &mut buffer)?;
    Ok(buffer)
}

/// What the operations of a layer's feed-forward leave in a step; what is added to `out` comes to lie there.
fn feed_forward_alone<O: Operations>(
    operations: &mut O,
    sample: &Sample,
    layer: &LayerWeights<O>,
    rows: &Rows,
    at: (&RopeTables, &O::Pool),
    hidden: &O::Buffer,
    mut out: O::Buffer,
) -> Result<Outputs, EngineError> {
    let (widths, count) = (ModelWidths::of(&sample.architecture), rows.len());
    let with_eps = |norm| (norm, widths.attention.norm_eps);
    let mut step = Outputs::new();
    match &layer.mlp {
        Mlp::Dense { gate_up, gate, down } => {
            let inner = activations(operations, rows, at, widths.ffn, 3)?;
            operations.begin(rows, at.0, at.1)?;
            let added = layer.mlp_norm.as_ref().map(with_eps);
            operations.project_add(rows, down, added, &inner, &mut out)?;
            step.push((Operation::Down, operations.read(&out, count)?));

            let mut out = operations.buffer(count, widths.ffn)?;
            let norm = layer.norm.as_ref().map(with_eps);
            operations.norm_gate_up(rows, norm, *gate, gate_up, hidden, &mut out)?;
            step.push((Operation::GateUp, operations.read(&out, count)?));
        }
        Mlp::Experts(experts) => {
            let inner = activations(operations, rows, at, widths.experts, 3)?;
            operations.begin(rows, at.0, at.1)?;
            let norm = layer.norm.as_ref().map(with_eps).expect("the input of experts is normed");
            // What a router chose is seen through the experts whose outputs are added, all of them noise.
            operations.route(rows, norm, experts, None, hidden)?;
            operations.expert_down(rows, experts, &inner, &mut out)?;
            step.push((Operation::Router, operations.read(&out, count)?));
            // The others see the experts of a script, so that a choice which falls apart is seen in the router alone.
            let mut script = RoutingScript::new(
                ExpertRouting::Uniform,
                sample.seed,
                experts.shape.count,
                experts.shape.per_row,
            );
            let chosen = Some(script.choose([0], rows));
            operations.take_script(chosen)?;
            operations.route(rows, norm, experts, chosen, hidden)?;
            operations.take_script(None)?;
            let mut gated = operations.buffer(count, widths.experts)?;
            operations.expert_gate_up(rows, norm, experts, hidden, &mut gated)?;
            step.push((Operation::ExpertGateUp, operations.read(&gated, count)?));
            operations.expert_down(rows, experts, &inner, &mut out)?;
            step.push((Operation::ExpertDown, operations.read(&out, count)?));
        }
    }
    Ok(step)
}

/// What the operations of a layer of latent attention leave behind the first one; K and V of the expanded form are seen through an attention. Where
/// a device does not have that its rows are empty.
fn latents_alone<O: Operations>(
    operations: &mut O,
    (layer, weights): (&LayerWeights<O>, &LatentWeights<O>),
    rows: &Rows,
    ropes: &RopeTables,
    pool: &O::Pool,
) -> Result<Outputs, EngineError> {
    let (count, absorbed) = (rows.len(), &layer.shape);
    let shape = weights.shape.expanded(absorbed);
    let attended = activations(operations, rows, (ropes, pool), absorbed.attended_width(), 2)?;
    operations.begin(rows, ropes, pool)?;
    let mut values = operations.buffer(count, shape.attended_width())?;
    operations.latent_value(rows, weights, &attended, &mut values)?;
    let of_absorbed = operations.read(&values, count)?;

    let nothing = vec![Vec::new(); count];
    let (mut made, mut of_expanded) = (nothing.clone(), nothing);
    if operations.can_expand(rows, weights, pool) {
        let given = activations(operations, rows, (ropes, pool), weights.shape.compressed_width(), 5)?;
        let noise = activations(operations, rows, (ropes, pool), shape.query_width(), 2)?;
        let mut expanded = operations.expanded_pool(&weights.shape, pool)?;
        operations.reserve(&mut expanded, rows.tables.len())?;
        let mut query = operations.buffer(count, shape.query_width())?;
        operations.begin(rows, ropes, pool)?;
        operations.latent_query(rows, absorbed, weights, ropes, LatentForm::Expanded, &given, &mut query)?;
        made = operations.read(&query, count)?;
        operations.latent_expand(rows, weights, 0, pool, &mut expanded)?;
        let (window, sinks) = (layer.window, layer.sinks.as_ref());
        operations.attention(rows, &shape, window, sinks, 0, &noise, &expanded, &mut values)?;
        of_expanded = operations.read(&values, count)?;
    }
    Ok(vec![
        (Operation::LatentValue, of_absorbed),
        (Operation::LatentQuery, made),
        (Operation::LatentExpand, of_expanded),
    ])
}

/// What each operation of the first layer leaves in the steps of a scenario, all of them on the same random inputs and a pool full of
/// noise. `norm_qkv` leaves its queries, and K and V as an attention sees them; `head` its logits, and those of the tokens it chose.
///
/// # Panics
/// When experts have no norm before them, which no sample has.
pub fn operations_alone<O: Operations>(
    operations: &mut O,
    sample: &Sample,
    scenario: &Scenario,
) -> Result<Outputs, EngineError> {
    let widths = ModelWidths::of(&sample.architecture);
    let with_eps = |norm| (norm, widths.attention.norm_eps);
    let model: ModelWeights<O> = weights::assemble(operations, &sample.architecture, sample.tensors())?;
    let layer = &model.layers[0];
    let shape = &layer.shape;
    let mut ropes = RopeTables::new(&sample.architecture)?;
    let everything: Vec<u32> = (0..).take(scenario.blocks).collect();
    ropes.extend_to(scenario.blocks * scenario.block_size);
    let mut outputs = Outputs::new();
    for rows in &scenario.steps {
        let mut step = Outputs::new();
        let mut pool = pool_of(operations, sample, scenario, &everything)?;
        let count = rows.len();
        let hidden = activations(operations, rows, (&ropes, &pool), widths.hidden, 1)?;
        let query = activations(operations, rows, (&ropes, &pool), shape.query_width(), 2)?;
        operations.begin(rows, &ropes, &pool)?;

        let mut out = operations.buffer(count, widths.hidden)?;
        let embedding = model.table.as_ref().map_or(Embedding::Head(&model.head), Embedding::Table);
        operations.embed(rows, embedding, model.embedding_scale, &mut out)?;
        step.push((Operation::Embed, operations.read(&out, count)?));

        if let Some(draft) = &model.draft {
            let mut joined = operations.buffer(count, 2 * widths.hidden)?;
            operations.join_state(rows, draft, widths.attention.norm_eps, &mut out, &mut joined)?;
            operations.project_add(rows, &draft.projection, None, &joined, &mut out)?;
            step.push((Operation::DraftInput, operations.read(&out, count)?));
        }

        let mut attended = operations.buffer(count, shape.attended_width())?;
        let sinks = layer.sinks.as_ref();
        operations.attention(rows, shape, layer.window, sinks, 0, &query, &pool, &mut attended)?;
        step.push((Operation::Attention, operations.read(&attended, count)?));

        if let Projections::Latent(weights) = &layer.attention {
            step.append(&mut latents_alone(operations, (layer, weights), rows, &ropes, &pool)?);
            operations.begin(rows, &ropes, &pool)?;
        }

        let mut made = operations.buffer(count, shape.query_width())?;
        let projected = match &layer.attention {
            Projections::Heads(weights) => {
                operations.norm_qkv(rows, shape, weights, &ropes, 0, &hidden, &mut pool, &mut made)?;
                step.push((Operation::NormQkv, operations.read(&made, count)?));
                Operation::NormQkv
            }
            Projections::Latent(weights) => {
                let width = weights.shape.compressed_width();
                let given = activations(operations, rows, (&ropes, &pool), width, 5)?;
                operations.begin(rows, &ropes, &pool)?;
                operations.latent_query(
                    rows,
                    shape,
                    weights,
                    &ropes,
                    LatentForm::Absorbed,
                    &given,
                    &mut made,
                )?;
                step.push((Operation::LatentQuery, operations.read(&made, count)?));
                let mut compressed = operations.buffer(count, width)?;
                operations.latent_down(
                    rows,
                    shape,
                    weights,
                    &ropes,
                    0,
                    &hidden,
                    &mut pool,
                    &mut compressed,
                )?;
                step.push((Operation::LatentDown, operations.read(&compressed, count)?));
                Operation::LatentDown
            }
        };
        // K and V are seen through an attention that reads them.
        operations.attention(rows, shape, layer.window, sinks, 0, &query, &pool, &mut attended)?;
        step.push((projected, operations.read(&attended, count)?));

        let mut out = activations(operations, rows, (&ropes, &pool), widths.hidden, 4)?;
        let values = activations(operations, rows, (&ropes, &pool), widths.values(), 2)?;
        operations.begin(rows, &ropes, &pool)?;
        let added = layer.output_norm.as_ref().map(with_eps);
        operations.project_add(rows, &layer.output, added, &values, &mut out)?;
        step.push((Operation::Output, operations.read(&out, count)?));
        step.append(&mut feed_forward_alone(operations, sample, layer, rows, (&ropes, &pool), &hidden, out)?);

        let (with_logits, mut next) = (rows.outputs.len(), Vec::new());
        let mut logits = operations.buffer(with_logits, widths.vocab)?;
        let (norm, eps) = with_eps(&model.norm);
        operations.head(rows, norm, eps, &model.head, model.softcap, &hidden, &mut logits, &mut next)?;
        let logits = operations.read(&logits, with_logits)?;
        operations.await_next(&mut next)?;
        // Of two that are equal up to rounding either may be chosen.
        let chosen = next.iter().zip(&logits).map(|(token, logits)| logits.get(*token as usize).copied());
        let chosen = chosen.map(|logit| vec![logit.unwrap_or(f32::NAN)]).collect();
        step.extend([(Operation::Head, logits), (Operation::Head, chosen)]);

        if outputs.is_empty() {
            outputs = step;
        } else {
            outputs.iter_mut().zip(step).for_each(|((_, all), (_, rows))| all.extend(rows));
        }
    }
    Ok(outputs)
}

#[cfg(test)]
mod tests;
