//! The dimensions of a GGUF file, and the roles of the tensors of one that need not run: more architectures, every block format.
//!
//! Enters: a checked [`Header`]. Leaves: an [`Architecture`] whose layers follow from the shapes of their tensors, and an [`Inventory`] with the
//! bytes of the file's own blocks.

use std::collections::HashMap;

use super::dimensions::{count, dense, eos_tokens, float, has, missing, rope_scaling, text, vocab_size};
use super::header::{GgufError, Header, TensorEntry};
use super::names::expected_tensors;
use crate::model::{
    Activation, Architecture, Attention, Biases, Dense, Dtype, Experts, Family, FeedForward, Inventory,
    LatentAttention, Layer, Mixer, Mixture, Multipliers, Norms, QkNorm, Reach, Role, Rope, RopeScaling,
    Rotary, Routing, Stack, TensorInfo,
};

const MAX_LAYERS: usize = 1_024;
const MAX_HEADS: usize = 4_096;
const MAX_WIDTH: usize = 1 << 17;
const MAX_HEAD_DIM: usize = 1 << 13;
const MAX_POSITIONS: usize = 1 << 27;
const MAX_EXPERTS: usize = 1 << 16;

/// Dimensions of a file that engines run: dense models and mixtures of the llama, qwen2 and qwen3 families, and gpt-oss.
///
/// # Errors
/// When the architecture is another, or a dimension is missing or out of range.
pub fn architecture(header: &Header) -> Result<Architecture, GgufError> {
    let (name, mixture) = family(header)?;
    match mixture {
        None | Some(Family::GptOss | Family::Mixtral | Family::Qwen2Moe | Family::Qwen3Moe) => {
            read(header, name, mixture)
        }
        Some(_) => Err(unknown(name)),
    }
}

/// Dimensions and tensors of a file that is not run.
///
/// # Errors
/// When the architecture is not known, a dimension is missing or out of range, or a tensor is none of a decoder's.
pub fn shape(header: &Header) -> Result<(Architecture, Inventory), GgufError> {
    let (name, family) = family(header)?;
    let architecture = read(header, name, family)?;
    let by_name = by_name(header);
    if family.is_none() {
        let lacks = |name: &String| !by_name.contains_key(name.as_str());
        if let Some(name) = expected_tensors(&architecture).into_iter().map(|(name, ..)| name).find(lacks) {
            return Err(GgufError::MissingTensor { name });
        }
    }
    let listed = header.tensors.iter().map(|tensor| listed(tensor, &by_name, &architecture));
    Ok((architecture.clone(), Inventory { tensors: listed.collect::<Result<_, _>>()? }))
}

fn unknown(name: &str) -> GgufError {
    GgufError::UnknownArchitecture { found: name.chars().take(80).collect() }
}

/// The architecture's name, and its family where that is none of the dense ones that engines run.
fn family(header: &Header) -> Result<(&str, Option<Family>), GgufError> {
    let name = text(header, "general.architecture")?.ok_or_else(|| missing("general.architecture"))?;
    let routed = count(header, &format!("{name}.expert_count"), 0, MAX_EXPERTS)?.unwrap_or(0) > 0;
    let family = match (name, routed) {
        ("llama" | "qwen2" | "qwen3", false) => None,
        ("llama", true) => Some(Family::Mixtral),
        ("qwen2moe", true) => Some(Family::Qwen2Moe),
        ("qwen3moe", true) => Some(Family::Qwen3Moe),
        ("gpt-oss", true) => Some(Family::GptOss),
        ("gemma3", false) => Some(Family::Gemma3),
        ("deepseek2", true) => Some(Family::DeepseekV3),
        ("glm4moe", true) => Some(Family::Glm4Moe),
        ("minimax-m2", true) => Some(Family::MinimaxM2),
        _ => return Err(unknown(name)),
    };
    Ok((name, family))
}

fn read(header: &Header, name: &str, family: Option<Family>) -> Result<Architecture, GgufError> {
    let architecture = match family {
        None => dense(header)?,
        Some(family) => Reader { header, name, family, by_name: by_name(header) }.architecture()?,
    };
    architecture.check().map_err(|refused| GgufError::UnsupportedModel {
        what: refused.what.to_owned(),
        found: refused.found,
    })?;
    Ok(architecture)
}

/// The tensors of a file, which may be some hundred thousand.
type ByName<'a> = HashMap<&'a str, &'a TensorEntry>;

fn by_name(header: &Header) -> ByName<'_> {
    header.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor)).collect()
}

