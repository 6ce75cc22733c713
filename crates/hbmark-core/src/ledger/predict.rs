//! Predictions from a data sheet: `hbmark predict`, without a device.
//!
//! Enters: dimensions, storage, a [`DeviceSpec`], and the axes of the grid. Leaves: predicted cells, crossovers, what fits in
//! memory, and a summary of the model. Every cell has the status `predicted`.

use super::crossover::{MEMORY_USE, crossovers};
use super::routing::ExpertRouting;
use super::step::{Ledger, StepCost, StepShape};
use super::verdict::{Floor, Roof};
use crate::model::{Architecture, Dtype, Inventory};
use crate::result::{Bound, Cause, CellResult, Crossover, DeviceSpec, ModelSummary, Phase, Status};
use crate::units::Nanos;

/// The engine named in predicted cells: it moves the minimum of bytes.
pub const IDEAL_ENGINE: &str = "ideal";

/// FLOPs per byte up to which a step is bound by memory on any GPU of the table, in any dtype.
const SURELY_MEMORY: f64 = 8.0;

/// What to predict.
#[derive(Debug, Clone)]
pub struct Request<'a> {
    pub architecture: &'a Architecture,
    /// The tensors as they are stored in `weights`.
    pub inventory: &'a Inventory,
    /// The model's name, for the summary.
    pub name: &'a str,
    pub weights: Dtype,
    pub kv: Dtype,
    pub device: &'a DeviceSpec,
    pub batches: &'a [usize],
    /// Cached positions of a decode, prompt tokens of a prefill.
    pub contexts: &'a [usize],
    pub phases: &'a [Phase],
    /// How tokens are assumed to be spread over experts.
    pub routing: ExpertRouting,
}

/// What was predicted.
#[derive(Debug, Clone, PartialEq)]
pub struct Prediction {
    pub model: ModelSummary,
    pub cells: Vec<CellResult>,
    pub crossovers: Vec<Crossover>,
    pub warnings: Vec<String>,
}

/// Predicts every cell of the grid, in the order phase, batch, context.
pub fn predict(request: &Request<'_>) -> Prediction {
    let inventory = request.inventory;
    let ledger = Ledger::new(request.architecture, inventory, request.kv).routed(request.routing);
    let roof = Roof::of_model(request.device, request.weights, request.architecture);
    let mut cells = Vec::with_capacity(request.phases.len() * request.batches.len() * request.contexts.len());
    for &phase in request.phases {
        for &batch in request.batches {
            for &context in request.contexts {
                cells.push(predict_cell(request, &ledger, &roof, StepShape { phase, batch, context }));
            }
        }
    }
    let mut warnings = Vec::new();
    warnings.extend(routing_of(request, &ledger));
    warnings.extend(peak_note(request, &roof));
    if ledger.resident_weights().as_f64() > request.device.memory_bytes.as_f64() * MEMORY_USE {
        warnings.push(format!(
            "the weights take {}, more than {:.0} % of the {} of {}: times are those of a device with more memory",
            ledger.resident_weights().capacity(),
            MEMORY_USE * 100.0,
            request.device.memory_bytes.capacity(),
            request.device.product
        ));
    }
    Prediction {
        model: summary(request),
        cells,
        crossovers: crossovers(
            &ledger,
            &roof,
            Some(request.device.memory_bytes),
            request.batches,
            request.contexts,
        ),
        warnings,
    }
}

/// The model as a prediction states it.
pub(in crate::ledger) fn summary(request: &Request<'_>) -> ModelSummary {
    ModelSummary::new(request.name, ModelSummary::SHAPE_ALONE, request.architecture, request.inventory)
}

/// That arithmetic has no floor.
pub(in crate::ledger) fn peak_note(request: &Request<'_>, roof: &Roof) -> Option<String> {
    let Some(peak) = &roof.peak else {
        return Some(format!(
            "the data sheet of {} has no matrix-product peak for {}: only memory floors are predicted, and a prefill is \
             slower than its floor",
            request.device.product, request.weights
        ));
    };
    let int8 = request.device.dense_flops_per_s.get("int8").copied()?;
    let weight_only = matches!(request.weights, Dtype::Int8 | Dtype::Int4) && int8 > peak.rate.0;
    weight_only.then(|| {
        format!(
            "{} weights are taken as weight-only, multiplied in {}: an engine that rounds activations to int8 too (W8A8) may be up to {:.0} times as \
             fast where a floor is compute",
            request.weights,
            peak.dtype,
            int8 / peak.rate.0
        )
    })
}

