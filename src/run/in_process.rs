//! Executes the requests of a step benchmark: opens the device and holds the sessions.
//!
//! Enters: requests. Leaves: responses, made of what engines, probes and the monitor measure. A worker process executes them here, and so
//! does a run without isolation. There is no schedule and no judgement here.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Instant;

use crate::engine::native::cpu::kernel_choice::{self, TimedFormat};
use crate::engine::{self, DeviceChoice, EngineError, SequenceId, Session, StepBatch};
use crate::machine::environment;
use crate::machine::memory::{self, MemoryOf};
use crate::measure::block::{BlockError, take_block};
use crate::measure::protocol::{Monitor, NoopMonitor, Protocol, ProtocolPreset};
use crate::measure::visit::{CellInputs, VisitEvent, trial_step};
use crate::measure::{self, monitor, operations, quality, weight_check};
use crate::run::config::RunConfig;
use crate::run::device_worker::{
    CostedCell, DeviceJob, DeviceRequest, DeviceResponse, MachineInfo, Opened, SampledBlock,
};
use crate::run::{RunError, plan};
use crate::weights::OpenModel;
use crate::worker::Observer;
use crate::worker::child::WorkerExit;
use crate::worker::fault_injection::SessionWrapper;
use crate::worker::job::Handler;
use hbmark_core::model::Dtype;
use hbmark_core::result::{Cause, ColdRow, EngineKind, Quality, Status};
use hbmark_core::units::{Bytes, Nanos};

/// The share of available memory that weights, KV and activations may take together, in percent.
pub(crate) const MEMORY_PERCENT: u64 = 90;

/// A reference in f32 is loaded for the quality gate when it takes at most this share of the available memory.
const REFERENCE_SHARE: f64 = 0.5;

/// The devices of this process.
pub struct LocalDevice {
    config: RunConfig,
    model: Rc<OpenModel>,
    live: BTreeMap<usize, LoadedEngine>,
    wrap: Option<SessionWrapper>,
    /// An engine was opened before: the device is open, and the file of the weights in memory.
    is_warm: bool,
}

impl std::fmt::Debug for LocalDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LocalDevice").field("open", &self.live.keys()).finish_non_exhaustive()
    }
}

/// Executes requests as a child process, until stdin ends.
pub fn work() -> Result<(), WorkerExit> {
    crate::worker::child::work(|config: &RunConfig| {
        crate::engine::threads::limit(config.threads);
        let model = crate::weights::open(&config.model, config.revision.as_deref(), config.seed);
        model.map(|model| LocalDevice::new(config, model.into())).map_err(|error| error.to_string())
    })
}

impl Handler for LocalDevice {
    type Job = DeviceJob;

    fn wrap_sessions(&mut self, wrap: SessionWrapper) {
        self.wrap = Some(wrap);
    }

    fn handle(
        &mut self,
        request: &DeviceRequest,
        observer: &mut dyn Observer,
    ) -> Result<DeviceResponse, RunError> {
        match request {
            DeviceRequest::Identify => {
                Ok(DeviceResponse::Identified(Box::new(environment::collect(self.config.device.gpu()))))
            }
            DeviceRequest::Probe => self.begin(observer),
            DeviceRequest::Open { series, engine, dtype, reopen } => {
                self.live.remove(series);
                let opened = self.open(engine, *dtype, reopen.as_deref(), observer);
                match opened {
                    Ok((live, opened)) => {
                        self.live.insert(*series, live);
                        Ok(DeviceResponse::Opened(Box::new(opened)))
                    }
                    Err(OpenFailure::Unavailable { status, reason }) => {
                        Ok(DeviceResponse::Unavailable { status, reason })
                    }
                    Err(OpenFailure::Lost { reason }) => Ok(DeviceResponse::Lost { reason }),
                    Err(OpenFailure::Refused(error)) => Err(error),
                }
            }
            DeviceRequest::Close { series } => {
                self.live.remove(series);
                Ok(DeviceResponse::Done)
            }
            DeviceRequest::Visit { series, .. }
            | DeviceRequest::MeasureReference { series, .. }
            | DeviceRequest::Profile { series, .. }
            | DeviceRequest::TrialStep { series, .. }
            | DeviceRequest::Sample { series, .. }
            | DeviceRequest::Release { series, .. } => match self.live.get_mut(series) {
                Some(live) => Ok(live.handle(request, observer)),
                None if matches!(request, DeviceRequest::Release { .. }) => Ok(DeviceResponse::Done),
                None => Ok(DeviceResponse::Refused { reason: format!("series {series} is not open") }),
            },
        }
    }
}

