//! The dimensions of a decoder-only transformer, as data.
//!
//! Enters: a `config.json`, GGUF metadata or a shape from `models/` (read by the family files beside this one).
//! Leaves: [`Architecture`], which everything else derives from: the tensor inventory, the byte ledger, memory
//! predictions, the stock engine's configuration and the native forward.

use std::f64::consts::TAU;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::layer::{
    Activation, Attention, Dense, FeedForward, Layer, Mixer, Mixture, Norms, QkNorm, Reach, Rotary, Routing,
    Stack,
};
use super::{DraftLayer, Quantization};

/// A model family: the set of tensor names and the forward that a checkpoint follows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
pub enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    Qwen2Moe,
    Mixtral,
    DeepseekV3,
    GptOss,
    Qwen3_5,
    Qwen3Next,
    Gemma3,
    Gemma4,
    Glm4Moe,
    MinimaxM2,
    NemotronH,
    Llama4,
    Phi3,
    MimoV2,
    Smollm3,
    Granite,
    Olmo2,
    Glm4,
    Gemma2,
}

impl Family {
    /// Whether its checkpoints hold the weights of norms less one.
    pub fn stores_norms_less_one(self) -> bool {
        matches!(self, Self::Gemma2 | Self::Gemma3)
    }

    /// Whether its checkpoints hold plain matrices of all experts as `[experts, input, out]`: rows are multiplied with them as they are.
    pub fn stores_experts_by_input(self) -> bool {
        matches!(self, Self::GptOss | Self::Llama4)
    }
}

/// The rotary position embedding.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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
    /// `YaRN`: slow frequencies divided by `factor`, fast ones kept, between them a ramp.
    Yarn {
        factor: f64,
        original_max_positions: usize,
        #[serde(flatten, default)]
        shape: YarnShape,
    },
    /// `LongRoPE` (Phi): every frequency divided by a factor of its own, [`Architecture::rope_factors`].
    LongRope {
        original_max_positions: usize,
        /// Multiplies cosines and sines.
        #[serde(default = "RopeScaling::neutral")]
        attention_factor: f64,
    },
}

impl RopeScaling {
    /// The context of Llama 3 before its scaling, and the bounds of that in turns within it.
    const LLAMA3: (f64, f64, usize) = (1.0, 4.0, 8192);
    /// How far the divisors of a file may be from those of the formula: they are f32.
    const SAME_DIVISOR: f64 = 1e-4;

    fn neutral() -> f64 {
        1.0
    }

    /// What [`RopeScaling::Llama3`] divides a frequency by, in radians per position.
    pub fn llama3_divisor(frequency: f64, factor: f64, (low, high): (f64, f64), original: usize) -> f64 {
        let turns = original as f64 * frequency / TAU;
        let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
        1.0 / (kept + (1.0 - kept) / factor)
    }

    /// The scaling whose divisors a file has in place of its parameters (`rope_freqs.weight` of a GGUF file); `None` for others than Llama 3's.
    pub fn of_divisors(divisors: &[f32], theta: f64) -> Option<Self> {
        let (low, high, original) = Self::LLAMA3;
        let factor = f64::from(divisors.iter().copied().reduce(f32::max)?);
        let dims = 2 * divisors.len();
        let is_its = |(i, divisor): (usize, &f32)| {
            let frequency = theta.powf(-((2 * i) as f64) / dims as f64);
            let wanted = Self::llama3_divisor(frequency, factor, (low, high), original);
            (f64::from(*divisor) / wanted - 1.0).abs() <= Self::SAME_DIVISOR
        };
        (factor.is_finite() && factor >= 1.0 && divisors.iter().enumerate().all(is_its)).then_some(
            Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_positions: original,
            },
        )
    }

    /// As configs spell it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::None => "default",
            Self::Linear { .. } => "linear",
            Self::Llama3 { .. } => "llama3",
            Self::Yarn { .. } => "yarn",
            Self::LongRope { .. } => "longrope",
        }
    }
}

