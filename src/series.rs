//! One engine at one dtype: load, gate, cold rows, protocol, judged cells.
//!
//! Enters: a configuration, an opened model and a [`Report`] in the making. Leaves: its cells, capabilities and cold rows. The parts it
//! joins know nothing of each other.

use std::time::Instant;

use crate::config::{Depth, RunConfig};
use crate::engine::{self, DeviceChoice, EngineError, SequenceId, Session, StepBatch};
use crate::measure::memory::{self, MemoryOf};
use crate::measure::protocol::{self, Measured, NoWitness, Protocol, Witness};
use crate::measure::{operations, quality, witness};
use crate::model::{Dtype, OpenModel};
use crate::plan::{self, Cell};
use crate::report::{CellResult, ColdRow, Crossover, OperationRow, Quality, Report, Status};
use crate::roofline::{self, Ledger, Roof, StepCost, StepShape, StockBackend};
use crate::units::{Bytes, Nanos};
use crate::{Observer, RunError, judge};

/// The engine whose traffic and memory are known from its code: candle's own forward.
const STOCK: &str = "stock";

/// The share of available memory that weights, KV and activations may take together, in percent.
const MEMORY_PERCENT: u64 = 90;

/// A reference in f32 is loaded for the quality gate when it takes at most this share of the available memory.
const REFERENCE_SHARE: f64 = 0.5;

/// A canary that must be allowed more than this hardly watches anything.
const NOISY_CANARY: f64 = 0.1;

/// A drift of the reference cell over the run beyond this is worth a warning.
const DRIFT_WARNING: f64 = 0.02;

/// A loaded engine with everything its cells are judged by.
pub struct Opened {
    pub session: Box<dyn Session>,
    ledger: Ledger,
    quality: Quality,
    device: DeviceChoice,
    available: Option<Bytes>,
}

/// Loads one engine at one dtype, checks its outputs and takes its cold rows. `None` when the weights do not fit: the cells are
/// then in the report, with the numbers.
pub fn open(
    config: &RunConfig,
    model: &OpenModel,
    engine: &str,
    dtype: Dtype,
    report: &mut Report,
    observer: &mut dyn Observer,
) -> Result<Option<Opened>, RunError> {
    // What the engine cannot do at all is an error of the plan, whatever else is wrong.
    engine::capabilities(engine, model, dtype, config.device)?;
    let planned =
        Ledger::new(&model.architecture, &model.inventory(dtype), engine::kv_dtype(engine, model, dtype));
    let mut lose = |status: Status, reason: String| {
        for cell in plan::cells(engine, dtype, &config.phases, &config.batches, &config.contexts) {
            let cost = cost(&planned, &cell, config.device);
            let mut lost = judge::unmeasured(&cell, planned.kv_dtype(), &cost, status, Some(reason.clone()));
            lost.memory_predicted_bytes = Some(needed(&planned, &cell, config.device));
            report.cells.push(lost);
        }
        Ok(None)
    };
    if let Some(reason) = too_large(config.device, &planned) {
        return lose(Status::Skipped, reason);
    }
    let begin = Instant::now();
    let mut session = match load(config, model, engine, dtype, observer) {
        Ok(session) => session,
        Err(error @ EngineError::OutOfMemory { .. }) => {
            return lose(Status::Oom, format!("while loading weights: {error}"));
        }
        Err(error) => return Err(error.into()),
    };
    cold(report, session.as_mut(), engine, dtype, begin);
    report.capabilities.push(session.capabilities().clone());
    let quality = gate(config, model, engine, dtype, session.as_mut(), observer)?;
    // From here on bytes are those of the tensors really loaded.
    let ledger = Ledger::new(session.architecture(), session.inventory(), session.kv_dtype());
    let available = memory::available(memory_of(config.device));
    Ok(Some(Opened { session, ledger, quality, device: config.device, available }))
}

/// Opens an engine, and tells the observer how far its weights have come.
fn load(
    config: &RunConfig,
    model: &OpenModel,
    engine: &str,
    dtype: Dtype,
    observer: &mut dyn Observer,
) -> Result<Box<dyn Session>, EngineError> {
    observer.stage(&format!("loading {} as {dtype}", model.name));
    let mut loaded = |done, total| observer.loaded(done, total);
    engine::open(engine, model, dtype, config.device, config.device_options, &mut loaded)
}

