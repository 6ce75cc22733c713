//! From what the user typed to a model that can be loaded.
//!
//! Enters: a shipped name, a folder, a hub id or a GGUF file. Leaves: an [`OpenModel`]: validated dimensions, and weights on demand.
//! Config and tensor inventory are checked here, before any engine sees them.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use candle_core::{Device, Tensor};
use sha2::{Digest, Sha256};

use super::gguf::GgufModel;
use super::hub::HubConfig;
use super::loading::{WeightsError, check_blocks};
use super::safetensors::{self, Checkpoint};
use super::stored_matrix::StoredTensor;
use super::tokenizer::Tokenizer;
use super::{quantised, stream, synthetic};
use crate::machine::device::DeviceChoice;
use crate::weights::OpenError;
use hbmark_core::model::{
    Architecture, DraftLayer, Dtype, Inventory, ModelError, Quantization, model_hash, presets, read_config,
};
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
    /// Random weights from a seed, for a shape without a checkpoint; `hub_id` where it was asked for by that.
    Synthetic { seed: u64, hub_id: Option<String> },
    /// A folder with config.json and safetensors; `stored` is what its files say of most of its bytes, and `on_disk` every tensor of the
    /// headers, where they were read for a shape.
    Folder {
        path: PathBuf,
        hub_id: Option<String>,
        stored: Option<Dtype>,
        on_disk: Option<Inventory>,
        /// Why the headers of its tensors could not be read, where only a shape is asked.
        unread: Option<String>,
    },
    Gguf {
        /// Of several files the first.
        path: PathBuf,
        /// All files.
        files: Vec<PathBuf>,
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
    if let Some(draft) = draft_of(spec, revision, seed) {
        return draft;
    }
    let fetch = |hub: &HubConfig| hub.resolve(spec, revision, true);
    let mut model = open_with((open_folder, open_gguf), fetch, spec, revision, seed)?;
    if let Source::Synthetic { hub_id, .. } = &mut model.source {
        *hub_id = spec.contains('/').then(|| spec.to_owned());
    }
    Ok(model)
}

/// Opens a model of which no weights will be asked: as [`open`], but a folder needs no more than its config.json, and loading is an error
/// where that is all there is.
///
/// # Errors
/// As [`open`], but for weights and tokenizers that are missing or broken.
pub fn open_shape(spec: &str, revision: Option<&str>) -> Result<OpenModel, OpenError> {
    if let Some(draft) = draft_of(spec, revision, 0) {
        return draft;
    }
    let fetch = |hub: &HubConfig| hub.resolve_config(spec, revision);
    open_with((open_shape_folder, open_shape_gguf), fetch, spec, revision, 0)
}

/// The layer that drafts for a model, `MODEL+mtp` or `MODEL+eagle`, with random weights: of the model no more than its dimensions is read.
fn draft_of(spec: &str, revision: Option<&str>, seed: u64) -> Option<Result<OpenModel, OpenError>> {
    let (model, kind) = DraftLayer::split(spec).filter(|_| !Path::new(spec).exists())?;
    Some(open_shape(model, revision).and_then(|model| {
        let name = format!("{}+{}", model.name, kind.name());
        Ok(OpenModel::synthetic(name, model.architecture.draft(kind)?, seed))
    }))
}

/// How a caller wants a folder and a GGUF file opened.
type Openers =
    (fn(&Path, Option<String>) -> Result<OpenModel, OpenError>, fn(&Path) -> Result<OpenModel, OpenError>);

