//! Models: their dimensions, their tensors, and where both come from.
//!
//! Enters: a name, a Hugging Face folder, a hub id or a GGUF file. Leaves: a validated [`Architecture`], an [`Inventory`]
//! and, on request, the tensors on a device. It knows nothing of steps, timing or reports.

pub mod adapter;
pub mod architecture;
mod bounds;
pub mod config;
mod error;
pub mod gguf;
pub mod hub;
pub mod inventory;
mod open;
pub mod presets;
pub mod safetensors;
pub mod stored;
mod stream;
pub mod synthetic;
pub mod tensors;
#[cfg(test)]
pub(crate) mod test_shapes;
pub mod tokenizer;

// One file per family: how its config reads.
mod deepseek_v3;
mod llama;
mod mistral;
mod mixtral;
mod qwen2;
mod qwen3;
mod qwen3_moe;
pub mod weights;

pub use adapter::{Adapter, AdapterError, Target};
pub use architecture::{
    Architecture, Biases, Dtype, Experts, Family, LatentAttention, Quantization, Rope, RopeScaling,
};
pub use bounds::OutOfBounds;
pub use config::{parse_config, read_config};
pub use error::ModelError;
pub use inventory::{Inventory, Role, TensorInfo};
pub use open::{OpenModel, Weights, open, open_shape};
pub use stored::{Packing, StoredData, StoredMatrix, StoredTensor};
pub use tensors::model_hash;
pub use weights::{LoadedWeights, WeightsError};
