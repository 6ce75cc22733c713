//! candle-transformers' models behind one enum.
//!
//! Enters: an [`Architecture`] and tensors. Leaves: [`StockModel`], whose `forward` is candle's, unchanged. What a family
//! of candle 0.11 cannot do, or does differently from the published model, is refused here by name, before candle runs it.

use std::collections::HashMap;

use candle_core::quantized::gguf_file;
use candle_core::{DType, Device, Result as CandleResult, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::{
    llama, mistral, mixtral, olmo2, phi3, quantized_llama, quantized_qwen3, qwen2, qwen2_moe, qwen3,
    qwen3_moe,
};
use serde::de::DeserializeOwned;
use serde_json::{Value as Json, json};

use crate::engine::EngineError;
use hbmark_core::model::{Architecture, Biases, Dtype, Family, Mixer, Mixture, RopeScaling, Routing};

/// Positions that candle's quantised llama precomputes rotary tables for (`quantized_llama::MAX_SEQ_LEN`).
const QUANTIZED_LLAMA_POSITIONS: usize = quantized_llama::MAX_SEQ_LEN;

/// How far the stock engine can go with a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    pub max_positions: usize,
    pub reason: Option<String>,
    /// The weights stay quantised, as in a GGUF file.
    pub quantized: bool,
}

/// Checks that candle runs this architecture as its authors meant it, and says up to which context.
pub fn limits(architecture: &Architecture, dtype: Dtype, quantized: bool) -> Result<Limits, EngineError> {
    let a = architecture;
    if let Some(q) = &a.quantization
        && !quantized
    {
        return refuse(
            format!("`{}` quantised safetensors", q.method),
            "candle-transformers has no loader for them; take --engine native, a GGUF file or unquantised weights",
        );
    }
    if a.draft.is_some() {
        return refuse(
            "layers that draft for a model".to_owned(),
            "candle-transformers has none; take --engine native",
        );
    }
    check_family(a, dtype)?;
    check_shape(a, quantized)?;
    if quantized && !matches!(a.family, Family::Llama | Family::Qwen3) {
        return refuse(format!("GGUF files of {:?}", a.family), "only llama and qwen3 are wired up");
    }
    let mut limits = Limits { max_positions: a.max_positions, reason: None, quantized };
    let mut lower_to = |positions: usize, reason: String| {
        if positions < limits.max_positions {
            (limits.max_positions, limits.reason) = (positions, Some(reason));
        }
    };
    if let Some(window) = (0..a.layers).filter_map(|layer| a.window(layer)).min() {
        lower_to(
            window,
            format!("sliding window of {window}: beyond it candle's decode attends to the whole cache"),
        );
    }
    if quantized && a.family == Family::Llama {
        let positions = QUANTIZED_LLAMA_POSITIONS;
        lower_to(positions, format!("candle's quantised llama has rotary tables for {positions} positions"));
    }
    if !quantized && let Some(whole) = whole_numbers(a.family, dtype) {
        let reason = format!(
            "candle's {:?} counts positions in {dtype}, which holds no odd number above {whole}; choose --dtype f32",
            a.family
        );
        lower_to(whole, reason);
    }
    Ok(limits)
}

fn refuse<T>(what: String, why: &str) -> Result<T, EngineError> {
    Err(EngineError::unsupported("stock", what, why))
}

/// Checks that candle has the family, in this dtype and build.
fn check_family(a: &Architecture, dtype: Dtype) -> Result<(), EngineError> {
    match a.family {
        Family::Llama | Family::Mistral | Family::Qwen2 | Family::Qwen3 | Family::Phi3 => {}
        Family::Olmo2 | Family::Mixtral | Family::Qwen2Moe | Family::Qwen3Moe if dtype == Dtype::F32 => {}
        Family::Olmo2 | Family::Mixtral | Family::Qwen2Moe | Family::Qwen3Moe => {
            return refuse(
                format!("{:?} in {dtype}", a.family),
                "candle's rotary angles, or its router's weights, are right in f32 alone; choose --dtype f32",
            );
        }
        other => {
            return refuse(
                format!("the {other:?} family"),
                "the stock engine has llama, mistral, qwen2, qwen3, phi3, and in f32 olmo2, mixtral, qwen2_moe and qwen3_moe; `hbmark predict` knows more",
            );
        }
    }
    if a.family == Family::Qwen3Moe && cfg!(feature = "cuda") {
        return refuse(
            "qwen3_moe in a build with CUDA".into(),
            "candle's own then has kernels for f16 and bf16 on a GPU alone, which are not wired up",
        );
    }
    if a.experts.is_some() && sparse_step(a).is_none() {
        return refuse(
            format!("{:?} with dense layers that no step gives", a.family),
            "candle has experts in every n-th layer and leaves `mlp_only_layers` out",
        );
    }
    Ok(())
}

