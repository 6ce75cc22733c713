//! From a validated configuration to ordered cells.
//!
//! Enters: the axes of a run and what the engine can do. Leaves: cells in the order that reloads models least; what cannot
//! run is a cell with the reason why, and what a cell's step costs by its shape. It runs nothing.

use crate::engine::native::DEFAULT_BLOCK_SIZE;
use crate::engine::stock::check_tensors;
use crate::engine::{DeviceChoice, DeviceOptions, no_verify_steps};
use hbmark_core::ledger::{Ledger, StepCost, StepShape, StockBackend};
use hbmark_core::model::{Architecture, Dtype, Inventory};
use hbmark_core::result::{Capabilities, Cause, Cell, EngineKind, Phase};
use hbmark_core::units::Bytes;

/// Whether an engine times steps of a phase: a prefill hides its launches behind its kernels, so it is not replayed; and candle's models compute
/// the logits of last tokens alone.
pub(super) fn times(engine: &str, phase: Phase) -> bool {
    match (EngineKind::of(engine), phase) {
        (Some(EngineKind::StockGraph), Phase::Prefill) => false,
        (Some(kind), Phase::Verify { .. }) => !kind.is_stock(),
        _ => true,
    }
}

/// The cells of one engine and dtype: phases outermost, then batch, then context. Of several phases an engine has those that it can.
pub fn cells<'a>(
    engine: &str,
    dtype: Dtype,
    phases: &[Phase],
    batches: &[usize],
    contexts: impl Fn(Phase) -> &'a [usize],
) -> Vec<Cell> {
    let mut cells = Vec::new();
    let any = phases.iter().any(|phase| times(engine, *phase));
    for &phase in phases.iter().filter(|phase| !any || times(engine, **phase)) {
        for &batch in batches {
            for &context in contexts(phase) {
                cells.push(Cell { phase, engine: engine.to_owned(), dtype, batch, context });
            }
        }
    }
    cells
}

/// Why a cell of a model cannot run, or `None`.
///
/// `predicted` is the memory the cell needs on its device, `available` what the device has left for it.
pub fn obstacle(
    cell: &Cell,
    architecture: &Architecture,
    capabilities: &Capabilities,
    predicted: Bytes,
    available: Option<Bytes>,
) -> Option<Cause> {
    if cell.phase == Phase::Prefill && !times(&cell.engine, cell.phase) {
        return Some(Cause::DecodeOnly { engine: cell.engine.clone() });
    }
    if matches!(cell.phase, Phase::Verify { .. }) && !capabilities.every_token_logits {
        return Some(no_verify_steps(&capabilities.engine).cause());
    }
    if cell.batch > capabilities.max_batch {
        return Some(Cause::BatchAboveLimit {
            batch: cell.batch,
            limit: capabilities.max_batch,
            limited_by: capabilities.max_batch_reason.clone(),
        });
    }
    if cell.positions() > capabilities.max_positions {
        let why = capabilities.max_positions_reason.as_deref().unwrap_or("the model's limit");
        return Some(Cause::ExceedsContext {
            positions: cell.positions(),
            limit: capabilities.max_positions,
            limited_by: Some(why.to_owned()),
        });
    }
    if EngineKind::of(&cell.engine).is_some_and(EngineKind::is_stock) {
        let (queries, positions) = (shape(cell).queries(), shape(cell).positions_after());
        if let Err(error) = check_tensors(capabilities, architecture, cell.batch, queries, positions) {
            return Some(error.cause());
        }
    }
    if let Some(available) = available
        && predicted > available
    {
        return Some(Cause::NotEnoughMemory { needed_bytes: predicted, available_bytes: available });
    }
    None
}

/// The shape of a cell's step.
pub fn shape(cell: &Cell) -> StepShape {
    StepShape { phase: cell.phase, batch: cell.batch, context: cell.context }
}

fn stock_backend(device: DeviceChoice) -> StockBackend {
    match device {
        DeviceChoice::Cpu => StockBackend::Cpu,
        DeviceChoice::Cuda(_) => StockBackend::Cuda,
    }
}

/// The ledger of the cells of an engine on a device.
pub fn ledger(
    architecture: &Architecture,
    inventory: &Inventory,
    kv_dtype: Dtype,
    engine: &str,
    device: DeviceChoice,
) -> Ledger {
    let on_gpu = device != DeviceChoice::Cpu;
    Ledger::of_engine(architecture, inventory, kv_dtype, EngineKind::ranks(engine), on_gpu)
}