/// Finds what a spec names; a folder, which comes from the hub or does not, is opened as the caller wants it.
fn open_with(
    (open_folder, open_gguf): Openers,
    fetch: impl FnOnce(&HubConfig) -> Result<PathBuf, WeightsError>,
    spec: &str,
    revision: Option<&str>,
    seed: u64,
) -> Result<OpenModel, OpenError> {
    let path = Path::new(spec);
    if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) {
        return open_gguf(path);
    }
    if path.is_dir() {
        return open_folder(path, None);
    }
    // The config is in the folder that is meant.
    if path.file_name().is_some_and(|name| name == "config.json") && path.is_file() {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        return open_folder(folder.unwrap_or(Path::new(".")), None);
    }
    if path.is_file() {
        return Err(ModelError::NotAModel { path: path.to_path_buf() }.into());
    }
    if let Some(preset) = presets::find(spec) {
        if let Some(revision) = revision {
            let (name, revision) = (preset.name.to_owned(), revision.to_owned());
            return Err(OpenError::RevisionOfShape { name, revision });
        }
        return Ok(OpenModel::synthetic(preset.name, preset.architecture, seed));
    }
    let looks_like_a_path = spec.starts_with(['.', '/', '~']) || spec.matches('/').count() > 1;
    if looks_like_a_path {
        return Err(ModelError::NoSuchPath { path: path.to_path_buf() }.into());
    }
    if !spec.contains('/') {
        return Err(presets::unknown(spec).into());
    }
    let folder = fetch(&HubConfig::from_env()?).map_err(|error| match presets::unknown(spec) {
        ModelError::UnknownModel { suggestions: shapes, .. } if !shapes.is_empty() => {
            OpenError::LikeShapes { error: Box::new(error), shapes }
        }
        _ => error.into(),
    })?;
    open_folder(&folder, Some(spec.to_owned()))
}

fn open_folder(path: &Path, hub_id: Option<String>) -> Result<OpenModel, OpenError> {
    let mut model = open_config(path, hub_id)?;
    let quantised = match &model.architecture.quantization {
        None => None,
        Some(own) => {
            let refused =
                |what| OpenError::Quantised { path: path.to_path_buf(), how: own.to_string(), what };
            Some(quantised::streamed_as(&model.architecture, own).map_err(refused)?)
        }
    };
    // Headers only: a broken checkpoint is refused before anything else happens.
    let expected = model.architecture.inventory(quantised.unwrap_or(Dtype::Bf16));
    let files = Checkpoint::open(path, &expected).map_err(|error| {
        match (&model.architecture.quantization, error) {
            (Some(own), error @ (WeightsError::Missing { .. } | WeightsError::Unknown { .. })) => {
                OpenError::OtherLayout { how: own.to_string(), error: Box::new(error) }
            }
            (_, error) => error.into(),
        }
    })?;
    if let Source::Folder { stored, .. } = &mut model.source {
        *stored = quantised.or_else(|| files.stored_dtype());
    }
    if path.join("tokenizer.json").exists() {
        // A tokenizer of another vocabulary would send tokens the model does not have.
        model.tokenizer()?;
    }
    Ok(model)
}

/// A folder of which only dimensions and storage are asked.
fn open_shape_folder(path: &Path, hub_id: Option<String>) -> Result<OpenModel, OpenError> {
    let mut model = open_config(path, hub_id)?;
    let (tensors, problem) = match safetensors::stored_tensors(path) {
        Ok(tensors) => (tensors, None),
        Err(problem) => (None, Some(problem.to_string())),
    };
    let told = stored_as(path, &model.architecture, tensors.as_deref())?;
    let listed = tensors.map(|tensors| model.architecture.inventory_of(&tensors)).transpose();
    let listed = listed.map_err(|problem| OpenError::Tensors { path: path.to_path_buf(), problem })?;
    if let Source::Folder { stored, on_disk, unread, .. } = &mut model.source {
        (*stored, *on_disk, *unread) = (told, listed, problem);
    }
    Ok(model)
}

