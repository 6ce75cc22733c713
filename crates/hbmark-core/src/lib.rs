//! The plain data of hbmark, and the arithmetic on it.
//!
//! Nothing here starts a thread, reads a clock or knows a device. Everything above (engines, protocol, traffic, reports) speaks in these
//! types, and each of them can be used without any of that: a fuzz target or a notebook reads a result with this crate alone.
//!
//! | module | what it holds |
//! |---|---|
//! | [`units`] | quantities with their unit in the type |
//! | [`stats`] | samples → summary |
//! | [`input`] | files and JSON of strangers, bounded before they are believed |
//! | [`model`] | dimensions as data, tensor inventories, the headers of safetensors and GGUF files |
//! | [`result`] | every saved file as plain data: read, validated |
//! | [`ledger`] | bytes and FLOPs of a step, floors, predictions |

pub mod input;
pub mod ledger;
pub mod model;
pub mod result;
pub mod stats;
pub mod units;

mod null_as_default;
