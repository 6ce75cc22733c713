//! `quantization_config`: which modules are stored in which format.
//!
//! Every method has its own words for the same facts; what this reader does not know is refused by method and key, because it would change
//! the bytes of every step.

use serde_json::{Value, json};

use super::fields::Fields;
use crate::model::format::{MX_GROUP, NVFP4_GROUP};
use crate::model::patterns::MAX_PATTERNS;
use crate::model::{Dtype, Format, FormatRule, ModelError, Quantization, Scales};

const METHODS: &str =
    "fp8, fbgemm_fp8, mxfp8, mxfp4, compressed-tensors, modelopt, quark, gptq, awq, bitsandbytes";
/// Widest group of weights that shares a scale.
const MAX_GROUP: usize = 1 << 20;
const SCHEMES: &str = "int of 4 or 8 bits per channel or group, float of 8 bits per tensor, channel, block or group of 32, float of 4 bits per group of 32 or tensor_group of 16";

/// Reads how the weights are stored; `None` where they are plain floats.
pub(super) fn read(fields: &Fields) -> Result<Option<Quantization>, ModelError> {
    // The name that `compressed-tensors` used before it joined `transformers`.
    fields.only("compression_config", &Value::Null)?;
    let Some(section) = fields.section("quantization_config")? else { return Ok(None) };
    let Some(method) = section.text("quant_method")? else {
        return Err(section.missing("quant_method", METHODS));
    };
    let mut read = match method {
        "fp8" => fp8(&section)?,
        "fbgemm_fp8" => {
            let format = Format::Fp8 { scales: Scales::Channel, input_scale: true };
            with_exceptions(format, without_head(modules(&section, "modules_to_not_convert")?))
        }
        "mxfp8" => but_for_lists(Format::Mxfp8, &section)?,
        "mxfp4" => but_for_lists(Format::Mxfp4, &section)?,
        "gptq" => gptq(&section)?,
        "awq" => awq(&section)?,
        "bitsandbytes" => bitsandbytes(&section)?,
        "compressed-tensors" => compressed_tensors(&section)?,
        "modelopt" => modelopt(&section)?,
        "quark" => quark(&section)?,
        _ => return Err(section.unsupported("quant_method", METHODS)),
    };
    method.clone_into(&mut read.method);
    if let Some(format) = read.main_format() {
        (read.bits, read.group_size, read.float) = summary(format);
        read.activations = read.activations.filter(|own| *own != products(format));
    }
    read.storage()
        .map_err(|refused| section.bad("(rules)", format!("{}, not {}", refused.wanted, refused.found)))?;
    Ok(Some(read))
}

/// What products with a format are in where a config says no more.
fn products(format: Format) -> Dtype {
    match format {
        Format::Fp8 { .. } | Format::Mxfp8 => Dtype::Fp8,
        Format::Mxfp4 | Format::Nvfp4 { .. } => Dtype::Nvfp4,
        Format::Int { .. } | Format::Nf4 { .. } => Dtype::Bf16,
    }
}

/// Bits, group and kind, as results state them.
fn summary(format: Format) -> (u32, Option<usize>, bool) {
    let group = |scales| match scales {
        Scales::Group { size } => Some(size),
        Scales::Block { columns, .. } => Some(columns),
        Scales::Tensor | Scales::Channel => None,
    };
    match format {
        Format::Fp8 { scales, .. } => (8, group(scales), true),
        Format::Mxfp8 => (8, Some(MX_GROUP), true),
        Format::Mxfp4 => (4, Some(MX_GROUP), true),
        Format::Nvfp4 { .. } => (4, Some(NVFP4_GROUP), true),
        Format::Int { bits, scales, .. } => (bits, group(scales), false),
        Format::Nf4 { .. } => (4, Some(64), true),
    }
}

/// One format for everything but some modules.
fn with_exceptions(format: Format, plain: Vec<String>) -> Quantization {
    let everything = FormatRule { modules: Vec::new(), format: Some(format) };
    let exceptions = (!plain.is_empty()).then_some(FormatRule { modules: plain, format: None });
    Quantization { rules: exceptions.into_iter().chain([everything]).collect(), ..Quantization::default() }
}

/// A list of modules.
fn modules(section: &Fields, key: &str) -> Result<Vec<String>, ModelError> {
    let text = |value: &Value| {
        value.as_str().map(str::to_owned).ok_or_else(|| section.bad(key, "a list of module names"))
    };
    section.list(key, MAX_PATTERNS)?.unwrap_or_default().iter().map(text).collect()
}

