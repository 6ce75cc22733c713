//! The inner loops of the native engine on a CPU, and those that measure its memory.
//!
//! Enters: pointers to packed weights, rows and tiles of a cache, and an [`InstructionSet`](simd::InstructionSet) that the processor has. Leaves:
//! sums, weights, bytes moved. Each kernel is written once over [`Simd`](simd::Simd) and compiled for every set. Threads, layouts of whole
//! matrices and what is done with the sums are the engine's.
//!
//! They are a crate of their own because they are half of the engine's code and rarely change: no edit of an engine compiles them again, and
//! they are optimised in every profile.
#![expect(
    clippy::inline_always,
    reason = "a kernel gets its instruction set from the function it is inlined into; left to itself it would have none"
)]

pub mod attention;
pub mod e2m1;
pub mod e4m3;
pub mod e8m0;
pub mod element;
pub mod elementwise;
pub mod memory;
pub mod rows;
pub mod simd;
pub mod tiles;
