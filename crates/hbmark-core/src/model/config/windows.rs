//! Sliding attention windows, which every family applies by its own rule.

use serde_json::Value;

use super::fields::Fields;
use super::limits;
use crate::model::ModelError;

/// Which layers a family's `sliding_window` binds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::model) enum Windows {
    /// The family has none: a window in its config is refused.
    Never,
    /// Every layer, whenever the key is not null; `required` where `transformers` would take 4096 for an absent key.
    Everywhere { required: bool },
    /// The family reads its layers itself.
    Own,
    /// With `use_sliding_window`, the layers from `max_window_layers` on, or those that `layer_types` names.
    FromLayer,
}

/// The window per layer; empty where no layer has one.
pub(super) fn read(fields: &Fields, layers: usize, rule: Windows) -> Result<Vec<Option<usize>>, ModelError> {
    if rule == Windows::Own {
        return Ok(Vec::new());
    }
    let windows = by_rule(fields, layers, rule)?;
    match layer_types(fields, layers)? {
        Some(sliding) if rule == Windows::FromLayer => from_layer_types(fields, &sliding),
        Some(sliding) if sliding.iter().zip(&windows).any(|(&s, w)| s != w.is_some()) => {
            Err(fields.bad("layer_types", "what `sliding_window` says of this family's layers"))
        }
        _ if windows.iter().all(Option::is_none) => Ok(Vec::new()),
        _ => Ok(windows),
    }
}

fn by_rule(fields: &Fields, layers: usize, rule: Windows) -> Result<Vec<Option<usize>>, ModelError> {
    let key = "sliding_window";
    let window = match rule {
        Windows::Never | Windows::Own => {
            fields.only("use_sliding_window", &Value::Bool(false))?;
            fields.only(key, &Value::Null)?;
            None
        }
        Windows::Everywhere { required } => {
            if required && fields.is_absent(key) {
                return Err(fields.missing(key, "a window in tokens, or null for full attention"));
            }
            fields.integer(key, 1..=limits::POSITIONS)?
        }
        Windows::FromLayer => {
            if !fields.flag("use_sliding_window", false)? {
                return Ok(vec![None; layers]);
            }
            let window = fields.need_integer(key, 1..=limits::POSITIONS)?;
            if fields.get("layer_types").is_some() {
                // The list decides, layer by layer.
                return Ok(vec![Some(window); layers]);
            }
            let first = fields.need_integer("max_window_layers", 0..=limits::LAYERS)?;
            return Ok((0..layers).map(|layer| (layer >= first).then_some(window)).collect());
        }
    };
    Ok(vec![window; layers])
}

/// Whether each layer slides, as `layer_types` lists them.
fn layer_types(fields: &Fields, layers: usize) -> Result<Option<Vec<bool>>, ModelError> {
    let kinds = layer_kinds(fields, layers, &["full_attention", "sliding_attention"])?;
    Ok(kinds.map(|kinds| kinds.iter().map(|kind| *kind == "sliding_attention").collect()))
}

fn from_layer_types(fields: &Fields, sliding: &[bool]) -> Result<Vec<Option<usize>>, ModelError> {
    if !sliding.contains(&true) {
        return Ok(Vec::new());
    }
    if !fields.flag("use_sliding_window", false)? {
        return Err(fields.bad("use_sliding_window", "true, because `layer_types` names sliding layers"));
    }
    let window = fields.need_integer("sliding_window", 1..=limits::POSITIONS)?;
    Ok(sliding.iter().map(|&slides| slides.then_some(window)).collect())
}

/// `layer_types`, in the family's own words.
pub(in crate::model) fn layer_kinds<'a>(
    fields: &Fields<'a>,
    layers: usize,
    known: &[&str],
) -> Result<Option<Vec<&'a str>>, ModelError> {
    let key = "layer_types";
    let Some(types) = fields.list(key, limits::LAYERS)? else { return Ok(None) };
    if types.len() != layers {
        return Err(fields.bad(key, format!("a list of `num_hidden_layers` ({layers}) entries")));
    }
    let kind = |kind: &'a Value| {
        kind.as_str()
            .filter(|kind| known.contains(kind))
            .ok_or_else(|| fields.unsupported(key, known.join(", ")))
    };
    types.iter().map(kind).collect::<Result<_, _>>().map(Some)
}

/// The layers of full attention, the first of two kinds: those that `layer_types` names, or every so many-th by the key of the interval.
pub(in crate::model) fn full_layers(
    fields: &Fields,
    layers: usize,
    kinds: &[&str; 2],
    interval: &str,
    every: usize,
) -> Result<Vec<bool>, ModelError> {
    if let Some(found) = layer_kinds(fields, layers, kinds)? {
        return Ok(found.iter().map(|kind| *kind == kinds[0]).collect());
    }
    let every = fields.integer(interval, 1..=limits::LAYERS)?.unwrap_or(every);
    Ok((0..layers).map(|layer| (layer + 1).is_multiple_of(every)).collect())
}
