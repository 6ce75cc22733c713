//! Why a model could not be opened.
//!
//! Every variant carries the path and the offending values.

use std::path::PathBuf;

/// Why a model could not be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The path does not exist.
    #[error(
        "{path} does not exist; --model takes a name (`hbmark models`), a folder, a hub id or a GGUF file"
    )]
    NoSuchPath { path: PathBuf },

    /// A model has no such drafting layer.
    #[error("there is no `+{kind}` layer of this model: {why}")]
    NoDraftLayer { kind: &'static str, why: &'static str },

    /// A file that is neither a config nor a GGUF file.
    #[error(
        "{path} is not a model: --model takes a name (`hbmark models`), a folder or its config.json, a hub id or a .gguf file"
    )]
    NotAModel { path: PathBuf },

    /// The operating system refused to open or read a file.
    #[error("cannot read {path}: {source}")]
    Read { path: PathBuf, source: std::io::Error },

    /// The path is a folder, a pipe or a device.
    #[error("{path} is not a regular file; give the path of a config.json")]
    NotAFile { path: PathBuf },

    /// Too long for a config: probably another file.
    #[error("{path} holds {found} bytes, and a config is at most {limit}; is it really a config.json?")]
    ConfigTooLarge { path: PathBuf, found: u64, limit: u64 },

    /// The text is not JSON.
    #[error("{path}:{line}:{column}: invalid JSON: {reason}")]
    ConfigSyntax { path: PathBuf, line: usize, column: usize, reason: String },

    /// A key that has no safe default is absent or null.
    #[error("{path}: `{key}` is missing; want {wanted}")]
    MissingKey { path: PathBuf, key: String, wanted: String },

    /// A value of the wrong type, out of range, or at odds with another key.
    #[error("{path}: `{key}` is {found}; want {wanted}")]
    BadValue { path: PathBuf, key: String, found: String, wanted: String },

    /// A value that is legal but asks for a computation hbmark does not have, and that would change the result.
    #[error("{path}: `{key}` = {found} is not supported; supported: {supported}")]
    UnsupportedValue { path: PathBuf, key: String, found: String, supported: String },

    /// The model family is not supported.
    #[error("{path}: architecture {found} is not supported; supported: {supported}")]
    UnsupportedArchitecture { path: PathBuf, found: String, supported: String },

    /// Each dimension is in range, their product is not.
    #[error("{path}: the dimensions multiply to more than {limit} parameters; one of them must be wrong")]
    TooManyParameters { path: PathBuf, limit: u64 },

    /// Each dimension is in range, and the layers times the experts are not.
    #[error("{path}: layers and experts make more than {limit} tensors; one of them must be wrong")]
    TooManyTensors { path: PathBuf, limit: usize },

    /// No shipped shape has this name.
    #[error("unknown model `{name}`{}", did_you_mean(.suggestions))]
    UnknownModel { name: String, suggestions: Vec<String> },
}

fn did_you_mean(suggestions: &[String]) -> String {
    if suggestions.is_empty() {
        "; give a shipped name (`hbmark models` lists them), a folder with a config.json, or a GGUF file"
            .to_owned()
    } else {
        format!("; did you mean {}?", suggestions.join(", "))
    }
}
