//! Weights: where they come from, and their bytes.
//!
//! Enters: a name, a Hugging Face folder, a hub id or a GGUF file. Leaves: an [`OpenModel`] with validated dimensions and, on request, its
//! tensors on a device.

pub mod adapter;
mod error;
pub(crate) mod gguf;
pub(crate) mod hub;
pub(crate) mod loading;
mod open;
mod quantised;
pub(crate) mod safetensors;
pub mod stored_matrix;
mod stream;
pub(crate) mod synthetic;
pub mod tokenizer;

pub use adapter::{Adapter, AdapterError};
pub use error::OpenError;
pub use loading::WeightsError;
pub use open::{OpenModel, Weights, open, open_shape};
pub(crate) use quantised::streamed_as;
pub use stored_matrix::{Packing, StoredData, StoredMatrix, StoredTensor};
pub(crate) use stream::name_of_weights;
