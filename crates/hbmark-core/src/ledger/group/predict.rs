//! Predictions for a group.
//!
//! Enters: a [`Request`] and a [`Group`]. Leaves: the cells of [`predict`](super::super::predict) with the parts of each step, and how the model
//! lies over the GPUs. A step takes the floor of the slowest GPU of each stage and its collectives, one after the other; batches follow each
//! other at the pace of the slowest stage.

use super::exchange::{Links, Traffic, of_stage, together};
use super::{Group, GroupError, Stage, stages, unread};
use crate::ledger::crossover::{MAX_BATCH, MEMORY_USE, available, crossovers, fit_row, last};
use crate::ledger::links;
use crate::ledger::predict::{
    Prediction, Request, beyond, blank, bound, peak_note, routing_of, summary, tokens_per_second,
};
use crate::ledger::step::{Ledger, StepCost, StepShape};
use crate::ledger::verdict::{Floor, Roof};
use crate::result::{
    Bound, Cause, CellResult, CollectiveKind, CollectiveRow, Crossover, CrossoverKind, GroupStep,
    GroupSummary, MeasuredStep, StageSummary, Status, StepBytes,
};
use crate::units::{Bytes, Flops, Nanos};

/// Predicts every cell of the grid for a model on a group.
///
/// # Errors
/// When no engine would start the model on such a group.
pub fn predict_group(request: &Request<'_>, group: Group) -> Result<(Prediction, GroupSummary), GroupError> {
    let stages = stages(request.architecture, request.inventory, group, 0)?;
    let ledgers: Vec<Ledger> = stages.iter().map(|stage| ledger(request, group, stage)).collect();
    let between = |gpus| links::between(&request.device.name, gpus);
    let model = Predicted {
        request,
        group,
        roof: Roof::of_model(request.device, request.weights, request.architecture),
        links: Links {
            // Of stages of one GPU the only link is that to the next.
            stage: between(if group.tensor > 1 { group.tensor } else { group.gpus() }),
            all: between(group.gpus()),
        },
        whole: Ledger::new(request.architecture, request.inventory, request.kv).routed(request.routing),
        stages: &stages,
        ledgers,
    };
    let mut cells = Vec::new();
    for &phase in request.phases {
        for &batch in request.batches {
            for &context in request.contexts {
                cells.push(model.cell(StepShape { phase, batch, context }));
            }
        }
    }
    let stages = stages.iter().zip(&model.ledgers).map(|(part, ledger)| StageSummary {
        dtype: request.weights,
        first_layer: part.first_layer,
        layers: part.layers,
        weight_bytes: ledger.resident_weights(),
        replicated_bytes: part.replicated,
        kv_bytes_per_token: ledger.kv_bytes_per_token(),
    });
    let summary_of_group = GroupSummary {
        tensor_parallel_size: group.tensor,
        pipeline_parallel_size: group.pipeline,
        expert_parallel: group.experts,
        gpus: group.gpus(),
        link: model.links.stage.cloned(),
        stages: stages.collect(),
    };
    let prediction = Prediction {
        model: summary(request),
        cells,
        crossovers: model.crossovers(),
        warnings: model.warnings(),
    };
    Ok((prediction, summary_of_group))
}

/// The ledger of one GPU of a stage.
pub(super) fn ledger(request: &Request<'_>, group: Group, part: &Stage) -> Ledger {
    Ledger::part(&part.architecture, &part.inventory, request.kv, part.tied)
        .routed(request.routing)
        .sharing_experts(group.expert_ranks())
}

struct Predicted<'a> {
    request: &'a Request<'a>,
    group: Group,
    roof: Roof,
    links: Links,
    /// The model on one GPU.
    whole: Ledger,
    stages: &'a [Stage],
    /// The first GPU of each stage.
    ledgers: Vec<Ledger>,
}

