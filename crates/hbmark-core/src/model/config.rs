//! From the text of a `config.json` to a validated [`Architecture`].
//!
//! Enters: a Hugging Face config, as `transformers` 4 or 5 writes it. Leaves: an [`Architecture`] whose dimensions are bounded
//! and agree with one another, or a [`ModelError`] that names file, key, found and wanted value.
//!
//! Keys that change a result are applied or refused by name; a default is taken only where `transformers` itself has one
//! for that family and every reader agrees on it. Keys for training or generation only are ignored.

mod fields;
mod quantization;
mod rope;
mod windows;

use std::borrow::Cow;
use std::io;
use std::path::Path;

use serde_json::{Value, json};

use super::{
    Architecture, Biases, Dtype, Family, ModelError, Multipliers, Rope, RopeScaling, deepseek_v3, gemma,
    glm4, glm4_moe, gpt_oss, granite, llama, llama4, mimo_v2, minimax_m2, mistral, mixtral, nemotron_h,
    olmo2, phi3, qwen2, qwen2_moe, qwen3, qwen3_5, qwen3_moe, smollm3,
};
use crate::input::{self, InputError};
use crate::units::whole_count;

pub(super) use fields::Fields;
pub(super) use rope::{long_factors, mscale_all_dim, scaling};
pub(super) use windows::{Windows, full_layers, layer_kinds};

/// Bounds on a config; each is several times the largest published model, and far from overflow.
pub(super) mod limits {
    use std::ops::RangeInclusive;

    /// The longest published ones, with a scheme for every layer, are some hundred kilobytes.
    pub const CONFIG_BYTES: u64 = 4 << 20;
    /// Memory for the values of a config.
    pub const CONFIG_BUDGET: usize = 32 << 20;
    pub const HIDDEN: usize = 1 << 17;
    pub const LAYERS: usize = 1 << 12;
    pub const HEADS: usize = 1 << 12;
    pub const HEAD_DIM: usize = 1 << 13;
    pub const FFN: usize = 1 << 20;
    pub const VOCAB: usize = 1 << 22;
    pub const POSITIONS: usize = 1 << 27;
    pub const EXPERTS: usize = 1 << 16;
    pub const EOS_TOKENS: usize = 1 << 10;
    pub const PARAMETERS: u64 = 1 << 46;
    /// DeepSeek-V3 has 45,000, models of 384 experts 70,000; three times as many entries, as int4 has them, are listed in 64 MiB.
    pub const TENSORS: usize = 100_000;
    pub const THETA: RangeInclusive<f64> = 1.0..=1e15;
    pub const ROPE_FACTOR: RangeInclusive<f64> = 1e-3..=1e6;
    pub const NORM_EPS: RangeInclusive<f64> = 1e-30..=1e-1;
}

/// How one family is recognised and read: the whole of what a family file exports to this one.
#[derive(Debug)]
pub(super) struct FamilySpec {
    /// `model_type` and class of each config that the family reads.
    pub names: &'static [(&'static str, &'static str)],
    /// Keys that change the forward, that other families refuse and this one reads.
    pub keys: &'static [&'static str],
    pub read: fn(&Fields) -> Result<Architecture, ModelError>,
}

/// Every family hbmark reads.
const FAMILIES: &[&FamilySpec] = &[
    &llama::SPEC,
    &mistral::SPEC,
    &qwen2::SPEC,
    &qwen3::SPEC,
    &qwen3_moe::SPEC,
    &qwen2_moe::SPEC,
    &mixtral::SPEC,
    &deepseek_v3::SPEC,
    &gpt_oss::SPEC,
    &qwen3_5::SPEC,
    &gemma::SPEC,
    &glm4_moe::SPEC,
    &minimax_m2::SPEC,
    &nemotron_h::SPEC,
    &llama4::SPEC,
    &phi3::SPEC,
    &mimo_v2::SPEC,
    &smollm3::SPEC,
    &granite::SPEC,
    &olmo2::SPEC,
    &glm4::SPEC,
];

/// Reads and parses a `config.json`, and the `hf_quant_config.json` beside it where the config has no `quantization_config`.
///
/// # Errors
/// When the file cannot be read, is not a regular file, is longer than 4 MiB, or [`parse_config`] refuses it.
pub fn read_config(path: &Path) -> Result<Architecture, ModelError> {
    let text = read_json(path)?;
    let beside = path.with_file_name("hf_quant_config.json");
    let quantization = if beside.is_file() { Some(read_json(&beside)?) } else { None };
    parse(&text, path, quantization.as_deref().map(|text| (text, beside.as_path())))
}