/// Weights in memory, with those that ranks of an engine hold beside their parts.
pub fn resident(ledger: &Ledger, engine: &str) -> Bytes {
    ledger.resident_weights() + ledger.rest_of_table(EngineKind::ranks(engine))
}

/// The cost of a cell's step, with what the engine's code is known to move beside it. Only candle's was read,
/// whichever way it is run; an engine that counts its own bytes reports them after a step.
pub fn cost(ledger: &Ledger, cell: &Cell, device: DeviceChoice) -> StepCost {
    let mut cost = ledger.step(shape(cell));
    if EngineKind::of(&cell.engine).is_some_and(EngineKind::is_stock) {
        cost.bytes.as_implemented = ledger.stock_bytes(shape(cell), stock_backend(device));
    }
    cost
}

/// Memory of weights, KV and the largest activations, of the ledger's device.
pub fn needed(ledger: &Ledger, cell: &Cell, device: DeviceChoice, options: DeviceOptions) -> Bytes {
    let kind = EngineKind::of(&cell.engine);
    let known = match kind {
        Some(kind) if kind.is_stock() => ledger.stock_memory(shape(cell), stock_backend(device)),
        Some(EngineKind::Native) if device != DeviceChoice::Cpu => {
            let block_size = options.block_size.unwrap_or(DEFAULT_BLOCK_SIZE);
            Some(ledger.native_gpu_memory(shape(cell), cell.dtype, block_size))
        }
        _ => None,
    };
    let of_one = known.unwrap_or_else(|| ledger.memory(shape(cell)));
    let ranks = EngineKind::ranks(&cell.engine);
    if ranks == 1 || device == DeviceChoice::Cpu {
        return of_one + ledger.repeated_on_ranks(shape(cell), ranks);
    }
    of_one + ledger.rest_of_table(ranks) + exchanged(ledger, shape(cell))
}

