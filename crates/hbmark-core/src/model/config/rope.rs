//! Rotary base and scaling, in the spellings of `transformers` 4 and 5.
//!
//! 4 writes `rope_theta` beside `rope_scaling` (whose kind is `rope_type`, earlier `type`); 5 writes one `rope_parameters`. A key
//! unknown to this reader inside either object is refused by name: it would change every logit.

use serde_json::{Value, json};

use super::fields::Fields;
use super::limits;
use crate::model::{ModelError, Rope, RopeScaling, YarnShape};

/// What `YaRN`'s own numbers may be.
const MSCALE: std::ops::RangeInclusive<f64> = 0.0..=1e6;

const SUPPORTED: &str = "default, linear, llama3, yarn, and longrope of phi3";

/// The original context of a Phi config that does not state it, as `transformers` has it.
const PHI_ORIGINAL: usize = 4096;

/// Reads base and scaling; `default_theta` is the family's own, where `transformers` gives it one.
pub(super) fn read(
    fields: &Fields,
    default_theta: Option<f64>,
    positions: usize,
    extra: &[&str],
) -> Result<Rope, ModelError> {
    let old = fields.section("rope_scaling")?;
    let new = fields.section("rope_parameters")?;
    if old.is_some() && new.is_some() && fields.get("rope_scaling") != fields.get("rope_parameters") {
        return Err(fields.bad("rope_scaling", "the same object as `rope_parameters`, or only one of them"));
    }
    let section = new.or(old);
    // Phi writes the original context beside the rope's object, transformers 5 into both.
    let mut original = positions;
    if extra.contains(&"long_factor") {
        let key = "original_max_position_embeddings";
        let outer = fields.integer(key, 1..=limits::POSITIONS)?;
        let inner = match &section {
            Some(section) => section.integer(key, 1..=limits::POSITIONS)?,
            None => None,
        };
        if let (Some(outer), Some(inner)) = (outer, inner)
            && outer != inner
        {
            return Err(fields.bad(key, format!("{inner}, as in the rope's object")));
        }
        original = inner.or(outer).unwrap_or(PHI_ORIGINAL);
    }

    let outer = fields.float("rope_theta", limits::THETA)?;
    let inner = section.as_ref().map(|s| s.float("rope_theta", limits::THETA)).transpose()?.flatten();
    if let (Some(outer), Some(inner)) = (outer, inner)
        && outer.to_bits() != inner.to_bits()
    {
        return Err(fields.bad("rope_theta", format!("{inner}, as in `rope_parameters.rope_theta`")));
    }
    let theta =
        inner.or(outer).or(default_theta).ok_or_else(|| fields.missing("rope_theta", "the rotary base"))?;

    let scaling = match section {
        None => RopeScaling::None,
        Some(section) => scaling(&section, positions, original, extra)?,
    };
    Ok(Rope { theta, scaling })
}

/// The scaling that an object asks for, in a model of so many positions, which had `original` before it was scaled where the object does not
/// say; `extra` are keys in it that the family reads itself.
pub(in crate::model) fn scaling(
    section: &Fields,
    positions: usize,
    original: usize,
    extra: &[&str],
) -> Result<RopeScaling, ModelError> {
    if !extra.contains(&"partial_rotary_factor") {
        section.only("partial_rotary_factor", &json!(1.0))?;
    }
    let accept_only =
        |section: &Fields, kind: &str, keys: &[&str]| accept_only(section, kind, &[keys, extra].concat());
    let (new, old) = (section.text("rope_type")?, section.text("type")?);
    if new.is_some() && old.is_some() && new != old {
        return Err(section.bad("type", "the same kind as `rope_type`, or only one of them"));
    }
    let key = if new.is_some() { "rope_type" } else { "type" };
    let kind = match new.or(old) {
        Some(kind) => kind,
        // Version 5 leaves the kind out where nothing is scaled.
        None if section.get("factor").is_none() => "default",
        None => return Err(section.missing("rope_type", SUPPORTED)),
    };

    let factor = || section.need_float("factor", limits::ROPE_FACTOR);
    let key_of_original = "original_max_position_embeddings";
    match kind {
        "default" => {
            accept_only(section, kind, &[])?;
            Ok(RopeScaling::None)
        }
        "linear" => {
            accept_only(section, kind, &["factor"])?;
            Ok(RopeScaling::Linear { factor: factor()? })
        }
        "llama3" => {
            accept_only(section, kind, &["factor", "low_freq_factor", "high_freq_factor", key_of_original])?;
            let low_freq_factor = section.need_float("low_freq_factor", limits::ROPE_FACTOR)?;
            let high_freq_factor = section.need_float("high_freq_factor", limits::ROPE_FACTOR)?;
            // Llama 4 has them equal, and no frequency between them.
            let equal = extra.contains(&"high_freq_factor") && high_freq_factor >= low_freq_factor;
            if high_freq_factor <= low_freq_factor && !equal {
                return Err(section
                    .bad("high_freq_factor", format!("more than `low_freq_factor` ({low_freq_factor})")));
            }
            let original_max_positions = section.need_integer(key_of_original, 1..=limits::POSITIONS)?;
            Ok(RopeScaling::Llama3 {
                factor: factor()?,
                low_freq_factor,
                high_freq_factor,
                original_max_positions,
            })
        }
        "yarn" => {
            let keys = ["beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"];
            accept_only(section, kind, &[&keys[..], &["factor", "truncate", key_of_original]].concat())?;
            let original_max_positions =
                section.integer(key_of_original, 1..=limits::POSITIONS)?.unwrap_or(original);
            let factor = factor()?;
            Ok(RopeScaling::Yarn { factor, original_max_positions, shape: yarn_shape(section, factor)? })
        }
        "longrope" if extra.contains(&"long_factor") => {
            accept_only(section, kind, &["factor", "attention_factor", key_of_original])?;
            let original_max_positions =
                section.integer(key_of_original, 1..=limits::POSITIONS)?.unwrap_or(original);
            let factor = section.float("factor", limits::ROPE_FACTOR)?;
            let factor = factor.unwrap_or(positions as f64 / original_max_positions as f64);
            let attention_factor = section.float("attention_factor", MSCALE)?.unwrap_or_else(|| {
                // A context of one token has no logarithm to divide by.
                let grown = factor > 1.0 && original_max_positions > 1;
                let of_original = (original_max_positions as f64).ln();
                if grown { (1.0 + factor.ln() / of_original).sqrt() } else { 1.0 }
            });
            Ok(RopeScaling::LongRope { original_max_positions, attention_factor })
        }
        // Gemma 4: partial, with the frequencies of the whole head.
        "proportional" if extra.contains(&"partial_rotary_factor") => Ok(RopeScaling::None),
        _ => Err(section.unsupported(key, SUPPORTED)),
    }
}

