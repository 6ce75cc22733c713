//! What a command does: a step benchmark, a prediction, a comparison, the checks of `verify`.
//!
//! Enters: a validated configuration. Leaves: a result as plain data. Data flows one way, and [`benchmark`] is the first of them:
//!
//! ```text
//! RunConfig → Plan (ordered cells) → Worker (Session loads weights) → measured samples
//!           → Ledger (bytes, FLOPs) × Ceilings → Verdict → Report
//! ```

pub mod bench;
pub(crate) mod compare;
pub mod config;
pub(crate) mod device_worker;
pub(crate) mod dry_run;
pub(crate) mod engine_run;
pub(crate) mod fleet;
pub(crate) mod in_process;
pub(crate) mod journal;
pub(crate) mod plan;
pub mod predict;
pub(crate) mod selftest;
pub(crate) mod verify;

pub use in_process::LocalDevice;

use config::RunConfig;
use device_worker::{DeviceJob, DeviceRequest, DeviceResponse, MachineInfo};

use crate::measure::protocol::{Protocol, ProtocolPreset};
use crate::weights::OpenModel;
use crate::worker::journal::JournalError;
use crate::worker::spawn::WorkerError;
use crate::worker::{Observer, Worker};
use crate::{engine, measure};
use hbmark_core::ledger::devices;
use hbmark_core::model::Dtype;
use hbmark_core::result::{Cause, Report, ReportKind, Status, as_map};
use hbmark_report::analysis::judge;

/// Why a run could not start, or had to end. A cell that fails is a result and not an error.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Engine(#[from] engine::EngineError),
    #[error(transparent)]
    Probe(#[from] measure::probe::ProbeError),
    #[error("{reason}")]
    Refused { reason: String },
    #[error(transparent)]
    Worker(#[from] WorkerError),
    #[error(transparent)]
    Journal(#[from] JournalError),
}

impl RunError {
    /// The signal that ended the run, if one did.
    pub fn signal(&self) -> Option<i32> {
        if let Self::Worker(error) = self { error.signal() } else { None }
    }
}

impl RunConfig {
    /// The dtypes of an engine's cells: those asked for, or the one that is sensible for the model on the device.
    pub fn dtypes_for(&self, engine: &str, model: &OpenModel) -> Vec<Dtype> {
        if self.dtypes.is_empty() {
            vec![engine::default_dtype(engine, model, self.device)]
        } else {
            self.dtypes.clone()
        }
    }

    /// The protocol of the run.
    pub fn protocol(&self) -> Protocol {
        let protocol = match self.preset {
            ProtocolPreset::Full => Protocol::full(self.seed),
            ProtocolPreset::Quick => Protocol::quick(self.seed),
            ProtocolPreset::Smoke => Protocol::smoke(self.seed),
        };
        let scripted = self.device_options.scripted_routing.map(|script| script.routing.to_string());
        Protocol { kv: self.kv, expert_routing: scripted, ..protocol }.stopped_by(&self.stopping)
    }
}

/// A run that ended.
#[derive(Debug, Clone, PartialEq)]
pub struct Finished {
    pub report: Report,
    /// The signal that stopped it early; the cells that it cost are incomplete.
    pub stopped: Option<i32>,
}

/// Runs a step benchmark: the machine, its ceilings, then every engine and dtype over its cells, judged and put together.
///
/// # Errors
/// When the device cannot be opened or probed, or the model cannot be loaded at all; when the run was stopped before it had anything.
pub fn benchmark(
    worker: &mut dyn Worker<DeviceJob>,
    config: &RunConfig,
    model: &OpenModel,
    command: &str,
    observer: &mut dyn Observer,
) -> Result<Finished, RunError> {
    let mut report = begin(worker, config, model, command, observer)?;
    let mut stopped = None;
    for series in engine_run::all(config, model) {
        if stopped.is_some() {
            series.lose(config, model, &mut report, (Status::Incomplete, &Cause::NotReached));
        } else {
            stopped = engine_run::run(worker, config, model, &series, &mut report, observer)?;
        }
    }
    report.crossovers = engine_run::crossovers(config, model, &report);
    conclude(&mut report);
    if stopped.is_some() {
        let open = report.cells.iter().filter(|cell| cell.status == Status::Incomplete).count();
        let warning = format!("the run was stopped: {open} of {} cells are incomplete", report.cells.len());
        report.warnings.insert(0, warning);
    }
    Ok(Finished { report, stopped })
}

/// The names of all cells of a run, in order.
pub fn planned(config: &RunConfig, model: &OpenModel) -> Vec<String> {
    let cells = engine_run::all(config, model).into_iter().flat_map(|series| series.cells(config));
    cells.map(|cell| cell.id()).collect()
}

/// A report with everything but cells: the machine, its ceilings, the model.
pub(super) fn begin(
    worker: &mut dyn Worker<DeviceJob>,
    config: &RunConfig,
    model: &OpenModel,
    command: &str,
    observer: &mut dyn Observer,
) -> Result<Report, RunError> {
    let begun = match engine_run::execute_with_retry(worker, &DeviceRequest::Probe, observer)? {
        DeviceResponse::Probed(begun) => begun,
        DeviceResponse::Lost { reason } => return Err(RunError::Refused { reason: reason.to_string() }),
        _ => {
            return Err(RunError::Refused {
                reason: "the response to a request for the ceilings is another one".into(),
            });
        }
    };
    let MachineInfo { started_at, environment, ceilings, warnings } = *begun;
    // A slice has its GPU's name, and a part of what the GPU's sheet promises.
    let whole = environment.gpu.as_ref().filter(|gpu| gpu.mig != Some(true));
    let product = whole.and_then(|gpu| gpu.name.as_deref());
    let datasheet = product.and_then(|name| devices::find(name).ok()).cloned();
    Ok(Report {
        started_at: Some(started_at),
        note: config.note.clone(),
        hypothesis: config.hypothesis.clone(),
        environment,
        config: as_map(config),
        protocol: Some(config.protocol().summary()),
        ceilings,
        datasheet,
        warnings,
        ..Report::new(
            ReportKind::Run,
            command,
            model.summary(config.dtypes_for(&config.engines[0], model)[0]),
        )
    })
}

/// Adds what is computed over all cells.
pub(super) fn conclude(report: &mut Report) {
    judge::recompute(report);
}

#[cfg(test)]
pub(crate) mod tests;