/// Two sums of hidden states in f32, which the GPUs of a group reach, grown to powers of two.
fn exchanged(ledger: &Ledger, shape: StepShape) -> Bytes {
    let rows = shape.batch.saturating_mul(shape.queries());
    let floats = rows.saturating_mul(ledger.architecture().hidden_size).checked_next_power_of_two();
    Bytes(floats.map_or(u64::MAX, |floats| 2 * 4 * floats as u64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hbmark_core::model::test_shapes::smollm2_135m;
    use hbmark_core::result::Ragged;

    fn capabilities() -> Capabilities {
        Capabilities {
            engine: "stock".into(),
            device: "cpu".into(),
            max_batch: 8,
            max_batch_reason: None,
            max_positions: 1024,
            max_positions_reason: Some("sliding window of 1024".into()),
            ragged: Ragged::Uniform,
            paged: false,
            prefix_sharing: false,
            graphs: false,
            every_token_logits: false,
            kernels: Vec::new(),
            host_memory: true,
        }
    }

    #[test]
    fn a_native_prefill_on_a_gpu_is_skipped_where_its_f32_activations_do_not_fit() {
        let model = hbmark_core::model::test_shapes::llama_3_1_8b();
        let ledger = Ledger::new(&model, &model.inventory(Dtype::Bf16), Dtype::Bf16);
        let (engine, dtype) = ("native".to_owned(), Dtype::Bf16);
        let cell = Cell { phase: Phase::Prefill, engine, dtype, batch: 32, context: 4096 };
        let on = |device| needed(&ledger, &cell, device, DeviceOptions::default());
        assert_eq!(on(DeviceChoice::Cpu), ledger.memory(shape(&cell)));
        // Weights of 16 GB, 17 GB of cache, 10 GB of 16-bit activations; and 36 GB of the engine's own.
        let room = Bytes(68_000_000_000);
        assert!(on(DeviceChoice::Cpu) < room && on(DeviceChoice::Cuda(0)) > room);
    }

    fn decode(batch: usize, context: usize) -> Cell {
        Cell { phase: Phase::Decode, engine: "stock".into(), dtype: Dtype::F32, batch, context }
    }

    #[test]
    fn ids_are_stable_and_readable() {
        assert_eq!(decode(1, 512).id(), "decode/stock/f32/b1/c512");
    }

    #[test]
    fn a_replay_has_decode_cells_and_says_why_it_has_no_others() {
        let both = [Phase::Prefill, Phase::Decode];
        let phases = |engine, phases: &[Phase]| -> Vec<Phase> {
            cells(engine, Dtype::Bf16, phases, &[1], |_| &[8]).iter().map(|cell| cell.phase).collect()
        };
        assert_eq!(phases("stock", &both), both);
        assert_eq!(phases("stock-graph", &both), [Phase::Decode]);
        assert_eq!(phases("stock-graph", &both[..1]), [Phase::Prefill]);
        let cell = Cell { phase: Phase::Prefill, engine: "stock-graph".into(), ..decode(1, 8) };
        let reason = obstacle(&cell, &smollm2_135m(), &capabilities(), Bytes(0), None).unwrap().to_string();
        assert_eq!(reason, "stock-graph replays decode steps alone; a prefill hides its launches");
    }

    #[test]
    fn engines_without_the_logits_of_every_token_have_no_verify_cells_and_say_why() {
        let verify = Phase::Verify { draft_tokens: 3 };
        let phases = |engine, phases: &[Phase]| -> Vec<Phase> {
            cells(engine, Dtype::Bf16, phases, &[1], |_| &[8]).iter().map(|cell| cell.phase).collect()
        };
        let both = [Phase::Decode, verify];
        assert_eq!(phases("native", &both), both);
        assert_eq!(phases("stock", &both), [Phase::Decode]);
        assert_eq!(phases("stock", &[verify]), [verify]);
        let cell = Cell { phase: verify, ..decode(1, 8) };
        assert_eq!((cell.id().as_str(), cell.positions()), ("verify-3/stock/f32/b1/c8", 12));
        let reason = obstacle(&cell, &smollm2_135m(), &capabilities(), Bytes(0), None);
        assert!(
            matches!(&reason, Some(Cause::Unsupported { what, .. }) if what == "verify steps"),
            "{reason:?}"
        );
    }

    /// SmolLM2-135M, engines and the largest cell of a run where nothing else is asked for.
    #[test]
    fn candle_has_no_cells_on_a_gpu_whose_tensors_its_kernels_cannot_index() {
        let model = smollm2_135m();
        let reason = |engine: &str, phase, batch, host_memory| {
            let limits = Capabilities { max_batch: 64, max_positions: 8192, ..capabilities() };
            let capabilities = Capabilities { engine: engine.into(), host_memory, ..limits };
            let cell = Cell { phase, engine: engine.into(), ..decode(batch, 4096) };
            obstacle(&cell, &model, &capabilities, Bytes(0), None).map(|cause| cause.to_string())
        };
        for engine in ["stock", "stock-pool"] {
            let of = |batch| reason(engine, Phase::Prefill, batch, false);
            assert_eq!(of(14), None);
            // 32 sequences, 9 heads, 4,096 tokens and as many positions.
            let why = "candle's CUDA kernels index 2147483648 elements; choose a smaller batch or context";
            let what = "a tensor of 4831838208 attention scores";
            assert_eq!(of(32), Some(format!("the {engine} engine does not run {what}: {why}")));
            assert!(of(15).is_some_and(|why| why.contains("2264924160 attention scores")));
            assert_eq!(reason(engine, Phase::Prefill, 32, true), None);
        }
        assert_eq!(reason("native", Phase::Prefill, 32, false), None);
        assert_eq!(reason("stock-graph", Phase::Decode, 32, false), None);
    }

    #[test]
    fn a_cell_that_cannot_run_says_why_with_the_numbers() {
        let free = Some(Bytes(1_000_000_000));
        let reason = |cell: Cell, need| {
            obstacle(&cell, &smollm2_135m(), &capabilities(), Bytes(need), free)
                .map(|cause| cause.to_string())
        };
        assert_eq!(reason(decode(1, 1023), 1_000), None);
        let reason = |cell, need| reason(cell, need).unwrap();
        assert_eq!(
            reason(decode(1, 1024), 1_000),
            "needs 1025 positions, the limit is 1024 (sliding window of 1024)"
        );
        assert_eq!(reason(decode(16, 1), 1_000), "batch 16 is above the engine's limit of 8");
        let reason = reason(decode(1, 1), 2_000_000_000);
        assert_eq!(reason, "needs 2.00 GB of memory, 1.00 GB is available");
    }
}
