//! Tensor parallel groups: each rank has its part of every layer, on a group of threads or on a GPU of its own.
//!
//! Enters: an [`OpenModel`] and the number of ranks. Leaves: a [`Session`] like any other. Heads, channels of feed-forwards and the vocabulary are
//! split as vLLM splits them ([`tensor_parts`]); norms, routers and the embedding are on every rank. All ranks run the same steps over caches of their
//! own heads, and meet where a layer adds to the residual ([`Rank`]). A rank that fails ends the step on all of them.
#![expect(unsafe_code, reason = "members of a team have a rank each")]

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::cpu::thread_team::{DisjointSlice, Team};
use super::cpu::{CpuOperations, KernelChoice};
#[cfg(any(test, feature = "cuda"))]
use super::cuda::{CudaOperations, Device};
use super::forward::ModelWeights;
use super::operations::{Operations, Storage};
use super::ranks::Rank;
use super::weights::Assembly;
use super::{NativeSession, kv_format, refuse};
use crate::engine::{
    EngineError, LoadedModel, OperationTime, ScriptedRouting, SequenceId, Session, StepBatch, StepProfiler,
    SyntheticKv, Timeline, error_mapping,
};
use crate::weights::{OpenModel, StoredTensor, name_of_weights};
use hbmark_core::ledger::group::{Group, TensorPart, stages, tensor_parts};
use hbmark_core::model::{Architecture, Dtype, Inventory, Mixer, QkNorm, Role};
use hbmark_core::result::{Capabilities, EngineKind};
use hbmark_core::units::Bytes;

/// What the ranks of a group have of a model.
#[derive(Debug)]
pub struct RankShapes {
    pub architectures: Vec<Architecture>,
    /// Rows of the head.
    pub vocabulary: Vec<Range<usize>>,
    /// Of each tensor, by the name under which it is streamed, the part of each rank.
    parts: HashMap<String, Vec<TensorPart>>,
}

impl RankShapes {
    /// Those of so many ranks.
    pub fn new(model: &OpenModel, dtype: Dtype, ranks: usize) -> Result<Self, EngineError> {
        let architecture = &model.architecture;
        check(architecture)?;
        let inventory = model.inventory(dtype);
        let group = Group { tensor: ranks, ..Group::ONE };
        let refused = |problem: hbmark_core::ledger::GroupError| {
            let what = format!("a tensor parallel group of {ranks}");
            EngineError::unsupported(super::NAME, what, problem.to_string())
        };
        let mut shapes = Self {
            architectures: Vec::with_capacity(ranks),
            vocabulary: Vec::with_capacity(ranks),
            parts: HashMap::new(),
        };
        for rank in 0..ranks {
            let [stage] = &stages(architecture, &inventory, group, rank).map_err(refused)?[..] else {
                unreachable!("one stage")
            };
            shapes.architectures.push(stage.architecture.clone());
            let parts = tensor_parts(architecture, &inventory, ranks, rank).map_err(refused)?;
            for (tensor, part) in inventory.tensors.iter().zip(parts) {
                let head = if architecture.tied_head { Role::Embedding } else { Role::Head };
                if tensor.role == head
                    && let TensorPart::Rows(blocks) = &part
                {
                    shapes.vocabulary.extend(TensorPart::ranges(blocks, architecture.vocab_size));
                }
                // Every rank looks tokens up itself.
                let part = if tensor.role == Role::Embedding { TensorPart::Whole } else { part };
                if !matches!(tensor.role, Role::Scale | Role::ExpertScale) {
                    shapes.parts.entry(name_of_weights(tensor)).or_default().push(part);
                }
            }
        }
        let none = |count: usize, of: &str| {
            refuse(format!("{of} of {count} on {ranks} ranks"), "the last of them would have none of it")
        };
        if shapes.vocabulary.iter().any(Range::is_empty) {
            return none(architecture.vocab_size, "a vocabulary");
        }
        let width =
            |architecture: &Architecture| architecture.experts.as_ref().map(|experts| experts.ffn_size);
        if shapes.architectures.iter().any(|of_rank| width(of_rank) == Some(0)) {
            return none(width(architecture).unwrap_or(0), "experts");
        }
        Ok(shapes)
    }