/// What the experts of a step are: a user who compares a measurement must know that they are not a floor.
pub fn routing_note(ledger: &Ledger, routing: ExpertRouting, batch: usize) -> Option<String> {
    let experts = ledger.architecture().experts.as_ref()?;
    let met = ledger.distinct_experts(batch)?;
    Some(format!(
        "bytes of experts are the expectation of {routing} routing ({:.1} ± {:.1} of {} experts a layer at batch {batch}), not a lower bound: \
         a step whose tokens agree reads {}",
        met.mean, met.deviation, experts.count, experts.per_token
    ))
}

/// The same at the largest decode batch of a grid.
pub(in crate::ledger) fn routing_of(request: &Request<'_>, ledger: &Ledger) -> Option<String> {
    routing_note(ledger, request.routing, request.batches.iter().copied().max()?)
}

/// A cell that the model cannot have.
pub(in crate::ledger) fn beyond(request: &Request<'_>, shape: StepShape) -> Option<CellResult> {
    let positions = shape.positions_after();
    let limit = request.architecture.max_positions;
    let reason = match shape.batch {
        0 => Cause::EmptyBatch,
        _ if positions > limit => Cause::ExceedsContext { positions, limit, limited_by: None },
        _ => return None,
    };
    Some(CellResult { status: Status::Skipped, reason: Some(reason), ..blank(request, shape) })
}

fn predict_cell(request: &Request<'_>, ledger: &Ledger, roof: &Roof, shape: StepShape) -> CellResult {
    if let Some(skipped) = beyond(request, shape) {
        return skipped;
    }
    let cost = ledger.step(shape);
    let floor = Floor::new(&cost, roof);
    let time = floor.time();
    let bound = bound(&cost, &floor);
    let memory = ledger.memory(shape);
    let mut flags = Vec::new();
    if memory.as_f64() > request.device.memory_bytes.as_f64() * MEMORY_USE {
        flags.push(Cause::DoesNotFit {
            needed_bytes: memory,
            device_bytes: request.device.memory_bytes,
            usable_share: MEMORY_USE,
        });
    }
    CellResult {
        tokens_per_s: bound.and_then(|_| tokens_per_second(shape, time)),
        predicted_ns: Some(time.0),
        predicted_datasheet_ns: Some(time.0),
        bytes: cost.bytes,
        flops: cost.flops.0,
        bound,
        memory_predicted_bytes: Some(memory),
        distinct_experts: cost.distinct_experts,
        flags,
        status: Status::Predicted,
        ..blank(request, shape)
    }
}

/// What bounds a step; `None` where that hangs on a peak that is not known: the floor of memory says nothing of its rate then.
pub(in crate::ledger) fn bound(cost: &StepCost, floor: &Floor) -> Option<Bound> {
    let intensity = cost.flops.0 / cost.bytes.ideal().as_f64();
    (floor.compute.is_some() || intensity <= SURELY_MEMORY).then(|| floor.bound())
}

/// An empty predicted cell.
pub(in crate::ledger) fn blank(request: &Request<'_>, shape: StepShape) -> CellResult {
    let cell = CellResult::blank(shape.phase, IDEAL_ENGINE, request.weights, shape.batch, shape.context);
    CellResult { kv_dtype: request.kv, ..cell }
}

