//! The step benchmark with criterion's sampler: criterion asks for samples, this module takes them.
//!
//! Enters: a configuration from the environment. Leaves: a time per sample for criterion, and at the end a [`Report`] over the very
//! samples criterion saw. It shares the worker, the blocks, the gate and the judgement with `hbmark run`, and leaves warm-up,
//! number of samples and filters to criterion.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use anyhow::Context;

use crate::engine::{DeviceChoice, DeviceOptions};
use crate::measure::protocol::{Protocol, ProtocolPreset};
use crate::run::config::{self, PhaseName, RunConfig};
use crate::run::device_worker::{CostedCell, DeviceJob, DeviceRequest, DeviceResponse, Opened};
use crate::run::{LocalDevice, engine_run};
use crate::weights::OpenModel;
use crate::worker::signals::Interrupts;
use crate::worker::spawn::WorkerCommand;
use crate::worker::{InProcess, NoopObserver, Observer, Supervisor, Worker};
use hbmark_core::model::Dtype;
use hbmark_core::result::{
    Block, Cause, Cell, EngineKind, KvFill, Measured, Phase, Report, Status, accepted, block_means,
    judged_times,
};
use hbmark_core::stats::{self, CONFIDENCE};
use hbmark_core::units::Bytes;

/// Samples criterion is asked for; the last so many blocks of a cell are the measured ones, those before were its warm-up.
pub const SAMPLES: usize = 10;

/// How long a worker may be silent: criterion decides how many steps a sample has, and they are not predicted.
const TIMEOUT: Duration = Duration::from_mins(10);

/// An interval wider than this is said not to have converged.
const HALF_WIDTH: f64 = 0.05;

/// A loaded model, its cells, and the samples taken so far.
pub struct Bench {
    report: Report,
    worker: Box<dyn Worker<DeviceJob>>,
    /// One per engine and dtype, with its number.
    opened: Vec<(usize, Opened)>,
    protocol: Protocol,
    /// Each with its place in `opened`.
    cells: Vec<(usize, CostedCell)>,
    samples: BTreeMap<usize, Vec<Block>>,
    tokens: BTreeMap<usize, Vec<u32>>,
    moved: BTreeMap<usize, Option<Bytes>>,
    out: Option<std::path::PathBuf>,
}

impl std::fmt::Debug for Bench {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Bench").field("cells", &self.cells).finish_non_exhaustive()
    }
}

/// Writes stages to stderr, where criterion's own progress goes.
struct Stages;

impl Observer for Stages {
    fn stage(&mut self, what: &str) {
        anstream::eprintln!("hbmark: {what}");
    }
}

impl Bench {
    /// Reads `HBMARK_*`, measures the ceilings and loads the model.
    ///
    /// # Errors
    /// Bad values, an unknown model, a device that cannot be opened.
    pub fn from_environment() -> anyhow::Result<Self> {
        let config = config_from(&|key| std::env::var(key).ok())?;
        let model = Rc::new(crate::weights::open(&config.model, None, config.seed)?);
        let alone = std::env::var_os("HBMARK_NO_ISOLATION").is_some_and(|value| !value.is_empty());
        let worker: Box<dyn Worker<DeviceJob>> = if alone {
            Box::new(InProcess::new(LocalDevice::new(&config, model.clone())))
        } else {
            let launch = WorkerCommand::this_program(TIMEOUT)?;
            Box::new(Supervisor::new(launch, config.clone(), Interrupts::default()))
        };
        Self::open(worker, &config, &model)
    }

