//! Models as data: their dimensions, their tensors, and the headers of files that hold them.
//!
//! Enters: a config, a GGUF header or the name of a shipped shape. Leaves: a validated [`Architecture`] and an [`Inventory`].

pub mod adapter;
pub mod architecture;
mod bounds;
pub mod config;
mod error;
pub mod gguf;
pub mod inventory;
pub mod presets;
pub mod safetensors;
pub mod tensors;
#[doc(hidden)]
pub mod test_shapes;

// One file per family: how its config reads.
mod deepseek_v3;
mod llama;
mod mistral;
mod mixtral;
mod qwen2;
mod qwen3;
mod qwen3_moe;

pub use adapter::Target;
pub use architecture::{
    Architecture, Biases, Dtype, Experts, Family, LatentAttention, Quantization, Rope, RopeScaling,
};
pub use bounds::OutOfBounds;
pub use config::{parse_config, read_config};
pub use error::ModelError;
pub use inventory::{Inventory, Role, TensorInfo};
pub use tensors::model_hash;
