//! Bytes and FLOPs of a step, the ceilings of a device, and what the two predict.
//!
//! Enters: an architecture, its tensor inventory, a batch and a context; bandwidths and peaks. Leaves: a ledger, a
//! predicted time with its bound, and fractions of the ceilings. Pure: it sees plain data and never a device.

pub mod ceilings;

pub use ceilings::{Ceilings, DeviceSpec, Spread};
