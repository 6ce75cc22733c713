//! From what the user typed to a model that can be loaded.
//!
//! Enters: a shipped name, a folder, a hub id or a GGUF file. Leaves: an [`OpenModel`]: validated dimensions, and weights on demand.
//! Config and tensor inventory are checked here, before any engine sees them.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};

use super::gguf::GgufModel;
use super::hub::HubConfig;
use super::loading::WeightsError;
use super::safetensors::Checkpoint;
use super::stored_matrix::StoredTensor;
use super::tokenizer::Tokenizer;
use super::{stream, synthetic};
use crate::machine::device::DeviceChoice;
use crate::weights::OpenError;
use hbmark_core::model::{Architecture, Dtype, Inventory, ModelError, model_hash, presets, read_config};
use hbmark_core::result::ModelSummary;
use hbmark_core::units::Bytes;

/// A model whose dimensions are known and whose weights can be loaded.
#[derive(Debug, Clone)]
pub struct OpenModel {
    pub name: String,
    pub architecture: Architecture,
    source: Source,
}

#[derive(Debug, Clone)]
enum Source {
    /// Random weights from a seed, for a shape without a checkpoint.
    Synthetic {
        seed: u64,
    },
    /// A folder with config.json and safetensors; `stored` is the dtype of most of its bytes, where they were
    /// looked at.
    Folder {
        path: PathBuf,
        hub_id: Option<String>,
        stored: Option<Dtype>,
    },
    Gguf {
        path: PathBuf,
        inventory: Inventory,
    },
}

/// Weights as an engine takes them.
#[derive(Debug)]
pub enum Weights {
    Tensors {
        tensors: HashMap<String, Tensor>,
        inventory: Inventory,
    },
    /// A validated GGUF file, for candle's own reader.
    Gguf {
        content: Box<candle_core::quantized::gguf_file::Content>,
        file: File,
        inventory: Inventory,
    },
}

/// Opens a model by name, folder, hub id or GGUF file. A path that exists wins over a name, a name over a hub id.
///
/// # Errors
/// When nothing of that name exists, or what exists is not a model hbmark can trust.
pub fn open(spec: &str, revision: Option<&str>, seed: u64) -> Result<OpenModel, OpenError> {
    let fetch = |hub: &HubConfig| hub.resolve(spec, revision, true);
    open_with(open_folder, fetch, spec, seed)
}

/// Opens a model of which no weights will be asked: as [`open`], but a folder needs no more than its config.json, and loading is an error
/// where that is all there is.
///
/// # Errors
/// As [`open`], but for weights and tokenizers that are missing or broken.
pub fn open_shape(spec: &str, revision: Option<&str>) -> Result<OpenModel, OpenError> {
    open_with(open_config, |hub| hub.resolve_config(spec, revision), spec, 0)
}

/// Finds what a spec names; a folder, which comes from the hub or does not, is opened as the caller wants it.
fn open_with(
    open_folder: fn(&Path, Option<String>) -> Result<OpenModel, OpenError>,
    fetch: impl FnOnce(&HubConfig) -> Result<PathBuf, WeightsError>,
    spec: &str,
    seed: u64,
) -> Result<OpenModel, OpenError> {
    let path = Path::new(spec);
    if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) {
        return open_gguf(path);
    }
    if path.is_dir() {
        return open_folder(path, None);
    }
    if let Some(preset) = presets::find(spec) {
        return Ok(OpenModel::synthetic(preset.name, preset.architecture, seed));
    }
    let looks_like_a_path = spec.starts_with(['.', '/', '~']) || spec.matches('/').count() > 1;
    if looks_like_a_path {
        return Err(ModelError::NoSuchPath { path: path.to_path_buf() }.into());
    }
    if !spec.contains('/') {
        return Err(presets::unknown(spec).into());
    }
    let folder = fetch(&HubConfig::from_env()?)?;
    open_folder(&folder, Some(spec.to_owned()))
}

fn open_folder(path: &Path, hub_id: Option<String>) -> Result<OpenModel, OpenError> {
    let mut model = open_config(path, hub_id)?;
    // Headers only: a broken checkpoint is refused before anything else happens.
    let expected = model.architecture.inventory(Dtype::Bf16);
    let files = Checkpoint::open(path, &expected)?;
    if let Source::Folder { stored, .. } = &mut model.source {
        *stored = files.stored_dtype();
    }
    if path.join("tokenizer.json").exists() {
        // A tokenizer of another vocabulary would send tokens the model does not have.
        model.tokenizer()?;
    }
    Ok(model)
}