impl Opened {
    /// The cost of a cell's step, with what the engine really moves beside it.
    pub fn cost(&self, cell: &Cell) -> StepCost {
        cost(&self.ledger, cell, self.device)
    }

    /// Memory of a cell's KV and activations, on top of the weights.
    fn added_memory(&self, cell: &Cell) -> Bytes {
        let all = needed(&self.ledger, cell, self.device);
        Bytes(all.0.saturating_sub(self.ledger.resident_weights().0))
    }

    /// Puts the cells that cannot run into the report, with the reason, and returns the others.
    pub fn split_off_impossible(&self, cells: Vec<Cell>, report: &mut Report) -> Vec<Cell> {
        let obstacle = |cell: &Cell| {
            let room = self.available.map(usable);
            plan::obstacle(cell, self.session.capabilities(), self.added_memory(cell), room)
        };
        let mut possible = Vec::with_capacity(cells.len());
        for cell in cells {
            let Some(reason) = obstacle(&cell) else {
                possible.push(cell);
                continue;
            };
            let cost = self.cost(&cell);
            let kv = self.ledger.kv_dtype();
            let mut skipped = judge::unmeasured(&cell, kv, &cost, Status::Skipped, Some(reason));
            skipped.memory_predicted_bytes = Some(needed(&self.ledger, &cell, self.device));
            report.cells.push(skipped);
        }
        possible
    }

    /// Whether the KV of all cells fits beside each other.
    fn all_fit(&self, cells: &[Cell]) -> bool {
        let together: Bytes = cells.iter().map(|cell| self.added_memory(cell)).sum();
        self.available.is_some_and(|free| together.0 < usable(free).0 / 2)
    }

    /// The judged result of a measured cell.
    pub fn judge(&self, measured: Measured, report: &Report) -> CellResult {
        let mut cost = self.cost(&measured.cell);
        // What the engine counted beats what is known of its code.
        cost.bytes.as_implemented = measured.moved.or(cost.bytes.as_implemented);
        let need = needed(&self.ledger, &measured.cell, self.device);
        let hash = (!measured.tokens.is_empty()).then(|| quality::token_hash(&measured.tokens));
        let peak = measured.peak_memory;
        let (ceilings, datasheet) = (report.ceilings.as_ref(), report.datasheet.as_ref());
        let mut result = judge::measured(measured, self.ledger.kv_dtype(), &cost, ceilings, datasheet);
        result.memory_predicted_bytes = Some(need);
        result.memory_peak_bytes = peak;
        if !self.quality.passed && result.step_ns.is_some() {
            result.status = Status::Invalid;
            result.reason = Some(wrong_outputs(&self.quality));
        }
        result.quality = Some(Quality { token_hash: hash, ..self.quality.clone() });
        result
    }

    /// Steps of the measured cells broken down per operation, in their order; all empty for an engine that cannot tell its
    /// operations apart. A cell that cannot be profiled is a warning.
    fn break_down(
        &mut self,
        measured: &[Measured],
        seed: u64,
        warnings: &mut Vec<String>,
    ) -> Vec<Vec<OperationRow>> {
        let mut rows = vec![Vec::new(); measured.len()];
        for (index, measured) in measured.iter().enumerate().filter(|(_, m)| !m.blocks.is_empty()) {
            match operations::of_cell(self.session.as_mut(), &measured.cell, index, seed) {
                Ok(none) if none.is_empty() => {
                    let engine = &measured.cell.engine;
                    warnings.push(format!("the {engine} engine cannot time its operations apart"));
                    break;
                }
                Ok(found) => rows[index] = found,
                Err(error) => {
                    warnings.push(format!("{}: no time per operation: {error}", measured.cell.id()));
                }
            }
        }
        rows
    }
}