impl LocalDevice {
    pub fn new(config: &RunConfig, model: Rc<OpenModel>) -> Self {
        Self { config: config.clone(), model, live: BTreeMap::new(), wrap: None, is_warm: false }
    }

    fn begin(&mut self, observer: &mut dyn Observer) -> Result<DeviceResponse, RunError> {
        let config = &self.config;
        let started_at = crate::machine::clock::now_utc();
        let environment = environment::collect(config.device.gpu());
        observer.stage("identifying this machine");
        let warnings = crate::machine::doctor::distortions(&environment);
        observer.stage("measuring this device's ceilings");
        let (device, preset, threads) = (config.device, config.preset, config.threads);
        let ceilings =
            measure::ceilings::for_run(device, preset, threads, &environment, config.fresh_ceilings)?;
        Ok(DeviceResponse::Probed(Box::new(MachineInfo { started_at, environment, ceilings, warnings })))
    }

    /// Loads one engine at one dtype, checks its outputs and takes its cold rows.
    fn open(
        &mut self,
        engine: &str,
        dtype: Dtype,
        reopen: Option<&[TimedFormat]>,
        observer: &mut dyn Observer,
    ) -> Result<(LoadedEngine, Opened), OpenFailure> {
        let first = !std::mem::replace(&mut self.is_warm, true);
        let (config, model) = (&self.config, &*self.model);
        let asked = config.device_options.kv_dtype;
        let can = |engine: &str, dtype| {
            engine::capabilities(engine, model, dtype, config.device)?;
            engine::check_kv_dtype(engine, model, dtype, config.device, asked)
        };
        // What no engine of the plan supports is an error of the plan; beside an engine that supports it, it is the status of a cell.
        let another_can = || {
            config.engines.iter().filter(|other| *other != engine).any(|other| {
                let dtype = engine::default_dtype(other, model, config.device);
                can(other, dtype).is_ok()
            })
        };
        let or_skipped = |error| match error {
            unable @ EngineError::Unsupported { .. } if another_can() => {
                OpenFailure::Unavailable { status: Status::Skipped, reason: unable.cause() }
            }
            other => OpenFailure::from(other),
        };
        can(engine, dtype).map_err(or_skipped)?;
        let kv_dtype = engine::kv_dtype(engine, model, dtype, asked);
        let inventory = model.inventory(dtype);
        let planned = plan::ledger(&model.architecture, &inventory, kv_dtype, engine, config.device);
        if let Some(reason) = too_large(config.device, plan::resident(&planned, engine)) {
            return Err(OpenFailure::Unavailable { status: Status::Skipped, reason });
        }
        kernel_choice::take_over(reopen.unwrap_or_default());
        let begin = Instant::now();
        let session = load(config, model, engine, dtype, observer).map_err(|error| match error {
            EngineError::OutOfMemory { device, detail } => {
                OpenFailure::out_of_memory(device, detail, "loading weights")
            }
            // What only the weights show, or the number of threads.
            other => or_skipped(other),
        })?;
        let mut session = match &self.wrap {
            Some(wrap) => wrap(session),
            None => session,
        };
        // Before anything is timed.
        if let Err(fault) = weight_check::weights(session.inventory(), &model.inventory(dtype)) {
            return Err(OpenFailure::Unavailable { status: Status::Invalid, reason: fault });
        }
        let cold = match reopen {
            Some(_) => Vec::new(),
            None => cold(session.as_mut(), engine, dtype, begin.elapsed().into(), first),
        };
        let quality = if reopen.is_some() {
            Quality {
                passed: true,
                check: "checked before".into(),
                max_relative_error: None,
                token_hash: None,
            }
        } else {
            gate(config, model, engine, dtype, session.as_mut(), observer)?
        };
        let ranks = EngineKind::ranks(engine);
        let monitor: Box<dyn Monitor> = match config.preset {
            ProtocolPreset::Smoke => Box::new(NoopMonitor),
            ProtocolPreset::Full | ProtocolPreset::Quick => {
                monitor::of_devices(config.device, ranks, config.threads).map_err(RunError::from)?
            }
        };
        // What the canary has mapped is no room for a cell.
        let devices = config.device.group(ranks);
        let available = devices.filter_map(|device| memory::available(memory_of(device))).min();
        let live = LoadedEngine::new(session, monitor, config.protocol());
        let opened = live.opened(config, (engine, dtype), quality, cold, available);
        Ok((live, opened))
    }
}

