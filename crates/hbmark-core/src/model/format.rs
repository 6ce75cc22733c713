//! How one linear layer is stored: its tensors, with their shapes and bytes.
//!
//! Enters: a [`Format`], the [`Layout`] that names its tensors, and a shape `[out, input]`. Leaves: the [`Part`]s that a checkpoint keeps for
//! that layer. Values are not known here.
//!
//! *Source*: `DeepSeek`-V3's `weight_block_size`; the OCP microscaling specification 1.0 (one e8m0 byte for 32 elements); vLLM's and
//! `compressed-tensors`' loaders for the names; `AutoGPTQ`, `AutoAWQ` and bitsandbytes for their own.

use serde::{Deserialize, Serialize};

use super::Dtype;

/// Inputs that share an e8m0 exponent in the microscaling formats.
pub const MX_GROUP: usize = 32;
/// Inputs that share an e4m3 scale in nvfp4.
pub const NVFP4_GROUP: usize = 16;
/// Weights that share an f32 `absmax` in bitsandbytes' 4 bits, and of those that share one where they are quantised again.
const NF4_BLOCK: usize = 64;
const NF4_NESTED_BLOCK: usize = 256;

/// Which weights share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(tag = "of", rename_all = "snake_case")]
pub enum Scales {
    Tensor,
    /// One for each output.
    Channel,
    /// One for so many inputs of an output.
    Group {
        size: usize,
    },
    Block {
        rows: usize,
        columns: usize,
    },
}

impl Scales {
    /// Rows and columns of the scales of a layer.
    fn shape(self, out: usize, input: usize) -> [usize; 2] {
        match self {
            Self::Tensor => [1, 1],
            Self::Channel => [out, 1],
            Self::Group { size } => [out, input.div_ceil(size.max(1))],
            Self::Block { rows, columns } => [out.div_ceil(rows.max(1)), input.div_ceil(columns.max(1))],
        }
    }
}

/// How the numbers of a linear layer are stored.
///
/// ```
/// use hbmark_core::model::{Format, Layout, Scales};
///
/// let int4 = Format::Int { bits: 4, scales: Scales::Group { size: 128 }, zeros: false };
/// let bytes: u64 = int4.parts(Layout::CompressedTensors, 4096, 4096).iter().filter(|part| part.read).map(|part| part.bytes).sum();
/// // 4 bits and a sixteenth of 2 bytes for 128 weights: 4.125 bits.
/// assert_eq!(bytes * 8, 4096 * 4096 * 33 / 8);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(tag = "format", rename_all = "snake_case")]
pub enum Format {
    /// e4m3; `input_scale` where the scale of the activations is stored too.
    Fp8 { scales: Scales, input_scale: bool },
    /// e4m3, an e8m0 byte for 32 inputs.
    Mxfp8,
    /// e2m1, an e8m0 byte for 32 inputs.
    Mxfp4,
    /// e2m1, an e4m3 byte for 16 inputs, an f32 for the tensor; `input_scale` as for fp8.
    Nvfp4 { input_scale: bool },
    /// Integers of 4 or 8 bits; a zero beside each scale where they are not symmetric.
    Int { bits: u32, scales: Scales, zeros: bool },
    /// bitsandbytes' 4 bits; `nested` where its scales are quantised again.
    Nf4 { nested: bool },
}

impl Format {
    /// Its name on the command line and in results.
    pub fn dtype(self) -> Dtype {
        match self {
            Self::Fp8 { .. } => Dtype::Fp8,
            Self::Mxfp8 => Dtype::Mxfp8,
            Self::Mxfp4 => Dtype::Mxfp4,
            Self::Nvfp4 { .. } => Dtype::Nvfp4,
            Self::Int { bits: 8, .. } => Dtype::Int8,
            Self::Int { .. } | Self::Nf4 { .. } => Dtype::Int4,
        }
    }

    /// Bits of a weight without scales.
    pub fn bits(self) -> u32 {
        match self {
            Self::Fp8 { .. } | Self::Mxfp8 => 8,
            Self::Mxfp4 | Self::Nvfp4 { .. } | Self::Nf4 { .. } => 4,
            Self::Int { bits, .. } => bits,
        }
    }

