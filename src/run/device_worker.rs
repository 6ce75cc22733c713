//! The requests of a step benchmark to the worker that owns the device, and their responses.
//!
//! Enters: a [`DeviceRequest`]. Leaves: its [`DeviceResponse`], plain data. Schedule, analysis and report are on this side and touch no
//! device; engines, probes and monitors are on the other. A response may be [`DeviceResponse::Lost`]: the worker is gone, and another
//! one executes the next request.

use serde::{Deserialize, Serialize};

use crate::engine::native::cpu::kernel_choice::TimedFormat;
use crate::measure::visit::{CellEnd, Reference, Visit, Visited};
use crate::run::RunError;
use crate::run::config::RunConfig;
use crate::worker::job::{Job, RequestKind, StateChange};
use hbmark_core::ledger::StepCost;
use hbmark_core::model::Dtype;
use hbmark_core::result::validation::check_blocks;
use hbmark_core::result::{
    Block, Cause, Ceilings, Cell, ColdRow, Environment, OperationRow, Quality, ReportError, Status,
};
use hbmark_core::units::Bytes;

/// A request to the worker that owns the device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceRequest {
    /// Name the machine.
    Identify,
    /// Name the machine, and measure its ceilings.
    Probe,
    /// Load an engine at a dtype and check its outputs; `reopen` in another worker, when both was done before, with what the first has timed of
    /// its kernels.
    Open {
        series: usize,
        engine: String,
        dtype: Dtype,
        reopen: Option<Vec<TimedFormat>>,
    },
    Visit {
        series: usize,
        visit: Visit,
    },
    MeasureReference {
        series: usize,
        reference: Reference,
    },
    /// Break a cell's step down per operation.
    Profile {
        series: usize,
        index: usize,
        cell: Cell,
    },
    /// Fill a cell and step it twice, untimed: for a sampler that cannot skip a cell while it times steps.
    TrialStep {
        series: usize,
        cell: Cell,
    },
    /// One monitored block for another program's sampler.
    Sample {
        series: usize,
        index: usize,
        cell: Cell,
        steps: usize,
        canary_tolerance: f64,
    },
    /// Free a cell's KV.
    Release {
        series: usize,
        index: usize,
    },
    /// Free a series with its weights.
    Close {
        series: usize,
    },
}

/// The response to a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceResponse {
    Identified(Box<Environment>),
    Probed(Box<MachineInfo>),
    Opened(Box<Opened>),
    /// The series cannot be had: its cells end like this.
    Unavailable {
        status: Status,
        reason: Cause,
    },
    Visited(Box<Visited>),
    ReferenceMeasured {
        mean_ns: Option<f64>,
    },
    Profiled {
        rows: Vec<OperationRow>,
        error: Option<String>,
    },
    /// Why the cell cannot be stepped, if it cannot.
    TrialStepped {
        end: Option<CellEnd>,
    },
    Sampled(Box<SampledBlock>),
    Done,
    /// No worker can execute the request: the run ends.
    Refused {
        reason: String,
    },
    /// The worker is gone.
    Lost {
        reason: Cause,
    },
}

/// The machine and what it can do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MachineInfo {
    pub started_at: String,
    pub environment: Environment,
    pub ceilings: Option<Ceilings>,
    pub warnings: Vec<String>,
}

/// A loaded engine with everything its cells are judged by.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Opened {
    pub capabilities: hbmark_core::result::Capabilities,
    pub kv_dtype: Dtype,
    pub quality: Quality,
    pub cold: Vec<ColdRow>,
    pub cells: Vec<CostedCell>,
    /// Whether the KV of all cells that can run fits beside each other.
    pub all_fit: bool,
    /// What the canary can bear here.
    pub canary_tolerance: f64,
    /// Bytes of one routed expert in every layer that has any.
    #[serde(default)]
    pub expert_bytes: Option<Bytes>,
    /// What the worker had timed of its CPU kernels by then.
    #[serde(default)]
    pub timed: Vec<TimedFormat>,
}

/// A cell, costed by the tensors that were really loaded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CostedCell {
    pub cell: Cell,
    pub cost: StepCost,
    pub needs: Bytes,
    /// Why it cannot run.
    pub obstacle: Option<Cause>,
}

/// A block, the tokens it gave and the bytes it moved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SampledBlock {
    pub block: Block,
    pub tokens: Vec<u32>,
    pub moved: Option<Bytes>,
}

/// A step benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceJob;

impl Job for DeviceJob {
    type Config = RunConfig;
    type Request = DeviceRequest;
    type Response = DeviceResponse;
    type Error = RunError;