/// How the weights of a folder are stored, by its config and by the headers of its tensors, which must not contradict each other.
fn stored_as(
    path: &Path,
    architecture: &Architecture,
    tensors: Option<&[safetensors::StoredTensor]>,
) -> Result<Option<Dtype>, OpenError> {
    let path = || path.to_path_buf();
    let most = tensors.and_then(safetensors::most_bytes);
    let float = most.and_then(safetensors::float_of);
    match (&architecture.quantization, most) {
        (Some(how), _) => {
            let how_stored =
                how.dtype().ok_or_else(|| OpenError::Unpriced { path: path(), how: how.to_string() })?;
            // Most of the bytes may be exceptions in 16 bits, but not all.
            let plain = |tensor: &safetensors::StoredTensor| matches!(tensor.storage, "F32" | "BF16" | "F16");
            match float.filter(|_| tensors.is_some_and(|tensors| tensors.iter().all(plain))) {
                Some(float) => {
                    Err(OpenError::StorageDisagrees { path: path(), config: how.to_string(), tensors: float })
                }
                None => Ok(Some(how_stored)),
            }
        }
        (None, Some(tensors)) if float.is_none() => Err(OpenError::Unpriced {
            path: path(),
            how: format!("tensors of {tensors}, of which config.json says nothing"),
        }),
        (None, _) => Ok(float.or(architecture.native_dtype)),
    }
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
        source: Source::Folder {
            path: path.to_path_buf(),
            hub_id,
            stored: None,
            on_disk: None,
            unread: None,
        },
        architecture,
    })
}

fn open_gguf(path: &Path) -> Result<OpenModel, OpenError> {
    let file = GgufModel::open(path)?;
    Ok(gguf_model(path, file.architecture.clone(), file.inventory.clone(), file.paths()))
}

/// A GGUF file of which only dimensions and storage are asked.
fn open_shape_gguf(path: &Path) -> Result<OpenModel, OpenError> {
    let (architecture, inventory, files) = GgufModel::open_shape(path)?;
    Ok(gguf_model(path, architecture, inventory, files))
}

fn gguf_model(
    path: &Path,
    architecture: Architecture,
    inventory: Inventory,
    files: Vec<PathBuf>,
) -> OpenModel {
    let name =
        path.file_stem().map_or_else(|| path.display().to_string(), |n| n.to_string_lossy().into_owned());
    OpenModel { name, architecture, source: Source::Gguf { path: path.to_path_buf(), files, inventory } }
}

impl OpenModel {
    /// A model of some dimensions with random weights.
    pub fn synthetic(name: impl Into<String>, architecture: Architecture, seed: u64) -> Self {
        Self { name: name.into(), architecture, source: Source::Synthetic { seed, hub_id: None } }
    }

    /// Where the weights come from, for results.
    pub fn source_label(&self) -> String {
        match &self.source {
            Source::Synthetic { seed, .. } => format!("synthetic, seed {seed}"),
            Source::Folder { hub_id: Some(id), .. } => format!("hub {id}"),
            Source::Folder { path, .. } | Source::Gguf { path, .. } => path.display().to_string(),
        }
    }

    /// Why the weights, or their bytes, may be others than those of its files: a sentence for stderr and for the result.
    pub fn doubt(&self) -> Option<String> {
        match &self.source {
            Source::Synthetic { hub_id: Some(id), .. } => Some(format!(
                "{id} is one of the shapes that come with hbmark, and runs with random weights: its times are those of the checkpoint, its outputs are not; give the folder of the checkpoint for its own weights"
            )),
            Source::Folder { path, unread: Some(problem), .. } => Some(format!(
                "bytes are those that {}/config.json says, and not those of the tensors, whose headers cannot be read: {problem}",
                path.display()
            )),
            _ => None,
        }
    }

    /// The model as results state it, stored in a dtype.
    pub fn summary(&self, dtype: Dtype) -> ModelSummary {
        ModelSummary::new(&self.name, self.source_label(), &self.architecture, &self.inventory(dtype))
    }

