//! The dimensions of a decoder-only transformer, as data.
//!
//! Enters: a `config.json`, GGUF metadata or a shape from `models/` (read by the family files beside this one).
//! Leaves: [`Architecture`], which everything else derives from: the tensor inventory, the byte ledger, memory
//! predictions, the stock engine's configuration and the native forward.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A model family: the set of tensor names and the forward that a checkpoint follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    Mixtral,
    DeepseekV3,
}

/// The rotary position embedding.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum RopeScaling {
    None,
    /// Every frequency divided by `factor`.
    Linear {
        factor: f64,
    },
    /// Llama 3.1's frequency-dependent scaling.
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_max_positions: usize,
    },
    /// `YaRN`; carried for `predict`, which needs no frequencies.
    Yarn {
        factor: f64,
        original_max_positions: usize,
    },
}

/// Rotary base and scaling.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Rope {
    pub theta: f64,
    pub scaling: RopeScaling,
}

/// Which linear layers carry a bias vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
pub struct Biases {
    pub qkv: bool,
    pub o: bool,
    pub mlp: bool,
}

/// Routed experts of a mixture-of-experts layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Experts {
    /// Routed experts in a layer (E).
    pub count: usize,
    /// Experts a token is routed to (k).
    pub per_token: usize,
    /// Inner width of one routed expert.
    pub ffn_size: usize,
    /// Experts every token passes through.
    pub shared_count: usize,
    /// Inner width of all shared experts together.
    pub shared_ffn_size: usize,
    /// Layers whose feed-forward is dense (width `Architecture::ffn_size`), by index.
    pub dense_layers: Vec<usize>,
}

/// Multi-head latent attention (`DeepSeek`): K and V are kept as one latent vector per token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct LatentAttention {
    /// Rank of the compressed query; `None` projects the query directly.
    pub q_rank: Option<usize>,
    /// Rank of the compressed K and V: what is cached, beside the rotary part.
    pub kv_rank: usize,
    pub qk_nope_head_dim: usize,
    pub qk_rope_head_dim: usize,
    pub v_head_dim: usize,
}

/// How the weights of a checkpoint are stored, when they are not plain floats.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Quantization {
    /// `quant_method` of the config: `fp8`, `gptq`, `awq`, `bitsandbytes`, `mxfp4`...
    pub method: String,
    pub bits: u32,
    pub group_size: Option<usize>,
    /// The numbers are floats, where the method alone does not say: `compressed-tensors` has both kinds.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub float: bool,
}

impl Quantization {
    /// The storage that the byte ledger has for it; `None` where it has none.
    #[must_use]
    pub fn dtype(&self) -> Option<Dtype> {
        match (self.method.as_str(), self.bits, self.float) {
            ("fp8" | "fbgemm_fp8", 8, _) | (_, 8, true) => Some(Dtype::Fp8),
            (_, 8, false) => Some(Dtype::Int8),
            (_, 4, false) => Some(Dtype::Int4),
            _ => None,
        }
    }
}

impl std::fmt::Display for Quantization {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, {} bits", self.method, self.bits)?;
        if self.float {
            f.write_str(" (float)")?;
        }
        self.group_size.map_or(Ok(()), |group| write!(f, ", groups of {group}"))
    }
}

/// Everything about a model that changes its bytes, FLOPs or outputs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Architecture {
    pub family: Family,
    pub hidden_size: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    /// Inner width of a dense feed-forward.
    pub ffn_size: usize,
    pub vocab_size: usize,
    pub max_positions: usize,
    pub norm_eps: f64,
    pub rope: Rope,
    pub qk_norm: bool,
    pub biases: Biases,
    /// The embedding table doubles as `lm_head`.
    pub tied_head: bool,
    /// Attention window per layer, in tokens; an empty list means full attention everywhere.
    pub windows: Vec<Option<usize>>,
    pub experts: Option<Experts>,
    pub latent: Option<LatentAttention>,
    pub quantization: Option<Quantization>,
    /// The dtype the config names for its weights (`bfloat16` → [`Dtype::Bf16`]), where it does.
    pub native_dtype: Option<Dtype>,
    pub eos_tokens: Vec<u32>,
}

impl Architecture {
    /// The attention window of a layer, or `None` where it attends to everything.
    #[must_use]
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.windows.get(layer).copied().flatten()
    }

    /// Positions of KV that a token at `context` reads in a layer.
    #[must_use]
    pub fn attended(&self, layer: usize, context: usize) -> usize {
        self.window(layer).map_or(context, |w| w.min(context))
    }

    /// Elements that one token keeps in the KV cache of one layer.
    #[must_use]
    pub fn kv_elements_per_token_and_layer(&self) -> usize {
        match self.latent {
            Some(latent) => latent.kv_rank + latent.qk_rope_head_dim,
            None => 2 * self.kv_heads * self.head_dim,
        }
    }

    /// Whether the feed-forward of a layer is routed over experts.
    #[must_use]
    pub fn is_expert_layer(&self, layer: usize) -> bool {
        self.experts.as_ref().is_some_and(|e| !e.dense_layers.contains(&layer))
    }
}

/// How numbers are stored: one name for weights, activations and KV on the command line and in results.
#[derive(
    Debug,
    Clone,
    Copy,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    Serialize,
    Deserialize,
    JsonSchema,
    clap::ValueEnum,
)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Dtype {
    F32,
    Bf16,
    F16,
    /// One scale per output channel.
    Int8,
    /// e4m3, one scale per 128 × 128 block or per channel.
    Fp8,
    /// Groups of 32 or 128 with a scale and a zero.
    Int4,
    /// ggml's blocks of 32 with one scale, throughout.
    Q8_0,
    /// ggml's blocks of 32 four-bit weights with one scale; embedding and head in `q8_0`.
    Q4_0,
    /// A GGUF file's own mixture of block formats.
    Gguf,
}

impl Dtype {
    /// The name on the command line and in results.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Int8 => "int8",
            Self::Fp8 => "fp8",
            Self::Int4 => "int4",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
            Self::Gguf => "gguf",
        }
    }

    /// The default KV cache dtype for weights of this dtype: the same for floats, bf16 where they are quantised.
    #[must_use]
    pub fn of_cache(self) -> Self {
        match self {
            Self::F32 | Self::Bf16 | Self::F16 => self,
            Self::Int8 | Self::Fp8 | Self::Int4 | Self::Q8_0 | Self::Q4_0 | Self::Gguf => Self::Bf16,
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;

    #[test]
    fn a_dtype_has_one_name_on_the_command_line_in_json_and_in_results() {
        for dtype in Dtype::value_variants() {
            assert_eq!(serde_json::to_value(dtype).unwrap(), dtype.name());
            assert_eq!(Dtype::from_str(dtype.name(), false), Ok(*dtype));
        }
    }
}