    /// The tensors of a linear layer `[out, input]`; the first holds the weights.
    pub fn parts(self, layout: Layout, out: usize, input: usize) -> Vec<Part> {
        let weights = (out as u64 * input as u64 * u64::from(self.bits())).div_ceil(8);
        let mut parts = vec![Part::new(layout.weight(self), &[out, input], self.dtype().name(), weights)];
        let scale_name = layout.scale(self);
        let of =
            |scales: Scales, storage, size| Part::sized(scale_name, &scales.shape(out, input), storage, size);
        let one = |name| Part::sized(name, &[1], "f32", 4);
        match self {
            Self::Fp8 { scales, input_scale } => {
                let (storage, size) = layout.float_scale(scales);
                parts.push(of(scales, storage, size));
                if input_scale {
                    parts.push(one(if layout == Layout::Fbgemm {
                        ".input_scale_ub"
                    } else {
                        ".input_scale"
                    }));
                }
            }
            Self::Mxfp8 | Self::Mxfp4 => parts.push(of(Scales::Group { size: MX_GROUP }, "e8m0", 1)),
            Self::Nvfp4 { input_scale } => {
                parts.push(of(Scales::Group { size: NVFP4_GROUP }, "fp8", 1));
                let compressed = layout == Layout::CompressedTensors;
                parts.push(one(if compressed { ".weight_global_scale" } else { ".weight_scale_2" }));
                if input_scale {
                    parts.push(one(if compressed { ".input_global_scale" } else { ".input_scale" }));
                }
            }
            Self::Int { bits, scales, zeros } => {
                let (storage, size) = if layout == Layout::Bitsandbytes { ("f32", 4) } else { layout.half() };
                parts.push(of(scales, storage, size));
                parts.extend(layout.zeros(bits, scales.shape(out, input), zeros));
                parts.extend(layout.unread(input));
            }
            Self::Nf4 { nested } => parts.extend(nf4_scales(out, input, nested)),
        }
        parts
    }
}

fn nf4_scales(out: usize, input: usize, nested: bool) -> Vec<Part> {
    let blocks = (out * input).div_ceil(NF4_BLOCK);
    let table = Part::sized(".weight.quant_map", &[16], "f32", 4);
    if !nested {
        return vec![Part::sized(".weight.absmax", &[blocks], "f32", 4), table];
    }
    vec![
        Part::sized(".weight.absmax", &[blocks], "u8", 1),
        Part::sized(".weight.nested_absmax", &[blocks.div_ceil(NF4_NESTED_BLOCK)], "f32", 4),
        Part::sized(".weight.nested_quant_map", &[256], "f32", 4),
        table,
    ]
}

/// Who wrote the checkpoint: the names of a layer's tensors, and the numbers of its scales.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// `quant_method` fp8, mxfp4 and mxfp8.
    Hub,
    Fbgemm,
    ModelOpt,
    Quark,
    CompressedTensors,
    Awq,
    Gptq {
        /// Inputs are reordered, and each has the index of its group.
        reordered: bool,
    },
    Bitsandbytes,
}

impl Layout {
    fn weight(self, format: Format) -> &'static str {
        match (self, format) {
            (Self::Awq | Self::Gptq { .. }, _) => ".qweight",
            (Self::CompressedTensors, Format::Mxfp4 | Format::Nvfp4 { .. } | Format::Int { bits: 4, .. }) => {
                ".weight_packed"
            }
            _ => ".weight",
        }
    }

    fn scale(self, format: Format) -> &'static str {
        match (self, format) {
            (Self::Awq | Self::Gptq { .. }, _) => ".scales",
            (Self::Bitsandbytes, _) => ".SCB",
            (Self::Hub, Format::Fp8 { scales: Scales::Block { .. }, .. } | Format::Mxfp8) => {
                ".weight_scale_inv"
            }
            _ => ".weight_scale",
        }
    }

    fn half(self) -> (&'static str, u64) {
        if self == Self::CompressedTensors { ("bf16", 2) } else { ("f16", 2) }
    }

    /// `compressed-tensors` keeps its scales in the model's own float, all others in f32.
    fn float_scale(self, scales: Scales) -> (&'static str, u64) {
        match (self, scales) {
            (Self::CompressedTensors, _) => ("bf16", 2),
            _ => ("f32", 4),
        }
    }

    fn zeros(self, bits: u32, groups: [usize; 2], asymmetric: bool) -> Option<Part> {
        let name = match self {
            // A symmetric GPTQ file has them all the same, with one value throughout.
            Self::Awq | Self::Gptq { .. } => ".qzeros",
            _ if asymmetric => ".weight_zero_point",
            _ => return None,
        };
        let bytes = (groups[0].div_ceil(8) as u64 * 8 * groups[1] as u64 * u64::from(bits)).div_ceil(8);
        Some(Part {
            read: asymmetric,
            ..Part::new(name, &groups, if bits == 4 { "int4" } else { "int8" }, bytes)
        })
    }

    fn unread(self, input: usize) -> Option<Part> {
        match self {
            Self::CompressedTensors => {
                Some(Part { read: false, ..Part::sized(".weight_shape", &[2], "i64", 8) })
            }
            Self::Gptq { reordered } => {
                Some(Part { read: reordered, ..Part::sized(".g_idx", &[input], "i32", 4) })
            }
            _ => None,
        }
    }
}