    /// By what a run that goes on knows the model again: its dimensions and tensors in a dtype, and of each file of weights the size and the time
    /// of its last change.
    pub fn identity(&self, dtype: Dtype) -> String {
        let model = model_hash(&self.architecture, &self.inventory(dtype));
        let mut files = match &self.source {
            Source::Synthetic { .. } => return model,
            Source::Gguf { files, .. } => files.clone(),
            Source::Folder { path, .. } => {
                let files = std::fs::read_dir(path).into_iter().flatten().flatten().map(|entry| entry.path());
                files.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).collect()
            }
        };
        files.sort_unstable();
        let mut hasher = Sha256::new();
        for file in files {
            let found = file.metadata().and_then(|found| Ok((found.len(), found.modified()?))).ok();
            hasher.update(format!("{:?} {found:?}\n", file.file_name()));
        }
        format!("{model}, weights {:.12x}", hasher.finalize())
    }

    /// Whether it has dimensions alone, and weights only where they are made.
    pub fn is_synthetic(&self) -> bool {
        matches!(self.source, Source::Synthetic { .. })
    }

    /// Whether the weights are in a GGUF file, whose block formats are its own.
    pub fn is_gguf(&self) -> bool {
        matches!(self.source, Source::Gguf { .. })
    }

    /// How many GGUF files the weights are in.
    pub fn gguf_files(&self) -> usize {
        if let Source::Gguf { files, .. } = &self.source { files.len() } else { 0 }
    }

    /// The dtype that is sensible where none is asked for: a GGUF file's own; f32 on a CPU, whose bf16 products candle runs some forty
    /// times slower; on a GPU what the checkpoint stores, or bf16. What is stored quantised has no other.
    pub fn default_dtype(&self, device: DeviceChoice) -> Dtype {
        match (&self.source, device) {
            (Source::Gguf { .. }, _) => Dtype::Gguf,
            (Source::Folder { stored: Some(stored), .. }, _) if !is_plain(*stored) => *stored,
            (_, DeviceChoice::Cpu) => Dtype::F32,
            (Source::Folder { stored: Some(stored), .. }, _) => *stored,
            _ => Dtype::Bf16,
        }
    }

    /// The storage that the model's own files state; bf16 of a shape without files, and where they say nothing.
    pub fn stored_dtype(&self) -> Dtype {
        match &self.source {
            Source::Gguf { .. } => Dtype::Gguf,
            Source::Folder { stored, .. } => stored.unwrap_or(Dtype::Bf16),
            Source::Synthetic { .. } => {
                self.architecture.quantization.as_ref().and_then(Quantization::dtype).unwrap_or(Dtype::Bf16)
            }
        }
    }

    /// The storage to compute with: what was asked for, where the files do not contradict it, otherwise [`Self::stored_dtype`]. Plain
    /// floats and shapes without files can be stored in any other way; weights that are quantised already cannot.
    ///
    /// # Errors
    /// When the files hold quantised weights and another storage is asked for, or a GGUF file's own and there is none, or when rows are no
    /// whole blocks of 256 and such are asked for.
    pub fn storage(&self, asked: Option<Dtype>) -> Result<Dtype, OpenError> {
        let stored = self.stored_dtype();
        let plain = is_plain(stored);
        match asked {
            None => Ok(stored),
            Some(Dtype::Gguf) if !self.is_gguf() => Err(OpenError::NotGguf { name: self.name.clone() }),
            Some(asked) if asked == stored || plain || matches!(self.source, Source::Synthetic { .. }) => {
                if matches!(asked, Dtype::Q4K | Dtype::Q5K | Dtype::Q6K) {
                    check_blocks(&self.architecture.inventory(asked), asked)?;
                }
                Ok(asked)
            }
            Some(asked) => {
                let how = self.architecture.quantization.as_ref();
                let how = how.map_or_else(String::new, |how| format!(" ({how})"));
                Err(OpenError::StoredAs { name: self.name.clone(), stored, how, asked })
            }
        }
    }

    /// The storage of the KV cache that goes with a dtype in the stock engine: candle's quantised models keep f32.
    pub fn kv_dtype(&self, dtype: Dtype) -> Dtype {
        match dtype {
            Dtype::Gguf => Dtype::F32,
            other => other.of_cache(),
        }
    }

    /// The tensors as they will be loaded in a dtype.
    pub fn inventory(&self, dtype: Dtype) -> Inventory {
        match &self.source {
            Source::Gguf { inventory, .. } if dtype == Dtype::Gguf => inventory.clone(),
            Source::Folder { on_disk: Some(inventory), stored: Some(stored), .. } if dtype == *stored => {
                inventory.clone()
            }
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
            Source::Synthetic { seed, .. } => {
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
    /// Values are those that [`load`](Self::load) gives. Quantised formats are packed from bf16 where weights come
    /// from a seed, and from the values as stored where they come from a folder. A GGUF file has its own formats:
    /// `q8_0`, `q4_0`, `q4_k`, `q5_k`, `q6_k` and plain floats are kept to the bit, all other blocks are dequantised and packed as `q8_0`.
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
            Source::Synthetic { seed, .. } => stream::from_seed(&self.architecture, dtype, *seed, sink),
            Source::Folder { path, .. } => {
                self.storage(Some(dtype))?;
                stream::from_folder(&self.architecture, dtype, path, sink)
            }
            Source::Gguf { path, .. } if dtype == Dtype::Gguf => stream::from_gguf(path, sink),
            Source::Gguf { path, .. } => Err(OpenError::GgufDtype { path: path.clone(), asked: dtype }),
        }
    }

    /// The tokenizer beside the weights, checked against the vocabulary.
    ///
    /// # Errors
    /// When there is none, or it has other than special tokens that the model does not.
    pub fn tokenizer(&self) -> Result<Tokenizer, OpenError> {
        let Source::Folder { path, .. } = &self.source else {
            return Err(OpenError::NoTokenizer { name: self.name.clone() });
        };
        let mut tokenizer = Tokenizer::open(path)?;
        tokenizer.check_vocab(self.architecture.vocab_size)?;
        Ok(tokenizer)
    }
}