impl Predicted<'_> {
    fn cell(&self, shape: StepShape) -> CellResult {
        if let Some(skipped) = beyond(self.request, shape) {
            return skipped;
        }
        let costs: Vec<StepCost> = self.ledgers.iter().map(|ledger| ledger.step(shape)).collect();
        let floors: Vec<Floor> = costs.iter().map(|cost| Floor::new(cost, &self.roof)).collect();
        let step = self.step(shape, &floors);
        let time = step.stages_ns.iter().sum::<f64>() + step.collectives_ns.unwrap_or(0.0);
        let memory = self.memory(shape);
        let does_not_fit = memory.as_f64() > self.request.device.memory_bytes.as_f64() * MEMORY_USE;
        let slowest = costs.iter().zip(&floors).max_by(|a, b| a.1.time().0.total_cmp(&b.1.time().0));
        let own_work = slowest.and_then(|(cost, floor)| bound(cost, floor));
        let exchanged = step.is_bound_by_collectives();
        let bound = own_work.map(|own| if exchanged { Bound::Collectives } else { own });
        let bytes = costs.iter().fold(StepBytes::default(), |sum, cost| StepBytes {
            weights: sum.weights + cost.bytes.weights,
            kv_read: sum.kv_read + cost.bytes.kv_read,
            kv_write: sum.kv_write + cost.bytes.kv_write,
            other: sum.other + cost.bytes.other,
            as_implemented: None,
        });
        CellResult {
            tokens_per_s: bound.and_then(|_| tokens_per_second(shape, Nanos(step.interval_ns))),
            predicted_ns: Some(time),
            predicted_datasheet_ns: Some(time),
            bytes,
            flops: costs.iter().map(|cost| cost.flops).fold(Flops(0.0), |a, b| Flops(a.0 + b.0)).0,
            bound,
            memory_predicted_bytes: Some(memory),
            distinct_experts: self.whole.step(shape).distinct_experts,
            flags: does_not_fit
                .then_some(Cause::DoesNotFit {
                    needed_bytes: memory,
                    device_bytes: self.request.device.memory_bytes,
                    usable_share: MEMORY_USE,
                })
                .into_iter()
                .collect(),
            group: Some(step),
            status: Status::Predicted,
            ..blank(self.request, shape)
        }
    }

    fn step(&self, shape: StepShape, floors: &[Floor]) -> GroupStep {
        let traffic = Traffic {
            tokens: shape.batch * shape.queries(),
            logits: shape.logits(),
            activation: self.whole.activation_bytes(),
        };
        let of = |stage| of_stage(stage, self.group, self.links, traffic);
        let rows: Vec<Vec<CollectiveRow>> = self.stages.iter().map(of).collect();
        // The next batch does not wait for what is on its way to the next stage.
        let busy = |rows: &[CollectiveRow]| -> f64 {
            let own = rows.iter().filter(|row| row.kind != CollectiveKind::Send);
            own.filter_map(|row| row.link_ns).sum()
        };
        let intervals = floors.iter().zip(&rows).map(|(floor, rows)| floor.time().0 + busy(rows));
        let interval_ns = intervals.fold(0.0, f64::max);
        let collectives = together(rows.into_iter().flatten());
        let stages_ns: Vec<f64> = floors.iter().map(|floor| floor.time().0).collect();
        let measured = self.measured(&collectives, stages_ns.iter().sum());
        let collectives_ns = self.links.stage.map(|_| collectives.iter().filter_map(|row| row.link_ns).sum());
        GroupStep { stages_ns, collectives, collectives_ns, interval_ns, measured }
    }

    /// The step with all-reduces as they were measured, by everyone who measured every size of them.
    fn measured(&self, rows: &[CollectiveRow], stages: f64) -> Vec<MeasuredStep> {
        let is_all_reduce = |row: &&CollectiveRow| row.kind == CollectiveKind::AllReduce;
        if self.group.tensor == 1 {
            return Vec::new();
        }
        let others: f64 = rows.iter().filter(|row| !is_all_reduce(row)).filter_map(|row| row.link_ns).sum();
        let of = |table: links::MeasuredAllReduce| {
            let times = rows
                .iter()
                .filter(is_all_reduce)
                .map(|row| Some(table.time(row.bytes)?.0 * row.count as f64));
            let all_reduces_ns = times.sum::<Option<f64>>()?;
            Some(MeasuredStep {
                by: table.by.to_owned(),
                source: table.source,
                all_reduces_ns,
                step_ns: stages + all_reduces_ns + others,
            })
        };
        links::measured(&self.request.device.name, self.group.tensor).into_iter().filter_map(of).collect()
    }

    /// The fullest GPU, with a batch in flight for each stage.
    fn memory(&self, shape: StepShape) -> Bytes {
        let of = |ledger: &Ledger| self.memory_of(ledger, shape);
        self.ledgers.iter().map(of).max().unwrap_or_default()
    }

    fn memory_of(&self, ledger: &Ledger, shape: StepShape) -> Bytes {
        let one = ledger.memory(shape);
        let kept = ledger.kept(shape.positions_after());
        let waiting = (self.group.pipeline - 1).saturating_mul(shape.batch) as u64;
        one + Bytes(kept.0.saturating_mul(waiting))
    }

    fn fits(&self, batch: usize, context: usize) -> bool {
        let memory = self.memory(StepShape::decode(batch, context));
        memory.as_f64() <= self.request.device.memory_bytes.as_f64() * MEMORY_USE
    }

    /// Of one stage those of its GPU; of several what fits in all.
    fn crossovers(&self) -> Vec<Crossover> {
        let Request { device, batches, contexts, architecture, .. } = self.request;
        let memory = device.memory_bytes;
        if let [ledger] = self.ledgers.as_slice() {
            return crossovers(ledger, &self.roof, Some(memory), batches, contexts);
        }
        let mut rows = Vec::new();
        for &context in contexts.iter().filter(|context| **context < architecture.max_positions) {
            let value = last(MAX_BATCH, |batch| self.fits(batch, context));
            rows.push(fit_row(CrossoverKind::MaxBatchThatFits, value, || {
                format!("at context {context} in {} of every GPU", available(memory))
            }));
        }
        for &batch in *batches {
            let value =
                last(architecture.max_positions.saturating_sub(1), |context| self.fits(batch, context));
            rows.push(fit_row(CrossoverKind::MaxContextThatFits, value, || {
                format!("at batch {batch} in {} of every GPU", available(memory))
            }));
        }
        rows
    }

    fn warnings(&self) -> Vec<String> {
        let Request { device, .. } = self.request;
        let mut warnings = Vec::new();
        warnings.extend(routing_of(self.request, &self.whole));
        warnings.extend(self.fullest_note());
        warnings.extend(peak_note(self.request, &self.roof));
        let fullest = self.ledgers.iter().map(Ledger::resident_weights).max().unwrap_or_default();
        if fullest.as_f64() > device.memory_bytes.as_f64() * MEMORY_USE {
            warnings.push(format!(
                "the weights take {} of a GPU, more than {:.0} % of the {} of {}: times are those of devices with more memory",
                fullest.capacity(),
                MEMORY_USE * 100.0,
                device.memory_bytes.capacity(),
                device.product
            ));
        }
        if self.links.all.is_none() && self.group.gpus() > 1 {
            let without = format!(
                "the table of devices has no link between {} × {}",
                self.group.gpus(),
                device.product
            );
            warnings.push(match self.links.stage {
                None => format!(
                    "communication time not modelled: {without}; the floor is that of the slowest GPU alone"
                ),
                Some(_) => format!("the time of what stages send each other is not modelled: {without}"),
            });
        }
        if self.group.pipeline > 1 {
            warnings.push(format!(
                "a step's time is that of one batch through all {0} stages; tokens a second and memory are with {0} batches in flight",
                self.group.pipeline
            ));
        }
        let unread = unread(self.request.inventory);
        if unread > 0 {
            warnings.push(format!("{} of tensors that no step reads are on no GPU here", Bytes(unread)));
        }
        warnings
    }

    fn fullest_note(&self) -> Option<String> {
        let ranks = self.group.expert_ranks();
        let batch = self.request.batches.iter().copied().max()?;
        let fullest = self.ledgers.first()?.most_experts(batch).filter(|_| ranks > 1)?;
        Some(format!(
            "a step waits for the GPU with the most active experts: {fullest:.1} a layer at batch {batch}, the mean of seeded draws"
        ))
    }
}
