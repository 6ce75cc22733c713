//! A step benchmark of a scripted device: the real path from weights to findings, with faults planted where they would arise.
//!
//! Enters: a [`RunScenario`]: cells, noise and [`StepFault`]s. Leaves: a judged [`Report`], made as a run makes one: the weights are audited, the
//! outputs checked, the protocol runs, operations are profiled, cells are judged. Nothing is written into the report by hand.

use std::cell::Cell as Shared;
use std::rc::Rc;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};

use super::architecture;
use crate::engine::scripted::{ScriptedSession, StepInfo, StepOutcome};
use crate::engine::{DeviceChoice, DeviceOptions, EngineError, OperationTime, Session};
use crate::measure::protocol::{self, BlockContext, Monitor, Protocol};
use crate::measure::{operations, quality, weight_check};
use crate::run::device_worker::{CostedCell, Opened};
use crate::run::plan;
use hbmark_core::ledger::{Ledger, StepCost, StepShape};
use hbmark_core::model::{Architecture, Dtype};
use hbmark_core::result::{
    BlockTelemetry, Cause, Ceilings, Cell, CellResult, Finding, Phase, Quality, Report, ReportKind, Spread,
    Status,
};
use hbmark_core::units::{Bytes, Nanos, whole};
use hbmark_report::analysis::judge;
use hbmark_traffic::clock::VirtualClock;

/// What a step without a fault reaches of its floor.
const REACHED: f64 = 0.9;
/// Device time of everything the device is not slowed by.
const BANDWIDTH: f64 = 4e12;
const PEAK: f64 = 500e12;
const LAST_CACHE: Bytes = Bytes(32_000_000);

/// One fault, with its severity.
#[derive(Debug, Clone, PartialEq)]
pub enum StepFault {
    /// The host takes so long between steps.
    HostDelay(Nanos),
    /// ... and works ahead of the device, so that it costs nothing while the device has work.
    HiddenDelay(Nanos),
    /// A kernel that spins in every layer.
    Spin(Nanos),
    /// From the third block on something else takes this share of the bandwidth.
    Hog(f64),
    /// Every byte of the cache is read so many times.
    KvTimes(f64),
    /// The engine moves so many times what it must; it counts the bytes or does not.
    Copies {
        times: f64,
        counted: bool,
    },
    /// The weights were loaded in this dtype.
    WeightsAs(Dtype),
    /// In this share of the steps the host takes so much longer.
    HostTail {
        share: f64,
        time: Nanos,
    },
    Leak(Bytes),
    KvLeak,
    MarksElsewhere,
    ClockRate(f64),
    LostToken,
    /// Other tokens from this step on.
    OtherTokens(usize),
    NotANumber,
    /// The steps of a cell take this share of their time: an engine that does not do them.
    Skips(f64),
    /// Blocks differ by this relative deviation, steps within one do not.
    Wanders(f64),
    /// Every step is longer than the last by this share.
    Drifts(f64),
    /// Blocks are rejected for a cause, this share of them.
    Rejected {
        cause: Cause,
        share: f64,
    },
    /// The canary varies both ways by this relative deviation.
    NoisyCanary(f64),
    /// The device stands at its power limit in this share of the blocks.
    PowerCap(f64),
    /// A step takes so long, whatever its batch.
    Flat(Nanos),
    /// Matrix products are so fast.
    Peak(f64),
    /// The last cache is so large.
    Cache(Bytes),
}

/// A benchmark to run.
#[derive(Debug, Clone)]
pub struct RunScenario {
    pub cells: Vec<Cell>,
    pub protocol: Protocol,
    /// Relative deviation of single steps.
    pub noise: f64,
    pub faults: Vec<StepFault>,
    pub profiled: bool,
}

/// A decode cell of the scripted engine.
pub fn decode(batch: usize, context: usize) -> Cell {
    Cell { phase: Phase::Decode, engine: "scripted".into(), dtype: Dtype::Bf16, batch, context }
}

impl RunScenario {
    /// One decode cell, sampled by few steps, with these faults.
    pub fn new(seed: u64, faults: Vec<StepFault>) -> Self {
        let protocol = Protocol {
            warmup_min_seconds: 0.0,
            warmup_max_seconds: 0.1,
            block_min_seconds: 0.0,
            cell_max_seconds: 60.0,
            ..Protocol::full(seed)
        };
        Self { cells: vec![decode(1, 64)], protocol, noise: 0.002, faults, profiled: false }
    }

