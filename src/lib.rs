//! hbmark times LLM prefill and decode steps in-process and holds them against the memory roofline.
//!
//! Data flows one way:
//!
//! ```text
//! RunConfig → Plan (ordered cells) → Session (loads weights) → measured samples → Summary
//!           → Ledger (bytes, FLOPs) × Ceilings → Verdict → Report → terminal | json | csv | markdown
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | [`units`] | quantities with their unit in the type |
//! | [`model`] | dimensions as data, tensor inventories, weights from files or a seed, tokenizers |
//! | [`engine`] | the waist: `Session`, `StepBatch`, `Capabilities`; candle's own path and a scripted device |
//! | [`measure`] | ceilings, telemetry, the measurement protocol |
//! | [`stats`] | samples → summary. Pure |
//! | [`roofline`] | bytes and FLOPs of a step, predictions, verdicts. Pure |
//! | [`report`] | the result as plain data and its output formats |
//! | [`config`], [`plan`] | what to run, and in which order |
//! | [`cli`] | clap types, one file per subcommand |

pub mod cli;
pub mod config;
pub mod engine;
pub mod measure;
pub mod model;
pub mod plan;
pub mod report;
pub mod roofline;
pub mod stats;
pub mod units;
