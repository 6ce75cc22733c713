//! Bytes and FLOPs of a step, the ceilings of a device, and what the two predict.
//!
//! Enters: an architecture, its tensor inventory, a batch and a context; bandwidths and peaks. Leaves: a ledger, a
//! predicted time with its bound, and fractions of the ceilings. Pure: it sees plain data and never a device.

pub mod ceilings;
pub mod crossover;
pub mod devices;
pub mod fit;
pub mod ledger;
#[cfg(test)]
mod ledger_tests;
pub mod predict;
pub mod stock;
pub mod verdict;

pub use ceilings::{Ceilings, DeviceSpec, GpuCeilings, Spread};
pub use crossover::crossovers;
pub use fit::{FitPoint, fit};
pub use ledger::{Ledger, RaggedPart, StepCost, StepShape, expected_distinct_adapters};
pub use predict::{Prediction, Request, predict};
pub use stock::StockBackend;
pub use verdict::{CACHE_MARGIN, CEILING_TOLERANCE, Floor, Roof, Verdict};