/// Why a series is not open.
enum OpenFailure {
    Unavailable { status: Status, reason: Cause },
    Lost { reason: Cause },
    Refused(RunError),
}

impl OpenFailure {
    fn out_of_memory(device: String, detail: String, during: &str) -> Self {
        let reason = Cause::OutOfMemory { device, detail, during: Some(during.to_owned()) };
        Self::Unavailable { status: Status::Oom, reason }
    }
}

impl From<EngineError> for OpenFailure {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::OutOfMemory { device, detail } => {
                Self::out_of_memory(device, detail, "checking outputs")
            }
            fault @ (EngineError::Device { .. } | EngineError::RankLost { .. }) => {
                Self::Lost { reason: fault.cause() }
            }
            other => Self::Refused(other.into()),
        }
    }
}

impl From<RunError> for OpenFailure {
    fn from(error: RunError) -> Self {
        Self::Refused(error)
    }
}

/// A loaded engine, the inputs of its cells and what watches them.
pub(crate) struct LoadedEngine {
    session: Box<dyn Session>,
    monitor: Box<dyn Monitor>,
    protocol: Protocol,
    inputs: CellInputs,
    /// Tokens of the cells that are sampled, by their place.
    tokens: BTreeMap<usize, Vec<u32>>,
}

impl LoadedEngine {
    pub(crate) fn new(session: Box<dyn Session>, monitor: Box<dyn Monitor>, protocol: Protocol) -> Self {
        Self { session, monitor, protocol, inputs: CellInputs::default(), tokens: BTreeMap::new() }
    }

    /// What the plan needs to know of it.
    pub(crate) fn opened(
        &self,
        config: &RunConfig,
        (engine, dtype): (&str, Dtype),
        quality: Quality,
        cold: Vec<ColdRow>,
        available: Option<Bytes>,
    ) -> Opened {
        // From here on bytes are those of the tensors really loaded.
        let session = &self.session;
        let (architecture, inventory) = (session.architecture(), session.inventory());
        let ledger = plan::ledger(architecture, inventory, session.kv_dtype(), engine, config.device);
        let loaded = plan::resident(&ledger, engine);
        let added = |needs: Bytes| Bytes(needs.0.saturating_sub(loaded.0));
        let cells: Vec<CostedCell> =
            plan::cells(engine, dtype, &config.phases, &config.batches, |phase| config.contexts_of(phase))
                .into_iter()
                .map(|cell| {
                    let needs = plan::needed(&ledger, &cell, config.device, config.device_options);
                    let room = available.map(usable);
                    let (able, needed) = (session.capabilities(), added(needs));
                    let obstacle = plan::obstacle(&cell, architecture, able, needed, room);
                    CostedCell { cost: plan::cost(&ledger, &cell, config.device), needs, obstacle, cell }
                })
                .collect();
        let possible = cells.iter().filter(|planned| planned.obstacle.is_none());
        let together: Bytes = possible.map(|planned| added(planned.needs)).sum();
        Opened {
            capabilities: session.capabilities().clone(),
            kv_dtype: session.kv_dtype(),
            quality,
            cold,
            cells,
            all_fit: available.is_some_and(|free| together.0 < usable(free).0 / 2),
            canary_tolerance: self.monitor.canary_tolerance(self.protocol.canary_tolerance),
            expert_bytes: ledger.expert_bytes(),
            timed: kernel_choice::timed(),
        }
    }