fn read_json(path: &Path) -> Result<String, ModelError> {
    input::read_text(path, limits::CONFIG_BYTES).map_err(|refused| {
        let path = path.to_owned();
        match refused {
            InputError::NotRegular { .. } => ModelError::NotAFile { path },
            InputError::TooLarge { size, limit } => ModelError::ConfigTooLarge { path, found: size, limit },
            InputError::Io(source) => ModelError::Read { path, source },
            other @ InputError::NotText { .. } => ModelError::Read { path, source: io::Error::other(other) },
        }
    })
}

/// Parses the text of a `config.json`; `path` is only for messages.
///
/// # Errors
/// When the text is not JSON, the architecture is not one of the supported families, a dimension is missing, out of range or at odds
/// with another, or a key asks for a computation that hbmark does not have.
pub fn parse_config(text: &str, path: &Path) -> Result<Architecture, ModelError> {
    parse(text, path, None)
}

fn parse(text: &str, path: &Path, quantization: Option<(&str, &Path)>) -> Result<Architecture, ModelError> {
    let mut document = document(text, path)?;
    if let (Some((text, beside)), Value::Object(map)) = (quantization, &mut document) {
        let nested = map.get("text_config").and_then(|nested| nested.get("quantization_config"));
        if nested.is_none() && map.get("quantization_config").is_none_or(Value::is_null) {
            let mut own = document_of_modelopt(text, beside)?;
            own.insert("quant_method".to_owned(), json!("modelopt"));
            map.insert("quantization_config".to_owned(), Value::Object(own));
        }
    }
    let fields = Fields::top(path, &document)?;
    let spec = recognise(&fields)?;
    let fields = fields.text_model()?;
    refuse_foreign_keys(&fields, spec.keys)?;
    let architecture = (spec.read)(&fields)?;
    check_size(&architecture, path)?;
    architecture.check().map_err(|refused| ModelError::BadValue {
        path: path.to_owned(),
        key: refused.what.to_owned(),
        found: refused.found,
        wanted: refused.wanted.to_owned(),
    })?;
    Ok(architecture)
}

fn document(text: &str, path: &Path) -> Result<Value, ModelError> {
    input::json::from_str(&quote_python_floats(text), limits::CONFIG_BUDGET).map_err(|e| {
        ModelError::ConfigSyntax {
            path: path.to_owned(),
            line: e.line(),
            column: e.column(),
            reason: e.to_string(),
        }
    })
}

/// The object under `quantization` that modelopt writes into a file of its own.
fn document_of_modelopt(text: &str, path: &Path) -> Result<serde_json::Map<String, Value>, ModelError> {
    let document = document(text, path)?;
    let fields = Fields::top(path, &document)?;
    match fields.get("quantization") {
        Some(Value::Object(map)) => Ok(map.clone()),
        _ => Err(fields.missing("quantization", "an object with `quant_algo`")),
    }
}

/// Python writes `NaN` and `Infinity` bare, which JSON does not have. Quoted, they are harmless in ignored keys and a
/// wrong type in the others.
fn quote_python_floats(text: &str) -> Cow<'_, str> {
    const WORDS: [&str; 3] = ["-Infinity", "Infinity", "NaN"];
    if !WORDS.iter().any(|word| text.contains(word)) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    let (mut in_string, mut escaped) = (false, false);
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        if !in_string && let Some(word) = WORDS.iter().find(|word| rest.starts_with(**word)) {
            out.push('"');
            out.push_str(word);
            out.push('"');
            rest = &rest[word.len()..];
            continue;
        }
        if c == '"' && !escaped {
            in_string = !in_string;
        }
        escaped = in_string && c == '\\' && !escaped;
        out.push(c);
        rest = &rest[c.len_utf8()..];
    }
    Cow::Owned(out)
}

/// Finds the family by `model_type` and `architectures`, which must not contradict each other.
fn recognise(fields: &Fields) -> Result<&'static FamilySpec, ModelError> {
    let model_type = fields.text("model_type")?;
    let classes = fields.list("architectures", 16)?.unwrap_or_default();
    let class = classes.first().and_then(Value::as_str);
    let named = |name: &(&str, &str)| match (model_type, class) {
        (Some(model_type), Some(class)) => *name == (model_type, class),
        (Some(model_type), None) => name.0 == model_type && classes.is_empty(),
        (None, Some(class)) => name.1 == class,
        (None, None) => false,
    };
    let spec = FAMILIES.iter().copied().find(|spec| spec.names.iter().any(named));
    if let Some(spec) = spec {
        return Ok(spec);
    }
    if model_type.is_none() && classes.is_empty() {
        return Err(fields.missing("model_type", listed(|(model_type, _)| model_type.to_string())));
    }
    let shown =
        classes.first().map(|c| format!("({})", c.as_str().map_or_else(|| c.to_string(), str::to_owned)));
    let found: Vec<_> = model_type.map(str::to_owned).into_iter().chain(shown).collect();
    Err(ModelError::UnsupportedArchitecture {
        path: fields.path().to_owned(),
        found: found.join(" ").chars().take(120).collect(),
        supported: listed(|(model_type, class)| format!("{model_type} ({class})")),
    })
}

