//! Is every GPU of a cluster as fast as the next, and which is sick.
//!
//! Enters: lists of nodes, plans, and folders of results from any launcher, in any order. Leaves: scripts and manifests for a scheduler, and
//! a [`result::FleetReport`] with a finding for each GPU, node or rack that is slow, sick or missing. It starts nothing and opens no device.

pub mod confirm;
mod document;
mod drain;
pub mod export;
pub mod folder;
pub mod judge;
pub mod launcher;
pub mod metric;
pub mod nodes;
pub mod plan;
pub mod result;
#[doc(hidden)]
pub mod simulation;
pub mod verdict;

pub use document::headline;
pub use drain::drain_commands;
