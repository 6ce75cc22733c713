//! Tests of the built program and of the source tree, in one binary. Those that need a process of their own (an allocator that counts, a
//! memory limit, hours) are files beside this folder.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on panics")]

mod architecture;
mod cli;
mod compare;
mod documented_commands;
mod gguf_mixtures;
#[cfg(unix)]
mod gpu_day;
mod isolation;
mod k_quants;
mod kv_cache;
mod limits;
mod live_server;
mod logits;
mod models;
mod native;
mod resume;
mod runs;
mod selftest;
mod serve;
mod serve_isolation;
mod serve_resume;
mod tensor_parallel;
mod unsafe_inventory;
