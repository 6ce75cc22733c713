//! GGUF files up to their tensor data: the header, and the dimensions its metadata say.

mod dimensions;
mod header;
mod shape;

pub use dimensions::{architecture, expected_tensors};
pub use header::{BlockType, GgufError, Header, TensorEntry, Value, block_type, read};
pub use shape::shape;
