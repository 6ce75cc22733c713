//! Why a model could not be opened, or its weights loaded.

use std::path::PathBuf;

use super::hub::HubError;
use super::loading::WeightsError;
use super::tokenizer::TokenizerError;
use hbmark_core::model::{Dtype, ModelError};

/// Why a model could not be opened, or its weights loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// Its dimensions cannot be read or are not plausible.
    #[error(transparent)]
    Model(#[from] ModelError),

    /// The model could not be fetched from the hub.
    #[error(transparent)]
    Hub(#[from] HubError),

    /// The tokenizer is broken or belongs to another model.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),

    /// A prompt as text was given to a model without a tokenizer.
    #[error("{name} has no tokenizer; give the prompt as --tokens 1,2,3")]
    NoTokenizer { name: String },

    /// GGUF blocks are run as they are.
    #[error("{path} cannot be run as {asked}: a GGUF file runs in its own block formats; leave --dtype out")]
    GgufDtype { path: PathBuf, asked: Dtype },

    /// Only a GGUF file has block formats of its own.
    #[error(
        "{name} is no GGUF file, and `gguf` is such a file's own mixture of formats; give the file as --model, or choose q8_0 or q4_0"
    )]
    NotGguf { name: String },

    /// The weights cannot be loaded.
    #[error(transparent)]
    Weights(#[from] WeightsError),
}