/// Measures all cells of one engine and dtype into the report.
pub fn run(
    config: &RunConfig,
    model: &OpenModel,
    engine: &str,
    dtype: Dtype,
    protocol: &Protocol,
    report: &mut Report,
    observer: &mut dyn Observer,
) -> Result<(), RunError> {
    let Some(mut opened) = open(config, model, engine, dtype, report, observer)? else { return Ok(()) };
    let cells = plan::cells(engine, dtype, &config.phases, &config.batches, &config.contexts);
    let cells = opened.split_off_impossible(cells, report);
    let mut witness: Box<dyn Witness> = match config.depth {
        Depth::Smoke => Box::new(NoWitness),
        Depth::Full | Depth::Quick => witness::of_device(config.device)?,
    };
    let canary_tolerance = witness.canary_tolerance(protocol.canary_tolerance);
    if canary_tolerance > NOISY_CANARY {
        report.warnings.push(format!(
            "memory bandwidth is not steady here: the canary alone varies so much that blocks are only rejected beyond ±{:.0} %",
            canary_tolerance * 100.0
        ));
    }
    let protocol = Protocol { canary_tolerance, ..protocol.clone() };
    report.protocol = Some(protocol.summary());
    let keep_resident = opened.all_fit(&cells);
    let (measured, reference) = protocol::run(
        opened.session.as_mut(),
        &cells,
        &protocol,
        witness.as_mut(),
        keep_resident,
        &mut |event| observer.event(event),
    );
    report.warnings.extend(drift(&reference));
    let operations = if config.show_ops {
        observer.stage("timing operations apart");
        opened.break_down(&measured, protocol.seed, &mut report.warnings)
    } else {
        vec![Vec::new(); measured.len()]
    };
    for (cell, operations) in measured.into_iter().zip(operations) {
        let result = opened.judge(cell, report);
        report.cells.push(CellResult { operations, ..result });
    }
    Ok(())
}

/// The plan as text.
pub fn dry_run(config: &RunConfig, model: &OpenModel) -> Result<String, RunError> {
    use std::fmt::Write;
    let mut text = format!("model   {} ({})\ndevice  {}\n", model.name, model.source_label(), config.device);
    let protocol = config.protocol();
    let _ = writeln!(
        text,
        "protocol {} · {} to {} blocks over {} visits, seed {}\n",
        protocol.name,
        protocol.looks[0],
        protocol.looks[protocol.looks.len() - 1],
        protocol.visits,
        config.seed
    );
    let available = memory::available(memory_of(config.device));
    for engine in &config.engines {
        for dtype in config.dtypes_for(engine, model) {
            let capabilities = engine::capabilities(engine, model, dtype, config.device)?;
            let ledger = Ledger::new(
                &model.architecture,
                &model.inventory(dtype),
                engine::kv_dtype(engine, model, dtype),
            );
            for cell in plan::cells(engine, dtype, &config.phases, &config.batches, &config.contexts) {
                let need = needed(&ledger, &cell, config.device);
                let cost = cost(&ledger, &cell, config.device);
                let obstacle = plan::obstacle(&cell, &capabilities, need, available)
                    .map_or_else(|| "run".to_owned(), |reason| format!("skip: {reason}"));
                let _ = writeln!(
                    text,
                    "{:<34} {:>10} to move, {:>10} of memory   {obstacle}",
                    cell.id(),
                    cost.bytes.ideal().to_string(),
                    need.to_string()
                );
            }
        }
    }
    Ok(text)
}

/// Where the regime changes, for the first dtype of the run.
pub fn crossovers(config: &RunConfig, model: &OpenModel, report: &Report) -> Vec<Crossover> {
    let engine = &config.engines[0];
    let dtype = config.dtypes_for(engine, model)[0];
    let kv_dtype = engine::kv_dtype(engine, model, dtype);
    let ledger = Ledger::new(&model.architecture, &model.inventory(dtype), kv_dtype);
    let Some(ceilings) = &report.ceilings else { return Vec::new() };
    let roof = Roof::measured(ceilings, dtype);
    let memory = report.environment.device_memory();
    roofline::crossovers(&ledger, &roof, memory, &config.batches, &config.contexts)
}

fn memory_of(device: DeviceChoice) -> MemoryOf {
    match device {
        DeviceChoice::Cpu => MemoryOf::Host,
        DeviceChoice::Cuda(index) => MemoryOf::Gpu(index),
    }
}