fn listed(name: fn(&(&str, &str)) -> String) -> String {
    FAMILIES.iter().flat_map(|spec| spec.names).map(name).collect::<Vec<_>>().join(", ")
}

/// Refuses keys of other families that change the forward, unless they change nothing.
fn refuse_foreign_keys(fields: &Fields, own: &[&str]) -> Result<(), ModelError> {
    let neutral = [
        ("partial_rotary_factor", json!(1.0)),
        ("rotary_pct", json!(1.0)),
        // Granite, Cohere, MiniCPM and other scaled residual streams.
        ("residual_multiplier", json!(1.0)),
        ("embedding_multiplier", json!(1.0)),
        ("logits_scaling", json!(1.0)),
        ("logit_scale", json!(1.0)),
        ("scale_emb", json!(1.0)),
        ("attention_multiplier", Value::Null),
        ("scale_depth", Value::Null),
        // Gemma.
        ("attn_logit_softcapping", Value::Null),
        ("final_logit_softcapping", Value::Null),
        ("query_pre_attn_scalar", Value::Null),
        ("sliding_window_pattern", Value::Null),
        ("num_kv_shared_layers", json!(0)),
        // Llama 4, OLMo, gpt-oss, DeepSeek V3.2, Qwen3-Next.
        ("attention_chunk_size", Value::Null),
        ("no_rope_layers", Value::Null),
        ("no_rope_layer_interval", Value::Null),
        ("clip_qkv", Value::Null),
        ("swiglu_limit", Value::Null),
        ("index_topk", Value::Null),
        ("attn_output_gate", json!(false)),
        ("use_qk_norm", json!(false)),
        // DeepSeek V4, GLM 5.2, MiniMax M3, Kimi K3, and layers that are not attention.
        ("compress_ratios", Value::Null),
        ("hc_mult", Value::Null),
        ("indexer_types", Value::Null),
        ("sparse_attention_config", Value::Null),
        ("linear_attn_config", Value::Null),
        ("hybrid_override_pattern", Value::Null),
        ("linear_num_value_heads", Value::Null),
        ("attention_k_eq_v", json!(false)),
        ("hidden_size_per_layer_input", json!(0)),
        ("attention_sink", json!(false)),
        ("rope_interleaved", json!(false)),
        ("alibi", json!(false)),
        ("add_cross_attention", json!(false)),
        ("is_encoder_decoder", json!(false)),
    ];
    let foreign = neutral.iter().filter(|(key, _)| !own.contains(key));
    foreign.into_iter().try_for_each(|(key, value)| fields.only(key, value))?;
    if own.contains(&"hidden_act") {
        return Ok(());
    }
    // Fields::text first: a number here is a wrong type, not an unknown function.
    match fields.text("hidden_act")? {
        None | Some("silu") => Ok(()),
        Some(_) => Err(fields.unsupported("hidden_act", "silu")),
    }
}

/// What the readers of the families do not share.
pub(super) struct Conventions {
    pub family: Family,
    /// `num_key_value_heads` may be absent and then equals `num_attention_heads`. Where it is false, only a null means that:
    /// `transformers` would take a constant unrelated to the model.
    pub kv_heads_may_be_absent: bool,
    /// Width of a head where the family has keys of its own for it; otherwise `head_dim`, or the hidden size shared out.
    pub head_dim: Option<usize>,
    /// `rope_theta` of a config that has none.
    pub theta: Option<f64>,
    pub qk_norm: bool,
    pub biases: Biases,
    pub windows: Windows,
    /// Inner width of a dense feed-forward where the family has a key of its own for it, or none.
    pub ffn_size: Option<usize>,
    pub norm_key: &'static str,
    /// Where the family has more than one, that of its full layers.
    pub rope: Option<Rope>,
    /// Keys of the rope's object that the family reads, or that say nothing of text.
    pub rope_keys: &'static [&'static str],
    /// What `transformers` takes for a key that the family's published configs leave out.
    pub default_heads: Option<usize>,
    pub default_kv_heads: Option<usize>,
    pub default_head_dim: Option<usize>,
    pub default_vocab: Option<usize>,
    pub default_positions: Option<usize>,
    pub default_eps: Option<f64>,
}

