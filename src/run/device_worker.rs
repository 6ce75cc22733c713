//! Whoever owns the device: this process, or a child of it that may die.
//!
//! Enters: a [`DeviceRequest`]. Leaves: its [`DeviceResponse`], plain data. The schedule, the judgement and the report stand on this side and touch no
//! device; engines, probes and monitors stand on the other. An answer may be [`DeviceResponse::Lost`]: whoever owned the device is gone, and a
//! fresh one stands behind the next order.
//!
//! ```text
//! schedule → Journaled (what was answered before) → Supervised → pipes → worker → Local → sessions, monitor, probes
//!                                                └─────── `--no-isolation` ──────┘
//! ```
//!
//! A worker does nothing unasked, so what the parent does between two requests (reading an answer, writing it to the journal) never
//! runs beside a timed block.

use serde::{Deserialize, Serialize};

use crate::measure::visit::{CellEnd, Reference, Visit, Visited};
use crate::run::{Observer, RunError};
use hbmark_core::ledger::StepCost;
use hbmark_core::model::Dtype;
use hbmark_core::result::{
    Block, Cause, Ceilings, Cell, ColdRow, Environment, OperationRow, Quality, Status,
};
use hbmark_core::units::Bytes;

/// What is asked of whoever owns the device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceRequest {
    /// Say which machine this is.
    Identify,
    /// Say which machine this is, and measure its ceilings.
    Probe,
    /// Load an engine at a dtype and check its outputs; `reopen` after it was lost, when both was done before.
    Open {
        series: usize,
        engine: String,
        dtype: Dtype,
        reopen: bool,
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
    /// Fill a cell and step it twice, untimed: for whoever cannot be told while steps are timed.
    TrialStep {
        series: usize,
        cell: Cell,
    },
    /// One monitored block for somebody else's sampler.
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

impl DeviceRequest {
    /// The order as a person would say it: "measuring decode/stock/f32/b1/c8".
    #[must_use]
    pub fn description(&self) -> String {
        match self {
            Self::Identify => "looking at the machine".into(),
            Self::Probe => "measuring the ceilings".into(),
            Self::Open { engine, dtype, .. } => format!("loading and checking {engine} as {dtype}"),
            Self::Visit { visit, .. } => {
                format!("measuring {} in round {}", visit.cell.id(), visit.round + 1)
            }
            Self::MeasureReference { reference, .. } => {
                format!("repeating the reference cell {}", reference.cell.id())
            }
            Self::Profile { cell, .. } => format!("timing the operations of {}", cell.id()),
            Self::TrialStep { cell, .. } => format!("trying {}", cell.id()),
            Self::Sample { cell, .. } => format!("sampling {}", cell.id()),
            Self::Release { .. } | Self::Close { .. } => "freeing memory".into(),
        }
    }

    /// Whether it measures a cell of the plan.
    #[must_use]
    pub fn is_cell_visit(&self) -> bool {
        matches!(self, Self::Visit { .. })
    }

    /// Whether the answer holds something that a later run cannot know without measuring.
    #[must_use]
    pub fn measures(&self) -> bool {
        !matches!(self, Self::Identify | Self::Release { .. } | Self::Close { .. })
    }
}

/// What is answered.
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
    /// The order cannot be carried out by anybody: the run ends.
    Refused {
        reason: String,
    },
    /// Whoever owned the device is gone.
    Lost {
        reason: Cause,
    },
}

impl DeviceResponse {
    /// Whether whoever gave it can no longer be trusted with the device, although it answered.
    pub(super) fn is_sticky(&self) -> bool {
        match self {
            Self::Unavailable { status, .. } => *status == Status::Oom,
            Self::Visited(visited) => visited.is_sticky(),
            Self::TrialStepped { end } => end.as_ref().is_some_and(|end| end.fault.is_some()),
            _ => false,
        }
    }
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

/// Carries out requests.
pub trait DeviceWorker {
    /// Carries out an order; `observer` is told how it goes on.
    ///
    /// # Errors
    /// When the run must end: it was interrupted, no worker can be started, or nothing can be written any more.
    fn execute(
        &mut self,
        request: &DeviceRequest,
        observer: &mut dyn Observer,
    ) -> Result<DeviceResponse, RunError>;

    /// Learns of an order that another rig carried out before: what it opened is to be opened again when it is needed.
    fn restore(&mut self, request: &DeviceRequest, response: &DeviceResponse);

    /// Whether a fresh device stands behind the next order after [`DeviceResponse::Lost`] or a fault.
    fn can_restart(&self) -> bool {
        false
    }
}

/// The series that are open, in the order in which they were opened.
#[derive(Debug, Clone, Default)]
pub(super) struct OpenEngines(Vec<(usize, String, Dtype)>);

impl OpenEngines {
    pub(super) fn note(&mut self, request: &DeviceRequest, response: &DeviceResponse) {
        match (request, response) {
            (DeviceRequest::Open { series, engine, dtype, .. }, DeviceResponse::Opened(_)) => {
                self.0.retain(|(known, ..)| known != series);
                self.0.push((*series, engine.clone(), *dtype));
            }
            (DeviceRequest::Close { series }, _) => self.0.retain(|(known, ..)| known != series),
            _ => {}
        }
    }

    /// Whether the series that an order opens is open.
    pub(super) fn holds(&self, request: &DeviceRequest) -> bool {
        matches!(request, DeviceRequest::Open { series, .. } if self.0.iter().any(|(known, ..)| known == series))
    }

    /// Orders that open all of it again.
    pub(super) fn reopen(&self) -> Vec<DeviceRequest> {
        let open = |(series, engine, dtype): &(usize, String, Dtype)| DeviceRequest::Open {
            series: *series,
            engine: engine.clone(),
            dtype: *dtype,
            reopen: true,
        };
        self.0.iter().map(open).collect()
    }
}

#[cfg(test)]
pub(crate) mod tests;
