//! Bytes and FLOPs of a step, the ceilings of a device, and the predicted floors.
//!
//! Enters: an architecture, its tensor inventory, a batch and a context; bandwidths and peaks. Leaves: a ledger, a
//! predicted time with its bound, and fractions of the ceilings. Plain data only, no device.

pub mod crossover;
pub mod devices;
pub mod fit;
pub mod group;
pub mod links;
mod native_gpu;
pub mod predict;
pub mod routing;
pub mod step;
pub mod stock;
pub mod verdict;

pub use crossover::crossovers;
pub use fit::{FitPoint, fit};
pub use group::{Group, GroupError, predict_group};
pub use predict::{Prediction, Request, predict, routing_note};
pub use routing::{DistinctExperts, ExpertRouting, LayerRouting};
pub use step::{Ledger, RaggedPart, StepCost, StepShape, expected_distinct_adapters};
pub use stock::{StockBackend, largest_stock_tensor};
pub use verdict::{
    CACHE_MARGIN, CEILING_IMPOSSIBLE, CEILING_TOLERANCE, EXPLAINED_SHARE, Floor, Roof, Verdict,
};
