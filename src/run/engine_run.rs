//! One engine at one dtype: open, schedule, judge.
//!
//! Enters: a configuration, an opened model, a [`Worker`] that owns the device, and a [`Report`] in the making. Leaves: its cells,
//! capabilities and cold rows. It touches no device itself: everything measured is a response of the worker.

use std::cell::RefCell;

use crate::engine;
use crate::measure::protocol::{self, Event, Protocol, Visitor};
use crate::measure::quality;
use crate::measure::visit::{Reference, Visit, Visited};
use crate::run::config::RunConfig;
use crate::run::device_worker::{CostedCell, DeviceJob, DeviceRequest, DeviceResponse, Opened};
use crate::run::{RunError, plan};
use crate::weights::OpenModel;
use crate::worker::job::Job;
use crate::worker::{NoopObserver, Observer, Worker};
use hbmark_core::ledger::{Floor, Roof};
use hbmark_core::model::Dtype;
use hbmark_core::result::{
    Block, Cause, Ceilings, Cell, CellResult, Crossover, Measured, OperationRow, Quality, Report, Status,
    accepted,
};
use hbmark_report::analysis::judge;

/// A canary that must be allowed more than this hardly watches anything.
const NOISY_CANARY: f64 = 0.1;

/// A drift of the reference cell over the run beyond this is worth a warning.
const DRIFT_WARNING: f64 = 0.02;

/// One engine at one dtype, by its place in the run.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineRun {
    pub number: usize,
    pub engine: String,
    pub dtype: Dtype,
}

/// The series of a run, in order.
pub fn all(config: &RunConfig, model: &OpenModel) -> Vec<EngineRun> {
    let dtypes = |engine: &String| {
        config.dtypes_for(engine, model).into_iter().map(|dtype| (engine.clone(), dtype)).collect::<Vec<_>>()
    };
    let pairs = config.engines.iter().flat_map(dtypes).enumerate();
    pairs.map(|(number, (engine, dtype))| EngineRun { number, engine, dtype }).collect()
}

impl EngineRun {
    /// Its cells, in order.
    pub fn cells(&self, config: &RunConfig) -> Vec<Cell> {
        plan::cells(&self.engine, self.dtype, &config.phases, &config.batches, |phase| {
            config.contexts_of(phase)
        })
    }

    /// Enters its cells as lost, costed by the headers of the model's files.
    pub fn lose(
        &self,
        config: &RunConfig,
        model: &OpenModel,
        report: &mut Report,
        (status, reason): (Status, &Cause),
    ) {
        let kv_dtype = engine::kv_dtype(&self.engine, model, self.dtype, config.device_options.kv_dtype);
        let inventory = model.inventory(self.dtype);
        let ledger = plan::ledger(&model.architecture, &inventory, kv_dtype, &self.engine, config.device);
        for cell in self.cells(config) {
            let cost = plan::cost(&ledger, &cell, config.device);
            let mut lost = judge::unmeasured(&cell, kv_dtype, &cost, status, Some(reason.clone()));
            lost.memory_predicted_bytes =
                Some(plan::needed(&ledger, &cell, config.device, config.device_options));
            report.cells.push(lost);
        }
    }
}

/// Executes a request, and once more where a worker was lost and can be restarted.
pub fn execute_with_retry(
    worker: &mut dyn Worker<DeviceJob>,
    request: &DeviceRequest,
    observer: &mut dyn Observer,
) -> Result<DeviceResponse, RunError> {
    let response = match worker.execute(request, observer)? {
        DeviceResponse::Lost { .. } if worker.can_restart() => worker.execute(request, observer)?,
        response => response,
    };
    match response {
        DeviceResponse::Refused { reason } => Err(RunError::Refused { reason }),
        response => Ok(response),
    }
}

