//! Which models the engine runs, on which devices, over how many ranks.
//!
//! Enters: dimensions, dtypes, a device. Leaves: nothing, or a refusal that names what is missing and what is possible.

use std::collections::HashMap;

use super::parallel::RankShapes;
use super::shapes::{ExpertShape, Gate, LatentShape};
use super::{gguf_formats, kv_dtype, kv_format, refuse};
use crate::engine::{DeviceChoice, EngineError};
use crate::weights::OpenModel;
use hbmark_core::model::{
    Architecture, Attention, Dense, Dtype, Family, FeedForward, Format, Inventory, LatentAttention, Mixer,
    Norms, QkNorm, Quantization, Reach, Role, Scales, TensorInfo,
};

/// Experts that do not share the rows that are prepared for them.
pub(super) fn refuse_mixed_experts<T>() -> Result<T, EngineError> {
    refuse(
        "experts of a layer in several formats",
        "rows are prepared once for all of them, the shared expert's included; `hbmark predict` has their bytes",
    )
}

/// Checks that the native forward runs an architecture as published.
///
/// # Errors
/// [`EngineError::Unsupported`], naming what is missing.
pub fn check(architecture: &Architecture, dtype: Dtype) -> Result<(), EngineError> {
    let a = architecture;
    if !(0..a.layers).all(|index| has_layer(a, index)) {
        let layers = a.stack.as_ref().map_or_else(|| "other ones".to_owned(), ToString::to_string);
        return refuse(
            format!("the {:?} family", a.family),
            format!(
                "its layers are {layers}, and the engine has attention of one shape in all of them, full or in windows or latent, and feed-forwards or experts with silu, gelu-tanh or clamped gates; `hbmark predict` knows them"
            ),
        );
    }
    // Hidden states are kept divided by this, so that a layer adds its output as it is. Norms of them have another ε for it; a norm behind a
    // projection, or of Q and K, would not.
    let residual = a.multipliers.residual;
    let plain = |layer: usize| {
        let layer = a.layer(layer);
        layer.norms == Norms::Before
            && matches!(layer.mixer, Mixer::Attention(Attention { qk_norm: QkNorm::None, .. }))
    };
    if (residual - 1.0).abs() > 0.0 && !(0..a.layers).all(plain) {
        return refuse(
            format!("a residual multiplier of {residual} beside norms of what it multiplies, or of Q and K"),
            "it has one where layers norm their input alone; `hbmark predict` knows the model",
        );
    }
    if a.draft.is_some() && (residual - 1.0).abs() > 0.0 {
        return refuse(
            format!("a layer that drafts for a model with a residual multiplier of {residual}"),
            "its projection would have to undo it; `hbmark predict` knows the layer",
        );
    }
    if let Some(own) = a.quantization.as_ref().filter(|own| own.dtype() == Some(dtype)) {
        if let Err(what) = crate::weights::streamed_as(a, own) {
            return refuse(
                format!("`{}` quantised safetensors ({what})", own.method),
                "it reads fp8, mxfp8, nvfp4, AWQ, symmetric GPTQ in order, compressed-tensors' integers and mxfp4, and GGUF files, and quantises plain weights itself",
            );
        }
        if has_mixed_experts(&a.inventory(dtype)) {
            return refuse_mixed_experts();
        }
        if let Some(latent) = a.latent
            && let Some(format) = own.storage().ok().and_then(|own| own.format(EXPANSION))
            && !turns(format, latent)
        {
            return refuse_expansion(&format.dtype().to_string());
        }
    }
    Ok(())
}

/// What expands the latents of the first layer: the rules of a checkpoint name modules.
const EXPANSION: &str = "model.layers.0.self_attn.kv_b_proj";

pub(super) fn refuse_expansion<T>(format: &str) -> Result<T, EngineError> {
    refuse(
        format!("`kv_b_proj` in {format} with a scale for a part of each row"),
        "its transpose is multiplied, whose rows would be rounded again; it runs in 16 bits, and in fp8 in blocks",
    )
}