fn open_config(path: &Path, hub_id: Option<String>) -> Result<OpenModel, OpenError> {
    let architecture = read_config(&path.join("config.json"))?;
    let name = hub_id.clone().unwrap_or_else(|| {
        path.canonicalize()
            .ok()
            .and_then(|p| p.file_name().map(|n| n.to_string_lossy().into_owned()))
            .unwrap_or_else(|| path.display().to_string())
    });
    Ok(OpenModel {
        name,
        source: Source::Folder { path: path.to_path_buf(), hub_id, stored: None },
        architecture,
    })
}

fn open_gguf(path: &Path) -> Result<OpenModel, OpenError> {
    let file = GgufModel::open(path)?;
    if file.has_rope_freqs {
        return Err(OpenError::Model(ModelError::UnsupportedValue {
            path: path.to_path_buf(),
            key: "rope_freqs.weight".into(),
            found: "a table of scaled rotary frequencies".into(),
            supported: "GGUF files without one; candle ignores the table, and logits would be wrong".into(),
        }));
    }
    let name =
        path.file_stem().map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into_owned());
    Ok(OpenModel {
        name,
        architecture: file.architecture.clone(),
        source: Source::Gguf { path: path.to_path_buf(), inventory: file.inventory.clone() },
    })
}

impl OpenModel {
    /// A model of some dimensions with random weights.
    #[must_use]
    pub fn synthetic(name: impl Into<String>, architecture: Architecture, seed: u64) -> Self {
        Self { name: name.into(), architecture, source: Source::Synthetic { seed } }
    }

    /// Where the weights come from, for results.
    #[must_use]
    pub fn source_label(&self) -> String {
        match &self.source {
            Source::Synthetic { seed } => format!("synthetic, seed {seed}"),
            Source::Folder { hub_id: Some(id), .. } => format!("hub {id}"),
            Source::Folder { path, .. } | Source::Gguf { path, .. } => path.display().to_string(),
        }
    }

    /// The model as results state it, stored in a dtype.
    #[must_use]
    pub fn summary(&self, dtype: Dtype) -> ModelSummary {
        let inventory = self.inventory(dtype);
        ModelSummary {
            name: self.name.clone(),
            source: self.source_label(),
            hash: model_hash(&self.architecture, &inventory),
            parameters: inventory.parameters(),
            weight_bytes: inventory.total_bytes(),
            architecture: self.architecture.clone(),
        }
    }

    /// Whether the weights are in a GGUF file, whose block formats are its own.
    #[must_use]
    pub fn is_gguf(&self) -> bool {
        matches!(self.source, Source::Gguf { .. })
    }

    /// The dtype that is sensible where none is asked for: a GGUF file's own; f32 on a CPU, whose bf16 products candle runs some forty
    /// times slower; on a GPU what the checkpoint stores, or bf16.
    #[must_use]
    pub fn default_dtype(&self, device: DeviceChoice) -> Dtype {
        match (&self.source, device) {
            (Source::Gguf { .. }, _) => Dtype::Gguf,
            (_, DeviceChoice::Cpu) => Dtype::F32,
            (Source::Folder { stored: Some(stored), .. }, _) => *stored,
            _ => Dtype::Bf16,
        }
    }

    /// The storage of the KV cache that goes with a dtype in the stock engine: candle's quantised models keep f32.
    #[must_use]
    pub fn kv_dtype(&self, dtype: Dtype) -> Dtype {
        match dtype {
            Dtype::Gguf => Dtype::F32,
            other => other.of_cache(),
        }
    }

    /// The tensors as they will be loaded in a dtype.
    #[must_use]
    pub fn inventory(&self, dtype: Dtype) -> Inventory {
        match &self.source {
            Source::Gguf { inventory, .. } if dtype == Dtype::Gguf => inventory.clone(),
            _ => self.architecture.inventory(dtype),
        }
    }