/// Opens a series. `None` when it cannot be opened: its cells are then in the report, with the reason.
pub fn open(
    worker: &mut dyn Worker<DeviceJob>,
    config: &RunConfig,
    model: &OpenModel,
    series: &EngineRun,
    report: &mut Report,
    observer: &mut dyn Observer,
) -> Result<Option<Opened>, RunError> {
    let (engine, dtype) = (series.engine.clone(), series.dtype);
    let request = DeviceRequest::Open { series: series.number, engine, dtype, reopen: None };
    let lost = match execute_with_retry(worker, &request, observer)? {
        DeviceResponse::Opened(opened) => {
            report.capabilities.push(opened.capabilities.clone());
            report.cold.extend(opened.cold.iter().cloned());
            return Ok(Some(*opened));
        }
        DeviceResponse::Unavailable { status, reason } => (status, reason),
        DeviceResponse::Lost { reason } => (Status::Failed, reason),
        _ => {
            return Err(RunError::Refused {
                reason: "the response to the opening of an engine is another one".into(),
            });
        }
    };
    series.lose(config, model, report, (lost.0, &lost.1));
    Ok(None)
}

impl Opened {
    /// Puts the cells that cannot run into the report, with the reason, and returns the others.
    pub fn skip_unsupported(&self, report: &mut Report) -> Vec<CostedCell> {
        let (possible, impossible): (Vec<CostedCell>, Vec<CostedCell>) =
            self.cells.iter().cloned().partition(|planned| planned.obstacle.is_none());
        for planned in impossible {
            let CostedCell { cell, cost, needs, obstacle } = planned;
            let mut skipped = judge::unmeasured(&cell, self.kv_dtype, &cost, Status::Skipped, obstacle);
            skipped.memory_predicted_bytes = Some(needs);
            report.cells.push(skipped);
        }
        possible
    }

    /// Puts the cells whose steps cannot be replayed into the report, with the reason, and returns the others. For a sampler that cannot
    /// skip a cell while it times steps.
    pub fn skip_unreplayable(
        &self,
        worker: &mut dyn Worker<DeviceJob>,
        series: &EngineRun,
        planned: Vec<CostedCell>,
        report: &mut Report,
    ) -> Result<Vec<CostedCell>, RunError> {
        let mut possible = Vec::with_capacity(planned.len());
        for planned in planned {
            let request = DeviceRequest::TrialStep { series: series.number, cell: planned.cell.clone() };
            let (status, reason) = match execute_with_retry(worker, &request, &mut NoopObserver)? {
                DeviceResponse::TrialStepped { end: None } => {
                    possible.push(planned);
                    continue;
                }
                DeviceResponse::TrialStepped { end: Some(end) } => (end.status, end.reason),
                DeviceResponse::Lost { reason } => (Status::Failed, reason),
                _ => return Err(unexpected(&request)),
            };
            let CostedCell { cell, cost, needs, .. } = planned;
            let mut lost = judge::unmeasured(&cell, self.kv_dtype, &cost, status, Some(reason));
            lost.memory_predicted_bytes = Some(needs);
            report.cells.push(lost);
        }
        Ok(possible)
    }

    /// The judged result of a measured cell.
    pub fn judge(&self, planned: &CostedCell, measured: Measured, report: &Report) -> CellResult {
        let mut cost = planned.cost;
        // What the engine counted beats what is known of its code.
        cost.bytes.as_implemented = measured.moved.or(cost.bytes.as_implemented);
        // Where rows were routed, the experts that they met are known and need not be expected.
        if let Some(met) = mean_experts(&measured.blocks) {
            cost = cost.meeting(met, self.expert_bytes);
        }
        let hash = (!measured.tokens.is_empty()).then(|| quality::token_hash(&measured.tokens));
        let peak = measured.peak_memory;
        let (ceilings, datasheet) = (report.ceilings.as_ref(), report.datasheet.as_ref());
        let architecture = &report.model.architecture;
        let mut result = judge::measured(measured, self.kv_dtype, &cost, architecture, ceilings, datasheet);
        result.memory_predicted_bytes = Some(planned.needs);
        result.memory_peak_bytes = peak;
        if !self.quality.passed && result.step_ns.is_some() {
            result.status = Status::Invalid;
            result.reason = Some(Cause::WrongOutputs {
                check: self.quality.check.clone(),
                max_relative_error: self.quality.max_relative_error,
            });
        }
        result.quality = Some(Quality { token_hash: hash, ..self.quality.clone() });
        result
    }
}

/// Different experts of a layer that the steps of the accepted blocks met, on average; of all blocks where none was accepted.
fn mean_experts(blocks: &[Block]) -> Option<f64> {
    let mean = |met: Vec<f64>| (!met.is_empty()).then(|| met.iter().sum::<f64>() / met.len() as f64);
    mean(accepted(blocks).filter_map(|block| block.experts_met).collect())
        .or_else(|| mean(blocks.iter().filter_map(|block| block.experts_met).collect()))
}