    /// What a rank has of a tensor; `None` for nothing.
    pub(super) fn part(
        &self,
        rank: usize,
        name: &str,
        tensor: &StoredTensor,
    ) -> Result<Option<StoredTensor>, EngineError> {
        let part = self.parts.get(name).map(|parts| &parts[rank]);
        Ok(match (part, tensor) {
            (Some(TensorPart::OnFirst), StoredTensor::Vector(values))
                if rank > 0 && name.contains(".experts.") =>
            {
                // All experts have biases or none has.
                Some(StoredTensor::Vector(vec![0.0; values.len()]))
            }
            (Some(TensorPart::OnFirst), _) if rank > 0 => None,
            (Some(TensorPart::Rows(blocks)), StoredTensor::Matrix(matrix)) => {
                let rows: Vec<usize> =
                    TensorPart::ranges(blocks, matrix.rows).into_iter().flatten().collect();
                Some(StoredTensor::Matrix(matrix.pick_rows(rows)))
            }
            (Some(TensorPart::Rows(blocks)), StoredTensor::Vector(values)) => {
                let ranges = TensorPart::ranges(blocks, values.len());
                Some(StoredTensor::Vector(ranges.into_iter().flat_map(|own| &values[own]).copied().collect()))
            }
            (Some(TensorPart::Columns(share)), StoredTensor::Matrix(matrix)) => {
                let own = share.range_of(matrix.columns);
                let Some(columns) = matrix.slice_columns(own.clone()) else {
                    return refuse(
                        format!("columns {own:?} of {name}, which is in {}", matrix.storage()),
                        "such a part would cut columns that share a scale",
                    );
                };
                Some(StoredTensor::Matrix(columns))
            }
            _ => Some(tensor.clone()),
        })
    }
}

/// Checks that every rank can norm what it has.
fn check(architecture: &Architecture) -> Result<(), EngineError> {
    let what = |index: usize| {
        matches!(architecture.layer(index).mixer, Mixer::Attention(a) if a.qk_norm == QkNorm::FullWidth)
            .then_some("norms over the heads of all ranks")
    };
    match (0..architecture.layers).find_map(what) {
        Some(what) => refuse(
            format!("tensor parallel groups of the {:?} family", architecture.family),
            format!("it has {what}; `hbmark predict --tensor-parallel-size` knows the model"),
        ),
        None => Ok(()),
    }
}

/// A rank that is being loaded.
struct Loading<'a, O: Operations> {
    operations: O,
    assembly: Option<Assembly<'a, O>>,
    weights: Option<ModelWeights<O>>,
    failed: Option<EngineError>,
}

/// What a rank has once it is loaded.
type Loaded<O> = (O, ModelWeights<O>);

/// A job on the thread of each rank that has not failed.
fn on_each<'a, O: Operations>(
    team: &mut Team,
    ranks: &mut [Loading<'a, O>],
    job: impl Fn(usize, &mut Loading<'a, O>) -> Result<(), EngineError> + Sync,
) {
    let slots = DisjointSlice::new(ranks);
    team.run(&|worker| {
        let rank = worker.index;
        // SAFETY: each member has its own rank.
        let own = unsafe { &mut slots.part(rank..rank + 1)[0] };
        if own.failed.is_none() {
            own.failed = job(rank, own).err();
        }
    });
}

/// Loads every rank's part in one pass over the weights. Each packs its own, so that memory lies where the rank runs.
fn load<O: Operations>(
    team: &mut Team,
    model: &OpenModel,
    dtype: Dtype,
    operations: Vec<O>,
    shapes: &RankShapes,
    loaded: &mut dyn FnMut(Bytes),
) -> Result<(Vec<Loaded<O>>, Inventory), EngineError> {
    let device = operations.first().map(Storage::device_name).unwrap_or_default();
    let mut ranks = Vec::with_capacity(operations.len());
    let parts = shapes.architectures.iter().zip(&shapes.vocabulary);
    for (operations, (architecture, vocabulary)) in operations.into_iter().zip(parts) {
        ranks.push(Loading {
            operations,
            assembly: Some(Assembly::of_rank(architecture, vocabulary.clone())),
            weights: None,
            failed: None,
        });
    }
    let streamed = model.stream(dtype, &mut |name, tensor| {
        loaded(tensor.bytes());
        on_each(team, &mut ranks, |rank, own| {
            let Loading { operations, assembly: Some(assembly), .. } = own else { return Ok(()) };
            let part = shapes.part(rank, name, &tensor)?;
            part.map_or(Ok(()), |part| assembly.take(operations, name, part))
        });
        Ok(())
    });
    let failed = |ranks: &mut Vec<Loading<'_, O>>| {
        ranks.iter_mut().find_map(|rank| rank.failed.take()).map_or(Ok(()), Err)
    };
    failed(&mut ranks)?;
    let inventory = streamed.map_err(|error| error_mapping::of_loading(&device, error))?;
    on_each(team, &mut ranks, |_, own| {
        let Loading { operations, assembly, weights, .. } = own;
        if let Some(assembly) = assembly.take() {
            *weights = Some(assembly.finish(operations)?);
        }
        Ok(())
    });
    failed(&mut ranks)?;
    let ranks = ranks.into_iter().filter_map(|rank| Some((rank.operations, rank.weights?)));
    Ok((ranks.collect(), inventory))
}

