//! LoRA adapters: low-rank additions `scale · B · A` to the linear layers of a model.
//!
//! Enters: a folder as PEFT writes it (`adapter_config.json`, `adapter_model.safetensors`), or a rank and a seed; and the
//! [`Architecture`] it is for. Leaves: an [`Adapter`], every matrix of the shape that the model's layers need. A folder is
//! untrusted: sizes are checked before anything is allocated, and what would be computed differently from PEFT (DoRA, biases,
//! ranks by pattern) is refused by name.

use std::path::{Path, PathBuf};

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;
use rand_distr::{Distribution, StandardNormal};
use serde::Deserialize;
use serde_json::Value;

use super::loading::{SizedFile, WeightsError};
use super::safetensors::TensorFile;
use hbmark_core::model::{Architecture, Target};
use hbmark_core::units::Bytes;

const CONFIG: &str = "adapter_config.json";
const WEIGHTS: &str = "adapter_model.safetensors";
/// PEFT's configs are near one KB.
const MAX_CONFIG: u64 = 1 << 20;
/// The largest rank; published adapters end at 512.
pub const MAX_RANK: usize = 512;
/// How PEFT names what it wraps.
const PREFIX: &str = "base_model.model.model.layers.";

/// What an adapter adds to one linear layer: `scale · B · A`.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraPair {
    /// `[rank, inputs]`.
    pub a: Vec<f32>,
    /// `[outputs, rank]`, without the scale.
    pub b: Vec<f32>,
}

/// Low-rank additions to a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Adapter {
    pub name: String,
    pub rank: usize,
    pub scale: f32,
    /// Where it was read from; `None` for one from a seed.
    pub folder: Option<PathBuf>,
    /// By layer and [`Target`].
    layers: Vec<[Option<LoraPair>; 7]>,
}

/// Why an adapter cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    #[error(transparent)]
    Weights(Box<WeightsError>),
    #[error("{} is not an adapter's config: {problem}", path.display())]
    Config { path: PathBuf, problem: String },
    #[error("{}: `{key}` is {found}, which hbmark does not add; supported: {supported}", path.display())]
    Unsupported { path: PathBuf, key: &'static str, found: String, supported: &'static str },
    #[error(
        "the adapter {name} has rank {rank}, and the most is {most}; raise --max-lora-rank (up to {MAX_RANK})"
    )]
    Rank { name: String, rank: usize, most: usize },
    #[error(
        "tensor {tensor} in {} is none of layers.N.(self_attn|mlp).MODULE.lora_(A|B).weight of this model's {layers} layers",
        path.display()
    )]
    UnknownTensor { path: PathBuf, tensor: String, layers: usize },
    #[error("tensor {tensor} in {} has shape {found:?}, but the model and the rank imply {wanted:?}", path.display())]
    Shape { path: PathBuf, tensor: String, found: Vec<usize>, wanted: [usize; 2] },
    #[error("{} has {present} of layer {layer}'s {module} and not {absent}", path.display())]
    Half { path: PathBuf, layer: usize, module: &'static str, present: &'static str, absent: &'static str },
    #[error("{} holds no low-rank matrices", path.display())]
    Empty { path: PathBuf },
}

impl From<WeightsError> for AdapterError {
    fn from(error: WeightsError) -> Self {
        Self::Weights(Box::new(error))
    }
}

impl Adapter {
    /// An adapter of random matrices for these targets: `A` keeps the size of its input, `B` makes an addition of about a tenth of what
    /// random weights give.
    ///
    /// # Panics
    /// Never: there are as many places as targets.
    pub fn synthetic(
        architecture: &Architecture,
        name: &str,
        rank: usize,
        targets: &[Target],
        seed: u64,
    ) -> Self {
        let mut random = ChaCha8Rng::seed_from_u64(seed);
        let mut normal = |count: usize, deviation: f32| -> Vec<f32> {
            let draw =
                |_| deviation * <StandardNormal as Distribution<f32>>::sample(&StandardNormal, &mut random);
            (0..count).map(draw).collect()
        };
        let layers = (0..architecture.layers).map(|_| {
            Target::ALL.map(|target| {
                let (outputs, inputs) = target.shape(architecture);
                targets.contains(&target).then(|| LoraPair {
                    a: normal(rank * inputs, 1.0 / (inputs as f32).sqrt()),
                    b: normal(outputs * rank, 0.1 / (rank as f32).sqrt()),
                })
            })
        });
        Self { name: name.to_owned(), rank, scale: 1.0, folder: None, layers: layers.collect() }
    }