/// Measures all cells of a series into the report. The signal that stopped it, if one did: the report then holds what was measured
/// by then.
pub fn run(
    worker: &mut dyn Worker<DeviceJob>,
    config: &RunConfig,
    model: &OpenModel,
    series: &EngineRun,
    report: &mut Report,
    observer: &mut dyn Observer,
) -> Result<Option<i32>, RunError> {
    let opened = match open(worker, config, model, series, report, observer) {
        Ok(Some(opened)) => opened,
        Ok(None) => return Ok(None),
        Err(error) => {
            let signal = error.signal().ok_or(error)?;
            series.lose(config, model, report, (Status::Incomplete, &Cause::NotReached));
            return Ok(Some(signal));
        }
    };
    let planned = opened.skip_unsupported(report);
    let cells: Vec<Cell> = planned.iter().map(|planned| planned.cell.clone()).collect();
    let canary_tolerance = opened.canary_tolerance;
    if canary_tolerance > NOISY_CANARY {
        report.warnings.push(format!(
            "memory bandwidth is not steady here ({} {}): the canary alone varies so much that blocks are only rejected beyond ±{:.0} %",
            series.engine,
            series.dtype,
            canary_tolerance * 100.0
        ));
    }
    let protocol = Protocol { canary_tolerance, ..config.protocol() };
    report.protocol = Some(protocol.summary());
    // The schedule and the worker report to the same observer.
    let shared = RefCell::new(observer);
    let mut visits = Visits {
        worker,
        series: series.number,
        planned: &planned,
        ceilings: report.ceilings.clone(),
        observer: &shared,
        clock: SessionClock::default(),
    };
    shared.borrow_mut().stage(&format!("timing {} {}", series.engine, series.dtype));
    let (mut done, mut total) = (0, 0);
    let (sampled, halt) =
        protocol::schedule(&mut visits, &cells, &protocol, opened.all_fit, &mut |event| match event {
            Event::Round { round, rounds, open } => total = done + open * (rounds - round),
            Event::Visiting { cell, accepted, wanted } => {
                let mut message = || format!("{} ({accepted} of {wanted} blocks)", cell.id());
                shared.borrow_mut().progress(done, total, &mut message);
                done += 1;
            }
            Event::Left { done, least, most } => shared.borrow_mut().remaining(done, least, most),
            Event::Finished { .. } => {}
        });
    let observer = shared.into_inner();
    let mut signal = halt.map(|error| error.signal().ok_or(error)).transpose()?;
    report.warnings.extend(drift(&sampled.reference));
    report.warnings.extend(sampled.repeated);
    let mut operations = vec![Vec::new(); cells.len()];
    if config.show_ops && signal.is_none() {
        observer.stage("timing operations apart");
        let warnings = &mut report.warnings;
        let timed = break_down(worker, series.number, &sampled.measured, &mut operations, warnings, observer);
        signal = timed.err().map(|error| error.signal().ok_or(error)).transpose()?;
    }
    for ((planned, measured), operations) in planned.iter().zip(sampled.measured).zip(operations) {
        let result = opened.judge(planned, measured, report);
        report.cells.push(CellResult { operations, ..result });
    }
    if signal.is_none() {
        worker.execute(&DeviceRequest::Close { series: series.number }, observer)?;
    }
    Ok(signal)
}

/// Visits made by a worker.
struct Visits<'a, 'o> {
    worker: &'a mut dyn Worker<DeviceJob>,
    series: usize,
    planned: &'a [CostedCell],
    ceilings: Option<Ceilings>,
    observer: &'a RefCell<&'o mut dyn Observer>,
    clock: SessionClock,
}

impl Visits<'_, '_> {
    fn execute(&mut self, request: &DeviceRequest) -> Result<DeviceResponse, RunError> {
        match self.worker.execute(request, &mut **self.observer.borrow_mut())? {
            DeviceResponse::Refused { reason } => Err(RunError::Refused { reason }),
            response => Ok(response),
        }
    }
}

impl Visitor for Visits<'_, '_> {
    type Halt = RunError;

