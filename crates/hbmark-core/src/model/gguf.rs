//! GGUF files up to their tensor data: the header, and the dimensions its metadata say.

mod dimensions;
mod header;
mod names;
mod shape;
mod split;

pub use header::{BlockType, GgufError, Header, TensorEntry, Value, block_type, read};
pub use names::{FileTensor, expected_tensors, file_shape, file_tensor};
pub use shape::{architecture, shape};
