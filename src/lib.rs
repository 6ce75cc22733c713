//! hbmark times LLM prefill and decode steps in-process and holds them against the memory roofline.
//!
//! The modules, lowest first; each uses those above it in this list and the crates below, never the other way round
//! (`ARCHITECTURE.md` has the table, `tests/it/architecture.rs` holds it):
//!
//! | module | what it holds |
//! |---|---|
//! | [`machine`] | the machine: NVML, telemetry, environment, doctor, memory, files |
//! | [`weights`] | weights from files or a seed, tokenizers, adapters |
//! | [`engine`] | the engine interface: `Session`, `StepBatch`; candle's own path, our kernels, a scripted device |
//! | [`worker`] | child processes, their messages, supervision, journal |
//! | [`measure`] | the measurement protocol, ceilings, the quality gate |
//! | [`serve`] | a session under traffic: points, sweeps, searches |
//! | [`run`] | what a command does: benchmark, predict, compare, verify, criterion's benches |
//! | [`cli`] | clap types, one file per subcommand |

pub mod cli;
pub mod engine;
pub mod machine;
pub mod measure;
pub mod run;
pub mod serve;
pub mod weights;
pub mod worker;