    fn open(
        mut worker: Box<dyn Worker<DeviceJob>>,
        config: &RunConfig,
        model: &OpenModel,
    ) -> anyhow::Result<Self> {
        let runs = |variant: EngineKind| config.engines.iter().any(|engine| engine == variant.name());
        if runs(EngineKind::StockPool) && (runs(EngineKind::Stock) || runs(EngineKind::StockGraph)) {
            anyhow::bail!(
                "{} sets the one memory pool of a process, and all engines of a bench are in one; name it alone, or use `hbmark run`",
                EngineKind::StockPool.name()
            );
        }
        let mut report = crate::run::begin(worker.as_mut(), config, model, "cargo bench", &mut Stages)?;
        let mut protocol =
            Protocol { name: "criterion", looks: vec![SAMPLES], ..Protocol::quick(config.seed) };
        let (mut opened, mut cells) = (Vec::new(), Vec::new());
        for series in engine_run::all(config, model) {
            let loaded = engine_run::open(worker.as_mut(), config, model, &series, &mut report, &mut Stages)?;
            // Its cells are in the report, with the reason.
            let Some(loaded) = loaded else { continue };
            protocol.canary_tolerance = protocol.canary_tolerance.max(loaded.canary_tolerance);
            let mut possible = loaded.skip_unsupported(&mut report);
            if EngineKind::of(&series.engine) == Some(EngineKind::StockGraph) {
                possible = loaded.skip_unreplayable(worker.as_mut(), &series, possible, &mut report)?;
            }
            cells.extend(possible.into_iter().map(|cell| (opened.len(), cell)));
            opened.push((series.number, loaded));
        }
        if cells.is_empty() {
            let reason = report.cells.iter().find_map(|cell| cell.reason.as_ref());
            let reason = reason.map_or_else(String::new, ToString::to_string);
            anyhow::bail!("no cell of this grid can run: {reason}");
        }
        report.protocol = Some(protocol.summary());
        Ok(Self {
            report,
            worker,
            opened,
            protocol,
            cells,
            samples: BTreeMap::new(),
            tokens: BTreeMap::new(),
            moved: BTreeMap::new(),
            out: config.out.clone(),
        })
    }

    /// The folder that `HBMARK_OUT` names.
    pub fn out(&self) -> Option<&std::path::Path> {
        self.out.as_deref()
    }

    /// The phases that have cells, prefill first.
    pub fn phases(&self) -> Vec<Phase> {
        let mut phases: Vec<Phase> = self.cells.iter().map(|(_, planned)| planned.cell.phase).collect();
        phases.sort();
        phases.dedup();
        phases
    }

    /// Indices of a phase's cells.
    pub fn cells(&self, phase: Phase) -> Vec<usize> {
        (0..self.cells.len()).filter(|&i| self.cells[i].1.cell.phase == phase).collect()
    }

    /// The name criterion shows and filters by, without the phase.
    pub fn name(&self, cell: usize) -> String {
        let id = self.cells[cell].1.cell.id();
        id.split_once('/').map_or(id.clone(), |(_, rest)| rest.to_owned())
    }

    /// The bytes one step of a cell must move.
    pub fn bytes(&self, cell: usize) -> Bytes {
        self.cells[cell].1.cost.bytes.ideal()
    }

    /// Takes one sample of `steps` steps and returns its device time in nanoseconds.
    ///
    /// # Panics
    /// When the engine or its worker fails: criterion takes no error.
    pub fn sample(&mut self, cell: usize, steps: u64) -> f64 {
        let steps = usize::try_from(steps).unwrap_or(usize::MAX);
        let (opened, planned) = &self.cells[cell];
        let request = DeviceRequest::Sample {
            series: self.opened[*opened].0,
            index: cell,
            cell: planned.cell.clone(),
            steps,
            canary_tolerance: self.protocol.canary_tolerance,
        };
        let sample = match self.worker.execute(&request, &mut NoopObserver) {
            Ok(DeviceResponse::Sampled(sample)) => sample,
            Ok(DeviceResponse::Lost { reason }) => panic!("{}: {reason}", planned.cell.id()),
            Ok(DeviceResponse::Refused { reason }) => panic!("{}: {reason}", planned.cell.id()),
            Ok(other) => panic!("{}: answered with {other:?}", planned.cell.id()),
            Err(error) => panic!("{}: {error}", planned.cell.id()),
        };
        self.moved.insert(cell, sample.moved);
        self.tokens.insert(cell, sample.tokens);
        let total = sample.block.step_ns.iter().sum();
        self.samples.entry(cell).or_default().push(sample.block);
        total
    }

    /// Frees the KV of a cell that criterion is done with.
    pub fn finish(&mut self, cell: usize) {
        let series = self.opened[self.cells[cell].0].0;
        // A worker that is gone has freed it.
        let _ = self.worker.execute(&DeviceRequest::Release { series, index: cell }, &mut NoopObserver);
    }

    /// The result over the samples that criterion measured.
    pub fn report(mut self) -> Report {
        let samples = std::mem::take(&mut self.samples);
        for (index, mut blocks) in samples {
            let measured_from = blocks.len().saturating_sub(SAMPLES);
            blocks.drain(..measured_from);
            let (opened, planned) = &self.cells[index];
            let cell = planned.cell.clone();
            let (status, reason) = status_of(&cell, &blocks);
            let tokens = self.tokens.remove(&index).unwrap_or_default();
            let moved = self.moved.remove(&index).flatten();
            let measured =
                Measured { cell, status, reason, blocks, merge: 1, tokens, peak_memory: None, moved };
            let result = self.opened[*opened].1.judge(planned, measured, &self.report);
            self.report.cells.push(result);
        }
        crate::run::conclude(&mut self.report);
        self.report
    }
}