struct Reader<'a> {
    header: &'a Header,
    name: &'a str,
    family: Family,
    by_name: ByName<'a>,
}

impl Reader<'_> {
    fn key(&self, suffix: &str) -> String {
        format!("{}.{suffix}", self.name)
    }

    fn count(&self, suffix: &str, most: usize) -> Result<Option<usize>, GgufError> {
        count(self.header, &self.key(suffix), 1, most)
    }

    fn need(&self, suffix: &str, most: usize) -> Result<usize, GgufError> {
        self.count(suffix, most)?.ok_or_else(|| missing(&self.key(suffix)))
    }

    fn tensor(&self, layer: usize, names: &[&str]) -> Option<&TensorEntry> {
        let entry = |module: &&str| self.by_name.get(format!("blk.{layer}.{module}.weight").as_str());
        names.iter().find_map(entry).copied()
    }

    fn needed(&self, layer: usize, names: &[&str]) -> Result<&TensorEntry, GgufError> {
        let lacks = || GgufError::MissingTensor { name: format!("blk.{layer}.{}.weight", names[0]) };
        self.tensor(layer, names).ok_or_else(lacks)
    }

    fn architecture(&self) -> Result<Architecture, GgufError> {
        let hidden_size = self.need("embedding_length", MAX_WIDTH)?;
        let heads = self.need("attention.head_count", MAX_HEADS)?;
        let head_dim = self.count("attention.key_length", MAX_HEAD_DIM)?.unwrap_or(hidden_size / heads);
        if head_dim == 0 || !head_dim.is_multiple_of(2) {
            let found = format!("{head_dim} with {heads} heads");
            return Err(GgufError::UnsupportedModel { what: self.key("attention.key_length"), found });
        }
        let further = count(self.header, &self.key("nextn_predict_layers"), 0, 16)?.unwrap_or(0);
        let layers = self.need("block_count", MAX_LAYERS)?.saturating_sub(further);
        let norm_key = self.key("attention.layer_norm_rms_epsilon");
        let mut rope = Rope {
            theta: float(self.header, &self.key("rope.freq_base"), 1.0, 1e12)?.unwrap_or(10_000.0),
            scaling: rope_scaling(self.header, self.name)?,
        };
        if let (Family::GptOss, RopeScaling::Yarn { shape, .. }) = (self.family, &mut rope.scaling) {
            // As its configs have it; no key of a file says so.
            shape.truncate = false;
        }
        let biases = self.biases();
        let latent = self.latent()?;
        let mixture = self.mixture(layers)?;
        let stack = (0..layers)
            .map(|layer| {
                let mixer = match latent {
                    Some(latent) => Mixer::Latent { heads, latent, indexer: None },
                    None => Mixer::Attention(self.attention(layer, heads, head_dim, rope, biases)?),
                };
                let norms = if self.family == Family::Gemma3 { Norms::BeforeAndAfter } else { Norms::Before };
                Ok(Layer { mixer, feed_forward: self.feed_forward(layer, mixture)?, norms })
            })
            .collect::<Result<Vec<_>, GgufError>>()?;
        let dense = (0..layers).filter(|at| stack[*at].feed_forward.mixture().is_none()).collect();
        let kv_heads = match stack.first().map(|layer| layer.mixer) {
            Some(Mixer::Attention(attention)) => attention.kv_heads,
            _ => heads,
        };
        Ok(Architecture {
            family: self.family,
            hidden_size,
            layers,
            heads,
            kv_heads,
            head_dim,
            ffn_size: self.count("feed_forward_length", 1 << 20)?.unwrap_or(1),
            vocab_size: vocab_size(self.header, self.name)?,
            max_positions: self.need("context_length", MAX_POSITIONS)?,
            norm_eps: float(self.header, &norm_key, 0.0, 1.0)?.ok_or_else(|| missing(&norm_key))?,
            rope,
            qk_norm: has(self.header, "blk.0.attn_q_norm.weight"),
            biases,
            tied_head: !has(self.header, "output.weight"),
            windows: Vec::new(),
            experts: mixture.map(|mixture| Experts::of(&mixture, dense)),
            latent,
            quantization: None,
            native_dtype: Some(Dtype::Gguf),
            eos_tokens: eos_tokens(self.header)?,
            multipliers: Multipliers::default(),
            stack: Some(Stack::new(stack)),
            draft: None,
            rope_factors: Vec::new(),
        })
    }

    /// Those of the first layer.
    fn biases(&self) -> Biases {
        Biases {
            qkv: has(self.header, "blk.0.attn_q.bias"),
            o: has(self.header, "blk.0.attn_output.bias"),
            mlp: self.family == Family::GptOss,
        }
    }

    fn latent(&self) -> Result<Option<LatentAttention>, GgufError> {
        if self.family != Family::DeepseekV3 {
            return Ok(None);
        }
        let rope = self.need("rope.dimension_count", MAX_HEAD_DIM)?;
        // Newer files state the widths of the expanded heads, older ones have them in the plain keys.
        let either = |own: &str, plain: &str| match self.count(own, MAX_HEAD_DIM)? {
            Some(width) => Ok(width),
            None => self.need(plain, MAX_HEAD_DIM),
        };
        let key = either("attention.key_length_mla", "attention.key_length")?;
        if key <= rope {
            let (what, found) = (self.key("rope.dimension_count"), format!("{rope} of heads of {key}"));
            return Err(GgufError::UnsupportedModel { what, found });
        }
        Ok(Some(LatentAttention {
            q_rank: self.count("attention.q_lora_rank", MAX_WIDTH)?,
            kv_rank: self.need("attention.kv_lora_rank", MAX_WIDTH)?,
            qk_nope_head_dim: key - rope,
            qk_rope_head_dim: rope,
            v_head_dim: either("attention.value_length_mla", "attention.value_length")?,
            // No byte depends on it, and no engine runs such a file.
            scale: None,
        }))
    }

    fn attention(
        &self,
        layer: usize,
        heads: usize,
        key_dim: usize,
        rope: Rope,
        biases: Biases,
    ) -> Result<Attention, GgufError> {
        let value_dim = self.count("attention.value_length", MAX_HEAD_DIM)?.unwrap_or(key_dim);
        let keys = self.needed(layer, &["attn_k"])?;
        let rows = keys.shape.first().copied().unwrap_or(0);
        if rows == 0 || !rows.is_multiple_of(key_dim) {
            let found = format!("{rows} rows for heads of {key_dim}");
            return Err(GgufError::UnsupportedModel { what: keys.name.clone(), found });
        }
        let window =
            count(self.header, &self.key("attention.sliding_window"), 0, MAX_POSITIONS)?.unwrap_or(0);
        let windowed = match self.family {
            _ if window == 0 => false,
            Family::GptOss => layer.is_multiple_of(2),
            Family::Gemma3 => !(layer + 1).is_multiple_of(6),
            _ => {
                let (what, found) = (self.key("attention.sliding_window"), window.to_string());
                return Err(GgufError::UnsupportedModel { what, found });
            }
        };
        self.needed(layer, &["attn_q"])?;
        self.needed(layer, &["attn_v"])?;
        self.needed(layer, &["attn_output"])?;
        let dims = self.count("rope.dimension_count", MAX_HEAD_DIM)?.unwrap_or(key_dim);
        Ok(Attention {
            reach: if windowed { Reach::Window { tokens: window } } else { Reach::Full },
            heads,
            kv_heads: rows / key_dim,
            key_dim,
            value_dim,
            rope: Some(Rotary { rope, dims, interleaved: false }),
            qk_norm: if self.tensor(layer, &["attn_q_norm"]).is_some() {
                QkNorm::PerHead
            } else {
                QkNorm::None
            },
            biases,
            shares_key: false,
            output_gate: false,
            sinks: self.family == Family::GptOss,
            scale: None,
            softcap: None,
            fused: false,
        })
    }

    fn mixture(&self, layers: usize) -> Result<Option<Mixture>, GgufError> {
        let Some(count) = self.count("expert_count", MAX_EXPERTS)? else { return Ok(None) };
        let first = (0..layers).find_map(|layer| self.tensor(layer, &["ffn_down_exps"]));
        let lacks = || GgufError::MissingTensor { name: "blk.0.ffn_down_exps.weight".to_owned() };
        let down = first.ok_or_else(lacks)?;
        let [experts, _, width] = down.shape[..] else {
            return Err(GgufError::UnsupportedModel {
                what: down.name.clone(),
                found: format!("a tensor of {} dimensions", down.shape.len()),
            });
        };
        if experts != count {
            let found = format!("{experts} experts, with {} {count}", self.key("expert_count"));
            return Err(GgufError::UnsupportedModel { what: down.name.clone(), found });
        }
        let shared = (0..layers).find_map(|layer| self.tensor(layer, &["ffn_down_shexp"]));
        Ok(Some(Mixture {
            count,
            per_token: self.need("expert_used_count", count)?,
            width,
            routing: match self.family {
                Family::GptOss => Routing::SoftmaxOfChosen,
                Family::DeepseekV3 | Family::Glm4Moe | Family::MinimaxM2 => {
                    Routing::Sigmoid { correction: true, groups: 1, chosen_groups: 1, renormalised: true }
                }
                Family::Qwen2Moe => Routing::Softmax { renormalised: false },
                _ => Routing::Softmax { renormalised: true },
            },
            activation: match self.family {
                // As its configs have it; no key of a file has the limit.
                Family::GptOss => Activation::ClampedSwiglu { limit: 7.0 },
                _ => Activation::Silu,
            },
            shared_width: shared.and_then(|tensor| tensor.shape.last().copied()).unwrap_or(0),
            shared_gate: self.family == Family::Qwen2Moe && shared.is_some(),
            bias: self.family == Family::GptOss,
            latent: None,
            routed_scaling_factor: 1.0,
        }))
    }

    fn feed_forward(&self, layer: usize, mixture: Option<Mixture>) -> Result<FeedForward, GgufError> {
        if let (Some(mixture), Some(_)) = (mixture, self.tensor(layer, &["ffn_down_exps"])) {
            self.needed(layer, &["ffn_gate_inp"])?;
            self.needed(layer, &["ffn_up_exps", "ffn_gate_up_exps"])?;
            return Ok(FeedForward::Mixture(mixture));
        }
        let down = self.needed(layer, &["ffn_down"])?;
        self.needed(layer, &["ffn_up"])?;
        let gelu = self.family == Family::Gemma3;
        Ok(FeedForward::Dense(Dense {
            width: down.shape.last().copied().unwrap_or(1),
            activation: if gelu { Activation::GeluTanh } else { Activation::Silu },
            bias: false,
            fused: false,
        }))
    }
}

