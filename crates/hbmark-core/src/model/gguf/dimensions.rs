//! GGUF metadata → [`Architecture`] of a dense model.
//!
//! Enters: a checked [`Header`]. Leaves: dimensions whose products are bounded, or the key that is wrong.

use super::header::{GgufError, Header, Value};
use crate::model::{Architecture, Biases, Dtype, Family, Multipliers, Rope, RopeScaling, YarnShape};

/// No model is near these; they keep every product of two dimensions far from overflow.
const MAX_LAYERS: usize = 1_024;
const MAX_HEADS: usize = 65_536;
const MAX_WIDTH: usize = 1 << 24;
const MAX_POSITIONS: usize = 1 << 30;
/// `llama.cpp`'s default where a file names no base.
const DEFAULT_THETA: f64 = 10_000.0;

/// Reads the dimensions of a llama, qwen2 or qwen3 file without experts.
///
/// # Errors
/// When the metadata lacks a dimension, or has a value that is not supported.
pub(super) fn dense(header: &Header) -> Result<Architecture, GgufError> {
    let name = text(header, "general.architecture")?.ok_or_else(|| missing("general.architecture"))?;
    let family = match name {
        "llama" => Family::Llama,
        "qwen2" => Family::Qwen2,
        "qwen3" => Family::Qwen3,
        other => return Err(GgufError::UnknownArchitecture { found: other.chars().take(80).collect() }),
    };
    let key = |suffix: &str| format!("{name}.{suffix}");
    let count = |suffix: &str, most| count(header, &key(suffix), 1, most);
    let required = |suffix: &str, most| count(suffix, most)?.ok_or_else(|| missing(&key(suffix)));

    let hidden_size = required("embedding_length", MAX_WIDTH)?;
    let heads = required("attention.head_count", MAX_HEADS)?;
    let kv_heads = count("attention.head_count_kv", MAX_HEADS)?.unwrap_or(heads);
    let head_dim = count("attention.key_length", MAX_HEADS)?.unwrap_or(hidden_size / heads);
    let unlike = |what: &str, found: usize| GgufError::UnsupportedModel {
        what: key(what),
        found: format!("{found} with {heads} heads of {head_dim}"),
    };
    if !heads.is_multiple_of(kv_heads) {
        return Err(unlike("attention.head_count_kv", kv_heads));
    }
    if head_dim == 0 || !head_dim.is_multiple_of(2) {
        return Err(unlike("attention.key_length", head_dim));
    }
    for same in ["attention.value_length", "rope.dimension_count"] {
        if let Some(found) = count(same, MAX_HEADS)?.filter(|found| *found != head_dim) {
            return Err(unlike(same, found));
        }
    }
    let layers = required("block_count", MAX_LAYERS)?;
    let window = self::count(header, &key("attention.sliding_window"), 0, MAX_POSITIONS)?.filter(|w| *w > 0);
    let norm_key = key("attention.layer_norm_rms_epsilon");
    Ok(Architecture {
        family,
        hidden_size,
        layers,
        heads,
        kv_heads,
        head_dim,
        ffn_size: required("feed_forward_length", MAX_WIDTH)?,
        vocab_size: vocab_size(header, name)?,
        max_positions: required("context_length", MAX_POSITIONS)?,
        norm_eps: float(header, &norm_key, 0.0, 1.0)?.ok_or_else(|| missing(&norm_key))?,
        rope: Rope {
            theta: float(header, &key("rope.freq_base"), 1.0, 1e12)?.unwrap_or(DEFAULT_THETA),
            scaling: rope_scaling(header, name)?,
        },
        qk_norm: has(header, "blk.0.attn_q_norm.weight"),
        biases: Biases {
            qkv: has(header, "blk.0.attn_q.bias"),
            o: has(header, "blk.0.attn_output.bias"),
            mlp: has(header, "blk.0.ffn_down.bias"),
        },
        tied_head: !has(header, "output.weight"),
        windows: window.map_or_else(Vec::new, |w| vec![Some(w); layers]),
        experts: None,
        latent: None,
        quantization: None,
        multipliers: Multipliers::default(),
        stack: None,
        draft: None,
        rope_factors: Vec::new(),
        native_dtype: Some(Dtype::Gguf),
        eos_tokens: eos_tokens(header)?,
    })
}

/// The token that ends a text, where the file names one.
pub(super) fn eos_tokens(header: &Header) -> Result<Vec<u32>, GgufError> {
    let id = count(header, "tokenizer.ggml.eos_token_id", 0, u32::MAX as usize)?;
    Ok(id.and_then(|id| u32::try_from(id).ok()).into_iter().collect())
}