/// Whether the keys of each head have the same values in a format when they are turned round.
fn turns(format: Format, latent: LatentAttention) -> bool {
    match format {
        Format::Fp8 { scales: Scales::Tensor, .. } => true,
        Format::Fp8 { scales: Scales::Block { rows, .. }, .. } => {
            latent.qk_nope_head_dim.is_multiple_of(rows) && latent.v_head_dim.is_multiple_of(rows)
        }
        _ => false,
    }
}

/// Whether the experts of a layer, its shared one included, are stored in several formats.
fn has_mixed_experts(inventory: &Inventory) -> bool {
    let experts = |tensor: &&TensorInfo| matches!(tensor.role, Role::Expert | Role::SharedExpert);
    let mut of_layers: HashMap<Option<usize>, &str> = HashMap::new();
    inventory.tensors.iter().filter(experts).any(|tensor| {
        of_layers.insert(tensor.layer, &tensor.storage).is_some_and(|before| before != tensor.storage)
    })
}

/// Whether the forward has a layer: attention of the model's widths, then a dense feed-forward or a mixture of experts.
fn has_layer(a: &Architecture, index: usize) -> bool {
    // Their forwards have more than their dimensions say: scales of layers, values that are normed or multiplied, temperatures of scores.
    if matches!(
        a.family,
        Family::Gemma4
            | Family::Llama4
            | Family::MimoV2
            | Family::NemotronH
            | Family::Qwen3_5
            | Family::Qwen3Next
    ) {
        return false;
    }
    let layer = a.layer(index);
    let widths = |latent: LatentAttention| {
        let LatentAttention { kv_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim, .. } = latent;
        [kv_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim].iter().all(|width| width.is_multiple_of(2))
    };
    let mlp = match layer.feed_forward {
        FeedForward::Dense(Dense { width, activation, bias, fused: _ }) => {
            width == a.ffn_size && bias == a.biases.mlp && Gate::of(activation).is_some()
        }
        FeedForward::Mixture(mixture) => layer.norms == Norms::Before && ExpertShape::of(&mixture).is_some(),
        FeedForward::DenseBesideMixture { .. } | FeedForward::None => false,
    };
    let attention = match layer.mixer {
        Mixer::Attention(attention) => attention,
        Mixer::Latent { heads, latent, indexer: None } => {
            return mlp && heads == a.heads && a.latent == Some(latent) && widths(latent);
        }
        _ => return false,
    };
    // What the operations get as values, or is undone when weights are loaded: matrices stored as one, neighbours that turn together.
    let Attention { reach, rope, qk_norm, scale, softcap, fused, sinks, .. } = attention;
    let of_widths = Attention { reach, rope, qk_norm, scale, softcap, fused, sinks, ..a.attention() };
    let reaches = !matches!(reach, Reach::Chunk { .. });
    attention == of_widths && reaches && qk_norm != QkNorm::Unweighted && mlp
}

/// Checks that the KV cache of an architecture can be kept in a dtype other than the one that goes with the weights.
pub fn check_kv_dtype(
    architecture: &Architecture,
    weights: Dtype,
    device: DeviceChoice,
    asked: Dtype,
) -> Result<(), EngineError> {
    kv_format::check(asked, architecture.latent.is_some())?;
    let own = kv_dtype(weights);
    if device != DeviceChoice::Cpu && asked != own && kv_format::element_bytes(asked) > 1 {
        return refuse(
            format!("a KV cache in {asked} beside weights in {weights} on {device}"),
            format!("its kernels keep it in {own}, fp8 or int8"),
        );
    }
    Ok(())
}

/// The most GPUs of a group (`kernels/peers.cuh`).
pub(super) const MAX_GPU_RANKS: usize = 16;

/// Experts of a layer, whose numbers and logits fit the shared memory of a block, and of a token, a lane each (`kernels/experts.cu`).
pub(super) const MAX_EXPERTS: usize = 1024;
pub(super) const MAX_EXPERTS_PER_TOKEN: usize = 32;