    /// Executes a request about a cell.
    pub(crate) fn handle(&mut self, request: &DeviceRequest, observer: &mut dyn Observer) -> DeviceResponse {
        let Self { session, monitor, protocol, inputs, tokens } = self;
        let session = session.as_mut();
        let mut told = |event: VisitEvent<'_>| match event {
            VisitEvent::Busy(seconds) => observer.busy(seconds),
            VisitEvent::Rejected(cause) => observer.rejected(cause),
        };
        match request {
            DeviceRequest::Visit { visit, .. } => {
                let visited = inputs.visit(session, monitor.as_mut(), protocol, visit, &mut told);
                DeviceResponse::Visited(Box::new(visited))
            }
            DeviceRequest::MeasureReference { reference, .. } => DeviceResponse::ReferenceMeasured {
                mean_ns: inputs.measure_reference(session, protocol, reference, &mut told),
            },
            DeviceRequest::Profile { index, cell, .. } => {
                let (rows, error) = match operations::of_cell(session, cell, *index, protocol.seed) {
                    Ok(rows) => (rows, None),
                    Err(error) => (Vec::new(), Some(error.to_string())),
                };
                DeviceResponse::Profiled { rows, error }
            }
            DeviceRequest::TrialStep { cell, .. } => {
                DeviceResponse::TrialStepped { end: trial_step(session, cell, protocol) }
            }
            DeviceRequest::Sample { index, cell, steps, canary_tolerance, .. } => {
                let tokens = tokens.entry(*index).or_default();
                let input = inputs.of(session, protocol, *index, cell);
                // One cell's KV at a time: the sampler visits them one after another.
                let taken = input.fill(session).map_err(BlockError::from).and_then(|()| {
                    session.threads_away();
                    monitor.before_block();
                    take_block(session, input, *steps, tokens)
                });
                match taken {
                    Ok(mut block) => {
                        let context = monitor.after_block(block.wall_ns / 1e9);
                        let mut context = context.without_threads(session.threads_away());
                        // Nobody knows which sample is the last: each is judged by itself.
                        let load = context.load.take().or_else(|| monitor.after_visit());
                        context.apply_to(&mut block, *canary_tolerance);
                        if let Some(load) = load {
                            load.apply_to(std::slice::from_mut(&mut block));
                        }
                        let sample =
                            SampledBlock { block, tokens: tokens.clone(), moved: session.bytes_moved() };
                        DeviceResponse::Sampled(Box::new(sample))
                    }
                    Err(error) => DeviceResponse::Refused { reason: error.to_string() },
                }
            }
            DeviceRequest::Release { index, .. } => {
                inputs.release(session, *index);
                DeviceResponse::Done
            }
            DeviceRequest::Identify
            | DeviceRequest::Probe
            | DeviceRequest::Open { .. }
            | DeviceRequest::Close { .. } => DeviceResponse::Done,
        }
    }
}

/// Opens an engine, and reports how far its weights have come.
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

/// Where the memory of a device is.
pub(crate) fn memory_of(device: DeviceChoice) -> MemoryOf {
    match device {
        DeviceChoice::Cpu => MemoryOf::Host,
        DeviceChoice::Cuda(index) => MemoryOf::Gpu(index),
    }
}

/// What of the available memory may be used.
fn usable(available: Bytes) -> Bytes {
    Bytes(available.0 / 100 * MEMORY_PERCENT)
}

/// Why not even the weights fit, if they do not.
fn too_large(device: DeviceChoice, need: Bytes) -> Option<Cause> {
    let available = memory::available(memory_of(device))?;
    (need > usable(available)).then_some(Cause::WeightsDoNotFit {
        needed_bytes: need,
        available_bytes: available,
        usable_percent: MEMORY_PERCENT,
    })
}

/// The cold rows: each happens once per process, so each is its own row and never mixed with warm steps. Those of an engine that is not the
/// process's first say so.
fn cold(session: &mut dyn Session, engine: &str, dtype: Dtype, load: Nanos, first: bool) -> Vec<ColdRow> {
    let sequence = SequenceId(u64::MAX / 4);
    let row = |what: &str, time: Nanos| ColdRow {
        what: format!("{what}{}", if first { "" } else { ", after another engine" }),
        engine: engine.into(),
        dtype,
        time_ns: time.0,
    };
    let mut rows = vec![row("open device and load weights", load)];
    let prompt = vec![1u32; 16.min(session.capabilities().max_positions.saturating_sub(1)).max(1)];
    let steps =
        [("first prefill of 16 tokens", prompt.clone(), 0), ("first decode step", vec![1], prompt.len())];
    for (what, tokens, position) in steps {
        let begin = Instant::now();
        let stepped = session
            .step(&StepBatch::uniform(sequence, &[tokens], position))
            .and_then(|()| session.greedy_tokens());
        if stepped.is_ok() {
            rows.push(row(what, begin.elapsed().into()));
        }
    }
    session.release(sequence);
    rows
}