    const KIND: &'static str = "run";
    /// candle's slowest products are about fifty times above their floor.
    const STEP_TIMEOUT_FACTOR: f64 = 100.0;
    const IDENTIFY: DeviceRequest = DeviceRequest::Identify;
    const DONE: DeviceResponse = DeviceResponse::Done;

    fn kind(request: &DeviceRequest) -> RequestKind {
        match request {
            DeviceRequest::Identify => RequestKind::Identify,
            DeviceRequest::Visit { .. } => RequestKind::Measure,
            DeviceRequest::Release { .. } | DeviceRequest::Close { .. } => RequestKind::Free,
            _ => RequestKind::Prepare,
        }
    }

    fn description(request: &DeviceRequest) -> String {
        match request {
            DeviceRequest::Identify => "identifying the machine".into(),
            DeviceRequest::Probe => "measuring the ceilings".into(),
            DeviceRequest::Open { engine, dtype, .. } => format!("loading and checking {engine} as {dtype}"),
            DeviceRequest::Visit { visit, .. } => {
                format!("measuring {} in round {}", visit.cell.id(), visit.round + 1)
            }
            DeviceRequest::MeasureReference { reference, .. } => {
                format!("repeating the reference cell {}", reference.cell.id())
            }
            DeviceRequest::Profile { cell, .. } => format!("timing the operations of {}", cell.id()),
            DeviceRequest::TrialStep { cell, .. } => format!("trying {}", cell.id()),
            DeviceRequest::Sample { cell, .. } => format!("sampling {}", cell.id()),
            DeviceRequest::Release { .. } | DeviceRequest::Close { .. } => "freeing memory".into(),
        }
    }

    fn state_change(
        request: &DeviceRequest,
        response: &DeviceResponse,
    ) -> Option<StateChange<DeviceRequest>> {
        match (request, response) {
            (DeviceRequest::Open { series, engine, dtype, .. }, DeviceResponse::Opened(opened)) => {
                let (series, engine, dtype) = (*series, engine.clone(), *dtype);
                let reopen =
                    DeviceRequest::Open { series, engine, dtype, reopen: Some(opened.timed.clone()) };
                Some(StateChange::Opened { key: series, reopen })
            }
            (DeviceRequest::Close { series }, _) => Some(StateChange::Closed { key: *series }),
            _ => None,
        }
    }

    fn lost(reason: Cause, _executing: bool) -> DeviceResponse {
        DeviceResponse::Lost { reason }
    }

    fn refused(reason: String) -> DeviceResponse {
        DeviceResponse::Refused { reason }
    }

    fn failure(response: &DeviceResponse) -> Option<String> {
        match response {
            DeviceResponse::Lost { reason } | DeviceResponse::Unavailable { reason, .. } => {
                Some(reason.to_string())
            }
            DeviceResponse::Refused { reason } => Some(reason.clone()),
            _ => None,
        }
    }

    fn is_recorded(response: &DeviceResponse) -> bool {
        // A refusal is not a measurement: a resumed run asks again.
        !matches!(response, DeviceResponse::Refused { .. })
    }

    fn is_sticky(response: &DeviceResponse) -> bool {
        match response {
            DeviceResponse::Lost { .. } => true,
            DeviceResponse::Unavailable { status, .. } => *status == Status::Oom,
            DeviceResponse::Visited(visited) => visited.is_sticky(),
            DeviceResponse::TrialStepped { end } => end.as_ref().is_some_and(|end| end.fault.is_some()),
            _ => false,
        }
    }

    fn environment(response: &DeviceResponse) -> Option<&Environment> {
        match response {
            DeviceResponse::Identified(environment) => Some(environment),
            DeviceResponse::Probed(machine) => Some(&machine.environment),
            _ => None,
        }
    }

    fn validate(request: &DeviceRequest, response: &DeviceResponse) -> Result<(), ReportError> {
        match (request, response) {
            (DeviceRequest::Visit { visit, .. }, DeviceResponse::Visited(visited)) => {
                check_blocks(&visited.blocks, visit.cell.phase, &visit.cell.id())
            }
            _ => Ok(()),
        }
    }

    fn warn(response: &mut DeviceResponse, warning: String) {
        if let DeviceResponse::Probed(machine) = response {
            machine.warnings.push(warning);
        }
    }

    fn fault_places(request: &DeviceRequest) -> &'static [&'static str] {
        match request {
            DeviceRequest::Probe => &["begin"],
            DeviceRequest::Open { .. } => &["load"],
            _ => &[],
        }
    }

    fn fault_site(request: &DeviceRequest) -> String {
        match request {
            DeviceRequest::Visit { visit, .. } => visit.cell.id(),
            _ => String::new(),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