/// Checks what candle's models take for given.
fn check_shape(a: &Architecture, quantized: bool) -> Result<(), EngineError> {
    let ordinary_heads = a.head_dim * a.heads == a.hidden_size;
    match a.rope.scaling {
        RopeScaling::None => {}
        RopeScaling::Linear { .. } | RopeScaling::Llama3 { .. }
            if a.family == Family::Llama && !quantized => {}
        other => {
            return refuse(
                format!("{} rope scaling for {:?}", other.name(), a.family),
                "candle would silently leave it out; its unquantised llama alone honours llama3 and linear",
            );
        }
    }
    match a.family {
        Family::Llama if a.biases != Biases::default() => {
            return refuse("llama with biases".into(), "candle's llama has none");
        }
        Family::Llama | Family::Qwen2 | Family::Phi3 | Family::Olmo2 | Family::Mixtral | Family::Qwen2Moe
            if !ordinary_heads =>
        {
            return refuse(
                format!(
                    "{:?} with head_dim {} where hidden/heads is {}",
                    a.family,
                    a.head_dim,
                    a.hidden_size / a.heads
                ),
                "candle derives head_dim from hidden_size",
            );
        }
        Family::Mistral | Family::Mixtral | Family::Qwen2Moe if a.tied_head => {
            return refuse(
                format!("{:?} with a tied head", a.family),
                "candle's always loads `lm_head.weight`",
            );
        }
        Family::Qwen2 | Family::Qwen2Moe if !a.biases.qkv || a.biases.o => {
            return refuse(
                format!("{:?} with other biases than q, k, v", a.family),
                "candle's has exactly those",
            );
        }
        Family::Mixtral if a.biases != Biases::default() => {
            return refuse("mixtral with biases".into(), "candle's mixtral has none");
        }
        Family::Olmo2 if a.biases.qkv != a.biases.o => {
            return refuse("olmo2 with biases of some projections".into(), "candle's has all four or none");
        }
        Family::Qwen2Moe if shared_width(a) == 0 => {
            return refuse("qwen2_moe without a shared expert".into(), "candle's always has one");
        }
        Family::Phi3 if !rotates_whole_heads(a) => {
            return refuse("phi3 that rotates a part of each head".into(), "only whole heads are wired up");
        }
        _ => {}
    }
    Ok(())
}

/// Positions that candle counts exactly, where it counts them in a dtype of the weights that has not all of them.
fn whole_numbers(family: Family, dtype: Dtype) -> Option<usize> {
    match (family, dtype) {
        (Family::Qwen2 | Family::Phi3, Dtype::Bf16) => Some(256),
        (Family::Qwen2 | Family::Phi3, Dtype::F16) => Some(2048),
        _ => None,
    }
}

/// The n of which every n-th layer has experts; `None` where no n gives the layers that have them.
fn sparse_step(a: &Architecture) -> Option<usize> {
    let sparse = |layer: usize| a.layer(layer).feed_forward.mixture().is_some();
    let first = (0..a.layers).find(|layer| sparse(*layer))?;
    let step = first + 1;
    (0..a.layers).all(|layer| sparse(layer) == (layer + 1).is_multiple_of(step)).then_some(step)
}

fn shared_width(a: &Architecture) -> usize {
    a.experts.as_ref().map_or(0, |experts| experts.shared_ffn_size)
}

