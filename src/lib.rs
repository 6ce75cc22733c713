//! hbmark times LLM prefill and decode steps in-process and holds them against the memory roofline.
//!
//! Data flows one way, and [`benchmark`] is the whole story:
//!
//! ```text
//! RunConfig → Plan (ordered cells) → Session (loads weights) → measured samples → Summary
//!           → Ledger (bytes, FLOPs) × Ceilings → Verdict → Report → terminal | json | csv | markdown | html
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | [`units`] | quantities with their unit in the type |
//! | [`intake`] | files and JSON of strangers, bounded before they are believed |
//! | [`model`] | dimensions as data, tensor inventories, weights from files or a seed, tokenizers |
//! | [`engine`] | the waist: `Session`, `StepBatch`, `Capabilities`; candle's own path and a scripted device |
//! | [`measure`] | the measurement protocol, ceilings, telemetry, the quality gate |
//! | [`stats`] | samples → summary. Pure |
//! | [`roofline`] | bytes and FLOPs of a step, predictions, verdicts. Pure |
//! | [`judge`] | measured blocks × ledger × ceilings → the numbers of a cell |
//! | [`insight`] | what the cells say together: the ladder of a step's time, the verdict of a comparison. Pure |
//! | [`compare`] | paired rounds of two configurations in fresh processes; two saved results side by side |
//! | [`report`] | the result as plain data and its output formats |
//! | [`config`], [`plan`] | what to run, and in which order |
//! | [`cli`] | clap types, one file per subcommand |

pub mod bench;
pub mod cli;
pub mod compare;
pub mod config;
pub mod engine;
pub mod insight;
pub mod intake;
pub mod judge;
pub mod measure;
pub mod model;
pub mod plan;
pub mod predict;
pub mod report;
pub mod roofline;
pub mod serve;
pub mod serving;
pub mod stats;
pub mod units;
pub mod verify;

mod series;

use config::{Depth, RunConfig};
use measure::environment::Environment;
use measure::protocol::{Event, Protocol};
use model::{Dtype, OpenModel};
use report::{ModelSummary, Report, ReportKind, SCHEMA_VERSION};
use roofline::devices;
use units::Bytes;

/// Is told how a run goes on.
pub trait Observer {
    /// A stage outside the cells: loading, probing.
    fn stage(&mut self, what: &str);
    /// While weights load: so many bytes of so many have come. Called once a tensor; the last call may fall short of the total, or
    /// pass it, where an engine stores some tensors otherwise than planned.
    fn loaded(&mut self, _done: Bytes, _total: Bytes) {}
    /// Something happened to a cell.
    fn event(&mut self, event: Event<'_>);
}

/// Why a run could not start. A cell that fails is a result and not an error.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Engine(#[from] engine::EngineError),
    #[error(transparent)]
    Probe(#[from] measure::probe::ProbeError),
}

impl RunConfig {
    /// The dtypes of an engine's cells: those asked for, or the one that is sensible for the model on the device.
    #[must_use]
    pub fn dtypes_for(&self, engine: &str, model: &OpenModel) -> Vec<Dtype> {
        if self.dtypes.is_empty() {
            vec![engine::default_dtype(engine, model, self.device)]
        } else {
            self.dtypes.clone()
        }
    }

    /// The protocol of the run.
    #[must_use]
    pub fn protocol(&self) -> Protocol {
        let protocol = match self.depth {
            Depth::Full => Protocol::full(self.seed),
            Depth::Quick => Protocol::quick(self.seed),
            Depth::Smoke => Protocol::smoke(self.seed),
        };
        Protocol { kv: self.kv, ..protocol }
    }
}

/// Runs a step benchmark: the machine, its ceilings, then every engine and dtype over its cells, judged and put together.
///
/// # Errors
/// When the device cannot be opened or probed, or the model cannot be loaded at all.
pub fn benchmark(
    config: &RunConfig,
    model: &OpenModel,
    command: &str,
    observer: &mut dyn Observer,
) -> Result<Report, RunError> {
    let mut report = begin(config, model, command, observer)?;
    let protocol = config.protocol();
    for engine in &config.engines {
        for dtype in config.dtypes_for(engine, model) {
            series::run(config, model, engine, dtype, &protocol, &mut report, observer)?;
        }
    }
    report.crossovers = series::crossovers(config, model, &report);
    conclude(&mut report);
    Ok(report)
}

/// A report with everything but cells: the machine, its ceilings, the model.
fn begin(
    config: &RunConfig,
    model: &OpenModel,
    command: &str,
    observer: &mut dyn Observer,
) -> Result<Report, RunError> {
    let started_at = Some(report::now_utc());
    let environment = Environment::collect(config.device.gpu());
    observer.stage("looking at this machine");
    let warnings = measure::doctor::distortions(&environment);
    let product = environment.gpu.as_ref().and_then(|gpu| gpu.name.as_deref());
    let datasheet = product.and_then(|name| devices::find(name).ok()).cloned();
    observer.stage("measuring this device's ceilings");
    let ceilings = measure::ceilings::measure(config.device, config.depth, config.threads)?;
    Ok(Report {
        schema_version: SCHEMA_VERSION,
        kind: ReportKind::Run,
        command: command.to_owned(),
        started_at,
        note: config.note.clone(),
        hypothesis: config.hypothesis.clone(),
        environment,
        config: report::as_map(config),
        model: summarise_model(model, config.dtypes_for(&config.engines[0], model)[0]),
        capabilities: Vec::new(),
        protocol: Some(config.protocol().summary()),
        ceilings,
        datasheet,
        cells: Vec::new(),
        cold: Vec::new(),
        ladders: Vec::new(),
        fits: Vec::new(),
        crossovers: Vec::new(),
        warnings,
    })
}

/// Adds what is computed over all cells.
fn conclude(report: &mut Report) {
    judge::recompute(report);
}

/// The plan of a run as text: which cells would run, which would be skipped and why, and what each needs.
///
/// # Errors
/// When the engine cannot run the model at all.
pub fn dry_run(config: &RunConfig, model: &OpenModel) -> Result<String, RunError> {
    series::dry_run(config, model)
}

fn summarise_model(model: &OpenModel, dtype: Dtype) -> ModelSummary {
    let inventory = model.inventory(dtype);
    ModelSummary {
        name: model.name.clone(),
        source: model.source_label(),
        hash: model::model_hash(&model.architecture, &inventory),
        parameters: inventory.parameters(),
        weight_bytes: inventory.total_bytes(),
        architecture: model.architecture.clone(),
    }
}