fn is_plain(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::Bf16 | Dtype::F16)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hbmark_core::model::Role;

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

    /// A folder with the config of a llama of two layers, changed, and perhaps tensors that are all zeros.
    fn folder(quantization: serde_json::Value, tensors: Option<&Inventory>) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let config = include_str!("../../tests/fixtures/configs/llama-3.1-8b.json");
        let mut config: serde_json::Value = serde_json::from_str(config).unwrap();
        config["quantization_config"] = quantization;
        config["num_hidden_layers"] = serde_json::json!(2);
        std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        if let Some(tensors) = tensors {
            write(&folder.path().join("model.safetensors"), tensors);
        }
        folder
    }

    /// A file without data on the disk, whose header has an inventory's tensors.
    fn write(path: &Path, inventory: &Inventory) {
        let mut end = 0;
        let entries = inventory.tensors.iter().map(|tensor| {
            let (begin, bytes) = (end, tensor.bytes.0);
            end += bytes;
            let (word, size) = match tensor.storage.as_str() {
                "bf16" => ("BF16", 2),
                "f16" => ("F16", 2),
                "f32" => ("F32", 4),
                "fp8" | "mxfp8" => ("F8_E4M3", 1),
                "int8" => ("I8", 1),
                "int4" if bytes.is_multiple_of(4) => ("I32", 4),
                _ => ("U8", 1),
            };
            let entry =
                serde_json::json!({"dtype": word, "shape": [bytes / size], "data_offsets": [begin, end]});
            (tensor.name.clone(), entry)
        });
        let header = serde_json::Value::Object(entries.collect()).to_string();
        let mut file = File::create(path).unwrap();
        std::io::Write::write_all(&mut file, &(header.len() as u64).to_le_bytes()).unwrap();
        std::io::Write::write_all(&mut file, header.as_bytes()).unwrap();
        file.set_len(8 + header.len() as u64 + end).unwrap();
    }

    fn stored(quantization: serde_json::Value, tensors: Option<&Inventory>) -> Result<Dtype, String> {
        let folder = folder(quantization, tensors);
        let opened = open_shape(folder.path().to_str().unwrap(), None);
        opened.map(|model| model.stored_dtype()).map_err(|error| error.to_string())
    }

    #[test]
    fn the_storage_of_a_folder_is_what_its_files_state() {
        use serde_json::{Value, json};
        let fp8 = || json!({"quant_method": "fp8", "weight_block_size": [128, 128]});
        let four_bits = |method: &str| json!({"quant_method": method, "bits": 4, "group_size": 128});
        let compressed = |weights: Value| json!({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}});
        let plain = folder(Value::Null, None);
        let plain = open_shape(plain.path().to_str().unwrap(), None).unwrap();
        let [f16, bf16] = [Dtype::F16, Dtype::Bf16].map(|dtype| plain.inventory(dtype));
        assert_eq!(stored(Value::Null, None), Ok(Dtype::Bf16));
        assert_eq!(stored(Value::Null, Some(&f16)), Ok(Dtype::F16), "the tensors, whatever torch_dtype says");
        let mut bare = bf16.clone();
        for tensor in bare.tensors.iter_mut().filter(|tensor| tensor.role == Role::Matrix) {
            (tensor.storage, tensor.bytes) = ("fp8".to_owned(), Bytes(tensor.elements()));
        }
        assert_eq!(stored(fp8(), None), Ok(Dtype::Fp8));
        assert_eq!(stored(fp8(), Some(&bare)), Ok(Dtype::Fp8));
        assert_eq!(stored(four_bits("gptq"), None), Ok(Dtype::Int4));
        assert_eq!(
            stored(json!({"quant_method": "bitsandbytes", "load_in_4bit": true}), None),
            Ok(Dtype::Int4)
        );
        assert_eq!(stored(json!({"quant_method": "mxfp4"}), None), Ok(Dtype::Mxfp4));
        assert_eq!(stored(compressed(json!({"num_bits": 8, "type": "int"})), None), Ok(Dtype::Int8));
        assert_eq!(stored(compressed(json!({"num_bits": 8, "type": "float"})), None), Ok(Dtype::Fp8));

        assert_eq!(
            stored(compressed(json!({"num_bits": 4, "type": "float", "group_size": 16})), None),
            Ok(Dtype::Nvfp4)
        );
        let mut integers = bf16.clone();
        for tensor in integers.tensors.iter_mut().filter(|tensor| tensor.role != Role::Norm) {
            (tensor.storage, tensor.bytes) = ("int8".to_owned(), Bytes(tensor.elements()));
        }
        let unsaid = stored(Value::Null, Some(&integers)).unwrap_err();
        assert!(unsaid.contains("tensors of I8"), "{unsaid}");
        let apart = stored(fp8(), Some(&bf16)).unwrap_err();
        assert!(apart.contains("fp8, 8 bits (float), groups of 128") && apart.contains("bf16"), "{apart}");
    }

    #[test]
    fn a_folder_is_predicted_by_the_tensors_it_holds() {
        let fp8 = serde_json::json!({"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["self_attn"]});
        let shape = folder(fp8.clone(), None);
        let shape = open_shape(shape.path().to_str().unwrap(), None).unwrap();
        let inventory = shape.inventory(Dtype::Fp8);
        let whole = folder(fp8.clone(), Some(&inventory));
        let whole = open_shape(whole.path().to_str().unwrap(), None).unwrap();
        let found = whole.inventory(Dtype::Fp8);
        assert_eq!(found.total_bytes(), inventory.total_bytes());
        assert!(found.tensors.iter().any(|tensor| tensor.storage == "f8_e4m3"), "the words of the files");
        // The same folder without a tensor is another model's.
        let mut less = inventory.clone();
        less.tensors.retain(|tensor| tensor.name != "model.layers.0.mlp.up_proj.weight");
        let broken = folder(fp8, Some(&less));
        let error = open_shape(broken.path().to_str().unwrap(), None).unwrap_err().to_string();
        assert!(error.contains("layer 0 has") && error.contains("matrix weights"), "{error}");
    }

    #[test]
    fn weights_that_are_quantised_already_have_no_other_storage_and_plain_ones_have_any() {
        let fp8 = folder(serde_json::json!({"quant_method": "fp8"}), None);
        let fp8 = open_shape(fp8.path().to_str().unwrap(), None).unwrap();
        assert_eq!(fp8.storage(None).unwrap(), Dtype::Fp8);
        assert_eq!(fp8.storage(Some(Dtype::Fp8)).unwrap(), Dtype::Fp8);
        let error = fp8.storage(Some(Dtype::Bf16)).unwrap_err().to_string();
        assert!(
            error.contains("stored as fp8 (fp8, 8 bits (float))") && error.contains("--dtype bf16"),
            "{error}"
        );
        let plain = folder(serde_json::Value::Null, None);
        let plain = open_shape(plain.path().to_str().unwrap(), None).unwrap();
        assert_eq!(plain.storage(Some(Dtype::Q8_0)).unwrap(), Dtype::Q8_0);
        assert!(matches!(plain.storage(Some(Dtype::Gguf)), Err(OpenError::NotGguf { .. })));
        let shape = open_shape("DeepSeek-V3", None).unwrap();
        assert_eq!(
            (shape.stored_dtype(), shape.storage(Some(Dtype::Bf16)).unwrap()),
            (Dtype::Fp8, Dtype::Bf16)
        );
        let gguf = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/llama-q8_0.gguf");
        let gguf = open_shape(gguf, None).unwrap();
        assert!(gguf.storage(Some(Dtype::Bf16)).unwrap_err().to_string().contains("stored as gguf"));
    }

    #[test]
    fn a_model_whose_weights_changed_is_another_one() {
        let shape = open_shape(folder(serde_json::Value::Null, None).path().to_str().unwrap(), None).unwrap();
        let inventory = shape.inventory(Dtype::Bf16);
        let folder = folder(serde_json::Value::Null, Some(&inventory));
        let model = open_shape(folder.path().to_str().unwrap(), None).unwrap();
        let was = model.identity(Dtype::Bf16);
        assert_eq!(was, model.identity(Dtype::Bf16));
        std::fs::write(folder.path().join("notes.txt"), "of no weights").unwrap();
        assert_eq!(was, model.identity(Dtype::Bf16));
        let file = File::options().append(true).open(folder.path().join("model.safetensors")).unwrap();
        file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        let written = model.identity(Dtype::Bf16);
        file.set_len(file.metadata().unwrap().len() + 1).unwrap();
        file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
        let longer = model.identity(Dtype::Bf16);
        assert!(was != written && written != longer, "{was} {written} {longer}");
        assert!(was.starts_with(&model.summary(Dtype::Bf16).hash));
    }

    #[test]
    fn quantised_weights_are_refused_by_name_where_an_engine_would_load_them() {
        let folder = folder(serde_json::json!({"quant_method": "bitsandbytes", "load_in_4bit": true}), None);
        let error = open(folder.path().to_str().unwrap(), None, 0).unwrap_err().to_string();
        assert!(error.contains("bitsandbytes, 4 bits") && error.contains("int4 of Bitsandbytes"), "{error}");
    }

    #[test]
    fn a_config_stands_for_its_folder_and_another_file_is_no_model() {
        let whole = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/llama-bf16");
        let by_file = open_shape(&format!("{whole}/config.json"), None).unwrap();
        assert_eq!(by_file.architecture, open_shape(whole, None).unwrap().architecture);
        assert_eq!(by_file.name, "llama-bf16");
        let error = open_shape(&format!("{whole}/model.safetensors"), None).unwrap_err().to_string();
        assert!(error.contains("is not a model"), "{error}");
    }

    #[test]
    fn what_is_beside_the_config_does_not_matter_to_a_shape() {
        let whole = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/llama-bf16");
        let (shape, model) = (open_shape(whole, None).unwrap(), open(whole, None, 0).unwrap());
        assert_eq!((&shape.architecture, &shape.name), (&model.architecture, &model.name));
        let parameters = |opened: &OpenModel| opened.inventory(Dtype::Bf16).parameters();
        assert_eq!(parameters(&shape), parameters(&model));
        assert!(matches!(
            open_shape("no-such-model", None),
            Err(OpenError::Model(ModelError::UnknownModel { .. }))
        ));
    }
}