    fn visit(&mut self, visit: &Visit) -> Result<Visited, RunError> {
        let request = DeviceRequest::Visit { series: self.series, visit: visit.clone() };
        match self.execute(&request)? {
            DeviceResponse::Visited(mut visited) => {
                self.clock.set(&mut visited);
                Ok(*visited)
            }
            DeviceResponse::Lost { reason } => Ok(Visited::lost(reason)),
            _ => Err(unexpected(&request)),
        }
    }

    fn measure_reference(&mut self, reference: &Reference) -> Result<Result<Option<f64>, Cause>, RunError> {
        let request = DeviceRequest::MeasureReference { series: self.series, reference: reference.clone() };
        match self.execute(&request)? {
            DeviceResponse::ReferenceMeasured { mean_ns } => Ok(Ok(mean_ns)),
            DeviceResponse::Lost { reason } => Ok(Err(reason)),
            _ => Err(unexpected(&request)),
        }
    }

    fn release(&mut self, index: usize) -> Result<(), RunError> {
        self.execute(&DeviceRequest::Release { series: self.series, index }).map(|_| ())
    }

    fn predicted_ns(&self, cell: &Cell) -> Option<f64> {
        let roof = Roof::measured(self.ceilings.as_ref()?, cell.dtype);
        let planned = self.planned.iter().find(|planned| planned.cell == *cell)?;
        Some(Floor::new(&planned.cost, &roof).time().0)
    }

    fn can_restart(&self) -> bool {
        self.worker.can_restart()
    }
}

fn unexpected(request: &DeviceRequest) -> RunError {
    RunError::Refused {
        reason: format!("the response is to another request than {}", DeviceJob::description(request)),
    }
}

/// Puts the blocks of several sessions on one time line: the clock of a session that replaces a lost one begins at 0 again.
#[derive(Debug, Default)]
struct SessionClock {
    shift: f64,
    end: f64,
}

impl SessionClock {
    fn set(&mut self, visited: &mut Visited) {
        if visited.blocks.first().is_some_and(|block| block.at_ns + self.shift < self.end) {
            self.shift = self.end;
        }
        for block in &mut visited.blocks {
            block.at_ns += self.shift;
            self.end = self.end.max(block.at_ns + block.wall_ns);
        }
    }
}

/// Steps of the measured cells broken down per operation, into `rows` in their order; nothing for an engine that cannot tell its
/// operations apart. A cell that cannot be profiled is a warning.
fn break_down(
    worker: &mut dyn Worker<DeviceJob>,
    series: usize,
    measured: &[Measured],
    rows: &mut [Vec<OperationRow>],
    warnings: &mut Vec<String>,
    observer: &mut dyn Observer,
) -> Result<(), RunError> {
    for (index, measured) in measured.iter().enumerate().filter(|(_, m)| !m.blocks.is_empty()) {
        let cell = measured.cell.clone();
        let request = DeviceRequest::Profile { series, index, cell };
        match worker.execute(&request, observer)? {
            DeviceResponse::Profiled { rows: none, error: None } if none.is_empty() => {
                let engine = &measured.cell.engine;
                warnings.push(format!("the {engine} engine cannot time its operations apart"));
                break;
            }
            DeviceResponse::Profiled { rows: found, error: None } => rows[index] = found,
            DeviceResponse::Lost { reason } => {
                warnings.push(format!("{}: no time per operation: {reason}", measured.cell.id()));
            }
            DeviceResponse::Profiled { error: Some(reason), .. } | DeviceResponse::Refused { reason } => {
                warnings.push(format!("{}: no time per operation: {reason}", measured.cell.id()));
            }
            _ => return Err(unexpected(&request)),
        }
    }
    Ok(())
}

