//! The plain data of hbmark, and the arithmetic on it.
//!
//! Nothing here starts a thread, reads a clock or uses a device. Engines, protocol, traffic and reports share these types, and a fuzz
//! target or a notebook can read a result with this crate alone.
//!
//! | module | what it holds |
//! |---|---|
//! | [`units`] | quantities with their unit in the type |
//! | [`stats`] | samples → summary |
//! | [`input`] | untrusted files and JSON, read within bounds |
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