    /// Numbers of an adapter of some rank for these targets, without making it.
    pub fn parameters(architecture: &Architecture, rank: usize, targets: &[Target]) -> u64 {
        let has = |target: &Target| targets.contains(target);
        let each = Target::ALL.into_iter().filter(has).map(|target| {
            let (outputs, inputs) = target.shape(architecture);
            (rank * (outputs + inputs)) as u64
        });
        architecture.layers as u64 * each.sum::<u64>()
    }

    /// Reads a PEFT folder for a model.
    ///
    /// # Errors
    /// When the folder is not there or not an adapter of this model, or asks for something else than plain low-rank additions.
    pub fn open(
        folder: &Path,
        name: &str,
        architecture: &Architecture,
        max_rank: usize,
    ) -> Result<Self, AdapterError> {
        let (rank, scale) = read_config(folder)?;
        let most = max_rank.min(MAX_RANK);
        if rank > most {
            return Err(AdapterError::Rank { name: name.to_owned(), rank, most });
        }
        let file = TensorFile::open(folder, WEIGHTS)?;
        let path = || file.path().to_path_buf();
        let mut halves: Vec<[[Option<Vec<f32>>; 2]; 7]> = vec![Default::default(); architecture.layers];
        for source in file.sources() {
            let unknown = || AdapterError::UnknownTensor {
                path: path(),
                tensor: source.name().chars().take(200).collect(),
                layers: architecture.layers,
            };
            let (layer, target, half) = place(source.name(), architecture.layers).ok_or_else(unknown)?;
            let (outputs, inputs) = target.shape(architecture);
            let wanted = if half == 0 { [rank, inputs] } else { [outputs, rank] };
            if source.shape() != wanted {
                let (tensor, found) = (source.name().to_owned(), source.shape().to_vec());
                return Err(AdapterError::Shape { path: path(), tensor, found, wanted });
            }
            if !matches!(source.storage(), "F32" | "BF16" | "F16") {
                return Err(WeightsError::StoredDtype {
                    path: path(),
                    name: source.name().to_owned(),
                    storage: source.storage().to_owned(),
                    wanted: hbmark_core::model::Dtype::F32,
                }
                .into());
            }
            halves[layer][target as usize][half] = Some(source.values::<f32>()?);
        }
        let mut layers = Vec::with_capacity(halves.len());
        for (layer, modules) in halves.into_iter().enumerate() {
            let mut whole: [Option<LoraPair>; 7] = Default::default();
            for (target, halves) in Target::ALL.into_iter().zip(modules) {
                let half = |present, absent| AdapterError::Half {
                    path: path(),
                    layer,
                    module: target.name(),
                    present,
                    absent,
                };
                whole[target as usize] = match halves {
                    [Some(a), Some(b)] => Some(LoraPair { a, b }),
                    [None, None] => None,
                    [Some(_), None] => return Err(half("lora_A", "lora_B")),
                    [None, Some(_)] => return Err(half("lora_B", "lora_A")),
                };
            }
            layers.push(whole);
        }
        if layers.iter().flatten().all(Option::is_none) {
            return Err(AdapterError::Empty { path: path() });
        }
        Ok(Self { name: name.to_owned(), rank, scale, folder: Some(folder.to_path_buf()), layers })
    }

    /// What it adds to a linear layer.
    pub fn at(&self, layer: usize, target: Target) -> Option<&LoraPair> {
        self.layers.get(layer)?[target as usize].as_ref()
    }

    /// The targets it adds to in any layer.
    pub fn targets(&self) -> Vec<Target> {
        let has = |t: &Target| self.layers.iter().any(|layer| layer[*t as usize].is_some());
        Target::ALL.into_iter().filter(has).collect()
    }

    /// Numbers of all its matrices.
    pub fn elements(&self) -> u64 {
        self.layers.iter().flatten().flatten().map(|low| (low.a.len() + low.b.len()) as u64).sum()
    }

    /// What a step must read of it where its matrices are stored in so many bits a number.
    pub fn bytes(&self, bits: u64) -> Bytes {
        Bytes(self.elements() * bits / 8)
    }