/// What of the available memory may be used.
fn usable(available: Bytes) -> Bytes {
    Bytes(available.0 / 100 * MEMORY_PERCENT)
}

fn shape(cell: &Cell) -> StepShape {
    StepShape { phase: cell.phase, batch: cell.batch, context: cell.context }
}

fn stock_backend(device: DeviceChoice) -> StockBackend {
    match device {
        DeviceChoice::Cpu => StockBackend::Cpu,
        DeviceChoice::Cuda(_) => StockBackend::Cuda,
    }
}

/// The cost of a cell's step, with what the engine's code is known to move beside it. Only candle's was read; an engine that
/// counts its own bytes says them after a step.
fn cost(ledger: &Ledger, cell: &Cell, device: DeviceChoice) -> StepCost {
    let mut cost = ledger.step(shape(cell));
    if cell.engine == STOCK {
        cost.bytes.as_implemented = ledger.stock_bytes(shape(cell), stock_backend(device));
    }
    cost
}

/// Memory of weights, KV and the largest activations.
fn needed(ledger: &Ledger, cell: &Cell, device: DeviceChoice) -> Bytes {
    let stock = || ledger.stock_memory(shape(cell), stock_backend(device));
    let known = if cell.engine == STOCK { stock() } else { None };
    known.unwrap_or_else(|| ledger.memory(shape(cell)))
}

/// Why not even the weights fit, if they do not.
fn too_large(device: DeviceChoice, ledger: &Ledger) -> Option<String> {
    let available = memory::available(memory_of(device))?;
    let need = ledger.resident_weights();
    (need > usable(available)).then(|| {
        format!("weights need {need}, {available} is available (at most {MEMORY_PERCENT} % is used)")
    })
}

/// The cold rows: each happens once per process, so each is its own row and never mixed with warm steps.
fn cold(report: &mut Report, session: &mut dyn Session, engine: &str, dtype: Dtype, begin: Instant) {
    let sequence = SequenceId(u64::MAX / 4);
    let mut row = |what: &str, time: Nanos| {
        report.cold.push(ColdRow { what: what.into(), engine: engine.into(), dtype, time_ns: time.0 });
    };
    row("open device and load weights", begin.elapsed().into());
    let prompt = vec![1u32; 16.min(session.capabilities().max_positions.saturating_sub(1)).max(1)];
    let steps =
        [("first prefill of 16 tokens", prompt.clone(), 0), ("first decode step", vec![1], prompt.len())];
    for (what, tokens, position) in steps {
        let begin = Instant::now();
        let stepped = session
            .step(&StepBatch::uniform(sequence, &[tokens], position))
            .and_then(|()| session.next_tokens());
        if stepped.is_ok() {
            row(what, begin.elapsed().into());
        }
    }
    session.release(sequence);
}

/// The quality gate, against an f32 reference on the same device where one fits beside the session.
fn gate(
    config: &RunConfig,
    model: &OpenModel,
    engine: &str,
    dtype: Dtype,
    session: &mut dyn Session,
    observer: &mut dyn Observer,
) -> Result<Quality, RunError> {
    let reference_bytes = model.inventory(Dtype::F32).total_bytes();
    let room = memory::available(memory_of(config.device))
        .is_some_and(|free| reference_bytes.as_f64() < free.as_f64() * REFERENCE_SHARE);
    let mut reference = if room && config.depth != Depth::Smoke {
        let (device, options) = (config.device, config.device_options);
        observer.stage("loading the f32 reference");
        let mut loaded = |done, total| observer.loaded(done, total);
        engine::open_reference(engine, model, dtype, device, options, &mut loaded)?
    } else {
        None
    };
    observer.stage("checking outputs");
    let reference: Option<&mut dyn Session> = match &mut reference {
        Some(session) => Some(session.as_mut()),
        None => None,
    };
    Ok(quality::gate(session, dtype, config.seed, reference)?)
}

fn wrong_outputs(quality: &Quality) -> String {
    match quality.max_relative_error {
        Some(error) => format!("outputs are wrong: {} is {error:.1e} off", quality.check),
        None => format!("outputs are wrong: {}", quality.check),
    }
}