fn rotates_whole_heads(a: &Architecture) -> bool {
    (0..a.layers).all(|layer| {
        let Mixer::Attention(attention) = a.layer(layer).mixer else { return false };
        attention.rope.is_some_and(|rotary| rotary.dims == a.head_dim)
    })
}

/// One of candle's models with its KV cache. Cloning shares every tensor and copies only handles.
#[derive(Clone)]
pub enum StockModel {
    Llama { model: std::sync::Arc<llama::Llama>, cache: Box<llama::Cache> },
    Mistral(Box<mistral::Model>),
    Qwen2(Box<qwen2::ModelForCausalLM>),
    Qwen3(Box<qwen3::ModelForCausalLM>),
    Phi3(Box<phi3::Model>),
    Olmo2(Box<olmo2::Model>),
    Mixtral(Box<mixtral::Model>),
    Qwen2Moe(Box<qwen2_moe::Model>),
    Qwen3Moe(Box<qwen3_moe::ModelForCausalLM>),
    QuantizedLlama(Box<quantized_llama::ModelWeights>),
    QuantizedQwen3(Box<quantized_qwen3::ModelWeights>),
}

impl std::fmt::Debug for StockModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StockModel")
    }
}

impl StockModel {
    /// Builds candle's model over loaded tensors. [`limits`] must have passed and the inventory been checked: some of
    /// candle's constructors panic on missing tensors.
    pub fn build(
        architecture: &Architecture,
        tensors: HashMap<String, Tensor>,
        dtype: DType,
        device: &Device,
    ) -> CandleResult<Self> {
        let a = architecture;
        let builder = VarBuilder::from_tensors(tensors, dtype, device);
        Ok(match a.family {
            Family::Llama => {
                let config = llama_config(a);
                let cache = llama::Cache::new(true, dtype, &config, device)?;
                let model = llama::Llama::load(builder, &config)?;
                Self::Llama { model: std::sync::Arc::new(model), cache: Box::new(cache) }
            }
            Family::Mistral => {
                let config = config(a, &json!({ "sliding_window": a.window(0) }))?;
                Self::Mistral(Box::new(mistral::Model::new(&config, builder)?))
            }
            Family::Qwen2 => {
                let config = config(a, &json!({ "sliding_window": widest_window(a) }))?;
                Self::Qwen2(Box::new(qwen2::ModelForCausalLM::new(&config, builder)?))
            }
            Family::Qwen3 => {
                Self::Qwen3(Box::new(qwen3::ModelForCausalLM::new(&config(a, &json!({}))?, builder)?))
            }
            Family::Phi3 => Self::Phi3(Box::new(phi3::Model::new(&config(a, &json!({}))?, builder)?)),
            Family::Olmo2 => Self::Olmo2(Box::new(olmo2::Model::new(&config(a, &json!({}))?, builder)?)),
            Family::Mixtral => Self::Mixtral(Box::new(mixtral::Model::new(&mixtral_config(a)?, builder)?)),
            Family::Qwen2Moe => {
                let config = qwen_moe_config(a, Some(widest_window(a)))?;
                Self::Qwen2Moe(Box::new(qwen2_moe::Model::new(&config, builder)?))
            }
            Family::Qwen3Moe => {
                let config = qwen_moe_config(a, None)?;
                Self::Qwen3Moe(Box::new(qwen3_moe::ModelForCausalLM::new(&config, builder)?))
            }
            other => candle_core::bail!("no stock model for {other:?}"),
        })
    }

    /// Reads a GGUF file through candle's quantised models. The header must have been validated before.
    pub fn build_gguf(
        architecture: &Architecture,
        content: gguf_file::Content,
        file: &mut std::fs::File,
        device: &Device,
    ) -> CandleResult<Self> {
        Ok(match architecture.family {
            Family::Llama => Self::QuantizedLlama(Box::new(quantized_llama::ModelWeights::from_gguf(
                content, file, device,
            )?)),
            Family::Qwen3 => Self::QuantizedQwen3(Box::new(quantized_qwen3::ModelWeights::from_gguf(
                content, file, device,
            )?)),
            other => candle_core::bail!("no quantised stock model for {other:?}"),
        })
    }

