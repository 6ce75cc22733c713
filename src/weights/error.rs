//! Why a model could not be opened, or its weights loaded.

use std::path::PathBuf;

use super::hub::HubError;
use super::loading::WeightsError;
use super::tokenizer::TokenizerError;
use hbmark_core::model::stored::StoredError;
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

    /// A shape has no revisions.
    #[error(
        "{name} is one of the shapes that come with hbmark and has random weights, so there is no revision {revision} of it; leave --revision out, or give the folder of a checkpoint"
    )]
    RevisionOfShape { name: String, revision: String },

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
        "{name} is not a GGUF file, and `gguf` is such a file's own mixture of formats; give the file as --model, or choose q8_0, q4_0 or q4_k"
    )]
    NotGguf { name: String },

    /// Quantised weights cannot be had in another storage.
    #[error(
        "{name} is stored as {stored}{how}, and --dtype {asked} asks for another storage; leave --dtype out, or give the model that is \
         stored as {asked}"
    )]
    StoredAs { name: String, stored: Dtype, how: String, asked: Dtype },

    /// The byte ledger has no sizes for a quantisation.
    #[error(
        "{path} holds {how}, whose bytes this program cannot count; it can count fp8, fp4 and integers of 4 and 8 bits"
    )]
    Unpriced { path: PathBuf, how: String },

    /// config.json names a quantisation that the tensors do not have.
    #[error(
        "{path}: config.json says {config}, and its tensors are {tensors}; correct the config, or take `quantization_config` out"
    )]
    StorageDisagrees { path: PathBuf, config: String, tensors: Dtype },

    /// The tensors of a folder are not those of its config.
    #[error("{path}: {problem}")]
    Tensors { path: PathBuf, problem: StoredError },

    /// No engine reads these quantised safetensors.
    #[error(
        "{path} holds weights quantised by {how}, which no engine of this program loads ({what}); give the unquantised model, one in fp8, \
         AWQ, symmetric GPTQ in order, or compressed-tensors' integers, or a GGUF file (`hbmark predict` and `serve --virtual` take it)"
    )]
    Quantised { path: PathBuf, how: String, what: String },

    /// The tensors of quantised layers are others than their writer's.
    #[error(
        "{error}; or its layers ({how}) are stored in another layout of that writer, which no engine of this program loads"
    )]
    OtherLayout { how: String, error: Box<WeightsError> },

    /// The hub gave no model of a name that is like those of shipped shapes.
    #[error("{error}; shapes of like names come with hbmark: {}", shapes.join(", "))]
    LikeShapes { error: Box<WeightsError>, shapes: Vec<String> },

    /// The weights cannot be loaded.
    #[error(transparent)]
    Weights(#[from] WeightsError),
}