pub(in crate::ledger) fn tokens_per_second(shape: StepShape, time: Nanos) -> Option<f64> {
    let tokens = shape.batch * shape.phase.sure_tokens(shape.context);
    (time.0 > 0.0).then(|| tokens as f64 / time.seconds())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::devices;
    use crate::model::test_shapes as shapes;
    use crate::result::CrossoverKind;

    fn request<'a>(architecture: &'a Architecture, inventory: &'a Inventory, device: &str) -> Request<'a> {
        Request {
            architecture,
            inventory,
            name: "test",
            weights: Dtype::Bf16,
            kv: Dtype::Bf16,
            device: devices::find(device).expect("a row"),
            batches: &[1, 32],
            contexts: &[512, 8192],
            phases: &[Phase::Prefill, Phase::Decode],
            routing: ExpertRouting::Uniform,
        }
    }

    fn cell<'a>(prediction: &'a Prediction, id: &str) -> &'a CellResult {
        prediction.cells.iter().find(|cell| cell.id == id).unwrap_or_else(|| panic!("no cell {id}"))
    }

    #[test]
    fn llama_8b_on_an_h200_decodes_at_the_published_floor() {
        let architecture = shapes::llama_3_1_8b();
        let inventory = architecture.inventory(Dtype::Bf16);
        let prediction = predict(&request(&architecture, &inventory, "h200-sxm"));
        assert_eq!(prediction.cells.len(), 8);
        assert!(
            prediction.cells.iter().all(|cell| cell.status == Status::Predicted && cell.step_ns.is_none())
        );
        // (15,009,849,344 + 513 · 131,072 + 8192) B / 4.8e12 B/s = 3.1411 ms.
        let decode = cell(&prediction, "decode/ideal/bf16/b1/c512");
        assert!((decode.predicted_ns.expect("a floor") / 1e6 - 3.1411).abs() < 1e-4);
        assert_eq!(decode.bound, Some(Bound::Memory));
        assert!((decode.tokens_per_s.expect("a rate") - 318.4).abs() < 0.1);
        // 7.1596 TFLOP of linear layers, attention and head: / 989.5e12 = 7.29 ms, over the 3.15 ms of the weights.
        let prefill = cell(&prediction, "prefill/ideal/bf16/b1/c512");
        assert_eq!(prefill.bound, Some(Bound::Compute));
        assert!(
            (prefill.predicted_ns.expect("a floor") / 1e6 - 7.29).abs() < 0.02,
            "{:?}",
            prefill.predicted_ns
        );
        assert!(prediction.warnings.is_empty());
        assert_eq!(prediction.model.parameters, 8_030_261_248);
    }

    #[test]
    fn cells_beyond_the_model_are_skipped_and_those_beyond_memory_say_so() {
        let architecture = Architecture { max_positions: 8192, ..shapes::llama_2_7b() };
        let inventory = architecture.inventory(Dtype::Bf16);
        let prediction = predict(&request(&architecture, &inventory, "a100-40-sxm"));
        let beyond = cell(&prediction, "decode/ideal/bf16/b1/c8192");
        assert_eq!(beyond.status, Status::Skipped);
        let limit = Cause::ExceedsContext { positions: 8193, limit: 8192, limited_by: None };
        assert_eq!(beyond.reason, Some(limit));
        assert_eq!(beyond.predicted_ns, None);
        assert_eq!(cell(&prediction, "prefill/ideal/bf16/b1/c8192").status, Status::Predicted);
        // 13.5 GB of weights, 32 · 8192 · 524,288 B = 137.4 GB of KV, 32 · 8192 · (2·11,008 + 2·4096) · 2 B = 15.8 GB of
        // activations.
        let full = cell(&prediction, "prefill/ideal/bf16/b32/c8192");
        let [Cause::DoesNotFit { needed_bytes, .. }] = full.flags[..] else { panic!("{:?}", full.flags) };
        assert_eq!(needed_bytes.0 / 1_000_000_000, 166, "{needed_bytes}");
        assert!(cell(&prediction, "decode/ideal/bf16/b1/c512").flags.is_empty());
    }

    #[test]
    fn a_model_larger_than_the_device_and_a_missing_peak_are_warned_about() {
        let architecture = shapes::llama_3_1_70b();
        let inventory = architecture.inventory(Dtype::Bf16);
        let prediction = predict(&request(&architecture, &inventory, "l4"));
        assert!(
            prediction.warnings[0].starts_with("the weights take 131.4 GiB, more than 90 %"),
            "{:?}",
            prediction.warnings
        );
        let mut device = devices::find("l4").expect("a row").clone();
        device.dense_flops_per_s.clear();
        let prediction = predict(&Request { device: &device, ..request(&architecture, &inventory, "l4") });
        assert!(
            prediction.warnings[0].contains("no matrix-product peak for bf16"),
            "{:?}",
            prediction.warnings
        );
        // A decode of few sequences reads more than it computes whatever the peak is; of a prefill nothing is known.
        for cell in &prediction.cells {
            let known = cell.phase == Phase::Decode && cell.batch <= 8;
            assert_eq!(cell.bound, known.then_some(Bound::Memory), "{}", cell.id);
            assert_eq!(cell.tokens_per_s.is_some(), known, "{}", cell.id);
        }
    }

    #[test]
    fn a_floor_is_at_the_peak_of_what_the_config_rounds_activations_to() {
        use crate::model::Quantization;
        let rounded = |activations| Architecture {
            quantization: Some(Quantization {
                method: "test".into(),
                bits: 8,
                activations,
                ..Quantization::default()
            }),
            ..shapes::llama_3_1_8b()
        };
        let floor = |architecture: &Architecture, weights| {
            let inventory = architecture.inventory(weights);
            let request = Request { weights, ..request(architecture, &inventory, "h100-sxm") };
            let prediction = predict(&request);
            let told = prediction.warnings.iter().any(|line| line.contains("weight-only"));
            (
                cell(&prediction, &format!("prefill/ideal/{weights}/b32/c512"))
                    .predicted_ns
                    .expect("a floor"),
                told,
            )
        };
        let (alone, told) = floor(&rounded(None), Dtype::Int8);
        assert!(told);
        // W8A8 at 1978.9 TOPS instead of 989.4 TFLOP/s, and no word of weights alone.
        let (both, told) = floor(&rounded(Some(Dtype::Int8)), Dtype::Int8);
        assert!((alone / both - 1978.9 / 989.4).abs() < 1e-9 && !told, "{alone} {both}");
        // What the config says is of its own storage.
        let [own, other] = [Some(Dtype::Int8), None].map(|rounds| floor(&rounded(rounds), Dtype::Bf16).0);
        assert!((own / other - 1.0).abs() < 1e-12, "{own} {other}");
    }

    #[test]
    fn experts_met_are_reported_beside_the_bytes() {
        let architecture = shapes::qwen3_30b_a3b();
        let inventory = architecture.inventory(Dtype::Bf16);
        let prediction = predict(&request(&architecture, &inventory, "h200-sxm"));
        assert_eq!(cell(&prediction, "decode/ideal/bf16/b1/c512").distinct_experts, Some(8.0));
        let many = cell(&prediction, "decode/ideal/bf16/b32/c512").distinct_experts.expect("experts");
        assert!((many - 128.0 * (1.0 - 0.9375_f64.powi(32))).abs() < 1e-9);
        let note = &prediction.warnings[0];
        assert!(
            note.contains("uniform routing (111.8 ± 3.1 of 128 experts")
                && note.contains("not a lower bound"),
            "{note}"
        );
        let zipf = Request {
            routing: ExpertRouting::Zipf { exponent: 1.0 },
            ..request(&architecture, &inventory, "h200-sxm")
        };
        let skewed = predict(&zipf);
        let fewer = cell(&skewed, "decode/ideal/bf16/b32/c512");
        assert!(fewer.distinct_experts.expect("experts") < 0.8 * many);
        assert!(fewer.bytes.weights < cell(&prediction, "decode/ideal/bf16/b32/c512").bytes.weights);
    }

    #[test]
    fn contexts_and_batches_have_their_crossovers() {
        let architecture = shapes::llama_3_1_8b();
        let inventory = architecture.inventory(Dtype::Bf16);
        let prediction = predict(&request(&architecture, &inventory, "h100-sxm"));
        let count = |what: CrossoverKind| prediction.crossovers.iter().filter(|row| row.what == what).count();
        assert_eq!(count(CrossoverKind::ComputeBoundBatch), 2);
        assert_eq!(count(CrossoverKind::KvExceedsWeightsContext), 2);
        assert_eq!(count(CrossoverKind::MaxBatchThatFits), 2);
        assert_eq!(count(CrossoverKind::MaxContextThatFits), 2);
    }
}