/// Whether criterion's samples are good for a verdict.
fn status_of(cell: &Cell, blocks: &[Block]) -> (Status, Option<Cause>) {
    let good = accepted(blocks).count();
    if good < blocks.len().div_ceil(2)
        && let Some(last) = blocks.iter().rev().find_map(|b| b.rejected.clone())
    {
        let (blocks, rejected) = (blocks.len(), blocks.len() - good);
        return (Status::Disturbed, Some(Cause::MostRejected { rejected, blocks, last: Box::new(last) }));
    }
    let means = block_means(blocks, 1, |b| judged_times(cell.phase, b));
    match stats::t_interval_log(&means, CONFIDENCE).map(|i| i.relative_half_width()) {
        Some(width) if width <= HALF_WIDTH => (Status::Ok, None),
        Some(half_width) => {
            let sampled_s = blocks.iter().map(|b| b.wall_ns / 1e9).sum();
            let wide = Cause::IntervalTooWide { half_width, wanted: HALF_WIDTH, blocks: good, sampled_s };
            (Status::NotConverged, Some(wide))
        }
        None => (Status::NotConverged, Some(Cause::TooFewBlocks { blocks: good })),
    }
}

/// A configuration from `HBMARK_*`; `get` reads one variable.
fn config_from(get: &dyn Fn(&str) -> Option<String>) -> anyhow::Result<RunConfig> {
    let or =
        |key: &str, default: &str| get(key).filter(|v| !v.is_empty()).unwrap_or_else(|| default.to_owned());
    let device: DeviceChoice = match get("HBMARK_DEVICE").filter(|v| !v.is_empty()) {
        Some(given) => given.parse()?,
        None => DeviceChoice::default_of_build(),
    };
    let phases = or("HBMARK_PHASE", "prefill,decode")
        .split(',')
        .map(|p| <PhaseName as clap::ValueEnum>::from_str(p.trim(), true).map_err(anyhow::Error::msg))
        .collect::<anyhow::Result<Vec<PhaseName>>>()
        .context("HBMARK_PHASE takes prefill, decode and verify, with commas")?;
    let draft_tokens = get("HBMARK_DRAFT_TOKENS").filter(|v| !v.is_empty());
    let dtypes: Vec<Dtype> = match get("HBMARK_DTYPE").filter(|v| !v.is_empty()) {
        Some(given) => crate::run::config::parse_dtypes("dtype", &given)?,
        None => Vec::new(),
    };
    let (batches, contexts) = config::default_grid(device);
    let engines = config::parse_engines(&or("HBMARK_ENGINE", config::default_engines()))?;
    let phases = config::phases(&phases, draft_tokens.as_deref())?;
    config::check_phases(&engines, &phases)?;
    Ok(RunConfig {
        model: or("HBMARK_MODEL", config::DEFAULT_MODEL),
        revision: None,
        engines: config::with_replay(engines, device),
        device,
        dtypes,
        phases,
        batches: config::parse_axis("batch", &or("HBMARK_BATCH", batches))?,
        contexts: config::parse_axis("context", &or("HBMARK_CONTEXT", contexts))?,
        prompts: None,
        seed: or("HBMARK_SEED", "42").parse().context("HBMARK_SEED takes a whole number")?,
        threads: None,
        preset: ProtocolPreset::Quick,
        stopping: crate::measure::protocol::Stopping::default(),
        fresh_ceilings: false,
        device_options: DeviceOptions::default(),
        show_ops: false,
        kv: KvFill::Synthetic,
        note: None,
        hypothesis: None,
        out: get("HBMARK_OUT").filter(|v| !v.is_empty()).map(Into::into),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_configures_the_bench() {
        let config = config_from(&|key| match key {
            "HBMARK_BATCH" => Some("1..8*2".into()),
            "HBMARK_DTYPE" => Some("bf16".into()),
            "HBMARK_PHASE" => Some("decode".into()),
            _ => None,
        })
        .unwrap();
        assert_eq!(config.batches, [1, 2, 4, 8]);
        assert_eq!(config.dtypes, [Dtype::Bf16]);
        assert_eq!(config.phases, [Phase::Decode]);
        assert_eq!(config.model, config::DEFAULT_MODEL);
        let wrong = config_from(&|key| (key == "HBMARK_BATCH").then(|| "0".into())).unwrap_err();
        assert!(wrong.to_string().contains("--batch `0`"), "{wrong}");
    }
}
