//! Whoever owns the device: this process, or a child of it that may die.
//!
//! Enters: an [`Order`]. Leaves: its [`Answer`], plain data. The schedule, the judgement and the report stand on this side and touch no
//! device; engines, probes and witnesses stand on the other. An answer may be [`Answer::Lost`]: whoever owned the device is gone, and a
//! fresh one stands behind the next order.
//!
//! ```text
//! schedule → Journaled (what was answered before) → Supervised → pipes → worker → Local → sessions, witness, probes
//!                                                └─────── `--no-isolation` ──────┘
//! ```
//!
//! A worker does nothing unasked, so what the parent does between two orders (reading an answer, writing it to the journal) never
//! runs beside a timed block.

use serde::{Deserialize, Serialize};

use crate::measure::visit::{End, Reference, Visit, Visited};
use crate::run::{Observer, RunError};
use hbmark_core::ledger::StepCost;
use hbmark_core::model::Dtype;
use hbmark_core::result::{Block, Ceilings, Cell, ColdRow, Environment, OperationRow, Quality, Status};
use hbmark_core::units::Bytes;

/// What is asked of whoever owns the device.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Order {
    /// Say which machine this is.
    Look,
    /// Say which machine this is, and measure its ceilings.
    Begin,
    /// Load an engine at a dtype and check its outputs; `again` after it was lost, when both was done before.
    Open {
        series: usize,
        engine: String,
        dtype: Dtype,
        again: bool,
    },
    Visit {
        series: usize,
        visit: Visit,
    },
    Refer {
        series: usize,
        reference: Reference,
    },
    /// Break a cell's step down per operation.
    BreakDown {
        series: usize,
        index: usize,
        cell: Cell,
    },
    /// Fill a cell and step it twice, untimed: for whoever cannot be told while steps are timed.
    Rehearse {
        series: usize,
        cell: Cell,
    },
    /// One witnessed block for somebody else's sampler.
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

impl Order {
    /// The order as a person would say it: "measuring decode/stock/f32/b1/c8".
    #[must_use]
    pub fn doing(&self) -> String {
        match self {
            Self::Look => "looking at the machine".into(),
            Self::Begin => "measuring the ceilings".into(),
            Self::Open { engine, dtype, .. } => format!("loading and checking {engine} as {dtype}"),
            Self::Visit { visit, .. } => {
                format!("measuring {} in round {}", visit.cell.id(), visit.round + 1)
            }
            Self::Refer { reference, .. } => format!("repeating the reference cell {}", reference.cell.id()),
            Self::BreakDown { cell, .. } => format!("timing the operations of {}", cell.id()),
            Self::Rehearse { cell, .. } => format!("trying {}", cell.id()),
            Self::Sample { cell, .. } => format!("sampling {}", cell.id()),
            Self::Release { .. } | Self::Close { .. } => "freeing memory".into(),
        }
    }

    /// Whether it measures a cell of the plan.
    #[must_use]
    pub fn is_visit(&self) -> bool {
        matches!(self, Self::Visit { .. })
    }

    /// Whether the answer holds something that a later run cannot know without measuring.
    #[must_use]
    pub fn measures(&self) -> bool {
        !matches!(self, Self::Look | Self::Release { .. } | Self::Close { .. })
    }
}

/// What is answered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    Looked(Box<Environment>),
    Begun(Box<Begun>),
    Opened(Box<Opened>),
    /// The series cannot be had: its cells end like this.
    NoRoom {
        status: Status,
        reason: String,
    },
    Visited(Box<Visited>),
    Referred {
        mean_ns: Option<f64>,
    },
    BrokenDown {
        rows: Vec<OperationRow>,
        error: Option<String>,
    },
    /// Why the cell cannot be stepped, if it cannot.
    Rehearsed {
        end: Option<End>,
    },
    Sampled(Box<Sample>),
    Done,
    /// The order cannot be carried out by anybody: the run ends.
    Refused {
        reason: String,
    },
    /// Whoever owned the device is gone.
    Lost {
        reason: String,
    },
}

impl Answer {
    /// Whether whoever gave it can no longer be trusted with the device, although it answered.
    pub(super) fn taints(&self) -> bool {
        match self {
            Self::NoRoom { status, .. } => *status == Status::Oom,
            Self::Visited(visited) => visited.taints(),
            Self::Rehearsed { end } => end.as_ref().is_some_and(|end| end.fault.is_some()),
            _ => false,
        }
    }
}

/// The machine and what it can do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Begun {
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
    pub cells: Vec<Planned>,
    /// Whether the KV of all cells that can run fits beside each other.
    pub all_fit: bool,
    /// What the canary can bear here.
    pub canary_tolerance: f64,
}

/// A cell, costed by the tensors that were really loaded.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Planned {
    pub cell: Cell,
    pub cost: StepCost,
    pub needs: Bytes,
    /// Why it cannot run.
    pub obstacle: Option<String>,
}

/// A block, the tokens it gave and the bytes it moved.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    pub block: Block,
    pub tokens: Vec<u32>,
    pub moved: Option<Bytes>,
}

/// Carries out orders.
pub trait Rig {
    /// Carries out an order; `observer` is told how it goes on.
    ///
    /// # Errors
    /// When the run must end: it was interrupted, no worker can be started, or nothing can be written any more.
    fn ask(&mut self, order: &Order, observer: &mut dyn Observer) -> Result<Answer, RunError>;

    /// Learns of an order that another rig carried out before: what it opened is to be opened again when it is needed.
    fn assume(&mut self, order: &Order, answer: &Answer);

    /// Whether a fresh device stands behind the next order after [`Answer::Lost`] or a fault.
    fn renews(&self) -> bool {
        false
    }
}

/// The series that are open, in the order in which they were opened.
#[derive(Debug, Clone, Default)]
pub(super) struct OpenSeries(Vec<(usize, String, Dtype)>);

impl OpenSeries {
    pub(super) fn note(&mut self, order: &Order, answer: &Answer) {
        match (order, answer) {
            (Order::Open { series, engine, dtype, .. }, Answer::Opened(_)) => {
                self.0.retain(|(known, ..)| known != series);
                self.0.push((*series, engine.clone(), *dtype));
            }
            (Order::Close { series }, _) => self.0.retain(|(known, ..)| known != series),
            _ => {}
        }
    }

    /// Whether the series that an order opens is open.
    pub(super) fn holds(&self, order: &Order) -> bool {
        matches!(order, Order::Open { series, .. } if self.0.iter().any(|(known, ..)| known == series))
    }

    /// Orders that open all of it again.
    pub(super) fn again(&self) -> Vec<Order> {
        let open = |(series, engine, dtype): &(usize, String, Dtype)| Order::Open {
            series: *series,
            engine: engine.clone(),
            dtype: *dtype,
            again: true,
        };
        self.0.iter().map(open).collect()
    }
}

#[cfg(test)]
#[path = "rig_tests.rs"]
pub(crate) mod tests;