/// Rows of the embedding table; the tokenizer's list and the size that is stated may be less (padding) and never more.
pub(super) fn vocab_size(header: &Header, name: &str) -> Result<usize, GgufError> {
    let table = header.tensors.iter().find(|t| t.name == "token_embd.weight");
    let rows = match table.map(|t| t.shape.as_slice()) {
        Some([rows, _]) => *rows,
        _ => {
            return Err(GgufError::UnsupportedModel {
                what: "token_embd.weight".to_owned(),
                found: if table.is_some() { "not a matrix" } else { "missing" }.to_owned(),
            });
        }
    };
    count(header, &format!("{name}.vocab_size"), 1, rows)?;
    match header.metadata.get("tokenizer.ggml.tokens") {
        Some(Value::Array { len }) if *len > rows as u64 => Err(GgufError::OutOfRange {
            key: "tokenizer.ggml.tokens".to_owned(),
            value: *len as f64,
            low: 1.0,
            high: rows as f64,
        }),
        _ => Ok(rows),
    }
}

pub(super) fn rope_scaling(header: &Header, architecture: &str) -> Result<RopeScaling, GgufError> {
    let key = |suffix: &str| format!("{architecture}.rope.scaling.{suffix}");
    let factor = || {
        let key = key("factor");
        float(header, &key, f64::MIN_POSITIVE, 1e6)?.ok_or_else(|| missing(&key))
    };
    match text(header, &key("type"))? {
        None | Some("none") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor: factor()? }),
        Some("yarn") => {
            let original = key("original_context_length");
            let (factor, usual) = (factor()?, YarnShape::default());
            let own = |suffix: &str| float(header, &key(suffix), f64::MIN_POSITIVE, 1e6);
            Ok(RopeScaling::Yarn {
                factor,
                original_max_positions: count(header, &original, 1, MAX_POSITIONS)?
                    .ok_or_else(|| missing(&original))?,
                shape: YarnShape {
                    beta_fast: own("yarn_beta_fast")?.unwrap_or(usual.beta_fast),
                    beta_slow: own("yarn_beta_slow")?.unwrap_or(usual.beta_slow),
                    // A file's factor multiplies the usual one.
                    attention_factor: own("attn_factor")?.map(|own| own * (0.1 * factor.max(1.0).ln() + 1.0)),
                    ..usual
                },
            })
        }
        Some(other) => Err(GgufError::UnsupportedModel {
            what: key("type"),
            found: format!("{:?}", other.chars().take(80).collect::<String>()),
        }),
    }
}

pub(super) fn has(header: &Header, tensor: &str) -> bool {
    header.tensors.iter().any(|t| t.name == tensor)
}

pub(super) fn missing(key: &str) -> GgufError {
    GgufError::MissingKey { key: key.to_owned() }
}

fn wrong(key: &str, found: &Value, wanted: &'static str) -> GgufError {
    GgufError::WrongKind { key: key.to_owned(), found: found.to_string(), wanted }
}

pub(super) fn text<'a>(header: &'a Header, key: &str) -> Result<Option<&'a str>, GgufError> {
    match header.metadata.get(key) {
        None => Ok(None),
        Some(Value::Text(value)) => Ok(Some(value)),
        Some(other) => Err(wrong(key, other, "text")),
    }
}

pub(super) fn count(header: &Header, key: &str, low: usize, high: usize) -> Result<Option<usize>, GgufError> {
    let (value, shown) = match header.metadata.get(key) {
        None => return Ok(None),
        Some(Value::Unsigned(value)) => (usize::try_from(*value).ok(), *value as f64),
        Some(Value::Signed(value)) => (usize::try_from(*value).ok(), *value as f64),
        Some(other) => return Err(wrong(key, other, "a whole number")),
    };
    match value {
        Some(value) if (low..=high).contains(&value) => Ok(Some(value)),
        _ => {
            let (key, low, high) = (key.to_owned(), low as f64, high as f64);
            Err(GgufError::OutOfRange { key, value: shown, low, high })
        }
    }
}

pub(super) fn float(header: &Header, key: &str, low: f64, high: f64) -> Result<Option<f64>, GgufError> {
    match header.metadata.get(key) {
        None => Ok(None),
        // A NaN is in no range.
        Some(Value::Float(value)) if (low..=high).contains(value) => Ok(Some(*value)),
        Some(Value::Float(value)) => {
            Err(GgufError::OutOfRange { key: key.to_owned(), value: *value, low, high })
        }
        Some(other) => Err(wrong(key, other, "a float")),
    }
}