    pub fn with_cells(mut self, cells: Vec<Cell>) -> Self {
        self.cells = cells;
        self
    }

    pub fn with_noise(mut self, noise: f64) -> Self {
        self.noise = noise;
        self
    }

    /// Times operations apart, too.
    pub fn profiled(mut self) -> Self {
        self.profiled = true;
        self
    }

    /// Blocks of at least so many seconds.
    pub fn with_blocks_of(mut self, seconds: f64) -> Self {
        self.protocol.block_min_seconds = seconds;
        self
    }

    /// Runs the benchmark.
    pub fn run(&self) -> Result<Report, EngineError> {
        let architecture = architecture();
        let clock = VirtualClock::default();
        let hogged = Rc::new(Shared::new(1.0));
        let mut report = self.blank();
        let session = self.session(&architecture, &clock, Rc::clone(&hogged));
        let wanted = architecture.inventory(Dtype::Bf16);
        if let Err(fault) = weight_check::weights(session.inventory(), &wanted) {
            let ledger = Ledger::new(&architecture, &wanted, Dtype::Bf16);
            for cell in &self.cells {
                let cost = ledger.step(plan::shape(cell));
                let reason = Some(fault.clone());
                report.cells.push(judge::unmeasured(cell, Dtype::Bf16, &cost, Status::Invalid, reason));
            }
            return Ok(report);
        }
        let mut session = session;
        let checked = quality::gate(&mut session, Dtype::Bf16, self.protocol.seed, None)?;
        let opened = self.opened(&session, checked);
        let mut monitor = Observer::new(self, hogged);
        let keep_resident = !self.faults.contains(&StepFault::KvLeak);
        let observe = &mut |_: protocol::Event<'_>| {};
        let (measured, _) =
            protocol::run(&mut session, &self.cells, &self.protocol, &mut monitor, keep_resident, observe);
        for (index, (planned, measured)) in opened.cells.iter().zip(measured).enumerate() {
            let mut rows = Vec::new();
            if self.profiled {
                rows = operations::of_cell(&mut session, &planned.cell, index, self.protocol.seed)?;
            }
            let result = opened.judge(planned, measured, &report);
            report.cells.push(CellResult { operations: rows, ..result });
        }
        judge::recompute(&mut report);
        Ok(report)
    }

    /// Runs the benchmark and says what was found, the worst first.
    pub fn explain(&self) -> Result<Vec<Finding>, EngineError> {
        Ok(hbmark_report::analysis::explain(&self.run()?))
    }

    fn session(
        &self,
        architecture: &Architecture,
        clock: &VirtualClock,
        hogged: Rc<Shared<f64>>,
    ) -> ScriptedSession {
        let loaded = planted!(self.faults, StepFault::WeightsAs(dtype) => *dtype);
        let inventory = architecture.inventory(loaded.unwrap_or(Dtype::Bf16));
        let script = Device::new(self, architecture, hogged).script();
        let mut session = ScriptedSession::new(architecture.clone(), inventory, clock, script);
        for fault in &self.faults {
            session = match fault {
                StepFault::Leak(per_step) => session.with_leak(*per_step),
                StepFault::KvLeak => session.with_kv_leak().with_leak(Bytes(0)),
                StepFault::MarksElsewhere => session.with_marks_elsewhere(),
                StepFault::ClockRate(rate) => session.with_clock_rate(*rate),
                StepFault::LostToken => session.with_lost_token(),
                StepFault::Copies { times, counted: true } => {
                    let ideal = self.ideal(architecture).bytes.ideal().as_f64();
                    session.with_moved(Bytes(whole(ideal * times)))
                }
                _ => session,
            };
        }
        if self.profiled {
            let ideal = self.ideal(architecture);
            let mut operations = vec![OperationTime {
                operation: "stream",
                calls: architecture.layers,
                time: Nanos(ideal.bytes.ideal().as_f64() / BANDWIDTH * 1e9 / REACHED),
                bytes: ideal.bytes.ideal(),
            }];
            if let Some(per_layer) = planted!(self.faults, StepFault::Spin(t) => t.0) {
                operations.push(OperationTime {
                    operation: "spin",
                    calls: architecture.layers,
                    time: Nanos(per_layer * architecture.layers as f64),
                    bytes: Bytes(0),
                });
            }
            session = session.with_profiler(move |_| operations.clone());
        }
        session
    }

