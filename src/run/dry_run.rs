//! The plan of a run: which cells would run, which would be skipped and why, and what each needs.
//!
//! Enters: a configuration and an opened model. Leaves: a [`DryRun`], printed in every format. Nothing is measured.

use serde::Serialize;

use super::config::RunConfig;
use super::{RunError, engine_run, in_process, plan};
use crate::engine::{self, EngineError};
use crate::machine::memory;
use crate::weights::OpenModel;
use hbmark_core::result::Cause;
use hbmark_core::units::Bytes;
use hbmark_report::analysis::words::counted;
use hbmark_report::output::Kind;
use hbmark_report::output::document::{Document, numbers, words};

/// What a run would measure.
#[derive(Debug, Clone, Serialize)]
pub struct DryRun {
    model: String,
    source: String,
    device: String,
    protocol: String,
    /// Fewest and most blocks of a cell.
    blocks: [usize; 2],
    visits: usize,
    seed: u64,
    /// Memory that is free on the device, if it is known.
    available: Option<Bytes>,
    cells: Vec<PlannedCell>,
    /// Engines of several that do not run the model at a dtype, and why.
    unsupported: Vec<String>,
}

/// A cell of the plan.
#[derive(Debug, Clone, Serialize)]
struct PlannedCell {
    id: String,
    /// Bytes that a step moves at least.
    step_bytes: Bytes,
    /// Memory that it needs.
    memory: Bytes,
    skip: Option<Cause>,
}

impl DryRun {
    /// Plans without measuring.
    pub fn of(config: &RunConfig, model: &OpenModel) -> Result<Self, RunError> {
        let protocol = config.protocol();
        let available = memory::available(in_process::memory_of(config.device));
        let mut plan = Self {
            model: model.name.clone(),
            source: model.source_label(),
            device: config.device.to_string(),
            protocol: protocol.name.to_string(),
            blocks: [protocol.looks[0], protocol.looks.last().copied().unwrap_or(1)],
            visits: protocol.visits,
            seed: config.seed,
            available,
            cells: Vec::new(),
            unsupported: Vec::new(),
        };
        for series in engine_run::all(config, model) {
            let (engine, dtype) = (series.engine.as_str(), series.dtype);
            let (device, asked) = (config.device, config.device_options.kv_dtype);
            let capabilities = engine::check_kv_dtype(engine, model, dtype, device, asked)
                .and_then(|()| engine::capabilities(engine, model, dtype, device));
            let capabilities = match capabilities {
                Ok(capabilities) => capabilities,
                Err(error @ EngineError::Unsupported { .. }) if config.engines.len() > 1 => {
                    plan.unsupported.push(format!("{engine}, {dtype}: {error}"));
                    continue;
                }
                Err(error) => return Err(error.into()),
            };
            let kv_dtype = engine::kv_dtype(engine, model, dtype, asked);
            let inventory = model.inventory(dtype);
            let ledger = plan::ledger(&model.architecture, &inventory, kv_dtype, engine, device);
            for cell in series.cells(config) {
                let memory = plan::needed(&ledger, &cell, config.device, config.device_options);
                plan.cells.push(PlannedCell {
                    id: cell.id(),
                    step_bytes: plan::cost(&ledger, &cell, config.device).bytes.ideal(),
                    memory,
                    skip: plan::obstacle(&cell, &model.architecture, &capabilities, memory, available),
                });
            }
        }
        if plan.cells.is_empty() {
            return Err(RunError::Refused {
                reason: format!("no cell can run: {}", plan.unsupported.join("; ")),
            });
        }
        Ok(plan)
    }

    /// The first cell with why it cannot run, where no cell can.
    pub fn obstacle(&self) -> Option<(&str, &Cause)> {
        let obstacles = self.cells.iter().map(|cell| Some((cell.id.as_str(), cell.skip.as_ref()?)));
        obstacles.collect::<Option<Vec<_>>>()?.into_iter().next()
    }
}

impl Kind for DryRun {
    fn document(&self) -> Document {
        let skipped = self.cells.iter().filter(|cell| cell.skip.is_some()).count();
        let mut document = Document::new(format!(
            "plan of {}, {skipped} of them skipped",
            counted(self.cells.len(), "cell")
        ));
        document.list([
            format!("model: {} ({})", self.model, self.source),
            format!("device: {}", self.device),
            format!(
                "protocol: {}, {} to {} over {}, seed {}",
                self.protocol,
                self.blocks[0],
                counted(self.blocks[1], "block"),
                counted(self.visits, "visit"),
                self.seed
            ),
        ]);
        let cells = || self.cells.iter();
        document.table(vec![
            words("cell", cells().map(|cell| cell.id.clone())),
            numbers("bytes of a step", cells().map(|cell| cell.step_bytes.to_string())),
            numbers("memory", cells().map(|cell| cell.memory.to_string())),
            words(
                "",
                cells().map(|cell| match &cell.skip {
                    None => "run".to_owned(),
                    Some(cause) => format!("skip: {cause}"),
                }),
            ),
        ]);
        document.list(self.unsupported.iter().map(|reason| format!("skip: {reason}")));
        document
    }

    fn json(&self) -> serde_json::Result<String> {
        serde_json::to_string_pretty(self)
    }
}