impl Conventions {
    /// Those of a family that is like most.
    pub fn of(family: Family) -> Self {
        Self {
            family,
            kv_heads_may_be_absent: false,
            head_dim: None,
            theta: None,
            qk_norm: false,
            biases: Biases::default(),
            windows: Windows::Never,
            ffn_size: None,
            norm_key: "rms_norm_eps",
            rope: None,
            rope_keys: &[],
            default_heads: None,
            default_kv_heads: None,
            default_head_dim: None,
            default_vocab: None,
            default_positions: None,
            default_eps: None,
        }
    }
}

/// Reads the dimensions that every decoder has; experts and latent attention are left to the family.
pub(super) fn decoder(fields: &Fields, conventions: &Conventions) -> Result<Architecture, ModelError> {
    let hidden_size = fields.need_integer("hidden_size", 1..=limits::HIDDEN)?;
    let layers = fields.need_integer("num_hidden_layers", 1..=limits::LAYERS)?;
    let or_default = |key: &str, most, default: Option<usize>| match (fields.get(key), default) {
        (None, Some(default)) => Ok(default),
        _ => fields.need_integer(key, 1..=most),
    };
    let heads = or_default("num_attention_heads", limits::HEADS, conventions.default_heads)?;
    let vocab_size = or_default("vocab_size", limits::VOCAB, conventions.default_vocab)?;
    let max_positions =
        or_default("max_position_embeddings", limits::POSITIONS, conventions.default_positions)?;
    let rope = match conventions.rope {
        Some(rope) => rope,
        None => rope::read(fields, conventions.theta, max_positions, conventions.rope_keys)?,
    };
    Ok(Architecture {
        family: conventions.family,
        hidden_size,
        layers,
        heads,
        kv_heads: kv_heads(fields, heads, conventions)?,
        head_dim: match (conventions.head_dim, conventions.default_head_dim) {
            (Some(own), _) => own,
            (None, Some(default)) if fields.get("head_dim").is_none() => default,
            _ => head_dim(fields, hidden_size, heads)?,
        },
        ffn_size: match conventions.ffn_size {
            Some(width) => width,
            None => fields.need_integer("intermediate_size", 1..=limits::FFN)?,
        },
        vocab_size,
        max_positions: extended(max_positions, rope),
        norm_eps: match (fields.get(conventions.norm_key), conventions.default_eps) {
            (None, Some(default)) => default,
            _ => fields.need_float(conventions.norm_key, limits::NORM_EPS)?,
        },
        rope,
        qk_norm: conventions.qk_norm,
        biases: conventions.biases,
        tied_head: fields.flag("tie_word_embeddings", false)?,
        windows: windows::read(fields, layers, conventions.windows)?,
        experts: None,
        latent: None,
        quantization: quantization::read(fields)?,
        native_dtype: native_dtype(fields)?,
        eos_tokens: eos_tokens(fields)?,
        multipliers: Multipliers::default(),
        stack: None,
        draft: None,
        rope_factors: Vec::new(),
    })
}

/// The positions that `YaRN` makes of a context, where the config does not count them already: vLLM and SGLang serve as many.
fn extended(positions: usize, rope: Rope) -> usize {
    let RopeScaling::Yarn { factor, original_max_positions, .. } = rope.scaling else { return positions };
    positions.max(whole_count(factor * original_max_positions as f64)).min(limits::POSITIONS)
}

fn kv_heads(fields: &Fields, heads: usize, conventions: &Conventions) -> Result<usize, ModelError> {
    let key = "num_key_value_heads";
    let default = conventions.default_kv_heads.filter(|_| fields.is_absent(key));
    if fields.is_absent(key) && !conventions.kv_heads_may_be_absent && default.is_none() {
        return Err(
            fields.missing(key, format!("a divisor of `num_attention_heads` ({heads}), or null for as many"))
        );
    }
    let kv_heads = fields.integer(key, 1..=limits::HEADS)?.or(default).unwrap_or(heads);
    if heads.is_multiple_of(kv_heads) {
        Ok(kv_heads)
    } else {
        Err(fields.bad(key, format!("a divisor of `num_attention_heads` ({heads})")))
    }
}