/// A tensor of the file with the role its name says.
fn listed(
    tensor: &TensorEntry,
    by_name: &ByName<'_>,
    architecture: &Architecture,
) -> Result<TensorInfo, GgufError> {
    let unknown = || GgufError::UnsupportedModel {
        what: tensor.name.chars().take(80).collect(),
        found: format!("none of the {:?} family's tensors", architecture.family),
    };
    let (role, layer) = match tensor.name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')) {
        None => (outer_role(&tensor.name).ok_or_else(unknown)?, None),
        Some((layer, rest)) => {
            let layer: usize = layer.parse().map_err(|_| unknown())?;
            let absorbed = rest == "attn_kv_b.weight"
                && by_name.contains_key(format!("blk.{layer}.attn_k_b.weight").as_str());
            match layer_role(rest).ok_or_else(unknown)? {
                // Layers that predict further tokens, and what the absorbed form stands for.
                _ if layer >= architecture.layers || absorbed => (Role::Unused, None),
                role => (role, Some(layer)),
            }
        }
    };
    Ok(tensor.info(role, layer))
}

fn outer_role(name: &str) -> Option<Role> {
    match name {
        "token_embd.weight" => Some(Role::Embedding),
        "output.weight" => Some(Role::Head),
        "output_norm.weight" => Some(Role::Norm),
        "output.bias" => Some(Role::Bias),
        _ if name.starts_with("rope_f") => Some(Role::Unused),
        _ => None,
    }
}

fn layer_role(name: &str) -> Option<Role> {
    let (module, ending) = name.rsplit_once('.')?;
    match (module, ending) {
        (_, "weight" | "bias") if module.ends_with("_norm") => Some(Role::Norm),
        ("ffn_gate_inp" | "ffn_gate_inp_shexp" | "exp_probs_b", "weight" | "bias") => Some(Role::Router),
        ("attn_sinks", _) => Some(Role::Bias),
        (_, "weight") if module.ends_with("_exps") => Some(Role::Expert),
        (_, "bias") if module.ends_with("_exps") => Some(Role::ExpertBias),
        (_, "weight") if module.ends_with("_shexp") => Some(Role::SharedExpert),
        (
            "attn_q" | "attn_k" | "attn_v" | "attn_qkv" | "attn_output" | "attn_q_a" | "attn_q_b"
            | "attn_kv_a_mqa" | "attn_kv_b" | "attn_k_b" | "attn_v_b" | "ffn_gate" | "ffn_up" | "ffn_down",
            ending,
        ) => match ending {
            "weight" => Some(Role::Matrix),
            "bias" => Some(Role::Bias),
            _ => None,
        },
        _ => None,
    }
}

#[cfg(test)]
mod tests;