    /// Adds it to a layer's own weights, `[outputs, inputs]`: `W += scale · B · A`.
    ///
    /// # Panics
    /// When the weights are not of the layer's shape.
    pub fn merge(&self, layer: usize, target: Target, weights: &mut [f32]) {
        let Some(low) = self.at(layer, target) else { return };
        let inputs = low.a.len() / self.rank;
        assert_eq!(weights.len(), low.b.len() / self.rank * inputs, "weights of the layer's shape");
        for (row, b) in weights.chunks_exact_mut(inputs).zip(low.b.chunks_exact(self.rank)) {
            for (column, weight) in row.iter_mut().enumerate() {
                let products =
                    b.iter().enumerate().map(|(r, b)| f64::from(*b) * f64::from(low.a[r * inputs + column]));
                #[expect(clippy::cast_possible_truncation, reason = "weights are f32")]
                let sum = (f64::from(*weight) + f64::from(self.scale) * products.sum::<f64>()) as f32;
                *weight = sum;
            }
        }
    }
}

/// Layer, target and half (0 for A) of a tensor's name.
fn place(name: &str, layers: usize) -> Option<(usize, Target, usize)> {
    let (layer, rest) = name.strip_prefix(PREFIX)?.split_once('.')?;
    let number: usize = layer.parse().ok()?;
    // Only the plain spelling, or two names would be one tensor.
    if number >= layers || number.to_string() != layer {
        return None;
    }
    let (module, half) = match rest.strip_suffix(".weight")?.rsplit_once('.')? {
        (module, "lora_A") => (module, 0),
        (module, "lora_B") => (module, 1),
        _ => return None,
    };
    let (parent, module) = module.split_once('.')?;
    let target = Target::ALL.into_iter().find(|t| (t.parent(), t.name()) == (parent, module))?;
    Some((number, target, half))
}

/// What matters of `adapter_config.json`.
#[derive(Deserialize)]
struct Config {
    peft_type: String,
    r: u64,
    lora_alpha: f64,
    #[serde(default)]
    use_rslora: bool,
    #[serde(flatten)]
    rest: serde_json::Map<String, Value>,
}

/// Keys that change what is computed, the supported values, and a description.
const PLAIN: [(&str, &str); 8] = [
    ("use_dora", "false"),
    ("use_qalora", "false"),
    ("fan_in_fan_out", "false"),
    ("lora_bias", "false"),
    ("modules_to_save", "null"),
    ("rank_pattern", "{}"),
    ("alpha_pattern", "{}"),
    ("trainable_token_indices", "null"),
];

/// Rank and scale.
fn read_config(folder: &Path) -> Result<(usize, f32), AdapterError> {
    let file = SizedFile::open_within(folder, CONFIG)?;
    let path = file.path().to_path_buf();
    let bytes = file.read_all(MAX_CONFIG)?;
    let fail = |problem: String| AdapterError::Config { path: path.clone(), problem };
    let config: Config = serde_json::from_slice(&bytes).map_err(|error| fail(error.to_string()))?;
    let unsupported = |key, found: String, supported| AdapterError::Unsupported {
        path: path.clone(),
        key,
        found: found.chars().take(100).collect(),
        supported,
    };
    if config.peft_type != "LORA" {
        return Err(unsupported("peft_type", config.peft_type, "LORA"));
    }
    for (key, plain) in PLAIN {
        let found = config.rest.get(key).filter(|value| !value.is_null()).map(Value::to_string);
        if let Some(found) = found.filter(|found| found != plain && !(plain == "null" && found == "[]")) {
            return Err(unsupported(key, found, plain));
        }
    }
    match config.rest.get("bias").and_then(Value::as_str) {
        None | Some("none") => {}
        Some(other) => return Err(unsupported("bias", format!("{other:?}"), "\"none\"")),
    }
    let rank = usize::try_from(config.r).unwrap_or(usize::MAX);
    if rank == 0 || !(config.lora_alpha.is_finite() && config.lora_alpha > 0.0) {
        return Err(fail(format!("rank {rank} and lora_alpha {} make no scale", config.lora_alpha)));
    }
    let divisor = if config.use_rslora { (rank as f64).sqrt() } else { rank as f64 };
    #[expect(clippy::cast_possible_truncation, reason = "a scale is a small number in f32")]
    Ok((rank, (config.lora_alpha / divisor) as f32))
}

#[cfg(test)]
mod tests;