/// What each frequency is divided by under `longrope`, for a part of a head of so many dimensions that turns: `long_factor` where a model's own
/// context is longer than the original one, as vLLM does at any length of a request; `transformers` goes by each request's.
pub(in crate::model) fn long_factors(
    fields: &Fields,
    scaling: RopeScaling,
    positions: usize,
    dims: usize,
) -> Result<Vec<f64>, ModelError> {
    let RopeScaling::LongRope { original_max_positions, .. } = scaling else { return Ok(Vec::new()) };
    let Some(section) = fields.section("rope_parameters")?.or(fields.section("rope_scaling")?) else {
        return Ok(Vec::new());
    };
    let key = if positions > original_max_positions { "long_factor" } else { "short_factor" };
    let wanted = format!("{} numbers above 0, one for each pair that turns", dims / 2);
    let list = section.list(key, dims / 2)?.ok_or_else(|| section.missing(key, wanted.clone()))?;
    let factors: Vec<f64> =
        list.iter().filter_map(Value::as_f64).filter(|factor| limits::ROPE_FACTOR.contains(factor)).collect();
    if list.len() == dims / 2 && factors.len() == list.len() {
        Ok(factors)
    } else {
        Err(section.bad(key, wanted))
    }
}

/// What `YaRN` multiplies scores with, squared, where a config gives it a scale for all dimensions (`DeepSeek`).
pub(in crate::model) fn mscale_all_dim(fields: &Fields) -> Result<Option<f64>, ModelError> {
    let Some(section) = fields.section("rope_parameters")?.or(fields.section("rope_scaling")?) else {
        return Ok(None);
    };
    let (factor, scale) =
        (section.float("factor", limits::ROPE_FACTOR)?, section.float("mscale_all_dim", MSCALE)?);
    Ok(factor.zip(scale.filter(|scale| *scale > 0.0)).map(|(factor, scale)| mscale(factor, scale)))
}

/// `YaRN`'s growth of attention with the context.
fn mscale(factor: f64, scale: f64) -> f64 {
    if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 }
}

/// The ramp, and the attention factor where it is not the usual one.
fn yarn_shape(section: &Fields, factor: f64) -> Result<YarnShape, ModelError> {
    let [beta_fast, beta_slow, of_pairs, of_all, attention_factor] =
        ["beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"]
            .map(|key| section.float(key, MSCALE));
    let usual = YarnShape::default();
    // As `transformers` reads it: a scale of zero is none.
    let ratio = match (of_pairs?.filter(|m| *m > 0.0), of_all?.filter(|m| *m > 0.0)) {
        (Some(own), Some(all)) => Some(mscale(factor, own) / mscale(factor, all)),
        _ => None,
    };
    let shape = YarnShape {
        beta_fast: beta_fast?.unwrap_or(usual.beta_fast),
        beta_slow: beta_slow?.unwrap_or(usual.beta_slow),
        truncate: section.flag("truncate", true)?,
        attention_factor: attention_factor?.or(ratio),
    };
    if shape.beta_slow <= 0.0 || shape.beta_fast < shape.beta_slow {
        return Err(
            section.bad("beta_slow", format!("above 0 and at most `beta_fast` ({})", shape.beta_fast))
        );
    }
    Ok(shape)
}

fn accept_only(section: &Fields, kind: &str, keys: &[&str]) -> Result<(), ModelError> {
    let always = ["type", "rope_type", "rope_theta", "partial_rotary_factor"];
    match section.keys().find(|key| !always.contains(key) && !keys.contains(key)) {
        None => Ok(()),
        Some(key) if matches!(section.get(key), Some(Value::Object(_))) => {
            Err(section.unsupported(key, "one rotary embedding for all layers"))
        }
        Some(key) => Err(section.unsupported(key, format!("no such key beside rope type {kind}"))),
    }
}