/// The head, which these methods leave alone.
fn without_head(mut plain: Vec<String>) -> Vec<String> {
    plain.push("lm_head".to_owned());
    plain
}

fn fp8(section: &Fields) -> Result<Quantization, ModelError> {
    if let Some(other) = section.text("fmt")?.filter(|name| !matches!(*name, "e4m3" | "float8_e4m3fn")) {
        return Err(section.unsupported("fmt", format!("e4m3, not {other}")));
    }
    let scales = match pair(section, "weight_block_size")? {
        Some((rows, columns)) => Scales::Block { rows, columns },
        None => Scales::Tensor,
    };
    let input_scale = section.text("activation_scheme")? == Some("static");
    but_for_lists(Format::Fp8 { scales, input_scale }, section)
}

/// One format for everything but the modules of two lists and the head.
fn but_for_lists(format: Format, section: &Fields) -> Result<Quantization, ModelError> {
    let mut plain = modules(section, "modules_to_not_convert")?;
    plain.extend(modules(section, "ignored_layers")?);
    Ok(with_exceptions(format, without_head(plain)))
}

fn gptq(section: &Fields) -> Result<Quantization, ModelError> {
    section.only("modules_in_block_to_quantize", &Value::Null)?;
    let zeros = !section.flag("sym", true)?;
    let of = |section: &Fields| {
        Ok::<_, ModelError>(Format::Int {
            bits: bits(section, "bits")?,
            scales: group_or_row(section)?,
            zeros,
        })
    };
    let format = of(section)?;
    let mut rules = Vec::new();
    if let Some(dynamic) = section.section("dynamic")? {
        // The first that matches decides: `-:` leaves out, `+:` or nothing replaces keys.
        for pattern in dynamic.keys().take(MAX_PATTERNS) {
            let (expression, left_out) = match pattern.strip_prefix("-:") {
                Some(expression) => (expression, true),
                None => (pattern.strip_prefix("+:").unwrap_or(pattern), false),
            };
            let modules = vec![format!("re:{expression}")];
            let own = match dynamic.section(pattern)?.filter(|_| !left_out) {
                None => None,
                Some(own) if own.get("bits").is_some() && own.get("group_size").is_some() => Some(of(&own)?),
                Some(own) if own.keys().next().is_none() => Some(format),
                Some(_) => return Err(dynamic.unsupported(pattern, "an object with `bits` and `group_size`")),
            };
            rules.push(FormatRule { modules, format: own });
        }
    }
    let plain = if section.flag("lm_head", false)? { Vec::new() } else { without_head(Vec::new()) };
    let rest = with_exceptions(format, plain);
    rules.extend(rest.rules);
    Ok(Quantization { rules, reordered: section.flag("desc_act", false)?, ..Quantization::default() })
}

fn awq(section: &Fields) -> Result<Quantization, ModelError> {
    let format = Format::Int {
        bits: bits(section, "bits")?,
        scales: group_or_row(section)?,
        zeros: section.flag("zero_point", true)?,
    };
    Ok(with_exceptions(format, without_head(modules(section, "modules_to_not_convert")?)))
}

fn bitsandbytes(section: &Fields) -> Result<Quantization, ModelError> {
    let format = match (section.flag("load_in_4bit", false)?, section.flag("load_in_8bit", false)?) {
        (true, false) => Format::Nf4 { nested: section.flag("bnb_4bit_use_double_quant", false)? },
        (false, true) => Format::Int { bits: 8, scales: Scales::Channel, zeros: false },
        _ => {
            return Err(
                section.bad("load_in_4bit", "exactly one of `load_in_4bit` and `load_in_8bit` to be true")
            );
        }
    };
    let read = with_exceptions(format, without_head(modules(section, "llm_int8_skip_modules")?));
    // LLM.int8() rounds all but outliers of the activations.
    Ok(Quantization { activations: (format.bits() == 8).then_some(Dtype::Int8), ..read })
}

fn compressed_tensors(section: &Fields) -> Result<Quantization, ModelError> {
    if let Some(sparsity) = section.section("sparsity_config")? {
        sparsity.only("format", &json!("dense"))?;
    }
    let mut rules: Vec<_> = ignored(modules(section, "ignore")?).into_iter().collect();
    let (groups, activations) = groups(section)?;
    rules.extend(groups);
    Ok(Quantization { rules, activations, kv_cache: kv_scheme(section)?, ..Quantization::default() })
}