/// A model on the ranks of a group.
pub struct ParallelSession<O: Operations> {
    /// Runs a job on a thread of each rank; the first is the caller's.
    team: Team,
    ranks: Vec<NativeSession<O>>,
    places: Vec<Rank>,
    model: LoadedModel,
    /// Of the last job, rank by rank.
    outcomes: Vec<Result<(), EngineError>>,
    lost: bool,
}

impl<O: Operations> std::fmt::Debug for ParallelSession<O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ParallelSession").field("ranks", &self.ranks).finish_non_exhaustive()
    }
}

impl ParallelSession<CpuOperations> {
    /// Loads a model onto so many ranks of a CPU, which share the threads.
    pub fn on_cpu(
        model: &OpenModel,
        dtypes: (Dtype, Dtype),
        (ranks, threads): (usize, usize),
        block_size: usize,
        loaded: &mut dyn FnMut(Bytes),
    ) -> Result<Self, EngineError> {
        let shapes = RankShapes::new(model, dtypes.0, ranks)?;
        if threads < ranks {
            return refuse(
                format!("a tensor parallel group of {ranks} on {threads} threads"),
                "a rank needs a thread of its own",
            );
        }
        let each = threads / ranks;
        let kernels = KernelChoice::of_processor()?;
        let on_own = |rank| CpuOperations::on_processors(each, rank * each, kernels);
        let operations = (0..ranks).map(on_own).collect::<Result<_, _>>()?;
        let team = Team::on_processors(ranks, 0, each).map_err(|error| no_threads(ranks, &error))?;
        Self::load(model, dtypes, (operations, team), &shapes, block_size, loaded)
    }
}

fn no_threads(ranks: usize, error: &std::io::Error) -> EngineError {
    let detail = format!("cannot start {ranks} ranks: {error}");
    EngineError::Device { device: "cpu".into(), detail }
}

#[cfg(any(test, feature = "cuda"))]
impl<D: Device> ParallelSession<CudaOperations<D>> {
    /// Loads a model onto GPUs that reach each other's memory, one for each rank.
    pub fn on_gpus(
        model: &OpenModel,
        dtypes: (Dtype, Dtype),
        operations: Vec<CudaOperations<D>>,
        block_size: usize,
        loaded: &mut dyn FnMut(Bytes),
    ) -> Result<Self, EngineError> {
        let ranks = operations.len();
        let shapes = RankShapes::new(model, dtypes.0, ranks)?;
        let team = Team::unpinned(ranks).map_err(|error| no_threads(ranks, &error))?;
        Self::load(model, dtypes, (operations, team), &shapes, block_size, loaded)
    }
}