    /// The cells, costed by the tensors that are there.
    fn opened(&self, session: &ScriptedSession, quality: Quality) -> Opened {
        let ledger = Ledger::new(session.architecture(), session.inventory(), session.kv_dtype());
        let planned = |cell: &Cell| CostedCell {
            cost: plan::cost(&ledger, cell, DeviceChoice::Cpu),
            needs: plan::needed(&ledger, cell, DeviceChoice::Cpu, DeviceOptions::default()),
            obstacle: None,
            cell: cell.clone(),
        };
        Opened {
            capabilities: session.capabilities().clone(),
            kv_dtype: session.kv_dtype(),
            quality,
            cold: Vec::new(),
            cells: self.cells.iter().map(planned).collect(),
            all_fit: true,
            canary_tolerance: self.protocol.canary_tolerance,
            expert_bytes: None,
            timed: Vec::new(),
        }
    }

    /// What the first cell must move and compute.
    fn ideal(&self, architecture: &Architecture) -> StepCost {
        let ledger = Ledger::new(architecture, &architecture.inventory(Dtype::Bf16), Dtype::Bf16);
        let cell = &self.cells[0];
        ledger.step(plan::shape(cell))
    }

    /// A report of a machine of round numbers, without cells.
    fn blank(&self) -> Report {
        let spread = |median: f64| Spread { median, low: median * 0.99, high: median * 1.01 };
        let peak = self.peak();
        let cache = planted!(self.faults, StepFault::Cache(bytes) => *bytes);
        Report {
            protocol: Some(self.protocol.summary()),
            ceilings: Some(Ceilings {
                read_bytes_per_s: spread(BANDWIDTH),
                copy_bytes_per_s: spread(BANDWIDTH),
                triad_bytes_per_s: spread(BANDWIDTH),
                gemm_flops_per_s: [("bf16".to_owned(), spread(peak)), ("f32".to_owned(), spread(peak / 2.0))]
                    .into(),
                launch_ns: None,
                gpu: None,
                disturbed: Vec::new(),
                age_s: None,
                working_set_bytes: Bytes(1 << 30),
                last_cache_bytes: Some(cache.unwrap_or(LAST_CACHE)),
                read_configuration: "scripted".into(),
            }),
            ..Report::new(ReportKind::Run, "hbmark selftest", super::model())
        }
    }

    fn peak(&self) -> f64 {
        planted!(self.faults, StepFault::Peak(peak) => *peak).unwrap_or(PEAK)
    }
}

/// The device and the host of a world, step by step.
struct Device {
    world: RunScenario,
    ledger: Ledger,
    hogged: Rc<Shared<f64>>,
    random: ChaCha8Rng,
    peak: f64,
    layers: f64,
    /// The last shape and its time: most steps are like the one before.
    known: Option<((usize, usize, usize), f64)>,
    wandered: f64,
}

impl Device {
    fn new(world: &RunScenario, architecture: &Architecture, hogged: Rc<Shared<f64>>) -> Self {
        Self {
            ledger: Ledger::new(architecture, &architecture.inventory(Dtype::Bf16), Dtype::Bf16),
            random: ChaCha8Rng::seed_from_u64(world.protocol.seed ^ 0x5eed),
            peak: world.peak(),
            layers: architecture.layers as f64,
            known: None,
            wandered: 1.0,
            world: world.clone(),
            hogged,
        }
    }

    fn script(mut self) -> crate::engine::scripted::Script {
        Box::new(move |info| self.step(info))
    }