    /// Runs candle's forward and returns the last position's logits, f32, `[batch, vocab]`.
    ///
    /// *Shapes*: `tokens: [batch, tokens], u32`.
    pub fn forward(&mut self, tokens: &Tensor, position: usize) -> CandleResult<Tensor> {
        let logits = match self {
            Self::Llama { model, cache } => model.forward(tokens, position, cache)?,
            Self::Mistral(model) => model.forward(tokens, position)?.squeeze(1)?,
            Self::Qwen2(model) => model.forward(tokens, position)?.squeeze(1)?,
            Self::Qwen3(model) => model.forward(tokens, position)?.squeeze(1)?,
            Self::Phi3(model) => model.forward(tokens, position)?.squeeze(1)?,
            Self::Olmo2(model) => model.forward(tokens, position)?.squeeze(1)?,
            Self::Mixtral(model) => model.forward(tokens, position)?.squeeze(1)?,
            Self::Qwen2Moe(model) => model.forward(tokens, position)?.squeeze(1)?,
            Self::Qwen3Moe(model) => model.forward(tokens, position)?.squeeze(1)?,
            Self::QuantizedLlama(model) => model.forward(tokens, position)?,
            Self::QuantizedQwen3(model) => model.forward(tokens, position)?,
        };
        logits.to_dtype(DType::F32)
    }
}

#[expect(clippy::cast_possible_truncation, reason = "candle's llama keeps rotary constants in f32")]
fn llama_config(a: &Architecture) -> llama::Config {
    let rope_scaling = match a.rope.scaling {
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
            Some(llama::Llama3RopeConfig {
                factor: factor as f32,
                low_freq_factor: low_freq_factor as f32,
                high_freq_factor: high_freq_factor as f32,
                original_max_position_embeddings: original_max_positions,
                rope_type: llama::Llama3RopeType::Llama3,
            })
        }
        // Linear scaling divides every frequency. candle has no such case, but its llama3 rule divides each frequency
        // whose wavelength exceeds original/low_freq_factor: an original of 0 puts all of them there.
        RopeScaling::Linear { factor } => Some(llama::Llama3RopeConfig {
            factor: factor as f32,
            low_freq_factor: 1.0,
            high_freq_factor: 2.0,
            original_max_position_embeddings: 0,
            rope_type: llama::Llama3RopeType::Llama3,
        }),
        RopeScaling::None | RopeScaling::Yarn { .. } | RopeScaling::LongRope { .. } => None,
    };
    llama::Config {
        hidden_size: a.hidden_size,
        intermediate_size: a.ffn_size,
        vocab_size: a.vocab_size,
        num_hidden_layers: a.layers,
        num_attention_heads: a.heads,
        num_key_value_heads: a.kv_heads,
        use_flash_attn: false,
        rms_norm_eps: a.norm_eps,
        rope_theta: a.rope.theta as f32,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling,
        max_position_embeddings: a.max_positions,
        tie_word_embeddings: a.tied_head,
    }
}

/// candle masks by the window even where the config says that it is not used. [`limits`] keeps every context inside it, so the widest one is
/// always right.
fn widest_window(a: &Architecture) -> usize {
    a.max_positions
}

/// A config of candle's as it reads it from a config.json, with what a family has more; it takes the keys it knows.
fn config<T: DeserializeOwned>(a: &Architecture, more: &Json) -> CandleResult<T> {
    let mut config = json!({
        "vocab_size": a.vocab_size,
        "hidden_size": a.hidden_size,
        "intermediate_size": a.ffn_size,
        "num_hidden_layers": a.layers,
        "num_attention_heads": a.heads,
        "num_key_value_heads": a.kv_heads,
        "head_dim": a.head_dim,
        "attention_bias": a.biases.qkv,
        "hidden_act": "silu",
        "max_position_embeddings": a.max_positions,
        "rms_norm_eps": a.norm_eps,
        "rope_theta": a.rope.theta,
        "tie_word_embeddings": a.tied_head,
        "use_sliding_window": false,
        "max_window_layers": a.layers,
        "use_flash_attn": false,
    });
    for (key, value) in more.as_object().into_iter().flatten() {
        config[key] = value.clone();
    }
    serde_json::from_value(config).map_err(candle_core::Error::wrap)
}

