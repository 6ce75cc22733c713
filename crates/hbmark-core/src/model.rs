//! Models as data: their dimensions, their tensors, and the headers of files that hold them.
//!
//! Enters: a config, a GGUF header or the name of a shipped shape. Leaves: a validated [`Architecture`] and an [`Inventory`].

pub mod adapter;
pub mod architecture;
mod bounds;
pub mod config;
pub mod draft;
mod error;
pub mod format;
pub mod gguf;
pub mod inventory;
pub mod layer;
mod patterns;
pub mod presets;
pub mod quantization;
pub mod safetensors;
pub mod stored;
pub mod tensors;
#[doc(hidden)]
pub mod test_shapes;

// One file per family: how its config reads.
mod deepseek_v3;
mod gemma;
mod glm4;
mod glm4_moe;
mod gpt_oss;
mod granite;
mod llama;
mod llama4;
mod mimo_v2;
mod minimax_m2;
mod mistral;
mod mixtral;
mod nemotron_h;
mod olmo2;
mod phi3;
mod qwen2;
mod qwen2_moe;
mod qwen3;
mod qwen3_5;
mod qwen3_moe;
mod smollm3;

pub use adapter::Target;
pub use architecture::{
    Architecture, Biases, Dtype, Experts, Family, LatentAttention, Multipliers, Rope, RopeScaling, YarnShape,
};
pub use bounds::OutOfBounds;
pub use config::{parse_config, read_config};
pub use draft::DraftLayer;
pub use error::ModelError;
pub use format::{Format, Layout, NVFP4_GROUP, Scales};
pub use inventory::{Inventory, Role, TensorInfo};
pub use layer::{
    Activation, Attention, DeltaNet, Dense, FeedForward, Indexer, Layer, Mamba, Mixer, Mixture, Norms,
    QkNorm, Reach, Rotary, Routing, Stack,
};
pub use quantization::{FormatRule, ModuleStorage, Quantization};
pub use tensors::{MixtureNames, NormNames, model_hash, sinks_name};

#[cfg(test)]
mod by_hand_tests;
#[cfg(test)]
mod families_tests;