/// As [`check_device`], and that they have the formats of a GGUF file's tensors where they stand.
pub fn check_model_on_device(
    model: &OpenModel,
    dtype: Dtype,
    device: DeviceChoice,
) -> Result<(), EngineError> {
    check_device(&model.architecture, dtype, device)?;
    if device == DeviceChoice::Cpu || dtype != Dtype::Gguf {
        return Ok(());
    }
    gguf_formats::check(&model.inventory(dtype), device)
}

/// Checks that the kernels of a device have what the forward of an architecture needs.
pub fn check_device(
    architecture: &Architecture,
    dtype: Dtype,
    device: DeviceChoice,
) -> Result<(), EngineError> {
    if device == DeviceChoice::Cpu {
        return Ok(());
    }
    if let Some(experts) = &architecture.experts
        && (experts.count > MAX_EXPERTS || experts.per_token > MAX_EXPERTS_PER_TOKEN)
    {
        return refuse(
            format!("{} of {} experts a token on {device}", experts.per_token, experts.count),
            format!("its kernels pick at most {MAX_EXPERTS_PER_TOKEN} of {MAX_EXPERTS}"),
        );
    }
    let of_head = |own: &Quantization| own.storage().ok()?.format("lm_head");
    let own = architecture.quantization.as_ref().filter(|own| own.dtype() == Some(dtype));
    if let Some(format) = own.and_then(of_head).filter(|_| !architecture.tied_head)
        && !matches!(
            format,
            Format::Int { bits: 8, .. } | Format::Fp8 { scales: Scales::Tensor | Scales::Channel, .. }
        )
    {
        return refuse(
            format!("a head in {} on {device}", format.dtype()),
            "its kernels have heads in bf16, f16, f32, int8 and fp8 with a scale for each output",
        );
    }
    let plain_attention = |tensor: &TensorInfo| {
        tensor.storage == "f16" && tensor.role == Role::Matrix && tensor.name.contains("self_attn")
    };
    if own.is_some() && architecture.inventory(dtype).tensors.iter().any(plain_attention) {
        return refuse(
            format!("attention in f16 beside {dtype} on {device}"),
            "what a quantised folder leaves of it in 16 bits must be bf16, as its cache is",
        );
    }
    if let Some(latent) = LatentShape::of(architecture, 0) {
        if matches!(dtype, Dtype::Q8_0 | Dtype::Q4_0 | Dtype::Q4K | Dtype::Q5K | Dtype::Q6K) {
            return refuse(
                format!("latent attention in {dtype} on {device}"),
                "its kernels of latents have the formats of safetensors alone",
            );
        }
        let (rank, width) = (latent.kv_rank, latent.cached());
        let whole =
            rank.is_multiple_of(8) && width.is_multiple_of(8) && latent.query_part().is_multiple_of(4);
        if !whole || rank > 512 || width > 576 {
            return refuse(
                format!("latents of {rank} and {} elements on {device}", latent.rope_dim),
                "multiples of 8 are needed, at most 512 and together 576, and a `q_lora_rank` that is a multiple of 4",
            );
        }
    } else if !architecture.head_dim.is_multiple_of(8) || architecture.head_dim > 256 {
        return refuse(
            format!("heads of {} on {device}", architecture.head_dim),
            "a multiple of 8 up to 256 is needed",
        );
    }
    Ok(())
}

/// Checks that a model can be split over the ranks of a tensor parallel group.
pub fn check_ranks(
    model: &OpenModel,
    dtype: Dtype,
    device: DeviceChoice,
    ranks: usize,
) -> Result<(), EngineError> {
    let shapes = RankShapes::new(model, dtype, ranks)?;
    if device == DeviceChoice::Cpu {
        return Ok(());
    }
    if ranks > MAX_GPU_RANKS || !model.architecture.hidden_size.is_multiple_of(4) {
        return refuse(
            format!("a group of {ranks} GPUs for hidden states of {}", model.architecture.hidden_size),
            format!("at most {MAX_GPU_RANKS} are summed over, four values at a time"),
        );
    }
    shapes.architectures.iter().try_for_each(|of_rank| check_device(of_rank, dtype, device))
}