fn ignored(modules: Vec<String>) -> Option<FormatRule> {
    (!modules.is_empty()).then_some(FormatRule { modules, format: None })
}

/// Groups of modules with one scheme each, those with patterns before those for every linear layer, and what activations are rounded to.
fn groups(section: &Fields) -> Result<(Vec<FormatRule>, Option<Dtype>), ModelError> {
    let key = "config_groups";
    let wanted = "an object of groups, each with `weights.num_bits`";
    let Some(groups) = section.section(key)? else { return Err(section.missing(key, wanted)) };
    let (mut rules, mut activations) = (Vec::new(), None);
    for name in groups.keys().take(MAX_PATTERNS) {
        let Some(group) = groups.section(name)? else { continue };
        let Some(weights) = group.section("weights")? else { continue };
        let inputs = group.section("input_activations")?;
        // "local": scales of groups are computed, that of the tensor is stored, as in the preset for nvfp4.
        let fixed = inputs.as_ref().and_then(|inputs| inputs.get("dynamic"));
        let fixed = fixed.is_some_and(|dynamic| [json!(false), json!("local")].contains(dynamic));
        let format = scheme(&weights, fixed)?;
        activations = fastest(activations, rounded(inputs.as_ref(), format)?);
        let mut targets = modules(&group, "targets")?;
        // A class stands for all its layers.
        if targets.is_empty() || targets.iter().any(|target| target == "Linear") {
            targets.clear();
        } else if targets
            .iter()
            .any(|target| target.chars().next().is_some_and(char::is_uppercase) && !target.contains('.'))
        {
            return Err(group.unsupported("targets", "Linear, names, or re: expressions"));
        }
        rules.push(FormatRule { modules: targets, format: Some(format) });
    }
    if rules.is_empty() {
        return Err(section.bad(key, wanted));
    }
    rules.sort_by_key(|rule| rule.modules.is_empty());
    Ok((rules, activations))
}

/// What the activations of a group are rounded to; a group without them is of weights alone.
fn rounded(inputs: Option<&Fields>, format: Format) -> Result<Dtype, ModelError> {
    let Some(inputs) = inputs else { return Ok(Dtype::Bf16) };
    Ok(match (inputs.text("type")?.unwrap_or("int"), inputs.integer("num_bits", 1..=16)?) {
        ("int", Some(8)) => Dtype::Int8,
        ("float", Some(8)) => Dtype::Fp8,
        _ => products(format),
    })
}

/// Of a mixture the activations with the highest peak, so that a floor stays one: 16 bits, 8 bits, 4 bits, as dtypes are ordered.
fn fastest(known: Option<Dtype>, next: Dtype) -> Option<Dtype> {
    known.max(Some(next))
}

/// `num_bits`, `type`, `strategy`, `group_size` and `symmetric` of a group's weights.
fn scheme(weights: &Fields, fixed_inputs: bool) -> Result<Format, ModelError> {
    let refused = |key: &str| Err(weights.unsupported(key, SCHEMES));
    let bits = u32::try_from(weights.need_integer("num_bits", 1..=16)?).unwrap_or(u32::MAX);
    let group = group_size(weights)?;
    let strategy = match (weights.text("strategy")?, group) {
        (Some(strategy), _) => strategy,
        (None, Some(_)) => "group",
        (None, None) => "tensor",
    };
    let scales = match (strategy, group) {
        ("tensor", None) => Scales::Tensor,
        ("channel", _) => Scales::Channel,
        ("group" | "tensor_group", Some(size)) => Scales::Group { size },
        ("block", _) => match pair(weights, "block_structure")? {
            Some((rows, columns)) => Scales::Block { rows, columns },
            None => return Err(weights.missing("block_structure", "two sides, such as [128, 128]")),
        },
        _ => return refused("strategy"),
    };
    let zeros = !weights.flag("symmetric", true)?;
    match (weights.text("type")?.unwrap_or("int"), bits, scales) {
        ("int", 4 | 8, Scales::Tensor | Scales::Channel | Scales::Group { .. }) => {
            Ok(Format::Int { bits, scales, zeros })
        }
        ("float", 8, Scales::Group { size: MX_GROUP }) => Ok(Format::Mxfp8),
        ("float", 8, Scales::Tensor | Scales::Channel | Scales::Block { .. }) => {
            Ok(Format::Fp8 { scales, input_scale: fixed_inputs })
        }
        ("float", 4, Scales::Group { size: MX_GROUP }) => Ok(Format::Mxfp4),
        ("float", 4, Scales::Group { size: NVFP4_GROUP }) => Ok(Format::Nvfp4 { input_scale: fixed_inputs }),
        ("float", 4 | 8, _) => refused("group_size"),
        ("int" | "float", _, _) => refused("num_bits"),
        _ => refused("type"),
    }
}