/// Where the ramp of `YaRN` lies, and what it multiplies cosines and sines with; by default as `transformers` has it.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct YarnShape {
    /// Turns within the original context from which a frequency is kept, and up to which it is divided.
    #[serde(default = "YarnShape::beta_fast")]
    pub beta_fast: f64,
    #[serde(default = "YarnShape::beta_slow")]
    pub beta_slow: f64,
    /// The ends of the ramp are rounded outwards to whole dimensions.
    #[serde(default = "YarnShape::truncate")]
    pub truncate: bool,
    /// Multiplies cosines and sines [default: 0.1 · ln(factor) + 1].
    #[serde(default)]
    pub attention_factor: Option<f64>,
}

impl YarnShape {
    fn beta_fast() -> f64 {
        32.0
    }
    fn beta_slow() -> f64 {
        1.0
    }
    fn truncate() -> bool {
        true
    }
}

impl Default for YarnShape {
    fn default() -> Self {
        Self {
            beta_fast: Self::beta_fast(),
            beta_slow: Self::beta_slow(),
            truncate: Self::truncate(),
            attention_factor: None,
        }
    }
}

/// Rotary base and scaling.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Rope {
    pub theta: f64,
    pub scaling: RopeScaling,
}

/// What a model multiplies outside its matrices, and what bends its logits.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Multipliers {
    /// Of rows of the embedding table.
    pub embedding: f64,
    /// Of what a mixer or a feed-forward adds.
    pub residual: f64,
    /// Of logits, before they are bent.
    pub logits: f64,
    /// Logits are bent towards this.
    pub logits_softcap: Option<f64>,
}

impl Default for Multipliers {
    fn default() -> Self {
        Self { embedding: 1.0, residual: 1.0, logits: 1.0, logits_softcap: None }
    }
}

impl Multipliers {
    /// Whether they leave everything as it is.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Which linear layers carry a bias vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct Biases {
    pub qkv: bool,
    pub o: bool,
    pub mlp: bool,
}

/// Routed experts of a mixture-of-experts layer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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

impl Experts {
    /// Those of a layer's mixture.
    pub(super) fn of(mixture: &Mixture, dense_layers: Vec<usize>) -> Self {
        Self {
            count: mixture.count,
            per_token: mixture.per_token,
            ffn_size: mixture.width,
            shared_count: usize::from(mixture.shared_width > 0),
            shared_ffn_size: mixture.shared_width,
            dense_layers,
        }
    }
}

/// Multi-head latent attention (`DeepSeek`): K and V are kept as one latent vector per token.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
pub struct LatentAttention {
    /// Rank of the compressed query; `None` projects the query directly.
    pub q_rank: Option<usize>,
    /// Rank of the compressed K and V: what is cached, beside the rotary part.
    pub kv_rank: usize,
    pub qk_nope_head_dim: usize,
    pub qk_rope_head_dim: usize,
    pub v_head_dim: usize,
    /// What scores are multiplied with [default: 1 / √(`qk_nope_head_dim` + `qk_rope_head_dim`)].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<f64>,
}

impl LatentAttention {
    /// Elements of the vector that is kept of each token: the latent, then the rotary part.
    pub fn cached(&self) -> usize {
        self.kv_rank + self.qk_rope_head_dim
    }

    /// Width of a head's query.
    pub fn query_dim(&self) -> usize {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }
}

/// Everything about a model that changes its bytes, FLOPs or outputs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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
    /// Under [`RopeScaling::LongRope`], what each frequency is divided by.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rope_factors: Vec<f64>,
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
    #[serde(default, skip_serializing_if = "Multipliers::is_default")]
    pub multipliers: Multipliers,
    /// The layers, where they are not what the fields above say of all of them. Those fields then hold the widths of the config's own
    /// keys, and [`Architecture::layer`] what each layer has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stack: Option<Stack>,
    /// This is the layer that drafts for a model ([`Architecture::draft`]).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<DraftLayer>,
}

impl Architecture {
    /// The attention window of a layer, or `None` where it attends to everything.
    pub fn window(&self, layer: usize) -> Option<usize> {
        self.windows.get(layer).copied().flatten()
    }

