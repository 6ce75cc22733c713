//! Every saved file as plain data: read, validated, written.
//!
//! Enters: bytes of a file, or measurements. Leaves: a [`Report`], a [`serving::ServeReport`] or a
//! [`comparison::Comparison`]. null is not 0: what was not measured stays null. Nothing here prints.

mod block;
mod capabilities;
pub mod cause;
mod ceilings;
mod cell;
pub mod comparison;
mod environment;
mod error;
mod finding;
mod group;
mod ladder;
mod report;
pub mod saved;
#[cfg(test)]
mod schema;
pub mod serving;
pub mod validation;

pub use block::{Block, BlockTelemetry, accepted, block_interval, block_means, judged_times, load_rejects};
pub use capabilities::{Capabilities, EngineDevice, EngineKind, MAX_RANKS, Ragged};
pub use cause::{Cause, ConsistencyRule};
pub use ceilings::{AllReduceTime, Ceilings, DeviceSpec, GpuCeilings, LinkCeilings, Spread};
pub use cell::{
    AllBlocks, Bound, Cell, CellName, CellResult, MAX_DRAFT_TOKENS, Measured, NoCellName, NoPhase,
    OperationRow, Phase, Quality, Status, StepBytes, TimeSummary, cell_id,
};
pub use environment::{
    Board, BuildEnvironment, CpuEnvironment, Environment, Fabric, FleetTask, GpuEnvironment, GpuMatch,
    Limits, Placement, RemappedRows, SIMULATED_DEVICE, UNKNOWN_PRODUCT,
};
pub use error::ReportError;
pub use finding::{Finding, Severity};
pub use group::{CollectiveKind, CollectiveRow, GroupStep, GroupSummary, Link, MeasuredStep, StageSummary};
pub use ladder::{Ladder, LaunchCost, Rung, RungKind, TimeScale};
pub use report::{
    ColdRow, Crossover, CrossoverKind, FittedModel, KvFill, MAX_CANARY_TOLERANCE, ModelSummary,
    OLDEST_SCHEMA_VERSION, ProtocolSummary, Report, ReportKind, SCHEMA_VERSION, as_map,
};