fn modelopt(section: &Fields) -> Result<Quantization, ModelError> {
    let mut plain = modules(section, "exclude_modules")?;
    plain.extend(modules(section, "ignore")?);
    let mut rules: Vec<_> = ignored(plain).into_iter().collect();
    let mut activations = None;
    match section.text("quant_algo")? {
        Some("MIXED_PRECISION") => {
            let key = "quantized_layers";
            let Some(layers) = section.section(key)? else {
                return Err(section.missing(key, "an object of modules, each with a `quant_algo`"));
            };
            // Modules of one format share a rule, so that the rules stay few.
            let mut of_format: Vec<FormatRule> = Vec::new();
            for module in layers.keys().take(MAX_PATTERNS) {
                let Some(own) = layers.section(module)? else { continue };
                let name = own.text("quant_algo")?.ok_or_else(|| own.missing("quant_algo", "a format"))?;
                let (format, rounded) = modelopt_format(&own, name)?;
                let format = Some(format);
                activations = fastest(activations, rounded);
                match of_format.iter_mut().find(|rule| rule.format == format) {
                    Some(rule) => rule.modules.push(module.to_owned()),
                    None => of_format.push(FormatRule { modules: vec![module.to_owned()], format }),
                }
            }
            rules.extend(of_format);
        }
        Some(name) => {
            let (format, rounded) = modelopt_format(section, name)?;
            rules.push(FormatRule { modules: Vec::new(), format: Some(format) });
            activations = Some(rounded);
        }
        None => {
            let groups = groups(section)?;
            rules.extend(groups.0);
            activations = groups.1;
        }
    }
    let kv_cache = match section.text("kv_cache_quant_algo")? {
        None | Some("NONE") => kv_scheme(section)?,
        Some("FP8") => Some(Dtype::Fp8),
        Some(_) => return Err(section.unsupported("kv_cache_quant_algo", "FP8, or null")),
    };
    Ok(Quantization { rules, activations, kv_cache, ..Quantization::default() })
}

/// The format of an algorithm, and what it rounds activations to.
fn modelopt_format(section: &Fields, name: &str) -> Result<(Format, Dtype), ModelError> {
    let key = "quant_algo";
    let format = match name {
        "FP8" => Format::Fp8 { scales: Scales::Tensor, input_scale: true },
        "FP8_PER_CHANNEL_PER_TOKEN" => Format::Fp8 { scales: Scales::Channel, input_scale: false },
        "FP8_PB_WO" => Format::Fp8 { scales: Scales::Block { rows: 128, columns: 128 }, input_scale: false },
        "MXFP8" => Format::Mxfp8,
        "W4A8_MXFP4_FP8" => Format::Mxfp4,
        "NVFP4" | "W4A16_NVFP4" => {
            let size = section.integer("group_size", 1..=MAX_GROUP)?.unwrap_or(NVFP4_GROUP);
            if size != NVFP4_GROUP {
                return Err(section.unsupported("group_size", "16"));
            }
            Format::Nvfp4 { input_scale: name == "NVFP4" }
        }
        _ => {
            return Err(section.unsupported(
                key,
                "FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, MXFP8, W4A8_MXFP4_FP8, NVFP4, W4A16_NVFP4, MIXED_PRECISION",
            ));
        }
    };
    let rounded = match name {
        "W4A8_MXFP4_FP8" => Dtype::Fp8,
        "W4A16_NVFP4" => Dtype::Bf16,
        _ => products(format),
    };
    Ok((format, rounded))
}