    /// Everything about one layer.
    ///
    /// ```
    /// use hbmark_core::model::{Mixer, Reach, presets};
    ///
    /// let gemma = presets::find("Gemma-3-27B").unwrap().architecture;
    /// let Mixer::Attention(attention) = gemma.layer(4).mixer else { panic!("attention") };
    /// assert_eq!(attention.reach, Reach::Window { tokens: 1024 });
    /// let Mixer::Attention(attention) = gemma.layer(5).mixer else { panic!("attention") };
    /// assert_eq!((attention.reach, attention.kv_heads), (Reach::Full, 16));
    /// ```
    ///
    /// # Panics
    /// When there is no such layer.
    pub fn layer(&self, index: usize) -> Layer {
        assert!(index < self.layers, "layer {index} of {}", self.layers);
        if let Some(stack) = &self.stack {
            return *stack.layer(index);
        }
        let mixer = match self.latent {
            Some(latent) => Mixer::Latent { heads: self.heads, latent, indexer: None },
            None => Mixer::Attention(Attention {
                reach: self.window(index).map_or(Reach::Full, |tokens| Reach::Window { tokens }),
                ..self.attention()
            }),
        };
        let feed_forward = match &self.experts {
            Some(experts) if self.is_expert_layer(index) => FeedForward::Mixture(self.mixture(experts)),
            _ => FeedForward::Dense(Dense {
                width: self.ffn_size,
                activation: Activation::Silu,
                bias: self.biases.mlp,
                fused: false,
            }),
        };
        Layer { mixer, feed_forward, norms: Norms::Before }
    }

    /// The same with a mixture in the layers that are not dense; each layer written out where the fields stand for another mixture.
    pub fn with_mixture(self, mixture: Mixture, dense_layers: Vec<usize>) -> Self {
        let experts = Experts::of(&mixture, dense_layers);
        let plain = self.mixture(&experts) == mixture;
        let architecture = Self { experts: Some(experts), ..self };
        if plain {
            return architecture;
        }
        let layers = (0..architecture.layers).map(|index| match architecture.layer(index) {
            layer @ Layer { feed_forward: FeedForward::Mixture(_), .. } => {
                Layer { feed_forward: FeedForward::Mixture(mixture), ..layer }
            }
            dense => dense,
        });
        let stack = Some(Stack::new(layers));
        Self { stack, ..architecture }
    }

    /// Full attention of the widths that the config gives for all layers.
    pub fn attention(&self) -> Attention {
        Attention {
            reach: Reach::Full,
            heads: self.heads,
            kv_heads: self.kv_heads,
            key_dim: self.head_dim,
            value_dim: self.head_dim,
            rope: Some(Rotary { rope: self.rope, dims: self.head_dim, interleaved: false }),
            qk_norm: if self.qk_norm { QkNorm::PerHead } else { QkNorm::None },
            biases: self.biases,
            shares_key: false,
            output_gate: false,
            sinks: false,
            scale: None,
            softcap: None,
            fused: false,
        }
    }

    pub(super) fn mixture(&self, experts: &Experts) -> Mixture {
        let routing = match self.family {
            Family::DeepseekV3 => {
                Routing::Sigmoid { correction: true, groups: 1, chosen_groups: 1, renormalised: true }
            }
            _ => Routing::Softmax { renormalised: true },
        };
        let mixture = Mixture::new(experts.count, experts.per_token, experts.ffn_size, routing);
        Mixture { shared_width: experts.shared_ffn_size, ..mixture }
    }

    /// The storage of the KV cache beside weights of a dtype: what the checkpoint's own config asks for where they are its own, otherwise that of
    /// the weights, bf16 where they are quantised.
    pub fn cache_of(&self, weights: Dtype) -> Dtype {
        let own = self.quantization.as_ref().filter(|own| own.dtype() == Some(weights));
        own.and_then(|own| own.kv_cache).unwrap_or_else(|| weights.of_cache())
    }

    /// Positions of KV that a token at `context` reads in a layer without a stack.
    pub fn attended(&self, layer: usize, context: usize) -> usize {
        self.window(layer).map_or(context, |w| w.min(context))
    }

