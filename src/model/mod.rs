//! Models: their dimensions, their tensors, and where both come from.
//!
//! Enters: a name, a Hugging Face folder, a hub id or a GGUF file. Leaves: a validated [`Architecture`], an [`Inventory`]
//! and, on request, the tensors on a device. It knows nothing of steps, timing or reports.

pub mod architecture;
pub mod gguf;
pub mod hub;
pub mod inventory;
mod open;
pub mod presets;
pub mod safetensors;
pub mod synthetic;
pub mod tokenizer;
pub mod weights;

pub use architecture::{
    Architecture, Biases, Dtype, Experts, Family, LatentAttention, Quantization, Rope, RopeScaling,
};
pub use config::{parse_config, read_config};
pub use error::ModelError;
pub use inventory::{Inventory, Role, TensorInfo};
pub use tokenizer::{Tokenizer, TokenizerError};
pub use weights::{LoadedWeights, WeightsError};

/// Why a model could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error(transparent)]
    Weights(#[from] WeightsError),
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
}