fn head_dim(fields: &Fields, hidden_size: usize, heads: usize) -> Result<usize, ModelError> {
    let (key, even) = ("head_dim", "an even number: the rotary embedding turns pairs");
    match fields.integer(key, 1..=limits::HEAD_DIM)? {
        Some(head_dim) if head_dim.is_multiple_of(2) => Ok(head_dim),
        Some(_) => Err(fields.bad(key, even)),
        None if !hidden_size.is_multiple_of(heads) => Err(fields.bad(
            "hidden_size",
            format!("a multiple of `num_attention_heads` ({heads}), or a `head_dim` beside it"),
        )),
        None if !(hidden_size / heads).is_multiple_of(2) => Err(fields.bad(
            "hidden_size",
            format!("an even multiple of `num_attention_heads` ({heads}): the rotary embedding turns pairs"),
        )),
        None if hidden_size / heads > limits::HEAD_DIM => {
            Err(fields.missing(key, format!("an integer from 1 to {}", limits::HEAD_DIM)))
        }
        None => Ok(hidden_size / heads),
    }
}

/// `torch_dtype` (4) or `dtype` (5).
fn native_dtype(fields: &Fields) -> Result<Option<Dtype>, ModelError> {
    let (new, old) = (fields.text("dtype")?, fields.text("torch_dtype")?);
    if new.is_some() && old.is_some() && new != old {
        return Err(fields.bad("dtype", "the same name as `torch_dtype`, or only one of them"));
    }
    let key = if new.is_some() { "dtype" } else { "torch_dtype" };
    let Some(name) = new.or(old) else { return Ok(None) };
    match name.strip_prefix("torch.").unwrap_or(name) {
        "float32" => Ok(Some(Dtype::F32)),
        "bfloat16" => Ok(Some(Dtype::Bf16)),
        "float16" => Ok(Some(Dtype::F16)),
        "float8_e4m3fn" => Ok(Some(Dtype::Fp8)),
        _ => Err(fields.unsupported(key, "float32, bfloat16, float16, float8_e4m3fn")),
    }
}

/// One id, a list of ids, or none.
fn eos_tokens(fields: &Fields) -> Result<Vec<u32>, ModelError> {
    let key = "eos_token_id";
    let id = |value: &Value| {
        value
            .as_u64()
            .and_then(|id| u32::try_from(id).ok())
            .ok_or_else(|| fields.bad(key, "a token id, a list of token ids, or null"))
    };
    match fields.get(key) {
        None => Ok(Vec::new()),
        Some(Value::Array(_)) => {
            fields.list(key, limits::EOS_TOKENS)?.unwrap_or_default().iter().map(id).collect()
        }
        Some(value) => Ok(vec![id(value)?]),
    }
}

/// Reads `num_experts_per_tok`, which cannot be more than there are.
pub(super) fn experts_per_token(fields: &Fields, count: usize) -> Result<usize, ModelError> {
    fields.need_integer("num_experts_per_tok", 1..=count)
}

/// What shares are multiplied with: 1 where a config says nothing.
pub(super) fn routed_scaling_factor(fields: &Fields) -> Result<f64, ModelError> {
    Ok(fields.float("routed_scaling_factor", 1e-6..=1e6)?.unwrap_or(1.0))
}

/// Elements of a head that turn, whole pairs, by `partial_rotary_factor`; or by the share that `transformers` takes where the key does not occur.
pub(super) fn rotary_dims(fields: &Fields, head_dim: usize, absent: f64) -> Result<usize, ModelError> {
    let key = "partial_rotary_factor";
    let nested = fields.section("rope_parameters")?;
    let inner = nested.as_ref().map(|section| section.float(key, 0.0..=1.0)).transpose()?.flatten();
    let outer = fields.float(key, 0.0..=1.0)?;
    if let (Some(outer), Some(inner)) = (outer, inner)
        && (outer - inner).abs() > 0.0
    {
        return Err(fields.bad(key, format!("{inner}, as in `rope_parameters`, or only one of them")));
    }
    let factor = outer.or(inner).unwrap_or(absent);
    let dims = whole_count(head_dim as f64 * factor);
    // As loaders do: an odd width loses its last column.
    Ok(dims / 2 * 2)
}

/// Refuses products of dimensions that no machine holds, though each of them is in range.
fn check_size(a: &Architecture, path: &Path) -> Result<(), ModelError> {
    if a.parameters_at_least().is_none_or(|n| n > limits::PARAMETERS) {
        return Err(ModelError::TooManyParameters { path: path.to_owned(), limit: limits::PARAMETERS });
    }
    if a.tensors_at_most() > limits::TENSORS {
        return Err(ModelError::TooManyTensors { path: path.to_owned(), limit: limits::TENSORS });
    }
    Ok(())
}

#[cfg(test)]
mod tests;