/// One tensor of a linear layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// What follows the layer's name.
    pub suffix: &'static str,
    /// Of the weights the logical shape, whatever they are packed into.
    pub shape: Vec<usize>,
    pub storage: &'static str,
    pub bytes: u64,
    /// A step reads it.
    pub read: bool,
}

impl Part {
    fn new(suffix: &'static str, shape: &[usize], storage: &'static str, bytes: u64) -> Self {
        Self { suffix, shape: shape.to_vec(), storage, bytes, read: true }
    }

    fn sized(suffix: &'static str, shape: &[usize], storage: &'static str, size: u64) -> Self {
        let elements: u64 = shape.iter().map(|&d| d as u64).product();
        Self::new(suffix, shape, storage, elements * size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bits of a weight with its scales, as a step reads them.
    fn width(format: Format, layout: Layout) -> f64 {
        let (out, input) = (4096, 8192);
        let parts = format.parts(layout, out, input);
        let read: u64 = parts.iter().filter(|part| part.read).map(|part| part.bytes).sum();
        read as f64 * 8.0 / (out * input) as f64
    }

    #[test]
    fn every_format_has_the_bits_of_its_definition() {
        let group = |size| Scales::Group { size };
        let int = |bits, scales, zeros| Format::Int { bits, scales, zeros };
        let fp8 = |scales| Format::Fp8 { scales, input_scale: false };
        let tensor = 32.0 / (4096.0 * 8192.0);
        let gptq = Layout::Gptq { reordered: false };
        for (format, layout, wanted) in [
            (fp8(Scales::Block { rows: 128, columns: 128 }), Layout::Hub, 8.0 + 32.0 / 16_384.0),
            (fp8(Scales::Tensor), Layout::ModelOpt, 8.0 + tensor),
            (fp8(Scales::Channel), Layout::CompressedTensors, 8.0 + 16.0 / 8192.0),
            (Format::Mxfp8, Layout::Hub, 8.25),
            (Format::Mxfp4, Layout::CompressedTensors, 4.25),
            (Format::Nvfp4 { input_scale: true }, Layout::ModelOpt, 4.5 + 2.0 * tensor),
            (int(4, group(32), false), Layout::CompressedTensors, 4.5),
            (int(4, group(128), false), Layout::CompressedTensors, 4.125),
            (int(4, group(128), true), Layout::CompressedTensors, 4.156_25),
            (int(4, group(128), true), Layout::Awq, 4.156_25),
            (int(4, group(128), true), gptq, 4.156_25),
            (int(4, group(128), false), gptq, 4.125),
            (int(8, Scales::Channel, false), Layout::CompressedTensors, 8.0 + 16.0 / 8192.0),
            (Format::Nf4 { nested: false }, Layout::Bitsandbytes, 4.5 + 16.0 * tensor),
        ] {
            let found = width(format, layout);
            assert!((found - wanted).abs() < 1e-9, "{format:?} of {layout:?}: {found} instead of {wanted}");
        }
    }

    #[test]
    fn a_reordered_file_reads_the_group_of_every_input() {
        let format = Format::Int { bits: 4, scales: Scales::Group { size: 128 }, zeros: false };
        let read = |reordered| {
            let parts = format.parts(Layout::Gptq { reordered }, 64, 256);
            parts.iter().filter(|part| part.read).map(|part| part.bytes).sum::<u64>()
        };
        assert_eq!(read(true) - read(false), 4 * 256);
    }
}