    /// Loads the weights onto a device, and calls `loaded` with the bytes of each tensor. candle's own reader of GGUF files tells
    /// nothing.
    ///
    /// # Errors
    /// When files are missing, broken or changed meanwhile, or cannot give the dtype.
    pub fn load(
        &self,
        dtype: Dtype,
        device: &Device,
        loaded: &mut dyn FnMut(Bytes),
    ) -> Result<Weights, OpenError> {
        match &self.source {
            Source::Synthetic { seed } => {
                let inventory = self.architecture.inventory(dtype);
                let tensors = synthetic::generate(&inventory, dtype, *seed, device, loaded)?;
                Ok(Weights::Tensors { tensors, inventory })
            }
            Source::Folder { path, .. } => {
                let expected = self.architecture.inventory(dtype);
                let weights = Checkpoint::open(path, &expected)?.load(dtype, device, loaded)?;
                Ok(Weights::Tensors { tensors: weights.tensors, inventory: weights.loaded })
            }
            Source::Gguf { path, .. } => {
                if dtype != Dtype::Gguf {
                    return Err(OpenError::GgufDtype { path: path.clone(), asked: dtype });
                }
                let model = GgufModel::open(path)?;
                let inventory = model.inventory.clone();
                let (content, file) = model.into_candle()?;
                Ok(Weights::Gguf { content: Box::new(content), file, inventory })
            }
        }
    }

    /// Hands over every matrix and vector that a step reads, one at a time and by its Hugging Face name, in the storage that
    /// `dtype` asks for. Beyond what the sink keeps, no more than one tensor and its packed form are held.
    ///
    /// Values are those that [`load`](Self::load) gives on the host. Quantised formats are packed from bf16 where weights come
    /// from a seed, and from the values as stored where they come from a folder. A GGUF file has its own formats:
    /// `q8_0`, `q4_0` and plain floats are kept to the bit, all other blocks are dequantised and packed as `q8_0`.
    ///
    /// The returned inventory describes the tensors as they were handed over; norms and biases in it are f32.
    ///
    /// # Errors
    /// When files are missing, broken or changed meanwhile, when they cannot give the dtype, or when the sink fails.
    pub fn stream(
        &self,
        dtype: Dtype,
        sink: &mut dyn FnMut(&str, StoredTensor) -> Result<(), OpenError>,
    ) -> Result<Inventory, OpenError> {
        match &self.source {
            Source::Synthetic { seed } => stream::from_seed(&self.architecture, dtype, *seed, sink),
            Source::Folder { path, .. } => stream::from_folder(&self.architecture, dtype, path, sink),
            Source::Gguf { path, .. } if dtype == Dtype::Gguf => stream::from_gguf(path, sink),
            Source::Gguf { path, .. } => Err(OpenError::GgufDtype { path: path.clone(), asked: dtype }),
        }
    }

    /// The tokenizer beside the weights, checked against the vocabulary.
    ///
    /// # Errors
    /// When there is none, or it has tokens that the model does not.
    pub fn tokenizer(&self) -> Result<Tokenizer, OpenError> {
        let Source::Folder { path, .. } = &self.source else {
            return Err(OpenError::NoTokenizer { name: self.name.clone() });
        };
        let tokenizer = Tokenizer::open(path)?;
        tokenizer.check_vocab(self.architecture.vocab_size)?;
        Ok(tokenizer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_with_its_config_alone_is_a_shape_and_no_model_to_load() {
        let folder = tempfile::tempdir().unwrap();
        let config = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/llama-bf16/config.json");
        std::fs::copy(config, folder.path().join("config.json")).unwrap();
        let spec = folder.path().to_str().unwrap();
        let shape = open_shape(spec, None).unwrap();
        assert!(shape.inventory(Dtype::Bf16).total_bytes() > Bytes(0));
        let refused = open(spec, None, 0).unwrap_err().to_string();
        assert!(refused.starts_with("no weights in"), "{refused}");
        let late = shape.load(Dtype::F32, &Device::Cpu, &mut |_| {}).unwrap_err().to_string();
        assert!(late.starts_with("no weights in"), "{late}");
    }

    #[test]
    fn what_is_beside_the_config_does_not_matter_to_a_shape() {
        let whole = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/llama-bf16");
        let (shape, model) = (open_shape(whole, None).unwrap(), open(whole, None, 0).unwrap());
        assert_eq!((&shape.architecture, &shape.name), (&model.architecture, &model.name));
        assert_eq!(shape.inventory(Dtype::Bf16), model.inventory(Dtype::Bf16));
        assert!(matches!(
            open_shape("no-such-model", None),
            Err(OpenError::Model(ModelError::UnknownModel { .. }))
        ));
    }
}