    /// Elements that one token keeps in the KV cache of one layer without a stack.
    pub fn kv_elements_per_token_and_layer(&self) -> usize {
        match self.latent {
            Some(latent) => latent.cached(),
            None => 2 * self.kv_heads * self.head_dim,
        }
    }

    /// Whether the feed-forward of a layer is routed over experts.
    pub fn is_expert_layer(&self, layer: usize) -> bool {
        self.experts.as_ref().is_some_and(|e| !e.dense_layers.contains(&layer))
    }
}

/// How numbers are stored: one name for weights, activations and KV on the command line and in results.
#[derive(Serialize, Deserialize, ValueEnum)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Dtype {
    #[value(alias = "float32", alias = "fp32")]
    F32,
    #[default]
    #[value(alias = "bfloat16")]
    Bf16,
    #[value(alias = "float16", alias = "fp16", alias = "half")]
    F16,
    /// One scale per output channel.
    Int8,
    /// e4m3, one scale per 128 × 128 block or per channel.
    #[value(alias = "fp8_e4m3")]
    Fp8,
    /// Groups of 32 or 128 with a scale, and a zero where they are not symmetric.
    Int4,
    /// e4m3, an exponent per 32 inputs (OCP microscaling).
    Mxfp8,
    /// e2m1, an exponent per 32 inputs (OCP microscaling).
    Mxfp4,
    /// e2m1, an e4m3 scale per 16 inputs.
    Nvfp4,
    /// ggml's blocks of 32 with one scale, throughout.
    Q8_0,
    /// ggml's blocks of 32 four-bit weights with one scale; embedding and head in `q8_0`.
    Q4_0,
    /// ggml's blocks of 256 four-bit weights with 6-bit scales and minima; embedding and head in `q6_k`.
    #[value(name = "q4_k")]
    Q4K,
    /// As `q4_k` with five bits a weight; embedding and head in `q6_k`.
    #[value(name = "q5_k")]
    Q5K,
    /// ggml's blocks of 256 six-bit weights with 8-bit scales, throughout.
    #[value(name = "q6_k")]
    Q6K,
    /// A GGUF file's own mixture of block formats.
    Gguf,
}

impl Dtype {
    /// The name on the command line and in results.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
            Self::Int8 => "int8",
            Self::Fp8 => "fp8",
            Self::Int4 => "int4",
            Self::Mxfp8 => "mxfp8",
            Self::Mxfp4 => "mxfp4",
            Self::Nvfp4 => "nvfp4",
            Self::Q8_0 => "q8_0",
            Self::Q4_0 => "q4_0",
            Self::Q4K => "q4_k",
            Self::Q5K => "q5_k",
            Self::Q6K => "q6_k",
            Self::Gguf => "gguf",
        }
    }

    /// The default KV cache dtype for weights of this dtype: the same for floats, bf16 where they are quantised.
    pub fn of_cache(self) -> Self {
        match self {
            Self::F32 | Self::Bf16 | Self::F16 => self,
            _ => Self::Bf16,
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

    use super::*;

    #[test]
    fn a_cache_is_stored_as_the_config_asks_beside_its_own_weights_alone() {
        let own = Quantization {
            method: "modelopt".into(),
            bits: 8,
            float: true,
            kv_cache: Some(Dtype::Fp8),
            ..Quantization::default()
        };
        let plain = super::super::test_shapes::llama_3_1_8b();
        let asks = Architecture { quantization: Some(own), ..plain.clone() };
        assert_eq!(asks.cache_of(Dtype::Fp8), Dtype::Fp8);
        assert_eq!((asks.cache_of(Dtype::Int4), asks.cache_of(Dtype::F32)), (Dtype::Bf16, Dtype::F32));
        assert_eq!((plain.cache_of(Dtype::Fp8), plain.cache_of(Dtype::Gguf)), (Dtype::Bf16, Dtype::Bf16));
    }

    #[test]
    fn a_dtype_has_one_name_on_the_command_line_in_json_and_in_results() {
        for dtype in Dtype::value_variants() {
            assert_eq!(serde_json::to_value(dtype).unwrap(), dtype.name());
            assert_eq!(Dtype::from_str(dtype.name(), false), Ok(*dtype));
        }
    }
}