impl<O: Operations> ParallelSession<O> {
    fn load(
        model: &OpenModel,
        (dtype, kv_dtype): (Dtype, Dtype),
        (operations, mut team): (Vec<O>, Team),
        shapes: &RankShapes,
        block_size: usize,
        loaded: &mut dyn FnMut(Bytes),
    ) -> Result<Self, EngineError> {
        kv_format::check(kv_dtype, model.architecture.latent.is_some())?;
        let ranks = operations.len();
        let (loaded, inventory) = load(&mut team, model, dtype, operations, shapes, loaded)?;
        let places = Rank::group(ranks);
        let session = |(rank, (operations, weights)): (usize, Loaded<O>)| {
            let mut session = NativeSession::of_weights(
                operations,
                &shapes.architectures[rank],
                weights,
                inventory.clone(),
                kv_dtype,
                block_size,
            )?;
            session.forward = session.forward.of_rank(places[rank].clone(), &shapes.vocabulary[rank]);
            Ok(session)
        };
        let sessions =
            loaded.into_iter().enumerate().map(session).collect::<Result<Vec<_>, EngineError>>()?;
        let of_rank = sessions[0].capabilities();
        let own = super::capabilities(&model.architecture, &of_rank.device.to_string(), of_rank.host_memory);
        let kernels = of_rank.kernels.clone();
        Ok(Self {
            team,
            outcomes: (0..ranks).map(|_| Ok(())).collect(),
            ranks: sessions,
            places,
            model: LoadedModel {
                capabilities: Capabilities { engine: EngineKind::of_ranks(ranks), kernels, ..own },
                architecture: model.architecture.clone(),
                inventory,
                kv_dtype,
            },
            lost: false,
        })
    }

    /// Why a rank was lost: what its own device says of it, where that is more than that it was missed.
    fn reason_of(&mut self, error: EngineError) -> EngineError {
        if error.is_sticky() {
            self.lost = true;
        }
        if !matches!(error, EngineError::RankLost { .. }) {
            return error;
        }
        let own = self.ranks.iter_mut().find_map(|rank| rank.timeline.drain().err());
        own.unwrap_or(error)
    }

    /// The operations of a rank, to plant faults in.
    #[cfg(test)]
    pub fn rank_mut(&mut self, rank: usize) -> &mut O {
        &mut self.ranks[rank].operations
    }

    /// The same on every rank at once.
    fn on_all(
        &mut self,
        job: impl Fn(usize, &mut NativeSession<O>) -> Result<(), EngineError> + Sync,
    ) -> Result<(), EngineError> {
        if self.lost {
            return Err(EngineError::Device {
                device: self.model.capabilities.device.to_string(),
                detail: "a rank of the tensor parallel group failed before".into(),
            });
        }
        let ranks = DisjointSlice::new(&mut self.ranks);
        let outcomes = DisjointSlice::new(&mut self.outcomes);
        let places = &self.places;
        self.team.run(&|worker| {
            let rank = worker.index;
            // SAFETY: each member has its own rank.
            let (session, outcome) =
                unsafe { (&mut ranks.part(rank..rank + 1)[0], &mut outcomes.part(rank..rank + 1)[0]) };
            *outcome = job(rank, session);
            if outcome.is_err() {
                places[rank].leave();
            }
        });
        let failed = |outcome: &Result<(), EngineError>| outcome.is_err();
        if !self.outcomes.iter().any(failed) {
            return Ok(());
        }
        let missed = |outcome: &Result<(), EngineError>| matches!(outcome, Err(EngineError::RankLost { .. }));
        // What all refuse alike is not a fault of any: they are where they were.
        let refused = |outcome: &Result<(), EngineError>| matches!(outcome, Err(error) if !error.is_sticky());
        if self.outcomes.iter().all(refused) {
            self.places[0].restore();
        } else {
            self.lost = true;
        }
        // The reason, and not that others missed a rank.
        let reason = self.outcomes.iter().position(|outcome| failed(outcome) && !missed(outcome));
        let at = reason.or_else(|| self.outcomes.iter().position(failed)).unwrap_or(0);
        std::mem::replace(&mut self.outcomes[at], Ok(()))
    }
}

impl<O: Operations> Session for ParallelSession<O> {
    fn model(&self) -> &LoadedModel {
        &self.model
    }

    fn step(&mut self, batch: &StepBatch) -> Result<(), EngineError> {
        self.ranks[0].check_batch(batch)?;
        self.on_all(|_, session| session.step(batch))
    }