/// The quality gate, against an f32 reference where one fits: beside the session, or on the host where its copy of the weights is made there.
fn gate(
    config: &RunConfig,
    model: &OpenModel,
    engine: &str,
    dtype: Dtype,
    session: &mut dyn Session,
    observer: &mut dyn Observer,
) -> Result<Quality, EngineError> {
    let reference_bytes = model.inventory(Dtype::F32).total_bytes();
    let place = engine::reference_device(engine, model, dtype, config.device)?;
    let room = place
        .and_then(|device| memory::available(memory_of(device)))
        .is_some_and(|free| reference_bytes.as_f64() < free.as_f64() * REFERENCE_SHARE);
    let mut reference = if room && config.preset != ProtocolPreset::Smoke {
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
    quality::gate(session, dtype, config.seed, reference)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::scripted::{StepInfo, StepOutcome};
    use crate::machine::telemetry::CpuLoad;
    use crate::measure::protocol::{BlockContext, WindowLoad};
    use crate::run::device_worker::tests::{config, session};
    use crate::worker::NoopObserver;
    use hbmark_core::result::{Cell, Phase};
    use hbmark_traffic::clock::VirtualClock;

    #[test]
    fn cold_rows_of_an_engine_that_is_not_the_first_of_its_process_say_so() {
        let model = crate::weights::open("tests/fixtures/models/qwen3-tied", None, 42).unwrap();
        let config = RunConfig { preset: ProtocolPreset::Smoke, ..config("native", &[1], &[8]) };
        let mut device = LocalDevice::new(&config, Rc::new(model));
        let mut rows = |series| {
            let open =
                DeviceRequest::Open { series, engine: "native".into(), dtype: Dtype::Bf16, reopen: None };
            let Ok(DeviceResponse::Opened(opened)) = device.handle(&open, &mut NoopObserver) else {
                panic!("series {series} is not open");
            };
            opened.cold.into_iter().map(|row| row.what).collect::<Vec<_>>()
        };
        let (first, second) = (rows(0), rows(1));
        assert_eq!(first.len(), 3);
        assert!(first.iter().all(|what| !what.ends_with("after another engine")), "{first:?}");
        assert!(second.iter().all(|what| what.ends_with(", after another engine")), "{second:?}");
    }

    /// Knows the load of a block when no more follow.
    struct Busy;

    impl Monitor for Busy {
        fn before_block(&mut self) {}
        fn after_block(&mut self, _wall_seconds: f64) -> BlockContext {
            BlockContext::default()
        }
        fn after_visit(&mut self) -> Option<WindowLoad> {
            let load = CpuLoad { blocks: 1, foreign_cores: Some(1.0), steal_cores: None };
            Some(WindowLoad { load, reject: Some(Cause::ForeignLoad { cores: 1.0 }) })
        }
    }

    #[test]
    fn a_sample_of_criterions_beside_other_load_does_not_count() {
        let clock = VirtualClock::default();
        let step = |_: StepInfo| StepOutcome::Takes { device: Nanos(1e7), host: Nanos(0.0) };
        let session = session(&clock, Box::new(step));
        let protocol = config("native", &[1], &[8]).protocol();
        let mut live = LoadedEngine::new(Box::new(session), Box::new(Busy), protocol);
        let cell =
            Cell { phase: Phase::Decode, engine: "native".into(), dtype: Dtype::Bf16, batch: 1, context: 8 };
        let request = DeviceRequest::Sample { series: 0, index: 0, cell, steps: 20, canary_tolerance: 0.1 };
        let DeviceResponse::Sampled(sample) = live.handle(&request, &mut NoopObserver) else {
            panic!("no sample");
        };
        assert_eq!(sample.block.rejected, Some(Cause::ForeignLoad { cores: 1.0 }));
        assert_eq!(sample.block.telemetry.unwrap().foreign_cores, Some(1.0));
    }
}