/// The experts that layers have, the step of these layers, and whether shares are renormalised.
fn mixture(a: &Architecture) -> CandleResult<(Mixture, usize, bool)> {
    let mixture = (0..a.layers).find_map(|layer| a.layer(layer).feed_forward.mixture().copied());
    match (mixture, sparse_step(a)) {
        (Some(mixture), Some(step)) => match mixture.routing {
            Routing::Softmax { renormalised } => Ok((mixture, step, renormalised)),
            other => candle_core::bail!("no stock model routes by {other:?}"),
        },
        _ => candle_core::bail!("no experts in every n-th layer"),
    }
}

fn mixtral_config(a: &Architecture) -> CandleResult<mixtral::Config> {
    let (mixture, ..) = mixture(a)?;
    let more = json!({
        "intermediate_size": mixture.width,
        "sliding_window": widest_window(a),
        "num_experts_per_tok": mixture.per_token,
        "num_local_experts": mixture.count,
    });
    config(a, &more)
}

fn qwen_moe_config<T: DeserializeOwned>(a: &Architecture, sliding_window: Option<usize>) -> CandleResult<T> {
    let (mixture, step, renormalised) = mixture(a)?;
    let more = json!({
        "sliding_window": sliding_window,
        "decoder_sparse_step": step,
        "moe_intermediate_size": mixture.width,
        "shared_expert_intermediate_size": mixture.shared_width,
        "num_experts_per_tok": mixture.per_token,
        "num_experts": mixture.count,
        "norm_topk_prob": renormalised,
    });
    config(a, &more)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// candle's table is made in the dtype of the weights: what it counts in bf16 stops being whole.
    #[test]
    fn positions_that_candle_cannot_count_are_beyond_the_limit() -> candle_core::Result<()> {
        let positions = |dtype| {
            Tensor::arange(0_u32, 4096, &Device::Cpu)?.to_dtype(dtype)?.to_dtype(DType::F32)?.to_vec1()
        };
        for (counted_in, dtype) in
            [(DType::BF16, Dtype::Bf16), (DType::F16, Dtype::F16), (DType::F32, Dtype::F32)]
        {
            let counted: Vec<f32> = positions(counted_in)?;
            let right = counted
                .iter()
                .zip(0_u16..)
                .take_while(|(counted, wanted)| counted.to_bits() == f32::from(*wanted).to_bits())
                .count();
            let config = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/models/qwen2/config.json");
            let mut qwen2 = hbmark_core::model::read_config(std::path::Path::new(config)).expect("a fixture");
            qwen2.max_positions = 4096;
            // The first position that is not counted is at the end of the even ones.
            assert_eq!(
                limits(&qwen2, dtype, false).expect("it runs").max_positions,
                right.min(4096) / 2 * 2,
                "{dtype}"
            );
        }
        Ok(())
    }

    /// The premise of the first footnote of `hbmark_core::ledger::stock`, asked of candle itself.
    #[test]
    fn a_value_cache_left_by_prefill_is_strided_and_stays_so_under_cat() -> candle_core::Result<()> {
        let (device, dtype) = (candle_core::Device::Cpu, candle_core::DType::F32);
        let values = |tokens: usize, kv_heads: usize| {
            candle_core::Tensor::zeros((1, tokens, kv_heads, 8), dtype, &device)?.transpose(1, 2)
        };
        let cache = values(5, 2)?;
        assert!(!cache.is_contiguous());
        let grown = candle_core::Tensor::cat(&[&cache, &values(1, 2)?], 2)?;
        assert!(!grown.is_contiguous());
        // After llama's copy it is contiguous and stays so; with one head it always was.
        let copied = candle_core::Tensor::cat(&[&grown.contiguous()?, &values(1, 2)?], 2)?;
        assert!(copied.is_contiguous());
        assert!(values(5, 1)?.is_contiguous());
        Ok(())
    }
}