    /// The time of a step by its bytes and arithmetic, in nanoseconds.
    fn floor(&mut self, info: StepInfo) -> f64 {
        let shape = (info.batch, info.tokens, info.start_position);
        if let Some((last, time)) = self.known
            && last == shape
        {
            return time;
        }
        let per_sequence = info.tokens / info.batch.max(1);
        let phase = if per_sequence == 1 { Phase::Decode } else { Phase::Prefill };
        let context = if per_sequence == 1 { info.start_position } else { per_sequence };
        let cost = self.ledger.step(StepShape { phase, batch: info.batch, context: context.max(1) });
        let mut bytes = cost.bytes.ideal().as_f64();
        for fault in &self.world.faults {
            match fault {
                StepFault::KvTimes(times) => bytes += (times - 1.0) * cost.bytes.kv_read.as_f64(),
                StepFault::Copies { times, .. } => bytes *= times,
                _ => {}
            }
        }
        let time = (bytes / BANDWIDTH).max(cost.flops.0 / self.peak) / REACHED * 1e9;
        self.known = Some((shape, time));
        time
    }

    fn step(&mut self, info: StepInfo) -> StepOutcome {
        let normal: f64 = StandardNormal.sample(&mut self.random);
        let mut device =
            self.floor(info) * (1.0 + self.world.noise * normal.clamp(-4.0, 4.0)) * self.hogged.get();
        let mut host = 0.0;
        let mut ahead = false;
        for fault in &self.world.faults {
            match fault {
                StepFault::HostDelay(time) => host += time.0,
                StepFault::HiddenDelay(time) => (host, ahead) = (host + time.0, true),
                StepFault::Spin(per_layer) => device += per_layer.0 * self.layers,
                StepFault::HostTail { share, time } if self.random.random_bool(*share) => host += time.0,
                StepFault::Skips(share) => device *= share,
                StepFault::Wanders(deviation) => {
                    if info.index.is_multiple_of(self.world.protocol.block_min_steps) {
                        let level: f64 = StandardNormal.sample(&mut self.random);
                        self.wandered = (1.0 + deviation * level).max(0.2);
                    }
                    device *= self.wandered;
                }
                StepFault::Drifts(share) => device *= 1.0 + share * info.index as f64,
                StepFault::Flat(time) => device = time.0 * (1.0 + self.world.noise * normal.clamp(-4.0, 4.0)),
                _ => {}
            }
        }
        let (device, host) = (Nanos(device), Nanos(host));
        for fault in &self.world.faults {
            match fault {
                StepFault::OtherTokens(from) if info.index >= *from => {
                    return StepOutcome::WrongTokens { device };
                }
                StepFault::NotANumber => return StepOutcome::NotANumber { device },
                _ => {}
            }
        }
        if ahead { StepOutcome::Ahead { device, host } } else { StepOutcome::Takes { device, host } }
    }
}

/// What is seen beside the blocks.
struct Observer {
    faults: Vec<StepFault>,
    random: ChaCha8Rng,
    hogged: Rc<Shared<f64>>,
    blocks: usize,
}

/// Blocks before a hog comes.
const BEFORE_THE_HOG: usize = 3;
/// What a quiet canary varies by.
const QUIET_CANARY: f64 = 0.001;

impl Observer {
    fn new(world: &RunScenario, hogged: Rc<Shared<f64>>) -> Self {
        let random = ChaCha8Rng::seed_from_u64(world.protocol.seed ^ 0xca);
        Self { faults: world.faults.clone(), random, hogged, blocks: 0 }
    }
}

impl Monitor for Observer {
    fn before_block(&mut self) {
        for fault in &self.faults {
            if let StepFault::Hog(share) = fault
                && self.blocks >= BEFORE_THE_HOG
            {
                self.hogged.set(1.0 / (1.0 - share));
            }
        }
        self.blocks += 1;
    }

    fn after_block(&mut self, _wall_seconds: f64) -> BlockContext {
        let normal: f64 = StandardNormal.sample(&mut self.random);
        let mut seen = BlockContext {
            canary_ratio: Some(self.hogged.get() * (1.0 + QUIET_CANARY * normal)),
            ..BlockContext::default()
        };
        for fault in &self.faults {
            match fault {
                StepFault::NoisyCanary(deviation) => seen.canary_ratio = Some(1.0 + deviation * normal),
                StepFault::Rejected { cause, share } if self.random.random_bool(*share) => {
                    seen.reject = Some(cause.clone());
                }
                StepFault::PowerCap(share) if self.random.random_bool(*share) => {
                    seen.conditions.push(Cause::PowerCapped);
                    seen.telemetry =
                        Some(BlockTelemetry { power_watts: Some(700.0), ..BlockTelemetry::default() });
                }
                _ => {}
            }
        }
        seen
    }
}