/// Where the regime changes, for the first dtype of the run.
pub fn crossovers(config: &RunConfig, model: &OpenModel, report: &Report) -> Vec<Crossover> {
    let engine = &config.engines[0];
    let dtype = config.dtypes_for(engine, model)[0];
    let kv_dtype = engine::kv_dtype(engine, model, dtype, config.device_options.kv_dtype);
    let inventory = model.inventory(dtype);
    let ledger = plan::ledger(&model.architecture, &inventory, kv_dtype, engine, config.device);
    let Some(ceilings) = &report.ceilings else { return Vec::new() };
    let roof = Roof::measured(ceilings, dtype);
    let memory = report.environment.device_memory();
    hbmark_core::ledger::crossovers(&ledger, &roof, memory, &config.batches, &config.contexts)
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
    use crate::engine::scripted::{ScriptedSession, StepOutcome};
    use crate::engine::{DeviceChoice, DeviceOptions};
    use crate::run::device_worker::tests::{Scripted, config, model};
    use hbmark_core::ledger::Ledger;
    use hbmark_core::ledger::StockBackend;
    use hbmark_core::units::{Bytes, Nanos};
    use hbmark_report::samples;
    use hbmark_traffic::clock::VirtualClock;

    fn takes(session: ScriptedSession) -> ScriptedSession {
        session
    }

    /// Opens a series of one decode cell over a scripted session, measures and judges it.
    fn results(
        engine: &str,
        show_ops: bool,
        change: impl Fn(ScriptedSession) -> ScriptedSession + 'static,
    ) -> Report {
        let config = RunConfig { show_ops, ..config(engine, &[1], &[64]) };
        let script = || Box::new(|_| StepOutcome::Takes { device: Nanos(9e6), host: Nanos(0.0) }) as _;
        let mut worker = Scripted::new(&config, move || {
            change(crate::run::device_worker::tests::session(&VirtualClock::default(), script()))
        });
        let mut report = Report { cells: Vec::new(), warnings: Vec::new(), ..samples::report() };
        let series = &all(&config, &model())[0];
        let stopped = run(&mut worker, &config, &model(), series, &mut report, &mut NoopObserver).unwrap();
        assert_eq!(stopped, None);
        report
    }

    #[test]
    fn only_stock_is_costed_by_what_is_known_of_candle() {
        let model = model();
        let ledger = Ledger::new(&model.architecture, &model.inventory(Dtype::Bf16), Dtype::Bf16);
        for engine in ["stock", "native"] {
            let cell =
                plan::cells(engine, Dtype::Bf16, &[hbmark_core::result::Phase::Decode], &[1], |_| &[64])
                    .remove(0);
            let found = results(engine, false, takes).cells.remove(0);
            let known = ledger.stock_bytes(plan::shape(&cell), StockBackend::Cpu);
            let stock = engine == "stock";
            assert_eq!(found.bytes.as_implemented, known.filter(|_| stock));
            assert!(known.is_some());
            let memory = plan::needed(&ledger, &cell, DeviceChoice::Cpu, DeviceOptions::default());
            assert_eq!(memory == ledger.memory(plan::shape(&cell)), !stock);
        }
    }

    #[test]
    fn an_engine_that_counts_says_what_it_moved() {
        for engine in ["native", "stock"] {
            let report = results(engine, false, |session| session.with_moved(Bytes(270_000_000)));
            assert_eq!(report.cells[0].bytes.as_implemented, Some(Bytes(270_000_000)));
        }
    }

    #[test]
    fn operations_come_beside_the_times_and_an_engine_without_them_says_so() {
        let head = OperationTime { operation: "head", calls: 1, time: Nanos(3e6), bytes: Bytes(56_000_000) };
        let report = results("native", true, move |session| session.with_profiler(move |_| vec![head]));
        assert_eq!(report.cells[0].operations.len(), 1);
        assert_eq!(report.cells[0].operations[0].operation, "head");
        assert!(report.warnings.is_empty(), "{:?}", report.warnings);
        let blind = results("native", true, takes);
        assert!(blind.cells[0].operations.is_empty());
        assert_eq!(blind.warnings, ["the native engine cannot time its operations apart"]);
    }

    #[test]
    fn a_session_that_replaces_a_lost_one_goes_on_where_it_ended() {
        let block = |at_ns| hbmark_core::result::Block { at_ns, wall_ns: 10.0, ..Default::default() };
        let visited =
            |at: &[f64]| Visited { blocks: at.iter().map(|at| block(*at)).collect(), ..Visited::default() };
        let mut clock = SessionClock::default();
        let mut set = |at: &[f64]| -> Vec<f64> {
            let mut visited = visited(at);
            clock.set(&mut visited);
            visited.blocks.iter().map(|block| block.at_ns).collect()
        };
        assert_eq!(set(&[100.0, 110.0]), [100.0, 110.0]);
        assert_eq!(set(&[5.0, 20.0]), [125.0, 140.0], "the clock began anew");
        assert_eq!(set(&[40.0]), [160.0], "and goes on");
    }
}