    fn read_logits(&mut self, logits: &mut Vec<f32>) -> Result<(), EngineError> {
        // Of each rank its part of every output's row.
        let mut parts = Vec::with_capacity(self.ranks.len());
        for rank in &mut self.ranks {
            let mut own = Vec::new();
            if let Err(error) = rank.read_logits(&mut own) {
                return Err(self.reason_of(error));
            }
            parts.push(own);
        }
        let vocab = self.architecture().vocab_size;
        let outputs = parts.iter().map(Vec::len).sum::<usize>() / vocab;
        logits.clear();
        for output in 0..outputs {
            for own in &parts {
                let width = own.len() / outputs;
                logits.extend_from_slice(&own[output * width..(output + 1) * width]);
            }
        }
        Ok(())
    }

    fn next_tokens(&mut self, tokens: &mut Vec<u32>) -> Result<(), EngineError> {
        // All have the same.
        self.ranks[0].next_tokens(tokens).map_err(|error| self.reason_of(error))
    }

    fn timeline(&mut self) -> &mut dyn Timeline {
        self.ranks[0].timeline()
    }

    fn release(&mut self, sequence: SequenceId) {
        self.ranks.iter_mut().for_each(|rank| rank.release(sequence));
    }

    fn synthetic_kv(&mut self) -> Option<&mut dyn SyntheticKv> {
        Some(self)
    }
    fn profiler(&mut self) -> Option<&mut dyn StepProfiler> {
        Some(self)
    }

    fn bytes_moved(&mut self) -> Option<Bytes> {
        // The ranks of a host share its memory; of GPUs each reads its own, and the first has the most.
        let reading = if self.model.capabilities.host_memory { self.ranks.len() } else { 1 };
        let mut read = self.ranks[..reading].iter_mut().map(NativeSession::bytes_moved);
        read.try_fold(Bytes(0), |sum, own| Some(sum + own?))
    }

    fn experts_met(&mut self) -> Option<f64> {
        // All meet the same.
        self.ranks.iter_mut().map(NativeSession::experts_met).fold(None, Option::or)
    }

    fn threads_away(&mut self) -> Option<f64> {
        self.ranks.iter_mut().filter_map(NativeSession::threads_away).reduce(|sum, own| sum + own)
    }

    fn script_experts(&mut self, script: Option<ScriptedRouting>) -> Option<ScriptedRouting> {
        let before: Vec<_> = self.ranks.iter_mut().map(|rank| rank.script_experts(script)).collect();
        before[0]
    }

    fn preallocate_blocks(&mut self, blocks: usize) -> Result<(), EngineError> {
        self.on_all(|_, session| session.preallocate_blocks(blocks))
    }
}

impl<O: Operations> Drop for ParallelSession<O> {
    /// Kernels of a rank may still be at memory of another.
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            // A device that failed has none running.
            let _ = rank.timeline.drain();
        }
    }
}

impl<O: Operations> SyntheticKv for ParallelSession<O> {
    fn fill_kv(&mut self, sequence: SequenceId, positions: usize, seed: u64) -> Result<(), EngineError> {
        self.on_all(|_, session| session.fill_kv(sequence, positions, seed))
    }
}

impl<O: Operations> StepProfiler for ParallelSession<O> {
    /// Times of the first rank, with the bytes of all that share its memory. What it waits for the others is in the sums.
    fn profile(&mut self, batch: &StepBatch) -> Result<Vec<OperationTime>, EngineError> {
        self.ranks[0].check_batch(batch)?;
        let profiles: Vec<Mutex<Vec<OperationTime>>> = self.ranks.iter().map(|_| Mutex::default()).collect();
        self.on_all(|rank, session| {
            *profiles[rank].lock().unwrap_or_else(PoisonError::into_inner) = session.profile(batch)?;
            Ok(())
        })?;
        let mut profiles =
            profiles.into_iter().map(|own| own.into_inner().unwrap_or_else(PoisonError::into_inner));
        let mut first = profiles.next().unwrap_or_default();
        for own in profiles.take(if self.model.capabilities.host_memory { usize::MAX } else { 0 }) {
            for (row, own) in first.iter_mut().zip(own) {
                row.bytes = row.bytes + own.bytes;
            }
        }
        Ok(first)
    }
}
