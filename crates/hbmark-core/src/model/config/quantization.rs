//! `quantization_config`: the method, its bits and its group size.

use serde_json::Value;

use super::fields::Fields;
use crate::model::{ModelError, Quantization};

const METHODS: &str = "fp8, fbgemm_fp8, gptq, awq, bitsandbytes, compressed-tensors, mxfp4";
/// Widest group of weights that shares a scale.
const MAX_GROUP: usize = 1 << 20;
/// The OCP microscaling format shares one exponent among 32 elements.
const MXFP4_GROUP: usize = 32;
/// `blocksize` of bitsandbytes' `quantize_4bit`: one f32 for so many weights.
const BITSANDBYTES_BLOCK: usize = 64;

/// Reads how the weights are stored; `None` where they are plain floats.
pub(super) fn read(fields: &Fields) -> Result<Option<Quantization>, ModelError> {
    // The name that `compressed-tensors` used before it joined `transformers`.
    fields.only("compression_config", &Value::Null)?;
    let Some(section) = fields.section("quantization_config")? else { return Ok(None) };
    let Some(method) = section.text("quant_method")? else {
        return Err(section.missing("quant_method", METHODS));
    };
    let (bits, group_size, float) = match method {
        "fp8" => (8, block_size(&section)?, false),
        "fbgemm_fp8" => (8, None, false),
        "gptq" | "awq" => (bits(&section, "bits")?, group_size(&section)?, false),
        "bitsandbytes" => bitsandbytes(&section)?,
        "compressed-tensors" => compressed_tensors(&section)?,
        "mxfp4" => (4, Some(MXFP4_GROUP), false),
        _ => return Err(section.unsupported("quant_method", METHODS)),
    };
    Ok(Some(Quantization { method: method.to_owned(), bits, group_size, float }))
}

fn bits(section: &Fields, key: &str) -> Result<u32, ModelError> {
    let bits = section.need_integer(key, 1..=16)?;
    u32::try_from(bits).map_err(|_| section.bad(key, "an integer from 1 to 16"))
}

/// -1 is the ecosystem's word for one group per row.
fn group_size(section: &Fields) -> Result<Option<usize>, ModelError> {
    if section.get("group_size").and_then(Value::as_i64) == Some(-1) {
        return Ok(None);
    }
    section.integer("group_size", 1..=MAX_GROUP)
}

/// The side of the square block that shares a scale.
fn block_size(section: &Fields) -> Result<Option<usize>, ModelError> {
    let key = "weight_block_size";
    let Some(sides) = section.list(key, 2)? else { return Ok(None) };
    let sides: Vec<_> =
        sides.iter().filter_map(Value::as_u64).filter_map(|v| usize::try_from(v).ok()).collect();
    match sides[..] {
        [rows, columns] if rows == columns && (1..=MAX_GROUP).contains(&rows) => Ok(Some(rows)),
        _ => Err(section.unsupported(key, "square blocks, such as [128, 128]")),
    }
}

/// Bits, group size, and whether the numbers are floats where the method does not say.
type Scheme = (u32, Option<usize>, bool);

fn bitsandbytes(section: &Fields) -> Result<Scheme, ModelError> {
    match (section.flag("load_in_4bit", false)?, section.flag("load_in_8bit", false)?) {
        (true, false) => Ok((4, Some(BITSANDBYTES_BLOCK), false)),
        (false, true) => Ok((8, None, false)),
        _ => Err(section.bad("load_in_4bit", "exactly one of `load_in_4bit` and `load_in_8bit` to be true")),
    }
}

/// Groups of modules with one scheme each; they must agree, because one width is carried for the whole model.
fn compressed_tensors(section: &Fields) -> Result<Scheme, ModelError> {
    let key = "config_groups";
    let wanted = "an object of groups, each with `weights.num_bits`";
    let Some(groups) = section.section(key)? else { return Err(section.missing(key, wanted)) };
    let mut scheme = None;
    for name in groups.keys() {
        let Some(group) = groups.section(name)? else { continue };
        let Some(weights) = group.section("weights")? else { continue };
        let float = weights.text("type")? == Some("float");
        let found = (bits(&weights, "num_bits")?, group_size(&weights)?, float);
        if scheme.is_some_and(|s| s != found) {
            return Err(section.unsupported(key, "groups of one type, one width and one group size"));
        }
        scheme = Some(found);
    }
    scheme.ok_or_else(|| section.bad(key, wanted))
}