/// A warning when the reference cell drifted over the run.
fn drift(reference: &[f64]) -> Option<String> {
    let (first, last) = (reference.first()?, reference.last()?);
    let change = last / first - 1.0;
    let (low, high) = reference.iter().fold((f64::MAX, 0.0f64), |(l, h), &x| (l.min(x), h.max(x)));
    (reference.len() > 1 && high / low - 1.0 > DRIFT_WARNING).then(|| {
        format!(
            "the machine was not steady: the reference cell, repeated {} times over the run, ranged over {:.1} % (first to last {:+.1} %)",
            reference.len(),
            (high / low - 1.0) * 100.0,
            change * 100.0
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::OperationTime;
    use crate::engine::scripted::{Outcome, ScriptedSession, VirtualClock};
    use crate::model::test_shapes;
    use crate::report::{Phase, hand_made};

    fn cell(engine: &str) -> Cell {
        Cell { phase: Phase::Decode, engine: engine.into(), dtype: Dtype::Bf16, batch: 1, context: 64 }
    }

    fn session() -> ScriptedSession {
        let architecture = test_shapes::smollm2_135m();
        let inventory = architecture.inventory(Dtype::Bf16);
        let takes = |_| Outcome::Takes { device: Nanos(9e6), host: Nanos(0.0) };
        ScriptedSession::new(architecture, inventory, &VirtualClock::default(), Box::new(takes))
    }

    fn opened(session: ScriptedSession) -> Opened {
        let ledger = Ledger::new(session.architecture(), session.inventory(), session.kv_dtype());
        let quality =
            Quality { passed: true, check: "none".into(), max_relative_error: None, token_hash: None };
        Opened { session: Box::new(session), ledger, quality, device: DeviceChoice::Cpu, available: None }
    }

    fn measure(opened: &mut Opened, engine: &str) -> Vec<Measured> {
        let protocol = Protocol::smoke(7);
        protocol::run(opened.session.as_mut(), &[cell(engine)], &protocol, &mut NoWitness, true, &mut |_| {})
            .0
    }

    #[test]
    fn only_stock_is_costed_by_what_is_known_of_candle() {
        let opened = opened(session());
        let shape = shape(&cell("stock"));
        assert_eq!(
            opened.cost(&cell("stock")).bytes.as_implemented,
            opened.ledger.stock_bytes(shape, StockBackend::Cpu)
        );
        assert!(opened.cost(&cell("stock")).bytes.as_implemented.is_some());
        assert_eq!(opened.cost(&cell("native")).bytes.as_implemented, None);
        let memory = needed(&opened.ledger, &cell("native"), DeviceChoice::Cpu);
        assert_eq!(memory, opened.ledger.memory(shape));
        assert_ne!(memory, needed(&opened.ledger, &cell("stock"), DeviceChoice::Cpu));
    }

    #[test]
    fn an_engine_that_counts_says_what_it_moved() {
        let mut opened = opened(session().with_moved(Bytes(270_000_000)));
        for engine in ["native", "stock"] {
            let measured = measure(&mut opened, engine).remove(0);
            let result = opened.judge(measured, &hand_made::report());
            assert_eq!(result.bytes.as_implemented, Some(Bytes(270_000_000)));
        }
    }

    #[test]
    fn operations_come_beside_the_times_and_an_engine_without_them_says_so() {
        let head = OperationTime { operation: "head", calls: 1, time: Nanos(3e6), bytes: Bytes(56_000_000) };
        let mut profiled = opened(session().with_profiler(move |_| vec![head]));
        let measured = measure(&mut profiled, "native");
        let mut warnings = Vec::new();
        let rows = profiled.break_down(&measured, 7, &mut warnings);
        assert_eq!((rows.len(), rows[0][0].operation.as_str()), (1, "head"));
        assert!(warnings.is_empty());
        let mut blind = opened(session());
        assert_eq!(blind.break_down(&measured, 7, &mut warnings), [Vec::new()]);
        assert_eq!(warnings, ["the native engine cannot time its operations apart"]);
    }
}