fn quark(section: &Fields) -> Result<Quantization, ModelError> {
    let mut rules: Vec<_> = ignored(modules(section, "exclude")?).into_iter().collect();
    let mut activations = None;
    section.only("layer_type_quant_config", &json!({}))?;
    if let Some(layers) = section.section("layer_quant_config")? {
        for pattern in layers.keys().take(MAX_PATTERNS) {
            let Some(own) = layers.section(pattern)? else { continue };
            let (format, rounded) = quark_format(&own)?;
            rules.push(FormatRule { modules: vec![pattern.to_owned()], format: Some(format) });
            activations = fastest(activations, rounded);
        }
    }
    let key = "global_quant_config";
    let Some(global) = section.section(key)? else {
        return Err(section.missing(key, "an object with `weight`"));
    };
    let (format, rounded) = quark_format(&global)?;
    rules.push(FormatRule { modules: Vec::new(), format: Some(format) });
    activations = fastest(activations, rounded);
    let kv_cache = match section.section("kv_cache_quant_config")? {
        Some(kv) if kv.keys().next().is_some() => Some(Dtype::Fp8),
        _ => None,
    };
    Ok(Quantization { rules, activations, kv_cache, ..Quantization::default() })
}

/// The format of a module's weights, and what its activations are rounded to.
fn quark_format(section: &Fields) -> Result<(Format, Dtype), ModelError> {
    let Some(weight) = section.section("weight")? else {
        return Err(section.missing("weight", "an object with `dtype` and `qscheme`"));
    };
    let inputs = section.section("input_tensors")?;
    let fixed = inputs.as_ref().is_some_and(|inputs| inputs.get("is_dynamic") == Some(&Value::Bool(false)));
    let dtype = weight.text("dtype")?.ok_or_else(|| weight.missing("dtype", "fp4, fp8_e4m3 or int8"))?;
    let group = group_size(&weight)?;
    let format = match (dtype, weight.text("qscheme")?, group) {
        ("fp4", Some("per_group"), Some(MX_GROUP)) => Format::Mxfp4,
        ("fp8_e4m3", Some("per_group"), Some(MX_GROUP)) => Format::Mxfp8,
        ("fp8_e4m3", Some("per_tensor"), _) => Format::Fp8 { scales: Scales::Tensor, input_scale: fixed },
        ("fp8_e4m3", Some("per_channel"), _) => Format::Fp8 { scales: Scales::Channel, input_scale: fixed },
        ("int8", Some("per_channel"), _) => Format::Int { bits: 8, scales: Scales::Channel, zeros: false },
        ("fp4" | "fp8_e4m3" | "int8", ..) => {
            return Err(weight.unsupported("qscheme", "per_group of 32, per_tensor, per_channel"));
        }
        _ => return Err(weight.unsupported("dtype", "fp4, fp8_e4m3, int8")),
    };
    let rounded = match inputs.as_ref().map(|inputs| inputs.text("dtype")).transpose()? {
        None => Dtype::Bf16,
        Some(Some("int8")) => Dtype::Int8,
        Some(Some("fp8_e4m3")) => Dtype::Fp8,
        Some(_) => products(format),
    };
    Ok((format, rounded))
}

fn kv_scheme(section: &Fields) -> Result<Option<Dtype>, ModelError> {
    let Some(scheme) = section.section("kv_cache_scheme")? else { return Ok(None) };
    match (scheme.integer("num_bits", 1..=16)?, scheme.text("type")?) {
        (Some(8), Some("float")) => Ok(Some(Dtype::Fp8)),
        (Some(8), _) => Ok(Some(Dtype::Int8)),
        _ => Err(scheme.unsupported("num_bits", "8")),
    }
}

fn bits(section: &Fields, key: &str) -> Result<u32, ModelError> {
    match section.need_integer(key, 1..=16)? {
        4 => Ok(4),
        8 => Ok(8),
        _ => Err(section.unsupported(key, "4, 8")),
    }
}

/// -1 is the ecosystem's word for one group per row.
fn group_size(section: &Fields) -> Result<Option<usize>, ModelError> {
    if section.get("group_size").and_then(Value::as_i64) == Some(-1) {
        return Ok(None);
    }
    section.integer("group_size", 1..=MAX_GROUP)
}

fn group_or_row(section: &Fields) -> Result<Scales, ModelError> {
    Ok(group_size(section)?.map_or(Scales::Channel, |size| Scales::Group { size }))
}

/// The sides of the block that shares a scale.
fn pair(section: &Fields, key: &str) -> Result<Option<(usize, usize)>, ModelError> {
    let Some(sides) = section.list(key, 2)? else { return Ok(None) };
    let sides: Vec<_> =
        sides.iter().filter_map(Value::as_u64).filter_map(|v| usize::try_from(v).ok()).collect();
    match sides[..] {
        [rows, columns] if [rows, columns].iter().all(|side| (1..=MAX_GROUP).contains(side)) => {
            Ok(Some((rows, columns)))
        }
        _ => Err(section.unsupported(key, "two sides, such as [128, 128]")),
    }
}
